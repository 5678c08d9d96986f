"""A reader of exported heads that stands for other engines.

It is plain PyTorch, and of ``config.json`` it knows only the names of transformers 4. Like the
engines, it takes a default where a setting is missing.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from eagle_fsd import EagleHead
from eagle_fsd.model.target import Target

#: Formats for EAGLE-1/2 heads.
FORMATS = ("eagle", "sglang", "vllm")
#: Names that transformers 4 does not know.
NEW_NAMES = ("rope_parameters", "dtype")


def read_export(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return an export's configuration and tensors."""
    config = json.loads((folder / "config.json").read_text())
    if (folder / "model.safetensors").exists():
        assert not (folder / "pytorch_model.bin").exists()
        return config, load_file(folder / "model.safetensors")
    return config, torch.load(folder / "pytorch_model.bin", weights_only=True)


def rotation_frequencies(config: dict[str, Any], size: int) -> Tensor:
    """Return ``[size / 2]`` radians per position for attention heads of ``size`` channels."""
    theta = config.get("rope_theta", 10000.0)
    frequencies = theta ** (-torch.arange(0, size, 2) / size)
    scaling = config.get("rope_scaling")
    if scaling is None:
        return frequencies
    factor = scaling["factor"]
    if scaling.get("type") == "linear":
        return frequencies / factor
    assert scaling["rope_type"] == "llama3"
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


class Layer(nn.Module):
    """A Llama layer without input norm, with the arguments of Hugging Face's layers."""

    def __init__(self, config: dict[str, Any], qkv_bias: bool, o_bias: bool) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.heads, self.groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.size = config.get("head_dim") or width // self.heads
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(width, self.heads * self.size, bias=qkv_bias),
                "k_proj": nn.Linear(width, self.groups * self.size, bias=qkv_bias),
                "v_proj": nn.Linear(width, self.groups * self.size, bias=qkv_bias),
                "o_proj": nn.Linear(self.heads * self.size, width, bias=o_bias),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(width, inner, bias=False),
                "up_proj": nn.Linear(width, inner, bias=False),
                "down_proj": nn.Linear(inner, width, bias=False),
            }
        )
        self.post_attention_layernorm = nn.RMSNorm(width, eps=config["rms_norm_eps"])
        self.frequencies = rotation_frequencies(config, self.size)

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        past_key_values: Any = None,
        **_others: object,
    ) -> Tensor:
        rows, length, _ = hidden.shape

        def project(name: str, heads: int) -> Tensor:
            return self.self_attn[name](hidden).view(rows, length, heads, -1).transpose(1, 2)

        angles = position_ids[:, None, :, None] * self.frequencies
        query = rotate(project("q_proj", self.heads), angles)
        key = rotate(project("k_proj", self.groups), angles)
        value = project("v_proj", self.groups)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, 0)
        key, value = (item.repeat_interleave(self.heads // self.groups, 1) for item in (key, value))
        scores = query @ key.transpose(2, 3) / math.sqrt(self.size)
        if attention_mask is not None:  # folded: the same rows for every query head of a group
            attention_mask = attention_mask[:, :, :length]
        else:
            attention_mask = torch.full((length, length), -math.inf).triu(1)
        weights = (scores + attention_mask).softmax(-1)
        mixed = (weights @ value).transpose(1, 2).reshape(rows, length, -1)
        hidden = hidden + self.self_attn["o_proj"](mixed)
        x = self.post_attention_layernorm(hidden)
        x = F.silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x)
        return hidden + self.mlp["down_proj"](x)


def rotate(states: Tensor, angles: Tensor) -> Tensor:
    """Rotate channel pairs ``(i, i + size / 2)`` of ``[B, heads, S, size]``."""
    first, second = states.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Reader(nn.Module):
    """The modules of a head as an engine builds them from ``config.json``."""

    def __init__(self, config: dict[str, Any], engine: str) -> None:
        super().__init__()
        width = config["hidden_size"]
        if engine == "eagle":
            fc_bias = config.get("bias", True)
            qkv_bias, o_bias = config.get("qkv_bias", False), False
        else:
            fc_bias = engine == "sglang"
            is_qwen = config["model_type"] == "qwen2"
            o_bias = not is_qwen and (config.get("attention_bias") or config.get("bias") or False)
            qkv_bias = is_qwen or o_bias
        self.embed_tokens = nn.Embedding(config["vocab_size"], width)
        self.fc = nn.Linear(2 * width, width, bias=fc_bias)
        self.layers = nn.ModuleList([Layer(config, qkv_bias, o_bias)])


def read_head(folder: Path, engine: str, target: Target) -> EagleHead:
    """Return a head for decoding whose modules are those of the engine's reader."""
    config, state = read_export(folder)
    for name in NEW_NAMES:
        config.pop(name, None)
    assert {tensor.dtype for tensor in state.values()} == {getattr(torch, config["torch_dtype"])}
    reader = Reader(config, engine).to(target.dtype)
    reader.load_state_dict(state)
    head = EagleHead(target.config, bias=reader.fc.bias is not None).attach(target)
    head.embed_tokens, head.fc, head.layers = reader.embed_tokens, reader.fc, reader.layers
    return head.eval()
