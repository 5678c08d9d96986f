"""The entry point, :func:`diagnose`, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from torch import Tensor

from eagle_fsd.evaluation.doctor.checks import (
    Finding,
    check_depth,
    check_length,
    check_settings,
    check_training_text,
    check_tree,
)
from eagle_fsd.evaluation.doctor.measurements import Measurements, complete_steps
from eagle_fsd.evaluation.doctor.templates import RawTemplate
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.chat_templates import ChatTemplate
from eagle_fsd.utils.progress import ProgressFactory, no_progress

#: Questions for pairs that no question set was made for.
GENERAL_QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short e-mail that moves a meeting from Tuesday to Thursday.",
    "A train travels 180 km in two and a half hours. What is its average speed?",
    "List five things to check before a long drive.",
    "Write a Python function that returns the median of a list of numbers.",
    "Summarize the plot of Romeo and Juliet in three sentences.",
    "What is the difference between weather and climate?",
    "Translate into French: The library closes at six o'clock.",
    "Describe how to cook rice on a stove.",
    "Who was Marie Curie, and what is she known for?",
    "Give two arguments for and two against working from home.",
    "Write a haiku about the first snow.",
)


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`diagnose` found.

    Attributes:
        measured: The measurements.
        findings: The findings; problems should be repaired in this order.
    """

    measured: Measurements
    findings: list[Finding]

    @property
    def healthy(self) -> bool:
        """Whether no problem was found."""
        return all(finding.level != "problem" for finding in self.findings)

    @property
    def next_step(self) -> str | None:
        """The step that the first problem recommends, or else the first note."""
        for level in ("problem", "note"):
            for finding in self.findings:
                if finding.level == level:
                    return finding.step
        return None

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as JSON-serializable values."""
        measured = self.measured
        agreement = measured.agreement
        return {
            "drafter": type(measured.model.drafter).__name__,
            "tree": measured.model.tree.model_dump(),
            "tokens": sum(sum(answer.accepted) for answer in measured.short),
            "tau": fmean(complete_steps(measured.short)),
            "agreement": None if agreement is None else agreement.mean,
            "findings": [asdict(finding) for finding in self.findings],
            "by_length": [asdict(row) for row in measured.by_length],
            "by_depth": [
                {"depth": depth, "steps": steps, "accepted": accepted}
                for depth, (steps, accepted) in enumerate(measured.by_depth, 1)
            ],
            "healthy": self.healthy,
            "next_step": self.next_step,
        }


def diagnose(
    model: EagleFSD,
    questions: Sequence[str],
    chat_template: ChatTemplate | None = None,
    training_texts: Sequence[tuple[Tensor, Tensor]] = (),
    max_new_tokens: int = 64,
    progress: ProgressFactory = no_progress,
) -> Diagnosis:
    """Measure a pair with exact greedy decoding, and look for causes of a low tau.

    Args:
        model: The pair, with a tokenizer.
        questions: Messages of users, at least one.
        chat_template: How chats are formatted; default: not at all.
        training_texts: See :func:`check_training_text`; default: not checked.
        max_new_tokens: Maximum number of tokens per answer, at least 2.
        progress: Reports progress.

    Raises:
        ValueError: No question leaves room for an answer, the chat template rejects one, or the
            pair cannot decode.
    """
    model = copy(model)
    model.tree = model.exact_tree
    measured = Measurements(model, questions, chat_template or RawTemplate(), max_new_tokens)
    with progress("decoding") as advance:
        for done, answers in enumerate(("short", "chains", "long")):
            advance(done, 3)
            getattr(measured, answers)
    findings = []
    if measured.agreement is not None:
        with progress("testing causes"):
            findings = check_settings(measured, measured.agreement)
            if training_texts:
                findings.append(check_training_text(model.target, training_texts))
        findings += [check_length(measured), check_depth(measured)]
    return Diagnosis(measured, [*findings, check_tree(measured)])
