"""``eagle-fsd chat``: FastChat's terminal chat, decoding with FSD."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from eagle_fsd.chat.config import AnswerOptions
from eagle_fsd.cli.options import (
    Pair,
    with_group,
    with_options,
    with_settings,
)


@with_settings()
@with_options(AnswerOptions, "options")
@with_group(Pair)
def chat(
    pair: Pair,
    settings: dict[str, Any],
    options: dict[str, Any],
    style: Annotated[str, typer.Option(help="simple, rich or programmatic.")] = "simple",
    system: Annotated[str | None, typer.Option(help="What the system says first.")] = None,
    show_origins: Annotated[
        bool, typer.Option("--show-origins", help="Colour exact and fuzzy tokens.")
    ] = False,
    history: Annotated[
        bool, typer.Option("--history/--no-history", help="Show the model earlier turns.")
    ] = True,
    multiline: Annotated[
        bool, typer.Option("--multiline", help="Several lines a message; see FastChat's help.")
    ] = False,
    mouse: Annotated[
        bool, typer.Option("--mouse", help="The mouse places the cursor (rich style).")
    ] = False,
) -> None:
    """Chat with the model in the terminal.

    Commands: !!exit, !!reset, !!remove, !!regen, !!save FILE, !!load FILE, and !!threshold 0.3 (or
    any other of FSD's settings) in mid-chat. Ctrl-C stops an answer; Ctrl-D or an empty line ends
    the chat.
    """
    from eagle_fsd.chat.terminal import STYLES, ChatSession
    from eagle_fsd.chat.terminal import chat as run

    if style not in STYLES:
        raise typer.BadParameter(f"--style must be one of {', '.join(STYLES)}; got {style}")
    model, wording = pair.load(settings)
    session = ChatSession(
        model,
        wording,
        AnswerOptions.from_dict(options),
        model.settings,
        show_origins,
    )
    run(session, style, system, history, multiline, mouse)
