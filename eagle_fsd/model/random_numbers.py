"""Random numbers that depend on the seed, the row's number and the tokens before them.

Those for sampled chains also depend on where steps begin. The hash is the finalizer of SplitMix64
(Steele et al., OOPSLA 2014, doi 10.1145/2660193.2660195), in 64-bit integers that wrap around.

Shape letters: ``B`` rows, ``N`` tree nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

from eagle_fsd.model.tree import DraftTree
from eagle_fsd.model.verify import Verification

#: Odd constants of SplitMix64, as signed integers.
GAMMA = 0x9E3779B97F4A7C15 - 2**64
FACTORS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


class Purpose(IntEnum):
    """What a random number is used for."""

    TARGET = 0  #: the target's sample at a node
    DRAFT = 1  #: a sample from the draft's distribution at a node
    RULE = 2  #: the acceptance rule
    CHAIN = 3  #: a drafted token of a sampled chain
    ACCEPT = 4  #: whether a token of a sampled chain is accepted
    RESIDUAL = 5  #: the token that replaces a rejected one


@dataclass(frozen=True)
class RandomNumbers:
    """The random numbers of one step.

    ``keys`` ``[B]`` are int64 hashes of the seed, the row's number and the tokens before the root,
    from the prompt's last one on. The root is at ``positions`` ``[B]``.
    """

    keys: Tensor
    positions: Tensor

    def node_keys(self, tree: DraftTree) -> Tensor:
        """Return ``[B, N]`` int64: a hash of the answer up to every node."""
        own = token_keys(tree.tokens, self.positions[:, None] + tree.depths)
        return self.keys[:, None] + torch.where(tree.ancestors, own[:, None, :], 0).sum(-1)

    def in_step(self, purpose: Purpose, count: int) -> Tensor:
        """Return ``[B, count]`` float64: numbers that no other step of a row uses."""
        index = torch.arange(count, device=self.keys.device)
        return uniform(mix(self.keys + self.positions)[:, None] + index, purpose)

    def next_keys(self, tree: DraftTree, kept: Verification) -> Tensor:
        """Return the keys ``[B]`` of the next step, which also hash the kept path."""
        steps = torch.arange(kept.path.shape[1], device=self.keys.device)
        own = token_keys(tree.tokens.gather(1, kept.path), self.positions[:, None] + steps)
        return self.keys + torch.where(steps < kept.count[:, None], own, 0).sum(1)


def mix(values: Tensor) -> Tensor:
    """Hash int64 values, one to one."""
    values = (values ^ _shifted(values, 30)) * FACTORS[0]
    values = (values ^ _shifted(values, 27)) * FACTORS[1]
    return values ^ _shifted(values, 31)


def token_keys(tokens: Tensor, positions: Tensor) -> Tensor:
    """Hash tokens at positions; the sum over a sequence is the sequence's hash."""
    return mix(mix(positions * GAMMA) + tokens)


def uniform(keys: Tensor, purpose: Purpose) -> Tensor:
    """Return float64 random numbers in ``[0, 1)`` for int64 keys."""
    return _shifted(mix(mix(keys) + int(purpose) + 1), 11).double() * 2.0**-53


@lru_cache(maxsize=4)
def seed_keys(seed: int, rows: int) -> Tensor:
    """Return ``[B]`` keys of answers without tokens, which do not depend on the number of rows."""
    generator = torch.Generator().manual_seed(seed)  # which reads the lower 32 bits
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator, device="cpu")
    return mix(keys ^ (seed >> 32)) if seed >> 32 else keys


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shift right, filling in zeros."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
