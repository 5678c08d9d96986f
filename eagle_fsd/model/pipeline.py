"""Decoding with a target and a drafter: :class:`EagleFSD`."""

from __future__ import annotations

import inspect
import itertools
import logging
import operator
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import GenerationMode
from transformers.generation.streamers import BaseStreamer
from typing_extensions import Unpack

from eagle_fsd.bundled import BUNDLED_DRAFTERS, BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.model.arguments import (
    MAX_BATCH,
    CallOptions,
    as_list,
    as_options,
    end_tokens,
    prompt_tensor,
)
from eagle_fsd.model.beam_search import (
    BeamEngine,
    BeamSearchOutput,
    beam_search,
)
from eagle_fsd.model.checkpoint import drafter_file
from eagle_fsd.model.compilation import (
    BackgroundCompiler,
    forget_compiled,
    has_graphs,
    using_device,
)
from eagle_fsd.model.config import (
    SETTINGS_FILE,
    AcceptanceConfig,
    BeamSearchConfig,
    SamplingConfig,
    Settings,
    TreeConfig,
    read_settings,
)
from eagle_fsd.model.depth import DepthPolicy
from eagle_fsd.model.description import describe_modules
from eagle_fsd.model.drafters.interface import Drafter, NoDrafter
from eagle_fsd.model.drafters.loading import WITHOUT_FILES, load_drafter
from eagle_fsd.model.engine import Decision, Engine, TokenDetail
from eagle_fsd.model.generation import Answer, Batch, GenerateOutput, Generation, Request
from eagle_fsd.model.identity import differs
from eagle_fsd.model.idle_engines import IdleEngines
from eagle_fsd.model.loading import load_target, load_tokenizer
from eagle_fsd.model.prefix_cache import PrefixCache
from eagle_fsd.model.random_numbers import seed_keys
from eagle_fsd.model.sampling import WARPERS, check_warpers
from eagle_fsd.model.self_check import check_target
from eagle_fsd.model.stats import DecodeStats
from eagle_fsd.model.target import Target
from eagle_fsd.model.verify import AcceptanceRule
from eagle_fsd.model.wrappers import unwrap_model
from eagle_fsd.utils.options import Options

log = logging.getLogger(__name__)

#: Values of ``method``: draft trees, or plain autoregressive decoding.
METHODS = ("fsd", "ar")
#: Inputs of the target's forward call that change no token.
NEUTRAL_INPUTS = ("use_cache", "logits_to_keep", "output_attentions", "output_hidden_states")

Config = TypeVar("Config", bound=Options)


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


@dataclass(frozen=True)
class _Call:
    """Validated options of a call.

    Attributes:
        max_new_tokens: Maximum number of new tokens per row.
        given_eos: Tokens that end a row, in the order given.
        pad_token_id: Token that fills rows, if one was given.
        criteria: Hugging Face stopping criteria.
        decision: How tokens are decided.
        seed: Seed of the random numbers.
        tree: Shape of the draft trees.
        drafted: Whether trees are drafted.
        draws_chains: Whether the drafter samples chains.
        lossless: Whether the tokens do not depend on the draft tree.
    """

    max_new_tokens: int
    given_eos: list[int]
    pad_token_id: int | None
    criteria: StoppingCriteriaList
    decision: Decision
    seed: int
    tree: TreeConfig
    drafted: bool
    draws_chains: bool
    lossless: bool

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a row."""
        return frozenset(self.given_eos)

    def request(
        self, ids: Tensor, tokens: list[int], limit: int, row: int = 0, rows: int = 1
    ) -> Request:
        """Return the request for one of the call's prompts; see :class:`Request`.

        Args:
            ids: ``[P]`` token ids as the caller passed them.
            tokens: Token ids without padding.
            limit: Maximum number of new tokens that fit the context.
            row: Index of the prompt.
            rows: Number of prompts.
        """
        sampling, tree = self.decision.sampling, self.tree
        # The rows of an engine have trees of the same shape, and chains sampled in the same way.
        draws = self.draws_chains and tree.top_k == 1 and sampling.temperature > 0.0
        varies = self.lossless and not draws
        if tree.adaptive and not (varies and self.drafted):
            tree = tree.updated(adaptive=False)
        draw = (sampling, self.decision.warpers) if draws else None
        engine = (tree, varies, draw) if self.drafted else None
        return Request(
            ids,
            tokens,
            limit,
            self.eos_token_ids,
            self.criteria,
            self.decision,
            int(seed_keys(self.seed, row + 1)[row]),
            tree,
            self.drafted,
            varies,
            draws,
            engine,
            row,
            rows,
        )


class Prompt:
    """A prompt for :meth:`EagleFSD.generate_many` with options of its own.

    Args:
        ids: ``[S]`` token ids, or a sequence of them.
        **options: Override those of the call.
    """

    def __init__(self, ids: Tensor | Sequence[int], **options: Unpack[PromptDecodeOptions]) -> None:
        self.ids, self.options = ids, options


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt of :meth:`EagleFSD.generate_many`.

    Attributes:
        index: Index of the prompt.
        tokens: The new tokens.
        origins: The :class:`~eagle_fsd.model.verify.Origin` of each.
        stats: Statistics; their seconds are those during which the answer was decoded, together
            with others.
        details: The details of each token; empty unless requested.
    """

    index: int
    tokens: list[int]
    origins: list[int]
    stats: DecodeStats
    details: list[TokenDetail]


class EagleFSD:
    """A target and a drafter, ready to decode.

    Use :meth:`from_pretrained`, or pass a loaded Hugging Face model and drafter.

    Args:
        model: An unmodified Hugging Face causal LM. The model inside is used if it is a PEFT model
            or was compiled by ``torch.compile``.
        drafter: A drafter for this target. None permits plain decoding (``method="ar"``) only.
        tree: Shape of the draft tree; default: :meth:`TreeConfig.for_device`.
        acceptance: Acceptance options of calls that pass none; default: lossless.
        tokenizer: The target's tokenizer; default: loaded on first use. Decoding works on token ids
            and does not need it.

    Raises:
        ValueError: The model's architecture, attention implementation or PEFT adapter is not
            supported, or the drafter belongs to another target.
        TypeError: ``model`` is not a Hugging Face model.

    Attributes:
        model: The target as a Hugging Face model, without wrappers.
        exact_tree: Shape of the draft tree of lossless calls, those with a threshold of 0.
            Assigning to :attr:`tree` sets it too.
        batch_trees: Shapes of the draft trees of lossless calls while so many prompts or more are
            decoded at once; the tokens do not depend on them. Assigning to :attr:`tree` clears
            them.
        compile: Whether the passes of drafter and target are compiled by ``torch.compile``, see
            :meth:`from_pretrained`.
        capture: Whether steps on a CUDA device are captured in graphs and replayed where possible;
            True by default. On other devices it has no effect.
    """

    def __init__(
        self,
        model: nn.Module,
        drafter: Drafter | None,
        tree: TreeConfig | None = None,
        acceptance: AcceptanceConfig | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.model = unwrap_model(model).eval()
        self.target = Target(self.model)
        self.drafter = (drafter or NoDrafter()).attach(self.target)
        if self.drafter.network is not None:
            self.drafter.network.eval()
        self.tree = tree or TreeConfig.for_device(self.target.device.type)  # sets exact_tree too
        self.acceptance = acceptance or AcceptanceConfig()
        self.compile = False
        self._background = BackgroundCompiler()
        self._unseeded = itertools.count(1)
        self.capture = True
        self._idle = IdleEngines()
        self._depths = DepthPolicy()
        self._name: str | None = None
        self._token: str | None = None
        if tokenizer is not None:
            self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | nn.Module | None = None,
        drafter: str | Path | Drafter | None = None,
        *,
        dtype: str | torch.dtype | None = None,
        device_map: str | torch.device | dict[str, Any] | None = None,
        settings: str | Path | None = None,
        tree: TreeConfig | None = None,
        acceptance: AcceptanceConfig | None = None,
        total_tokens: int | None = None,
        depth: int | Literal["auto"] | None = None,
        top_k: int | None = None,
        draft_vocabulary: int | str | Path | None = None,
        compile: bool | Literal["auto"] = False,
        token: str | None = None,
        **target_options: Any,
    ) -> EagleFSD:
        """Load a target and a drafter; the bundled pair if neither is given.

        Args:
            target: A folder, a Hub name, or a loaded model, which may be a PEFT or compiled model.
                Default: the bundled target.
            drafter: A folder, a Hub name, a loaded drafter, or a key of
                :data:`~eagle_fsd.bundled.BUNDLED_DRAFTERS`. Default with the bundled target: the
                bundled head.
            dtype: Such as ``"bfloat16"``. Default: float32 on a CPU, else the checkpoint's own.
            device_map: As in Hugging Face. Default: the GPU if there is one, else the CPU.
            settings: An ``fsd.json`` file with tree and acceptance options. Default: ``fsd.json``
                beside the drafter; decoding is lossless if there is none.
            tree: Shape of the draft tree; overrides ``settings``.
            acceptance: Acceptance options; overrides ``settings``.
            total_tokens: Overrides this field of the tree; not allowed together with ``tree``.
            depth: As ``total_tokens``. ``"auto"`` only lets lossless steps use shallower trees than
                those of the settings, see :mod:`~eagle_fsd.model.depth`.
            top_k: As ``total_tokens``.
            draft_vocabulary: Number of tokens, the most frequent ones, that an EAGLE-1/2 head
                drafts, or a file that ranks them, see :mod:`~eagle_fsd.model.draft_vocabulary`.
                Default: all.
            compile: Whether the passes of drafter and target, and verification, are compiled by
                ``torch.compile``. True compiles them when a call first needs them, which takes
                about a minute, for as many rows as the call decodes at once. ``"auto"`` compiles
                those for a single row in a background thread once decoding has taken about as long;
                later answers use them. Sampling is then reproducible only with a ``seed``, and in
                half precision, tokens can depend on when that happens.
            token: A Hugging Face token for gated repositories.
            **target_options: Passed to ``AutoModelForCausalLM.from_pretrained``.

        Raises:
            LoadError: The target's files are missing or damaged.
            CheckpointError: The drafter's files are missing or damaged.
            ValueError: A target is given without a drafter, they do not match, the architecture is
                not supported, or an option is invalid.
            TypeError: An option does not apply to a target that is already loaded, or ``target`` is
                neither a name nor a Hugging Face model.
        """
        if target is None:
            target = BUNDLED_TARGET
            drafter = BUNDLED_HEAD if drafter is None else drafter
        if drafter is None:
            raise ValueError(
                "pass both a target and a drafter (--drafter): the bundled head fits the bundled"
                " target only, and eagle-fsd train trains one for yours"
            )
        if isinstance(drafter, str):
            drafter = BUNDLED_DRAFTERS.get(drafter, drafter)
        name = None
        if isinstance(target, (str, Path)):
            name = str(target)
            target = load_target(name, dtype, device_map, token=token, **target_options)
        elif dtype is not None or device_map is not None or target_options:
            given = {"dtype": dtype, "device_map": device_map}
            names = [option for option, value in given.items() if value is not None]
            names += target_options
            raise TypeError(f"{', '.join(names)} cannot be set on a target that is already loaded")
        target = unwrap_model(target)
        wrapped = Target(target)
        if settings is None and not isinstance(drafter, Drafter):
            has_files = str(drafter) not in WITHOUT_FILES
            settings = drafter_file(drafter, SETTINGS_FILE, token) if has_files else None
        from_file = read_settings(settings) if settings is not None else Settings()
        if not isinstance(drafter, Drafter):
            drafter = load_drafter(drafter, wrapped, token, draft_vocabulary)
        elif draft_vocabulary is not None:
            raise TypeError("draft_vocabulary cannot be set on a drafter that is already loaded")
        model = cls(target, drafter)
        model._name, model._token = name, token
        model.compile = compile
        model.configure(from_file)
        if depth == "auto" and tree is None:
            model.adapt_depth()
            depth = None
        shape = {"total_tokens": total_tokens, "depth": depth, "top_k": top_k}
        if tree is not None or any(value is not None for value in shape.values()):
            model.tree = _override(model.tree, "tree", tree, **shape)
        model.acceptance = acceptance or model.acceptance
        return model

    @property
    def tree(self) -> TreeConfig:
        """Shape of the draft tree."""
        return self._tree

    @tree.setter
    def tree(self, tree: TreeConfig) -> None:
        """Set the trees of all calls.

        Args:
            tree: Shape of the draft tree.
        """
        self._tree = self.exact_tree = tree
        self.batch_trees: dict[int, TreeConfig] = {}

    @property
    def compile(self) -> bool | Literal["auto"]:
        """Whether passes are compiled, see :meth:`from_pretrained`."""
        return self._compile

    @compile.setter
    def compile(self, compile: bool | Literal["auto"]) -> None:
        """Set whether passes are compiled.

        Args:
            compile: True, False or ``"auto"``.

        Raises:
            ValueError: Another value.
        """
        if not (isinstance(compile, bool) or compile == "auto"):
            raise ValueError(f"compile must be True, False or 'auto'; got {compile!r}")
        self._compile = compile

    def adapt_depth(self, adaptive: bool = True) -> None:
        """Let lossless steps use shallower trees, or not; see :mod:`~eagle_fsd.model.depth`.

        Args:
            adaptive: Whether they may.
        """
        self._tree = self._tree.updated(adaptive=adaptive)
        self.exact_tree = self.exact_tree.updated(adaptive=adaptive)
        trees = self.batch_trees.items()
        self.batch_trees = {rows: tree.updated(adaptive=adaptive) for rows, tree in trees}

    def configure(self, settings: Settings) -> None:
        """Override the tree and acceptance options that a file sets.

        Logs a warning if the file was written for another target, drafter or data type, whose
        settings may lose more accuracy here.

        Args:
            settings: The contents of an ``fsd.json`` file.
        """
        shape = {name: value for name, value in settings.tree.items() if name != "adaptive"}
        if shape:
            self.tree = self.tree.updated(**shape)
        self.exact_tree = settings.exact or self.exact_tree
        if settings.batch:
            self.batch_trees = {int(rows): tree for rows, tree in settings.batch.items()}
        if "adaptive" in settings.model_fields_set:
            self.adapt_depth(settings.adaptive)
        self.acceptance = self.acceptance.updated(**settings.acceptance)
        recorded = {"target": settings.target, "drafter": settings.drafter}
        for kind, module in (("target", self.model), ("drafter", self.drafter)):
            identity = recorded[kind]
            if identity is not None and differs(identity, module, self.target.dtype):
                log.warning(
                    "the settings were calibrated for another %s (%s): no bound on the loss holds"
                    " for this one; run eagle-fsd calibrate, or pass --threshold 0",
                    kind,
                    identity.name,
                )
        dtype = str(self.target.dtype).removeprefix("torch.")
        calibrated = None if settings.lossless else settings.target
        if calibrated is not None and calibrated.dtype != dtype:
            log.warning(
                "the settings were calibrated in %s, but the target is in %s: no bound on the loss"
                " holds; run eagle-fsd calibrate, or pass --threshold 0",
                calibrated.dtype,
                dtype,
            )

    def tree_for(self, acceptance: AcceptanceConfig) -> TreeConfig:
        """Return the draft tree of calls with given acceptance options.

        Args:
            acceptance: The acceptance options.
        """
        return self.exact_tree if acceptance.lossless else self.tree

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer, loaded on first use.

        Raises:
            ValueError: The target was not loaded from files.
            LoadError: The tokenizer's files are missing or damaged.
        """
        name = self._name or self.model.config._name_or_path
        if not name:
            raise ValueError("this target was not loaded from files; pass its tokenizer")
        return load_tokenizer(name, self._token)

    @property
    def eos_token_ids(self) -> list[int]:
        """The target's end-of-sequence tokens, which ``eos_token_id`` overrides in a call."""
        eos = self.model.generation_config.eos_token_id
        return [] if eos is None else end_tokens(eos)

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 256,
        *,
        streamer: BaseStreamer | None = None,
        **options: Unpack[DecodeOptions],
    ) -> GenerateOutput:
        """Generate an answer to every prompt.

        Args:
            input_ids: ``[B, S]`` token ids; shorter prompts are padded on the left.
            attention_mask: ``[B, S]``, 1 at tokens and 0 at padding. Default: 0 at the padding
                token, unless it is also an end-of-sequence token.
            max_new_tokens: Maximum number of new tokens per row, at least 1; reduced to fit the
                target's context.
            streamer: A Hugging Face streamer, which receives the prompt and then the tokens of each
                step; for a single prompt only.
            **options: Further keyword arguments:

                - ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``seed``: the fields of
                  :class:`SamplingConfig`; or pass ``sampling`` instead, as an object or a
                  dictionary. Default, also for ``None``: greedy. (The tree's ``top_k`` is set in
                  :meth:`from_pretrained`.)
                - ``threshold``, ``min_ratio``, ``divergence``: override these fields of
                  :attr:`acceptance`; or pass ``acceptance``, an object or a dictionary, to replace
                  all of it.
                - ``method``: ``"fsd"``, or ``"ar"`` for plain decoding without a drafter.
                - ``rule``: an acceptance rule that replaces the one of ``acceptance``, or the name
                  of one, such as ``"margin 0.8"``; see :class:`AcceptanceConfig`.
                - ``eos_token_id``: one id or several that end a row, ``[]`` for none. Default: the
                  target's.
                - ``pad_token_id``: fills rows that end before others. Default: the target's, else
                  the first of ``eos_token_id``, else 0.
                - ``stopping_criteria``: a Hugging Face stopping criterion or a list of them,
                  checked after every token.
                - ``logits_processor``: a Hugging Face logits processor or a list of them. Each tree
                  node is processed with its own prefix, so they must not keep state. Processors
                  from the target's generation configuration, such as a repetition penalty, are not
                  applied: for those, call ``target.generate`` with :meth:`custom_generate`.
                - ``logits_warper``: a Hugging Face logits processor or a list of them, instead of
                  ``temperature``, ``top_p``, ``top_k`` and ``min_p``; a ``temperature`` above 0
                  then only enables sampling. They must not read previous tokens.
                - ``prefix_cache``: keeps the caches for the next turn of a chat; for a single
                  prompt only. The prefix shared with earlier turns is not processed again.
                - ``details``: number of alternatives to report for every token, along with its
                  log-probability and divergence, in the chunks of :meth:`stream`. Default: no
                  details.

        Raises:
            ValueError: An argument is invalid, or a field is passed both by itself and in its
                config object.
            FloatingPointError: The target produced NaN or infinite logits, or a processor or
                warper such scores or -inf for every token.
        """
        generation = self._prepare(input_ids, attention_mask, max_new_tokens, **options)
        return _finish(generation, input_ids, streamer)

    def stream(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 256,
        **options: Unpack[DecodeOptions],
    ) -> Generation:
        """Decode step by step.

        Args:
            input_ids: See :meth:`generate`.
            attention_mask: See :meth:`generate`.
            max_new_tokens: See :meth:`generate`.
            **options: See :meth:`generate`.

        Returns:
            An iterable of one :class:`StreamChunk` per row and step. Nothing is decoded until it is
            iterated.

        Raises:
            ValueError: See :meth:`generate`.
            FloatingPointError: While iterating; see :meth:`generate`.
        """
        return self._prepare(input_ids, attention_mask, max_new_tokens, **options)

    def generate_many(
        self,
        prompts: Iterable[Prompt | Tensor | Sequence[int]],
        max_new_tokens: int = 256,
        *,
        max_batch: int = MAX_BATCH,
        **options: Unpack[DecodeOptions],
    ) -> Iterator[Completion]:
        """Continue any number of prompts, several at once.

        When an answer ends, the next prompt takes its place in the batch, so that the batch stays
        full although answers differ in length. An answer does not depend on the other prompts: it
        is the one that :meth:`generate` gives for its prompt alone (with the same seed, if it is
        sampled), up to rounding, which depends on the number of rows. Drafters that adapt to all
        rows, :class:`AdaptiveNGramDrafter` and draft models of adaptive depth, are an exception
        for answers that depend on the draft tree.

        An answer that fails does not stop the others. A warning names its prompt, and its error is
        raised when all others have been yielded.

        Args:
            prompts: Token ids of each prompt, ``[S]``, without padding; or :class:`Prompt`, with
                options of its own. An iterator is read as far as there are free rows.
            max_new_tokens: See :meth:`generate`.
            max_batch: Maximum number of prompts that are decoded at once; fewer where memory is
                short.
            **options: See :meth:`generate`; without ``prefix_cache`` and ``pad_token_id``. With
                ``seed``, prompt ``i`` is sampled as row ``i`` of a call of :meth:`generate`.

        Yields:
            The result for each prompt, in the order in which they end.

        Raises:
            ValueError: See :meth:`generate`; for an invalid prompt, when it is read.
            FloatingPointError: See :meth:`generate`; after the other answers.
            MemoryError: There will never be enough memory for a prompt; after the other answers.
        """
        max_batch = CallOptions.from_dict({"max_batch": max_batch}).max_batch
        if not isinstance(prompts, Iterable) or isinstance(prompts, str):
            raise ValueError(f"prompts must be several prompts; got {prompts!r}")
        source = enumerate(prompts)
        running: dict[Answer, tuple[int, list[TokenDetail]]] = {}
        error: Exception | None = None
        with closing(self.batch(max_batch, compiled_rows=max_batch)) as batch:
            while True:
                for index, prompt in itertools.islice(source, batch.free):
                    if not isinstance(prompt, Prompt):
                        prompt = Prompt(prompt)
                    given: Any = {"max_new_tokens": max_new_tokens, **options, **prompt.options}
                    row = 0 if "seed" in prompt.options else index
                    answer = batch.add(self._request(prompt.ids, row, **given))
                    running[answer] = index, []
                if not len(batch):
                    break
                for answer, chunk in batch.step():
                    running[answer][1].extend(chunk.details or [])
                    if not chunk.finished:
                        continue
                    index, details = running.pop(answer)
                    if answer.error is not None:
                        log.warning("prompt %d failed: %s", index, answer.error)
                        error = error or answer.error
                        continue
                    stats = answer.stats
                    yield Completion(index, answer.tokens, answer.origins, stats, details)
        if error is not None:
            raise error

    def request(
        self,
        ids: Tensor | Sequence[int],
        max_new_tokens: int = 256,
        **options: Unpack[DecodeOptions],
    ) -> Request:
        """Validate a prompt for a :class:`~eagle_fsd.model.generation.Batch`.

        Args:
            ids: ``[S]`` token ids.
            max_new_tokens: See :meth:`generate`.
            **options: See :meth:`generate`; without ``prefix_cache`` and ``pad_token_id``.

        Raises:
            ValueError: See :meth:`generate`.
        """
        return self._request(ids, max_new_tokens=max_new_tokens, **options)

    def batch(self, max_rows: int, max_length: int | None = None, compiled_rows: int = 1) -> Batch:
        """Return a batch without requests, which decodes requests of :meth:`request`.

        :meth:`Batch.close` ends it.

        Args:
            max_rows: Maximum number of requests that are decoded at once.
            max_length: See :class:`~eagle_fsd.model.generation.Batch`.
            compiled_rows: Number of requests with which steps are compiled if :attr:`compile` is
                True; any other number would take a compilation of its own.

        Raises:
            ValueError: An argument is not an integer of at least 1.
        """
        sizes = CallOptions.from_dict({"max_rows": max_rows, "max_length": max_length})
        new_engine = partial(self._new_engine, rows=compiled_rows)
        return Batch(new_engine, sizes.max_rows, sizes.max_length, self._idle)

    def release_memory(self) -> None:
        """Free the memory that is kept for the next call.

        On CUDA, the caches and CUDA graphs of calls that have ended are kept for those with the
        same options, up to :data:`~eagle_fsd.model.idle_engines.MAX_ENGINES` of them, until memory
        is short. What has been compiled for the models is dropped, too, so that the next call
        compiles it again. Elsewhere, nothing is kept.
        """
        self._idle.clear()
        forget_compiled(*filter(None, (self.model, self.drafter.network)))

    def beam_search(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 256,
        *,
        num_beams: int,
        num_return_sequences: int = 1,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        eos_token_id: int | Sequence[int] | Set[int] | None = None,
        pad_token_id: int | None = None,
        method: str = "fsd",
    ) -> BeamSearchOutput:
        """Find the most likely answers to every prompt by beam search.

        The result is that of Hugging Face's ``generate`` with ``num_beams`` and
        ``do_sample=False``. It does not depend on the drafter or on :attr:`acceptance`. Beams that
        score equally up to rounding may be exchanged.

        Args:
            input_ids: See :meth:`generate`.
            attention_mask: See :meth:`generate`.
            max_new_tokens: See :meth:`generate`.
            num_beams: Running hypotheses per prompt, at least 1.
            num_return_sequences: Hypotheses to return per prompt, at most ``num_beams``.
            length_penalty: Finished hypotheses are ranked by their log-probability, divided by
                their number of new tokens to this power.
            early_stopping: When to end a search that has finished ``num_beams`` hypotheses: True,
                at once; False, when no running one scores above them at its present length;
                ``"never"``, when none can exceed them.
            eos_token_id: See :meth:`generate`.
            pad_token_id: Pads the answers on the right. Default: the target's. As in Hugging Face's
                beam search, 0 stands for the first of ``eos_token_id``.
            method: See :meth:`generate`.

        Raises:
            ValueError: An argument is invalid.
            FloatingPointError: The target produced NaN or infinite logits.
        """
        config = BeamSearchConfig.from_dict(
            {
                "num_beams": num_beams,
                "num_return_sequences": num_return_sequences,
                "length_penalty": length_penalty,
                "early_stopping": early_stopping,
            }
        )
        self._check_method(method)
        target, defaults = self.target, self.model.generation_config
        limits = CallOptions.from_dict(
            {"max_new_tokens": max_new_tokens, "pad_token_id": pad_token_id}
        )
        eos = self.eos_token_ids if eos_token_id is None else end_tokens(eos_token_id)
        if num_beams + len(set(eos)) > target.vocab_size:
            raise ValueError(
                "num_beams and the end-of-sequence tokens must be at most as many as the"
                f" {target.vocab_size} tokens of the vocabulary; got {num_beams} and {len(eos)}"
            )
        pad = defaults.pad_token_id if pad_token_id is None else limits.pad_token_id
        prompts = _prompts(input_ids, attention_mask, target, None if pad in eos else pad)
        rooms = self._limit_new_tokens(list(map(len, prompts)), limits.max_new_tokens)
        drafter = self.drafter if method == "fsd" else NoDrafter()
        engine = BeamEngine(target, drafter, self.exact_tree.updated(adaptive=False))
        self._check_target(drafter)
        fill = pad or next(iter(eos), 0)
        return beam_search(engine, input_ids, prompts, config, rooms, frozenset(eos), fill)

    def custom_generate(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        threshold: float | None = None,
        divergence: str | None = None,
        min_ratio: float | None = None,
        fallback: str | None = None,
        selection: str | None = None,
        divergence_on: str | None = None,
        price: float | None = None,
        max_fuzzy_nats: float | None = None,
        method: str = "fsd",
        seed: int | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """Decoding loop for ``target.generate(..., custom_generate=fsd.custom_generate)``.

        Sampling options come from Hugging Face's generation configuration, FSD's options from the
        call. (Hugging Face passes on only named parameters, so all of them are in the signature. It
        drops ``streamer``, which ``functools.partial(fsd.custom_generate, streamer=...)`` binds.)

        Args:
            model: The target, passed by Hugging Face.
            input_ids: ``[B, S]`` token ids.
            logits_processor: Built by Hugging Face from its generation configuration.
            stopping_criteria: Built by Hugging Face from its generation configuration.
            generation_config: Hugging Face's generation configuration.
            synced_gpus: Must be False: ranks take different numbers of passes.
            streamer: See :meth:`generate`.
            threshold: Overrides this field of :attr:`acceptance`.
            divergence: Overrides this field of :attr:`acceptance`.
            min_ratio: Overrides this field of :attr:`acceptance`.
            fallback: Overrides this field of :attr:`acceptance`.
            selection: Overrides this field of :attr:`acceptance`.
            divergence_on: Overrides this field of :attr:`acceptance`.
            price: Overrides this field of :attr:`acceptance`.
            max_fuzzy_nats: Overrides this field of :attr:`acceptance`.
            method: ``"fsd"`` or ``"ar"``.
            seed: Seed that makes sampling reproducible.
            **model_kwargs: ``attention_mask``, and what Hugging Face adds by itself: an empty
                cache, the positions that follow from the mask, :data:`NEUTRAL_INPUTS`.

        Returns:
            ``[B, S + new]`` token ids, as Hugging Face's ``generate`` returns them.

        Raises:
            ValueError: ``model`` is not this target, an option is invalid, the generation
                configuration requests beam search, another decoding method or
                ``return_dict_in_generate``, or there are further model inputs.
            FloatingPointError: See :meth:`generate`.
        """
        if unwrap_model(model) is not self.model:
            raise ValueError("custom_generate was called on a model other than its target")
        if synced_gpus:
            raise ValueError("custom_generate does not support synced_gpus")
        config = generation_config
        if config.num_beams not in (None, 1):
            raise ValueError(f"num_beams must be 1 to decode draft trees; got {config.num_beams}")
        mode = config.get_generation_mode(_assistant_model())
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ValueError(
                "custom_generate replaces greedy search and sampling only, but the options select"
                f" {mode.value.replace('_', ' ')}"
            )
        if config.return_dict_in_generate:
            raise ValueError(
                "custom_generate returns sequences only: leave return_dict_in_generate out, or"
                " call EagleFSD.generate for origins and statistics"
            )
        attention_mask = model_kwargs.pop("attention_mask", None)
        if attention_mask is None:  # also if it was all ones
            attention_mask = torch.ones_like(input_ids)
        _check_inputs(model_kwargs, attention_mask)
        processors, warpers = list(logits_processor), None
        temperature = 0.0
        if config.do_sample:
            processors, warpers = _split_warpers(logits_processor)
            temperature = 1.0 if config.temperature is None else config.temperature
        generation = self._prepare(
            input_ids,
            attention_mask,
            config.max_length - input_ids.shape[1],
            temperature=temperature,
            logits_processor=processors,
            logits_warper=warpers,
            # The generation loop checks length and end-of-sequence tokens at no extra cost.
            stopping_criteria=[
                item
                for item in stopping_criteria
                if not isinstance(item, (MaxLengthCriteria, EosTokenCriteria))
            ],
            eos_token_id=[] if config.eos_token_id is None else config.eos_token_id,
            pad_token_id=config.pad_token_id,
            acceptance=self.acceptance.updated(
                threshold=threshold,
                divergence=divergence,
                min_ratio=min_ratio,
                fallback=fallback,
                selection=selection,
                divergence_on=divergence_on,
                price=price,
                max_fuzzy_nats=max_fuzzy_nats,
            ),
            method=method,
            seed=seed,
        )
        return _finish(generation, input_ids, streamer).sequences

    def _prepare(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        max_new_tokens: int,
        **options: Unpack[DecodeOptions],
    ) -> Generation:
        """Validate the arguments of a call; nothing is decoded yet."""
        call = self._call(max_new_tokens, **options)
        prefix_cache, pad = options.get("prefix_cache"), call.pad_token_id
        if pad is None:
            pad = self.model.generation_config.pad_token_id
        eos = call.eos_token_ids
        prompts = _prompts(input_ids, attention_mask, self.target, None if pad in eos else pad)
        if prefix_cache is not None and len(prompts) != 1:
            raise ValueError(f"a prefix cache needs a single prompt; got {len(prompts)}")
        limits = self._limit_new_tokens(list(map(len, prompts)), call.max_new_tokens)
        requests = [
            call.request(ids, prompt, limit, row, len(prompts))
            for row, (ids, prompt, limit) in enumerate(zip(input_ids, prompts, limits, strict=True))
        ]
        fill = pad if pad is not None else next(iter(call.given_eos), 0)
        new_engine = partial(self._new_engine, caches=prefix_cache, rows=len(requests))
        return Generation(new_engine, requests, fill, prefix_cache, self._idle)

    def _request(
        self, ids: Tensor | Sequence[int], row: int = 0, **options: Unpack[PromptDecodeOptions]
    ) -> Request:
        """Return the request for a prompt without padding."""
        if options.get("prefix_cache") is not None:
            raise ValueError("a batch keeps its own caches; leave prefix_cache out")
        call, tensor = self._call(**options), prompt_tensor(ids)
        (prompt,) = _prompts(tensor[None], torch.ones_like(tensor)[None], self.target, None)
        (limit,) = self._limit_new_tokens([len(prompt)], call.max_new_tokens)
        return replace(call.request(tensor, prompt, limit, row), row=0)

    def _call(
        self,
        max_new_tokens: int,
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        sampling: SamplingConfig | Mapping[str, Any] | None = None,
        threshold: float | None = None,
        min_ratio: float | None = None,
        divergence: str | None = None,
        acceptance: AcceptanceConfig | Mapping[str, Any] | None = None,
        method: str = "fsd",
        rule: AcceptanceRule | str | None = None,
        eos_token_id: int | Sequence[int] | Set[int] | None = None,
        stopping_criteria: StoppingCriteria | Sequence[StoppingCriteria] | None = None,
        logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None = None,
        logits_warper: LogitsProcessor | Sequence[LogitsProcessor] | None = None,
        details: int | None = None,
        pad_token_id: int | None = None,
        prefix_cache: PrefixCache | None = None,
    ) -> _Call:
        """Validate the options of a call; the last concerns the call as a whole."""
        if prefix_cache is not None and not isinstance(prefix_cache, PrefixCache):
            raise ValueError(f"prefix_cache must be a PrefixCache; got {prefix_cache!r}")
        sampling = _override(
            SamplingConfig(),
            "sampling",
            sampling,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
        )
        acceptance = _override(
            self.acceptance,
            "acceptance",
            acceptance,
            threshold=threshold,
            min_ratio=min_ratio,
            divergence=divergence,
            rule=rule if isinstance(rule, str) and acceptance is None else None,
        )
        if isinstance(rule, str):
            acceptance, rule = acceptance.updated(rule=rule), None
        elif rule is not None and not isinstance(rule, AcceptanceRule):
            raise ValueError(f"rule must be an AcceptanceRule or the name of one; got {rule!r}")
        self._check_method(method)
        if sampling.top_k > self.target.vocab_size:
            raise ValueError(
                f"top_k must be at most the vocabulary of {self.target.vocab_size} tokens;"
                f" got {sampling.top_k}"
            )
        limits = CallOptions.from_dict(
            {"max_new_tokens": max_new_tokens, "details": details, "pad_token_id": pad_token_id}
        )
        warpers = None if logits_warper is None else as_list("logits_warper", logits_warper)
        decision = Decision.of(
            sampling,
            acceptance,
            rule,
            as_list("logits_processor", logits_processor),
            warpers,
            limits.details,
        )
        check_warpers(warpers or (), self.target.vocab_size, self.target.device)
        tree = self.tree_for(acceptance)
        chosen = sampling.seed
        if chosen is None and sampling.temperature > 0.0:
            chosen = self.target.agree(int(torch.randint(2**62, ())))
            if self.compile == "auto":  # compiling restores torch's global generator when it ends
                chosen += next(self._unseeded)
        return _Call(
            limits.max_new_tokens,
            self.eos_token_ids if eos_token_id is None else end_tokens(eos_token_id),
            limits.pad_token_id,
            StoppingCriteriaList(as_list("stopping_criteria", stopping_criteria)),
            decision,
            chosen or 0,
            tree,
            # A tree that consists of its root is plain decoding.
            method == "fsd" and tree.total_tokens > 1,
            self.drafter.draws_chains,
            rule is None and acceptance.lossless,
        )

    def _new_engine(
        self, request: Request, caches: PrefixCache | None = None, rows: int = 1
    ) -> Engine:
        """Return an engine without rows that decodes requests like this one, so many at once."""
        drafter = self.drafter if request.drafted else NoDrafter()
        self._check_target(drafter)
        compiled = rows if self.compile is True else 0
        kind: Hashable = None
        made_with, device = None, self.target.device
        if not self.capture:
            self._idle.clear()
        elif caches is None and has_graphs(device) and self.target.one_device:
            # Work on other streams could overlap with that of the calls before.
            stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
            kind = request.engine, tuple(self.batch_trees.items()), stream, compiled
            self.target.register(drafter.reads)  # hooks are part of the description
            made_with = self._describe()
            kept = self._idle.take(kind, made_with)
            if kept is not None:
                return kept
        sampler = request.decision.sampler
        draw = sampler.draw_draft if request.draws else None
        auto = self.compile == "auto"
        engine = Engine(
            self.target,
            drafter,
            request.tree,
            draw,
            caches,
            compiled=compiled,
            # Processes that decode together would have to compile at the same time.
            background=self._background if auto and self.target.group is None else None,
            capture=self.capture,
            batch_trees=self.batch_trees if request.varies and request.drafted else None,
            depths=self._depths,
        )
        engine.kind, engine.made_with = kind, made_with
        return engine

    def _describe(self) -> object:
        """Return what all engines depend on."""
        return self.drafter, self.compile, describe_modules(self.model, self.drafter.network)

    def _check_target(self, drafter: Drafter) -> None:
        """Check the target, unless that has been done; see :func:`check_target`."""
        with using_device(self.target.device):
            check_target(self.target, projected=drafter.projects)

    def _check_method(self, method: str) -> None:
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
        if method == "fsd" and isinstance(self.drafter, NoDrafter):
            raise ValueError('this model has no drafter; only method="ar" is available')
        width = max(self.tree.top_k, self.exact_tree.top_k)
        if method == "fsd" and width > self.target.vocab_size:
            raise ValueError(
                f"the tree's top_k must be at most the vocabulary of {self.target.vocab_size}"
                f" tokens; got {width}"
            )

    def _limit_new_tokens(self, lengths: list[int], max_new_tokens: int) -> list[int]:
        """Return ``max_new_tokens`` of each row, reduced to fit the context after its prompt."""
        target = self.target
        if max(lengths) >= target.context_length:
            raise ValueError(
                f"the prompt has {max(lengths)} tokens, which leaves no room for an answer in the"
                f" target's context of {target.context_length} tokens"
            )
        rooms = [min(max_new_tokens, target.context_length - length) for length in lengths]
        if min(rooms) < max_new_tokens:
            log.warning(
                "the context of %d tokens has room for only %d new tokens",
                target.context_length,
                min(rooms),
            )
        target.check_length(max(map(operator.add, lengths, rooms)))
        return rooms


def _override(
    default: Config, name: str, given: Config | Mapping[str, Any] | None, **fields: Any
) -> Config:
    """Return ``given``, or ``default`` with the fields that are not None changed."""
    names = [field for field, value in fields.items() if value is not None]
    if given is None:
        return default.updated(**fields)
    if names:
        raise ValueError(f"pass either {name} or {', '.join(names)}, not both")
    return as_options(type(default), name, given)


def _finish(
    generation: Generation, input_ids: Tensor, streamer: BaseStreamer | None
) -> GenerateOutput:
    """Decode until every row has ended; the streamer receives the prompt first."""
    if streamer is not None:
        if not hasattr(streamer, "put") or not hasattr(streamer, "end"):
            raise ValueError(f"streamer must be a Hugging Face streamer; got {streamer!r}")
        if input_ids.shape[0] != 1:
            raise ValueError(f"a streamer needs a single prompt; got {input_ids.shape[0]}")
        streamer.put(input_ids[0].cpu())
    return generation.finish(streamer)


def _check_inputs(inputs: dict[str, Any], attention_mask: Tensor) -> None:
    """Reject inputs of the target's forward call, unless the target would ignore them."""
    for name, value in inputs.items():
        if name in NEUTRAL_INPUTS or value is None or (isinstance(value, dict) and not value):
            continue
        if name == "past_key_values":
            if isinstance(value, (DynamicCache, StaticCache)) and not value.get_seq_length():
                continue
            raise ValueError(
                "custom_generate does not support past_key_values other than an empty DynamicCache"
                " or StaticCache; to keep tokens, pass a prefix_cache to EagleFSD.generate"
            )
        if name == "position_ids" and _follow_from_mask(value, attention_mask):
            continue
        if name == "mm_encoder_outputs":  # Hugging Face has encoded the images already
            name = "pixel_values"
        raise ValueError(
            f"custom_generate does not support {name}: the target reads only input_ids and"
            " attention_mask"
        )


def _follow_from_mask(position_ids: Tensor, attention_mask: Tensor) -> bool:
    """Whether positions, ``[B, S]`` or ``[..., B, S]``, count the tokens of each row."""
    expected = attention_mask.cumsum(-1) - 1
    if position_ids.shape[-2:] not in (expected.shape, expected[:1].shape):
        return False
    return bool(((position_ids == expected) | (attention_mask == 0)).all())


def _assistant_model() -> PreTrainedModel | None:
    """Return the assistant model of the calling ``generate``, which does not pass it on."""
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["assistant_model"]


def _split_warpers(
    processors: Sequence[LogitsProcessor],
) -> tuple[list[LogitsProcessor], list[LogitsProcessor]]:
    """Split Hugging Face's list into processors and the warpers at its end."""
    first = len(processors)
    while first and isinstance(processors[first - 1], WARPERS):
        first -= 1
    return list(processors[:first]), list(processors[first:])


def _prompts(
    input_ids: Tensor, attention_mask: Tensor | None, target: Target, pad: int | None
) -> list[list[int]]:
    """Return each row's tokens without padding."""
    if not isinstance(input_ids, Tensor):
        raise ValueError(f"input_ids must be a tensor [B, S]; got a {type(input_ids).__name__}")
    if input_ids.ndim != 2 or input_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "input_ids must be integers (int32 or int64) of shape [B, S]; got"
            f" {str(input_ids.dtype).removeprefix('torch.')} of shape {tuple(input_ids.shape)}"
        )
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise ValueError(
            f"attention_mask must be a tensor [B, S]; got a {type(attention_mask).__name__}"
        )
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids) if pad is None else input_ids != pad
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}; got"
            f" {tuple(attention_mask.shape)}"
        )
    rows = zip(input_ids.tolist(), attention_mask.tolist(), strict=True)
    prompts = [[token for token, kept in zip(*row, strict=True) if kept] for row in rows]
    if not prompts or not all(prompts):
        raise ValueError("empty prompt: every row needs at least one token")
    least, most = min(map(min, prompts)), max(map(max, prompts))
    if least < 0 or most >= target.vocab_size:
        raise ValueError(
            f"input_ids must be in [0, {target.vocab_size - 1}], the target's vocabulary; got"
            f" {least} to {most}"
        )
    return prompts
