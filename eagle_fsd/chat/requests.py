"""Validate the parameters of a request and tokenize its prompt, before anything is decoded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from pydantic import Field, field_validator, model_validator
from transformers import PreTrainedTokenizerBase
from typing_extensions import NotRequired, TypedDict

from eagle_fsd.chat.config import Limits, RequestOptions
from eagle_fsd.chat.grammar import Grammar, json_grammar
from eagle_fsd.chat.request_body import RequestError
from eagle_fsd.chat.session import AnswerRequest, ContextLengthError, fit_chat, max_chars
from eagle_fsd.model.config import AcceptanceConfig
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.chat_templates import ChatTemplate, TokenizerTemplate
from eagle_fsd.utils.detokenization import CONTEXT_TOKENS, IncrementalDetokenizer
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.text import one_line

#: Maximum number of alternatives per token, as in OpenAI's API.
MAX_ALTERNATIVES = 20
#: Maximum number of log-probabilities of a prompt's tokens and their alternatives.
MAX_PROMPT_LOGPROBS = 262_144
MAX_BIAS = 100
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


class ChatTurn(TypedDict):
    """A message of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    name: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]


class RequestParams(RequestOptions):
    """Parameters of a request for an answer, by FastChat's names; unknown ones are rejected."""

    model: str = Field(default="", description="Name of the model; any is accepted.")
    messages: list[ChatTurn] | None = Field(default=None, description="A chat.")
    truncation: Literal["auto", "disabled"] = Field(
        default="disabled", description="auto: drop the oldest messages of a chat that is too long."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={}, description="Arguments of the tokenizer's chat template."
    )
    prompt: str | None = Field(default=None, description="A raw prompt, instead of a chat.")
    prompt_token_ids: list[int] | None = Field(
        default=None, description="A raw prompt as token ids, instead of ``prompt``."
    )
    max_new_tokens: int = Field(
        ge=0,
        le=1_048_576,
        description="Maximum number of new tokens; 0, with ``echo``, scores the prompt only.",
    )
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_ALTERNATIVES,
        description="Report log-probabilities, with this many alternatives per token.",
    )
    echo: bool = Field(default=False, description="Begin the answer with the raw prompt.")
    json_schema: dict[str, Any] | None = Field(
        default=None, description="JSON schema of the answer."
    )
    tools: list[dict[str, Any]] = Field(
        default=[], description="Functions that the chat template shows, as in OpenAI's API."
    )
    required_tools: list[str] = Field(
        default=[], description="Names of tools, one of which the answer must call."
    )
    strict_length: bool = Field(
        default=False,
        description="Reject max_new_tokens beyond the server's limit or the context's room.",
    )
    best_of: Literal[1] = Field(default=1, description="Not supported; FastChat may send 1.")
    use_beam_search: Literal[False] = Field(
        default=False, description="Not supported; FastChat sends false."
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_variants(cls, params: dict[str, Any]) -> dict[str, Any]:
        """Convert values by which clients disable top-k, decode greedily or ask for logprobs."""
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
        return fsd

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for tool in tools:
            function = tool.get("function")
            if (
                not isinstance(function, dict)
                or not isinstance(function.get("name"), str)
                or not isinstance(function.get("parameters", {}), dict)
            ):
                raise ValueError("tools must be functions with a name and an object of parameters")
        return tools

    @model_validator(mode="after")
    def _check_combinations(self) -> RequestParams:
        prompts = [self.messages, self.prompt, self.prompt_token_ids]
        if not any(prompts):
            raise ValueError(
                "messages must be a non-empty list, prompt a non-empty string, or prompt_token_ids"
                " a non-empty list of token ids"
            )
        if sum(item is not None for item in prompts) > 1:
            raise ValueError("messages, prompt and prompt_token_ids exclude each other")
        if self.lossless and self.fsd:
            raise ValueError("lossless and fsd exclude each other")
        if not {tool["function"]["name"] for tool in self.tools}.issuperset(self.required_tools):
            raise ValueError(f"required_tools must be names of tools; got {self.required_tools}")
        if self.json_schema is not None and self.required_tools:
            raise ValueError("json_schema and required_tools exclude each other")
        if self.constrained and (self.ignore_eos or self.min_tokens):
            name = "required_tools" if self.json_schema is None else "json_schema"
            raise ValueError(f"{name} excludes ignore_eos and min_tokens")
        if self.echo and self.messages is not None:
            raise ValueError("echo requires a raw prompt; got a chat")
        if not self.max_new_tokens and not self.echo:
            raise ValueError("max_new_tokens must be at least 1 unless echo is true; got 0")
        return self

    @property
    def constrained(self) -> bool:
        """Whether the answer must be JSON: of a schema, or a call of a tool."""
        return self.json_schema is not None or bool(self.required_tools)


def read_request(
    params: Mapping[str, Any], model: EagleFSD, chat_template: ChatTemplate, limits: Limits
) -> AnswerRequest:
    """Validate the fields of :class:`RequestParams` and tokenize the prompt.

    Null is the same as absent; the server's acceptance options are the defaults. Raises
    RequestError.
    """
    given = _without_nulls(params)
    given.setdefault("max_new_tokens", limits.max_new_tokens)
    try:
        parsed = RequestParams.from_dict(given)
    except OptionsError as error:
        raise RequestError(str(error)) from error
    acceptance = read_acceptance(parsed.fsd, parsed.lossless, model, limits)
    max_new_tokens = min(parsed.max_new_tokens, limits.max_new_tokens)
    strict = parsed.strict_length and params.get("max_new_tokens") is not None
    if strict and parsed.max_new_tokens > max_new_tokens:
        raise RequestError(
            f"max_new_tokens must be at most {max_new_tokens} on this server;"
            f" got {parsed.max_new_tokens}"
        )
    if parsed.min_tokens > max_new_tokens:
        raise RequestError(
            f"min_tokens must be at most max_new_tokens, {max_new_tokens}; got {parsed.min_tokens}"
        )
    _check_tokens(parsed, model.target.vocab_size)
    if parsed.chat_template_kwargs:
        chat_template = _with_arguments(chat_template, parsed.chat_template_kwargs)
    if parsed.tools:
        chat_template = _with_tools(chat_template, parsed.tools)
    stop, stop_token_ids = [*parsed.stop], [*parsed.stop_token_ids]
    # A FastChat template may be made for another vocabulary.
    template_ends = [
        token for token in chat_template.stop_token_ids if token < model.target.vocab_size
    ]
    echo_texts: list[str] = []
    dropped = 0
    try:
        if parsed.messages is None:
            tokens, echo_texts = _encode_raw(parsed, model)
            ids = torch.tensor([tokens], dtype=torch.long)
        else:
            ids, dropped = fit_chat(
                model, chat_template, parsed.messages, drop=parsed.truncation == "auto"
            )
            if not parsed.ignore_eos:
                stop += chat_template.stop
                stop_token_ids += template_ends
    except ContextLengthError as error:
        raise RequestError(str(error), RequestError.CONTEXT) from error
    except ValueError as error:  # the template rejects the chat
        raise RequestError(str(error), RequestError.INVALID) from error
    if not ids.shape[1]:
        raise RequestError("the prompt has no tokens", RequestError.INVALID, "prompt")
    if strict and parsed.truncation == "disabled":
        _check_room(ids.shape[1], max_new_tokens, model.target.stable_length)
    if parsed.echo and parsed.logprobs is not None:
        _check_prompt_logprobs(ids.shape[1] * (1 + parsed.logprobs))
    ends = sorted({*model.eos_token_ids, *template_ends})
    ending = {"stop": stop, "stop_token_ids": stop_token_ids}
    return AnswerRequest(
        ids,
        parsed.model_copy(update={"max_new_tokens": max(1, max_new_tokens), **ending}),
        acceptance=acceptance,
        compile_grammar=partial(_read_grammar, parsed, model, ends) if parsed.constrained else None,
        details=parsed.logprobs,
        context=ids[0, -CONTEXT_TOKENS:].tolist() if parsed.messages is None else (),
        echo_texts=tuple(echo_texts),
        prompt_only=not max_new_tokens,
        dropped=dropped,
    )


def _check_tokens(parsed: RequestParams, vocab_size: int) -> None:
    """Raise RequestError if token ids or their biases are out of range."""
    if not all(abs(bias) <= MAX_BIAS for bias in parsed.logit_bias.values()):
        raise RequestError(f"logit_bias must have values in [-{MAX_BIAS}, {MAX_BIAS}]")
    for name in ("prompt_token_ids", "stop_token_ids", "logit_bias"):
        if not all(0 <= token < vocab_size for token in getattr(parsed, name) or ()):
            raise RequestError(f"{name} must be token ids in [0, {vocab_size - 1}]")


def _check_room(prompt_tokens: int, max_new_tokens: int, context: int) -> None:
    """Raise RequestError if the context has no room for the longest answer."""
    if prompt_tokens + max_new_tokens > context:
        raise RequestError(
            f"max_new_tokens must be at most {context - prompt_tokens} after a prompt of"
            f" {prompt_tokens} tokens; got {max_new_tokens}: the context has {context} tokens",
            RequestError.CONTEXT,
        )


def _check_prompt_logprobs(values: int) -> None:
    """Raise RequestError if ``echo`` would report too many log-probabilities of a prompt."""
    if values > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            "with echo, the number of prompt tokens times (1 + logprobs) must be at most"
            f" {MAX_PROMPT_LOGPROBS}; got {values}"
        )


def _read_grammar(parsed: RequestParams, model: EagleFSD, ends: Sequence[int]) -> Grammar:
    """Compile the grammar of an answer by JSON schema or tool call; raises RequestError."""
    alternatives: list[tuple[str, Mapping[str, Any], str]] = []
    if parsed.json_schema is not None:
        param = "response_format"
        alternatives.append(("", parsed.json_schema, ""))
    else:
        param = "tools"
        for function in (tool["function"] for tool in parsed.tools):
            if function["name"] in parsed.required_tools:
                before = f'{{"name": {json.dumps(function["name"])}, "arguments": '
                schema = {"type": "object", **function.get("parameters", {})}
                alternatives.append((before, schema, "}"))
    try:
        return json_grammar(alternatives, model.tokenizer, model.target.vocab_size, ends)
    except ValueError as error:
        raise RequestError(f"{param}: {one_line(error)}", RequestError.INVALID, param) from error


def default_acceptance(model: EagleFSD, limits: Limits) -> AcceptanceConfig:
    """Return the acceptance options of requests that set none."""
    return AcceptanceConfig() if limits.lossless else model.acceptance


def read_acceptance(
    fsd: Mapping[str, Any], lossless: bool, model: EagleFSD, limits: Limits
) -> AcceptanceConfig:
    """Return the server's acceptance options with those of a request; raises RequestError."""
    if lossless:
        return AcceptanceConfig()
    default = default_acceptance(model, limits)
    try:
        acceptance = default.overridden(_without_nulls(fsd))
    except OptionsError as error:
        raise RequestError(f"fsd: {error}") from error
    if limits.lossless and not acceptance.lossless:
        raise RequestError(f"fsd: this server is lossless; got {acceptance.label}")
    bound = max(limits.max_threshold, default.threshold)
    if acceptance.threshold > bound:
        raise RequestError(
            f"fsd: threshold must be at most {bound:g} on this server; got {acceptance.threshold:g}"
        )
    if acceptance.rule not in ("fsd", default.rule):
        allowed = " or ".join(dict.fromkeys(("fsd", default.rule)))
        raise RequestError(f"fsd: rule must be {allowed} on this server; got {acceptance.rule}")
    return acceptance


def _with_arguments(template: ChatTemplate, arguments: Mapping[str, Any]) -> ChatTemplate:
    """Return a chat template with arguments; raises RequestError if it cannot have them."""
    reserved = signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    for name in arguments:
        if name in reserved:
            raise RequestError(f"chat_template_kwargs must not set {name}")
    if not isinstance(template, TokenizerTemplate):
        raise RequestError("chat_template_kwargs requires the tokenizer's own chat template")
    return type(template)(template.tokenizer, arguments)


def _with_tools(template: ChatTemplate, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
    """Return a chat template that shows tools; raises RequestError if it ignores them."""
    if isinstance(template, TokenizerTemplate):
        shown = type(template)(template.tokenizer, {**template.arguments, "tools": list(tools)})
        chat = [{"role": "user", "content": ""}]
        try:
            if shown.render(chat) != template.render(chat):
                return shown
        except ValueError as error:
            raise RequestError(str(error), RequestError.INVALID, "tools") from error
    message = "tools are not supported: the model's chat template ignores them"
    raise RequestError(message, RequestError.INVALID, "tools")


def _encode_raw(params: RequestParams, model: EagleFSD) -> tuple[list[int], list[str]]:
    """Return a raw prompt's token ids and, if it is echoed, the text of each.

    The texts of a string add up to it; those of token ids leave out special tokens. Raises
    ContextLengthError if no room is left for the first new token.
    """
    context, prompt = model.target.stable_length, params.prompt
    offsets: list[tuple[int, int]] = []
    if prompt is None:
        ids = params.prompt_token_ids or []
    elif len(prompt) > max_chars(context):
        raise ContextLengthError(
            f"the prompt has {len(prompt)} characters, more than the {max_chars(context)} that are"
            f" tokenized; the context length is {context} tokens"
        )
    else:
        encoded = model.tokenizer(prompt, return_offsets_mapping=True)
        ids, offsets = encoded.input_ids, encoded.offset_mapping
    length = len(ids) + min(1, params.max_new_tokens)
    if length > context:
        raise ContextLengthError(
            f"the prompt's {len(ids)} tokens fill the context of {context} tokens"
        )
    if not params.echo:
        return ids, []
    if prompt is None:
        detokenizer = IncrementalDetokenizer(model.tokenizer)
        return ids, [detokenizer.step(token) for token in ids]
    ends = [0, *accumulate((end for _, end in offsets[:-1]), max), len(prompt)]
    return ids, [prompt[start:end] for start, end in pairwise(ends)]
