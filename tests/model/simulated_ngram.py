"""Drafting from counts without waiting for the device, shown without a GPU.

``test_simulated_accelerator.py`` runs these tests in a process of their own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_accelerator import DEVICES
from simulated_steps import GREEDY, SAMPLED, pair, run_steps

from eagle_fsd import EagleFSD, SamplingConfig
from eagle_fsd.model.drafters.interface import DraftState
from eagle_fsd.model.drafters.ngram import AdaptiveNGramDrafter, NGramDrafter

#: Prompts of the rows: with two continuations, with one, and with none.
PROMPTS = [[1, 2, 3, 1, 4, 1], [5, 6, 5], [7, 8, 9]]


def with_known_prompts(kind: type[NGramDrafter | AdaptiveNGramDrafter], repeats: bool) -> Any:
    """Return a drafter for prompts that are known to the host: it reads them before the steps."""

    class Known(kind):  # type: ignore[misc,valid-type]
        def start(self, *args: Any) -> DraftState:
            state = super().start(*args)
            admit = state.admit
            state.admit = lambda first, prompts: admit(
                first,
                [
                    PROMPTS[row] if repeats else [7, 8, 9]
                    for row in range(first, first + len(prompts))
                ],
            )
            return state

    return Known()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("kind", [NGramDrafter, AdaptiveNGramDrafter])
def test_step(
    kind: type[NGramDrafter | AdaptiveNGramDrafter],
    repeats: bool,
    rows: int,
    sampling: SamplingConfig,
) -> None:
    """A step with a tree, or with its root only."""
    drafted = EagleFSD(pair().model, None)
    drafted.drafter, drafted.tree = with_known_prompts(kind, repeats), pair().tree
    drafted.drafter.attach(drafted.target)
    for selection in ("longest", "sample"):
        engine, launched = run_steps(
            drafted, sampling, rows=rows, threshold=0.2, selection=selection
        )
        tokens = launched.tokens
        assert (tokens.device, tokens.shape[0]) == (torch.device(DEVICES[0]), rows)
        assert tokens.shape[1] == (drafted.tree.depth + 2 if repeats else 1)
        assert engine.draft.rows[0].tokens
