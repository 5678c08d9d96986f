"""Exact distributions of sampled tokens, and how far samples may be from them.

Distributions are enumerated in float64.

``n`` independent rows give an empirical distribution; ``TV`` is its total variation distance to the
exact distribution ``w``. If the rows really follow ``w``,

* ``E[TV] <= sum_i sqrt(w_i (1 - w_i) / n) / 2`` (Jensen), and
* ``P(TV >= E[TV] + t) <= exp(-2 n t^2)`` (McDiarmid: one row moves ``TV`` by at most ``1 / n``),

so :func:`bound` is exceeded with probability below ``FALSE_ALARM = 1e-7``. A distribution whose own
distance to ``w`` is twice the bound is detected with the same certainty. Seeds are fixed, so runs
differ only where torch's generator does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from eagle_fsd import EagleFSD, Origin

Array = NDArray[np.float64]
FALSE_ALARM = 1e-7
#: Temperature and top-p.
MODES = [(1.0, 1.0), (0.7, 0.9)]
PROMPT = (3, 1, 4)
#: Rows of a call; the time of dropping ended rows grows with its square.
BATCH = 500


def bound(law: Array, rows: int) -> float:
    """``TV`` of ``rows`` samples from ``law`` exceeds this with probability below 1e-7."""
    mean = 0.5 * np.sqrt(law * (1 - law) / rows).sum()
    return float(mean + math.sqrt(math.log(1 / FALSE_ALARM) / (2 * rows)))


def distance(counts: Array, law: Array) -> float:
    """Total variation distance between the distribution of ``counts`` and ``law``."""
    assert counts.shape == law.shape
    assert law.sum() == pytest.approx(1.0, abs=1e-9)
    return 0.5 * float(np.abs(counts / counts.sum() - law).sum())


def softmax(logits: Array) -> Array:
    exponent = np.exp(logits - logits.max(-1, keepdims=True))
    return exponent / exponent.sum(-1, keepdims=True)


def warp(logits: Array, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Array:
    """Temperature, top-k and top-p of one distribution, by definition."""
    probs = softmax(logits / temperature)
    order = np.argsort(-probs)
    if top_k:
        probs[order[top_k:]] = 0
        probs /= probs.sum()
    if top_p < 1:
        before = np.cumsum(probs[order]) - probs[order]
        # Rounding must not decide what is in the nucleus: the seeds avoid its boundary.
        assert np.abs(before[1:] - top_p).min() > 1e-4
        probs[order[before >= top_p]] = 0
        probs /= probs.sum()
    return probs


@dataclass
class Draws:
    """The answers to many copies of one prompt: token ids and origins ``[n, new]``, and steps."""

    answers: Tensor
    origins: Tensor
    accepted: list[list[int]]

    def count(self, origin: Origin) -> int:
        """Number of emitted tokens of an origin."""
        return int((self.origins == origin).sum())


def generate(
    pair: EagleFSD,
    rows: int,
    new: int,
    seed: int,
    prompt: Sequence[int] = PROMPT,
    **options: object,
) -> Draws:
    """Sample answers of ``new`` tokens, :data:`BATCH` at a time."""
    parts = []
    for start in range(0, rows, BATCH):
        ids = torch.tensor([prompt]).expand(min(BATCH, rows - start), -1)
        options["seed"] = 10_000 * seed + start
        parts.append(pair.generate(ids, max_new_tokens=new, **options))
    return Draws(
        torch.cat([part.sequences[:, len(prompt) :] for part in parts]),
        torch.cat([part.origins for part in parts]),
        [row for part in parts for row in part.stats.accepted],
    )


@torch.no_grad()
def target_law(
    model: PreTrainedModel,
    new: int,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    prompt: Sequence[int] = PROMPT,
) -> Array:
    """``[V] * new``: the distribution of the answer, from the model's logits on every answer."""
    size = model.config.vocab_size
    answers = torch.tensor(list(itertools.product(range(size), repeat=new)))
    given = torch.tensor(prompt).expand(len(answers), -1)
    logits = model(torch.cat([given, answers[:, :-1]], 1)).logits.double().numpy()
    law = np.ones(len(answers))
    for index, answer in enumerate(answers.tolist()):
        for step, token in enumerate(answer):
            law[index] *= warp(logits[index, len(prompt) - 1 + step], temperature, top_p, top_k)[
                token
            ]
    return law.reshape([size] * new)


def histogram(answers: Tensor, shape: tuple[int, ...]) -> Array:
    """Counts of the rows of ``answers`` (``[n, len(shape)]``)."""
    flat = np.ravel_multi_index(tuple(answers.T.numpy()), shape)
    return np.bincount(flat, minlength=math.prod(shape)).reshape(shape).astype(float)


def assert_target_law(draws: Draws, law: Array) -> None:
    """Compare whole answers of three tokens, the first two, and the last two, with their laws."""
    rows, counts = len(draws.answers), histogram(draws.answers, law.shape)
    assert distance(counts, law) < bound(law, rows)
    for axis in (2, 0):
        pairs = law.sum(axis)
        assert distance(counts.sum(axis), pairs) < bound(pairs, rows)
    # There were drafted tokens, and steps that accepted none.
    assert {1, 2} <= {row[0] for row in draws.accepted}
    assert draws.count(Origin.EXACT) > rows / 10
    assert draws.count(Origin.FUZZY) == 0
