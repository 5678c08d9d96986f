"""Format a report as a self-contained web page, ``report.html``, from ``report.html.jinja``.

The page loads nothing and runs no scripts. All text is escaped; control characters are replaced.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from eagle_fsd.evaluation.markdown_report import OUTCOMES
from eagle_fsd.evaluation.tables import footnote, method_text, tables
from eagle_fsd.evaluation.verdict import main_row, verdict
from eagle_fsd.utils.text import escape_control_chars

TEMPLATE = Path(__file__).with_name("report.html.jinja")


def html_text(report: dict[str, Any], folder: Path) -> str:
    """Format a report as a web page, with the figures in a folder."""
    row, sentence = main_row(report), verdict(report)
    return _template().render(
        about=report["about"],
        verdict=sentence,
        conclusions=[item for item in report.get("conclusions", []) if item != sentence],
        figures=[_figure(folder / name) for name in report.get("figures", [])],
        main=row["method"] if row is not None else None,
        tables=[*report.get("tables", []), *tables(report)],
        comparison=report.get("comparison"),
        reference=report.get("reference", "exact decoding"),
        outcomes=OUTCOMES,
        settings=_settings(report, row),
        footnote=footnote(report),
        written=report["written"],
    )


def _figure(path: Path) -> Markup:
    """Return a figure as an element of a page: without prologue and metadata."""
    text = path.with_suffix(".svg").read_text(encoding="utf-8")
    return Markup(re.sub("<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S))


def _settings(report: dict[str, Any], row: dict[str, Any] | None) -> dict[str, Any]:
    """Return the settings of the main method and of the run, by name."""
    found: dict[str, Any] = {}
    if row is not None:
        found = {"decoding": method_text(row), **(row.get("settings") or {})}
    found |= report["about"]
    return {name: value for name, value in found.items() if value is not None}


@cache
def _template() -> Template:
    """Load the page's template."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: escape_control_chars(value) if type(value) is str else value,
    )
    environment.filters.update(tip=_tip, fuzzy=_fuzzy_summary, visible=_visible)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))


def _tip(piece: dict[str, Any]) -> str:
    """Describe a fuzzy token."""
    text = "fuzzy token"
    if piece.get("regret") is not None:
        text += f", gave up {piece['regret']:.3g} nats"
    if piece.get("divergence") is not None:
        text += f", divergence {piece['divergence']:.3g}"
    return text


def _fuzzy_summary(pieces: list[dict[str, Any]]) -> str:
    """Describe how many fuzzy tokens a turn has, and how many nats they give up."""
    fuzzy = [piece for piece in pieces if piece.get("fuzzy")]
    if not fuzzy:
        return ""
    regrets = [piece["regret"] for piece in fuzzy if "regret" in piece]
    nats = f", {sum(regrets):.2f} nats" if regrets else ""
    return f": {len(fuzzy)} fuzzy token{'' if len(fuzzy) == 1 else 's'}{nats}"


def _visible(text: str) -> str:
    """Make a token of spaces and newlines visible."""
    return text if text.strip() else text.replace(" ", "\u2423").replace("\n", "\u21b5\n")
