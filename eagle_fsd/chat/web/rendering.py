"""HTML of the web page: what models and people say goes in as text and stays text.

Every function returns markup in which whatever it was given is escaped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import zip_longest

from eagle_fsd.chat.backend import Token
from eagle_fsd.model.config import FSDSettings

LEGEND = {
    "exact": "drafted, and the target's own choice",
    "fuzzy": "drafted; kept because the divergence is below T",
    "target": "the target's own, after the drafted ones",
}
NO_DIVERGENCE = "no draft here, so no divergence"
#: In the place of plain decoding's speed while it is to come, and where there is none.
WAITING, NONE = "…", "-"
#: Tokens that plain decoding is measured with.
PLAIN_TOKENS = 64


def about_token(token: Token, settings: FSDSettings) -> str:
    """What the pointer and the keyboard are told of a token, in a few lines.

    Args:
        settings: Those it was decoded with.
    """
    lines = [f"“{visible(token.text)}” is {token.origin}: {LEGEND[token.origin]}"]
    if token.divergence is None:
        lines.append(NO_DIVERGENCE)
    else:
        lines.append(
            f"{settings.divergence} divergence {token.divergence:.4f} (T = {settings.threshold:g})"
        )
    if token.probability is not None:
        lines.append(f"target's probability {percent(token.probability)}")
    if token.top:
        likeliest = ", ".join(f"“{visible(text)}” {percent(p)}" for text, p in token.top)
        lines.append(f"its likeliest: {likeliest}")
    return "\n".join(lines)


def visible(text: str) -> str:
    """``text`` on one line, an end token as a word."""
    return text.replace("\n", "⏎").replace("\t", "⇥") or "end"


def percent(part: float) -> str:
    return f"{part:.1%}" if part < 0.9995 else "100%"


def token_html(
    token: Token, settings: FSDSettings, parts: bool = False, first: bool = False
) -> str:
    """One token, coloured by its origin, with all about it for the pointer and the keyboard.

    Args:
        parts: Whether two answers part here.
        first: The keyboard's way into an answer is its first token; arrows lead on from there.
    """
    if not token.text and not parts:
        return ""
    classes = f"fsd-token fsd-{token.origin}" + " fsd-parts" * parts
    title = escape(about_token(token, settings), quote=True).replace("\n", "&#10;")
    shown = escape(token.text) or "∎"
    place = "0" if first else "-1"
    found = f'<span class="{classes}" tabindex="{place}" title="{title}">{shown}</span>'
    return f'<mark class="fsd-parting">{found}</mark>' if parts else found


def answer_html(
    tokens: Sequence[Token],
    settings: FSDSettings,
    parting: int | None = None,
    busy: bool = False,
) -> str:
    """An answer's tokens.

    Args:
        parting: Which of them differs from another answer's.
        busy: Whether more will come.
    """
    first = next((place for place, token in enumerate(tokens) if token.text), 0)
    spans = [
        token_html(token, settings, place == parting, place == first)
        for place, token in enumerate(tokens)
    ]
    if parting == len(tokens) and not busy:  # this one ended where the other goes on
        spans.append('<mark class="fsd-parting"><span class="fsd-parts">∎</span></mark>')
    caret = '<span class="fsd-caret" aria-hidden="true"></span>' if busy else ""
    state = "true" if busy else "false"
    return f'<div class="fsd-answer" aria-busy="{state}">{"".join(spans)}{caret}</div>'


def turn_html(role: str, body: str, note: str = "") -> str:
    """One message of the chat; ``body`` is markup already."""
    who = "You" if role == "user" else "Model"
    below = f'<div class="fsd-note">{escape(note)}</div>' if note else ""
    return (
        f'<div class="fsd-turn fsd-{escape(role)}">'
        f'<div class="fsd-who">{who}</div>{body}{below}</div>'
    )


def said_html(text: str) -> str:
    """What a person said."""
    return f'<div class="fsd-said">{escape(text)}</div>'


def notice_html(text: str) -> str:
    """Something that went wrong."""
    return f'<div class="fsd-notice" role="alert">{escape(text)}</div>' if text else ""


def welcome_html() -> str:
    """An empty chat."""
    return (
        '<div class="fsd-welcome">Ask something. Every token of the answer is coloured by where'
        " it came from; point at one, or step through with the arrow keys, for its divergence."
        "</div>"
    )


def legend_html() -> str:
    """What the colours mean, and for the pointer what the words mean."""
    items = "".join(
        f'<li title="{escape(text, quote=True)}"><span class="fsd-token fsd-{name}">{name}</span>'
        f" <small>{escape(text)}</small></li>"
        for name, text in LEGEND.items()
    )
    return f'<ul class="fsd-legend" aria-label="What the colours mean">{items}</ul>'


def inspector_html() -> str:
    """Where the page's script tells of the token that is pointed at or focused."""
    hint = "Point at a token, or step through an answer with the arrow keys: here is told of it."
    return f'<div id="fsd-inspector" role="status" aria-live="polite">{hint}</div>'


def figures_html(fsd: Mapping[str, float], plain: Mapping[str, float], waiting: str = NONE) -> str:
    """Speed and accepted length beside plain decoding's.

    Args:
        waiting: In the place of plain decoding's speed while there is none.
    """
    rows = [
        ("tokens/s", _number(fsd, "tokens_per_second", 1), _number(plain, "tokens_per_second", 1)),
        ("tau", _number(fsd, "tau", 2), _number(plain, "tau", 2)),
        ("tokens", _number(fsd, "tokens"), _number(plain, "tokens")),
        ("target passes", _number(fsd, "steps"), _number(plain, "steps")),
        ("fuzzy", _share(fsd), _share(plain)),
    ]
    body = "".join(
        f'<tr><th scope="row">{name}</th><td>{left}</td><td>{right}</td></tr>'
        for name, left, right in rows
    )
    factor = waiting
    if fsd.get("tokens_per_second") and plain.get("tokens_per_second"):
        factor = f"{fsd['tokens_per_second'] / plain['tokens_per_second']:.1f} x"
    return (
        f'<div class="fsd-figures"><div class="fsd-factor"><b>{escape(factor)}</b>'
        " plain decoding's speed</div>"
        '<table><thead><tr><td></td><th scope="col">FSD</th><th scope="col">plain</th></tr></thead>'
        f"<tbody>{body}</tbody></table>"
        f'<div class="fsd-note">Plain decoding of the same prompt, at most {PLAIN_TOKENS} tokens,'
        " after the answer. Reading the prompt counts in neither.</div></div>"
    )


def _number(figures: Mapping[str, float], name: str, digits: int = 0) -> str:
    return f"{figures[name]:.{digits}f}" if name in figures else "-"


def _share(figures: Mapping[str, float]) -> str:
    return percent(figures["fuzzy_tokens"] / figures["tokens"]) if figures.get("tokens") else "-"


def parting(left: Sequence[Token], right: Sequence[Token]) -> int | None:
    """Where two answers first have different tokens; None: nowhere in what both have said.

    While either is still on its way its missing end is no difference: ask again at the end with
    :func:`parting_at_end`.
    """
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (one, other) in pairs if one.id != other.id), None)


def parting_at_end(left: Sequence[Token], right: Sequence[Token]) -> int | None:
    """Where two finished answers part; one that ends sooner parts at its end."""
    pairs = enumerate(zip_longest(left, right))
    different = (
        place for place, (one, other) in pairs if not (one and other and one.id == other.id)
    )
    return next(different, None)


def compare_html(
    left: str, right: str, names: tuple[str, str], notes: tuple[str, str], verdict: str
) -> str:
    """Two answers side by side, under each other where there is no room.

    Args:
        left, right: Markup of :func:`answer_html`.
        names: Their headings. notes: Their figures. verdict: Where they part.
    """
    columns = "".join(
        f'<section class="fsd-column" aria-label="{escape(name, quote=True)}"><h3>{escape(name)}'
        f'</h3>{body}<div class="fsd-note">{escape(note)}</div></section>'
        for name, body, note in zip(names, (left, right), notes, strict=True)
    )
    return (
        f'<div class="fsd-compare"><p class="fsd-verdict" role="status">{escape(verdict)}</p>'
        f'<div class="fsd-columns">{columns}</div></div>'
    )


def verdict(left: Sequence[Token], right: Sequence[Token], done: bool, sampled: bool) -> str:
    """In words, where the exact answer and FSD's part.

    Args:
        done: Whether both are complete.
        sampled: Whether tokens are drawn, so that chance parts answers too.
    """
    place = parting_at_end(left, right) if done else parting(left, right)
    chance = " At temperature above 0 they part by chance as well." * sampled
    if place is None:
        same = f"The same {len(left)} tokens." if done else "No difference so far."
        return same + (chance if done else "")
    one, other = (
        f"“{visible(tokens[place].text)}”" if place < len(tokens) else "nothing more"
        for tokens in (left, right)
    )
    return f"They part at token {place + 1}: exact says {one}, FSD {other}.{chance}"


def summary(figures: Mapping[str, float], settings: FSDSettings, ended: str = "") -> str:
    """An answer's figures in one line."""
    if not figures:
        return ended
    parts = [
        f"{figures['tokens']} tokens",
        f"tau {figures['tau']:.2f}",
        f"{figures['tokens_per_second']:.0f} tokens/s",
        f"{_share(figures)} fuzzy",
        f"T = {settings.threshold:g}",
    ]
    if dropped := figures.get("dropped"):
        parts.append(f"the chat outgrew the context: its {dropped} oldest messages are left out")
    return " · ".join([*parts, *([ended] if ended else [])])
