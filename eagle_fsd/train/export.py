"""Convert a trained head to the layout that another engine reads.

========  ==========================================================================
engine    requirements
========  ==========================================================================
eagle     ``pytorch_model.bin`` with ``embed_tokens.weight``; ``bias`` and, for biases
          of the attention, ``qkv_bias`` in ``config.json``; a layer with the tensors of
          Llama's or Qwen2's; RoPE scaling linear or dynamic (it rejects others)
sglang    its own ``architectures``; ``fc.bias`` always (its layer has one, which stays
          random if the file lacks it); ``bias`` false in ``config.json`` (it means
          biases of the attention there); ``embed_tokens.weight``
vllm      the target's architecture; no ``fc.bias`` (its layer has none and ignores the
          file's); ``bias`` as for SGLang; ``embed_tokens.weight``
========  ==========================================================================

All of them read RoPE settings and data type under their names in transformers 4.

EAGLE-3 heads have two layouts, see :mod:`~eagle_fsd.model.eagle3_checkpoint`: EAGLE's for ``eagle``
and ``sglang``, that of speculators for ``vllm`` and ``speculators``. Only the latter can declare an
acceptance rule. EAGLE's own code knows none of the variants, and reads a ``pytorch_model.bin``.

Sources: EAGLE's ``cnets.py``, ``cnets1.py`` and ``configs.py``; SGLang's ``models/llama.py``,
``llama_eagle.py`` and ``qwen2_eagle.py``; vLLM's ``models/llama.py`` and ``llama_eagle.py``.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.model.checkpoint import (
    EMBEDDING,
    FC_BIAS,
    head_config,
    load_head,
    read_config,
    read_weights,
    tensor_names,
    transformers4_fields,
    write_head,
)
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.eagle3_checkpoint import (
    HeadLayout,
    declared_rule,
    is_eagle3,
    load_eagle3,
    save_eagle3,
)
from eagle_fsd.model.identity import EXPORTED_KEY, fingerprints
from eagle_fsd.model.target import Target
from eagle_fsd.train.config import ExportFormat, ExportRequest
from eagle_fsd.train.loaded_target import load_frozen_target
from eagle_fsd.utils.files import atomic_write

log = logging.getLogger(__name__)

#: Tensors of EAGLE's own code, which ignores others.
EAGLE_TENSORS = re.compile(
    r"embed_tokens\.weight|fc\..*|layers\.0\.(self_attn\.[qkvo]_proj\.weight|self_attn\.[qkv]_proj"
    r"\.bias|mlp\.(gate|up|down)_proj\.weight|post_attention_layernorm\.weight)"
)
#: Architectures of EAGLE heads, by engine and model family.
ARCHITECTURES = {
    "sglang": {"llama": "LlamaForCausalLMEagle", "qwen2": "Qwen2ForCausalLMEagle"},
    "vllm": {"llama": "LlamaForCausalLM"},
}


def export_head(request: ExportRequest, *, token: str | None = None) -> Path:
    """Convert a head for another engine; raises ValueError if that is impossible."""
    target = load_frozen_target(request, token=token, layers=False)
    return convert_head(request.head, target, request.out, request.format, token=token)


def convert_head(
    head: str | Path,
    target: Target,
    out: str | Path,
    export_format: ExportFormat,
    token: str | None = None,
) -> Path:
    """Convert a head for another engine, given a loaded target; see :func:`export_head`."""
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} must be an empty or a new folder")
    if is_eagle3(read_config(head, token), tensor_names(head, token)):
        _record_origin(out, _convert_eagle3(head, target, out, export_format, token=token))
        return out
    if export_format == "speculators":
        raise ValueError(
            f"{head} is an EAGLE-1/2 head; the speculators layout is for EAGLE-3 heads"
        )
    loaded = load_head(head, target, _stored_dtype(head, token), token)
    if loaded.token_ids is not None:
        log.warning(
            "the head was trained to draft %d tokens; %s will draft all of the target's",
            len(loaded.token_ids),
            export_format,
        )
        loaded.restrict_vocabulary(None)
    config = head_config(loaded, loaded.dtype)
    state: dict[str, Tensor] = dict(loaded.state_dict())
    if loaded.embed_tokens is None:
        state[EMBEDDING] = target.embed.weight
    if export_format == "eagle":
        config.update(_eagle_fields(config, state))
    else:
        config.update(
            architectures=[_architecture(export_format, loaded.config.model_type)], bias=False
        )
    if export_format == "sglang":
        state.setdefault(FC_BIAS, torch.zeros(target.hidden_size, dtype=loaded.dtype))
    elif export_format == "vllm" and state.pop(FC_BIAS, torch.zeros(1)).any():
        raise ValueError(
            "the head was trained with a bias in fc, which vLLM ignores; train it with --no-bias"
        )
    write_head(out, config, state, loaded.dtype, binary=export_format == "eagle")
    _record_origin(out, loaded)
    return out


def _record_origin(out: Path, head: Drafter) -> None:
    """Record the fingerprints of the head that was exported, by which settings are checked."""
    assert head.network is not None
    file = out / "config.json"
    config = {
        **json.loads(file.read_text(encoding="utf-8")),
        EXPORTED_KEY: fingerprints(head.network),
    }
    atomic_write(file, json.dumps(config, indent=2, sort_keys=True) + "\n")


def _convert_eagle3(
    head: str | Path, target: Target, out: Path, export_format: ExportFormat, token: str | None
) -> Drafter:
    """Convert an EAGLE-3 head; warn of what EAGLE's own code or the layout cannot express."""
    loaded = load_eagle3(head, target, _stored_dtype(head, token), token)
    rule = declared_rule(head, token)
    if export_format == "eagle":
        variants = [name for name, value in vars(loaded.flags).items() if value and name != "bias"]
        if variants:
            log.warning("EAGLE's own code ignores variants of this head: %s", ", ".join(variants))
        _warn_of_scaling(transformers4_fields(loaded.config, loaded.dtype))
    layout: HeadLayout = "eagle" if export_format in ("eagle", "sglang") else "speculators"
    if layout == "eagle" and rule is not None:
        log.warning(
            "the layout for %s has no acceptance rule; this head's is left out", export_format
        )
        rule = None
    name = target.model.name_or_path or "."
    save_eagle3(
        loaded,
        out,
        layout,
        binary=export_format == "eagle",
        target_name=None if Path(name).exists() else name,
        rule=rule,
    )
    return loaded


def _eagle_fields(config: dict[str, Any], state: dict[str, Tensor]) -> dict[str, Any]:
    """Return the fields that only EAGLE's own code reads; warn of what it cannot read."""
    _warn_of_scaling(config)
    if ignored := sorted(name for name in state if not EAGLE_TENSORS.fullmatch(name)):
        log.warning("EAGLE's own code ignores tensors of this head: %s", ", ".join(ignored))
    return {"qkv_bias": True} if "layers.0.self_attn.q_proj.bias" in state else {}


def _warn_of_scaling(config: dict[str, Any]) -> None:
    scaling = config.get("rope_scaling")
    if scaling is not None and "type" not in scaling:
        kind = scaling["rope_type"]
        log.warning("EAGLE's own code rejects this head: its RoPE scaling is %s", kind)


def _architecture(export_format: str, family: str) -> str:
    known = ARCHITECTURES[export_format]
    if family not in known:
        raise ValueError(f"{export_format} reads EAGLE heads for {', '.join(known)}; got {family}")
    return known[family]


def _stored_dtype(head: str | Path, token: str | None) -> torch.dtype:
    """Return the dtype of a head's file, which the export keeps."""
    weights = read_weights(head, token).values()
    return next((item.dtype for item in weights if item.is_floating_point()), torch.float32)
