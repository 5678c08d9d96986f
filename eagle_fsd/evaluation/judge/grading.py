"""Rate single answers; ``fastchat.llm_judge.show_result`` makes tables of the judgment file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.judge.client import JudgeTask, ask, judged_turns, judgment_file
from eagle_fsd.evaluation.judge.prompts import JudgePrompts, parse_rating
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.utils.chat_api import Endpoint


def judge_answers(
    endpoint: Endpoint,
    questions: Sequence[Question],
    records: Mapping[str, Sequence[Record]],
    out: str | Path,
    parallel: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> list[Record]:
    """Rate the first two turns of every method's answers, and return the lines, see :func:`ask`.

    FastChat has no prompt for further turns. Empty answers are judged like any other.
    """
    prompts, judge = JudgePrompts.load(questions), endpoint.model
    tasks = []
    for model, found in records.items():
        for question, turn, answers, (answer_id,) in judged_turns(questions, found):
            prompt = prompts.fill(question, turn, *answers)
            fields = {
                "question_id": question.question_id,
                "model": model,
                "judge": [judge, prompt.name],
                "user_prompt": prompt.user,
                "turn": turn,
                "answer_id": answer_id,
            }
            tasks.append(JudgeTask(fields, (prompt,), ("judgment",), _rating))
    file = judgment_file(out, judge, "single")
    return ask(endpoint, tasks, file, parallel=parallel, progress=progress)


def _rating(replies: Sequence[str]) -> Record:
    return {"score": parse_rating(replies[0])}
