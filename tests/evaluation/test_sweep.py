"""Sweeps: conclusions, divergences, and plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from sample_report import make_row
from transformers import StopStringCriteria

from eagle_fsd import EagleFSD, OptionsError, TreeConfig
from eagle_fsd.evaluation import sweep as sweep_module
from eagle_fsd.evaluation.config import EvaluationConfig, EvaluationRequest, GridConfig
from eagle_fsd.evaluation.methods import BEFORE_RESULT, EXACT, Method
from eagle_fsd.evaluation.questions.formats import bundled_questions
from eagle_fsd.evaluation.report import limit_losses
from eagle_fsd.evaluation.search.prediction import Candidate
from eagle_fsd.evaluation.search.search import TreePlan
from eagle_fsd.evaluation.search.workload import Workload
from eagle_fsd.evaluation.statistics import loss_bound
from eagle_fsd.evaluation.sweep import probe_divergences, sweep
from eagle_fsd.evaluation.tables import points_text
from eagle_fsd.evaluation.verdict import conclusions
from eagle_fsd.model.config import Settings

EXACT_ROW = make_row("exact", 1.0)


# -- conclusions -----------------------------------------------------------------------------------


def concluded(*rows: dict[str, Any], margins: Sequence[float]) -> list[str]:
    return conclusions({"rows": rows, **limit_losses(rows)}, margins)


def test_conclusions_name_the_fastest_method_within_a_margin() -> None:
    """The bounds hold for all settings at once; otherwise it is exact decoding."""
    rows = [
        EXACT_ROW,
        make_row("a", 1.2, 2, 1),
        make_row("c", 1.5, 10),
        make_row("d", 1.3, 4, 2),
    ]
    wide, narrow = concluded(*rows, margins=(0.25, 0.1))
    assert wide.startswith(
        "Fastest within a 25-point loss of accuracy (exact paired bound, 95% confidence"
        " for all 3 settings): c (tree 16/8/2) decodes 1.50 times as fast as exact decoding (95%"
        " interval 1.49 to 1.51) and 3.75 times as fast as plain decoding; of 100 questions it"
        " loses 10 and gains 0, so with 95% confidence its loss of accuracy is at most "
    )
    bound = points_text(loss_bound(4, 2, 100, 1 - 0.05 / 3))
    assert ": d (tree 16/8/2) decodes 1.30 times" in narrow
    assert "of 100 questions it loses 4 and gains 2" in narrow
    assert narrow.endswith(f"its loss of accuracy is at most {bound} points.")
    assert concluded(EXACT_ROW, margins=(0.25,)) == []
    noisy = {**make_row("noisy", 1.2, 2, 1), "speed_over_exact_interval": [0.9, 1.5]}
    for other in (noisy, make_row("slow", 0.8), make_row("lossy", 1.5, 10)):
        (found,) = concluded(EXACT_ROW, other, margins=(0.05,))
        assert "for the setting): exact decoding; 100 questions without any difference" in found
        assert found.endswith("a loss of at most 2.97 points.")


# -- divergences -----------------------------------------------------------------------------------


def test_probed_divergences_are_within_their_bounds(model: EagleFSD) -> None:
    """Questions that fill the context are not counted, and answers end as an evaluation's do."""
    questions = bundled_questions(2)
    too_long = replace(questions[0], turns=("apples " * model.target.context_length,))
    config = EvaluationConfig(max_new_tokens=32)
    workload = Workload.of(model, [*questions, too_long], EvaluationRequest(), config)
    found = probe_divergences(workload, ["js", "tv"])
    assert found["questions"] == 2
    assert found["drafted"] + found["not_drafted"] >= 10  # at least one node per target pass
    for name, most in (("js", 0.6932), ("tv", 1.0 + 1e-6)):
        drafted, others = found[name]["drafted"], found[name]["not_drafted"]
        assert 0 <= drafted[0] <= drafted[1] < others[1] <= others[2] <= most
    stop = [StopStringCriteria(model.tokenizer, [" "])]
    ends = {**workload.ends, "stopping_criteria": stop}
    stopped = probe_divergences(replace(workload, ends=ends), ["js"])
    assert stopped["drafted"] < found["drafted"]


# -- the command -----------------------------------------------------------------------------------

GRID = GridConfig(thresholds=(0.0, 0.1, 0.4), divergences=("js", "kl"), min_ratios=(0.0, 0.3))
SHAPE = TreeConfig(total_tokens=8, depth=6, top_k=1)


def planned(_: object, methods: Sequence[Method], *__: object, **options: bool) -> TreePlan:
    """Every method with a small tree, the later the slower."""
    assert options == {"compiled": False, "last_race": True}
    names = [method.name for method in (EXACT, *methods)]
    candidates = {name: [Candidate(SHAPE, 3.0, 150.0 - 10 * at)] for at, name in enumerate(names)}
    return TreePlan(exact=SHAPE, candidates=candidates)


def test_sweep_writes_report_and_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "plan_trees", planned)
    config, stored = EvaluationConfig(max_new_tokens=12), Settings(threshold=0.1, min_ratio=0.0)
    request = EvaluationRequest(count=2, out=tmp_path)
    report = sweep(request, config, GRID, rules=False, settings=stored)
    names = [item["method"] for item in report["rows"]]
    series = [f"{d} T={t}{r}" for d in ("js", "kl") for r in ("", " r=0.3") for t in (0.1, 0.4)]
    assert [*names, *report["omitted"]] == ["plain", "exact", *series]
    assert list(report["omitted"]) == series[1:]  # with these predictions
    slowest = report["omitted"]["kl T=0.4 r=0.3"]
    assert slowest == "predicted to be 0.47 times as fast as exact decoding"
    assert {item["settings"].get("depth", 6) for item in report["rows"]} == {6}
    assert set(report["divergences"]) == {"drafted", "not_drafted", "questions", "js", "kl"}
    assert len(report["conclusions"]) == 2
    text = (tmp_path / "report.md").read_text()
    assert all(sentence in text for sentence in report["conclusions"])
    assert "| tokens per pass | >= 1 |" in text
    assert "| divergence | target's choice |" in text
    assert report["figures"] == ["tradeoff.png"]  # with a single setting
    assert "![tradeoff.png](tradeoff.png)" in text
    assert ">calibrated: js T=0.1<" in (tmp_path / "tradeoff.svg").read_text()
    assert ">calibrated: js T=0.1<" in (tmp_path / "report.html").read_text()
    with Image.open(tmp_path / "tradeoff.png") as picture:
        about = json.loads(picture.text["Description"])
        assert about["environment"]["versions"]["torch"] == version("torch")


@pytest.mark.usefixtures("no_figures")
def test_speeds_are_measured_apart_from_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "plan_trees", planned)
    monkeypatch.setattr(sweep_module, "rule_methods", lambda: [BEFORE_RESULT])
    config, grid = EvaluationConfig(max_new_tokens=12), GridConfig(thresholds=(0.0,))
    lossless, reports = Settings(threshold=0.0, min_ratio=0.0), {}
    for answer_batch in (None, 2):
        request = EvaluationRequest(count=2, out=tmp_path / str(answer_batch))
        reports[answer_batch] = sweep(
            request, config, grid, answer_batch=answer_batch, settings=lossless
        )
    alone, together = reports[None], reports[2]
    for one, other in zip(alone["rows"], together["rows"], strict=True):
        assert all(one[name] == other[name] for name in ("method", "tau", "accuracy"))
        assert other["latency"]["p95"] >= other["latency"]["median"] > 0.0
    exact = next(row for row in together["rows"] if row["method"] == "exact")
    assert exact["speed_over_exact"] == pytest.approx(1.0)
    assert together["calibrated"] is None  # a rule object has no acceptance options
    assert "batch size 1 (answers: 2)" in (tmp_path / "2" / "report.md").read_text()
    with pytest.raises(OptionsError, match="omit --answer-batch"):
        sweep(request.updated(baseline="hf"), config, grid, answer_batch=2)
