"""A tiny random model of every causal-LM type of transformers."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB_SIZE = 96
LAYERS = 4
WINDOW = 16
CONTEXT = 512
SPECIAL_TOKENS = tuple(
    f"{name}_token_id"
    for name in ("bos", "eos", "pad", "sep", "cls", "decoder_start", "forced_eos")
)

#: Value of the integer fields whose whole name matches; the first match counts.
SIZES = {
    r"\w*vocab_size\w*": VOCAB_SIZE,
    r"max_window_layers": LAYERS // 2,  # layers before the first windowed one
    r"(num_|n_)?((hidden|encoder|decoder)_)?layers?": LAYERS,
    r"max_(position_embeddings|target_positions|seq_len)|n_positions|n_ctx|context_length": CONTEXT,
    r"(attention_)?(sliding_)?window(_size)?|attention_chunk_size|index_topk": WINDOW,
    r"local_attention": 2 * WINDOW,  # counts both sides of a token
    r"index_block_size": 4,
    r"\w*(intermediate_size|ffn)\w*|mlp_dim|dff|dim_ff|feed_forward_size|d_inner": 96,
    r"router_hidden_size|(\w+_)?(low)?rank|d_rel|conf_\w+_size": 16,
    r"(?!attention)\w*hidden_size|\w*embedding_size|d_model|n_embd|lru_width": 64,
    r"(word_embed_proj|emb|ple_embed|adapter_in|adapter_out)_dim": 64,
    r"\w*(kv|key_value)_heads|kv_n_heads": 2,
    r"\w*heads|n_head": 4,
    r"qk_rope_head_dim|rotary_dim": 8,
    r"v_head_dim": 12,  # values smaller than keys
    r"(?!qk_head_dim)\w*head_dim|dim_head|d_head|attention_head_size|kv_channels": 16,
    r"\w*shared_experts": 1,
    r"\w*experts|zero_expert_num": 4,
    r"num_experts_per_tok|moe_topk|moe_top_k|moe_k": 2,
    r"n_groups?|topk_group|num_nextn_predict_layers": 1,
}
#: Integer fields that are set although their default may be None.
OPTIONAL = (
    "head_dim",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "num_key_value_heads",
    "sliding_window",
)
ALTERNATING = ["sliding_attention", "full_attention"] * 2
CONVOLUTIONAL = ["conv", "full_attention"] * 2
RECURRENT = ["mamba", "hybrid"] * 2
#: RoBERTa and its kin count positions from the padding token's id.
PADDED = {"pad_token_id": 1}
#: Gemma 4's assistants read the keys and values of another model.
ASSISTANT = {
    "text_config": {
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "num_hidden_layers": LAYERS,
        "num_kv_shared_layers": LAYERS,
    }
}
#: Fields that :data:`SIZES` does not make small, consistent and varied, by ``model_type``.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "big_bird": {"block_size": 4, "num_random_blocks": 1},
    "blt": {"encoder_hash_byte_group_vocab": VOCAB_SIZE},
    "camembert": PADDED,
    "cohere_compass_text": {
        "layer_types": ALTERNATING,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "data2vec-text": PADDED,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dots3_note_audio_encoder": {"adapter_input_size": 64},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
    },
    "electra": {"embedding_size": 32},  # as by default, not the hidden size
    "gemma3n_text": {
        "hidden_size_per_layer_input": 16,
        "intermediate_size": 96,
        "layer_types": ALTERNATING,
        "num_kv_shared_layers": 2,
    },
    "gemma4_assistant": ASSISTANT,
    "gemma4_text": {"global_head_dim": 32, "hidden_size_per_layer_input": 16, "pad_token_id": 0},
    "gemma4_unified_assistant": ASSISTANT,
    "gemma4_unified_text": {"global_head_dim": 32, "pad_token_id": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granite": {"logits_scaling": 4.0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hrm_text": {"L_cycles": 1, "num_layers_per_stack": 1},  # many cycles amplify rounding
    "hyperclovax": {"logits_scaling": 0.25},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "laguna": {"layer_types": ALTERNATING},
    "lfm2": {"layer_types": CONVOLUTIONAL},
    "lfm2_moe": {"layer_types": CONVOLUTIONAL},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"head_dim": 32},
    "mellum": {"layer_types": ALTERNATING},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "prophetnet": {"pad_token_id": 0},
    "qwen4_exp_text": {
        "indexer_budget": WINDOW,
        "indexer_compress_ratio": 4,
        "indexer_head_dim": 16,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 4,
    },
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 96},
    "reformer": {"axial_pos_embds": False, "num_buckets": 2},
    "roberta": PADDED,
    "roberta-prelayernorm": PADDED,
    "roc_bert": {"concat_input": False},
    "xlm": {"pad_token_id": 0},
    "xlm-roberta": PADDED,
    "xlm-roberta-xl": PADDED,
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX", **PADDED},
    "zamba": {"layers_block_type": RECURRENT},
    "zamba2": {"layers_block_type": RECURRENT},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "num_experts_per_tok": 1},
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Create a configuration of a few small layers, among them every kind that the type has."""
    return _shrink(CONFIG_MAPPING[model_type], {})


def _shrink(config_class: type[PreTrainedConfig], changes: dict[str, Any]) -> PreTrainedConfig:
    """Create a configuration with ``changes``, and with every other field made small."""
    changes = {**OVERRIDES.get(config_class.model_type, {}), **changes}
    try:
        default = config_class()
    except (ValueError, StrictDataclassError):  # not without some of the changes
        default = config_class(**changes)
    fields = {field.name: str(field.type) for field in dataclasses.fields(config_class)}
    for name, type_ in fields.items():
        value = vars(default).get(config_class.attribute_map.get(name, name))
        if isinstance(value, PreTrainedConfig):
            changes[name] = _shrink(type(value), changes.get(name, {}))
        elif name in changes:
            continue
        elif name in ("is_decoder", "use_sliding_window"):
            changes[name] = True
        elif name == "tie_word_embeddings":
            changes[name] = False
        elif name in SPECIAL_TOKENS and "None" in type_:
            changes[name] = None
        elif name.endswith(("_token_id", "_token_index")):
            changes[name] = 0
        elif name == "num_key_value_heads" and "kv_lora_rank" in fields:  # latent attention
            changes[name] = 4
        elif (isinstance(value, int) and not isinstance(value, bool)) or name in OPTIONAL:
            sizes = [size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)]
            if sizes:
                changes[name] = sizes[0]
        elif name == "layer_types" and value and len(set(value)) > 1:
            kinds = list(dict.fromkeys(value))  # alternating
            changes[name] = [kinds[layer % len(kinds)] for layer in range(LAYERS)]
        elif name == "mlp_layer_types" and value and len(set(value)) > 1:
            kinds = list(dict.fromkeys(value))  # half and half, so that every combination occurs
            changes[name] = [kinds[layer * len(kinds) // LAYERS] for layer in range(LAYERS)]
    return config_class(**changes)


def tiny_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """Create a random float32 model whose output depends on context, positions and windows."""
    config = tiny_config(model_type)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            module = model.get_submodule(name.rpartition(".")[0])
            if parameter.ndim < 2:  # keep norms near 1 and biases small, and make attention sharp
                parameter.add_(0.1 * noise + (2.0 if "q_norm" in name else 0.0))
            elif isinstance(module, nn.Embedding):  # small next to what the layers add
                parameter.copy_(0.25 * noise)
            else:  # without the mean, which would let the mean of a GELU dominate the output
                noise -= noise.mean(-1, keepdim=True) if parameter.shape[-1] >= 16 else 0.0
                parameter.copy_(2.5 * noise * parameter.shape[-1] ** -0.5)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.eval()
