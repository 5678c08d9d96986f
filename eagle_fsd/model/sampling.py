"""Turn the target's logits on a tree into the distributions that verification needs.

This module applies Hugging Face's logits processors. A processor that reads previous tokens gets
each node's own prefix: the row up to the root, then the path from the root down to the node.
"""

from __future__ import annotations

import copy
import math
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
from eagle_fsd.model.vocabulary import Distributions, Warp, arg_max, chunks

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
#: Warpers that :class:`Warp` replaces: the attribute with the option, and the options that may come
#: before.
STANDARD: dict[type[LogitsProcessor], tuple[str, tuple[str, ...]]] = {
    TemperatureLogitsWarper: ("temperature", ()),
    TopKLogitsWarper: ("top_k", ("temperature",)),
    TopPLogitsWarper: ("top_p", ("temperature", "top_k")),
    MinPLogitsWarper: ("min_p", ("temperature", "top_k", "top_p")),
}
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

    Attributes:
        numbers: Uniform random numbers in ``[0, 1)``, float64, to use instead of drawing from the
            generator: code that is compiled cannot draw from one. :meth:`random` takes them in
            order and advances :attr:`used`; reset it to 0 when new ones are set.
        used: How many random numbers :meth:`random` has returned.

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
        self.warp: Warp | None = Warp(
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        )
        self.warpers = list(warpers or ())
        if warpers is not None:
            self.warp = _as_warp(warpers)
        self.draw_from_draft = draw_from_draft
        self.warp_draft = warp_draft or draw_from_draft
        self.draw_uniform = draw_uniform and not self.greedy
        self.verify_chain = verify_block if block else verify_tokens
        self.generator = generator
        self.numbers: Tensor | None = None
        self.used = 0

    @property
    def needs_history(self) -> bool:
        """Whether any processor reads previous tokens."""
        return any(not isinstance(item, PREFIX_FREE) for item in self.processors)

    @property
    def on_device(self) -> bool:
        """Whether no processor or warper of Hugging Face is called, so that it can be compiled."""
        return not self.processors and self.warp is not None

    def __call__(
        self, tree: DraftTree, logits: Tensor, history: History | None
    ) -> VerificationInputs:
        """Process the target's logits and sample.

        Args:
            tree: The draft tree.
            logits: ``[B, N, V]`` float32, as the target returned them.
            history: The tokens of every row; required if :attr:`needs_history`.
        """
        raw = processed = Distributions.of(logits)
        if self.processors:
            processed = Distributions.of(self._process(tree, logits, history))
        if self.greedy:
            # Compare the logits themselves: after subtracting the normalizer two different ones can
            # round to the same value.
            warped, sampled = processed, arg_max(processed.logits)
        else:
            points = self.random(tree.tokens.shape, logits.device)
            warped, sampled = self._warp(processed.logits, points)
        # There can be more expanded nodes than tree nodes: warp them only where needed.
        draft: Distributions | None = None
        drawn: Tensor | None = tree.tokens
        expanded = tree.draft_log_probs.shape[:2]
        if self.greedy:
            draft = Distributions.normalized(tree.draft_log_probs)
            if self.draw_from_draft and expanded[1]:
                drawn = self._at_nodes(tree, arg_max(tree.draft_log_probs))
        elif (self.warp_draft or tree.sampled) and expanded[1]:
            points = self.random(expanded, logits.device)
            draft, drawn = self._warp(tree.draft_log_probs, points)
            drawn = self._at_nodes(tree, drawn)
        if tree.sampled:  # the drafted tokens are draws already
            drawn = torch.cat([tree.tokens[:, 1:], tree.tokens[:, -1:]], 1)
        if tree.sampled:
            assert draft is not None
            points = self.random((2, *tree.tokens.shape), logits.device)
            drafted = tree.tokens[:, 1:]
            followed = self.verify_chain(warped, draft, tree.token_ids, drafted, points)
            sampled = torch.cat([followed, sampled[:, -1:]], 1)
        uniform = None
        if self.draw_uniform:
            uniform = self.random(tree.tokens.shape, logits.device).float()
        drawn = drawn if self.draw_from_draft else None
        return VerificationInputs(tree, raw, processed, warped, draft, sampled, drawn, uniform)

    def _at_nodes(self, tree: DraftTree, drawn: Tensor) -> Tensor:
        """Convert ``[B, M]`` draws from the draft to ``[B, N]`` tokens of the target."""
        drawn = drawn if tree.token_ids is None else tree.token_ids[drawn]
        return drawn.gather(1, tree.draft_rows.clamp_min(0))

    def reserve(self, count: int, device: torch.device) -> None:
        """Allocate the random numbers of a step, which :meth:`refill` draws.

        Args:
            count: Upper bound of the random numbers that a step needs.
            device: Device of the numbers.
        """
        if not self.greedy:
            self.numbers = torch.empty(count, dtype=torch.float64, device=device)

    def refill(self) -> None:
        """Draw the random numbers of the next step."""
        self.used = 0
        if self.numbers is not None:
            self.numbers.uniform_(generator=self.generator)

    def random(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return uniform random numbers in ``[0, 1)``.

        Args:
            shape: Shape of the result.
            device: Device of the result.

        Returns:
            A float64 tensor.
        """
        count = math.prod(shape)
        first, self.used = self.used, self.used + count
        if self.numbers is not None:
            return self.numbers[first : first + count].view(*shape)
        numbers = torch.empty(*shape, dtype=torch.float64, device=device)
        return numbers.uniform_(generator=self.generator)

    def draw_draft(self, log_probs: Tensor) -> Tensor:
        """Sample from the draft's distributions after temperature, top-k and top-p.

        Args:
            log_probs: ``[..., D]`` float32 log-probabilities.

        Returns:
            ``[...]`` indices into the draft's vocabulary.
        """
        shape = log_probs.shape[:-1]
        points = self.random((1, shape.numel()), log_probs.device)
        return self._warp(log_probs.flatten(0, -2)[None], points)[1].view(shape)

    def _warp(self, logits: Tensor, points: Tensor) -> tuple[Distributions, Tensor]:
        """Warp ``[B, N, V]`` logits, and sample with the random numbers ``[B, N]``."""
        if self.warp is not None:
            return self.warp(logits, points)
        flat, parts = logits.flatten(0, 1), []
        for rows in chunks(len(flat), flat):
            scores = flat[rows]
            for warper in self.warpers:
                scores = warper(None, scores)
            parts.append(scores)
        return Warp()(torch.cat(parts).view_as(logits), points)

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


def _as_warp(warpers: Sequence[LogitsProcessor]) -> Warp | None:
    """Return what equals warpers of Hugging Face; None if there is another one among them."""
    found: dict[str, Any] = {}
    for item in warpers:
        if isinstance(item, hf.LogitNormalization):
            continue  # changes no distribution
        name, before = STANDARD.get(type(item), ("", ()))
        fixed = getattr(item, "filter_value", -math.inf), getattr(item, "min_tokens_to_keep", 1)
        if not name or fixed != (-math.inf, 1) or not found.keys() <= set(before):
            return None
        found[name] = getattr(item, name)
    return Warp(**found)


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
