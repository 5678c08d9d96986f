"""Run the program of an answer, in a sandbox wherever there is one."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from eagle_fsd.evaluation.code_execution.programs import Program
from eagle_fsd.evaluation.code_execution.sandbox import SandboxError, check_sandbox, start_child
from eagle_fsd.utils.files import append_line, read_jsonl, truncate_partial_line
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.text import escape_control_chars, one_line

log = logging.getLogger(__name__)

#: Maximum address space of each process in MiB.
_MAX_MEGABYTES = 512
#: Number of bytes of a verdict that are read; ``child.py`` writes fewer.
_VERDICT_BYTES = 8192


@dataclass(frozen=True)
class RunResult:
    """The outcome of a program."""

    passed: bool
    reason: str = ""  # why it did not pass, in one line
    timed_out: bool = False  # on wall-clock time


@functools.cache
def use_sandbox(unsafe: bool) -> bool:
    """Return whether there is a sandbox; if not, raise OptionsError unless ``unsafe`` is set."""
    try:
        check_sandbox()
    except SandboxError as error:
        text = (
            f"{error}. Without a sandbox, --execute-code is not a security boundary: the code"
            " in answers can read your files and environment and use the network."
        )
        if not unsafe:
            raise OptionsError(
                f"{text} Install or permit bubblewrap, or add --unsafe to run the code anyway, for"
                " instance in a container"
            ) from error
        log.warning("%s", text)
        return False
    return True


def run_program(program: Program, sandboxed: bool = True, seconds: float = 10.0) -> RunResult:
    """Run an answer and its tests in two processes, each in a sandbox of its own.

    The process of the answer receives its code and the arguments of each call, and sends the
    results. The process of the tests compares them and decides. Arguments and results are sent as
    literals of built-in types. ``seconds`` limits wall-clock and CPU time. For what applies without
    a sandbox, see :func:`~eagle_fsd.evaluation.code_execution.sandbox.start_child`.
    """
    limits = max(1, round(seconds)), _MAX_MEGABYTES
    with (
        tempfile.TemporaryFile() as job,
        tempfile.TemporaryFile() as verdict,  # not a pipe, because the size of files is limited
        ExitStack() as stack,
    ):
        job.write(ascii((program.code, program.tests, program.entry_point)).encode())
        job.seek(0)
        request_reader, request_writer = os.pipe()
        reply_reader, reply_writer = os.pipe()
        try:
            stack.enter_context(
                start_child(
                    "answer", limits, sandboxed=sandboxed, stdin=request_reader, stdout=reply_writer
                )
            )
            checker = stack.enter_context(
                start_child(
                    "checker",
                    limits,
                    sandboxed=sandboxed,
                    stdin=job,
                    stdout=verdict,
                    descriptors=(reply_reader, request_writer),
                )
            )
        finally:
            for descriptor in (request_reader, request_writer, reply_reader, reply_writer):
                os.close(descriptor)
        try:
            checker.wait(seconds)
        except subprocess.TimeoutExpired:
            return RunResult(False, f"timed out after {seconds:g} s", timed_out=True)
        verdict.seek(0)
        return _parse(verdict.read(_VERDICT_BYTES).decode("ascii", "replace"))


def _parse(verdict: str) -> RunResult:
    """Read the output of a checker, which ``child.py`` describes."""
    started, _, rest = verdict.partition("\n")
    outcome, _, reason = rest.partition("\n")
    if not started or outcome == "no answer":
        raise SandboxError("the process of an answer or of its tests did not start")
    if outcome == "passed":
        return RunResult(True)
    return RunResult(False, escape_control_chars(one_line(reason)) or "the tests did not finish")


class CachedRunner:
    """Run each program once with :func:`run_program`, and cache its outcome in a file.

    Timeouts are not saved, because the machine may be less busy the next time.
    """

    def __init__(self, path: str | Path, unsafe: bool = False) -> None:
        self.path, self.unsafe, self.count = Path(path), unsafe, 0
        self._results: dict[str, RunResult] = {}
        if self.path.exists():
            truncate_partial_line(self.path)
            for row in read_jsonl(self.path):
                self._results[row["program"]] = RunResult(row["passed"], row["reason"])

    def __call__(self, program: Program) -> RunResult:
        """Return the outcome of ``program``, running it if it is not cached."""
        sandboxed = use_sandbox(self.unsafe)
        parts = [program.code, program.tests, program.entry_point, sandboxed]
        key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        if key not in self._results:
            result = self._results[key] = run_program(program, sandboxed)
            self.count += 1
            if not result.timed_out:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                row = {"program": key, "passed": result.passed, "reason": result.reason}
                append_line(self.path, json.dumps(row))
        return self._results[key]
