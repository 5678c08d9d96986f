"""Tests for exported heads (EAGLE, SGLang, vLLM) and for trained heads loaded back.

The export of EAGLE-3 heads is in ``test_eagle3_training.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_reader import FORMATS, read_export, read_head
from pairs import (
    DEFAULT_ARCHITECTURE,
    LINEAR_ROPE,
    aligned_pair,
    left_padded,
    prompt,
    tiny_target,
    untrained_head,
)
from safetensors.torch import load_file
from torch import Tensor
from trainings import Train, read_weights, same_weights

from eagle_fsd import CheckpointError, EagleFSD, EagleHead
from eagle_fsd.model.checkpoint import load_head, save_head
from eagle_fsd.model.identity import EXPORTED_KEY, fingerprint
from eagle_fsd.model.loading import load_target
from eagle_fsd.model.target import Target
from eagle_fsd.train.config import ExportFormat
from eagle_fsd.train.export import convert_head

LAYER = {
    "layers.0.self_attn.q_proj.weight",
    "layers.0.self_attn.k_proj.weight",
    "layers.0.self_attn.v_proj.weight",
    "layers.0.self_attn.o_proj.weight",
    "layers.0.mlp.gate_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.0.mlp.down_proj.weight",
    "layers.0.post_attention_layernorm.weight",
}
EVERY = {"embed_tokens.weight", "fc.weight"} | LAYER


def save_random_head(
    folder: Path, architecture: str = DEFAULT_ARCHITECTURE, bias: bool = False
) -> tuple[Path, Target]:
    """Save a head of a family; return its folder and its target."""
    target = Target(tiny_target(architecture))
    save_head(untrained_head(target.model, bias=bias).attach(target), folder / "head")
    return folder / "head", target


def export_random_head(
    folder: Path, engine: ExportFormat, architecture: str = DEFAULT_ARCHITECTURE, bias: bool = False
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Export a head of a family; return the configuration and the tensors."""
    head, target = save_random_head(folder, architecture, bias)
    return read_export(convert_head(head, target, folder / "out", engine))


# -- the three formats -----------------------------------------------------------------------------


def test_each_engine_finds_its_tensors_and_fields(tmp_path: Path) -> None:
    """SGLang's ``fc`` has a bias, which stays random if the file lacks it; vLLM's has none."""
    for bias in (True, False):
        folder = tmp_path / str(bias)
        config, state = export_random_head(folder / "eagle", "eagle", bias=bias)
        assert (folder / "eagle" / "out" / "pytorch_model.bin").exists()
        assert state.keys() == (EVERY | {"fc.bias"} if bias else EVERY)
        assert (config["bias"], config["num_hidden_layers"]) == (bias, 1)
        config, state = export_random_head(folder / "sglang", "sglang", bias=bias)
        assert state.keys() == EVERY | {"fc.bias"}
        assert (config["architectures"], config["bias"]) == (["LlamaForCausalLMEagle"], False)
        saved = load_file(folder / "sglang" / "head" / "model.safetensors")
        assert torch.equal(state["fc.bias"], saved.get("fc.bias", torch.zeros(32)))
    config, _ = export_random_head(tmp_path / "qwen2", "sglang", "qwen2")
    assert config["architectures"] == ["Qwen2ForCausalLMEagle"]
    config, state = export_random_head(tmp_path / "vllm", "vllm")
    assert state.keys() == EVERY
    assert (config["architectures"], config["bias"]) == (["LlamaForCausalLM"], False)
    target = Target(tiny_target())
    head = untrained_head(target.model).attach(target)
    torch.nn.init.zeros_(head.fc.bias)  # it can be dropped
    save_head(head, tmp_path / "zeros")
    _, state = read_export(convert_head(tmp_path / "zeros", target, tmp_path / "out", "vllm"))
    assert state.keys() == EVERY


def test_eagle_export_warns_of_what_eagle_cannot_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for architecture, warning in (
        ("llama-linear-rope-tied", ""),
        ("qwen2", ""),
        ("llama-grouped-llama3-rope", "rejects this head: its RoPE scaling is llama3"),
        ("qwen3", "ignores tensors of this head: layers.0.self_attn.k_norm.weight, layers.0.self"),
    ):
        caplog.clear()
        export_random_head(tmp_path / architecture, "eagle", architecture)
        assert warning in caplog.text
        assert bool(warning) == bool(caplog.text)


def test_sglang_export_can_be_exported_again(tmp_path: Path) -> None:
    head, target = save_random_head(tmp_path, bias=True)
    sglang = convert_head(head, target, tmp_path / "sglang", "sglang")
    again = read_export(convert_head(sglang, target, tmp_path / "again", "eagle"))
    config, state = read_export(convert_head(head, target, tmp_path / "eagle", "eagle"))
    assert {**again[0], "architectures": 0} == {**config, "architectures": 0}
    assert again[0]["bias"] is True
    assert same_weights(again[1], state)


def test_export_computes_what_the_head_computes(tmp_path: Path) -> None:
    head, target = save_random_head(tmp_path)
    before = json.loads((head / "config.json").read_text())
    own = untrained_head(target.model, bias=False).attach(target)
    own.embed_tokens = torch.nn.Embedding.from_pretrained(torch.randn_like(target.embed.weight))
    save_head(own, tmp_path / "own", torch.bfloat16, binary=True)
    for engine in FORMATS:
        out = convert_head(head, target, tmp_path / engine, engine)
        config, state = read_export(out)
        assert torch.equal(state["embed_tokens.weight"], target.embed.weight)
        for name, tensor in load_file(head / "model.safetensors").items():
            assert torch.equal(state[name], tensor)
        loaded, original = load_head(out, target), load_head(head, target)
        assert loaded.embed_tokens is None  # the target's embedding is not kept twice
        given = torch.randn(1, 5, target.hidden_size), prompt(5), torch.arange(5)[None]
        assert torch.equal(loaded(*given), original(*given))
        assert config.pop(EXPORTED_KEY)["float32"] == fingerprint(original)
        changed = {"bias": 0, "architectures": 0}
        assert {**before, **changed} == {**config, **changed}
        out = convert_head(tmp_path / "own", target, tmp_path / f"{engine}-own", engine)
        config, state = read_export(out)  # its embedding and dtype are kept
        assert torch.equal(state["embed_tokens.weight"], own.embed_tokens.weight.bfloat16())
        assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
        assert config["dtype"] == config["torch_dtype"] == "bfloat16"


def test_export_rejects_what_it_cannot_convert(tmp_path: Path) -> None:
    for architecture, engine in (
        ("qwen2", "vllm"),
        ("qwen3", "vllm"),
        ("qwen3", "sglang"),
        ("mistral-no-window", "sglang"),
    ):
        with pytest.raises(ValueError, match=f"{engine} reads EAGLE heads for llama"):
            export_random_head(tmp_path, engine, architecture)
    with pytest.raises(ValueError, match="bias in fc, which vLLM ignores"):
        export_random_head(tmp_path, "vllm", bias=True)
    head, target = save_random_head(tmp_path)
    with pytest.raises(ValueError, match="choose another folder"):
        convert_head(head, target, head, "eagle")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        convert_head(tmp_path, target, tmp_path / "out", "eagle")
    with pytest.raises(ValueError, match="is an EAGLE-1/2 head; the speculators layout is for"):
        convert_head(head, target, tmp_path / "out", "speculators")
    other = Target(tiny_target(hidden_size=64))
    with pytest.raises(ValueError, match="belongs to another target"):
        convert_head(head, other, tmp_path / "out", "eagle")
    assert not (tmp_path / "out").exists()


# -- heads loaded back -----------------------------------------------------------------------------


def test_loaded_head_decodes_identically(tmp_path: Path) -> None:
    """Most drafts of this head are accepted, so another head would need other steps."""
    pair = aligned_pair()
    ids, mask = left_padded(prompt(7, 1), prompt(20, 3))
    for binary in (False, True):
        save_head(pair.drafter, tmp_path / str(binary), binary=binary)
        loaded = EagleFSD(pair.model, load_head(tmp_path / str(binary), pair.target), pair.tree)
        for threshold in (0.0, 0.3):
            before = pair.generate(ids, mask, max_new_tokens=40, threshold=threshold)
            after = loaded.generate(ids, mask, max_new_tokens=40, threshold=threshold)
            assert torch.equal(after.sequences, before.sequences)
            assert torch.equal(after.origins, before.origins)
            assert after.stats.steps == before.stats.steps < before.stats.tokens


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


# -- as other engines read them, with engine_reader in their place --------------------------------


def export(head: EagleHead, folder: Path, engine: ExportFormat) -> Path:
    """Save a head and export it; return the export's folder."""
    save_head(head, folder / "head")
    return convert_head(folder / "head", head.target, folder / engine, engine)


def test_export_of_a_head_without_the_old_names_has_them(tmp_path: Path) -> None:
    """As heads were saved before."""
    target = Target(tiny_target())
    head = untrained_head(target.model, bias=False).attach(target)
    for engine in FORMATS:
        expected = (export(head, tmp_path, engine) / "config.json").read_text()
        config = json.loads((tmp_path / "head" / "config.json").read_text())
        for name in ("rope_theta", "rope_scaling", "torch_dtype"):
            del config[name]
        (tmp_path / "head" / "config.json").write_text(json.dumps(config))
        again = convert_head(tmp_path / "head", target, tmp_path / f"{engine}2", engine)
        assert (again / "config.json").read_text() == expected


def test_readers_compute_the_heads_features(tmp_path: Path) -> None:
    """The reader's modules have exactly the file's tensors, for every kind of bias."""
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
        target = Target(tiny_target(architecture, **changes))
        head = untrained_head(target.model, bias=bias).attach(target)
        folder = export(head, tmp_path / str(number), engine)
        features = torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(number))
        inputs = features, prompt(20), torch.arange(20)[None]
        for other in (read_head(folder, engine, target), load_head(folder, target)):
            assert torch.allclose(other(*inputs), head(*inputs), rtol=1e-4, atol=1e-4)
        if architecture == llama:
            config = json.loads((folder / "config.json").read_text())
            assert config["rope_scaling"] == {"type": "linear", "factor": LINEAR_ROPE["factor"]}
