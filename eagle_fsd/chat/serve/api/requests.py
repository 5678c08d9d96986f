"""OpenAI requests as today's clients send them, made fit for FastChat's API server.

That server knows the API of 2023. What it would stumble over is worded in its terms or refused
here, and what it would drop (FSD's options, seeds, log-probabilities of chats, usage in streams)
is taken aside as :class:`Extras`, which the launcher carries around it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_fsd.chat.requests import RequestError, read_json, shortened
from eagle_fsd.chat.wire_format import clean

#: Answers to one request at most.
MOST_CHOICES = 16
#: Texts in one request for embeddings at most, as OpenAI has it.
MOST_TEXTS = 2048
#: What clients may ask for and would miss silently.
NOT_HERE = ("tools", "functions", "tool_choice", "function_call", "suffix", "logit_bias")
NOT_HERE += ("use_beam_search",)
#: What FastChat's server is told. Of anything else it would find fault with the type.
FORWARDED = ("model", "messages", "prompt", "input", "encoding_format", "n", "max_tokens")
FORWARDED += ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "stop")
FORWARDED += ("stream", "echo", "logprobs", "best_of")


class ApiError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: Of HTTP. kind, code: OpenAI's words for it.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | int | None = None,
    ) -> None:
        super().__init__(shortened(message))
        self.status, self.kind, self.code = status, kind, code

    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.kind, "param": None, "code": self.code}
        return {"error": error}


@dataclass
class Extras:
    """What goes around FastChat's API server, there and back.

    Attributes:
        params: For the worker, beside what FastChat sends it.
        chat: Whether it is a chat; else a plain completion.
        logprobs: Whether log-probabilities are asked for.
        stream: Whether the answer is streamed. include_usage: With the usage at its end.
        choices: How many are asked for of every prompt.
        outputs: Each choice's last output of the worker.
        pending: Each choice's log-probabilities of a stream that no chunk has carried yet.
        turn: Whose it is, of the choices of an answer that is not streamed.
        refusal: What the worker said to a choice that it did not answer.
    """

    params: dict[str, Any] = field(default_factory=dict)
    chat: bool = True
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    choices: int = 1
    outputs: list[dict[str, Any]] = field(default_factory=list)
    pending: dict[int, dict[str, list[Any]]] = field(default_factory=dict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    refusal: dict[str, Any] | None = None


def translate_body(path: str, data: bytes) -> tuple[bytes, Extras]:
    """The body FastChat's server is to see, and what goes around it.

    Raises:
        ApiError: The request is malformed, or asks for what is not there.
    """
    try:
        body = read_json(data)
    except RequestError as error:
        raise ApiError(str(error)) from error
    if not isinstance(body.get("model"), str):
        raise ApiError("model must be a text")
    if path.endswith("/embeddings"):
        extras = _embeddings(body)
    else:
        _check_common(body)
        extras = _chat(body) if path.endswith("/chat/completions") else _completion(body)
        extras.stream = body.get("stream") is True
        extras.choices = body.get("n") or 1
        options = body.get("stream_options")
        if options is not None and not isinstance(options, dict):
            raise ApiError("stream_options must be an object")
        extras.include_usage = bool((options or {}).get("include_usage"))
        for name in ("fsd", "seed"):
            if body.get(name) is not None:
                extras.params[name] = body[name]
    told = {name: body[name] for name in FORWARDED if body.get(name) is not None}
    return json.dumps(told).encode(), extras


def _check_common(body: dict[str, Any]) -> None:
    for name in NOT_HERE:
        if body.get(name) not in (None, False, [], {}, "none", "auto", ""):
            raise ApiError(f"{name} is not supported")
    form = body.get("response_format")
    if form is not None and not (isinstance(form, dict) and form.get("type") == "text"):
        raise ApiError("response_format knows only text")
    bounds = {"n": (1, MOST_CHOICES), "max_tokens": (1, 2**31), "best_of": (1, 1)}
    if body.get("max_completion_tokens") is not None:
        body["max_tokens"] = body["max_completion_tokens"]
    for name, (low, high) in bounds.items():
        value = body.get(name)
        if value is None:
            body.pop(name, None)  # FastChat's own default, which is never None
        elif isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ApiError(f"{name} must be a whole number between {low} and {high}")
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "top_k"):
        value = body.get(name)
        if value is None:
            body.pop(name, None)
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ApiError(f"{name} must be a number")
        elif not abs(value) < 1e6:  # nor infinite, nor NaN
            raise ApiError(f"{name} is out of range")
    if isinstance(body.get("top_k"), float) and not body["top_k"].is_integer():
        raise ApiError("top_k must be a whole number")
    for name in ("stream", "echo"):
        if body.get(name) is not None and not isinstance(body[name], bool):
            raise ApiError(f"{name} must be true or false")
    stop = body.get("stop")
    if stop is not None:
        texts = [stop] if isinstance(stop, str) else stop
        if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
            raise ApiError("stop must be a text or a list of texts")


def _chat(body: dict[str, Any]) -> Extras:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be a list with at least one message")
    system, turns = [], []
    for message in messages:
        if not isinstance(message, Mapping):
            raise ApiError("every message must be an object")
        role, text = message.get("role"), _text(message.get("content"))
        if role in ("system", "developer"):
            system.append(text)
        elif role in ("user", "assistant"):
            turns.append({"role": role, "content": text})
        else:
            raise ApiError(f"messages of the role {role!r} are not supported")
    if not turns:
        raise ApiError("messages must hold something that the user says")
    # FastChat keeps one word of the system's, the last.
    head = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    body["messages"] = head + turns
    asked, top = body.pop("logprobs", None), body.pop("top_logprobs", None)
    if asked not in (None, False, True):
        raise ApiError("logprobs must be true or false")
    if top is not None and (isinstance(top, bool) or not isinstance(top, int) or not asked):
        raise ApiError("top_logprobs must be a whole number, with logprobs true")
    params = {"logprobs": top or 0} if asked else {}
    return Extras(params, chat=True, logprobs=bool(asked))


def _completion(body: dict[str, Any]) -> Extras:
    prompt = body.get("prompt")
    texts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) and t for t in texts):
        raise ApiError("prompt must be a text or a list of texts, none empty (no token ids)")
    if len(texts) * (body.get("n") or 1) > MOST_CHOICES:
        raise ApiError(f"prompt may hold {MOST_CHOICES} texts at most, each of n choices counted")
    body["prompt"] = [clean(text) for text in texts]
    asked = body.get("logprobs")
    if asked is not None and (isinstance(asked, bool) or not isinstance(asked, int)):
        raise ApiError("logprobs must be a whole number")
    return Extras(chat=False, logprobs=asked is not None)


def _embeddings(body: dict[str, Any]) -> Extras:
    texts = [body["input"]] if isinstance(body.get("input"), str) else body.get("input")
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) and t for t in texts):
        raise ApiError("input must be a text or a list of texts, none empty (no token ids)")
    if len(texts) > MOST_TEXTS:
        raise ApiError(f"input may hold {MOST_TEXTS} texts at most")
    if body.get("encoding_format") not in (None, "float", "base64"):
        raise ApiError("encoding_format must be float or base64")
    if body.get("dimensions") is not None:
        raise ApiError("dimensions is not supported")
    body["input"] = texts
    return Extras()


def _text(content: Any) -> str:
    """The text of a message's content, which may come in parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return clean(content)
    if not isinstance(content, list):
        raise ApiError("a message's content must be a text or a list of parts")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise ApiError("only parts of the type text are supported")
        if not isinstance(part.get("text"), str):
            raise ApiError("a part's text must be a text")
        texts.append(clean(part["text"]))
    return "\n".join(texts)
