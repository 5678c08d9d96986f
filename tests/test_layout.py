"""Which part of the package may import which."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

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


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imported_modules(module: str, source: str) -> Iterator[str]:
    """Yield the modules of the package that ``source`` imports, also inside functions.

    ``from eagle_fsd.chat import web`` imports the module ``eagle_fsd.chat.web``. A name that is not
    a module counts as an import of the package that contains it. The import of a module runs the
    ``__init__`` of its packages, so these are imported too, unless ``module`` is inside them.
    """
    for node in ast.walk(ast.parse(source)):
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
    return {
        module: set(imported_modules(module, path.read_text(encoding="utf-8")))
        for module, path in MODULES.items()
    }


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
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_imports_have_no_cycle() -> None:
    TopologicalSorter(import_graph()).prepare()  # raises an error that names a cycle


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
        assert find_violations({module: set(imported_modules(module, source))}), source


def test_every_package_has_a_docstring() -> None:
    for path in PACKAGE.rglob("__init__.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert len(docstring.split()) >= 8, f"{path.relative_to(ROOT)} needs a docstring"


def undocumented_arguments(source: str, names: Collection[str]) -> list[str]:
    """Arguments of functions, and of the public methods of classes, that no docstring describes.

    A method without a docstring that overrides another inherits its documentation, and so does one
    that refers to the method that it implements.
    """
    found = []

    def visit(node: ast.Module | ast.ClassDef) -> None:
        for child in node.body:
            if isinstance(node, ast.Module) and getattr(child, "name", None) not in names:
                continue
            if isinstance(child, ast.ClassDef):
                visit(child)
            if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if child.name.startswith("_") and child.name != "__init__":
                continue
            if any(ast.unparse(item).endswith(".setter") for item in child.decorator_list):
                continue  # the property's docstring describes it
            text = ast.get_docstring(child) or ""
            is_method = isinstance(node, ast.ClassDef)
            if is_method and re.search(r"[Ss]ee (:meth:)?`", text):
                continue
            if is_method and node.bases and not text:
                continue
            if is_method and child.name == "__init__":
                text += ast.get_docstring(node) or ""
            arguments = child.args.posonlyargs + child.args.args + child.args.kwonlyargs
            found.extend(
                f"{child.name}({name})"
                for name in (argument.arg for argument in arguments)
                if name not in ("self", "cls")
                and not re.search(rf"^\s*{name}\b.*:|``{name}``", text, re.MULTILINE)
            )

    visit(ast.parse(source))
    return found


def test_every_argument_of_an_exported_name_is_documented() -> None:
    exported = defaultdict(list)
    for name in eagle_fsd.__all__:
        exported[getattr(eagle_fsd, name).__module__].append(name)
    undocumented = {
        module: found
        for module, names in exported.items()
        if (found := undocumented_arguments(MODULES[module].read_text(encoding="utf-8"), names))
    }
    assert len(exported) > 10
    assert not undocumented


def test_links_at_the_top() -> None:
    for name in ("model", "train", "evaluation"):
        assert (ROOT / name).is_symlink()
        assert (ROOT / name).resolve() == PACKAGE / name


def test_calls_with_many_arguments_use_keywords() -> None:
    """Calls of the package's functions and classes pass at most four arguments by position."""
    trees = {module: ast.parse(path.read_text()) for module, path in MODULES.items()}
    names = {
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        or (isinstance(node, ast.FunctionDef) and node.args.vararg is None)
    }
    long = [
        f"{module}:{node.lineno}"
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in names
        and len(node.args) > 4
    ]
    assert long == []
