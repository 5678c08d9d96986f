"""Comparing answers with exact decoding's in both orders; a local server is the judge."""

from __future__ import annotations

from pathlib import Path

import pytest
from stub_judge import QUESTIONS, StubJudge, pairwise_request, records_of

from eagle_fsd import OptionsError
from eagle_fsd.evaluation import EvaluationConfig, evaluate
from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.judge.judging import judge, judgment_file, pair_summary
from eagle_fsd.evaluation.methods import fsd_method
from eagle_fsd.evaluation.statistics import loss_bound
from eagle_fsd.utils.files import read_jsonl

pytestmark = pytest.mark.usefixtures("judge_data")

#: Turns of all questions.
TURNS = 7


@pytest.fixture
def answers() -> dict[str, list[Record]]:
    """Answers of exact decoding and FSD; plain decoding's are those of exact decoding."""
    plain = [
        {**record, "answer_id": f"plain-{at}"} for at, record in enumerate(records_of("exact"))
    ]
    return {"plain": plain, "exact": records_of("exact"), "fsd": records_of("fsd")}


def test_every_answer_is_compared_in_both_orders(
    stub: StubJudge, answers: dict[str, list[Record]], tmp_path: Path
) -> None:
    stub.prefer("fsd")
    seen: list[tuple[int, int]] = []
    found = judge(
        stub.endpoint(),
        QUESTIONS,
        answers,
        tmp_path,
        parallel=1,
        progress=lambda *numbers: seen.append(numbers),
        reference="exact",
    )
    assert seen == [(done, 2 * TURNS) for done in range(1, 2 * TURNS + 1)]
    assert len(stub.requests) == 2 * TURNS  # identical answers need none
    lines = read_jsonl(judgment_file(tmp_path, "a/b", "pair"))
    assert lines == found
    assert [line["model_1"] for line in lines] == ["plain"] * TURNS + ["fsd"] * TURNS
    first = lines[TURNS]
    assert first["model_2"] == "exact"
    assert first["g1_user_prompt"] == "Q write A fsd write B exact write"
    assert first["g2_user_prompt"] == "Q write A exact write B fsd write"
    assert (first["g1_winner"], first["g2_winner"]) == ("model_1", "model_1")
    summary = pair_summary(found, 0.95)
    assert summary["plain"] | {"loss_limit": None} == {
        **{"questions": 4, "won": 0, "tied": 4, "lost": 0, "unclear": 0, "loss_limit": None}
    }
    assert (summary["fsd"]["won"], summary["fsd"]["lost"]) == (4, 0)
    assert summary["fsd"]["loss_limit"] == loss_bound(0, 4, 4)
    # A comparison is discarded where an answer changed; the others are resumed.
    asked = len(stub.requests)
    answers["fsd"][3]["choices"][0]["turns"] = ["fsd hello"]
    again = judge(stub.endpoint(), QUESTIONS, answers, tmp_path, reference="exact")
    assert len(stub.requests) == asked + 2
    assert read_jsonl(judgment_file(tmp_path, "a/b", "pair"))[:-1] == lines[:-1]
    assert again[-1]["g1_user_prompt"] == "Q greet A fsd hello B exact greet"


def test_outcomes_of_replies(
    stub: StubJudge, answers: dict[str, list[Record]], tmp_path: Path
) -> None:
    """A judge that prefers the first answer gives ties; a reply must have double brackets."""
    for at, (reply, winners) in enumerate(
        [
            ("A is better. [[A]]", ("model_1", "model_2")),
            ("[[B]]", ("model_2", "model_1")),
            ("[[C]]", ("tie", "tie")),
            ("[A]", ("error", "error")),
            ("", ("error", "error")),
        ]
    ):
        stub.reply_with(lambda _, reply=reply: reply)
        folder = tmp_path / str(at)
        found = judge(stub.endpoint(), QUESTIONS, answers, folder, reference="exact")
        lines = [line for line in found if line["model_1"] == "fsd"]
        assert {(line["g1_winner"], line["g2_winner"]) for line in lines} == {winners}
        tied, unclear = (pair_summary(lines, 0.95)["fsd"][name] for name in ("tied", "unclear"))
        assert (tied, unclear) == ((0, 4) if "error" in winners else (4, 0))
    # Unclear replies count as losses in the limit.
    summary = pair_summary(found, 0.95)["fsd"]
    expected = {"questions": 4, "won": 0, "tied": 0, "lost": 0, "unclear": 4}
    assert summary == {**expected, "loss_limit": loss_bound(4, 0, 4)}


def comparison(question: int, turn: int, first: str, second: str) -> Record:
    winners = {"g1_winner": first, "g2_winner": second}
    return {"question_id": question, "model_1": "fsd", "turn": turn, **winners}


def test_the_turns_of_a_question_count_as_one() -> None:
    won, lost, tied = ("model_1",) * 2, ("model_2",) * 2, ("tie", "tie")
    found = [
        *(comparison(1, turn, *won) for turn in (1, 2)),
        comparison(2, 1, *won),
        comparison(2, 2, *lost),
        comparison(3, 1, *tied),
        comparison(3, 2, *lost),
        comparison(4, 1, *won),
        comparison(4, 2, "model_1", "error"),
    ]
    summary = pair_summary(found, 0.95)["fsd"]
    names = ("questions", "won", "tied", "lost", "unclear")
    assert [summary[name] for name in names] == [4, 1, 1, 1, 1]
    assert summary["loss_limit"] == loss_bound(2, 1, 4)


@pytest.mark.usefixtures("no_figures")
def test_evaluation_reports_comparisons(stub: StubJudge, tmp_path: Path) -> None:
    stub.reply_with(lambda _: "[[C]]")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello!\nWhat is 2 + 3?\n")
    request = pairwise_request(stub, 2, tmp_path / "out").updated(questions=str(prompts))
    config = EvaluationConfig(max_new_tokens=12)
    report = evaluate(request, config, ["exact", fsd_method(0.4)])
    exact, fuzzy = report["rows"]
    assert exact["judge"] is None
    assert fuzzy["judge"]["pairs"]["tied"] == fuzzy["judge"]["pairs"]["questions"] == 2
    page = (tmp_path / "out" / "report.html").read_text()
    assert "the judge finds 0 of 2 answers worse and 0 better" in page
    with pytest.raises(OptionsError, match="--judge-mode pair compares with exact decoding"):
        evaluate(request, config, ["fsd"])
