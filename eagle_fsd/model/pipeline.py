"""Decoding with a target and a draft head: :class:`EagleFSD`."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from eagle_fsd.bundled import BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.model.acceptance import rule_for
from eagle_fsd.model.checkpoint import load_head, settings_file
from eagle_fsd.model.config import FSDSettings, read_settings
from eagle_fsd.model.drafters.eagle import EagleHead
from eagle_fsd.model.engine import Engine
from eagle_fsd.model.generation import Decoding, GenerateOutput
from eagle_fsd.model.loading import load_target, load_tokenizer
from eagle_fsd.model.prefix_cache import Conversation
from eagle_fsd.model.sampling import WARPERS, History, Sampler
from eagle_fsd.model.stats import PhaseClock
from eagle_fsd.model.target import Target
from eagle_fsd.model.verify import AcceptanceRule

log = logging.getLogger(__name__)

METHODS = ("fsd", "ar")


class EagleFSD:
    """A target and its draft head, ready to decode.

    Use :meth:`from_pretrained`, or pass a loaded Hugging Face model and head.

    Args:
        model: An unmodified causal LM of Hugging Face transformers, with full attention.
        head: Attached to the same target, or None to decode plainly (``method="ar"``) only.
        settings: Defaults of every call; lossless, with the device's tree, when not given.
        tokenizer: For the convenience of callers; decoding itself works on ids.

    Raises:
        ValueError: The architecture or its attention implementation does not suit a tree pass.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head: EagleHead | None,
        settings: FSDSettings | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.model = model.eval()
        self.target = Target(model)
        self.head = head.attach(self.target).eval() if head is not None else None
        self.settings = settings or FSDSettings.for_device(self.target.device.type)
        if tokenizer is not None:
            self.tokenizer = tokenizer

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | PreTrainedModel | None = None,
        head: str | Path | EagleHead | None = None,
        *,
        dtype: str | torch.dtype | None = None,
        device_map: str | torch.device | dict[str, Any] | None = None,
        settings: str | Path | FSDSettings | None = None,
        total_tokens: int | None = None,
        depth: int | None = None,
        top_k: int | None = None,
        token: str | None = None,
        **target_options: Any,
    ) -> EagleFSD:
        """Load a target and a head; the bundled pair when neither is named.

        Args:
            target: A folder, a Hub name, or a loaded model.
            head: A folder or Hub name in the published EAGLE-1/2 layout, or a loaded head.
            dtype: ``"bfloat16"``, say. Default: float32 on a CPU, the checkpoint's own elsewhere.
            device_map: As in Hugging Face. Default: the GPU if there is one, else the CPU.
            settings: An ``fsd.json`` or settings; default: ``fsd.json`` beside the head, and
                lossless decoding where there is none.
            total_tokens, depth, top_k: The draft tree, above what the settings say.
            token: For gated repositories.
            **target_options: Handed to ``AutoModelForCausalLM.from_pretrained``.

        Raises:
            LoadError, CheckpointError: The target's or the head's files are missing or damaged.
            ValueError: Target and head do not fit, or a setting is out of its bounds.
            TypeError: An option that a loaded target cannot take.
        """
        if target is None and head is None:
            target, head = BUNDLED_TARGET, BUNDLED_HEAD
        if target is None or head is None:
            raise ValueError("name both a target and a head, or neither for the bundled pair")
        name = None
        if not isinstance(target, PreTrainedModel):
            name = str(target)
            target = load_target(name, dtype, device_map, token=token, **target_options)
        elif dtype is not None or device_map is not None or target_options:
            names = {"dtype": dtype, "device_map": device_map}
            given = [option for option, value in names.items() if value is not None]
            given += target_options
            raise TypeError(f"a loaded target takes no {', '.join(given)}: load it that way")
        wrapped = Target(target)
        values: dict[str, Any] = {}
        if isinstance(settings, FSDSettings):
            values = settings.as_dict()
        elif settings is not None:
            values = read_settings(settings)
        elif not isinstance(head, EagleHead) and (beside := settings_file(head, token)):
            values = read_settings(beside)
        if not isinstance(head, EagleHead):
            head = load_head(head, wrapped, token=token)
        merged = FSDSettings.for_device(wrapped.device.type).updated(**values)
        merged = merged.updated(total_tokens=total_tokens, depth=depth, top_k=top_k)
        model = cls(target, head, merged)
        model._name, model._token = name, token
        return model

    _name: str | None = None
    _token: str | None = None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's tokenizer, loaded when first asked for."""
        name = self._name or self.model.config._name_or_path
        if not name:
            raise ValueError("this target was not loaded from files: pass its tokenizer")
        return load_tokenizer(name, self._token)

    @property
    def end_tokens(self) -> list[int]:
        """Ids that end an answer unless a call names others: the target's."""
        eos = self.model.generation_config.eos_token_id
        return [] if eos is None else torch.as_tensor(eos).flatten().tolist()

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> GenerateOutput:
        """Decode every prompt to its end.

        Takes what :meth:`stream` takes, and ``streamer``, a Hugging Face streamer (one prompt
        only), which is given the prompt and then each step's tokens.
        """
        streamer: BaseStreamer | None = options.pop("streamer", None)
        decoding = self.stream(input_ids, attention_mask, **options)
        if streamer is not None:
            if input_ids.shape[0] != 1:
                raise ValueError("a streamer follows one prompt; this call has several")
            streamer.put(input_ids[0].cpu())
        return decoding.finish(streamer)

    def stream(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        *,
        threshold: float | None = None,
        divergence: str | None = None,
        min_ratio: float | None = None,
        fallback: str | None = None,
        selection: str | None = None,
        divergence_on: str | None = None,
        settings: FSDSettings | None = None,
        method: str = "fsd",
        rule: AcceptanceRule | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        stopping_criteria: Sequence[StoppingCriteria] | None = None,
        logits_processor: Sequence[LogitsProcessor] | None = None,
        logits_warper: Sequence[LogitsProcessor] | None = None,
        seed: int | None = None,
        conversation: Conversation | None = None,
        details: int | None = None,
    ) -> Decoding:
        """Decode step by step: iterate over the result for a :class:`StreamChunk` a row and step.

        Args:
            input_ids: ``[B, S]``; shorter prompts padded on the left.
            attention_mask: ``[B, S]``, 1 at tokens. Default: everything but the padding token, or
                everything where that is an ``eos`` too.
            max_new_tokens: At least 1; a row never grows beyond the target's context.
            temperature: 0 is greedy.
            top_p, top_k: Sampling, as in Hugging Face; ``top_k=0`` and ``top_p=1`` are off. (The
                tree's ``top_k`` is set by :meth:`from_pretrained` or ``settings``.)
            threshold, divergence, min_ratio, fallback, selection, divergence_on: See
                :class:`FSDSettings`; None takes the settings' value.
            settings: Takes the place of the model's settings.
            method: ``"fsd"``, or ``"ar"`` for plain decoding over the same cache.
            rule: An acceptance rule that takes the place of FSD's.
            eos_token_id: One id or several, ``[]`` for none; default: the target's.
            pad_token_id: Fills rows that ended; default: the target's, else the first ``eos``.
            stopping_criteria: Hugging Face's, asked after every token.
            logits_processor: Hugging Face's; each tree node is given its own prefix. Only what is
                given here is applied: for what the target's generation configuration asks for
                (a repetition penalty, say), call ``target.generate`` with
                :meth:`custom_generate`.
            logits_warper: Hugging Face's, in the place of ``top_p`` and ``top_k`` and of what
                ``temperature`` does but for switching sampling on.
            seed: Makes sampling repeatable; default: a seed from torch's own generator.
            conversation: Keeps the caches for the next turn of a chat (one prompt only): what it
                shares with this prompt is not read again.
            details: Tell of every token its log-probability under the target, the divergence
                where it stands, and so many of the likeliest tokens there: in the chunks.

        Raises:
            ValueError: Something of the above is out of its bounds; the message says what.
            FloatingPointError: The target produced NaN or infinite logits.
        """
        target = self.target
        settings = (settings or self.settings).updated(
            threshold=threshold,
            divergence=divergence,
            min_ratio=min_ratio,
            fallback=fallback,
            selection=selection,
            divergence_on=divergence_on,
        )
        self._check_method(method, settings)
        eos, pad, padding = self._end_tokens(eos_token_id, pad_token_id)
        prompts = _prompts(input_ids, attention_mask, target, padding)
        max_new_tokens = self._room(max(map(len, prompts)), max_new_tokens)
        if top_k > target.vocabulary:
            raise ValueError(
                f"top_k is {top_k}, more than the vocabulary of {target.vocabulary} tokens"
            )
        if seed is not None and not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed must be a whole number of 64 bits; got {seed!r}")
        if conversation is not None and len(prompts) != 1:
            raise ValueError("a conversation is one prompt's; this call has several")
        if details is not None and details < 0:
            raise ValueError(f"details must be 0 or more; got {details}")
        generator = None
        if temperature:
            generator = torch.Generator(target.device)
            generator.manual_seed(seed if seed is not None else int(torch.randint(2**62, ())))
        sampler = Sampler(
            temperature,
            top_k,
            top_p,
            logits_processor or (),
            logits_warper,
            draw_from_draft=settings.selection == "sample",
            warp_draft=rule is not None or settings.divergence_on == "warped",
            draw_uniform=rule is not None,
            generator=generator,
        )
        history = None
        if sampler.needs_history:
            room = max_new_tokens + settings.depth + 2
            history = History(input_ids.to(target.device, torch.long), room)
        clock = PhaseClock(target.device)

        def make_engine() -> Engine:
            return Engine(
                target,
                self.head if method == "fsd" else None,
                settings,
                rule or rule_for(settings),
                sampler,
                prompts,
                max_new_tokens,
                clock,
                history,
                conversation,
                details,
            )

        criteria = StoppingCriteriaList(stopping_criteria or [])
        return Decoding(make_engine, clock, input_ids, max_new_tokens, eos, pad, criteria)

    def custom_generate(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        threshold: float | None = None,
        divergence: str | None = None,
        min_ratio: float | None = None,
        fallback: str | None = None,
        selection: str | None = None,
        divergence_on: str | None = None,
        method: str = "fsd",
        seed: int | None = None,
        **model_kwargs: Any,
    ) -> Tensor:
        """The decoding loop for ``target.generate(..., custom_generate=fsd.custom_generate)``.

        Takes its sampling options from Hugging Face's generation configuration, FSD's own from the
        call, and returns the sequences as ``generate`` does. (Hugging Face hands over what the
        signature names and nothing else, so FSD's options are spelled out.)
        """
        if model is not self.model:
            raise ValueError("custom_generate belongs to another target than the one it was given")
        config = generation_config
        if config.num_beams != 1:
            raise ValueError("draft trees and beam search do not go together: set num_beams=1")
        if config.return_dict_in_generate:
            raise ValueError(
                "custom_generate returns sequences alone: leave return_dict_in_generate out, or"
                " call EagleFSD.generate for origins and statistics"
            )
        processors, warpers = _split_warpers(logits_processor)
        decoding = self.stream(
            input_ids,
            model_kwargs.get("attention_mask"),
            max_new_tokens=config.max_length - input_ids.shape[1],
            temperature=1.0 if config.do_sample else 0.0,
            logits_processor=processors,
            logits_warper=warpers,
            # Length and end tokens are seen to here; to ask again costs a look at every token.
            stopping_criteria=[
                item
                for item in stopping_criteria
                if not isinstance(item, (MaxLengthCriteria, EosTokenCriteria))
            ],
            eos_token_id=[] if config.eos_token_id is None else config.eos_token_id,
            pad_token_id=config.pad_token_id,
            threshold=threshold,
            divergence=divergence,
            min_ratio=min_ratio,
            fallback=fallback,
            selection=selection,
            divergence_on=divergence_on,
            method=method,
            seed=seed,
        )
        return decoding.finish(streamer).sequences

    def _check_method(self, method: str, settings: FSDSettings) -> None:
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
        if method == "fsd" and self.head is None:
            raise ValueError('this model has no draft head: only method="ar" can be used')
        if method == "fsd" and settings.top_k > self.target.vocabulary:
            raise ValueError(
                f"the tree's top_k is {settings.top_k}, more than the vocabulary of"
                f" {self.target.vocabulary} tokens"
            )

    def _end_tokens(
        self, eos_token_id: int | Sequence[int] | None, pad_token_id: int | None
    ) -> tuple[set[int], int, int | None]:
        """Ids that end a row, the id that fills one that ended, and what is padding in a prompt."""
        eos = self.end_tokens
        if eos_token_id is not None:
            eos = torch.as_tensor(eos_token_id).flatten().tolist()
        pad = self.model.generation_config.pad_token_id if pad_token_id is None else pad_token_id
        fill = pad if pad is not None else next(iter(eos), 0)
        return set(eos), fill, None if pad in eos else pad

    def _room(self, longest: int, max_new_tokens: int) -> int:
        """``max_new_tokens``, or what the context has room for after ``longest`` tokens."""
        target = self.target
        if (
            not isinstance(max_new_tokens, (int, float))
            or not 1 <= max_new_tokens < math.inf
            or max_new_tokens != int(max_new_tokens)
        ):
            raise ValueError(
                f"max_new_tokens must be a whole number of at least 1; got {max_new_tokens!r}"
            )
        if longest >= target.context:
            raise ValueError(
                f"the prompt has {longest} tokens; the target's context holds {target.context},"
                " the answer included"
            )
        room = min(int(max_new_tokens), target.context - longest)
        if room < max_new_tokens:
            log.warning(
                "the context of %d tokens leaves room for %d new ones", target.context, room
            )
        target.check_length(longest + room)
        return room


def _split_warpers(
    processors: Sequence[LogitsProcessor],
) -> tuple[list[LogitsProcessor], list[LogitsProcessor]]:
    """Hugging Face's one list as processors and, from its end, what makes the sampled law."""
    warpers = list(processors)
    rest = []
    while warpers and not all(isinstance(item, WARPERS) for item in warpers):
        rest.append(warpers.pop(0))
    return rest, warpers


def _prompts(
    input_ids: Tensor, attention_mask: Tensor | None, target: Target, pad: int | None
) -> list[Tensor]:
    """Each row's tokens without padding, on the target's device."""
    if not isinstance(input_ids, Tensor):
        raise ValueError(f"input_ids must be a tensor [B, S]; got a {type(input_ids).__name__}")
    if input_ids.ndim != 2 or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise ValueError(
            f"input_ids must be whole numbers of shape [B, S]; got {tuple(input_ids.shape)} of"
            f" {str(input_ids.dtype).removeprefix('torch.')}"
        )
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        raise ValueError("attention_mask must be a tensor like input_ids")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids) if pad is None else input_ids != pad
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask is {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}"
        )
    prompts = [ids[kept.bool()] for ids, kept in zip(input_ids, attention_mask, strict=True)]
    if not prompts or not all(map(len, prompts)):
        raise ValueError("empty prompt: every row needs at least one token")
    worst = torch.stack([extreme for prompt in prompts for extreme in prompt.aminmax()])
    if int(worst.min()) < 0 or int(worst.max()) >= target.vocabulary:
        raise ValueError(
            f"the prompt holds token ids outside the target's vocabulary of {target.vocabulary}"
        )
    return [prompt.to(target.device, torch.long) for prompt in prompts]
