"""Convert a trained head to the layout that another engine reads.

========  ==========================================================================
engine    requirements
========  ==========================================================================
eagle     ``pytorch_model.bin`` with ``embed_tokens.weight``; ``bias`` in ``config.json``
sglang    its own ``architectures``; ``fc.bias`` always (its layer has one, which stays
          random if the file lacks it); ``embed_tokens.weight``
vllm      the target's architecture; no ``fc.bias`` (its layer has none and ignores the
          file's); ``embed_tokens.weight``
========  ==========================================================================

Sources: EAGLE's ``cnets.py``; SGLang's ``models/llama_eagle.py`` and ``models/qwen2_eagle.py``;
vLLM's ``models/llama_eagle.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_fsd.model.checkpoint import CONFIG_FILE, EMBEDDING, WEIGHT_FILES, load_head
from eagle_fsd.model.config import TargetOptions
from eagle_fsd.model.target import Target
from eagle_fsd.train.config import ExportFormat, ExportRequest
from eagle_fsd.train.loaded_target import LoadedTarget

#: Architectures of EAGLE heads, by engine and model family.
ARCHITECTURES = {
    "sglang": {"llama": "LlamaForCausalLMEagle", "qwen2": "Qwen2ForCausalLMEagle"},
    "vllm": {"llama": "LlamaForCausalLM"},
}


def export_head(request: ExportRequest, *, token: str | None = None) -> Path:
    """Convert a head for another engine.

    Args:
        request: The head, the target, the engine and the output folder.
        token: Access token for the Hub.

    Returns:
        The folder.

    Raises:
        CheckpointError: The head cannot be read.
        LoadError: The target cannot be loaded.
        ValueError: The engine has no EAGLE head for this family, the output folder is not empty, or
            the head has a bias that vLLM would ignore.
    """
    options = TargetOptions(target=request.target, dtype=request.dtype)
    target = LoadedTarget.load(options, token=token).target
    return convert_head(request.head, target, request.out, request.format)


def convert_head(
    head: str | Path, target: Target, out: str | Path, export_format: ExportFormat
) -> Path:
    """Convert a head for another engine, given a loaded target.

    Args:
        head: Folder of the head.
        target: The head's target, which provides the embedding if the head has none.
        out: Output folder, created if missing.
        export_format: The engine.

    Returns:
        ``out``.

    Raises:
        CheckpointError: The head cannot be read.
        ValueError: See :func:`export_head`.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists; choose another folder")
    loaded = load_head(head, target, dtype=_stored_dtype(Path(head)))
    config = json.loads((Path(head) / CONFIG_FILE).read_text(encoding="utf-8"))
    state: dict[str, Tensor] = dict(loaded.state_dict())
    own_embedding = loaded.embed_tokens
    embedding = target.embed.weight if own_embedding is None else own_embedding.weight
    state[EMBEDDING] = embedding.detach().to(dtype=loaded.dtype)
    if export_format != "eagle":
        family = config.get("model_type", "llama")
        config["architectures"] = [_architecture(export_format, family)]
    if export_format == "sglang":
        state.setdefault("fc.bias", torch.zeros(target.hidden_size, dtype=loaded.dtype))
    elif export_format == "vllm" and state.pop("fc.bias", torch.zeros(1)).any():
        raise ValueError(
            "the head was trained with a bias in fc, which vLLM ignores; train it with --no-bias"
        )
    config["bias"] = "fc.bias" in state
    out.mkdir(parents=True, exist_ok=True)
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    state = {name: tensor.cpu().contiguous() for name, tensor in state.items()}
    if export_format == "eagle":
        torch.save(state, out / WEIGHT_FILES[1])
    else:
        save_file(state, out / WEIGHT_FILES[0], metadata={"format": "pt"})
    return out


def _architecture(export_format: str, family: str) -> str:
    known = ARCHITECTURES[export_format]
    if family not in known:
        families = ", ".join(known)
        raise ValueError(f"{export_format} reads EAGLE heads for {families}; got {family}")
    return known[family]


def _stored_dtype(folder: Path) -> torch.dtype:
    """Return the dtype of a head's file, which the export keeps."""
    safe, binary = (folder / name for name in WEIGHT_FILES)
    if safe.exists():
        weights = load_file(safe)
    elif binary.exists():
        weights = torch.load(binary, map_location="cpu", weights_only=True)
    else:
        return torch.float32  # load_head reports the missing file
    return next(iter(weights.values())).dtype
