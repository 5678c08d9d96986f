"""Extraction of code from answers, and its execution.

Most programs of this file are trusted, so they run in this process, which is faster than the
sandbox.
"""

from __future__ import annotations

import ast
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from published import published

from eagle_fsd.evaluation.code_execution.execution import CachedRunner, RunResult, run_program
from eagle_fsd.evaluation.code_execution.programs import Program, build_program
from eagle_fsd.evaluation.questions.formats import read_questions
from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.evaluation.scoring import score


def run_trusted(program: Program) -> RunResult:
    """Run a program in this process."""
    # The dataclasses module looks up the module of a class.
    module = sys.modules["answer"] = types.ModuleType("answer")
    namespace: dict[str, Any] = {}
    try:
        exec(compile(program.code, "<answer>", "exec"), module.__dict__)
        exec(compile(program.tests, "<tests>", "exec"), namespace)
        namespace[program.entry_point] = module.__dict__[program.entry_point]
        namespace["check"](namespace[program.entry_point])
    except (Exception, SystemExit) as error:
        return RunResult(False, repr(error))
    finally:
        del sys.modules["answer"]
    return RunResult(True)


def is_correct(question: Question, answer: str) -> bool | None:
    return score(question, answer, run=run_trusted)


PROMPT = '''from typing import List


def twice(values: List[int]) -> List[int]:
    """ Each value twice as large.
    >>> twice([1])
    [2]
    """
'''
TEST = """def check(candidate):
    assert candidate([1, 2]) == [2, 4]
    assert candidate([]) == []
"""
TWICE = Question(
    "x", "humaneval", ("",), "code", TEST, row={"prompt": PROMPT, "entry_point": "twice"}
)
WHOLE = "def twice(values):\n    return [2 * value for value in values]\n"
WRONG = "def twice(values):\n    return values\n"

RIGHT_ANSWERS = {
    "body": "    return [2 * value for value in values]",
    "body without its first indentation": "found = []\n    for value in values:\n"
    "        found.append(2 * value)\n    return found",
    "body without any indentation": "found = []\nfor value in values:\n"
    "    found.append(2 * value)\nreturn found",
    "body and another function": "return [2 * v for v in values]\n\n\ndef other():\n    pass",
    "body and prose": "    return [2 * v for v in values]\n\n\nThis doubles it.",
    "body and a fence without a beginning": "    return [2 * v for v in values]\n```\nDone.",
    "body in a block, unindented": "```python\nfound = [2 * v for v in values]\nreturn found\n```",
    "block": f"Here:\n```python\n{WHOLE}```\nDone.",
    "Python with attributes": f"```Python title=a.py\n{WHOLE}```",
    "tildes": f"Here:\n~~~python\n{WHOLE}~~~\nDone.",
    "four ticks": f"````\n{WHOLE}````",
    "block in a list": "1. So:\n   ```python\n"
    "   def twice(values):\n       return [2 * v for v in values]\n   ```",
    "carriage returns": f"```python\n{WHOLE}```".replace("\n", "\r\n"),
    "truncated": f"```python\n{WHOLE}\n# As in\nprint(twice([1",
    "several blocks": f"Use it like this:\n```python\ntwice([1]) == [2]\n```\n"
    f"It is\n```python\n{WHOLE}```\nand to try it\n```python\nassert twice([1]) == [3]\n```",
    "a correction": f"```python\n{WRONG}```\nNo, that is wrong:\n```python\n{WHOLE}```",
    "a helper in a separate block": "```python\ndef double(value):\n    return 2 * value\n```\n"
    "```python\ndef twice(values):\n    return [double(value) for value in values]\n```",
    "two values in a separate block": "```python\nONE, TWO = 1, 2\n```\n"
    "```python\ndef twice(values):\n    return [TWO * value for value in values]\n```",
    "an import in a separate block": "```python\nimport operator\n```\n"
    "```python\nfrom __future__ import annotations\n\n\ndef twice(values):\n"
    "    return [operator.mul(2, value) for value in values]\n```\n"
    "```python\nimport missing\nfrom answer import twice\nprint(twice([1]))\n```",
    "a helper after the function": "```python\ndef twice(values):\n"
    "    return [double(value) for value in values]\n\n\n"
    "def double(value):\n    return 2 * value\n```",
    "values that calls assign after the function": "```python\nfrom functools import cache\n\n\n"
    "def twice(values):\n    return [double(value) for value in values]\n\n\n"
    "TWO = len([1, 1])\ndouble = cache(lambda value: TWO * value)\n"
    "values = sys.stdin.read().split()\nvalue = twice(values)\nassert value == [3]\n```",
    "a value computed from a call": (
        f"```python\n{WHOLE}\nfound = twice([1])\npassed = found == [2]\nprint(passed)\n```"
    ),
    "imports": f"```python\nfrom __future__ import annotations\nimport math\n\n{WHOLE}```",
    "the prompt again": f"```python\n{PROMPT}    return [2 * value for value in values]\n```",
    "a main guard": f"```python\n{WHOLE}\n\n"
    'if __name__ == "__main__":\n    raise SystemExit(input())\n```',
    "a main guard after a body": "    return [2 * v for v in values]\n\n"
    'if __name__ == "__main__":\n    import sys\n    sys.exit(0)\n',
    "statements that call the function": f"```python\n{WHOLE}\nn = int(input())\nprint(twice(n))\n"
    "assert twice([1]) == 3\n```",
    "prose without fences": f"Here is the function:\n\nimport math\n{WHOLE}\nHope this helps!",
    "a lambda": "```python\ntwice = lambda values: [2 * value for value in values]\n```",
    "ticks in the docstring": "```python\ndef twice(values):\n"
    '    """Like ```x```."""\n    return [2 * v for v in values]\n```',
    "prose after a line of code": f"import math\nmath it is.\n\n{WHOLE}\nHope this helps (",
    "truncated in a string": f'{WHOLE}\n\ndef other():\n    """Not',
    "a dataclass": "```python\nfrom __future__ import annotations\nimport dataclasses\n\n\n"
    "@dataclasses.dataclass\nclass Pair:\n    kept: dataclasses.InitVar[int]\n"
    "    value: int = 2\n\n\ndef twice(values):\n"
    "    return [Pair(1).value * v for v in values]\n```",
    "after reasoning": f"<think>```python\n{WRONG}```</think>```python\n{WHOLE}```",
}
WRONG_ANSWERS = {
    "nothing": "",
    "a wrong body": "return values",
    "another function": "```python\ndef thrice(values):\n    return [2 * v for v in values]\n```",
    "a stub": "```python\ndef twice(values):\n    ...\n```",
    "no code": "```python\n```",
    "null character": "```python\n\0\n```",
    "nested too deeply": "```python\n" + "(" * 5000 + "\n```",
    "an exit": "```python\nimport sys\nsys.exit(0)\n" + WHOLE + "```",
    "correct, then wrong": f"```python\n{WHOLE}```\n```python\n{WRONG}```",
}


def test_code_is_found_in_every_form() -> None:
    for name, answer in RIGHT_ANSWERS.items():
        program = build_program(TWICE, answer)
        result = run_trusted(program)
        assert result.passed, (name, result.reason, program)
    for name, answer in WRONG_ANSWERS.items():
        assert is_correct(TWICE, answer) is False, name


def test_questions_need_not_end_with_a_line_break() -> None:
    question = replace(TWICE, row={**TWICE.row, "prompt": PROMPT.rstrip()})
    for name in ("block", "body", "body without any indentation"):
        assert is_correct(question, RIGHT_ANSWERS[name]), name


def test_every_canonical_solution_of_human_eval_passes() -> None:
    """A whole function in a code block passes, and a stripped body gives the same program."""
    questions = read_questions(published("HumanEval.jsonl.gz"))
    assert len(questions) == 164
    for item in questions:
        whole = f"Here it is:\n```python\n{item.row['prompt']}{item.reference}\n```\nDone."
        assert is_correct(item, whole), item.question_id
        # The code of the stripped body is the published one.
        stripped = build_program(item, item.reference.strip())
        assert ast.dump(ast.parse(stripped.code)) == ast.dump(
            ast.parse(f"{item.row['prompt']}{item.reference}")
        ), item.question_id
    for item in questions[:10]:
        assert not is_correct(item, "```python\n    return None\n```")


@pytest.mark.usefixtures("sandbox")
def test_canonical_solutions_pass_in_the_sandbox() -> None:
    """The tests of 32, 38 and 50 call functions that the question defines."""
    questions = read_questions(published("HumanEval.jsonl.gz"))
    for item in [questions[index] for index in (0, 32, 38, 50)]:
        result = run_program(build_program(item, item.reference))
        assert result.passed, (item.question_id, result.reason)


@pytest.mark.usefixtures("sandbox")
def test_cached_programs_are_not_run_again(tmp_path: Path) -> None:
    """Outcomes are reused by the same runner and by one that resumes from its file."""
    assert score(TWICE, WHOLE) is None  # without permission
    path = tmp_path / "runs" / "code.jsonl"
    runs = CachedRunner(path)
    assert score(TWICE, WHOLE, run=runs) is True
    assert score(TWICE, WRONG, run=runs) is False
    assert runs.count == 2
    assert score(TWICE, f"```python\n{WHOLE}```", run=runs) is True
    with path.open("a") as file:
        file.write('{"program": "partial')
    again = CachedRunner(path)
    assert score(TWICE, WHOLE, run=again) is True
    assert score(TWICE, WRONG, run=again) is False
    assert again.count == 0
    assert "AssertionError" in again(build_program(TWICE, WRONG)).reason
    assert score(TWICE, "return []", run=again) is False
    assert again.count == 1
    assert score(TWICE, "return []", run=CachedRunner(path)) is False
