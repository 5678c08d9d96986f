"""Serve the files of the web page, and what its controls need to know."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, get_args

from fastapi import FastAPI, Request
from fastapi.responses import Response

from eagle_fsd.chat.backend import LocalBackend
from eagle_fsd.chat.config import AnswerOptions
from eagle_fsd.chat.serve.guard import PAGE_ROUTES
from eagle_fsd.utils.options import Options, OptionsError, field_bounds

#: Maximum of the temperature slider, as in the API.
MAX_TEMPERATURE = 2.0
#: Acceptance options with a control on the page.
ACCEPTANCE_CONTROLS = ("threshold", "divergence", "min_ratio")
#: Labels of the controls by option, and the step of each slider.
CONTROLS: dict[str, tuple[str, float | None]] = {
    "threshold": ("Threshold T", 0.005),
    "divergence": ("Divergence", None),
    "min_ratio": ("Min ratio", 0.01),
    "temperature": ("Temperature", 0.05),
    "max_new_tokens": ("Max new tokens", 1),
}
#: Explanations that controls add to the descriptions of options.
EXPLANATIONS = {
    "divergence": "js: Jensen-Shannon, kl: Kullback-Leibler, tv: total variation.",
}
MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_page(app: FastAPI, settings: dict[str, Any]) -> None:
    """Add the page's files, and ``/page.json``, which requires a key if the API does."""
    folder = files("eagle_fsd.chat.web")
    for route in PAGE_ROUTES:
        name = route.strip("/") or "page.html"
        content = folder.joinpath(name).read_bytes()
        media_type = MEDIA_TYPES[name.rpartition(".")[2]]

        def serve(_: Request, content: bytes = content, media_type: str = media_type) -> Response:
            return Response(content, headers=HEADERS, media_type=media_type)

        app.add_route(route, serve, include_in_schema=False)

    @app.get("/page.json", include_in_schema=False)
    async def values() -> dict[str, Any]:
        return settings


def page_settings(
    backend: LocalBackend, options: AnswerOptions, examples: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the page's settings as JSON values; raises OptionsError for those it cannot show.

    ``options`` are initial values of the controls, and the values of options without a control;
    ``examples`` are questions that the page suggests.
    """
    acceptance = backend.default_acceptance
    if options.temperature > MAX_TEMPERATURE:
        message = f"--temperature must be at most {MAX_TEMPERATURE:g} for the page"
        raise OptionsError(f"{message}; got {options.temperature:g}")
    return {
        "model": backend.names[0],
        "rule": acceptance.rule,
        "label": acceptance.label,
        "controls": [_control(name, backend, options) for name in CONTROLS],
        "params": options.model_dump(exclude_none=True, exclude=set(CONTROLS)),
        "examples": examples,
        "max_body": backend.limits.max_body,
    }


def _control(name: str, backend: LocalBackend, options: AnswerOptions) -> dict[str, Any]:
    """Describe an option's slider or drop-down list, within the bounds of option and server."""
    acceptance = backend.default_acceptance
    is_acceptance = name in ACCEPTANCE_CONTROLS
    owner: Options = acceptance if is_acceptance else options
    option, value = type(owner).model_fields[name], getattr(owner, name)
    label, step = CONTROLS[name]
    control = {
        "name": name,
        "label": label,
        "info": f"{option.description} {EXPLANATIONS.get(name, '')}".rstrip(),
        "acceptance": is_acceptance,
        "enabled": not is_acceptance or (acceptance.rule == "fsd" and not backend.limits.lossless),
    }
    if choices := get_args(option.annotation):
        return {**control, "choices": choices, "value": value}
    bounds = {"le": math.inf, **field_bounds(option)}
    limits = {
        "threshold": _max_threshold(backend),
        "temperature": MAX_TEMPERATURE,
        "max_new_tokens": backend.limits.max_new_tokens,
    }
    high = min(bounds["le"], limits.get(name, math.inf))
    scale = {"min": bounds["ge"], "max": high, "step": step}
    return {**control, **scale, "value": min(value, high)}


def _max_threshold(backend: LocalBackend) -> float:
    threshold = backend.default_acceptance.threshold
    if math.isinf(threshold):
        raise OptionsError(f"threshold must be finite for the web page's slider; got {threshold}")
    return max(backend.limits.max_threshold, threshold)
