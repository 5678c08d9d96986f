"""Tests for exported heads (EAGLE, SGLang, vLLM) and for the formats of trained heads.

The export of EAGLE-3 heads is in ``test_eagle3_training.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import (
    DEFAULT_ARCHITECTURE,
    LINEAR_ROPE,
    prompt,
    tiny_target,
    untrained_head,
)
from safetensors.torch import load_file
from torch import Tensor
from trainings import Train, read_weights, same_weights
from transformers import AutoConfig

from eagle_fsd import CheckpointError, EagleHead
from eagle_fsd.model.checkpoint import load_head, save_head
from eagle_fsd.model.identity import EXPORTED_KEY, fingerprint
from eagle_fsd.model.loading import load_target
from eagle_fsd.model.target import Target
from eagle_fsd.train.config import ExportFormat
from eagle_fsd.train.export import convert_head

#: Formats for EAGLE-1/2 heads.
FORMATS: tuple[ExportFormat, ...] = ("eagle", "sglang", "vllm")
#: Names that transformers 4 does not know, and those in their place.
NEW_NAMES, OLD_NAMES = ("rope_parameters", "dtype"), ("rope_theta", "rope_scaling", "torch_dtype")
PARTS = {"self_attn": "qkvo", "mlp": ("gate", "up", "down")}
EVERY = {f"layers.0.{part}.{name}_proj.weight" for part, names in PARTS.items() for name in names}
EVERY |= {"embed_tokens.weight", "fc.weight", "layers.0.post_attention_layernorm.weight"}


def make_head(
    architecture: str = DEFAULT_ARCHITECTURE, bias: bool = False, **changes: Any
) -> EagleHead:
    """Create a random head of a family, attached to a target."""
    target = Target(tiny_target(architecture, **changes))
    return untrained_head(target.model, bias=bias).attach(target)


def export(head: EagleHead, folder: Path, engine: ExportFormat) -> Path:
    """Save a head and export it; return the export's folder."""
    save_head(head, folder / "head")
    return convert_head(folder / "head", head.target, folder / engine, engine)


def read_export(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return an export's configuration and tensors."""
    config = json.loads((folder / "config.json").read_text())
    if (folder / "model.safetensors").exists():
        assert not (folder / "pytorch_model.bin").exists()
        return config, load_file(folder / "model.safetensors")
    return config, torch.load(folder / "pytorch_model.bin", weights_only=True)


def read_head(folder: Path, engine: str, target: Target) -> EagleHead:
    """Read a head as an engine does: by the names of transformers 4, with its own biases."""
    config, state = read_export(folder)
    for name in NEW_NAMES:
        config.pop(name, None)
    assert {tensor.dtype for tensor in state.values()} == {getattr(torch, config["torch_dtype"])}
    config["attention_bias"] = engine != "eagle" and any(
        config.get(name) for name in ("attention_bias", "bias")
    )
    bias = config.get("bias", True) if engine == "eagle" else engine == "sglang"
    head = EagleHead(AutoConfig.for_model(config.pop("model_type"), **config), bias).attach(target)
    head.embed_tokens = torch.nn.Embedding(*state["embed_tokens.weight"].shape)
    head.load_state_dict(state)
    return head.eval()


def test_each_engine_finds_its_tensors_and_fields(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's ``fc`` has a bias, which stays random if the file lacks it; vLLM's has none."""
    for bias in (True, False):
        head, folder = make_head(bias=bias), tmp_path / str(bias)
        config, state = read_export(export(head, folder, "eagle"))
        assert (folder / "eagle" / "pytorch_model.bin").exists()
        assert state.keys() == (EVERY | {"fc.bias"} if bias else EVERY)
        assert (config["bias"], config["num_hidden_layers"]) == (bias, 1)
        config, state = read_export(export(head, folder, "sglang"))
        assert state.keys() == EVERY | {"fc.bias"}
        assert (config["architectures"], config["bias"]) == (["LlamaForCausalLMEagle"], False)
        assert torch.equal(state["fc.bias"], head.fc.bias if bias else torch.zeros(32))
    config, _ = read_export(export(make_head("qwen2"), tmp_path / "qwen2", "sglang"))
    assert config["architectures"] == ["Qwen2ForCausalLMEagle"]
    zeros = make_head(bias=True)
    torch.nn.init.zeros_(zeros.fc.bias)  # it can be dropped
    config, state = read_export(export(zeros, tmp_path / "vllm", "vllm"))
    assert state.keys() == EVERY
    assert (config["architectures"], config["bias"]) == (["LlamaForCausalLM"], False)
    for architecture, warning in (
        ("llama-linear-rope-tied", ""),
        ("qwen2", ""),
        ("llama-grouped-llama3-rope", "rejects this head: its RoPE scaling is llama3"),
        ("qwen3", "ignores tensors of this head: layers.0.self_attn.k_norm.weight, layers.0.self"),
    ):
        caplog.clear()
        export(make_head(architecture), tmp_path / architecture, "eagle")
        assert warning in caplog.text
        assert bool(warning) == bool(caplog.text)


def test_exports_compute_what_the_head_computes(tmp_path: Path) -> None:
    """Exports read here or as engines do give the head's outputs, with any bias or field names."""
    llama, scaled = "llama-linear-rope-tied", "llama-grouped-llama3-rope"
    cases: list[tuple[str, ExportFormat, bool, dict[str, Any]]] = [
        (llama, "eagle", True, {}),
        (llama, "eagle", False, {}),
        (llama, "sglang", True, {}),
        (llama, "vllm", False, {}),
        (scaled, "sglang", False, {"attention_bias": True}),
        (scaled, "vllm", False, {"attention_bias": True}),
        ("qwen2", "eagle", True, {}),
        ("qwen2", "sglang", False, {}),
    ]
    for number, (architecture, engine, bias, changes) in enumerate(cases):
        head, folder = make_head(architecture, bias, **changes), tmp_path / str(number)
        out = export(head, folder, engine)
        config, state = read_export(out)
        for name, tensor in load_file(folder / "head" / "model.safetensors").items():
            assert torch.equal(state[name], tensor)
        assert torch.equal(state["embed_tokens.weight"], head.target.embed.weight)
        features = torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(number))
        inputs = features, prompt(20), torch.arange(20)[None]
        for other in (read_head(out, engine, head.target), load_head(out, head.target)):
            assert torch.allclose(other(*inputs), head(*inputs), rtol=1e-4, atol=1e-4)
        assert other.embed_tokens is None  # the target's embedding is not kept twice
        assert config[EXPORTED_KEY]["float32"] == fingerprint(head)
        if architecture == llama:
            assert config["rope_scaling"] == {"type": "linear", "factor": LINEAR_ROPE["factor"]}
        file = folder / "head" / "config.json"  # as heads were saved before
        old = {
            key: item for key, item in json.loads(file.read_text()).items() if key not in OLD_NAMES
        }
        file.write_text(json.dumps(old))
        again = convert_head(folder / "head", head.target, folder / "again", engine)
        assert (again / "config.json").read_text() == (out / "config.json").read_text()


def test_exports_keep_embedding_and_data_type_and_can_be_exported_again(tmp_path: Path) -> None:
    own = make_head(bias=True)
    target = own.target
    own.embed_tokens = torch.nn.Embedding.from_pretrained(torch.randn_like(target.embed.weight))
    save_head(own, tmp_path / "own", torch.bfloat16, binary=True)
    before = json.loads((tmp_path / "own" / "config.json").read_text())
    for engine in ("eagle", "sglang"):
        out = convert_head(tmp_path / "own", target, tmp_path / engine, engine)
        config, state = read_export(out)
        assert torch.equal(state["embed_tokens.weight"], own.embed_tokens.weight.bfloat16())
        assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
        assert config["dtype"] == config["torch_dtype"] == "bfloat16"
        changed = {"bias": 0, "architectures": 0, EXPORTED_KEY: 0}
        assert {**before, **changed} == {**config, **changed}
    again = read_export(convert_head(tmp_path / "sglang", target, tmp_path / "again", "eagle"))
    config, state = read_export(tmp_path / "eagle")
    assert {**again[0], "architectures": 0} == {**config, "architectures": 0}
    assert again[0]["bias"] is True
    assert same_weights(again[1], state)


def test_export_rejects_what_it_cannot_convert(tmp_path: Path) -> None:
    for architecture, engine in (
        ("qwen2", "vllm"),
        ("qwen3", "vllm"),
        ("qwen3", "sglang"),
        ("mistral-no-window", "sglang"),
    ):
        with pytest.raises(ValueError, match=f"{engine} reads EAGLE heads for llama"):
            export(make_head(architecture), tmp_path, engine)
    with pytest.raises(ValueError, match="bias in fc, which vLLM ignores"):
        export(make_head(bias=True), tmp_path, "vllm")
    head, out = make_head(), tmp_path / "out"
    save_head(head, tmp_path / "head")
    with pytest.raises(ValueError, match="must be an empty or a new folder"):
        convert_head(tmp_path / "head", head.target, tmp_path / "head", "eagle")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        convert_head(tmp_path, head.target, out, "eagle")
    with pytest.raises(ValueError, match="is an EAGLE-1/2 head; the speculators layout is for"):
        convert_head(tmp_path / "head", head.target, out, "speculators")
    with pytest.raises(ValueError, match="belongs to another target"):
        convert_head(tmp_path / "head", Target(tiny_target(hidden_size=64)), out, "eagle")
    assert not out.exists()


def test_trained_head_is_saved_in_either_format(train: Train, target: Path, tmp_path: Path) -> None:
    safe = train("safe", bias=True, max_steps=3)
    binary = train("binary", bias=True, max_steps=3, binary=True)
    assert not (binary / "model.safetensors").exists()
    stored = torch.load(binary / "pytorch_model.bin", weights_only=True)
    assert same_weights(stored, read_weights(safe))
    assert stored.keys() == EVERY - {"embed_tokens.weight"} | {"fc.bias"}
    last = load_file(safe / "checkpoints" / "step-3" / "model.safetensors")
    assert same_weights({k.removeprefix("head."): v for k, v in last.items()}, stored)
    wrapped = Target(load_target(target))
    convert_head(binary, wrapped, tmp_path / "sglang", "sglang")
    convert_head(train(max_steps=1), wrapped, tmp_path / "vllm", "vllm")  # it has no bias
