"""Tell the weights of a target or a drafter from others, whatever files they come from."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from eagle_fsd.model.config import ModelIdentity
from eagle_fsd.model.weights import plain_tensors

#: Approximate number of elements per tensor that a fingerprint hashes.
FINGERPRINT_ELEMENTS = 256


def identify(name: str, module: object, dtype: torch.dtype) -> ModelIdentity:
    """Describe a model in a file.

    Args:
        name: Its folder or Hub name.
        module: The model; drafters without weights have no tensors.
        dtype: Data type of its weights.
    """
    return ModelIdentity(
        name=name, dtype=str(dtype).removeprefix("torch."), fingerprint=fingerprint(module)
    )


def differs(recorded: ModelIdentity, module: object, dtype: torch.dtype) -> bool:
    """Return whether a model has other weights than a recorded one.

    Weights of another data type cannot be compared and count as equal.

    Args:
        recorded: The recorded model.
        module: The model.
        dtype: Data type of its weights.
    """
    same_type = recorded.dtype == str(dtype).removeprefix("torch.")
    return same_type and recorded.fingerprint != fingerprint(module)


def fingerprint(module: object) -> str:
    """Hash the name, shape, type and some elements of every tensor of a module.

    The hash identifies the weights in memory, whatever files they come from. Of tensors that are
    offloaded to disk, only name, shape and type are hashed. If the module is split over processes,
    all of them must call this; the hash is that of the whole module.

    Args:
        module: The module. Other objects, such as drafters without weights, have no tensors.

    Returns:
        16 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items() if isinstance(module, nn.Module) else ():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.device.type == "meta":
            continue
        for part in filter(torch.numel, plain_tensors(tensor.detach())):
            flat = part.flatten()
            sample = flat[:: max(1, len(flat) // FINGERPRINT_ELEMENTS)].cpu().contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
