"""Check and convert the arguments of calls: token ids, prompts, processors, and sets of options."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from eagle_fsd.utils.options import Options
from eagle_fsd.utils.text import one_line

if TYPE_CHECKING:
    from eagle_fsd.model.target import Target

log = logging.getLogger(__name__)

Config = TypeVar("Config", bound=Options)
Item = TypeVar("Item")

#: Default maximum number of prompts that are decoded at once.
MAX_BATCH = 32
#: Bounds of token ids, which must fit 32 bits.
MIN_TOKEN, MAX_TOKEN = -(2**31), 2**31 - 1


class CallOptions(Options):
    """Integer options of a call that belong to no other set of options."""

    max_new_tokens: int = Field(default=256, ge=1, description="Maximum new tokens per row.")
    details: int | None = Field(
        default=None, ge=0, description="Alternatives to report for every token."
    )
    eos_token_id: int = Field(
        default=0, ge=MIN_TOKEN, le=MAX_TOKEN, description="Token that ends a row."
    )
    pad_token_id: int | None = Field(
        default=None, ge=MIN_TOKEN, le=MAX_TOKEN, description="Token that fills rows."
    )
    max_batch: int = Field(default=MAX_BATCH, ge=1, description="Prompts decoded at once.")
    max_rows: int = Field(default=MAX_BATCH, ge=1, description="Requests decoded at once.")
    max_length: int | None = Field(default=None, ge=1, description="Maximum tokens of a row.")
    compiled_rows: int = Field(default=1, ge=1, description="Requests that steps are compiled for.")


def override(
    default: Config, name: str, given: Config | Mapping[str, Any] | None, **fields: Any
) -> Config:
    """Return ``given``, or ``default`` with the fields that are not None changed.

    Fields that a dictionary lacks are the class's defaults.
    """
    if given is None:
        return default.updated(**fields)
    kind, names = type(default), [field for field, value in fields.items() if value is not None]
    if names:
        raise ValueError(f"pass either {name} or {', '.join(names)}, not both")
    if isinstance(given, kind):
        return given
    if isinstance(given, Mapping):
        return kind.from_dict(given)
    raise ValueError(f"{name} must be of type {kind.__name__} or dict; got {_shown(given)}")


def as_list(name: str, given: Item | Sequence[Item] | None) -> list[Item]:
    """Return processors or stopping criteria, which may be given as one or as several."""
    if given is None:
        return []
    several = isinstance(given, Sequence) and not isinstance(given, str)
    items: Any = given if several else [given]
    for item in items:
        if not callable(item) or isinstance(item, type):
            raise ValueError(
                f"{name} must be a Hugging Face object or a list of them; got {_shown(item)}"
            )
    return list(items)


def end_tokens(given: int | Sequence[int] | Set[int]) -> list[int]:
    """Return end-of-sequence tokens, which may be given as one, as several or as a set."""
    if hasattr(given, "flatten"):  # a tensor or an array
        given = given.flatten().tolist()
    several = isinstance(given, (Sequence, Set)) and not isinstance(given, str)
    items: Any = given if several else [given]
    ids = [CallOptions.from_dict({"eos_token_id": item}).eos_token_id for item in items]
    return sorted(ids) if isinstance(given, Set) else ids


def model_end_tokens(model: PreTrainedModel) -> list[int]:
    """Return the end-of-sequence tokens of a model's generation configuration."""
    eos = model.generation_config.eos_token_id
    return [] if eos is None else end_tokens(eos)


def prompt_tensor(given: Tensor | Sequence[int]) -> Tensor:
    """Return the token ids of a prompt as a tensor ``[S]``; an empty one is rejected later."""
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # whatever torch raises
        ids = torch.empty(())
    integers = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if ids.ndim != 1 or (len(ids) and not integers):
        raise ValueError(f"a prompt must be a sequence of integers; got {_shown(given)}")
    return ids if ids.dtype in (torch.int32, torch.int64) else ids.long()


def read_prompts(
    input_ids: Tensor, attention_mask: Tensor | None, target: Target, pad: int | None
) -> list[list[int]]:
    """Return each row's tokens without padding."""
    if not isinstance(input_ids, Tensor):
        raise ValueError(f"input_ids must be a tensor [B, S]; got a {type(input_ids).__name__}")
    if input_ids.ndim != 2 or input_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"input_ids must be integers (int32 or int64) of shape [B, S]; got {_shown(input_ids)}"
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
        raise ValueError("there must be at least one prompt, and every prompt must have a token")
    least, most = min(map(min, prompts)), max(map(max, prompts))
    if least < 0 or most >= target.vocab_size:
        raise ValueError(
            f"token ids must be in [0, {target.vocab_size - 1}], the target's vocabulary; got"
            f" {least} to {most}"
        )
    return prompts


def limit_new_tokens(target: Target, lengths: list[int], max_new_tokens: int) -> list[int]:
    """Return ``max_new_tokens`` of each row, reduced to fit the context after its prompt."""
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
    target.check_length(max(length + room for length, room in zip(lengths, rooms, strict=True)))
    return rooms


def name_of(item: object) -> str:
    """Return the name of a function, or of an object's class."""
    return str(getattr(item, "__name__", type(item).__name__))


def _shown(value: object) -> str:
    """Return a value on one line, shortened; a tensor as its dtype and shape."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return one_line(reprlib.repr(value))
