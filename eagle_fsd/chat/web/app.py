"""The web page, drawn with gradio, and its server. The only module that imports gradio."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import socket
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import fields
from html import escape
from importlib.resources import files
from typing import Any

import uvicorn

# No statistics for gradio's makers; it reads this when it is imported.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
import gradio as gr
from fastapi import FastAPI

from eagle_fsd.chat.backend import Backend
from eagle_fsd.chat.config import AnswerOptions
from eagle_fsd.chat.serve.launch import GRACE
from eagle_fsd.chat.web import rendering as text
from eagle_fsd.chat.web.guard import PageGuard
from eagle_fsd.chat.web.page import LONGEST_MESSAGE, Page, View, Visit
from eagle_fsd.model.config import FSDSettings
from eagle_fsd.utils.options import Options

SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif")
#: Events of gradio's at once, beside the requests that may wait.
SPARE = 64
MONO = ("ui-monospace", "DejaVu Sans Mono", "monospace")


def page_app(
    backend: Backend, options: AnswerOptions | None = None, examples: Sequence[str] = ()
) -> PageGuard:
    """The ASGI application; its lifespan starts gradio's queue.

    Args:
        options: How answers are drawn at first, and for good where the page has no slider.
        examples: Questions to begin with.
    """
    blocks = draw(backend, options or AnswerOptions(), examples)
    limits = backend.about.limits
    # Requests wait in the line of whoever decodes, not here: each of them has a place, and there is
    # always one for those who stop.
    blocks.max_threads = limits.queue + SPARE
    blocks.queue(default_concurrency_limit=None, max_size=blocks.max_threads, api_open=False)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it mounts
        gr.mount_gradio_app(app, blocks, "/", show_api=False, ssr_mode=False, pwa=False)
    mounted = next(route.app for route in app.routes if isinstance(route.app, gr.routes.App))
    return PageGuard(app, limits.max_body, mounted.stop_event.set)


def run_page(app: PageGuard, host: str, port: int) -> None:
    """Serve the page until told to stop.

    Raises:
        OSError: The port is taken, or there is no such host.
    """
    server = page_server(app, host, port)
    server.run()
    if not server.started:
        raise OSError(f"cannot serve at {host}:{port}: is the port taken?")


def page_server(app: PageGuard, host: str = "127.0.0.1", port: int = 7860) -> uvicorn.Server:
    """The server of the page, not running yet."""
    # gradio closes asynchronous generators by forgetting them, which does close them.
    warnings.filterwarnings("ignore", "coroutine method 'aclose'", RuntimeWarning)
    config = uvicorn.Config(
        app, host, port, log_level="warning", timeout_graceful_shutdown=GRACE, lifespan="on"
    )
    return _Server(config)


class _Server(uvicorn.Server):
    """Ends the connections that gradio keeps open while its page is."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.config.app.close()
        # Answers on their way are cut off, which is no failure to tell of.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await super().shutdown(sockets)


def draw(backend: Backend, options: AnswerOptions, examples: Sequence[str]) -> gr.Blocks:
    """The page: chat on the left, settings and figures on the right."""
    page, about = Page(backend, options), backend.about
    theme = gr.themes.Soft(
        primary_hue="indigo",
        font=[gr.themes.Font(name) for name in SANS],
        font_mono=[gr.themes.Font(name) for name in MONO],
    ).set(
        # gradio's own greys are too pale to read.
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_300",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
    )
    own = files("eagle_fsd.chat.web")
    with gr.Blocks(
        title="eagle_fsd",
        theme=theme,
        css=own.joinpath("style.css").read_text(encoding="utf-8"),
        head=f"<script>{own.joinpath('script.js').read_text(encoding='utf-8')}</script>",
        analytics_enabled=False,
        fill_width=True,
    ) as blocks:
        visit = gr.State(Visit())
        _html(
            f"<h1>eagle_fsd</h1><p>Fuzzy speculative decoding of <b>{escape(about.name)}</b></p>",
            "fsd-head",
        )
        with gr.Row(elem_id="fsd-page"):
            with gr.Column(scale=7, min_width=320):
                with gr.Column(elem_id="fsd-chat"):
                    log = _html("", "fsd-log")
                    live = _html(text.welcome_html(), "fsd-live")
                _html(text.inspector_html(), "fsd-inspector-box")
                box = gr.Textbox(
                    label="Message",
                    show_label=False,
                    placeholder="Enter sends, Shift+Enter: a new line",
                    lines=1,
                    max_lines=8,
                    max_length=LONGEST_MESSAGE,
                    elem_id="fsd-box",
                )
                with gr.Row(elem_id="fsd-buttons"):
                    send = _button("Send", "fsd-send", variant="primary")
                    stop = _button("Stop", "fsd-stop")
                    compare = _button("Compare", "fsd-compare-button")
                    clear = _button("New chat", "fsd-clear")
                with gr.Row(elem_id="fsd-examples"):
                    for example in examples:
                        button = gr.Button(example, size="sm", min_width=220)
                        _on(button.click, lambda said=example: said, None, box)
                compared = _html("", "fsd-compared")
            with gr.Column(scale=3, min_width=300):
                figures = _html(text.figures_html({}, {}), "fsd-figures-box")
                _html(text.legend_html(), "fsd-legend-box")
                chosen = _controls(about.settings, options, backend)
        outputs = [box, log, live, figures, compared]
        names = list(chosen)

        def on_send(visit: Visit, message: Any, *values: Any) -> AsyncIterator[View]:
            return page.send(visit, message, dict(zip(names, values, strict=True)))

        def on_compare(visit: Visit, message: Any, *values: Any) -> AsyncIterator[View]:
            return page.compare(visit, message, dict(zip(names, values, strict=True)))

        def on_sent(visit: Visit, typed: Any) -> list[Any]:
            return _changes(page.give_back(visit, typed))

        async def on_clear(visit: Visit) -> list[Any]:
            return _changes(await page.clear(visit))

        inputs = [visit, box, *chosen.values()]
        sent = _on([send.click, box.submit], _drawing(on_send), inputs, outputs)
        _on(sent.then, on_sent, [visit, box], outputs)
        _on(sent.then, _drawing(page.measure), [visit], outputs)
        _on(compare.click, _drawing(on_compare), inputs, outputs)
        _on(stop.click, page.stop, [visit], None)
        _on(clear.click, on_clear, [visit], outputs)
    return blocks


def _controls(
    settings: FSDSettings, options: AnswerOptions, backend: Backend
) -> dict[str, gr.components.Component]:
    """Sliders by what they set; their bounds are the declared ones and the server's."""
    limits = backend.about.limits
    most = {
        "threshold": max(limits.max_threshold, settings.threshold),
        "max_new_tokens": limits.max_new_tokens,
    }
    labels = {
        "threshold": "Threshold T",
        "divergence": "Divergence",
        "min_ratio": "Min-ratio",
        "temperature": "Temperature",
        "max_new_tokens": "Tokens at most",
    }
    steps = {"threshold": 0.005, "min_ratio": 0.01, "temperature": 0.05, "max_new_tokens": 1}
    found: dict[str, gr.components.Component] = {}
    for name, label in labels.items():
        owner: Options = settings if hasattr(settings, name) else options
        metadata = next(item.metadata for item in fields(owner) if item.name == name)
        shared = {
            "label": label,
            "info": metadata["help"],
            "elem_id": f"fsd-{name.replace('_', '-')}",
            "interactive": True,
        }
        value = getattr(owner, name)
        if "choices" in metadata:
            found[name] = gr.Dropdown(list(metadata["choices"]), value=value, **shared)
            continue
        high = min(metadata["high"], most.get(name, math.inf))
        found[name] = gr.Slider(
            metadata["low"], high, value=min(value, high), step=steps[name], **shared
        )
    return found


def _html(value: str, name: str) -> gr.HTML:
    return gr.HTML(value, elem_id=name, padding=False)


def _button(label: str, name: str, variant: str = "secondary") -> gr.Button:
    return gr.Button(label, elem_id=name, variant=variant, min_width=90)


def _on(trigger: Any, function: Any, inputs: Any, outputs: Any) -> Any:
    """An event that gradio shows no progress of, and that is in no interface for programs."""
    shared = {"show_progress": "hidden", "show_api": False, "api_name": False}
    shared |= {"concurrency_limit": None}
    if isinstance(trigger, list):
        return gr.on(trigger, function, inputs, outputs, trigger_mode="once", **shared)
    return trigger(function, inputs, outputs, **shared)


def _drawing(
    views: Callable[..., AsyncIterator[View]],
) -> Callable[..., AsyncIterator[list[Any]]]:
    """An event of gradio's that draws ``views``, and at last nothing.

    gradio draws an event's last view once more when the event has ended, and by then a new chat may
    stand there.
    """

    async def event(*values: Any) -> AsyncIterator[list[Any]]:
        async with contextlib.aclosing(views(*values)) as found:
            async for view in found:
                yield _changes(view)
        yield _changes(View())

    return event


def _changes(view: View) -> list[Any]:
    """In gradio's words; what did not change is not sent."""
    parts = (view.box, view.log, view.live, view.figures, view.compare)
    return [gr.skip() if part is None else part for part in parts]
