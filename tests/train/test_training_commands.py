"""Tests for ``eagle-fsd train`` and its subcommands."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from trainings import Train, command, read_losses, train_here, without_option, write_chats

from eagle_fsd.bundled import BUNDLED_HEAD
from eagle_fsd.cli.train import WritingProgress
from eagle_fsd.train.chat_file import ChatFile
from eagle_fsd.train.config import RegenerateConfig

Run = Callable[..., tuple[int, str, str]]


def test_stored_features_can_be_trained_on(
    succeed: Any,
    run: Run,
    target: Path,
    data: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "features"
    store = ("train", "features", "--data", data, "--out", folder, "--target", target)
    out, errors = succeed(*store, "--max-length", 64)
    assert "10 chats are in" in out
    assert re.search(r"about [\d.]+ kB for 10 chats; .* are free", caplog.text)
    arguments = without_option(command(data, tmp_path / "out", target, max_steps=2), "--data")
    succeed(*arguments, "--features", folder)
    assert len(read_losses(tmp_path / "out")) == 2
    for option, value, stored in (
        ("--max-length", "32", "max_length must be that of --features, 64; got 32"),
        (
            "--conv-template",
            "vicuna_v1.1",
            "must be that of --features, the tokenizer's; got vicuna",
        ),
    ):
        status, _, errors = run(*arguments, "--overwrite", "--features", folder, option, value)
        assert (status, stored in errors) == (2, True), errors
    succeed(*without_option(arguments, "--max-length"), "--overwrite", "--features", folder)
    recipe = json.loads((tmp_path / "out" / "recipe.json").read_text())
    assert recipe["recipe"]["max_length"] == 64


def test_rewritten_chats_can_be_trained_on(
    succeed: Any, target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of ``train --regenerate`` are beside its folder, where they can be inspected."""
    short = partial(RegenerateConfig, max_new_tokens=16)  # train has no option for it
    monkeypatch.setattr("eagle_fsd.train.regenerate.RegenerateConfig", short)
    rewritten = tmp_path / "chats.jsonl"
    arguments = ("train", "regenerate", "--data", data, "--max-new-tokens", 4, "--out", rewritten)
    assert "10 rewritten chats are in" in succeed(*arguments)[0]
    assert len(ChatFile(rewritten)) == 10
    out, rewritten = tmp_path / "out", tmp_path / "out-regenerated.jsonl"
    succeed(*command(data, out, target, "--regenerate", max_steps=2))
    assert len(rewritten.read_text().splitlines()) == 10
    assert json.loads((out / "recipe.json").read_text())["data"]["data"] == str(rewritten)
    assert len(read_losses(out)) == 2
    others = write_chats(tmp_path / "others.jsonl", 4)
    succeed(*command(others, out, target, "--regenerate", "--overwrite", max_steps=2))
    assert len(rewritten.read_text().splitlines()) == 4


def test_trained_head_is_exported(
    refused: Any, succeed: Any, target: Path, data: Path, tmp_path: Path
) -> None:
    """Metrics are printed as lines, because there is no terminal."""
    head, out = tmp_path / "head", tmp_path / "out"
    _, errors = succeed(*command(data, head, target, validation=1, max_steps=3))
    assert errors.startswith("training on 9 chats: 3 steps, up to 20 epochs")
    assert "training: 3 of 3" in errors
    for word in ("loss", "top-1", "top-3", "lr", "tokens/s", "minutes left", "tau", "JS by depth"):
        assert word in errors
    arguments = ("train", "export", "--head", head, "--out", out, "--target", target)
    printed, _ = succeed(*arguments, "--format", "sglang")
    assert "as sglang reads it" in printed
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
    assert "must be an empty or a new folder" in refused(*arguments, "--format", "sglang")
    assert "eagle, sglang, vllm" in refused(*arguments, "--format", "tensorrt", status=2)


def test_invalid_arguments_are_reported_in_one_line(
    refused: Any, run: Run, target: Path, data: Path, tmp_path: Path
) -> None:
    """No invalid argument writes a file; the last two cases truncate all chats before an answer."""
    out, features = tmp_path / "out", tmp_path / "features"
    source = ("--data", data, "--target", target, "--max-length", 8)
    assert run("train", "features", *source, "--out", features)[0] == 0
    no_loss = "no token of the 10 chats contributes to the loss: 10 are truncated before an answer"
    given = command(data, out, target)
    stored = (*without_option(given, "--data"), "--max-length", "8")
    for arguments, status, words in (
        ([*given, "--conv-template", "vicuna9"], 1, ("vicuna9", "vicuna_v1.1")),
        ([*given, "--target", "/no/such/target"], 1, ("/no/such/target",)),
        ([*given, "--data", __file__], 1, ("no valid chat", "line 1")),
        ([*stored, "--features", str(tmp_path)], 1, ("index.json",)),
        ([*given, "--head", str(BUNDLED_HEAD)], 1, ("another target",)),
        ([*given, "--max-length", "8"], 1, (no_loss,)),
        ([*stored, "--features", str(features)], 1, (no_loss,)),
    ):
        errors = refused(*arguments, status=status)
        assert all(word in errors for word in words), errors
        assert not out.exists() or not any(out.iterdir())


def test_dropped_and_truncated_chats_are_reported(
    train: Train, target: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train("short", max_length=20)
    found = re.search(
        r"of 24 chats read in all epochs, 24 were truncated, (\d+) had no", caplog.text
    )
    assert found is not None  # twelve batches of two
    record = json.loads((tmp_path / "short" / "training.json").read_text())["data"]
    assert (record["records"], record["skipped"], record["shortened"]) == (10, {}, {})
    assert (record["chats"], record["truncated"], record["rejected"]) == (24, 24, 0)
    assert record["unused"] == int(found[1])
    assert 0 < record["loss_tokens"] < record["tokens"] <= 24 * 20
    caplog.clear()
    lines = data.read_text().splitlines()
    chat = json.loads(lines[0])
    chat["messages"] += [{"role": "narrator", "content": "..."}]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join([*lines, "{", json.dumps(chat)]))
    out = train_here(file, tmp_path / "out", target, max_steps=1, max_length=256)
    assert "were truncated" not in caplog.text
    assert "shortened 1 of 12 records: 1 unknown role;" in caplog.text
    assert "skipped 1 of 12 records: 1 not JSON; first skipped: line 11: not JSON" in caplog.text
    record = json.loads((out / "training.json").read_text())["data"]
    assert (record["skipped"], record["shortened"]) == ({"not JSON": 1}, {"unknown role": 1})


def test_time_left_of_writing_counts_tokens_of_incomplete_chats(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = 0.0
    monkeypatch.setattr("time.monotonic", lambda: seconds)
    shown = WritingProgress(RegenerateConfig(max_new_tokens=100, batch_size=4))
    with shown.stage("writing") as report:
        report(2, 12)  # written by an earlier run
        for tokens, line in (
            (0, "writing: 2 of 12"),
            (120, "writing: 2 of 12, 2 tokens/s, 7 minutes left"),  # as many as 1.2 chats
            (1080, "writing: 2 of 12, 10 tokens/s, 3 minutes left"),  # the batch has only 4
        ):
            if tokens:
                seconds += 60.0
                shown.add_tokens(tokens)
            assert capsys.readouterr().err.splitlines()[-1] == line
