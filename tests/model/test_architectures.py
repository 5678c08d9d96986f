"""Many architectures: each decodes as its own ``generate`` does, or is rejected."""

from __future__ import annotations

import pytest
import torch
from families import tiny_model
from pairs import (
    MODEL_SIZES,
    VOCAB_SIZE,
    answers,
    batch,
    greedy_reference,
    left_padded,
    path_to,
    plain_logits,
    prompt,
    raises_one_line,
    randomize,
    small_tree,
    tiny_target,
    untrained_head,
)
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
)
from trees import make_tree

from eagle_fsd import EagleFSD, EagleHead
from eagle_fsd.model.self_check import check_target
from eagle_fsd.model.target import Target, TargetPass

#: Types, and whether their decoder layers can serve in a head. OPT calls its inner decoder and not
#: its base model; DeepSeek's keys and values differ in size; Gemma 3 has a window and a RoPE of its
#: own in some layers; Gemma 2, Cohere and HyperCLOVA X transform the output of ``lm_head``, and
#: MiniCPM3 its input (both are tested without a head).
TYPES = {
    "opt": False,
    "deepseek_v3": False,
    "gemma2": False,
    "gemma3_text": True,
    "cohere": True,
    "minicpm3": False,
    "hyperclovax": False,
}
SCALED = ("gemma2", "cohere", "minicpm3", "hyperclovax")
CONTEXT = 64  # GPT-2's
LIMIT = 32  # stable_length with LONGROPE
SIZES = {**MODEL_SIZES, "tie_word_embeddings": False}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}
DYNAMIC = {
    "rope_type": "dynamic",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": LIMIT,
}


@pytest.mark.parametrize("name", TYPES)
def test_decoding_and_passes_match_hugging_face(name: str) -> None:
    """Decoding with and without a head, tree passes and prefill features match Hugging Face."""
    model = tiny_model(name)
    ids, mask = batch()
    expected = greedy_reference(model, ids, mask, new=12)
    drafter = untrained_head(model) if TYPES[name] else None
    pair = EagleFSD(model, drafter, small_tree())
    for method in ("fsd", "ar") if drafter else ("ar",):
        out = pair.generate(ids, attention_mask=mask, max_new_tokens=12, method=method)
        assert torch.equal(out.sequences, expected)
    target, prefixes = Target(model), [prompt(5, 1)[0], prompt(19, 2)[0]]
    tree = make_tree([0, 0, 0, 1, 2], [40, 7, 9, 11, 12]).of_rows(torch.tensor([0, 0]))
    tree.tokens[1] += 3
    scored = score(target, tree, prefixes)
    for row, prefix in enumerate(prefixes):
        for node in range(tree.size):
            path = torch.cat([prefix, torch.tensor(path_to(tree, row, node))])
            assert_close(scored, row, node, plain_logits(model, path))
    ids = prompt(17, 3)
    with torch.no_grad():
        features = target.prefill(ids, 0, target.new_cache(1, 20))[0]
        logits, plain = plain_logits(model, ids[0])
        torch.testing.assert_close(features, plain, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(target.project(plain), logits)
        if drafter:
            log_probs = pair.drafter.log_probs(plain)
            torch.testing.assert_close(log_probs, logits.log_softmax(-1), atol=1e-4, rtol=1e-4)
        assert torch.equal(model.lm_head(plain), logits) == (name not in SCALED)


def test_learned_positions_limit_the_answer_to_the_context() -> None:
    """Tree nodes beyond the position table do not affect others."""
    sizes = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**sizes, n_positions=CONTEXT, bos_token_id=None, eos_token_id=None)
    model, ids = AutoModelForCausalLM.from_config(config).eval(), prompt(50, 11)
    randomize(model, 4)
    expected = greedy_reference(model, ids, new=14)
    out = EagleFSD(model, None).generate(ids, max_new_tokens=30, method="ar")
    assert torch.equal(out.sequences, expected)
    assert answers(out).shape == (1, 14)
    tree = make_tree([0, 0, 0, 1, 3, 4], [40, 7, 9, 11, 12, 80])
    for length in (60, 63):
        prefix = prompt(length, 1)[0]
        scored = score(Target(model), tree, [prefix])
        assert scored.logits.isfinite().all()
        for node in range(tree.size):
            path = torch.tensor(path_to(tree, 0, node))
            if length + len(path) <= CONTEXT:
                assert_close(scored, 0, node, plain_logits(model, torch.cat([prefix, path])))


@pytest.mark.parametrize(
    ("config", "new"),
    [
        (Phi3Config(**SIZES, original_max_position_embeddings=LIMIT, rope_parameters=LONGROPE), 25),
        (LlamaConfig(**SIZES, rope_parameters=DYNAMIC), 40),
    ],
    ids=["phi3-longrope", "llama-dynamic"],
)
def test_length_dependent_rope_matches_hugging_face_up_to_its_limit(
    config: PreTrainedConfig, new: int
) -> None:
    """A node beyond the limit of longrope would switch the whole pass to other frequencies."""
    model = AutoModelForCausalLM.from_config(config).eval()
    randomize(model, 2)
    model.generation_config.eos_token_id = None
    pair = EagleFSD(model, untrained_head(model), small_tree(depth=6, top_k=2))
    ids, mask = left_padded(prompt(5, 1), prompt(1, 2), prompt(7, 3))
    expected = greedy_reference(model, ids, mask, new=new)
    for method in ("fsd", "ar"):
        assert torch.equal(pair.generate(ids, mask, new, method=method).sequences, expected)


def test_calls_beyond_the_limit_of_longrope_are_rejected() -> None:
    config = Phi3Config(**SIZES, original_max_position_embeddings=LIMIT, rope_parameters=LONGROPE)
    model = AutoModelForCausalLM.from_config(config).eval()
    pair = EagleFSD(model, untrained_head(model))
    for length, new, method in ((20, 13, "fsd"), (33, 1, "ar"), (1, 200, "fsd")):
        with raises_one_line(f"reach {length + new} tokens, but the target's attention changes"):
            pair.generate(prompt(length), max_new_tokens=new, method=method)


def test_unsupported_targets_and_heads_are_rejected() -> None:
    """GPT-Neo's local layers compute their window from slots."""
    bloom, mpt = (tiny_model(name) for name in ("bloom", "mpt"))
    for model in (bloom, mpt):
        message = f"{type(model).__name__}.* configuration has no max_position_embeddings"
        with raises_one_line(message):
            EagleFSD(model, None)
    kinds = [[["global", "local"], 1]]
    config = GPTNeoConfig(num_layers=2, hidden_size=32, num_heads=4, attention_types=kinds)
    with pytest.raises(ValueError, match="it has layers of type local"):
        Target(AutoModelForCausalLM.from_config(config))
    for name in ("opt", "gpt2", "gpt_neox"):
        with raises_one_line("cannot build an EAGLE head for"):
            EagleHead(tiny_model(name).config)


def test_offloaded_weights_are_rejected() -> None:
    """Hugging Face keeps offloaded layers on the meta device."""
    model = tiny_target()
    pair = EagleFSD(model, untrained_head(model), small_tree())
    model.model.layers[1].to("meta")
    for method in ("fsd", "ar"):
        with raises_one_line("offloaded .* needs all layers on their devices"):
            pair.generate(prompt(6), max_new_tokens=4, method=method)
    model = tiny_target()
    model.lm_head.to("meta")
    with pytest.raises(ValueError, match="offloaded"):
        check_target(Target(model))


def assert_close(scored: TargetPass, row: int, node: int, expected: tuple[Tensor, Tensor]) -> None:
    """Compare a node with the last position of a plain pass."""
    for found, plain in zip((scored.logits, scored.features), expected, strict=True):
        torch.testing.assert_close(found[row, node], plain[-1], atol=1e-3, rtol=1e-3)


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
