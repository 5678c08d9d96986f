"""A trained head in the layout that other engines read.

========  ==========================================================================
format    what it needs
========  ==========================================================================
eagle     ``pytorch_model.bin`` with ``embed_tokens.weight``; ``bias`` in ``config.json``
sglang    ``architectures`` of its own; ``fc.bias`` always (its layer has one, and what a
          file leaves out stays random); ``embed_tokens.weight``
vllm      the target's architecture; no ``fc.bias`` (its layer has none, and one in the
          file would be dropped without a word); ``embed_tokens.weight``
========  ==========================================================================

(EAGLE's ``cnets.py``; SGLang's ``models/llama_eagle.py`` and ``models/qwen2_eagle.py``; vLLM's
``models/llama_eagle.py``.)
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_fsd.model.checkpoint import CONFIG_FILE, EMBEDDING, WEIGHT_FILES, load_head
from eagle_fsd.model.target import Target

FORMATS = ("eagle", "sglang", "vllm")
#: Families each engine has an EAGLE head for, and what it calls it.
SGLANG_ARCHITECTURES = {"llama": "LlamaForCausalLMEagle", "qwen2": "Qwen2ForCausalLMEagle"}
VLLM_ARCHITECTURES = {"llama": "LlamaForCausalLM"}


def export_head(head: str | Path, target: Target, out: str | Path, kind: str) -> Path:
    """Write the head in folder ``head`` to ``out`` as ``kind`` reads it.

    Raises:
        CheckpointError: The head cannot be read.
        ValueError: ``kind`` is unknown or has no head for this family, ``out`` holds something, or
            the head has a bias that vLLM would drop.
    """
    if kind not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}; got {kind!r}")
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists: name another folder")
    loaded = load_head(head, target, dtype=_stored_dtype(Path(head)))
    config = json.loads((Path(head) / CONFIG_FILE).read_text(encoding="utf-8"))
    family = config.get("model_type", "llama")
    state: dict[str, Tensor] = {
        name: tensor.contiguous() for name, tensor in loaded.state_dict().items()
    }
    embedding = loaded.embed_tokens.weight if loaded.embed_tokens is not None else None
    embedding = target.embed.weight if embedding is None else embedding
    state[EMBEDDING] = embedding.detach().to("cpu", loaded.dtype).contiguous()
    if kind == "sglang":
        config["architectures"] = [_architecture(kind, family, SGLANG_ARCHITECTURES)]
        state.setdefault("fc.bias", torch.zeros(target.hidden_size, dtype=loaded.dtype))
    elif kind == "vllm":
        config["architectures"] = [_architecture(kind, family, VLLM_ARCHITECTURES)]
        if state.pop("fc.bias", torch.zeros(1)).any():
            raise ValueError(
                "this head was trained with a bias in fc, which vLLM would drop: train it with"
                " --no-bias"
            )
    config["bias"] = "fc.bias" in state
    out.mkdir(parents=True, exist_ok=True)
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    state = {name: tensor.cpu() for name, tensor in state.items()}
    if kind == "eagle":
        torch.save(state, out / WEIGHT_FILES[1])
    else:
        save_file(state, out / WEIGHT_FILES[0], metadata={"format": "pt"})
    return out


def _architecture(kind: str, family: str, known: dict[str, str]) -> str:
    if family not in known:
        raise ValueError(f"{kind} reads EAGLE heads for {', '.join(known)} targets; this: {family}")
    return known[family]


def _stored_dtype(folder: Path) -> torch.dtype:
    """The dtype a head is stored in: an export changes names, not numbers."""
    safe = folder / WEIGHT_FILES[0]
    weights = load_file(safe) if safe.exists() else None
    if weights is None and (folder / WEIGHT_FILES[1]).exists():
        weights = torch.load(folder / WEIGHT_FILES[1], map_location="cpu", weights_only=True)
    return next(iter(weights.values())).dtype if weights else torch.float32
