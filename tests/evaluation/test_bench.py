"""Benchmarks: an evaluation whose answers carry the seconds of each phase."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from eagle_fsd import OptionsError
from eagle_fsd.bundled import BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.evaluation import EvaluationConfig, EvaluationRequest, evaluate
from eagle_fsd.evaluation.bench import bench
from eagle_fsd.evaluation.config import BenchConfig, BenchGrid
from eagle_fsd.evaluation.tables import footnote
from eagle_fsd.utils.files import read_jsonl

GRID = BenchGrid(thresholds=(0.2,), min_ratios=(0.0,))


@pytest.mark.usefixtures("no_figures")
def test_bench_reports_phases(tmp_path: Path) -> None:
    config = BenchConfig(max_new_tokens=8, repeats=2)
    request = EvaluationRequest(count=2, baseline="hf", out=tmp_path)
    # The options of the drafter's own settings do not apply.
    head = tmp_path / "head"
    shutil.copytree(BUNDLED_HEAD, head)
    own = json.loads((head / "fsd.json").read_text())
    (head / "fsd.json").write_text(json.dumps(own | {"exact_first": 3, "selection": "priced"}))
    request = request.updated(target=str(BUNDLED_TARGET), drafter=str(head))
    report = bench(request, config, GRID)
    hf, plain, exact, fuzzy = report["rows"]
    assert [row["method"] for row in report["rows"]] == ["hf", "plain", "exact", "T=0.2"]
    assert hf["phase_shares"] == {}
    for row in (plain, exact, fuzzy):
        assert sum(row["phase_shares"].values()) == pytest.approx(1.0)
        assert row["step_over_exact"] > 0
    assert exact["step_over_exact"] == pytest.approx(1.0)
    assert "exact_first" not in fuzzy["settings"]
    assert fuzzy["settings"]["selection"] == "longest"
    (choice,) = read_jsonl(tmp_path / "exact.jsonl")[0]["choices"]
    (phases,) = choice["phases"]
    assert 0.0 < sum(phases.values()) <= choice["wall_time"][0]
    assert "each decoded 2 times" in footnote(report)
    # Answers that carry phases and those that do not are never mixed.
    with pytest.raises(ValueError, match="repeats was 2, is None"):
        evaluate(request, EvaluationConfig(max_new_tokens=8), ["exact"])


def test_answers_that_a_drafter_has_learned_are_not_repeated(tmp_path: Path) -> None:
    request = EvaluationRequest(drafter="adaptive-ngram", count=1, out=tmp_path / "out")
    with pytest.raises(OptionsError, match="--repeats must be 1 with a drafter that learns"):
        bench(request, BenchConfig(repeats=2))
    assert not (tmp_path / "out").exists()


def test_bench_by_several_processes_requires_an_output_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionsError, match="--out is required"):
        bench(EvaluationRequest())
