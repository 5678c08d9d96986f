"""Which part of the package may import which, and what it exports."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import eagle_fsd

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "eagle_fsd"
#: What each part may import besides itself; "" is the root package, which exports the public API.
ALLOWED = {
    "utils": set(),
    "bundled": set(),
    "model": {"utils", "bundled"},
    "train": {"model", "utils", "bundled"},
    "evaluation": {"engines", "model", "utils", "bundled"},
    "chat": {"model", "utils", "bundled"},
    "engines": {"model", "utils"},
    "cli": {"chat", "engines", "evaluation", "train", "model", "utils", "bundled", ""},
    "": {"model", "utils"},
}
Graph = dict[str, set[str]]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each module."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imported_modules(module: str, tree: ast.Module) -> Iterator[str]:
    """Yield the modules of the package that ``tree`` imports, also inside functions.

    ``from eagle_fsd.chat import web`` imports the module ``eagle_fsd.chat.web``. A name that is not
    a module counts as an import of the package that contains it. The import of a module runs the
    ``__init__`` of its packages, so these are imported too, unless ``module`` is inside them.
    """
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if function in ("import_module", "__import__"):
                names = [str(node.args[0].value)]
        for name in names:
            if name.split(".")[0] != "eagle_fsd":
                continue
            target = name if name in MODULES else name.rpartition(".")[0]
            yield target
            while target := target.rpartition(".")[0]:
                if not f"{module}.".startswith(f"{target}."):
                    yield target


@cache
def import_graph() -> Graph:
    """Return the modules that each module imports."""
    return {module: set(imported_modules(module, tree)) for module, tree in trees().items()}


def find_violations(graph: Graph) -> list[str]:
    """Return the imports that :data:`ALLOWED` does not contain."""
    return [
        f"{module} imports {target}"
        for module, targets in graph.items()
        for target in targets
        if part_of(target) not in {part_of(module), *ALLOWED[part_of(module)]}
    ]


def test_imports_point_downward() -> None:
    assert find_violations(import_graph()) == []


def test_names_of_classes_are_unique() -> None:
    names = Counter(
        node.name
        for tree in trees().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_imports_have_no_cycle() -> None:
    TopologicalSorter(import_graph()).prepare()  # raises an error that names a cycle


def test_modules_of_fastchat_have_no_effects() -> None:
    """Its servers and workers replace the standard streams and create log files when imported."""
    harmless = re.compile(r"from fastchat\.(conversation import|serve import (cli|inference)\b)")
    for module, path in MODULES.items():
        for line in re.findall(r"^\s*((?:from|import) fastchat.*)", path.read_text("utf-8"), re.M):
            assert harmless.match(line), f"{module}: {line}"


def test_violations_are_found_in_every_form_of_import() -> None:
    module = "eagle_fsd.chat.session"
    for source in (
        "from eagle_fsd import cli",
        "from eagle_fsd import EagleFSD",
        "import eagle_fsd.cli.main",
        "def later():\n    from eagle_fsd.cli import generate",
        "import importlib\nimportlib.import_module('eagle_fsd.evaluation')",
        "from eagle_fsd.train.losses import loss",
    ):
        assert find_violations({module: set(imported_modules(module, ast.parse(source)))}), source


def test_every_package_has_a_docstring() -> None:
    for module, path in MODULES.items():
        if path.name == "__init__.py":
            docstring = ast.get_docstring(trees()[module]) or ""
            assert len(docstring.split()) >= 8, f"{module} needs a docstring"


def test_every_argument_of_an_exported_name_is_documented() -> None:
    """A method may refer to another, or inherit the documentation of the one that it overrides."""
    checked, undocumented = 0, []
    for exported in eagle_fsd.__all__:
        item = getattr(eagle_fsd, exported)
        for name, member in vars(item).items():
            if name.startswith("_") and name != "__init__":
                continue
            function = inspect.unwrap(getattr(member, "__func__", member))
            if not inspect.isfunction(function):
                continue
            if function.__code__.co_filename != inspect.getfile(item):
                continue  # generated for a dataclass, or defined elsewhere
            text = function.__doc__ or ""
            if re.search(r"[Ss]ee (:meth:)?`", text) or (item.__bases__ != (object,) and not text):
                continue
            if name == "__init__":
                text += item.__doc__ or ""
            for argument, given in inspect.signature(function).parameters.items():
                variable = given.kind in (given.VAR_POSITIONAL, given.VAR_KEYWORD)
                if variable or argument in ("self", "cls"):
                    continue
                checked += 1
                if not re.search(rf"^\s*{argument}\b.*:|``{argument}``", text, re.MULTILINE):
                    undocumented.append(f"{exported}.{name}({argument})")
    assert checked > 50
    assert not undocumented


def test_links_at_the_top() -> None:
    for name in ("model", "train", "evaluation"):
        assert (ROOT / name).is_symlink()
        assert (ROOT / name).resolve() == PACKAGE / name


def test_calls_with_many_arguments_use_keywords() -> None:
    """Calls of the package's functions and classes pass at most four arguments by position."""
    names = {
        node.name
        for tree in trees().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        or (isinstance(node, ast.FunctionDef) and node.args.vararg is None)
    }
    long = [
        f"{module}:{node.lineno}"
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in names
        and len(node.args) > 4
    ]
    assert long == []


def test_public_names_are_available() -> None:
    assert set(eagle_fsd.__all__) <= set(dir(eagle_fsd))
    for name in eagle_fsd.__all__:
        assert getattr(eagle_fsd, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        eagle_fsd.nonsense  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    imports = [node for node in ast.walk(trees()["eagle_fsd"]) if isinstance(node, ast.ImportFrom)]
    names = {alias.asname: node.module for node in imports for alias in node.names if alias.asname}
    assert names == {name: f"eagle_fsd.{module}" for name, module in eagle_fsd._MODULES.items()}
