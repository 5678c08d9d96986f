"""The web page's layout and application. The only module that imports Gradio."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import wraps
from html import escape
from importlib.resources import files
from types import SimpleNamespace
from typing import Any, Literal, get_args

# Gradio reads this when it is imported: no telemetry.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
import gradio as gr
from fastapi import FastAPI
from gradio import queueing

from eagle_fsd.chat.backend import About, Backend
from eagle_fsd.chat.config import AnswerOptions
from eagle_fsd.chat.web import rendering
from eagle_fsd.chat.web.guard import PageApp
from eagle_fsd.chat.web.page import (
    ACCEPTANCE_CONTROLS,
    MAX_MESSAGE_LENGTH,
    ChatState,
    Page,
    View,
    max_threshold,
)
from eagle_fsd.utils.options import Options

log = logging.getLogger(__name__)

SANS_FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "DejaVu Sans", "sans-serif")
MONO_FONTS = ("ui-monospace", "DejaVu Sans Mono", "monospace")
#: Upper end of the temperature slider, unless the initial value is higher.
MAX_TEMPERATURE = 2.0
#: Concurrent Gradio events beside those that wait in the decoding queue, such as Stop.
EXTRA_EVENTS = 64
#: Labels of the controls by option, and the step of each slider.
CONTROLS: dict[str, tuple[str, float | None]] = {
    "threshold": ("Threshold T", 0.005),
    "divergence": ("Divergence", None),
    "min_ratio": ("Min ratio", 0.01),
    "temperature": ("Temperature", 0.05),
    "max_new_tokens": ("Max new tokens", 1),
}

#: What descriptions of options leave to their documentation.
EXPLANATIONS = {
    "divergence": "js: Jensen-Shannon, kl: Kullback-Leibler, tv: total variation.",
}


def page_app(
    backend: Backend, options: AnswerOptions | None = None, examples: Sequence[str] = ()
) -> PageApp:
    """Build the page's ASGI application, which needs its lifespan.

    ``options`` are initial values of the controls, and the values of options without a control;
    ``examples`` are questions that the page suggests.
    """
    # Gradio would print tracebacks past the limits of the log.
    vars(queueing)["traceback"] = SimpleNamespace(print_exc=_log_failure)
    # Gradio drops asynchronous generators instead of closing them; that closes them as well.
    warnings.filterwarnings("ignore", "coroutine method 'aclose'", RuntimeWarning)
    blocks = build_blocks(backend, options or AnswerOptions(), examples)
    limits = backend.about.limits
    # Requests wait in the decoding queue, not in Gradio's: Stop must get through at any time.
    blocks.max_threads = limits.queue + EXTRA_EVENTS
    blocks.queue(default_concurrency_limit=None, max_size=blocks.max_threads, api_open=False)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    with contextlib.redirect_stdout(io.StringIO()):  # Gradio prints while mounting
        gr.mount_gradio_app(app, blocks, "/", show_api=False, ssr_mode=False, pwa=False)
    mounts = (getattr(route, "app", None) for route in app.routes)
    gradio_app = next(mount for mount in mounts if isinstance(mount, gr.routes.App))
    gradio_app.debug = False  # in an error's response, Gradio would send the traceback
    events = {index: len(event.inputs) for index, event in blocks.fns.items()}
    return PageApp(app, events, gradio_app.stop_event.set)


def build_blocks(backend: Backend, options: AnswerOptions, examples: Sequence[str]) -> gr.Blocks:
    """Lay out the page: the chat on the left, controls and statistics on the right."""
    page, about = Page(backend, options), backend.about
    theme = gr.themes.Soft(
        primary_hue="indigo",
        font=[gr.themes.Font(name) for name in SANS_FONTS],
        font_mono=[gr.themes.Font(name) for name in MONO_FONTS],
    ).set(
        # The theme's own colors have too little contrast.
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_300",
        block_title_text_color="*primary_800",
        # Nor should labels look like buttons.
        block_title_text_color_dark="*primary_200",
        block_title_background_fill="none",
        block_title_background_fill_dark="none",
        block_title_padding="0",
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_300",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_300",
        input_border_width="1px",
        input_border_color="*neutral_500",
        input_border_color_focus="*primary_600",
        input_border_color_dark="*neutral_400",
        input_border_color_focus_dark="*primary_300",
        button_border_width="1px",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_primary_background_fill_hover_dark="*primary_700",
        button_secondary_border_color="*neutral_500",
        button_secondary_border_color_hover="*neutral_500",
        button_secondary_border_color_dark="*neutral_400",
        button_secondary_border_color_hover_dark="*neutral_400",
        button_secondary_background_fill_hover_dark="*primary_700",
    )
    assets = files("eagle_fsd.chat.web")
    with gr.Blocks(
        title="eagle_fsd",
        theme=theme,
        css=assets.joinpath("style.css").read_text(encoding="utf-8")
        + f".gradio-container {{ --fsd-max: {max_threshold(about):g}; }}",
        head=f"<script>{assets.joinpath('script.js').read_text(encoding='utf-8')}</script>",
        analytics_enabled=False,
        fill_width=True,
    ) as blocks:
        state = gr.State(ChatState())
        _html(
            f"<h1>eagle_fsd</h1><p>Fuzzy Speculative Decoding with <b>{escape(about.name)}</b></p>",
            "fsd-head",
        )
        with gr.Row(elem_id="fsd-page"):
            with gr.Column(scale=7, min_width=320):
                with gr.Column(elem_id="fsd-chat"):
                    log = _html("", "fsd-log")
                    live = _html(rendering.welcome_html(), "fsd-live")
                    comparison = _html("", "fsd-comparison-box")
                    suggestions = gr.Row(elem_id="fsd-examples")
                _html(rendering.legend_html(), "fsd-legend-box")
                box = gr.Textbox(
                    label="Message",
                    show_label=False,
                    placeholder="Message (Shift+Enter for a new line)",
                    lines=1,
                    max_lines=8,
                    max_length=MAX_MESSAGE_LENGTH,
                    elem_id="fsd-box",
                )
                with gr.Row(elem_id="fsd-buttons"):
                    send = _button("Send", "fsd-send", variant="primary")
                    stop = _button("Stop", "fsd-stop", interactive=False)
                    compare = _button("Compare", "fsd-compare-button")
                    clear = _button("New chat", "fsd-clear")
                # Below the buttons: they must not move when it opens.
                _html(rendering.inspector_html(), "fsd-inspector-box")
            with gr.Column(scale=3, min_width=300, elem_id="fsd-side"):
                controls = {name: _control(name, about, options) for name in CONTROLS}
                stats = _html(rendering.stats_html({}, {}), "fsd-stats-box")
            with suggestions:
                for example in examples:
                    button = gr.Button(example, size="sm", min_width=220)
                    _listen(button.click, lambda text=example: text, None, box)

        def on_send(
            request: gr.Request, state: ChatState, message: Any, *values: Any
        ) -> AsyncGenerator[View, None]:
            state.client = _client(request)
            return page.send(state, message, dict(zip(controls, values, strict=True)))

        def on_compare(
            request: gr.Request, state: ChatState, message: Any, *values: Any
        ) -> AsyncGenerator[View, None]:
            state.client = _client(request)
            return page.compare(state, message, dict(zip(controls, values, strict=True)))

        def on_sent(state: ChatState, text: Any) -> list[Any]:
            return _component_values(page.restore_question(state, text))

        async def on_clear(state: ChatState) -> list[Any]:
            return _component_values(await page.clear(state))

        inputs = [state, box, *controls.values()]
        outputs = [box, log, live, stats, comparison, stop]
        sent = _listen([send.click, box.submit], _streaming(on_send), inputs, outputs)
        _listen(sent.then, on_sent, [state, box], outputs)
        _listen(sent.then, _streaming(page.measure_baseline), [state], outputs)
        _listen(compare.click, _streaming(on_compare), inputs, outputs)
        _listen(stop.click, page.stop, [state], None)
        _listen(clear.click, on_clear, [state], outputs)
    return blocks


def _log_failure() -> None:
    log.warning("an event of the page failed", exc_info=True)


def _client(request: gr.Request) -> str:
    """Return the client that the guard has identified."""
    scope: Any = request.request and request.request.scope
    return str(scope["state"]["client"])


def _control(name: str, about: About, options: AnswerOptions) -> gr.components.Component:
    """Build the slider or drop-down list of an option, with the bounds declared by its model."""
    own = name in ACCEPTANCE_CONTROLS
    owner: Options = about.acceptance if own else options
    option, value = type(owner).model_fields[name], getattr(owner, name)
    label, step = CONTROLS[name]
    common: dict[str, Any] = {
        "label": label,
        "info": f"{option.description} {EXPLANATIONS.get(name, '')}".rstrip(),
        "elem_id": f"fsd-{name.replace('_', '-')}",
        "interactive": about.acceptance.rule == "fsd" or not own,
    }
    if choices := get_args(option.annotation):
        return gr.Dropdown(list(choices), value=value, **common)
    bounds = {"le": math.inf}
    for item in option.metadata:
        bounds |= {key: getattr(item, key) for key in ("ge", "le") if hasattr(item, key)}
    limits = {
        "threshold": max_threshold(about),
        "temperature": max(MAX_TEMPERATURE, options.temperature),
        "max_new_tokens": about.limits.max_new_tokens,
    }
    high = min(bounds["le"], limits.get(name, math.inf))
    return gr.Slider(bounds["ge"], high, value=min(value, high), step=step, **common)


def _html(value: str, elem_id: str) -> gr.HTML:
    return gr.HTML(value, elem_id=elem_id, padding=False)


def _button(
    label: str,
    elem_id: str,
    variant: Literal["primary", "secondary"] = "secondary",
    interactive: bool = True,
) -> gr.Button:
    return gr.Button(label, elem_id=elem_id, variant=variant, interactive=interactive, min_width=90)


def _listen(trigger: Any, function: Any, inputs: Any, outputs: Any) -> Any:
    """Register an event without a progress display and outside Gradio's public API."""
    common = {
        "show_progress": "hidden",
        "show_api": False,
        "api_name": False,
        "concurrency_limit": None,
    }
    if isinstance(trigger, list):
        return gr.on(trigger, function, inputs, outputs, trigger_mode="once", **common)
    return trigger(function, inputs, outputs, **common)


def _streaming(
    views: Callable[..., AsyncGenerator[View, None]],
) -> Callable[..., AsyncIterator[list[Any]]]:
    """Turn a stream of views into a Gradio event handler.

    The last view is empty because Gradio renders an event's last view once more after the event,
    when the visitor may have started a new chat.
    """

    @wraps(views)  # Gradio passes the request because of the annotation
    async def handler(*values: Any) -> AsyncIterator[list[Any]]:
        async with contextlib.aclosing(views(*values)) as stream:
            async for view in stream:
                yield _component_values(view)
        yield _component_values(View())

    return handler


def _component_values(view: View) -> list[Any]:
    """Return the outputs of an event; unchanged parts are not sent."""
    stop = None if view.stoppable is None else gr.update(interactive=view.stoppable)
    parts = (view.box, view.log, view.live, view.stats, view.comparison, stop)
    return [gr.skip() if part is None else part for part in parts]
