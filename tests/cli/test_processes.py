"""Commands that two processes run together, with a target that is split over them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launches import run_two

from eagle_fsd import OptionsError
from eagle_fsd.evaluation.processes import placement
from eagle_fsd.utils.files import read_jsonl

Run = Callable[..., tuple[int, str, str]]

MODULE = ("-m", "eagle_fsd.cli")
#: The command with few measurements. The second process's clock is of no use.
FEW_MEASUREMENTS = """
import os, random
from types import SimpleNamespace
from eagle_fsd.cli import main
from eagle_fsd.evaluation import calibration
from eagle_fsd.evaluation.search import prediction, search, workload
from eagle_fsd.model import stats
from eagle_fsd.model.config import TreeConfig
prediction.SECONDS, search.TIMED_ROUNDS, calibration.RACE_GROUPS = 0.0, 1, 2
def measure_once(workload, advance, rounds=1):
    return prediction.measure_costs(workload, advance, 1)
def one_tree():
    return [TreeConfig(total_tokens=12, depth=10, top_k=1)]
search.measure_costs, search.recorded_trees = measure_once, one_tree
if os.environ["RANK"] == "1":
    stats.time = workload.time = SimpleNamespace(perf_counter=random.Random(1).random)
main()
"""
GENERATE = ("--max-new-tokens", 24, "--threshold", 0.2, "--json")
EVALUATE = ("--threshold", 0.2, "--max-new-tokens", 8, "--json")
PROMPT = "Tom has 3 apples and buys 4. How many apples does he have?"


def split(*arguments: object, program: tuple[str, ...] = MODULE, stdin: str = "") -> Any:
    """Run a command with a split target; return the JSON that it printed, once."""
    done = run_two(*program, *arguments, "--device", "tp", stdin=stdin)
    assert done.returncode == 0, done.stderr
    (printed,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(printed)


def answers(folder: Path) -> dict[str, list[list[int]]]:
    """The tokens of all answers, by method."""
    return {
        path.stem: [record["choices"][0]["token_ids"][0] for record in read_jsonl(path)]
        for path in folder.glob("*.jsonl")
    }


@pytest.mark.slow
def test_generate_prints_the_answer_of_one_process(run: Run) -> None:
    """The prompt comes from standard input, which only one process can read."""
    options = [*GENERATE, "--temperature", 0.8, "--seed", 3]
    found = split("generate", "-", *options, stdin=PROMPT)
    expected = json.loads(run("generate", PROMPT, *options)[1])
    for name in ("text", "tokens", "origins", "settings"):
        assert found[name] == expected[name]


@pytest.mark.slow
def test_evaluate_resumes_and_writes_the_answers_of_one_process(run: Run, tmp_path: Path) -> None:
    together, alone = tmp_path / "together", tmp_path / "alone"
    assert run("evaluate", "--count", 3, *EVALUATE, "--out", together)[0] == 0
    for file in together.glob("*.jsonl"):
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:1]))
    kept = read_jsonl(together / "exact.jsonl")
    report = split("evaluate", "--count", 3, *EVALUATE, "--out", together)
    assert run("evaluate", "--count", 3, *EVALUATE, "--out", alone)[0] == 0
    assert answers(together) == answers(alone)
    assert all(len(found) == 3 for found in answers(together).values())
    assert all(record in read_jsonl(together / "exact.jsonl") for record in kept)
    assert report == json.loads((together / "report.json").read_text())
    assert report["comparison"]["changed"] > 0
    names = [sorted(path.name for path in item.iterdir()) for item in (together, alone)]
    assert names[0] == names[1]


@pytest.mark.slow
def test_processes_take_the_same_decisions_from_the_clock_of_the_first(tmp_path: Path) -> None:
    """All stages; decisions that differed would make one of them wait for the other forever."""
    program, folder, grader = (tmp_path / name for name in ("program.py", "out", "grader.py"))
    program.write_text(FEW_MEASUREMENTS)
    grader.write_text("def right(answer, question):\n    return True\n")
    options: list[object] = ["-T", 0.1, "-r", 0, "--no-rules", "--grader", f"{grader}:right"]
    found = split(
        *("calibrate", "--count", 4, "--max-new-tokens", 8, "--json", "--out", folder, *options),
        program=(str(program),),
    )
    assert found["conclusions"]
    assert (folder / "fsd.json").exists()


@pytest.mark.usefixtures("loaded_once")
def test_without_torchrun_the_target_is_whole(run: Run) -> None:
    expected = json.loads(run("generate", PROMPT, *GENERATE)[1])
    found = json.loads(run("generate", PROMPT, *GENERATE, "--device", "tp")[1])
    assert found["tokens"] == expected["tokens"]


def test_servers_and_chats_require_a_single_process(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for command in ("demo", "serve", "serve worker", "chat"):
        status, _, errors = run(*command.split())
        assert status == 2
        assert f"error: {command} requires a single process; got 2." in errors
        assert "--device auto" in errors
    for words in ("evaluate --server A=http://a/v1 B=http://b/v1", "chat --base-url http://a/v1"):
        status, _, errors = run(*words.split())
        assert status == 2
        assert "requires a single process; got 2 (see" in errors


def test_processes_must_join_to_share_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two:
        num_processes = 2

    monkeypatch.setattr("eagle_fsd.evaluation.processes.start_processes", Two)
    assert placement("cuda:1") == {"device_map": "cuda:1"}
    with pytest.raises(OptionsError, match="does not support --device tp"):
        placement("tp")
