"""From the target's logits on a tree to the distributions verification works with.

Hugging Face's own logits processors do the work. Those that look at the tokens so far see, at every
node, that node's own prefix: the row up to the root and the path from the root down.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    LogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import logits_process as hf

from eagle_fsd.model.tree import DraftTree
from eagle_fsd.model.verify import Evidence

#: What makes the distribution sampled from out of the processed one, last in Hugging Face's lists.
WARPERS = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    hf.TopHLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.LogitNormalization,
)
#: Processors that never look at the tokens so far: one call serves all nodes.
PREFIX_FREE = (*WARPERS, hf.InfNanRemoveLogitsProcessor, hf.SuppressTokensLogitsProcessor)


class History:
    """The tokens of every row so far, prompt padding included: what processors may look at.

    Rows differ in length; the lengths are known to the host.
    """

    def __init__(self, prompts: Tensor, capacity: int) -> None:
        self.tokens = F.pad(prompts, (0, capacity))  # [B, prompt + capacity]
        self.lengths = [prompts.shape[1]] * prompts.shape[0]
        self.rows = list(range(prompts.shape[0]))  # which prompt of the call each row is

    def append(self, row: int, tokens: Tensor, count: int) -> None:
        start = self.lengths[row]
        self.tokens[row, start : start + count] = tokens[:count]
        self.lengths[row] += count

    def move_row(self, source: int, target: int) -> None:
        self.tokens[target] = self.tokens[source]
        self.lengths[target] = self.lengths[source]
        self.rows[target] = self.rows[source]

    def keep(self, count: int) -> None:
        del self.lengths[count:], self.rows[count:]


class Sampler:
    """Processed log-probabilities and the target's own choice at every node.

    Args:
        temperature: 0 is greedy; top-k and top-p then do not apply, as in Hugging Face.
        top_k: 0 is off. top_p: 1 is off.
        processors: Applied before temperature, in order.
        warpers: Take the place of temperature, top-k and top-p where Hugging Face made them; with
            temperature above 0 only.
        draw_from_draft: Also draw a token of the draft's distribution at every node.
        warp_draft: Warp the draft's distributions too; needed where they are looked at warped.
        draw_uniform: Also draw a uniform number at every node, for rules that draw.
        generator: The only source of randomness.

    Raises:
        ValueError: A value is out of its bounds.
    """

    def __init__(
        self,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        processors: Sequence[LogitsProcessor] = (),
        warpers: Sequence[LogitsProcessor] | None = None,
        draw_from_draft: bool = False,
        warp_draft: bool = True,
        draw_uniform: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        if not 0.0 <= temperature < math.inf:
            raise ValueError(f"temperature must be finite and at least 0; got {temperature!r}")
        if not 0.0 < top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1; got {top_p!r}")
        if top_k < 0 or top_k != int(top_k):
            raise ValueError(f"top_k must be a whole number, 0 for off; got {top_k!r}")
        self.greedy = temperature == 0.0
        self.processors = list(processors)
        self.warpers = list(warpers or ()) if not self.greedy else []
        if warpers is None and not self.greedy:
            if temperature != 1.0:
                self.warpers.append(TemperatureLogitsWarper(float(temperature)))
            if top_k:
                self.warpers.append(TopKLogitsWarper(int(top_k)))
            if top_p < 1.0:
                self.warpers.append(TopPLogitsWarper(float(top_p)))
        self.draw_from_draft = draw_from_draft
        self.warp_draft = warp_draft or draw_from_draft
        self.draw_uniform = draw_uniform and not self.greedy
        self.generator = generator

    @property
    def needs_history(self) -> bool:
        return any(not isinstance(item, PREFIX_FREE) for item in self.processors)

    def __call__(self, tree: DraftTree, logits: Tensor, history: History | None) -> Evidence:
        """``logits``: ``[B, N, V]`` float32, as the target gave them."""
        raw = log_probs = F.log_softmax(logits, -1)
        if self.processors:
            logits = self._process(tree, logits, history)
            log_probs = F.log_softmax(logits, -1)
        warped, warped_draft = log_probs, tree.draft_log_probs
        if self.warpers:
            warped = self._warp(log_probs)
            # Every node the head expanded, many more than the tree's: only where it is needed.
            warped_draft = self._warp(tree.draft_log_probs) if self.warp_draft else None
        drawn = None
        if self.draw_from_draft and tree.draft_log_probs.shape[1]:
            choices = self._choose(warped_draft)  # [B, M]
            drawn = choices.gather(1, tree.draft_rows.clamp_min(0))
        elif self.draw_from_draft:
            drawn = tree.tokens
        # Greedy looks at the logits themselves: subtracting the normaliser can round two apart
        # logits to one value.
        sampled = self._choose(logits if self.greedy else warped)
        uniform = None
        if self.draw_uniform:
            uniform = torch.empty_like(warped[..., 0]).uniform_(generator=self.generator)
        return Evidence(tree, raw, log_probs, warped, warped_draft, sampled, drawn, uniform)

    def _choose(self, scores: Tensor) -> Tensor:
        """Arg-max, or one sample by the Gumbel-max trick: ``[..., V]`` to ``[...]``."""
        if self.greedy:
            return scores.argmax(-1)
        noise = torch.empty_like(scores).exponential_(generator=self.generator)
        return (scores - noise.log_()).argmax(-1)

    def _warp(self, log_probs: Tensor) -> Tensor:
        flat = log_probs.flatten(0, 1)
        if not flat.shape[0]:
            return log_probs
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

    def _process_row(self, tree: DraftTree, logits: Tensor, row: int, history: History) -> Tensor:
        """One row's ``[N, V]``, each node processed once, with its own prefix.

        Level by level, because a node below a forbidden edge must not be asked about: a constraint
        knows no continuation of a text it rules out, and nothing there can be emitted anyway. Such
        processors are Python that looks at tokens, so here, and only here, the host looks too.
        """
        processors = [_for_row(item, history.rows[row]) for item in self.processors]
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


def _for_row(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    """``processor`` for one prompt of the call: some of Hugging Face's hold a value for each."""
    if isinstance(processor, hf.PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return type(processor)(lambda _node, ids: allowed(row, ids), num_beams=1)
    own = copy.copy(processor)
    if isinstance(processor, hf.RepetitionPenaltyLogitsProcessor):
        ignored = processor.prompt_ignore_length
        if isinstance(ignored, Tensor):
            own.prompt_ignore_length = int(ignored[row])
    elif isinstance(processor, hf.EncoderRepetitionPenaltyLogitsProcessor):
        own.encoder_input_ids = processor.encoder_input_ids[row : row + 1]
    elif isinstance(processor, hf.EncoderNoRepeatNGramLogitsProcessor):
        own.generated_ngrams, own.batch_size = [processor.generated_ngrams[row]], 1
    return own


def _paths(tree: DraftTree, row: int) -> Tensor:
    """``[N, max_depth]``: the tokens from below the root down to each node, 0 beyond it."""
    level = torch.arange(1, tree.max_depth + 1, device=tree.tokens.device)
    at_level = tree.depths[row] == level[:, None]  # [D, N]
    tokens = at_level * tree.tokens[row]  # [D, N]
    return (tree.ancestors[row][:, None, :] * tokens).sum(-1)
