"""Choose the draft tree of a pair without ``fsd.json`` by the costs of its passes on a CPU.

A few steps with different trees are timed. The choice is the tree that emits the most tokens per
second if drafted tokens are accepted as often as :data:`ACCEPTED` assumes. ``eagle-fsd tune`` can
find a better one, because it decodes prompts with the pair.
"""

from __future__ import annotations

import heapq
import itertools
import json
import logging
from contextlib import closing

import torch

from eagle_fsd.model.config import TreeConfig
from eagle_fsd.model.drafters.draft_model import DraftModel
from eagle_fsd.model.drafters.levels import LevelDrafter
from eagle_fsd.model.gguf import cache_folder
from eagle_fsd.model.identity import fingerprint, json_digest
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.files import atomic_write
from eagle_fsd.utils.provenance import describe_environment

log = logging.getLogger(__name__)

#: Assumed share of tokens accepted after an accepted token, by their rank among the drafter's.
ACCEPTED = (0.6, 0.15, 0.07, 0.04, 0.03, 0.02, 0.01, 0.01)
#: Nodes, depths and widths of the trees to choose from.
NODES = (4, 8, 16, 32, 60)
DEPTHS = (1, 2, 3, 4, 5, 6, 8)
WIDTHS = (1, 2, 4, 8)
#: Further levels, beyond depth 1, of the trees that show what a level costs.
LEVELS = 4
#: Timed steps of every measurement, of which the fastest counts; one more comes before them.
STEPS = 2
CACHE_FILE = "trees.json"


def fit_tree(model: EagleFSD) -> None:
    """Choose the tree of a network drafter on a CPU if none has been set; the result is cached."""
    # Processes that share a target could choose different trees.
    on_cpu = model.target.device.type == "cpu" and model.target.group is None
    drafter = model.drafter
    # Draft models whose depth adapts would be timed with shallower trees.
    adapts = isinstance(drafter, DraftModel) and drafter.adapts
    is_set = not model.has_default_tree or model.exact_tree is not model.tree or model.batch_trees
    if adapts or is_set or not (on_cpu and isinstance(drafter, LevelDrafter)):
        return
    file, key = cache_folder().with_name(CACHE_FILE), _key(model)
    try:
        known = dict(json.loads(file.read_text(encoding="utf-8")))
        if key in known:
            model.tree = TreeConfig.from_dict(known[key])
            return
    except (OSError, ValueError, TypeError, AttributeError):  # missing or damaged
        known = {}
    log.warning("timing a few steps to choose the draft tree; eagle-fsd tune may find a better one")
    tree = choose_tree(*_time_passes(model))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, json.dumps({**known, key: tree.model_dump()}, indent=1) + "\n")
    except OSError as error:
        log.warning("the draft tree is not cached: %s", error)
    model.tree = tree


def choose_tree(
    target: dict[int, float], level: dict[int, float], draft: dict[int, float]
) -> TreeConfig:
    """Return the tree that is expected to emit the most tokens per second.

    ``target`` maps the number of nodes to the seconds of a step without drafting, ``level`` the
    width to those of a level, and ``draft`` the width to those of the rest of drafting.
    """
    best, speed = TreeConfig.for_device("cpu"), 0.0
    for nodes, depth, width in itertools.product(target, DEPTHS, level):
        seconds = target[nodes] + draft[width] + depth * level[width]
        # A step emits a token of the target, and each node with the probability that it is kept.
        rate = (1.0 + sum(_path_shares(depth, width)[: nodes - 1])) / seconds
        if rate > speed:
            best, speed = TreeConfig(total_tokens=nodes, depth=depth, top_k=width), rate
    return best


def _path_shares(depth: int, width: int) -> list[float]:
    """Return the probability that each node is kept, by :data:`ACCEPTED`, the largest first."""
    level = list(ACCEPTED[:width])
    shares = level
    for _ in range(depth):  # the drafter expands the best nodes of each level
        best = heapq.nlargest(width, level)
        level = [share * accepted for share in best for accepted in ACCEPTED[:width]]
        shares = shares + level
    return sorted(shares, reverse=True)


def _time_passes(model: EagleFSD) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
    """Time steps with a few trees; return the arguments of :func:`choose_tree`."""
    trees = [TreeConfig(total_tokens=nodes, depth=1, top_k=WIDTHS[-1]) for nodes in NODES]
    trees += [
        TreeConfig(total_tokens=NODES[0], depth=depth, top_k=width)
        for width in WIDTHS
        for depth in (1, 1 + LEVELS)
    ]
    spent = {}
    original = model.tree, model.compile
    model.compile = False  # every tree would be compiled by itself
    try:
        for tree in dict.fromkeys(trees):
            model.tree = tree
            spent[tree.total_tokens, tree.depth, tree.top_k] = _step_seconds(model)
    finally:
        model.tree, model.compile = original
    target = {nodes: spent[nodes, 1, WIDTHS[-1]][1] for nodes in NODES}
    level, draft = {}, {}
    for width in WIDTHS:
        one, more = (spent[NODES[0], depth, width][0] for depth in (1, 1 + LEVELS))
        level[width] = max(0.0, (more - one) / LEVELS)
        draft[width] = max(0.0, one - level[width])
    return target, level, draft


def _step_seconds(model: EagleFSD) -> tuple[float, float]:
    """Return the seconds of drafting and of the rest of a step."""
    drafts: list[float] = []
    others: list[float] = []
    room = min(model.target.context_length - 2, (STEPS + 1) * (model.tree.depth + 2))
    with closing(model.batch(1)) as batch, torch.inference_mode():
        batch.add(model.request(torch.tensor([1, 2]), room, eos_token_id=[]))
        before = dict(batch.seconds)
        while len(batch) and len(drafts) <= STEPS:
            for answer, _ in batch.step():
                if answer.error is not None:
                    raise answer.error
            after = dict(batch.seconds)
            step = {name: after[name] - before.get(name, 0.0) for name in after}
            drafts.append(step.pop("draft"))
            others.append(sum(step.values()) - step["prefill"])
            before = after
    return min(drafts[1:] or drafts), min(others[1:] or others)


def _key(model: EagleFSD) -> str:
    """Identify pair, data types, machine and version of torch."""
    machine, drafter = describe_environment()["machine"], model.drafter
    token_ids = drafter.token_ids if isinstance(drafter, LevelDrafter) else None
    size = None if token_ids is None else len(token_ids)
    parts = [fingerprint(model.model), fingerprint(drafter), size, machine, torch.__version__]
    return json_digest(parts)
