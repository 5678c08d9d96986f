"""Write generated chats to a file, as training data for the bundled head or for experiments."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from eagle_fsd.bundled.problems import chats
from eagle_fsd.utils.files import atomic_write


def write_chats(path: Path, count: int = 3000, seed: int = 3) -> Path:
    """Write generated training chats as JSON Lines, unless the file exists.

    Args:
        path: The file to write.
        count: Number of chats.
        seed: Seed of the generator.

    Returns:
        ``path``.
    """
    if not path.exists():
        generated = itertools.islice(chats("train", seed), count)
        lines = [json.dumps({"messages": chat}) + "\n" for chat in generated]
        atomic_write(path, "".join(lines))
    return path
