"""``eagle-fsd demo``: a web page for a pair in this process."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Annotated

from eagle_fsd.chat.config import AnswerOptions, Limits
from eagle_fsd.cli.console import fail, out
from eagle_fsd.cli.options import (
    AcceptanceOptions,
    Pair,
    PairArguments,
    Port,
    Server,
    TreeOptions,
    load_chat,
)
from eagle_fsd.cli.parsing import options
from eagle_fsd.model.config import AcceptanceConfig, TreeConfig

BUNDLED_NAME = "eagle-fsd-bundled"
#: Example questions for the bundled pair.
EXAMPLES = (
    "Anna gathers 12 buckets of 4 shells each. Then Anna uses 5 shells. How many shells are left"
    " in the end?",
    "At the market, Tom buys 7 boxes with 3 apples in every box. Then Tom gives 4 apples to Mia."
    " How many apples are left in the end?",
)


class PageServer(Server):
    """Where the web page is served."""

    port: Port = 7860


#: The page has a slider for the length of answers instead of an option.
PageAnswerOptions = Annotated[AnswerOptions, options("Answers", exclude=("max_new_tokens",))]
LimitOptions = Annotated[Limits, options("Limits")]
PageServerOptions = Annotated[PageServer, options("Server")]


def demo(
    *,
    server: PageServerOptions = PageServer(),
    pair: PairArguments = Pair(),
    tree: TreeOptions = TreeConfig(),
    acceptance: AcceptanceOptions = AcceptanceConfig(),
    answers: PageAnswerOptions = AnswerOptions(),
    limits: LimitOptions = Limits(),
) -> None:
    """Chat with a pair on a web page, until Ctrl-C.

    Tokens are colored by origin, and sliders set the threshold and the other acceptance options.
    Compare decodes the same prompt losslessly and with FSD, side by side.
    """
    page = import_page()
    from eagle_fsd.chat.backend import LocalBackend
    from eagle_fsd.chat.serve.servers import check_port

    check_port(server.host, server.port)
    model, chat_template = load_chat(pair, tree, acceptance)
    name = pair.target or BUNDLED_NAME
    backend = LocalBackend(model, chat_template, limits, name)
    backend.warm_up()
    app = page.page_app(backend, answers, examples_for(name))
    print_page_address(server)
    try:
        page.run_page(app, server.host, server.port)
    finally:
        backend.close()


def import_page() -> ModuleType:
    """Import the web page, or exit with a message that says what to install."""
    try:
        from eagle_fsd.chat.web import app
    except ImportError as error:
        if (error.name or "").startswith("eagle_fsd"):
            raise
        fail(f"the web page needs gradio ({error}): pip install 'eagle_fsd[web]'", 1)
    return app


def examples_for(name: str) -> Sequence[str]:
    """Return example questions for a model.

    Args:
        name: The model's name; only the bundled one has examples.
    """
    return EXAMPLES if name == BUNDLED_NAME else ()


def print_page_address(server: PageServer) -> None:
    """Print the page's address.

    Args:
        server: Where the page is served.
    """
    out.print(f"web page    http://{server.host}:{server.port}", soft_wrap=True)
