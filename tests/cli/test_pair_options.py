"""``--target``, ``--drafter`` and ``--conv-template``: the same in every command that has them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pairs import tiny_target, untrained_head

from eagle_fsd import EagleFSD
from eagle_fsd.bundled import BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.chat.serve import servers
from eagle_fsd.cli.app import app
from eagle_fsd.cli.options import Pair
from eagle_fsd.cli.parsing import arguments_for
from eagle_fsd.model.checkpoint import save_head
from eagle_fsd.model.target import Target

Run = Callable[..., tuple[int, str, str]]

#: Commands that decode with a pair. (``serve all`` passes its options to ``serve worker``.)
DECODING: tuple[tuple[object, ...], ...] = (
    ("generate", "Hello"),
    ("chat",),
    ("demo",),
    ("serve", "worker"),
    ("evaluate",),
    ("sweep",),
    ("tune",),
    ("calibrate", "--max-drop", 1),
    ("bench",),
    ("doctor",),
)
#: Spellings of the option for the drafter.
SPELLINGS = ("--drafter", "--head")

each_command = pytest.mark.parametrize(
    "words", DECODING, ids=lambda words: " ".join(map(str, words))
)
each_spelling = pytest.mark.parametrize("spelling", SPELLINGS)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run in an empty folder, without ports and without the web page's libraries."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(servers, "check_port", lambda *_: None)
    monkeypatch.setattr("eagle_fsd.cli.demo.import_page", SimpleNamespace)


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


def arguments_of_training(command: str, chats: Path) -> tuple[object, ...]:
    if command == "export":
        return ("train", "export", "--out", "out", "--format", "vllm")
    sizes = ("--max-steps", 1, "--max-length", 16, "--validation", 0)
    return ("train", "--data", chats, "--out", "out", *sizes)


# -- one of --target and --drafter -----------------------------------------------------------------


@pytest.mark.slow
@each_command
@each_spelling
def test_head_that_fits_is_used_with_the_bundled_target(
    spelling: str,
    words: tuple[object, ...],
    head: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = EagleFSD.from_pretrained

    def load_and_stop(*given: Any, **options: Any) -> None:
        pair = load(*given, **options)
        raise ValueError(f"{pair.model.config._name_or_path} and {given[1]} are loaded")

    monkeypatch.setattr(EagleFSD, "from_pretrained", load_and_stop)
    status, _, err = run(*words, spelling, head)
    assert err.splitlines()[-1] == f"error: {BUNDLED_TARGET} and {head} are loaded"
    assert status == 1


@pytest.mark.parametrize("command", ["train", "export"])
@each_spelling
def test_head_that_fits_is_trained_and_exported_with_the_bundled_target(
    spelling: str, command: str, head: Path, chats: Path, run: Run
) -> None:
    status, out, err = run(*arguments_of_training(command, chats), spelling, head)
    assert status == 0, err
    assert "The head is in out" in out


@pytest.mark.parametrize("command", ["train", "export"])
def test_bundled_heads_are_trained_and_exported_by_name(
    command: str, chats: Path, run: Run
) -> None:
    words = arguments_of_training(command, chats)
    own = ("--head-type", "eagle3") if command == "train" else ()
    status, out, err = run(*words, *own, "--drafter", "bundled-eagle3")
    assert status == 0, err
    assert "The head is in out" in out


@each_command
def test_head_that_does_not_fit_needs_its_target(
    words: tuple[object, ...], other_head: Path, run: Run
) -> None:
    check_needs_target(words, other_head, run)


@pytest.mark.parametrize("command", ["train", "export"])
def test_head_that_does_not_fit_needs_its_target_for_training(
    command: str, other_head: Path, chats: Path, run: Run
) -> None:
    check_needs_target(arguments_of_training(command, chats), other_head, run)
    assert not Path("out").exists()


def check_needs_target(words: tuple[object, ...], other_head: Path, run: Run) -> None:
    status, out, err = run(*words, "--drafter", other_head)
    assert (status, out) == (1, "")
    assert err.splitlines()[-1] == (
        f"error: {other_head}: this head belongs to another target: its hidden size is 32, the"
        " target's is 128; pass its own target (--target)"
    )


@each_command
def test_target_needs_its_head(words: tuple[object, ...], run: Run) -> None:
    status, out, err = run(*words, "--target", BUNDLED_TARGET)
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith("error: pass both a target and a drafter (--drafter)")


# -- CUDA graphs -----------------------------------------------------------------------------------


@pytest.mark.slow
@each_command
def test_capture_can_be_disabled(
    words: tuple[object, ...], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is on by default."""

    def set_attribute(self: EagleFSD, name: str, value: object) -> None:
        if name == "capture" and hasattr(self, name):  # set again, by the command
            raise ValueError(f"capture is {value}")
        object.__setattr__(self, name, value)

    monkeypatch.setattr(EagleFSD, "__setattr__", set_attribute)
    for options, expected in (((), True), (("--capture",), True), (("--no-capture",), False)):
        status, _, err = run(*words, *options)
        assert (status, err.splitlines()[-1]) == (1, f"error: capture is {expected}")


def test_serve_all_passes_capture_on() -> None:
    given = arguments_for(app["serve"]["worker"], Pair(capture=False, compile=True))
    assert given == ["--compile", "--no-capture"]
    assert not arguments_for(app["serve"]["worker"], Pair())


# -- targets without a chat template ---------------------------------------------------------------


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The bundled target without its chat template."""
    return link_files(BUNDLED_TARGET, tmp_path / "my-target", "chat_template.jinja")


@pytest.mark.parametrize("options", [(), ("--conv-template", "vicuna_v1.1")])
@pytest.mark.parametrize("engine", ["eagle", "sglang", "vllm"])
def test_export_needs_no_chat_template(
    engine: str, options: tuple[str, ...], target: Path, head: Path, run: Run
) -> None:
    words = ("train", "export", "--out", "out", "--format", engine, "--head", head)
    status, _, err = run(*words, "--target", target, *options)
    assert status == 0, err


def test_export_needs_no_tokenizer(head: Path, tmp_path: Path, run: Run) -> None:
    target = link_files(BUNDLED_TARGET, tmp_path / "bare", "tokenizer.json")
    words = ("train", "export", "--out", "out", "--format", "vllm", "--head", head)
    status, _, err = run(*words, "--target", target)
    assert status == 0, err


@pytest.mark.parametrize("options", [(), ("--raw",), ("--raw", "--conv-template", "vicuna_v1.1")])
def test_generate_needs_no_chat_template_for_a_raw_prompt(
    options: tuple[str, ...], target: Path, head: Path, run: Run
) -> None:
    pair = ("--target", target, "--head", head, "--max-new-tokens", 4, "--json")
    raw = run("generate", "Mia has", "--raw", "--max-new-tokens", 4, "--json", "--threshold", 0)
    status, out, err = run("generate", "Mia has", *pair, *options)
    assert status == 0, err
    assert json.loads(out)["tokens"] == json.loads(raw[1])["tokens"]


def test_generate_formats_the_prompt_with_a_fastchat_template(
    target: Path, head: Path, run: Run
) -> None:
    pair = ("--target", target, "--head", head, "--max-new-tokens", 1, "--json")
    prefilled = [
        json.loads(run("generate", "Mia has", *pair, *options)[1])["stats"]["prefilled"]
        for options in ((), ("--conv-template", "vicuna_v1.1"))
    ]
    assert prefilled[1] > prefilled[0] + 10
