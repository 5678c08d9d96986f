"""MT-bench's single-answer grading by a language model behind any OpenAI-compatible endpoint.

What comes of it is FastChat's file of judgments, which ``fastchat.llm_judge.show_result`` reads.
As in answer files, a kill at any moment loses no line that was written.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from eagle_fsd.evaluation.answer_store import (
    Record,
    append_line,
    cut_half_line,
    read_records,
    write_whole,
)
from eagle_fsd.evaluation.judge.client import JudgeClient, JudgeEndpoint, in_parallel
from eagle_fsd.evaluation.judge.prompts import TURNS, JudgePrompts, Prompt, rating
from eagle_fsd.evaluation.questions.question import Question

#: Method, question, turn.
Key = tuple[str, int | str, int]


@dataclass(frozen=True)
class Judgment:
    """One turn of one answer, judged.

    Attributes:
        category: The question's.
        model: The method, which FastChat takes for a model.
        judge: The judge's name. prompt: The name of the wording it was asked in.
        user_prompt: The user's message of it. judgment: What the judge said.
        score: 1 to 10; -1 where the judge gave no rating.
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

    def as_line(self) -> Record:
        """FastChat's keys, and the answer's."""
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
    """A turn of an answer that is to be judged, and what the judge is asked."""

    question: Question
    model: str
    answer_id: str
    turn: int
    judge: str
    prompt: Prompt

    @property
    def key(self) -> Key:
        return self.model, self.question.question_id, self.turn

    def judged(self, judgment: str, score: int | float, tstamp: float) -> Judgment:
        return Judgment(
            self.question.question_id,
            self.question.category,
            self.model,
            self.answer_id,
            self.turn,
            self.judge,
            self.prompt.name,
            self.prompt.user,
            judgment,
            score,
            tstamp,
        )

    def kept(self, line: Record | None) -> Judgment | None:
        """The judgment in ``line``, if it is of this answer and was asked for in these words."""
        if line is None:
            return None
        found = self.judged(line["judgment"], line["score"], line["tstamp"])
        return found if found.as_line() == line else None


def judgment_file(out: str | Path, judge: str) -> Path:
    """Where the judgments of the model ``judge`` are."""
    return Path(out) / "model_judgment" / f"{judge.replace('/', '_')}_single.jsonl"


def judge_answers(
    endpoint: JudgeEndpoint,
    questions: Sequence[Question],
    records: dict[str, Sequence[Record]],
    out: str | Path,
    parallel: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> list[Judgment]:
    """Judge what has no judgment yet; in the end the file is in order.

    The first two turns of an answer are judged, each by itself: FastChat has no prompt for a third.
    An empty answer is judged as any other. A judgment is dropped where its answer has been drawn
    anew, or the judge would be asked in other words now. Lines of methods that ``records`` does not
    name stay, at the end of the file.

    Args:
        records: The answers by method.
        out: The judgments are in its folder ``model_judgment``.
        parallel: How many requests are under way at a time.
        progress: Called with the judgments there are and those there will be.

    Returns:
        By method, question and turn, in the order given.

    Raises:
        JudgeError: The endpoint is down or refuses; what is judged by then is kept.
        QuestionSetError: The prompts or the reference answers are not to be had.
        ValueError: ``parallel`` is below 1.
    """
    if parallel < 1:
        raise ValueError(f"parallel must be 1 or more; got {parallel}")
    path = judgment_file(out, endpoint.model)
    tasks = _tasks(endpoint.model, questions, records)
    cut_half_line(path)
    lines = read_records(path) if path.exists() else []
    before = {(line["model"], line["question_id"], line["turn"]): line for line in lines}
    done: dict[Key, Judgment] = {}
    waiting: list[_Task] = []
    for task in tasks:
        judgment = task.kept(before.get(task.key))
        if judgment is None:
            waiting.append(task)
        else:
            done[task.key] = judgment
    path.parent.mkdir(parents=True, exist_ok=True)
    if waiting:
        client = JudgeClient(endpoint)
        replies = in_parallel(lambda task: client.ask(task.prompt), waiting, parallel)
        with closing(replies):
            for task, said in replies:
                done[task.key] = task.judged(said, rating(said), time.time())
                append_line(path, json.dumps(done[task.key].as_line()))
                if progress is not None:
                    progress(len(done), len(tasks))
    judgments = [done[task.key] for task in tasks]
    others = [line for line in lines if line["model"] not in records]
    whole = [*(judgment.as_line() for judgment in judgments), *others]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in whole))
    return judgments


def _tasks(
    judge: str, questions: Sequence[Question], records: dict[str, Sequence[Record]]
) -> list[_Task]:
    """All turns to be judged, by method, question and turn."""
    prompts = JudgePrompts.find(questions)
    tasks = []
    for model, answers in records.items():
        by_id = {record["question_id"]: record for record in answers}
        for question in questions:
            if question.question_id not in by_id:
                continue
            record = by_id[question.question_id]
            turns = record["choices"][0]["turns"]
            for turn in range(1, min(len(question.turns), len(turns), TURNS) + 1):
                prompt = prompts.fill(question, turns, turn)
                tasks.append(_Task(question, model, record["answer_id"], turn, judge, prompt))
    return tasks
