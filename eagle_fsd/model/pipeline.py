"""Decoding with a target and a drafter: :class:`EagleFSD`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer
from typing_extensions import Unpack

from eagle_fsd.bundled import BUNDLED_DRAFTERS, BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.model import custom_generate as hugging_face
from eagle_fsd.model.arguments import (
    MAX_BATCH,
    CallOptions,
    limit_new_tokens,
    model_end_tokens,
    override,
    prompt_tensor,
    read_prompts,
)
from eagle_fsd.model.batch import Batch, EngineOptions, EnginePool
from eagle_fsd.model.beam_search import BeamSearchOutput, beam_search
from eagle_fsd.model.checkpoint import drafter_file
from eagle_fsd.model.compilation import BackgroundCompiler, forget_compiled, using_device
from eagle_fsd.model.config import (
    SETTINGS_FILE,
    AcceptanceConfig,
    BeamSearchConfig,
    Certificate,
    Settings,
    TreeConfig,
    read_settings,
)
from eagle_fsd.model.drafters.draft_model import DraftModel
from eagle_fsd.model.drafters.interface import Drafter, NoDrafter
from eagle_fsd.model.drafters.loading import WITHOUT_FILES, load_drafter
from eagle_fsd.model.execution import ExecutionOptions
from eagle_fsd.model.generation import Completion, GenerateOutput, Generation, decode_many
from eagle_fsd.model.identity import warn_of_other_models
from eagle_fsd.model.loading import TOKENIZER_OPTIONS, load_target, load_tokenizer
from eagle_fsd.model.packed_weights import forget_packed
from eagle_fsd.model.prefix_cache import PrefixCache
from eagle_fsd.model.request import DecodeOptions, Prompt, Request, read_options
from eagle_fsd.model.target import Target
from eagle_fsd.model.wrappers import unwrap_model

log = logging.getLogger(__name__)

#: Values of ``method``: draft trees, or plain autoregressive decoding.
METHODS = ("fsd", "ar")


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
        exact_tree: Shape of the draft tree of lossless calls, which accept only the target's own
            tokens. Assigning to :attr:`tree` sets it too.
        has_default_tree: Whether no argument, file or assignment to :attr:`tree` has set a tree.
        batch_trees: Shapes of the draft trees of lossless calls, by the least number of prompts
            decoded at once; up to rounding, tokens do not depend on them. Not used if
            :attr:`exact_tree` has a single node, or is a chain whose tokens are sampled. Assigning
            to :attr:`tree` clears them.
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
        self.drafter = (NoDrafter() if drafter is None else drafter).attach(self.target)
        if self.drafter.network is not None:
            self.drafter.network.eval()
        # The setter also sets exact_tree, batch_trees and has_default_tree.
        self.tree = tree or TreeConfig.for_device(self.target.device.type)
        self.has_default_tree = tree is None
        self.acceptance = acceptance or AcceptanceConfig()
        self._certified: tuple[AcceptanceConfig, TreeConfig, Certificate] | None = None
        self.compile = False
        self._background = BackgroundCompiler()
        self._seed_offsets = iter(range(1, 2**62))  # Python 3.14 cannot copy itertools.count
        self.capture = True
        self._pool = EnginePool()
        self._name: str | None = None
        self._reduced = False  # by `draft_vocabulary`, which settings do not state
        self._tokenizer_options: dict[str, Any] = {}
        if tokenizer is not None:
            self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | nn.Module | None = None,
        drafter: str | Path | Drafter | nn.Module | None = None,
        *,
        dtype: str | torch.dtype | None = None,
        device_map: str | torch.device | dict[str, Any] | None = None,
        settings: str | Path | None = None,
        tree: TreeConfig | Mapping[str, Any] | None = None,
        acceptance: AcceptanceConfig | Mapping[str, Any] | None = None,
        total_tokens: int | None = None,
        depth: int | None = None,
        top_k: int | None = None,
        draft_vocabulary: int | str | Path | None = None,
        compile: bool | Literal["auto"] = False,
        token: str | None = None,
        **target_options: Any,
    ) -> EagleFSD:
        """Load a target and a drafter; the bundled pair if neither is given.

        Args:
            target: A folder, a Hub name, a GGUF file, or a loaded model, which may be a PEFT or
                compiled model; :func:`~eagle_fsd.model.gguf.locate_model` says how to name a GGUF
                file. Default: the bundled target.
            drafter: A folder, a Hub name, a loaded drafter, a loaded draft model, ``"ngram"``,
                ``"adaptive-ngram"``, or a key of :data:`~eagle_fsd.bundled.BUNDLED_DRAFTERS`.
                Default without a target: the bundled head.
            dtype: Such as ``"bfloat16"``. Default: float32 on a CPU, else the checkpoint's own.
            device_map: As in Hugging Face. Default: the GPU if there is one, else the CPU.
            settings: An ``fsd.json`` file with tree and acceptance options. Default: that in the
                folder or repository ``drafter``; decoding is lossless if there is none.
            tree: Shape of the draft tree, as an object or a dictionary, instead of that in
                ``settings``. Fields that a dictionary lacks have :class:`TreeConfig`'s defaults.
            acceptance: Acceptance options, as an object or a dictionary, instead of those in
                ``settings``. Without a threshold or a rule, decoding is lossless.
            total_tokens: Overrides this field of the tree; not allowed together with ``tree``.
            depth: As ``total_tokens``.
            top_k: As ``total_tokens``.
            draft_vocabulary: Number of tokens, the most frequent ones, that an EAGLE-1/2 head
                drafts, or a file that ranks them, see :func:`~.checkpoint.select_tokens`.
                Default: all.
            compile: Whether the passes of drafter and target, and verification, are compiled by
                ``torch.compile``. True compiles them when a call first needs them, which takes
                about a minute, for as many rows as the call has prompts, or ``max_batch`` in
                :meth:`generate_many`. ``"auto"`` compiles those for a single row in a background
                thread once decoding has taken about as long; later answers use them. Sampling is
                then reproducible only with a ``seed``, and in half precision, tokens can depend on
                when that happens.
            token: A Hugging Face token for gated repositories.
            **target_options: ``quantize`` and ``tp_plan``, see
                :func:`~eagle_fsd.model.loading.load_target`; all others are passed to
                ``AutoModelForCausalLM.from_pretrained``.

        Raises:
            LoadError: A model's files are missing, damaged, or need a missing package.
            CheckpointError: The drafter's files are missing or damaged.
            ValueError: A target is given without a drafter, they do not match, the architecture is
                not supported, or an option is invalid.
            OSError: The file ``settings`` cannot be read.
            TypeError: An option is unknown or does not apply to a target or drafter that is already
                loaded, or ``target`` or ``drafter`` is of another type.
        """
        if target is None:
            target = BUNDLED_TARGET
            drafter = BUNDLED_HEAD if drafter is None else drafter
        if drafter is None:
            raise ValueError(
                "pass both a target and a drafter (--drafter): the bundled head fits the bundled"
                " target only, eagle-fsd train trains one for yours, and ngram needs no training"
            )
        if isinstance(drafter, str):
            drafter = BUNDLED_DRAFTERS.get(drafter, drafter)
        if isinstance(drafter, nn.Module) and not isinstance(drafter, Drafter):
            drafter = DraftModel(unwrap_model(drafter))
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
        model._name, model._reduced = name, draft_vocabulary is not None
        own = {key: target_options[key] for key in TOKENIZER_OPTIONS if key in target_options}
        model._tokenizer_options = {"token": token, **own}
        model.compile = compile
        model.configure(from_file)
        shape = {"total_tokens": total_tokens, "depth": depth, "top_k": top_k}
        if tree is not None or any(value is not None for value in shape.values()):
            model.tree = override(model.tree, "tree", tree, **shape)
        model.acceptance = override(model.acceptance, "acceptance", acceptance)
        return model

    @property
    def tree(self) -> TreeConfig:
        """Shape of the draft tree; for lossless calls, see :attr:`exact_tree`."""
        return self._tree

    @tree.setter
    def tree(self, tree: TreeConfig) -> None:
        self._tree = self.exact_tree = tree
        self.has_default_tree = False
        self.batch_trees: dict[int, TreeConfig] = {}

    @property
    def compile(self) -> bool | Literal["auto"]:
        """Whether passes are compiled, see :meth:`from_pretrained`."""
        return self._compile

    @compile.setter
    def compile(self, compile: bool | Literal["auto"]) -> None:
        if not (isinstance(compile, bool) or compile == "auto"):
            raise ValueError(f"compile must be True, False or 'auto'; got {compile!r}")
        self._compile = compile

    def configure(self, settings: Settings) -> None:
        """Override the tree and acceptance options that ``settings``, an ``fsd.json`` file, sets.

        Logs a warning if they are not lossless and the file was written for another target, drafter
        or data type: they may lose more accuracy here.
        """
        if settings.tree:
            self.tree = self.tree.updated(**settings.tree)
        if settings.exact is not None:
            self.exact_tree, self.has_default_tree = settings.exact, False
        if settings.batch:
            self.batch_trees = {int(rows): tree for rows, tree in settings.batch.items()}
            self.has_default_tree = False
        self.acceptance = self.acceptance.overridden(settings.acceptance)
        others = warn_of_other_models(settings, self.model, self.drafter, self.target.dtype)
        if settings.certificate is not None:
            # Options that were set before, and that the file lacks, were not certified.
            own = AcceptanceConfig().overridden(settings.acceptance)
            self._certified = None if others else (own, self.tree, settings.certificate)

    def certificate_for(self, acceptance: AcceptanceConfig) -> Certificate | None:
        """Return the bound on the loss of calls with the options ``acceptance``.

        None if there is none for this pair, these options, and the present draft tree. A bound
        holds at the certificate's temperature, with other sampling options at their defaults.
        """
        if self._certified is None or self._reduced:
            return None
        options, tree, certificate = self._certified
        same = (acceptance, self.tree) == (options, tree) and certificate.decoder == "eagle-fsd"
        return certificate if same else None

    def tree_for(self, acceptance: AcceptanceConfig) -> TreeConfig:
        """Return the draft tree of calls with the options ``acceptance``."""
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
        return load_tokenizer(name, **self._tokenizer_options)

    @property
    def eos_token_ids(self) -> list[int]:
        """The target's end-of-sequence tokens, which ``eos_token_id`` overrides in a call."""
        return model_end_tokens(self.model)

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
                  of one, such as ``"margin 0.8"``; see :class:`AcceptanceConfig`. The fields
                  ``max_fuzzy_nats`` and ``exact_first`` of ``acceptance`` restrict it.
                - ``eos_token_id``: one id or several that end a row, ``[]`` for none. Default: the
                  target's.
                - ``pad_token_id``: fills rows that end before others. Default: the target's, else
                  the first of ``eos_token_id``, else 0.
                - ``stopping_criteria``: a Hugging Face stopping criterion or a list of them,
                  checked after every token, with ``None`` for the scores.
                - ``logits_processor``: a Hugging Face logits processor or a list of them. Each tree
                  node is processed with its own prefix, so they must not keep state. Processors
                  from the target's generation configuration, such as a repetition penalty, are not
                  applied: for those, call ``target.generate`` with :meth:`custom_generate`.
                - ``logits_warper``: a Hugging Face logits processor or a list of them, instead of
                  ``temperature``, ``top_p``, ``top_k`` and ``min_p``; a ``temperature`` above 0
                  then only enables sampling. They must not read previous tokens.
                - ``prefix_cache``: keeps the caches for the next turn of a chat, see
                  :class:`PrefixCache`; for a single prompt only.
                - ``details``: number of alternatives to report for every token, along with its
                  log-probability and divergence, in the chunks of :meth:`stream` and the results of
                  :meth:`generate_many`. Default: no details.

        Raises:
            ValueError: An argument is invalid, or a field is passed both by itself and in its
                config object.
            FloatingPointError: The target produced NaN or infinite logits, or a processor or
                warper such scores or -inf for every token.
            MemoryError: There is not enough memory for a prompt.
            Exception: That of a stopping criterion, a processor, a warper or a rule. (An error in
                one row ends the call.)
        """
        generation = self.stream(input_ids, attention_mask, max_new_tokens, **options)
        if streamer is not None:
            if not hasattr(streamer, "put") or not hasattr(streamer, "end"):
                raise ValueError(f"streamer must be a Hugging Face streamer; got {streamer!r}")
            if input_ids.shape[0] != 1:
                raise ValueError(f"a streamer needs a single prompt; got {input_ids.shape[0]}")
            streamer.put(input_ids[0].cpu())
        return generation.finish(streamer)

    def stream(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 256,
        **options: Unpack[DecodeOptions],
    ) -> Generation:
        """Decode step by step; see :meth:`generate` for arguments and errors.

        Returns:
            An iterable of one :class:`StreamChunk` per row and step. Nothing is decoded until it is
            iterated.
        """
        call, prefix_cache = self._template(max_new_tokens, **options), options.get("prefix_cache")
        requests, fill = self._requests(call, input_ids, attention_mask)
        if prefix_cache is not None and len(requests) != 1:
            raise ValueError(f"a prefix cache needs a single prompt; got {len(requests)}")
        return Generation(self._engine_options(len(requests), prefix_cache), requests, fill)

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
        is the one that :meth:`generate` gives for its prompt alone (or as row ``i`` of a call, if
        it is sampled), up to rounding, which depends on the number of rows. Drafters that adapt to
        all rows, :class:`AdaptiveNGramDrafter` and draft models of adaptive depth, are an
        exception for answers that depend on the draft tree.

        An answer that fails does not stop the others: a warning names its prompt, and the first
        such error is raised at the end. Exceptions of processors, warpers and rules do stop them.

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
            ValueError: See :meth:`generate`; for an invalid prompt or option, when a prompt is
                read, which drops the answers in progress.
            FloatingPointError: See :meth:`generate`; after the other answers.
            MemoryError: There will never be enough memory for a prompt; after the other answers.
            Exception: That of a stopping criterion, after the other answers; any other, at once.
        """
        max_batch = CallOptions.from_dict({"max_batch": max_batch}).max_batch
        if not isinstance(prompts, Iterable) or isinstance(prompts, str):
            raise ValueError(f"prompts must be several prompts; got {prompts!r}")

        def requests() -> Iterator[Request]:
            seeds = {"seed", "sampling"}
            for index, prompt in enumerate(prompts):
                if not isinstance(prompt, Prompt):
                    prompt = Prompt(prompt)
                given: Any = {"max_new_tokens": max_new_tokens, **options, **prompt.options}
                row = index if seeds & options.keys() and not seeds & prompt.options.keys() else 0
                yield self.request(prompt.ids, row=row, **given)

        return decode_many(self.batch(max_batch, compiled_rows=max_batch), requests())

    def request(
        self,
        ids: Tensor | Sequence[int],
        max_new_tokens: int = 256,
        *,
        row: int = 0,
        **options: Unpack[DecodeOptions],
    ) -> Request:
        """Validate the token ids ``[S]`` of a prompt for a :class:`Batch`.

        See :meth:`generate` for the options, which are the same but for ``prefix_cache`` and
        ``pad_token_id``. With a seed, the prompt is sampled as row ``row`` of a call.
        """
        if options.get("prefix_cache") is not None:
            raise ValueError("a batch keeps its own caches; leave prefix_cache out")
        if options.get("pad_token_id") is not None:
            raise ValueError("a batch fills no rows; leave pad_token_id out")
        call, tensor = self._template(max_new_tokens, **options), prompt_tensor(ids)
        (prompt,) = read_prompts(tensor[None], None, self.target, pad=None)
        (limit,) = limit_new_tokens(self.target, [len(prompt)], call.max_new_tokens)
        return replace(call.of_prompt(tensor, prompt, limit, row=row), row=0)

    def batch(self, max_rows: int, max_length: int | None = None, compiled_rows: int = 1) -> Batch:
        """Return a batch without requests, which decodes requests of :meth:`request`.

        :meth:`Batch.close` ends it.

        Args:
            max_rows: Maximum number of requests that are decoded at once.
            max_length: See :class:`Batch`.
            compiled_rows: The only number of requests with which steps are compiled if
                :attr:`compile` is True.

        Raises:
            ValueError: An argument is not an integer of at least 1.
        """
        given = {"max_rows": max_rows, "max_length": max_length, "compiled_rows": compiled_rows}
        sizes = CallOptions.from_dict(given)
        options = self._engine_options(sizes.compiled_rows)
        return Batch(options, sizes.max_rows, sizes.max_length)

    def release_memory(self) -> None:
        """Free the memory that is kept for the next call.

        On CUDA, the caches and CUDA graphs of calls that have ended are kept for those with the
        same options, up to :data:`~eagle_fsd.model.batch.MAX_POOLED_ENGINES` of them, until memory
        is short. Compiled passes and, on a CPU, packed weights are dropped, too; later calls make
        them again.
        """
        modules = [item for item in (self.model, self.drafter.network) if item is not None]
        self._pool.clear()
        self._background.forget()
        forget_compiled(*modules)
        forget_packed(*modules)

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

        The result is that of beam search in Hugging Face's ``generate`` with ``do_sample=False``,
        without logits processors. It does not depend on the drafter or on :attr:`acceptance`. Beams
        that score equally up to rounding may be exchanged. Passes are not compiled or captured.

        Args:
            input_ids: See :meth:`generate`.
            attention_mask: See :meth:`generate`.
            max_new_tokens: See :meth:`generate`.
            num_beams: Running hypotheses per prompt, at least 1.
            num_return_sequences: Hypotheses to return per prompt, at most ``num_beams``.
            length_penalty: Finished hypotheses are ranked by their log-probability, divided by
                their number of new tokens to this power.
            early_stopping: When to end a search that has finished ``num_beams`` hypotheses: True,
                at once; False, when no running one scores above the worst of them at its present
                length; ``"never"``, when none can exceed it.
            eos_token_id: See :meth:`generate`.
            pad_token_id: See :meth:`generate`, but 0 stands for the first of ``eos_token_id``.
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
        call = self._template(
            max_new_tokens,
            acceptance=AcceptanceConfig(),
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            method=method,
        )
        requests, fill = self._requests(call, input_ids, attention_mask)
        fill = fill or next(iter(call.eos_token_ids), 0)  # as in Hugging Face, which ignores 0
        drafter = self.drafter.attach(self.target) if method == "fsd" else NoDrafter()
        with using_device(self.target.device):
            return beam_search(self.target, drafter, config, requests=requests, fill=fill)

    custom_generate = hugging_face.custom_generate

    def _requests(
        self, call: Request, input_ids: Tensor, attention_mask: Tensor | None
    ) -> tuple[list[Request], int]:
        """Return the request of each prompt ``[B, S]``, and the token that fills their rows."""
        pad, eos = call.pad_token_id, call.eos_token_ids
        if pad is None:
            pad = self.model.generation_config.pad_token_id
        prompts = read_prompts(input_ids, attention_mask, self.target, None if pad in eos else pad)
        limits = limit_new_tokens(self.target, list(map(len, prompts)), call.max_new_tokens)
        requests = [
            call.of_prompt(ids, prompt, limit, row=row, rows=len(prompts))
            for row, (ids, prompt, limit) in enumerate(zip(input_ids, prompts, limits, strict=True))
        ]
        return requests, pad if pad is not None else next(iter(eos), 0)

    def _template(self, max_new_tokens: int, **options: Unpack[DecodeOptions]) -> Request:
        """Validate the options of a call, and return what its requests have in common."""
        # Compiling in the background restores torch's generator when it ends.
        offset = next(self._seed_offsets) if self.compile == "auto" else 0
        request = read_options(self.target, self.acceptance, max_new_tokens, offset, **options)
        self._check_method(options.get("method", "fsd"))
        decision = request.decision
        tree = self.exact_tree if request.uses_batch_trees else self.tree
        sampled = decision.sampling.temperature > 0.0
        samples_chains = self.drafter.draws_chains and tree.top_k == 1 and sampled
        return replace(
            request,
            tree=tree,
            # A tree that consists of its root is plain decoding.
            drafted=request.drafted and tree.total_tokens > 1,
            uses_batch_trees=request.uses_batch_trees and not samples_chains,
            samples_chains=samples_chains,
        )

    def _engine_options(self, rows: int = 1, caches: PrefixCache | None = None) -> EngineOptions:
        """Return the options of engines that decode ``rows`` prompts at once."""
        # Processes that decode together would have to compile at the same time.
        auto = self.compile == "auto" and self.target.group is None
        execution = ExecutionOptions(
            compiled_rows=rows if self.compile is True else 0,
            background=self._background if auto else None,
            capture=self.capture,
        )
        return EngineOptions(
            target=self.target,
            drafter=self.drafter,
            execution=execution,
            batch_trees=self.batch_trees,
            caches=caches,
            pool=self._pool,
        )

    def _check_method(self, method: str) -> None:
        """Raise ``ValueError`` for an unknown method, or ``"fsd"`` without a drafter."""
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
        if method == "fsd" and isinstance(self.drafter, NoDrafter):
            raise ValueError('this model has no drafter; only method="ar" is available')
