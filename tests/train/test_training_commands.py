"""Tests for ``eagle-fsd train`` and its subcommands."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainings import Train, command, read_losses, train_here, without_option

from eagle_fsd.bundled import BUNDLED_HEAD
from eagle_fsd.train.chat_file import ChatFile


def test_stored_features_can_be_trained_on(
    succeed: Any, run, target: Path, data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "features"
    store = ("train", "features", "--data", data, "--out", folder, "--target", target)
    out, errors = succeed(*store, "--max-length", 64)
    assert "10 chats are in" in out
    estimate = re.search(r"about ([\d.]+) (B|KB) for 10 chats; .* are free", errors)
    assert estimate is not None
    size = float(estimate[1]) * {"B": 1, "KB": 1000}[estimate[2]]
    assert size == pytest.approx((folder / "features-00000.safetensors").stat().st_size, rel=0.05)
    arguments = without_option(command(data, tmp_path / "out", target, max_steps=2), "--data")
    succeed(*arguments, "--features", folder)
    assert len(read_losses(tmp_path / "out")) == 2
    for option, value, difference in (
        ("--max-length", 32, "max_length is 64 there, 32 here"),
        ("--dtype", "bfloat16", "dtype is 'float32' there, 'bfloat16' here"),
    ):
        status, _, errors = run(*store, *("--max-length", 64, option, value))
        assert status == 1
        assert errors.splitlines()[-1].startswith("error: ")
        assert difference in errors


def test_regenerate_writes_chats_once(succeed: Any, run, data: Path, tmp_path: Path) -> None:
    """With the bundled target."""
    out = tmp_path / "chats.jsonl"
    arguments = ("train", "regenerate", "--data", data, "--out", out, "--max-new-tokens", 4)
    _, errors = succeed(*arguments)
    assert "10 rewritten chats are in" in errors
    content = out.read_text()
    assert len(ChatFile(out)) == 10
    assert run(*arguments)[0] == 0
    assert out.read_text() == content


def test_training_on_regenerated_chats(run, target: Path, data: Path, tmp_path: Path) -> None:
    """The rewritten chats are beside the folder, where they can be inspected and resumed."""
    out = tmp_path / "out"
    status, _, errors = run(*command(data, out, target, "--regenerate", max_steps=2))
    rewritten = tmp_path / "out-regenerated.jsonl"
    assert status == 0, errors
    assert len(rewritten.read_text().splitlines()) == 10
    assert json.loads((out / "recipe.json").read_text())["data"]["data"] == str(rewritten)
    assert len(read_losses(out)) == 2


def test_export(refused: Any, succeed: Any, train: Train, target: Path, tmp_path: Path) -> None:
    head = train("head", max_steps=1)
    out = tmp_path / "out"
    arguments = ("train", "export", "--head", head, "--out", out, "--target", target)
    printed, _ = succeed(*arguments, "--format", "sglang")
    assert "as sglang reads it" in printed
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
    assert "exists; choose another folder" in refused(*arguments, "--format", "sglang")
    assert "eagle, sglang, vllm" in refused(*arguments, "--format", "tensorrt", status=2)


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (lambda given: without_option(given, "--out"), 2, ("--out",)),
        (lambda given: without_option(given, "--data"), 2, ("--data", "--features")),
        (lambda given: [*given, "--features", str(Path(__file__).parent)], 2, ("either",)),
        (lambda given: [*given, "--unroll", "0"], 2, ("unroll", "[1, 8]")),
        (lambda given: [*given, "--divergence-loss", "cosine"], 2, ("cosine", "js")),
        (lambda given: [*given, "--conv-template", "vicuna9"], 1, ("vicuna9", "vicuna_v1.1")),
        (lambda given: [*given, "--target", "/no/such/target"], 1, ("/no/such/target",)),
        (lambda given: [*given, "--data", "no-such.jsonl"], 2, ("no-such.jsonl",)),
        (lambda given: [*given, "--data", __file__], 1, ("no valid chat", "line 1")),
        (
            lambda given: [*without_option(given, "--data"), "--features", "tests"],
            1,
            ("index.json",),
        ),
        (lambda given: [*given, "--head", str(BUNDLED_HEAD)], 1, ("another target",)),
    ],
    ids=lambda item: None if not isinstance(item, tuple) else "-".join(item),
)
def test_invalid_arguments_are_reported_in_one_line(
    refused: Any,
    change: Callable[[list[str]], list[str]],
    status: int,
    words: tuple[str, ...],
    target: Path,
    data: Path,
    tmp_path: Path,
) -> None:
    """And nothing is written."""
    out = tmp_path / "out"
    errors = refused(*change(command(data, out, target)), status=status)
    for word in words:
        assert word in errors
    assert not out.exists() or not any(out.iterdir())


def test_truncated_chats_are_reported(
    train: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train("short", max_length=20)
    found = re.search(
        r"of 24 chats read in all epochs, 24 were truncated, (\d+) had no", caplog.text
    )
    assert found is not None  # twelve batches of two
    record = json.loads((tmp_path / "short" / "training.json").read_text())["data"]
    assert record["records"] == 10
    assert record["skipped"] == record["shortened"] == {}
    assert (record["chats"], record["truncated"], record["rejected"]) == (24, 24, 0)
    assert record["unused"] == int(found[1])
    assert 0 < record["loss_tokens"] < record["tokens"] <= 24 * 20
    caplog.clear()
    train("long", max_length=256, max_steps=1)
    assert "truncated" not in caplog.text


def test_dropped_records_are_reported_with_their_number(
    target: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "chats.jsonl"
    lines = data.read_text().splitlines()
    chat = json.loads(lines[0])
    chat["messages"] += [{"role": "narrator", "content": "..."}]
    file.write_text("\n".join([*lines, "{", json.dumps(chat)]))
    out = train_here(file, tmp_path / "out", target, max_steps=1)
    assert "shortened 1 of 12 records: 1 unknown role;" in caplog.text
    assert "skipped 1 of 12 records: 1 not JSON; first skipped: line 11: not JSON" in caplog.text
    record = json.loads((out / "training.json").read_text())["data"]
    assert record["skipped"] == {"not JSON": 1}
    assert record["shortened"] == {"unknown role": 1}


@pytest.mark.parametrize("stored", [False, True], ids=["chats", "features"])
def test_training_without_any_loss_token_is_refused(
    stored: bool, target: Path, data: Path, tmp_path: Path, run
) -> None:
    """Every chat is truncated before its answer. Nothing is written."""
    out = tmp_path / "out"
    arguments = command(data, out, target, max_length=8)
    if stored:
        features = ("--data", data, "--target", target, "--max-length", 8)
        assert run("train", "features", *features, "--out", tmp_path / "features")[0] == 0
        arguments = [*without_option(arguments, "--data"), "--features", str(tmp_path / "features")]
    status, _, errors = run(*arguments)
    assert status == 1
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == (
        "error: no token of the 10 chats contributes to the loss: 10 are truncated before an answer"
        " (raise max_length)"
    )
    assert not out.exists()


def test_metrics_are_printed_as_lines_without_a_terminal(
    succeed: Any, target: Path, data: Path, tmp_path: Path
) -> None:
    arguments = command(data, tmp_path / "out", target, validation=1, max_steps=3)
    _, errors = succeed(*arguments)
    assert "step 3 of 3" in errors
    for word in ("loss", "top-1", "top-3", "lr", "tokens/s", "minutes left", "tau", "JS by depth"):
        assert word in errors
