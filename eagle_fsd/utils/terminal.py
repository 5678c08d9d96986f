"""Style generated text for the terminal by the origin of each token."""

from __future__ import annotations

from rich.text import Text

from eagle_fsd.utils.text import escape_control_chars

#: Style of a token by the lowercase name of its :class:`~eagle_fsd.model.verify.Origin`.
ORIGIN_STYLES = {"exact": "green", "fuzzy": "bold yellow", "target": ""}


def origin_text(text: str, origin: str) -> Text:
    """Return text in the style of its token's origin, with control characters escaped.

    Args:
        text: The text that the token completes.
        origin: A key of :data:`ORIGIN_STYLES`.
    """
    return Text(escape_control_chars(text), style=ORIGIN_STYLES[origin])


def origin_legend() -> Text:
    """Return a line that names every origin in its style."""
    return Text(" ").join(Text(name, style=style) for name, style in ORIGIN_STYLES.items())
