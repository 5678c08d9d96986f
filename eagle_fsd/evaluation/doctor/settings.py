"""The settings of a drafter that may not fit its target, and what each could be instead."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, permutations
from typing import Any

import torch
from torch import Tensor, nn

from eagle_fsd.model.drafters.eagle3 import Eagle3Head, default_reads
from eagle_fsd.model.drafters.heads import DraftHead
from eagle_fsd.model.drafters.levels import LevelDrafter
from eagle_fsd.model.target import LAST, Target

#: An object, the name of an attribute, and its value while the change applies.
Change = tuple[Any, str, Any]
#: Descriptions of alternatives, with their changes; may be an iterator.
Alternatives = Iterable[tuple[str, Sequence[Change]]]

#: Minimum increase of the agreement; the second value applies to other hidden states.
#: Neighboring layers have similar states, so numbering the layers wrongly by one costs the
#: bundled EAGLE-3 head one or two points.
MIN_GAIN, MIN_READS_GAIN = 0.03, 0.005
#: Bases of the rotary embedding in published models.
THETAS = (10_000.0, 500_000.0, 1_000_000.0, 10_000_000.0)
#: Offsets to try of the layer ids of EAGLE-3 heads, which conventions number differently.
SHIFTS = (-2, -1, 1, 2)
#: Maximum number of orders of an EAGLE-3 head's hidden states, its own included: all of three.
MAX_ORDERS = 6


@dataclass(frozen=True)
class DrafterSetting:
    """A setting of a drafter, and what it could be instead."""

    check: str
    value: str
    step: str  # what to do if an alternative fits better; {} stands for its description
    alternatives: Alternatives
    min_gain: float = MIN_GAIN  # by how much an alternative must raise the agreement


def find_settings(drafter: LevelDrafter, target: Target) -> list[DrafterSetting]:
    """Return the settings of a drafter, in the order in which they are reported."""
    own, theirs = (str(item.dtype).removeprefix("torch.") for item in (drafter, target))
    step = f"pass another --dtype: {own} is not precise enough for this drafter"
    found = [DrafterSetting("dtype", f"{own}; target {theirs}", step, _float32(drafter))]
    if drafter.reads:
        step = "train the head again, on the last hidden state: this one fits {}"
        if isinstance(drafter, Eagle3Head):
            step = "correct the layer ids in the head's config.json, so that it reads {}"
        reads = other_reads(drafter, target)
        others = [(_describe_reads(item), [(drafter, "reads", item)]) for item in reads]
        value = _describe_reads(drafter.reads)
        found.append(DrafterSetting("hidden states", value, step, others, min_gain=MIN_READS_GAIN))
    if isinstance(drafter, DraftHead):
        value = "embedding, then hidden state"
        step = "export the head again, with its weights' columns in order: it agrees best with {}"
        found.append(DrafterSetting("input order", value, step, _input_orders(drafter)))
        own_embedding, width = drafter.embed_tokens, target.embed.weight.shape[-1]
        if own_embedding is not None and own_embedding.weight.shape[-1] == width:
            step = "remove embed_tokens from the head's weights: {} fits"
            shared: Alternatives = [("the target's", [(drafter, "embed_tokens", None)])]
            found.append(DrafterSetting("embedding", "the head's own", step, shared))
    ids = drafter.token_ids
    value = "the target's" if ids is None else f"{len(ids):,} tokens"
    step = "use a drafter with the target's tokenizer: {} fits this one"
    maps: list[tuple[str, list[Change]]] = []
    if ids is not None and isinstance(drafter, Eagle3Head):
        step = "export the head again with the d2t and t2d that it was trained with: {} fits"
        offsets = ids - torch.arange(len(ids), device=ids.device)
        if not (ascending := ids.sort().values).equal(ids):
            maps.append(("a map in ascending order", [map_change(drafter, ascending)]))
        maps.append(("a map of ids, not offsets", [map_change(drafter, offsets)]))
    found.append(DrafterSetting("vocabulary", value, step, maps))
    if rotary := _rotary_embeddings(drafter.network):
        ropes = [_rope(rotary[0][2].config), _rope(target.config)]
        value = "; target ".join(dict.fromkeys(_describe_rope(rope) for rope in ropes if rope))
        step = "correct the RoPE in the drafter's config.json: {}"
        found.append(DrafterSetting("RoPE", value, step, _other_ropes(rotary, *ropes)))
    return found


def map_change(drafter: LevelDrafter, token_ids: Tensor) -> Change:
    """Return the change to another vocabulary map, ``[D]``, negative where there is no token."""
    if isinstance(drafter, Eagle3Head):
        return drafter, "d2t", token_ids - torch.arange(len(token_ids), device=token_ids.device)
    return drafter, "token_ids", token_ids


def other_reads(drafter: LevelDrafter, target: Target) -> list[tuple[int, ...]]:
    """Return the hidden states that a head could read instead of its own."""
    own, layers = drafter.reads, len(target.layers)
    found: list[tuple[int, ...]] = [(LAST,), (layers - 1,), (layers - 2,)]
    if isinstance(drafter, Eagle3Head):
        found = [tuple(index + shift for index in own) for shift in SHIFTS]
        found = [reads for reads in found if min(reads) >= 0 and max(reads) < layers]
        found.append(default_reads(layers))
    return [reads for reads in dict.fromkeys(found) if reads != own and len(reads) == len(own)]


def _float32(drafter: LevelDrafter) -> Alternatives:
    """Convert the weights, unless they are in float32 already or quantized."""
    network = drafter.network
    quantized = hasattr(getattr(network, "config", None), "quantization_config")
    if network is not None and drafter.dtype != torch.float32 and not quantized:
        yield "float32", [(item, "data", item.data.float()) for item in network.parameters()]


def _input_orders(head: DraftHead) -> Alternatives:
    """Reorder what ``fc``, and the attention of an EAGLE-3 head, reads side by side."""
    fc = [head.fc.weight]
    if not isinstance(head, Eagle3Head):
        yield "swapped halves of fc", _reordered(fc, (1, 0))
    else:
        for order in islice(permutations(range(len(head.reads))), 1, MAX_ORDERS):
            layers = ", ".join(str(head.reads[index]) for index in order)
            yield f"fc reading layers {layers}", _reordered(fc, order)
        attention = head.layers[0].self_attn
        weights = [getattr(attention, name).weight for name in ("q_proj", "k_proj", "v_proj")]
        yield "swapped halves of q_proj, k_proj and v_proj", _reordered(weights, (1, 0))


def _reordered(weights: Sequence[Tensor], order: Sequence[int]) -> list[Change]:
    """Permute the columns of weights: of their equal parts, part ``i`` becomes ``order[i]``."""
    changes: list[Change] = []
    for weight in weights:
        parts = weight.data.chunk(len(order), 1)
        columns = torch.cat([parts[order.index(at)] for at in range(len(order))], 1)
        changes.append((weight, "data", columns))
    return changes


def _describe_reads(reads: Sequence[int]) -> str:
    """Describe hidden states, as in ``"the inputs of layers 2, 7, 11"``."""
    if tuple(reads) == (LAST,):
        return "the last hidden state"
    layers = ", ".join(map(str, reads))
    return f"the inputs of layers {layers}" if len(reads) > 1 else f"the input of layer {layers}"


def _rotary_embeddings(network: nn.Module | None) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return the parent, the name and the module of every rotary embedding."""
    return [
        (parent, name, module)
        for parent in (network.modules() if network is not None else ())
        for name, module in parent.named_children()
        if "RotaryEmbedding" in type(module).__name__ and _rope(getattr(module, "config", None))
    ]


def _rope(config: Any) -> dict[str, Any]:
    """Return the RoPE parameters of full attention; empty if the model has no RoPE."""
    found = getattr(config, "rope_parameters", None) or {}
    found = found.get("full_attention") or found
    return dict(found) if "rope_theta" in found else {}


def _describe_rope(rope: Mapping[str, Any]) -> str:
    """Describe RoPE parameters, as in ``"theta 500000, llama3 times 8"``."""
    text = f"theta {rope['rope_theta']:.10g}"
    if (kind := rope.get("rope_type", "default")) != "default":
        text += f", {kind}" + (f" times {rope['factor']:g}" if "factor" in rope else "")
    return text


def _other_ropes(
    modules: Sequence[tuple[nn.Module, str, nn.Module]],
    own: dict[str, Any],
    target: dict[str, Any],
) -> Alternatives:
    """Try unscaled RoPE with the bases of published models and its own, and the target's RoPE."""
    partial = "partial_rotary_factor"  # a property of the layers
    if target.get("rope_type") == "longrope" and target.get(partial, 1.0) != own.get(partial, 1.0):
        target = {}  # its factors belong to the pairs that the target rotates
    ropes = [
        {"rope_type": "default", "rope_theta": theta} for theta in (*THETAS, own["rope_theta"])
    ]
    others = {_describe_rope(rope): rope for rope in [*ropes, *([target] if target else [])]}
    others.pop(_describe_rope(own), None)
    kept = {partial: own[partial]} if partial in own else {}
    for name, rope in others.items():
        rope = {key: value for key, value in rope.items() if key != partial} | kept
        yield name, [(parent, key, _with_rope(old, rope)) for parent, key, old in modules]


def _with_rope(module: Any, rope: dict[str, Any]) -> nn.Module:
    """Return a rotary embedding with other parameters."""
    config = copy.deepcopy(module.config)
    if "full_attention" in config.rope_parameters:  # one for each type of layer
        config.rope_parameters["full_attention"] = rope
    else:
        config.rope_parameters = rope
    changed: nn.Module = type(module)(config)
    return changed.to(next(module.buffers()).device)
