"""A frequency-ranked draft vocabulary for EAGLE-1/2 heads (FR-Spec, arXiv 2502.14856).

A head projects every level of a draft tree to the target's whole vocabulary, which can cost more
than its decoder layer. Restricted to the most frequent tokens, it uses that many rows of the
projection. Verification stays exact: the target can sample any token, and one that the head does
not know is never drafted.

The ranking is a file beside the head, ``token_ranks.safetensors``, with the tensor ``tokens``:
``[R]`` int64, the most frequent token first. ``eagle-fsd train ranks`` writes it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_fsd.model.checkpoint import RANKS_FILE, CheckpointError, drafter_file
from eagle_fsd.utils.files import atomic_path
from eagle_fsd.utils.text import one_line


def write_ranks(path: str | Path, counts: Tensor) -> None:
    """Rank tokens by how often they occur ``[V]``, equally frequent ones by their ids."""
    tokens = counts.sort(descending=True, stable=True).indices
    with atomic_path(Path(path)) as temporary:
        save_file({"tokens": tokens.contiguous()}, temporary)


def select_tokens(
    vocabulary: int | str | Path, drafter: str | Path, vocab_size: int, token: str | None = None
) -> Tensor:
    """Return the tokens ``[D]`` of a draft vocabulary in ascending order.

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
        tokens = _read_ranks(Path(found), vocab_size)
        if not 1 <= vocabulary <= len(tokens):
            raise ValueError(
                f"draft_vocabulary must be an integer in [1, {len(tokens)}]; got {vocabulary}"
            )
        tokens = tokens[:vocabulary]
    else:
        tokens = _read_ranks(Path(vocabulary), vocab_size)
    return tokens.sort().values


def _read_ranks(path: Path, vocab_size: int) -> Tensor:
    try:
        tokens = load_file(path)["tokens"]
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"{path} holds no ranking of tokens: {one_line(error)}") from error
    valid = tokens.dtype == torch.int64 and tokens.ndim == 1 and len(tokens) > 0
    if not valid or len(tokens.unique()) < len(tokens):
        raise CheckpointError(f"{path} holds no ranking of tokens: they are not distinct integers")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise CheckpointError(
            f"{path} ranks tokens from {tokens.min()} to {tokens.max()}, but the target has only"
            f" {vocab_size}"
        )
    return tokens
