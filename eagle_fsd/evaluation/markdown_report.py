"""Format a report as Markdown: ``report.md``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from eagle_fsd.evaluation.tables import footnote, markdown, tables
from eagle_fsd.evaluation.verdict import verdict
from eagle_fsd.utils.text import escape_control_chars

#: Maximum number of changed answers.
MAX_ANSWERS = 5
#: What became of a changed answer, with {} for the reference.
OUTCOMES = {
    "lost": "right with {}, wrong here",
    "gained": "wrong with {}, right here",
    "changed": "changed",
}


def report_text(report: dict[str, Any]) -> str:
    """Format verdict, figures, tables, changed answers, and how it was measured as Markdown."""
    sentence = verdict(report)
    others = [item for item in report.get("conclusions", []) if item != sentence]
    parts = [
        f"# Evaluation on {_escape(report['about']['questions'])}",
        *([f"**{_escape(sentence)}**"] if sentence else []),
        *map(_escape, others),
        *(f"![{name}]({name})" for name in report.get("figures", [])),
        *(markdown(*table) for table in [*report.get("tables", []), *tables(report)]),
        *_changed_answers(report.get("comparison"), report.get("reference")),
        _escape(footnote(report)),
    ]
    return "\n\n".join(parts) + "\n"


def _changed_answers(comparison: dict[str, Any] | None, server: str | None) -> list[str]:
    """Format the first changed answers: per turn, a table with the reference's at the left.

    The reference is exact decoding unless it is a ``server``.
    """
    if not comparison or not comparison["answers"]:
        return []
    shown, method = comparison["answers"][:MAX_ANSWERS], comparison["method"]
    reference = _escape(server or "exact decoding")
    parts = [
        f"## Changed answers of {_escape(method)}",
        f"{len(shown)} of {comparison['changed']}{'' if server else '; fuzzy tokens are bold'}.",
    ]
    for answer in shown:
        name = _escape(str(answer["question_id"]))
        parts.append(f"### Question {name}: {OUTCOMES[answer['outcome']].format(reference)}")
        sides = zip(answer["turns"], answer["exact"], answer["other"], strict=True)
        for turn, *pair in sides:
            parts.append("\n".join(f"> {_escape(line)}" for line in turn.splitlines()))
            parts.append(markdown([server or "exact", method], [list(map(_cell, pair))]))
    return parts


def _cell(pieces: Sequence[dict[str, Any]]) -> str:
    """Format an answer as one line of Markdown."""
    texts = []
    for piece in pieces:
        text = _escape(piece["text"])
        word = text.strip()
        if piece.get("fuzzy") and word:
            text = text.replace(word, f"<b>{word}</b>", 1)
        texts.append(text)
    return "".join(texts).strip().replace("\n", "<br>")


def _escape(text: str) -> str:
    """Escape control characters, HTML and inline Markdown, except vertical bars."""
    text = escape_control_chars(text).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_{}\[\]#~$])", r"\\\1", text)
