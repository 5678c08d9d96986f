"""One decoding step on a batch: draft a tree, score it, keep a path, tidy the caches.

Everything here stays on the device; the host learns what a step emitted from
:meth:`Engine.step`'s result and nothing else. Shape letters as in ``verify.py``; ``A`` is the most
tokens a step can emit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_fsd.model.acceptance import FuzzyRule
from eagle_fsd.model.cache import additive_mask
from eagle_fsd.model.config import FSDSettings
from eagle_fsd.model.drafters.eagle import EagleHead
from eagle_fsd.model.prefix_cache import Conversation
from eagle_fsd.model.sampling import History, Sampler
from eagle_fsd.model.stats import PhaseClock
from eagle_fsd.model.target import Target
from eagle_fsd.model.tree import DraftTree, TreeBuilder, single_node
from eagle_fsd.model.verify import AcceptanceRule, Evidence, Verification, verify, verify_root

#: Prompt tokens the target reads in one pass.
PREFILL_CHUNK = 512


@dataclass(frozen=True)
class TokenDetail:
    """What is known of one emitted token.

    Attributes:
        log_prob: The target's own, before processors and sampling options; nats.
        divergence: Between target and draft where the token follows, by the settings' divergence;
            None where the draft was not asked there.
        top: The likeliest tokens at its place and their log-probabilities, likeliest first.
    """

    log_prob: float
    divergence: float | None
    top: list[tuple[int, float]]


@dataclass
class StepResult:
    """What a step emitted, read back from the device in one transfer.

    Attributes:
        tokens: For each live row, the emitted tokens; at least one.
        origins: Their :class:`~eagle_fsd.model.verify.Origin`, alike.
        details: What is known of each token, alike; None unless it was asked for.
    """

    tokens: list[list[int]]
    origins: list[list[int]]
    details: list[list[TokenDetail]] | None = None


class Engine:
    """The rows of one call and everything they need on the device.

    The target's cache holds all of a row but its last token, which is the root of the next tree.
    The head's cache holds the pairs (feature, next token) before that; pairs that the last step
    added are pending and open the next draft.

    Args:
        head: None for plain decoding, which is the same step on a tree of one node.
        prompts: For each row its tokens, at least one, on the target's device.
        max_new_tokens: How many tokens a row may add; sizes the caches.
        history: Needed where the sampler's processors look at prefixes.
        conversation: Caches of earlier calls; one prompt only.
        details: With every token its :class:`TokenDetail`, of so many likeliest ones; None: no.
    """

    def __init__(
        self,
        target: Target,
        head: EagleHead | None,
        settings: FSDSettings,
        rule: AcceptanceRule,
        sampler: Sampler,
        prompts: list[Tensor],
        max_new_tokens: int,
        clock: PhaseClock,
        history: History | None = None,
        conversation: Conversation | None = None,
        details: int | None = None,
    ) -> None:
        self.details = details
        self.target, self.head, self.settings = target, head, settings
        self.rule, self.sampler, self.clock, self.history = rule, sampler, clock, history
        self.host_lengths = [len(prompt) - 1 for prompt in prompts]
        self.opening = self.host_lengths[0]
        self.conversation = conversation
        longest = max(self.host_lengths) + max_new_tokens
        length, head_length = longest + (settings.total_tokens if head is not None else 1), 0
        if head is not None:
            tree = settings.total_tokens, settings.depth, settings.top_k
            self.builder = TreeBuilder(*tree, target.vocabulary, head.device)
            drafted = settings.depth + 2 + settings.depth * self.builder.width
            head_length = longest + drafted
        start = 0
        if conversation is None:
            self.cache = target.new_cache(len(prompts), length)
            if head is not None:
                self.head_cache = head.new_cache(len(prompts), head_length)
        else:
            self.sequence = prompts[0].tolist()
            start = conversation.resume(target, head, self.sequence)
            self.cache, self.head_cache = conversation.caches(target, head, length, head_length)
        self.prefilled = sum(self.host_lengths) - start
        clock.enter("prefill")
        self._prefill(prompts, start)
        self._remember(max(0, self.host_lengths[0] - 1))

    @property
    def rows(self) -> int:
        return self.roots.shape[0]

    def step(self) -> StepResult:
        """Emit at least one token for every row.

        Raises:
            FloatingPointError: The target produced NaN or infinite logits.
        """
        plain = self.head is None
        tree = single_node(self.roots, self.target.vocabulary) if plain else self._draft()
        self.clock.enter("target")
        scored = self.target.forward_tree(tree, self.lengths, max(self.host_lengths), self.cache)
        self.clock.enter("verify")
        evidence = self.sampler(tree, scored.logits, self.history)
        if plain:
            kept = verify_root(evidence)
        else:
            kept = verify(evidence, self.rule, self.settings.fallback, self.settings.selection)
        # A NaN or +inf anywhere in a row of logits makes all of its log-softmax NaN.
        first = torch.stack([evidence.raw_log_probs[..., 0], evidence.warped_log_probs[..., 0]])
        broken = first.isnan().any(-1).any(0)
        details = None if self.details is None else self._describe(evidence, kept)
        self.clock.enter("cache")
        self._commit(tree, scored.features, kept)
        self.clock.enter("host")
        return self._read(kept, broken, details)

    def drop(self, rows: list[int]) -> list[int]:
        """Forget finished rows; returns the old index of every row left, in the new order."""
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

    def _prefill(self, prompts: list[Tensor], first: int) -> None:
        """Read every prompt from ``first`` but its last token, chunk by chunk, into both caches."""
        device = self.target.device
        self.roots = torch.stack([prompt[-1] for prompt in prompts])
        self.lengths = torch.tensor(self.host_lengths, device=device)
        longest = max(self.host_lengths)
        ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)  # right: [B, longest + 1]
        last = (self.lengths - 1).clamp_min(0)  # the position of each row's last feature
        feature = None
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
        # The last pair is kept pending: the draft that it opens needs its output. A prompt of one
        # token has no feature before that token; its draft opens with zeros in that place.
        self.head_lengths = last
        self.pending_features = feature.masked_fill((self.lengths == 0)[:, None, None], 0.0)
        self.pending_tokens = self.roots[:, None]
        self.pending = torch.ones_like(self.lengths)

    # -- a step's parts --------------------------------------------------------------------------

    def _draft(self) -> DraftTree:
        """Grow the tree: the pending pairs give the root's children, then one pass a level."""
        head, builder, cache = self.head, self.builder, self.head_cache
        self.clock.enter("draft")
        # Host's bound on the pairs in the cache: as many as the target's holds tokens, but for a
        # prompt of one token one more.
        longest = max(self.host_lengths) + 1
        output = head.append(
            self.pending_features, self.pending_tokens, self.head_lengths, longest, cache
        )
        last = (self.pending - 1)[:, None, None].expand(-1, 1, output.shape[-1])
        features = output.gather(1, last)  # [B, 1, H], at the root
        self.head_lengths = self.head_lengths + self.pending
        log_probs = head.readout(features[:, 0])
        self.clock.enter("tree")
        builder.start(log_probs)

        depth, width, lengths = builder.depth, builder.width, self.head_lengths[:, None]
        steps = torch.arange(depth * width, device=lengths.device)
        positions = (lengths + steps[:depth])[:, :, None].expand(-1, -1, width).unbind(1)
        slots = (lengths + steps).view(-1, depth, width)  # where the drafted pairs go
        addresses = cache.addresses(slots).transpose(0, 1).flatten(1).unbind()
        own = slots[:, None, :, :, None].unbind(2)  # a level each, as the rest: [B, 1, K, 1]
        view = cache.visible(longest + depth * width)
        committed = torch.arange(view, device=lengths.device) < lengths
        mask = additive_mask(committed[:, None], head.dtype).expand(-1, -1, width, -1)
        features = features.expand(-1, width, -1)
        for level in range(depth):
            tokens, parents = builder.choose()
            if level:  # every node starts from its parent's feature and sees what that saw
                index = parents[:, :, None]
                features = features.gather(1, index.expand_as(features))
                mask = mask.gather(2, index[:, None].expand_as(mask))
            mask = mask.scatter(3, own[level], 0.0)  # and itself; [B, 1, K, view]
            cache.place_at(addresses[level], view)
            self.clock.enter("draft")
            features = head(features, tokens, positions[level], mask, cache)
            log_probs = head.readout(features)
            self.clock.enter("tree")
            builder.extend(log_probs)
        return builder.finish(self.roots)

    def _commit(self, tree: DraftTree, features: Tensor, kept: Verification) -> None:
        """Close up the target's cache behind the kept path and queue the head's new pairs."""
        if tree.size > 1:
            source = self.lengths[:, None] + kept.path
            slots = torch.arange(kept.path.shape[1], device=source.device)
            # Slots past the path hold nothing that is ever read: write each to itself.
            target = torch.where(slots < kept.count[:, None], slots, kept.path)
            self.cache.move(source, self.lengths[:, None] + target)
        self.lengths = self.lengths + kept.count
        self.roots = kept.tokens.gather(1, kept.count[:, None] - 1)[:, 0]
        if self.head is None:
            return
        index = kept.path[:, :, None].expand(-1, -1, features.shape[-1])
        self.pending_features, self.pending_tokens = features.gather(1, index), kept.tokens
        self.pending = kept.count

    def _describe(self, evidence: Evidence, kept: Verification) -> tuple[Tensor, Tensor]:
        """For every slot of the kept path ``[B, A, 2 + n]``: log-probability, divergence, the ``n``
        largest log-probabilities; and ``[B, A, n]`` their tokens."""
        vocabulary = evidence.raw_log_probs.shape[-1]
        path = kept.path[:, :, None].expand(-1, -1, vocabulary)
        rows = evidence.raw_log_probs.gather(1, path)
        own = rows.gather(-1, kept.tokens[:, :, None])
        settings = self.settings
        rule = FuzzyRule(0.0, settings.divergence, divergence_on=settings.divergence_on)
        divergence = rule.divergences(evidence).gather(1, kept.path)[:, :, None]
        top = rows.topk(min(self.details, vocabulary), -1)
        return torch.cat([own, divergence, top.values], -1), top.indices

    def _read(
        self, kept: Verification, broken: Tensor, details: tuple[Tensor, Tensor] | None
    ) -> StepResult:
        """The only place of a step where the host waits for the device."""
        packed = torch.cat(
            [kept.count[:, None], broken[:, None].long(), kept.tokens, kept.origins], 1
        ).tolist()
        if any(row[1] for row in packed):
            raise FloatingPointError(
                "the target produced NaN or infinite logits; check its weights and dtype"
                " (float16 overflows in some models: try bfloat16 or float32)"
            )
        most = kept.tokens.shape[1]
        tokens = [row[2 : 2 + row[0]] for row in packed]
        pairs = self.host_lengths[0]  # what the kept tokens add is pending till the next draft
        origins = [row[2 + most : 2 + most + row[0]] for row in packed]
        for row, emitted in enumerate(tokens):
            self.host_lengths[row] += len(emitted)
            if self.history is not None:
                self.history.append(row, kept.tokens[row], len(emitted))
        if self.conversation is not None:
            self.sequence += tokens[0]
            self._remember(pairs)
        return StepResult(tokens, origins, _token_details(tokens, details))

    def _remember(self, pairs: int) -> None:
        """Tell the conversation what the caches hold now."""
        if self.conversation is None:
            return
        self.conversation.tokens = self.sequence[: self.host_lengths[0]]
        # The head's pairs of a prompt of one token stand one place further on: of no use later.
        if self.head is not None and self.opening:
            self.conversation.pairs = pairs

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
    """:meth:`Engine._describe` read back, for the tokens that were emitted."""
    if details is None:
        return None
    numbers, alternatives = (item.tolist() for item in details)
    return [
        [
            TokenDetail(own, None if math.isinf(gap) else gap, list(zip(ids, top, strict=True)))
            for (own, gap, *top), ids in zip(row_numbers[: len(emitted)], row_ids, strict=False)
        ]
        for emitted, row_numbers, row_ids in zip(tokens, numbers, alternatives, strict=True)
    ]
