"""The program in an answer to a question of HumanEval's, with the question's tests behind it."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator

from eagle_fsd.evaluation.questions.question import Question

# Code. A fence begins a line (of a list, maybe) or stands after a space or a colon.
_BLOCK = re.compile(
    r"(?:^[ \t>*\d.)-]*|(?<=[\s:]))(?P<fence>`{3,}|~{3,})[^\n`]*\n"
    r"(?P<code>.*?)(?:^[ \t]*(?P=fence)[`~]*[ \t]*$|(?P=fence)[ \t]*$|\Z)",
    re.DOTALL | re.MULTILINE,
)
_CODE_BEGINS = re.compile(r"^(?:(?:from|import|def|async def|class|@\w+)\b|\w+ = )", re.MULTILINE)
#: Lines of an answer without code blocks that are tried as the first line of its code.
_MOST = 20

_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def said(answer: str) -> str:
    """What was said after thinking, its lines ended as Python ends them."""
    return answer.rsplit("</think>", 1)[-1].replace("\r\n", "\n").replace("\r", "\n")


def test_program(question: Question, answer: str) -> str:
    """The code of ``answer`` with the question's tests behind it.

    The last code block that defines the function asked for counts, with what it uses of other
    blocks' functions; without such a block, such code in the text. Other code is taken as the
    body, whose indentation may have been lost. Where code was cut off, or goes on in prose, as much
    of it counts as parses. Main guards, and what only tries the function out behind it, are
    dropped. What the question imports and defines comes along in front.

    The program is otherwise that of OpenAI's human-eval: question, code, tests. OpenAI's
    simple-evals takes the first block; EvalPlus likewise keeps what parses.
    """
    entry, prompt = question.extra["entry_point"], question.extra["prompt"]
    text = said(answer)
    code = _whole_function(text, prompt, entry) or _body(text, prompt, entry) or prompt + text
    return f"{code}\n\n{question.answer}\n\ncheck({entry})\n"


def _blocks(text: str) -> list[str]:
    return [textwrap.dedent(match["code"]) for match in _BLOCK.finditer(text)]


def _parse(source: str) -> ast.Module | None:
    """None where ``source`` is no program."""
    return _parse_or_line(source)[0]


def _parse_or_line(source: str) -> tuple[ast.Module | None, int]:
    """The program, or None and the line that is in the way (0 where that is not known)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
            compile(tree, "<answer>", "exec", dont_inherit=True)  # "return" outside a function
        except SyntaxError as error:
            return None, error.lineno or 0
        except (ValueError, RecursionError, MemoryError, OverflowError):
            return None, 0
    return tree, 0


def _longest_part(before: str, code: str) -> str:
    """As many lines of ``code`` as are a program behind ``before``."""
    lines = code.rstrip().split("\n")
    offset, count = before.count("\n"), len(lines)
    while count > 0:
        part = "\n".join(lines[:count]) + "\n"
        tree, line = _parse_or_line(before + part)
        if tree is not None:
            return part
        # Whatever is in the way there is so without the lines behind it; it may go on into them.
        count = min(count - 1, max(0, line - offset)) if line else count - 1
    return ""


def _names(node: ast.stmt) -> set[str]:
    """What a statement gives a meaning."""
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return set()


def _whole_function(text: str, prompt: str, entry: str) -> str | None:
    """The program of an answer that defines ``entry`` itself."""
    defines = re.compile(rf"^(?:async )?def {re.escape(entry)}\b", re.MULTILINE)
    blocks = [block for block in reversed(_blocks(text)) if entry in block]

    def candidates() -> Iterator[str]:
        yield from blocks
        for block in blocks:
            yield _longest_part("", block)
        for match in reversed(list(defines.finditer(text))[-_MOST:]):
            starts = [at.start() for at in _CODE_BEGINS.finditer(text, 0, match.end())]
            for start in starts[-_MOST:]:
                yield _longest_part("", text[start:])

    for code in candidates():
        tree = _parse(code)
        if tree is not None and any(entry in _names(node) for node in tree.body):
            before, after = "", f"{_indentation(prompt)}pass\n\n"
            for block in _blocks(text):
                before += _helpers(block, tree, entry)
            return _trimmed(f"{prompt}{after}", before + code, entry)
    return None


def _helpers(block: str, tree: ast.Module, entry: str) -> str:
    """What ``block`` defines of what ``tree`` uses and does not define."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used -= {name for node in tree.body for name in _names(node)} | {entry}
    other = _parse(block)
    if other is None or not any(used & _names(node) for node in other.body):
        return ""
    kept = [node for node in other.body if isinstance(node, _DEFINITIONS) or used & _names(node)]
    kept = [node for node in kept if entry not in _names(node)]
    return ast.unparse(ast.Module(kept, [])) + "\n\n"


def _body(text: str, prompt: str, entry: str) -> str | None:
    """The program of an answer that goes on with the question's function."""
    first = _BLOCK.search(text)
    parts = [*_blocks(text), text[: first.start()] if first else text, text]
    parts = [part.strip("\n").rstrip() for part in parts if part.strip()]
    parts.sort(key=lambda part: not re.search(r"\b(?:return|yield)\b", part))  # a stable order
    indentation = _indentation(prompt)
    for part in parts:
        wordings = (
            part,
            indentation + part.lstrip(),  # its first line's was lost
            textwrap.indent(textwrap.dedent(part), indentation),
        )
        for code in wordings:
            if _fills(prompt + code, entry):
                return _trimmed("", f"{prompt}{code}\n", entry)
        longest = max((_longest_part(prompt, code) for code in wordings), key=len)
        if _fills(prompt + longest, entry):
            return _trimmed("", prompt + longest, entry)
    return None


def _indentation(prompt: str) -> str:
    """Of the body of the function that a question begins."""
    last = prompt.rstrip().rpartition("\n")[2]
    return last[: len(last) - len(last.lstrip())] or "    "


def _fills(source: str, entry: str) -> bool:
    """Whether ``entry`` has more of a body than its documentation."""
    tree = _parse(source)
    functions = [
        node
        for node in (tree.body if tree else [])
        if isinstance(node, _FUNCTIONS) and node.name == entry
    ]
    return bool(functions) and not all(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for node in functions[-1].body
    )


def _trimmed(before: str, code: str, entry: str) -> str:
    """``before`` and ``code`` without main guards and what tries ``entry`` out.

    What is imported from ``__future__`` comes first, where it has to be.
    """
    tree = _parse(code)
    if tree is None:
        return before + code
    last = max(at for at, node in enumerate(tree.body) if entry in _names(node))
    kept, future = [], []
    for at, node in enumerate(tree.body):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            future.append(node)
        elif not _is_main_guard(node) and (at <= last or _only_defines(node)):
            kept.append(node)
    if len(kept) == len(tree.body):
        return before + code
    try:
        first, rest = (ast.unparse(ast.Module(nodes, [])) for nodes in (future, kept))
    except (ValueError, RecursionError):
        return before + code
    return f"{first}\n{before}{rest}\n"


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and any(
        isinstance(item, ast.Name) and item.id == "__name__" for item in ast.walk(node.test)
    )


def _only_defines(node: ast.stmt) -> bool:
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return not any(isinstance(item, ast.Call) for item in ast.walk(node))
    return isinstance(node, _DEFINITIONS)
