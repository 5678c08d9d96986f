"""Tell the weights of a target or a drafter from others, whatever files they come from."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from eagle_fsd.model.config import ModelIdentity
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.weights import plain_tensors

#: Approximate number of elements per tensor that a fingerprint hashes.
FINGERPRINT_ELEMENTS = 256


def identify(name: str, model: nn.Module | Drafter, dtype: torch.dtype) -> ModelIdentity:
    """Describe the weights of a target or a drafter, named by a folder or Hub name."""
    return ModelIdentity(
        name=name, dtype=str(dtype).removeprefix("torch."), fingerprint=fingerprint(model)
    )


def differs(recorded: ModelIdentity, model: nn.Module | Drafter, dtype: torch.dtype) -> bool:
    """Whether a model has other weights than a recorded one.

    Weights of another data type cannot be compared and count as equal.
    """
    same_type = recorded.dtype == str(dtype).removeprefix("torch.")
    return same_type and recorded.fingerprint != fingerprint(model)


def fingerprint(model: nn.Module | Drafter) -> str:
    """Hash name, shape, type and some elements of every tensor to 16 hexadecimal digits.

    The hash identifies the weights in memory, whatever files they come from. Of tensors that are
    offloaded to disk, only name, shape and type are hashed. If the model is split over processes,
    all of them must call this; the hash is that of the whole model. That of a drafter without a
    network is the hash of its ``repr``.
    """
    network = model.network if isinstance(model, Drafter) else model
    if network is None:
        return hashlib.sha256(repr(model).encode()).hexdigest()[:16]
    digest = hashlib.sha256()
    for name, tensor in network.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.device.type == "meta":
            continue
        for part in filter(torch.numel, plain_tensors(tensor.detach())):
            flat = part.flatten()
            sample = flat[:: max(1, len(flat) // FINGERPRINT_ELEMENTS)].cpu().contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
