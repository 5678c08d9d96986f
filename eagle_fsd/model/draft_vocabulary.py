"""A frequency-ranked draft vocabulary for EAGLE-1/2 heads (FR-Spec, arXiv 2502.14856).

A head projects every level of a draft tree to the target's whole vocabulary, which can cost more
than its decoder layer. Restricted to the most frequent tokens, it uses that many rows of the
projection. Verification stays exact: the target can sample any token, and one that the head does
not know is never drafted.

The ranking is a file beside the head, ``token_ranks.safetensors``, with the tensor ``tokens``:
``[R]`` int64, the most frequent token first. ``eagle-fsd train ranks`` writes it, and so does a
training with ``--draft-vocab-size``, whose head drafts these tokens by default.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from eagle_fsd.model.checkpoint import RANKS_FILE, CheckpointError, drafter_file, read_ranks


def select_tokens(
    vocabulary: int | str | Path, drafter: str | Path, vocab_size: int, token: str | None = None
) -> Tensor:
    """Return the tokens ``[D]`` of a draft vocabulary, the most frequent first.

    ``vocabulary`` is the number of most frequent tokens by the file beside the drafter, or a file
    of ranked tokens, all of which are used. Raises :class:`CheckpointError` if the file is missing
    or damaged or has a token outside the vocabulary, and ``ValueError`` if the number is out of
    bounds.
    """
    if isinstance(vocabulary, int):
        found = drafter_file(drafter, RANKS_FILE, token)
        if found is None:
            raise CheckpointError(
                f"{drafter} has no ranking of tokens; write one with eagle-fsd train ranks"
            )
        tokens = read_ranks(found, vocab_size)
        if not 1 <= vocabulary <= len(tokens):
            raise ValueError(
                f"draft_vocabulary must be an integer in [1, {len(tokens)}]; got {vocabulary}"
            )
        tokens = tokens[:vocabulary]
    else:
        tokens = read_ranks(vocabulary, vocab_size)
    return tokens
