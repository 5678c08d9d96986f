"""Record accepted lengths with a few large trees, and predict those of any tree.

A recording with a deep tree predicts tau for every smaller depth. If a step emitted ``L`` tokens
and the tree in question emits at most ``m``, then

- on a chain, whose steps end where the target disagrees, the ``L`` tokens take ``ceil(L / m)``
  steps;
- on a bushy tree, whose steps often end where its nodes are used up, the step emits ``min(L, m)``
  tokens, and the next one goes on as far as any other.

Between recorded numbers of nodes, tau is interpolated on their logarithm.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eagle_fsd.evaluation.methods import Method
from eagle_fsd.evaluation.tuning.workload import Workload
from eagle_fsd.model.config import TreeConfig
from eagle_fsd.model.identity import fingerprint
from eagle_fsd.utils.files import append_line, read_jsonl, truncate_partial_line

#: Prompts that are decoded at once.
BATCH = 16


@dataclass(frozen=True)
class Lengths:
    """The tokens that each target pass of one method emitted, for each answer, by tree."""

    recorded: Mapping[TreeConfig, Sequence[Sequence[int]]]

    def tau(self, tree: TreeConfig) -> float | None:
        """Predict the mean number of tokens that a target pass emits.

        None if no recording covers the tree: with as many children per node, and at least as many
        nodes and levels.
        """
        if tree.top_k == 1:
            for recorded, answers in self.recorded.items():
                if recorded.top_k == 1 and max_emitted(recorded) >= max_emitted(tree):
                    return _tau(answers, tree)
            return None
        points = sorted(
            (recorded.total_tokens, _tau(answers, tree))
            for recorded, answers in self.recorded.items()
            if recorded.top_k == tree.top_k
            and recorded.depth >= min(tree.depth, recorded.total_tokens - 2)
        )
        nodes = tree.total_tokens
        if not points or not points[0][0] <= nodes <= points[-1][0]:
            return None
        sizes, taus = zip(*points, strict=True)
        return float(np.interp(math.log(nodes), np.log(sizes), taus))


def max_emitted(tree: TreeConfig) -> int:
    """Return the largest number of tokens that a step can emit with a tree.

    Its deepest path has ``depth + 1`` drafted tokens, and a token of the target follows.
    """
    return min(tree.total_tokens, tree.depth + 2)


def capacity(tree: TreeConfig) -> int:
    """Return the number of nodes that a tree can have, from its depth and its width."""
    pool = 1 + (1 + tree.depth * tree.top_k) * tree.top_k
    return min(tree.total_tokens, pool)


def _tau(answers: Sequence[Sequence[int]], tree: TreeConfig) -> float:
    """Return the mean number of tokens per step, given those of a deeper tree."""
    most = max_emitted(tree)
    lengths = [length for answer in answers for length in answer]
    if tree.top_k == 1:
        return sum(lengths) / max(1, sum(math.ceil(length / most) for length in lengths))
    return sum(min(length, most) for length in lengths) / max(1, len(lengths))


class LengthRecorder:
    """Record accepted lengths, and keep them in a file, from which an interrupted run resumes.

    ``digest`` is a hash of the pair, the prompts and the options of decoding.
    """

    def __init__(self, workload: Workload, path: Path) -> None:
        self.workload, self.path = workload, path
        model = workload.model
        inputs = {
            "target": fingerprint(model.model),
            "drafter": fingerprint(model.drafter),
            "prompts": [prompt.tolist() for prompt in workload.prompts],
            "config": workload.config.model_dump(),
        }
        self.digest = _digest(inputs)
        self._known: dict[str, list[list[int]]] = {}
        truncate_partial_line(path)
        if path.exists():
            self._known = {line["key"]: line["accepted"] for line in read_jsonl(path)}

    def record(self, method: Method) -> list[list[int]]:
        """Return the tokens that each target pass of a method with its tree emits, by answer."""
        key = _digest([self.digest, method.describe(self.workload.model)])
        if key not in self._known:
            pair, found = self.workload.pair(), []
            total = len(self.workload.prompts)
            for first in range(0, total, BATCH):
                answers, _ = self.workload.decode(pair, method, first, min(BATCH, total - first))
                found += [answer.stats.accepted[0] for answer in answers]
            self._known[key] = found
            append_line(self.path, json.dumps({"key": key, "accepted": found}))
        return self._known[key]


def _digest(values: object) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
