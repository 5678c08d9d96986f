"""The losses: that several steps are what decoding does, and that no distribution breaks them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pairs import ARCHITECTURES, PLAIN, VOCABULARY, tiny_target, untrained_head
from torch import Tensor

from eagle_fsd import EagleHead
from eagle_fsd.model.divergence import DIVERGENCES
from eagle_fsd.model.target import Target
from eagle_fsd.train import losses as module
from eagle_fsd.train.config import DIVERGENCE_LOSSES, LossWeights
from eagle_fsd.train.features import compute_features
from eagle_fsd.train.losses import HeadLosses, unroll

ROWS, LENGTH = 2, 11  # of chats and of tokens
STEPS = 4
#: What the losses are given.
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def attached_head(architecture: str = PLAIN, dtype: torch.dtype = torch.float32) -> EagleHead:
    model = tiny_target(architecture, dtype=dtype).requires_grad_(False)
    return untrained_head(model).attach(Target(model))


@pytest.fixture
def head() -> EagleHead:
    """As training begins with it."""
    model = tiny_target().requires_grad_(False)
    torch.manual_seed(0)
    return EagleHead(model.config).attach(Target(model))


def inputs(head: EagleHead) -> Inputs:
    """Features, the tokens after each, the features wanted, and which count."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=generator)
    features = compute_features(head._shared, ids)
    counted = torch.rand(ROWS, LENGTH - 1, generator=generator) < 0.6
    assert 0 < counted.sum() < counted.numel()
    return features[:, :-1], ids[:, 1:], features[:, 1:], counted


def gradients(losses: HeadLosses, given: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The sums, and the gradient of ``loss`` for every parameter."""
    losses.zero_grad(set_to_none=True)
    sums = losses(*given)
    sums["loss"].backward()
    assert all(parameter.grad is not None for parameter in losses.parameters())
    return sums, {name: item.grad.clone() for name, item in losses.named_parameters()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_steps_are_what_decoding_does(architecture: str) -> None:
    """From every root: the chat up to it in the cache, then a chain on the head's own features.

    In float64, as this head makes much of small differences.
    """
    head = attached_head(architecture, torch.float64)
    features, tokens, _, _ = inputs(head)
    with torch.no_grad():
        outputs = unroll(head, features, tokens, STEPS)
        assert len(outputs) == STEPS
        for root in range(tokens.shape[1]):
            cache = head.new_cache(ROWS, LENGTH + STEPS)
            lengths = torch.zeros(ROWS, dtype=torch.long)
            context = features[:, : root + 1], tokens[:, : root + 1]
            said = head.append(*context, lengths, 0, cache)[:, -1:]
            torch.testing.assert_close(outputs[0][:, root], said[:, 0], rtol=1e-6, atol=1e-8)
            for step in range(1, min(STEPS, tokens.shape[1] - root)):
                pair = root + step
                said = head.append(said, tokens[:, pair : pair + 1], lengths + pair, pair, cache)
                ours = outputs[step][:, pair]
                torch.testing.assert_close(ours, said[:, 0], rtol=1e-6, atol=1e-8)


def test_later_steps_differ_from_the_first() -> None:
    """So equality above means something."""
    head = attached_head()
    features, tokens, _, _ = inputs(head)
    outputs = unroll(head, features, tokens, STEPS)
    for step in range(1, STEPS):
        assert (outputs[step] - outputs[step - 1])[:, step:].abs().mean() > 0.01


def test_one_step_is_the_head_itself(head: EagleHead) -> None:
    features, tokens, _, _ = inputs(head)
    positions = torch.arange(LENGTH - 1).expand(ROWS, -1)
    (output,) = unroll(head, features, tokens, 1)
    assert torch.equal(output, head(features, tokens, positions))
    first = unroll(head, features, tokens, 2)[0]
    torch.testing.assert_close(first, output, rtol=1e-5, atol=1e-6)


def test_padding_is_never_seen(head: EagleHead) -> None:
    """Whatever stands on the right of a chat, no step says anything else within it."""
    features, tokens, _, _ = inputs(head)
    before = unroll(head, features, tokens, 3)
    features[:, 6:], tokens[:, 6:] = 3.0, 0
    after = unroll(head, features, tokens, 3)
    for ours, theirs in zip(before, after, strict=True):
        torch.testing.assert_close(ours[:, :6], theirs[:, :6])


def test_sums_are_the_published_losses(head: EagleHead) -> None:
    """Smooth-L1 a position, cross-entropy under the target's distribution, and agreement."""
    features, tokens, wanted, counted = inputs(head)
    sums = HeadLosses(head, LossWeights())(features, tokens, wanted, counted)
    predicted = unroll(head, features, tokens, 1)[0][counted]
    target = head._shared.model.lm_head(wanted[counted])
    draft = head._shared.model.lm_head(predicted)
    count = int(counted.sum())
    feature = F.smooth_l1_loss(predicted, wanted[counted]) * count
    token = F.cross_entropy(draft, target.softmax(-1), reduction="sum")
    best = target.argmax(-1, keepdim=True)
    torch.testing.assert_close(sums["feature"], feature)
    torch.testing.assert_close(sums["token"], token)
    torch.testing.assert_close(sums["loss"], feature + 0.1 * token)
    assert sums["divergence"] == 0
    assert sums["top1"] == (draft.topk(1).indices == best).sum()
    assert sums["top3"] == (draft.topk(3).indices == best).sum()


@pytest.mark.parametrize("kind", DIVERGENCE_LOSSES)
def test_the_divergence_is_the_one_fsd_accepts_by(kind: str, head: EagleHead) -> None:
    features, tokens, wanted, counted = inputs(head)
    weights = LossWeights(feature=0.0, token=0.0, divergence=2.0, kind=kind)
    sums, found = gradients(HeadLosses(head, weights), (features, tokens, wanted, counted))
    draft = head.readout(unroll(head, features, tokens, 1)[0][counted])
    expected = DIVERGENCES[kind](head.readout(wanted[counted]), draft).sum()
    torch.testing.assert_close(sums["divergence"], expected)
    torch.testing.assert_close(sums["loss"], 2 * expected)
    assert any(gradient.abs().max() > 0 for gradient in found.values())


def test_steps_are_weighted_and_averaged(head: EagleHead) -> None:
    """A step counts ``decay`` of the one before, only where it was predicted from something."""
    features, tokens, wanted, counted = inputs(head)
    counted[:, 0] = True
    sums = HeadLosses(head, LossWeights(steps=3, decay=0.5))(features, tokens, wanted, counted)
    expected = torch.zeros(())
    outputs = unroll(head, features, tokens, 3)
    for step, share in enumerate((4 / 7, 2 / 7, 1 / 7)):
        valid = counted.clone()
        valid[:, :step] = False
        loss = F.smooth_l1_loss(outputs[step][valid], wanted[valid], reduction="none")
        expected = expected + share * loss.mean(-1).sum()
    torch.testing.assert_close(sums["feature"], expected)
    alone = HeadLosses(head, LossWeights())(features, tokens, wanted, counted)
    assert sums["top1"] == alone["top1"]
    assert sums["top3"] == alone["top3"]


@pytest.mark.parametrize(
    "options",
    [{}, {"divergence": 1.0}, {"steps": 3, "divergence": 1.0, "kind": "tv"}],
    ids=["published", "divergence", "all"],
)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_chunked_readout_changes_nothing(
    rows: int, options: dict[str, Any], head: EagleHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, given = HeadLosses(head, LossWeights(**options)), inputs(head)
    sums, whole = gradients(losses, given)
    monkeypatch.setattr(module, "READOUT_ROWS", rows)
    chunked_sums, chunked = gradients(losses, given)
    for name, value in sums.items():
        torch.testing.assert_close(chunked_sums[name], value)
    for name, gradient in whole.items():
        assert (chunked[name] - gradient).norm() <= 1e-5 * gradient.norm()


def test_the_readout_is_chunked_indeed(head: EagleHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more rows of the vocabulary than that in memory."""
    monkeypatch.setattr(module, "READOUT_ROWS", 4)
    seen: list[int] = []
    whole = EagleHead.readout

    def watched(self: EagleHead, features: Tensor) -> Tensor:
        seen.append(len(features))
        return whole(self, features)

    monkeypatch.setattr(EagleHead, "readout", watched)
    HeadLosses(head, LossWeights())(*inputs(head))
    assert max(seen) == 4


def sharp_pairs() -> Iterator[tuple[str, Tensor, Tensor]]:
    """Log-probabilities of target and draft that are all but one-hot, alike and apart."""
    flat = torch.zeros(VOCABULARY)
    peak = torch.zeros(VOCABULARY).index_fill(0, torch.tensor(3), 1.0)
    other = peak.roll(5)
    for scale in (50.0, 1e4, 1e30):
        yield f"same peak {scale:g}", scale * peak, scale * peak
        yield f"other peak {scale:g}", scale * peak, scale * other
        yield f"peak and flat {scale:g}", scale * peak, flat
        yield f"flat and peak {scale:g}", flat, scale * peak
    yield "flat", flat, flat


@pytest.mark.parametrize("kind", DIVERGENCE_LOSSES)
@pytest.mark.parametrize(
    ("target", "draft"), [pair[1:] for pair in sharp_pairs()], ids=[p[0] for p in sharp_pairs()]
)
def test_no_distribution_breaks_the_losses(
    target: Tensor, draft: Tensor, kind: str, head: EagleHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and gradients are finite for the log-softmax of any finite logits."""
    size = head.config.hidden_size
    wanted = torch.zeros(1, size)
    predicted = torch.ones(1, size, requires_grad=True)

    def logits(features: Tensor) -> Tensor:
        mine = draft + 0 * features.sum(-1, keepdim=True)
        logits = torch.where(features.sum(-1, keepdim=True) > 0, mine, target)
        return (logits + features[..., :1] * torch.arange(VOCABULARY)).log_softmax(-1)

    monkeypatch.setattr(head, "readout", logits)
    losses = HeadLosses(head, LossWeights(divergence=1.0, kind=kind))
    sums = losses._compare(predicted, wanted)
    for value in sums.values():
        assert value.isfinite()
    (sums["token"] + sums["divergence"]).backward()
    assert predicted.grad is not None
    assert predicted.grad.isfinite().all()


@pytest.mark.parametrize("steps", [1, 3])
def test_where_nothing_counts_loss_and_gradients_are_zero(steps: int, head: EagleHead) -> None:
    """Still a gradient for every parameter: a parallel wrapper waits for them."""
    features, tokens, wanted, counted = inputs(head)
    weights = LossWeights(divergence=1.0, steps=steps)
    given = features, tokens, wanted, torch.zeros_like(counted)
    sums, found = gradients(HeadLosses(head, weights), given)
    assert all(value == 0 for value in sums.values())
    assert all((gradient == 0).all() for gradient in found.values())


def test_a_chat_shorter_than_the_steps(head: EagleHead) -> None:
    """Two pairs and four runs: the last ones have nothing to say."""
    features, tokens, wanted, _ = inputs(head)
    given = features[:, :2], tokens[:, :2], wanted[:, :2], torch.ones(ROWS, 2, dtype=torch.bool)
    sums, found = gradients(HeadLosses(head, LossWeights(steps=4)), given)
    assert sums["loss"].isfinite()
    assert all(gradient.isfinite().all() for gradient in found.values())


def test_only_the_head_learns(head: EagleHead) -> None:
    losses = HeadLosses(head, LossWeights(divergence=1.0))
    gradients(losses, inputs(head))
    names = {name for name, _ in losses.named_parameters()}
    assert names == {f"head.{name}" for name in head.state_dict()}
    assert all(parameter.grad is None for parameter in head._shared.model.parameters())
