"""``eagle-fsd demo``: the web page over a pair in this process."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Annotated, Any

import typer

from eagle_fsd.chat.config import AnswerOptions, Limits
from eagle_fsd.cli.console import fail, out
from eagle_fsd.cli.options import (
    Pair,
    with_group,
    with_options,
    with_settings,
)

BUNDLED_NAME = "eagle-fsd-bundled"
#: What the bundled pair can be asked: it knows little else.
EXAMPLES = (
    "Anna gathers 12 buckets of 4 shells each. Then Anna uses 5 shells. How many shells are left"
    " in the end?",
    "At the market, Tom buys 7 boxes with 3 apples in every box. Then Tom gives 4 apples to Mia."
    " How many apples are left in the end?",
)
#: Decided by the page's own slider, up to the server's bound.
ON_THE_PAGE = frozenset({"max_new_tokens"})

PageHost = Annotated[str, typer.Option(help="Whom to listen to; 0.0.0.0 is everybody.")]
PagePort = Annotated[int, typer.Option(min=1, max=65535, help="As FastChat and gradio: 7860.")]


@with_settings()
@with_options(AnswerOptions, "options", leave_out=ON_THE_PAGE)
@with_options(Limits, "limits")
@with_group(Pair)
def demo(
    pair: Pair,
    settings: dict[str, Any],
    options: dict[str, Any],
    limits: dict[str, Any],
    host: PageHost = "127.0.0.1",
    port: PagePort = 7860,
) -> None:
    """Chat with a pair on a web page, until Ctrl-C.

    Tokens are coloured by where they come from; sliders set T and the rest; Compare decodes the
    same prompt exactly and with FSD, side by side.
    """
    web = web_page()
    from eagle_fsd.chat.backend import LocalBackend
    from eagle_fsd.chat.serve.launch import check_free

    check_free(host, port)
    model, wording = pair.load(settings)
    name = pair.target or BUNDLED_NAME
    backend = LocalBackend(model, wording, Limits.from_dict(limits), name)
    backend.warm_up()
    page = web.page_app(backend, AnswerOptions.from_dict(options), examples_for(name))
    tell_page(host, port)
    try:
        web.run_page(page, host, port)
    finally:
        backend.close()


def web_page() -> ModuleType:
    """The module of the page; where gradio is missing, one line that says so, and the end."""
    try:
        from eagle_fsd.chat.web import app as web
    except ImportError as error:
        if (error.name or "").startswith("eagle_fsd"):
            raise
        fail(f"the web page needs gradio ({error}): pip install 'eagle_fsd[web]'", 1)
    return web


def examples_for(name: str) -> Sequence[str]:
    """Questions to begin with: the bundled pair's."""
    return EXAMPLES if name == BUNDLED_NAME else ()


def tell_page(host: str, port: int) -> None:
    """Where to look."""
    out.print(f"web page    http://{host}:{port}", markup=False, soft_wrap=True)
