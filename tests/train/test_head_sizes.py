"""Tests for heads of published targets: their sizes follow from the target's configuration."""

from __future__ import annotations

import pytest
import torch
from pairs import LLAMA3_ROPE
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from eagle_fsd import EagleHead

#: That of LLaMA 3.1.
ROPE = {
    **LLAMA3_ROPE,
    **{"rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 8192},
}


def sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


#: Sizes as in the targets' own config.json.
TARGETS: dict[str, PreTrainedConfig] = {
    "vicuna-7b": LlamaConfig(**sizes(4096, 11008, 32, 32, 32, 32000)),
    "vicuna-13b": LlamaConfig(**sizes(5120, 13824, 40, 40, 40, 32000)),
    "llama-2-70b": LlamaConfig(**sizes(8192, 28672, 80, 64, 8, 32000)),
    "llama-3.1-8b": LlamaConfig(**sizes(4096, 14336, 32, 32, 8, 128256), rope_parameters=ROPE),
    "qwen2.5-7b": Qwen2Config(**sizes(3584, 18944, 28, 28, 4, 152064)),
    "qwen3-8b": Qwen3Config(**sizes(4096, 12288, 36, 32, 8, 151936), head_dim=128),
}
#: Parameters of heads according to the EAGLE paper, in billions.
PUBLISHED = {"vicuna-7b": 0.24, "vicuna-13b": 0.37, "llama-2-70b": 0.99}


def meta_head(config: PreTrainedConfig, bias: bool = False) -> EagleHead:
    """Create a head on the meta device, where it takes no memory."""
    with torch.device("meta"):
        return EagleHead(config, bias)


def expected_parameters(config: PreTrainedConfig) -> int:
    """Count the parameters of ``fc`` and of one layer without its input norm."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    size = getattr(config, "head_dim", None) or hidden // heads
    queries, keys = heads * size, config.num_key_value_heads * size
    count = 2 * hidden * hidden  # fc
    count += 2 * hidden * queries + 2 * hidden * keys  # attention
    count += 3 * hidden * config.intermediate_size + hidden  # MLP and the norm before it
    if config.model_type == "qwen2":
        count += queries + 2 * keys  # biases
    if config.model_type == "qwen3":
        count += 2 * size  # norms of queries and keys
    return count


def test_number_of_parameters() -> None:
    for name, config in TARGETS.items():
        count = sum(parameter.numel() for parameter in meta_head(config).parameters())
        assert count == expected_parameters(config)
        with_bias = sum(item.numel() for item in meta_head(config, bias=True).parameters())
        assert with_bias == count + config.hidden_size
        if name in PUBLISHED:
            assert count / 1e9 == pytest.approx(PUBLISHED[name], abs=0.006)
