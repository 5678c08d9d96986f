"""One decoding step on a batch: draft a tree, score it, keep a path, compact the caches.

All state stays on the device; the host reads only the result of :meth:`Engine.step`.

Shape letters: ``B`` rows, ``S`` tokens, ``N`` tree nodes, ``K`` nodes expanded per level, ``H``
hidden size, ``V`` vocabulary, ``A`` the largest number of tokens that one step can emit.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_fsd.model.acceptance import FuzzyRule, rule_for
from eagle_fsd.model.cache import TreeCache, additive_mask
from eagle_fsd.model.config import AcceptanceConfig, TreeConfig
from eagle_fsd.model.drafters.eagle import EagleHead
from eagle_fsd.model.prefix_cache import PrefixCache
from eagle_fsd.model.sampling import History, Sampler
from eagle_fsd.model.stats import PhaseClock
from eagle_fsd.model.target import Target
from eagle_fsd.model.tree import DraftTree, TreeBuilder, single_node
from eagle_fsd.model.verify import (
    AcceptanceRule,
    Verification,
    VerificationInputs,
    verify,
    verify_root,
)

#: Prompt tokens that the target processes in one pass.
PREFILL_CHUNK = 512


@dataclass(frozen=True)
class TokenDetail:
    """Log-probability, divergence and alternatives of one emitted token.

    Attributes:
        log_prob: The target's log-probability, before processors and sampling options; nats.
        divergence: Between target and draft at the token's parent, by the divergence that the
            acceptance options select; None if the parent is a leaf or was not expanded.
        top: The target's most likely tokens at this position and their log-probabilities, in
            descending order.
    """

    log_prob: float
    divergence: float | None
    top: list[tuple[int, float]]


@dataclass
class StepResult:
    """The tokens that a step emitted, on the host.

    Attributes:
        tokens: For each row, the emitted tokens, at least one.
        origins: The :class:`~eagle_fsd.model.verify.Origin` of each token.
        details: The details of each token; None unless requested.
    """

    tokens: list[list[int]]
    origins: list[list[int]]
    details: list[list[TokenDetail]] | None = None


class Engine:
    """The rows of one call and their state on the device.

    Call :meth:`prefill` once, then :meth:`step` until every row has ended; :meth:`drop` removes
    ended rows.

    The target's cache holds all tokens of a row but the last, which is the root of the next tree.
    The head's cache holds the (feature, next token) pairs up to the root, except for those that the
    last step added: they stay pending until the next draft processes them.

    Args:
        target: The target.
        head: The draft head. None for plain decoding, which is the same step on a tree of one node.
        sampler: Processes logits and samples.
        tree: Shape of the draft tree.
        acceptance: Acceptance options.
        rule: Replaces the acceptance rule that ``acceptance`` selects.
        clock: Measures the phases of a step.
        details: Number of most likely tokens in the :class:`TokenDetail` of every token; default:
            no details.
    """

    cache: TreeCache
    head_cache: TreeCache
    builder: TreeBuilder
    roots: Tensor  # [B] the last token of each row, not in the target's cache
    lengths: Tensor  # [B] tokens in the target's cache
    head_lengths: Tensor  # [B] pairs in the head's cache
    pending: Tensor  # [B] number of pending pairs
    pending_features: Tensor  # [B, S, H]
    pending_tokens: Tensor  # [B, S]
    host_lengths: list[int]  # `lengths` on the host
    history: History | None
    prefilled: int  # prompt tokens processed

    def __init__(
        self,
        target: Target,
        head: EagleHead | None,
        sampler: Sampler,
        tree: TreeConfig,
        acceptance: AcceptanceConfig,
        rule: AcceptanceRule | None = None,
        clock: PhaseClock | None = None,
        details: int | None = None,
    ) -> None:
        self.target, self.head, self.sampler = target, head, sampler
        self.tree, self.acceptance = tree, acceptance
        self.rule = rule or rule_for(acceptance)
        self.clock = clock or PhaseClock(target.device)
        self.details = details

    @property
    def rows(self) -> int:
        """Number of rows being decoded."""
        return self.roots.shape[0]

    def prefill(
        self,
        prompts: list[Tensor],
        max_new_tokens: Sequence[int],
        history: History | None = None,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        """Create the caches and process the prompts, all but the last token of each.

        Args:
            prompts: ``[S]`` token ids of each row, at least one, on the target's device.
            max_new_tokens: Maximum number of tokens added to each row.
            history: The tokens of every row, for processors that read previous tokens.
            prefix_cache: Caches of earlier calls; for a single prompt only.

        Raises:
            ValueError: The prefix cache belongs to another model.
        """
        self.clock.enter("prefill")
        self.history, self._prefix_cache = history, prefix_cache
        self.host_lengths = [len(prompt) - 1 for prompt in prompts]
        self._single_token_prompt = self.host_lengths[0] == 0
        max_length = max(map(operator.add, self.host_lengths, max_new_tokens))
        length, head_length = max_length + 1, 0
        if self.head is not None:
            self.builder = TreeBuilder(self.tree, self.target.vocab_size, self.head.device)
            length = max_length + self.tree.total_tokens
            head_length = max_length + self.tree.depth * (self.builder.width + 1) + 2
        start = 0
        if prefix_cache is None:
            self.cache = self.target.new_cache(len(prompts), length)
            if self.head is not None:
                self.head_cache = self.head.new_cache(len(prompts), head_length)
        else:
            self._sequence: list[int] = prompts[0].tolist()
            start = prefix_cache.resume(self.target, self.head, self._sequence)
            cache, head_cache = prefix_cache.caches(self.target, self.head, length, head_length)
            self.cache = cache
            if head_cache is not None:
                self.head_cache = head_cache
        self.prefilled = sum(self.host_lengths) - start
        self._process_prompts(prompts, start)
        self._update_prefix_cache(max(0, self.host_lengths[0] - 1))

    def step(self) -> StepResult:
        """Emit at least one token for every row.

        Raises:
            FloatingPointError: The target produced NaN or infinite logits.
        """
        return self._read(*self._launch())

    def _launch(self) -> tuple[Verification, Tensor, tuple[Tensor, Tensor] | None]:
        """Start a step on the device, without waiting for anything.

        Returns:
            The emitted tokens, ``[B]`` bool whether a row's logits are broken, and the result of
            :meth:`_describe`.
        """
        if self.head is None:
            tree = single_node(self.roots, self.target.vocab_size)
        else:
            tree = self._draft(self.head)
        self.clock.enter("target")
        scored = self.target.forward_tree(tree, self.lengths, max(self.host_lengths), self.cache)
        self.clock.enter("verify")
        inputs = self.sampler(tree, scored.logits, self.history)
        if self.head is None:
            kept = verify_root(inputs)
        else:
            kept = verify(inputs, self.rule, self.acceptance.fallback, self.acceptance.selection)
        # A single NaN or +inf in a row of logits makes its whole log-softmax NaN.
        first = torch.stack([inputs.raw_log_probs[..., 0], inputs.warped_log_probs[..., 0]])
        broken = first.isnan().any(-1).any(0)  # [B]
        details = None if self.details is None else self._describe(inputs, kept, self.details)
        self.clock.enter("cache")
        self._commit(tree, scored.features, kept)
        self.clock.enter("host")
        return kept, broken, details

    def drop(self, rows: list[int]) -> list[int]:
        """Remove rows.

        Args:
            rows: Indices of the rows to remove.

        Returns:
            The previous index of every remaining row, in the new order.
        """
        order = list(range(self.rows))
        for row in sorted(rows, reverse=True):
            last = len(order) - 1
            if row != last:
                self._move_row(last, row)
                order[row] = order[last]
            order.pop()
        keep = len(order)
        self.roots, self.lengths = self.roots[:keep], self.lengths[:keep]
        del self.host_lengths[keep:]
        if self.head is not None:
            self.head_lengths = self.head_lengths[:keep]
            self.pending_features = self.pending_features[:keep]
            self.pending_tokens = self.pending_tokens[:keep]
            self.pending = self.pending[:keep]
        if self.history is not None:
            self.history.keep(keep)
        return order

    # -- prefill ---------------------------------------------------------------------------------

    def _process_prompts(self, prompts: list[Tensor], first: int) -> None:
        """Fill both caches chunk by chunk from position ``first`` on."""
        device = self.target.device
        self.roots = torch.stack([prompt[-1] for prompt in prompts])
        self.lengths = torch.tensor(self.host_lengths, device=device)
        longest = max(self.host_lengths)
        ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)  # right: [B, longest + 1]
        last = (self.lengths - 1).clamp_min(0)  # [B] position of each row's last feature
        feature: Tensor | None = None
        for start in range(first, longest, PREFILL_CHUNK):
            stop = min(start + PREFILL_CHUNK, longest)
            features = self.target.prefill(ids[:, start:stop], start, self.cache)
            if self.head is None:
                continue
            pairs = torch.full_like(self.lengths, start)
            self.head.append(features, ids[:, start + 1 : stop + 1], pairs, start, self.head_cache)
            index = (last - start).clamp(0, stop - start - 1)[:, None, None]
            here = features.gather(1, index.expand(-1, 1, features.shape[-1]))  # [B, 1, H]
            inside = ((last >= start) & (last < stop))[:, None, None]
            feature = here if feature is None else torch.where(inside, here, feature)
        if self.head is None:
            return
        if feature is None:
            shape = (len(prompts), 1, self.target.hidden_size)
            feature = torch.zeros(shape, dtype=self.head.dtype, device=device)
        # The last pair stays pending, because the next draft needs its output. A prompt of one
        # token has no feature before that token; zeros take its place.
        self.head_lengths = last
        self.pending_features = feature.masked_fill((self.lengths == 0)[:, None, None], 0.0)
        self.pending_tokens = self.roots[:, None]
        self.pending = torch.ones_like(self.lengths)

    # -- parts of a step -------------------------------------------------------------------------

    def _draft(self, head: EagleHead) -> DraftTree:
        """Grow a tree: the pending pairs give the root's children, then one pass per level."""
        builder, cache = self.builder, self.head_cache
        self.clock.enter("draft")
        # The head's cache holds at most as many pairs as the target's holds tokens, plus one after
        # a prompt of one token.
        max_length = max(self.host_lengths) + 1
        output = head.append(
            self.pending_features, self.pending_tokens, self.head_lengths, max_length, cache
        )
        last = (self.pending - 1)[:, None, None].expand(-1, 1, output.shape[-1])
        features = output.gather(1, last)  # [B, 1, H], at the root
        self.head_lengths = self.head_lengths + self.pending
        log_probs = head.log_probs(features[:, 0])
        self.clock.enter("tree")
        builder.start(log_probs)

        depth, width, lengths = builder.depth, builder.width, self.head_lengths[:, None]
        steps = torch.arange(depth * width, device=lengths.device)
        positions = (lengths + steps[:depth])[:, :, None].expand(-1, -1, width).unbind(1)
        slots = (lengths + steps).view(-1, depth, width)  # where drafted pairs are written
        addresses = cache.addresses(slots).transpose(0, 1).flatten(1).unbind()
        own = slots[:, None, :, :, None].unbind(2)  # one entry per level: [B, 1, K, 1]
        view = cache.visible(max_length + depth * width)
        committed = torch.arange(view, device=lengths.device) < lengths
        mask = additive_mask(committed[:, None], head.dtype).expand(-1, -1, width, -1)
        features = features.expand(-1, width, -1)
        for level in range(depth):
            tokens, parents = builder.choose()
            if level:  # every node starts from its parent's feature and sees what its parent saw
                index = parents[:, :, None]
                features = features.gather(1, index.expand_as(features))
                mask = mask.gather(2, index[:, None].expand_as(mask))
            mask = mask.scatter(3, own[level], 0.0)  # and itself; [B, 1, K, view]
            cache.place_at(addresses[level], view)
            self.clock.enter("draft")
            features = head(features, tokens, positions[level], mask, cache)
            log_probs = head.log_probs(features)
            self.clock.enter("tree")
            builder.extend(log_probs)
        return builder.finish(self.roots)

    def _commit(self, tree: DraftTree, features: Tensor, kept: Verification) -> None:
        """Compact the target's cache to the kept path and make the head's new pairs pending."""
        if tree.size > 1:
            source = self.lengths[:, None] + kept.path
            slots = torch.arange(kept.path.shape[1], device=source.device)
            # Beyond the path, copy the root's slot onto itself.
            target = torch.where(slots < kept.count[:, None], slots, kept.path)
            self.cache.move(source, self.lengths[:, None] + target)
        self.lengths = self.lengths + kept.count
        self.roots = kept.tokens.gather(1, kept.count[:, None] - 1)[:, 0]
        if self.head is None:
            return
        index = kept.path[:, :, None].expand(-1, -1, features.shape[-1])
        self.pending_features, self.pending_tokens = features.gather(1, index), kept.tokens
        self.pending = kept.count

    def _describe(
        self, inputs: VerificationInputs, kept: Verification, count: int
    ) -> tuple[Tensor, Tensor]:
        """Collect the details of every emitted token.

        Returns:
            ``[B, A, 2 + count]``: log-probability, divergence, and the largest log-probabilities;
            ``[B, A, count]``: the tokens of the latter.
        """
        vocab_size = inputs.raw_log_probs.shape[-1]
        path = kept.path[:, :, None].expand(-1, -1, vocab_size)
        rows = inputs.raw_log_probs.gather(1, path)
        own = rows.gather(-1, kept.tokens[:, :, None])
        rule = FuzzyRule(
            0.0, self.acceptance.divergence, divergence_on=self.acceptance.divergence_on
        )
        divergence = rule.divergences(inputs).gather(1, kept.path)[:, :, None]
        top = rows.topk(min(count, vocab_size), -1)
        return torch.cat([own, divergence, top.values], -1), top.indices

    def _read(
        self, kept: Verification, broken: Tensor, details: tuple[Tensor, Tensor] | None
    ) -> StepResult:
        """Transfer the result to the host, which waits for the device here."""
        packed = torch.cat(
            [kept.count[:, None], broken[:, None].long(), kept.tokens, kept.origins], 1
        ).tolist()
        if any(row[1] for row in packed):
            raise FloatingPointError(
                "the target produced NaN or infinite logits; check its weights and dtype"
                " (some models overflow in float16: try bfloat16 or float32)"
            )
        width = kept.tokens.shape[1]
        tokens = [row[2 : 2 + row[0]] for row in packed]
        origins = [row[2 + width : 2 + width + row[0]] for row in packed]
        pairs = self.host_lengths[0]  # the pairs of the new tokens stay pending
        for row, emitted in enumerate(tokens):
            self.host_lengths[row] += len(emitted)
            if self.history is not None:
                self.history.append(row, kept.tokens[row], len(emitted))
        if self._prefix_cache is not None:
            self._sequence += tokens[0]
            self._update_prefix_cache(pairs)
        return StepResult(tokens, origins, _token_details(tokens, details))

    def _update_prefix_cache(self, pairs: int) -> None:
        """Record the tokens and pairs that the caches hold now."""
        if self._prefix_cache is None:
            return
        self._prefix_cache.tokens = self._sequence[: self.host_lengths[0]]
        # After a prompt of one token the head's pairs are shifted by one slot and cannot be reused.
        if self.head is not None and not self._single_token_prompt:
            self._prefix_cache.pairs = pairs

    def _move_row(self, source: int, target: int) -> None:
        tensors = [self.roots, self.lengths]
        self.cache.move_row(source, target)
        self.host_lengths[target] = self.host_lengths[source]
        if self.head is not None:
            self.head_cache.move_row(source, target)
            tensors += [self.head_lengths, self.pending_features, self.pending_tokens, self.pending]
        for tensor in tensors:
            tensor[target] = tensor[source]
        if self.history is not None:
            self.history.move_row(source, target)


def _token_details(
    tokens: list[list[int]], details: tuple[Tensor, Tensor] | None
) -> list[list[TokenDetail]] | None:
    """Convert the result of :meth:`Engine._describe` for the emitted tokens."""
    if details is None:
        return None
    values, alternatives = (item.tolist() for item in details)
    return [
        [
            TokenDetail(
                log_prob,
                None if math.isinf(divergence) else divergence,
                list(zip(ids, top, strict=True)),
            )
            for (log_prob, divergence, *top), ids in zip(
                row_values[: len(emitted)], row_ids, strict=False
            )
        ]
        for emitted, row_values, row_ids in zip(tokens, values, alternatives, strict=True)
    ]
