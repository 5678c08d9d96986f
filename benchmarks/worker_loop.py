"""Shared code of ``revision_worker.py`` and ``eagle_worker.py``; imports no other package."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any


def serve(package: str, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Write the package's folder to standard output, then answer requests until the input ends.

    Requests are read from standard input and results are written to standard output, each as JSON
    on a line. What ``answer`` prints goes to standard error.
    """
    print(json.dumps(package), flush=True)
    for line in sys.stdin:
        with redirect_stdout(sys.stderr):
            result = answer(json.loads(line))
        print(json.dumps(result), flush=True)
