"""Variants of a drafter: other hidden states, another RoPE, float32."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eagle_fsd.model.drafters.eagle3 import Eagle3Head, default_reads
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.target import LAST

#: Bases of the rotary embedding in published models.
THETAS = (10_000.0, 500_000.0, 1_000_000.0, 10_000_000.0)
#: By how much the layer ids of EAGLE-3 heads differ between conventions, and one more.
SHIFTS = (-2, -1, 1, 2)


class Place(NamedTuple):
    """A submodule: its parent, and its name there."""

    parent: nn.Module
    name: str

    @property
    def module(self) -> Any:
        """The submodule."""
        return getattr(self.parent, self.name)


def network_of(drafter: Drafter) -> nn.Module | None:
    """Return the module with the drafter's weights, if it has any.

    Args:
        drafter: The drafter.
    """
    found = drafter if isinstance(drafter, nn.Module) else getattr(drafter, "model", None)
    return found if isinstance(found, nn.Module) else None


def other_reads(drafter: Drafter, layers: int) -> list[tuple[int, ...]]:
    """Return plausible alternatives to the hidden states that a drafter reads.

    Args:
        drafter: The drafter.
        layers: The target's number of decoder layers.
    """
    if isinstance(drafter, Eagle3Head):
        found = [tuple(index + shift for index in drafter.reads) for shift in SHIFTS]
        found = [*found, default_reads(layers)]
        return [
            reads
            for reads in dict.fromkeys(found)
            if reads != drafter.reads
            and len(reads) == len(drafter.reads)
            and all(0 <= index < layers for index in reads)
        ]
    if not drafter.reads:
        return []
    found = [(LAST,), (layers - 1,), (layers - 2,)]
    return [reads for reads in found if reads != drafter.reads]


def describe_reads(reads: Sequence[int]) -> str:
    """Describe hidden states, as in ``"the inputs of layers 2, 7, 11"``.

    Args:
        reads: Indices into Hugging Face's ``hidden_states``.
    """
    if tuple(reads) == (LAST,):
        return "the last hidden state"
    layers = ", ".join(map(str, reads))
    return f"the inputs of layers {layers}" if len(reads) > 1 else f"the input of layer {layers}"


def token_maps(token_ids: Tensor) -> dict[str, Tensor]:
    """Return plausible alternatives to a vocabulary map, by name.

    Args:
        token_ids: ``[D]`` the target's token for each of the draft's.
    """
    first = torch.arange(len(token_ids), device=token_ids.device)
    return {"in ascending order": token_ids.sort().values, "of ids, not offsets": token_ids - first}


@contextmanager
def in_float32(network: nn.Module) -> Iterator[None]:
    """Convert the parameters of a network to float32 and back, which loses nothing.

    Args:
        network: The network.
    """
    dtypes = [parameter.dtype for parameter in network.parameters()]
    for parameter in network.parameters():
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter, dtype in zip(network.parameters(), dtypes, strict=True):
            parameter.data = parameter.data.to(dtype)


def rotary_embeddings(network: nn.Module) -> list[Place]:
    """Return the rotary embeddings of a network.

    Args:
        network: The network.
    """
    return [
        Place(parent, name)
        for parent in network.modules()
        for name, child in parent.named_children()
        if "RotaryEmbedding" in type(child).__name__
        and rope_parameters(getattr(child, "config", None))
    ]


@contextmanager
def replaced_rope(places: Sequence[Place], rope: Mapping[str, Any]) -> Iterator[None]:
    """Replace rotary embeddings for a while.

    Args:
        places: The rotary embeddings.
        rope: RoPE parameters, as in Hugging Face's ``rope_parameters``.
    """
    before = [place.module for place in places]
    try:
        for (parent, name), module in zip(places, before, strict=True):
            config = copy.deepcopy(module.config)
            if "full_attention" in config.rope_parameters:  # one for each type of layer
                config.rope_parameters["full_attention"] = dict(rope)
            else:
                config.rope_parameters = dict(rope)
            setattr(parent, name, type(module)(config).to(next(module.buffers()).device))
        yield
    finally:
        for (parent, name), module in zip(places, before, strict=True):
            setattr(parent, name, module)


def rope_parameters(config: Any) -> dict[str, Any]:
    """Return the RoPE parameters of full attention; empty if the model has no RoPE.

    Args:
        config: The configuration.
    """
    found = getattr(config, "rope_parameters", None) or {}
    found = found.get("full_attention") or found
    return dict(found) if "rope_theta" in found else {}


def other_ropes(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return plausible alternatives to a drafter's RoPE parameters, by description.

    Args:
        own: The drafter's.
        theirs: The target's; empty if it has none.
    """
    found = [dict(theirs)] if theirs else []
    thetas = dict.fromkeys((own["rope_theta"], *THETAS))
    found += [{"rope_type": "default", "rope_theta": theta} for theta in thetas]
    if "partial_rotary_factor" in own:  # this is a property of the layers
        found = [{**rope, "partial_rotary_factor": own["partial_rotary_factor"]} for rope in found]
    described = {describe_rope(rope): rope for rope in reversed(found)}
    described.pop(describe_rope(own), None)
    return described


def describe_rope(rope: Mapping[str, Any]) -> str:
    """Describe RoPE parameters, as in ``"theta 500000, llama3 times 8"``.

    Args:
        rope: The parameters, as in Hugging Face's ``rope_parameters``.
    """
    text = f"theta {rope['rope_theta']:.10g}"
    if (kind := rope.get("rope_type", "default")) != "default":
        text += f", {kind}"
        if "factor" in rope:
            text += f" times {rope['factor']:g}"
    return text
