"""Decode for ``revisions.py``, in a process that imports one revision of the package.

It uses only what the package offered in all revisions that are compared.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

import torch
from worker_loop import serve

import eagle_fsd
from eagle_fsd import EagleFSD


@lru_cache
def load_pair(target: str, head: str, total_tokens: int, depth: int, top_k: int) -> EagleFSD:
    """Load a pair in float32 on the CPU."""
    return EagleFSD.from_pretrained(
        target, head, device_map="cpu", total_tokens=total_tokens, depth=depth, top_k=top_k
    )


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Decode one prompt.

    ``request`` has ``target``, ``head``, ``tree`` (total tokens, depth, top_k), ``compile``,
    ``ids`` of the prompt, and ``options`` of the call.

    Returns the new ``tokens``, the number of ``passes`` of the target, and the ``seconds``.
    """
    model = load_pair(request["target"], request["head"], *request["tree"])
    # The second is the name in revisions up to d16a6ae. No effect where one cannot compile.
    model.compile = model.compiled = request["compile"]
    ids = torch.tensor([request["ids"]])
    begin = time.perf_counter()
    out = model.generate(ids, torch.ones_like(ids), **request["options"])
    seconds = time.perf_counter() - begin
    return {
        "tokens": out.sequences[0, ids.shape[1] :].tolist(),
        "passes": sum(map(len, out.stats.accepted)),
        "seconds": seconds,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(eagle_fsd.__path__[0], answer)
