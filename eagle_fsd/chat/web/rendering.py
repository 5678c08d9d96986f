"""HTML of the web page. Every function escapes the text that it is given."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from itertools import zip_longest
from statistics import median
from typing import Any

from eagle_fsd.chat.backend import Token
from eagle_fsd.model.config import AcceptanceConfig

LEGEND = {
    "exact": "drafted, and the target's own choice",
    "fuzzy": "drafted, and the divergence is below T",
    "target": "chosen by the target, not drafted",
}
NO_DIVERGENCE = "No draft distribution at this position"
#: Decades that style.css shows of the divergence.
SCALE_DECADES = 4
#: Shown instead of the speedup while the baseline is pending, and where there is none.
PENDING, NONE = "…", "—"
#: New tokens that the autoregressive baseline is measured over.
BASELINE_TOKENS = 64


def describe_token(token: Token, acceptance: AcceptanceConfig) -> str:
    """Describe a token in a few lines of plain text, for its tooltip and the inspector."""
    lines = [f"“{visible(token.text)}” — {token.origin}: {LEGEND[token.origin]}"]
    if token.divergence is None:
        lines.append(NO_DIVERGENCE)
    else:
        lines.append(
            f"Divergence ({acceptance.divergence}): {token.divergence:.4f} ({_rule(acceptance)})"
        )
    if token.probability is not None:
        lines.append(f"Target probability: {percent(token.probability)}")
    if token.top:
        top = ", ".join(f"“{visible(text)}” {percent(p)}" for text, p in token.top)
        lines.append(f"Top target tokens: {top}")
    return "\n".join(lines)


def visible(text: str) -> str:
    """Return a token's text on one line, with visible whitespace and end-of-text marks."""
    return text.replace("\n", "⏎").replace("\t", "⇥") or "<end>"


def _rule(acceptance: AcceptanceConfig) -> str:
    return f"T = {acceptance.threshold:g}" if acceptance.rule == "fsd" else acceptance.label


def percent(fraction: float) -> str:
    """Format a fraction as a percentage with at most one decimal."""
    return f"{fraction:.1%}" if fraction < 0.9995 else "100%"


def token_html(
    token: Token, acceptance: AcceptanceConfig, differs: bool = False, focusable: bool = False
) -> str:
    """Render one token with its description as the tooltip.

    The class is its origin, and the CSS variable ``--d`` its divergence; style.css and script.js
    use both. A token without text is rendered only where two answers differ first. One token of an
    answer is focusable with the Tab key; the arrow keys move on from there.
    """
    if not token.text and not differs:
        return ""
    classes = f"fsd-token fsd-{token.origin}"
    if differs:
        classes += " fsd-differs"
    title = escape(describe_token(token, acceptance), quote=True).replace("\n", "&#10;")
    tabindex = "0" if focusable else "-1"
    text = escape(token.text) or "∎"
    attributes = f'class="{classes}"{_divergence_style(token)} tabindex="{tabindex}"'
    span = f'<span {attributes} title="{title}">{text}</span>'
    return f'<mark class="fsd-difference">{span}</mark>' if differs else span


def _divergence_style(token: Token) -> str:
    if token.divergence is None:
        return ""
    return f' style="--d:{max(token.divergence, 0.0):.9g}"'  # rounding may leave it below 0


def answer_html(
    tokens: Sequence[Token],
    acceptance: AcceptanceConfig,
    difference: int | None = None,
    busy: bool = False,
) -> str:
    """Render the tokens of an answer."""
    first = next((index for index, token in enumerate(tokens) if token.text), 0)
    spans = [
        token_html(token, acceptance, index == difference, index == first)
        for index, token in enumerate(tokens)
    ]
    if difference == len(tokens) and not busy:  # this answer ended where the other one continues
        spans.append('<mark class="fsd-difference"><span class="fsd-differs">∎</span></mark>')
    caret = '<span class="fsd-caret" aria-hidden="true"></span>' if busy else ""
    state = "true" if busy else "false"
    return f'<div class="fsd-answer" aria-busy="{state}">{"".join(spans)}{caret}</div>'


def strip_html(tokens: Sequence[Token], acceptance: AcceptanceConfig, max_threshold: float) -> str:
    """Render the divergence of each token as a bar, with a line at the threshold.

    In the browser, script.js moves the line with the slider and marks the tokens that would flip.
    """
    shown = [token for token in tokens if token.text]
    bars = "".join(
        f'<i class="fsd-bar fsd-{token.origin}"{_divergence_style(token)}></i>' for token in shown
    )
    known = [token for token in shown if token.divergence is not None]
    summary = f"{len(shown)} tokens, {len(known)} with a divergence"
    if values := [token.divergence or 0.0 for token in known]:
        most = max(known, key=lambda token: token.divergence or 0.0)
        summary += (
            f": median {median(values):.4f}, largest {max(values):.4f} at “{visible(most.text)}”"
        )
        if acceptance.rule == "fsd":
            below = sum(value < acceptance.threshold for value in values)
            summary += f"; {below} below {_rule(acceptance)}"
    line = "; the line is at T" if acceptance.rule == "fsd" else ""
    lowest = f"{max_threshold / 10**SCALE_DECADES:.9f}".rstrip("0").rstrip(".")
    return (
        f'<figure class="fsd-strip" data-threshold="{acceptance.threshold}"'
        f' data-divergence="{acceptance.divergence}" style="--fsd-t:{acceptance.threshold}">'
        f"<figcaption>Divergence of each token ({acceptance.divergence}, logarithmic,"
        f" {lowest} to {max_threshold:g}){line}</figcaption>"
        '<div class="fsd-scroll"><div class="fsd-bars" role="img"'
        f' style="--n:{len(shown)}"'
        f' aria-label="{escape(summary, quote=True)}">{bars}</div></div>'
        '<div class="fsd-flips" role="status"></div></figure>'
    )


def export_html(values: Mapping[str, Any]) -> str:
    """Render a link that saves ``values`` as a JSON file, without a request to the server."""
    text = json.dumps(values, indent=1, ensure_ascii=False)
    data = base64.b64encode(text.encode("utf-8", "replace")).decode("ascii")
    return (
        '<a class="fsd-export" download="eagle-fsd-answer.json"'
        f' href="data:application/json;base64,{data}">Export as JSON</a>'
    )


def message_html(role: str, body: str, note: str = "") -> str:
    """Render one message of the chat."""
    author = "You" if role == "user" else "Assistant"
    footer = f'<div class="fsd-note">{escape(note)}</div>' if note else ""
    return (
        f'<div class="fsd-message fsd-{escape(role)}">'
        f'<div class="fsd-author">{author}</div>{body}{footer}</div>'
    )


def question_html(text: str) -> str:
    """Render the body of a user's message."""
    return f'<div class="fsd-question">{escape(text)}</div>'


def error_html(message: str) -> str:
    """Render an error message."""
    return f'<div class="fsd-error" role="alert">{escape(message)}</div>' if message else ""


def welcome_html() -> str:
    """Render the placeholder of an empty chat."""
    return (
        '<div class="fsd-welcome">Ask a question to start. Each token of the answer is colored by'
        " its origin; point at a token, or use the arrow keys, to see its divergence.</div>"
    )


def legend_html() -> str:
    """Render the legend of the token colors, and the choice of what they show.

    style.css applies the choice.
    """
    items = "".join(
        f'<li><span class="fsd-token fsd-{name}">{name}</span> <small>{escape(text)}</small></li>'
        for name, text in LEGEND.items()
    )
    choices = "".join(
        f'<label><input type="radio" name="fsd-by" id="fsd-by-{name}"{checked} /> {name}</label>'
        for name, checked in (("origin", " checked"), ("divergence", ""))
    )
    return (
        '<div class="fsd-key"><fieldset class="fsd-shading"><legend>Color by</legend>'
        f'{choices}<span class="fsd-gradient"><span>low</span><span>high</span></span></fieldset>'
        f'<ul class="fsd-legend" aria-label="Origins of tokens">{items}</ul></div>'
    )


def inspector_html() -> str:
    """Render the inspector, which script.js fills with the description of a token."""
    return '<div id="fsd-inspector" role="status" aria-live="polite"></div>'


def stats_html(
    fsd: Mapping[str, float], baseline: Mapping[str, float], placeholder: str = NONE
) -> str:
    """Render the statistics of an answer beside those of autoregressive decoding."""
    rows = [
        ("Tokens/s", *(_number(stats, "tokens_per_second", 1) for stats in (fsd, baseline))),
        ("Tau (tokens per pass)", *(_number(stats, "tau", 2) for stats in (fsd, baseline))),
        ("New tokens", *(_number(stats, "tokens") for stats in (fsd, baseline))),
        ("Target passes", *(_number(stats, "steps") for stats in (fsd, baseline))),
        ("Fuzzy tokens", *(_fuzzy_share(stats) for stats in (fsd, baseline))),
    ]
    body = "".join(
        f'<tr><th scope="row">{name}</th><td>{left}</td><td>{right}</td></tr>'
        for name, left, right in rows
    )
    speedup = placeholder
    if fsd.get("tokens_per_second") and baseline.get("tokens_per_second"):
        speedup = f"{fsd['tokens_per_second'] / baseline['tokens_per_second']:.1f}x"
    return (
        f'<div class="fsd-stats"><div class="fsd-speedup"><b>{escape(speedup)}</b>'
        " speedup over autoregressive decoding</div>"
        '<table><thead><tr><td></td><th scope="col">FSD</th>'
        '<th scope="col"><abbr title="Autoregressive decoding">AR</abbr></th></tr></thead>'
        f"<tbody>{body}</tbody></table>"
        '<div class="fsd-note">Each answer is followed by autoregressive decoding (AR) of up to'
        f" {BASELINE_TOKENS} tokens. Prefill time is not counted.</div></div>"
    )


def _number(stats: Mapping[str, float], name: str, digits: int = 0) -> str:
    return f"{stats[name]:.{digits}f}" if name in stats else NONE


def _fuzzy_share(stats: Mapping[str, float]) -> str:
    return percent(stats["fuzzy_tokens"] / stats["tokens"]) if stats.get("tokens") else NONE


def first_difference(left: Sequence[Token], right: Sequence[Token], complete: bool) -> int | None:
    """Return the index of the first token at which two answers differ, or None.

    If both are complete, an answer that is a prefix of the other differs at its end; otherwise only
    the tokens that both have are compared.
    """
    length = None if complete else min(len(left), len(right))
    for index, (one, other) in enumerate(zip_longest(left[:length], right[:length])):
        if one is None or other is None or one.id != other.id:
            return index
    return None


def describe_difference(
    left: Sequence[Token], right: Sequence[Token], complete: bool, sampled: bool
) -> str:
    """Describe the first difference between the exact answer and the FSD answer in a sentence."""
    index = first_difference(left, right, complete)
    if index is None and not complete:
        return "No difference so far."
    if index is None:
        message = f"The answers are identical ({len(left)} tokens)."
    else:
        one, other = (
            f"“{visible(tokens[index].text)}”" if index < len(tokens) else "no further token"
            for tokens in (left, right)
        )
        message = f"First difference at token {index + 1}: exact {one}, FSD {other}."
    if sampled:
        message += " With a temperature above 0, sampling alone also causes differences."
    return message


def comparison_html(
    answers: tuple[str, str], titles: tuple[str, str], notes: tuple[str, str], difference: str
) -> str:
    """Render two answers side by side, stacked where the page is narrow."""
    columns = "".join(
        f'<section class="fsd-column" aria-label="{escape(title, quote=True)}">'
        f'<h3>{escape(title)}</h3>{body}<div class="fsd-note">{escape(note)}</div></section>'
        for title, body, note in zip(titles, answers, notes, strict=True)
    )
    return (
        f'<div class="fsd-comparison"><p class="fsd-verdict" role="status">{escape(difference)}</p>'
        f'<div class="fsd-columns">{columns}</div></div>'
    )


def summarize(stats: Mapping[str, float], acceptance: AcceptanceConfig, status: str = "") -> str:
    """Summarize an answer in one line of plain text."""
    if not stats:
        return status
    parts = [
        f"{stats['tokens']} tokens",
        f"tau {stats['tau']:.2f}",
        f"{stats['tokens_per_second']:.0f} tokens/s",
        f"{_fuzzy_share(stats)} fuzzy",
        _rule(acceptance),
    ]
    if dropped := stats.get("dropped_messages"):
        parts.append(f"{dropped} oldest messages dropped to fit the context")
    if status:
        parts.append(status)
    return " · ".join(parts)
