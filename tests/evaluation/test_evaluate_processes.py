"""``eagle-fsd evaluate`` in processes of its own: kills, several processes, and MT-bench."""

from __future__ import annotations

import json
import signal
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from launches import run_two
from published import published

from eagle_fsd.evaluation import EvaluationConfig, EvaluationRequest, evaluate
from eagle_fsd.model.config import Settings
from eagle_fsd.utils.files import read_jsonl

METHODS = ("plain", "exact", "fsd")
COUNT = 12

#: The command in a process that is killed once it has written its fifth answer.
KILLED_AT_THE_FIFTH = """
import os, signal
from eagle_fsd.cli import main
from eagle_fsd.evaluation.answer_store import AnswerStore
original, written = AnswerStore.append, []
def append(store, record):
    original(store, record)
    written.append(record)
    if len(written) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
AnswerStore.append = append
main()
"""

#: Fields that greedy decoding reproduces.
REPRODUCED = ("turns", "idxs", "new_tokens", "accepted", "origins", "errors")


def evaluate_in_two(program: Sequence[str], folder: Path) -> CompletedProcess[str]:
    """Run ``eagle-fsd evaluate`` in two processes."""
    methods = [word for name in METHODS for word in ("-m", name)]
    options = ["--count", COUNT, "--threshold", 0.2, "--max-new-tokens", 8, "--json"]
    command = [*program, "evaluate", "bundled", *options, *methods, "--out", folder]
    return run_two(*command, ACCELERATE_USE_CPU="true")


@pytest.mark.slow
def test_two_killed_processes_resume_to_the_files_of_one(tmp_path: Path) -> None:
    """The parts of both become part of the merged files, and only one prints."""
    folder, alone, script = (tmp_path / name for name in ("out", "alone", "killed.py"))
    config, settings = EvaluationConfig(max_new_tokens=8), Settings(threshold=0.2)
    evaluate(EvaluationRequest(count=COUNT, out=alone), config, METHODS, settings=settings)
    script.write_text(KILLED_AT_THE_FIFTH)
    killed = evaluate_in_two([str(script)], folder)
    assert killed.returncode not in (0, -signal.SIGKILL)  # the launcher survives
    kept = [record for path in folder.glob("*.part*.jsonl") for record in read_jsonl(path)]
    assert 5 <= len(kept) <= 10
    done = evaluate_in_two(["-m", "eagle_fsd.cli"], folder)
    assert done.returncode == 0, done.stderr
    (printed,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    report, before = (json.loads((at / "report.json").read_text()) for at in (folder, alone))
    assert json.loads(printed) == report
    for name in ("about", "settings", "questions"):
        assert report[name] == before[name]
    for ours, theirs in zip(report["rows"], before["rows"], strict=True):
        for name in ("method", "answers", "failed", "tokens", "tau", "reach", "origins"):
            assert ours[name] == theirs[name]
    files = [sorted(path.name for path in at.iterdir()) for at in (folder, alone)]
    assert files[0] == files[1]
    records = []
    for name in METHODS:
        found, expected = (read_jsonl(at / f"{name}.jsonl") for at in (folder, alone))
        assert [record["question_id"] for record in found] == list(range(COUNT))
        assert len({record["answer_id"] for record in found}) == COUNT
        for ours, theirs in zip(found, expected, strict=True):
            (choice,), (other,) = ours["choices"], theirs["choices"]
            assert [choice[key] for key in REPRODUCED] == [other[key] for key in REPRODUCED]
            assert choice["log_likelihood"] == pytest.approx(other["log_likelihood"], abs=1e-6)
        records += found
    assert all(record in records for record in kept)


def test_fastchat_reads_answers_to_mt_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question of each category, both turns."""
    file = published("mt_bench_question.jsonl")
    monkeypatch.setenv("EAGLE_FSD_DATA", str(file.parent))
    request = EvaluationRequest(questions="mt-bench", count=8, out=tmp_path)
    report = evaluate(request, EvaluationConfig(max_new_tokens=8, batch=8), ["exact"])
    for name in ("openai", "anthropic"):  # FastChat imports clients that are not needed here
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    from fastchat.llm_judge.common import load_model_answers

    answers = load_model_answers(str(tmp_path))
    assert list(answers) == ["exact"]  # every .jsonl file in the folder
    records = read_jsonl(tmp_path / "exact.jsonl")
    assert list(answers["exact"].values()) == records
    for record in records:
        (choice,) = record["choices"]
        for key in ("turns", "idxs", "new_tokens", "wall_time", "accepted", "errors"):
            assert len(choice[key]) == 2
    (row,) = report["rows"]
    assert len(records) == row["answers"] == 8
    assert row["tokens"] == sum(sum(item["choices"][0]["new_tokens"]) for item in records)
    assert sorted(row["tau_by_category"]) == [
        *("coding", "extraction", "humanities", "math"),
        *("reasoning", "roleplay", "stem", "writing"),
    ]
