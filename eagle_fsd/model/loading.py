"""Load a target and its tokenizer, with one-line messages for missing or damaged files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from eagle_fsd.utils.text import one_line

#: Data types by name; ``auto`` is the checkpoint's own.
DTYPES: dict[str, str | torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "auto": "auto",
}

#: Exceptions that transformers raises for files with unexpected content.
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError)


class LoadError(ValueError):
    """The files of a target or a tokenizer are missing or damaged."""


def load_target(
    name: str | Path,
    dtype: str | torch.dtype | None = None,
    device_map: str | torch.device | dict[str, Any] | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Load a causal language model with Hugging Face's ``from_pretrained``.

    Args:
        name: A folder or a Hub name.
        dtype: A torch dtype or a key of :data:`DTYPES`. Default: float32 on a CPU, else the
            checkpoint's own.
        device_map: As in Hugging Face. Default: the GPU if there is one, else the CPU.
        **options: Passed to ``AutoModelForCausalLM.from_pretrained``.

    Raises:
        LoadError: The files are missing or damaged.
        ValueError: The dtype or the device does not exist.
        TypeError: An option does not exist.
    """
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
        dtype = DTYPES[dtype]
    if device_map is None:
        device_map = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype is None:
        dtype = "auto" if _uses_gpu(device_map) else torch.float32
    if Path(name).is_absolute() and not Path(name).is_dir():
        raise LoadError(f"cannot load the target: {name} is not a folder")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(name), dtype=dtype, device_map=device_map, output_loading_info=True, **options
        )
    except (*DAMAGED, SafetensorError, RuntimeError, EOFError) as error:
        if isinstance(error, TypeError) and "keyword argument" in str(error):
            raise  # an option does not exist
        raise LoadError(f"cannot load the target {name}: {one_line(error)}") from error
    model: PreTrainedModel = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):  # Hugging Face initializes them at random
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise LoadError(f"the target {name} lacks {len(missing)} tensors: {shown}")
    return model


def load_tokenizer(name: str | Path, token: str | None = None) -> Tokenizer:
    """Load a tokenizer that pads on the left.

    Args:
        name: A folder or a Hub name.
        token: A Hugging Face token for gated repositories.

    Returns:
        The tokenizer. If it has no padding token, the end-of-sequence token serves as one.

    Raises:
        LoadError: The files are missing or damaged.
    """
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(
            str(name), token=token, padding_side="left"
        )
    except (*DAMAGED, ImportError) as error:
        raise LoadError(f"cannot load the tokenizer of {name}: {one_line(error)}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _uses_gpu(device_map: str | torch.device | dict[str, Any]) -> bool:
    """Whether a device map uses any device other than the CPU.

    Raises:
        ValueError: A device does not exist.
    """
    places = device_map.values() if isinstance(device_map, dict) else [device_map]
    used = False
    for place in places:
        if isinstance(place, str) and place in ("auto", "balanced", "balanced_low_0", "sequential"):
            used = used or torch.cuda.is_available()
            continue
        if place == "disk":
            continue
        try:
            device = torch.device(place)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"{place!r} is not a device: {one_line(error)}") from error
        if device.type == "meta":
            raise ValueError("cannot decode on the meta device: it holds no data")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"{device} does not exist: this machine has {torch.cuda.device_count()} CUDA"
                " devices"
            )
        used = used or device.type != "cpu"
    return used
