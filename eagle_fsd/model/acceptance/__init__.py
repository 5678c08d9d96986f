"""Acceptance rules: which drafted tokens are accepted although the target sampled another token.

:class:`FuzzyRule` is FSD's. The others are rules from the literature behind the same interface, so
that they can be compared on equal terms. With ``p`` and ``q`` the target's and the draft's
distributions at a node, ``x`` a child's token and ``s`` the target's sample, the child is accepted
if ``x = s`` or if

===========================  ====================================================================
:class:`ExactRule`           (never; EAGLE-2)
:class:`FuzzyRule`           ``Div(p, q) < T`` (and ``p(x) >= r max p``)
:class:`TypicalRule`         ``p(x) > min(epsilon, delta exp(-H(p)))`` (Medusa)
:class:`TopKRule`            ``x`` among the ``top`` likeliest, and ``p(x) >= max p - gap``
                             (TensorRT-LLM) or ``p(x) >= ratio max p`` (speculators)
:class:`MarginRule`          ``x`` among the two likeliest, and the ratio of the two largest logits
                             above ``ratio`` (MARS)
:class:`CascadeRule`         ``max q >= max p - alpha TV(p, q)`` and ``x`` is the draft's own choice
                             (speculative cascades)
:class:`TargetRule`          ``p(x) >= single``, or ``x`` is sampled from ``p`` raised by
                             ``1 / acc`` (SGLang)
:class:`BudgetRule`          ``x`` is sampled from ``p`` raised by a KL budget (Cactus)
:class:`MixtureRule`         ``x`` is sampled from ``w p + (1 - w) q``, which replaces ``s``
                             (static ensemble)
:class:`DeferredRule`        ``H(p) >= entropy log V`` and the next tokens agree for a window
                             (FLy)
:class:`RegretRule`          ``max log p - log p(x)`` is below a bound per position that ``x`` can
                             save (approximate speculative decoding)
===========================  ====================================================================

:class:`LimitedRule`, :class:`DelayedRule` and :class:`PhaseRule` restrict another rule: to a budget
of log-probability per answer, to what follows its first tokens, and to positions between two
markers.

Subclasses of :class:`DrawnRule` raise the probabilities of drafted tokens and reuse the random
number behind ``s``. At temperature 0 they accept a token if its raised probability reaches
``max p``.
"""

from __future__ import annotations

from eagle_fsd.model.acceptance.draws import BudgetRule as BudgetRule
from eagle_fsd.model.acceptance.draws import DrawnRule as DrawnRule
from eagle_fsd.model.acceptance.draws import MixtureRule as MixtureRule
from eagle_fsd.model.acceptance.draws import TargetRule as TargetRule
from eagle_fsd.model.acceptance.thresholds import CascadeRule as CascadeRule
from eagle_fsd.model.acceptance.thresholds import DeferredRule as DeferredRule
from eagle_fsd.model.acceptance.thresholds import ExactRule as ExactRule
from eagle_fsd.model.acceptance.thresholds import FuzzyRule as FuzzyRule
from eagle_fsd.model.acceptance.thresholds import MarginRule as MarginRule
from eagle_fsd.model.acceptance.thresholds import RegretRule as RegretRule
from eagle_fsd.model.acceptance.thresholds import TopKRule as TopKRule
from eagle_fsd.model.acceptance.thresholds import TypicalRule as TypicalRule
from eagle_fsd.model.acceptance.wrappers import DelayedRule as DelayedRule
from eagle_fsd.model.acceptance.wrappers import LimitedRule as LimitedRule
from eagle_fsd.model.acceptance.wrappers import PhaseRule as PhaseRule
from eagle_fsd.model.acceptance.wrappers import WrappedRule as WrappedRule
from eagle_fsd.model.config import AcceptanceConfig
from eagle_fsd.model.verify import AcceptanceRule

#: Rules from the literature by name: with published values, if any, and with stricter or looser
#: ones. (SGLang's two rules, ``single`` and ``acc``, are off by default. In greedy decoding,
#: ``single`` above 0.5 accepts only the target's own token.)
RULES: dict[str, AcceptanceRule] = {
    "typical": TypicalRule(),
    "typical 0.03": TypicalRule(epsilon=0.1, delta=0.03),
    "single 0.4": TargetRule(single=0.4),
    "single 0.2": TargetRule(single=0.2),
    "acc 0.5": TargetRule(acc=0.5),
    "acc 0.2": TargetRule(acc=0.2),
    "top-gap": TopKRule(gap=0.6),
    "top-gap 0.3": TopKRule(gap=0.3),
    "top-ratio": TopKRule(3, ratio=0.5),
    "top-ratio 0.2": TopKRule(3, ratio=0.2),
    "margin": MarginRule(),
    "margin 0.8": MarginRule(0.8),
    "cascade": CascadeRule(),
    "cascade -1": CascadeRule(-1.0),
    "mixture": MixtureRule(),
    "mixture 0.5": MixtureRule(0.5),
    "regret": LimitedRule(RegretRule(), 10.0),
    "regret 0.2": LimitedRule(RegretRule(0.2), 5.0),
    "budget": BudgetRule(),
    "budget 0.02": BudgetRule(budget=0.02),
    "deferred": DeferredRule(),
    "deferred 0.1": DeferredRule(entropy=0.1, window=3),
}


def rule_for(acceptance: AcceptanceConfig, rule: AcceptanceRule | None = None) -> AcceptanceRule:
    """Return ``rule``, by default that of the options, restricted by their limits unless exact."""
    if rule is None and acceptance.lossless:
        rule = ExactRule()
    if isinstance(rule, ExactRule):
        return rule
    rule = (
        rule
        or RULES.get(acceptance.rule)
        or FuzzyRule(
            acceptance.threshold,
            acceptance.divergence,
            acceptance.min_ratio,
            acceptance.divergence_on,
        )
    )
    if acceptance.exact_first:
        rule = DelayedRule(rule, acceptance.exact_first)
    limit = acceptance.max_fuzzy_nats
    return rule if limit is None else LimitedRule(rule, limit)
