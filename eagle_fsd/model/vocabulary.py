"""Distributions over large vocabularies, without normalized copies of the logits.

Operations on whole rows process a few rows at a time: about :data:`CHUNK` values on a CPU,
:data:`DEVICE_CHUNK` elsewhere. In code that ``torch.compile`` traces, they process all rows at
once, because the compiler fuses the operations.

Shape letters: ``B`` rows, ``N`` nodes, ``V`` vocabulary, ``Q`` queried (node, token) pairs, ``R``
flattened ``B * N`` nodes or some of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

#: Values that are processed together on a CPU, where they fit into a core's cache, and elsewhere.
CHUNK = 2**18
DEVICE_CHUNK = 2**21
#: Log-probabilities are clamped to it, because ``exp`` returns denormal numbers below -87.34, with
#: which a CPU computes slowly.
MIN_LOG_PROB = -87.0
#: Probabilities below it are 0, that of :data:`MIN_LOG_PROB` included.
MIN_PROB = 1e-37
#: Values in a block, of which sums or maxima are taken before one block is searched; a power of 2.
BLOCK = 256
#: Up to this number of values, :func:`arg_max` calls ``torch.argmax``, except in compiled code.
SMALL_SIZE = 2**15
#: Up to this size of the vocabulary, ``torch.topk`` is about as fast as searching the best blocks.
SMALL_VOCABULARY = 4096
#: The cut of top-p is located to this fraction of an interval, as a power of 1/2.
RESOLUTION_BITS = 24
#: Sizes of the histograms for this, as powers of 2; the largest within the vocabulary is used.
HISTOGRAM_BITS = (12, 8, 6, 4, 3)
#: Units of the integer masses of these histograms.
MASS_UNITS = 2.0**40


@dataclass(frozen=True)
class Distributions:
    """Distributions at the nodes of trees, as logits and three numbers per node.

    With ``d(x) = z(x) / temperature - peak``, which is at most 0, ``log p(x) = d(x) - log_total``
    where ``d(x) >= -radius``, and ``-inf`` elsewhere.
    """

    logits: Tensor  # [B, N, V] float32 z; -inf for tokens that processors masked
    peak: Tensor  # [B, N] the largest of z / temperature
    log_total: Tensor  # [B, N] log of the sum of exp d over the support; NaN for broken logits
    temperature: float = 1.0
    radius: Tensor | None = None  # [B, N] nats below the most likely token; None: all tokens

    @classmethod
    def of(cls, logits: Tensor) -> Distributions:
        """Return the softmax distributions of float32 logits or log-probabilities ``[B, N, V]``."""
        flat, parts = logits.flatten(0, 1), []
        for rows in chunks(len(flat), flat):
            # One fused operation. The difference of logsumexp and the maximum would lose digits.
            largest = nn.functional.log_softmax(flat[rows], -1).amax(-1)
            parts.append((flat[rows].amax(-1), -largest))
        joined = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        peak, total = (part.view(logits.shape[:2]) for part in joined)
        return cls(logits, peak, total)

    @classmethod
    def normalized(cls, log_probs: Tensor) -> Distributions:
        """Wrap log-probabilities, without computing ``peak`` and ``max_log_prob``."""
        zero = log_probs.new_zeros(1, 1).expand(log_probs.shape[:2])
        return cls(log_probs, zero, zero)

    @property
    def max_log_prob(self) -> Tensor:
        """``[B, N]`` log-probability of the most likely token at each node."""
        return -self.log_total

    def log_prob(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Look up log-probabilities ``[B, Q]`` of tokens ``[B, Q]`` at nodes ``[B, Q]``."""
        index = nodes * self.logits.shape[-1] + tokens
        values = self.logits.flatten(1).gather(1, index)
        radius = None if self.radius is None else self.radius.gather(1, nodes)
        return self._normalize(
            values, self.peak.gather(1, nodes), self.log_total.gather(1, nodes), radius
        )

    def rows(self, index: Tensor) -> Tensor:
        """Return log-probabilities ``[R, V]`` at nodes ``[R]``, numbered ``row * N + node``."""
        radius = None if self.radius is None else self.radius.flatten()[index][:, None]
        return self._normalize(
            self.logits.flatten(0, 1).index_select(0, index),
            self.peak.flatten()[index][:, None],
            self.log_total.flatten()[index][:, None],
            radius,
        )

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a function from ``[R, V]`` log-probabilities to ``[R]`` at every node."""
        nodes = torch.arange(self.peak.numel(), device=self.peak.device)
        parts = [function(self.rows(nodes[rows])) for rows in chunks(len(nodes), self.logits)]
        return torch.cat(parts).view_as(self.peak)

    def _normalize(
        self, values: Tensor, peak: Tensor, log_total: Tensor, radius: Tensor | None
    ) -> Tensor:
        below = scaled(values, self.temperature) - peak
        if radius is None:
            return below.sub_(log_total)
        return (below - log_total).masked_fill_(below < -radius, -torch.inf)


def chunks(rows: int, logits: Tensor) -> Iterator[slice]:
    """Split ``rows`` rows as long as those of ``logits`` into slices, see the module."""
    values = CHUNK if logits.device.type == "cpu" else DEVICE_CHUNK
    step = rows if torch.compiler.is_compiling() else values // max(logits.shape[-1], 1)
    for start in range(0, max(rows, 1), max(step, 1)):
        yield slice(start, start + max(step, 1))


def exp(log_probs: Tensor) -> Tensor:
    """Return probabilities for log-probabilities of any shape, 0 below :data:`MIN_PROB`."""
    found = log_probs.clamp_min(MIN_LOG_PROB).exp_()
    return nn.functional.threshold(found, MIN_PROB, 0.0, inplace=True)


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits by a temperature above 0, without a copy if it is 1."""
    return logits if temperature == 1.0 else logits / temperature


def arg_max(values: Tensor) -> Tensor:
    """Return the index of the largest of ``[..., V]``, the first of several; fast for large V."""
    if values.numel() <= SMALL_SIZE and not torch.compiler.is_compiling():
        return values.argmax(-1)  # one operation instead of eleven
    blocks = _in_blocks(values)
    block = blocks.amax(-1).argmax(-1, keepdim=True)  # [..., 1]
    inside = _take_block(blocks, block).argmax(-1)
    return block[..., 0] * blocks.shape[-1] + inside


def top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest of ``[..., V]`` and their indices, as ``torch.topk`` does.

    Faster for large ``V`` and small ``k``: they are in the ``k`` blocks with the largest maxima.
    """
    blocks = _in_blocks(values)
    count, size = blocks.shape[-2:]
    if values.shape[-1] <= SMALL_VOCABULARY or 4 * k > count or size == 1:
        found = values.max(-1, keepdim=True) if k == 1 else values.topk(k)
        return found.values, found.indices
    block = blocks.amax(-1).topk(k).indices  # [..., k]
    candidates = blocks.gather(-2, block[..., None].expand(*block.shape, size))
    found = candidates.flatten(-2).topk(k)
    index = block.gather(-1, found.indices // size) * size + found.indices % size
    return found.values, index


def draw(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Sample indices ``[R]`` by inversion of the cumulative distribution; return sums ``[R]``, too.

    A float64 number in ``[0, 1)`` selects a block of the weights ``[R, V]``, then a token in it,
    which has weight unless the sum is 0 or NaN.
    """
    blocks = _in_blocks(weights)
    ends = blocks.sum(-1).double().cumsum(-1)  # [R, C]
    total, point = ends[:, -1], (uniform * ends[:, -1])[:, None]
    block = (ends <= point).sum(-1, keepdim=True).clamp_max(ends.shape[1] - 1)  # [R, 1]
    end, start = ends.gather(1, block), ends.gather(1, (block - 1).clamp_min(0))
    start = torch.where(block > 0, start, 0.0)
    inner = _take_block(blocks, block).double().cumsum(-1)
    # Rounding must not move the point to the end of the block.
    share = ((point - start) / (end - start)).clamp_max(1.0 - 1e-15)
    inside = (inner <= share * inner[:, -1:]).sum(-1).clamp_max(inner.shape[1] - 1)
    return block[:, 0] * blocks.shape[-1] + inside, total


def top_p_radius(below: Tensor, weights: Tensor, top_p: float) -> Tensor:
    """Find how many nats below the most likely token the nucleus reaches ``[R]``, without sorting.

    The nucleus is the smallest set of the most likely tokens whose mass is at least ``top_p``,
    which is below 1. ``below`` ``[R, V]`` are log-probabilities relative to the largest, and
    ``weights`` ``[R, V]`` their masses. A histogram of the masses over ``below`` shows in which bin
    ``top_p`` is reached, and further ones, each of the bin found last, in which part of it. Tokens
    in the last part, about 1e-6 nats wide, are all kept. Masses are integers where additions have
    no fixed order.
    """
    size = weights.shape[-1]
    bits = next((bits for bits in HISTOGRAM_BITS if 2**bits <= size), HISTOGRAM_BITS[-1])
    bins = 2**bits
    ordered = weights.device.type == "cpu"  # the additions to a row's bins
    mass = weights.double() if ordered else (weights * MASS_UNITS).long()
    start, goal = torch.zeros_like(below[:, :1]), None
    # All tokens further below together have at most the mass 1 - top_p. The width must not
    # be 0, as it would be for a single token and a tiny top_p.
    width = math.log(max(size, 2) / (1.0 - top_p))
    # Bin 0 holds likelier tokens than the interval. Less likely ones, which are most, are spread
    # over `spare` bins behind it: additions to a single one would wait for each other.
    spare = _block_size(size)
    last = torch.arange(bins + 1, bins + 1 + spare, dtype=torch.float32, device=below.device)
    for _ in range(RESOLUTION_BITS // bits):
        first = 1.0 - start * (bins / width)
        place = torch.add(first, below, alpha=-bins / width)
        place.unflatten(-1, (-1, spare)).clamp_max_(last)
        index = place.long().clamp_min_(0)  # NaN may become negative
        masses = mass.new_zeros(len(mass), bins + 1 + spare).scatter_add_(1, index, mass)
        ends = masses.cumsum(1)
        if goal is None:
            goal = ends[:, -1:].double() * top_p
        width /= bins
        start = start + width * ((ends < goal).sum(1, keepdim=True) - 1).clamp_min(0)
    # One part more than needed, because the edges are rounded.
    return start[:, 0] + 2.0 * width


@dataclass(frozen=True)
class Warp:
    """Temperature, then top-k, top-p and min-p, as the warpers of transformers apply them.

    Of tokens as likely as the last of the ``top_k``, all are kept; for ``top_p``, see
    :func:`top_p_radius`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __call__(self, logits: Tensor, uniform: Tensor) -> tuple[Distributions, Tensor]:
        """Warp logits ``[B, N, V]``, and sample tokens with float64 random numbers ``[B, N]``."""
        flat, shape, points = logits.flatten(0, 1), logits.shape[:2], uniform.flatten()
        parts = [self._rows(flat[rows], points[rows]) for rows in chunks(len(flat), flat)]
        peak, log_total, radius, tokens = (
            torch.cat(part).view(shape) for part in zip(*parts, strict=True)
        )
        cut = self.top_k or self.top_p < 1.0 or self.min_p
        law = Distributions(
            logits, peak, log_total, temperature=self.temperature, radius=radius if cut else None
        )
        return law, tokens

    def _rows(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return peak, log total, radius and sample of ``[R, V]`` logits."""
        values = scaled(logits, self.temperature)
        peak = values.amax(-1)
        # In place where possible: every further tensor takes another part of a core's cache.
        below = values - peak[:, None] if values is logits else values.sub_(peak[:, None])
        weights = exp(below)
        pool, radius = below, torch.full_like(peak, torch.inf)
        if 0 < self.top_k < below.shape[1]:
            pool = top_k(below, self.top_k)[0]
            radius = -pool[:, -1]
        if self.top_p < 1.0:
            masses = weights if pool is below else exp(pool)
            radius = torch.minimum(radius, top_p_radius(pool, masses, self.top_p))
        if self.min_p > 0.0:
            radius = radius.clamp_max(-math.log(self.min_p))
        if pool is not below or self.top_p < 1.0 or self.min_p > 0.0:
            weights.mul_(below.ge_(-radius[:, None]))
        token, total = draw(weights, uniform)
        return peak, total.log().float(), radius, token


def _in_blocks(values: Tensor) -> Tensor:
    """View ``[..., V]`` as ``[..., V / size, size]``, with a size that divides ``V``."""
    return values.unflatten(-1, (-1, _block_size(values.shape[-1])))


def _block_size(size: int) -> int:
    """Return ``gcd(size, BLOCK)``; ``torch.compile`` cannot trace ``math.gcd`` of dynamic sizes."""
    block = BLOCK
    while size % block:
        block //= 2
    return block


def _take_block(blocks: Tensor, block: Tensor) -> Tensor:
    """Look up block ``[..., 1]`` of ``[..., C, size]``: ``[..., size]``."""
    index = block[..., None].expand(*block.shape, blocks.shape[-1])
    return blocks.gather(-2, index)[..., 0, :]
