"""Load and save EAGLE-3 heads in both published layouts.

The tensors are those of :class:`~eagle_fsd.model.drafters.eagle3.Eagle3Head`, with ``midlayer.``
for the first layer in the EAGLE layout and ``layers.0.`` in speculators'. If the head's vocabulary
is smaller than the target's, ``d2t`` ``[D]`` holds offsets (the target's token is
``i + d2t[i]``) and the optional ``t2d`` ``[V]`` is true at the tokens that the head has.

The layouts differ in ``config.json``:

===============  =======================================  ========================================
content          EAGLE, SGLang, SpecForge                 speculators
===============  =======================================  ========================================
decoder layers   at the top                               ``transformer_layer_config``
hidden states    layer outputs (inputs minus 1):          layer inputs:
                 ``eagle_aux_hidden_state_layer_ids``     ``eagle_aux_hidden_state_layer_ids``
                 in ``eagle_config``                      at the top
acceptance rule  none                                     ``verifier_accept_k`` and
                                                          ``accept_tolerance``
===============  =======================================  ========================================

Both have ``target_hidden_size`` (``H`` if absent), ``draft_vocab_size`` (``V`` if absent; null for
the target's output projection) and the names of :class:`Eagle3Flags` at the top; SGLang also knows
``fc_norm`` as ``use_aux_norm``. Before September 2026 SpecForge trained heads without
``norm_output`` under a configuration that sets it: remove the field from such a head's
``config.json``.

Sources: ``cnets.py`` of EAGLE's authors; SGLang's and vLLM's ``llama_eagle3.py``; ``config.py``,
``models/eagle3`` and ``proposals/greedy.py`` in speculators.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eagle_fsd.model.acceptance import TopKRule
from eagle_fsd.model.checkpoint import (
    CONFIG_FILE,
    CheckpointError,
    building_head,
    fill_head,
    layer_fields,
    parse_config,
    read_config,
    read_weights,
    write_head,
)
from eagle_fsd.model.drafters.eagle3 import Eagle3Flags, Eagle3Head, default_reads
from eagle_fsd.model.drafters.layer_detection import detect_layers, is_cheap, sample_texts
from eagle_fsd.model.target import Target
from eagle_fsd.utils.text import one_line

log = logging.getLogger(__name__)

HeadLayout = Literal["eagle", "speculators"]

FIRST_LAYER = "layers.0."
#: Name of the first layer in the EAGLE layout.
MIDLAYER = "midlayer."
#: The tensor of a P-EAGLE head that stands for tokens not drafted yet.
MASK = "mask_hidden"
#: The hidden states that the head reads, in either layout.
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
#: Maps from the head's tokens to the target's, and back.
D2T, T2D = "d2t", "t2d"
SPECULATORS_TYPE = "speculators_model_type"
#: Version of speculators whose format is written.
SPECULATORS_VERSION = "0.7.0"
#: Fields of the EAGLE layout that do not describe the decoder layers.
_OWN_FIELDS = {
    *Eagle3Flags.__dataclass_fields__,
    *("architectures", "draft_vocab_size", "eagle_config", LAYER_IDS),
    *("target_hidden_size", "use_aux_norm"),
}


def is_eagle3(values: Mapping[str, Any], names: set[str]) -> bool:
    """Whether a checkpoint holds an EAGLE-3 head, or something similar that this module rejects."""
    names = {name.removeprefix("model.") for name in names}
    return (
        SPECULATORS_TYPE in values
        or not names.isdisjoint({D2T, MASK, FIRST_LAYER + "hidden_norm.weight"})
        or any(name.startswith(MIDLAYER) for name in names)
    )


def load_eagle3(
    path: str | Path, target: Target, dtype: torch.dtype | None = None, token: str | None = None
) -> Eagle3Head:
    """Load an EAGLE-3 head of either layout and attach it to its target.

    If ``config.json`` is ambiguous about the hidden states that the head reads, its readings are
    measured if that takes seconds, else the likeliest one is used. A warning names the choice.

    Raises CheckpointError if the files are missing, damaged or do not match, and ValueError if the
    head belongs to another target.
    """
    values = read_config(path, token)
    weights = _canonical(path, read_weights(path, token))
    kind = values.get(SPECULATORS_TYPE, "eagle3")
    if MASK in weights or kind == "peagle":
        raise CheckpointError(
            f"{path} is a P-EAGLE head, which drafts several tokens in one pass; only heads that"
            " draft token by token are supported"
        )
    if kind != "eagle3":
        raise CheckpointError(f"{path}: {SPECULATORS_TYPE} must be eagle3; got {kind!r}")
    layers = values.get("transformer_layer_config") if SPECULATORS_TYPE in values else values
    if not isinstance(layers, dict):
        raise CheckpointError(f"{path}: transformer_layer_config in {CONFIG_FILE} is not an object")
    config = parse_config(path, {k: v for k, v in layers.items() if k not in _OWN_FIELDS})
    candidates = _candidate_reads(path, values, len(target.layers))
    # Create the weights on the target's device, where they stay.
    with building_head(path), target.device:
        head = Eagle3Head(
            config,
            target_hidden_size=int(values.get("target_hidden_size") or config.hidden_size),
            draft_vocab_size=values.get("draft_vocab_size", config.vocab_size),
            reads=candidates[0],
            flags=_flags(values),
            dtype=dtype or target.dtype,
        )
    t2d = weights.pop(T2D, None)
    d2t = weights.get(D2T) if head.d2t is not None else weights.pop(D2T, None)
    fill_head(path, head, target, weights)
    try:
        _check_map(head, d2t, t2d)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if len(candidates) > 1:
        _choose_reads(path, head, target, candidates)
    return head


def save_eagle3(
    head: Eagle3Head,
    path: str | Path,
    layout: HeadLayout = "eagle",
    dtype: torch.dtype | None = None,
    binary: bool = False,
    target_name: str | None = None,
    rule: TopKRule | None = None,
) -> None:
    """Save an EAGLE-3 head that is attached to its target.

    The layout ``"eagle"`` is that of EAGLE's own code, SGLang and SpecForge; ``"speculators"``, of
    vLLM and speculators, also records the target's Hub name and an acceptance rule. Raises
    ``ValueError`` for a rule, layers or weights that a layout has no place for.
    """
    dtype = dtype or head.dtype
    weights = dict(head.state_dict())
    if (token_ids := head.token_ids) is not None:
        held = torch.zeros(head.config.vocab_size, dtype=torch.bool, device=token_ids.device)
        weights[T2D] = held.index_fill(0, token_ids, True)
    layers = layer_fields(head.config, len(head.layers), dtype)
    if layout == "speculators":
        config = _speculators_layout(head, layers, target_name, rule)
    else:
        if rule is not None:
            raise ValueError("the eagle layout declares no acceptance rule")
        config = _eagle_layout(head, layers)
        weights = _renamed(weights, FIRST_LAYER, MIDLAYER)
    config["draft_vocab_size"] = head.draft_vocab_size
    # With this field, EAGLE's own code expects the embedding among the weights.
    if layout == "speculators" or head.target_hidden_size != head.config.hidden_size:
        config["target_hidden_size"] = head.target_hidden_size
    write_head(path, config, weights, dtype=dtype, binary=binary)


def _eagle_layout(head: Eagle3Head, layers: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ``config.json``, given those of the decoder layers."""
    if head.config.model_type != "llama":
        raise ValueError(
            f"the eagle layout is for Llama layers; got {head.config.model_type}: use the"
            " speculators layout"
        )
    reads = [index - 1 for index in head.reads]
    return {
        **layers,
        # Flags that are false are left out: before September 2026 (pull request 879), SpecForge
        # took ``norm_output: false`` for no norm before the output projection.
        **{name: value for name, value in vars(head.flags).items() if value},
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {LAYER_IDS: reads, "use_aux_hidden_state": True},
    }


def _speculators_layout(
    head: Eagle3Head, layers: dict[str, Any], target_name: str | None, rule: TopKRule | None
) -> dict[str, Any]:
    """Return the fields of ``config.json``, given those of the decoder layers."""
    flags = dict(vars(head.flags))
    if flags.pop("bias"):
        raise ValueError("the speculators layout has no bias in fc")
    if head.draft_vocab_size is None:
        raise ValueError("the speculators layout needs a head with an output projection")
    if rule is not None and (rule.gap < 1.0 or rule.ratio == 0.0):
        raise ValueError(f"the speculators layout declares a ratio above 0 and no gap; got {rule}")
    layers.pop("architectures", None)
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": 5,  # the default
        "verifier_accept_k": rule.top if rule else 1,
        "accept_tolerance": -math.log(rule.ratio) if rule else 0.0,
    }
    architectures = [type(head.target.model).__name__]
    return {
        **flags,
        "architectures": ["Eagle3Speculator"],
        SPECULATORS_TYPE: "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target_name, "architectures": architectures},
        },
        LAYER_IDS: list(head.reads),
        "dtype": layers["dtype"],
        "torch_dtype": layers["torch_dtype"],
    }


def declared_rule(path: str | Path, token: str | None = None) -> TopKRule | None:
    """Return the acceptance rule that a head in the speculators layout declares; None if lossless.

    The default proposal method accepts a token among the target's ``verifier_accept_k`` most likely
    ones whose log-probability is within ``accept_tolerance`` of the largest. Nothing applies the
    rule unless it is passed to ``EagleFSD.generate(rule=...)``.
    """
    declared = read_config(path, token).get("speculators_config") or {}
    try:
        methods = {item["proposal_type"]: item for item in declared.get("proposal_methods", [])}
        method = methods.get(declared.get("default_proposal_method"), {})
        top = int(method.get("verifier_accept_k", 1))
        tolerance = float(method.get("accept_tolerance", 0.0))
        if top < 1 or not tolerance >= 0.0:
            raise ValueError(f"verifier_accept_k is {top} and accept_tolerance {tolerance}")
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
        raise CheckpointError(
            f"{path}: speculators_config in {CONFIG_FILE} is invalid: {one_line(error)}"
        ) from error
    if top == 1 or tolerance == 0.0:
        return None
    # A ratio above 0, which can be exported again, whatever the tolerance.
    return TopKRule(top, ratio=max(math.exp(-tolerance), sys.float_info.min))


def _canonical(path: str | Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the first layer as in :class:`Eagle3Head`."""
    renamed = _renamed(weights, MIDLAYER, FIRST_LAYER)
    if len(renamed) < len(weights):
        raise CheckpointError(f"{path} holds tensors of both {MIDLAYER}* and {FIRST_LAYER}*")
    return renamed


def _renamed(weights: Mapping[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    """Replace a prefix of names."""
    return {
        new + name.removeprefix(old) if name.startswith(old) else name: tensor
        for name, tensor in weights.items()
    }


def _flags(values: Mapping[str, Any]) -> Eagle3Flags:
    found = {name: values.get(name, False) for name in Eagle3Flags.__dataclass_fields__}
    found["fc_norm"] = found["fc_norm"] or values.get("use_aux_norm", False)
    for name, value in found.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false; got {value!r}")
    return Eagle3Flags(**found)


def _check_map(head: Eagle3Head, d2t: Tensor | None, t2d: Tensor | None) -> None:
    """Check the vocabulary map of a loaded head."""
    size = head.config.vocab_size
    if head.d2t is None:
        # Heads with the target's vocabulary may come with maps that change nothing.
        if d2t is not None and d2t.any():
            raise ValueError(f"{D2T} is not zero, but the head has the target's {size} tokens")
        if t2d is not None and not t2d.all():
            raise ValueError(f"{T2D} lacks tokens, but the head has the target's {size} tokens")
        return
    assert d2t is not None
    token_ids = d2t + torch.arange(len(d2t), device=d2t.device)
    head.set_token_ids(token_ids)
    if t2d is None:
        return
    if list(t2d.shape) != [size]:
        raise ValueError(f"{T2D} is {list(t2d.shape)}, not [{size}]")
    if int(t2d.count_nonzero()) != len(token_ids) or not t2d[token_ids].all():
        raise ValueError(f"{D2T} and {T2D} select different tokens")


def _candidate_reads(
    path: str | Path, values: Mapping[str, Any], layers: int
) -> list[tuple[int, ...]]:
    """Return the hidden states that ``config.json`` may mean, the likeliest first."""
    default = default_reads(layers)
    eagle_config = values.get("eagle_config") or {}
    if not isinstance(eagle_config, dict):
        raise CheckpointError(f"{path}: eagle_config in {CONFIG_FILE} is not an object")
    nested = eagle_config.get(LAYER_IDS)
    found = []
    for ids, offset in ((nested, 1), (values.get(LAYER_IDS), 0)):
        if not ids:
            continue
        if not isinstance(ids, list) or not all(isinstance(index, int) for index in ids):
            raise CheckpointError(f"{path}: {LAYER_IDS} must be a list of integers; got {ids!r}")
        found.append(tuple(index + offset for index in ids))
    if not found:
        return [default]
    if len(set(map(len, found))) > 1:
        raise CheckpointError(f"{path}: its two {LAYER_IDS} differ in their numbers of layers")
    # Doubt a numbering if the other one gives the layers that heads read by default.
    difference = -1 if nested else 1
    if default not in found and default == tuple(index + difference for index in found[0]):
        found.append(default)
    valid = [reads for reads in dict.fromkeys(found) if min(reads) >= 0 and max(reads) < layers]
    return valid or found


def _choose_reads(
    path: str | Path, head: Eagle3Head, target: Target, candidates: list[tuple[int, ...]]
) -> None:
    """Choose the hidden states that the head reads by its agreement, if measuring is cheap."""
    if not is_cheap(target):
        log.warning(
            "%s is ambiguous about the hidden states that the head reads; assuming the inputs of"
            " layers %s. eagle-fsd doctor measures which ones fit",
            path,
            candidates[0],
        )
        return
    head.reads, agreement = detect_layers(head, target, sample_texts(target), candidates)
    log.warning(
        "%s is ambiguous about the hidden states that the head reads; using the inputs of layers %s"
        " (agreement with the target on sampled texts: %s)",
        path,
        head.reads,
        ", ".join(f"{share:.1%} with {reads}" for reads, share in agreement.items()),
    )
