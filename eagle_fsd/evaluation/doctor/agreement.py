"""Let a network predict answer tokens from the target's states, as it is and with one change.

Shape letters: ``S`` tokens of a sequence, ``T`` answer tokens of all sequences, ``H`` hidden size
of the target, ``D`` tokens of the draft's vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from eagle_fsd.model.drafters.eagle3 import Eagle3Head, default_reads
from eagle_fsd.model.drafters.levels import LevelDrafter
from eagle_fsd.model.target import LAST, Target

#: Maximum number of positions whose distributions are in memory at once.
CHUNK = 512
#: Bases of the rotary embedding in published models.
THETAS = (10_000.0, 500_000.0, 1_000_000.0, 10_000_000.0)
#: By how much the layer ids of EAGLE-3 heads differ between conventions, and one more.
SHIFTS = (-2, -1, 1, 2)
#: A vocabulary map estimated from the answers must reach this agreement. Those of a drafter that
#: knows nothing but the previous token reach less.
MIN_ESTIMATED = 0.4


class Agreement:
    """The answer tokens that a network predicts.

    Args:
        drafter: The network.
        target: Its target.
        answers: For each answer, ``[S]`` token ids and the number of prompt tokens.

    Attributes:
        truth: ``[T]`` the answer tokens.
        positions: ``[T]`` number of tokens before each of them.
        chance: Share of the most frequent answer token, which a constant prediction would reach.
        reads: Description of the hidden states that the network reads; empty if there are none.
        rope: Description of the RoPE of network and target; empty if the network has none.
    """

    def __init__(
        self, drafter: LevelDrafter, target: Target, answers: Sequence[tuple[Tensor, int]]
    ) -> None:
        self.drafter, self.target = drafter, target
        # The first token that a pair of a feature and the next token predicts is the third one.
        self._sequences = [(ids, max(start, 2)) for ids, start in answers]
        self.truth = torch.cat([ids[start:] for ids, start in self._sequences])
        self.positions = torch.cat(
            [torch.arange(start, len(ids), device=ids.device) for ids, start in self._sequences]
        )
        self.chance = int(self.truth.bincount().max()) / len(self.truth)
        self.reads = _describe_reads(drafter.reads) if drafter.reads else ""
        rotary = [_rope(module.config) for _, _, module in _rotary_embeddings(drafter.network)]
        self._rope, self._target_rope = rotary[0] if rotary else {}, _rope(target.config)
        ropes = [_describe_rope(rope) for rope in (self._rope, self._target_rope) if rope]
        self.rope = "; target ".join(dict.fromkeys(ropes)) if rotary else ""

    @cached_property
    @torch.no_grad()
    def _states(self) -> list[dict[int, Tensor]]:
        """The hidden states of each sequence that any variant reads, ``[S, H]`` by index."""
        target = self.target
        indices = sorted({*self.drafter.reads, *sum(self._other_reads(), ())})
        found = []
        for ids, _ in self._sequences:
            features = target.prefill(ids[None], 0, target.new_cache(1, len(ids)), indices)[0]
            found.append(dict(zip(indices, features.split(target.hidden_size, -1), strict=True)))
        return found

    @torch.no_grad()
    def _predict(self, reads: Sequence[int]) -> Tensor:
        """Return ``[T]`` most likely entries of the draft's vocabulary; -1 if not finite."""
        drafter, found = self.drafter, []
        for number, (ids, start) in enumerate(self._sequences):
            size = len(ids)
            if reads:
                states = self._states[number]
                features = torch.cat([states[index] for index in reads], -1)[None, :-1]
                tokens = ids[None, 1:]
            else:
                features, tokens = torch.empty(1, size, 0, device=ids.device), ids[None]
            lengths = torch.zeros(1, dtype=torch.long, device=ids.device)
            cache = drafter.new_cache(1, size)
            keys = cache.keys(size, ids.device)
            hidden = drafter.append(features, tokens, lengths, keys, cache)[0]
            # The last output predicts the token after the sequence.
            for rows in hidden[start - size - 1 : -1].split(CHUNK):
                best = drafter.log_probs(rows).max(-1)
                found.append(best.indices.where(best.values.isfinite(), -1))
        return torch.cat(found)

    def _hits(self, entries: Tensor, token_ids: Tensor | None) -> Tensor:
        """Return which answer tokens are predicted under a vocabulary map: ``[T]`` bool."""
        tokens = entries if token_ids is None else token_ids[entries]
        return (tokens == self.truth) & (entries >= 0)

    def _measure(self, reads: Sequence[int] | None = None) -> Tensor:
        entries = self._predict(self.drafter.reads if reads is None else reads)
        return self._hits(entries, self.drafter.token_ids)

    @cached_property
    def entries(self) -> Tensor:
        """``[T]`` the drafter's most likely entries of its vocabulary; -1 if not finite."""
        return self._predict(self.drafter.reads)

    @cached_property
    def own(self) -> Tensor:
        """``[T]`` bool, which answer tokens the drafter predicts as it is."""
        return self._hits(self.entries, self.drafter.token_ids)

    def in_float32(self) -> dict[str, Tensor]:
        """Return which answer tokens are predicted, ``[T]`` bool, by the network in float32.

        Empty if it is in float32 already, if its weights are quantized, or if they do not fit into
        memory a second time in float32.
        """
        found: dict[str, Tensor] = {}
        network = self.drafter.network
        quantized = hasattr(getattr(network, "config", None), "quantization_config")
        if network is None or self.drafter.dtype == torch.float32 or quantized:
            return found
        before = [parameter.data for parameter in network.parameters()]
        try:
            for parameter in network.parameters():
                parameter.data = parameter.data.float()
            found["float32"] = self._measure()
        except torch.OutOfMemoryError:
            pass
        finally:
            for parameter, data in zip(network.parameters(), before, strict=True):
                parameter.data = data
        return found

    def with_other_reads(self) -> dict[str, Tensor]:
        """Return which answer tokens are predicted, ``[T]`` bool, from other hidden states."""
        return {_describe_reads(reads): self._measure(reads) for reads in self._other_reads()}

    def _other_reads(self) -> list[tuple[int, ...]]:
        own, layers = self.drafter.reads, len(self.target.layers)
        if isinstance(self.drafter, Eagle3Head):
            found = [tuple(index + shift for index in own) for shift in SHIFTS]
            found = [reads for reads in found if min(reads) >= 0 and max(reads) < layers]
            found.append(default_reads(layers))
        else:
            found = [(LAST,), (layers - 1,), (layers - 2,)]
        return [reads for reads in dict.fromkeys(found) if reads != own and len(reads) == len(own)]

    def with_other_maps(self) -> dict[str, Tensor]:
        """Return which answer tokens are predicted, ``[T]`` bool, under other vocabulary maps.

        One is estimated from the answers: each half of the tokens is predicted with a map that
        assigns to every entry the token that it coincides with most often in the other half.
        """
        ids, entries, truth = self.drafter.token_ids, self.entries, self.truth
        found = {}
        if ids is not None:
            offsets = ids - torch.arange(len(ids), device=ids.device)
            found["a map in ascending order"] = self._hits(entries, ids.sort().values)
            found["a map of ids, not offsets"] = self._hits(entries, offsets)
        tokens = torch.full_like(truth, -1)
        half = torch.arange(len(truth), device=truth.device) % 2 == 0
        for fitted, tested in ((half, ~half), (~half, half)):
            pairs = torch.stack([entries[fitted], truth[fitted]])
            pairs, counts = pairs.unique(dim=1, return_counts=True)
            # Of several pairs with the same entry, the last one remains.
            best = dict(zip(*pairs[:, counts.argsort()].tolist(), strict=True))
            estimated = [best.get(entry, -1) for entry in entries[tested].tolist()]
            tokens[tested] = torch.tensor(estimated, device=truth.device)
        hits = (tokens == truth) & (entries >= 0)
        if int(hits.sum()) > max(MIN_ESTIMATED * len(truth), int(self.own.sum())):
            found["a map estimated from the answers"] = hits
        return found

    def with_other_ropes(self) -> dict[str, Tensor]:
        """Return which answer tokens are predicted, ``[T]`` bool, with other RoPE parameters."""
        own, factor = self._rope, "partial_rotary_factor"
        thetas = dict.fromkeys((*THETAS, own["rope_theta"]))
        ropes = [{"rope_type": "default", "rope_theta": theta} for theta in thetas]
        ropes += [self._target_rope] if self._target_rope else []
        if factor in own:  # this is a property of the layers
            ropes = [{**rope, factor: own[factor]} for rope in ropes]
        others = {_describe_rope(rope): rope for rope in ropes}
        others.pop(_describe_rope(own), None)
        found, places = {}, _rotary_embeddings(self.drafter.network)
        for name, rope in others.items():
            for parent, attribute, module in places:
                setattr(parent, attribute, _with_rope(module, rope))
            found[name] = self._measure()
        for parent, attribute, module in places:
            setattr(parent, attribute, module)
        return found


def _describe_reads(reads: Sequence[int]) -> str:
    """Describe hidden states, as in ``"the inputs of layers 2, 7, 11"``."""
    if tuple(reads) == (LAST,):
        return "the last hidden state"
    layers = ", ".join(map(str, reads))
    return f"the inputs of layers {layers}" if len(reads) > 1 else f"the input of layer {layers}"


def _describe_rope(rope: Mapping[str, Any]) -> str:
    """Describe RoPE parameters, as in ``"theta 500000, llama3 times 8"``."""
    text = f"theta {rope['rope_theta']:.10g}"
    if (kind := rope.get("rope_type", "default")) != "default":
        text += f", {kind}"
        if "factor" in rope:
            text += f" times {rope['factor']:g}"
    return text


def _rope(config: Any) -> dict[str, Any]:
    """Return the RoPE parameters of full attention; empty if the model has no RoPE."""
    found = getattr(config, "rope_parameters", None) or {}
    found = found.get("full_attention") or found
    return dict(found) if "rope_theta" in found else {}


def _rotary_embeddings(network: nn.Module | None) -> list[tuple[nn.Module, str, Any]]:
    """Return the parent, the name and the module of every rotary embedding."""
    return [
        (parent, name, module)
        for parent in (network.modules() if network is not None else ())
        for name, module in parent.named_children()
        if "RotaryEmbedding" in type(module).__name__ and _rope(getattr(module, "config", None))
    ]


def _with_rope(module: Any, rope: Mapping[str, Any]) -> nn.Module:
    """Return a rotary embedding with other parameters."""
    config = copy.deepcopy(module.config)
    if "full_attention" in config.rope_parameters:  # one for each type of layer
        config.rope_parameters["full_attention"] = dict(rope)
    else:
        config.rope_parameters = dict(rope)
    changed: nn.Module = type(module)(config)
    return changed.to(next(module.buffers()).device)
