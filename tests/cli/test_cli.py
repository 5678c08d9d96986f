"""The command line: what it prints, what it returns, and how it refuses."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import eagle_fsd
from eagle_fsd.cli import out_of_memory
from eagle_fsd.cli.generate import _Printer
from eagle_fsd.cli.options import SETTING_NAMES
from eagle_fsd.model.config import FSDSettings

QUESTION = "Mia has 8 apples at home. Then she gives 3 apples to Tom. How many apples are left?"


def test_generate_streams_an_answer_and_says_how_it_was_decoded(run) -> None:
    status, out, err = run("generate", QUESTION)
    assert status == 0
    assert "####" in out
    assert "tau" in err
    assert "tokens/s" in err


def test_generate_json_agrees_with_itself(run) -> None:
    status, out, _ = run("generate", "--json", "--threshold", "0", QUESTION)
    record = json.loads(out)
    assert status == 0
    assert record["settings"]["threshold"] == 0.0
    assert len(record["tokens"]) == len(record["origins"]) == record["stats"]["tokens"]
    assert record["stats"]["origins"]["fuzzy"] == 0
    plain = json.loads(run("generate", "--json", "--plain", QUESTION)[1])
    assert plain["tokens"] == record["tokens"]
    assert plain["stats"]["tau"] == 1.0


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_said_does_not_command_a_terminal(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "a\x1b[2Jb"
    printed = io.StringIO()
    console = Console(file=printed, force_terminal=terminal, color_system=None)
    monkeypatch.setattr(sys.modules[_Printer.__module__], "out", console)
    tokenizer = SimpleNamespace(decode=lambda tokens, skip_special_tokens: said)
    printer = _Printer(tokenizer, show_origins=False, quiet=False)
    printer(SimpleNamespace(tokens=[1], origins=[1]))
    printer.end()
    assert printed.getvalue() == ("a\u241b[2Jb\n" if terminal else said + "\n")


def test_settings_come_from_options_above_the_file(run, tmp_path: Path) -> None:
    file = tmp_path / "fsd.json"
    file.write_text('{"threshold": 0.05, "min_ratio": 0.5}')
    command = ("generate", "--json", "--max-new-tokens", "2", "--settings", str(file))
    settings = json.loads(run(*command, "--threshold", "0.25", QUESTION)[1])["settings"]
    assert (settings["threshold"], settings["min_ratio"]) == (0.25, 0.5)


def test_max_new_tokens_and_standard_input(run, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO(QUESTION))
    record = json.loads(run("generate", "--json", "--max-new-tokens", "5", "-")[1])
    assert len(record["tokens"]) == 5


def test_every_setting_has_an_option_with_help(run) -> None:
    status, out, _ = run("generate", "--help")
    assert status == 0
    for name in FSDSettings().as_dict():
        option = SETTING_NAMES.get(name, "--" + name.replace("_", "-"))
        assert option in out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("generate", "--threshold", "-1", "x"), "threshold"),
        (("generate", "--threshold", "nan", "x"), "threshold"),
        (("generate", "--divergence", "cosine", "x"), "divergence"),
        (("generate", "--min-ratio", "2", "x"), "min-ratio"),
        (("generate", "--max-new-tokens", "0", "x"), "max-new-tokens"),
        (("generate", " "), "empty"),
        (("generate",), "prompt"),
        (("generate", "--top-p", "0", "x"), "top-p"),
        (("generate", "--top-p", "nan", "x"), "top-p"),
        (("generate", "--temperature", "inf", "x"), "temperature"),
        (("generate", "--temperature", "nan", "x"), "temperature"),
        (("generate", "--seed", str(2**63), "x"), "seed"),
        (("generate", "--seed", "-1", "x"), "seed"),
        (("bench", "--baseline", "vllm"), "hf"),
        (("bench", "-T", "nan"), "threshold"),
        (("bench", "--problems", "0"), "problems"),
        (("bench", "--threshold", "0.1"), "thresholds"),
        (("bench", "--output", str(Path(__file__).parent)), "no place for a file"),
        (("bench", "--output", "no/such/folder/bench.json"), "no place for a file"),
        (("fly",), "fly"),
    ],
)
def test_usage_errors_end_with_status_2(run, arguments: tuple[str, ...], word: str) -> None:
    status, _, err = run(*arguments)
    assert status == 2
    assert word in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (
            ("generate", "--target", "no/such/folder", "--head", "no/such/head", "x"),
            "no/such/folder",
        ),
        (("generate", "--target", "no/such/folder", "x"), "both"),
        (("generate", "--target", "/no/such/folder", "--head", "x", "x"), "folder /no/such/folder"),
        (("generate", "--settings", "no-such-file.json", "x"), "no-such-file.json"),
        (("generate", "--dtype", "foo", "x"), "dtype"),
        (("generate", "--device", "cuda:99", "x"), "cuda:99 is not there"),
        (("generate", "--device", "toaster", "x"), "toaster"),
        (("generate", "--top-k", "5000", "x"), "top_k is 5000, more than the vocabulary"),
        (("bench", "--dtype", "foo"), "dtype"),
        (("bench", "--device", "cuda:99"), "cuda:99 is not there"),
    ],
)
def test_expected_failures_are_one_line(
    run, arguments: tuple[str, ...], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, out, err = run(*arguments)
    assert status == 1
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert word in err


def test_bench_measures_every_method_in_one_run(run, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    arguments = ["--problems", "6", "--timed", "1", "-T", "0.2", "-r", "0", "-r", "0.1"]
    status, out, err = run("bench", *arguments, "--baseline", "hf", "--output", str(file))
    assert status == 0
    report = json.loads(file.read_text())
    names = [row["method"] for row in report["rows"]]
    assert names == ["hf", "plain", "exact", "T=0.2", "T=0.2 r=0.1"]
    assert all(name in out for name in names)
    assert "6 of" in err or "decoding" in err
    hf, plain, exact, fuzzy, _ = report["rows"]
    assert hf["timed_tokens"] == plain["timed_tokens"] == exact["timed_tokens"]
    assert hf["correct"] == plain["correct"] == exact["correct"]
    assert plain["tau"] == 1.0
    assert exact["tau"] > 1.5
    assert exact["origins"]["fuzzy"] == 0
    assert fuzzy["tau"] >= exact["tau"]
    assert sum(exact["phase_shares"].values()) == pytest.approx(1.0)
    assert report["environment"]["versions"]["torch"]


def test_bench_without_a_baseline_prints_its_table_and_json(run) -> None:
    arguments = ("bench", "--problems", "1", "--timed", "1", "-T", "0.2", "-r", "0.1")
    status, out, _ = run(*arguments)
    assert status == 0
    assert "x plain" in out
    assert "x HF" not in out
    report = json.loads(run(*arguments, "--json")[1])
    assert [row["method"] for row in report["rows"]] == ["plain", "exact", "T=0.2 r=0.1"]
    assert report["rows"][0]["speedup_over_hf"] is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate"),
            False,
        ),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            True,
        ),
        (RuntimeError("a bug"), False),
    ],
)
def test_what_is_out_of_memory(error: BaseException, expected: bool) -> None:
    assert out_of_memory(error) is expected


def test_out_of_memory_is_one_line(
    run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr("eagle_fsd.model.pipeline.EagleFSD.from_pretrained", exhausted)
    status, _, errors = run("generate", "Hello!")
    assert (status, len(errors.splitlines())) == (1, 1)
    assert errors.startswith("error: out of memory")


def test_the_command_line_is_there_before_torch_is() -> None:
    """``eagle-fsd --help`` answers at once; so do usage errors and Ctrl-C."""
    program = "import sys, eagle_fsd.cli; print([n for n in sys.argv[1:] if n in sys.modules])"
    heavy = ("torch", "transformers", "accelerate", "fastchat", "matplotlib", "gradio", "scipy")
    done = subprocess.run(
        [sys.executable, "-c", program, *heavy], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_public_names_are_there_when_asked_for() -> None:
    assert set(eagle_fsd.__all__) <= set(dir(eagle_fsd))
    for name in eagle_fsd.__all__:
        assert getattr(eagle_fsd, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        eagle_fsd.nonsense  # noqa: B018
