"""Read weights: files of them, and parameters that are split over processes or quantized."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from eagle_fsd.utils.text import one_line

#: Files with the weights of a checkpoint, in the order of preference.
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
#: Ending of the file that lists the shards of one of :data:`WEIGHT_FILES`.
INDEX = ".index.json"


class CheckpointError(ValueError):
    """The files of a model are missing or damaged, or do not match its configuration."""


def tensor_files(find: Callable[[str], str | None]) -> dict[str, str]:
    """Map tensor names to file names; ``find`` returns a file's path, or None if it is missing."""
    for name in WEIGHT_FILES:
        if path := find(name):
            return dict.fromkeys(_tensor_names(path), name)
        if path := find(name + INDEX):
            return _read_index(path)
    return {}


def read_tensors(path: str, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Read the tensors of a file, or those of the given names; raises CheckpointError."""
    try:
        if path.endswith(".safetensors"):
            with safe_open(path, framework="pt") as file:
                found = file.keys() if names is None else names
                return {name: file.get_tensor(name) for name in found}
        tensors = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except pickle.UnpicklingError as error:
        # torch's own message suggests disabling weights_only.
        raise CheckpointError(
            f"{path} is damaged or holds more than tensors; only plain state dicts are loaded"
        ) from error
    except Exception as error:  # for damaged files, torch raises exceptions of many types
        raise CheckpointError(f"cannot read {path}: {one_line(error)}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in tensors.items()
    ):
        raise CheckpointError(f"{path} is not a state dict of tensors by name")
    if names is None:
        return tensors
    if missing := set(names) - tensors.keys():
        raise CheckpointError(f"{path} has no {min(missing)}")
    return {name: tensors[name] for name in names}


def read_json(path: str) -> dict[str, object]:
    """Read a file that holds a JSON object; raises CheckpointError."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
    except (ValueError, OSError) as error:
        raise CheckpointError(f"cannot read {path}: {one_line(error)}") from error
    return values


def whole(weight: Tensor) -> Tensor:
    """Return a weight in full; if it is split over processes, all of them must call this."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def plain_tensors(weight: Tensor) -> list[Tensor]:
    """Return the whole tensors that a weight consists of: several if it is quantized."""
    weight = whole(weight)
    if not is_traceable_wrapper_subclass(weight):
        return [weight]
    names, _ = weight.__tensor_flatten__()
    return [part for name in names for part in plain_tensors(getattr(weight, name))]


def _tensor_names(path: str) -> list[str]:
    if not path.endswith(".safetensors"):
        return list(read_tensors(path))
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read {path}: {one_line(error)}") from error


def _read_index(path: str) -> dict[str, str]:
    shards = read_json(path).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(file, str) for file in shards.values()):
        raise CheckpointError(f"{path} has no weight_map from tensors to files")
    return shards
