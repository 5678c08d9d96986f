"""Generated chats as a file, to train the bundled pair's head on and to try the trainer with."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from eagle_fsd.bundled.problems import chats


def write_chats(path: Path, count: int, seed: int = 3) -> Path:
    """``count`` generated training chats as JSON Lines; a file that is there is kept."""
    if not path.exists():
        lines = (
            json.dumps({"messages": chat}) + "\n"
            for chat in itertools.islice(chats("train", seed), count)
        )
        part = path.with_suffix(".part")
        part.write_text("".join(lines), encoding="utf-8")
        part.replace(path)
    return path
