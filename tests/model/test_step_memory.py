"""The memory of a batch that has taken thousands of steps."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from pairs import aligned_pair, prompt
from resident_memory import resident_memory

from eagle_fsd import AcceptanceConfig

LIMITED = AcceptanceConfig(threshold=0.2, max_fuzzy_nats=4.0)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"threshold": 0.3, "min_ratio": 0.1},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1, "acceptance": LIMITED},
    {"method": "ar"},
]


def tensors() -> tuple[int, int]:
    """Return the number of tensors that Python holds, and their bytes.

    Those of subclasses, which tracing creates, may have no size.
    """
    gc.collect()
    found = [item for item in gc.get_objects() if type(item) is torch.Tensor]
    return len(found), sum(item.nbytes for item in found)


@pytest.mark.slow
def test_memory_is_flat_over_ten_thousand_steps(record_property: Any) -> None:
    """After 10,000 steps there are no more tensors than after 1,000, and at most 2 % more memory.

    What tests before this one have left may be freed meanwhile.
    """
    pair = aligned_pair()
    batch = pair.batch(max_rows=4, max_length=120)
    numbers = itertools.count()

    def run(steps: int) -> None:
        """Decode answers of different lengths and options until so many steps have been taken."""
        while batch.passes < steps:
            while batch.free:
                number = next(numbers)
                ids = prompt(1 + number % 40, number)[0]
                options = OPTIONS[number % len(OPTIONS)]
                batch.add(pair.request(ids, 60 + number % 7, **options))
            for answer, _ in batch.step():
                assert answer.error is None
        while len(batch):
            batch.step()

    run(1000)
    before = resident_memory(), tensors()
    run(10_000)
    after = resident_memory(), tensors()
    record_property("resident_bytes", [before[0], after[0]])
    assert after[1][0] <= before[1][0]
    assert after[1][1] <= before[1][1]
    assert after[0] <= 1.02 * before[0]
