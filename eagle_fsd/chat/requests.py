"""A request as it comes over the network, checked and bounded before anything is decoded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from eagle_fsd.chat.config import AnswerOptions, Limits
from eagle_fsd.chat.session import ContextError, fit_chat, most_characters
from eagle_fsd.chat.wire_format import unpack
from eagle_fsd.model.config import FSDSettings
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.chat_templates import ChatFormat

#: Settings of FSD's that a request may choose; the tree is the server's.
CHOOSABLE = ("threshold", "divergence", "min_ratio", "fallback", "selection", "divergence_on")
#: OpenAI's bound on alternatives a token.
MOST_ALTERNATIVES = 20
MOST_STOPS = 16
LONGEST_STOP = 256
#: Lists and objects within one another in a request.
DEEPEST = 32
#: Seconds that a client may take to send a request.
BODY_SECONDS = 30.0
#: Characters of an error's message: it may quote the request.
LONGEST_MESSAGE = 500
#: Temperatures below are greedy: logits divided by one overflow.
COLDEST = 1e-3


class RequestError(ValueError):
    """A request asks for something that is not to be had.

    Attributes:
        code: FastChat's, of ``fastchat.constants.ErrorCode``.
    """

    INVALID, OUT_OF_RANGE, CONTEXT = 40001, 40302, 40303

    def __init__(self, message: str, code: int = OUT_OF_RANGE) -> None:
        super().__init__(shortened(message))
        self.code = code


def shortened(message: str) -> str:
    """``message`` as one that tells an error may be: a request's megabyte is not sent back."""
    if len(message) <= LONGEST_MESSAGE:
        return message
    return f"{message[: LONGEST_MESSAGE - 4]} ..."


def announces_more(content_length: str, most: int) -> bool:
    """Whether that header tells of a body larger than it may be, which need not be read then."""
    digits = content_length.strip()
    return digits.isdecimal() and (len(digits) > 18 or int(digits) > most)


def read_json(data: bytes) -> dict[str, Any]:
    """The object that a request's body holds: numbers finite, text whole, nesting bounded.

    Raises:
        RequestError: It holds something else.
    """
    try:
        value = json.loads(data, parse_constant=_finite, parse_float=_finite)
    except RecursionError as error:
        raise RequestError("the request is nested too deeply", RequestError.INVALID) from error
    except ValueError as error:
        raise RequestError("the request is not JSON", RequestError.INVALID) from error
    if not isinstance(value, dict):
        raise RequestError("the request is not a JSON object", RequestError.INVALID)
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        level = [inner for item in level for inner in _inside(item)]
    if level:
        raise RequestError("the request is nested too deeply", RequestError.INVALID)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # no tokenizer and no answer can hold that
        message = "the request holds half a character (a lone surrogate)"
        raise RequestError(message, RequestError.INVALID) from error
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number of JSON's")
    return value


def _inside(value: Any) -> Sequence[Any]:
    """The lists and objects in a list or an object."""
    items = value.values() if isinstance(value, dict) else value
    return [item for item in items if isinstance(item, (dict, list))]


@dataclass(frozen=True)
class AnswerRequest:
    """What is to be answered, and how.

    Attributes:
        ids: ``[1, S]``.
        settings: FSD's, the request's own above the server's.
        details: Alternatives a token whose log-probabilities are asked for; None: none are.
        echo: The raw prompt, where the answer is to begin with it.
        dropped: Messages left out because the chat outgrew the context.
    """

    ids: Tensor
    options: AnswerOptions
    settings: FSDSettings
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    details: int | None = None
    echo: str = ""
    dropped: int = 0


def read_request(
    params: Mapping[str, Any], model: EagleFSD, wording: ChatFormat, limits: Limits
) -> AnswerRequest:
    """The parameters FastChat's API server sends a worker, and ours (``fsd``, ``seed``), checked.

    Raises:
        RequestError: Something is missing, of another type, or out of its bounds.
    """
    prompt = params.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise RequestError("the prompt must be a text, and not empty", RequestError.INVALID)
    chat = unpack(prompt)
    stop = _stops(params.get("stop"))
    ends = _token_ids(params.get("stop_token_ids"), model.target.vocabulary)
    dropped = 0
    try:
        if chat is None:
            ids = _raw_ids(prompt, model)
            if ids.shape[1] >= model.target.context:
                raise ContextError(
                    f"the prompt's {ids.shape[1]} tokens fill the context of"
                    f" {model.target.context} tokens"
                )
        else:
            ids, dropped = fit_chat(model, wording, chat)
            stop, ends = (*stop, *wording.stop), (*ends, *wording.stop_token_ids)
    except ContextError as error:
        raise RequestError(str(error), RequestError.CONTEXT) from error
    except ValueError as error:  # the template refuses the chat
        raise RequestError(str(error), RequestError.INVALID) from error
    if not ids.shape[1]:
        raise RequestError("the prompt has no tokens", RequestError.INVALID)
    echo = prompt if params.get("echo") and chat is None else ""
    options, settings = _options(params, limits), _settings(params.get("fsd"), model, limits)
    details = _details(params.get("logprobs"))
    return AnswerRequest(ids, options, settings, stop, ends, details, echo, dropped)


def _raw_ids(prompt: str, model: EagleFSD) -> Tensor:
    most = most_characters(model.target.context)
    if len(prompt) > most:  # not worth the tokenizer's time
        raise ContextError(
            f"the prompt's {len(prompt)} characters are more than the {most} that may be tried:"
            f" the context is {model.target.context} tokens"
        )
    return model.tokenizer(prompt, return_tensors="pt").input_ids


def _options(params: Mapping[str, Any], limits: Limits) -> AnswerOptions:
    given = {
        item.name: params[item.name]
        for item in fields(AnswerOptions)
        if params.get(item.name) is not None
    }
    given.setdefault("max_new_tokens", limits.max_new_tokens)
    if given.get("top_k") == -1:  # off, in FastChat's words
        given["top_k"] = 0
    if given.get("top_p") == 0:  # "greedy", to some clients
        given["top_p"], given["temperature"] = 1.0, 0.0
    try:
        options = AnswerOptions.from_dict(given)
    except (ValueError, TypeError) as error:
        raise RequestError(str(error)) from error
    cold = options.temperature < COLDEST
    return options.updated(
        max_new_tokens=min(options.max_new_tokens, limits.max_new_tokens),
        temperature=0.0 if cold else options.temperature,
    )


def _settings(given: Any, model: EagleFSD, limits: Limits) -> FSDSettings:
    if given is None:
        return model.settings
    if not isinstance(given, Mapping):
        raise RequestError("fsd must be an object of settings", RequestError.INVALID)
    unknown = sorted(set(map(str, given)) - set(CHOOSABLE))
    if unknown:
        raise RequestError(
            f"fsd has no setting {', '.join(unknown)}; a request may set {', '.join(CHOOSABLE)}"
        )
    try:
        settings = model.settings.updated(**given)
    except (ValueError, TypeError) as error:
        raise RequestError(str(error)) from error
    bound = max(limits.max_threshold, model.settings.threshold)
    if settings.threshold > bound:
        raise RequestError(f"threshold must be at most {bound:g} here; got {settings.threshold:g}")
    return settings


def _details(asked: Any) -> int | None:
    if asked is None or asked is False:
        return None
    if isinstance(asked, bool):
        return 0
    if not isinstance(asked, int) or not 0 <= asked <= MOST_ALTERNATIVES:
        raise RequestError(f"logprobs must be between 0 and {MOST_ALTERNATIVES}; got {asked!r}")
    return asked


def _stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given or []
    if not isinstance(stops, Sequence) or not all(isinstance(item, str) for item in stops):
        raise RequestError("stop must be a text or a list of texts", RequestError.INVALID)
    if len(stops) > MOST_STOPS or any(len(item) > LONGEST_STOP for item in stops):
        raise RequestError(f"stop may hold {MOST_STOPS} texts of {LONGEST_STOP} characters at most")
    return tuple(stops)


def _token_ids(given: Any, vocabulary: int) -> tuple[int, ...]:
    ids = given or []
    valid = isinstance(ids, Sequence) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < vocabulary
        for item in ids
    )
    if not valid:
        raise RequestError("stop_token_ids must be a list of the vocabulary's ids")
    return tuple(ids)
