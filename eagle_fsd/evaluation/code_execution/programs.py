"""Extract the program of an answer to a HumanEval question."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eagle_fsd.evaluation.questions.question import Question

# A fenced code block. The fence begins a line or a list item, or follows a space or a colon.
_BLOCK = re.compile(
    r"(?:^[ \t>*\d.)-]*|(?<=[\s:]))(?P<fence>`{3,}|~{3,})[^\n`]*\n"
    r"(?P<code>.*?)(?:^[ \t]*(?P=fence)[`~]*[ \t]*$|(?P=fence)[ \t]*$|\Z)",
    re.DOTALL | re.MULTILINE,
)
_CODE_START = re.compile(r"^(?:(?:from|import|def|async def|class|@\w+)\b|\w+ = )", re.MULTILINE)
#: Maximum number of definitions in a text, and of first lines of code for each, to try.
_MAX_STARTS = 20

#: Names by which programs read their input.
_INPUTS = ("input", "open", "sys")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.Import, ast.ImportFrom, ast.ClassDef)


def strip_reasoning(answer: str) -> str:
    """Return an answer after its last ``</think>``, with line ends normalized to ``\\n``."""
    return answer.rsplit("</think>", 1)[-1].replace("\r\n", "\n").replace("\r", "\n")


@dataclass(frozen=True)
class Program:
    """The code of an answer, and the tests that it must pass."""

    code: str  # should define the function; may be invalid
    tests: str  # defines ``check(function)``, which raises on failure, and the question's helpers
    entry_point: str  # name of the function


def build_program(question: Question, answer: str) -> Program:
    """Extract the code of an answer, and add the question's tests.

    The last code block that defines the requested function is used, with the definitions it needs
    from other blocks. If there is no such block, the whole text is searched for the function. If it
    is not there, the code is taken as its body, whose indentation may be missing. If code is cut
    off or followed by prose, the longest part that parses is used. After the function, only
    definitions and values are kept, not main guards and calls. The question's own imports and
    definitions come first.

    OpenAI's human-eval appends the answer to the question, as here if the answer is a body.
    OpenAI's simple-evals uses the first block; EvalPlus also keeps the part that parses.
    """
    entry, prompt = question.row["entry_point"], question.row["prompt"].rstrip() + "\n"
    text = strip_reasoning(answer)
    code = _whole_function(text, prompt, entry) or _completion(text, prompt, entry) or prompt + text
    return Program(code, f"{_stub(prompt)}{question.answer}\n", entry)


def _blocks(text: str) -> list[str]:
    """Return the contents of the code blocks."""
    return [textwrap.dedent(match["code"]) for match in _BLOCK.finditer(text)]


def _parse(source: str) -> tuple[ast.Module | None, int]:
    """Parse a program; where it is invalid, return None and the line of the error (0: unknown)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
            compile(tree, "<answer>", "exec", dont_inherit=True)  # finds "return" outside functions
        except SyntaxError as error:
            return None, error.lineno or 0
        except (ValueError, RecursionError, MemoryError, OverflowError):
            return None, 0
    return tree, 0


def _statements(source: str) -> list[ast.stmt]:
    """Return the statements of a program; none if it is invalid."""
    tree, _ = _parse(source)
    return tree.body if tree else []


def _longest_part(before: str, code: str) -> str:
    """Return the longest run of lines at the beginning of ``code`` that parses after ``before``."""
    lines = code.rstrip().split("\n")
    offset, count = before.count("\n"), len(lines)
    while count > 0:
        part = "\n".join(lines[:count]) + "\n"
        tree, line = _parse(before + part)
        if tree is not None:
            return part
        # Nearly all errors remain without the lines after them: drop all of these at once.
        count = min(count - 1, max(0, line - offset)) if line else count - 1
    return ""


def _defined_names(*nodes: ast.stmt) -> set[str]:
    """Return the names of the functions, classes and values that statements define."""
    names = {node.name for node in nodes if isinstance(node, (*_FUNCTIONS, ast.ClassDef))}
    targets: list[ast.expr] = []
    for node in nodes:
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AnnAssign):
            targets.append(node.target)
    return names.union(*map(_stored_names, targets))


def _imported_names(*nodes: ast.stmt) -> set[str]:
    """Return the names that statements import."""
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    aliases = [alias for node in imports for alias in node.names]
    return {(alias.asname or alias.name).partition(".")[0] for alias in aliases}


def _used_names(*nodes: ast.stmt) -> set[str]:
    """Return all names in statements."""
    return {item.id for node in nodes for item in ast.walk(node) if isinstance(item, ast.Name)}


def _stored_names(node: ast.AST) -> set[str]:
    """Return the names that a statement or a target assigns to."""
    names = (item for item in ast.walk(node) if isinstance(item, ast.Name))
    return {item.id for item in names if isinstance(item.ctx, ast.Store)}


def _whole_function(text: str, prompt: str, entry: str) -> str | None:
    """Return the program of an answer that defines ``entry``; None if it does not."""
    definition = re.compile(rf"^(?:async )?def {re.escape(entry)}\b", re.MULTILINE)
    blocks = [block for block in reversed(_blocks(text)) if entry in block]

    def candidates() -> Iterator[str]:
        yield from blocks
        for block in blocks:
            yield _longest_part("", block)
        for match in reversed(list(definition.finditer(text))[-_MAX_STARTS:]):
            starts = [start.start() for start in _CODE_START.finditer(text, 0, match.end())]
            for start in starts[-_MAX_STARTS:]:
                yield _longest_part("", text[start:])

    for code in candidates():
        body = _statements(code)
        if entry in _defined_names(*body):
            helpers = [_helpers(block, body, entry) for block in _blocks(text)]
            return _trim(_stub(prompt), [*helpers, code], entry)
    return None


def _helpers(block: str, body: list[ast.stmt], entry: str) -> str:
    """Return the imports and definitions in ``block`` that a program uses but does not contain.

    If these include a function, a class or a value, all imports and definitions are returned.
    """
    used = _used_names(*body) - _defined_names(*body) - _imported_names(*body) - {entry}
    other = _statements(block)
    defines = bool(used & _defined_names(*other))
    kept = []
    for node in other:
        names = _defined_names(node) | _imported_names(node)
        if entry not in names and (used & names or (defines and isinstance(node, _DEFINITIONS))):
            kept.append(node)
    return ast.unparse(ast.Module(kept, [])) + "\n\n" if kept else ""


def _completion(text: str, prompt: str, entry: str) -> str | None:
    """Return the program of an answer that continues the function; None if it does not."""
    first = _BLOCK.search(text)
    parts = [*_blocks(text), text[: first.start()] if first else text, text]
    parts = [part.strip("\n").rstrip() for part in parts if part.strip()]
    # Code that returns a value is tried first; the sort is stable.
    parts.sort(key=lambda part: not re.search(r"\b(?:return|yield)\b", part))
    indentation = _indentation(prompt)
    for part in parts:
        variants = (
            part,
            indentation + part.lstrip(),  # the indentation of the first line was lost
            textwrap.indent(textwrap.dedent(part), indentation),
        )
        longest = max((_longest_part(prompt, code) for code in variants), key=len)
        for code in (*(f"{code}\n" for code in variants), longest):
            if _has_body(prompt + code, entry):
                return _trim("", [prompt + code], entry)
    return None


def _stub(prompt: str) -> str:
    """Return the question's definitions, with ``pass`` as the body of the function."""
    return f"{prompt}{_indentation(prompt)}pass\n\n"


def _indentation(prompt: str) -> str:
    """Return the indentation of the body of the function that a prompt begins."""
    last = prompt.rstrip().rpartition("\n")[2]
    return last[: len(last) - len(last.lstrip())] or "    "


def _has_body(source: str, entry: str) -> bool:
    """Return whether ``source`` defines ``entry`` with a body beyond a docstring."""
    functions = [
        node for node in _statements(source) if isinstance(node, _FUNCTIONS) and node.name == entry
    ]
    return bool(functions) and not all(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for node in functions[-1].body
    )


def _trim(before: str, parts: Sequence[str], entry: str) -> str:
    """Append valid parts to ``before``, without statements after ``entry``, such as main guards.

    Definitions are kept, and values that they use, unless these come from ``entry`` or from an
    input, as in tests and programs. Imports from ``__future__`` are moved to the beginning.
    """
    code, body = "".join(parts), [node for part in parts for node in _statements(part)]
    last = max((at for at, node in enumerate(body) if entry in _defined_names(node)), default=0)
    used = _used_names(*(node for node in body if isinstance(node, _DEFINITIONS)))
    removed = {*_INPUTS}  # and the names whose values are removed
    values: set[int] = set()  # assignments after `entry` that read none of these
    for index, node in enumerate(body[last + 1 :], last + 1):
        names, assigns = _used_names(node), isinstance(node, (ast.Assign, ast.AnnAssign))
        if assigns and not names & removed and (entry not in names or _is_definition(node)):
            values.add(index)
        elif not isinstance(node, _DEFINITIONS):
            removed |= _stored_names(node)
    kept: list[ast.stmt] = []
    future: list[ast.stmt] = []
    for index, node in reversed([*enumerate(body)]):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            future.append(node)
        elif (
            index <= last
            or isinstance(node, _DEFINITIONS)
            or (index in values and (_is_definition(node) or used & _defined_names(node)))
        ):
            kept.append(node)
            used |= _used_names(node)
    if len(kept) == len(body):
        return before + code
    try:
        imports, rest = (ast.unparse(ast.Module(nodes[::-1], [])) for nodes in (future, kept))
    except (ValueError, RecursionError):
        return before + code
    return f"{imports}\n{before}{rest}\n"


def _is_definition(node: ast.stmt) -> bool:
    """Return whether a statement is an import, a definition, or an assignment without a call."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return not any(isinstance(item, ast.Call) for item in ast.walk(node))
    return isinstance(node, _DEFINITIONS)
