"""Answers of the bundled pair without a whole evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_fsd import EagleFSD
from eagle_fsd.evaluation.answer_store import Session
from eagle_fsd.evaluation.answering import PairAnswerer
from eagle_fsd.evaluation.config import EvaluationConfig
from eagle_fsd.utils.chat_templates import ChatTemplate, load_chat_template


def answerer(
    model: EagleFSD, folder: Path, template: ChatTemplate | None = None, **options: Any
) -> PairAnswerer:
    """Return what answers questions with some options of decoding."""
    return PairAnswerer(
        model=model,
        chat_template=template or load_chat_template(model.tokenizer),
        config=EvaluationConfig(**options),
        session=Session(folder, {}),
    )
