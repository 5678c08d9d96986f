"""The comparison of priced paths with the longest."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eagle_fsd.bundled import BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.evaluation.compare_selections import (
    Totals,
    format_table,
    gain,
    log_prob,
    measure,
    questions,
    tau,
)
from eagle_fsd.model.config import AcceptanceConfig
from eagle_fsd.model.pipeline import EagleFSD


def _totals(tau: float, log_prob: float) -> Totals:
    """Two equal answers of 60 tokens."""
    return np.array([[60.0, 60.0 / tau, 60.0 * log_prob]] * 2)


def test_gain_is_the_distance_from_the_frontier() -> None:
    """The third setting is worse than the second in both quantities, so the line ignores it."""
    frontier = [_totals(3.0, -0.5), _totals(4.0, -0.6), _totals(3.5, -0.65), _totals(6.0, -0.8)]
    assert gain(_totals(3.7, -0.55), frontier) == pytest.approx(0.2)
    assert gain(_totals(5.0, -0.7), frontier) == pytest.approx(0.0)
    assert gain(_totals(3.0, -0.4), frontier) == pytest.approx(0.0)
    assert math.isnan(gain(_totals(7.0, -0.9), frontier))


def test_table_of_the_bundled_pair() -> None:
    """The totals are those that decoding reports; two answers give standard errors."""
    model = EagleFSD.from_pretrained(BUNDLED_TARGET, BUNDLED_HEAD)
    prompts = questions(model, 2)
    exact = measure(model, prompts, AcceptanceConfig(), 24)
    free = AcceptanceConfig(threshold=1.0, selection="priced", price=0.5)
    priced = measure(model, prompts, free, 24)
    assert exact[:, 0].tolist() == [24.0, 24.0]
    assert tau(priced) > tau(exact) > 2.0
    assert -1.0 < log_prob(priced) < 0.0
    lines = format_table({"exact": exact, "price 0.5": priced}, [exact]).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith(f"| exact | {tau(exact):.3f} ± ")
