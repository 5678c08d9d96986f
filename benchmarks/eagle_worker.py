"""Decode for ``compare.py`` with the official EAGLE code, in an interpreter that can import it.

It answers the requests of ``revision_worker.py``, with ``dtype`` in place of ``compile`` and
``max_new_tokens`` as the only option. The checkout is used as it is: what it expects of a target's
folder is provided in a temporary one.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import eagle
import torch
import transformers
from eagle.model.ea_model import EaModel
from worker_loop import serve

WEIGHTS = "model.safetensors"


@lru_cache
def load_pair(
    target: str, head: str, dtype: str, total_tokens: int, depth: int, top_k: int
) -> EaModel:
    """Load a target and its EAGLE-2 head on the CPU."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in Path(target).iterdir():
            (folder / path.name).symlink_to(path.resolve())
        # The head's input embedding is looked up in the index of a target of several files.
        index = {"weight_map": {"model.embed_tokens.weight": WEIGHTS}}
        (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index), encoding="utf-8")
        model = EaModel.from_pretrained(
            use_eagle3=False,
            base_model_path=name,
            ea_model_path=head,
            total_token=total_tokens,
            depth=depth,
            top_k=top_k,
            torch_dtype=getattr(torch, dtype),
        )
    return model.eval()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Decode one prompt greedily.

    The official code ends after the step that reaches a limit: what the last one emits beyond the
    number of new tokens, or behind an end-of-sequence token, is not counted.
    """
    model = load_pair(request["target"], request["head"], request["dtype"], *request["tree"])
    ids = torch.tensor([request["ids"]])
    limit = request["options"]["max_new_tokens"]
    begin = time.perf_counter()
    # It ends when there are more tokens than asked for.
    sequences, _, last = model.eagenerate(ids, max_new_tokens=limit - 1, log=True)
    seconds = time.perf_counter() - begin
    tokens = sequences[0, ids.shape[1] :].tolist()[:limit]
    end = model.tokenizer.eos_token_id
    if end in tokens:
        tokens = tokens[: tokens.index(end) + 1]
    return {"tokens": tokens, "passes": last + 1, "seconds": seconds}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    serve(eagle.__path__[0], answer)
