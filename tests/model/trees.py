"""Hand-built trees over five tokens, and readable outcomes of their verification."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_fsd.model.random_numbers import RandomNumbers, seed_keys
from eagle_fsd.model.tree import DraftTree, ancestor_matrix
from eagle_fsd.model.verify import Origin, Verification, VerificationInputs
from eagle_fsd.model.vocabulary import Distributions

EXACT, FUZZY, TARGET = Origin.EXACT, Origin.FUZZY, Origin.TARGET
A, B, C, D, E = range(5)
VOCAB_SIZE = 5
UNIFORM = [0.2] * VOCAB_SIZE
#: A threshold above every divergence.
ALWAYS = math.inf


def depths_of(parents: Sequence[int]) -> list[int]:
    """Return the depth of every node."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def make_tree(
    parents: Sequence[int],
    tokens: Sequence[int],
    q: dict[int, Sequence[float]] | None = None,
    max_depth: int | None = None,
) -> DraftTree:
    """Build one row; ``q`` holds the draft's probabilities at the expanded nodes."""
    q = q or {}
    rows = {node: row for row, node in enumerate(sorted(q))}
    depths = depths_of(parents)
    draft = torch.tensor([q[node] for node in sorted(q)], dtype=torch.float32)
    return DraftTree(
        tokens=torch.tensor([tokens]),
        parents=torch.tensor([parents]),
        depths=torch.tensor([depths]),
        ancestors=ancestor_matrix(torch.tensor([parents]), len(parents)),
        draft_rows=torch.tensor([[rows.get(node, -1) for node in range(len(parents))]]),
        draft_log_probs=draft.reshape(1, len(q), draft.shape[-1] if q else VOCAB_SIZE).log(),
        max_depth=max(depths) if max_depth is None else max_depth,
    )


def make_inputs(
    tree: DraftTree,
    p: Sequence[Sequence[float]],
    sampled: Sequence[int],
    drawn: Sequence[int] | None = None,
    masked: Sequence[tuple[int, int]] = (),
) -> VerificationInputs:
    """Build the inputs from the target's probabilities at every node.

    The (node, token) pairs in ``masked`` have processed and warped log-probability ``-inf``; their
    raw log-probability stays.
    """
    raw = torch.tensor([p], dtype=torch.float32).log()
    processed = raw.clone()
    for node, token in masked:
        processed[0, node, token] = -torch.inf
    return VerificationInputs(
        tree,
        raw=Distributions.of(raw),
        processed=Distributions.of(processed),
        warped=Distributions.of(processed),
        warped_draft=Distributions.normalized(tree.draft_log_probs),
        sampled=torch.tensor([sampled]),
        drawn=None if drawn is None else torch.tensor([drawn]),
    )


def dense(law: Distributions) -> Tensor:
    """Return ``[B, N, V]``: the log-probabilities of distributions."""
    return law.rows(torch.arange(law.peak.numel())).view_as(law.logits)


def first_numbers(seed: int, rows: int) -> RandomNumbers:
    """Return the random numbers of a first step."""
    return RandomNumbers(seed_keys(seed, rows), torch.zeros(rows, dtype=torch.long))


def outcome(kept: Verification, row: int = 0) -> tuple[list[int], list[Origin], list[int]]:
    """Return emitted tokens, their origins and the kept nodes; check that the rest is padding."""
    count = int(kept.count[row])
    assert (kept.origins[row, count:] == Origin.PADDING).all()
    assert (kept.path[row, count:] == 0).all()
    origins = [Origin(item) for item in kept.origins[row, :count].tolist()]
    return kept.tokens[row, :count].tolist(), origins, kept.path[row, :count].tolist()
