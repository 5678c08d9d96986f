"""Tell the weights of a target or a drafter from others, whatever files they come from."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from eagle_fsd.model.config import ModelIdentity, Settings
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.hub import find_file
from eagle_fsd.model.weights import plain_tensors, read_json, read_tensors, tensor_files

log = logging.getLogger(__name__)

#: Key of an exported head's ``config.json`` with the original's fingerprint in each data type.
EXPORTED_KEY = "eagle_fsd_fingerprints"
#: A fingerprint hashes this many elements of a tensor, or up to twice as many; all if it has fewer.
FINGERPRINT_ELEMENTS = 256


def identify(name: str, model: nn.Module | Drafter, dtype: torch.dtype) -> ModelIdentity:
    """Describe the weights of a target or a drafter."""
    return ModelIdentity(
        name=name, dtype=str(dtype).removeprefix("torch."), fingerprint=fingerprint(model)
    )


def warn_of_other_models(
    settings: Settings, target: nn.Module, drafter: Drafter, dtype: torch.dtype
) -> bool:
    """Return whether lossy settings were calibrated for another pair or data type; warn if so."""
    if settings.lossless:
        return False
    own = str(dtype).removeprefix("torch.")
    problems = [
        f"for another {kind} ({recorded.name}): no bound on the loss holds for this one"
        for kind, recorded, model in (
            ("target", settings.target, target),
            ("drafter", settings.drafter, drafter),
        )
        if recorded is not None
        and recorded.dtype == own  # fingerprints of other data types differ
        and recorded.fingerprint != fingerprint(model)
    ]
    calibrated = settings.target
    if calibrated is not None and calibrated.dtype != own:
        problems.append(
            f"in {calibrated.dtype}, but the target is in {own}: no bound on the loss holds"
        )
    for problem in problems:
        advice = "run eagle-fsd calibrate, or pass --threshold 0"
        log.warning("the settings were calibrated %s; %s", problem, advice)
    return bool(problems)


def fingerprint(model: nn.Module | Drafter) -> str:
    """Hash name, shape, type and some elements of every saved tensor to 16 hexadecimal digits.

    Offloaded tensors contribute no elements. If the model is split over processes, all of them must
    call this. A drafter without a network is hashed by its ``repr``.
    """
    network = model.network if isinstance(model, Drafter) else model
    if network is None:
        return hashlib.sha256(repr(model).encode()).hexdigest()[:16]
    return _hash(network.state_dict())


def configuration(model: nn.Module | Drafter) -> str:
    """Hash what a model's output depends on besides its weights.

    That is its configuration, its end tokens, whether its depth adapts and, of a drafter, what it
    reads and drafts. It leaves out the defaults of transformers, which depend on its version.
    """
    network = model.network if isinstance(model, Drafter) else model
    config = getattr(network, "config", None)
    values = {} if config is None else config.to_diff_dict()
    for name in ("_name_or_path", "dtype", "transformers_version"):
        values.pop(name, None)
    generation = getattr(network, "generation_config", None)
    for name in ("eos_token_id", "num_assistant_tokens_schedule"):
        values[f"generation {name}"] = getattr(generation, name, None)
    tokens = getattr(model, "token_ids", None)
    drafter = [getattr(model, "reads", ()), repr(getattr(model, "flags", None))]
    drafter.append(None if tokens is None else tokens.tolist())
    return json_digest([values, drafter])


def json_digest(values: object) -> str:
    """Hash JSON values, and others by their text, to 16 hexadecimal digits."""
    text = json.dumps(values, default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprints(network: nn.Module) -> dict[str, str]:
    """Compute the fingerprint that a network has after a conversion to each data type, by name."""
    types = (torch.float32, torch.bfloat16, torch.float16)
    state = network.state_dict()
    return {str(dtype).removeprefix("torch."): _hash(state, dtype) for dtype in types}


def fingerprint_of_files(folder: str | Path, dtype: torch.dtype) -> str | None:
    """Compute the fingerprint of a causal LM's files; None if that is not possible."""
    values = read_json(str(Path(folder, "config.json")))
    if "model_type" not in values or values.get("quantization_config"):
        return None  # a head, or weights that are stored in another form
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (ValueError, ImportError):  # a model that this version of transformers lacks
        return None
    files = tensor_files(partial(find_file, folder))
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        # Tied weights are stored once, under the first of their names.
        source = name if name in files else first_names.get(id(tensor), name)
        if source not in files:
            return None
        # The file is mapped into memory: only what is hashed is read.
        found = read_tensors(str(Path(folder, files[source])), [source])[source]
        if found.shape != tensor.shape:
            return None
        tensors[name] = found
    return _hash(tensors, dtype)


def _hash(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """Hash tensors, after a conversion to a data type if one is given."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        to = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        digest.update(f"{name} {tuple(tensor.shape)} {to}".encode())
        if tensor.device.type == "meta":
            continue
        for part in filter(torch.numel, plain_tensors(tensor.detach())):
            flat = part.flatten()
            sample = flat[:: max(1, len(flat) // FINGERPRINT_ELEMENTS)].to(to).cpu().contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
