"""Ways to decode that are measured side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eagle_fsd.model.decode import EagleFSD
from eagle_fsd.model.loading import load_target
from eagle_fsd.model.rules import BudgetRule, DeferredRule, TargetRule, TopGapRule, TypicalRule
from eagle_fsd.model.settings import FSDSettings
from eagle_fsd.model.stats import DecodeStats

#: Rules of the literature by the name they have in tables, with their published values.
RULES = {
    "typical": TypicalRule(),
    "single": TargetRule(single=0.5),
    "acc": TargetRule(acc=0.5),
    "top-gap": TopGapRule(),
    "budget": BudgetRule(),
    "deferred": DeferredRule(),
}


@dataclass(frozen=True)
class Method:
    """A way to decode.

    Attributes:
        name: In tables and files.
        options: For :meth:`EagleFSD.generate`; None: Hugging Face's own ``generate``.
        assistant: With ``options`` None: a draft model for Hugging Face's assisted generation.
    """

    name: str
    options: dict[str, Any] | None = field(default_factory=dict)
    assistant: PreTrainedModel | None = None

    def describe(self, settings: FSDSettings) -> dict[str, Any]:
        """For files: all that this method's answers depend on, in plain values.

        Args:
            settings: The model's, which the method's own stand above.
        """
        if self.options is None:
            assistant = self.assistant.config._name_or_path if self.assistant else None
            return {"method": "hf", "assistant": assistant}
        if self.options.get("method") == "ar":
            return {"method": "plain"}
        own = {key: value for key, value in self.options.items() if key in settings.as_dict()}
        effective = settings.updated(**own)
        values = effective.as_dict()
        values["tree_top_k"] = values.pop("top_k")  # plain top_k is sampling's
        tree = {key: values[key] for key in ("total_tokens", "depth", "tree_top_k")}
        if "rule" in self.options:
            return {"method": repr(self.options["rule"]), **tree}
        if effective.threshold == 0.0:
            return {"method": "exact", **tree}
        return {"method": "fsd", **values}


PLAIN = Method("plain", {"method": "ar"})
EXACT = Method("exact", {"threshold": 0.0})
HF = Method("hf", None)
HF_ASSISTED = "hf assisted"
#: What speculative decoding is compared with.
BASELINES = (PLAIN.name, HF.name, HF_ASSISTED)


def hugging_face(model: EagleFSD, assistant: str | None = None) -> list[Method]:
    """Hugging Face's own ``generate``, and its assisted generation with a draft model if one is
    named.

    Raises:
        LoadError: The draft model's files are missing or damaged.
        ValueError: Its vocabulary is not the target's.
    """
    if assistant is None:
        return [HF]
    draft = load_target(assistant, model.target.dtype, model.target.device)
    sizes = draft.config.vocab_size, model.model.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the draft model {assistant} has a vocabulary of {sizes[0]}, the target one of"
            f" {sizes[1]}: assisted generation needs the same"
        )
    return [HF, Method(HF_ASSISTED, None, draft)]


def fsd(
    threshold: float, min_ratio: float = 0.0, divergence: str = "js", many: bool = False
) -> Method:
    """FSD at one setting; ``many``: divergences differ in this table, so the name says which."""
    name = f"T={threshold:g}"
    if many or divergence != "js":
        name = f"{divergence} {name}"
    if min_ratio:
        name += f" r={min_ratio:g}"
    options = {"threshold": threshold, "divergence": divergence, "min_ratio": min_ratio}
    return Method(name, options)


def fsd_groups(
    thresholds: Sequence[float], min_ratios: Sequence[float], divergences: Sequence[str]
) -> dict[str, list[Method]]:
    """For every divergence and ratio the thresholds above 0, rising, under a name of the group."""
    many = len(divergences) > 1
    groups = {}
    for divergence in divergences:
        for ratio in min_ratios:
            name = f"{divergence} r={ratio:g}" if many else f"r={ratio:g}"
            rising = sorted(threshold for threshold in thresholds if threshold > 0.0)
            groups[name] = [fsd(threshold, ratio, divergence, many) for threshold in rising]
    return groups


def fsd_grid(
    thresholds: Sequence[float], min_ratios: Sequence[float], divergences: Sequence[str]
) -> list[Method]:
    """Every threshold with every ratio and divergence; ``T = 0`` once, as exact decoding."""
    groups = fsd_groups(thresholds, min_ratios, divergences)
    return [EXACT] * (0.0 in thresholds) + [item for group in groups.values() for item in group]


def rule_methods() -> list[Method]:
    """The literature's rules."""
    return [Method(name, {"threshold": 0.0, "rule": rule}) for name, rule in RULES.items()]


def decode(
    model: EagleFSD, method: Method, ids: Tensor, mask: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None, DecodeStats | None]:
    """New tokens ``[B, S]``, and where the method tells them their origins and statistics.

    Args:
        options: ``max_new_tokens``, ``temperature``, ``top_p``, ``top_k``, ``seed``,
            ``eos_token_id``.
    """
    start = ids.shape[1]
    if method.options is not None:
        out = model.generate(ids, mask, **{**options, **method.options})
        return out.sequences[:, start:], out.origins, out.stats
    temperature = options.get("temperature", 0.0)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature}
        sampling |= {"top_p": options.get("top_p", 1.0), "top_k": options.get("top_k", 0)}
        if options.get("seed") is not None:
            torch.manual_seed(options["seed"])
    if options.get("eos_token_id") is not None:
        sampling["eos_token_id"] = options["eos_token_id"]
    sequences = model.model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=options.get("max_new_tokens", 256),
        assistant_model=method.assistant,
        **sampling,
    )
    return sequences[:, start:], None, None


def synchronise(model: EagleFSD) -> None:
    """Wait for the device, so that a clock read next tells the truth."""
    if model.target.device.type == "cuda":
        torch.cuda.synchronize(model.target.device)


def count_new(new: Tensor, ends: Sequence[int]) -> int:
    """Tokens of one answer up to and with the first of ``ends``: the same for every method."""
    found = torch.isin(new, torch.tensor(ends, dtype=new.dtype, device=new.device)).nonzero()
    return int(found[0]) + 1 if len(found) else len(new)
