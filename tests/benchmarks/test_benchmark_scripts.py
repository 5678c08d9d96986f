"""Every benchmark runs with ``--quick`` and saves what it prints."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import batches
import compare
import divergences
import drafters
import engines
import operations
import pytest
import revisions
import serving
import shapes
import step
import summary
import torch
import training
from measurement import EXACT, FSD, PLAIN, Answer, Method, Task, answer_in_turn

from eagle_fsd import AcceptanceConfig
from eagle_fsd.model.engine import Engine
from eagle_fsd.model.packed_weights import SUPPORTED
from eagle_fsd.model.stats import PhaseClock

ROOT = Path(__file__).parents[2]
MEASUREMENT = (ROOT / "benchmarks/measurement.py").read_text(encoding="utf-8")
Quick = Callable[..., tuple[str, dict[str, Any], str]]


@pytest.fixture(autouse=True)
def _keep_threads() -> Any:
    """Undo what the scripts set for the whole process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Quick:
    """Run a script with ``--quick``; returns its report's name, JSON and Markdown.

    Results must be saved as they come in, so that a script that is killed leaves those it has.
    """

    def call(script: Any, *arguments: str, saves: int | None = None) -> Any:
        save, found = script.save_report, []

        def save_report(options: Any, name: str, tables: Any, finished: bool = True) -> None:
            save(options, name, tables, finished)
            (path,) = tmp_path.glob("*.json")
            report = json.loads(path.read_text(encoding="utf-8"))
            count = sum(map(len, report["tables"].values()))
            assert count == sum(len(table.rows) for table in tables) > 0
            assert ("incomplete" in path.with_suffix(".md").read_text()) != report["finished"]
            found.append((report["finished"], count))

        monkeypatch.setattr(script, "save_report", save_report)
        script.main(["--quick", "--device", "cpu", "--out", str(tmp_path), *arguments])
        assert found == sorted(found)
        assert saves in (None, len(found) - 1)
        assert [finished for finished, _ in found] == [False] * (len(found) - 1) + [True]
        (path,) = tmp_path.glob("*.json")
        report = json.loads(path.read_text(encoding="utf-8"))
        assert {"date", "machine", "versions"} <= set(report["environment"])
        return path.stem, report["tables"], path.with_suffix(".md").read_text(encoding="utf-8")

    return call


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, bool]]:
    """The number of prompts of each step at the reserved size, and whether it is compiled."""
    step, found = Engine.step, set()

    def record(engine: Engine, *args: Any, **options: Any) -> Any:
        if len(engine.rows) == engine.reserved[0]:
            found.add((engine.reserved[0], engine.execution.compiles))
        return step(engine, *args, **options)

    monkeypatch.setattr(Engine, "step", record)
    return found


def check_steps(rows: list[dict[str, Any]], seconds: str) -> None:
    """Check the phases and the floor of steps, whose phases add up to a field of their row."""
    for row in rows:
        assert row["target_ms"] > 0.0
        phases = sum(row[f"{phase}_ms"] for phase in ("draft", "target", "verify", "rest"))
        assert phases == pytest.approx(row[seconds], rel=0.5)
        assert row["over_floor"] == pytest.approx(row["step_ms"] / row["floor_ms"])


def test_step_reports_phases_and_floor(quick: Quick, capsys: pytest.CaptureFixture[str]) -> None:
    name, tables, text = quick(step, saves=1)
    assert name == "step-bundled-cpu"
    assert text.strip() in capsys.readouterr().out
    ((_, rows),) = tables.items()
    assert [row["method"] for row in rows] == [PLAIN, EXACT, FSD]
    check_steps(rows, "step_ms")
    assert not any(row["captured"] for row in rows)
    assert "CUDA graphs" not in text


class GraphClock(PhaseClock):
    """Reports the phases of a step as those of a replayed CUDA graph: as a single one."""

    def enter(self, phase: str | None) -> None:
        parts = ("draft", "target", "verify", "cache")
        super().enter("graph" if phase in parts else phase)


def test_phases_of_captured_steps_come_from_a_second_run(
    quick: Quick, compiled: set[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, the first run reports the phase "graph" only."""
    create = Engine.__init__
    captures = []

    def init(engine: Engine, *args: Any, **options: Any) -> None:
        create(engine, *args, **options)
        captures.append(engine.execution.options.capture)
        if captures[-1]:
            engine.execution.clock = GraphClock(engine.target.device)

    monkeypatch.setattr(Engine, "__init__", init)
    arguments = ["--shape", "llama-3.1-8b", "--tree", "16/3/4", "--rows", "2"]
    name, tables, text = quick(step, *arguments, "--compile")
    assert name == "step-llama-3.1-8b-compiled-cpu"
    assert captures == 3 * [True] + 3 * [False]
    assert compiled == {(2, True)}
    ((_, rows),) = tables.items()
    assert [row["method"] for row in rows] == [PLAIN, EXACT, FSD]
    check_steps(rows, "phased_ms")
    for row in rows:
        assert row["captured"]
        assert row["tree"] in text
        assert f"{row['method']} {row['phased_ms']:.2f} ms" in text
    assert "replayed as CUDA graphs" in text
    assert ", compiled," in text


def test_shapes_force_acceptance(quick: Quick) -> None:
    name, tables, _ = quick(shapes, "--accepted", "2", "--dtype", "bfloat16", saves=2)
    assert name == "shapes-bfloat16-cpu"
    assert len(tables) == 2  # a full and a reduced draft vocabulary
    for rows in tables.values():
        plain, *forced = rows
        assert plain["tau"] == 1.0
        assert [row["tau"] for row in forced] == [3.0, 3.0]
        for row in forced:
            assert row["speedup"] == pytest.approx(3.0 * plain["step_ms"] / row["step_ms"])
            assert row["floor_ms"] > plain["floor_ms"]


def test_batches_give_the_same_answers(quick: Quick) -> None:
    name, tables, _ = quick(batches, saves=6)
    assert name == "batches-cpu"
    ((_, rows),) = tables.items()
    assert [(row["rows"], row["method"]) for row in rows] == [
        (rows, method) for rows in (1, 3) for method in (PLAIN, EXACT, FSD)
    ]
    assert all(row["identical"] == 100 for row in rows)
    assert all(row["cache_mib"] > 0 for row in rows)


def test_operations_are_timed(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "COPIED_VALUES", 2**21)
    name, tables, _ = quick(operations, saves=4 if SUPPORTED else 3)
    assert name == "operations-float32-cpu"
    verification, read_out, attention, *packed = tables.values()
    assert all(row["ms"] > 0.0 for row in (*verification, *read_out))
    assert all(row["ratio"] > 0.0 for rows in packed for row in rows)
    assert all(float(row["difference"]) < 1e-5 for row in attention)


def test_training_steps_have_a_floor(quick: Quick) -> None:
    _, tables, _ = quick(training, saves=3)
    (rows,) = tables.values()
    assert all(row["ratio"] > 0 and row["rate"] > 0 for row in rows)
    assert rows[0]["floor"] > rows[2]["floor"]  # all tokens, and a draft vocabulary


def test_options_that_a_script_cannot_use_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "EAGLE/eagle/model/ea_model.py"
    source.parent.mkdir(parents=True)
    source.touch()
    python, missing = sys.executable, str(tmp_path / "missing")
    official = ("--eagle", str(tmp_path / "EAGLE"), "--eagle-python")
    for script, words, message in (
        (revisions, ["--threads", "2"], "--threads must be 1; got 2"),
        (serving, ["--threads", "2"], "--threads must be 1; got 2"),
        (training, ["--dtype", "bfloat16"], "--dtype must be float32; got bfloat16"),
        (training, ["--device", "cuda"], "--device must be cpu; got cuda"),
        (compare, ["--count", "1"], "--count must be at least 2; got 1"),
        (drafters, ["--trial", "0"], "--trial must be at least 1; got 0"),
        (engines, ["--vllm-python", "python", "--device", "cuda"], "must be cpu; got cuda"),
        (compare, official[:2], "must be given together"),
        (compare, ["--tree", "16/7/2"], "--tree requires --eagle"),
        (compare, [*official, python, "--device", "cuda"], "requires --device cpu; got cuda"),
        (compare, ["--eagle", missing, "--eagle-python", python], f"{missing} has no eagle/model"),
        (compare, [*official, missing], f"{missing} cannot be run: No such file or directory"),
        (
            compare,
            [*official, python],
            f"must have transformers {compare.OFFICIAL_TRANSFORMERS}; {python} has",
        ),
    ):
        with pytest.raises(SystemExit):
            script.main(["--quick", "--device", "cpu", *words])
        assert message in capsys.readouterr().err


def test_warm_up_is_neither_counted_nor_asked_again() -> None:
    asked: list[int] = []

    def generate(ids: list[int]) -> Answer:
        asked.extend(ids)
        return Answer([*ids], 1, 1.0)

    method, tasks = Method("a", "", generate), [Task([number], 0) for number in range(3)]
    answer_in_turn([method], tasks[1:], "answering", warm_up=tasks[0])
    assert asked == [0, 1, 2]
    assert [answer.tokens for answer in method.answers] == [[1], [2]]


def test_comparison_with_hugging_face(quick: Quick) -> None:
    _, tables, _ = quick(compare)
    ((_, rows),) = tables.items()
    by_name = {row["method"]: row for row in rows}
    assert len(by_name) == 6
    assert by_name[compare.GREEDY]["speedup"] == 1.0
    lossless = set(by_name) - {FSD}
    assert {by_name[method]["identical"] for method in lossless} == {100.0}


@pytest.mark.slow  # starts a process
def test_official_code_gives_the_same_answers(quick: Quick) -> None:
    checkout, python = map(os.environ.get, ("EAGLE_CHECKOUT", "EAGLE_PYTHON"))
    if not checkout or not python:
        pytest.skip("EAGLE_CHECKOUT and EAGLE_PYTHON do not name the official code")
    arguments = ["--eagle", checkout, "--eagle-python", python]
    _, tables, text = quick(compare, *arguments)
    methods, rows = tables.values()
    settings = [row["setting"] for row in methods if row["method"] == compare.OFFICIAL]
    assert settings == list(compare.OFFICIAL_TREES)
    assert [row["method"] for row in rows] == [f"exact {tree}" for tree in settings]
    assert [row["identical"] for row in rows] == [100.0] * 2
    assert f"transformers {compare.OFFICIAL_TRANSFORMERS}" in text


def test_summary_replaces_the_results(tmp_path: Path) -> None:
    for name in ("growth-cpu", "compare-cpu", "compare-cuda"):
        (tmp_path / f"{name}.md").write_text(f"## Table of {name}\n", encoding="utf-8")
    page = tmp_path / "README.md"
    page.write_text("# Benchmarks\n\n## Results\n\nold\n", encoding="utf-8")
    arguments = ["--out", str(tmp_path), "--readme", str(page)]
    for _ in range(2):
        summary.main(arguments)
        written = page.read_text(encoding="utf-8")
        assert written == (
            "# Benchmarks\n\n## Results\n\n### Table of compare-cpu\n\n"
            "### Further results\n\n- [growth-cpu.md](./growth-cpu.md)\n"
        )


def test_commands_of_the_page_and_of_the_gpu_script_exist(tmp_path: Path) -> None:
    """The parts of the latter fit into nine minutes."""
    page = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python (benchmarks/\w+\.py.*)$", page, re.MULTILINE)
    assert commands
    python, called = tmp_path / "python", tmp_path / "called"
    python.write_text(f'#!/bin/sh\necho "$@" >> {called}\n')
    python.chmod(0o755)
    command = ["bash", str(ROOT / "benchmarks/gpu.sh"), "--quick"]
    subprocess.run(command, env={**os.environ, "PYTHON": str(python)}, check=True)
    tests, *parts = called.read_text().splitlines()
    assert (ROOT / tests.split()[-1]).exists()
    assert len(parts) == 6
    for script, *words in map(str.split, [*commands, *parts]):
        source = (ROOT / script).read_text(encoding="utf-8") + MEASUREMENT
        assert all(f'"{word}"' in source for word in words if word.startswith("--"))
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    assert set(re.findall(r"`(\w+\.py)`", page)) <= scripts
    script = (ROOT / "benchmarks/gpu.sh").read_text(encoding="utf-8")
    limits = [int(value) for value in re.findall(r"^(?:\w+=1 )*part [\w-]+ (\d+) ", script, re.M)]
    assert len(limits) == 7
    assert sum(limits) <= 540 - 50
    assert "\nLIMIT=540\n" in script


@pytest.mark.slow
def test_every_drafter_has_a_row(quick: Quick) -> None:
    name, tables, _ = quick(drafters)
    assert name == "drafters-cpu"
    assert set(tables) == {"Drafters on problems", "Drafters on copies"}
    for plain, *rows in tables.values():
        assert (plain["drafter"], plain["tau"], plain["speedup"]) == ("none", 1.0, 1.0)
        names = [(row["drafter"], row["setting"]) for row in rows]
        assert names == [(item, how) for item in drafters.DRAFTERS for how in drafters.ACCEPTANCE]


@pytest.mark.slow
def test_every_divergence_has_a_row_for_both_heads(quick: Quick) -> None:
    name, tables, _ = quick(divergences)
    assert name == "divergences-cpu"
    ((_, rows),) = tables.items()
    assert [row["divergence"] for row in rows] == ["js", "kl", "kl_reversed"] * 2
    assert [row["ratio_interval"] is None for row in rows] == [True, False, False] * 2


def test_search_finds_the_largest_threshold_within_the_limit() -> None:
    tasks = [Task([], index) for index in range(100)]

    class Model(SimpleNamespace):
        """Answers every problem in fewer passes the larger the threshold, some of them wrongly."""

        def generate_many(self, *_: Any, acceptance: AcceptanceConfig, **__: Any) -> Iterator[Any]:
            lost = round(acceptance.threshold)
            stats = SimpleNamespace(steps=10 - min(lost, 9))
            for index in range(100):
                tokens = f"#### {-1 if index < lost else index}".ljust(10)
                yield SimpleNamespace(index=index, tokens=tokens, stats=stats)

    model: Any = Model(tokenizer=SimpleNamespace(decode=lambda text, **_: text))
    exact = divergences.answer(model, tasks, AcceptanceConfig(), 8)
    threshold, found = divergences.search(model, tasks, "kl", exact, 3, 20, 8)
    assert threshold == pytest.approx(3.5, rel=1e-3)
    assert found.changes(exact) == (3, 0)
    assert found.compared(exact)["ratio"] == pytest.approx(10 / 7)


@pytest.mark.slow  # starts two processes
def test_revisions_answer_alike(quick: Quick) -> None:
    command = ["git", "cat-file", "-e", revisions.REVISION]
    if subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL).returncode:
        pytest.skip(f"the checkout's history lacks the revision {revisions.REVISION}")
    _, tables, _ = quick(revisions)
    ((_, rows),) = tables.items()
    assert [row["method"] for row in rows] == ["plain", "exact 60/6/10", "FSD 20/18/1"]
    assert [row["identical"] for row in rows] == [100.0] * 3
    assert rows[0]["tau"] == 1.0 < rows[1]["tau"] < rows[2]["tau"]
    values = [row[key] for row in rows for key in ("old", "new", "ratio")]
    assert all(math.isfinite(value) and value > 0.0 for value in values)


@pytest.mark.slow  # starts a process
def test_serving_reports_speed_and_latency(quick: Quick) -> None:
    name, tables, text = quick(serving, saves=2)
    assert name == "serving-cpu"
    (rows,) = tables.values()
    assert [row["clients"] for row in rows] == [1, 4]
    for row in rows:
        assert row["tokens_per_second"] > 0.0
        assert 0.0 < row["first_p50"] <= row["p50"] <= row["p95"]
    assert re.search(r"The server started in \d+\.\d s, and took \d+ MB then and \d+ MB in", text)


STUB = """#!{python}
import json, sys
request = json.load(open(sys.argv[2]))
drafted, relaxed = "speculative_config" in request, "settings" in request
answers = [[1, 2, 3 + relaxed]] * len(request["prompts"])
print("a line of vLLM")
versions = dict(vllm="0.32.0", torch="2.13.0")
rows = [
    dict(requests=count, answers=answers, tokens_per_second=100.0 * (1 + drafted + relaxed),
         tau=1.0 + drafted, sampler_share=2.0, rule_share=1.0)
    for count in request["concurrency"]
]
print(json.dumps(dict(versions=versions, rows=rows)))
"""


def test_engines_are_compared_with_plain_decoding(quick: Quick, tmp_path: Path) -> None:
    """A stand-in replaces the interpreter with vLLM."""
    stub = tmp_path / "vllm-python"
    stub.write_text(STUB.format(python=sys.executable))
    stub.chmod(0o755)
    name, tables, text = quick(engines, "--vllm-python", str(stub), saves=3)
    assert name == "engines-eagle-cpu"
    ((_, rows),) = tables.items()
    assert [row["method"] for row in rows[::2]] == [PLAIN, EXACT, "FSD, T = 0.05"]
    assert [row["speed"] for row in rows] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert [row["equal_answers"] for row in rows] == [2, 2, 2, 2, 0, 0]
    assert "equal plain decoding's in vLLM: 2 at 1, 2 at 2; in this library: 0 at 1, 0 at 2" in text
    assert "The first model runner of vLLM, with vllm 0.32.0, torch 2.13.0." in text
