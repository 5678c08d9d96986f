"""What all tests share: threads, Hypothesis profiles, the bundled pair, and the command line.

The Hypothesis profile ``repeatable`` (the default) draws the same examples in every run.
``pytest --hypothesis-profile explore`` draws more of them, at random.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

# Libraries read these when they are imported, and tests' child processes inherit them.
if "PYTEST_XDIST_WORKER" in os.environ:  # one process per core: more threads would slow it down
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("ACCELERATE_MIXED_PRECISION", "no")  # equal results on all machines
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # servers that tests start do not try to compile

import pytest
from accelerators import reset_accelerator_state
from hypothesis import settings

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.cli import main

# A shell ignores Ctrl-C in background jobs; the programs that tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: importing torch, or a busy machine, may delay an example.
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def model() -> EagleFSD:
    """The bundled pair; tests that change it restore it."""
    return EagleFSD.from_pretrained()


@pytest.fixture
def loaded_once(monkeypatch: pytest.MonkeyPatch, model: EagleFSD) -> None:
    """Commands that load the bundled pair get a copy of the one that is loaded already."""
    load = EagleFSD.from_pretrained

    def from_pretrained(target: Any, drafter: Any, **options: Any) -> EagleFSD:
        if target is not None or drafter is not None or any(options.values()):
            return load(target, drafter, **options)
        pair = copy.copy(model)
        pair.tokenizer = model.tokenizer  # a copy would load its own
        return pair

    monkeypatch.setattr(EagleFSD, "from_pretrained", from_pretrained)


@pytest.fixture
def few_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches measure every step once for a moment, and predict from one recording."""
    chain = TreeConfig(total_tokens=12, depth=10, top_k=1)
    for name, value in (
        ("search.prediction.SECONDS", 0.0),
        ("search.prediction.ROUNDS", 1),
        ("search.search.recorded_trees", lambda: [chain]),
        ("search.search.TIMED_ROUNDS", 1),
        ("tune.BATCHES", (4,)),
        ("tune.BATCH_ROUNDS", 1),
    ):
        monkeypatch.setattr(f"eagle_fsd.evaluation.{name}", value)


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Call ``eagle-fsd`` in this process; returns exit status, standard output, standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        reset_accelerator_state()
        monkeypatch.setattr(sys, "argv", ["eagle-fsd", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
        try:
            main()
            status = 0
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call
