"""Decode with FSD from Hugging Face's ``generate``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
)
from transformers.generation import GenerationMode
from transformers.generation.streamers import BaseStreamer

from eagle_fsd.model.sampling import WARPERS
from eagle_fsd.model.verify import AcceptanceRule
from eagle_fsd.model.wrappers import unwrap_model

#: Inputs of the target's forward call that change no token.
NEUTRAL_INPUTS = ("use_cache", "logits_to_keep", "output_attentions", "output_hidden_states")


def custom_generate(
    fsd: Any,
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
    exact_first: int | None = None,
    rule: AcceptanceRule | str | None = None,
    method: str = "fsd",
    seed: int | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """Decoding loop for ``target.generate(..., custom_generate=fsd.custom_generate)``.

    Sampling options come from Hugging Face's generation configuration, FSD's options from the
    call. (Hugging Face passes on only named parameters, so all of them are in the signature. It
    drops ``streamer``, which ``functools.partial(fsd.custom_generate, streamer=...)`` binds, and
    ``tokenizer``: pass a ``StopStringCriteria`` instead of ``stop_strings``.)

    Args:
        fsd: The pair, an :class:`EagleFSD`.
        model: The target, passed by Hugging Face.
        input_ids: ``[B, S]`` token ids.
        logits_processor: Built by Hugging Face from its generation configuration and the call.
        stopping_criteria: Built by Hugging Face from its generation configuration and the call;
            the only source of end tokens.
        generation_config: Hugging Face's generation configuration.
        synced_gpus: Must be False: ranks take different numbers of passes. That Hugging Face sets
            it by itself, with ZeRO-3 or FSDP, is not detected.
        streamer: See :meth:`EagleFSD.generate`.
        threshold, divergence, min_ratio, fallback, selection, divergence_on, price, max_fuzzy_nats,
            exact_first, rule: Override these fields of :attr:`EagleFSD.acceptance`. ``rule`` may be
            a rule object, too, see :meth:`EagleFSD.generate`.
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
        FloatingPointError, MemoryError, Exception: See :meth:`EagleFSD.generate`.
    """
    if unwrap_model(model) is not fsd.model:
        raise ValueError("custom_generate was called on a model other than its target")
    given = threshold is not None or min_ratio is not None
    if given and isinstance(rule, AcceptanceRule):
        raise ValueError("pass either a rule object or threshold and min_ratio, not both")
    if synced_gpus or caller_argument("synced_gpus"):
        raise ValueError("custom_generate does not support synced_gpus")
    config = generation_config
    _check_config(config)
    attention_mask = model_kwargs.pop("attention_mask", None)
    if attention_mask is None:  # also if it was all ones
        attention_mask = torch.ones_like(input_ids)
    _check_inputs(model_kwargs, attention_mask)
    processors, warpers = list(logits_processor), None
    temperature = 0.0
    if config.do_sample:
        processors, warpers = _split_warpers(logits_processor)
        temperature = 1.0 if config.temperature is None else config.temperature
    # The generation loop checks length and end-of-sequence tokens at no extra cost.
    checked = (MaxLengthCriteria, EosTokenCriteria)
    lengths = [item.max_length for item in stopping_criteria if type(item) is MaxLengthCriteria]
    ends = [item.eos_token_id for item in stopping_criteria if type(item) is EosTokenCriteria]
    return fsd.generate(
        input_ids,
        attention_mask,
        max(1, min(lengths, default=config.max_length) - input_ids.shape[1]),
        streamer=streamer,
        temperature=temperature,
        logits_processor=processors,
        logits_warper=warpers,
        stopping_criteria=[item for item in stopping_criteria if type(item) not in checked],
        eos_token_id=[token for item in ends for token in item.flatten().tolist()],
        pad_token_id=config.pad_token_id,
        acceptance=fsd.acceptance.updated(
            threshold=threshold,
            divergence=divergence,
            min_ratio=min_ratio,
            fallback=fallback,
            selection=selection,
            divergence_on=divergence_on,
            price=price,
            max_fuzzy_nats=max_fuzzy_nats,
            exact_first=exact_first,
            rule=rule if isinstance(rule, str) else None,
        ),
        rule=None if isinstance(rule, str) else rule,
        method=method,
        seed=seed,
    ).sequences


def _check_config(config: GenerationConfig) -> None:
    """Reject options that select another decoding method or another result."""
    if config.num_beams not in (None, 1):
        raise ValueError(f"num_beams must be 1 to decode draft trees; got {config.num_beams}")
    mode = config.get_generation_mode(caller_argument("assistant_model"))
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


def _check_inputs(inputs: dict[str, Any], attention_mask: Tensor) -> None:
    """Reject inputs of the target's forward call, unless they change no token."""
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


def caller_argument(name: str) -> Any:
    """Return an argument of the calling ``generate`` that it does not pass on, or None."""
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else frame.f_locals[name]


def _split_warpers(
    processors: Sequence[LogitsProcessor],
) -> tuple[list[LogitsProcessor], list[LogitsProcessor]]:
    """Split Hugging Face's list into processors and the warpers at its end."""
    first = len(processors)
    while first and type(processors[first - 1]) in WARPERS:
        first -= 1
    return list(processors[:first]), list(processors[first:])
