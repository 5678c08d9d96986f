"""Tests for heads of published targets: their sizes follow from the target's configuration."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from eagle_fsd import EagleHead

#: Parameters of heads according to the EAGLE paper, in billions, and sizes in the targets' own
#: config.json: hidden, inner, number of heads, of key-value heads, and of tokens.
PUBLISHED: dict[float, tuple[int, ...]] = {
    0.24: (4096, 11008, 32, 32, 32000),  # Vicuna 7B
    0.37: (5120, 13824, 40, 40, 32000),  # Vicuna 13B
    0.99: (8192, 28672, 64, 8, 32000),  # LLaMA 2 70B
}
NAMES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    "vocab_size",
)


def test_number_of_parameters() -> None:
    for billions, sizes in PUBLISHED.items():
        config = LlamaConfig(**dict(zip(NAMES, sizes, strict=True)))
        with torch.device("meta"):
            plain, biased = (EagleHead(config, bias) for bias in (False, True))
        count = sum(parameter.numel() for parameter in plain.parameters())
        assert count / 1e9 == pytest.approx(billions, abs=0.006)
        assert sum(item.numel() for item in biased.parameters()) == count + config.hidden_size
