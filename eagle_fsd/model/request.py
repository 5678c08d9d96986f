"""The validated options of a call, its request per prompt, and the answer in progress."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList
from typing_extensions import Unpack

from eagle_fsd.model.acceptance import ExactRule, rule_for
from eagle_fsd.model.arguments import (
    CallOptions,
    as_list,
    end_tokens,
    model_end_tokens,
    name_of,
    override,
)
from eagle_fsd.model.config import AcceptanceConfig, SamplingConfig, TreeConfig
from eagle_fsd.model.prefix_cache import PrefixCache
from eagle_fsd.model.random_numbers import seed_keys, token_keys
from eagle_fsd.model.sampling import Prefix, Sampler, check_warpers
from eagle_fsd.model.stats import DecodeStats
from eagle_fsd.model.target import Target
from eagle_fsd.model.verify import TARGET_FAULT, WHOLE_PATHS, AcceptanceRule
from eagle_fsd.model.vocabulary import Warp

#: Message of the error that NaN or infinite logits of the target raise.
BROKEN_LOGITS = (
    "the target produced NaN or infinite logits; check its weights and dtype (some models overflow"
    " in float16: try bfloat16 or float32)"
)


class DecodeOptions(TypedDict, total=False):
    """Keyword arguments of :meth:`EagleFSD.generate`, which describes them."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    sampling: SamplingConfig | Mapping[str, Any] | None
    threshold: float | None
    min_ratio: float | None
    divergence: str | None
    acceptance: AcceptanceConfig | Mapping[str, Any] | None
    method: str
    rule: AcceptanceRule | str | None
    eos_token_id: int | Sequence[int] | Set[int] | None
    pad_token_id: int | None
    stopping_criteria: StoppingCriteria | Sequence[StoppingCriteria] | None
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None
    logits_warper: LogitsProcessor | Sequence[LogitsProcessor] | None
    prefix_cache: PrefixCache | None
    details: int | None


class PromptDecodeOptions(DecodeOptions, total=False):
    """Keyword arguments of :class:`Prompt`."""

    max_new_tokens: int


class Prompt:
    """A prompt for :meth:`EagleFSD.generate_many` with options of its own.

    Args:
        ids: ``[S]`` token ids, or a sequence of them.
        **options: ``max_new_tokens`` and the options of :meth:`EagleFSD.generate_many`, which
            override those of the call. They cannot be combined with options of the call that
            exclude them, such as ``sampling`` with ``temperature``.
    """

    def __init__(self, ids: Tensor | Sequence[int], **options: Unpack[PromptDecodeOptions]) -> None:
        self.ids, self.options = ids, options


@dataclass(frozen=True)
class Decision:
    """The options that decide a row's tokens; rows with equal decisions are verified together.

    Equality ignores the seed. It compares ``law`` instead of ``warpers``, so Hugging Face's warpers
    that have an equal :class:`~eagle_fsd.model.vocabulary.Warp` are interchangeable. ``details`` is
    the number of alternatives to report for each token; None reports no details.
    """

    sampling: SamplingConfig
    acceptance: AcceptanceConfig
    rule: AcceptanceRule = field(hash=False)  # a custom rule need not be hashable
    processors: tuple[LogitsProcessor, ...] = ()
    warpers: tuple[LogitsProcessor, ...] | None = field(default=None, compare=False)
    details: int | None = None
    sampler: Sampler = field(init=False, compare=False, repr=False)
    law: Warp | tuple[LogitsProcessor, ...] | None = field(init=False, repr=False)

    @classmethod
    def of(
        cls,
        sampling: SamplingConfig | None = None,
        acceptance: AcceptanceConfig | None = None,
        rule: AcceptanceRule | None = None,
        processors: Sequence[LogitsProcessor] = (),
        warpers: Sequence[LogitsProcessor] | None = None,
        details: int | None = None,
    ) -> Decision:
        """Return the decision for options that may be missing; by default greedy and lossless."""
        acceptance = acceptance or AcceptanceConfig()
        return cls(
            sampling=(sampling or SamplingConfig()).model_copy(update={"seed": None}),
            acceptance=acceptance,
            rule=rule_for(acceptance, rule),
            processors=tuple(processors),
            warpers=None if warpers is None else tuple(warpers),
            details=details,
        )

    def __post_init__(self) -> None:
        rule, acceptance = self.rule, self.acceptance
        sampler = Sampler(
            self.sampling,
            self.processors,
            self.warpers,
            draw_from_draft=acceptance.selection == "sample" or rule.needs_drawn,
            # Details report the divergence that the acceptance options select, under any rule.
            warp_draft=rule.needs_warped_draft
            or (acceptance.divergence_on == "warped" and self.details is not None),
            draw_uniform=rule.needs_uniform,
            # A subclass may let other rules read samples below the kept path.
            block=type(rule) is ExactRule,
        )
        object.__setattr__(self, "sampler", sampler)  # the class is frozen
        object.__setattr__(self, "law", sampler.warp or self.warpers)

    def describe_fault(self, fault: int) -> str:
        """Return the error message for a nonzero :meth:`VerificationInputs.row_faults`."""
        if fault == TARGET_FAULT:
            return BROKEN_LOGITS
        item = (*self.processors, *(self.warpers or ()))[fault - TARGET_FAULT - 1]
        name = name_of(item)
        return f"no token can be chosen: {name} returned NaN or +inf scores, or -inf for all tokens"

    @property
    def on_device(self) -> bool:
        """Whether verification consists of tensor operations that never wait for the device."""
        return self.sampler.on_device and self.rule.capturable


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt and how to continue it."""

    tokens: list[int]  # of the prompt, without padding
    max_new_tokens: int
    decision: Decision = field(default_factory=Decision.of)
    key: int = 0  # of the random numbers, see `random_numbers`
    tree: TreeConfig = field(default_factory=TreeConfig)
    drafted: bool = True  # otherwise decoding is plain
    uses_batch_trees: bool = False  # whether the trees may depend on the number of rows
    samples_chains: bool = False  # whether the trees are chains that are sampled
    eos_token_ids: list[int] = field(default_factory=list)
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    pad_token_id: int | None = None
    # The prompt [P] as the caller passed it, padding included: number `row` of `rows` in its call.
    ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    row: int = 0
    rows: int = 1

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in the target's cache."""
        return len(self.tokens) - 1 + self.max_new_tokens

    @property
    def engine_key(self) -> Hashable:
        """Equal for requests that one engine decodes: equal trees, chains sampled equally."""
        if not self.drafted:
            return None
        return self.tree, self.uses_batch_trees, self.decision.law if self.samples_chains else None

    def of_prompt(
        self, ids: Tensor, tokens: list[int], limit: int, row: int = 0, rows: int = 1
    ) -> Request:
        """Return this request for one of the prompts of its call, whose seed is :attr:`key`."""
        greedy = self.decision.sampler.greedy
        key = 0 if greedy else int(seed_keys(self.key, 1 << row.bit_length())[row])
        return replace(
            self, ids=ids, tokens=tokens, max_new_tokens=limit, key=key, row=row, rows=rows
        )


def read_options(
    target: Target,
    default: AcceptanceConfig,
    max_new_tokens: int,
    offset: int = 0,
    **options: Unpack[DecodeOptions],
) -> Request:
    """Validate the options of :meth:`EagleFSD.generate`, for a request that has no prompt yet.

    Its key is the seed; by default, 0 if decoding is greedy, else a number drawn from torch's
    generator plus ``offset``.
    """
    given: dict[str, Any] = {**dict.fromkeys(DecodeOptions.__annotations__), **options}
    if unknown := given.keys() - DecodeOptions.__annotations__.keys():
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    prefix_cache = given["prefix_cache"]
    if prefix_cache is not None and not isinstance(prefix_cache, PrefixCache):
        raise ValueError(f"prefix_cache must be a PrefixCache; got {prefix_cache!r}")
    fields = {name: given[name] for name in SamplingConfig.model_fields}
    sampling = override(SamplingConfig(), "sampling", given["sampling"], **fields)
    acceptance, rule = _read_acceptance(default, given)
    if sampling.top_k > target.vocab_size:
        raise ValueError(
            f"top_k must be at most the vocabulary of {target.vocab_size} tokens;"
            f" got {sampling.top_k}"
        )
    limits = CallOptions.from_dict(
        {
            "max_new_tokens": max_new_tokens,
            "details": given["details"],
            "pad_token_id": given["pad_token_id"],
        }
    )
    warpers = given["logits_warper"]
    if warpers is not None:
        warpers = as_list("logits_warper", warpers)
    drafted = options.get("method", "fsd") == "fsd"
    decision = Decision.of(
        sampling=sampling,
        acceptance=acceptance,
        rule=rule,
        processors=as_list("logits_processor", given["logits_processor"]),
        warpers=warpers,
        details=limits.details,
    )
    if drafted and decision.rule.judges_paths and acceptance.selection not in WHOLE_PATHS:
        raise ValueError(
            f"{name_of(decision.rule)} judges whole paths: it needs selection"
            f" {' or '.join(WHOLE_PATHS)}; got {acceptance.selection}"
        )
    check_warpers(warpers or (), target.vocab_size, target.device)
    key = sampling.seed
    if key is None and sampling.temperature > 0.0:
        key = target.agree(int(torch.randint(2**62, ()))) + offset
    ends = given["eos_token_id"]
    return Request(
        tokens=[],
        max_new_tokens=limits.max_new_tokens,
        decision=decision,
        key=key or 0,
        drafted=drafted,
        # Up to rounding, lossless tokens do not depend on the trees, unless chains are sampled.
        uses_batch_trees=isinstance(decision.rule, ExactRule),
        eos_token_ids=model_end_tokens(target.model) if ends is None else end_tokens(ends),
        criteria=StoppingCriteriaList(as_list("stopping_criteria", given["stopping_criteria"])),
        pad_token_id=limits.pad_token_id,
    )


def _read_acceptance(
    default: AcceptanceConfig, given: Mapping[str, Any]
) -> tuple[AcceptanceConfig, AcceptanceRule | None]:
    """Return the acceptance options of a call, and the rule object that replaces theirs, if any."""
    rule = given["rule"]
    fields = {name: given[name] for name in ("threshold", "min_ratio", "divergence")}
    # Together with the other options, so that a threshold beside another rule is rejected.
    if isinstance(rule, str) and given["acceptance"] is None:
        fields["rule"] = rule
    acceptance = override(default, "acceptance", given["acceptance"], **fields)
    if isinstance(rule, str):
        return acceptance.updated(rule=rule), None
    if rule is not None and not isinstance(rule, AcceptanceRule):
        raise ValueError(f"rule must be an AcceptanceRule or the name of one; got {rule!r}")
    ignored = [name for name in ("threshold", "min_ratio") if given[name] is not None]
    if rule is not None and ignored:
        raise ValueError(f"pass either a rule object or {', '.join(ignored)}, not both")
    return acceptance, rule


class Answer:
    """A request in progress: what was emitted for it, and where its row in an engine stands."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []  # new tokens
        self.origins: list[int] = []
        self.stats = DecodeStats.empty(1)  # its seconds are those during which it was decoded
        self.finished = False  # whether it has ended or was cancelled
        self.error: Exception | None = None  # why decoding failed
        self.prompt = request.tokens  # the row's prompt, with the new tokens if it was resumed
        self.length = 0  # tokens in the target's cache
        self.root = 0  # the last token, which is not in the cache
        self.rule_state: Tensor | None = None  # after the last step that was read; None: fresh
        self._ids = request.ids  # what `ids` returned last

    @property
    def ids(self) -> Tensor:
        """The prompt as the caller passed it, padding included, and the new tokens."""
        if new := self.tokens[len(self._ids) - len(self.request.ids) :]:
            self._ids = torch.cat([self._ids, self._ids.new_tensor(new)])
        return self._ids

    @property
    def prefix(self) -> Prefix:
        """The tokens so far, for processors that read them."""
        request = self.request
        return Prefix(
            self.ids,
            prompt_length=len(request.ids),
            row=request.row,
            rows=request.rows,
            ends=request.eos_token_ids,
        )

    @property
    def key(self) -> int:
        """Key of the random numbers of the next step, see :class:`RandomNumbers`."""
        request, new = self.request, self.tokens
        if not new:
            return request.key
        before = torch.tensor([request.tokens[-1], *new[:-1]])
        positions = torch.arange(len(new)) + len(request.tokens) - 1
        return int(torch.tensor(request.key) + token_keys(before, positions).sum())

    def start(self) -> None:
        """Start, or resume, in an engine."""
        self.prompt = [*self.request.tokens, *self.tokens]
        self.length, self.root = len(self.prompt) - 1, self.prompt[-1]
        self.stats.prefilled = 0

    def add(self, tokens: list[int], origins: list[int]) -> int:
        """Add the tokens that a step emitted, up to the end of the answer; return their number."""
        request, count = self.request, 0
        while count < len(tokens) and not self.finished:
            self.tokens.append(tokens[count])
            count += 1
            self.finished = (
                self.tokens[-1] in request.eos_token_ids
                or len(self.tokens) >= request.max_new_tokens
                or self._meets_criteria()
            )
        self.origins += origins[:count]
        self.stats.add(0, origins[:count])
        self.stats.passes += 1
        return count

    def _meets_criteria(self) -> bool:
        if not self.request.criteria:
            return False
        try:
            return bool(self.request.criteria(self.ids[None], None).any())
        except Exception as error:  # of any kind: other answers continue
            self.error = error
            return True
