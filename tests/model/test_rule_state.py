"""Rules with a state per row, through whole calls: rows are independent, and limits hold."""

from __future__ import annotations

import pytest
import torch
from pairs import batch, random_pair
from torch import Tensor

from eagle_fsd import AcceptanceConfig, EagleFSD, Origin
from eagle_fsd.model.acceptance import DelayedRule, FuzzyRule, LimitedRule, PhaseRule, RegretRule
from eagle_fsd.model.verify import AcceptanceRule

ALWAYS = FuzzyRule(10.0)
#: Rows end after different numbers of steps, so they are dropped and moved.
ENDS = list(range(0, 96, 7))
NEW_TOKENS = 40


def _spent(pair: EagleFSD, prompt: Tensor, answer: Tensor, origins: Tensor) -> float:
    """Sum of ``max log p - log p(x)`` over an answer's fuzzy tokens, by a plain forward pass."""
    ids = torch.cat([prompt, answer])[None]
    with torch.no_grad():
        log_probs = pair.model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    regret = log_probs.amax(-1) - log_probs.gather(1, answer[:, None])[:, 0]
    return float(regret[origins == Origin.FUZZY].sum())


@pytest.mark.parametrize(
    "rule",
    [
        LimitedRule(RegretRule(1.0), 6.0),
        PhaseRule(LimitedRule(ALWAYS, 6.0), 5, 9),
        LimitedRule(DelayedRule(ALWAYS, 7), 6.0),
    ],
    ids=["limited", "phase", "delayed"],
)
def test_state_follows_its_row(rule: AcceptanceRule) -> None:
    """A batch gives the same answers as its rows by themselves."""
    pair = random_pair()
    ids, mask = batch()
    options = {"max_new_tokens": NEW_TOKENS, "rule": rule, "eos_token_id": ENDS}
    together = pair.generate(ids, mask, **options)
    new = together.sequences[:, ids.shape[1] :]
    lengths = set()
    for row, (tokens, real) in enumerate(zip(ids, mask.bool(), strict=True)):
        alone = pair.generate(tokens[real][None], **options)
        count = alone.origins.shape[1]
        lengths.add(count)
        assert torch.equal(new[row, :count], alone.sequences[0, int(real.sum()) :])
        assert torch.equal(together.origins[row, :count], alone.origins[0])
    assert len(lengths) > 1


@pytest.mark.parametrize("options", [{}, {"selection": "target"}, {"rule": "mixture 0.5"}])
def test_the_first_tokens_are_exact(options: dict[str, str]) -> None:
    """As many as ``exact_first`` says, and not one more."""
    pair = random_pair()
    ids, mask = batch()
    rule = {} if "rule" in options else {"threshold": 10.0}

    def answers(**acceptance: object) -> tuple[Tensor, Tensor]:
        out = pair.generate(
            ids,
            mask,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=[],
            acceptance=AcceptanceConfig.from_dict(acceptance),
        )
        return out.sequences[:, ids.shape[1] :], out.origins

    exact, _ = answers()
    for count in (1, 4, NEW_TOKENS):
        tokens, origins = answers(**options, **rule, exact_first=count)
        assert torch.equal(tokens[:, :count], exact[:, :count])
        assert not (origins[:, :count] == Origin.FUZZY).any()
        assert count == NEW_TOKENS or not torch.equal(tokens, exact)
    if not options:
        assert (answers(**rule, exact_first=4)[1][:, 4] == Origin.FUZZY).any()


def test_fuzzy_tokens_of_an_answer_stay_within_the_limit() -> None:
    """``max_fuzzy_nats`` limits the whole answer; without it much more is given up, with 0 none."""
    pair = random_pair()
    ids, mask = batch()
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": []}

    def spent(acceptance: AcceptanceConfig) -> list[float]:
        out = pair.generate(ids, mask, acceptance=acceptance, **options)
        answers = out.sequences[:, ids.shape[1] :]
        return [
            _spent(pair, ids[row, real], answers[row], out.origins[row])
            for row, real in enumerate(mask.bool())
        ]

    for selection, limit in (("longest", 20.0), ("priced", 3.0)):
        free = AcceptanceConfig(threshold=10.0, selection=selection, price=0.1)
        limited = spent(free.updated(max_fuzzy_nats=limit))
        assert 0.5 * limit <= max(limited) <= limit + 1e-3
        assert min(spent(free)) > 20.0
    exact = pair.generate(ids, mask, threshold=0.0, **options)
    none = AcceptanceConfig(threshold=10.0, max_fuzzy_nats=0.0)
    assert torch.equal(
        pair.generate(ids, mask, acceptance=none, **options).sequences, exact.sequences
    )
