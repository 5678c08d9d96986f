"""Measure how a drafter's distributions agree with its target's, as it is and with one change.

The agreement at a position is the probability with which speculative sampling at temperature 1
accepts a token drafted from ``q`` where the target has ``p`` (Leviathan et al., arXiv 2211.17192),
``sum_v min(p(v), q(v))``.

Shape letters: ``S`` tokens of a sequence, ``T`` answer tokens of all sequences, ``K`` most likely
tokens of the target, ``H`` hidden size of the target, ``D`` tokens of the draft's vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from eagle_fsd.evaluation.doctor.settings import Change, map_change, other_reads
from eagle_fsd.model.drafters.levels import LevelDrafter
from eagle_fsd.model.target import LAST, Target

#: Maximum number of positions whose distributions are in memory at once.
CHUNK = 512
#: ``K``: the sum is taken over these tokens only.
TOP_TOKENS = 32


class Agreement:
    """A drafter's agreement before each answer token, when it reads the target's own states.

    ``answers`` are ``[S]`` token ids with the number of prompt tokens. ``truth`` holds their answer
    tokens, ``[T]``, and ``positions`` the number of tokens before each.
    """

    def __init__(
        self, drafter: LevelDrafter, target: Target, answers: Sequence[tuple[Tensor, int]]
    ) -> None:
        self.drafter, self.target = drafter, target
        self._sequences = answers
        self.truth = torch.cat([ids[start:] for ids, start in self._sequences])
        self.positions = torch.cat(
            [torch.arange(start, len(ids), device=ids.device) for ids, start in self._sequences]
        )

    @cached_property
    @torch.no_grad()
    def _states(self) -> list[dict[int, Tensor]]:
        """The hidden states of each sequence that any setting reads, ``[S, H]`` by index."""
        target, others = self.target, other_reads(self.drafter, self.target)
        indices = sorted({LAST, *self.drafter.reads, *sum(others, ())})
        found = []
        for ids, _ in self._sequences:
            features = target.prefill(ids[None], 0, target.new_cache(1, len(ids)), indices)[0]
            found.append(dict(zip(indices, features.split(target.hidden_size, -1), strict=True)))
        return found

    @cached_property
    @torch.no_grad()
    def _expected(self) -> tuple[Tensor, Tensor]:
        """``[T, K]`` probabilities and ids of the target's most likely tokens."""
        pairs = zip(self._sequences, self._states, strict=True)
        rows = torch.cat([states[LAST][start - 1 : -1] for (_, start), states in pairs])
        count = min(TOP_TOKENS, self.target.vocab_size)
        parts = (self.target.project(part).softmax(-1).topk(count) for part in rows.split(CHUNK))
        values, indices = zip(*parts, strict=True)
        return torch.cat(values), torch.cat(indices)

    @torch.no_grad()
    def _drafts(self) -> Iterator[Tensor]:
        """Yield the drafter's log-probabilities before the answer tokens, ``[n, D]`` at a time."""
        drafter = self.drafter
        for (ids, start), states in zip(self._sequences, self._states, strict=True):
            size, tokens = len(ids), ids[None]
            features = torch.empty(1, size, 0, device=ids.device)
            if drafter.reads:
                features = torch.cat([states[index] for index in drafter.reads], -1)[None, :-1]
                tokens = tokens[:, 1:]
            lengths = tokens.new_zeros(1)
            cache = drafter.new_cache(1, size)
            keys = cache.keys(size, ids.device)
            hidden = drafter.append(features, tokens, lengths, keys=keys, cache=cache)[0]
            # The last output predicts the token after the sequence.
            for rows in hidden[start - size - 1 : -1].split(CHUNK):
                yield drafter.log_probs(rows)

    def measure(self, *changes: Change) -> Tensor:
        """Return the agreement, ``[T]``, while changes apply; NaN where a distribution has NaN."""
        expected, known = self._expected
        parts, done = [], 0
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
        try:
            for owner, name, value in changes:
                setattr(owner, name, value)
            if (ids := self.drafter.token_ids) is not None:
                entries = ids.new_full((self.target.vocab_size + 1,), -1)  # last: of negative ids
                entries[ids.clamp_min(-1)] = torch.arange(len(ids), device=ids.device)
                known = entries[known]  # [T, K] the draft's entries; -1 if it lacks the token
            for log_probs in self._drafts():
                wanted = known[done : done + len(log_probs)]
                probs = log_probs.gather(-1, wanted.clamp_min(0)).exp()
                parts.append(probs.where(wanted >= 0, 0.0))
                done += len(log_probs)
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)
        return torch.minimum(expected, torch.cat(parts)).sum(-1)

    @cached_property
    def own(self) -> Tensor:
        """``[T]`` the drafter's agreement as it is; NaN where a distribution has NaN."""
        return self.measure()

    @cached_property
    def mean(self) -> float:
        """The mean agreement, where NaN counts as 0."""
        return float(self.own.nan_to_num(0.0).mean())

    @cached_property
    def chance(self) -> float:
        """The mean agreement of a constant prediction, the target's mean distribution."""
        probs, tokens = self._expected
        mean = probs.new_zeros(self.target.vocab_size)
        mean.index_add_(0, tokens.flatten(), probs.flatten() / len(probs))
        return float(torch.minimum(probs, mean[tokens]).sum(-1).mean())

    def with_estimated_map(self) -> Tensor:
        """Return the agreement, ``[T]``, with a vocabulary map estimated from the answers.

        Each half of the answers is measured with the most frequent tokens of the other half.
        """
        best = torch.cat([log_probs.argmax(-1) for log_probs in self._drafts()])
        first = torch.arange(len(best), device=best.device) < len(best) // 2
        own = self.drafter.token_ids
        found = []
        for fitted in (first, ~first):
            pairs = torch.stack([best[fitted], self.truth[fitted]])
            pairs, counts = pairs.unique(dim=1, return_counts=True)
            # Of several pairs with the same entry, the last one remains.
            tokens = dict(zip(*pairs[:, counts.argsort()].tolist(), strict=True))
            before = range(self.drafter.vocab_size) if own is None else own.tolist()
            ids = [tokens.get(entry, token) for entry, token in enumerate(before)]
            found.append(self.measure(map_change(self.drafter, best.new_tensor(ids))))
        return found[1].where(first, found[0])
