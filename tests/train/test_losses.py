"""Tests for the losses and sizes of heads: unrolled runs match decoding, and all is finite.

Those of EAGLE-3 heads that differ are in ``test_eagle3_training.py``.
"""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from pairs import ARCHITECTURES, VOCAB_SIZE, tiny_target, untrained_head
from torch import Tensor

from eagle_fsd import EagleHead
from eagle_fsd.model.divergence import DIVERGENCES
from eagle_fsd.model.target import Target
from eagle_fsd.train.config import DivergenceLoss, TrainConfig
from eagle_fsd.train.features import compute_features
from eagle_fsd.train.losses import HeadLosses, unroll

CHATS, LENGTH = 2, 11  # LENGTH tokens per chat
RUNS = 4
#: Arguments of ``HeadLosses.forward``.
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture
def head() -> EagleHead:
    """A head with the random weights that training starts from."""
    model = tiny_target().requires_grad_(False)
    torch.manual_seed(0)
    return EagleHead(model.config).attach(Target(model))


def inputs(head: EagleHead) -> Inputs:
    """Random chats: features, the token and the feature after each, and which positions count."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB_SIZE, (CHATS, LENGTH), generator=generator)
    features = compute_features(head.target, ids)
    loss_mask = torch.rand(CHATS, LENGTH - 1, generator=generator) < 0.6
    assert 0 < loss_mask.sum() < loss_mask.numel()
    return features[:, :-1], ids[:, 1:], features[:, 1:], loss_mask


def gradients(losses: HeadLosses, given: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the sums, and the gradient of ``loss`` for every parameter, of the head only."""
    losses.zero_grad(set_to_none=True)
    sums = losses(*given)
    sums["loss"].backward()
    found = {name: item.grad for name, item in losses.named_parameters()}
    assert found.keys() == {f"head.{name}" for name in losses.head.state_dict()}
    assert all(item.grad is None for item in losses.head.target.model.parameters())
    return sums, {name: item.clone() for name, item in found.items() if item is not None}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_unrolled_runs_match_decoding(architecture: str) -> None:
    """At every root, runs equal cached drafting of a chain on the head's own features."""
    model = tiny_target(architecture, dtype=torch.float64)  # it amplifies small differences
    head = untrained_head(model.requires_grad_(False)).attach(Target(model))
    head.plain = False  # transformers computes norms in float32
    features, tokens, _, _ = inputs(head)
    with torch.no_grad():
        outputs = unroll(head, features, tokens, RUNS)
        assert len(outputs) == RUNS
        for root in range(tokens.shape[1]):
            cache = head.new_cache(CHATS, LENGTH + RUNS)
            lengths = torch.zeros(CHATS, dtype=torch.long)
            context = features[:, : root + 1], tokens[:, : root + 1]
            keys = cache.keys(LENGTH + RUNS, lengths.device)
            drafted = head.append(*context, lengths, keys, cache)[:, -1:]
            torch.testing.assert_close(outputs[0][:, root], drafted[:, 0], rtol=1e-6, atol=1e-8)
            for run in range(1, min(RUNS, tokens.shape[1] - root)):
                pair = root + run
                drafted = head.append(
                    drafted, tokens[:, pair : pair + 1], lengths + pair, keys, cache
                )
                ours = outputs[run][:, pair]
                torch.testing.assert_close(ours, drafted[:, 0], rtol=1e-6, atol=1e-8)


def test_sums_match_the_published_losses(head: EagleHead) -> None:
    """Smooth L1 per position, cross-entropy under the target's distribution, and agreement."""
    features, tokens, labels, loss_mask = inputs(head)
    predicted = unroll(head, features, tokens, 1)[0][loss_mask]
    target = head.target.model.lm_head(labels[loss_mask])
    draft = head.target.model.lm_head(predicted)
    count, best = int(loss_mask.sum()), target.argmax(-1, keepdim=True)
    feature = F.smooth_l1_loss(predicted, labels[loss_mask]) * count
    token = F.cross_entropy(draft, target.softmax(-1), reduction="sum")
    for kind in get_args(DivergenceLoss):
        config = TrainConfig(divergence_loss=kind, divergence_weight=2.0)
        sums, found = gradients(HeadLosses(head, config), (features, tokens, labels, loss_mask))
        divergence = DIVERGENCES[kind](target.log_softmax(-1), draft.log_softmax(-1)).sum()
        torch.testing.assert_close(sums["feature"], feature)
        torch.testing.assert_close(sums["token"], token)
        torch.testing.assert_close(sums["divergence"], divergence)
        torch.testing.assert_close(sums["loss"], feature + 0.1 * token + 2.0 * divergence)
        assert sums["top1"] == (draft.topk(1).indices == best).sum()
        assert sums["top3"] == (draft.topk(3).indices == best).sum()
        assert any(gradient.abs().max() > 0 for gradient in found.values())


def test_runs_are_weighted_and_averaged(head: EagleHead) -> None:
    """Each run counts ``unroll_decay`` times the previous one, where it has a predicted input."""
    features, tokens, labels, loss_mask = inputs(head)
    loss_mask[:, 0] = True
    sums = HeadLosses(head, TrainConfig(unroll=3, unroll_decay=0.5))(
        features, tokens, labels, loss_mask
    )
    expected = torch.zeros(())
    outputs = unroll(head, features, tokens, 3)
    for run, share in enumerate((4 / 7, 2 / 7, 1 / 7)):
        valid = loss_mask.clone()
        valid[:, :run] = False
        loss = F.smooth_l1_loss(outputs[run][valid], labels[valid], reduction="none")
        expected = expected + share * loss.mean(-1).sum()
    torch.testing.assert_close(sums["feature"], expected)
    alone = HeadLosses(head, TrainConfig())(features, tokens, labels, loss_mask)
    assert sums["top1"] == alone["top1"]
    assert sums["top3"] == alone["top3"]


def test_result_does_not_depend_on_the_rows_in_memory(
    head: EagleHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows, options in ((1, {"divergence_weight": 0.0}), (3, {"unroll": 3})):
        losses, given = HeadLosses(head, TrainConfig(**options)), inputs(head)
        sums, whole = gradients(losses, given)
        with monkeypatch.context() as patch:
            patch.setattr("eagle_fsd.train.features.MAX_CPU_LOGITS", rows * VOCAB_SIZE)
            chunked_sums, chunked = gradients(losses, given)
        for name, value in sums.items():
            torch.testing.assert_close(chunked_sums[name], value)
        for name, gradient in whole.items():
            assert (chunked[name] - gradient).norm() <= 1e-5 * gradient.norm()


def test_losses_and_gradients_are_finite_for_extreme_distributions(
    head: EagleHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target and draft are almost one-hot or uniform, equal or not."""
    flat = torch.zeros(VOCAB_SIZE)
    peak = flat.index_fill(0, torch.tensor(3), 1.0)
    shapes = ((peak, peak), (peak, peak.roll(5)), (peak, flat), (flat, peak), (flat, flat))
    logits: list[Tensor] = []

    def log_probs(features: Tensor) -> Tensor:
        return (logits[1] + features[..., :1] * torch.arange(VOCAB_SIZE)).log_softmax(-1)

    monkeypatch.setattr(head, "log_probs", log_probs)
    monkeypatch.setattr(
        head.target, "project", lambda states, rows: logits[0].expand(len(states), -1)
    )
    features, tokens, labels, loss_mask = inputs(head)
    cases = itertools.product(get_args(DivergenceLoss), (50.0, 1e4, 1e30), shapes)
    for kind, scale, shape in cases:
        logits[:] = (scale * item for item in shape)
        losses = HeadLosses(head, TrainConfig(divergence_loss=kind))
        sums, found = gradients(losses, (features, tokens, labels, loss_mask))
        assert all(value.isfinite() for value in sums.values()), (kind, scale)
        assert all(gradient.isfinite().all() for gradient in found.values()), (kind, scale)


def test_small_batches_have_gradients(head: EagleHead) -> None:
    """Zeros rather than None without positions: a parallel wrapper waits for every parameter."""
    features, tokens, labels, loss_mask = inputs(head)
    given = features, tokens, labels, torch.zeros_like(loss_mask)
    for runs in (1, 3):
        sums, found = gradients(HeadLosses(head, TrainConfig(unroll=runs)), given)
        assert all(value == 0 for value in sums.values())
        assert len(found) == len(list(head.parameters()))
        assert all((gradient == 0).all() for gradient in found.values())
    # Chats may be shorter than the runs.
    given = features[:, :2], tokens[:, :2], labels[:, :2], torch.ones(CHATS, 2, dtype=torch.bool)
    sums, found = gradients(HeadLosses(head, TrainConfig(unroll=4)), given)
    assert sums["loss"].isfinite()
    assert all(gradient.isfinite().all() for gradient in found.values())
