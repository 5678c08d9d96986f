"""The documentation agrees with the package: examples run, commands parse, links exist."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from eagle_fsd.cli.app import app
from eagle_fsd.model.config import AcceptanceConfig, SamplingConfig, TreeConfig

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "eagle_fsd"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(PACKAGE.rglob("*.md")),
]
#: The changelog also names what earlier versions had.
CURRENT_PAGES = [page for page in PAGES if page.name != "CHANGELOG.md"]
#: Text that marks an example as one that needs the reader's models or a running server.
PLACEHOLDERS = ("path/to/", "http://")
#: Options of other programs: pytest and lm-evaluation-harness.
OTHER_OPTIONS = {"--hypothesis-profile", "--model_args", "--gen_kwargs", "--apply_chat_template"}
#: Everything that starts the command line, up to its first argument.
LAUNCHER = re.compile(
    r"(?:\w+=\S+ )*(?:eagle-fsd|(?:(?:python|accelerate launch|torchrun)\b.*? )?-m eagle_fsd\.cli)"
    r"(?= |$)"
)
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a page in a language."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [text for _, name, text in found if name == language]


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def spans(page: Path) -> list[str]:
    """Return the inline code of a page; a span that a line break interrupts is joined."""
    return SPAN.findall(re.sub(r"\n(?=\S)", " ", prose(page)))


def command_lines(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of every ``eagle-fsd`` command in a page's shell blocks."""
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r" \| | && ", line):
                if found := LAUNCHER.match(part.strip()):
                    yield shlex.split(part.strip()[found.end() :], comments=True)


def anchor_of(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def table_rows(page: Path) -> list[list[str]]:
    lines = [line for line in prose(page).splitlines() if line.lstrip().startswith("|")]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


@cache
def option_names() -> set[str]:
    """Return the long options of all commands."""
    names = {"--help", "--version"}

    def visit(command: Any) -> None:
        if command.default_command is not None:
            for argument in command.assemble_argument_collection():
                names.update(argument.names)
        for name in command:
            if not name.startswith("-"):
                visit(command[name])

    visit(app)
    return names


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    for text in blocks(page, "python"):
        code = compile(text, f"{name_of(page)} (example)", "exec")
        if not any(mark in text for mark in PLACEHOLDERS):
            exec(code, namespace)


def test_commands_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("chats.jsonl", "rewritten.jsonl", "recipe.yaml"):
        (tmp_path / name).touch()
    for name in ("path/to/target", "path/to/head", "my-head", "features"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "path/to/fsd.json").touch()
    for page in PAGES:
        for arguments in command_lines(page):  # unknown options and invalid values raise
            app.parse_args(arguments, exit_on_error=False, print_error=False)


def test_options_in_prose_exist() -> None:
    known = option_names() | OTHER_OPTIONS
    for page in CURRENT_PAGES:
        mentioned = {span.split()[0].split("=")[0] for span in spans(page) if span.startswith("--")}
        for span in spans(page):
            if found := LAUNCHER.match(span):
                mentioned.update(re.findall(r"--[a-z][a-z-]*", span[found.end() :]))
        assert mentioned <= known, page


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if re.match(r"\w+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            if anchor:
                text = target.read_text(encoding="utf-8")
                headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
                assert anchor in map(anchor_of, headings), link


def test_paths_and_modules_exist() -> None:
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in CURRENT_PAGES:
        commands = "\n".join(blocks(page, "bash"))
        for span in [*spans(page), *commands.split()]:
            if re.fullmatch(r"(eagle_fsd|tests|docs|benchmarks|tools|\.ci)/[\w./-]+", span):
                assert (ROOT / span).exists(), span
            elif re.fullmatch(r"[\w/]+\.py", span):
                assert any((base / span).exists() for base in (ROOT, PACKAGE)), span
        text = page.read_text(encoding="utf-8")
        for module in re.findall(r"-m (eagle_fsd[\w.]*)", text):
            assert importlib.util.find_spec(module), module
        for name in re.findall(r"(?:^|`)make (\w+)", text, re.MULTILINE):
            assert re.search(rf"^{name}:", targets, re.MULTILINE), f"make {name}"


def test_pages_begin_with_a_command_and_have_narrow_tables() -> None:
    for page in PAGES:
        assert all(len(row) <= 7 for row in table_rows(page)), page
        if page.parent == ROOT / "docs":
            title, blank, fence, *_ = page.read_text(encoding="utf-8").splitlines()
            assert (title[:2], blank, fence) == ("# ", "", "```bash"), page


def test_readme_is_short_and_links_every_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 75
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "contributing.md" or f"(docs/{page.name})" in text


def test_settings_page_states_every_option_and_its_default() -> None:
    documented = {row[0].strip("`"): row[1:3] for row in table_rows(ROOT / "docs" / "settings.md")}
    cpu = TreeConfig.for_device("cpu")
    for options in (AcceptanceConfig(), SamplingConfig()):
        for name, default in options:
            assert documented[name][0].strip("`") == str(default)
    rows = [row for row in table_rows(ROOT / "docs" / "settings.md") if len(row) == 4]
    for row in rows[2:]:
        name = row[0].strip("`")
        assert row[1:3] == [str(getattr(TreeConfig(), name)), str(getattr(cpu, name))]


def test_architecture_page_names_functions_that_exist() -> None:
    rows = [row for row in table_rows(ROOT / "docs" / "architecture.md") if len(row) == 4]
    for _, file, function, _ in rows[2:]:
        tree = ast.parse((PACKAGE / file.strip("`")).read_text(encoding="utf-8"))
        body: list[ast.stmt] = tree.body
        for name in function.strip("`").split("."):
            kinds = (ast.ClassDef, ast.FunctionDef)
            found = [item for item in body if isinstance(item, kinds) and item.name == name]
            assert found, f"{file} has no {function}"
            body = found[0].body
