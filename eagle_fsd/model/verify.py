"""Verification: select the path of a draft tree to keep, and the token that follows it.

One code path serves greedy decoding and sampling, every acceptance rule and every batch size, in a
few tensor operations over ``[B, N]`` and without host synchronization.

Shape letters: ``B`` rows, ``N`` tree nodes, ``V`` vocabulary, ``D`` tokens of the draft's
vocabulary, ``M`` expanded nodes, ``R`` flattened nodes, ``Q`` queried (node, token) pairs, ``A`` =
``max_depth + 1``, the largest number of tokens that one step can emit.

At every node ``i`` the target's distribution ``p_i`` is known, and one token ``s_i`` is sampled
from it. An edge into node ``c`` is *exact* when ``c`` carries its parent's ``s``; it is *relaxed*
when the acceptance rule's gate is open at the parent and the rule admits the token. The deepest
path of accepted edges is kept, and ``s`` at its last node follows as the bonus token. With
``selection="priced"`` it is the path with the largest ``depth - price * sum of regret``, where the
regret of a relaxed edge is ``max log p - log p(x)`` and exact edges cost nothing.

Without relaxed edges this is lossless: following the target's own sample while it is in the tree
has the same distribution as EAGLE-2's recursive rejection over deterministic candidates
(arXiv 2406.16858). For a chain whose tokens were sampled from the draft,
:mod:`~eagle_fsd.model.residual` draws ``s`` so that it agrees with them as often as possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.model.config import AcceptanceConfig
from eagle_fsd.model.divergence import LOG_FLOOR
from eagle_fsd.model.tree import DraftTree
from eagle_fsd.model.vocabulary import Distributions, chunks

#: What :meth:`VerificationInputs.row_faults` returns for the target; processors and warpers follow.
TARGET_FAULT = 1
#: Values of ``selection`` that compare whole paths; the others keep one child per node.
WHOLE_PATHS = ("longest", "priced")
#: Options that :func:`verify` applies by default.
DEFAULT_OPTIONS = AcceptanceConfig()


class Origin(IntEnum):
    """Where an emitted token came from."""

    PADDING = 0  #: no token
    EXACT = 1  #: drafted, and equal to the target's own sample
    FUZZY = 2  #: another token than the target's sample: drafted, or chosen in the sample's place
    TARGET = 3  #: the target's sample after the kept path (the bonus token)


@dataclass
class VerificationInputs:
    """A draft tree and both models' distributions on it; the input of every acceptance rule.

    Attributes:
        tree: The draft tree.
        raw: The softmax of the target's logits at each node.
        processed: After logits processors, before the warpers (temperature, top-k, top-p, min-p).
            Without processors this is the object ``raw``.
        warped: After the warpers: the distributions that are sampled from. At temperature 0 this is
            the object ``processed``.
        warped_draft: The draft's distributions at its ``M`` expanded nodes after the same warpers.
            At temperature 0 they are not warped, and ``max_log_prob`` is not computed; above, None
            if no node was expanded or nothing needs them.
        sampled: ``[B, N]`` the target's own sample ``s`` at each node; where the tree's tokens were
            sampled, see :mod:`~eagle_fsd.model.residual`.
        drawn: ``[B, N]`` one token sampled from the draft's distribution at each expanded node
            (undefined elsewhere); at temperature 0 its most likely one, and the drafted token if
            the tree's tokens were sampled. None unless ``selection="sample"`` or the rule needs it.
        uniform: ``[B, N]`` uniform random numbers, independent of ``sampled``. None at temperature
            0, and if the rule does not need them.
        state: ``[B, W]`` float32, the rule's state of every row, see :meth:`AcceptanceRule.start`.
        faults: ``[B, N]`` which processor or warper left no token at each node, see
            :meth:`row_faults`; None if neither is called.
    """

    tree: DraftTree
    raw: Distributions
    processed: Distributions
    warped: Distributions
    warped_draft: Distributions | None
    sampled: Tensor
    drawn: Tensor | None = None
    uniform: Tensor | None = None
    state: Tensor | None = None
    faults: Tensor | None = None
    _edge_log_prob: Tensor | None = field(default=None, init=False, repr=False)
    _regret: Tensor | None = field(default=None, init=False, repr=False)

    def row_faults(self, kept: Verification) -> Tensor:
        """Find the rows in which no token can be chosen, and the cause: ``[B]`` int64.

        0 is no fault. :data:`TARGET_FAULT` is NaN, infinity, or -inf for every token in the
        target's logits at any node. ``TARGET_FAULT + i`` is the same at the end of the kept path,
        which the ``i``-th of the processors and warpers, counted from 1, returned and no later one
        repaired. No token below such a node is accepted.
        """
        if self.faults is None:
            broken = (self.raw.log_total + self.warped.log_total).isnan().any(1)
            return broken * TARGET_FAULT
        own = self.faults.gather(1, kept.path).amax(1)
        return own.masked_fill(self.raw.log_total.isnan().any(1), TARGET_FAULT)

    @property
    def peak(self) -> Tensor:
        """``[B, N]`` log-probability of the most likely token of :attr:`processed`."""
        return self.processed.max_log_prob

    @property
    def edge_log_prob(self) -> Tensor:
        """``[B, N]`` log-probability of each token at its parent, by :attr:`processed`.

        This and :attr:`regret` are computed once, so they must not be changed in place.
        """
        if self._edge_log_prob is None:
            self._edge_log_prob = self.log_prob(self.tree.parents, self.tree.tokens)
        return self._edge_log_prob

    @property
    def regret(self) -> Tensor:
        """``[B, N]`` nats: ``max log p - log p(x)`` of each token at its parent; 0 at the root."""
        if self._regret is None:
            regret = self.peak.gather(1, self.tree.parents) - self.edge_log_prob
            self._regret = regret.masked_fill_(self.tree.depths == 0, 0.0)
        return self._regret

    def log_prob(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Look up ``log p`` of tokens ``[B, Q]`` at nodes ``[B, Q]``, by :attr:`processed`."""
        return self.processed.log_prob(nodes, tokens)

    def above_floor(self, nodes: Tensor, tokens: Tensor, ratio: float) -> Tensor:
        """Whether ``p(x) >= ratio * max p`` for tokens ``[B, Q]`` at nodes ``[B, Q]``."""
        return (self.log_prob(nodes, tokens) - self.peak.gather(1, nodes)).exp() >= ratio

    def supported(self, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Whether tokens ``[B, Q]`` are in the support that processors and warpers left."""
        return self.warped.log_prob(nodes, tokens) > -torch.inf

    def pairs(self, nodes: Tensor, warped: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over both models' distributions at nodes ``[B, Q]``, a few nodes at a time.

        Yields ``[R, V]`` and ``[R, D]`` log-probabilities of the target and of the draft at the
        next of the flattened nodes. Where a node was not expanded, the draft's are another node's.
        ``warped`` takes the distributions after the warpers, and raises ``ValueError`` if there are
        none of the draft.
        """
        tree, draft = self.tree, self.warped_draft
        if warped and draft is None:
            raise ValueError(
                "warped_draft is None: a rule that reads it must set needs_warped_draft"
            )
        target = self.warped if warped else self.raw
        row = torch.arange(len(nodes), device=nodes.device)[:, None]
        expanded = tree.draft_rows.gather(1, nodes).clamp_min(0)
        at_draft = (expanded + row * tree.draft_log_probs.shape[1]).flatten()
        at_target = (nodes + row * tree.size).flatten()
        for part in chunks(len(at_target), target.logits):
            if warped and draft is not None:
                log_q = draft.rows(at_draft[part])
            else:
                log_q = tree.draft_log_probs.flatten(0, 1).index_select(0, at_draft[part])
            yield target.rows(at_target[part]), log_q


class AcceptanceRule:
    """Base class of rules that accept drafted tokens although the target sampled another token.

    An edge is relaxed if :meth:`gate` is open at the parent and :meth:`admits` accepts the child's
    token. :meth:`settle` can then revoke edges, given the whole tree. The built-in rules are in
    :mod:`eagle_fsd.model.acceptance`. A custom rule overrides the methods that it needs, and the
    attributes as class attributes or properties.

    A rule that depends on what a row has emitted keeps :attr:`state_size` numbers per row on the
    device. They follow the row when rows are dropped, and are in :attr:`VerificationInputs.state`.

    Rows with equal rules and options are verified together. Rules that are dataclasses are equal if
    their fields are, others if they are one object. An evaluation resumes if the rule has the same
    ``repr``, by default its attributes that are numbers, strings, tuples, None and rules.

    Attributes:
        needs_uniform: Whether the rule reads :attr:`VerificationInputs.uniform`.
        needs_drawn: Whether it reads :attr:`VerificationInputs.drawn`.
        capturable: Whether it consists of tensor operations that never wait for the device. Its
            attributes must then not change after the first step, which CUDA graphs repeat.
    """

    needs_uniform = False
    needs_drawn = False
    capturable = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" not in vars(cls):
            return
        # What it inherits from a dataclass ignores the attributes that its __init__ may set.
        for name, method in (
            ("__eq__", object.__eq__),
            ("__hash__", object.__hash__),
            ("__repr__", AcceptanceRule.__repr__),
        ):
            owner = next(base for base in cls.__mro__ if name in vars(base))
            if owner is not cls and "__dataclass_fields__" in vars(owner):
                setattr(cls, name, method)

    def __repr__(self) -> str:
        plain = (bool, int, float, str, tuple, type(None), AcceptanceRule)
        own = (f"{name}={item!r}" for name, item in vars(self).items() if isinstance(item, plain))
        return f"{type(self).__name__}({', '.join(own)})"

    @property
    def needs_warped_draft(self) -> bool:
        """Whether the rule reads :attr:`VerificationInputs.warped_draft`."""
        return False

    @property
    def judges_paths(self) -> bool:
        """Whether :meth:`settle` revokes edges, which requires whole paths."""
        return type(self).settle is not AcceptanceRule.settle

    @property
    def replaces_samples(self) -> bool:
        """Whether :meth:`choose` replaces the target's samples."""
        return type(self).choose is not AcceptanceRule.choose

    @property
    def state_size(self) -> int:
        """``W``, the number of values that the rule keeps per row."""
        return 0

    def start(self, prompts: Sequence[Tensor]) -> Tensor:
        """Return the state before the first step, ``[B, W]`` float32; by default zeros.

        ``prompts`` are ``[S]`` token ids of each row, on the device of the state.
        """
        shape, device = (len(prompts), self.state_size), prompts[0].device
        return torch.zeros(shape, dtype=torch.float32, device=device)

    def advance(self, inputs: VerificationInputs, kept: Verification) -> Tensor:
        """Return the ``[B, W]`` state after a step; by default unchanged.

        ``inputs`` and ``kept`` are the inputs and the result of the step.
        """
        assert inputs.state is not None
        return inputs.state

    def choose(self, inputs: VerificationInputs) -> Tensor:
        """Choose the token that is exact below each node and ends a path there; by default ``s``.

        ``inputs`` are the tree and both models' distributions on it, the result is ``[B, N]`` token
        ids. Where there is no draft, it must be ``s``: steps whose trees are their roots do not
        call this.
        """
        return inputs.sampled

    def gate(self, inputs: VerificationInputs) -> Tensor:
        """Select the nodes below which tokens may be relaxed: ``[B, N]`` bool; by default all.

        ``inputs`` are the tree and both models' distributions on it. With ``fallback="stop"``, a
        closed gate also ends the path: a rule that relaxes nothing overrides :meth:`admits`.
        """
        return torch.ones_like(inputs.tree.tokens, dtype=torch.bool)

    def admits(self, inputs: VerificationInputs, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Select the tokens that may follow open nodes: ``[B, Q]`` bool; by default all.

        ``inputs`` are those of :meth:`gate`, ``nodes`` and ``tokens`` ``[B, Q]`` node indices and
        token ids.
        """
        return torch.ones_like(nodes, dtype=torch.bool)

    def settle(self, inputs: VerificationInputs, exact: Tensor, accepted: Tensor) -> Tensor:
        """Revoke accepted edges, given the whole tree; by default none.

        ``inputs`` are those of :meth:`gate`. ``exact`` and ``accepted`` are ``[B, N]`` bool: the
        nodes whose incoming edge is exact, and those whose edge is accepted so far, of which the
        result is a subset.
        """
        return accepted


@dataclass(frozen=True)
class Verification:
    """The result of verifying a tree.

    Attributes:
        tokens: ``[B, A]`` token ids; the first ``count`` of each row are emitted.
        origins: ``[B, A]`` :class:`Origin` of each token, ``PADDING`` from ``count`` on.
        count: ``[B]`` number of emitted tokens, at least 1: the kept path without its root, plus
            the bonus token.
        path: ``[B, A]`` the kept nodes, root first; 0 from ``count`` on.
        accepted: ``[B, N]`` bool, the root and the nodes whose incoming edge is accepted.
    """

    tokens: Tensor
    origins: Tensor
    count: Tensor
    path: Tensor
    accepted: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Verification], order: Tensor) -> Verification:
        """Join the results for groups of rows; ``order`` ``[B]`` indexes the rows of all parts."""
        names = [item.name for item in fields(cls)]
        return cls(
            **{name: torch.cat([getattr(part, name) for part in parts])[order] for name in names}
        )


def verify(
    inputs: VerificationInputs, rule: AcceptanceRule, options: AcceptanceConfig = DEFAULT_OPTIONS
) -> Verification:
    """Keep one path of the tree.

    Args:
        inputs: The tree and both models' distributions on it.
        rule: Selects the tokens that are relaxed. A token that a processor or a warper masks is
            never accepted, whatever the rule.
        options: Their ``fallback``, ``selection`` and ``price`` apply; the others belong to the
            rule. Where the gate is closed, ``fallback="stop"`` emits the target's sample and ends
            the path, as in the paper's chain algorithm. A rule that judges whole paths needs a
            ``selection`` from :data:`WHOLE_PATHS`.
    """
    tree = inputs.tree
    tokens = tree.tokens
    chosen, exact, accepted = accepted_edges(inputs, rule, options)
    accepted[:, 0] = True

    # Log-probabilities add up along a path, to -inf where an edge is not accepted.
    edge_score = torch.where(accepted, inputs.edge_log_prob.clamp_min(LOG_FLOOR), -torch.inf)
    edge_score[:, 0] = 0.0
    score = tree.path_sum(edge_score)  # [B, N]
    value = tree.depths.to(score)
    if options.selection == "priced":
        cost = tree.path_sum(torch.where(accepted & ~exact, inputs.regret, 0.0))
        value = value - options.price * cost
    value = torch.where(score > -torch.inf, value, -torch.inf)
    best = value == value.amax(1, keepdim=True)
    end = torch.where(best, score, -torch.inf).argmax(1, keepdim=True)  # [B, 1]

    length = tree.max_depth + 1
    on_path = tree.ancestors.gather(1, end[:, :, None].expand(-1, 1, tree.size))[:, 0]
    # Nodes off the path are scattered into a spare slot.
    slots = torch.where(on_path, tree.depths, length)
    path = torch.zeros_like(tokens[:, :1]).repeat(1, length + 1)
    nodes = torch.arange(tree.size, device=tokens.device).expand_as(tokens)
    path = path.scatter_(1, slots, nodes)[:, :length]
    count = tree.depths.gather(1, end)[:, 0] + 1

    # The kept nodes without the root, then the token that follows the last of them.
    step = torch.arange(length, device=tokens.device)
    following = torch.cat([path[:, 1:], path.new_zeros(path.shape[0], 1)], 1)
    emitted = tokens.gather(1, following).scatter(1, count[:, None] - 1, chosen.gather(1, end))
    own = emitted == inputs.sampled.gather(1, path)
    origins = torch.where(own, int(Origin.EXACT), int(Origin.FUZZY))
    origins = torch.where(own & (step == count[:, None] - 1), int(Origin.TARGET), origins)
    origins = torch.where(step < count[:, None], origins, int(Origin.PADDING))
    return Verification(tokens=emitted, origins=origins, count=count, path=path, accepted=accepted)


def accepted_edges(
    inputs: VerificationInputs, rule: AcceptanceRule, options: AcceptanceConfig = DEFAULT_OPTIONS
) -> tuple[Tensor, Tensor, Tensor]:
    """Decide about every edge of the tree; see :func:`verify` for the arguments.

    Returns ``[B, N]`` each: the token to emit if the path ends at a node, whether the edge into a
    node is exact, and whether it is accepted. At the root, the last two have no meaning.
    """
    parents, tokens = inputs.tree.parents, inputs.tree.tokens
    gate = rule.gate(inputs)
    chosen = rule.choose(inputs)
    if inputs.warped is inputs.processed:
        supported = inputs.edge_log_prob > -torch.inf
    else:
        supported = inputs.supported(parents, tokens)
    exact = tokens == chosen.gather(1, parents)
    relaxed = gate.gather(1, parents) & rule.admits(inputs, parents, tokens)
    accepted = exact | relaxed
    if options.selection not in WHOLE_PATHS:
        if options.selection == "target":
            chosen = _preferred_child(inputs, exact, relaxed & supported, chosen)
        else:
            chosen = _draft_draw(inputs, rule, gate, chosen)
        accepted = tokens == chosen.gather(1, parents)
    if options.fallback == "stop":
        accepted = accepted & gate.gather(1, parents)
    return chosen, exact, rule.settle(inputs, exact, accepted & supported)


def verify_root(inputs: VerificationInputs) -> Verification:
    """Verify a tree that consists of its root: emit the target's sample."""
    root = torch.zeros_like(inputs.sampled)
    origins = torch.full_like(root, int(Origin.TARGET))
    accepted = torch.ones_like(root, dtype=torch.bool)
    return Verification(
        tokens=inputs.sampled,
        origins=origins,
        count=torch.ones_like(root[:, 0]),
        path=root,
        accepted=accepted,
    )


def _preferred_child(
    inputs: VerificationInputs, exact: Tensor, relaxed: Tensor, sampled: Tensor
) -> Tensor:
    """Return ``[B, N]``: the likeliest relaxed child's token, if no child is exact.

    Elsewhere it is ``sampled``.
    """
    tree = inputs.tree
    score = torch.where(relaxed, inputs.edge_log_prob, -torch.inf)
    score = torch.where(exact, torch.inf, score)
    score[:, 0] = -torch.inf
    is_child = tree.parents[:, None, :] == torch.arange(tree.size, device=score.device)[:, None]
    best, child = torch.where(is_child, score[:, None, :], -torch.inf).max(-1)  # [B, N]
    return torch.where(best > -torch.inf, tree.tokens.gather(1, child), sampled)


def _draft_draw(
    inputs: VerificationInputs, rule: AcceptanceRule, gate: Tensor, sampled: Tensor
) -> Tensor:
    """Return ``[B, N]``: the draft's sample where the gate is open and the token is admitted.

    Elsewhere it is ``sampled``, by default from ``p``. With an open gate, the emitted token's
    distribution is then, unless chains are sampled, ``q`` on the admitted tokens plus ``q``'s
    remaining mass times ``p``. If only the support is checked, its total variation distance from
    ``p`` is at most that of ``q``; a floor moves mass to likelier tokens, which can increase it.
    """
    if inputs.drawn is None:
        raise ValueError('selection="sample" needs a draw from the draft at every node')
    nodes = torch.arange(inputs.tree.size, device=gate.device).expand_as(gate)
    gate = gate & (inputs.tree.draft_rows >= 0)  # elsewhere there is no draft distribution
    admitted = rule.admits(inputs, nodes, inputs.drawn)
    admitted = admitted & inputs.supported(nodes, inputs.drawn)
    return torch.where(gate & admitted, inputs.drawn, sampled)
