"""Load and save draft heads in the layout of published EAGLE-1/2 heads.

A checkpoint is a folder or a Hub repository with ``config.json`` and ``model.safetensors`` or
``pytorch_model.bin``. The weights are ``fc.weight``, ``fc.bias`` if ``config.bias`` is true (the
default when absent) and in heads for SGLang, ``layers.0.*`` without an input norm, and in most
checkpoints a copy of the target's ``embed_tokens.weight``. RoPE settings and data type are saved
under their names in transformers 5 and in transformers 4.
"""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import errors as hub_errors
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import cached_file

from eagle_fsd.model.config import SETTINGS_FILE
from eagle_fsd.model.drafters.eagle import EagleHead
from eagle_fsd.model.target import Target
from eagle_fsd.utils.text import one_line

log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
EMBEDDING = "embed_tokens.weight"
FC_BIAS = "fc.bias"
#: RoPE scaling that EAGLE's own code reads. It requires the older name, ``type``, and rejects other
#: entries beside ``factor``.
EAGLE_SCALING = ("linear", "dynamic")
#: Buffers in older checkpoints that are computed from the configuration.
_COMPUTED = ("rotary_emb.inv_freq",)
#: Exceptions that configuration classes raise for a field with a wrong type or value.
_STRICT = (hub_errors.StrictDataclassError,)


class CheckpointError(ValueError):
    """The files of a head are missing or damaged, or do not match its configuration."""


def load_head(
    path: str | Path, target: Target, dtype: torch.dtype | None = None, token: str | None = None
) -> EagleHead:
    """Load a draft head and attach it to its target.

    Args:
        path: A folder or a Hub name.
        target: The target that the head was trained for.
        dtype: Data type of the weights; default: the target's.
        token: A Hugging Face token for gated repositories.

    Raises:
        CheckpointError: Files are missing or damaged, or tensors are missing, unexpected or of the
            wrong shape; the message names each.
        ValueError: The head's hidden size or vocabulary is not the target's.
    """
    config = _read_config(path, token)
    weights = {
        name.removeprefix("model."): tensor
        for name, tensor in _read_weights(path, token).items()
        if not name.endswith(_COMPUTED)
    }
    bias = getattr(config, "bias", True) or FC_BIAS in weights
    try:
        head = EagleHead(config, bias, dtype or target.dtype)
    except (ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: cannot build a head from its {CONFIG_FILE}: {error}"
        ) from error
    try:
        head.attach(target)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; pass its own target (--target)") from error
    embedding = weights.pop(EMBEDDING, None)
    _check(path, head.state_dict(), weights)
    head.load_state_dict(weights)
    if embedding is not None:
        _set_embedding(path, head, target, embedding)
    return head.eval().requires_grad_(False)


def save_head(
    head: EagleHead, path: str | Path, dtype: torch.dtype | None = None, binary: bool = False
) -> None:
    """Save a draft head as ``config.json`` and ``model.safetensors``.

    Args:
        head: The head to save.
        path: A folder, created if it does not exist.
        dtype: Data type of the saved weights; default: the head's.
        binary: Write ``pytorch_model.bin`` instead, which EAGLE's own code reads.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    config = head_config(head, dtype or head.dtype)
    (path / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    state = {
        name: tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()
        for name, tensor in head.state_dict().items()
    }
    if binary:
        torch.save(state, path / WEIGHT_FILES[1])
    else:
        save_file(state, path / WEIGHT_FILES[0], metadata={"format": "pt"})


def head_config(head: EagleHead, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of a head's ``config.json``.

    Args:
        head: The head.
        dtype: Data type of its saved weights.
    """
    config = head.config.to_diff_dict()
    for name in ("_name_or_path", "quantization_config"):  # a local path, and how the target's
        config.pop(name, None)  # weights are stored
    config.update(
        num_hidden_layers=1,
        bias=head.fc.bias is not None,
        dtype=str(dtype).removeprefix("torch."),
        **transformers4_fields(head.config, dtype),
    )
    if config.get("layer_types"):  # one for each of the target's layers
        config["layer_types"] = ["full_attention"]
    return config


def transformers4_fields(config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return RoPE settings and data type under their names in transformers 4.

    Readers that know only those names would otherwise use defaults without an error.

    Args:
        config: A configuration. If it has a RoPE for each layer type, that of full attention is
            returned.
        dtype: Data type of the saved weights.

    Returns:
        ``torch_dtype``; if the model has a RoPE, also ``rope_theta``, ``rope_scaling`` and, if only
        a part of each attention head is rotated, ``partial_rotary_factor``.
    """
    fields: dict[str, Any] = {"torch_dtype": str(dtype).removeprefix("torch.")}
    rope = getattr(config, "rope_parameters", None) or {}
    scaling = dict(rope.get("full_attention") or rope)
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in scaling:
            fields[name] = scaling.pop(name)
    if "rope_theta" not in fields:
        return fields
    kind = scaling.pop("rope_type")
    scaling.pop("type", None)
    scaling["type" if kind in EAGLE_SCALING else "rope_type"] = kind
    fields["rope_scaling"] = None if kind == "default" else scaling
    return fields


def settings_file(path: str | Path, token: str | None = None) -> Path | None:
    """Return the path of the ``fsd.json`` beside a head, or None if there is none.

    Args:
        path: The head's folder or Hub name.
        token: A Hugging Face token for gated repositories.

    Raises:
        CheckpointError: ``path`` is neither a folder nor an accessible repository.
    """
    found = _file(path, SETTINGS_FILE, token)
    return Path(found) if found else None


def _file(path: str | Path, name: str, token: str | None) -> str | None:
    if Path(path).is_dir():
        return str(Path(path) / name) if (Path(path) / name).is_file() else None
    if Path(path).exists():
        raise CheckpointError(f"{path} is a file; pass the folder that holds the head")
    try:
        return cached_file(
            str(path), name, token=token, _raise_exceptions_for_missing_entries=False
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is neither a folder nor an accessible model: {one_line(error)}"
        ) from error


def _read_config(path: str | Path, token: str | None) -> PreTrainedConfig:
    found = _file(path, CONFIG_FILE, token)
    if found is None:
        raise CheckpointError(f"{path} has no {CONFIG_FILE}")
    try:
        values = json.loads(Path(found).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
        scaling = values.get("rope_scaling")
        if values.get("rope_parameters"):
            values.pop("rope_scaling", None)  # the same settings, of a single layer type
        elif isinstance(scaling, dict) and "type" in scaling:
            scaling.setdefault("rope_type", scaling["type"])  # Gemma 3 knows only the new name
        config: PreTrainedConfig = AutoConfig.for_model(values.pop("model_type", "llama"), **values)
    except (ValueError, TypeError, AttributeError, ArithmeticError, *_STRICT) as error:
        raise CheckpointError(
            f"{found} is not a configuration of a head: {one_line(error)}"
        ) from error
    return config


def _read_weights(path: str | Path, token: str | None) -> dict[str, Tensor]:
    for name in WEIGHT_FILES:
        found = _file(path, name, token)
        if found is None:
            continue
        try:
            if name.endswith(".safetensors"):
                return load_file(found)
            weights = torch.load(found, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            # torch's own message suggests disabling weights_only.
            raise CheckpointError(
                f"{found} is damaged or holds more than tensors; only plain state dicts are loaded"
            ) from error
        except (SafetensorError, RuntimeError, EOFError, OSError) as error:
            raise CheckpointError(f"cannot read {found}: {one_line(error)}") from error
        if not isinstance(weights, dict) or not all(
            isinstance(key, str) and isinstance(value, Tensor) for key, value in weights.items()
        ):
            raise CheckpointError(f"{found} is not a state dict of tensors by name")
        return weights
    raise CheckpointError(f"{path} has neither {WEIGHT_FILES[0]} nor {WEIGHT_FILES[1]}")


def _check(path: str | Path, expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    problems = [f"missing {name}" for name in sorted(expected.keys() - found.keys())]
    problems += [f"unexpected {name}" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} is {list(found[name].shape)}, not {list(expected[name].shape)}"
        for name in sorted(expected.keys() & found.keys())
        if found[name].shape != expected[name].shape
    ]
    if problems:
        raise CheckpointError(f"{path} does not match its configuration: " + "; ".join(problems))


def _set_embedding(path: str | Path, head: EagleHead, target: Target, embedding: Tensor) -> None:
    """Keep the checkpoint's embedding only if it differs from the target's."""
    own = target.embed.weight
    if embedding.shape != own.shape:
        raise CheckpointError(
            f"{path}: {EMBEDDING} is {list(embedding.shape)}, the target's is {list(own.shape)}"
        )
    embedding = embedding.to(own.device, own.dtype)
    if torch.equal(embedding, own):
        return
    log.warning("%s: the head has an embedding other than the target's; keeping both", path)
    head.embed_tokens = nn.Embedding.from_pretrained(embedding.to(head.device, head.dtype))
