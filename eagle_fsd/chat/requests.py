"""Validate the parameters of a request and tokenize its prompt, before anything is decoded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Field, field_validator, model_validator
from torch import Tensor

from eagle_fsd.chat.config import AnswerOptions, Limits
from eagle_fsd.chat.request_body import RequestError
from eagle_fsd.chat.session import AnswerRequest, ContextLengthError, fit_chat, max_chars
from eagle_fsd.chat.wire_format import decode_chat
from eagle_fsd.model.config import AcceptanceConfig
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.chat_templates import ChatTemplate
from eagle_fsd.utils.options import OptionsError

#: Maximum number of alternatives per token, as in OpenAI's API.
MAX_ALTERNATIVES = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


class WorkerParams(AnswerOptions):
    """Parameters of a worker request: those that FastChat's API server sends, and ``fsd``.

    Unknown parameters are ignored.
    """

    model_config = ConfigDict(extra="ignore")

    stop: list[str] = Field(default=[], description="Strings that end the answer.")
    stop_token_ids: list[int] = Field(default=[], description="Tokens that end the answer.")
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_ALTERNATIVES,
        description="Report log-probabilities, with this many alternatives per token.",
    )
    echo: bool = Field(default=False, description="Begin the answer with a raw prompt.")
    fsd: dict[str, Any] = Field(
        default={}, description="Acceptance options that override the server's."
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_variants(cls, params: dict[str, Any]) -> dict[str, Any]:
        params = dict(params)
        if params.get("top_k") == -1:  # FastChat's value for disabling top-k
            params["top_k"] = 0
        if params.get("top_p") == 0:  # some clients request greedy decoding this way
            params |= {"top_p": 1.0, "temperature": 0.0}
        if isinstance(params.get("logprobs"), bool):
            params["logprobs"] = 0 if params["logprobs"] else None
        return params

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, stop: Any) -> Any:
        strings = [stop] if isinstance(stop, str) else stop
        valid = isinstance(strings, list) and len(strings) <= MAX_STOP_STRINGS
        if not valid or not all(
            isinstance(item, str) and len(item) <= MAX_STOP_LENGTH for item in strings
        ):
            raise ValueError(
                f"stop must be a string or a list of at most {MAX_STOP_STRINGS} strings, each of at"
                f" most {MAX_STOP_LENGTH} characters; got {stop!r}"
            )
        return strings

    @field_validator("fsd", mode="before")
    @classmethod
    def _check_fsd(cls, fsd: Any) -> Any:
        if not isinstance(fsd, dict):
            raise ValueError(f"fsd must be an object; got {fsd!r}")
        return _without_nulls(fsd)

    def answer_options(self, limits: Limits) -> AnswerOptions:
        """Return the options of the answer, reduced to a server's limits.

        Args:
            limits: The server's limits.
        """
        names = set(AnswerOptions.model_fields)
        options = AnswerOptions.from_dict(self.model_dump(include=names))
        return options.updated(max_new_tokens=min(options.max_new_tokens, limits.max_new_tokens))


def read_request(
    params: Mapping[str, Any], model: EagleFSD, chat_template: ChatTemplate, limits: Limits
) -> AnswerRequest:
    """Validate the parameters of a worker request and tokenize its prompt.

    Args:
        params: The ``prompt`` and the fields of :class:`WorkerParams`; null is the same as absent.
        model: The pair; its acceptance options are the defaults.
        chat_template: How a chat encoded in the prompt is formatted.
        limits: The server's limits.

    Raises:
        RequestError: A parameter is missing, of the wrong type or out of bounds, or the prompt does
            not fit the context.
    """
    prompt = params.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise RequestError("prompt must be a non-empty string", RequestError.INVALID)
    given = _without_nulls(params)
    given.setdefault("max_new_tokens", limits.max_new_tokens)
    try:
        parsed = WorkerParams.from_dict(given)
    except OptionsError as error:
        raise RequestError(str(error)) from error
    acceptance = _acceptance(parsed.fsd, model.acceptance, limits)
    last_token = model.target.vocab_size - 1
    if not all(0 <= token <= last_token for token in parsed.stop_token_ids):
        raise RequestError(f"stop_token_ids must be token ids in [0, {last_token}]")
    stop, stop_token_ids = [*parsed.stop], [*parsed.stop_token_ids]
    chat, dropped = decode_chat(prompt), 0
    try:
        if chat is None:
            ids = _encode_raw(prompt, model)
        else:
            ids, dropped = fit_chat(model, chat_template, chat)
            stop += chat_template.stop
            stop_token_ids += chat_template.stop_token_ids
    except ContextLengthError as error:
        raise RequestError(str(error), RequestError.CONTEXT) from error
    except ValueError as error:  # the template rejects the chat
        raise RequestError(str(error), RequestError.INVALID) from error
    if not ids.shape[1]:
        raise RequestError("the prompt has no tokens", RequestError.INVALID)
    return AnswerRequest(
        ids,
        parsed.answer_options(limits),
        acceptance,
        stop,
        stop_token_ids,
        details=parsed.logprobs,
        echo=prompt if parsed.echo and chat is None else "",
        dropped=dropped,
    )


def _acceptance(
    given: Mapping[str, Any], default: AcceptanceConfig, limits: Limits
) -> AcceptanceConfig:
    """Return the server's acceptance options with those of a request."""
    try:
        acceptance = AcceptanceConfig.from_dict({**default.model_dump(), **given})
    except OptionsError as error:
        raise RequestError(f"fsd: {error}") from error
    bound = max(limits.max_threshold, default.threshold)
    if acceptance.threshold > bound:
        raise RequestError(
            f"fsd: threshold must be at most {bound:g} on this server; got {acceptance.threshold:g}"
        )
    return acceptance


def _encode_raw(prompt: str, model: EagleFSD) -> Tensor:
    """Tokenize a raw prompt, which must leave room for at least one new token."""
    context = model.target.context_length
    if len(prompt) > max_chars(context):
        raise ContextLengthError(
            f"the prompt has {len(prompt)} characters, more than the {max_chars(context)} that are"
            f" tokenized; the context length is {context} tokens"
        )
    ids: Tensor = model.tokenizer(prompt, return_tensors="pt").input_ids
    if ids.shape[1] >= context:
        raise ContextLengthError(
            f"the prompt's {ids.shape[1]} tokens fill the context of {context} tokens"
        )
    return ids
