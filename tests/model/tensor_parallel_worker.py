"""Decode with a tensor-parallel target in one of several processes, for test_tensor_parallel.py.

Run by ``torchrun``: ``tensor_parallel_worker.py FOLDER``. The folder holds a target and a head, and
each process writes what it decoded to a file of its own there.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pairs import NEW_TOKENS, aligned_pair, batch, greedy_reference, prompt, small_tree, tiny_target

from eagle_fsd import EagleFSD
from eagle_fsd.bundled import BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.model.config import AcceptanceConfig
from eagle_fsd.model.drafters.draft_model import DraftModel
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.drafters.ngram import NGramDrafter
from eagle_fsd.model.identity import fingerprint
from eagle_fsd.model.loading import load_target
from eagle_fsd.model.prefix_cache import PrefixCache

#: Options of calls whose results are compared with those of a single process.
CALLS: dict[str, dict[str, Any]] = {
    "plain": {"method": "ar"},
    "exact": {},
    "fsd": {"threshold": 0.2},
    "plain-sampled": {"method": "ar", "temperature": 1.0, "seed": 3},
    "fsd-sampled": {"threshold": 0.2, "temperature": 0.8, "top_p": 0.9, "seed": 3},
    "drawn": {
        "acceptance": AcceptanceConfig(threshold=0.2, selection="sample"),
        "temperature": 1.0,
        "seed": 3,
    },
}
#: Drafters, each of which decodes the call "fsd-sampled".
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "draft-model": lambda: DraftModel(tiny_target(seed=5)),
    "ngram": NGramDrafter,
}


def head() -> Drafter:
    return copy.deepcopy(aligned_pair().drafter)


def generate(pair: EagleFSD, **options: Any) -> Any:
    """Decode a batch of prompts; return sequences, origins and tau."""
    ids, mask = batch()
    out = pair.generate(ids, mask, 12, **options)
    return out.sequences, out.origins, out.stats.tau


def two_turns(pair: EagleFSD) -> Any:
    """Continue a chat whose tokens are cached."""
    cache = PrefixCache()
    first = pair.generate(prompt(8), None, 8, prefix_cache=cache).sequences
    return pair.generate(torch.cat([first, prompt(5)], 1), None, 8, prefix_cache=cache).sequences


OTHERS: dict[str, Callable[[EagleFSD], Any]] = {
    "custom_generate": lambda pair: greedy_reference(
        pair.model, *batch(), new=NEW_TOKENS, custom_generate=pair.custom_generate
    ),
    "beam_search": lambda pair: pair.beam_search(*batch(), 6, num_beams=2).sequences,
    "prefix_cache": two_turns,
}


def results(model: Any) -> dict[str, Any]:
    """Return the results of all calls by their names."""
    pair = EagleFSD(model, head(), small_tree())
    calls = {name: partial(generate, pair, **options) for name, options in CALLS.items()}
    for kind, drafter in DRAFTERS.items():
        other = EagleFSD(model, drafter(), small_tree())
        calls[kind] = partial(generate, other, **CALLS["fsd-sampled"])
    calls |= {name: partial(function, pair) for name, function in OTHERS.items()}
    return {name: call() for name, call in calls.items()}


def from_files(folder: Path, **options: Any) -> dict[str, Any]:
    """Load pairs, whose settings identify the target, and a head with the target's embedding."""
    ids = prompt(12)
    bundled = EagleFSD.from_pretrained(BUNDLED_TARGET, BUNDLED_HEAD, **options)
    pair = EagleFSD.from_pretrained(folder / "target", folder / "head", **options)
    pair.tree = small_tree()
    found = {
        "fingerprint": fingerprint(bundled.model),
        "bundled": bundled.generate(ids, None, NEW_TOKENS).sequences,
        "own embedding": pair.drafter.embed_tokens is not None,
        "head": generate(pair),
    }
    pair.drafter.restrict_vocabulary(torch.arange(8, 80))
    found["draft vocabulary"] = generate(pair)
    return found


def main(out: str) -> None:
    folder = Path(out)
    model = load_target(folder / "target", tp_plan="auto")
    rank = dist.get_rank()
    torch.manual_seed(rank)  # what is sampled must not depend on the global generator
    found = results(model)
    target = EagleFSD(model, None).target
    found["files"] = from_files(folder, tp_plan="auto")
    found["unseeded"] = EagleFSD(model, head(), small_tree()).generate(*batch(), temperature=1.0)
    found["unseeded"] = found["unseeded"].sequences
    found["agreed"] = target.agree(rank + 5)
    found["one_device"] = target.one_device
    found["rows"] = model.model.layers[0].mlp.up_proj.weight.to_local().shape[0]
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
