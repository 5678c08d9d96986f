"""Several samples of each question: seeds, pass@k, and means over samples and seeds."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pair_answers import answerer
from sample_report import make_report, make_row

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.evaluation import EvaluationConfig, EvaluationRequest, evaluate
from eagle_fsd.evaluation.answer_store import AnswerStore, all_turns
from eagle_fsd.evaluation.answering import answer_seed
from eagle_fsd.evaluation.methods import EXACT, FSD
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.report import pass_at_k, summarize_samples
from eagle_fsd.evaluation.tables import tables
from eagle_fsd.utils.files import read_jsonl


def test_pass_at_k_is_unbiased() -> None:
    """Its expectation over all outcomes is the probability that one of k samples is correct."""
    for count, chance in itertools.product((1, 2, 5, 8), (0.0, 0.1, 0.5, 0.9, 1.0)):
        for k in range(1, count + 1):
            expected = sum(
                math.comb(count, correct)
                * chance**correct
                * (1 - chance) ** (count - correct)
                * pass_at_k(correct, count, k)
                for correct in range(count + 1)
            )
            assert expected == pytest.approx(1 - (1 - chance) ** k, abs=1e-12)
    for k in (0, 9):
        with pytest.raises(ValueError, match=rf"k must be in \[1, 8\]; got {k}"):
            pass_at_k(0, 8, k)


def test_samples_of_known_scores() -> None:
    """Three questions, two seeds of two samples; one question has no score in one sample."""
    scores = [
        {0: True, 1: False, 2: True, 3: True},
        {0: True, 1: False, 2: False, 3: True},
        {0: True, 1: True, 2: False, 3: True},
        {0: True, 1: False, 2: False},
    ]
    exact = [{0: True, 1: False, 2: True}] * 4
    found = summarize_samples(scores, 2, exact)
    means = [1.0, 0.25, 0.25]
    assert found["samples"] == 4
    assert found["accuracy"] == pytest.approx(0.5)
    assert found["accuracy_interval"] == (0.0, 1.0)  # Student's t is beyond both
    assert found["seed_accuracies"] == [pytest.approx(3 / 6), pytest.approx(3 / 6)]
    assert found["seed_accuracies_interval"] == pytest.approx((0.5, 0.5))
    assert found["pass_at"] == {"4": pytest.approx(1.0)}
    change = [mean - other for mean, other in zip(means, (1.0, 0.0, 1.0), strict=True)]
    assert found["accuracy_change"] == pytest.approx(sum(change) / 3)
    report = make_report([make_row("fsd", 1.5) | {"samples": found}, make_row("plain", 0.4)])
    headers, cells = next(table for table in tables(report) if table[0][0] == "samples")
    assert headers == ["samples", "accuracy", "vs exact", "seeds", "pass@4"]
    assert cells == [["fsd", "50.0% ± 50.0%", "-16.7% ± 129.3%", "50.0%", "100.0%"]]
    assert summarize_samples([{}, {}], 1) is None
    found = summarize_samples([{0: True, 1: False}] * 12, 1)
    assert found["pass_at"] == {"5": 0.5, "10": 0.5, "12": 0.5}
    assert found["seed_accuracies_interval"] is None


def test_every_answer_has_a_seed_of_its_own() -> None:
    keys: list[tuple[int, int | str, int, int]] = [
        *itertools.product((0, 1), (0, 1, "1"), (0, 1), (0, 1))
    ]
    seeds = [answer_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**56 for seed in seeds)
    assert seeds == [answer_seed(*key) for key in keys]


@pytest.mark.slow
def test_samples_do_not_depend_on_other_questions(model: EagleFSD, tmp_path: Path) -> None:
    """Samples are the same in larger runs, in runs that grow, and in batches."""
    questions = [Question(n, "c", (f"Ann has {n} pens. How many?",)) for n in range(4)]

    def answers(out: str, count: int, samples: int, **options: Any) -> dict[int, list[str]]:
        some = questions[:count][::-1]  # neither does the order matter
        store = AnswerStore(tmp_path / out, "fsd", {}, {item.question_id: "" for item in some})
        config = {"temperature": 1.0, "max_new_tokens": 10, "samples": samples}
        asked = answerer(model, tmp_path / out, **config, **options)
        asked.methods, asked.stores = [FSD], [store.open()]
        asked.run(some)
        return {
            record["question_id"]: [choice["turns"][0] for choice in record["choices"]]
            for record in store.merge()
        }

    few = answers("grown", 2, 2)
    grown = answers("grown", 4, 2)
    assert grown.keys() == {0, 1, 2, 3}
    assert grown.items() >= few.items()
    assert answers("whole", 4, 2) == grown
    one = answers("one", 2, 1)
    assert one == {key: texts[:1] for key, texts in few.items()}
    repeated = answers("seeds", 2, 1, seeds=2)
    assert {key: texts[:1] for key, texts in repeated.items()} == one
    assert {key: texts[1:] for key, texts in repeated.items()} == answers("next", 2, 1, seed=1)
    batched = answers("batched", 4, 4, batch=2)
    assert {key: texts[:2] for key, texts in batched.items()} == grown
    assert all(len(set(texts)) > 1 for texts in batched.values())
    assert answers("larger", 4, 4, batch=16) == batched


@pytest.mark.slow
def test_samples_are_reported(tmp_path: Path) -> None:
    """Exact decoding, also with a tree of its own, is not compared with itself."""
    own_tree = replace(EXACT, tree=TreeConfig(total_tokens=8, depth=4, top_k=2))
    report = evaluate(
        EvaluationRequest(count=2, out=tmp_path),
        EvaluationConfig(temperature=1.0, max_new_tokens=64, samples=2, seeds=2),
        [own_tree, "fsd"],
    )
    records = read_jsonl(tmp_path / "fsd.jsonl")
    assert [len(record["choices"]) for record in records] == [4, 4]
    exact, fuzzy = report["rows"]
    turns = [all_turns(record)["new_tokens"] for record in records]
    assert fuzzy["tokens"] == sum(map(sum, turns))
    assert "accuracy_change" not in exact["samples"]
    assert fuzzy["accuracy"] == fuzzy["samples"]["accuracy"]
    assert len(fuzzy["samples"]["seed_accuracies"]) == 2
    assert fuzzy["samples"]["pass_at"]["4"] >= fuzzy["accuracy"]
    change = fuzzy["accuracy"] - exact["accuracy"]
    assert fuzzy["samples"]["accuracy_change"] == pytest.approx(change)
    text = (tmp_path / "report.md").read_text()
    assert "seeds 0 to 1, 2 samples of each question" in text
