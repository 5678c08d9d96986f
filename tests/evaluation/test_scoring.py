"""What counts as right, and how sure one can be of it."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from eagle_fsd.evaluation.questions import Question, read_questions
from eagle_fsd.evaluation.scoring import (
    McNemar,
    Mean,
    Proportion,
    final_letter,
    final_number,
    loss_bound,
    normal_quantile,
    same_number,
    score,
)
from eagle_fsd.evaluation.scoring import (
    test_program as program_of,
)

DATA = Path(__file__).parents[3] / "shared" / "data"


def _data(name: str) -> Path:
    if not (DATA / name).exists():
        pytest.skip(f"{name} is not beside the project")
    return DATA / name


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7\n#### 7", "7"),
        ("#### 5 is wrong, again\n#### $1,234.50", "1234.50"),
        ("The answer is 18.", "18"),
        ("It falls to -3 degrees", "-3"),
        ("####", None),
        ("12 apples ####", "12"),
        ("no number at all", None),
        ("", None),
    ],
)
def test_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == number


def test_numbers_are_compared_as_numbers() -> None:
    assert same_number("18.00", "18")
    assert same_number("1234", "1,234")
    assert not same_number("18.5", "18")
    assert not same_number(None, "18")


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("Answer: B", "B"),
        ("The answer is (c).", "C"),
        ("**Answer:** **D**", "D"),
        ("A is wrong, B too.\nAnswer: E", "E"),
        ("B", "B"),
        ("(B) because", "B"),
        ("Apples and Bananas", None),
        ("", None),
    ],
)
def test_final_letter(text: str, letter: str | None) -> None:
    assert final_letter(text) == letter


def test_every_reference_answer_of_gsm8k_is_right() -> None:
    questions = read_questions(_data("gsm8k_test.jsonl"))
    assert len(questions) == 1319
    assert all(score(item, item.reference) for item in questions)
    assert not any(score(item, item.reference + "1") for item in questions[:100])


def test_every_canonical_solution_of_human_eval_passes() -> None:
    """Said as a whole function in a code block, and, for some, as the body alone."""
    questions = read_questions(_data("HumanEval.jsonl.gz"))
    assert len(questions) == 164
    for item in questions:
        whole = f"Here it is:\n```python\n{item.extra['prompt']}{item.reference}\n```\nDone."
        assert score(item, whole, execute_code=True), item.question_id
    for item in questions[:10]:
        assert score(item, item.reference, execute_code=True), item.question_id
        assert not score(item, "```python\n    return None\n```", execute_code=True)


def test_code_is_run_only_when_that_is_allowed() -> None:
    question = Question("x", "humaneval", ("",), "code", "def check(f): assert f() == 1", extra={
        "prompt": "def one():\n", "entry_point": "one"})  # fmt: skip
    assert score(question, "    return 1") is None
    assert score(question, "    return 1", execute_code=True) is True
    assert score(question, "    return 2", execute_code=True) is False
    assert "check(one)" in program_of(question, "    return 1")


def test_questions_without_a_score_have_none() -> None:
    assert score(Question(81, "writing", ("Write.",)), "Anything") is None


def test_wilsons_interval_against_tabulated_values() -> None:
    """8 of 10: 0.490 to 0.943 (Wilson 1927, at 95 %)."""
    low, high = Proportion(8, 10).interval
    assert low == pytest.approx(0.4902, abs=5e-4)
    assert high == pytest.approx(0.9433, abs=5e-4)
    assert Proportion(0, 20).interval[0] == 0.0
    assert Proportion(20, 20).interval[1] == 1.0
    assert math.isnan(Proportion(0, 0).value)


def test_the_interval_of_a_mean() -> None:
    mean = Mean.of([1.0, 2.0, 3.0, 4.0])
    assert mean.value == 2.5
    half = 1.959964 * math.sqrt(5 / 3) / 2
    assert mean.interval == pytest.approx((2.5 - half, 2.5 + half), abs=1e-5)


def test_mcnemar_is_the_exact_binomial_test() -> None:
    """Enumerated: the share of all splits of the unequal pairs at least as uneven."""
    first = [True] * 7 + [False] * 1 + [True] * 5 + [False] * 3
    second = [False] * 7 + [True] * 1 + [True] * 5 + [False] * 3
    found = McNemar.of(first, second)
    assert (found.lost, found.gained) == (7, 1)
    splits = [sum(bits) for bits in itertools.product((0, 1), repeat=8)]
    uneven = sum(min(bits, 8 - bits) <= 1 for bits in splits) / len(splits)
    assert found.p_value == pytest.approx(uneven)
    assert McNemar.of([True], [True]).p_value == 1.0


@pytest.mark.parametrize(
    ("lost", "gained", "count", "confidence"),
    [(0, 0, 100, 0.95), (5, 2, 500, 0.95), (3, 3, 200, 0.99), (0, 7, 300, 0.9)],
)
def test_the_bound_of_a_loss_inverts_tangos_test(
    lost: int, gained: int, count: int, confidence: float
) -> None:
    """At the bound the score statistic is the normal quantile, the nuisance at its maximum of
    likelihood, found here by search."""
    bound = loss_bound(lost, gained, count, confidence)

    def log_likelihood(gain: float) -> float:
        same = 1 - 2 * gain - bound
        if gain < 0 or gain + bound < 0 or same <= 0:
            return -math.inf
        value = (count - lost - gained) * math.log(same)
        for seen, chance in ((lost, gain + bound), (gained, gain)):
            if seen:
                value += seen * math.log(chance) if chance > 0 else -math.inf
        return value

    grid = [step / 400_000 for step in range(200_000)]
    gain = max(grid, key=log_likelihood)
    statistic = (lost - gained - count * bound) / math.sqrt(
        count * (2 * gain + bound * (1 - bound))
    )
    assert statistic == pytest.approx(-normal_quantile(confidence), rel=2e-3)


def test_the_bound_of_a_loss_by_hand() -> None:
    """Where nothing differs it is z^2 / (n + z^2)."""
    z = 1.6448536269514722
    assert loss_bound(0, 0, 100) == pytest.approx(z * z / (100 + z * z))
    assert loss_bound(0, 0, 1000, 0.99) > loss_bound(0, 0, 1000, 0.9)
    assert loss_bound(0, 0, 0) == 1.0
    assert loss_bound(100, 0, 100) == pytest.approx(1.0)
    assert loss_bound(0, 50, 100) < 0


@pytest.mark.parametrize(
    ("count", "lose", "gain"), [(200, 0.01, 0.005), (500, 0.01, 1e-9), (300, 0.05, 0.03)]
)
def test_the_bound_of_a_loss_holds_as_often_as_it_says(
    count: int, lose: float, gain: float
) -> None:
    """Its coverage, summed over every outcome with its probability, is 95 % within one point."""
    covered = seen = 0.0
    for lost in range(50):
        for gained in range(40):
            same = count - lost - gained
            chance = math.exp(
                math.lgamma(count + 1)
                - sum(math.lgamma(part + 1) for part in (lost, gained, same))
                + lost * math.log(lose)
                + gained * math.log(gain)
                + same * math.log(1 - lose - gain)
            )
            if chance > 1e-9:
                seen += chance
                covered += chance * (loss_bound(lost, gained, count) >= lose - gain)
    assert seen == pytest.approx(1.0, abs=1e-5)
    assert 0.94 <= covered <= 0.97
