"""Operations over the vocabulary: equal to plain ones, in little memory, and traceable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pairs import (
    random_pair,
)
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig
from trees import dense, first_numbers

from eagle_fsd.model import vocabulary
from eagle_fsd.model.acceptance import rule_for
from eagle_fsd.model.config import AcceptanceConfig, SamplingConfig, TreeConfig
from eagle_fsd.model.sampling import Sampler
from eagle_fsd.model.tree import DraftTree, TreeBuilder
from eagle_fsd.model.verify import verify
from eagle_fsd.model.vocabulary import Distributions, Warp, arg_max, draw, exp, top_k

#: Vocabulary sizes: of several blocks, with small blocks, and without a common divisor with them.
SIZES = (1024, 4 * 83, 509, 7)


def _random(*shape: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 2000, vocabulary.CHUNK])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process one row at a time, a few, and all."""
    monkeypatch.setattr(vocabulary, "CHUNK", request.param)


@pytest.mark.usefixtures("_chunks")
def test_distributions_are_those_of_log_softmax() -> None:
    for size in SIZES:
        logits = _random(2, 5, size)
        logits[0, 1, 2] = -torch.inf
        logits[1, 3] += 100.0
        law, expected = Distributions.of(logits), logits.double().log_softmax(-1).float()
        torch.testing.assert_close(dense(law), expected, atol=2e-6, rtol=1e-6)
        torch.testing.assert_close(law.max_log_prob, expected.amax(-1), atol=2e-6, rtol=1e-6)
        nodes = torch.tensor([[4, 0, 1], [3, 3, 2]])
        tokens = torch.tensor([[0, size - 1, 2], [1, 2, 3]])
        found = law.log_prob(nodes, tokens)
        assert torch.equal(found, dense(law)[torch.arange(2)[:, None], nodes, tokens])
        assert found[0, 2] == -torch.inf
        sums = law.map_rows(lambda rows: exp(rows).sum(-1))
        torch.testing.assert_close(sums, torch.ones(2, 5))


def test_top_p_zero_keeps_the_most_likely_token() -> None:
    """As transformers' warper does, which accepts ``top_p=0``."""
    logits = _random(2, 3, 500)
    for warp in (Warp(top_p=0.0), Warp(top_k=1, top_p=0.0)):
        drawn = warp(logits, torch.rand(2, 3, dtype=torch.float64))[1]
        assert torch.equal(drawn, logits.argmax(-1))


@pytest.mark.parametrize("size", SIZES)
def test_largest_values_are_found(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``arg_max`` returns the first of the largest, ``top_k`` any of them."""
    monkeypatch.setattr(vocabulary, "SMALL_VOCABULARY", 0)  # also search blocks
    values = _random(20, 3, size).round()  # many ties
    values[1, 2] = -torch.inf
    expected = (values == values.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(arg_max(values), expected)
    values = _random(20, 3, size)
    values[1, 2, 1:] = -torch.inf
    for k in (1, 3, 7):
        found, index = top_k(values, k)
        assert torch.equal(found, values.topk(k).values)
        assert torch.equal(values.gather(-1, index), found)
        assert (index.sort(-1).values.diff(dim=-1) > 0).all()


@pytest.mark.parametrize("size", SIZES)
def test_draw_inverts_the_cumulative_distribution(size: int) -> None:
    """Draws invert the distribution for 10,000 numbers and never return a token without weight."""
    weights = exp(_random(1, size))
    weights[:, ::3] = 0.0
    uniform = torch.linspace(0, 1, 10_001, dtype=torch.float64)[:-1]
    tokens, total = draw(weights.expand(len(uniform), -1), uniform)
    ends = weights[0].double().cumsum(0)
    torch.testing.assert_close(total, ends[-1].expand_as(total), rtol=1e-6, atol=0.0)
    share = ends / ends[-1]
    # The boundaries of the tokens' intervals, up to the rounding of block sums in float32.
    assert (share[tokens] > uniform - 1e-6).all()
    assert (share[tokens] - weights[0, tokens] / ends[-1] <= uniform + 1e-6).all()
    assert (weights[0, tokens] > 0.0).all()
    assert (tokens.diff() >= 0).all()
    uniform = torch.tensor([0.0, 2.0**-53, 0.5, 1.0 - 2.0**-53], dtype=torch.float64)
    random = np.random.default_rng(0)
    for _ in range(50):
        weights = torch.zeros(4, size)
        kept = random.choice(size, int(random.integers(1, 4)), replace=False)
        weights[:, kept] = torch.tensor(random.random(len(kept)) + 1e-3, dtype=torch.float32)
        tokens, _ = draw(weights, uniform)
        assert set(tokens.tolist()) <= set(kept.tolist())


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("size", [509, 1024])
def test_warp_has_the_support_of_hugging_faces_warpers(size: int) -> None:
    """Peaked and nearly uniform rows keep Hugging Face's support, and all samples are inside it."""
    scale = torch.tensor([0.01, 1.0, 3.0, 10.0]).repeat(10)[:, None]
    logits = scale * _random(40, size, scale=1.0)
    uniform = torch.rand(1, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for options in (
        {},
        {"temperature": 0.3},  # probabilities down to 1e-30
        {"top_k": 20},
        {"top_p": 0.02},
        {"top_p": 0.7},
        {"top_p": 0.999},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
        {"top_k": 5000, "top_p": 0.5},
    ):
        config = GenerationConfig(do_sample=True, **{"top_k": None, **options})
        scores = logits
        for warper in random_pair().model._get_logits_processor(config, input_ids_seq_length=1):
            scores = warper(None, scores)
        law, tokens = Warp(**options)(logits[None], uniform)
        found = dense(law)[0]
        # Tokens within 2e-6 nats of the cut are kept. Hugging Face's sums are rounded, so that the
        # cut itself may be another token if both reach the mass up to about 1e-6.
        disputed = (found > -torch.inf) != (scores > -torch.inf)
        cut = torch.where(scores > -torch.inf, found, torch.inf).amin(-1, keepdim=True)
        far = disputed & ((found - cut).abs() > 4e-6)
        assert far.sum(-1).max() <= 1
        assert far.any(-1).sum() <= 1
        assert (found.gather(1, tokens.T) > -torch.inf).all()


class PeakMemory(TorchDispatchMode):
    """Record the largest number of bytes of living storages that operations made.

    Args:
        *given: Tensors to ignore.
    """

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.alive = {key: item for key, item in self.alive.items() if not item[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() in self.given:
                    continue
                self.alive[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def _tree(size: int, tokens: int = 60, rows: int = 1) -> DraftTree:
    """Grow EAGLE-2's tree over a draft with random distributions."""
    builder = TreeBuilder(TreeConfig(total_tokens=tokens, depth=6, top_k=10), size, "cpu")
    builder.start(_random(rows, size).log_softmax(-1))
    for level in range(6):
        builder.choose()
        builder.extend(_random(rows, 10, size, seed=level).log_softmax(-1))
    return builder.finish(torch.zeros(rows, dtype=torch.long))


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("js", SamplingConfig()),
        ("top_k_js", SamplingConfig(temperature=0.7)),
        ("top_p_js", SamplingConfig(temperature=1.0, top_p=0.9)),
    ],
    ids=str,
)
def test_verification_needs_little_memory_beyond_the_logits(
    name: str, sampling: SamplingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak is below 24 chunks of float32, where one ``[N, V]`` tensor would take 60."""
    size = 4096
    monkeypatch.setattr(vocabulary, "CHUNK", size)
    tree, logits = _tree(size), _random(1, 60, size)
    rule = rule_for(AcceptanceConfig(threshold=0.3, divergence=name))
    with torch.inference_mode(), PeakMemory(logits, tree.draft_log_probs) as memory:
        verify(Sampler(sampling)(tree, logits, first_numbers(0, 1)), rule)
    # A chunk of masses, their bins and a copy of them take 8 bytes per value.
    assert 3 * 4 * size < memory.peak < 24 * 4 * size, memory.peak / size / 4
