"""``--target``, ``--drafter`` and ``--conv-template``: the same in every command that has them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pairs import tiny_target, untrained_head

from eagle_fsd import AcceptanceConfig, EagleFSD, TreeConfig
from eagle_fsd.bundled import BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.chat.serve import connections
from eagle_fsd.cli.options import given_settings
from eagle_fsd.model.checkpoint import save_head
from eagle_fsd.model.target import Target

Run = Callable[..., tuple[int, str, str]]

#: Commands that decode with a pair. The default numbers of problems would take seconds to generate.
DECODING: tuple[tuple[object, ...], ...] = (
    ("generate", "Hello"),
    ("chat",),
    ("demo",),
    ("serve",),
    ("serve", "worker"),
    ("evaluate", "--count", 2),
    ("sweep", "--count", 2),
    ("tune", "--count", 2),
    ("calibrate", "--count", 8, "--max-drop", 1),
    ("bench", "--count", 2),
    ("doctor",),
)


def test_a_given_tree_replaces_all_trees_of_a_file(tmp_path: Path) -> None:
    tree = {"total_tokens": 8, "depth": 4, "top_k": 2}
    file = tmp_path / "fsd.json"
    file.write_text(json.dumps({**tree, "exact": tree, "batch": {"4": tree}, "threshold": 0.1}))
    found = given_settings(file, TreeConfig(depth=3), AcceptanceConfig())
    assert (found.depth, found.total_tokens, found.threshold) == (3, 8, 0.1)
    assert (found.exact, found.batch) == (None, {})


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run in an empty folder, without ports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(connections, "check_port", lambda *_: None)


def link_files(source: Path, folder: Path, *without: str) -> Path:
    """Create a folder with links to the files of another one."""
    folder.mkdir()
    for file in source.iterdir():
        if file.name not in without:
            (folder / file.name).symlink_to(file)
    return folder


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A head that fits the bundled target."""
    return link_files(BUNDLED_HEAD, tmp_path / "my-head", "fsd.json")


@pytest.fixture
def other_head(tmp_path: Path) -> Path:
    """A head of another target."""
    head = untrained_head(tiny_target(), bias=False)
    save_head(head.attach(Target(tiny_target())), tmp_path / "other-head")
    return tmp_path / "other-head"


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    messages = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5."}]
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": messages}) + "\n")
    return file


def training(chats: Path) -> list[tuple[object, ...]]:
    """Arguments of the commands that train and export, but for the head and the folder."""
    sizes = ("--max-steps", 1, "--max-length", 16, "--validation", 0)
    return [("train", "--data", chats, *sizes), ("train", "export", "--format", "vllm")]


def test_head_that_fits_is_used_with_the_bundled_target(
    head: Path, chats: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command loads it, under either name of the option; others train or export it."""
    monkeypatch.setattr("eagle_fsd.train.run.draw_curves", lambda *_: None)
    train, export = training(chats)
    for number, (words, drafter) in enumerate(
        (
            (export, ("--head", head)),
            ((*train, "--head-type", "eagle3"), ("--drafter", "bundled-eagle3")),
        )
    ):
        status, out, err = run(*words, "--out", f"out-{number}", *drafter)
        assert (status, "The head is in out" in out) == (0, True), err
    loaded: list[tuple[object, object]] = []

    def stop(*given: Any, **_: Any) -> None:
        loaded.append(given)
        raise ValueError("stop")

    monkeypatch.setattr(EagleFSD, "from_pretrained", stop)
    for words, spelling in zip(DECODING, itertools.cycle(("--drafter", "--head"))):
        status, _, err = run(*words, spelling, head)
        assert (status, err.splitlines()[-1]) == (1, "error: stop"), words
        assert loaded.pop()[1] in (head, str(head)), words
        assert not loaded


def test_head_that_does_not_fit_needs_its_target(other_head: Path, chats: Path, run: Run) -> None:
    """A target without its head is rejected, too."""
    trains = [(*words, "--out", "out") for words in training(chats)]
    for words in (*DECODING[::3], *trains):
        status, out, err = run(*words, "--drafter", other_head)
        assert (status, out) == (1, ""), words
        assert err.splitlines()[-1] == (
            f"error: {other_head}: this head belongs to another target: it reads hidden states of"
            " size 32, the target's have size 128; pass its own target (--target)"
        )
        assert not Path("out").exists()
    for words in DECODING[::3]:
        status, out, err = run(*words, "--target", BUNDLED_TARGET)
        assert (status, out) == (1, ""), words
        expected = "error: pass both a target and a drafter (--drafter)"
        assert err.splitlines()[-1].startswith(expected)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The bundled target without its chat template."""
    return link_files(BUNDLED_TARGET, tmp_path / "my-target", "chat_template.jinja")


@pytest.mark.usefixtures("loaded_once")
def test_no_chat_template_is_needed_for_an_export_or_a_raw_prompt(
    target: Path, head: Path, tmp_path: Path, run: Run
) -> None:
    """Exports and raw prompts need no chat template, and exports need no tokenizer either."""
    bare = link_files(BUNDLED_TARGET, tmp_path / "bare", "tokenizer.json")
    for engine, folder, options in (
        ("sglang", target, ("--conv-template", "vicuna_v1.1")),
        ("vllm", bare, ()),
    ):
        words = ("train", "export", "--out", engine, "--format", engine, "--head", head)
        status, _, err = run(*words, "--target", folder, *options)
        assert status == 0, err
    words = ("generate", "Mia has", "--threshold", 0, "--max-new-tokens", 4, "--json")
    raw = json.loads(run(*words, "--raw")[1])
    formatted = ("--conv-template", "vicuna_v1.1")
    for options in ((), ("--raw", *formatted), formatted):
        status, out, err = run(*words, "--target", target, "--head", head, *options)
        assert status == 0, err
        record = json.loads(out)
        if options == formatted:
            assert record["stats"]["prefilled"] > raw["stats"]["prefilled"] + 10
        else:
            assert record["tokens"] == raw["tokens"]
