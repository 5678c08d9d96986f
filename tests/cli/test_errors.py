"""Exit statuses, and error messages of one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel

from eagle_fsd.cli.app import INTERRUPTED, is_out_of_memory

Run = Callable[..., tuple[int, str, str]]

ROOT = Path(__file__).parent

USAGE_ERRORS: list[tuple[str, str]] = [
    ("fly", 'unknown command "fly" (see eagle-fsd --help)'),
    ("generat", 'unknown command "generat". Did you mean "generate"? (see eagle-fsd --help)'),
    ("serve fly", 'unknown command "fly" (see eagle-fsd serve --help)'),
    ("generate", "PROMPT is missing or empty"),
    ("generate x y", "unexpected argument y"),
    ("generate x --depth", "--depth needs a value"),
    ("generate x --treshold 1", "unknown option: --treshold. Did you mean --threshold?"),
    ("generate x --no-json", "unknown option: --no-json"),
    ("generate x --depth 99", "--depth must be an integer in [1, 64]; got 99"),
    ("generate x --tree-top-k 0", "--tree-top-k must be an integer in [1, 256]; got 0"),
    ("generate x --top-k -1", "--top-k must be an integer of at least 0; got -1"),
    ("generate x --seed 1.5", "got 1.5"),
    ("generate x --seed 9223372036854775808", "--seed must be an integer in [0, "),
    ("generate x --threshold nan", "--threshold must be a number of at least 0; got nan"),
    ("generate x --temperature inf", "--temperature must be a finite number of at least 0"),
    ("generate x --top-p 0", "--top-p must be a number in (0, 1]; got 0"),
    ("generate x --divergence cosine", "--divergence must be one of js, js_reference, kl, "),
    ("generate x --fallback no", "--fallback must be one of exact, stop; got no"),
    ("chat --style loud", '"simple", "rich", "programmatic"'),
    ("evaluate --method beam", '"plain", "exact", "fsd", "hf", "rules"'),
    ("evaluate --baseline vllm", "--baseline must be one of hf; got vllm"),
    ("evaluate --assistant x", "--assistant requires --baseline hf"),
    ("evaluate --top-p 0", "--top-p must be a number in (0, 1]; got 0"),
    ("sweep --thresholds 0 -1", "threshold must be a number of at least 0; got -1.0"),
    ("sweep --thresholds 0 gsm8k", "got gsm8k"),
    ("sweep --threshold 0.1", "unknown option: --threshold. Did you mean --thresholds?"),
    ("sweep --min-ratio 2", "min_ratio must be a number in [0, 1]; got 2.0"),
    ("calibrate --max-drop 1 --thresholds 0", "requires a threshold above 0"),
    ("calibrate --max-drop 1 --head no/head --target no/target --install", "--install"),
    ("bench --count 0", "--count must be an integer of at least 1; got 0"),
    ("bench --output no/such/folder/bench.json", "--output must be a file in an existing folder"),
    (f"bench --output {ROOT}", "--output must be a file in an existing folder"),
    (f"train --data {__file__}", "--out is missing"),
    ("train --out x", "requires either --data or --features"),
    (f"train --out x --data {__file__} --features {ROOT}", "either --data or --features"),
    ("train --data no/such/file --out x", "--data must be an existing"),
    (f"train fly --out x --data {__file__}", "unexpected argument fly"),
    (
        f"train export --head {ROOT} --out x --format tensorrt",
        "one of eagle, sglang, vllm, speculators; got",
    ),
    (f"train chats --out {__file__}", "exists"),
    ("serve api --controller machine:21001", "--controller must be a URL such as http://"),
    ("serve worker --controller nonsense", "--controller must be a URL such as http://"),
    ("serve web --controller http://machine:99999", "--controller must be a URL such as http://"),
    ("serve worker --address ftp://machine", "--address must be a URL such as http://"),
    ("serve worker --controller http://machine1:1", "cannot reach this worker at 127.0.0.1"),
    ("serve all --web-port 8000 --web", "every server needs a port of its own"),
    ("serve all --port 0", "--port must be an integer in [1, 65535]; got 0"),
]

FAILURES: list[tuple[str, str]] = [
    ("generate x --target no/such/a --head no/such/b", "cannot load the target no/such/a"),
    ("generate x --target no/such", "pass both a target and a drafter"),
    ("generate x --target /no/such --head x", "/no/such"),
    ("generate x --settings no-such-file.json", "no-such-file.json"),
    ("generate x --dtype foo", "dtype"),
    ("generate x --device cuda:99", "cuda:99"),
    ("generate x --device toaster", "toaster"),
    ("generate x --temperature 1 --top-k 5000", "top_k must be at most the vocabulary"),
    ("generate x --conv-template none", "unknown FastChat template 'none'"),
    (f"train --data {__file__} --out no-such-folder", Path(__file__).name),
]


@pytest.mark.parametrize(("words", "message"), USAGE_ERRORS)
def test_usage_errors_exit_with_status_2(run: Run, words: str, message: str) -> None:
    status, out, err = run(*words.split())
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.endswith(" --help)\n")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(("words", "message"), FAILURES)
def test_expected_failures_exit_with_status_1(
    run: Run, words: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(*words.split())
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def raised_by_loading(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make every command that loads a pair raise an error."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("eagle_fsd.model.pipeline.EagleFSD.from_pretrained", fail)


def test_interrupt_exits_with_status_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    raised_by_loading(monkeypatch, KeyboardInterrupt())
    assert run("generate", "x") == (INTERRUPTED, "", "error: stopped\n")


@pytest.mark.parametrize("error", [OSError("a\nb"), ValueError("a b"), FloatingPointError("a b")])
def test_message_of_several_lines_is_joined(
    error: Exception, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised_by_loading(monkeypatch, error)
    assert run("generate", "x") == (1, "", "error: a b\n")


def test_validation_error_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(BaseModel):
        number: int

    with pytest.raises(ValueError, match="number") as error:
        Model(number="x")  # type: ignore[arg-type]
    raised_by_loading(monkeypatch, error.value)
    status, _, err = run("generate", "x")
    assert (status, err.count("\n")) == (1, 1)
    assert err.startswith("error: number must be a valid integer")


def test_unexpected_error_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    raised_by_loading(monkeypatch, RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        run("generate", "x")


def test_out_of_memory_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")
    raised_by_loading(monkeypatch, error)
    status, _, err = run("generate", "x")
    assert (status, err.count("\n")) == (1, 1)
    assert err.startswith("error: out of memory")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate"),
            False,
        ),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), True),
        (RuntimeError("a bug"), False),
    ],
)
def test_is_out_of_memory(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
