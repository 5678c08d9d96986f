"""Divergences against independent float64 formulas, their ranges, and their bucketed variants."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from eagle_fsd.model.divergence import DIVERGENCES, TOP_K, TOP_P

Array = NDArray[np.float64]
BASE = ("js", "js_reference", "kl", "kl_reversed", "tv")
#: ln 2 in float32, 2e-9 above ln 2 itself.
LN2 = float(np.float32(math.log(2.0)))
#: Upper bounds of the documented ranges.
MAXIMUM = {"js": LN2, "tv": 1.0}
#: Close to the largest finite float32; the difference of two such logits overflows.
HUGE = float(np.float32(3e38))

#: Any finite logits, including extreme ones.
finite = st.floats(-HUGE, HUGE, width=32) | st.sampled_from([0.0, -HUGE, HUGE, 1.0, -90.0, -1e4])


@st.composite
def logit_pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Two rows of finite logits; a vocabulary of 60 is larger than ``TOP_K``."""
    size = draw(st.sampled_from([2, 3, 7, 60]))
    row = st.lists(finite, min_size=size, max_size=size)
    return torch.tensor(draw(row)), torch.tensor(draw(row))


def _kl(a: Array, b: Array) -> float:
    """``KL(a||b)`` of probabilities; terms with ``a = 0`` are zero."""
    kept = a > 0
    return float(np.sum(a[kept] * np.log(a[kept] / b[kept])))


def _half_kl_sum(p: Array, q: Array) -> float:
    middle = (p + q) / 2
    return 0.5 * _kl(p, middle) + 0.5 * _kl(q, middle)


def _reversed_half_kl_sum(p: Array, q: Array) -> float:
    middle = (p + q) / 2
    return 0.5 * _kl(middle, p) + 0.5 * _kl(middle, q)


#: The formulas over float64 probabilities.
EXPECTED: dict[str, Callable[[Array, Array], float]] = {
    "js": _half_kl_sum,
    "js_reference": _reversed_half_kl_sum,
    "kl": lambda p, q: _kl(q, p),
    "kl_reversed": lambda p, q: _kl(p, q),
    "tv": lambda p, q: 0.5 * float(np.abs(p - q).sum()),
}


def _softmax(logits: Array) -> Array:
    exponent = np.exp(logits - logits.max())
    return exponent / exponent.sum()


def _top_k_bucket(p: Array, q: Array) -> tuple[Array, Array]:
    """The target's best ``TOP_K`` tokens, then everything else as one event.

    The draft decides between tokens that the target ranks equally.
    """
    order = sorted(range(len(p)), key=lambda token: (-p[token], -q[token]))
    return tuple(np.append(x[order[:TOP_K]], x[order[TOP_K:]].sum()) for x in (p, q))


def _top_p_bucket(p: Array, q: Array) -> tuple[Array, Array]:
    """The fewest best tokens whose mass reaches ``TOP_P``, then everything else as one event.

    Tokens that the target ranks equally are inside together.
    """
    order = sorted(range(len(p)), key=lambda token: -p[token])
    size, mass = 0, 0.0
    while mass < TOP_P:
        mass += p[order[size]]
        size += 1
    while size < len(p) and p[order[size]] == p[order[size - 1]]:
        size += 1
    return tuple(np.append(x[order[:size]], x[order[size:]].sum()) for x in (p, q))


def _base(name: str) -> str:
    return name.removeprefix("top_k_").removeprefix("top_p_")


#: The probabilities that the variants compare.
BUCKETS = {"top_k_": _top_k_bucket, "top_p_": _top_p_bucket}


def _random_pair(seed: int, size: int, scale: float = 2.0) -> tuple[Array, Array]:
    random = np.random.default_rng(seed)
    return random.normal(0, scale, size), random.normal(0, scale, size)


def _measure(name: str, p_logits: Array, q_logits: Array) -> float:
    log_p, log_q = (
        F.log_softmax(torch.tensor(logits), -1).float() for logits in (p_logits, q_logits)
    )
    return DIVERGENCES[name](log_p, log_q).item()


@pytest.mark.parametrize("name", BASE)
def test_divergence_matches_float64_formula(name: str) -> None:
    """20 random pairs from flat to peaked; with at most 50 tokens nothing is left for ``top_k``."""
    for size in (2, 8, 50, 51, 400):
        for seed in range(20):
            p, q = _random_pair(seed, size, scale=0.2 + 0.3 * seed)
            expected = EXPECTED[name](_softmax(p), _softmax(q))
            assert _measure(name, p, q) == pytest.approx(expected, rel=2e-5, abs=2e-6)
        for seed in range(10):
            p, q = _random_pair(seed, size)
            for prefix, bucket in BUCKETS.items():
                expected = EXPECTED[name](*bucket(_softmax(p), _softmax(q)))
                assert _measure(prefix + name, p, q) == pytest.approx(expected, rel=5e-5, abs=2e-6)


def test_divergence_reduces_the_last_dimension() -> None:
    """``[B, N, V]`` gives ``[B, N]`` float32, also of half precision; rows are independent."""
    generator = torch.Generator().manual_seed(3)
    log_p, log_q = torch.randn(2, 2, 3, 70, generator=generator).log_softmax(-1).bfloat16()
    for divergence in DIVERGENCES.values():
        value = divergence(log_p, log_q)
        assert (value.shape, value.dtype) == ((2, 3), torch.float32)
        assert torch.equal(value, divergence(log_p.float(), log_q.float()))
        alone = divergence(log_p[1, 2], log_q[1, 2])
        torch.testing.assert_close(value[1, 2], alone, rtol=1e-6, atol=1e-7)


@settings(max_examples=30)
@given(logit_pairs())
def test_divergence_of_finite_logits_is_finite_and_in_range(pair: tuple[Tensor, Tensor]) -> None:
    """Divergences are finite where a log-probability underflows, and 0 for equal inputs."""
    log_p, log_q = (F.log_softmax(logits, -1) for logits in pair)
    for name, divergence in DIVERGENCES.items():
        value = divergence(log_p, log_q).item()
        assert math.isfinite(value), name
        assert 0.0 <= value <= MAXIMUM.get(_base(name), math.inf), name
        assert divergence(log_p, log_p.clone()).item() == pytest.approx(0.0, abs=1e-6), name


def _tied_pair(seed: int, size: int, levels: int) -> tuple[Array, Array]:
    """Logits of which the target's take few values: ties lie on every boundary."""
    random = np.random.default_rng(seed)
    return random.integers(0, levels, size).astype(np.float64), random.normal(0, 2, size)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 52, 200]), st.integers(1, 6), st.booleans())
def test_divergence_does_not_depend_on_the_order_of_the_vocabulary(
    seed: int, size: int, levels: int, masked: bool
) -> None:
    """Permuting the vocabulary does not change a divergence, even with tied or masked tokens."""
    p, q = _tied_pair(seed, size, levels)
    if masked:
        p[p < p.max()] = -np.inf
    order = np.random.default_rng(seed).permutation(size)
    for name in DIVERGENCES:
        expected = _measure(name, p, q)
        assert _measure(name, p[order], q[order]) == pytest.approx(expected, rel=1e-4, abs=1e-6)
