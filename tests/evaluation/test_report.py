"""Reports from answers made by hand: numbers, sessions, phases, tables and CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from sample_report import make_report, make_row

from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.report import harness_accuracy, limit_losses, summarize
from eagle_fsd.evaluation.statistics import loss_bound
from eagle_fsd.evaluation.tables import csv_text, footnote, tables


def record_of(
    number: int,
    seconds: float,
    accepted: list[int],
    origins: list[int],
    session: str = "a",
    batch: int | None = None,
) -> dict[str, Any]:
    choice = {
        "index": 0,
        "turns": [f"answered in {seconds} s"],
        "errors": [None],
        "cut_off": [False],
        "wall_time": [seconds],
        "latency": [3 * seconds],
        "new_tokens": [sum(accepted)],
        "accepted": [accepted],
        "origins": [origins],
        "token_ids": [list(range(sum(accepted)))],
        "log_likelihood": [-0.5 * (number + 1)],
        "regrets": [[0.5] * origins.count(2)],
        "memory": [1000 * (number + 1)],
    }
    return {
        "question_id": number,
        "category": "c",
        "session": session,
        "batch": number if batch is None else batch,
        "choices": [choice],
    }


def tables_of(rows: list[dict[str, Any]], temperature: float = 0.0, **values: Any) -> Any:
    """Return the tables of a report by their first header, as headers and lines of cells."""
    found = tables({"rows": rows, "about": {"temperature": temperature}, **values})
    return {headers[0]: (headers[1:], cells) for headers, cells in found}


def csv_lines(report: dict[str, Any]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(csv_text(report))))


def test_rows_and_tables_of_known_answers() -> None:
    records = {
        "plain": [record_of(0, 2.0, [1] * 4, [3] * 4), record_of(1, 2.0, [1] * 2, [3] * 2)],
        "exact": [record_of(0, 1.0, [3, 1], [1, 1, 3, 3]), record_of(1, 0.5, [2], [1, 3])],
        "fsd": [record_of(0, 0.5, [4], [1, 2, 2, 3]), record_of(1, 0.5, [2], [2, 3])],
    }
    scores: dict[str, Any] = {
        "plain": {},
        "exact": {0: True, 1: True},
        "fsd": {0: False, 1: True},
    }
    plain, exact, fuzzy = rows = summarize(list(records), records, scores)
    limit_losses(rows)
    assert plain["tokens_per_second"] == 1.5
    assert exact["speedup"] == pytest.approx(4.0 / 1.5)
    assert (exact["speed_over_exact"], exact["tau"]) == (1.0, 2.0)
    assert fuzzy["speed_over_exact"] == pytest.approx(1.5)
    low, high = fuzzy["speed_over_exact_interval"]
    assert low < 1.5 < high
    assert exact["reach"] == [1.0, pytest.approx(2 / 3), pytest.approx(1 / 3)]
    assert fuzzy["origins"]["fuzzy"] == 0.5
    assert (exact["log_likelihood"], plain["accuracy"], fuzzy["memory"]) == (-0.75, None, 2000)
    against = fuzzy["against_exact"]
    assert (against["lost"], against["accuracy_change"]) == (1, -0.5)
    assert against["log_likelihood_change"] == 0.0
    assert against["loss_limit"] == loss_bound(1, 0, 2, 0.95)
    assert against["agreement"]["identical"] == 2  # token ids, not texts
    assert fuzzy["regret"]["per_token"] == pytest.approx(0.25)
    assert fuzzy["latency"] == {"median": 1.5, "p95": 1.5}
    found = tables_of(rows)
    headers, cells = found["method"]
    assert headers == ["tokens/s", "x plain", "x exact", "tau", "median s", "p95 s", "MiB"]
    assert cells[2][:4] == ["fsd", "6.0", "4.00", f"1.50 ({low:.2f} to {high:.2f})"]
    assert cells[1][3] == "1.00"
    assert found["quality"][1][2][:4] == ["fsd", "2", "50.0% ± 40.5%", "1/0"]
    headers, cells = found["against exact"]
    assert headers == ["identical", "length", "repetition"]
    assert cells[1][:2] == ["fsd", "2/2"]
    assert found["fuzzy tokens"] == (
        ["share", "nats/fuzzy token", "p95 nats"],
        [["fsd", "50.0%", "0.500", "0.500"]],
    )
    assert "phases" not in found
    assert "identical" not in tables_of(rows, temperature=1.0)["against exact"][0]


def test_losses_are_counted_and_bounded_for_all_methods_at_once() -> None:
    names = ("plain", "exact", "a", "b")
    records = {name: [record_of(at, 1.0, [1], [3]) for at in range(5)] for name in names}
    exact = {0: True, 1: True, 2: True, 3: False, 4: False}
    other = {1: False, 2: False, 3: True, 4: False}
    scores: dict[str, Any] = {"plain": exact, "exact": exact, "a": other, "b": exact}
    plain, _, a, b = rows = summarize(names, records, scores)
    limits = limit_losses(rows)
    assert "loss_limit" not in plain["against_exact"]
    found = a["against_exact"]
    assert [found[name] for name in ("lost", "gained", "paired")] == [2, 1, 4]
    assert (found["accuracy_change"], found["mcnemar_p"]) == (-0.25, 1.0)
    assert found["loss_limit"] == loss_bound(2, 1, 4, 0.975)
    assert b["against_exact"]["loss_limit"] == loss_bound(0, 0, 5, 0.975)
    words = "are exact, at 95% confidence for all methods at once (97.5% for each)."
    assert words in footnote(make_report([make_row("fsd", 1.5)], **limits))


def test_phases_are_shares_of_the_decoding_time() -> None:
    records = {
        "exact": [record_of(0, 1.0, [3, 1], [1, 1, 3, 3])],
        "fsd": [record_of(0, 1.0, [4], [1, 2, 2, 3])],
        "hf": [record_of(0, 1.0, [4], [3] * 4)],
    }
    records["hf"][0]["choices"][0]["accepted"] = [[]]
    phases = {"exact": {"prefill": 9.0, "target": 3.0, "draft": 1.0}, "hf": {}}
    phases["fsd"] = {"prefill": 9.0, "target": 1.0, "draft": 0.0}
    for name, values in phases.items():
        records[name][0]["choices"][0]["phases"] = [values]
    exact, fuzzy, hf = rows = summarize(list(records), records, {name: {} for name in records})
    assert exact["phase_shares"] == {"target": 0.75, "draft": 0.25}
    assert (exact["seconds_per_step"], exact["step_over_exact"]) == (2.0, 1.0)
    assert fuzzy["step_over_exact"] == 0.5
    assert (hf["phase_shares"], hf["seconds_per_step"], hf["step_over_exact"]) == ({}, None, None)
    headers, cells = tables_of(rows)["phases"]
    assert headers[:3] == ["ms/pass", "x exact", "target"]
    assert [line[:4] for line in cells] == [
        ["exact", "2000.00", "1.00", "75.0%"],
        ["fsd", "1000.00", "0.50", "100.0%"],
    ]
    fuzzy["phase_shares"] = {"graph": 0.85, "target": 0.15}  # steps that were captured on CUDA
    headers, cells = tables_of(rows)["phases"]
    assert headers[2:] == ["graph", "target", "draft"]
    assert cells[1][3:] == ["85.0%", "15.0%", ""]


def test_speeds_compare_within_a_session() -> None:
    """The machine of session b is ten times as fast, and plain decoding was not measured there."""
    records = {
        "plain": [record_of(0, 4.0, [1] * 4, [3] * 4), record_of(1, 2.0, [1] * 2, [3] * 2)],
        "exact": [record_of(0, 2.0, [4], [3] * 4), record_of(1, 0.1, [2], [3] * 2, "b")],
        "fsd": [record_of(0, 0.1, [4], [3] * 4, "b"), record_of(1, 0.05, [2], [3] * 2, "b")],
        "late": [record_of(0, 0.1, [4], [3] * 4, "c")],
    }
    plain, exact, fuzzy, late = summarize(list(records), records, {name: {} for name in records})
    assert exact["speedup"] == pytest.approx(2.0)  # question 0 only
    assert fuzzy["speedup"] is None
    assert fuzzy["speed_over_exact"] == pytest.approx(2.0)  # question 1 only
    assert (late["speedup"], late["speed_over_exact"]) == (None, None)
    assert plain["speedup"] == 1.0


def test_speed_intervals_treat_batches_as_independent() -> None:
    """Eight questions in two batches give the interval of two measurements, not of eight."""

    def interval(together: bool, count: int = 8) -> Any:
        records = {
            name: [
                record_of(at, 1 / speeds[at // 4], [4], [3] * 4, batch=at // 4 if together else at)
                for at in range(count)
            ]
            for name, speeds in {"exact": (1.0, 1.0), "fsd": (1.5, 1.6)}.items()
        }
        rows = summarize(["exact", "fsd"], records, {"exact": {}, "fsd": {}})
        return rows[1]["speed_over_exact_interval"]

    (low, high), (narrow_low, narrow_high) = interval(True), interval(False)
    assert low < narrow_low < narrow_high < high
    assert high - low > 5 * (narrow_high - narrow_low)  # t with 1 degree of freedom, not 7
    assert interval(True, count=4) is None


def test_accuracy_under_the_filters_of_lm_evaluation_harness() -> None:
    questions = [Question(number, "c", ("?",), "number", "4") for number in (0, 1)]
    records = [record_of(number, 1.0, [1], [3]) for number in (0, 1)]
    for record, text in zip(records, ("2 + 2\n#### 4", "The answer is $4."), strict=True):
        record["choices"][0]["turns"] = [text]
    found = harness_accuracy(questions, records)
    assert found == {"strict-match": 0.5, "flexible-extract": 1.0}
    row = make_row("exact", 1.0) | {"accuracy": 1.0, "harness": found}
    assert tables_of([row])["accuracy by scoring"] == (
        ["eagle-fsd", "strict-match", "flexible-extract"],
        [["exact", "100.0%", "50.0%", "100.0%"]],
    )
    row["harness"] = {"strict-match": 1.0, "flexible-extract": 1.0}
    assert "accuracy by scoring" not in tables_of([row])
    assert harness_accuracy([Question(0, "c", ("?",))], records[:1]) is None


def test_tables_of_categories_and_positions_are_narrow() -> None:
    rows = [make_row("exact", 1.0), make_row("fsd", 1.5)]
    rows[0] |= {"reach": [1 - at / 80 for at in range(65)]}
    for row in rows:
        row["tau_by_category"] = {f"c{at}": 2.0 for at in range(8)}
    comparison = {"method": "fsd", "answers": [], "tokens": [[0.01, 0.5], [0.04, 0.25]]}
    sides = {"drafted": [1e-6, 2e-5, 0.003], "not_drafted": [0.01, 0.02, 0.5]}
    divergences = {"drafted": 90, "not_drafted": 10, "questions": 5, "js": sides}
    found = tables_of(rows, comparison=comparison, divergences=divergences)
    assert found["fuzzy tokens"][1][-1][-1] == "0.025"
    assert [
        line["divergence_mean"] for line in csv_lines(make_report(rows, comparison=comparison))
    ] == ["", "0.025"]
    headers, cells = found["tokens per pass"]
    assert (headers[-1], cells[0][-1]) == (">= 64", "21%")
    parts = tables({"rows": rows, "about": {"temperature": 0.0}})
    assert [len(headers) for headers, _ in parts if headers[0] == "tau"] == [7, 3]
    assert found["divergence"][1][0] == ["js", "drafted", "90", "1e-06", "2e-05", "0.003"]


def test_csv_and_footnote_state_the_settings_of_each_row() -> None:
    """The pair's own tree (16/8/2) is not the one that exact decoding used."""
    plain, exact, fuzzy = (make_row(name, 1.0) for name in ("plain", "exact", "fsd"))
    plain["settings"] = {"method": "plain"}
    exact["settings"] = {"method": "exact", "total_tokens": 20, "depth": 5, "tree_top_k": 4}
    fuzzy["settings"] |= {"selection": "priced", "price": 0.75, "max_fuzzy_nats": 2.5}
    report = make_report([plain, exact, fuzzy])
    names = ("total_tokens", "depth", "top_k", "price", "max_fuzzy_nats")
    assert [[line[name] for name in names] for line in csv_lines(report)] == [
        ["", "", "", "", ""],
        ["20", "5", "4", "", ""],
        ["16", "8", "2", "0.75", "2.5"],
    ]
    settings = "fsd (js T=0.1, r=0.1, price 0.75, at most 2.5 nats, tree 16/8/2)."
    assert settings in footnote(report)
    fuzzy["settings"] = {"method": "server", "model": "m", "engine": "vllm"}
    report["about"]["servers"] = ["fsd=http://localhost:8000/v1"]
    assert " fsd." not in footnote(report)
    report["sessions"]["b"] = report["sessions"]["a"]
    assert "2 sessions. x compares within a session" in footnote(report)
    report["about"]["answer_batch"] = 8  # speeds were measured separately
    assert "x compares" not in footnote(report)


def test_unclear_replies_of_a_judge_are_reported() -> None:
    row = make_row("fsd", 1.5)
    pairs = {"questions": 9, "won": 2, "tied": 3, "lost": 1, "unclear": 3, "loss_limit": 0.5}
    row["judge"] = {"pairs": pairs}
    assert tables_of([row])["judge"] == (
        ["better/equal/worse", "unclear", "net loss <="],
        [["fsd", "2/3/1", "3", "50.00 points"]],
    )
    (line,) = csv_lines(make_report([row]))
    assert (line["judge_unclear"], line["judge_loss_limit"]) == ("3", "0.5")
    pairs["unclear"] = 0
    assert "unclear" not in tables_of([row])["judge"][0]
