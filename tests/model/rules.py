"""Every acceptance rule besides the exact one and FSD's, and settings with which they are exact."""

from __future__ import annotations

import math

from trees import ALWAYS

from eagle_fsd.model.acceptance import (
    BudgetRule,
    CascadeRule,
    DeferredRule,
    FuzzyRule,
    LimitedRule,
    MarginRule,
    MixtureRule,
    PhaseRule,
    RegretRule,
    TargetRule,
    TopKRule,
    TypicalRule,
)
from eagle_fsd.model.verify import AcceptanceRule

NEVER = -5  # a token that does not exist
#: Settings that accept some tokens and reject others, also of tiny random models.
RULES: list[AcceptanceRule] = [
    TypicalRule(),
    TopKRule(3, gap=0.4),
    TopKRule(3, ratio=0.2),
    MarginRule(0.5),
    CascadeRule(),
    TargetRule(single=0.2, acc=0.5),
    BudgetRule(),
    MixtureRule(0.3),
    DeferredRule(0.3, 1),
    RegretRule(1.0),
]
#: Rules that wrap others; the phases begin and end at tokens 1 and 2.
WRAPPED: list[AcceptanceRule] = [
    LimitedRule(FuzzyRule(ALWAYS), 2.0),
    LimitedRule(RegretRule(2.0), 3.0),
    PhaseRule(FuzzyRule(ALWAYS), 1, 2),
    PhaseRule(MixtureRule(0.3), None, 2),
    PhaseRule(LimitedRule(FuzzyRule(ALWAYS), 2.0), 1, 2),
    LimitedRule(PhaseRule(FuzzyRule(ALWAYS), None, 2), 2.0),
]
DISABLED: list[AcceptanceRule] = [
    FuzzyRule(0.0),
    TypicalRule(1.0, math.inf),
    TopKRule(1),
    TopKRule(gap=0.0),
    TopKRule(ratio=1.0),
    MarginRule(1.0),
    CascadeRule(-math.inf),
    TargetRule(),
    BudgetRule(0.0),
    MixtureRule(1.0),
    DeferredRule(2.0),
    RegretRule(0.0),
    LimitedRule(FuzzyRule(ALWAYS), 0.0),
    PhaseRule(FuzzyRule(ALWAYS), NEVER, NEVER),
]
