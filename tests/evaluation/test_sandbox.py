"""The sandbox allows what an answer needs and denies everything else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from eagle_fsd.evaluation.code_execution.sandbox import run_program


def test_a_program_without_errors_passes() -> None:
    assert run_program("import math\nassert math.sqrt(4) == 2").passed
    assert run_program("open('mine.txt', 'w').write('x')\nprint(open('mine.txt').read())").passed


@pytest.mark.parametrize(
    "program",
    [
        # The home folder and the folder of temporary files are the working folder.
        "import os, pathlib\nassert os.path.samefile(pathlib.Path.home(), os.getcwd())",
        "import os\nassert os.path.samefile(os.path.expanduser('~'), os.getcwd())",
        "import os, tempfile\nassert os.path.samefile(tempfile.gettempdir(), os.getcwd())",
        "import tempfile\nwith tempfile.TemporaryFile() as f:\n    f.write(b'x')",
        "import tempfile\nwith tempfile.NamedTemporaryFile() as f:\n    f.write(b'x')",
        "import os, tempfile\nwith tempfile.TemporaryDirectory() as d:\n"
        "    os.mkdir(d + '/a')\n    open(d + '/a/b', 'w').write('x')\n"
        "assert not os.path.exists(d)",
        # It does not run as the main program, but as an importable module.
        "if __name__ == '__main__':\n    raise SystemExit(3)",
        "import pickle\nclass A:\n    pass\npickle.loads(pickle.dumps(A()))",
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\n"
        "class A:\n    x: dataclasses.InitVar[int]\nA(1)",
    ],
)
def test_allowed_operations(program: str) -> None:
    result = run_program(program)
    assert result.passed, result.reason


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("import os\nwhile True: os.fork()", "os.fork"),
        ("import subprocess\nsubprocess.run(['true'])", "subprocess.Popen"),
        ("import os\nos.system('true')", "os.system"),
        ("import multiprocessing as m\nm.Process(target=print).start()", "os.fork"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "socket."),
        ("import urllib.request as u\nu.urlopen('http://127.0.0.1')", "urllib."),
        ("x = 'a' * 10**10", "MemoryError"),
        ("import sys\nsys.exit(0)", "exited before its tests"),
        ("import os\nos._exit(0)", "exited before its tests"),
        ("import ctypes", "ImportError"),
        ("import os\nos.kill(os.getppid(), 9)", "os.kill"),
        ("while True: print('x' * 1000)", "File too large"),
    ],
)
def test_denied_operations_and_errors_fail(program: str, reason: str) -> None:
    result = run_program(program, seconds=5)
    assert not result.passed
    assert reason in result.reason


def test_a_denial_cannot_be_caught() -> None:
    program = "import socket\ntry:\n    socket.socket()\nexcept BaseException:\n    pass"
    assert not run_program(program).passed


@pytest.mark.parametrize(
    "program",
    [
        "open({path!r}, 'w')",
        "open('../out.txt', 'a')",
        "__import__('os').remove({path!r})",
        "import os\nos.chdir({folder!r})\nopen('kept.txt', 'w')",
        "import os\nos.open('kept.txt', os.O_WRONLY, dir_fd=os.open({folder!r}, os.O_RDONLY))",
        "import os\nos.mkdir('made', dir_fd=os.open({folder!r}, os.O_RDONLY))",
        "import os\nos.open({folder!r}, getattr(os, 'O_TMPFILE', os.O_CREAT) | os.O_RDWR)",
        "import os\nos.mkdir('a')\nos.open('a', os.O_RDONLY)",
        "import shutil\nshutil.rmtree({folder!r})",
        "import os\nos.mkdir('a')\n"
        "open('a', opener=lambda path, flags: os.open(path, os.O_RDONLY))",
        "import os\nos.mkfifo({path!r} + '2')",
        "import os\nos.mknod({path!r} + '2')",
        "import _posixsubprocess as p\np.fork_exec([b'touch'], [b'/bin/touch'], *[None] * 20)",
    ],
)
def test_writes_outside_the_folder_are_denied(program: str, tmp_path: Path) -> None:
    path = tmp_path / "kept.txt"
    path.write_text("kept")
    result = run_program(program.format(path=str(path), folder=str(tmp_path)))
    assert not result.passed
    assert "not allowed" in result.reason
    assert path.read_text() == "kept"
    assert [item.name for item in tmp_path.iterdir()] == ["kept.txt"]


def test_an_endless_loop_times_out() -> None:
    start = time.monotonic()
    result = run_program("while True: pass", seconds=1)
    assert not result.passed
    assert time.monotonic() - start < 60


def test_endless_threads_are_killed() -> None:
    loop = "while True: threading.Thread(target=time.sleep, args=(99,)).start()"
    assert not run_program(f"import threading, time\n{loop}", seconds=1).passed
