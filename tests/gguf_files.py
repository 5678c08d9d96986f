"""Tiny GGUF files, written by the package ``gguf``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

#: ChatML without a default system prompt.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n'"
    " + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HIDDEN, INNER, HEADS, HEAD_SIZE, CONTEXT = 32, 64, 4, 8, 256
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ t", "Ġt he")


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    tokenizer: bool = True,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    without: str = "",
) -> Path:
    """Write a random one-layer Llama with byte tokens, whose matrices are quantized to Q8_0.

    ``metadata`` and ``tensors`` are added, and the tensor ``without`` is left out.
    """
    words = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(pair.replace(" ", "") for pair in MERGES)]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(words))
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(words)
        kinds = [gguf.TokenType.CONTROL] * len(SPECIAL)
        writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * (len(words) - len(SPECIAL))])
        writer.add_token_merges(list(MERGES))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(TEMPLATE)
    for key, value in (metadata or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key, value)
    random = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (len(words), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        **{f"blk.0.attn_{name}.weight": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")},
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }
    for name, shape in shapes.items():
        values = random.normal(size=shape).astype(np.float32)
        if name == without:
            continue
        if len(shape) == 1:
            writer.add_tensor(name, values)
            continue
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def dequantized(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file, dequantized by the package ``gguf``."""
    reader = gguf.GGUFReader(path)
    return {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors
    }
