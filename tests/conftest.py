"""What all tests share: the command line as a function, and Hypothesis profiles.

``repeatable`` (default) draws the same examples on every run, so a failure is never chance;
``pytest --hypothesis-profile explore`` looks further, at random.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import pytest
from accelerators import forget_accelerator
from hypothesis import settings

from eagle_fsd import cli

# A shell's background job ignores Ctrl-C, and so would the programs that tests send it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: a first call into torch, or a busy machine, is not a failure.
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Call ``eagle-fsd`` in this process: (status, standard output, standard error)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        forget_accelerator()
        monkeypatch.setattr(sys, "argv", ["eagle-fsd", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
        try:
            cli.main()
            status = 0
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call
