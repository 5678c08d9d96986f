"""The entry point, :func:`diagnose`, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eagle_fsd.evaluation.doctor.checks import (
    Finding,
    TrainingText,
    check_depth,
    check_length,
    check_settings,
    check_training_text,
    check_tree,
)
from eagle_fsd.evaluation.doctor.measurements import (
    DepthRow,
    LengthRow,
    Measurements,
    complete_steps,
    mean,
)
from eagle_fsd.evaluation.doctor.templates import RawTemplate
from eagle_fsd.model.config import TreeConfig
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
        drafter: Name of the drafter's class.
        tree: Shape of the draft trees.
        tokens: Number of tokens of the answers to the questions.
        tau: Mean accepted length of exact greedy decoding.
        agreement: Share of the answer tokens that the drafter predicts from the target's states;
            None if it is not a network.
        findings: The findings; problems should be repaired in this order.
        by_length: Tau and agreement by context length.
        by_depth: Acceptance by depth in a chain.
    """

    drafter: str
    tree: TreeConfig
    tokens: int
    tau: float
    agreement: float | None
    findings: list[Finding]
    by_length: list[LengthRow]
    by_depth: list[DepthRow]

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
        values = {**asdict(self), "tree": self.tree.model_dump()}
        return {**values, "healthy": self.healthy, "next_step": self.next_step}


def diagnose(
    model: EagleFSD,
    questions: Sequence[str],
    chat_template: ChatTemplate | None = None,
    training_texts: Sequence[TrainingText] = (),
    max_new_tokens: int = 64,
    progress: ProgressFactory = no_progress,
) -> Diagnosis:
    """Measure a pair with exact greedy decoding, and look for causes of a low tau.

    Args:
        model: The pair, with a tokenizer.
        questions: Messages of users, at least one.
        chat_template: How chats are formatted; default: not at all.
        training_texts: Chats that the drafter was, or will be, trained on.
        max_new_tokens: Maximum number of tokens per answer, at least 2.
        progress: Reports progress.

    Raises:
        ValueError: No question leaves room for an answer, the chat template rejects one, or the
            pair cannot decode.
    """
    measured = Measurements(model, questions, chat_template or RawTemplate(), max_new_tokens)
    with progress("decoding") as advance:
        measured.decode(advance)
    findings, agreement = [], measured.agreement
    if agreement is not None:
        with progress("testing causes") as advance:
            findings = check_settings(measured, agreement, advance)
        if training_texts:
            with progress("reading training text") as advance:
                findings.append(check_training_text(model.target, training_texts, advance))
        findings += [check_length(measured, agreement), check_depth(measured)]
    findings.append(check_tree(measured))
    return Diagnosis(
        drafter=type(model.drafter).__name__,
        tree=model.tree,
        tokens=sum(len(answer.ids) - answer.start for answer in measured.short),
        tau=mean(complete_steps(measured.short)),
        agreement=None if agreement is None else mean(agreement.own.tolist()),
        findings=findings,
        by_length=measured.by_length,
        by_depth=measured.by_depth,
    )
