"""The draft model: exact output, its distributions, prefix caches, and vocabularies."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import (
    MODEL_SIZES,
    NEW_TOKENS,
    VOCAB_SIZE,
    RecordingRule,
    aligned_pair,
    batch,
    drafted_trees,
    left_padded,
    path_to,
    plain_logits,
    prompt,
    randomize,
    reference,
    small_tree,
    tiny_target,
    tokenizer,
)
from sampling_laws import bound, distance, generate, histogram, target_law
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MambaConfig,
    PreTrainedModel,
)

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.model.acceptance import ExactRule, FuzzyRule
from eagle_fsd.model.drafters.draft_model import (
    MAX_PADDING,
    DraftModel,
    load_draft_model,
)
from eagle_fsd.model.target import Target
from eagle_fsd.model.verify import AcceptanceRule

TREE = small_tree(total_tokens=20)
CHAIN = TreeConfig(total_tokens=6, depth=4, top_k=1)


def small(**changes: object) -> PreTrainedModel:
    """A model of one layer."""
    return tiny_target(seed=5, num_hidden_layers=1, **changes)


def windowed() -> PreTrainedModel:
    """A Qwen 2 with a window of 6 tokens in one of its two layers."""
    kinds = ["sliding_attention", "full_attention"]
    return tiny_target("qwen2", sliding_window=6, use_sliding_window=True, layer_types=kinds)


def gemma2() -> PreTrainedModel:
    """Windows of 5 tokens in every other layer, and soft caps."""
    config = Gemma2Config(**{**MODEL_SIZES, "head_dim": 8}, sliding_window=5)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomize(model, 11)
    return model.eval()


#: Draft models: unrelated to the target, equal to it, and with other vocabulary sizes.
DRAFTS = {
    "small": small,
    "target": tiny_target,
    "windowed": windowed,
    "gemma2": gemma2,
    "fewer-tokens": lambda: small(vocab_size=VOCAB_SIZE - 6),
    "more-tokens": lambda: small(vocab_size=VOCAB_SIZE + 6),
}


@pytest.mark.parametrize(
    ("draft", "chain"),
    [("windowed", True), ("gemma2", False), ("fewer-tokens", False), ("more-tokens", True)],
)
def test_greedy_output_matches_hugging_face(draft: str, chain: bool) -> None:
    """A batch of mixed lengths, whose rows end at different steps."""
    model, (ids, mask) = (
        EagleFSD(tiny_target(), DraftModel(DRAFTS[draft]()), CHAIN if chain else TREE),
        batch(),
    )
    out = model.generate(ids, mask, NEW_TOKENS)
    assert torch.equal(out.sequences, reference())


@pytest.mark.parametrize("make", [windowed, gemma2])
def test_target_as_its_own_draft_model_accepts_every_chain(
    make: Callable[[], PreTrainedModel],
) -> None:
    """Caches, positions and windows of both models agree; ratios of probabilities are 1."""
    ids, mask = batch()
    model = EagleFSD(make(), DraftModel(make()), CHAIN)
    for options in ({}, {"temperature": 0.8, "seed": 1}):
        out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, **options)
        assert {count for row in out.stats.accepted for count in row} == {CHAIN.depth + 2}


@torch.inference_mode()
@pytest.mark.parametrize(("make", "tree"), [(small, CHAIN), (windowed, TREE), (gemma2, TREE)])
def test_distributions_are_those_of_plain_passes(
    make: Callable[[], PreTrainedModel], tree: TreeConfig
) -> None:
    """All expanded nodes match plain passes, also with windows shorter than the trees are deep."""
    draft, rule = make(), RecordingRule()
    model = EagleFSD(aligned_pair().model, DraftModel(draft), tree)
    prompts = [prompt(9, 1), prompt(3, 2), prompt(1, 3)]
    out = model.generate(*left_padded(*prompts), max_new_tokens=NEW_TOKENS, rule=rule)
    for found, row, context in drafted_trees(out, rule, prompts, steps=3):
        for node in (found.draft_rows[row] >= 0).nonzero()[:, 0].tolist():
            path = torch.tensor(context + path_to(found, row, node)[1:])
            expected = plain_logits(draft, path)[0][-1].log_softmax(-1)
            log_probs = found.draft_log_probs[row, found.draft_rows[row, node]]
            torch.testing.assert_close(log_probs, expected, atol=2e-4, rtol=1e-3)


TINY = 6


@lru_cache
def tiny_model(layers: int) -> PreTrainedModel:
    """A vocabulary of 6, with weights large enough for contexts to matter."""
    config = LlamaConfig(
        **{**MODEL_SIZES, "vocab_size": TINY, "num_hidden_layers": layers}, initializer_range=0.3
    )
    with torch.random.fork_rng():
        torch.manual_seed(10)
        return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("tree", "rule", "warped"),
    [
        (TreeConfig(total_tokens=3, depth=1, top_k=1), ExactRule(), {}),
        (TreeConfig(total_tokens=3, depth=1, top_k=1), FuzzyRule(0.0), {"top_k": 4}),
        (TreeConfig(total_tokens=6, depth=1, top_k=2), ExactRule(), {"top_p": 0.96}),
    ],
    ids=["block", "token", "tree"],
)
def test_sampling_has_the_distribution_of_the_target(
    tree: TreeConfig, rule: AcceptanceRule, warped: dict[str, Any]
) -> None:
    """1000 identical prompts and three tokens from at least one step, at temperature 0.8."""
    rows = 1000
    model = EagleFSD(tiny_model(2), DraftModel(tiny_model(1)), tree)
    draws = generate(model, rows, 3, seed=1, temperature=0.8, rule=rule, **warped)
    law, drafted = (target_law(tiny_model(layers), 3, 0.8, **warped) for layers in (2, 1))
    counts = histogram(draws.answers, law.shape)
    assert distance(counts, law) < bound(law, rows)
    assert distance(drafted, law) > 2 * bound(law, rows)
    assert len({row[0] for row in draws.accepted}) > 1


def test_depth_adapts_to_the_accepted_lengths() -> None:
    """A draft model that is never right and one that always is; the output stays exact."""
    ids, mask = batch()
    for draft, expected in (("small", [5, 4, 3, 2, 2, 2]), ("target", [5, 5, 5, 5])):
        model, rule = DRAFTS[draft](), RecordingRule(0.0)
        model.generation_config.num_assistant_tokens_schedule = "heuristic"
        found = EagleFSD(tiny_target(), DraftModel(model), CHAIN)
        out = found.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, rule=rule)
        assert torch.equal(out.sequences, reference())
        assert [step.tree.max_depth for step in rule.steps][: len(expected)] == expected


def test_other_vocabulary_is_rejected() -> None:
    other = small(vocab_size=VOCAB_SIZE + MAX_PADDING + 1)
    with pytest.raises(ValueError, match="it has 353 tokens, the target has 96"):
        DraftModel(other).attach(Target(tiny_target()))


@pytest.fixture
def target(tmp_path: Path) -> Target:
    """A target that was loaded from a folder with a tokenizer."""
    folder = tmp_path / "target"
    tiny_target().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return Target(AutoModelForCausalLM.from_pretrained(folder))


def test_tokenizers_may_differ_in_added_tokens_only(target: Target, tmp_path: Path) -> None:
    """A draft model may come without a tokenizer, and is loaded in the target's dtype."""
    folder = tmp_path / "draft"
    small(dtype=torch.float16).save_pretrained(folder)
    assert load_draft_model(folder, target).dtype == torch.float32
    tokenizer().save_pretrained(folder)
    drafter = load_draft_model(folder, target)
    assert (drafter.vocab_size, drafter.device) == (VOCAB_SIZE, target.device)
    target.config = type(target.config)()  # that of the text alone, as of Gemma 3, has no name
    extended = tokenizer().__class__.from_pretrained(target.model.config._name_or_path)
    extended.add_tokens("<|tool|>", special_tokens=True)
    extended.save_pretrained(folder)
    load_draft_model(folder, target)
    file = folder / "tokenizer.json"
    text = file.read_text()
    assert '"A":' in text
    file.write_text(text.replace('"A":', '"AB":'))
    with pytest.raises(ValueError, match="has a different tokenizer from the target"):
        load_draft_model(folder, target)


def test_unsupported_draft_model_is_named(target: Target, tmp_path: Path) -> None:
    """One without attention, and one that ignores masks; the target is not named."""
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 1}
    AutoModelForCausalLM.from_config(MambaConfig(**sizes)).save_pretrained(tmp_path / "draft")
    folder = re.escape(str(tmp_path / "draft"))
    with pytest.raises(ValueError, match=f"^draft model {folder}: MambaFor.* not supported"):
        load_draft_model(tmp_path / "draft", target)
    model = small()

    def no_mask(_module: object, args: object, options: dict[str, object]) -> object:
        return args, {**options, "attention_mask": None}

    model.model.register_forward_pre_hook(no_mask, with_kwargs=True)
    found = EagleFSD(tiny_target(), DraftModel(model), CHAIN)
    with pytest.raises(ValueError, match=r"^draft model: LlamaForCausalLM is not supported"):
        found.generate(batch()[0], max_new_tokens=2)


def test_prompts_beyond_the_context_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """The answer to a prompt within the context may exceed it."""
    model = EagleFSD(tiny_target(), DraftModel(small(max_position_embeddings=8)), CHAIN)
    model.generate(prompt(8), max_new_tokens=4)
    assert not caplog.text
    model.generate(prompt(9), max_new_tokens=4)
    assert "prompt of 9 tokens exceeds the draft model's context of 8 tokens" in caplog.text
