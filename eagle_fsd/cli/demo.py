"""``eagle-fsd demo``: the server with the web page."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from eagle_fsd.chat.config import AnswerOptions, Limits
from eagle_fsd.cli.options import AcceptanceOptions, Pair, PairArguments, TreeOptions
from eagle_fsd.cli.parsing import options
from eagle_fsd.cli.processes import check_single_process
from eagle_fsd.cli.serve import LimitOptions, Port, Server, run_api
from eagle_fsd.model.config import AcceptanceConfig, TreeConfig


class PageServer(Server):
    """Where the web page and the API are served."""

    port: Port = 7860
    browser: bool = Field(True, description="Open the page in a browser, if there is a screen.")


def demo(
    *,
    server: Annotated[PageServer, options("Server")] = PageServer(),
    pair: PairArguments = Pair(),
    tree: TreeOptions = TreeConfig(),
    acceptance: AcceptanceOptions = AcceptanceConfig(),
    # Limits have the option --max-new-tokens.
    answers: Annotated[
        AnswerOptions, options("Answers", exclude=("max_new_tokens",))
    ] = AnswerOptions(),
    limits: LimitOptions = Limits(),
) -> None:
    """Chat with a pair on a web page: eagle-fsd serve --web, with options for the page.

    Tokens are colored by origin, and controls set the threshold, the divergence and the min ratio.
    Compare decodes the same prompt losslessly and with these settings, side by side.
    """
    check_single_process("demo")
    run_api(
        server, pair, tree, acceptance, limits=limits, answers=answers, open_page=server.browser
    )
