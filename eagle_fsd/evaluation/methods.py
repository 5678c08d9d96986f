"""Decoding methods to compare."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from eagle_fsd.evaluation.config import METHOD_NAMES, GridConfig
from eagle_fsd.model.acceptance import RULES, FuzzyRule, PhaseRule
from eagle_fsd.model.config import AcceptanceConfig, Settings, TreeConfig, settings_dict
from eagle_fsd.model.loading import load_target
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.verify import AcceptanceRule
from eagle_fsd.utils.options import OptionsError

#: Acceptance settings of EAGLE-2, used by the methods that FSD is compared with.
EAGLE_ACCEPTANCE: dict[str, Any] = {
    "threshold": 0.0,
    "fallback": "exact",
    "selection": "longest",
    "max_fuzzy_nats": None,
}


@dataclass(frozen=True)
class Method:
    """A decoding method.

    Attributes:
        name: Name in tables and files.
        acceptance: Fields of :class:`AcceptanceConfig` that override the model's.
        rule: Acceptance rule to use instead of the one that ``acceptance`` selects.
        decoder: ``"fsd"`` or ``"ar"``, the ``method`` of :meth:`EagleFSD.generate`; or ``"hf"`` for
            Hugging Face's ``generate``.
        assistant: Draft model for Hugging Face's assisted generation.
        tree: Shape of the draft tree; default: the model's, which may depend on the batch.
        phase: Markers at the beginning of a line between which ``rule`` applies; without the first
            one, it applies from the beginning of the answer. Of a marker of several tokens, the
            last one counts.
    """

    name: str
    acceptance: dict[str, Any] = field(default_factory=dict)
    rule: AcceptanceRule | None = None
    decoder: Literal["fsd", "ar", "hf"] = "fsd"
    assistant: PreTrainedModel | None = None
    phase: tuple[str | None, str] | None = None
    tree: TreeConfig | None = None

    def pair_for(self, model: EagleFSD) -> EagleFSD:
        """Return the pair with this method's acceptance settings and tree.

        Args:
            model: The pair, which is not changed.
        """
        pair = copy.copy(model)
        pair.acceptance = model.acceptance.overridden(self.acceptance)
        pair.tree = self.tree or model.tree_for(pair.acceptance)
        if self.tree is None:
            pair.batch_trees = model.batch_trees
        return pair

    def rule_for(self, model: EagleFSD) -> AcceptanceRule | None:
        """Return the rule, restricted to the phase if there is one.

        Args:
            model: The pair, whose tokenizer knows the markers.
        """
        if self.rule is None or self.phase is None:
            return self.rule
        encode = model.tokenizer.encode
        begin, end = (
            None if marker is None else encode(f"\n{marker}", add_special_tokens=False)[-1]
            for marker in self.phase
        )
        assert end is not None
        return PhaseRule(self.rule, begin, end)

    def describe(self, model: EagleFSD, rows: int = 1) -> dict[str, Any]:
        """Return the settings that this method's answers depend on, as JSON values.

        Args:
            model: The pair, whose settings the method's override.
            rows: Number of prompts that are decoded at once, for the shape of the tree.
        """
        if self.decoder == "hf":
            assistant = self.assistant.config._name_or_path if self.assistant else None
            return {"method": "hf", "assistant": assistant}
        if self.decoder == "ar":
            return {"method": "plain"}
        pair = self.pair_for(model)
        values = settings_dict(pair.tree, pair.acceptance)
        values["tree_top_k"] = values.pop("top_k")  # "top_k" is sampling's
        shape = {name: values[name] for name in ("total_tokens", "depth", "tree_top_k")}
        if self.rule is not None or pair.acceptance.rule != "fsd":
            phase = {"phase": list(self.phase)} if self.phase else {}
            rule = self.rule or RULES[pair.acceptance.rule]
            others = pair.acceptance.model_dump(
                include={"fallback", "selection", "price", "max_fuzzy_nats"}, exclude_defaults=True
            )
            return {"method": repr(rule), **phase, **shape, **others}
        if pair.acceptance == pair.acceptance.overridden(EAGLE_ACCEPTANCE):
            used = [least for least in sorted(pair.batch_trees) if least <= rows]
            tree = pair.batch_trees[used[-1]] if used else pair.tree
            shape = dict(zip(shape, (tree.total_tokens, tree.depth, tree.top_k), strict=True))
            trees = {str(least): item.model_dump() for least, item in pair.batch_trees.items()}
            batch = {"batch_trees": trees} if trees else {}
            return {"method": "exact", **shape, **batch}
        return {"method": "fsd", **values}


PLAIN = Method("plain", decoder="ar")
EXACT = Method("exact", EAGLE_ACCEPTANCE)
FSD = Method("fsd")
HF = Method("hf", decoder="hf")
HF_ASSISTED = "hf assisted"
#: FSD until the marker of the final number in answers to the bundled problems and to GSM8K.
BEFORE_RESULT = Method(
    "before ####", EAGLE_ACCEPTANCE, FuzzyRule(0.2, min_ratio=0.1), phase=(None, "####")
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
#: Names of the methods that decode without a draft head.
BASELINES = (PLAIN.name, HF.name, HF_ASSISTED)


def find_methods(names: Sequence[str | Method]) -> list[Method]:
    """Look up methods by name.

    Args:
        names: Names from :data:`~eagle_fsd.evaluation.config.METHOD_NAMES`; methods are passed
            through.

    Returns:
        The methods without duplicates; ``"rules"`` stands for all of :data:`RULES`.

    Raises:
        OptionsError: A name is unknown.
    """
    known = {"plain": [PLAIN], "exact": [EXACT], "fsd": [FSD], "hf": [HF], "rules": rule_methods()}
    found: dict[str, Method] = {}
    for name in names:
        if isinstance(name, str) and name not in known:
            raise OptionsError(f"method must be one of {', '.join(METHOD_NAMES)}; got {name!r}")
        for method in known[name] if isinstance(name, str) else [name]:
            found.setdefault(method.name, method)
    return list(found.values())


def decoded_methods(methods: Sequence[Method], model: EagleFSD) -> list[Method]:
    """Drop the method ``fsd`` if it has no threshold, and ``exact`` decodes the same anyway.

    Args:
        methods: The methods.
        model: The pair.
    """
    repeats = EXACT in methods and FSD.describe(model) == EXACT.describe(model)
    return [method for method in methods if method != FSD or not repeats]


def baseline_methods(model: EagleFSD, assistant: str | None = None) -> list[Method]:
    """Return Hugging Face's ``generate`` and, given a draft model, its assisted generation.

    Args:
        model: The pair that is evaluated.
        assistant: Folder or Hub name of the draft model.

    Raises:
        LoadError: The draft model's files are missing or damaged.
        ValueError: Its vocabulary size differs from the target's.
    """
    if assistant is None:
        return [HF]
    draft = load_target(assistant, model.target.dtype, model.target.device)
    size, expected = draft.config.vocab_size, model.model.config.vocab_size
    if size != expected:
        raise ValueError(
            f"assisted generation requires equal vocabularies; the draft model {assistant} has"
            f" {size} tokens, the target {expected}"
        )
    return [HF, Method(HF_ASSISTED, decoder="hf", assistant=draft)]


def format_number(value: float) -> str:
    """Format a number with six significant digits, or with all of them if six are not exact.

    Args:
        value: The number.
    """
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def fsd_method(
    threshold: float,
    min_ratio: float = 0.0,
    divergence: str = "js",
    name_divergence: bool = False,
) -> Method:
    """Return FSD at one setting.

    Args:
        threshold: The threshold T.
        min_ratio: The floor.
        divergence: Name of the divergence that is compared with T.
        name_divergence: Include the divergence in the method's name even if it is ``"js"``.
    """
    name = f"T={format_number(threshold)}"
    if name_divergence or divergence != "js":
        name = f"{divergence} {name}"
    if min_ratio:
        name += f" r={format_number(min_ratio)}"
    return Method(name, {"threshold": threshold, "divergence": divergence, "min_ratio": min_ratio})


def given_acceptance(settings: Settings | None) -> AcceptanceConfig:
    """Return the options that all settings to compare share: those given, no calibrated ones.

    Args:
        settings: Options of the command line or of a file that it names.
    """
    return AcceptanceConfig().updated(**settings.acceptance) if settings else AcceptanceConfig()


def fsd_series(grid: GridConfig) -> dict[str, list[Method]]:
    """Return FSD at every setting of a grid, except thresholds of 0, which mean exact decoding.

    Args:
        grid: The settings.

    Returns:
        A series of methods with increasing thresholds for every divergence and floor, by name.
    """
    several = len(grid.divergences) > 1
    thresholds = sorted(threshold for threshold in grid.thresholds if threshold > 0.0)
    series = {}
    for divergence in grid.divergences:
        for ratio in grid.min_ratios:
            name = f"r={format_number(ratio)}"
            series[f"{divergence} {name}" if several else name] = [
                fsd_method(threshold, ratio, divergence, several) for threshold in thresholds
            ]
    return series


def rule_methods() -> list[Method]:
    """Return a method for each of :data:`RULES`, FSD restricted to a phase, and priced paths."""
    return [*map(rule_method, RULES), BEFORE_RESULT, *PRICED]


def rule_method(name: str) -> Method:
    """Return a method for one of :data:`RULES`.

    Args:
        name: The rule's name, which is also the method's.
    """
    return Method(name, {**EAGLE_ACCEPTANCE, "rule": name})


def synchronize(model: EagleFSD) -> None:
    """Wait until the target's device has finished its work, so that timings are correct.

    Args:
        model: The pair.
    """
    if model.target.device.type == "cuda":
        torch.cuda.synchronize(model.target.device)
