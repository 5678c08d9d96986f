"""Select the settings that a calibration tests: what to try, what to drop, and what to test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

import numpy as np

from eagle_fsd.evaluation.certificate import MAX_TESTS, outcomes
from eagle_fsd.evaluation.config import EngineName, GridConfig, LossBounds
from eagle_fsd.evaluation.engines import ENGINES
from eagle_fsd.evaluation.frontier import is_faster
from eagle_fsd.evaluation.methods import (
    EXACT,
    PRICED,
    Method,
    fsd_series,
    given_acceptance,
    rule_method,
)
from eagle_fsd.evaluation.search.prediction import Candidate
from eagle_fsd.evaluation.search.search import TreePlan
from eagle_fsd.evaluation.statistics import confidence_per_test, is_loss_below
from eagle_fsd.evaluation.tables import Row
from eagle_fsd.model.config import Settings
from eagle_fsd.utils.options import OptionsError

#: Rules from the literature to choose from.
CALIBRATED_RULES = ("acc 0.5", "budget", "top-ratio", "margin", "cascade", "mixture")
#: Probability of being certified below which a setting is dropped, and the number of draws that
#: it is estimated from.
MIN_CHANCE, DRAWS = 0.02, 200
#: Minimum accuracy of exact decoding, in percent and as a multiple of the allowed loss. Below it
#: there is little accuracy to lose, usually because answers are cut off or cannot be parsed.
MIN_ACCURACY, MIN_ACCURACY_TO_LOSS = 5.0, 2.0


@dataclass(frozen=True)
class Setting:
    """A method with its tree to choose from, and its predicted speed relative to exact decoding.

    ``acceptance`` names the acceptance setting, which several trees share.
    """

    method: Method
    acceptance: str
    speed: float

    @property
    def name(self) -> str:
        """Name of the method."""
        return self.method.name


def candidate_methods(
    grid: GridConfig,
    engine: EngineName | None,
    temperature: float,
    rules: bool,
    settings: Settings | None = None,
    drafter: str | None = None,
) -> list[Method]:
    """Return the acceptance settings to choose from, without trees.

    To the grid, priced paths without a gate are added, and :data:`CALIBRATED_RULES` with ``rules``.
    All share the options in ``settings`` that they do not set. An engine has those that it
    supports, or its own. Raises OptionsError if the engine does not apply its rule at this
    temperature, or does not support one of the shared options.
    """
    # The highest floor first, see :func:`plan_settings`.
    methods = [method for group in reversed(fsd_series(grid).values()) for method in group]
    shared = given_acceptance(settings)
    methods += PRICED
    for name in CALIBRATED_RULES if rules else ():
        if name != "mixture" or shared.max_fuzzy_nats is None:  # which cannot limit it
            methods.append(rule_method(name))
    if engine is None:
        return methods
    found = ENGINES[engine]
    if found.sampled not in (None, temperature > 0.0):
        raise OptionsError(f"{found.requirement}; got {temperature:g}")
    return list(found.methods(methods, shared, drafter))


def engine_plan(plan: TreePlan, engine: EngineName | None) -> TreePlan:
    """Keep the trees with which an engine (None: ours) decodes as we do.

    These are chains, and any tree for exact decoding if the engine has trees.
    """
    if engine is None:
        return plan
    only_chains = ENGINES[engine].chains_only
    candidates = {
        name: [
            item
            for item in found
            if item.tree.top_k == 1 or (name == EXACT.name and not only_chains)
        ]
        for name, found in plan.candidates.items()
    }
    exact = plan.exact
    if only_chains and exact.top_k > 1:
        exact = candidates[EXACT.name][0].tree
    return TreePlan(exact=exact, candidates=candidates)


def plan_settings(plan: TreePlan, methods: Sequence[Method]) -> list[Setting]:
    """Combine each method with its fastest chain and with its fastest bushy tree.

    The settings are those that are predicted to be faster than exact decoding, fastest first. Of
    methods with the same predicted speed and tau on a tree, such as FSD with a small threshold
    under several floors, only the first is tried.
    """
    found: dict[Candidate, Setting] = {}
    exact = plan.speed(EXACT.name)
    for method in methods:
        trees = plan.candidates[method.name]
        chains = [item for item in trees if item.tree.top_k == 1]
        bushy = [item for item in trees if item.tree.top_k > 1]
        for item in (*chains[:1], *bushy[:1]):
            if item.tokens_per_second > exact:
                name = f"{method.name} tree {item.tree.shape.replace('/', '-')}"
                own = replace(method, name=name, tree=item.tree)
                setting = Setting(own, method.name, item.tokens_per_second / exact)
                found.setdefault(item, setting)
    return sorted(found.values(), key=lambda item: -item.speed)


def check_accuracy(exact: Row, max_drop: float) -> None:
    """Raise a ValueError if too few of exact decoding's answers are right to bound a loss."""
    if not exact["tokens"]:
        raise ValueError("no question was answered, so there is nothing to calibrate on")
    points = 100 * (exact["accuracy"] or 0.0)
    if points < min(100.0, max(MIN_ACCURACY, MIN_ACCURACY_TO_LOSS * max_drop)):
        raise ValueError(
            f"the accuracy of exact decoding is only {points:.1f}%, too low for --max-drop"
            f" {max_drop:g} ({exact['cut_off']} answers were cut off); check --max-new-tokens and"
            " the chat template"
        )


def drop_settings(
    plan: Sequence[Setting], rows: Mapping[str, Row], bounds: LossBounds, fresh: int, kept: int
) -> list[Setting]:
    """Keep up to ``kept`` settings, those with the largest expected gain, in their order.

    Only the most promising tree of an acceptance setting remains, and only one of several settings
    with equal trees and results. ``fresh`` is the number of questions that will certify a setting.
    """
    chances = {item.name: chance(rows[item.name], bounds, fresh) for item in plan}
    gains = {item.name: chances[item.name] * (item.speed - 1) for item in plan}
    best: dict[str, str] = {}
    decoded = set()
    for item in sorted(plan, key=lambda item: -gains[item.name]):
        row = rows[item.name]
        seen = (item.method.tree, row["tokens"], row["tau"], outcomes(row))
        is_new = item.acceptance not in best and seen not in decoded
        if is_new and chances[item.name] >= MIN_CHANCE:
            best[item.acceptance] = item.name
            decoded.add(seen)
    remaining = list(best.values())[:kept]
    return [item for item in plan if item.name in remaining]


def choose_tests(rows: Sequence[Row], bounds: LossBounds, fresh: int) -> list[Row]:
    """Choose the settings to test: the series that has the largest expected speed.

    A series is tested from its fastest setting to its slowest, until one is certified; exact
    decoding remains if none is. The outcomes of its tests are taken to be independent. No setting
    is chosen if none is faster than exact decoding and may be certified.
    """
    faster = sorted(filter(is_faster, rows), key=lambda row: -row["speed_over_exact"])
    best: tuple[float, tuple[Row, ...]] = (1.0, ())
    for count in range(1, MAX_TESTS + 1):
        for series in combinations(faster, count):
            speed = 1.0
            for row in reversed(series):
                probability = chance(row, bounds, fresh, count)
                speed = probability * row["speed_over_exact"] + (1 - probability) * speed
            if speed > best[0]:
                best = speed, series
    return list(best[1])


def chance(row: Row, bounds: LossBounds, fresh: int, tests: int = 1) -> float:
    """Estimate the probability that a setting will be certified, given its answers so far.

    The shares of lost and gained answers are drawn from their posterior distribution under
    Jeffreys' prior, and the outcomes of ``fresh`` further questions from these shares. The error
    probability is divided among ``tests`` tests.
    """
    level = confidence_per_test(bounds.confidence, tests)
    return _chance(*outcomes(row), fresh, bounds.max_drop / 100, level)


@lru_cache(maxsize=4096)
def _chance(
    lost: int, gained: int, paired: int, fresh: int, max_loss: float, confidence: float
) -> float:
    """Compute :func:`chance`, cached by counts, which many settings share."""
    random = np.random.default_rng(0)
    counts = np.array([lost, gained, paired - lost - gained])
    drawn = random.multinomial(fresh, random.dirichlet(counts + 0.5, DRAWS))[:, :2]
    # A bound is not below its estimate.
    possible = drawn[drawn[:, 0] - drawn[:, 1] <= max_loss * fresh]
    found, repeats = np.unique(possible, axis=0, return_counts=True)
    passed = [
        is_loss_below(max_loss, int(b), int(c), count=fresh, confidence=confidence)
        for b, c in found
    ]
    return float(repeats @ np.array(passed, dtype=float)) / DRAWS
