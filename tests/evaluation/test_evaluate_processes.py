"""``eagle-fsd evaluate`` in processes of its own: kills, several processes, and MT-bench."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from published import published

from eagle_fsd.evaluation import EvaluationConfig, EvaluationRequest, evaluate
from eagle_fsd.model.config import Settings
from eagle_fsd.utils.files import read_jsonl

#: Starts ``eagle-fsd`` with a launcher and the command's arguments.
Start = Callable[[Sequence[str], Sequence[object]], "subprocess.Popen[str]"]
Record = dict[str, Any]

METHODS = ("plain", "exact", "fsd")
COUNT = 12

MODULE = ("-m", "eagle_fsd.cli")
#: ``accelerate launch --cpu --num_processes 2`` starts one process unless there is an mpirun.
TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
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

#: Seconds until a process counts as hung.
TIMEOUT = 600

#: Fields that greedy decoding reproduces.
REPRODUCED = ("turns", "idxs", "new_tokens", "accepted", "origins", "errors")


@pytest.fixture
def start() -> Iterator[Start]:
    """Start processes; those still running at the end of the test are terminated."""
    started: list[subprocess.Popen[str]] = []

    def call(launcher: Sequence[str], arguments: Sequence[object]) -> subprocess.Popen[str]:
        variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        variables["ACCELERATE_USE_CPU"] = "true"
        process = subprocess.Popen(
            [sys.executable, *launcher, "evaluate", *map(str, arguments)],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield call
    for process in started:
        if process.poll() is None:
            process.terminate()  # torchrun terminates its workers
        process.communicate(timeout=TIMEOUT)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The answers of a run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("undisturbed") / "out"
    resume(folder)
    return folder


def arguments(folder: Path) -> list[object]:
    methods = [word for name in METHODS for word in ("-m", name)]
    options = ["--count", COUNT, "--threshold", 0.2, "--max-new-tokens", 8]
    return ["bundled", *options, *methods, "--out", folder, "--json"]


def resume(folder: Path) -> dict[str, Any]:
    """Run the command of :func:`arguments` in this process."""
    report = evaluate(
        EvaluationRequest(count=COUNT, out=folder),
        EvaluationConfig(max_new_tokens=8),
        METHODS,
        settings=Settings(threshold=0.2),
    )
    assert report is not None
    return report


def finish(process: subprocess.Popen[str]) -> str:
    """Return the standard output of a process that succeeds."""
    output, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, errors
    return output


def complete_answers(folder: Path, name: str) -> list[Record]:
    path = folder / f"{name}.jsonl"
    return read_jsonl(path) if path.exists() else []


def assert_same_answers(folder: Path, undisturbed: Path) -> None:
    """Check that each question is answered once, in order, as without interruption."""
    files = [sorted(path.name for path in item.iterdir()) for item in (folder, undisturbed)]
    assert files[0] == files[1]
    for name in METHODS:
        records = complete_answers(folder, name)
        assert [record["question_id"] for record in records] == list(range(COUNT))
        assert len({record["answer_id"] for record in records}) == COUNT
        for ours, theirs in zip(records, complete_answers(undisturbed, name), strict=True):
            (choice,), (expected,) = ours["choices"], theirs["choices"]
            assert [choice[key] for key in REPRODUCED] == [expected[key] for key in REPRODUCED]
            assert choice["log_likelihood"] == pytest.approx(expected["log_likelihood"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_accelerator")
def test_two_killed_processes_resume_to_the_files_of_one(
    start: Start, undisturbed: Path, tmp_path: Path
) -> None:
    """The parts of both become part of the merged files, and only one prints."""
    folder, script = tmp_path / "out", tmp_path / "killed.py"
    script.write_text(KILLED_AT_THE_FIFTH)
    killed = start((*TWO_PROCESSES, str(script)), arguments(folder))
    killed.communicate(timeout=TIMEOUT)
    assert killed.returncode not in (0, -signal.SIGKILL)  # the launcher survives
    kept = [record for path in folder.glob("*.part*.jsonl") for record in read_jsonl(path)]
    assert 5 <= len(kept) <= 10
    output = finish(start((*TWO_PROCESSES, *MODULE), arguments(folder)))
    (printed,) = [line for line in output.splitlines() if line.startswith("{")]
    report = json.loads((folder / "report.json").read_text())
    assert json.loads(printed) == report
    before = json.loads((undisturbed / "report.json").read_text())
    for name in ("about", "settings", "questions"):
        assert report[name] == before[name]
    for ours, theirs in zip(report["rows"], before["rows"], strict=True):
        for name in ("method", "answers", "failed", "tokens", "tau", "reach", "origins"):
            assert ours[name] == theirs[name]
    records = [record for name in METHODS for record in complete_answers(folder, name)]
    assert all(record in records for record in kept)
    assert_same_answers(folder, undisturbed)


@pytest.mark.usefixtures("fresh_accelerator")
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
