"""Beam search with a drafter: Hugging Face's hypotheses from fewer target passes.

A drafter proposes a tree of continuations of every running hypothesis (beam), one target pass
scores all trees, and the host replays beam search on the scored nodes for as many steps as they
allow. (DSBD, arXiv 2409.16560, samples its beams; here they are exact.)

A step needs the target's distribution at the last token of each beam, which is known at the roots.
Later, a beam may have left its tree; its score is an upper bound of its continuations' scores. If
all selected continuations score above it, the replay continues, otherwise it ends.

Shape letters: ``B`` prompts, ``K`` beams per prompt, ``R`` = ``B * K`` rows of the engine, ``N``
tree nodes, ``F`` values of the features, ``C`` candidate tokens per node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_fsd.model.attention import folded_queries
from eagle_fsd.model.compilation import upload
from eagle_fsd.model.config import BeamSearchConfig
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.engine import Engine
from eagle_fsd.model.request import BROKEN_LOGITS, Answer, Request
from eagle_fsd.model.self_check import check_target
from eagle_fsd.model.stats import DecodeStats
from eagle_fsd.model.step import commit, draft_and_score
from eagle_fsd.model.target import Target
from eagle_fsd.model.tree import DraftTree
from eagle_fsd.model.verify import Origin, Verification


@dataclass
class BeamSearchOutput:
    """The result of :meth:`EagleFSD.beam_search`.

    Attributes:
        sequences: ``[B * num_return_sequences, prompt + new]``: for each prompt, its best
            hypotheses, best first; prompts as given, answers padded on the right.
        scores: ``[B * num_return_sequences]`` float32: the sum of the new tokens'
            log-probabilities, divided by their number to the power of the length penalty.
        stats: Statistics in which each beam search step of a prompt counts as one token, so
            ``stats.tau`` is the number of steps per target pass. The last step of a pass has the
            origin ``target``, the others ``exact``.
    """

    sequences: Tensor
    scores: Tensor
    stats: DecodeStats


@dataclass(frozen=True)
class ScoredTrees:
    """The trees that a target pass scored, on the host.

    ``log_probs``, the largest ones in descending order, and their ``tokens`` are ``[R][N][C]``;
    ``children[row]`` maps (node, token) to the child with this token.
    """

    log_probs: list[list[list[float]]]
    tokens: list[list[list[int]]]
    children: list[dict[tuple[int, int], int]]


@dataclass
class Beam:
    """A running hypothesis, held by a row of the engine."""

    row: int
    score: float  # sum of the new tokens' log-probabilities
    tokens: list[int]  # the new ones
    path: list[int] = field(default_factory=list)  # nodes before the last token's, root first
    node: int | None = 0  # of the last token; None if it was not scored


class Search:
    """Beam search for one prompt, with Hugging Face's rules, in some rows of the engine."""

    def __init__(
        self, rows: list[int], config: BeamSearchConfig, limit: int, eos_token_ids: frozenset[int]
    ) -> None:
        self.rows, self.config = rows, config
        self.limit, self.eos_token_ids = limit, eos_token_ids
        # All beams start at the prompt, so only one of them may have continuations.
        self.beams = [
            Beam(row, -math.inf if number else 0.0, []) for number, row in enumerate(rows)
        ]
        self.finished: list[tuple[float, list[int]]] = []

    @property
    def done(self) -> bool:
        """Whether further steps cannot, or must not, change the finished hypotheses."""
        if not self.beams:
            return True
        if len(self.finished) < self.config.num_beams:
            return False
        if self.config.early_stopping is True:
            return True
        penalty, length = self.config.length_penalty, len(self.beams[0].tokens)
        if self.config.early_stopping == "never" and penalty > 0.0:
            length = self.limit
        return self.beams[0].score / length**penalty <= self.finished[-1][0]

    def replay(self, scored: ScoredTrees) -> int:
        """Make as many steps as the scored nodes allow; return their number, at least 1."""
        steps = 0
        while not self.done and self._step(scored):
            steps += 1
        return steps

    def _step(self, scored: ScoredTrees) -> bool:
        """Extend every beam by a token; return False if that needs a node that was not scored."""
        width, length = self.config.num_beams, len(self.beams[0].tokens) + 1
        last = length == self.limit
        running: list[Beam] = []
        finished: list[tuple[float, list[int]]] = []
        for rank, (score, beam, token) in enumerate(self._candidates(scored)):
            if len(running) == width or (last and rank == width):
                break
            if token is None or beam.node is None:
                return False
            tokens = [*beam.tokens, token]
            if not last and token not in self.eos_token_ids:
                node = scored.children[beam.row].get((beam.node, token))
                path = [*beam.path, beam.node]
                running.append(Beam(beam.row, score, tokens, path=path, node=node))
            elif rank < width:
                finished.append((score / length**self.config.length_penalty, tokens))
        self.beams = running
        self.finished = sorted(self.finished + finished, key=itemgetter(0), reverse=True)[:width]
        return True

    def _candidates(self, scored: ScoredTrees) -> list[tuple[float, Beam, int | None]]:
        """Return (score, beam, token) of all continuations, in descending order of score.

        A beam that was not scored stands for its continuations, without a token.
        """
        found: list[tuple[float, Beam, int | None]] = []
        for beam in self.beams:
            if beam.node is None:
                found.insert(0, (beam.score, beam, None))  # before others of the same score
            else:
                log_probs = scored.log_probs[beam.row][beam.node]
                tokens = scored.tokens[beam.row][beam.node]
                found += [
                    (beam.score + log_prob, beam, token)
                    for log_prob, token in zip(log_probs, tokens, strict=True)
                ]
        return sorted(found, key=itemgetter(0), reverse=True)

    def settle(self) -> list[tuple[int, int]]:
        """Give every beam a row of its own; return the rows to copy, as (source, target)."""
        free = set(self.rows) - {beam.row for beam in self.beams}
        taken: set[int] = set()
        copies = []
        for beam in self.beams:
            if beam.row in taken:
                row = free.pop()
                copies.append((beam.row, row))
                beam.row = row
            taken.add(beam.row)
        return copies

    def renumber(self, rows: dict[int, int]) -> None:
        """Follow the engine's new numbering of its rows, by their previous numbers."""
        self.rows = [rows[row] for row in self.rows]
        for beam in self.beams:
            beam.row = rows[beam.row]


class BeamEngine(Engine):
    """An engine whose rows are beams: call :meth:`score` and :meth:`advance` in turn."""

    def score(self, count: int) -> tuple[DraftTree, Tensor, ScoredTrees]:
        """Score a tree for every row: trees, features ``[R, N, F]``, and ``C`` candidates."""
        execution, slots = self.execution, self._visible_slots()
        with folded_queries(self.target.model, self.state.folds):
            tree, scored = draft_and_score(
                self.state, *slots, prepare=execution.prepare, enter=self.clock.enter
            )
        self.clock.enter("verify")
        best = F.log_softmax(scored.logits, -1).topk(count)
        self.clock.enter("host")
        log_probs = best.values.cpu()
        if log_probs.isnan().any():
            raise FloatingPointError(BROKEN_LOGITS)
        children = [
            {edge: node for node, edge in enumerate(zip(parents, tokens, strict=True)) if node}
            for parents, tokens in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
        ]
        result = ScoredTrees(log_probs.tolist(), best.indices.tolist(), children)
        return tree, scored.features, result

    def advance(
        self, tree: DraftTree, features: Tensor, searches: Sequence[Search]
    ) -> list[Search]:
        """Commit the tokens that the searches took along ``tree``; return the unfinished ones."""
        self.clock.enter("cache")
        live = [search for search in searches if not search.done]
        if not live:
            return live
        order = self.drop([row for search in searches if search.done for row in search.rows])
        rows = {old: new for new, old in enumerate(order)}
        for search in live:
            search.renumber(rows)
            for source, target in search.settle():
                self._copy_rows([source], [target])
                self.rows[target].length = self.rows[source].length
                order[target] = order[source]
        beams = sorted((beam for search in live for beam in search.beams), key=attrgetter("row"))
        tokens = [beam.tokens[-len(beam.path) :] for beam in beams]
        kept = _as_verification(tree, [beam.path for beam in beams], tokens)
        commit(self.state, tree, features[order], kept)
        for row, (beam, new) in enumerate(zip(beams, tokens, strict=True)):
            self.rows[row].length += len(new)
            self._mark_written(row, self.rows[row].length)
            beam.path, beam.node = [], 0
        self.draft.observe(tokens)
        return live


def _as_verification(
    tree: DraftTree, paths: list[list[int]], tokens: list[list[int]]
) -> Verification:
    """Describe kept paths, root first, and each row's new tokens as a result of verification."""
    width, device = tree.max_depth + 1, tree.tokens.device
    origins = [_origins(len(path)) for path in paths]
    packed = [
        [value for part in parts for value in part + [0] * (width - len(part))]
        for parts in zip(paths, tokens, origins, strict=True)
    ]
    path, new, origin = upload(packed, device).split(width, 1)
    accepted = torch.zeros(len(paths), tree.size, dtype=torch.bool, device=path.device)
    return Verification(
        tokens=new,
        origins=origin,
        count=upload([len(path) for path in paths], device),
        path=path,
        accepted=accepted.scatter(1, path, True),
    )


def _origins(steps: int) -> list[int]:
    """Return the origins of the tokens of a pass: drafted ones, then the target's own."""
    return [int(Origin.EXACT)] * (steps - 1) + [int(Origin.TARGET)]


@torch.inference_mode()
def beam_search(
    target: Target,
    drafter: Drafter,
    config: BeamSearchConfig,
    requests: Sequence[Request],
    fill: int,
) -> BeamSearchOutput:
    """Search with a target on torch's current device; see :meth:`EagleFSD.beam_search`.

    ``fill`` is the token of answers beyond their ends.
    """
    width, eos = config.num_beams, frozenset(requests[0].eos_token_ids)
    if width + len(eos) > target.vocab_size:
        raise ValueError(
            "num_beams plus the number of end-of-sequence tokens must be at most the vocabulary of"
            f" {target.vocab_size} tokens; got {width} + {len(eos)}"
        )
    searches = [
        Search(list(range(index * width, (index + 1) * width)), config, request.max_new_tokens, eos)
        for index, request in enumerate(requests)
    ]
    check_target(target, projected=drafter.projects)
    engine = BeamEngine(target, drafter, requests[0].tree)
    rows = [Answer(request) for request in requests for _ in range(width)]
    engine.admit(rows)
    while engine.joining:
        engine.prefill()
    stats = DecodeStats.empty(len(requests))
    stats.seconds, stats.prefilled = engine.clock.seconds, sum(row.stats.prefilled for row in rows)
    live = searches
    while live:
        # A step takes at most `width` continuations of a beam, and skips those that end.
        trees, features, scored = engine.score(width + len(eos))
        stats.passes += 1
        for search in live:
            stats.add(searches.index(search), _origins(search.replay(scored)))
        live = engine.advance(trees, features, live)
        engine.clock.enter(None)
        engine.clock.collect()
    kept = config.num_return_sequences
    best = [found for search in searches for found in search.finished[:kept]]
    longest = max(len(tokens) for _, tokens in best)
    with torch.inference_mode(False):  # callers may change the result
        given = torch.stack([request.ids for request in requests for _ in range(kept)])
        new = given.new_tensor([tokens + [fill] * (longest - len(tokens)) for _, tokens in best])
        scores = [score for score, _ in best]
        return BeamSearchOutput(
            torch.cat([given, new], 1),
            torch.tensor(scores, dtype=torch.float32, device=given.device),
            stats,
        )
