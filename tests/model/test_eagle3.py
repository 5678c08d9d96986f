"""The EAGLE-3 head: its forward pass against plain formulas, exactness, and the sampling law."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from eagle3_heads import (
    DRAFT_VOCAB_SIZE,
    aligned_eagle3_pair,
    draft_tokens,
    target_model,
    untrained_eagle3,
)
from pairs import (
    LINEAR_ROPE,
    VOCAB_SIZE,
    RecordingRule,
    batch,
    drafted_trees,
    greedy_reference,
    left_padded,
    path_to,
    prompt,
    randomize,
    small_tree,
    small_vocabulary_config,
)
from sampling_laws import MODES, assert_target_law, generate, target_law
from torch import Tensor
from transformers import Gemma2Config, GPT2Config, LlamaForCausalLM, Phi3Config, Qwen3Config
from trees import make_inputs, make_tree

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.model.acceptance.thresholds import divergences
from eagle_fsd.model.divergence import DIVERGENCES, LOG_FLOOR, on_draft_vocabulary
from eagle_fsd.model.drafters.eagle3 import Eagle3Flags, Eagle3Head, layer_config


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()


def rotate(x: Tensor, frequencies: Tensor) -> Tensor:
    """Rotate ``[heads, S, hd]`` by position times frequency; ``i`` is paired with ``i + hd/2``."""
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    low, high = x.chunk(2, -1)
    return torch.cat(
        [low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1
    )


class Reference:
    """An EAGLE-3 head in float64, by itself: no cache, no mask but the causal one, one sequence."""

    def __init__(self, head: Eagle3Head) -> None:
        self.weights = {name: item.double() for name, item in head.state_dict().items()}
        self.config, self.flags = head.config, head.flags
        self.reads = head.reads
        embedding = head.embed_tokens if head.embed_tokens is not None else head.target.embed
        self.embedding = embedding.weight.double()
        self.projection = self.weights.get("lm_head.weight", head.target.lm_head.weight.double())

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[name + ".weight"], self.config.rms_norm_eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(name + ".bias", torch.zeros(()))
        return x @ self.weights[name + ".weight"].T + bias

    def attention(self, a: Tensor, layer: str) -> Tensor:
        """Causal grouped-query attention over ``[S, ...]``."""
        config, length = self.config, len(a)
        groups = config.num_attention_heads // config.num_key_value_heads
        q, k, v = (
            self.linear(a, f"{layer}self_attn.{name}_proj")
            .view(length, -1, config.head_dim)
            .transpose(0, 1)
            for name in "qkv"
        )
        if config.model_type == "qwen3":
            q, k = (
                self.norm(q, layer + "self_attn.q_norm"),
                self.norm(k, layer + "self_attn.k_norm"),
            )
        rope = config.rope_parameters
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        frequencies = rope["rope_theta"] ** -steps / rope.get("factor", 1.0)
        q, k = rotate(q, frequencies), rotate(k, frequencies)
        k, v = (item.repeat_interleave(groups, 0) for item in (k, v))
        scores = q @ k.transpose(1, 2) / math.sqrt(config.head_dim)
        future = torch.ones(length, length).triu(1).bool()
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return self.linear((weights @ v).transpose(0, 1).flatten(1), layer + "self_attn.o_proj")

    def mlp(self, x: Tensor, layer: str) -> Tensor:
        gate = self.linear(x, layer + "mlp.gate_proj")
        up = self.linear(x, layer + "mlp.up_proj")
        return self.linear(gate * gate.sigmoid() * up, layer + "mlp.down_proj")

    def fuse(self, states: list[Tensor]) -> Tensor:
        if self.flags.fc_norm:
            states = [self.norm(state, f"fc_norm.{i}") for i, state in enumerate(states)]
        joined = torch.cat(states, -1)
        if self.flags.norm_before_fc:
            joined = self.norm(joined, "input_norm")
        return self.linear(joined, "fc")

    def outputs(self, x: Tensor, tokens: Tensor) -> Tensor:
        """``[S, H]`` hidden states before each of ``[S]`` tokens to ``[S, H]`` outputs."""
        normed = self.norm(x, "layers.0.hidden_norm")
        embedded = self.norm(self.embedding[tokens], "layers.0.input_layernorm")
        y = normed if self.flags.norm_before_residual else x
        y = y + self.attention(torch.cat([embedded, normed], -1), "layers.0.")
        z = y + self.mlp(self.norm(y, "layers.0.post_attention_layernorm"), "layers.0.")
        for number in range(1, self.config.num_hidden_layers):
            layer = f"layers.{number}."
            z = z + self.attention(self.norm(z, layer + "input_layernorm"), layer)
            z = z + self.mlp(self.norm(z, layer + "post_attention_layernorm"), layer)
        return z

    def log_probs(self, states: list[Tensor], tokens: list[int], drafted: list[int]) -> Tensor:
        """The distribution ``[D]`` after accepted and drafted tokens.

        ``states`` are ``[S, Ht]`` each, of all accepted ``tokens`` but the last.
        """
        x, tokens = self.fuse(states), tokens[1:]
        for token in [*drafted, None]:
            z = self.outputs(x, torch.tensor(tokens))[-1:]
            if token is not None:
                x = torch.cat([x, self.norm(z, "norm") if self.flags.norm_output else z])
                tokens = [*tokens, token]
        return (self.norm(z, "norm") @ self.projection.T).log_softmax(-1)[0]


#: Every flag and size, a few of them together.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias and biases of the attention": {
        "flags": Eagle3Flags(bias=True),
        "attention_bias": True,
        "mlp_bias": True,
    },
    "norm_before_fc, whole vocabulary": {
        "flags": Eagle3Flags(norm_before_fc=True),
        "draft_vocab_size": VOCAB_SIZE,
    },
    "norm_output, projection of the target": {
        "flags": Eagle3Flags(norm_output=True),
        "draft_vocab_size": None,
    },
    "eagle-3.1": {
        "flags": Eagle3Flags(norm_before_residual=True, fc_norm=True, norm_output=True),
    },
    "three layers of qwen3": {"family": Qwen3Config, "num_hidden_layers": 3},
    "head size and RoPE, own embedding": {
        "head_dim": 16,
        "rope_parameters": LINEAR_ROPE,
        "embedding": True,
    },
    "wider than the target": {"hidden_size": 48, "embedding": True, "num_hidden_layers": 2},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_distributions_on_trees_match_the_formulas(variant: str) -> None:
    """Every expanded node of the first two trees of a batch, whose greedy output is lossless."""
    options = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    model = target_model()
    head = untrained_eagle3(model, **{**options, **VARIANTS[variant]})
    pair, rule, reference = EagleFSD(model, head, small_tree()), RecordingRule(), Reference(head)
    prompts = [prompt(9, 1), prompt(2, 4)]
    ids, mask = left_padded(*prompts)
    expected = greedy_reference(model, ids, mask, new=9)
    assert torch.equal(pair.generate(ids, mask, max_new_tokens=9).sequences, expected)
    out = pair.generate(ids, mask, max_new_tokens=9, rule=rule)
    assert out.stats.tau > 2.0
    compared = 0
    for tree, row, context in drafted_trees(out, rule, prompts, steps=2):
        with torch.no_grad():
            output = model(torch.tensor([context[:-1]]), output_hidden_states=True)
        states = [output.hidden_states[index][0].double() for index in head.reads]
        for node in (tree.draft_rows[row] >= 0).nonzero()[:, 0].tolist():
            expected = reference.log_probs(states, context, path_to(tree, row, node)[1:])
            found = tree.draft_log_probs[row, tree.draft_rows[row, node]]
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
            compared += 1
    assert compared >= 20


@pytest.mark.parametrize(
    ("draft_vocab_size", "total_tokens", "depth", "top_k"),
    [(VOCAB_SIZE, 12, 3, 3), (70, 6, 4, 1), (70, 60, 6, 10)],
)
def test_greedy_output_matches_hugging_face_when_many_tokens_are_accepted(
    draft_vocab_size: int, total_tokens: int, depth: int, top_k: int
) -> None:
    """Rows advance at different speeds; the tree may be a chain, or wider than the vocabulary."""
    base = aligned_eagle3_pair(draft_vocab_size)
    config = TreeConfig(total_tokens=total_tokens, depth=depth, top_k=top_k)
    pair = EagleFSD(base.model, base.drafter, config)
    ids, mask = batch()
    expected = greedy_reference(base.model, ids, mask, new=16)
    out = pair.generate(ids, attention_mask=mask, max_new_tokens=16)
    assert torch.equal(out.sequences, expected)
    assert out.stats.tau > 1.3
    assert len({tuple(row) for row in out.stats.accepted}) > 1


@pytest.fixture(scope="module")
def tiny_pair() -> EagleFSD:
    """A vocabulary of 8 tokens, of which the head drafts 5."""
    config = small_vocabulary_config(8)
    model = LlamaForCausalLM(config)
    randomize(model, 10)
    head = Eagle3Head(layer_config(config), 16, 5, (0, 1))
    randomize(head, 11)
    head.set_token_ids(torch.tensor([6, 0, 3, 2, 7]))
    return EagleFSD(model, head, TreeConfig(total_tokens=9, depth=2, top_k=3))


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_p"), MODES)
def test_sampling_at_threshold_zero_has_the_distribution_of_the_target(
    tiny_pair: EagleFSD, temperature: float, top_p: float
) -> None:
    """3000 identical prompts and three new tokens; see ``sampling_laws.py`` for the bounds."""
    draws = generate(tiny_pair, 3000, 3, seed=1, temperature=temperature, top_p=top_p)
    assert_target_law(draws, target_law(tiny_pair.model, 3, temperature, top_p))


def test_divergences_over_a_reduced_vocabulary() -> None:
    """Mass of 20 targets that the drafts cannot reach counts as ``LOG_FLOOR`` nats."""
    generator, tokens = torch.Generator().manual_seed(0), draft_tokens()
    log_p = (2 * torch.randn(20, VOCAB_SIZE, generator=generator)).log_softmax(-1)
    log_q = (2 * torch.randn(20, DRAFT_VOCAB_SIZE, generator=generator)).log_softmax(-1)
    whole = torch.full_like(log_p, -torch.inf).index_copy_(-1, tokens, log_q)
    reduced = on_draft_vocabulary(log_p, log_q, tokens)
    for name in ("js", "tv", "kl"):
        found = DIVERGENCES[name](*reduced)
        torch.testing.assert_close(found, DIVERGENCES[name](log_p, whole), rtol=1e-5, atol=1e-6)
        assert (found > 0.1).all()
    # Buckets hold the unlikely tokens of the whole vocabulary.
    for row in range(len(log_p)):
        tree = make_tree([0, 0], [0, 6], q={0: log_q[row].exp().tolist()})
        inputs = make_inputs(
            replace(tree, token_ids=tokens), [log_p[row].exp().tolist()] * 2, sampled=[1, 1]
        )
        for name in ("top_k_js", "top_p_tv"):
            found = divergences(inputs, name)[0, 0]
            torch.testing.assert_close(found, DIVERGENCES[name](log_p[row], whole[row]))
    outside = 1.0 - log_p[:, tokens].exp().sum(-1)
    for name, share in (("kl_reversed", 1.0), ("js_reference", 0.25)):
        found = DIVERGENCES[name](*reduced)
        assert found.isfinite().all()
        torch.testing.assert_close(found / -LOG_FLOOR, share * outside, rtol=0.01, atol=1e-3)


def test_layers_suit_targets_of_other_families() -> None:
    """The sizes of the MLP may have another name, and LongRoPE may rotate a part of a head."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "pad_token_id": None}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    partial = {"partial_rotary_factor": 0.5, "rope_parameters": rope}
    phi = Phi3Config(**sizes, **partial, original_max_position_embeddings=64)
    assert phi.rope_parameters["partial_rotary_factor"] == 0.5
    for config, size in ((GPT2Config(n_embd=32, n_head=2), 128), (phi, phi.intermediate_size)):
        layer = layer_config(config)
        assert layer.intermediate_size == size
        Eagle3Head(layer, 32, None, (0, 1))


def test_unsupported_heads_are_rejected() -> None:
    reads = (2, 3, 4)
    gemma = Gemma2Config(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=1)
    kinds = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    sliding = Qwen3Config(vocab_size=VOCAB_SIZE, **kinds)
    llama = layer_config(target_model().config)
    for config, size, message in (
        (gemma, None, r"type llama or qwen3; got gemma2$"),
        (sliding, None, "sliding window"),
        (llama, 0, r"draft_vocab_size must be in \[1, 96\]; got 0$"),
        (llama, VOCAB_SIZE + 1, r"draft_vocab_size must be in \[1, 96\]; got 97$"),
    ):
        with pytest.raises(ValueError, match=message):
            Eagle3Head(config, 32, size, reads)
    with pytest.raises(ValueError, match="norm_before_fc and fc_norm"):
        Eagle3Flags(norm_before_fc=True, fc_norm=True)
