"""What can fail in a later stage fails before the pair is loaded and trees are searched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_fsd import OptionsError
from eagle_fsd.evaluation import calibration, runner
from eagle_fsd.evaluation import sweep as sweep_module
from eagle_fsd.evaluation.calibration import calibrate
from eagle_fsd.evaluation.config import (
    CalibrationConfig,
    EvaluationRequest,
    LossBounds,
    SelectionConfig,
)
from eagle_fsd.evaluation.runner import evaluate
from eagle_fsd.evaluation.sweep import sweep

COMMANDS: dict[str, Callable[[EvaluationRequest], Any]] = {
    "evaluate": evaluate,
    "sweep": sweep,
    "calibrate": lambda request: calibrate(request, LossBounds(max_drop=50.0)),
}
PROBLEM = {
    "task_id": "T/0",
    "prompt": "def f():\n",
    "entry_point": "f",
    "canonical_solution": "    return 1\n",
    "test": "def check(candidate):\n    assert candidate() == 1\n",
}


@pytest.fixture(autouse=True)
def not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("the pair was loaded")

    for module in (runner, sweep_module, calibration):
        monkeypatch.setattr(module, "load_share", load)


def fail(*_: Any) -> None:
    raise OptionsError("this does not work")


@pytest.mark.parametrize("command", COMMANDS)
def test_what_fails_later_is_found_early(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing sandbox, missing prompts of the judge, and a grader that fails."""
    run, file = COMMANDS[command], tmp_path / "problems.jsonl"
    rows = [{**PROBLEM, "task_id": f"T/{at}", "prompt": f"# {at}\ndef f():\n"} for at in range(8)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(runner, "use_sandbox", fail)
    monkeypatch.setattr(runner.JudgePrompts, "load", fail)
    for options in (
        {"questions": str(file), "execute_code": True},
        {"judge_base_url": "http://127.0.0.1:9/v1"},
    ):
        with pytest.raises(OptionsError, match="this does not work"):
            run(EvaluationRequest(count=8, out=tmp_path / "out", **options))
    (tmp_path / "own.py").write_text("def grade(answer):\n    return True\n")
    grader = f"{tmp_path / 'own.py'}:grade"
    with pytest.raises(ValueError, match="failed on question 0: TypeError"):
        run(EvaluationRequest(count=8, out=tmp_path / "out", grader=grader))


def test_options_without_effect_on_a_calibration_are_rejected(tmp_path: Path) -> None:
    request, bounds = EvaluationRequest(count=8, out=tmp_path), LossBounds()
    with pytest.raises(OptionsError, match="--baseline is not supported by calibrate"):
        calibrate(request.updated(baseline="hf"), bounds)
    config = CalibrationConfig(measure="agreement")
    selection = SelectionConfig(select_on="gsm8k", select_regret=0.1)
    with pytest.raises(OptionsError, match="requires --measure accuracy; got agreement"):
        calibrate(request, bounds, config, selection=selection)
