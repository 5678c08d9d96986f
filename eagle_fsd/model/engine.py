"""One decoding step on a batch: draft a tree, score it, keep a path, compact the caches.

All state stays on the device; the host reads only the result of :meth:`Engine.step`.

Shape letters: ``B`` rows, ``S`` tokens, ``N`` tree nodes, ``V`` vocabulary, ``A`` the largest
number of tokens that one step can emit.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_fsd.model.acceptance import FuzzyRule, rule_for
from eagle_fsd.model.cache import TreeCache
from eagle_fsd.model.config import AcceptanceConfig, TreeConfig
from eagle_fsd.model.drafters.interface import Drafter, DraftState
from eagle_fsd.model.prefix_cache import PrefixCache
from eagle_fsd.model.sampling import History, Sampler
from eagle_fsd.model.stats import PhaseClock
from eagle_fsd.model.target import Target, TargetPass
from eagle_fsd.model.tree import DraftTree
from eagle_fsd.model.verify import (
    AcceptanceRule,
    Verification,
    VerificationInputs,
    verify,
    verify_root,
)

#: Prompt tokens that the target processes in one pass.
PREFILL_CHUNK = 512
#: Message of the error that NaN or infinite logits raise.
BROKEN_LOGITS = (
    "the target produced NaN or infinite logits; check its weights and dtype (some models overflow"
    " in float16: try bfloat16 or float32)"
)


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

    Args:
        target: The target.
        drafter: Proposes the trees.
        sampler: Processes logits and samples.
        tree: Shape of the draft tree.
        acceptance: Acceptance options.
        rule: Replaces the acceptance rule that ``acceptance`` selects.
        clock: Measures the phases of a step.
        details: Number of most likely tokens in the :class:`TokenDetail` of every token; default:
            no details.
    """

    cache: TreeCache
    draft: DraftState
    roots: Tensor  # [B] the last token of each row, not in the target's cache
    lengths: Tensor  # [B] tokens in the target's cache
    host_lengths: list[int]  # `lengths` on the host
    rule_state: Tensor  # [B, W] the acceptance rule's state
    history: History | None
    prefilled: int  # prompt tokens processed

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        sampler: Sampler,
        tree: TreeConfig,
        acceptance: AcceptanceConfig,
        rule: AcceptanceRule | None = None,
        clock: PhaseClock | None = None,
        details: int | None = None,
    ) -> None:
        self.target, self.drafter, self.sampler = target, drafter, sampler
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
        self.rule_state = self.rule.start(prompts)
        self.host_lengths = [len(prompt) - 1 for prompt in prompts]
        max_length = max(map(operator.add, self.host_lengths, max_new_tokens))
        length = max_length + self.drafter.max_nodes(self.tree)
        draft_length = self.drafter.cache_length(max_length, self.tree)
        start, draft_cache = 0, None
        if prefix_cache is None:
            self.cache = self.target.new_cache(len(prompts), length)
            if draft_length:
                draft_cache = self.drafter.new_cache(len(prompts), draft_length)
        else:
            self._sequence: list[int] = prompts[0].tolist()
            # After a prompt of one token, a head's pairs are shifted by one slot.
            self._keeps_entries = bool(draft_length) and self.host_lengths[0] > 0
            start = prefix_cache.resume(self.target, self.drafter, self._sequence, draft_length)
            self.cache, draft_cache = prefix_cache.caches(
                self.target, self.drafter, length, draft_length
            )
        self.draft = self.drafter.start(prompts, max_length, self.tree, self.sampler, draft_cache)
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
        tree, scored = self._score_tree()
        self.clock.enter("verify")
        inputs = self.sampler(tree, scored.logits, self.history)
        inputs.state = self.rule_state
        if tree.size == 1:
            kept = verify_root(inputs)
        else:
            options = self.acceptance
            kept = verify(inputs, self.rule, options.fallback, options.selection, options.price)
        self.rule_state = self.rule.advance(inputs, kept)
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
        self.rule_state = self.rule_state[:keep]
        del self.host_lengths[keep:]
        self.draft.keep(keep)
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
        for start in range(first, longest, PREFILL_CHUNK):
            stop = min(start + PREFILL_CHUNK, longest)
            features = self.target.prefill(
                ids[:, start:stop], start, self.cache, self.drafter.reads
            )
            self.draft.prefill(ids, start, stop, features)

    # -- parts of a step -------------------------------------------------------------------------

    def _score_tree(self) -> tuple[DraftTree, TargetPass]:
        """Draft a tree for every row, and run the target on it."""
        self.clock.enter("draft")
        max_length = max(self.host_lengths)
        tree = self.draft.draft(self.roots, max_length)
        self.clock.enter("target")
        return tree, self.target.forward_tree(
            tree, self.lengths, max_length, self.cache, self.drafter.reads
        )

    def _commit(self, tree: DraftTree, features: Tensor, kept: Verification) -> None:
        """Compact the target's cache to the kept path."""
        if tree.size > 1:
            source = self.lengths[:, None] + kept.path
            slots = torch.arange(kept.path.shape[1], device=source.device)
            # Beyond the path, copy the root's slot onto itself.
            target = torch.where(slots < kept.count[:, None], slots, kept.path)
            self.cache.move(source, self.lengths[:, None] + target)
        self.lengths = self.lengths + kept.count
        self.roots = kept.tokens.gather(1, kept.count[:, None] - 1)[:, 0]
        self.draft.commit(features, kept)

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
            raise FloatingPointError(BROKEN_LOGITS)
        width = kept.tokens.shape[1]
        tokens = [row[2 : 2 + row[0]] for row in packed]
        origins = [row[2 + width : 2 + width + row[0]] for row in packed]
        entries = self.host_lengths[0]  # the drafter has not processed the new tokens
        for row, emitted in enumerate(tokens):
            self.host_lengths[row] += len(emitted)
            if self.history is not None:
                self.history.append(row, kept.tokens[row], len(emitted))
        self.draft.observe(tokens)
        if self._prefix_cache is not None:
            self._sequence += tokens[0]
            self._update_prefix_cache(entries)
        return StepResult(tokens, origins, _token_details(tokens, details))

    def _update_prefix_cache(self, entries: int) -> None:
        """Record the tokens that the caches hold now."""
        if self._prefix_cache is None:
            return
        self._prefix_cache.tokens = self._sequence[: self.host_lengths[0]]
        if self._keeps_entries:
            self._prefix_cache.entries = entries

    def _move_row(self, source: int, target: int) -> None:
        self.cache.move_row(source, target)
        self.draft.move_row(source, target)
        self.host_lengths[target] = self.host_lengths[source]
        for tensor in (self.roots, self.lengths, self.rule_state):
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
