"""``eagle-fsd evaluate`` as users start and stop it: kills, two processes, MT-bench, bad input."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from published import published

#: Calls ``eagle-fsd`` in this process: (status, standard output, standard error).
Command = Callable[..., tuple[int, str, str]]
#: Starts ``eagle-fsd`` in a process of its own, with a launcher and the command's arguments.
Start = Callable[[Sequence[str], Sequence[object]], "subprocess.Popen[str]"]
Record = dict[str, Any]


METHODS = ("plain", "exact", "fsd")
COUNT = 40
SMALL = ("--count", COUNT, "--threshold", 0.2, "--max-new-tokens", 16)

AS_USERS_DO = ("-m", "eagle_fsd.cli")
#: The same, but the slow imports are over before it is told to begin. Ten starts in a row then wait
#: for each other's imports on one core only.
WHEN_TOLD = """
import sys
import accelerate, eagle_fsd.evaluation.runner
from eagle_fsd.cli import main
if sys.stdin.readline():
    main()
"""
#: ``accelerate launch --cpu --num_processes 2`` starts one process unless there is an mpirun.
TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

#: Seconds until a process counts as hung; a busy machine is not a failure.
PATIENCE = 1200

#: What is the same whenever greedy decoding answers a question.
REPEATED = ("turns", "idxs", "new_tokens", "accepted", "origins", "errors")
#: What is not the same even then.
OF_THE_MOMENT = ("session", "answer_id", "tstamp", "wall_time", "memory")


@pytest.fixture
def start() -> Iterator[Start]:
    """What it started and is still running when a test ends, it stops."""
    started: list[subprocess.Popen[str]] = []

    def call(launcher: Sequence[str], arguments: Sequence[object]) -> subprocess.Popen[str]:
        started.append(_start(launcher, arguments))
        return started[-1]

    yield call
    for process in started:
        if process.poll() is None:
            process.terminate()  # torchrun hands it on to its workers
        process.communicate(timeout=PATIENCE)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The answers of one process that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed") / "out"
    _finish(_start(AS_USERS_DO, _arguments(folder)))
    return folder


def _start(launcher: Sequence[str], arguments: Sequence[object]) -> subprocess.Popen[str]:
    """On the CPU and on one thread: threads change the last bits."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, *launcher, "evaluate", *map(str, arguments)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _arguments(folder: Path) -> list[object]:
    methods = [word for name in METHODS for word in ("-m", name)]
    return ["bundled", *SMALL, *methods, "--out", folder, "--json"]


def _finish(process: subprocess.Popen[str], told: str | None = None) -> str:
    """Standard output of a process that ends well."""
    try:
        output, errors = process.communicate(told, timeout=PATIENCE)
    finally:
        process.terminate()  # nothing, where it has ended
    assert process.returncode == 0, errors
    return output


def _answers(folder: Path, name: str) -> list[Record]:
    """The whole lines of an answer file; none where there is no file yet."""
    path = folder / f"{name}.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _number_of_lines(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*.jsonl"))


def _without(record: Record, names: Sequence[str]) -> Record:
    (choice,) = record["choices"]
    kept = {key: value for key, value in choice.items() if key not in names}
    return {key: value for key, value in record.items() if key not in names} | {"choices": [kept]}


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- kills -----------------------------------------------------------------------------------------


def test_ten_kills_change_no_answer(start: Start, undisturbed: Path, tmp_path: Path) -> None:
    """SIGKILL anywhere: some answers after the start, and then some milliseconds.

    What was written stays to its answer's id, so no question was answered twice.
    """
    draw = random.Random(20)
    folder = tmp_path / "out"
    launcher, arguments = ("-c", WHEN_TOLD), _arguments(folder)
    kept: dict[str, list[Record]] = {name: [] for name in METHODS}
    after = start(launcher, arguments)
    for _ in range(10):
        process, after = after, start(launcher, arguments)  # its imports run meanwhile
        process.stdin.write("go\n")
        process.stdin.flush()
        _kill_after(process, folder, draw.randint(1, 6), draw.uniform(0.0, 0.05))
        assert process.returncode == -signal.SIGKILL
        assert not (folder / "report.json").exists()
        for name in METHODS:
            found = _answers(folder, name)
            assert found[: len(kept[name])] == kept[name]
            assert [record["question_id"] for record in found] == list(range(len(found)))
            kept[name] = found
    report = json.loads(_finish(after, "go\n"))
    assert [row["answers"] for row in report["rows"]] == [COUNT] * 3
    assert _files(folder) == _files(undisturbed)
    for name in METHODS:
        found = _answers(folder, name)
        assert found[: len(kept[name])] == kept[name]
        assert [record["question_id"] for record in found] == list(range(COUNT))
        assert len({record["answer_id"] for record in found}) == COUNT
        for ours, theirs in zip(found, _answers(undisturbed, name), strict=True):
            (choice,), (expected,) = ours["choices"], theirs["choices"]
            assert [choice[key] for key in REPEATED] == [expected[key] for key in REPEATED]
            assert choice["log_likelihood"] == pytest.approx(expected["log_likelihood"], abs=1e-6)


def _kill_after(process: subprocess.Popen[str], folder: Path, answers: int, seconds: float) -> None:
    """SIGKILL once there are so many more answers, so many seconds later."""
    before = _number_of_lines(folder)
    deadline = time.monotonic() + PATIENCE
    while _number_of_lines(folder) < before + answers:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(seconds)
    process.kill()
    process.communicate(timeout=PATIENCE)


# -- two processes ---------------------------------------------------------------------------------


def test_two_processes_write_the_files_of_one(
    start: Start, undisturbed: Path, tmp_path: Path
) -> None:
    """The same records in the same order, one report, and no parts left behind."""
    folder = tmp_path / "out"
    output = _finish(start((*TWO_PROCESSES, *AS_USERS_DO), _arguments(folder)))
    (printed,) = [line for line in output.splitlines() if line.startswith("{")]
    report = json.loads((folder / "report.json").read_text())
    assert json.loads(printed) == report
    before = json.loads((undisturbed / "report.json").read_text())
    for name in ("about", "settings", "questions"):
        assert report[name] == before[name]
    for ours, theirs in zip(report["rows"], before["rows"], strict=True):
        assert ours["answers"] == COUNT
        for name in ("method", "failed", "tokens", "tau", "reach", "origins", "accuracy"):
            assert ours[name] == theirs[name]
    assert _files(folder) == _files(undisturbed)
    for name in METHODS:
        found = [_without(record, OF_THE_MOMENT) for record in _answers(folder, name)]
        expected = [_without(record, OF_THE_MOMENT) for record in _answers(undisturbed, name)]
        assert found == expected
        assert [record["question_id"] for record in found] == list(range(COUNT))


#: The command in a process that is killed for good once it has written its fifth answer.
KILLED_AT_THE_FIFTH = """
import os, signal
from eagle_fsd.cli import main
from eagle_fsd.evaluation.answer_store import AnswerStore
whole, written = AnswerStore.append, []
def append(store, record):
    whole(store, record)
    written.append(record)
    if len(written) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
AnswerStore.append = append
main()
"""


@pytest.mark.slow
def test_one_process_goes_on_where_two_were_killed(
    start: Start, undisturbed: Path, tmp_path: Path
) -> None:
    """The parts that they left are part of the file in the end."""
    folder, script = tmp_path / "out", tmp_path / "killed.py"
    script.write_text(KILLED_AT_THE_FIFTH)
    killed = start((*TWO_PROCESSES, str(script)), _arguments(folder))
    killed.communicate(timeout=PATIENCE)
    assert killed.returncode not in (0, -signal.SIGKILL)  # the launcher lives and tells
    parts = {path.name: path.read_bytes() for path in folder.glob("*.part*.jsonl")}
    kept = [json.loads(line) for text in parts.values() for line in text.split(b"\n")[:-1]]
    assert 5 <= len(kept) <= 10
    _finish(start(AS_USERS_DO, _arguments(folder)))
    assert _files(folder) == _files(undisturbed)
    for name in METHODS:
        found = _answers(folder, name)
        assert all(record in found for record in kept if record["model_id"] == name)
        assert [_without(record, OF_THE_MOMENT) for record in found] == [
            _without(record, OF_THE_MOMENT) for record in _answers(undisturbed, name)
        ]


# -- MT-bench --------------------------------------------------------------------------------------


def test_mt_bench_from_end_to_end(
    tmp_path: Path, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both turns of all 80 questions, in files that FastChat's judge reads as answers."""
    file = published("mt_bench_question.jsonl")
    monkeypatch.setenv("EAGLE_FSD_DATA", str(file.parent))
    names = ("exact", "fsd")
    methods = [word for name in names for word in ("-m", name)]
    short = ("--max-new-tokens", 32, "--threshold", 0.2, "--batch", 8)
    status, printed, errors = run(
        "evaluate", "mt-bench", *short, *methods, "--out", tmp_path, "--json"
    )
    assert status == 0, errors
    report = json.loads(printed)
    assert report["questions"] == 80
    lines = file.read_text(encoding="utf-8").splitlines()
    order = [json.loads(line)["question_id"] for line in lines]
    read = _fastchats_loader(monkeypatch)(str(tmp_path))
    assert list(read) == ["exact", "fsd"]  # every *.jsonl there
    for name, row in zip(names, report["rows"], strict=True):
        assert list(read[name]) == order
        records = _answers(tmp_path, name)
        assert [record["question_id"] for record in records] == order
        failed = 0
        for record in records:
            assert record == read[name][record["question_id"]]
            assert record["model_id"] == name
            assert len(record["answer_id"]) == 22
            assert isinstance(record["tstamp"], float)
            (choice,) = record["choices"]
            assert choice["index"] == 0
            for key in ("turns", "idxs", "new_tokens", "wall_time", "accepted", "errors"):
                assert len(choice[key]) == 2
            for turn, error in enumerate(choice["errors"]):
                failed += error is not None
                assert error is None or choice["turns"][turn] == ""
                assert choice["new_tokens"][turn] == len(choice["origins"][turn]) <= 32
                assert choice["idxs"][turn] == len(choice["accepted"][turn])
        assert (row["method"], row["answers"], row["failed"]) == (name, 80, failed)
        assert row["tokens"] == sum(sum(r["choices"][0]["new_tokens"]) for r in records)
        assert sorted(row["tau_by_category"]) == [
            *("coding", "extraction", "humanities", "math"),
            *("reasoning", "roleplay", "stem", "writing"),
        ]


def _fastchats_loader(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """FastChat's own; its module imports two clients of judges, which nothing here needs."""
    for name in ("openai", "anthropic"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    from fastchat.llm_judge.common import load_model_answers

    return load_model_answers


def test_turns_that_do_not_fit_are_counted_beside_those_that_do(
    tmp_path: Path, run: Command
) -> None:
    """A full context ends a conversation, not the run."""
    file = tmp_path / "some.jsonl"
    conversations = [["Hello!", "pens " * 3000, "Hello!"], ["Hello!"]]
    file.write_text(
        "".join(
            json.dumps({"question_id": number, "turns": turns}) + "\n"
            for number, turns in enumerate(conversations)
        )
    )
    out = tmp_path / "out"
    status, printed, _ = run(
        "evaluate", file, "--out", out, "-m", "exact", "--max-new-tokens", 8, "--json"
    )
    assert status == 0
    (row,) = json.loads(printed)["rows"]
    assert (row["answers"], row["failed"]) == (2, 2)
    (first,), (second,) = (record["choices"] for record in _answers(out, "exact"))
    assert [error is None for error in first["errors"]] == [True, False, False]
    assert [text == "" for text in first["turns"]] == [False, True, True]
    assert second["errors"] == [None]
    assert "2 turns, over all methods, were not answered" in (out / "report.md").read_text()


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"question_id": 2, "turns": ["a"', "not JSON"),
        ('["a"]', "not a JSON object"),
        ('{"question_id": 2, "turns": "a"}', '"turns" is not a list of texts'),
        ('{"turns": ["a"]}', "'question_id' is missing"),
        ('{"question_id": 2, "text": "a"}', "no known format has these fields"),
    ],
)
def test_a_malformed_question_is_named_by_its_line(
    line: str, reason: str, tmp_path: Path, run: Command
) -> None:
    file, out = tmp_path / "questions.jsonl", tmp_path / "out"
    file.write_text('{"question_id": 1, "turns": ["a"]}\n\n' + line + "\n")
    status, _, errors = run("evaluate", file, "--out", out)
    assert status == 1
    assert errors.startswith("error: ")
    assert len(errors.splitlines()) == 1
    assert f"questions.jsonl, line 3: {reason}" in errors
    assert not out.exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (("--max-new-tokens", 5), ["max_new_tokens was 4, is 5"]),
        (("--count", 2, "--seed", 1), ["count was 1, is 2", "seed was 0, is 1"]),
        (("--temperature", 0.5), ["temperature was 0.0, is 0.5"]),
        (("--conv-template", "vicuna_v1.1"), ["template was None, is 'vicuna_v1.1'"]),
        (("--depth", 3), ["depth was 4, is 3"]),
    ],
    ids=lambda item: item[0] if isinstance(item, tuple) else None,
)
def test_answers_of_other_settings_are_refused_and_left_alone(
    changes: tuple[object, ...], told: list[str], tmp_path: Path, run: Command
) -> None:
    """One line that tells everything that changed."""
    command = ("evaluate", "--count", 1, "--max-new-tokens", 4, "-m", "exact", "--out", tmp_path)
    command += ("--depth", 4)
    assert run(*command)[0] == 0
    before = _content(tmp_path)
    status, printed, errors = run(*command, *changes)
    assert (status, printed) == (1, "")
    assert len(errors.splitlines()) == 1
    assert "exact.jsonl holds answers of other settings (" in errors
    assert all(item in errors for item in told)
    assert _content(tmp_path) == before


def test_sampling_from_other_tokens_is_another_setting(tmp_path: Path, run: Command) -> None:
    """Though the tree has a ``top_k`` of its own."""
    command = ("evaluate", "--count", 1, "--max-new-tokens", 4, "-m", "exact", "--out", tmp_path)
    sampled = (*command, "--temperature", 1)
    assert run(*sampled, "--top-k", 50)[0] == 0
    status, _, errors = run(*sampled, "--top-k", 5)
    assert status == 1
    assert "was 50, is 5" in errors
