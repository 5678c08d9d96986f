"""Options of evaluation, sweep, calibration and benchmark.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator
from typing_extensions import Self

from eagle_fsd.model.config import (
    AcceptanceConfig,
    DivergenceName,
    PairOptions,
    SamplingConfig,
    find_divergence,
)
from eagle_fsd.utils.options import ExistingFile, Options, OptionsError

MethodName = Literal["plain", "exact", "fsd", "hf", "rules"]
METHOD_NAMES: tuple[str, ...] = get_args(MethodName)
EngineName = Literal["vllm", "sglang", "tensorrt-llm"]
Measure = Literal["accuracy", "agreement", "regret"]
DEFAULT_METHODS: tuple[MethodName, ...] = ("plain", "exact", "fsd")


class EvaluationRequest(PairOptions):
    """What to evaluate, with which pair, and where the results go."""

    questions: str = Field(
        "bundled",
        description="Question set: bundled, bundled-edits, mt-bench, spec-bench, gsm8k,"
        " gsm8k-train, commonsense-qa, mmlu, humaneval, ifeval, or a file (see evaluate"
        " --formats).",
    )
    count: int | None = Field(
        None,
        ge=1,
        description="Number of questions, spread evenly over the set's categories; default: all"
        " of them, of bundled 100 (calibrate 2000, bench 20) and bundled-edits 100; for tune 32.",
    )
    skip: int = Field(
        0,
        ge=0,
        description="Leave out this many questions, such as those of a run with this --count.",
    )
    grader: str | None = Field(
        None,
        description="How answers are scored: exact, regex, number, strict-match, flexible-extract,"
        " or FILE.py:FUNCTION; default: as the question set says.",
    )
    system: str | None = Field(
        None, description="System prompt of every chat that has none of its own."
    )
    few_shot: int | None = Field(
        None,
        ge=0,
        le=100,
        description="Show this many worked examples, the set's first questions with an answer,"
        " before every question. Required without a chat template, of the target or by"
        " --conv-template; 0 then continues the prompt as it is.",
    )
    out: Path | None = Field(
        None,
        description="Folder for the results, from which an interrupted run resumes; default:"
        " runs/COMMAND/QUESTIONS (with servers: runs/servers/QUESTIONS); bench keeps nothing.",
    )
    baseline: Literal["hf"] | None = Field(
        None, description="'hf': also measure Hugging Face's generate."
    )
    assistant: str | None = Field(
        None,
        description="With --baseline hf: also measure its assisted generation with this draft"
        " model, a folder or a Hub name, or with its prompt lookup (ngram).",
    )
    execute_code: bool = Field(
        False,
        description="Run the code in answers to humaneval, or to a file in its format, in a sandbox"
        " of bubblewrap. Where bubblewrap is missing or does not work, this is not a security"
        " boundary and requires --unsafe.",
    )
    unsafe: bool = Field(
        False,
        description="With --execute-code: run the code even where there is no sandbox. It can then"
        " read your files and environment and use the network.",
    )
    judge_base_url: str | None = Field(
        None,
        description="OpenAI-compatible endpoint whose model rates the answers with FastChat's"
        " prompts; OPENAI_API_KEY holds its key.",
    )
    judge_model: str = Field("gpt-4", description="Name of the judge at that endpoint.")
    judge_mode: Literal["single", "pair"] = Field(
        "single",
        description="'single' rates each answer from 1 to 10, 'pair' compares it with exact"
        " decoding's (with servers: the first one's) in both orders.",
    )
    judge_parallel: int = Field(4, ge=1, description="Concurrent requests to the judge.")

    @model_validator(mode="after")
    def _check_dependent(self) -> EvaluationRequest:
        if self.assistant and not self.baseline:
            raise ValueError("--assistant requires --baseline hf")
        if self.unsafe and not self.execute_code:
            raise ValueError("--unsafe requires --execute-code")
        names = {"judge_model", "judge_mode", "judge_parallel"}
        given = self.model_dump(include=names, exclude_defaults=True)
        if given and not self.judge_base_url:
            raise ValueError(f"--{min(given).replace('_', '-')} requires --judge-base-url")
        return self

    def without_judge(self) -> Self:
        """Return a copy whose answers are not judged."""
        fields = type(self).model_fields.items()
        judge = {name: field.default for name, field in fields if name.startswith("judge_")}
        return self.model_copy(update=judge)

    def output_folder(self, command: str) -> Path:
        """Return the folder for results."""
        return self.out or Path("runs") / command / Path(self.questions).name.split(".")[0]


class EvaluationConfig(SamplingConfig):
    """How answers are decoded, the same for every method."""

    max_new_tokens: int = Field(512, ge=1, description="Maximum number of new tokens per turn.")
    seed: int = Field(0, ge=0, le=2**31, description="Seed of sampling and of bundled questions.")
    batch: int = Field(
        1, ge=1, le=1024, description="Answers decoded at once; speeds are for this batch size."
    )
    samples: int = Field(
        1, ge=1, le=1000, description="Answers per question and seed; several require sampling."
    )
    seeds: int = Field(
        1,
        ge=1,
        le=100,
        description="Repeat all answers with this many seeds: seed, seed + 1, and so on; several"
        " require a temperature above 0.",
    )

    @model_validator(mode="after")
    def _check_samples(self) -> EvaluationConfig:
        for name in ("samples", "seeds"):
            count = getattr(self, name)
            if count > 1 and not self.temperature:
                raise ValueError(f"--{name} {count} requires a --temperature above 0")
        return self

    @property
    def answers(self) -> int:
        """Number of answers to each question."""
        return self.samples * self.seeds


class MeasureConfig(Options):
    """What a calibration counts as lost."""

    measure: Measure = Field(
        "accuracy",
        description="When an answer counts as lost: 'accuracy' if only exact decoding's is right,"
        " 'agreement' if it is not identical to exact decoding's, 'regret' if it gives up more than"
        " --max-regret. The last two need no reference answers.",
    )
    max_regret: float | None = Field(
        None,
        ge=0.0,
        description="With --measure regret, which requires it: largest regret of an answer, in nats"
        " per token; the regrets of its fuzzy tokens divided by the number of all its tokens.",
    )

    @model_validator(mode="after")
    def _check_measure(self) -> MeasureConfig:
        if (self.measure == "regret") != (self.max_regret is not None):
            raise ValueError("--measure regret and --max-regret require each other")
        return self

    @property
    def measured(self) -> str:
        """What is bounded, in words."""
        if self.max_regret is None:
            return self.measure
        return f"answers with a regret of at most {self.max_regret:g} nats per token"


class SelectionConfig(Options):
    """Which questions select the settings of a calibration."""

    select_on: str | None = Field(
        None,
        description="Question set or file that selects the settings, so that all other QUESTIONS"
        " certify them; default: a fifth of QUESTIONS.",
    )
    select_regret: float | None = Field(
        None,
        ge=0.0,
        description="If a question of --select-on has no score, an answer is lost if it gives up"
        " more nats per token than this; default: if it is not identical to exact decoding's.",
    )

    @model_validator(mode="after")
    def _check_regret(self) -> SelectionConfig:
        if self.select_regret is not None and self.select_on is None:
            raise ValueError("--select-regret requires --select-on")
        return self


class CalibrationConfig(EvaluationConfig, MeasureConfig):
    """How answers are decoded for calibration.

    The default seed differs from that of :class:`EvaluationConfig`, so that calibration and
    evaluation use different bundled questions.
    """

    seed: int = Field(1, ge=0, le=2**31, description="Seed of sampling and of bundled questions.")
    answer_batch: int = Field(
        32,
        ge=1,
        le=1024,
        description="Questions answered at once where only quality is measured; speeds are measured"
        " with --batch.",
    )


class BenchConfig(EvaluationConfig):
    """How answers are decoded and timed in a benchmark."""

    max_new_tokens: int = Field(256, ge=1, description="Maximum number of new tokens per turn.")
    repeats: int = Field(1, ge=1, description="Times each turn is decoded; timings are averaged.")


Thresholds = Annotated[tuple[float, ...], Field(min_length=1, description="Thresholds T.")]
MinRatios = Annotated[
    tuple[float, ...],
    Field(min_length=1, description="Floors (min_ratio) to combine with each T."),
]


class GridConfig(Options):
    """Acceptance settings to compare: every threshold above 0, with every divergence and floor.

    The default thresholds, which are a sweep's, span orders of magnitude, as divergences do: small
    thresholds matter for pairs that agree well.
    """

    thresholds: Thresholds = (0.0, 0.003, 0.01, 0.05, 0.1, 0.4)
    divergences: tuple[Annotated[DivergenceName, find_divergence], ...] = Field(
        ("js",), min_length=1, description="Divergences that are compared with T."
    )
    min_ratios: MinRatios = (0.0, 0.1, 0.3)

    @field_validator("thresholds", "divergences", "min_ratios")
    @classmethod
    def _check_values(
        cls, values: tuple[float | str, ...], info: ValidationInfo
    ) -> tuple[float | str, ...]:
        """Apply the bounds of :class:`AcceptanceConfig` and drop duplicates."""
        name = str(info.field_name)
        option = name.removesuffix("s")
        for value in values:
            try:
                AcceptanceConfig.from_dict({option: value})
            except OptionsError as error:  # which names the single option
                raise ValueError(str(error).replace(option, name, 1)) from error
        return tuple(dict.fromkeys(values))


class CalibrationGrid(GridConfig):
    """Acceptance settings that calibration chooses from."""

    thresholds: Thresholds = (0.003, 0.01, 0.03, 0.05, 0.1, 0.4)
    min_ratios: MinRatios = (0.1, 0.3)

    @model_validator(mode="after")
    def _check_thresholds(self) -> CalibrationGrid:
        if not any(self.thresholds):
            raise ValueError("--thresholds must include a value above 0")
        return self


class BenchGrid(GridConfig):
    """Acceptance settings of a benchmark."""

    thresholds: Thresholds = (0.1, 0.2, 0.3)
    min_ratios: MinRatios = (0.0, 0.1)


class LossBounds(Options):
    """The largest loss to accept, of accuracy or of what :class:`MeasureConfig` counts."""

    max_drop: float = Field(
        1.0,
        ge=0.0,
        le=100.0,
        description="Largest share of answers to lose, less those gained, in percentage points.",
    )
    confidence: float = Field(
        0.95, ge=0.5, le=0.9999, description="Confidence that the loss is within the bound."
    )


class ServerOptions(LossBounds):
    """Servers to compare instead of methods of decoding in this process."""

    servers: tuple[str, ...] = Field(
        (),
        description="Compare OpenAI-compatible servers, each given as NAME=URL with a URL up to"
        " /v1. The first one is the reference. OPENAI_API_KEY holds the key; --batch is the number"
        " of concurrent requests.",
    )
    server_model: str | None = Field(
        None, description="Model to request; default: the first one that a server lists."
    )
    certify: ExistingFile | None = Field(
        None,
        description="With two servers: the fsd.json file that the second one uses. If the bound on"
        " the loss is at most --max-drop, its certificate is replaced.",
    )
    engine: str | None = Field(
        None,
        description="What the certificate names as the decoder, such as vllm; default: the owner"
        " that the second server states for its model.",
    )

    @field_validator("servers")
    @classmethod
    def _check_servers(cls, servers: tuple[str, ...]) -> tuple[str, ...]:
        names = [server.partition("=")[0] for server in servers]
        for server, name in zip(servers, names, strict=True):
            if not re.fullmatch(r"[\w.-]+=https?://.+", server):
                raise ValueError(f"--server must be NAME=URL; got {server}")
            if name in ("plain", "hf"):  # reports compare with these methods
                raise ValueError(f"--server: a server cannot be named {name}")
            if names.count(name) > 1:
                raise ValueError(f"--server: two servers have the name {name!r}")
        if len(servers) == 1:
            raise ValueError("--server compares servers: give at least two")
        return servers

    @model_validator(mode="after")
    def _check_dependent(self) -> ServerOptions:
        if self.certify is not None and len(self.servers) != 2:
            raise ValueError("--certify requires two servers")
        given = self.model_dump(exclude_defaults=True)
        if given and not self.servers:
            name = min(given).replace("_", "-")
            raise ValueError(f"--{name} requires --server")
        if self.certify is None and (unused := given.keys() & {"engine", "max_drop"}):
            raise ValueError(f"--{min(unused).replace('_', '-')} requires --certify")
        return self
