"""Grade answers with a judge and save the judgments.

The judgment file is FastChat's, which ``fastchat.llm_judge.show_result`` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.judge.client import JudgeEndpoint
from eagle_fsd.evaluation.judge.prompts import MAX_TURNS, JudgePrompts, Prompt, parse_rating
from eagle_fsd.evaluation.judge.tasks import Reply, run_tasks
from eagle_fsd.evaluation.questions.question import Question

#: Method, question id, turn.
_Key = tuple[str, int | str, int]


@dataclass(frozen=True)
class Judgment:
    """The judgment of one turn of an answer.

    Attributes:
        question_id: The question.
        category: The question's category.
        model: Name of the method; FastChat calls this field the model.
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

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return (self.prompt,)

    def judgment(self, replies: Sequence[Reply]) -> Judgment:
        (reply,) = replies
        return Judgment(
            self.question.question_id,
            self.question.category,
            self.model,
            self.answer_id,
            self.turn,
            self.judge,
            self.prompt.name,
            self.prompt.user,
            reply.text,
            parse_rating(reply.text),
            reply.tstamp,
        )

    def saved_replies(self, record: Record) -> list[Reply]:
        return [Reply(record["judgment"], record["tstamp"])]


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

    Methods that give the same answer share the judge's reply. The first two turns of an answer are
    judged separately; FastChat has no prompt for further turns. Empty answers are judged like any
    other. A saved judgment is discarded if the answer or the prompt has changed since. Judgments of
    methods that ``records`` does not contain are kept at the end of the file.

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
    path = judgment_file(out, endpoint.model)
    tasks = _tasks(endpoint.model, questions, records)
    return run_tasks(
        endpoint,
        tasks,
        path,
        lambda line: (line["model"], line["question_id"], line["turn"]),
        parallel,
        progress,
    )


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
