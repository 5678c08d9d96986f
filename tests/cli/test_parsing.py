"""Options of the command line: spellings, bounds, several values, help, and the way back."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from annotated_types import Ge, Gt, Le
from cyclopts import App

from eagle_fsd.cli.app import app
from eagle_fsd.cli.parsing import _fields
from eagle_fsd.utils.options import Options, describe_bounds, describe_field

Run = Callable[..., tuple[int, str, str]]

COMMANDS = [
    *((name,) for name in ("demo", "generate", "chat", "evaluate", "sweep", "tune", "calibrate")),
    *((name,) for name in ("train", "bench", "doctor", "serve")),
    ("serve", "worker"),
    ("export", "custom-generate"),
    *(("train", name) for name in ("features", "regenerate", "chats", "ranks", "export")),
]
HEAVY = ("torch", "transformers", "accelerate", "fastchat", "matplotlib", "scipy")


def find_command(names: tuple[str, ...]) -> App:
    command: App = app
    for name in names:
        command = command[name]
    return command


def test_options_are_parsed_to_models() -> None:
    """Fields that are not given stay unset, and the last of several values counts."""

    def parse(*words: str) -> dict[str, Any]:
        _, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
        return bound.kwargs

    tree = parse("generate", "x", "--depth", "5", "--depth", "6", "--tree-top-k", "7")["tree"]
    assert tree.model_dump(exclude_unset=True) == {"depth": 6, "top_k": 7}
    for words in (["--name", "a", "b"], ["--name", "a", "--name", "b"], ["--name=a", "--name=b"]):
        assert parse("serve", *words)["server"].names == ("a", "b")


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """The help of every command, by its words, from a process in which nothing heavy is imported.

    ``--help`` and usage errors answer at once; so does Ctrl-C. Importing the package and its
    options is as cheap.
    """
    program = f"""
import contextlib, io, json, sys, eagle_fsd
eagle_fsd.TreeConfig, eagle_fsd.SamplingConfig
from eagle_fsd.cli import main
helps = {{}}
for words in {[[*names, "--help"] for names in [(), *COMMANDS]]!r} + [
    [], ["--version"], ["fly"], ["generate"], ["generate", "--depth", "99", "x"],
    ["calibrate", "--count", "x"], ["sweep", "-T", "x"], ["train", "--out", "x"],
    ["serve", "fly"], ["serve", "all", "--port", "21001"], ["serve", "worker", "--address", "x"],
]:
    sys.argv = ["eagle-fsd", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main()
    assert not [name for name in {HEAVY!r} if name in sys.modules], words
    if words[-1:] == ["--help"]:
        helps[" ".join(words[:-1])] = out.getvalue()
print(json.dumps(helps))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_option_is_described(helps: dict[str, str]) -> None:
    """Help texts describe every option with its bounds, and with its default where it is fixed."""
    texts = {name: " ".join(text.replace("│", " ").split()) for name, text in helps.items()}
    port = "Port to listen on. An integer in [1, 65535]. [default: 8000]"
    assert f"--port INT {port}" in texts["serve"]
    assert "--no-web" not in texts["serve"]
    style = "[choices: simple, rich, programmatic] [default: simple]"
    assert f"--style CHOICE FastChat's terminal style. {style}" in texts["chat"]
    for names in COMMANDS:
        text = texts[" ".join(names)]
        assert "Args:" not in text, names
        for model, field, argument in _fields(find_command(names).assemble_argument_collection()):
            description = model.model_fields[field].description
            assert description, f"{model.__name__}.{field}"
            assert argument.names[0] in text
            assert description in text
            if describe_bounds(model.model_fields[field]):
                bounds = describe_field(model, field)
                assert f"{bounds[:1].upper()}{bounds[1:]}." in text


def values_out_of_bounds() -> Iterator[tuple[tuple[str, ...], str, object, str]]:
    """Yield command, option, value and expected message for each kind of bound of every model."""
    seen: set[tuple[type[Options], type]] = set()
    for names in COMMANDS:
        arguments = find_command(names).assemble_argument_collection()
        for model, field, argument in _fields(arguments):
            for item in model.model_fields[field].metadata:
                value: float
                if isinstance(item, Ge):
                    value = float(item.ge) - 1  # type: ignore[arg-type]
                elif isinstance(item, Gt):
                    value = float(item.gt)  # type: ignore[arg-type]
                elif isinstance(item, Le):
                    value = float(item.le) * 2 + 1  # type: ignore[arg-type]
                elif getattr(item, "allow_inf_nan", None) is False:
                    value = math.inf
                else:
                    continue
                if (model, type(item)) in seen:
                    continue
                seen.add((model, type(item)))
                shown = int(value) if describe_field(model, field).startswith("an int") else value
                option = argument.names[0]
                yield names, option, shown, f"{option} must be {describe_field(model, field)}"


def test_bounds_are_enforced(run: Run) -> None:
    """A value out of bounds is a usage error of one line that names option, bounds and value."""
    required = {
        ("train",): ("--data", __file__, "--out", "x"),
        ("train", "features"): ("--data", __file__, "--out", "x"),
        ("train", "regenerate"): ("--data", __file__, "--out", "x"),
        ("train", "chats"): ("--out", "x"),
        ("train", "ranks"): ("--data", __file__, "--out", "x"),
    }
    checked = 0
    for names, option, value, message in values_out_of_bounds():
        status, out, err = run(*names, *required.get(names, ()), f"{option}={value}")
        assert (status, out) == (2, "")
        assert (
            err == f"error: {message}; got {value} (see {' '.join(('eagle-fsd', *names))} --help)\n"
        )
        checked += 1
    assert checked > 30
