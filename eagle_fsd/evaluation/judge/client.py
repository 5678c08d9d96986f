"""Ask a judge for what a file of judgments lacks.

The judge is asked once for each prompt: equal prompts share its reply, so that a judge's noise does
not tell equal answers apart. As with answer files, a process killed at any time loses no complete
line.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.judge.prompts import MAX_TURNS, JudgeError, Prompt
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.utils.chat_api import ChatClient, Endpoint, EndpointError, map_concurrently
from eagle_fsd.utils.files import append_line, atomic_write, read_jsonl, truncate_partial_line

#: Maximum length of a judgment in tokens, as in FastChat.
MAX_TOKENS = 2048


@dataclass(frozen=True)
class Reply:
    """A judge's reply, and its time in seconds since 1970."""

    text: str
    tstamp: float


@dataclass(frozen=True)
class Judged(ABC):
    """A judgment of one turn, a line of FastChat's files; without replies until it is made."""

    question_id: int | str
    model: str  # name of the method
    turn: int  # from 1
    judge: str
    answer_ids: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    replies: tuple[Reply, ...] = ()  # to each prompt

    #: Fields of a line that tell which judgment it holds.
    KEYS: ClassVar[tuple[str, ...]]

    @property
    def requests(self) -> tuple[Prompt, ...]:
        """The prompts that have no reply."""
        return () if self.replies else self.prompts

    @property
    @abstractmethod
    def key(self) -> tuple[Hashable, ...]:
        """The values of :attr:`KEYS`."""

    @abstractmethod
    def as_record(self) -> Record:
        """Return the line: FastChat's fields and the answers' ids."""

    @abstractmethod
    def saved_replies(self, record: Record) -> tuple[Reply, ...]:
        """Return the replies in a line."""


Result = TypeVar("Result", bound=Judged)


def judgment_file(out: str | Path, judge: str, mode: Literal["single", "pair"]) -> Path:
    """Return the path of a judge's judgments in the folder of an evaluation."""
    return Path(out) / "model_judgment" / f"{judge.replace('/', '_')}_{mode}.jsonl"


def judged_turns(
    questions: Sequence[Question], *records: Sequence[Record]
) -> Iterator[tuple[Question, int, list[list[str]], tuple[str, ...]]]:
    """Yield each turn to judge, from 1, with all turns of every method's answer, and their ids.

    Questions without an answer of every method are skipped.
    """
    by_id = [{record["question_id"]: record for record in found} for found in records]
    for question in questions:
        if all(question.question_id in found for found in by_id):
            same = [found[question.question_id] for found in by_id]
            answers = [record["choices"][0]["turns"] for record in same]
            ids = tuple(record["answer_id"] for record in same)
            for turn in range(1, min(len(question.turns), MAX_TURNS, *map(len, answers)) + 1):
                yield question, turn, answers, ids


def ask(
    endpoint: Endpoint,
    wanted: Sequence[Result],
    path: Path,
    parallel: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> list[Result]:
    """Make all judgments that a file does not hold yet, add them to it, and return all.

    A line of the file is discarded if another one would be written now, because the answer or the
    prompt has changed. Lines of other judgments are kept at the end. If the endpoint fails, raise
    JudgeError; the judgments so far are saved.
    """
    truncate_partial_line(path)
    lines: list[Record] = read_jsonl(path) if path.exists() else []

    def key_of(line: Record) -> tuple[Hashable, ...]:
        return tuple(line[name] for name in wanted[0].KEYS) if wanted else ()

    saved = {key_of(line): line for line in lines}
    done: dict[Hashable, Result] = {}
    known: dict[Prompt, Reply] = {}
    for item in wanted:
        record = saved.get(item.key)
        if record is not None:
            judged = replace(item, replies=item.replies or item.saved_replies(record))
            if judged.as_record() == record:
                done[item.key] = judged
                known.update(zip(item.requests, judged.replies, strict=False))
    path.parent.mkdir(parents=True, exist_ok=True)

    def finish(item: Result) -> None:
        replies = item.replies or tuple(known[prompt] for prompt in item.prompts)
        judged = done[item.key] = replace(item, replies=replies)
        append_line(path, json.dumps(judged.as_record()))
        if progress is not None:
            progress(len(done), len(wanted))

    waiting: dict[Prompt, list[Result]] = defaultdict(list)
    for item in wanted:
        if item.key not in done:
            missing = [prompt for prompt in dict.fromkeys(item.requests) if prompt not in known]
            for prompt in missing:
                waiting[prompt].append(item)
            if not missing:
                finish(item)
    if waiting:
        try:
            client = ChatClient(endpoint)

            def complete(prompt: Prompt) -> str:
                return client.complete(prompt.messages(), temperature=0, max_tokens=MAX_TOKENS)

            with closing(map_concurrently(complete, waiting, parallel)) as found:
                for prompt, text in found:
                    known[prompt] = Reply(text, time.time())
                    for item in waiting[prompt]:
                        if all(needed in known for needed in item.prompts):
                            finish(item)
        except EndpointError as error:
            raise JudgeError(
                f"the judge {endpoint.model} at {endpoint.redacted_url} failed ({error});"
                " answers and judgments so far are saved: run the same command again to resume"
            ) from error
    others = [line for line in lines if key_of(line) not in done]
    records = [*(done[item.key].as_record() for item in wanted), *others]
    atomic_write(path, "".join(json.dumps(record) + "\n" for record in records))
    return [done[item.key] for item in wanted]
