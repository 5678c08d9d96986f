"""Loading a target and its tokenizer from files, with errors that say what is wrong in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "auto": "auto",
}


#: What transformers raises for files that hold something else than they should.
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError)


class LoadError(ValueError):
    """A target's or tokenizer's files are missing or damaged; the message says which."""


def load_target(
    name: str | Path,
    dtype: str | torch.dtype | None = None,
    device_map: str | torch.device | dict[str, Any] | None = None,
    **options: Any,
) -> PreTrainedModel:
    """``AutoModelForCausalLM.from_pretrained`` with this package's defaults.

    Args:
        dtype: Default: float32 on a CPU, the checkpoint's own elsewhere.
        device_map: As in Hugging Face. Default: the GPU if there is one, else the CPU.

    Raises:
        LoadError: The files are missing or damaged.
        ValueError: The dtype does not exist, or the device is not there.
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
        raise LoadError(f"the target cannot be loaded: there is no folder {name}")
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            str(name), dtype=dtype, device_map=device_map, output_loading_info=True, **options
        )
    except (*DAMAGED, SafetensorError, RuntimeError, EOFError) as error:
        if isinstance(error, TypeError) and "keyword argument" in str(error):
            raise  # an option that does not exist
        raise LoadError(f"the target {name} cannot be loaded: {one_line(error)}") from error
    if missing := sorted(report["missing_keys"]):  # which Hugging Face fills with noise
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise LoadError(f"the target {name} lacks {len(missing)} tensors: {shown}")
    return model


def load_tokenizer(name: str | Path, token: str | None = None) -> Tokenizer:
    """The tokenizer, padding on the left; one without a padding token pads with its end token.

    Raises:
        LoadError: The files are missing or damaged.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(name), token=token, padding_side="left")
    except (*DAMAGED, ImportError) as error:
        raise LoadError(f"the tokenizer of {name} cannot be loaded: {one_line(error)}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _uses_gpu(device_map: str | torch.device | dict[str, Any]) -> bool:
    """Whether any of it lies elsewhere than on the CPU.

    Raises:
        ValueError: A device that is not there.
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
            raise ValueError(f"{place!r} is no device: {one_line(error)}") from error
        if device.type == "meta":
            raise ValueError("the meta device holds no numbers to decode with")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"{device} is not there: this machine has {torch.cuda.device_count()} CUDA devices"
            )
        used = used or device.type != "cpu"
    return used


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
