"""``eagle-fsd chat``: chat in the terminal."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from eagle_fsd.chat.config import AnswerOptions
from eagle_fsd.cli.options import (
    AcceptanceOptions,
    Pair,
    PairArguments,
    ShowOrigins,
    TreeOptions,
    load_chat,
)
from eagle_fsd.cli.parsing import options
from eagle_fsd.cli.processes import check_single_process
from eagle_fsd.cli.serve import BUNDLED_NAME
from eagle_fsd.model.config import AcceptanceConfig, TreeConfig
from eagle_fsd.utils.chat_api import ChatClient, find_model
from eagle_fsd.utils.options import OptionsError


def chat(
    *,
    style: Annotated[
        Literal["simple", "rich", "programmatic"], Parameter(help="FastChat's terminal style.")
    ] = "simple",
    system: Annotated[str | None, Parameter(help="System message.")] = None,
    show_origins: ShowOrigins = False,
    history: Annotated[
        bool, Parameter(help="Include earlier turns in the prompt.", negative_bool="no-")
    ] = True,
    multiline: Annotated[
        bool,
        Parameter(
            help="Read messages of several lines: Ctrl-D ends one; in rich style, Enter does, and"
            " Esc+Enter ends a line."
        ),
    ] = False,
    mouse: Annotated[
        bool, Parameter(help="Use the mouse to move the cursor (rich style).")
    ] = False,
    base_url: Annotated[
        str | None,
        Parameter(
            help="Chat with a model of this OpenAI-compatible server instead, such as"
            " http://localhost:8000/v1; OPENAI_API_KEY holds the key."
        ),
    ] = None,
    server_model: Annotated[
        str | None,
        Parameter(help="With --base-url: model to request; default: the first that it lists."),
    ] = None,
    pair: PairArguments = Pair(),
    tree: TreeOptions = TreeConfig(),
    acceptance: AcceptanceOptions = AcceptanceConfig(),
    answers: Annotated[AnswerOptions, options("Answers")] = AnswerOptions(),
) -> None:
    """Chat with the model in the terminal.

    Commands: !!help, !!exit, !!reset, !!remove, !!regen, !!save FILE, !!load FILE; and
    !!temperature 0.7, or any other option of answers and, without --base-url, of the tree and
    acceptance. Ctrl-C stops an answer; an empty message, or Ctrl-D instead, ends the chat.
    """
    from eagle_fsd.chat.terminal import ChatSession, ServerSession, TerminalSession, run_chat

    check_single_process("chat", loads_target=base_url is None)
    session: TerminalSession
    if base_url is not None:
        given = (pair.model_fields_set, tree.model_fields_set, acceptance.model_fields_set)
        if show_origins or any(given):
            raise OptionsError(
                "the server has the model: --base-url allows no options of model, tree or"
                " acceptance, and no --show-origins"
            )
        endpoint, _ = find_model(base_url, server_model)
        session = ServerSession(ChatClient(endpoint), options=answers, name=endpoint.model)
    elif server_model is not None:
        raise OptionsError("--server-model requires --base-url")
    else:
        model, chat_template = load_chat(pair, tree, acceptance)
        name = pair.target or BUNDLED_NAME
        session = ChatSession(
            model, chat_template, options=answers, name=name, show_origins=show_origins
        )
    run_chat(session, style, system=system, history=history, multiline=multiline, mouse=mouse)
