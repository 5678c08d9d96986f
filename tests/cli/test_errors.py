"""Exit statuses, and error messages of one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import BaseModel

from eagle_fsd.cli.app import INTERRUPTED

Run = Callable[..., tuple[int, str, str]]

ROOT = Path(__file__).parent

USAGE_ERRORS: list[tuple[str, str]] = [
    ("fly", 'unknown command "fly" (see eagle-fsd --help)'),
    ("generat", 'unknown command "generat". Did you mean "generate"? (see eagle-fsd --help)'),
    ("serve fly", "unexpected argument fly"),
    ("serve all", "unexpected argument all"),
    ("generate", "PROMPT is missing or empty"),
    ("generate x y", "unexpected argument y"),
    ("generate x --depth", "--depth needs a value"),
    ("generate x --treshold 1", "unknown option: --treshold. Did you mean --threshold?"),
    ("generate x --no-json", "unknown option: --no-json"),
    ("generate x --seed 1.5", "got 1.5"),
    ("generate x --threshold nan", "--threshold must be a number of at least 0; got nan"),
    ("generate x --divergence cosine", "--divergence must be one of js, js_reference, kl, "),
    ("chat --style loud", '"simple", "rich", "programmatic"'),
    ("evaluate --method beam", '"plain", "exact", "fsd", "hf", "rules"'),
    ("sweep --thresholds 0 -1", "--thresholds must be a number of at least 0; got -1.0"),
    ("sweep --thresholds 0 x", "--thresholds must be a valid number"),
    ("sweep --threshold 0.1", "unknown option: --threshold. Did you mean --thresholds?"),
    ("sweep --min-ratio 2", "--min-ratio must be a number in [0, 1]; got 2.0"),
    ("sweep --answer-batch 0", "--answer-batch must be an integer in [1, 1024]; got 0"),
    ("generate x --settings no.json", "--settings must be an existing file; got no.json"),
    (f"export custom-generate x --drafter bundled --settings {ROOT}", "--settings must be an"),
    ("evaluate --certify no.json", "--certify must be an existing file; got no.json"),
    ("bench --output no/such/folder/bench.json", "--output must be a file in a writable folder"),
    (f"bench --output {ROOT}", "--output must be a file in a writable folder"),
    (f"train --data {__file__}", "--out is missing"),
    (f"train --out x --data {__file__} --features {ROOT}", "either --data or --features"),
    (f"train fly --out x --data {__file__}", "unexpected argument fly"),
    (
        f"train export --head {ROOT} --out x --format tensorrt",
        "one of eagle, sglang, vllm, speculators; got",
    ),
    (f"train chats --out {__file__}", "exists"),
    ("serve worker --controller nonsense", "--controller must be a URL such as http://"),
    ("serve worker --controller http://machine:99999", "--controller must be a URL"),
    ("serve worker --controller http://[::1", "--controller must be a URL"),
    ("serve worker --address ftp://machine", "--address must be a URL such as http://"),
    ("serve worker --address http://machine:1?a", "without credentials, query or fragment; got"),
    ("serve worker --address http://machine:1/#", "without credentials, query or fragment; got"),
    ("serve worker --controller http://machine1:1", "cannot reach this worker at 127.0.0.1"),
    ("serve worker --controller http://machine1:1 --host 0.0.0.0", "set --address"),
]

FAILURES: list[tuple[str, str]] = [
    ("generate x --target no/such/a --head no/such/b", "cannot load the target no/such/a"),
    ("generate x --target /no/such --head x", "/no/such"),
    ("generate x --dtype foo", "dtype"),
    ("generate x --temperature 1 --top-k 5000", "top_k must be at most the vocabulary"),
    ("chat --conv-template none", "unknown FastChat template 'none'"),
    ("generate x --conv-template none", "unknown FastChat template 'none'"),
    (f"train --data {__file__} --out no-such-folder", Path(__file__).name),
]


def test_usage_errors_exit_with_status_2(run: Run) -> None:
    for words, message in USAGE_ERRORS:
        status, out, err = run(*words.split())
        assert (status, out, err.count("\n")) == (2, "", 1), words
        assert re.fullmatch(r"error: .* --help\)\n", err), words
        assert message in err, words


@pytest.mark.usefixtures("loaded_once")
def test_expected_failures_exit_with_status_1(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, message in FAILURES:
        status, out, err = run(*words.split())
        assert (status, out, err.count("\n")) == (1, "", 1), words
        assert err.startswith("error: ")
        assert message in err, words


def test_exceptions_become_messages_of_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a command that loads a pair raises; unexpected ones keep their traceback."""

    class Model(BaseModel):
        number: int

    with pytest.raises(ValueError, match="number") as invalid:
        Model(number="x")  # type: ignore[arg-type]
    errors: list[BaseException] = []

    def fail(*_: object, **__: object) -> None:
        raise errors[-1]

    monkeypatch.setattr("eagle_fsd.model.pipeline.EagleFSD.from_pretrained", fail)
    advice = "; reduce the batch or the number of tokens, or use a smaller model or dtype"
    memory, row = f"out of memory{advice}", "a row of 9 tokens needs 2 GiB"
    for error, status, message in (
        (KeyboardInterrupt(), INTERRUPTED, "stopped"),
        (OSError("a\nb"), 1, "a b"),
        (ValueError("a b"), 1, "a b"),
        (FloatingPointError("a b"), 1, "a b"),
        (invalid.value, 1, "number must be a valid integer, unable to parse string"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB"), 1, memory),
        (MemoryError(), 1, memory),
        (MemoryError(row), 1, f"out of memory ({row}){advice}"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 1, memory),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), 1, memory),
        (RuntimeError("CUDA error: out of memory"), 1, memory),
    ):
        errors.append(error)
        found, _, err = run("generate", "--compile", "x")  # the prompt is not the option's value
        assert (found, err.count("\n")) == (status, 1)
        assert err.startswith(f"error: {message}")
    for unexpected in ("a bug", "[enforce fail at x.cpp] DefaultCPUAllocator: can't allocate"):
        errors.append(RuntimeError(unexpected))
        with pytest.raises(RuntimeError, match=re.escape(unexpected)):
            run("generate", "x")
