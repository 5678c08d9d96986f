"""Compare answers with exact decoding's, in both orders, and save the comparisons.

The file is FastChat's, which ``fastchat.llm_judge.show_result --mode pairwise-baseline`` reads. A
judge may prefer the answer that it reads first; as in FastChat, two comparisons that disagree count
as a tie (Zheng et al., "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena", arXiv 2306.05685,
section 3.4).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.judge.client import JudgeTask, ask, judged_turns, judgment_file
from eagle_fsd.evaluation.judge.prompts import JudgePrompts, parse_winner
from eagle_fsd.evaluation.methods import EXACT
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.statistics import loss_bound
from eagle_fsd.utils.chat_api import Endpoint

#: The reply recorded for identical answers, about which the judge is not asked.
IDENTICAL = "The answers are identical. [[C]]"


def judge_pairs(
    endpoint: Endpoint,
    questions: Sequence[Question],
    records: Mapping[str, Sequence[Record]],
    out: str | Path,
    parallel: int = 4,
    progress: Callable[[int, int], None] | None = None,
    reference: str = EXACT.name,
) -> list[Record]:
    """Compare the first two turns of all answers with those of a reference, see :func:`ask`.

    ``records`` holds the answers of each method, the reference's included. Identical answers are
    ties without asking. Returns the lines, in which ``model_1`` is the method.
    """
    prompts, judge = JudgePrompts.load(questions), endpoint.model
    tasks, replies = [], {}
    for model in records:
        if model == reference:
            continue
        pairs = judged_turns(questions, records[model], records[reference])
        for question, turn, (own, other), ids in pairs:
            first = prompts.fill(question, turn, own, other)
            second = prompts.fill(question, turn, other, own)
            fields = {
                "question_id": question.question_id,
                "model_1": model,
                "model_2": reference,
                "judge": [judge, first.name],
                "g1_user_prompt": first.user,
                "g2_user_prompt": second.user,
                "turn": turn,
                "answer_ids": ids,
            }
            if own[:turn] == other[:turn]:
                replies[first] = IDENTICAL, 0.0
            names = ("g1_judgment", "g2_judgment")
            tasks.append(JudgeTask(fields, (first, second), names, _winners))
    file = judgment_file(out, judge, "pair")
    return ask(endpoint, tasks, file, parallel=parallel, progress=progress, replies=replies)


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
    question is ``unclear`` if any of its comparisons has no outcome. ``loss_limit`` is an exact
    upper limit on the share of questions lost minus that of questions won, in which unclear
    questions count as lost.
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
