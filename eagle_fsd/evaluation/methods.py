"""Ways to decode that are measured side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from eagle_fsd.model.acceptance import BudgetRule, DeferredRule, TargetRule, TopGapRule, TypicalRule
from eagle_fsd.model.config import FSDSettings
from eagle_fsd.model.loading import load_target
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.stats import DecodeStats
from eagle_fsd.model.verify import Origin

#: Rules of the literature by the name they have in tables: with their published values, where there
#: are any, and beside them stricter or laxer ones, as FSD has several thresholds. (SGLang switches
#: its two off by default. When greedy, ``single`` above a half lets nothing pass that is not the
#: target's own.)
RULES = {
    "typical": TypicalRule(),
    "typical 0.03": TypicalRule(epsilon=0.1, delta=0.03),
    "single 0.4": TargetRule(single=0.4),
    "single 0.2": TargetRule(single=0.2),
    "acc 0.5": TargetRule(acc=0.5),
    "acc 0.2": TargetRule(acc=0.2),
    "top-gap": TopGapRule(),
    "top-gap 0.3": TopGapRule(gap=0.3),
    "budget": BudgetRule(),
    "budget 0.02": BudgetRule(budget=0.02),
    "deferred": DeferredRule(),
    "deferred 0.1": DeferredRule(entropy=0.1, window=3),
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
        if effective == effective.updated(**EAGLE_WALK):
            return {"method": "exact", **tree}
        return {"method": "fsd", **values}


PLAIN = Method("plain", {"method": "ar"})
#: What FSD's settings may change of the walk down the tree, as EAGLE-2 has it: what is compared
#: with FSD stays what it is whatever FSD is set to.
EAGLE_WALK = {"threshold": 0.0, "fallback": "exact", "selection": "longest"}
EXACT = Method("exact", EAGLE_WALK)
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


def short(value: float) -> str:
    """``value`` in as few digits as tell it from any other."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def fsd(
    threshold: float, min_ratio: float = 0.0, divergence: str = "js", many: bool = False
) -> Method:
    """FSD at one setting; ``many``: divergences differ in this table, so the name says which."""
    name = f"T={short(threshold)}"
    if many or divergence != "js":
        name = f"{divergence} {name}"
    if min_ratio:
        name += f" r={short(min_ratio)}"
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
            name = f"{divergence} r={short(ratio)}" if many else f"r={short(ratio)}"
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
    return [Method(name, {**EAGLE_WALK, "rule": rule}) for name, rule in RULES.items()]


@dataclass(frozen=True)
class Decoded:
    """What came of one call.

    Attributes:
        tokens: The new tokens of each row, up to and with the first that ends it: what is counted,
            the same for every method.
        origins: Where they came from, and ``stats``: None where the method tells none.
    """

    tokens: list[Tensor]
    origins: list[list[int]] | None
    stats: DecodeStats | None


def decode(
    model: EagleFSD,
    method: Method,
    ids: Tensor,
    mask: Tensor,
    ends: Sequence[int],
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int | None = None,
    stopping_criteria: Sequence[StoppingCriteria] = (),
) -> Decoded:
    """Decode ``ids`` ``[B, S]`` with ``method``; the options are :meth:`EagleFSD.generate`'s.

    Args:
        ends: Ids that end a row.
    """
    start = ids.shape[1]
    criteria = StoppingCriteriaList(stopping_criteria)
    if method.options is not None:
        out = model.generate(
            ids,
            mask,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            eos_token_id=list(ends),
            stopping_criteria=criteria,
            **method.options,
        )
        counts = (out.origins != Origin.PADDING).sum(1).tolist()
        rows = zip(out.sequences[:, start:], out.origins, counts, strict=True)
        kept = [(new[:count], origins[:count].tolist()) for new, origins, count in rows]
        return Decoded([new for new, _ in kept], [origins for _, origins in kept], out.stats)
    if temperature and seed is not None:
        torch.manual_seed(seed)
    pad = _padding(model, ends)
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k} if temperature else {}
    with _configured(
        model.model,
        GenerationConfig(
            do_sample=bool(temperature),
            eos_token_id=list(ends) or None,
            pad_token_id=pad,
            bos_token_id=model.model.generation_config.bos_token_id,
            max_new_tokens=max_new_tokens,
            **sampling,
        ),
    ):
        sequences = model.model.generate(
            ids,
            attention_mask=mask,
            assistant_model=method.assistant,
            stopping_criteria=criteria,
        )
    counts = [_count_new(row, ends, pad) for row in sequences[:, start:]]
    new = [row[:count] for row, count in zip(sequences[:, start:], counts, strict=True)]
    return Decoded(new, None, None)


@contextmanager
def _configured(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """``generate`` with ``config`` alone.

    What the target's own generation configuration asks for beside it (a repetition penalty, a
    sampling law of its own) would make Hugging Face decode from another law than everybody else;
    ``generate`` fills in from there whatever a configuration that it is handed leaves open.
    """
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


def _padding(model: EagleFSD, ends: Sequence[int]) -> int | None:
    """What Hugging Face fills rows with that ended before others: not an end, if there is one."""
    known = getattr(model, "tokenizer", None)
    found = [known.pad_token_id, known.unk_token_id] if known is not None else []
    found += [model.model.generation_config.pad_token_id, *ends]
    usable = [item for item in found if item is not None]
    return next((item for item in usable if item not in ends), next(iter(usable), None))


def _count_new(new: Tensor, ends: Sequence[int], pad: int | None) -> int:
    """Tokens of one row up to and with the first of ``ends``; without one, up to its padding.

    (A row that a stop string ended is padded with ``pad``; where that is an end itself, one of
    them is counted.)
    """
    found = torch.isin(new, torch.tensor(list(ends), dtype=new.dtype, device=new.device)).nonzero()
    if len(found):
        return int(found[0]) + 1
    kept = (new != pad).nonzero() if pad is not None else torch.tensor([[len(new) - 1]])
    return int(kept[-1]) + 1 if len(kept) else 0


def synchronise(model: EagleFSD) -> None:
    """Wait for the device, so that a clock read next tells the truth."""
    if model.target.device.type == "cuda":
        torch.cuda.synchronize(model.target.device)
