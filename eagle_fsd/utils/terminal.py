"""Styles of generated text in the terminal, by the origin of each token."""

from __future__ import annotations

from rich.text import Text

#: Style of a token by the lowercase name of its :class:`~eagle_fsd.model.verify.Origin`.
ORIGIN_STYLES = {"exact": "green", "fuzzy": "bold yellow", "target": ""}


def origin_legend() -> Text:
    """Return a line that names every origin in its style."""
    return Text(" ").join(Text(name, style=style) for name, style in ORIGIN_STYLES.items())
