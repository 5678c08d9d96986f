"""Grow draft trees with a network, level by level.

Shape letters: ``B`` rows, ``S`` tokens, ``K`` nodes expanded per level, ``L`` visible slots of the
cache, ``F`` values of the features, ``H`` hidden size of the network, ``D`` tokens of its
vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle_fsd.model.cache import TreeCache, additive_mask
from eagle_fsd.model.compilation import upload
from eagle_fsd.model.config import TreeConfig
from eagle_fsd.model.drafters.interface import Drafter, DraftState
from eagle_fsd.model.plain_layers import AttentionInputs
from eagle_fsd.model.random_numbers import Purpose, RandomNumbers
from eagle_fsd.model.tree import DraftTree, Draw, TreeBuilder, single_node

if TYPE_CHECKING:
    from eagle_fsd.model.verify import Verification


class LevelDrafter(Drafter):
    """A network with a key-value cache that expands a tree level by level, as in EAGLE-2.

    An entry of its cache is, for a draft head, a pair of a feature and the token after it, for a
    draft model, a token. ``token_ids`` ``[D]`` are the target's tokens for those of the network's
    vocabulary; None if they are the same.
    """

    token_ids: Tensor | None = None

    @property
    def feature_size(self) -> int:
        """``F``, of all hidden states that the network reads; by default 0."""
        return 0

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """``D``, the number of tokens of each distribution."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the weights."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of the weights and of attention masks."""

    def fuse(self, features: Tensor) -> Tensor:
        """Convert the target's features ``[B, S, F]`` to the input ``[B, S, H]``."""
        return features

    def carry(self, hidden: Tensor) -> Tensor:
        """Convert the output ``[..., H]`` to the input at the next token."""
        return hidden

    def rotary_embedding(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Compute the rotary embedding of positions ``[B, S]``; by default, none.

        Returns tensors ``[B, S, ...]``. A draft computes it for all levels at once, and splits it.
        """
        return ()

    def append(
        self, features: Tensor, tokens: Tensor, lengths: Tensor, keys: Tensor, cache: TreeCache
    ) -> Tensor:
        """Process accepted tokens that follow those in the cache: ``[B, S, H]`` hidden states.

        ``features`` ``[B, S, F]`` are the target's before each of the ``tokens`` ``[B, S]``,
        ``lengths`` ``[B]`` the number of entries in the cache, and ``keys`` ``[L]`` a result of
        :meth:`TreeCache.keys` for ``S`` slots beyond any of them. Attention is causal.
        """
        positions = lengths[:, None] + torch.arange(tokens.shape[1], device=lengths.device)
        cache.place(positions, keys)
        mask = additive_mask(keys <= positions[:, :, None], self.dtype)
        inputs = AttentionInputs(self.rotary_embedding(positions), mask, cache)
        return self.encode(self.fuse(features), tokens, positions, inputs)

    @abstractmethod
    def encode(
        self, x: Tensor, tokens: Tensor, positions: Tensor, inputs: AttentionInputs
    ) -> Tensor:
        """Process accepted tokens, or one level of a tree: ``[B, S, H]`` hidden states.

        ``x`` ``[B, S, H]`` are results of :meth:`fuse` or :meth:`carry` before each of the
        ``tokens`` ``[B, S]``, at ``positions`` ``[B, S]``. A visible slot's position is the number
        of visible slots before it. ``inputs`` hold a result of :meth:`rotary_embedding`.
        """

    @abstractmethod
    def log_probs(self, hidden: Tensor) -> Tensor:
        """Return float32 log-probabilities ``[..., D]`` of the next token, for ``[..., H]``."""

    def check_length(self, length: int) -> None:
        """Check the number of tokens of a prompt; by default, any is fine."""
        return

    def max_nodes(self, tree: TreeConfig) -> int:
        return tree.total_tokens

    def max_expanded(self, tree: TreeConfig) -> int:
        return 1 + tree.depth * tree.top_k

    def cache_length(self, max_length: int, tree: TreeConfig) -> int:
        return max_length + tree.depth * (tree.top_k + 1) + 2

    def start(self, tree: TreeConfig, draw: Draw | None) -> LevelState:
        return LevelState(self, tree, draw)


class LevelState(DraftState):
    """The state of a :class:`LevelDrafter`.

    The entries of the tokens that the last step added stay pending until the next draft.
    """

    cache: TreeCache

    def __init__(self, drafter: LevelDrafter, tree: TreeConfig, draw: Draw | None) -> None:
        self.drafter = drafter
        self.draw = draw
        self._builders: dict[TreeConfig, TreeBuilder] = {}
        self.use(tree)
        # A feature is paired with the next token. There is none before the only token of a prompt;
        # zeros take its place.
        self.shift = 1 if drafter.reads else 0
        # A step can emit a token of each of the `depth + 1` levels, and a bonus token.
        self._width = tree.depth + 2  # A
        device, dtype = drafter.device, drafter.dtype
        # The position of the last feature, and what `show` names; a row for each of the engine's.
        self._rows: list[Tensor] = [
            *torch.zeros(3, 0, dtype=torch.long, device=device),
            torch.zeros(0, self._width, dtype=torch.long, device=device),
            torch.zeros(0, self._width, drafter.feature_size, dtype=dtype, device=device),
        ]
        self.show(0)

    def use(self, tree: TreeConfig) -> None:
        drafter = self.drafter
        if tree not in self._builders:
            self._builders[tree] = TreeBuilder(
                tree,
                drafter.vocab_size,
                drafter.device,
                token_ids=drafter.token_ids,
                draw=self.draw,
            )
        self.builder = self._builders[tree]

    def renew(self, tree: TreeConfig) -> None:
        self._builders.clear()  # the vocabulary may have changed
        self.use(tree)

    def reserve(self, rows: int, max_length: int, cache: TreeCache | None) -> None:
        assert cache is not None
        self.cache = cache
        # The network may have moved, or have another data type.
        *integers, features = (item.to(self.drafter.device) for item in self._rows)
        self._rows = [
            torch.cat([item, item.new_zeros(rows - len(item), *item.shape[1:])])
            for item in (*integers, features.to(self.drafter.dtype))
        ]
        self.show(len(self.lengths))

    def show(self, rows: int) -> None:
        _, lengths, pending, tokens, features = (tensor[:rows] for tensor in self._rows)
        self.lengths = lengths  # [B] entries in the cache
        self.pending = pending  # [B] number of pending entries
        self.pending_tokens = tokens  # [B, A]
        self.pending_features = features  # [B, A, F]

    def admit(self, first: int, prompts: Sequence[Sequence[int]]) -> None:
        self.drafter.check_length(max(map(len, prompts)))
        own = slice(first, first + len(prompts))
        last, lengths, pending, tokens, features = (item[own] for item in self._rows)
        last.copy_(upload([len(prompt) - 2 for prompt in prompts], last.device))
        lengths.copy_(last.clamp_min(0) if self.shift else last + 1)
        pending.fill_(1)
        tokens[:, 0] = upload([prompt[-1] for prompt in prompts], tokens.device)
        features.zero_()  # clear NaNs of an earlier row: an additive mask would let them through

    def prefill(self, first: int, ids: Tensor, start: int, stop: int, features: Tensor) -> None:
        last, *_, pending_features = (item[first : first + len(ids)] for item in self._rows)
        tokens = ids[:, start + self.shift : stop + self.shift]
        keys = self.cache.keys(stop, ids.device)
        with self.cache.from_row(first):
            done = torch.full_like(last, start)
            self.drafter.append(features, tokens, lengths=done, keys=keys, cache=self.cache)
        # The last pair stays pending, because the next draft needs its output.
        index = (last - start).clamp(0, stop - start - 1)[:, None, None]
        here = features.gather(1, index.expand(-1, 1, features.shape[-1]))[:, 0]  # [B, F]
        inside = ((last >= start) & (last < stop))[:, None]
        before = pending_features[:, 0]
        pending_features[:, 0] = torch.where(inside, here.to(before.dtype), before)

    def keys(self, max_length: int) -> Tensor:
        # With the pending entries, the cache holds as many as the target's, and one more in a draft
        # model or after a prompt of one token. All columns of pending entries are written, then
        # the levels of the tree after the valid ones.
        entries, builder = max_length + 1, self.builder
        needed = entries + max(self.pending_tokens.shape[1], builder.depth * builder.width)
        return self.cache.keys(needed, self.drafter.device)

    def draft(self, roots: Tensor, keys: Tensor | None, random: RandomNumbers) -> DraftTree:
        """Grow a tree: pending entries give the root's children."""
        assert keys is not None
        drafter, builder, cache = self.drafter, self.builder, self.cache
        output = drafter.append(
            self.pending_features, self.pending_tokens, lengths=self.lengths, keys=keys, cache=cache
        )
        last = (self.pending - 1)[:, None, None].expand(-1, 1, output.shape[-1])
        hidden = output.gather(1, last)  # [B, 1, H], at the root
        self.lengths.add_(self.pending)
        if builder.total_tokens == 1:
            return single_node(roots)
        depth, width, lengths = builder.depth, builder.width, self.lengths[:, None]
        points = None if self.draw is None else random.in_step(Purpose.CHAIN, depth + 1)
        builder.start(drafter.log_probs(hidden[:, 0]), points)
        steps = torch.arange(depth * width, device=lengths.device)
        positions = lengths + steps // width  # [B, depth * K]
        rotary = [part.split(width, 1) for part in drafter.rotary_embedding(positions)]
        slots = (lengths + steps).view(-1, depth, width)  # where the levels are written
        own = slots[:, None, :, :, None].unbind(2)  # one entry per level: [B, 1, K, 1]
        mask = additive_mask((keys < lengths)[:, None], drafter.dtype).expand(-1, -1, width, -1)
        hidden = hidden.expand(-1, width, -1)
        for level in range(depth):
            tokens, parents = builder.choose()
            # Every node starts from its parent's state and sees what its parent saw.
            if level and width > 1:
                index = parents[:, :, None]
                hidden = hidden.gather(1, index.expand_as(hidden))
                mask = mask.gather(2, index[:, None].expand_as(mask))
            mask = mask.scatter(3, own[level], 0.0)  # and itself; [B, 1, K, L]
            cache.place(slots[:, level], keys)
            inputs = AttentionInputs(tuple(part[level] for part in rotary), mask, cache)
            here = positions[:, level * width : (level + 1) * width]
            hidden = drafter.encode(drafter.carry(hidden), tokens, here, inputs)
            builder.extend(drafter.log_probs(hidden))
        return builder.finish(roots)

    def commit(self, features: Tensor, kept: Verification) -> None:
        index = kept.path[:, :, None].expand(-1, -1, features.shape[-1])
        width = kept.path.shape[1]  # less than A if the tree has fewer levels
        self.pending_features[:, :width] = features.gather(1, index)
        self.pending_tokens[:, :width] = kept.tokens
        self.pending.copy_(kept.count)

    def copy_rows(self, source: Sequence[int], target: Sequence[int]) -> None:
        device = self._rows[0].device
        read, written = (upload(rows, device) for rows in (source, target))
        for tensor in self._rows:
            tensor[written] = tensor[read]
