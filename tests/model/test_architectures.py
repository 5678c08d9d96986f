"""Architectures of many kinds: each decodes as its own ``generate`` does, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from pairs import (
    DEVICES,
    NEW,
    SIZES,
    VOCABULARY,
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

from eagle_fsd import EagleFSD, EagleHead, FSDSettings
from eagle_fsd.model.target import Target, TargetPass

# Untied, as tied random embeddings mostly repeat the last token.
SIZED = {**SIZES, "tie_word_embeddings": False}
#: For families without grouped keys and values, whose configurations do not know the word.
UNGROUPED = {key: value for key, value in SIZED.items() if key != "num_key_value_heads"}
CONTEXT = 64  # GPT-2's
LIMIT = 32  # up to here the two kinds of RoPE below turn all keys one way
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC_LIMIT = {**DYNAMIC, "original_max_position_embeddings": LIMIT}

#: A configuration and a seed with which greedy decoding wanders.
FAMILIES: dict[str, tuple[Callable[[], PreTrainedConfig], int]] = {
    "opt": (lambda: OPTConfig(**UNGROUPED, ffn_dim=48, word_embed_proj_dim=32), 3),
    "opt-projected": (lambda: OPTConfig(**UNGROUPED, ffn_dim=48, word_embed_proj_dim=16), 7),
    "gpt2": (
        lambda: GPT2Config(
            vocab_size=VOCABULARY,
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
    "falcon": (lambda: FalconConfig(**UNGROUPED, multi_query=False), 0),
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
#: With decoder layers that a head can be made of.
HEADED = ["granite", "cohere"]
SCALED = ["gemma2", "granite", "cohere"]
#: Gemma 2 has no other: its attention scores are capped too.
EAGER = ["gemma2", "bloom", "mpt"]
EMBEDDINGS = ("embed_tokens", "embed_positions", "wte", "wpe", "embed_in", "word_embeddings")

REFUSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "bloom": lambda: BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    "mpt": lambda: MptConfig(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4),
    "falcon-multi-query": lambda: FalconConfig(**UNGROUPED, multi_query=True),
    "deepseek": lambda: DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        moe_intermediate_size=16,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
    ),
}


@lru_cache
def family(name: str) -> PreTrainedModel:
    """One target of each; every parameter random, and norms and embeddings of a usual size."""
    make, seed = FAMILIES[name] if name in FAMILIES else (REFUSED[name], 0)
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
    """``sequences``, when their answers of ``new`` tokens do not repeat themselves."""
    assert min(row.unique().numel() for row in sequences[:, -new:]) >= min(new // 2, 6)
    return sequences


# -- decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", UNLIMITED)
def test_plain_decoding_is_the_models_own_greedy(name: str, device: str) -> None:
    """A batch of mixed lengths, through the same cache, mask and positions as a tree pass."""
    model = family(name).to(device)
    ids, mask = (item.to(device) for item in batch())
    out = EagleFSD(model, None).generate(ids, attention_mask=mask, max_new_tokens=NEW, method="ar")
    expected = varied(greedy_reference(model, ids, mask, new=NEW), NEW)
    model.to("cpu")
    assert torch.equal(out.sequences, expected)


@pytest.mark.parametrize("name", HEADED)
def test_drafted_decoding_is_the_models_own_greedy(name: str) -> None:
    """Under an untrained head of the family, which next to nothing is accepted from."""
    model = family(name)
    ids, mask = batch()
    pair = EagleFSD(model, untrained_head(model), small_tree())
    out = pair.generate(ids, attention_mask=mask, max_new_tokens=NEW)
    assert torch.equal(out.sequences, varied(greedy_reference(model, ids, mask, new=NEW), NEW))


@pytest.mark.parametrize("name", UNLIMITED)
def test_tree_nodes_have_the_logits_and_features_of_their_paths(name: str) -> None:
    """Features too, although OPT calls its inner decoder and not its base model."""
    model = family(name)
    prefixes = [prompt(5, 1)[0], prompt(19, 2)[0]]
    tree = hand_made_tree([40, 7, 9, 11, 12], [0, 0, 0, 1, 2], rows=2, shift=3)
    scored = score(Target(model), tree, prefixes)
    for row, prefix in enumerate(prefixes):
        for node in range(tree.size):
            ids = torch.cat([prefix, torch.tensor(path_to(tree, row, node))])
            logits, features = plain_logits(model, ids)
            torch.testing.assert_close(scored.logits[row, node], logits[-1], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(
                scored.features[row, node], features[-1], atol=1e-4, rtol=1e-4
            )


@pytest.mark.parametrize("name", UNLIMITED)
def test_prefill_has_the_features_that_the_projection_takes(name: str) -> None:
    """The head is given prefill's features and a tree pass's alike: they must be one thing."""
    target, ids = Target(family(name)), prompt(17, 3)
    with torch.no_grad():
        features = target.prefill(ids, 0, target.new_cache(1, 20))[0]
    logits, expected = plain_logits(target.model, ids[0])
    torch.testing.assert_close(features, expected, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(target.project(features), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", UNLIMITED)
def test_projected_features_are_the_models_own_logits(name: str) -> None:
    """What the head drafts with and the divergence is taken of; Gemma 2, Granite and Cohere do
    something to their logits behind ``lm_head``, which would not show in an arg-max."""
    model = family(name)
    logits, features = plain_logits(model, prompt(9, 4)[0])
    with torch.no_grad():
        projected, bare = Target(model).project(features), model.lm_head(features)
    assert torch.equal(projected, logits)
    assert torch.equal(bare, logits) == (name not in SCALED)


def test_a_scaled_drafts_distribution_is_scaled_too() -> None:
    """A head with the target's own feature agrees with the target, whatever the scale."""
    for name in ("granite", "cohere"):
        model = family(name)
        pair = EagleFSD(model, untrained_head(model), small_tree())
        logits, features = plain_logits(model, prompt(9, 4)[0])
        with torch.no_grad():
            read = pair.head.readout(features)
        torch.testing.assert_close(read, logits.log_softmax(-1), atol=1e-5, rtol=1e-5)


# -- the end of the context -----------------------------------------------------------------------


@pytest.mark.parametrize("new", [14, 30])
def test_learned_positions_up_to_the_last_of_the_context(new: int) -> None:
    """GPT-2's table of positions ends with the context; asking for more is cut there."""
    model, ids = family("gpt2"), prompt(50, 11)
    out = EagleFSD(model, None).generate(ids, max_new_tokens=new, method="ar")
    assert torch.equal(out.sequences, varied(greedy_reference(model, ids, new=14), 14))
    assert answers(out).shape == (1, 14)


@pytest.mark.parametrize("length", [60, 61, 62, 63])
def test_tree_nodes_beyond_the_context_break_nothing(length: int) -> None:
    """They would be looked up outside GPT-2's table; the nodes inside are what they are."""
    model = family("gpt2")
    prefix = prompt(length, 1)[0]
    tree = hand_made_tree([40, 7, 9, 11, 12, 80], [0, 0, 0, 1, 3, 4])
    assert length + tree.max_depth >= CONTEXT
    scored = score(Target(model), tree, [prefix])
    assert scored.logits.isfinite().all()
    for node in range(tree.size):
        path = torch.tensor(path_to(tree, 0, node))
        if length + len(path) <= CONTEXT:
            logits, features = plain_logits(model, torch.cat([prefix, path]))
            torch.testing.assert_close(scored.logits[0, node], logits[-1], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(scored.features[0, node], features[-1], atol=1e-4, rtol=1e-4)


# -- RoPE that depends on the length --------------------------------------------------------------


@pytest.mark.parametrize("name", LIMITED)
def test_length_dependent_rope_up_to_its_limit(name: str) -> None:
    """Below it the frequencies are always the same; the last token may reach it."""
    model = family(name)
    ids, mask = batch()
    pair = EagleFSD(model, untrained_head(model), small_tree())
    expected = varied(greedy_reference(model, ids, mask, new=12), 12)
    out = pair.generate(ids, attention_mask=mask, max_new_tokens=12, method="ar")
    assert torch.equal(out.sequences, expected)
    ids, mask = left_padded(prompt(5, 1), prompt(1, 2), prompt(8, 3))
    out = pair.generate(ids, attention_mask=mask, max_new_tokens=20)
    assert torch.equal(out.sequences, greedy_reference(model, ids, mask, new=20))


@pytest.mark.parametrize("depth", [1, 3, 6])
@pytest.mark.parametrize("name", LIMITED)
def test_tree_nodes_beyond_the_limit_do_not_change_those_inside(name: str, depth: int) -> None:
    """A position beyond the limit would switch the whole pass to the long factors."""
    model, ids = family(name), prompt(7, 1)
    settings = FSDSettings(total_tokens=12, depth=depth, top_k=2)
    pair = EagleFSD(model, untrained_head(model), settings)
    out = pair.generate(ids, max_new_tokens=25)
    assert torch.equal(out.sequences, greedy_reference(model, ids, new=25))


@pytest.mark.parametrize("method", ["fsd", "ar"])
@pytest.mark.parametrize("name", LIMITED)
def test_length_dependent_rope_beyond_its_limit_is_an_error(name: str, method: str) -> None:
    """Keys in the cache would have been turned another way than Hugging Face's."""
    model = family(name)
    pair = EagleFSD(model, untrained_head(model), small_tree())
    for length, new in ((20, 13), (33, 1), (1, 200)):
        message = f"reach {length + new} tokens, but beyond 32 the target's RoPE"
        refused(pair, message, prompt(length), max_new_tokens=new, method=method)


def test_dynamic_rope_without_a_limit_of_its_own_serves_the_whole_context() -> None:
    """Its frequencies change beyond ``max_position_embeddings`` only, which no call passes."""
    model, ids = tiny_target(max_position_embeddings=40, rope_parameters=DYNAMIC), prompt(20, 1)
    pair = EagleFSD(model, untrained_head(model), small_tree())
    for method in ("fsd", "ar"):
        out = pair.generate(ids, max_new_tokens=20, method=method)
        assert torch.equal(out.sequences, varied(greedy_reference(model, ids, new=20), 20))


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_positions_told_by_attention_biases_are_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="tells positions by other means") as error:
        EagleFSD(family(name), None)
    assert str(error.value).isprintable()
    assert type(family(name)).__name__ in str(error.value)


def test_a_falcon_with_attention_biases_is_an_error() -> None:
    config = FalconConfig(**UNGROUPED, multi_query=False, alibi=True)
    with pytest.raises(ValueError, match="tells positions by other means"):
        Target(AutoModelForCausalLM.from_config(config))


def test_local_layers_are_refused_where_their_window_would_bind() -> None:
    """GPT-Neo's; within the window they are full attention."""
    config = GPTNeoConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=16,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(3)
    pair = EagleFSD(AutoModelForCausalLM.from_config(config).eval(), None)
    refused(pair, "sliding window of 16", prompt(7), max_new_tokens=10, method="ar")
    out = pair.generate(prompt(7), max_new_tokens=9, method="ar")
    assert torch.equal(out.sequences, greedy_reference(pair.model, prompt(7), new=9))


@pytest.mark.parametrize("name", ["opt", "gpt2", "gpt-neox"])
def test_families_without_a_head_of_llamas_make_say_so(name: str) -> None:
    with pytest.raises(ValueError, match="no EAGLE head can be made for") as error:
        EagleHead(family(name).config)
    assert str(error.value).isprintable()


def test_an_output_projection_that_is_not_on_a_device_is_an_error() -> None:
    model = tiny_target()
    pair = EagleFSD(model, untrained_head(model), small_tree())
    model.lm_head.to("meta")
    with pytest.raises(ValueError, match="offloaded"):
        pair.target.new_cache(1, 8)


@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("name", ["falcon-multi-query", "deepseek"])
def test_other_keys_and_values_than_configured_are_an_error(name: str, length: int) -> None:
    """One head for all queries, or a compressed latent: in prefill, or where there is none."""
    pair = EagleFSD(family(name), None)
    message = r"keys and values of \[1, 8\] and .* as its configuration says: it is not supported"
    refused(pair, message, prompt(length), method="ar")


@pytest.mark.parametrize("method", ["fsd", "ar"])
def test_layers_that_are_not_on_a_device_are_an_error(method: str) -> None:
    """Where Hugging Face puts what it offloads: the weights come for the length of a call."""
    model = tiny_target()
    pair = EagleFSD(model, untrained_head(model), small_tree())
    model.model.layers[1].to("meta")
    refused(pair, "offloaded .* needs all layers on their devices", prompt(6), method=method)


def refused(pair: EagleFSD, message: str, ids: Tensor, **options: object) -> None:
    """``generate`` is a ValueError of one line."""
    with pytest.raises(ValueError, match=message) as error:
        pair.generate(ids, **{"max_new_tokens": 4, **options})
    assert str(error.value).isprintable()


def score(target: Target, tree: object, prefixes: list[Tensor]) -> TargetPass:
    """A tree pass behind ``prefixes``, a row each."""
    lengths = torch.tensor([len(item) for item in prefixes])
    longest = int(lengths.max())
    cache = target.new_cache(len(prefixes), longest + tree.size)
    ids = torch.nn.utils.rnn.pad_sequence(prefixes, batch_first=True)
    with torch.no_grad():
        target.prefill(ids, 0, cache)
        return target.forward_tree(tree, lengths, longest, cache)
