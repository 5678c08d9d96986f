"""Read the files of drafters, and load and save EAGLE-1/2 heads in their published layout.

A checkpoint is a folder or a Hub repository with ``config.json`` and ``model.safetensors`` or
``pytorch_model.bin``, or shards of either. The weights of an EAGLE-1/2 head are ``fc.weight``,
``fc.bias`` if ``config.bias`` is true (the default when absent) and in heads for SGLang,
``layers.0.*`` without an input norm, and in most checkpoints a copy of the target's
``embed_tokens.weight``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig

from eagle_fsd.model.drafters.eagle import EagleHead
from eagle_fsd.model.drafters.heads import DraftHead
from eagle_fsd.model.hub import find_file
from eagle_fsd.model.loading import DAMAGED
from eagle_fsd.model.target import Target
from eagle_fsd.model.weights import (
    INDEX,
    WEIGHT_FILES,
    CheckpointError,
    read_json,
    read_tensors,
    tensor_files,
    whole,
)
from eagle_fsd.utils.files import atomic_path, atomic_write
from eagle_fsd.utils.text import one_line

log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
#: Tokens by frequency, of which a head may draft some (FR-Spec, arXiv 2502.14856): the tensor
#: ``tokens`` is ``[R]`` int64, the most frequent first. ``eagle-fsd train ranks`` writes it.
RANKS_FILE = "token_ranks.safetensors"
EMBEDDING = "embed_tokens.weight"
FC_BIAS = "fc.bias"
#: Size of a head's vocabulary, if it was trained on some of the target's tokens.
DRAFT_VOCAB_SIZE = "draft_vocab_size"
#: RoPE scaling that EAGLE's own code reads. It requires the older name, ``type``, and rejects other
#: entries beside ``factor``.
EAGLE_SCALING = ("linear", "dynamic")
#: Buffers in older checkpoints that are computed from the configuration.
_COMPUTED = ("rotary_emb.inv_freq",)

Head = TypeVar("Head", bound=DraftHead)


def load_head(
    path: str | Path, target: Target, dtype: torch.dtype | None = None, token: str | None = None
) -> EagleHead:
    """Load a draft head, by default in its target's data type, and attach it.

    Raises CheckpointError if the files are missing, damaged or do not match, and ValueError if the
    head belongs to another target.
    """
    config = parse_config(path, read_config(path, token))
    weights = read_weights(path, token)
    bias = getattr(config, "bias", True) or FC_BIAS in weights
    with building_head(path):
        head = EagleHead(config, bias, dtype or target.dtype)
        size = int(getattr(config, DRAFT_VOCAB_SIZE, None) or target.vocab_size)
    head = fill_head(path, head, target, weights)
    if size < target.vocab_size:
        file = drafter_file(path, RANKS_FILE, token)
        if file is None:
            raise CheckpointError(f"{path} drafts {size} tokens, but has no {RANKS_FILE}")
        ranks = read_ranks(file, target.vocab_size)
        if len(ranks) != size:
            raise CheckpointError(
                f"{path} drafts {size} tokens, but its {RANKS_FILE} has {len(ranks)}, so it is not"
                " the one that was saved with the head"
            )
        head.restrict_vocabulary(ranks)
    return head


def save_head(
    head: EagleHead, path: str | Path, dtype: torch.dtype | None = None, binary: bool = False
) -> None:
    """Save a head; ``binary`` writes ``pytorch_model.bin``, which EAGLE's own code reads."""
    dtype = dtype or head.dtype
    write_head(path, head_config(head, dtype), head.state_dict(), dtype=dtype, binary=binary)
    if head.ranked_tokens is not None:
        write_ranks(Path(path) / RANKS_FILE, head.ranked_tokens)


def write_ranks(path: str | Path, tokens: Tensor) -> None:
    """Write a ranking of tokens ``[R]``, the most frequent first."""
    with atomic_path(Path(path)) as temporary:
        save_file({"tokens": tokens.cpu().contiguous()}, temporary)


def read_ranks(path: str | Path, vocab_size: int) -> Tensor:
    """Read the tokens ``[R]`` of a ranking, the most frequent first."""
    try:
        tokens = load_file(path)["tokens"]
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"{path} holds no ranking of tokens: {one_line(error)}") from error
    valid = tokens.dtype == torch.int64 and tokens.ndim == 1 and len(tokens) > 0
    if not valid or len(tokens.unique()) < len(tokens):
        raise CheckpointError(f"{path} holds no ranking of tokens: they are not distinct integers")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise CheckpointError(
            f"{path} ranks tokens from {tokens.min()} to {tokens.max()}, but the target has only"
            f" {vocab_size}"
        )
    return tokens


def select_tokens(
    vocabulary: int | str | Path, drafter: str | Path, vocab_size: int, token: str | None = None
) -> Tensor:
    """Return the tokens ``[D]`` of a draft vocabulary, the most frequent first.

    ``vocabulary`` is a number of most frequent tokens, as ranked by :data:`RANKS_FILE` beside the
    drafter, or a file of ranked tokens, all of which are used.
    """
    if not isinstance(vocabulary, int):
        return read_ranks(vocabulary, vocab_size)
    found = drafter_file(drafter, RANKS_FILE, token)
    if found is None:
        raise CheckpointError(
            f"{drafter} has no ranking of tokens; write one with eagle-fsd train ranks"
        )
    tokens = read_ranks(found, vocab_size)
    if not 1 <= vocabulary <= len(tokens):
        raise ValueError(
            f"draft_vocabulary must be an integer in [1, {len(tokens)}]; got {vocabulary}"
        )
    return tokens[:vocabulary]


def head_config(head: EagleHead, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of a head's ``config.json``, given the data type of its saved weights."""
    fields = {**layer_fields(head.config, 1, dtype), "bias": head.fc.bias is not None}
    fields.pop(DRAFT_VOCAB_SIZE, None)
    if head.token_ids is not None:
        fields[DRAFT_VOCAB_SIZE] = len(head.token_ids)
    return fields


def layer_fields(config: PreTrainedConfig, layers: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of ``config.json`` that describe a head's decoder layers."""
    fields = config.to_diff_dict()
    # A local path, and how the target's weights are stored.
    for name in ("_name_or_path", "quantization_config"):
        fields.pop(name, None)
    fields.update(
        num_hidden_layers=layers,
        dtype=str(dtype).removeprefix("torch."),
        **transformers4_fields(config, dtype),
    )
    if fields.get("layer_types"):  # one for each of the target's layers
        fields["layer_types"] = ["full_attention"] * layers
    return fields


def transformers4_fields(config: PreTrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return RoPE settings and data type under their names in transformers 4.

    Readers that know only those would otherwise use defaults. If each layer type has a RoPE of its
    own, the settings for full attention are returned.
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


def drafter_file(path: str | Path, name: str, token: str | None = None) -> str | None:
    """Return the local path of a drafter's file, or None if there is none."""
    if Path(path).is_file():
        raise CheckpointError(f"{path} is a file; pass the folder that holds the drafter")
    try:
        return find_file(path, name, token)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is neither a folder nor an accessible model: {one_line(error)}"
        ) from error


def read_config(path: str | Path, token: str | None = None) -> dict[str, Any]:
    """Read the ``config.json`` of a drafter."""
    found = drafter_file(path, CONFIG_FILE, token)
    if found is None:
        raise CheckpointError(f"{path} has no {CONFIG_FILE}")
    return read_json(found)


def parse_config(path: str | Path, values: Mapping[str, Any]) -> PreTrainedConfig:
    """Convert the fields of a head's decoder layers, by old or new names, to a configuration."""
    with building_head(path):
        values = dict(values)
        scaling = values.get("rope_scaling")
        if values.get("rope_parameters"):
            values.pop("rope_scaling", None)  # the same settings, of a single layer type
        elif isinstance(scaling, dict) and "type" in scaling:
            # Gemma 3 knows only the new name.
            values["rope_scaling"] = {"rope_type": scaling["type"], **scaling}
        config: PreTrainedConfig = AutoConfig.for_model(values.pop("model_type", "llama"), **values)
    return config


@contextmanager
def building_head(path: str | Path) -> Iterator[None]:
    """Raise :class:`CheckpointError` for a configuration from which no head can be built."""
    try:
        yield
    except (*DAMAGED, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: cannot build a head from its {CONFIG_FILE}: {one_line(error)}"
        ) from error


def tensor_names(path: str | Path, token: str | None = None) -> set[str]:
    """Return the names of a drafter's tensors, without reading tensors where that is possible."""
    return set(_tensor_files(path, token))


def read_weights(path: str | Path, token: str | None = None) -> dict[str, Tensor]:
    """Read a drafter's tensors, without computed buffers, by name without ``model.``."""
    weights: dict[str, Tensor] = {}
    for name in sorted(set(_tensor_files(path, token).values())):
        file = drafter_file(path, name, token)
        if file is None:
            raise CheckpointError(f"{path} has no {name}, which its index lists")
        weights |= read_tensors(file)
    return {
        name.removeprefix("model."): tensor
        for name, tensor in weights.items()
        if not name.endswith(_COMPUTED)
    }


def _tensor_files(path: str | Path, token: str | None) -> dict[str, str]:
    """Return the name of the file of every tensor."""
    files = tensor_files(partial(drafter_file, path, token=token))
    if not files:
        raise CheckpointError(f"{path} has neither {WEIGHT_FILES[0]} nor {WEIGHT_FILES[1]}")
    return files


def fill_head(path: str | Path, head: Head, target: Target, weights: Mapping[str, Tensor]) -> Head:
    """Attach a head to its target and set its weights, in evaluation mode and without gradients.

    An embedding is kept only if it differs from the target's.
    """
    embedding = weights.get(EMBEDDING)
    if embedding is not None:
        size = head.config.vocab_size, head.config.hidden_size
        head.embed_tokens = nn.utils.skip_init(
            nn.Embedding, *size, device=head.device, dtype=head.dtype
        )
    try:
        head.attach(target)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; pass its own target (--target)") from error
    _check_tensors(path, head.state_dict(), weights)
    head.load_state_dict(weights)
    if embedding is not None:
        own = whole(target.embed.weight)
        if embedding.shape == own.shape and torch.equal(embedding.to(own.device, own.dtype), own):
            head.embed_tokens = None
        else:
            log.warning("%s: the head has an embedding other than the target's; keeping both", path)
    return head.eval().requires_grad_(False)


def write_head(
    path: str | Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    binary: bool = False,
) -> None:
    """Write ``config.json`` and weights, those in floating point as ``dtype``."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    atomic_write(path / CONFIG_FILE, json.dumps(config, indent=2, sort_keys=True) + "\n")
    state = {
        name: tensor.detach()
        .to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        .contiguous()
        for name, tensor in weights.items()
    }
    file = WEIGHT_FILES[1] if binary else WEIGHT_FILES[0]
    with atomic_path(path / file) as temporary:
        if binary:
            torch.save(state, temporary)
        else:
            save_file(state, temporary, metadata={"format": "pt"})
    for name in WEIGHT_FILES:  # of a head saved earlier, which readers may prefer
        for other in (name, name + INDEX):
            if other != file:
                (path / other).unlink(missing_ok=True)


def _check_tensors(
    path: str | Path, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> None:
    """Raise CheckpointError unless names and shapes of the tensors are the expected ones."""
    problems = [f"missing {name}" for name in sorted(expected.keys() - found.keys())]
    problems += [f"unexpected {name}" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} is {list(found[name].shape)}, not {list(expected[name].shape)}"
        for name in sorted(expected.keys() & found.keys())
        if found[name].shape != expected[name].shape
    ]
    if problems:
        raise CheckpointError(f"{path} does not match its configuration: " + "; ".join(problems))
