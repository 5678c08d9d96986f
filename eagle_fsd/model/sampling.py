"""Turn the target's logits on a tree into the distributions that verification needs.

Shape letters: ``B`` rows, ``N`` tree nodes, ``M`` nodes that the drafter expanded, ``R`` some of
the flattened nodes, ``V`` vocabulary, ``D`` tokens of the draft's vocabulary, ``S`` prompt tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import logits_process as hf

from eagle_fsd.model.arguments import name_of
from eagle_fsd.model.config import SamplingConfig
from eagle_fsd.model.random_numbers import Purpose, RandomNumbers, uniform
from eagle_fsd.model.residual import SampledChain, verify_block, verify_tokens
from eagle_fsd.model.tree import DraftTree
from eagle_fsd.model.verify import TARGET_FAULT, VerificationInputs
from eagle_fsd.model.vocabulary import Distributions, Warp, arg_max, chunks
from eagle_fsd.utils.text import one_line

#: Processors that apply sampling options, such as temperature. Hugging Face appends them to its
#: list after all others, except for watermarking.
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
#: Processors that never read previous tokens, so one call serves all nodes.
PREFIX_FREE = (*WARPERS, hf.InfNanRemoveLogitsProcessor, hf.SuppressTokensLogitsProcessor)
#: Processors that are not supported, and why.
UNSUPPORTED: dict[type[LogitsProcessor], str] = {
    hf.UnbatchedClassifierFreeGuidanceLogitsProcessor: "keeps state from call to call",
    hf.SynthIDTextWatermarkLogitsProcessor: "keeps state from call to call",
    hf.ClassifierFreeGuidanceLogitsProcessor: "combines the rows of a batch",
}


class AnswerProcessor(LogitsProcessor):
    """A logits processor that gets the tokens of the answer only, without the prompt."""


class Prefix(NamedTuple):
    """The tokens of a row so far, prompt padding included, for processors that read them.

    The prompt is number ``row`` of the ``rows`` of its call; processors are not called for drafted
    tokens that are among ``ends``, or below them.
    """

    ids: Tensor  # [S + new]
    prompt_length: int
    row: int
    rows: int
    ends: Sequence[int]


class Sampler:
    """Compute the processed distributions and the target's sample at every node.

    ``processors`` apply before temperature, in order; ``warpers``, which must not read previous
    tokens, replace those of ``sampling`` at temperatures above 0. ``draw_from_draft``,
    ``warp_draft`` and ``draw_uniform`` request optional inputs of verification. ``block`` verifies
    sampled chains as a block, which is only for rules that relax nothing.
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

    @property
    def needs_prefix(self) -> bool:
        """Whether any processor reads previous tokens, which its ``reads_prefix`` may deny."""
        return any(
            getattr(item, "reads_prefix", type(item) not in PREFIX_FREE) for item in self.processors
        )

    @property
    def on_device(self) -> bool:
        """Whether it can be compiled: no processors, and no warpers that Warp cannot replace."""
        return not self.processors and self.warp is not None

    def __call__(
        self,
        tree: DraftTree,
        logits: Tensor,
        random: RandomNumbers | None = None,
        prefixes: Sequence[Prefix] = (),
    ) -> VerificationInputs:
        """Process the target's logits ``[B, N, V]`` and sample.

        Temperatures above 0 require ``random``, and processors that read previous tokens a prefix
        for each row.
        """
        raw = processed = Distributions.of(logits)
        faults = None if self.on_device else torch.zeros_like(tree.tokens)
        if self.processors and faults is not None:
            processed = Distributions.of(self._process(tree, logits, prefixes, faults))
        expanded = tree.draft_log_probs.shape[1] > 0
        draft: Distributions | None = None
        drawn = tree.tokens
        if self.greedy:
            warped, draft = processed, Distributions.normalized(tree.draft_log_probs)
            # Two different logits can be equal after subtracting the normalizer.
            sampled = arg_max(processed.logits)
            if self.draw_from_draft and expanded:
                drawn = self._at_nodes(tree, arg_max(tree.draft_log_probs))
        else:
            assert random is not None
            keys = random.node_keys(tree)
            warped, sampled = self._warp(processed.logits, uniform(keys, Purpose.TARGET), faults)
            # The draft can have more nodes than the tree: warp its distributions only if needed.
            if (self.warp_draft or tree.sampled) and expanded:
                points = uniform(tree.to_expanded(keys), Purpose.DRAFT)
                size = logits.shape[-1]
                draft, drawn = self._warp(
                    tree.draft_log_probs, points, token_ids=tree.token_ids, vocab_size=size
                )
                drawn = self._at_nodes(tree, drawn)
            if tree.sampled:  # the drafted tokens are draws already
                assert draft is not None
                drafted = tree.tokens[:, 1:]
                drawn = torch.cat([drafted, drawn[:, -1:]], 1)
                points = torch.stack(
                    [random.in_step(use, tree.size) for use in (Purpose.ACCEPT, Purpose.RESIDUAL)]
                )
                chain = SampledChain(
                    warped, draft, token_ids=tree.token_ids, drafted=drafted, uniform=points
                )
                followed = self.verify_chain(chain)
                sampled = torch.cat([followed, sampled[:, -1:]], 1)
        return VerificationInputs(
            tree=tree,
            raw=raw,
            processed=processed,
            warped=warped,
            warped_draft=draft,
            sampled=sampled,
            drawn=drawn if self.draw_from_draft else None,
            # `draw_uniform` is never set at temperature 0.
            uniform=uniform(keys, Purpose.RULE).float() if self.draw_uniform else None,
            faults=faults,
        )

    def _at_nodes(self, tree: DraftTree, drawn: Tensor) -> Tensor:
        """Convert ``[B, M]`` draws from the draft to ``[B, N]`` tokens of the target."""
        drawn = drawn if tree.token_ids is None else tree.token_ids[drawn]
        return drawn.gather(1, tree.draft_rows.clamp_min(0))

    def draw_draft(self, log_probs: Tensor, points: Tensor) -> Tensor:
        """Warp log-probabilities ``[B, D]``, and sample with numbers ``[B]``: ``[B]`` indices."""
        return self._warp(log_probs[:, None], points[:, None])[1][:, 0]

    def _warp(
        self,
        logits: Tensor,
        points: Tensor,
        faults: Tensor | None = None,
        token_ids: Tensor | None = None,
        vocab_size: int = 0,
    ) -> tuple[Distributions, Tensor]:
        """Warp ``[B, N, V]`` logits, and sample with the random numbers ``[B, N]``.

        A reduced draft vocabulary has logits ``[B, N, D]`` of the tokens ``token_ids`` ``[D]``.
        """
        if self.warp is not None:
            return self.warp(logits, points)
        flat, parts = logits.flatten(0, 1), []
        for rows in chunks(len(flat), flat):
            scores = flat[rows].clone()  # a warper may change it in place
            if token_ids is not None:  # warpers know the target's vocabulary
                whole = scores.new_full((len(scores), vocab_size), -torch.inf)
                scores = whole.index_copy_(1, token_ids, scores)
            for number, warper in enumerate(self.warpers, len(self.processors) + 1):
                scores = warper(None, scores)
                if faults is not None:
                    _mark_faults(faults.view(-1)[rows], scores, number)
            parts.append(scores if token_ids is None else scores[:, token_ids])
        return Warp()(torch.cat(parts).view_as(logits), points)

    def _process(
        self, tree: DraftTree, logits: Tensor, prefixes: Sequence[Prefix], faults: Tensor
    ) -> Tensor:
        """Process ``[B, N, V]`` logits, and mark the nodes where no token is left."""
        if self.needs_prefix:
            return torch.stack(
                [
                    self._process_row(tree, logits, row, prefix=prefix, faults=faults[row])
                    for row, prefix in enumerate(prefixes)
                ]
            )
        scores = logits.flatten(0, 1).clone()  # a processor may change it in place
        for number, item in enumerate(self.processors, 1):
            scores = item(None, scores)
            _mark_faults(faults.view(-1), scores, number)
        return scores.view_as(logits)

    def _process_row(
        self, tree: DraftTree, logits: Tensor, row: int, prefix: Prefix, faults: Tensor
    ) -> Tensor:
        """Process one row's ``[N, V]`` logits, each node with its own prefix.

        Level by level, because masked tokens, tokens that end the row and nodes below them are
        skipped: a constraint may have no continuation there.
        """
        processors = [
            (
                _for_row(item, prefix.row, prefix.rows),
                prefix.prompt_length if isinstance(item, AnswerProcessor) else 0,
            )
            for item in self.processors
        ]
        paths, parents, tokens = _paths(tree, row), tree.parents[row], tree.tokens[row]
        result = logits[row].clone()
        continues = ~torch.isin(tokens, tokens.new_tensor(prefix.ends))
        open_ = torch.zeros_like(parents, dtype=torch.bool)
        open_[0] = True
        for depth in range(tree.max_depth + 1):
            if depth:
                allowed = result[parents, tokens] > -torch.inf
                open_ = open_ | (open_[parents] & allowed & continues)
            nodes = (open_ & (tree.depths[row] == depth)).nonzero()[:, 0]
            if not len(nodes):
                break
            before = prefix.ids.to(nodes.device).expand(len(nodes), -1)
            ids = torch.cat([before, paths[nodes, :depth]], 1)
            scores, marks = logits[row, nodes].clone(), faults[nodes]
            for number, (item, first) in enumerate(processors, 1):
                scores = item(ids[:, first:], scores)
                _mark_faults(marks, scores, number)
            result[nodes], faults[nodes] = scores, marks
        return result


def _mark_faults(faults: Tensor, scores: Tensor, number: int) -> None:
    """Mark the ``[R]`` nodes where processor ``number`` left no token; unmark those it repaired."""
    broken = ~scores.amax(-1).isfinite()
    faults.masked_fill_((faults == 0) & broken, TARGET_FAULT + number).masked_fill_(~broken, 0)


def _check_processor(processor: LogitsProcessor) -> None:
    for kind, problem in UNSUPPORTED.items():
        if isinstance(processor, kind):
            raise ValueError(
                f"{type(processor).__name__} is not supported, because it {problem}: a draft tree"
                " has several prefixes per step, which are processed in any order"
            )


def check_warpers(
    warpers: Sequence[LogitsProcessor], vocab_size: int, device: torch.device
) -> None:
    """Call custom warpers once without previous tokens; raise ``ValueError`` if one fails."""
    for item in warpers:
        if type(item) in WARPERS:
            continue
        try:
            item(None, torch.zeros(1, vocab_size, device=device))
        except Exception as error:
            raise ValueError(
                f"logits_warper {name_of(item)} fails without previous tokens"
                f" ({type(error).__name__}: {one_line(error)}); if it reads them, pass it as"
                " logits_processor"
            ) from error


def _as_warp(warpers: Sequence[LogitsProcessor]) -> Warp | None:
    """Return the ``Warp`` that is equivalent to warpers of Hugging Face, None if there is none."""
    found: dict[str, Any] = {}
    for item in warpers:
        if type(item) is hf.LogitNormalization:
            continue  # changes no distribution
        name, before = STANDARD.get(type(item), ("", ()))
        fixed = getattr(item, "filter_value", -math.inf), getattr(item, "min_tokens_to_keep", 1)
        if not name or fixed != (-math.inf, 1) or not found.keys() <= set(before):
            return None
        found[name] = getattr(item, name)
    return Warp(**found)


def _for_row(processor: LogitsProcessor, row: int, rows: int) -> LogitsProcessor:
    """Return a processor for one of ``rows`` prompts, given one that may hold values for each."""
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
    at_level = tree.depths[row] == level[:, None]  # [max_depth, N]
    tokens = at_level * tree.tokens[row]  # [max_depth, N]
    return (tree.ancestors[row][:, None, :] * tokens).sum(-1)
