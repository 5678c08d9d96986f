"""Find chats that share a question with a benchmark, so that no head is trained on one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from eagle_fsd.train.chat_file import Chat
from eagle_fsd.utils.files import read_jsonl

#: Words in a row that count as the same question, as in GPT-3's report; shorter questions count if
#: they are equal as a whole.
WORDS = 13


class Overlaps:
    """An index of questions, which chats are compared with."""

    def __init__(self, questions: Iterable[str]) -> None:
        self._found: dict[tuple[str, ...], str] = {}
        for question in questions:
            for part in _parts(question):
                self._found.setdefault(part, question)

    def find(self, chat: Chat) -> str | None:
        """Return a question that counts as the same as a user's message, or None."""
        messages = (item["content"] for item in chat if item["role"] == "user")
        parts = (part for message in messages for part in _parts(message))
        return next((self._found[part] for part in parts if part in self._found), None)


def read_questions(path: Path) -> Iterator[str]:
    """Yield the questions of a JSON Lines file in any of the benchmarks' layouts."""
    for record in read_jsonl(path):
        yield from record.get("turns") or [record.get("question") or record["prompt"]]


def _parts(text: str) -> Iterator[tuple[str, ...]]:
    """Yield all runs of :data:`WORDS` words; of a shorter text, all words."""
    words = re.findall(r"\w+", text.casefold())
    for start in range(max(1, len(words) - WORDS + 1)):
        yield tuple(words[start : start + WORDS])
