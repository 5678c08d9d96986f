"""The entry point, :func:`diagnose`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import asdict
from statistics import fmean
from typing import Any

from torch import Tensor

from eagle_fsd.evaluation.doctor import checks
from eagle_fsd.evaluation.doctor.measurements import Measurements, complete_steps
from eagle_fsd.evaluation.doctor.templates import RAW
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


def diagnose(
    model: EagleFSD,
    questions: Sequence[str],
    chat_template: ChatTemplate | None = None,
    training_texts: Sequence[tuple[Tensor, Tensor]] = (),
    max_new_tokens: int = 64,
    progress: ProgressFactory = no_progress,
) -> dict[str, Any]:
    """Measure a pair with exact greedy decoding, and look for causes of a low tau.

    The result is JSON-serializable; problems should be repaired in the order of its ``findings``.
    Without a chat template, messages are a line each. For ``training_texts``, see
    :func:`~eagle_fsd.evaluation.doctor.checks.check_training_text`. Raises ValueError if no
    question leaves room for an answer, or the chat template rejects one.
    """
    acceptance, certificate = model.acceptance, model.certificate_for(model.acceptance)
    model = copy(model)
    model.tree = model.exact_tree
    if model.tree.total_tokens == 1:  # the settings choose plain decoding
        model.tree = TreeConfig.for_device(model.target.device.type)
    measured = Measurements(model, questions, chat_template or RAW, max_new_tokens)
    with progress("decoding") as advance:
        for done, answers in enumerate(("short", "chains", "long")):
            advance(done, 3)
            getattr(measured, answers)  # decodes on first use
    findings, agreement = [], measured.agreement
    if agreement is not None:
        with progress("testing causes"):
            findings = checks.check_settings(measured, agreement)
            if training_texts:
                findings.append(checks.check_training_text(model.target, training_texts))
        findings.append(checks.check_length(measured))
        if measured.by_depth:
            findings.append(checks.check_depth(measured))
        findings += checks.check_gate(measured)
    findings += [*checks.check_speed(measured), checks.check_tree(measured)]
    steps = {finding.level: finding.step for finding in reversed(findings)}
    return {
        "drafter": type(model.drafter).__name__,
        "tree": model.tree.model_dump(),
        "acceptance": "lossless" if acceptance.lossless else acceptance.label,
        "certificate": certificate and certificate.model_dump(),
        "tokens": sum(sum(answer.accepted) for answer in measured.short),
        "tau": fmean(complete_steps(measured.short)),
        "agreement": None if agreement is None else agreement.mean,
        "findings": [asdict(finding) for finding in findings],
        "by_length": measured.by_length,
        "by_depth": measured.by_depth,
        "healthy": "problem" not in steps,
        "next_step": steps.get("problem") or steps.get("note"),
    }
