"""Decode for ``revisions.py``, in a process that imports one revision of the package.

Writes the package's folder to standard output, then reads requests from standard input and writes
their results, each as JSON on a line. It uses only what the package offered in all revisions that
are compared.
"""

from __future__ import annotations

import json
import sys
import time
from functools import lru_cache

import torch

import eagle_fsd
from eagle_fsd import EagleFSD


@lru_cache
def load_pair(target: str, head: str, total_tokens: int, depth: int, top_k: int) -> EagleFSD:
    """Load a pair in float32 on the CPU.

    Args:
        target: Folder of the target.
        head: Folder of its EAGLE-2 head.
        total_tokens: Nodes of the tree.
        depth: Its depth.
        top_k: Children of each node.
    """
    return EagleFSD.from_pretrained(
        target, head, device_map="cpu", total_tokens=total_tokens, depth=depth, top_k=top_k
    )


def main() -> None:
    """Answer requests until standard input ends."""
    torch.set_num_threads(1)
    print(json.dumps(eagle_fsd.__path__[0]), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        model = load_pair(request["target"], request["head"], *request["tree"])
        # The second is the name in revisions up to d16a6ae. No effect where one cannot compile.
        model.compile = model.compiled = request["compile"]
        ids = torch.tensor([request["ids"]])
        begin = time.perf_counter()
        out = model.generate(ids, torch.ones_like(ids), **request["options"])
        seconds = time.perf_counter() - begin
        result = {
            "tokens": out.sequences[0, ids.shape[1] :].tolist(),
            "passes": sum(map(len, out.stats.accepted)),
            "seconds": seconds,
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
