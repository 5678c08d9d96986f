"""Decoding methods to compare."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eagle_fsd.evaluation.config import METHOD_NAMES, GridConfig
from eagle_fsd.model.acceptance import RULES, FuzzyRule, PhaseRule
from eagle_fsd.model.config import AcceptanceConfig, Settings, TreeConfig
from eagle_fsd.model.loading import load_target
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.request import Decision
from eagle_fsd.model.verify import AcceptanceRule
from eagle_fsd.utils.options import OptionsError

#: Acceptance settings of the rules that FSD is compared with; they share the model's limits.
RULE_ACCEPTANCE: dict[str, Any] = {
    "threshold": 0.0,
    "fallback": "exact",
    "selection": "longest",
}
#: Acceptance settings of EAGLE-2.
EAGLE_ACCEPTANCE = {**RULE_ACCEPTANCE, "max_fuzzy_nats": None, "exact_first": 0}


def marker_token(tokenizer: PreTrainedTokenizerBase, marker: str) -> int:
    """Return the last token of a marker at the beginning of a line."""
    token: int = tokenizer.encode(f"\n{marker}", add_special_tokens=False)[-1]
    return token


@dataclass(frozen=True)
class Method:
    """A decoding method, under the name that it has in tables and files."""

    name: str
    #: Fields of :class:`AcceptanceConfig` that override the model's.
    acceptance: dict[str, Any] = field(default_factory=dict)
    #: Acceptance rule to use instead of the one that ``acceptance`` selects.
    rule: AcceptanceRule | None = None
    #: The ``method`` of :meth:`EagleFSD.generate`, or ``"hf"`` for Hugging Face's ``generate``.
    decoder: Literal["fsd", "ar", "hf"] = "fsd"
    #: Draft model for Hugging Face's assisted generation, or ``"ngram"`` for prompt lookup.
    assistant: PreTrainedModel | Literal["ngram"] | None = None
    #: Markers, encoded after a newline, between which ``rule`` applies; without the first one, it
    #: applies from the beginning of the answer. Of a marker of several tokens, the last one counts.
    phase: tuple[str | None, str] | None = None
    #: Shape of the draft tree; default: the model's, which may depend on the batch.
    tree: TreeConfig | None = None

    def pair_for(self, model: EagleFSD) -> EagleFSD:
        """Return a copy of the pair with this method's acceptance settings and tree."""
        pair = copy.copy(model)
        pair.acceptance = model.acceptance.overridden(self.acceptance)
        pair.tree = self.tree or (
            model.tree if self.rule is not None else model.tree_for(pair.acceptance)
        )
        if self.tree is None:
            pair.batch_trees = model.batch_trees
        return pair

    def rule_for(self, model: EagleFSD) -> AcceptanceRule | None:
        """Return the rule, restricted to the phase if there is one."""
        if self.rule is None or self.phase is None:
            return self.rule
        begin, end = self.phase
        encode = partial(marker_token, model.tokenizer)
        return PhaseRule(self.rule, None if begin is None else encode(begin), encode(end))

    def decision_for(self, model: EagleFSD) -> Decision:
        """Return the acceptance options and the rule as a greedy :class:`Decision`."""
        acceptance = model.acceptance.overridden(self.acceptance)
        return Decision.of(acceptance=acceptance, rule=self.rule_for(model))

    def describe(self, model: EagleFSD, rows: int = 1) -> dict[str, Any]:
        """Return the settings that this method's answers depend on, as JSON values.

        The shape of the tree may depend on ``rows``, the number of prompts decoded at once.
        """
        if self.decoder == "hf":
            found = self.assistant
            assistant = found.config._name_or_path if isinstance(found, PreTrainedModel) else found
            return {"method": "hf", "assistant": assistant}
        if self.decoder == "ar":
            return {"method": "plain"}
        pair = self.pair_for(model)
        acceptance, shape = pair.acceptance, _shape(pair.tree)
        if self.rule is not None or acceptance.rule != "fsd":
            phase = {"phase": list(self.phase)} if self.phase else {}
            rule = self.rule or RULES[acceptance.rule]
            others = acceptance.model_dump(
                include={"fallback", "selection", "price", "max_fuzzy_nats", "exact_first"},
                exclude_defaults=True,
            )
            return {"method": repr(rule), **phase, **shape, **others}
        if acceptance == acceptance.overridden(EAGLE_ACCEPTANCE):
            used = [least for least in sorted(pair.batch_trees) if least <= rows]
            if used:
                shape = _shape(pair.batch_trees[used[-1]])
            trees = {str(least): item.model_dump() for least, item in pair.batch_trees.items()}
            return {"method": "exact", **shape, **({"batch_trees": trees} if trees else {})}
        return {"method": "fsd", **acceptance.model_dump(), **shape}


def _shape(tree: TreeConfig) -> dict[str, int]:
    """Return the shape of a tree under the names of reports, where ``top_k`` is sampling's."""
    return {
        "total_tokens": tree.total_tokens,
        "depth": tree.depth,
        "tree_top_k": tree.top_k,
    }


def fresh_pair(model: EagleFSD) -> EagleFSD:
    """Return a copy of a pair whose drafter has learned nothing."""
    pair = copy.copy(model)
    pair.drafter = model.drafter.fresh().attach(pair.target)
    return pair


PLAIN = Method("plain", decoder="ar")
EXACT = Method("exact", EAGLE_ACCEPTANCE)
FSD = Method("fsd")
HF = Method("hf", decoder="hf")
HF_ASSISTED, HF_LOOKUP = "hf assisted", "hf lookup"
#: FSD until the marker of the final number in answers to the bundled problems and to GSM8K.
BEFORE_RESULT = Method(
    "before ####", RULE_ACCEPTANCE, FuzzyRule(0.2, min_ratio=0.1), phase=(None, "####")
)
#: Priced paths without a gate.
PRICED = [
    Method(
        f"price {price:g}",
        {"threshold": 1.0, "divergence": "js", "min_ratio": 0.0, "fallback": "exact"}
        | {"selection": "priced", "price": price},
    )
    for price in (1.5, 0.75)
]
#: Names of the methods that decode without the pair's drafter.
BASELINES = (PLAIN.name, HF.name, HF_ASSISTED, HF_LOOKUP)


def find_methods(names: Sequence[str | Method]) -> list[Method]:
    """Look up methods by name, without duplicates; methods are passed through."""
    known = {"plain": [PLAIN], "exact": [EXACT], "fsd": [FSD], "hf": [HF], "rules": rule_methods()}
    found: dict[str, Method] = {}
    for name in names:
        if isinstance(name, str) and name not in known:
            raise OptionsError(f"method must be one of {', '.join(METHOD_NAMES)}; got {name!r}")
        for method in known[name] if isinstance(name, str) else [name]:
            if found.setdefault(method.name, method) != method:
                raise OptionsError(f"two methods have the name {method.name!r}")
    return list(found.values())


def decoded_methods(methods: Sequence[Method], model: EagleFSD) -> list[Method]:
    """Drop the method ``fsd`` if ``exact`` is among the methods and has the same settings."""
    repeats = EXACT in methods and FSD.describe(model) == EXACT.describe(model)
    return [method for method in methods if method != FSD or not repeats]


def baseline_methods(model: EagleFSD, assistant: str | None = None) -> list[Method]:
    """Return Hugging Face's ``generate`` and, given an assistant, its assisted generation.

    ``assistant`` is the folder or Hub name of a draft model, or ``"ngram"`` for prompt lookup.
    """
    if assistant is None:
        return [HF]
    if assistant == "ngram":
        return [HF, Method(HF_LOOKUP, decoder="hf", assistant="ngram")]
    draft = load_target(assistant, model.target.dtype, model.target.device)
    size, expected = (
        item.config.get_text_config(decoder=True).vocab_size for item in (draft, model.model)
    )
    if size != expected:
        raise ValueError(
            f"assisted generation requires equal vocabularies; the draft model {assistant} has"
            f" {size} tokens, the target {expected}"
        )
    return [HF, Method(HF_ASSISTED, decoder="hf", assistant=draft)]


def format_number(value: float) -> str:
    """Format a number with six significant digits, or with all of them if six are not exact."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def fsd_method(
    threshold: float, min_ratio: float = 0.0, divergence: str = "js", name_divergence: bool = False
) -> Method:
    """Return FSD at one setting."""
    name = f"T={format_number(threshold)}"
    if name_divergence or divergence != "js":
        name = f"{divergence} {name}"
    if min_ratio:
        name += f" r={format_number(min_ratio)}"
    return Method(name, {"threshold": threshold, "divergence": divergence, "min_ratio": min_ratio})


def given_acceptance(settings: Settings | None) -> AcceptanceConfig:
    """Return the options that settings to compare share: those given, not the drafter's own."""
    return AcceptanceConfig().updated(**settings.acceptance) if settings else AcceptanceConfig()


def fsd_series(grid: GridConfig) -> dict[str, list[Method]]:
    """Return FSD by divergence and increasing floor, each with increasing thresholds above 0."""
    several = len(grid.divergences) > 1
    thresholds = sorted(threshold for threshold in grid.thresholds if threshold > 0.0)
    series = {}
    for divergence in grid.divergences:
        for ratio in sorted(grid.min_ratios):
            name = f"r={format_number(ratio)}"
            series[f"{divergence} {name}" if several else name] = [
                fsd_method(threshold, ratio, divergence, several) for threshold in thresholds
            ]
    return series


def rule_methods() -> list[Method]:
    """Return a method for each of :data:`RULES`, FSD restricted to a phase, and priced paths."""
    return [*map(rule_method, RULES), BEFORE_RESULT, *PRICED]


def rule_method(name: str) -> Method:
    """Return a method for one of :data:`RULES`."""
    # max_fuzzy_nats cannot limit mixtures.
    limits = {"max_fuzzy_nats": None} if name.startswith("mixture") else {}
    return Method(name, {**RULE_ACCEPTANCE, **limits, "rule": name})


def synchronize(model: EagleFSD) -> None:
    """Wait until the target's device, if it is CUDA, has finished, so that timings are correct."""
    if model.target.device.type == "cuda":
        torch.cuda.synchronize(model.target.device)
