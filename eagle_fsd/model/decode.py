"""Decoding with a target and a draft head: :class:`EagleFSD`."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from eagle_fsd.model.checkpoint import load_head, settings_file
from eagle_fsd.model.engine import Engine
from eagle_fsd.model.head import EagleHead
from eagle_fsd.model.sampling import History, Sampler
from eagle_fsd.model.settings import FSDSettings, read_settings
from eagle_fsd.model.stats import DecodeStats, PhaseClock
from eagle_fsd.model.target import Target
from eagle_fsd.model.verify import AcceptanceRule, Origin, rule_for

log = logging.getLogger(__name__)

METHODS = ("fsd", "ar")
BUNDLED = Path(__file__).parent / "bundled"


@dataclass
class GenerateOutput:
    """What :meth:`EagleFSD.generate` returns.

    Attributes:
        sequences: ``[B, prompt + new]``: prompts as given, answers padded on the right.
        origins: ``[B, new]`` uint8, :class:`~eagle_fsd.model.verify.Origin` of each new token.
        stats: Accepted lengths, origins, seconds by phase.
    """

    sequences: Tensor
    origins: Tensor
    stats: DecodeStats


@dataclass
class StreamChunk:
    """New tokens of one row, as one step emitted them.

    Attributes:
        row: Which prompt.
        tokens: Their ids. origins: Their :class:`~eagle_fsd.model.verify.Origin`.
        finished: Whether the row is complete.
    """

    row: int
    tokens: list[int]
    origins: list[int]
    finished: bool


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
            dtype: Default: float32 on the CPU, the checkpoint's own elsewhere.
            device_map: As in Hugging Face. Default: the GPU if there is one, else the CPU.
            settings: An ``fsd.json`` or settings; default: ``fsd.json`` beside the head, and
                lossless decoding where there is none.
            total_tokens, depth, top_k: The draft tree, above what the settings say.
            token: For gated repositories.
            **target_options: Handed to ``AutoModelForCausalLM.from_pretrained``.

        Raises:
            CheckpointError: The head cannot be read or is damaged.
            ValueError: Target and head do not fit, or a setting is out of its bounds.
        """
        if target is None and head is None:
            target, head = BUNDLED / "target", BUNDLED / "head"
        if target is None or head is None:
            raise ValueError("name both a target and a head, or neither for the bundled pair")
        name = None
        if not isinstance(target, PreTrainedModel):
            name = str(target)
            device_map = device_map or ("cuda" if torch.cuda.is_available() else "cpu")
            target_options.setdefault("attn_implementation", "sdpa")
            target = AutoModelForCausalLM.from_pretrained(
                name,
                dtype=dtype or (torch.float32 if str(device_map) == "cpu" else "auto"),
                device_map=device_map,
                token=token,
                **target_options,
            )
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
        return AutoTokenizer.from_pretrained(name, token=self._token, padding_side="left")

    def generate(self, input_ids: Tensor, *args: Any, **options: Any) -> GenerateOutput:
        """Decode every prompt to its end.

        Takes what :meth:`stream` takes, and ``streamer``, a Hugging Face streamer (one prompt
        only), which is given the prompt and then each step's tokens.
        """
        streamer: BaseStreamer | None = options.pop("streamer", None)
        if streamer is not None and input_ids.shape[0] != 1:
            raise ValueError("a streamer follows one prompt; this call has several")
        decoding = Decoding(self, input_ids, *args, **options)
        if streamer is not None:
            streamer.put(input_ids[0].cpu())
        return decoding.finish(streamer)

    def stream(self, input_ids: Tensor, *args: Any, **options: Any) -> Decoding:
        """Decode step by step: iterate over the result for a :class:`StreamChunk` a row and step.

        Args:
            input_ids: ``[B, S]``; shorter prompts padded on the left.
            attention_mask: ``[B, S]``, 1 at tokens; default: everything but the padding token.
            max_new_tokens: At least 1; a row never grows beyond the target's context.
            temperature: 0 is greedy.
            top_p, top_k: Sampling, as in Hugging Face; ``top_k=0`` and ``top_p=1`` are off. (The
                tree's ``top_k`` is set by :meth:`from_pretrained` or ``settings``.)
            settings: Takes the place of the model's settings.
            threshold, divergence, ...: Single fields of :class:`FSDSettings`, above all settings;
                None leaves a field as it is.
            method: ``"fsd"``, or ``"ar"`` for plain decoding over the same cache.
            rule: An acceptance rule that takes the place of FSD's.
            eos_token_id: One id or several; default: the target's.
            pad_token_id: Fills rows that ended; default: the target's, else the first ``eos``.
            stopping_criteria: Hugging Face's, asked after every token.
            logits_processor: Hugging Face's; each tree node is given its own prefix. Only what is
                given here is applied: for what the target's generation configuration asks for
                (a repetition penalty, say), call ``target.generate`` with
                :meth:`custom_generate`.
            seed: Makes sampling repeatable; default: a seed from torch's own generator.

        Raises:
            ValueError: Something of the above is out of its bounds; the message says what.
            TypeError: An option that does not exist.
            FloatingPointError: The target produced NaN or infinite logits.
        """
        return Decoding(self, input_ids, *args, **options)

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
        signature names and nothing else, so here FSD's options are spelled out.)
        """
        if model is not self.model:
            raise ValueError("custom_generate belongs to another target than the one it was given")
        if generation_config.num_beams != 1:
            raise ValueError("draft trees and beam search do not go together: set num_beams=1")
        sampled = generation_config.do_sample
        decoding = Decoding(
            self,
            input_ids,
            attention_mask=model_kwargs.get("attention_mask"),
            max_new_tokens=generation_config.max_length - input_ids.shape[1],
            # Hugging Face's list holds the warpers too, in its own order; leave them there.
            temperature=1.0 if sampled else 0.0,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            eos_token_id=generation_config.eos_token_id,
            pad_token_id=generation_config.pad_token_id,
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


class Decoding:
    """One call on its way: checks its arguments, runs the engine, ends each row in time.

    Made by :meth:`EagleFSD.stream`, which documents the arguments. Iterating decodes; afterwards
    :meth:`output` has the whole. Stopping early is fine: ``output`` then has what there is.
    """

    def __init__(
        self,
        owner: EagleFSD,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        *,
        settings: FSDSettings | None = None,
        method: str = "fsd",
        rule: AcceptanceRule | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        stopping_criteria: Sequence[StoppingCriteria] | None = None,
        logits_processor: Sequence[LogitsProcessor] | None = None,
        seed: int | None = None,
        **changes: Any,
    ) -> None:
        target = owner.target
        self.settings = (settings or owner.settings).updated(**changes)
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
        if method == "fsd" and owner.head is None:
            raise ValueError('this model has no draft head: only method="ar" can be used')
        if method == "fsd" and self.settings.top_k > target.vocabulary:
            raise ValueError(
                f"the tree's top_k is {self.settings.top_k}, more than the vocabulary of"
                f" {target.vocabulary} tokens"
            )
        if not 1 <= max_new_tokens < math.inf or max_new_tokens != int(max_new_tokens):
            raise ValueError(
                f"max_new_tokens must be a whole number of at least 1; got {max_new_tokens!r}"
            )

        config = owner.model.generation_config
        eos = config.eos_token_id if eos_token_id is None else eos_token_id
        eos = [] if eos is None else torch.as_tensor(eos).flatten().tolist()
        pad = config.pad_token_id if pad_token_id is None else pad_token_id
        self.eos = set(eos)
        self.pad = pad if pad is not None else next(iter(eos), 0)
        self.input_ids = input_ids
        prompts = _prompts(input_ids, attention_mask, target, None if pad in self.eos else pad)
        longest = max(map(len, prompts))
        if longest >= target.context:
            raise ValueError(
                f"the prompt has {longest} tokens; the target's context holds {target.context},"
                " the answer included"
            )
        if longest + max_new_tokens > target.context:
            max_new_tokens = target.context - longest
            log.warning(
                "the context of %d tokens leaves room for %d new ones",
                target.context,
                max_new_tokens,
            )
        self.max_new_tokens = int(max_new_tokens)
        target.check_length(longest + self.max_new_tokens)

        generator = torch.Generator(target.device)
        generator.manual_seed(seed if seed is not None else int(torch.randint(2**62, ())))
        self.criteria = StoppingCriteriaList(stopping_criteria or [])
        sampler = Sampler(
            temperature,
            top_k,
            top_p,
            logits_processor or (),
            draw_from_draft=self.settings.selection == "sample",
            generator=generator,
        )
        history = None
        if sampler.needs_history:
            room = self.max_new_tokens + self.settings.depth + 2
            history = History(input_ids.to(target.device, torch.long), room)
        self.new: list[list[int]] = [[] for _ in prompts]
        self.origins: list[list[int]] = [[] for _ in prompts]
        self.stats = DecodeStats.empty(len(prompts))
        self.clock = PhaseClock(target.device)
        self.stats.seconds = self.clock.seconds
        self._steps = self._run()
        self._make_engine = lambda: Engine(
            target,
            owner.head if method == "fsd" else None,
            self.settings,
            rule or rule_for(self.settings),
            sampler,
            prompts,
            self.max_new_tokens,
            self.clock,
            history,
        )

    def finish(self, streamer: BaseStreamer | None = None) -> GenerateOutput:
        """Decode to the end, telling ``streamer`` what each step emitted."""
        for chunk in self:
            if streamer is not None:
                streamer.put(torch.tensor(chunk.tokens))
        if streamer is not None:
            streamer.end()
        return self.output()

    def __iter__(self) -> Iterator[StreamChunk]:
        """Every call goes on where the last one left off."""
        return self._steps

    @torch.inference_mode()
    def _run(self) -> Iterator[StreamChunk]:
        engine = self._make_engine()
        live = list(range(len(self.new)))
        while live:
            result = engine.step()
            self.clock.collect()
            self.stats.passes += 1
            ended = []
            for place, row in enumerate(live):
                tokens, finished = self._take(row, result.tokens[place])
                origins = result.origins[place][: len(tokens)]
                self.origins[row] += origins
                self.stats.add(row, origins)
                if finished:
                    ended.append(place)
                yield StreamChunk(row, tokens, origins, finished)
            if ended and len(ended) < len(live):
                live = [live[place] for place in engine.drop(ended)]
            elif ended:
                live = []

    def _take(self, row: int, tokens: list[int]) -> tuple[list[int], bool]:
        """Add a step's tokens to a row up to its end: the tokens taken, and whether it ended."""
        new = self.new[row]
        for taken, token in enumerate(tokens, 1):
            new.append(token)
            if token in self.eos or len(new) >= self.max_new_tokens or self._stops(row):
                return tokens[:taken], True
        return tokens, False

    def _stops(self, row: int) -> bool:
        if not self.criteria:
            return False
        ids = torch.cat([self.input_ids[row], self.input_ids.new_tensor(self.new[row])])
        return bool(self.criteria(ids[None], None).any())

    def output(self) -> GenerateOutput:
        """Everything emitted so far."""
        width = max(map(len, self.new))
        device = self.input_ids.device

        def padded(rows: list[list[int]], fill: int, dtype: torch.dtype) -> Tensor:
            rows = [row + [fill] * (width - len(row)) for row in rows]
            return torch.tensor(rows, dtype=dtype, device=device)

        new = padded(self.new, self.pad, self.input_ids.dtype)
        origins = padded(self.origins, int(Origin.PADDING), torch.uint8)
        return GenerateOutput(torch.cat([self.input_ids, new], 1), origins, self.stats)


def _prompts(
    input_ids: Tensor, attention_mask: Tensor | None, target: Target, pad: int | None
) -> list[Tensor]:
    """Each row's tokens without padding, on the target's device."""
    if input_ids.ndim != 2 or input_ids.is_floating_point():
        raise ValueError(
            f"input_ids must be whole numbers of shape [B, S]; got {tuple(input_ids.shape)}"
        )
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
