"""Rate single answers; ``fastchat.llm_judge.show_result`` makes tables of the judgment file."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.judge.client import Judged, Reply, ask, judged_turns, judgment_file
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
    """Rate the first two turns of every method's answers, see :func:`ask`.

    FastChat has no prompt for further turns. Empty answers are judged like any other.
    """
    prompts, judge = JudgePrompts.load(questions), endpoint.model
    wanted = [
        Judgment(
            question.question_id, model, turn, judge, ids, (prompts.fill(question, turn, *answers),)
        )
        for model, found in records.items()
        for question, turn, answers, ids in judged_turns(questions, found)
    ]
    return ask(endpoint, wanted, judgment_file(out, judge, "single"), parallel, progress)
