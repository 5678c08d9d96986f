"""Decode in vLLM for ``engines.py`` and tests, in a process of an interpreter that has it.

``python engines_worker.py REQUEST`` reads a JSON file with the request that :func:`measure`
describes, and prints a line of JSON with what it returns.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

#: Environment variables for vLLM, to be set before it is imported.
ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}
COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")


class Clock:
    """Add up the seconds within functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, owner: Any, *names: str) -> None:
        """Time functions of a class or module."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def main() -> None:
    """Measure one configuration."""
    os.environ |= ENVIRONMENT
    found = measure(json.loads(Path(sys.argv[1]).read_text()))
    installed = {item.name.removesuffix("-cpu"): item.version for item in distributions()}
    versions = {name: installed[name] for name in ("vllm", "torch", "transformers")}
    sys.stdout.write(f"\n{json.dumps({'versions': versions, 'rows': found})}\n")


def measure(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Decode in this process, and return a measurement for each number of concurrent requests.

    ``request`` has ``target``, ``prompts`` (token ids), ``max_tokens``, the list ``concurrency``,
    and optionally ``speculative_config`` and ``settings``. The timed functions remain wrapped.
    """
    from vllm import LLM, SamplingParams
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    from eagle_fsd.engines.chains import ChainVerifier
    from eagle_fsd.engines.vllm import runner
    from eagle_fsd.engines.vllm.sampler import RelaxedSampler

    options = {}
    if "settings" in request:
        options["additional_config"] = {"eagle_fsd": request["settings"]}
    model = LLM(
        request["target"],
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=max(request["concurrency"]),
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=request.get("speculative_config"),
        **options,
    )
    sampler, rule, processors = Clock(), Clock(), Clock()
    sampler.wrap(RejectionSampler, "forward")
    processors.wrap(RejectionSampler, "apply_logits_processors")
    rule.wrap(RelaxedSampler, "apply_logits_processors")  # and vLLM's own, which it calls
    outside = Clock()  # what the rule adds outside of vLLM's sampler
    outside.wrap(ChainVerifier, "finish")
    outside.wrap(runner, "prepare", "keep_logits")
    clocks = (sampler, rule, processors, outside)
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    sampling = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"])
    model.generate(prompts[: max(request["concurrency"])], sampling, use_tqdm=False)
    found = []
    for count in request["concurrency"]:
        before = _counts(model)
        for clock in clocks:
            clock.seconds = 0.0
        start = time.perf_counter()
        outputs = []
        for first in range(0, len(prompts), count):
            outputs += model.generate(prompts[first : first + count], sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        drafts, accepted = (now - then for now, then in zip(_counts(model), before, strict=True))
        found.append(
            {
                "requests": count,
                "answers": answers,
                "tokens_per_second": sum(map(len, answers)) / seconds,
                "drafts": drafts,
                "tau": 1.0 + accepted / drafts if drafts else 1.0,
                "sampler_share": 100.0 * (sampler.seconds + outside.seconds) / seconds,
                "rule_share": 100.0 * _rule_seconds(rule, processors, outside) / seconds,
            }
        )
    return found


def _rule_seconds(rule: Clock, processors: Clock, outside: Clock) -> float:
    """Return the seconds that a rule adds to decoding; 0 if there is none."""
    return rule.seconds - processors.seconds + outside.seconds if rule.seconds else 0.0


def _counts(model: Any) -> list[int]:
    values = {
        metric.name: metric.value for metric in model.get_metrics() if metric.name in COUNTERS
    }
    return [values.get(name, 0) for name in COUNTERS]


if __name__ == "__main__":
    main()
