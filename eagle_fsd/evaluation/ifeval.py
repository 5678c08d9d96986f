"""Score answers to IFEval by programs: the checkers of lm-evaluation-harness.

A prompt of IFEval (Zhou et al., "Instruction-Following Evaluation for Large Language Models", arXiv
2311.07911) holds one to three instructions that a program can check. An answer follows an
instruction strictly as it is, or loosely if it does without its first line, its last line or the
asterisks of Markdown.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.utils.options import OptionsError

#: Sentences that some checkers count are found with this model of NLTK.
SENTENCE_MODEL = "tokenizers/punkt_tab"
#: A package that contains the model, where it is found and never imported.
MODEL_PACKAGE, MODEL_FOLDER = "llama_index", "core/_static/nltk_cache"


@cache
def load_checkers() -> Any:
    """Import the harness's module; raises OptionsError if it or the sentence model is missing.

    The module would download the model on import.
    """
    try:
        nltk = importlib.import_module("nltk")
        package = importlib.util.find_spec(MODEL_PACKAGE)
        for folder in package.submodule_search_locations or () if package is not None else ():
            nltk.data.path.append(str(Path(folder) / MODEL_FOLDER))
        nltk.data.find(SENTENCE_MODEL)
        # The language of a short text is guessed at random otherwise.
        importlib.import_module("langdetect").DetectorFactory.seed = 0
        return importlib.import_module("lm_eval.tasks.ifeval.utils")
    except ImportError as error:
        raise OptionsError(
            f"IFEval is scored with lm-evaluation-harness ({error}): install it with"
            ' pip install "eagle_fsd[ifeval]"'
        ) from error
    except LookupError as error:
        raise OptionsError(
            "IFEval is scored with NLTK's sentence tokenizer punkt_tab, which is not installed: run"
            " python -m nltk.downloader punkt_tab, or pip install --no-deps llama-index-core, which"
            " contains it"
        ) from error


def check(question: Question, answer: str) -> dict[str, Any]:
    """Check an answer to one of IFEval's prompts; the fields are those of the harness."""
    found: dict[str, Any] = load_checkers().process_results(question.row, [answer])
    return found


def accuracies(checks: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the four accuracies of IFEval: of whole prompts and of instructions."""
    found, rates = list(checks), {}
    for name, level in (("prompt", "prompt"), ("instruction", "inst")):
        for mode in ("strict", "loose"):
            flags = np.hstack([item[f"{level}_level_{mode}_acc"] for item in found])
            rates[f"{name}, {mode}"] = float(flags.mean())
    return rates
