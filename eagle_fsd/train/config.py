"""Options of training and related commands. This module imports neither torch nor transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, model_validator

from eagle_fsd.model.config import (
    DrafterName,
    SamplingConfig,
    TargetOptions,
    find_divergence,
)
from eagle_fsd.utils.options import ExistingPath, Options
from eagle_fsd.utils.text import one_line

HeadType = Literal["eagle", "eagle3"]
#: Published learning rates, and the hidden size that they were published for (7B and 8B Llamas).
PUBLISHED_LR = {"eagle": 3e-5, "eagle3": 5e-5}
PUBLISHED_HIDDEN_SIZE = 4096
#: Options whose defaults are different for EAGLE-3 heads: those of its authors' training script.
EAGLE3_DEFAULTS: dict[str, float] = {
    "weight_decay": 0.0,
    "noise": 0.0,
    "feature_weight": 0.0,
    "token_weight": 1.0,
    "divergence_weight": 0.0,
    "unroll": 7,
    "unroll_decay": 0.8,
}
#: Options that are fields of :class:`~eagle_fsd.model.drafters.eagle3.Eagle3Flags`.
EAGLE3_FLAGS = ("fc_norm", "norm_output", "norm_before_residual")
#: By default, there are as many epochs as read so many tokens in all, within these bounds.
MIN_EPOCHS, MAX_EPOCHS, TRAINED_TOKENS = 4, 20, 12_000_000
#: Largest vocabulary of an EAGLE-3 head by default.
DRAFT_VOCAB_SIZE = 32_000

#: Divergences that can be part of the loss: those over all tokens but ``js_reference``.
DivergenceLoss = Literal["js", "tv", "kl", "kl_reversed"]


CHATS_DESCRIPTION = "Chats in ShareGPT's or OpenAI's layout, JSON or JSON Lines."
MaxLength = Annotated[
    int, Field(ge=8, le=1_048_576, description="Tokens per chat; longer chats are truncated.")
]
HEAD_TYPE_DESCRIPTION = "Kind of head: eagle (EAGLE-1/2) or eagle3."
BatchSize = Annotated[int, Field(ge=1, le=4096)]
Steps = Annotated[int, Field(ge=1, le=10**9)]
Weight = Annotated[float, Field(ge=0.0, le=1e6)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Temperature = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
DeviceMap = Annotated[
    str | None,
    Field(
        description="Where the target goes, as in Hugging Face: cpu, cuda:1, auto, balanced, ...;"
        " default: the GPU if there is one."
    ),
]

ExportFormat = Literal["eagle", "sglang", "vllm", "speculators"]


class TrainConfig(Options):
    """Hyperparameters for training a draft head.

    Most defaults are EAGLE's (arXiv 2401.15077, appendix, and the authors' training script), but
    the learning rate is scaled to the hidden size, long training texts are read in fewer epochs,
    the half-width of the noise is 0.1 for every chat, gradients are clipped by their norm, and
    ``fc`` has no bias. The divergence loss is an addition; it increased the accepted length on the
    bundled target (``docs/results.md``). With ``head_type="eagle3"``, the options in
    :data:`EAGLE3_DEFAULTS` have those defaults (``eagle/traineagle3`` in the authors' repository).
    """

    head_type: HeadType = Field("eagle", description=HEAD_TYPE_DESCRIPTION)
    draft_vocab_size: int | None = Field(
        None,
        ge=1,
        le=2**31,
        description="Tokens that the head can draft: the most frequent ones of the training text's"
        f" answers; default: all, but at most {DRAFT_VOCAB_SIZE} with eagle3.",
    )
    fc_norm: bool = Field(
        False, description="eagle3: norm each hidden state by itself before fc (EAGLE-3.1)."
    )
    norm_output: bool = Field(
        False, description="eagle3: norm the head's output before it is its next input (EAGLE-3.1)."
    )
    norm_before_residual: bool = Field(
        False, description="eagle3: add the normed input to the attention's output, not the input."
    )
    epochs: int | None = Field(
        None,
        ge=1,
        le=10_000,
        description=f"Passes over the chats; default: {MAX_EPOCHS}, and for more than"
        f" {TRAINED_TOKENS // MAX_EPOCHS:,} tokens as many as make {TRAINED_TOKENS:,}, but at least"
        f" {MIN_EPOCHS}.",
    )
    max_steps: int | None = Field(
        None, ge=1, description="Stop after this many optimizer steps; default: no limit."
    )
    batch_size: BatchSize = Field(4, description="Chats per batch and process.")
    tokens_per_batch: int | None = Field(
        None,
        ge=8,
        le=2**31,
        description="Tokens per batch and process, padding included; replaces --batch-size.",
    )
    accumulate: BatchSize = Field(1, description="Batches per optimizer step.")
    max_length: MaxLength = 2048
    lr: float | None = Field(
        None,
        ge=0.0,
        le=1.0,
        description="Peak learning rate; default: the published 3e-5 (eagle3: 5e-5), scaled to the"
        " target's hidden size.",
    )
    warmup: int = Field(
        2000, ge=0, le=10**9, description="Warm-up steps, at most a tenth of all steps."
    )
    weight_decay: Share = Field(0.01, description="Weight decay of AdamW; eagle3: 0 by default.")
    beta1: float = Field(0.9, ge=0.0, le=0.9999, description="First beta of AdamW.")
    beta2: float = Field(0.95, ge=0.0, le=0.99999, description="Second beta of AdamW.")
    clip: float = Field(0.5, gt=0.0, description="Maximum norm of the gradient.")
    noise: float = Field(
        0.1,
        ge=0.0,
        le=10.0,
        description="Half-width of the uniform noise added to the features; eagle3: 0 by default.",
    )
    feature_weight: Weight = Field(
        1.0, description="Weight of the smooth-L1 loss on the features; eagle3: always 0."
    )
    token_weight: Weight = Field(
        0.1,
        description="Weight of the cross-entropy with the target's distribution; eagle3: 1 by"
        " default.",
    )
    divergence_weight: Weight = Field(
        1.0, description="Weight of the divergence between target and draft; eagle3: 0 by default."
    )
    divergence_loss: Annotated[DivergenceLoss, find_divergence] = Field(
        "js", description="Divergence used as a loss."
    )
    unroll: int = Field(
        1,
        ge=1,
        le=8,
        description="Runs of the head over each chat. All but the first read the features that the"
        " one before predicted; gradients flow back through all of them. eagle3: 7 by default.",
    )
    unroll_decay: Share = Field(
        1.0, description="Weight of each run relative to the one before; eagle3: 0.8 by default."
    )
    bias: bool = Field(
        False, description="Give the fc layer of an eagle head a bias (vLLM's has none)."
    )
    seed: int = Field(
        0, ge=0, le=2**31 - 1, description="Seed of the weights, the order and the noise."
    )
    validation: int = Field(
        32, ge=0, le=100_000, description="Chats held out for validation, at most a tenth of all."
    )
    validate_every: Steps = Field(1000, description="Steps between validations.")
    checkpoint_every: Steps = Field(500, description="Steps between checkpoints.")
    log_every: Steps = Field(10, description="Steps between lines of metrics.")
    workers: int = Field(0, ge=0, le=256, description="Processes that read and tokenize chats.")
    compile: bool = Field(
        False, description="Compile the decoder layers (on a CPU this needs a C++ compiler)."
    )

    @model_validator(mode="after")
    def _apply_head_type(self) -> TrainConfig:
        if self.head_type == "eagle":
            for name in EAGLE3_FLAGS:
                if getattr(self, name):
                    raise ValueError(f"{name} requires head_type eagle3")
            return self
        for name, value in EAGLE3_DEFAULTS.items():
            if name not in self.model_fields_set:
                object.__setattr__(self, name, value)
        if self.feature_weight:
            raise ValueError(
                "feature_weight must be 0 with head_type eagle3, which predicts no features; got"
                f" {self.feature_weight:g}"
            )
        if self.bias:
            raise ValueError("bias requires head_type eagle")
        return self

    def updated(self, **changes: Any) -> TrainConfig:
        """See :meth:`Options.updated`; options that were not set keep following ``head_type``."""
        given = {name: value for name, value in changes.items() if value is not None}
        return type(self).from_dict({**self.model_dump(exclude_unset=True), **given})

    def count_epochs(self, tokens: int) -> int:
        """Return ``epochs``, or the default for chats of so many tokens."""
        if self.epochs is not None:
            return self.epochs
        return min(MAX_EPOCHS, max(MIN_EPOCHS, -(-TRAINED_TOKENS // max(1, tokens))))

    def learning_rate(self, hidden_size: int) -> float:
        """Return the peak learning rate: ``lr``, or the published one times 4096 / ``hidden_size``.

        With Adam, the best learning rate falls as layers get wider.
        """
        if self.lr is not None:
            return self.lr
        return PUBLISHED_LR[self.head_type] * PUBLISHED_HIDDEN_SIZE / hidden_size

    def learning_rate_factor(self, step: int, total: int) -> float:
        """Return the learning rate relative to its peak: linear warm-up, then linear decay to 0."""
        warmup = min(self.warmup, total // 10)
        if step < warmup:
            return (step + 1) / warmup
        return (total - step) / (total - warmup)


class PartialTrainConfig(TrainConfig):
    """Hyperparameters from one of several sources; combinations are checked after merging them."""

    @model_validator(mode="after")
    def _apply_head_type(self) -> PartialTrainConfig:
        return self


def _is_exponential(value: Any) -> bool:
    return isinstance(value, str) and bool(
        re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+", value)
    )


def read_config(path: str | Path) -> dict[str, Any]:
    """Read options of :class:`TrainConfig` from a YAML file; return those that it sets."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        if not isinstance(values, dict | None):
            raise ValueError("not a mapping of option names to values")
        # PyYAML reads 1e-3 and 1.0e3, unlike 1.0e-3, as strings.
        values = {
            str(name): float(value) if _is_exponential(value) else value
            for name, value in (values or {}).items()
        }
        return PartialTrainConfig.from_dict(values).model_dump(exclude_unset=True)
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {one_line(error)}") from error


class TrainRequest(TargetOptions):
    """A training to run: its data, its target and the output folder."""

    data: ExistingPath | None = Field(None, description=CHATS_DESCRIPTION)
    features: ExistingPath | None = Field(
        None, description="Instead of --data: a folder written by eagle-fsd train features."
    )
    device_map: DeviceMap = None
    out: Path = Field(description="Folder for the head, its checkpoints and metrics.")
    head: DrafterName | None = Field(
        None, description="Head to start from: a folder or a Hub name; default: random weights."
    )
    store_features: bool = Field(
        False,
        description="Compute the target's features once, not in every epoch; keep them in --out, in"
        " bfloat16, until the end. --dtype is then bfloat16 by default on an x86 CPU that is faster"
        " in it.",
    )
    regenerate: bool = Field(
        False, description="First have the target rewrite the assistant's answers in --data."
    )
    resume: bool = Field(False, description="Resume from the newest checkpoint in --out, if any.")
    overwrite: bool = Field(False, description="Delete --out, if it holds an earlier training.")
    binary: bool = Field(
        False, description="Write pytorch_model.bin, which EAGLE's own code reads."
    )

    @model_validator(mode="after")
    def _check_source(self) -> TrainRequest:
        if (self.data is None) == (self.features is None):
            raise ValueError("training requires either --data or --features")
        for name in ("regenerate", "store_features"):
            if getattr(self, name) and self.data is None:
                raise ValueError(f"--{name.replace('_', '-')} requires --data")
        if self.resume and self.overwrite:
            raise ValueError("--resume and --overwrite exclude each other")
        for name in ("data", "features"):
            source: Path | None = getattr(self, name)
            inside = source is not None and source.resolve().is_relative_to(self.out.resolve())
            # A training's own store of features is deleted at its end.
            if inside and (self.overwrite or name == "features"):
                raise ValueError(
                    f"--{name} must not be in --out, or it would be deleted; got {source}"
                )
        return self


class FeaturesRequest(TargetOptions):
    """Features to store: the chats, the target and the output folder."""

    data: ExistingPath = Field(description=CHATS_DESCRIPTION)
    device_map: DeviceMap = None
    out: Path = Field(description="Folder for the features; an interrupted run resumes there.")
    head_type: HeadType = Field("eagle", description=HEAD_TYPE_DESCRIPTION)
    max_length: MaxLength = 2048
    batch_size: BatchSize = Field(4, description="Chats per forward pass.")


class RanksRequest(TargetOptions):
    """Chats whose answers rank the tokens: the input file, the target and the output file."""

    data: ExistingPath = Field(description=CHATS_DESCRIPTION)
    out: Path = Field(description="File to write: token_ranks.safetensors in the head's folder.")
    max_length: MaxLength = 2048


class RegenerateRequest(TargetOptions):
    """Chats to rewrite: the input file, the target and the output file."""

    data: ExistingPath = Field(description=CHATS_DESCRIPTION)
    device_map: DeviceMap = None
    out: Path = Field(description="JSON Lines file to write; an interrupted run resumes there.")


class RegenerateServer(Options):
    """An OpenAI-compatible server of the target, which writes turns without loading it here."""

    base_url: str | None = Field(
        None,
        description="Have an OpenAI-compatible server write the turns, instead of loading the"
        " target: its URL up to and including /v1.",
    )
    model: str | None = Field(None, description="With --base-url: the target's name there.")
    api_key_env: str = Field(
        "OPENAI_API_KEY", description="Environment variable with the server's key, if it needs one."
    )
    concurrency: int = Field(16, ge=1, le=1024, description="Chats written at once by a server.")
    timeout: float = Field(600.0, gt=0.0, description="Seconds to wait for a server's reply.")
    retries: int = Field(
        5,
        ge=0,
        le=1000,
        description="Retries of a request that fails with status 429 or 5xx, or that a server does"
        " not answer.",
    )

    @model_validator(mode="after")
    def _check_model(self) -> RegenerateServer:
        if (self.base_url is None) != (self.model is None):
            raise ValueError("--base-url and --model require each other")
        if self.base_url is None and (given := self.model_fields_set - {"base_url", "model"}):
            raise ValueError(f"--{min(given).replace('_', '-')} requires --base-url")
        return self


class RegenerateConfig(SamplingConfig):
    """Sampling, length and batch size of rewritten turns."""

    temperature: Temperature = Field(
        0.7, description="Sampling temperature of answers; 0 is greedy decoding."
    )
    seed: int = Field(0, ge=0, le=2**31, description="Seed of sampling.")
    batch_size: BatchSize = Field(16, description="Chats that the loaded target writes at once.")
    max_new_tokens: int = Field(512, ge=1, description="Maximum number of new tokens per turn.")


class SynthesizeRequest(TargetOptions):
    """Chats to write: their number, the target and the output file."""

    out: Path = Field(description="JSON Lines file to write; an interrupted run resumes there.")
    count: int = Field(1000, ge=1, description="Number of usable chats.")
    dtype: str | None = Field(
        None,
        description="float32, bfloat16 or float16; default: bfloat16 on an x86 CPU that is faster"
        " in it, else float32 on a CPU and the checkpoint's on a GPU.",
    )
    device_map: DeviceMap = None


class SynthesizeConfig(RegenerateConfig):
    """Sampling, length and subjects of chats that the target writes."""

    user_temperature: Temperature = Field(1.0, description="Sampling temperature of user messages.")
    user_top_p: float = Field(
        0.9, gt=0.0, le=1.0, description="Nucleus of user messages; 1 is off."
    )
    max_user_tokens: int = Field(
        256, ge=1, description="Maximum number of new tokens per user message."
    )
    turns: int = Field(1, ge=1, le=64, description="Maximum number of exchanges per chat.")
    system: tuple[str, ...] = Field(
        (), description="System prompts, which chats use in turn; default: the template's."
    )
    prefix: tuple[str, ...] = Field(
        (),
        description="Beginnings of the first user message, which chats use in turn, to choose"
        " languages or subjects.",
    )
    batch_size: BatchSize = Field(32, description="Chats that the loaded target writes at once.")


class ExportRequest(TargetOptions):
    """A trained head to convert, the engine to convert it for, and the output folder."""

    head: DrafterName = Field(description="The trained head: a folder or a Hub name.")
    out: Path = Field(description="Folder to write, empty or new.")
    format: ExportFormat = Field(description="Engine that will read the head.")
    dtype: str | None = Field(
        None, description="Data type that the target is loaded in; the head keeps its own."
    )
    chat_template: str | None = Field(
        None, description="Accepted as in the other commands; no chat is formatted."
    )
