"""Turn the target's logits on a tree into the distributions that verification needs.

This module applies Hugging Face's logits processors. A processor that reads previous tokens gets
each node's own prefix: the row up to the root, then the path from the root down to the node.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import logits_process as hf

from eagle_fsd.model.config import SamplingConfig
from eagle_fsd.model.residual import verify_block, verify_tokens
from eagle_fsd.model.tree import DraftTree
from eagle_fsd.model.verify import VerificationInputs

#: Processors that apply sampling options, such as temperature. Hugging Face appends them to the end
#: of its list.
WARPERS = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    hf.TopHLogitsWarper,
    MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.LogitNormalization,
)
#: Processors that never read previous tokens, so that one call serves all nodes.
PREFIX_FREE = (*WARPERS, hf.InfNanRemoveLogitsProcessor, hf.SuppressTokensLogitsProcessor)
#: Processors that keep state from call to call.
STATEFUL = (
    hf.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    hf.SynthIDTextWatermarkLogitsProcessor,
    hf.DiaEOSDelayPatternLogitsProcessor,
    hf.WhisperNoSpeechDetection,
)
#: Processors that combine the rows of a batch.
ACROSS_ROWS = (
    hf.ClassifierFreeGuidanceLogitsProcessor,
    hf.DiaClassifierFreeGuidanceLogitsProcessor,
    hf.DiaEOSChannelFilterLogitsProcessor,
)


class History:
    """The tokens of every row so far, prompt padding included, as prefixes for processors.

    Args:
        prompts: ``[B, S]`` prompts, padded on the left.
        capacity: Maximum number of tokens added to a row.
    """

    def __init__(self, prompts: Tensor, capacity: int) -> None:
        self.tokens = F.pad(prompts, (0, capacity))  # [B, prompt + capacity]
        self.lengths = [prompts.shape[1]] * prompts.shape[0]  # known to the host
        self.rows = list(range(prompts.shape[0]))  # index of each row's prompt in the call

    def append(self, row: int, tokens: Tensor, count: int) -> None:
        """Add ``tokens[:count]`` to a row.

        Args:
            row: Index among the remaining rows.
            tokens: ``[A]`` token ids.
            count: Number of tokens to add.
        """
        start = self.lengths[row]
        self.tokens[row, start : start + count] = tokens[:count]
        self.lengths[row] += count

    def move_row(self, source: int, target: int) -> None:
        """Overwrite a row with another.

        Args:
            source: Index of the row to copy.
            target: Index of the row to overwrite.
        """
        self.tokens[target] = self.tokens[source]
        self.lengths[target] = self.lengths[source]
        self.rows[target] = self.rows[source]

    def keep(self, count: int) -> None:
        """Drop all rows but the first ones.

        Args:
            count: Number of rows to keep.
        """
        del self.lengths[count:], self.rows[count:]


class Sampler:
    """Compute the processed distributions and the target's sample at every node.

    Args:
        sampling: Temperature, top-k, top-p and min-p. At temperature 0, the others do not apply,
            as in Hugging Face.
        processors: Applied before temperature, in order.
        warpers: Replace those of ``sampling`` if Hugging Face has built the warpers already; used
            at temperatures above 0 only. They must not read previous tokens.
        draw_from_draft: Also sample a token from the draft's distribution at every expanded node.
        warp_draft: Also warp the draft's distributions.
        draw_uniform: Also draw a uniform random number at every node.
        block: Verify sampled chains as a block instead of token by token. Only for rules that relax
            nothing.
        generator: Source of all randomness; default: torch's global generator.

    Raises:
        ValueError: A processor or warper keeps state or combines rows.
    """

    def __init__(
        self,
        sampling: SamplingConfig | None = None,
        processors: Sequence[LogitsProcessor] = (),
        warpers: Sequence[LogitsProcessor] | None = None,
        draw_from_draft: bool = False,
        warp_draft: bool = False,
        draw_uniform: bool = False,
        block: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        sampling = sampling or SamplingConfig()
        for item in (*processors, *(warpers or ())):
            _check_processor(item)
        self.greedy = sampling.temperature == 0.0
        self.processors = list(processors)
        self.warpers: list[LogitsProcessor] = []
        if not self.greedy:
            self.warpers = _warpers(sampling) if warpers is None else list(warpers)
        self.draw_from_draft = draw_from_draft
        self.warp_draft = warp_draft or draw_from_draft
        self.draw_uniform = draw_uniform and not self.greedy
        self.verify_chain = verify_block if block else verify_tokens
        self.generator = generator

    @property
    def needs_history(self) -> bool:
        """Whether any processor reads previous tokens."""
        return any(not isinstance(item, PREFIX_FREE) for item in self.processors)

    def __call__(
        self, tree: DraftTree, logits: Tensor, history: History | None
    ) -> VerificationInputs:
        """Process the target's logits and sample.

        Args:
            tree: The draft tree.
            logits: ``[B, N, V]`` float32, as the target returned them.
            history: The tokens of every row; required if :attr:`needs_history`.
        """
        raw = log_probs = F.log_softmax(logits, -1)
        if self.processors:
            logits = self._process(tree, logits, history)
            log_probs = F.log_softmax(logits, -1)
        warped = log_probs
        warped_draft: Tensor | None = tree.draft_log_probs
        if self.warpers:
            warped = self._warp(log_probs)
            # There are many more expanded nodes than tree nodes: warp them only where needed.
            needed = self.warp_draft or tree.sampled
            warped_draft = self._warp(tree.draft_log_probs) if needed else None
        drawn = None
        if self.draw_from_draft:
            drawn = tree.tokens
            if warped_draft is not None and warped_draft.shape[1]:
                drawn = self._choose(warped_draft)
                drawn = drawn if tree.token_ids is None else tree.token_ids[drawn]
                drawn = drawn.gather(1, tree.draft_rows.clamp_min(0))
            if tree.sampled:  # the drafted tokens are draws already
                drawn = torch.cat([tree.tokens[:, 1:], drawn[:, -1:]], 1)
        if tree.sampled:
            assert warped_draft is not None
            sampled = self._follow_chain(tree, warped, warped_draft)
        else:
            # Greedy decoding compares the logits themselves: after subtracting the normalizer two
            # different logits can round to the same value.
            sampled = self._choose(logits if self.greedy else warped)
        uniform = None
        if self.draw_uniform:
            uniform = torch.empty_like(warped[..., 0]).uniform_(generator=self.generator)
        return VerificationInputs(
            tree, raw, log_probs, warped, warped_draft, sampled, drawn, uniform, logits
        )

    def draw_draft(self, log_probs: Tensor) -> Tensor:
        """Sample from the draft's distributions after temperature, top-k and top-p.

        Args:
            log_probs: ``[..., D]`` float32 log-probabilities.

        Returns:
            ``[...]`` indices into the draft's vocabulary.
        """
        return self._choose(self._warp(log_probs))

    def _follow_chain(self, tree: DraftTree, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Return ``[B, N]``: the target's sample at every node of a sampled chain."""
        log_p, last = log_p.split([tree.size - 1, 1], 1)
        log_q = log_q[:, : tree.size - 1]  # of a chain, node i is expanded as the i-th
        if tree.token_ids is not None:
            log_q = torch.full_like(log_p, -torch.inf).index_copy(2, tree.token_ids, log_q)
        followed = self.verify_chain(log_p, log_q, tree.tokens[:, 1:], self.generator)
        return torch.cat([followed, self._choose(last)], 1)

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the argmax, or a sample by the Gumbel-max trick: ``[..., V]`` to ``[...]``."""
        if self.greedy:
            return scores.argmax(-1)
        noise = torch.empty_like(scores).exponential_(generator=self.generator)
        return (scores - noise.log_()).argmax(-1)

    def _warp(self, log_probs: Tensor) -> Tensor:
        if not log_probs.numel():
            return log_probs
        flat = log_probs.flatten(0, -2)
        for warper in self.warpers:
            flat = warper(None, flat)
        return F.log_softmax(flat, -1).view_as(log_probs)

    def _process(self, tree: DraftTree, logits: Tensor, history: History | None) -> Tensor:
        if not self.needs_history:
            flat = logits.flatten(0, 1)
            for item in self.processors:
                flat = item(None, flat)
            return flat.view_as(logits)
        rows = [
            self._process_row(tree, logits, row, history) for row in range(tree.tokens.shape[0])
        ]
        return torch.stack(rows)

    def _process_row(
        self, tree: DraftTree, logits: Tensor, row: int, history: History | None
    ) -> Tensor:
        """Process one row's ``[N, V]`` logits, each node with its own prefix.

        Levels are processed in order, because nodes below a masked token must be skipped: they
        cannot be emitted, and a constraint may have no continuation for a prefix that it excludes.
        The processors are Python code that reads tokens, so each level synchronizes with the host.
        """
        assert history is not None, "processors that read prefixes need the history"
        prompt, prompts = history.rows[row], history.tokens.shape[0]
        processors = [_for_row(item, prompt, prompts) for item in self.processors]
        before = history.tokens[row, : history.lengths[row]]
        paths, parents, tokens = _paths(tree, row), tree.parents[row], tree.tokens[row]
        result = logits[row].clone()
        open_ = torch.zeros_like(parents, dtype=torch.bool)
        open_[0] = True
        for depth in range(tree.max_depth + 1):
            if depth:
                open_ = open_ | (open_[parents] & (result[parents, tokens] > -torch.inf))
            nodes = (open_ & (tree.depths[row] == depth)).nonzero()[:, 0]
            if not len(nodes):
                break
            prefix = torch.cat([before.expand(len(nodes), -1), paths[nodes, :depth]], 1)
            scores = logits[row, nodes].clone()
            for item in processors:
                scores = item(prefix, scores)
            result[nodes] = scores
        return result


def _check_processor(processor: LogitsProcessor) -> None:
    for kinds, problem in (
        (STATEFUL, "keeps state from call to call"),
        (ACROSS_ROWS, "combines the rows of a batch"),
    ):
        if isinstance(processor, kinds):
            raise ValueError(
                f"{type(processor).__name__} is not supported, because it {problem}: a draft tree"
                " has several prefixes per step, which are processed in any order"
            )


def _warpers(sampling: SamplingConfig) -> list[LogitsProcessor]:
    """Build Hugging Face's warpers for the sampling options, in the order it uses."""
    found: list[LogitsProcessor] = []
    if sampling.temperature != 1.0:
        found.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        found.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        found.append(MinPLogitsWarper(sampling.min_p))
    return found


def _for_row(processor: LogitsProcessor, row: int, rows: int) -> LogitsProcessor:
    """Return a processor for one of ``rows`` prompts, given one that may hold values for each.

    It holds them once for all copies of a prompt if the call asks for several answers to it.
    """
    if isinstance(processor, hf.PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return type(processor)(lambda _node, ids: allowed(row, ids), num_beams=1)
    own: Any = copy.copy(processor)
    if isinstance(processor, hf.RepetitionPenaltyLogitsProcessor):
        ignored = processor.prompt_ignore_length
        if isinstance(ignored, Tensor):
            own.prompt_ignore_length = int(ignored[row])
    elif isinstance(processor, hf.EncoderRepetitionPenaltyLogitsProcessor):
        first = row * len(processor.encoder_input_ids) // rows
        own.encoder_input_ids = processor.encoder_input_ids[first : first + 1]
    elif isinstance(processor, hf.EncoderNoRepeatNGramLogitsProcessor):
        first = row * processor.batch_size // rows
        own.generated_ngrams, own.batch_size = [processor.generated_ngrams[first]], 1
    return own


def _paths(tree: DraftTree, row: int) -> Tensor:
    """Return ``[N, max_depth]``: the tokens on the path to each node, root excluded, then zeros."""
    level = torch.arange(1, tree.max_depth + 1, device=tree.tokens.device)
    at_level = tree.depths[row] == level[:, None]  # [D, N]
    tokens = at_level * tree.tokens[row]  # [D, N]
    return (tree.ancestors[row][:, None, :] * tokens).sum(-1)
