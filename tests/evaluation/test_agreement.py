"""Agreement with exact decoding, the price of fuzzy tokens, and changed answers side by side."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
from pair_answers import answerer

from eagle_fsd import EagleFSD
from eagle_fsd.evaluation.agreement import (
    MAX_SHOWN_ANSWERS,
    agreement,
    changed_limit,
    compare_answers,
    fuzzy_divergences,
    regret_summary,
    repetition,
)
from eagle_fsd.evaluation.answer_store import Record
from eagle_fsd.evaluation.methods import EXACT, Method, fsd_method
from eagle_fsd.evaluation.questions.formats import bundled_questions
from eagle_fsd.model.verify import Origin

pytestmark = pytest.mark.xdist_group("agreement")

THRESHOLD = 0.1
FUZZY = fsd_method(THRESHOLD, 0.1)
COUNT = 3


def record_of(number: int, *turns: list[int], regrets: list[float] | None = None) -> Record:
    choice = {
        "turns": ["text" for _ in turns],
        "token_ids": list(turns),
        "new_tokens": [len(turn) for turn in turns],
        "regrets": [regrets or []],
        "errors": [None for _ in turns],
    }
    return {"question_id": number, "choices": [choice]}


# -- summaries -------------------------------------------------------------------------------------


def test_agreement_of_known_answers() -> None:
    exact = [record_of(0, [5, 6]), record_of(1, [5, 6, 7]), record_of(2, [1], [2, 3])]
    other = [record_of(0, [5, 6]), record_of(1, [5, 6]), record_of(2, [1], [2, 4, 5])]
    found = agreement(exact, [*other, record_of(9, [1])])
    assert (found["answers"], found["identical"]) == (3, 1)
    assert found["first_difference"] == [2.0, 2.0, 2.0]  # the first turn counts
    assert found["length_change"] == pytest.approx(0.0)
    low, high = found["length_change_interval"]
    assert low == pytest.approx(-high)
    # With two of three changed, the limit solves P(at most two changes) = 0.05: 1 - p^3 = 0.05.
    assert changed_limit(found, 0.95) == pytest.approx(0.95 ** (1 / 3))


def test_agreement_of_equal_and_of_empty_answers() -> None:
    answers = [record_of(number, [1, 2]) for number in range(30)]
    found = agreement(answers, answers)
    assert (found["identical"], found["first_difference"]) == (30, None)
    assert changed_limit(found, 0.95) == pytest.approx(1 - 0.05 ** (1 / 30))
    empty = record_of(0, [])
    empty["choices"][0]["turns"] = [""]
    found = agreement([empty], [record_of(0, [5])])
    assert (found["answers"], found["identical"]) == (1, 0)
    empty["choices"][0]["errors"] = ["too long"]
    found = agreement([empty], [empty])  # exact decoding failed
    assert (found["answers"], changed_limit(found, 0.95), found["length_change"]) == (0, None, None)


def test_repetition() -> None:
    for turns, expected in (
        ([[1, 2, 3]], 0.0),
        ([[1, 2, 3, 4, 5]], 0.0),
        ([[7] * 13], 0.9),  # ten 4-grams, one distinct
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 0.0),  # another turn is no repetition
    ):
        assert repetition(turns) == pytest.approx(expected)


def test_regrets_are_summed_over_all_tokens() -> None:
    records = [record_of(0, [1] * 10, regrets=[0.5, 1.5]), record_of(1, [1] * 30)]
    found = regret_summary(records)
    assert (found["fuzzy_tokens"], found["mean"], found["max"]) == (2, 1.0, 1.5)
    assert found["per_token"] == pytest.approx(2.0 / 40)
    low, high = found["per_token_interval"]
    assert low < 0.05 < high
    # Ten equal samples of each question are no more evidence than one.
    repeated = regret_summary([{**item, "choices": 10 * item["choices"]} for item in records])
    assert repeated["fuzzy_tokens"] == 20
    assert repeated["per_token_interval"] == pytest.approx([low, high])
    assert regret_summary([record_of(0, [1])]) is None


# -- the bundled pair ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answers(model: EagleFSD, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Record]]:
    asked = answerer(model, tmp_path_factory.mktemp("answers"), max_new_tokens=64)
    questions = bundled_questions(COUNT)
    return {method.name: asked.answer(questions, method) for method in (EXACT, FUZZY)}


def test_divergences_of_fuzzy_tokens_are_below_the_threshold(
    model: EagleFSD, answers: dict[str, list[Record]]
) -> None:
    found = fuzzy_divergences(model, FUZZY, answers[FUZZY.name], max_batch=2)
    alone = fuzzy_divergences(model, FUZZY, answers[FUZZY.name])
    for record in answers[FUZZY.name]:
        for pair in zip(found[record["question_id"]], alone[record["question_id"]], strict=True):
            assert pair[0] == pytest.approx(pair[1], abs=1e-5)
        turns, choice = found[record["question_id"]], record["choices"][0]
        assert [len(turn) for turn in turns] == [len(turn) for turn in choice["regrets"]]
        values = [value for turn in turns for value in turn if value is not None]
        assert values
        assert all(0.0 <= value < THRESHOLD for value in values)
    assert fuzzy_divergences(model, FUZZY, answers["exact"][:1]) == {}  # other tokens
    # At a near tie of the target's logits, a fuzzy token may be the target's own choice next time.
    first, *others = copy.deepcopy(answers[FUZZY.name])
    choice = first["choices"][0]
    choice["origins"][0][choice["origins"][0].index(Origin.FUZZY)] = int(Origin.EXACT)
    choice["regrets"][0].pop(0)
    assert first["question_id"] not in fuzzy_divergences(model, FUZZY, [first])
    compared = compare(model, {**answers, FUZZY.name: [first, *others]})
    assert compared["changed"] == len(compared["answers"]) > 0


def compare(
    model: EagleFSD, answers: dict[str, list[Record]], method: Method = FUZZY, **scores: Any
) -> dict[str, Any]:
    return compare_answers(
        bundled_questions(COUNT),
        answers,
        scores,
        method.name,
        tokenizer=model.tokenizer,
        find_divergences=partial(fuzzy_divergences, model, method),
    )


def test_changed_answers_consist_of_the_answers_text(
    model: EagleFSD, answers: dict[str, list[Record]]
) -> None:
    found = compare(model, answers)
    assert 0 < len(found["answers"]) == found["changed"] <= MAX_SHOWN_ANSWERS
    by_id = {
        name: {record["question_id"]: record["choices"][0] for record in records}
        for name, records in answers.items()
    }
    for answer in found["answers"]:
        for side, name in (("exact", "exact"), ("other", FUZZY.name)):
            choice = by_id[name][answer["question_id"]]
            text = "".join(piece["text"] for piece in answer[side][0]).replace("</s>", "")
            assert text.strip() == choice["turns"][0]
        fuzzy = [piece for piece in answer["other"][0] if piece.get("fuzzy")]
        count = choice["origins"][0].count(Origin.FUZZY)
        assert len(fuzzy) == count > 0
        assert [piece["regret"] for piece in fuzzy] == choice["regrets"][0]
        assert all(piece["divergence"] < THRESHOLD for piece in fuzzy)
        assert not any(piece.get("fuzzy") for piece in answer["exact"][0])
        same = [
            "".join(piece["text"] for piece in answer[side][0] if not piece.get("changed"))
            for side in ("exact", "other")
        ]
        assert same[0] == same[1]
    total = sum(len(choice["regrets"][0]) for choice in by_id[FUZZY.name].values())
    assert len(found["tokens"]) == total


def test_lost_answers_come_first_and_equal_ones_are_not_shown(
    model: EagleFSD, answers: dict[str, list[Record]]
) -> None:
    shown = [answer["question_id"] for answer in compare(model, answers)["answers"]]
    last = shown[-1]
    right = dict.fromkeys(shown, True)
    found = compare(model, answers, exact=right, **{FUZZY.name: {**right, last: False}})
    assert [answer["outcome"] for answer in found["answers"]][:2] == ["lost", "changed"]
    assert found["answers"][0]["question_id"] == last
    found = compare(model, answers, exact={**right, last: False}, **{FUZZY.name: right})
    assert found["answers"][0]["outcome"] == "gained"
    found = compare(model, {"exact": answers["exact"], FUZZY.name: answers["exact"]})
    assert (found["changed"], found["answers"], found["tokens"]) == (0, [], [])
