"""Which drafter a name or a folder stands for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from eagle3_heads import target_model, untrained_eagle3
from pairs import (
    VOCAB_SIZE,
    aligned_pair,
    greedy_reference,
    prompt,
    raises_one_line,
    untrained_head,
)
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from eagle_fsd import CheckpointError, EagleFSD, EagleHead
from eagle_fsd.model.checkpoint import RANKS_FILE, save_head, select_tokens, write_ranks
from eagle_fsd.model.drafters.draft_model import DraftModel
from eagle_fsd.model.drafters.eagle3 import Eagle3Head
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.drafters.loading import load_drafter
from eagle_fsd.model.eagle3_checkpoint import save_eagle3
from eagle_fsd.model.target import Target


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return target_model()


def save_kind(kind: str, folder: Path, model: PreTrainedModel) -> type[Drafter]:
    """Write a drafter of a kind and return its class."""
    if kind == "eagle-2":
        save_head(untrained_head(model).attach(Target(model)), folder, binary=True)
        return EagleHead
    if kind == "draft model":
        config = type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 2})
        AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        return DraftModel
    save_eagle3(untrained_eagle3(model), folder, kind)
    return Eagle3Head


@pytest.mark.parametrize("kind", ["eagle-2", "eagle", "speculators", "draft model"])
def test_kind_follows_from_the_files(kind: str, model: PreTrainedModel, tmp_path: Path) -> None:
    """Every kind decodes exactly."""
    expected = save_kind(kind, tmp_path, model)
    pair = EagleFSD.from_pretrained(model, tmp_path, total_tokens=6, depth=2, top_k=2)
    assert type(pair.drafter) is expected
    ids = prompt(9, 5)
    out = pair.generate(ids, max_new_tokens=12)
    assert torch.equal(out.sequences, greedy_reference(model, ids, new=12))


def test_folder_without_a_usable_drafter_is_rejected(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    """Damaged files, and Medusa heads."""
    for number, (files, message) in enumerate(
        (
            ({"config.json": "{}", "model.safetensors": "x"}, "model.safetensors"),
            ({"config.json": "{}", "model.safetensors.index.json": "{}"}, "has no weight_map"),
            ({"config.json": "{}", "model.safetensors.index.json": "["}, "index.json"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        with raises_one_line(message, CheckpointError):
            load_drafter(folder, Target(model))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "medusa"}))
    save_file({"0.linear.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with raises_one_line(r"neither an EAGLE head .*model_type medusa", CheckpointError):
        load_drafter(tmp_path, Target(model))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A head's folder with a ranking: token ``i`` occurs ``i % 7`` times."""
    head = aligned_pair().drafter
    assert isinstance(head, EagleHead)
    save_head(head, tmp_path)
    ranks = (torch.arange(VOCAB_SIZE) % 7).sort(descending=True, stable=True).indices
    write_ranks(tmp_path / RANKS_FILE, ranks)
    return tmp_path


def test_invalid_sizes_and_rankings_are_refused(folder: Path) -> None:
    for size in (0, VOCAB_SIZE + 1):
        with pytest.raises(ValueError, match=rf"in \[1, {VOCAB_SIZE}\]; got {size}"):
            select_tokens(size, folder, VOCAB_SIZE)
    for tokens, reason in (
        (torch.tensor([1, 1]), "distinct"),
        (torch.tensor([0.5]), "distinct"),
        (torch.tensor([-1, 2]), "-1 to 2"),
        (torch.tensor([VOCAB_SIZE]), f"only {VOCAB_SIZE}"),
    ):
        save_file({"tokens": tokens}, folder / RANKS_FILE)
        with pytest.raises(CheckpointError, match=reason):
            select_tokens(1, folder, VOCAB_SIZE)
    (folder / RANKS_FILE).write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="holds no ranking"):
        select_tokens(1, folder, VOCAB_SIZE)
    (folder / RANKS_FILE).unlink()
    with pytest.raises(CheckpointError, match="eagle-fsd train ranks"):
        select_tokens(1, folder, VOCAB_SIZE)


def test_head_is_saved_and_loaded_with_its_vocabulary(folder: Path, tmp_path: Path) -> None:
    """The option overrides it, and a lost or replaced file is reported."""
    model, saved = aligned_pair().model, tmp_path / "saved"
    head = EagleFSD.from_pretrained(model, folder, draft_vocabulary=30).drafter
    assert isinstance(head, EagleHead)
    save_head(head, saved)
    for size, options in ((30, {}), (9, {"draft_vocabulary": 9})):
        found = EagleFSD.from_pretrained(model, saved, **options).drafter
        assert isinstance(found, EagleHead)
        expected = select_tokens(size, folder, VOCAB_SIZE).sort().values
        assert torch.equal(found.token_ids, expected)
    shutil.copy(folder / RANKS_FILE, saved / RANKS_FILE)
    with raises_one_line(f"drafts 30 tokens, but its {RANKS_FILE} has {VOCAB_SIZE}"):
        EagleFSD.from_pretrained(model, saved)
    (saved / RANKS_FILE).unlink()
    with pytest.raises(CheckpointError, match=f"drafts 30 tokens, but has no {RANKS_FILE}"):
        EagleFSD.from_pretrained(model, saved)


def test_decoding_is_lossless_and_drafts_frequent_tokens_only(folder: Path) -> None:
    """A smaller draft vocabulary lowers acceptance but does not change the output."""
    whole = EagleFSD.from_pretrained(aligned_pair().model, folder)
    ids = prompt(7, 2)
    expected = greedy_reference(whole.model, ids, new=40)
    taus = []
    for size in (5, 40, VOCAB_SIZE):
        pair = EagleFSD.from_pretrained(whole.model, folder, draft_vocabulary=size, tree=whole.tree)
        out = pair.generate(ids, max_new_tokens=40)
        assert torch.equal(out.sequences, expected)
        drafted = out.sequences[:, 7:][out.origins == 1]
        assert set(drafted.tolist()) <= set(select_tokens(size, folder, VOCAB_SIZE).tolist())
        taus.append(out.stats.tau)
    assert 1.0 < taus[0] < taus[1] < taus[2]
    assert taus[2] == pytest.approx(whole.generate(ids, max_new_tokens=40).stats.tau)
