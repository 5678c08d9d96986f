"""The bundled EAGLE-3 head and draft model: files, lossless drafts, cards, and recipes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from accelerators import reset_accelerator_state
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.bundled import BUNDLED_EAGLE3, BUNDLED_TARGET
from eagle_fsd.bundled.problems import problems
from eagle_fsd.model.acceptance import ExactRule, FuzzyRule
from eagle_fsd.model.drafters.draft_model import DraftModel
from eagle_fsd.model.drafters.layer_detection import detect_layers, sample_texts
from eagle_fsd.train.config import TrainConfig
from eagle_fsd.train.record import read_record
from recipes import bundled
from recipes.draft_model import DraftModelConfig, build_draft_model, train_draft_model

BUSHY = TreeConfig(**dict(zip(("total_tokens", "depth", "top_k"), bundled.TREES[0], strict=True)))
CHAIN = TreeConfig(total_tokens=7, depth=5, top_k=1)


@pytest.fixture(scope="module")
def eagle3() -> EagleFSD:
    return EagleFSD.from_pretrained(
        drafter="bundled-eagle3", dtype=torch.float32, device_map="cpu", tree=BUSHY
    )


@pytest.fixture(scope="module")
def draft_model() -> EagleFSD:
    """The bundled target with the draft model, which drafts chains of 6 tokens."""
    return EagleFSD.from_pretrained(
        drafter="bundled-draft-model", dtype=torch.float32, device_map="cpu", tree=CHAIN
    )


def prompts(model: EagleFSD, seed: int) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask of 32 problems that no bundled model was trained on."""
    chats = [[{"role": "user", "content": item.question}] for item in problems("test", 32, seed)]
    encoded = model.tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    return encoded["input_ids"], encoded["attention_mask"]


# -- EAGLE-3 ---------------------------------------------------------------------------------------


def test_head_is_that_of_the_recipe(eagle3: EagleFSD) -> None:
    head = eagle3.drafter
    assert head.reads == (2, 7, 11)
    assert head.flags.fc_norm
    assert head.flags.norm_output
    config = bundled.HEADS["eagle3"]
    assert head.draft_vocab_size == config.draft_vocab_size
    assert TrainConfig.from_dict(read_record(BUNDLED_EAGLE3)["settings"]) == config


def test_hidden_states_are_detected(eagle3: EagleFSD) -> None:
    """One layer above or below is nearly as good in this small target, two below is not."""
    target, trained, near = eagle3.target, (2, 7, 11), [(1, 6, 10), (3, 8, 12)]
    candidates = [(0, 5, 9), trained, *near]
    reads, agreement = detect_layers(eagle3.drafter, target, sample_texts(target), candidates)
    assert reads == trained
    assert set(agreement) == set(candidates)
    best = agreement[trained]
    assert max(agreement.values()) == best
    assert min(agreement[item] for item in near) > best - 0.03


def test_head_can_draft_the_tokens_of_answers(eagle3: EagleFSD) -> None:
    token_ids = eagle3.drafter.token_ids
    solutions = [problem.answer for problem in problems("test", 100, seed=6)]
    tokens = {token for ids in eagle3.tokenizer(solutions)["input_ids"] for token in ids}
    assert len(tokens) > 100
    assert tokens <= set(token_ids.tolist())


@pytest.mark.slow
def test_greedy_output_is_the_target_s_and_tau_the_card_s(eagle3: EagleFSD) -> None:
    ids, mask = prompts(eagle3, seed=5)
    expected = eagle3.generate(ids, mask, max_new_tokens=128, method="ar").sequences
    out = eagle3.generate(ids, mask, max_new_tokens=128, threshold=0.0)
    assert torch.equal(out.sequences, expected)
    card = (BUNDLED_EAGLE3 / "README.md").read_text()
    row = re.search(r"^\| 16/8/2 \| [\d.]+ \| ([\d.]+) \|$", card, re.MULTILINE)
    assert out.stats.tau == pytest.approx(float(row[1]), rel=0.1)


@pytest.mark.slow
def test_recipe_stores_features_and_trains_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It shows the progress of the training."""
    reset_accelerator_state()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(bundled, "HEAD_CHATS", 12)
    monkeypatch.setitem(bundled.HEADS, "eagle3", bundled.HEADS["eagle3"].updated(max_steps=2))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "target").symlink_to(BUNDLED_TARGET)
    bundled.train_head("eagle3", tmp_path, tmp_path / "out")
    assert "training: 2 of 2" in capsys.readouterr().err
    out = tmp_path / "out" / "eagle3"
    assert read_record(out)["steps"] == 2
    trained, shipped = (load_file(folder / "model.safetensors") for folder in (out, BUNDLED_EAGLE3))
    assert {name: item.shape for name, item in trained.items()} == {
        name: item.shape for name, item in shipped.items()
    }


# -- draft model -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_greedy_output_is_the_target_s(draft_model: EagleFSD) -> None:
    """Chains, and a tree; most steps accept several tokens."""
    ids, mask = prompts(draft_model, seed=4)
    expected = draft_model.generate(ids, mask, max_new_tokens=32, method="ar").sequences
    out = draft_model.generate(ids, mask, max_new_tokens=32)
    assert torch.equal(out.sequences, expected)
    assert out.stats.tau > 2.5
    tree = EagleFSD(
        draft_model.model, draft_model.drafter, TreeConfig(total_tokens=12, depth=4, top_k=3)
    )
    assert torch.equal(tree.generate(ids, mask, max_new_tokens=32).sequences, expected)


def test_most_sampled_tokens_are_accepted(draft_model: EagleFSD) -> None:
    """A step gives 6.0 of 7 tokens as a block, 6.0 token by token, and 6.2 by FSD (measured)."""
    ids, mask = (item[:4] for item in prompts(draft_model, seed=4))
    for rule in (ExactRule(), FuzzyRule(0.0), FuzzyRule(0.1)):
        out = draft_model.generate(ids, mask, max_new_tokens=64, temperature=1.0, seed=1, rule=rule)
        assert out.stats.tau > 5


def test_initial_weights_are_the_target_s() -> None:
    target = AutoModelForCausalLM.from_pretrained(BUNDLED_TARGET, dtype=torch.float32)
    draft = build_draft_model(target, (0, -1))
    assert draft.lm_head.weight is draft.model.embed_tokens.weight
    for found, layer in zip(draft.model.layers, (0, -1), strict=True):
        for name, value in found.state_dict().items():
            assert torch.equal(value, target.model.layers[layer].state_dict()[name])
    for name in ("embed_tokens.weight", "norm.weight"):
        assert torch.equal(draft.model.state_dict()[name], target.model.state_dict()[name])


@pytest.mark.slow
def test_recipe_trains_a_model_that_loads(tmp_path: Path, draft_model: EagleFSD) -> None:
    config = DraftModelConfig(chats=4, epochs=2, tokens_per_batch=1024)
    train_draft_model(config, BUNDLED_TARGET, tmp_path / "work", tmp_path / "out")
    assert read_record(tmp_path / "out")["settings"]["chats"] == 4
    found = EagleFSD.from_pretrained(BUNDLED_TARGET, tmp_path / "out", dtype=torch.float32)
    assert isinstance(found.drafter, DraftModel)
    ids, mask = (item[:2] for item in prompts(draft_model, seed=4))
    expected = draft_model.generate(ids, mask, max_new_tokens=16, method="ar").sequences
    assert torch.equal(found.generate(ids, mask, max_new_tokens=16).sequences, expected)
