"""Run untrusted programs in a child process with limited rights, memory and time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from eagle_fsd.utils.files import append_line, read_jsonl, truncate_partial_line

_CHILD = Path(__file__).with_name("confined.py")


@dataclass(frozen=True)
class RunResult:
    """The outcome of a program.

    Attributes:
        passed: Whether the program ran to its end without an error.
        reason: Why it did not pass, in one line.
        timed_out: Whether it exceeded the wall-clock limit.
    """

    passed: bool
    reason: str = ""
    timed_out: bool = False


def run_program(program: str, seconds: float = 10.0, megabytes: int = 512) -> RunResult:
    """Run a Python program in a temporary folder, restricted as ``confined.py`` describes.

    Args:
        program: The program's source.
        seconds: Limit on wall-clock time and, rounded to seconds, on CPU time. When it is exceeded,
            the process and its descendants are killed.
        megabytes: Limit on the address space in MiB.

    Returns:
        The outcome.
    """
    token = secrets.token_hex(16)  # printed by the child after the program has ended
    limits = [str(max(1, round(seconds))), str(megabytes)]
    with (
        tempfile.TemporaryDirectory(prefix="answer-") as folder,
        tempfile.TemporaryFile() as output,  # files, because the size of pipes cannot be limited
        tempfile.TemporaryFile() as errors,
    ):
        process = subprocess.Popen(
            [sys.executable, "-I", _CHILD, *limits, token],
            cwd=folder,
            env={
                "PATH": os.environ.get("PATH", ""),
                "OMP_NUM_THREADS": "1",
                **dict.fromkeys(("HOME", "USERPROFILE", "TMPDIR", "TEMP", "TMP"), folder),
            },
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        try:
            process.communicate(program.encode("utf-8", "replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            return RunResult(False, f"timed out after {seconds:g} s", timed_out=True)
        finally:
            _kill(process)
        completed = _read(output).endswith(token)
        messages = _read(errors).strip().splitlines()
    if process.returncode == 0:
        return RunResult(completed, "" if completed else "exited before its tests ran")
    if process.returncode < 0:
        return RunResult(False, f"killed by {signal.Signals(-process.returncode).name}")
    reason = messages[-1][:200] if messages else f"exit status {process.returncode}"
    return RunResult(False, reason)


class CachedRunner:
    """Run each program once with :func:`run_program`, and cache its outcome in a file.

    A program is not run again when an evaluation resumes or another method gives the same answer.
    Timeouts are not saved, because the machine may be less busy the next time.

    Args:
        path: The JSON Lines file of outcomes; created, with its folder, if missing.

    Attributes:
        count: The number of programs that this object has run.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.count = Path(path), 0
        truncate_partial_line(self.path)
        rows = read_jsonl(self.path) if self.path.exists() else []
        self._results = {row["program"]: RunResult(row["passed"], row["reason"]) for row in rows}

    def __call__(self, program: str) -> RunResult:
        """Return the outcome of ``program``, running it if it is not cached."""
        key = hashlib.sha256(program.encode("utf-8", "replace")).hexdigest()
        if key not in self._results:
            result = self._results[key] = run_program(program)
            self.count += 1
            if not result.timed_out:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                row = {"program": key, "passed": result.passed, "reason": result.reason}
                append_line(self.path, json.dumps(row))
        return self._results[key]


def _read(file: IO[bytes]) -> str:
    """Return everything written to a temporary file."""
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its descendants."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
