"""Load a drafter by its name, whatever its kind."""

from __future__ import annotations

from pathlib import Path

from eagle_fsd.model.checkpoint import load_head
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.target import Target


def load_drafter(name: str | Path, target: Target, token: str | None = None) -> Drafter:
    """Load a drafter and attach it to its target.

    Args:
        name: A folder or a Hub name; the kind follows from its files.
        target: The target to draft for.
        token: A Hugging Face token for gated repositories.

    Raises:
        CheckpointError: Files are missing or damaged.
        ValueError: The drafter belongs to another target.
    """
    return load_head(name, target, token=token)
