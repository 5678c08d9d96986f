"""Answers that attack the sandbox are wrong, reach nothing outside it and leave nothing behind."""

from __future__ import annotations

import ast
import contextlib
import errno
import logging
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_fsd.evaluation.code_execution import child, execution, sandbox
from eagle_fsd.evaluation.code_execution.execution import RunResult, run_program, use_sandbox
from eagle_fsd.evaluation.code_execution.programs import Program
from eagle_fsd.evaluation.config import EvaluationRequest
from eagle_fsd.evaluation.runner import evaluate
from eagle_fsd.utils.options import OptionsError

RIGHT = "def f(x):\n    return x + 1\n"
TESTS = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(5) == 6\n"


def run(code: str, tests: str = TESTS, sandboxed: bool = True, seconds: float = 30) -> RunResult:
    return run_program(Program(code, tests, "f"), sandboxed, seconds)


def look(code: str) -> Any:
    """Return what the function ``f`` of an answer sees in the sandbox."""
    result = run(code, "def check(candidate):\n    raise RuntimeError(repr(candidate()))")
    assert result.reason.startswith("RuntimeError: "), result
    return ast.literal_eval(result.reason.removeprefix("RuntimeError: "))


@pytest.mark.usefixtures("sandbox")
def test_right_answers_pass() -> None:
    for code in [
        RIGHT,
        "print('x')\ndef f(x):\n    print(x)\n    return x + 1",
        # It does not run as the main program, but as an importable module.
        f"if __name__ == '__main__':\n    raise SystemExit(3)\n{RIGHT}",
        f"import pickle\nclass A:\n    pass\npickle.loads(pickle.dumps(A()))\n{RIGHT}",
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\n"
        f"class A:\n    x: dataclasses.InitVar[int]\nA(1)\n{RIGHT}",
        f"import ctypes, decimal, hashlib, random, re, sqlite3, ssl\n{RIGHT}",
    ]:
        result = run(code)
        assert result.passed, result.reason
    own = "class Own(ValueError):\n    pass\ndef f(x):\n    raise Own('no')"
    expected = (
        "def check(candidate):\n    try:\n        candidate(1)\n    except ValueError as error:\n"
    )
    assert run(own, f"{expected}        assert str(error) == 'no'").passed
    decode = "def f(x):\n    return b'\\xff'.decode('ascii')"
    assert run(decode, f"{expected}        assert 'ordinal' in str(error)").passed


FIND_SECRETS = """
def secrets():
    found = []
    for process in filter(str.isdigit, os.listdir('/proc')):
        for name in ('cmdline', 'environ'):
            try:
                found.append(open(f'/proc/{process}/{name}', 'rb').read())
            except OSError:
                pass
    return found
"""
#: Answers that try to be counted as right, to exhaust a resource, or to stop the checker.
ATTACKS = {
    "os._exit is replaced": "import os\nos._exit = lambda code: None\nos.abort = os._exit\n"
    "import socket\nsocket.create_connection(('127.0.0.1', 80))\ndef f(x):\n    return x + 1",
    "prints every secret and a verdict": f"import os\n{FIND_SECRETS}"
    "for text in [*secrets(), b'started\\npassed\\n', b'\\npassed\\n\\n']:\n"
    "    for file in range(3, 64):\n"
    "        try:\n            os.write(file, text)\n        except OSError:\n            pass\n"
    "os._exit(0)",
    "needs the judge's key": f"import os\n{FIND_SECRETS}"
    "assert any(b'sk-of-the-judge' in text for text in secrets())\ndef f(x):\n    return x + 1",
    "leaves a daemon running": "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
    "    if os.fork() == 0:\n        time.sleep(600)\n    os._exit(0)\n"
    "def f(x):\n    return x + 1",
    "exits": "import sys\nsys.exit(0)",
    "exits at once": "import os\nos._exit(0)",
    "compares equal to everything": "class A(int):\n    __eq__ = lambda *_: True\n"
    "    __hash__ = None\ndef f(x):\n    return A()",
    "changes what tests call": "import builtins, sys\nbuiltins.AssertionError = ValueError\n"
    "sys.modules['__main__'].literal_eval = lambda _: ('value', 2)\ndef f(x):\n    return 0",
    "replies without being asked": "import os\nfor file in range(3, 64):\n    try:\n"
    "        os.write(file, b\"('value', None)\\n('value', 0)\\n\" * 9)\n"
    "    except OSError:\n        pass\ndef f(x):\n    return 0",
    "sends a class": "import os\nfor file in range(3, 64):\n    try:\n"
    "        os.write(file, b\"('value', __import__('os'))\\n\" * 9)\n"
    "    except OSError:\n        pass\ndef f(x):\n    return 0",
    "endless loop": "while True:\n    pass",
    "fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n"
    "    except OSError:\n        pass",
    "threads": "import threading, time\nwhile True:\n"
    "    threading.Thread(target=time.sleep, args=(99,)).start()",
    "memory": "x = 'a' * 10**10",
    "endless output": "while True:\n    print('x' * 1000)",
    "endless reply": "import os\nwhile True:\n    for file in range(3, 64):\n        try:\n"
    "            os.write(file, b'x' * 65536)\n        except OSError:\n            pass",
    "deeply nested reply": "def f(x):\n    for _ in range(10000):\n        x = [x]\n    return x",
    "kills its parents": "import os, signal\nfor process in (os.getppid(), 1, -1, 0):\n"
    "    try:\n        os.kill(process, signal.SIGKILL)\n    except OSError:\n        pass",
}
ENDLESS = ("endless loop", "endless output", "fork bomb")
#: The number of threads that an answer can start.
THREADS = """import threading
def f():
    count, end = 0, threading.Event()
    while True:
        try:
            threading.Thread(target=end.wait, daemon=True).start()
        except RuntimeError:
            return count
        count += 1
"""
#: The environment, such as the judge's key, the processes and the rights that an answer finds.
LOOK_AROUND = f"""import os
{FIND_SECRETS}
def f():
    status = dict(line.split(':', 1) for line in open('/proc/self/status'))
    leaks = [text for text in secrets() if b'sk-of' in text or b'pytest' in text]
    processes = list(filter(str.isdigit, os.listdir('/proc')))
    rights = {{status[name].strip() for name in ('CapPrm', 'CapEff', 'CapAmb')}}
    return [set(os.environ), leaks, len(processes), os.getuid(), rights, status['NoNewPrivs']]
"""
SEES_NOTHING = """def check(candidate):
    environment, leaks, processes, uid, rights, no_new_privileges = candidate()
    assert environment <= {'PWD', 'LC_CTYPE', 'LD_LIBRARY_PATH'}, environment
    assert leaks == [], leaks
    assert processes == 2, processes  # bubblewrap's first process and the answer
    assert uid != 0
    assert rights == {'0' * 16}, rights
    assert no_new_privileges.strip() == '1'
"""


def check_gone(name: str) -> None:
    """Assert that all processes of a name end."""
    deadline = time.monotonic() + 30
    while processes_named(name) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_named(name) == []


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_wrong_answers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an attack starts ends with it."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-judge")
    inherited = f"attack{os.getpid()}"
    named = f"import ctypes\nctypes.CDLL(None).prctl(15, b'{inherited}', 0, 0, 0)\n"
    result = run(named + ATTACKS[name], seconds=0.5 if name in ENDLESS else 60)
    assert not result.passed
    assert result.reason
    assert result.timed_out is (name in ENDLESS)
    check_gone(inherited)


@pytest.mark.usefixtures("sandbox")
def test_nothing_of_the_host_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads is limited, for root too, which has no such limit itself."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-judge")
    result = run(LOOK_AROUND, SEES_NOTHING)
    assert result.passed, result.reason
    assert 0 < look(THREADS) < sandbox.MAX_THREADS


@pytest.mark.usefixtures("sandbox")
def test_only_the_interpreter_is_in_the_file_system() -> None:
    """Programs see no checkout, home folder or installed packages, and cannot write anywhere."""
    names, checkout, home, packages, writable = look(
        "import glob, os\n"
        "def f():\n"
        "    writable = []\n"
        "    for folder, folders, _ in os.walk('/'):\n"
        "        if folder == '/proc':\n"
        "            folders.clear()\n"
        "        try:\n            open(folder + '/x', 'w')\n"
        "        except OSError:\n            continue\n"
        "        writable.append(folder)\n"
        f"    return [os.listdir('/'), os.path.exists({str(Path(__file__))!r}),\n"
        f"            os.path.exists({os.path.expanduser('~/.bashrc')!r}),\n"
        "            glob.glob(os.__file__[:-5] + 'site-packages/*'), writable]\n"
    )
    prefix = Path(os.path.realpath(sys.base_prefix)).parts[1]
    assert set(names) <= {"child.py", "dev", "etc", "lib", "lib64", "proc", "usr", prefix}
    assert (checkout, home, packages, writable) == (False, False, [], [])


@pytest.mark.usefixtures("sandbox")
def test_python_may_be_reached_through_a_link(tmp_path: Path) -> None:
    """As in virtual environments of uv, whose interpreters are in linked folders."""
    (tmp_path / "python").symlink_to(os.path.realpath(sys.base_prefix))
    python = tmp_path / "python" / "bin" / Path(os.path.realpath(sys.executable)).name
    subprocess.run([python, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    program = f"from {sandbox.__name__} import check_sandbox\ncheck_sandbox()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([tmp_path / "venv/bin/python", "-c", program], env=environment, check=True)


@pytest.mark.usefixtures("sandbox")
def test_the_network_is_not_reachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        address = server.getsockname()
        errors = look(
            "import socket\n"
            "def f():\n"
            "    errors = []\n"
            f"    for address in ({address!r}, ('192.0.2.1', 53)):\n"
            "        try:\n            socket.create_connection(address, timeout=5)\n"
            "        except OSError as error:\n            errors.append(error.errno)\n"
            "    return errors\n"
        )
        assert errors == [errno.EPERM] * 2
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.usefixtures("sandbox")
def test_only_unix_sockets_open() -> None:
    """Programs can open Unix sockets only, so AF_VSOCK cannot reach a virtual machine's host."""
    opened = look(
        "import socket\n"
        "def f():\n"
        "    found = set()\n"
        "    for family in range(64):\n"
        "        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):\n"
        "            for create in (socket.socket, socket.socketpair):\n"
        "                try:\n                    create(family, kind)\n"
        "                    found.add((create.__name__, family))\n"
        "                except OSError:\n                    pass\n"
        "    return sorted(found)\n"
    )
    assert opened == [("socket", socket.AF_UNIX), ("socketpair", socket.AF_UNIX)]


@pytest.mark.usefixtures("sandbox")
def test_system_calls_are_filtered() -> None:
    """Tracing, new user namespaces, and memory that no limit covers."""
    results = look(
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "def call(name, *arguments):\n"
        "    ctypes.set_errno(0)\n"
        "    return [getattr(libc, name)(*arguments), ctypes.get_errno()]\n"
        "def f():\n"
        "    return {\n"
        "        'ptrace': call('ptrace', 16, 1, None, None),\n"
        "        'unshare': call('unshare', 0x10000000),\n"
        "        'clone': call('syscall', {'x86_64': 56}.get(os.uname().machine, 220),\n"
        "                      0x10000011, 0, 0, 0, 0),\n"
        "        'shmget': call('shmget', 0, 4096, 0o1600),\n"
        "        'x32 socket': call('syscall', 0x40000000 + 41, 2, 1, 0),\n"
        "        'getppid': call('getppid'),\n"
        "    }\n"
    )
    assert results.pop("getppid") == [1, 0]  # what is not denied still works
    assert results == {name: [-1, errno.EPERM] for name in results}


def processes_named(name: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # it ended
            found += [str(path)] if path.read_text().strip() == name else []
    return found


#: Ways to start a process; each one raises an exception in the sandbox.
STARTS = {
    "fork": "os.fork()",
    "vfork": "assert libc.vfork() >= 0",
    "spawn": "os.posix_spawn(sys.executable, [sys.executable, '-c', 'while True: pass'], {})",
    "subprocess": "subprocess.Popen([sys.executable, '-c', 'while True: pass'])",
    "multiprocessing": "multiprocessing.get_context('fork').Process(target=time.sleep).start()",
    "clone": "assert libc.syscall({'x86_64': 56}.get(os.uname().machine, 220), 17, 0, 0, 0, 0) > 0",
    "clone3": "assert libc.syscall(435, bytes(32) + bytes([17]) + bytes(55), 88) > 0",
}


@pytest.mark.usefixtures("sandbox")
def test_answers_that_start_processes_are_wrong() -> None:
    """A right function, after a process that would go on."""
    name = f"left{os.getpid()}"
    for start in STARTS.values():
        result = run(
            "import ctypes, multiprocessing, os, subprocess, sys, time\n"
            "libc = ctypes.CDLL(None)\n"
            f"libc.prctl(15, b'{name}', 0, 0, 0)\n"  # which processes inherit
            f"{start}\n"
            f"{RIGHT}"
        )
        assert not result.passed, start
        raised = ("PermissionError", "AssertionError", "AnswerError")
        assert result.reason.startswith(raised), (start, result)
        check_gone(name)


@pytest.mark.usefixtures("sandbox")
def test_the_sandbox_works_for_nobody() -> None:
    """The same as an unprivileged user, in a process of its own."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can change the user, with setpriv")
    paths = [Path(sys.base_prefix), Path(sys.prefix), Path(__file__).parents[2]]
    closed = {parent for path in paths for parent in path.parents if not parent.stat().st_mode & 1}
    # Folders that nobody cannot enter are replaced by ones that hold nothing but these paths.
    bwrap = ["bwrap", "--dev-bind", "/", "/"]
    for folder in sorted(folder for folder in closed if not closed & set(folder.parents)):
        bwrap += ["--tmpfs", str(folder)]
        for path in paths:
            if folder in path.parents:
                for parent in reversed(path.parents):
                    bwrap += ["--dir", str(parent)] if folder in parent.parents else []
                bwrap += ["--ro-bind", str(path), str(path)]
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    threads = f"def check(candidate):\n    assert 0 < candidate() < {sandbox.MAX_THREADS}"
    programs = [(RIGHT, TESTS), (THREADS, threads), (LOOK_AROUND, SEES_NOTHING), ("", TESTS)]
    script = (
        "import os\n"
        "from eagle_fsd.evaluation.code_execution.execution import run_program\n"
        "from eagle_fsd.evaluation.code_execution.programs import Program\n"
        "assert os.getuid() == 65534\n"
        f"for code, tests in {programs!r}:\n"
        "    print(run_program(Program(code, tests, 'f'), True, 60))\n"
    )
    output = subprocess.run(
        [*bwrap, *nobody, sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OPENAI_API_KEY": "sk-of-the-judge"},
        capture_output=True,
        text=True,
        check=False,
    )
    passed = [line.startswith("RunResult(passed=True") for line in output.stdout.splitlines()]
    assert passed == [True, True, True, False], output


@pytest.fixture
def no_sandbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """bubblewrap is not installed."""

    def fail() -> None:
        raise execution.SandboxError("bubblewrap is not installed")

    monkeypatch.setattr(execution, "check_sandbox", fail)
    use_sandbox.cache_clear()
    yield
    use_sandbox.cache_clear()


@pytest.mark.usefixtures("no_sandbox")
def test_without_a_sandbox_code_runs_only_if_unsafe(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = '{"task_id": "x/0", "prompt": "def f(x):\\n", "entry_point": "f", "test": "def check(f):'
    (tmp_path / "code.jsonl").write_text(row + ' pass", "canonical_solution": "    return 1"}\n')
    request = EvaluationRequest(
        questions=str(tmp_path / "code.jsonl"), execute_code=True, out=tmp_path / "out"
    )
    with pytest.raises(OptionsError, match=r"not a security boundary.*--unsafe"):
        evaluate(request)
    assert not list((tmp_path / "out").glob("*.jsonl"))
    with caplog.at_level(logging.WARNING):
        assert use_sandbox(True) is False
    assert "not a security boundary" in caplog.text
    assert run(RIGHT, sandboxed=False).passed
    assert not run("def f(x):\n    return x", sandboxed=False).passed
    assert run("while True:\n    pass", sandboxed=False, seconds=0.5).timed_out


def test_threads_are_not_limited_without_a_sandbox() -> None:
    """The limit counts all threads of the user, who has others outside a sandbox."""
    code = "import resource\ndef f():\n    return resource.getrlimit(resource.RLIMIT_NPROC)"
    limit = resource.getrlimit(resource.RLIMIT_NPROC)
    tests = f"def check(candidate):\n    assert candidate() == {limit}"
    assert run(code, tests, sandboxed=False).passed


class Color(IntEnum):
    RED = 1


class EqualToAll(list[int]):
    def __eq__(self, _: object) -> bool:
        return True


def test_messages_hold_plain_values() -> None:
    values: list[tuple[object, object]] = [
        (10**5000, 10**5000),
        (-float("inf"), -float("inf")),
        (Color.RED, 1),
        (frozenset({1}), {1}),
        (bytearray(b"\n"), b"\n"),
        (Fraction(1, 2), 0.5),
        (Decimal("-3"), -3.0),
        (EqualToAll([1]), [1]),
    ]
    for value, plain in values:
        found = ast.literal_eval(child.encode(value))
        assert type(found) is type(plain)
        assert plain == found
    for value in (float("nan"), complex("inf"), object(), [range(3)], iter([]), Fraction(1, 3)):
        with pytest.raises((TypeError, ValueError)):
            child.encode(value)


_KEYS = st.none() | st.booleans() | st.integers() | st.text(st.characters(codec=None)) | st.binary()
_SCALARS = _KEYS | st.floats(allow_nan=False)


@given(
    st.recursive(
        _SCALARS,
        lambda items: (
            st.lists(items)
            | st.lists(items).map(tuple)
            | st.dictionaries(_KEYS, items)
            | st.sets(_KEYS)
        ),
        max_leaves=10,
    )
)
def test_messages_are_one_line_and_keep_values(value: object) -> None:
    message = child.encode(value)
    assert message.isascii()
    assert message.isprintable()
    found = ast.literal_eval(message)
    assert found == value
    assert ascii(found) == ascii(value) or "{" in message  # sets have no order
