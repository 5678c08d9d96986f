"""Decode prompts with vLLM, as a process of its own; see tests/engines/test_vllm.py.

``python decode.py REQUEST`` reads a JSON file with ``target``, ``prompts`` (token ids),
``max_tokens``, and optionally ``speculative_config`` and ``settings``, and prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Print answers, seconds, and vLLM's counts of steps and accepted tokens."""
    os.environ |= {
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    request: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    options = {}
    if "settings" in request:
        options["additional_config"] = {"eagle_fsd": request["settings"]}
    model = LLM(
        request["target"],
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=request.get("speculative_config"),
        **options,
    )
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    sampling = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"])
    model.generate(prompts[:1], sampling, use_tqdm=False)
    before, start = _counts(model), time.perf_counter()
    answers = [
        list(model.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids)
        for prompt in prompts
    ]
    seconds = time.perf_counter() - start
    steps, accepted = (now - then for now, then in zip(_counts(model), before, strict=True))
    sys.stdout.write(
        json.dumps({"answers": answers, "seconds": seconds, "steps": steps, "accepted": accepted})
    )


def _counts(model: Any) -> list[int]:
    names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    values = {metric.name: metric.value for metric in model.get_metrics() if metric.name in names}
    return [values.get(name, 0) for name in names]


if __name__ == "__main__":
    main()
