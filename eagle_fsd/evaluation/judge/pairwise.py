"""Compare answers with exact decoding's, in both orders, and save the comparisons.

The file is FastChat's, which ``fastchat.llm_judge.show_result --mode pairwise-baseline`` reads. A
judge may prefer the answer that it reads first; as in FastChat, two comparisons that disagree count
as a tie (Zheng et al., "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena", arXiv 2306.05685,
section 3.4).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.judge.client import Judged, Reply, ask, judged_turns, judgment_file
from eagle_fsd.evaluation.judge.prompts import JudgePrompts, parse_winner
from eagle_fsd.evaluation.methods import EXACT
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.statistics import loss_bound
from eagle_fsd.utils.chat_api import Endpoint

#: The reply recorded for identical answers, about which the judge is not asked.
IDENTICAL = "The answers are identical. [[C]]"


@dataclass(frozen=True)
class Comparison(Judged):
    """A method's answer to one turn, compared with exact decoding's in both orders.

    The first request has the method's answer first, the second one exact decoding's.
    """

    KEYS = ("model_1", "model_2", "question_id", "turn")

    @property
    def key(self) -> tuple[Hashable, ...]:
        """See :attr:`Judged.key`."""
        return self.model, EXACT.name, self.question_id, self.turn

    @property
    def winners(self) -> tuple[str, str]:
        """For each order ``"model_1"`` (the method), ``"model_2"``, ``"tie"`` or ``"error"``."""
        first, second = (parse_winner(reply.text) for reply in self.replies)
        return (
            {"A": "model_1", "B": "model_2"}.get(first, first),
            {"A": "model_2", "B": "model_1"}.get(second, second),
        )

    @property
    def outcome(self) -> int | None:
        """1 if the method is better, -1 if it is worse, 0 for a tie; None if a reply is unclear."""
        if "error" in self.winners:
            return None
        if self.winners[0] != self.winners[1]:
            return 0
        return {"model_1": 1, "model_2": -1, "tie": 0}[self.winners[0]]

    def as_record(self) -> Record:
        """See :meth:`Judged.as_record`."""
        (first, second), (own, other) = self.prompts, self.replies
        return {
            "question_id": self.question_id,
            "model_1": self.model,
            "model_2": EXACT.name,
            "g1_winner": self.winners[0],
            "g2_winner": self.winners[1],
            "judge": [self.judge, first.name],
            "g1_user_prompt": first.user,
            "g1_judgment": own.text,
            "g2_user_prompt": second.user,
            "g2_judgment": other.text,
            "turn": self.turn,
            "tstamp": max(own.tstamp, other.tstamp),
            "answer_ids": list(self.answer_ids),
        }

    def saved_replies(self, record: Record) -> tuple[Reply, ...]:
        """See :meth:`Judged.saved_replies`."""
        return tuple(Reply(record[f"g{order}_judgment"], record["tstamp"]) for order in (1, 2))


def judge_pairs(
    endpoint: Endpoint,
    questions: Sequence[Question],
    records: Mapping[str, Sequence[Record]],
    out: str | Path,
    parallel: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> list[Comparison]:
    """Compare the first two turns of all answers with exact decoding's, see :func:`ask`.

    ``records`` holds the answers of each method, exact decoding's included. Identical answers are
    ties without asking.
    """
    prompts, judge = JudgePrompts.load(questions), endpoint.model
    wanted = []
    for model in records:
        if model == EXACT.name:
            continue
        pairs = judged_turns(questions, records[model], records[EXACT.name])
        for question, turn, (own, other), ids in pairs:
            both = (
                prompts.fill(question, turn, own, other),
                prompts.fill(question, turn, other, own),
            )
            same = own[:turn] == other[:turn]
            replies = (Reply(IDENTICAL, 0.0),) * 2 if same else ()
            wanted.append(Comparison(question.question_id, model, turn, judge, ids, both, replies))
    return ask(endpoint, wanted, judgment_file(out, judge, "pair"), parallel, progress)


def pair_summary(comparisons: Sequence[Comparison], confidence: float) -> dict[str, dict[str, Any]]:
    """Summarize the comparisons of each method.

    The turns of a question count as one: the method wins if it wins more of them than it loses. A
    question is ``unclear`` if any of its comparisons has no outcome. ``loss_limit`` is an exact
    upper limit on the share of questions lost minus that of questions won, in which unclear
    questions count as lost.
    """
    outcomes: dict[str, dict[int | str, list[int | None]]] = defaultdict(lambda: defaultdict(list))
    for item in comparisons:
        outcomes[item.model][item.question_id].append(item.outcome)
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
