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
from functools import partial
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.model.acceptance import FuzzyRule, rule_for
from eagle_fsd.model.attention import folded_queries, query_groups
from eagle_fsd.model.cache import TreeCache
from eagle_fsd.model.compilation import StepGraphs, compiled
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


class _Launched:
    """A step that the device has been told to take.

    Args:
        packed: ``[B, 2 + 2 A]``, see :meth:`Engine._step`.
        tokens: ``[B, A]`` emitted tokens.
        details: Result of :meth:`Engine._describe`.

    Attributes:
        order: The row of these tensors for each row that is still being decoded.
    """

    def __init__(
        self, packed: Tensor, tokens: Tensor, details: tuple[Tensor, Tensor] | None
    ) -> None:
        self.tokens, self.details = tokens, details
        self.order = list(range(len(packed)))
        self._packed, self._copied = packed, None
        if packed.is_cuda:  # the next step may overwrite the tensors
            self._packed = torch.empty_like(packed, device="cpu", pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[list[int]]:
        """Wait for the step, and return the remaining rows of what it emitted."""
        if self._copied is not None:
            self._copied.synchronize()
        packed = self._packed.tolist()
        return [packed[row] for row in self.order]


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
        compiled: Compile the passes of drafter and target, see
            :mod:`~eagle_fsd.model.compilation`.
        capture: On CUDA, capture steps in graphs and replay them where possible.
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
        compiled: bool = False,
        capture: bool = True,
    ) -> None:
        self.target, self.drafter, self.sampler = target, drafter, sampler
        self.tree, self.acceptance = tree, acceptance
        self.rule = rule or rule_for(acceptance)
        self.clock = clock or PhaseClock(target.device)
        self.details, self.compiled, self.capture = details, compiled, capture
        self._nodes = drafter.max_nodes(tree)
        self._width = tree.depth + 2  # the most tokens that a step emits
        self._graphs: StepGraphs | None = None
        self._overlaps = False
        self._ahead: _Launched | None = None

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
        self._groups = query_groups(self.target.model)  # the check of its first use decides
        device = self.target.device
        self.history, self._prefix_cache = history, prefix_cache
        self.rule_state = self.rule.start(prompts).clone()
        self.host_lengths = [len(prompt) - 1 for prompt in prompts]
        max_length = max(map(operator.add, self.host_lengths, max_new_tokens))
        ahead = self._width if device.type == "cuda" else 0  # see `step`
        draft_length = self.drafter.cache_length(max_length + ahead, self.tree)
        length = max_length + ahead + self._nodes
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
        # Per row: a few at every node, and one where the drafter draws.
        drawn = 6 * self._nodes + self.tree.depth * self.tree.top_k + 1
        self.sampler.reserve(len(prompts) * drawn, device)
        on_cuda = device.type == "cuda"
        fixed = history is None and not self.draft.waits
        # Details are read from the device after the tokens, when the next step has replaced them.
        self._overlaps = on_cuda and fixed and self.details is None
        self._graphs = None
        if self.capture and on_cuda and fixed and self.rule.capturable and self.target.one_device:
            self._graphs = StepGraphs()
        self.prefilled = sum(self.host_lengths) - start
        self._process_prompts(prompts, start)
        self._update_prefix_cache(max(0, self.host_lengths[0] - 1))

    def step(self) -> StepResult:
        """Emit at least one token for every row.

        Raises:
            FloatingPointError: The target produced NaN or infinite logits.
        """
        launched = self._ahead or self._launch()
        # The device runs the next step while the host reads the tokens of this one.
        self._ahead = self._launch(unread=1) if self._overlaps else None
        return self._read(launched)

    def _launch(self, unread: int = 0) -> _Launched:
        """Start a step on the device, without waiting for anything.

        Args:
            unread: Number of steps before this one whose tokens have not been read.
        """
        draft_keys, keys = self._keys(unread)
        self.sampler.refill()
        self.clock.enter("graph" if self._graphs else "draft")

        def run() -> tuple[Tensor, Verification, tuple[Tensor, Tensor] | None]:
            return self._step(draft_keys, keys)

        if self._graphs:
            shapes = self.rows, len(keys), 0 if draft_keys is None else len(draft_keys)
            packed, kept, details = self._graphs.run(shapes, run)
        else:
            packed, kept, details = run()
        self.clock.enter("host")
        return _Launched(packed, kept.tokens, details)

    def _step(
        self, draft_keys: Tensor | None, keys: Tensor
    ) -> tuple[Tensor, Verification, tuple[Tensor, Tensor] | None]:
        """Take a step on the device; its state changes in place.

        Args:
            draft_keys: Visible slots of the drafter's cache.
            keys: Visible slots of the target's cache.

        Returns:
            What the host reads (``[B, 2 + 2 A]``: count, whether the logits are broken, tokens and
            origins), the emitted tokens, and the result of :meth:`_describe`.
        """
        self.sampler.used = 0  # again if the step is repeated, because it cannot be captured
        tree, scored = self._score_tree(draft_keys, keys)
        self.clock.enter("verify")
        kept, inputs = self._judge(tree, scored.logits)
        details = None if self.details is None else self._describe(inputs, kept, self.details)
        self.clock.enter("cache")
        self._commit(tree, scored.features, kept)
        parts = kept.count[:, None], inputs.broken[:, None].long(), kept.tokens, kept.origins
        return torch.cat(parts, 1), kept, details

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
        if self._ahead:
            self._ahead.order = [self._ahead.order[row] for row in order]
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

    def _keys(self, unread: int = 0) -> tuple[Tensor | None, Tensor]:
        """Return the slots of both caches that a step reads.

        Args:
            unread: Number of earlier steps whose tokens have not been read.
        """
        longest = max(self.host_lengths) + unread * self._width
        keys = self.cache.keys(longest + self._nodes, self.target.device)
        return self.draft.keys(longest), keys

    def _score_tree(self, draft_keys: Tensor | None, keys: Tensor) -> tuple[DraftTree, TargetPass]:
        """Draft a tree for every row, and run the target on it."""
        self.clock.enter("draft")
        draft, score = self.draft.draft, self.target.forward_tree
        if self.compiled:  # compiled functions are shared by all objects
            if self.draft.on_device:
                draft = partial(compiled(type(self.draft).draft), self.draft)
            score = partial(compiled(Target.forward_tree), self.target)
        tree = draft(self.roots, draft_keys)
        self.clock.enter("target")
        with folded_queries(self.target.model, self._groups):
            return tree, score(
                tree, self.lengths, keys, self.cache, self.drafter.reads, self._groups
            )

    def _judge(self, tree: DraftTree, logits: Tensor) -> tuple[Verification, VerificationInputs]:
        """Sample at every node and keep a path of the tree."""
        judge: Any = _judge
        if self.compiled and self.sampler.on_device and self.rule.capturable:
            judge = compiled(_judge)
        kept, inputs, state = judge(
            self.sampler, self.rule, self.acceptance, tree, logits, self.history, self.rule_state
        )
        self.rule_state.copy_(state)
        return kept, inputs

    def _commit(self, tree: DraftTree, features: Tensor, kept: Verification) -> None:
        """Compact the target's cache to the kept path."""
        if tree.size > 1:
            source = self.lengths[:, None] + kept.path
            slots = torch.arange(kept.path.shape[1], device=source.device)
            # Beyond the path, copy the root's slot onto itself.
            target = torch.where(slots < kept.count[:, None], slots, kept.path)
            self.cache.move(source, self.lengths[:, None] + target)
        self.lengths.add_(kept.count)
        self.roots.copy_(kept.tokens.gather(1, kept.count[:, None] - 1)[:, 0])
        self.draft.commit(features, kept)

    def _describe(
        self, inputs: VerificationInputs, kept: Verification, count: int
    ) -> tuple[Tensor, Tensor]:
        """Collect the details of every emitted token.

        Returns:
            ``[B, A, 2 + count]``: log-probability, divergence, and the largest log-probabilities;
            ``[B, A, count]``: the tokens of the latter.
        """
        first = torch.arange(len(kept.path), device=kept.path.device)[:, None] * inputs.tree.size
        rows = inputs.raw.rows((kept.path + first).flatten()).unflatten(0, kept.path.shape)
        own = rows.gather(-1, kept.tokens[:, :, None])
        rule = FuzzyRule(
            0.0, self.acceptance.divergence, divergence_on=self.acceptance.divergence_on
        )
        divergence = rule.divergences(inputs).gather(1, kept.path)[:, :, None]
        top = rows.topk(min(count, rows.shape[-1]), -1)
        return torch.cat([own, divergence, top.values], -1), top.indices

    def _read(self, launched: _Launched) -> StepResult:
        """Read a step's tokens, which waits for the device."""
        packed = launched.read()
        if any(row[1] for row in packed):
            raise FloatingPointError(BROKEN_LOGITS)
        width = launched.tokens.shape[1]
        tokens = [row[2 : 2 + row[0]] for row in packed]
        origins = [row[2 + width : 2 + width + row[0]] for row in packed]
        entries = self.host_lengths[0]  # the drafter has not processed the new tokens
        for row, emitted in enumerate(tokens):
            self.host_lengths[row] += len(emitted)
            if self.history is not None:
                self.history.append(row, launched.tokens[row], len(emitted))
        self.draft.observe(tokens)
        if self._prefix_cache is not None:
            self._sequence += tokens[0]
            self._update_prefix_cache(entries)
        return StepResult(tokens, origins, _token_details(tokens, launched.details))

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


def _judge(
    sampler: Sampler,
    rule: AcceptanceRule,
    options: AcceptanceConfig,
    tree: DraftTree,
    logits: Tensor,
    history: History | None,
    state: Tensor,
) -> tuple[Verification, VerificationInputs, Tensor]:
    """Sample at every node, keep a path, and advance the rule's state."""
    inputs = sampler(tree, logits, history)
    inputs.state = state
    if tree.size == 1:
        kept = verify_root(inputs)
    else:
        kept = verify(inputs, rule, options.fallback, options.selection, options.price)
    return kept, inputs, rule.advance(inputs, kept)


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
