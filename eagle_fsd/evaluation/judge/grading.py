"""Grade answers with a judge and save the judgments.

The judgment file is FastChat's, which ``fastchat.llm_judge.show_result`` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.judge.client import (
    Judged,
    Reply,
    ask,
    judged_turns,
    judgment_file,
)
from eagle_fsd.evaluation.judge.prompts import JudgePrompts, parse_rating
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.utils.chat_api import Endpoint


@dataclass(frozen=True)
class Judgment(Judged):
    """The rating of one turn of an answer."""

    KEYS = ("model", "question_id", "turn")

    @property
    def key(self) -> tuple[Hashable, ...]:
        """See :attr:`Judged.key`."""
        return self.model, self.question_id, self.turn

    @property
    def score(self) -> int | float:
        """The rating from 1 to 10; -1 if the reply has none."""
        return parse_rating(self.replies[0].text)

    def as_record(self) -> Record:
        """See :meth:`Judged.as_record`."""
        (prompt,), (reply,), (answer_id,) = self.prompts, self.replies, self.answer_ids
        return {
            "question_id": self.question_id,
            "model": self.model,
            "judge": [self.judge, prompt.name],
            "user_prompt": prompt.user,
            "judgment": reply.text,
            "score": self.score,
            "turn": self.turn,
            "tstamp": reply.tstamp,
            "answer_id": answer_id,
        }

    def saved_replies(self, record: Record) -> tuple[Reply, ...]:
        """See :meth:`Judged.saved_replies`."""
        return (Reply(record["judgment"], record["tstamp"]),)


def judge_answers(
    endpoint: Endpoint,
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
    """
    prompts, judge = JudgePrompts.load(questions), endpoint.model
    wanted = []
    for model, found in records.items():
        for question, turn, answers, ids in judged_turns(questions, found):
            prompt = prompts.fill(question, turn, *answers)
            place = question.question_id, question.category, model, turn
            wanted.append(Judgment(*place, judge, ids, (prompt,)))
    return ask(endpoint, wanted, judgment_file(out, judge, "single"), parallel, progress)
