"""Running the code a model wrote: another process, limited in what it may do and for how long."""

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

from eagle_fsd.evaluation.answer_store import append_line, cut_half_line, read_records

GUARDED = Path(__file__).with_name("guarded.py")


@dataclass(frozen=True)
class RunResult:
    """Whether a program ended by itself without an error, and its last line where it did not."""

    passed: bool
    reason: str = ""
    timed_out: bool = False


def run_program(program: str, seconds: float = 10.0, megabytes: int = 512) -> RunResult:
    """Run ``program`` in a folder of its own, see ``guarded.py``.

    Args:
        seconds: Of wall-clock time; the process and its descendants are killed after it.
        megabytes: Of memory.
    """
    word = secrets.token_hex(16)  # printed at the very end
    limits = [str(max(1, round(seconds))), str(megabytes)]
    with (
        tempfile.TemporaryDirectory(prefix="answer-") as folder,
        tempfile.TemporaryFile() as printed,  # files, not pipes: their size is limited
        tempfile.TemporaryFile() as errors,
    ):
        process = subprocess.Popen(
            [sys.executable, "-I", GUARDED, *limits, word],
            cwd=folder,
            env={
                "PATH": os.environ.get("PATH", ""),
                "OMP_NUM_THREADS": "1",
                **dict.fromkeys(("HOME", "USERPROFILE", "TMPDIR", "TEMP", "TMP"), folder),
            },
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=errors,
            start_new_session=True,
        )
        try:
            process.communicate(program.encode("utf-8", "replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            return RunResult(False, f"no end after {seconds:g} s", timed_out=True)
        finally:
            _kill(process)
        finished = _text(printed).endswith(word)
        lines = _text(errors).strip().splitlines()
    if process.returncode == 0:
        return RunResult(finished, "" if finished else "ended before its tests did")
    if process.returncode < 0:
        return RunResult(False, f"killed by {signal.Signals(-process.returncode).name}")
    return RunResult(False, lines[-1][:200] if lines else f"status {process.returncode}")


class Runs:
    """Runs programs like :func:`run_program`, each only once.

    What came of a program (but for those that took too long) is added to a file, a line each, so
    that an evaluation that is resumed, or whose methods give the same answers, does not run it
    again. Without that file all are.

    Args:
        path: Of the file; made, with its folder, if missing.

    Attributes:
        count: How many programs have been run here.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.count = Path(path), 0
        cut_half_line(self.path)
        lines = read_records(self.path) if self.path.exists() else []
        self._known = {line["program"]: RunResult(line["passed"], line["reason"]) for line in lines}

    def __call__(self, program: str) -> RunResult:
        key = hashlib.sha256(program.encode("utf-8", "replace")).hexdigest()
        if key not in self._known:
            found = self._known[key] = run_program(program)
            self.count += 1
            if found.timed_out:  # on another day the machine may be less busy
                return found
            self.path.parent.mkdir(parents=True, exist_ok=True)
            line = {"program": key, "passed": found.passed, "reason": found.reason}
            append_line(self.path, json.dumps(line))
        return self._known[key]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and everything it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
