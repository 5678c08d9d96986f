"""Grow draft trees with a network, level by level.

Shape letters: ``B`` rows, ``S`` tokens, ``K`` nodes expanded per level, ``L`` visible slots of the
cache, ``F`` values of the features, ``H`` hidden size of the network, ``D`` tokens of its
vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle_fsd.model.cache import TreeCache, additive_mask
from eagle_fsd.model.config import TreeConfig
from eagle_fsd.model.drafters.interface import Drafter, DraftState
from eagle_fsd.model.tree import DraftTree, TreeBuilder

if TYPE_CHECKING:
    from eagle_fsd.model.sampling import Sampler
    from eagle_fsd.model.verify import Verification


class LevelDrafter(Drafter):
    """A network with a key-value cache that expands a tree level by level, as in EAGLE-2.

    Its cache holds one entry per token of a row: a draft head's is a pair of a feature and the
    token after it, a draft model's is a token.

    Attributes:
        token_ids: ``[D]`` the target's token for each token of the network's vocabulary; None if
            they are the same.
        draws_chains: Whether a tree with ``top_k = 1`` is sampled from the network's distributions
            at temperatures above 0.
    """

    token_ids: Tensor | None = None
    draws_chains = False

    @property
    def feature_size(self) -> int:
        """``F``, of all hidden states that the network reads; by default 0."""
        return 0

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """``D``."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the weights."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of the weights and of attention masks."""

    @abstractmethod
    def append(
        self,
        features: Tensor,
        tokens: Tensor,
        lengths: Tensor,
        max_length: int,
        cache: TreeCache,
    ) -> Tensor:
        """Process accepted tokens that follow those in the cache, causally.

        Args:
            features: ``[B, S, F]`` the target's features before each token.
            tokens: ``[B, S]`` token ids.
            lengths: ``[B]`` number of entries in the cache.
            max_length: Upper bound of ``lengths``, known without reading from the device.
            cache: The network's cache.

        Returns:
            ``[B, S, H]`` hidden states.
        """

    @abstractmethod
    def extend(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor, cache: TreeCache
    ) -> Tensor:
        """Process one level of a tree.

        Args:
            hidden: ``[B, K, H]`` the network's hidden state at each node's parent.
            tokens: ``[B, K]`` token ids.
            positions: ``[B, K]`` positions.
            mask: ``[B, 1, K, L]`` additive attention mask.
            cache: The network's cache, on which :meth:`TreeCache.place_at` has been called.

        Returns:
            ``[B, K, H]`` hidden states.
        """

    @abstractmethod
    def log_probs(self, hidden: Tensor) -> Tensor:
        """Return the distributions of the next token.

        Args:
            hidden: ``[..., H]`` hidden states.

        Returns:
            ``[..., D]`` float32 log-probabilities.
        """

    @abstractmethod
    def new_cache(self, rows: int, length: int) -> TreeCache: ...

    def max_nodes(self, tree: TreeConfig) -> int:
        return tree.total_tokens

    def cache_length(self, max_length: int, tree: TreeConfig) -> int:
        return max_length + tree.depth * (min(tree.top_k, self.vocab_size) + 1) + 2

    def start(
        self,
        prompts: list[Tensor],
        max_length: int,
        tree: TreeConfig,
        sampler: Sampler,
        cache: TreeCache | None,
    ) -> LevelState:
        assert cache is not None
        return LevelState(self, prompts, tree, sampler, cache)


class LevelState(DraftState):
    """The state of a :class:`LevelDrafter`.

    The cache holds the entries of a row up to the root, except for those of the tokens that the
    last step added: they stay pending until the next draft processes them.

    Args:
        drafter: The network.
        prompts: ``[S]`` token ids of each row.
        tree: Shape of the draft trees.
        sampler: The call's sampler.
        cache: The network's cache.
    """

    def __init__(
        self,
        drafter: LevelDrafter,
        prompts: list[Tensor],
        tree: TreeConfig,
        sampler: Sampler,
        cache: TreeCache,
    ) -> None:
        self.drafter, self.cache = drafter, cache
        draws = drafter.draws_chains and tree.top_k == 1 and not sampler.greedy
        self.builder = TreeBuilder(
            tree,
            drafter.vocab_size,
            drafter.device,
            drafter.token_ids,
            sampler.draw_draft if draws else None,
        )
        self.pending_tokens = torch.stack([prompt[-1:] for prompt in prompts])  # [B, S]
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=drafter.device)
        self.pending = torch.ones_like(last)  # [B] number of pending entries
        self.lengths = last  # [B] entries in the cache
        # A feature is paired with the token after it. A prompt of one token has none; zeros take
        # its place.
        self.shift = bool(drafter.reads)
        self._final = last - 1  # [B] position of each row's last feature
        if self.shift:
            self.lengths = self._final.clamp_min(0)
        size = len(prompts), 1, drafter.feature_size
        self.pending_features = torch.zeros(size, dtype=drafter.dtype, device=drafter.device)

    def prefill(self, ids: Tensor, start: int, stop: int, features: Tensor) -> None:
        done = torch.full_like(self.lengths, start)
        tokens = ids[:, start + self.shift : stop + self.shift]
        self.drafter.append(features, tokens, done, start, self.cache)
        # The last pair stays pending, because the next draft needs its output.
        index = (self._final - start).clamp(0, stop - start - 1)[:, None, None]
        here = features.gather(1, index.expand(-1, 1, features.shape[-1]))  # [B, 1, F]
        inside = ((self._final >= start) & (self._final < stop))[:, None, None]
        self.pending_features = torch.where(
            inside, here.to(self.pending_features.dtype), self.pending_features
        )

    def draft(self, roots: Tensor, max_length: int) -> DraftTree:
        """Grow a tree: pending entries give the root's children; see :meth:`DraftState.draft`."""
        drafter, builder, cache = self.drafter, self.builder, self.cache
        # The cache holds as many entries as the target's, plus one after a prompt of one token.
        max_length += 1
        output = drafter.append(
            self.pending_features, self.pending_tokens, self.lengths, max_length, cache
        )
        last = (self.pending - 1)[:, None, None].expand(-1, 1, output.shape[-1])
        hidden = output.gather(1, last)  # [B, 1, H], at the root
        self.lengths = self.lengths + self.pending
        builder.start(drafter.log_probs(hidden[:, 0]))

        depth, width, lengths = builder.depth, builder.width, self.lengths[:, None]
        steps = torch.arange(depth * width, device=lengths.device)
        positions = (lengths + steps[:depth])[:, :, None].expand(-1, -1, width).unbind(1)
        slots = (lengths + steps).view(-1, depth, width)  # where the levels are written
        addresses = cache.addresses(slots).transpose(0, 1).flatten(1).unbind()
        own = slots[:, None, :, :, None].unbind(2)  # one entry per level: [B, 1, K, 1]
        view = cache.visible(max_length + depth * width)
        committed = torch.arange(view, device=lengths.device) < lengths
        mask = additive_mask(committed[:, None], drafter.dtype).expand(-1, -1, width, -1)
        hidden = hidden.expand(-1, width, -1)
        for level in range(depth):
            tokens, parents = builder.choose()
            if level:  # every node starts from its parent's state and sees what its parent saw
                index = parents[:, :, None]
                hidden = hidden.gather(1, index.expand_as(hidden))
                mask = mask.gather(2, index[:, None].expand_as(mask))
            mask = mask.scatter(3, own[level], 0.0)  # and itself; [B, 1, K, view]
            cache.place_at(addresses[level], view)
            hidden = drafter.extend(hidden, tokens, positions[level], mask, cache)
            builder.extend(drafter.log_probs(hidden))
        return builder.finish(roots)

    def commit(self, features: Tensor, kept: Verification) -> None:
        """Make the kept tokens pending; see :meth:`DraftState.commit`."""
        index = kept.path[:, :, None].expand(-1, -1, features.shape[-1])
        self.pending_features = features.gather(1, index)
        self.pending_tokens, self.pending = kept.tokens, kept.count

    def move_row(self, source: int, target: int) -> None:
        self.cache.move_row(source, target)
        for tensor in (self.lengths, self.pending, self.pending_tokens, self.pending_features):
            tensor[target] = tensor[source]

    def keep(self, count: int) -> None:
        self.lengths, self.pending = self.lengths[:count], self.pending[:count]
        self.pending_tokens = self.pending_tokens[:count]
        self.pending_features = self.pending_features[:count]
