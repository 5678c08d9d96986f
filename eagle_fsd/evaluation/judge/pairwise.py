"""Compare answers with exact decoding's, in both orders, and save the comparisons.

The file is FastChat's, which ``fastchat.llm_judge.show_result --mode pairwise-baseline`` reads. A
judge may prefer the answer that it reads first; as in FastChat, two comparisons that disagree count
as a tie (Zheng et al., "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena", arXiv 2306.05685,
section 3.4).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.judge.client import JudgeEndpoint
from eagle_fsd.evaluation.judge.prompts import MAX_TURNS, JudgePrompts, Prompt, parse_winner
from eagle_fsd.evaluation.judge.tasks import Reply, run_tasks
from eagle_fsd.evaluation.methods import BASELINES
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.statistics import loss_bound

#: The reply recorded for identical answers, about which the judge is not asked.
IDENTICAL = "The answers are identical. [[C]]"
#: Probability that any method's limit is too low.
LIMIT_ERROR = 0.05


@dataclass(frozen=True)
class Comparison:
    """A method's answer to one turn, compared with the baseline's in both orders.

    Attributes:
        question_id: The question.
        model: Name of the method; FastChat calls this field the model.
        baseline: The method to compare with.
        turn: The turn, from 1.
        judge: The judge's name.
        prompts: The two requests: the method's answer first, then the baseline's answer first.
        replies: The judge's reply to each.
        answer_ids: The ids of both answers.
    """

    question_id: int | str
    model: str
    baseline: str
    turn: int
    judge: str
    prompts: tuple[Prompt, Prompt]
    replies: tuple[Reply, Reply]
    answer_ids: tuple[str, str]

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
        """Return the comparison with FastChat's keys and the answers' ids."""
        (first, second), (own, other) = self.prompts, self.replies
        return {
            "question_id": self.question_id,
            "model_1": self.model,
            "model_2": self.baseline,
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


@dataclass(frozen=True)
class _Task:
    """A comparison to make; ``same`` tells whether the conversations are identical."""

    question_id: int | str
    model: str
    baseline: str
    turn: int
    judge: str
    both: tuple[Prompt, Prompt]
    answer_ids: tuple[str, str]
    same: bool

    @property
    def key(self) -> tuple[str, str, int | str, int]:
        return self.model, self.baseline, self.question_id, self.turn

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return () if self.same else self.both

    def judgment(self, replies: Sequence[Reply]) -> Comparison:
        first, second = replies or (Reply(IDENTICAL, 0.0), Reply(IDENTICAL, 0.0))
        return Comparison(
            self.question_id,
            self.model,
            self.baseline,
            self.turn,
            self.judge,
            self.both,
            (first, second),
            self.answer_ids,
        )

    def saved_replies(self, record: Record) -> list[Reply]:
        if self.same:
            return []
        return [Reply(record[f"g{order}_judgment"], record["tstamp"]) for order in (1, 2)]


def comparison_file(out: str | Path, judge: str) -> Path:
    """Return the path of a judge's comparison file.

    Args:
        out: The folder of the evaluation.
        judge: The judge's name.
    """
    return Path(out) / "model_judgment" / f"{judge.replace('/', '_')}_pair.jsonl"


def judge_pairs(
    endpoint: JudgeEndpoint,
    questions: Sequence[Question],
    records: Mapping[str, Sequence[Record]],
    out: str | Path,
    parallel: int = 4,
    progress: Callable[[int, int], None] | None = None,
    baseline: str = "exact",
) -> list[Comparison]:
    """Compare all answers that have no comparison yet with the baseline's, in both orders.

    The first two turns of an answer are compared separately; FastChat has no prompt for further
    turns. Identical answers are ties without asking. A saved comparison is discarded if an answer
    or the prompt has changed since.

    Args:
        endpoint: The judge.
        questions: The questions that were answered.
        records: The answers of each method, as in its answer file, the baseline's included.
        out: The folder of the evaluation; the comparisons are in its folder ``model_judgment``.
        parallel: Maximum number of concurrent requests.
        progress: Called after each comparison with the number so far and the total.
        baseline: The method to compare with.

    Returns:
        The comparisons by method, question and turn, in the order of the arguments.

    Raises:
        JudgeError: The endpoint cannot be reached or rejects a request; the comparisons so far are
            saved.
        QuestionSetError: The prompts or reference answers cannot be downloaded.
        ValueError: ``parallel`` is below 1.
    """
    prompts = JudgePrompts.load(questions)
    by_id = {name: {item["question_id"]: item for item in found} for name, found in records.items()}
    tasks = []
    for model in records:
        for question in questions:
            pair = [by_id[name].get(question.question_id) for name in (model, baseline)]
            if model == baseline or None in pair:
                continue
            own, other = (record["choices"][0]["turns"] for record in pair if record)
            ids = tuple(record["answer_id"] for record in pair if record)
            for turn in range(1, min(len(question.turns), MAX_TURNS) + 1):
                both = (
                    prompts.fill_pair(question, own, other, turn),
                    prompts.fill_pair(question, other, own, turn),
                )
                place = question.question_id, model, baseline, turn
                same = own[:turn] == other[:turn]
                tasks.append(_Task(*place, endpoint.model, both, (ids[0], ids[1]), same))
    return run_tasks(
        endpoint,
        tasks,
        comparison_file(out, endpoint.model),
        lambda line: (line["model_1"], line["model_2"], line["question_id"], line["turn"]),
        parallel,
        progress,
    )


def pair_summary(comparisons: Sequence[Comparison]) -> dict[str, dict[str, Any]]:
    """Summarize the comparisons of each method.

    The turns of a question count as one: the method wins if it wins more of them than it loses.

    Args:
        comparisons: The comparisons of all methods.

    Returns:
        For each method ``questions`` (their number), ``won``, ``tied`` and ``lost``; ``unclear``,
        the number of comparisons without an outcome; and ``loss_limit``, an exact upper limit on
        the share of questions lost minus that of questions won. With 95% confidence, the limits of
        all methods but the baselines hold at once.
    """
    outcomes: dict[str, dict[int | str, int]] = defaultdict(lambda: defaultdict(int))
    unclear: dict[str, int] = defaultdict(int)
    for item in comparisons:
        if item.outcome is None:
            unclear[item.model] += 1
        else:
            outcomes[item.model][item.question_id] += item.outcome
    tested = sum(name not in BASELINES for name in outcomes)
    summary = {}
    for model, found in outcomes.items():
        won = sum(value > 0 for value in found.values())
        lost = sum(value < 0 for value in found.values())
        summary[model] = {
            "questions": len(found),
            "won": won,
            "tied": len(found) - won - lost,
            "lost": lost,
            "unclear": unclear[model],
            "loss_limit": loss_bound(lost, won, len(found), 1 - LIMIT_ERROR / max(1, tested)),
        }
    return summary
