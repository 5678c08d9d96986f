"""A trained head on disk: in the published layout, and as EAGLE, SGLang and vLLM name its parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import kindred_pair, left_padded, prompt, tiny_target, untrained_head
from safetensors.torch import load_file
from torch import Tensor
from trainings import same_weights, train_here, weights
from transformers import LlamaConfig

from eagle_fsd import CheckpointError, EagleFSD, EagleHead
from eagle_fsd.model import checkpoint
from eagle_fsd.model.checkpoint import load_head, save_head
from eagle_fsd.model.loading import load_target
from eagle_fsd.model.target import Target
from eagle_fsd.train.export import FORMATS, export_head

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
PLAIN = "llama-grouped-llama3-rope"


def saved(folder: Path, architecture: str = PLAIN, bias: bool = False) -> tuple[Path, Target]:
    """A head of the family in a folder, and its target."""
    target = Target(tiny_target(architecture))
    save_head(untrained_head(target.model, bias=bias).attach(target), folder / "head")
    return folder / "head", target


def exported(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An export's configuration and tensors."""
    config = json.loads((folder / "config.json").read_text())
    if (folder / "model.safetensors").exists():
        assert not (folder / "pytorch_model.bin").exists()
        return config, load_file(folder / "model.safetensors")
    return config, torch.load(folder / "pytorch_model.bin", weights_only=True)


# -- the three formats -----------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_eagle_reads_a_bin_that_says_whether_fc_has_a_bias(bias: bool, tmp_path: Path) -> None:
    head, target = saved(tmp_path, bias=bias)
    config, state = exported(export_head(head, target, tmp_path / "out", "eagle"))
    assert (tmp_path / "out" / "pytorch_model.bin").exists()
    assert state.keys() == (EVERY | {"fc.bias"} if bias else EVERY)
    assert config["bias"] is bias
    assert config["num_hidden_layers"] == 1


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_sglang_is_always_given_a_bias(bias: bool, tmp_path: Path) -> None:
    """Its layer has one, and what a file leaves out stays random there."""
    head, target = saved(tmp_path, bias=bias)
    config, state = exported(export_head(head, target, tmp_path / "out", "sglang"))
    assert state.keys() == EVERY | {"fc.bias"}
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    assert config["bias"] is True
    expected = load_file(head / "model.safetensors").get("fc.bias", torch.zeros(32))
    assert torch.equal(state["fc.bias"], expected)


def test_sglang_has_another_name_for_qwen2(tmp_path: Path) -> None:
    head, target = saved(tmp_path, "qwen2")
    config, _ = exported(export_head(head, target, tmp_path / "out", "sglang"))
    assert config["architectures"] == ["Qwen2ForCausalLMEagle"]


def test_vllm_is_given_no_bias(tmp_path: Path) -> None:
    head, target = saved(tmp_path)
    config, state = exported(export_head(head, target, tmp_path / "out", "vllm"))
    assert state.keys() == EVERY
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["bias"] is False


def test_a_bias_that_vllm_would_drop_is_refused(tmp_path: Path) -> None:
    head, target = saved(tmp_path, bias=True)
    with pytest.raises(ValueError, match="bias in fc, which vLLM would drop"):
        export_head(head, target, tmp_path / "out", "vllm")
    assert not (tmp_path / "out").exists()


def test_a_bias_of_nothing_but_zeros_is_no_loss(tmp_path: Path) -> None:
    target = Target(tiny_target())
    head = untrained_head(target.model).attach(target)
    torch.nn.init.zeros_(head.fc.bias)
    save_head(head, tmp_path / "head")
    _, state = exported(export_head(tmp_path / "head", target, tmp_path / "out", "vllm"))
    assert state.keys() == EVERY


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("qwen2", "vllm"), ("qwen3", "vllm"), ("qwen3", "sglang"), ("mistral-no-window", "sglang")],
)
def test_families_that_an_engine_has_no_head_for_are_refused(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    head, target = saved(tmp_path, architecture)
    with pytest.raises(ValueError, match=f"{kind} reads EAGLE heads for llama"):
        export_head(head, target, tmp_path / "out", kind)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", FORMATS)
def test_an_export_says_what_the_head_says(kind: str, tmp_path: Path) -> None:
    """Loaded back here; numbers are the same, and the embedding is the target's."""
    head, target = saved(tmp_path)
    out = export_head(head, target, tmp_path / "out", kind)
    config, state = exported(out)
    assert torch.equal(state["embed_tokens.weight"], target.embed.weight)
    for name, tensor in load_file(head / "model.safetensors").items():
        assert torch.equal(state[name], tensor)
    back, before = load_head(out, target), load_head(head, target)
    assert back.embed_tokens is None  # no second copy of what is the target's
    features, tokens = torch.randn(1, 5, target.hidden_size), prompt(5)
    positions = torch.arange(5)[None]
    assert torch.equal(back(features, tokens, positions), before(features, tokens, positions))
    ours = json.loads((head / "config.json").read_text())
    assert {**ours, "bias": 0, "architectures": 0} == {**config, "bias": 0, "architectures": 0}


@pytest.mark.parametrize("kind", FORMATS)
def test_numbers_are_kept_as_they_are_stored(kind: str, tmp_path: Path) -> None:
    target = Target(tiny_target())
    head = untrained_head(target.model, bias=False).attach(target)
    save_head(head, tmp_path / "head", torch.bfloat16, binary=True)
    config, state = exported(export_head(tmp_path / "head", target, tmp_path / "out", kind))
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    assert config["dtype"] == "bfloat16"


def test_an_embedding_of_the_heads_own_is_kept(tmp_path: Path) -> None:
    target = Target(tiny_target())
    head = untrained_head(target.model, bias=False).attach(target)
    own = torch.randn_like(target.embed.weight)
    head.embed_tokens = torch.nn.Embedding.from_pretrained(own)
    save_head(head, tmp_path / "head")
    _, state = exported(export_head(tmp_path / "head", target, tmp_path / "out", "vllm"))
    assert torch.equal(state["embed_tokens.weight"], own)


def test_refusals(tmp_path: Path) -> None:
    head, target = saved(tmp_path)
    with pytest.raises(ValueError, match="format must be one of eagle, sglang, vllm"):
        export_head(head, target, tmp_path / "out", "tensorrt")
    with pytest.raises(ValueError, match="name another folder"):
        export_head(head, target, head, "eagle")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        export_head(tmp_path, target, tmp_path / "out", "eagle")
    other = Target(tiny_target(hidden_size=64))
    with pytest.raises(ValueError, match="belongs to another target"):
        export_head(head, other, tmp_path / "out", "eagle")
    assert not (tmp_path / "out").exists()


# -- a head that was trained here ------------------------------------------------------------------


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
def test_a_head_loaded_back_decodes_identically(binary: bool, tmp_path: Path) -> None:
    """Tokens and steps: most drafts of this head are accepted, so another one would differ."""
    pair = kindred_pair()
    save_head(pair.head, tmp_path, binary=binary)
    loaded = EagleFSD(pair.model, load_head(tmp_path, pair.target), pair.settings)
    ids, mask = left_padded(prompt(7, 1), prompt(20, 3))
    for threshold in (0.0, 0.3):
        before = pair.generate(ids, mask, max_new_tokens=40, threshold=threshold)
        after = loaded.generate(ids, mask, max_new_tokens=40, threshold=threshold)
        assert torch.equal(after.sequences, before.sequences)
        assert torch.equal(after.origins, before.origins)
        assert after.stats.steps == before.stats.steps < before.stats.tokens


def test_a_trained_head_is_the_one_that_is_saved(target: Path, data: Path, tmp_path: Path) -> None:
    """With --bin too; both load, decode alike, and export."""
    safe = train_here(data, tmp_path / "safe", target, bias=True)
    binary = train_here(data, tmp_path / "binary", target, bias=True, binary=True)
    assert not (binary / "model.safetensors").exists()
    stored = torch.load(binary / "pytorch_model.bin", weights_only=True)
    assert same_weights(stored, weights(safe))
    assert stored.keys() == EVERY - {"embed_tokens.weight"} | {"fc.bias"}
    last = load_file(safe / "checkpoints" / "step-12" / "model.safetensors")
    assert same_weights({k.removeprefix("head."): v for k, v in last.items()}, stored)
    model = load_target(target)
    answers = []
    for folder in (safe, binary):
        pair = EagleFSD(model, load_head(folder, Target(model)))
        answers.append(pair.generate(prompt(9, vocabulary=1024), max_new_tokens=20))
    assert torch.equal(answers[0].sequences, answers[1].sequences)
    assert answers[0].stats.steps == answers[1].stats.steps
    export_head(binary, Target(model), tmp_path / "sglang", "sglang")


def test_heads_have_no_bias_unless_asked(target: Path, data: Path, tmp_path: Path) -> None:
    """So what is trained by default suits every engine."""
    out = train_here(data, tmp_path / "out", target, max_steps=1)
    assert "fc.bias" not in weights(out)
    export_head(out, Target(load_target(target)), tmp_path / "vllm", "vllm")


# -- a published head ------------------------------------------------------------------------------

#: As EAGLE's authors published their head for a 7B Llama or Vicuna: names and shapes.
PUBLISHED_7B = {
    "embed_tokens.weight": (32000, 4096),
    "fc.weight": (4096, 8192),
    "fc.bias": (4096,),
    "layers.0.self_attn.q_proj.weight": (4096, 4096),
    "layers.0.self_attn.k_proj.weight": (4096, 4096),
    "layers.0.self_attn.v_proj.weight": (4096, 4096),
    "layers.0.self_attn.o_proj.weight": (4096, 4096),
    "layers.0.mlp.gate_proj.weight": (11008, 4096),
    "layers.0.mlp.up_proj.weight": (11008, 4096),
    "layers.0.mlp.down_proj.weight": (4096, 11008),
    "layers.0.post_attention_layernorm.weight": (4096,),
}
CONFIG_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_a_published_7b_head_is_accepted(bias: bool) -> None:
    """By names and shapes, with no memory taken for any of it."""
    config = LlamaConfig(**CONFIG_7B, num_hidden_layers=1)
    with torch.device("meta"):
        head = EagleHead(config, bias)
        found = {name: torch.empty(*shape) for name, shape in PUBLISHED_7B.items()}
    if not bias:
        del found["fc.bias"]
    del found[checkpoint.EMBEDDING]  # the target's, and looked at apart
    checkpoint._check("published", head.state_dict(), found)
    head.load_state_dict(found)
    found["fc.weight"] = found["fc.weight"].T
    with pytest.raises(CheckpointError, match=r"fc.weight is \[8192, 4096\], not \[4096, 8192\]"):
        checkpoint._check("published", head.state_dict(), found)
