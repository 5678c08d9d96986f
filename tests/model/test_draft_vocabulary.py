"""EAGLE heads that draft the most frequent tokens only: lossless, and the same as a masked head."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from pairs import VOCAB_SIZE, aligned_pair, greedy_reference, prompt
from safetensors.torch import save_file

from eagle_fsd import EagleFSD, SamplingConfig
from eagle_fsd.model.checkpoint import RANKS_FILE, CheckpointError, save_head
from eagle_fsd.model.divergence import DIVERGENCES
from eagle_fsd.model.draft_vocabulary import select_tokens, write_ranks
from eagle_fsd.model.drafters.eagle import EagleHead


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A head's folder with a ranking: token ``i`` occurs ``i % 7`` times."""
    head = aligned_pair().drafter
    assert isinstance(head, EagleHead)
    save_head(head, tmp_path)
    write_ranks(tmp_path / RANKS_FILE, torch.arange(VOCAB_SIZE) % 7)
    return tmp_path


def test_tokens_are_the_most_frequent_in_ascending_order(folder: Path) -> None:
    sixes = list(range(6, VOCAB_SIZE, 7))
    assert select_tokens(3, folder, VOCAB_SIZE).tolist() == sixes[:3]
    found = select_tokens(len(sixes) + 1, folder, VOCAB_SIZE).tolist()
    assert found == sorted([*sixes, 5])
    every = select_tokens(folder / RANKS_FILE, folder, VOCAB_SIZE)
    assert torch.equal(every, torch.arange(VOCAB_SIZE))


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


def test_option_is_for_eagle_heads_that_are_to_be_loaded(folder: Path) -> None:
    model = aligned_pair().model
    with pytest.raises(ValueError, match="EAGLE-1/2 heads only; ngram is none"):
        EagleFSD.from_pretrained(model, "ngram", draft_vocabulary=5)
    with pytest.raises(TypeError, match="already loaded"):
        EagleFSD.from_pretrained(model, aligned_pair().drafter, draft_vocabulary=5)


def test_decoding_is_lossless_and_drafts_frequent_tokens_only(folder: Path) -> None:
    """With few tokens, fewer drafted ones are accepted."""
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


def test_distributions_are_those_of_the_head_over_the_tokens(folder: Path) -> None:
    """And so is JS over the whole vocabulary, where the head gives all other tokens nothing."""
    pair = EagleFSD.from_pretrained(aligned_pair().model, folder, draft_vocabulary=30)
    head, whole = pair.drafter, aligned_pair().drafter
    assert isinstance(head, EagleHead)
    assert isinstance(whole, EagleHead)
    assert head.token_ids is not None
    hidden = torch.randn(4, head.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found, every = head.log_probs(hidden), whole.log_probs(hidden)
        expected = every[:, head.token_ids].log_softmax(-1)
        torch.testing.assert_close(found, expected)
        log_p = torch.randn(4, VOCAB_SIZE).log_softmax(-1)
        full = torch.full_like(log_p, -torch.inf).index_copy_(1, head.token_ids, found)
    assert DIVERGENCES["js"](log_p, full).isfinite().all()
    head.restrict_vocabulary(None)
    assert torch.equal(head.log_probs(hidden), every)


def test_every_way_to_decode_accepts_a_reduced_vocabulary(folder: Path) -> None:
    pair = EagleFSD.from_pretrained(aligned_pair().model, folder, draft_vocabulary=30)
    for temperature, selection in itertools.product((0.0, 1.0), ("longest", "sample")):
        acceptance = pair.acceptance.updated(threshold=0.3, selection=selection)
        sampling = SamplingConfig(temperature=temperature, top_p=0.9, seed=1)
        out = pair.generate(prompt(5), max_new_tokens=12, sampling=sampling, acceptance=acceptance)
        assert out.sequences.shape == (1, 17)
