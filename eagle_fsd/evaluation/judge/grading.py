"""Grade answers with a judge and save the judgments.

The judgment file is FastChat's, which ``fastchat.llm_judge.show_result`` reads. As with answer
files, a process killed at any time loses no complete line.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.judge.client import JudgeClient, JudgeEndpoint
from eagle_fsd.evaluation.judge.prompts import MAX_TURNS, JudgePrompts, Prompt, parse_rating
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.utils.chat_api import map_concurrently
from eagle_fsd.utils.files import append_line, atomic_write, read_jsonl, truncate_partial_line

#: Method, question id, turn.
_Key = tuple[str, int | str, int]


@dataclass(frozen=True)
class Judgment:
    """The judgment of one turn of an answer.

    Attributes:
        question_id: The question.
        category: The question's category.
        model: The method, which takes the place of FastChat's model.
        answer_id: The answer.
        turn: The turn, from 1.
        judge: The judge's name.
        prompt: The name of the prompt template.
        user_prompt: The user message sent to the judge.
        judgment: The judge's reply.
        score: The rating from 1 to 10; -1 if the reply has none.
        tstamp: Seconds since 1970.
    """

    question_id: int | str
    category: str
    model: str
    answer_id: str
    turn: int
    judge: str
    prompt: str
    user_prompt: str
    judgment: str
    score: int | float
    tstamp: float

    def as_record(self) -> Record:
        """Return the judgment with FastChat's keys and the answer's id."""
        return {
            "question_id": self.question_id,
            "model": self.model,
            "judge": [self.judge, self.prompt],
            "user_prompt": self.user_prompt,
            "judgment": self.judgment,
            "score": self.score,
            "turn": self.turn,
            "tstamp": self.tstamp,
            "answer_id": self.answer_id,
        }


@dataclass(frozen=True)
class _Task:
    """A turn of an answer to judge, and the prompt for the judge."""

    question: Question
    model: str
    answer_id: str
    turn: int
    judge: str
    prompt: Prompt

    @property
    def key(self) -> _Key:
        return self.model, self.question.question_id, self.turn

    def judgment(self, reply: str, score: int | float, tstamp: float) -> Judgment:
        """Build the judgment from the judge's reply."""
        return Judgment(
            self.question.question_id,
            self.question.category,
            self.model,
            self.answer_id,
            self.turn,
            self.judge,
            self.prompt.name,
            self.prompt.user,
            reply,
            score,
            tstamp,
        )

    def resume(self, record: Record | None) -> Judgment | None:
        """Return the saved judgment if it is for the same answer and prompt."""
        if record is None:
            return None
        judgment = self.judgment(record["judgment"], record["score"], record["tstamp"])
        return judgment if judgment.as_record() == record else None


def judgment_file(out: str | Path, judge: str) -> Path:
    """Return the path of a judge's judgment file.

    Args:
        out: The folder of the evaluation.
        judge: The judge's name.
    """
    return Path(out) / "model_judgment" / f"{judge.replace('/', '_')}_single.jsonl"


def judge_answers(
    endpoint: JudgeEndpoint,
    questions: Sequence[Question],
    records: Mapping[str, Sequence[Record]],
    out: str | Path,
    parallel: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> list[Judgment]:
    """Judge all answers that have no judgment yet.

    The judge is asked once for each prompt: methods that give the same answer share its reply, so
    that a judge's noise does not tell them apart. The first two turns of an answer are judged
    separately; FastChat has no prompt for further turns. Empty answers are judged like any other. A
    saved judgment is discarded if the answer or the prompt has changed since. Judgments of methods
    that ``records`` does not contain are kept at the end of the file.

    Args:
        endpoint: The judge.
        questions: The questions that were answered.
        records: The answers of each method, as in its answer file.
        out: The folder of the evaluation; the judgments are in its folder ``model_judgment``.
        parallel: Maximum number of concurrent requests.
        progress: Called after each reply with the number of judgments so far and the total.

    Returns:
        The judgments by method, question and turn, in the order of the arguments; the file has the
        same order at the end.

    Raises:
        JudgeError: The endpoint cannot be reached or rejects a request; the judgments so far are
            saved.
        QuestionSetError: The prompts or reference answers cannot be downloaded.
        ValueError: ``parallel`` is below 1.
    """
    if parallel < 1:
        raise ValueError(f"parallel must be at least 1; got {parallel}")
    path = judgment_file(out, endpoint.model)
    tasks = _tasks(endpoint.model, questions, records)
    truncate_partial_line(path)
    lines: list[Record] = read_jsonl(path) if path.exists() else []
    saved = {(line["model"], line["question_id"], line["turn"]): line for line in lines}
    done: dict[_Key, Judgment] = {}
    judged: dict[Prompt, Judgment] = {}
    for task in tasks:
        judgment = task.resume(saved.get(task.key))
        if judgment is not None:
            done[task.key] = judged[task.prompt] = judgment
    pending: dict[Prompt, list[_Task]] = defaultdict(list)
    for task in tasks:
        if task.key not in done:
            pending[task.prompt].append(task)
    path.parent.mkdir(parents=True, exist_ok=True)

    def record(task: _Task, judgment: Judgment) -> None:
        done[task.key] = judgment
        append_line(path, json.dumps(judgment.as_record()))
        if progress is not None:
            progress(len(done), len(tasks))

    for prompt in [prompt for prompt in pending if prompt in judged]:
        known = judged[prompt]
        for task in pending.pop(prompt):
            record(task, task.judgment(known.judgment, known.score, known.tstamp))
    if pending:
        client = JudgeClient(endpoint)
        replies = map_concurrently(client.ask, pending, parallel)
        with closing(replies):
            for prompt, reply in replies:
                score, now = parse_rating(reply), time.time()
                for task in pending[prompt]:
                    record(task, task.judgment(reply, score, now))
    judgments = [done[task.key] for task in tasks]
    others = [line for line in lines if line["model"] not in records]
    ordered = [*(judgment.as_record() for judgment in judgments), *others]
    atomic_write(path, "".join(json.dumps(line) + "\n" for line in ordered))
    return judgments


def _tasks(
    judge: str, questions: Sequence[Question], records: Mapping[str, Sequence[Record]]
) -> list[_Task]:
    """Return all turns to judge, by method, question and turn."""
    prompts = JudgePrompts.load(questions)
    tasks = []
    for model, answers in records.items():
        by_id = {record["question_id"]: record for record in answers}
        for question in questions:
            if question.question_id not in by_id:
                continue
            record = by_id[question.question_id]
            turns = record["choices"][0]["turns"]
            for turn in range(1, min(len(question.turns), len(turns), MAX_TURNS) + 1):
                prompt = prompts.fill(question, turns, turn)
                tasks.append(_Task(question, model, record["answer_id"], turn, judge, prompt))
    return tasks
