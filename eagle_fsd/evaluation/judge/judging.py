"""Have a judge rate single answers, or compare answers with a reference's in both orders.

Judgment files have FastChat's format; ``fastchat.llm_judge.show_result`` tabulates them. The judge
is asked once for each prompt: equal prompts share its reply, so that a judge's noise does not tell
equal answers apart. As with answer files, a process killed at any time loses no complete line.
A judge may prefer the answer that it reads first; as in FastChat, two comparisons that disagree
count as a tie (Zheng et al., "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena", arXiv
2306.05685, section 3.4).
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.judge.prompts import (
    MAX_TURNS,
    JudgeError,
    JudgePrompt,
    JudgePrompts,
    parse_rating,
    parse_winner,
)
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.statistics import loss_bound
from eagle_fsd.utils.chat_api import ChatClient, Endpoint, EndpointError, map_concurrently
from eagle_fsd.utils.files import append_line, atomic_write, read_jsonl, truncate_partial_line

#: Maximum length of a judgment in tokens, as in FastChat.
MAX_TOKENS = 2048
#: The text and the time of a reply, in seconds since 1970.
Reply = tuple[str, float]
#: Fields that identify the judgment in a line, of ratings and of comparisons.
KEYS = ("model", "model_1", "model_2", "question_id", "turn")
#: The reply recorded for identical answers, about which the judge is not asked.
IDENTICAL = "The answers are identical. [[C]]"


@dataclass(frozen=True)
class JudgeTask:
    """A turn to judge, written as one line of the FastChat judgment file."""

    fields: Record  # of the line, known before the judge is asked
    prompts: tuple[JudgePrompt, ...]
    replies: tuple[str, ...]  # names of the fields that hold the reply to each prompt
    read: Callable[[Sequence[str]], Record]  # returns the fields that follow from the replies

    @property
    def key(self) -> tuple[Hashable, ...]:
        """The values of :data:`KEYS`."""
        return _key(self.fields)

    def line(self, texts: Sequence[str], tstamp: float) -> Record:
        """Return the line with the texts and the time of replies."""
        replies = dict(zip(self.replies, texts, strict=True))
        return {**self.fields, **replies, **self.read(texts), "tstamp": tstamp}


def _key(line: Record) -> tuple[Hashable, ...]:
    return tuple(line.get(name) for name in KEYS)


def judgment_file(out: str | Path, judge: str, mode: Literal["single", "pair"]) -> Path:
    """Return the path of a judge's judgments in the folder of an evaluation."""
    return Path(out) / "model_judgment" / f"{judge.replace('/', '_')}_{mode}.jsonl"


def judged_turns(
    questions: Sequence[Question], *records: Sequence[Record]
) -> Iterator[tuple[Question, int, list[list[str]], list[str]]]:
    """Yield each turn to judge, from 1, with all turns of every method's answer, and their ids."""
    by_id = [{record["question_id"]: record for record in found} for found in records]
    for question in questions:
        if all(question.question_id in found for found in by_id):
            same = [found[question.question_id] for found in by_id]
            answers = [record["choices"][0]["turns"] for record in same]
            ids = [record["answer_id"] for record in same]
            for turn in range(1, min(len(question.turns), MAX_TURNS, *map(len, answers)) + 1):
                yield question, turn, answers, ids


def ask(
    endpoint: Endpoint,
    tasks: Sequence[JudgeTask],
    path: Path,
    parallel: int = 4,
    progress: Callable[[int, int], None] | None = None,
    replies: Mapping[JudgePrompt, Reply] | None = None,
) -> list[Record]:
    """Ask the judge for what a file lacks, append it, and return the judgments of all tasks.

    A line of the file is discarded if another one would be written now, because the answer or the
    prompt has changed. Lines of other judgments are kept at the end. Prompts that ``replies``
    contains are not sent. If the endpoint fails, raise JudgeError; the judgments so far are saved.
    """
    truncate_partial_line(path)
    lines: list[Record] = read_jsonl(path) if path.exists() else []
    done, known = _valid_lines(tasks, lines), dict(replies or {})
    for task in tasks:
        if line := done.get(task.key):
            for prompt, name in zip(task.prompts, task.replies, strict=True):
                known[prompt] = line[name], line["tstamp"]
    path.parent.mkdir(parents=True, exist_ok=True)

    def finish(task: JudgeTask) -> None:
        texts, times = zip(*(known[prompt] for prompt in task.prompts), strict=True)
        line = done[task.key] = task.line(texts, max(times))
        append_line(path, json.dumps(line))
        if progress is not None:
            progress(len(done), len(tasks))

    waiting: dict[JudgePrompt, list[JudgeTask]] = defaultdict(list)
    for task in tasks:
        if task.key not in done:
            missing = [prompt for prompt in dict.fromkeys(task.prompts) if prompt not in known]
            for prompt in missing:
                waiting[prompt].append(task)
            if not missing:
                finish(task)
    if waiting:
        try:
            client = ChatClient(endpoint)

            def complete(prompt: JudgePrompt) -> str:
                return client.answer(prompt.messages(), temperature=0, max_tokens=MAX_TOKENS)[0]

            with closing(map_concurrently(complete, waiting, parallel)) as found:
                for prompt, text in found:
                    known[prompt] = text, time.time()
                    for task in waiting[prompt]:
                        if all(needed in known for needed in task.prompts):
                            finish(task)
        except EndpointError as error:
            raise JudgeError(
                f"the judge {endpoint.model} at {endpoint.redacted_url} failed ({error});"
                " answers and judgments so far are saved: run the same command again to resume"
            ) from error
    records = [done[task.key] for task in tasks]
    others = [line for line in lines if _key(line) not in done]
    atomic_write(path, "".join(json.dumps(record) + "\n" for record in [*records, *others]))
    return records


def _valid_lines(tasks: Sequence[JudgeTask], lines: Sequence[Record]) -> dict[Hashable, Record]:
    """Return the lines that would be written again for the same replies, by key."""
    saved = {_key(line): line for line in lines}
    found: dict[Hashable, Record] = {}
    for task in tasks:
        line = saved.get(task.key)
        if line and line == task.line([line[name] for name in task.replies], line["tstamp"]):
            found[task.key] = line
    return found


def judge(
    endpoint: Endpoint,
    questions: Sequence[Question],
    records: Mapping[str, Sequence[Record]],
    out: str | Path,
    parallel: int = 4,
    progress: Callable[[int, int], None] | None = None,
    reference: str | None = None,
) -> list[Record]:
    """Rate the first two turns of all answers, or compare them with those of a reference.

    Of several samples, the first is judged. ``records`` include the reference's. Returns the lines,
    see :func:`ask`; in those of comparisons, ``model_1`` is the method.
    """
    prompts, name = JudgePrompts.load(questions), endpoint.model
    tasks: list[JudgeTask] = []
    replies: dict[JudgePrompt, Reply] = {}
    for model in records:
        if model == reference:
            continue
        compared = [model] if reference is None else [model, reference]
        found = judged_turns(questions, *(records[item] for item in compared))
        for question, turn, answers, ids in found:
            # A comparison is made in both orders.
            filled = tuple(prompts.fill(question, turn, *order) for order in permutations(answers))
            fields: Record = {
                "question_id": question.question_id,
                "judge": [name, filled[0].name],
                "turn": turn,
            }
            if reference is None:
                fields |= {"model": model, "user_prompt": filled[0].user, "answer_id": ids[0]}
                tasks.append(JudgeTask(fields, filled, ("judgment",), _rating))
                continue
            fields |= {"model_1": model, "model_2": reference, "answer_ids": ids}
            fields |= {f"g{at}_user_prompt": prompt.user for at, prompt in enumerate(filled, 1)}
            if answers[0][:turn] == answers[1][:turn]:
                replies[filled[0]] = IDENTICAL, 0.0
            tasks.append(JudgeTask(fields, filled, ("g1_judgment", "g2_judgment"), _winners))
    file = judgment_file(out, name, "single" if reference is None else "pair")
    return ask(endpoint, tasks, file, parallel=parallel, progress=progress, replies=replies)


def _rating(replies: Sequence[str]) -> Record:
    return {"score": parse_rating(replies[0])}


def _winners(replies: Sequence[str]) -> Record:
    """Return the winner for each order: ``"model_1"``, ``"model_2"``, ``"tie"`` or ``"error"``."""
    first, second = map(parse_winner, replies)
    return {
        "g1_winner": {"A": "model_1", "B": "model_2"}.get(first, first),
        "g2_winner": {"A": "model_2", "B": "model_1"}.get(second, second),
    }


def outcome(line: Record) -> int | None:
    """Return 1 if the method is better, -1 if it is worse, 0 for a tie; None if it is unclear."""
    first, second = line["g1_winner"], line["g2_winner"]
    if "error" in (first, second):
        return None
    return {"model_1": 1, "model_2": -1}.get(first, 0) if first == second else 0


def pair_summary(comparisons: Sequence[Record], confidence: float) -> dict[str, dict[str, Any]]:
    """Summarize the comparisons of each method.

    The turns of a question count as one: the method wins if it wins more of them than it loses. A
    question is ``unclear`` if any of its comparisons has no outcome; in ``loss_limit``, an exact
    upper limit on the share lost minus that won, it counts as lost.
    """
    outcomes: dict[str, dict[int | str, list[int | None]]] = defaultdict(lambda: defaultdict(list))
    for line in comparisons:
        outcomes[line["model_1"]][line["question_id"]].append(outcome(line))
    summary = {}
    for model, found in outcomes.items():
        clear = [sum(turn or 0 for turn in turns) for turns in found.values() if None not in turns]
        won, lost = sum(value > 0 for value in clear), sum(value < 0 for value in clear)
        unclear = len(found) - len(clear)
        summary[model] = {
            "questions": len(found),
            "won": won,
            "tied": len(clear) - won - lost,
            "lost": lost,
            "unclear": unclear,
            "loss_limit": loss_bound(lost + unclear, won, len(found), confidence),
        }
    return summary
