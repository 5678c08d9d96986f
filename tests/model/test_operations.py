"""How many operations a decoding step dispatches: without compilation, the host waits for each."""

from __future__ import annotations

from collections import Counter
from typing import Any

from pairs import prompt
from torch.utils._python_dispatch import TorchDispatchMode

from eagle_fsd import AcceptanceConfig, EagleFSD, TreeConfig


class CountOperations(TorchDispatchMode):
    """Counts the operations in a context, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def operations(tree: TreeConfig, acceptance: AcceptanceConfig) -> Counter[str]:
    """Count the operations of the bundled pair's third step, in which all shapes are usual."""
    pair = EagleFSD.from_pretrained()
    pair.tree = tree
    chunks = iter(pair.stream(prompt(20), max_new_tokens=100, acceptance=acceptance))
    for _ in range(2):
        next(chunks)
    with CountOperations() as counted:
        next(chunks)
    return counted.counts


def test_step() -> None:
    """Revision 68e5df3 dispatched 1,985 operations with this tree at ``T = 0``."""
    tree = TreeConfig(total_tokens=16, depth=8, top_k=2)
    for threshold, min_ratio, most in ((0.0, 0.0, 1830), (0.1, 0.3, 1900)):
        counts = operations(tree, AcceptanceConfig(threshold=threshold, min_ratio=min_ratio))
        assert counts.total() < most, counts.most_common(30)


def test_level() -> None:
    """A level runs the head's layer once; what surrounds it is about as much again."""
    totals = [
        operations(TreeConfig(total_tokens=16, depth=depth, top_k=2), AcceptanceConfig()).total()
        for depth in (8, 12)
    ]
    assert (totals[1] - totals[0]) / 4 < 70, totals
