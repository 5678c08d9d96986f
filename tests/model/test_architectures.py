"""Many architectures: each decodes as its own ``generate`` does, or is rejected."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from pairs import (
    DEVICES,
    MODEL_SIZES,
    NEW_TOKENS,
    VOCAB_SIZE,
    answers,
    batch,
    greedy_reference,
    hand_made_tree,
    left_padded,
    path_to,
    plain_logits,
    prompt,
    small_tree,
    tiny_target,
    untrained_head,
)
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MptConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
)

from eagle_fsd import EagleFSD, EagleHead
from eagle_fsd.model.self_check import check_target
from eagle_fsd.model.target import Target, TargetPass

# Untied, as tied random embeddings mostly repeat the last token.
SIZED = {**MODEL_SIZES, "tie_word_embeddings": False}
#: For families without grouped keys and values.
UNGROUPED = {key: value for key, value in SIZED.items() if key != "num_key_value_heads"}
CONTEXT = 64  # GPT-2's
LIMIT = 32  # stable_rope_length of the two RoPE types below
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC_LIMIT = {**DYNAMIC, "original_max_position_embeddings": LIMIT}

#: A configuration, and a seed with which greedy output varies.
FAMILIES: dict[str, tuple[Callable[[], PreTrainedConfig], int]] = {
    "opt": (lambda: OPTConfig(**UNGROUPED, ffn_dim=48, word_embed_proj_dim=16), 7),
    "gpt2": (
        lambda: GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=CONTEXT,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=False,
        ),
        4,
    ),
    "gpt-neox": (lambda: GPTNeoXConfig(**UNGROUPED), 7),
    "falcon": (lambda: FalconConfig(**UNGROUPED, multi_query=True), 0),
    "deepseek": (  # multi-head latent attention: keys and values differ in size
        lambda: DeepseekV3Config(
            **{**SIZED, "num_key_value_heads": 4},
            moe_intermediate_size=16,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=8,
            v_head_dim=6,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
        ),
        0,
    ),
    "gemma2": (
        lambda: Gemma2Config(
            **SIZED,
            head_dim=8,
            query_pre_attn_scalar=8,
            final_logit_softcapping=3.0,
            sliding_window=128,
        ),
        5,
    ),
    "gemma3": (  # a window and a RoPE of its own in every layer but the last
        lambda: Gemma3TextConfig(
            **{**SIZED, "num_hidden_layers": 3},
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=6,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        ),
        1,
    ),
    "granite": (
        lambda: GraniteConfig(
            **SIZED,
            logits_scaling=4.0,
            embedding_multiplier=2.0,
            residual_multiplier=0.5,
            attention_multiplier=0.3,
        ),
        2,
    ),
    "cohere": (lambda: CohereConfig(**SIZED, logit_scale=0.25), 0),
    "phi3-longrope": (
        lambda: Phi3Config(
            **SIZED, original_max_position_embeddings=LIMIT, rope_parameters=LONGROPE
        ),
        2,
    ),
    "llama-dynamic": (lambda: LlamaConfig(**SIZED, rope_parameters=DYNAMIC_LIMIT), 7),
}
LIMITED = ["phi3-longrope", "llama-dynamic"]
UNLIMITED = [name for name in FAMILIES if name not in LIMITED]
#: Families whose decoder layers can serve in a head.
HEADED = ["granite", "cohere", "gemma3"]
SCALED = ["gemma2", "granite", "cohere"]
#: Gemma 2 caps its attention scores, which sdpa cannot.
EAGER = ["gemma2", "bloom", "mpt"]
EMBEDDINGS = ("embed_tokens", "embed_positions", "wte", "wpe", "embed_in", "word_embeddings")

REJECTED: dict[str, Callable[[], PreTrainedConfig]] = {
    "bloom": lambda: BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4),
    "mpt": lambda: MptConfig(vocab_size=VOCAB_SIZE, d_model=32, n_layers=2, n_heads=4),
}


@lru_cache
def family(name: str) -> PreTrainedModel:
    """Return a random target; norms and embeddings are of the usual magnitude."""
    make, seed = FAMILIES[name] if name in FAMILIES else (REJECTED[name], 0)
    attention = "eager" if name in EAGER else "sdpa"
    model = AutoModelForCausalLM.from_config(make(), attn_implementation=attention)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for place, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1 and not place.endswith("bias"):
                noise = 1.0 + 0.2 * noise
            elif not any(word in place for word in EMBEDDINGS):
                noise = 0.3 * noise
            parameter.copy_(noise)
    model.generation_config.eos_token_id = None
    return model.eval()


def varied(sequences: Tensor, new: int) -> Tensor:
    """Return ``sequences`` after checking that their ``new`` tokens are not repetitive."""
    assert min(row.unique().numel() for row in sequences[:, -new:]) >= min(new // 2, 6)
    return sequences


# -- decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", UNLIMITED)
def test_decoding_matches_hugging_face(name: str, device: str) -> None:
    """A batch of mixed lengths, plain and, where its layers can serve in one, with a head."""
    model = family(name).to(device)
    ids, mask = (item.to(device) for item in batch())
    drafter = untrained_head(model) if name in HEADED else None
    pair = EagleFSD(model, drafter, small_tree())
    expected = varied(greedy_reference(model, ids, mask, new=NEW_TOKENS), NEW_TOKENS)
    for method in ("fsd", "ar") if drafter else ("ar",):
        out = pair.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, method=method)
        assert torch.equal(out.sequences, expected)
    model.to("cpu")


@pytest.mark.parametrize("name", UNLIMITED)
def test_passes_match_plain_ones(name: str) -> None:
    """A tree pass over each path, and the prefill, whose features the projection takes.

    OPT calls its inner decoder and not its base model, which matters for the features. Gemma 2,
    Granite and Cohere transform the output of ``lm_head`` in ways that do not change the arg-max.
    """
    model = family(name)
    target, prefixes = Target(model), [prompt(5, 1)[0], prompt(19, 2)[0]]
    tree = hand_made_tree([40, 7, 9, 11, 12], [0, 0, 0, 1, 2], rows=2, shift=3)
    scored = score(target, tree, prefixes)
    for row, prefix in enumerate(prefixes):
        for node in range(tree.size):
            ids = torch.cat([prefix, torch.tensor(path_to(tree, row, node))])
            assert_close(scored, row, node, plain_logits(model, ids))
    ids = prompt(17, 3)
    with torch.no_grad():
        features = target.prefill(ids, 0, target.new_cache(1, 20))[0]
        logits, expected = plain_logits(model, ids[0])
        torch.testing.assert_close(features, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(target.project(features), logits, atol=1e-4, rtol=1e-4)
        assert torch.equal(target.project(expected), logits)
        assert torch.equal(model.lm_head(expected), logits) == (name not in SCALED)


def test_log_probs_of_the_head_are_scaled_like_the_target() -> None:
    for name in ("granite", "cohere"):
        model = family(name)
        pair = EagleFSD(model, untrained_head(model), small_tree())
        logits, features = plain_logits(model, prompt(9, 4)[0])
        with torch.no_grad():
            log_probs = pair.drafter.log_probs(features)
        torch.testing.assert_close(log_probs, logits.log_softmax(-1), atol=1e-5, rtol=1e-5)


# -- the end of the context -----------------------------------------------------------------------


def test_learned_positions_limit_the_answer_to_the_context() -> None:
    """GPT-2's position table ends with the context."""
    model, ids = family("gpt2"), prompt(50, 11)
    expected = varied(greedy_reference(model, ids, new=14), 14)
    for new in (14, 30):
        out = EagleFSD(model, None).generate(ids, max_new_tokens=new, method="ar")
        assert torch.equal(out.sequences, expected)
        assert answers(out).shape == (1, 14)


def test_tree_nodes_beyond_the_context_do_not_affect_others() -> None:
    """Their positions are outside GPT-2's table."""
    model = family("gpt2")
    tree = hand_made_tree([40, 7, 9, 11, 12, 80], [0, 0, 0, 1, 3, 4])
    for length in (60, 61, 62, 63):
        prefix = prompt(length, 1)[0]
        assert length + tree.max_depth >= CONTEXT
        scored = score(Target(model), tree, [prefix])
        assert scored.logits.isfinite().all()
        for node in range(tree.size):
            path = torch.tensor(path_to(tree, 0, node))
            if length + len(path) <= CONTEXT:
                assert_close(scored, 0, node, plain_logits(model, torch.cat([prefix, path])))


# -- length-dependent RoPE -------------------------------------------------------------------------


@pytest.mark.parametrize("name", LIMITED)
def test_length_dependent_rope_matches_hugging_face_up_to_its_limit(name: str) -> None:
    """The last token may reach the limit."""
    model = family(name)
    ids, mask = batch()
    pair = EagleFSD(model, untrained_head(model), small_tree())
    expected = varied(greedy_reference(model, ids, mask, new=12), 12)
    out = pair.generate(ids, attention_mask=mask, max_new_tokens=12, method="ar")
    assert torch.equal(out.sequences, expected)
    ids, mask = left_padded(prompt(5, 1), prompt(1, 2), prompt(8, 3))
    out = pair.generate(ids, attention_mask=mask, max_new_tokens=20)
    assert torch.equal(out.sequences, greedy_reference(model, ids, mask, new=20))


@pytest.mark.parametrize(("name", "depth"), [("phi3-longrope", 6), ("llama-dynamic", 3)])
def test_tree_nodes_beyond_the_rope_limit_do_not_affect_others(name: str, depth: int) -> None:
    """A position beyond the limit would switch the whole pass to other frequencies."""
    model, ids = family(name), prompt(7, 1)
    pair = EagleFSD(model, untrained_head(model), small_tree(depth=depth, top_k=2))
    out = pair.generate(ids, max_new_tokens=25)
    assert torch.equal(out.sequences, greedy_reference(model, ids, new=25))
    for length, new, method in ((20, 13, "fsd"), (33, 1, "ar"), (1, 200, "fsd")):
        message = f"reach {length + new} tokens, but beyond 32 the target's attention"
        _assert_rejected(pair, message, prompt(length), max_new_tokens=new, method=method)


def test_dynamic_rope_without_a_limit_serves_the_whole_context() -> None:
    """Its frequencies change only beyond ``max_position_embeddings``, which no call exceeds."""
    model, ids = tiny_target(max_position_embeddings=40, rope_parameters=DYNAMIC), prompt(20, 1)
    pair = EagleFSD(model, untrained_head(model), small_tree())
    for method in ("fsd", "ar"):
        out = pair.generate(ids, max_new_tokens=20, method=method)
        assert torch.equal(out.sequences, varied(greedy_reference(model, ids, new=20), 20))


# -- unsupported architectures ---------------------------------------------------------------------


def test_target_without_a_context_length_is_rejected() -> None:
    for name in REJECTED:
        message = f"{type(family(name)).__name__}.* configuration has no max_position_embeddings"
        with pytest.raises(ValueError, match=message) as error:
            EagleFSD(family(name), None)
        assert str(error.value).isprintable()


def test_local_layers_are_rejected() -> None:
    """GPT-Neo's local layers compute their window from slots."""
    config = GPTNeoConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=16,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    with pytest.raises(ValueError, match="it has layers of type local"):
        Target(AutoModelForCausalLM.from_config(config))


def test_head_of_a_family_unlike_llama_is_rejected() -> None:
    for name in ("opt", "gpt2", "gpt-neox"):
        with pytest.raises(ValueError, match="cannot build an EAGLE head for") as error:
            EagleHead(family(name).config)
        assert str(error.value).isprintable()


def test_offloaded_weights_are_rejected() -> None:
    """Hugging Face keeps offloaded layers on the meta device."""
    model = tiny_target()
    pair = EagleFSD(model, untrained_head(model), small_tree())
    model.model.layers[1].to("meta")
    for method in ("fsd", "ar"):
        message = "offloaded .* needs all layers on their devices"
        _assert_rejected(pair, message, prompt(6), method=method)
    model = tiny_target()
    model.lm_head.to("meta")
    with pytest.raises(ValueError, match="offloaded"):
        check_target(Target(model))


def _assert_rejected(pair: EagleFSD, message: str, ids: Tensor, **options: object) -> None:
    """``generate`` raises a ValueError of one line."""
    with pytest.raises(ValueError, match=message) as error:
        pair.generate(ids, **{"max_new_tokens": 4, **options})
    assert str(error.value).isprintable()


def assert_close(scored: TargetPass, row: int, node: int, expected: tuple[Tensor, Tensor]) -> None:
    """Compare a node with the last position of a plain pass."""
    for found, plain in zip((scored.logits, scored.features), expected, strict=True):
        torch.testing.assert_close(found[row, node], plain[-1], atol=1e-4, rtol=1e-4)


def score(target: Target, tree: object, prefixes: list[Tensor]) -> TargetPass:
    """Run a tree pass after ``prefixes``, one per row."""
    lengths = torch.tensor([len(item) for item in prefixes])
    max_length = int(lengths.max())
    cache = target.new_cache(len(prefixes), max_length + tree.size)
    ids = torch.nn.utils.rnn.pad_sequence(prefixes, batch_first=True)
    with torch.no_grad():
        keys = cache.keys(max_length + tree.size, ids.device)
        target.prefill(ids, 0, cache)
        return target.forward_tree(tree, lengths, keys, cache)
