"""Ask a judge for what a file of judgments lacks.

The judge is asked once for each prompt: equal prompts share its reply, so that a judge's noise does
not tell equal answers apart. As with answer files, a process killed at any time loses no complete
line.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.judge.client import JudgeClient, JudgeEndpoint
from eagle_fsd.evaluation.judge.prompts import Prompt
from eagle_fsd.utils.chat_api import map_concurrently
from eagle_fsd.utils.files import append_line, atomic_write, read_jsonl, truncate_partial_line


@dataclass(frozen=True)
class Reply:
    """A judge's reply.

    Attributes:
        text: The reply.
        tstamp: Seconds since 1970.
    """

    text: str
    tstamp: float


class Judged(Protocol):
    """A judgment that a file holds as one line."""

    def as_record(self) -> Record:
        """Return the line with FastChat's keys."""


Result = TypeVar("Result", bound=Judged, covariant=True)


class Task(Protocol[Result]):
    """A judgment to make."""

    @property
    def key(self) -> Hashable:
        """What is judged; see ``key_of`` of :func:`run_tasks`."""

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The requests to the judge; without any, the judgment is known."""

    def judgment(self, replies: Sequence[Reply]) -> Result:
        """Build the judgment.

        Args:
            replies: The reply to each prompt.
        """

    def saved_replies(self, record: Record) -> list[Reply]:
        """Return the replies in a line of the file.

        Args:
            record: The line.
        """


def run_tasks(
    endpoint: JudgeEndpoint,
    tasks: Sequence[Task[Result]],
    path: Path,
    key_of: Callable[[Record], Hashable],
    parallel: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> list[Result]:
    """Make all judgments that a file does not hold yet, and add them to it.

    A line of the file is discarded if its task would write another one, because the answer or the
    prompt has changed. Lines of other tasks are kept at the end.

    Args:
        endpoint: The judge.
        tasks: The judgments to make.
        path: The file.
        key_of: Returns the key of the task that wrote a line.
        parallel: Maximum number of concurrent requests.
        progress: Called after each judgment with the number of judgments so far and the total.

    Returns:
        The judgment of each task; the file has the same order at the end.

    Raises:
        JudgeError: The endpoint cannot be reached or rejects a request; the judgments so far are
            saved.
        ValueError: ``parallel`` is below 1.
    """
    if parallel < 1:
        raise ValueError(f"parallel must be at least 1; got {parallel}")
    truncate_partial_line(path)
    lines: list[Record] = read_jsonl(path) if path.exists() else []
    saved = {key_of(line): line for line in lines}
    done: dict[Hashable, Result] = {}
    known: dict[Prompt, Reply] = {}
    for task in tasks:
        record = saved.get(task.key)
        if record is not None:
            replies = task.saved_replies(record)
            judgment = task.judgment(replies)
            if judgment.as_record() == record:
                done[task.key] = judgment
                known.update(zip(task.prompts, replies, strict=True))
    path.parent.mkdir(parents=True, exist_ok=True)

    def finish(task: Task[Result]) -> None:
        judgment = done[task.key] = task.judgment([known[prompt] for prompt in task.prompts])
        append_line(path, json.dumps(judgment.as_record()))
        if progress is not None:
            progress(len(done), len(tasks))

    waiting: dict[Prompt, list[Task[Result]]] = defaultdict(list)
    for task in tasks:
        if task.key not in done:
            missing = [prompt for prompt in dict.fromkeys(task.prompts) if prompt not in known]
            for prompt in missing:
                waiting[prompt].append(task)
            if not missing:
                finish(task)
    if waiting:
        client = JudgeClient(endpoint)
        with closing(map_concurrently(client.ask, waiting, parallel)) as found:
            for prompt, text in found:
                known[prompt] = Reply(text, time.time())
                for task in waiting[prompt]:
                    if all(item in known for item in task.prompts):
                        finish(task)
    keys = {task.key for task in tasks}
    others = [line for line in lines if key_of(line) not in keys]
    records = [*(done[task.key].as_record() for task in tasks), *others]
    atomic_write(path, "".join(json.dumps(record) + "\n" for record in records))
    return [done[task.key] for task in tasks]
