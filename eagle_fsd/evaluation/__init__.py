"""Measure how fast and how well decoding methods answer questions.

Start with ``runner.py``: :func:`evaluate` loads a pair, answers questions with each method
(``methods.py``, ``answering.py``), stores the answers (``answer_store.py``), scores them
(``scoring.py``; ``graders.py`` for users' graders) and reports (``report.py``, ``tables.py``).
``servers.py`` compares servers in the same way. ``bench.py``, ``sweep.py`` and ``calibration.py``
build on it; their options are in ``config.py``. ``search`` finds trees and settings for the last
two and for ``tune.py``; ``selection.py`` and ``certificate.py`` are the two halves of a
calibration. ``doctor`` explains a low tau, ``questions`` reads question sets, ``code_execution``
runs generated programs, and ``judge`` has answers rated by a language model.

Importing this package does not import torch; :func:`evaluate` is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle_fsd.evaluation.config import EvaluationConfig, EvaluationRequest

if TYPE_CHECKING:
    from eagle_fsd.evaluation.runner import evaluate

__all__ = ["EvaluationConfig", "EvaluationRequest", "evaluate"]


def __getattr__(name: str) -> Any:
    if name == "evaluate":
        from eagle_fsd.evaluation.runner import evaluate

        return evaluate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
