"""OpenAI's formats: request models, response bodies and errors.

Requests have the parameters of OpenAI's API that are supported, others that clients send and that
have no effect, and this project's own. Types are strict, and unknown parameters are rejected. Null
is the same as absent.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import abstractmethod
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from secrets import token_hex
from typing import Annotated, Any, Literal

import numpy as np
from fastapi.exceptions import RequestValidationError
from numpy.typing import NDArray
from pydantic import (
    AliasChoices,
    FailFast,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    model_validator,
)
from starlette.exceptions import HTTPException

from eagle_fsd.chat.config import RequestOptions
from eagle_fsd.chat.decode_queue import JobUpdate
from eagle_fsd.chat.request_body import RequestError, UnansweredError, shorten
from eagle_fsd.chat.requests import MAX_ALTERNATIVES, MAX_BIAS
from eagle_fsd.chat.serve.body import Body
from eagle_fsd.chat.serve.tools import (
    MAX_TOOLS,
    Tool,
    ToolCall,
    ToolChoice,
    ToolParser,
)
from eagle_fsd.chat.text import Piece, TokenDecoder
from eagle_fsd.model.config import AcceptanceConfig, Certificate
from eagle_fsd.utils.text import one_line

#: Maximum number of choices in a response, for all prompts together.
MAX_CHOICES = 128
#: Maximum number of texts in a request for embeddings, as in OpenAI's API.
MAX_EMBEDDING_INPUTS = 2048
MAX_TOKENS = 1_048_576
#: Maximum number of log-probabilities in a response that is not streamed, of about 100 bytes each.
MAX_LOGPROBS = 262_144
MAX_BIASES = 300
#: Parameters that are passed on as they are.
_FORWARDED = {
    *RequestOptions.model_fields,
    *("echo", "logprobs", "truncation", "chat_template_kwargs"),
}
#: Parameters that change which tokens are sampled, beside the temperature.
_SHAPING = {
    *("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "min_tokens", "ignore_eos"),
}


def _to_strings(value: Any) -> list[str]:
    strings = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str) for item in strings):
        raise ValueError("must be a string or a list of strings")
    return strings


def _to_text(content: Any) -> str:
    """Join the parts of a message's content."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        valid = isinstance(part, dict) and part.keys() == {"type", "text"}
        if not valid or part["type"] != "text" or not isinstance(part["text"], str):
            raise ValueError("must be a string or a list of parts of type text")
    return "\n".join(part["text"] for part in parts)


def _to_prompts(value: Any) -> list[str | list[int]]:
    """Validate ``prompt``, and return it as a list."""

    def is_prompt(item: Any) -> bool:
        return bool(item) and (isinstance(item, str) or is_ids(item))

    def is_ids(item: Any) -> bool:
        return isinstance(item, list) and all(type(token) is int for token in item)

    prompts = [value] if isinstance(value, str) or is_ids(value) else value
    valid = isinstance(prompts, list) and 1 <= len(prompts) <= MAX_CHOICES
    if not valid or not all(map(is_prompt, prompts)):
        raise ValueError(
            f"must be a non-empty string, a list of token ids, or a list of 1 to {MAX_CHOICES} of"
            " these"
        )
    return prompts


def _to_biases(value: Any) -> dict[int, float]:
    """Validate ``logit_bias``, whose keys are strings in JSON."""

    def valid(token: Any, bias: Any) -> bool:
        number = type(bias) in (int, float) and -MAX_BIAS <= bias <= MAX_BIAS
        return isinstance(token, str) and token.isdecimal() and len(token) < 10 and number

    if (
        not isinstance(value, dict)
        or len(value) > MAX_BIASES
        or not all(valid(*item) for item in value.items())
    ):
        raise ValueError(
            f"must be an object of at most {MAX_BIASES} token ids with numbers in [-{MAX_BIAS},"
            f" {MAX_BIAS}]"
        )
    return {int(token): float(bias) for token, bias in value.items()}


Biases = Annotated[
    dict[int, float], PlainValidator(_to_biases, json_schema_input_type=dict[str, float])
]
Strings = Annotated[list[str], PlainValidator(_to_strings, json_schema_input_type=str | list[str])]
Text = Annotated[str, PlainValidator(_to_text, json_schema_input_type=str | list[dict[str, str]])]
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(
        _to_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
    ),
]


class Message(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = ""
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = Field(default=[])
    tool_call_id: str | None = None
    annotations: list[Any] = Field(default=[], max_length=0)
    parsed: Any = Field(default=None, description="Ignored; OpenAI's client adds it.")

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        # An assistant may have called tools only.
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise ValueError("must have content")
        return self


def to_chat(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return a chat with its system messages joined in front: many templates allow no others."""
    system: list[str] = []
    chat: list[dict[str, Any]] = []
    for message in messages:
        if message.role in ("system", "developer"):
            system.append(message.content)
        else:
            names = {"name", "reasoning_content", "tool_call_id"}
            extra = message.model_dump(include=names, exclude_none=True)
            if message.tool_calls:
                extra["tool_calls"] = [call.for_template() for call in message.tool_calls]
            chat.append({"role": message.role, "content": message.content, **extra})
    if system:
        chat.insert(0, {"role": "system", "content": "\n\n".join(system)})
    return chat


class StreamOptions(Body):
    """Options of a streamed response."""

    include_usage: bool = Field(default=False, description="End the stream with the usage.")
    include_obfuscation: Literal[False] = False
    include_tokens: bool = Field(
        default=False, description="Report new tokens, usage and speed in chunks."
    )


class JsonSchema(Body):
    """A JSON schema; it is always followed, strict or not."""

    name: str
    description: str = ""
    definition: dict[str, Any] = Field(default={"type": "object"}, validation_alias="schema")
    strict: bool = False


class ResponseFormat(Body):
    """Format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("must have json_schema if its type is json_schema, and only then")
        return self

    @property
    def definition(self) -> dict[str, Any] | None:
        """The schema of answers; None for any text."""
        if self.json_schema is not None:
            return self.json_schema.definition
        return {"type": "object"} if self.type == "json_object" else None


class GenerationRequest(RequestOptions, Body):
    """Parameters that chats and completions share."""

    model: str
    n: int = Field(default=1, ge=1, le=MAX_CHOICES, description="Number of choices per prompt.")
    temperature: float = Field(default=0.7, ge=0, le=2, description="0 is greedy.")
    top_p: float = Field(default=1.0, ge=0, le=1, description="1 is off; 0 is greedy.")
    top_k: int = Field(default=-1, ge=-1, description="-1 and 0 are off.")
    stop: Strings = Field(default=[], description="Strings that end the answer.")
    method: Literal["fsd", "ar"] = Field(
        default="fsd", description="ar: decode without the drafter, losslessly."
    )
    stream: bool = Field(default=False, description="Send server-sent events.")
    stream_options: StreamOptions = StreamOptions()
    logit_bias: Biases = Field(default={}, description="Numbers to add to logits, by token id.")
    user: str = Field(default="", description="Not used.")
    metadata: dict[str, Any] = Field(default={}, description="Not used.")
    store: bool = Field(default=False, description="Not used.")
    service_tier: str = Field(default="auto", description="Not used.")
    safety_identifier: str = Field(default="", description="Not used.")
    prompt_cache_key: str = Field(default="", description="Not used.")
    _length_name: str = PrivateAttr("max_tokens")

    @model_validator(mode="after")
    def _check_unused(self) -> GenerationRequest:
        if self.method == "ar" and self.fsd:
            raise ValueError("must not set both fsd and method ar")
        if not self.stream and "stream_options" in self.model_fields_set:
            raise ValueError("must set stream with stream_options")
        return self

    @property
    def parameter_names(self) -> dict[str, str]:
        """The client's parameters by the names that ``eagle_fsd.chat.requests`` has for them."""
        return {
            **{name: name for name in type(self).model_fields},
            "max_new_tokens": self._length_name,
            "prompt_token_ids": "prompt",
            "json_schema": "response_format",
            "required_tools": "tool_choice",
        }

    def answer_params(self) -> list[dict[str, Any]]:
        """Return the parameters of each choice, as ``eagle_fsd.chat.requests`` declares them.

        Choice ``i`` of a prompt has the seed ``seed + i``; otherwise all would be the same.
        """
        params = self.model_dump(include=_FORWARDED, exclude_none=True)
        params["strict_length"] = "max_new_tokens" in self.model_fields_set
        requests = [{**params, **prompt} for prompt in self._prompts() for _ in range(self.n)]
        if self.seed is not None:
            for index, request in enumerate(requests):
                request["seed"] = (self.seed + index % self.n) % 2**63
        return requests

    def decodes_as(self, certificate: Certificate) -> bool:
        """Whether answers are sampled like those that the certificate was measured on."""
        fields = type(self).model_fields
        same = all(getattr(self, name) == fields[name].default for name in _SHAPING)
        return same and self.temperature == certificate.temperature

    @abstractmethod
    def _prompts(self) -> list[dict[str, Any]]:
        """Return the parameters that differ among prompts."""


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    chat_template_kwargs: dict[str, Any] = Field(
        default={}, description="Arguments of the tokenizer's chat template."
    )
    truncation: Literal["auto", "disabled"] = Field(
        default="disabled", description="auto: drop the oldest messages if the chat is too long."
    )
    max_new_tokens: int | None = Field(  # type: ignore[assignment]
        default=None,
        ge=1,
        le=MAX_TOKENS,
        validation_alias=AliasChoices("max_completion_tokens", "max_tokens"),
        description="Maximum number of tokens, also as max_tokens; default: the server's limit.",
    )
    logprobs: bool = Field(default=False, description="Report log-probabilities.")
    top_logprobs: int = Field(
        default=0, ge=0, le=MAX_ALTERNATIVES, description="Alternatives for each token."
    )
    response_format: ResponseFormat = ResponseFormat(type="text")
    tools: Annotated[list[Tool], FailFast()] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: ToolChoice = Field(
        default="auto", description="Whether the answer calls tools, or which."
    )
    parallel_tool_calls: bool = True

    @model_validator(mode="wrap")
    @classmethod
    def _check_names(
        cls, values: Any, validate: ModelWrapValidatorHandler[ChatRequest]
    ) -> ChatRequest:
        names = ("max_tokens", "max_completion_tokens")
        given = [
            name for name in names if isinstance(values, dict) and values.get(name) is not None
        ]
        if len(given) > 1:
            raise ValueError("must not set both max_tokens and max_completion_tokens")
        request = validate(values)
        request._length_name = given[0] if given else names[0]
        return request

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        if all(message.role in ("system", "developer") for message in self.messages):
            raise ValueError("must have a user message in messages")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("must set logprobs with top_logprobs")
        choice = self.tool_choice
        if isinstance(choice, Tool) and choice.function.name not in self.tool_names:
            raise ValueError("must have the tool that tool_choice names in tools")
        if choice == "required" and not self.tools:
            raise ValueError("must have tools if tool_choice is required")
        if self.tool_names and self.response_format.definition is not None:
            raise ValueError("must not set both tools and a response_format of JSON")
        return self

    def decodes_as(self, certificate: Certificate) -> bool:
        """See :meth:`GenerationRequest.decodes_as`."""
        free = self.response_format.definition is None and self.tool_choice in ("auto", "none")
        return free and super().decodes_as(certificate)

    @property
    def tool_names(self) -> list[str]:
        """Names of the tools that the answer may call."""
        return [] if self.tool_choice == "none" else [tool.function.name for tool in self.tools]

    def _prompts(self) -> list[dict[str, Any]]:
        logprobs = self.top_logprobs if self.logprobs else None
        params: dict[str, Any] = {"messages": to_chat(self.messages), "logprobs": logprobs}
        if self.response_format.definition is not None:
            params["json_schema"] = self.response_format.definition
        if self.tool_names:
            choice = self.tool_choice
            params["tools"] = [tool.model_dump(exclude_unset=True) for tool in self.tools]
            if isinstance(choice, Tool):
                params["required_tools"] = [choice.function.name]
            elif choice == "required":
                params["required_tools"] = self.tool_names
        return [params]


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Prompts
    max_new_tokens: int = Field(
        default=16,
        ge=0,
        le=MAX_TOKENS,
        validation_alias="max_tokens",
        description="Maximum number of tokens; 0 is allowed with echo.",
    )
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_ALTERNATIVES,
        description="Report log-probabilities and this many alternatives.",
    )
    echo: bool = Field(default=False, description="Begin the answer with the prompt.")
    best_of: Literal[1] = 1
    suffix: Literal[""] = ""

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise ValueError(f"must not have more than {MAX_CHOICES} prompts, multiplied by n")
        if self.max_new_tokens == 0 and not self.echo:
            raise ValueError("must set max_tokens to at least 1 unless echo is true")
        return self

    def _prompts(self) -> list[dict[str, Any]]:
        return [
            {"prompt": item} if isinstance(item, str) else {"prompt_token_ids": item}
            for item in self.prompt
        ]


class TokenizeRequest(Body):
    """Body of ``POST /tokenize``, as in vLLM."""

    model: str = ""
    prompt: str = ""
    messages: Annotated[list[Message], FailFast()] = Field(default=[], description="A chat.")
    add_special_tokens: bool = Field(default=True, description="In a prompt, not in a chat.")
    add_generation_prompt: Literal[True] = True

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if bool(self.prompt) == bool(self.messages):
            raise ValueError("must have either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """Body of ``POST /detokenize``, as in vLLM."""

    model: str = ""
    tokens: Annotated[list[int], FailFast()]


class EmbeddingRequest(Body):
    """Body of ``POST /v1/embeddings``."""

    model: str
    input: Strings = Field(description="Texts; token ids are not supported.")
    encoding_format: Literal["float", "base64"] = "float"
    user: str = Field(default="", description="Not used.")

    @model_validator(mode="after")
    def _check(self) -> EmbeddingRequest:
        if not 1 <= len(self.input) <= MAX_EMBEDDING_INPUTS or not all(self.input):
            raise ValueError(f"must have 1 to {MAX_EMBEDDING_INPUTS} non-empty strings as input")
        return self


class ResponseBuilder:
    """Build the response to a request from the updates of its choices, whole or in chunks."""

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        choices: int,
        tokens: TokenDecoder,
    ) -> None:
        self.chat, self.n = isinstance(request, ChatRequest), request.n
        self.truncation = isinstance(request, ChatRequest) and request.truncation == "auto"
        self.logprobs = request.logprobs is not None and request.logprobs is not False
        self.include_tokens = request.stream_options.include_tokens
        self.include_usage = request.stream_options.include_usage
        self._tokens = tokens
        self._fields: dict[str, Any] = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{token_hex(12)}",
            "created": int(time.time()),
            "model": request.model,
        }
        self._last: list[JobUpdate | None] = [None] * choices
        self._texts = [""] * choices
        names = request.tool_names if isinstance(request, ChatRequest) else []
        self._parsers = [ToolParser(names, tokens) if names else None for _ in range(choices)]
        # Log-probabilities are kept as JSON, in small parts: as Python objects they would take many
        # times the memory, and converting all of them at once would block other responses.
        self._logprobs: list[dict[str, list[str]]] = [{} for _ in range(choices)]

    def add(self, index: int, update: JobUpdate) -> None:
        """Add an update of a choice to the whole response."""
        if self.logprobs:
            columns = self._format_logprobs(update.pieces, len(self._texts[index]))
            for name, values in columns.items():
                text = json.dumps(values, separators=(",", ":"))[1:-1]
                self._logprobs[index].setdefault(name, []).extend([text] if text else [])
        self._texts[index] += self._content(index, update)[0]
        self._last[index] = update

    def chunks(self, index: int, update: JobUpdate) -> list[dict[str, Any]]:
        """Add an update of a choice, and return the chunks of a streamed response for it."""
        found = []
        if self.chat and self._last[index] is None:
            delta = {"role": "assistant", "content": ""}
            opening = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            found.append(self._chunk([opening]))
        self._last[index] = update
        logprobs = None
        text, calls = self._content(index, update)
        reported = self.logprobs or self.include_tokens
        if text or calls or update.finish_reason or (reported and update.pieces):
            content: dict[str, Any] = {"text": text}
            if self.chat:
                delta = {"content": text} if text else {}
                content = {"delta": {**delta, "tool_calls": calls} if calls else delta}
            if self.logprobs:
                logprobs = self._format_logprobs(update.pieces, len(self._texts[index]))
                if self.chat:
                    logprobs["refusal"] = None
            choice, usage = self._choice(index, content, logprobs, update), None
            if not self.include_usage and all(item and item.finish_reason for item in self._last):
                usage = self._usage()  # every reply tells how many of its tokens are fuzzy
            if self.include_tokens:
                choice["tokens"] = [_token(piece) for piece in update.pieces]
                speed = {name: update.stats[name] for name in ("steps", "tokens_per_second")}
                usage = {**self._usage(), **speed}
            found.append(self._chunk([choice], usage))
        self._texts[index] += text
        return found

    def _content(self, index: int, update: JobUpdate) -> tuple[str, list[dict[str, Any]]]:
        """Return the text of an update, and the tool calls that it completes."""
        parser = self._parsers[index]
        if parser is None:
            return update.text, []
        return parser.push(update.pieces, end=update.finish_reason is not None)

    def _calls(self, index: int, text: str) -> dict[str, Any]:
        """Return the fields that tool calls add to a message; ``content`` is null without text."""
        parser = self._parsers[index]
        if parser is None or not parser.calls:
            return {}
        return {
            "content": text or None,
            "tool_calls": [
                {name: value for name, value in call.items() if name != "index"}
                for call in parser.calls
            ],
        }

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream, which has no choices."""
        return self._chunk([], self._usage())

    def response(self) -> bytes:
        """Return the whole response as JSON."""
        choices = []
        for index, (text, update) in enumerate(zip(self._texts, self._last, strict=True)):
            assert update is not None
            content: dict[str, Any] = {"text": text}
            if self.chat:
                message = {"role": "assistant", "content": text, "refusal": None}
                content = {"message": {**message, **self._calls(index, text)}}
            choice = json.dumps(self._choice(index, content, None, update), ensure_ascii=False)
            if self.logprobs:
                parts = [
                    f'"{name}":[{",".join(values)}]'
                    for name, values in self._logprobs[index].items()
                ]
                parts += ['"refusal":null'] if self.chat else []
                choice = f'{choice[:-1]},"logprobs":{{{",".join(parts)}}}}}'
            choices.append(choice)
        kind = "chat.completion" if self.chat else "text_completion"
        fields = json.dumps({**self._fields, "object": kind, "usage": self._usage()})
        return f'{fields[:-1]},"choices":[{",".join(choices)}]}}'.encode()

    def _chunk(self, choices: list[Any], usage: Any = None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._fields, "object": kind, "choices": choices, "usage": usage}

    def _choice(
        self, index: int, content: dict[str, Any], logprobs: Any, update: JobUpdate
    ) -> dict[str, Any]:
        """Return a choice; :meth:`response` adds the log-probabilities of a whole response."""
        parser, reason = self._parsers[index], update.finish_reason
        if reason == "stop" and parser is not None and parser.calls:
            reason = "tool_calls"
        choice = {"index": index, **content, "finish_reason": reason}
        if logprobs is not None or not self.logprobs:
            choice["logprobs"] = logprobs
        return choice

    def _format_logprobs(self, pieces: Sequence[Piece], offset: int) -> dict[str, Any]:
        if self.chat:
            return {"content": chat_logprobs(pieces, self._tokens)}
        return completion_logprobs(pieces, offset, self._tokens)

    def _usage(self) -> dict[str, Any]:
        """Return token counts, tau, and tokens by origin; a prompt counts once."""
        found = [(index, update) for index, update in enumerate(self._last) if update is not None]
        last = [update for _, update in found]
        prompts = {index // self.n: update.usage["prompt_tokens"] for index, update in found}
        prompt = sum(prompts.values())
        tokens = sum(update.usage["completion_tokens"] for update in last)
        names = ("fuzzy_tokens", "exact_tokens", "target_tokens")
        origins = {name: sum(update.stats[name] for update in last) for name in names}
        steps = sum(update.stats["steps"] for update in last)
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens, **origins}
        usage["completion_tokens_details"] = {"fuzzy_tokens": origins["fuzzy_tokens"]}
        if self.truncation:
            usage["dropped_messages"] = last[0].stats["dropped_messages"]
        return {**usage, "total_tokens": prompt + tokens, "tau": tokens / steps if steps else None}


def _token(piece: Piece) -> dict[str, Any]:
    """Return a token as requests with ``include_tokens`` get it."""
    return {
        "id": piece.token,
        "text": piece.text,
        "origin": piece.origin.name.lower(),
        "divergence": piece.detail and piece.detail.divergence,
    }


def acceptance_label(acceptance: AcceptanceConfig, certificate: Certificate | None = None) -> str:
    """Describe how tokens are accepted, in ASCII for a header."""
    if acceptance.lossless:
        return "lossless"
    label = acceptance.label if certificate is None else f"{acceptance.label}; {certificate}"
    return one_line(label).encode("ascii", "replace").decode()


def completion_logprobs(
    pieces: Iterable[Piece], offset: int, tokens: TokenDecoder
) -> dict[str, list[Any]]:
    """Return log-probabilities in the format of completions; the text begins at ``offset``."""
    columns: dict[str, list[Any]] = {
        "text_offset": [],
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
    }
    for piece in pieces:
        columns["text_offset"].append(offset)
        columns["tokens"].append(tokens.text(piece.token))
        columns["token_logprobs"].append(piece.detail and piece.detail.log_prob)
        top: dict[str, float] = {}
        for other, log_prob in piece.detail.top if piece.detail else ():
            top.setdefault(tokens.text(other), log_prob)  # of equal texts the likeliest
        columns["top_logprobs"].append(top or None)
        offset += len(piece.text)
    return columns


def chat_logprobs(pieces: Iterable[Piece], tokens: TokenDecoder) -> list[dict[str, Any]]:
    """Return log-probabilities in the format of chats."""

    def entry(token: int, log_prob: float) -> dict[str, Any]:
        text, data = tokens.text(token), list(tokens.bytes(token))
        return {"token": text, "logprob": log_prob, "bytes": data}

    return [
        {
            **entry(piece.token, piece.detail.log_prob),
            "top_logprobs": [entry(*item) for item in piece.detail.top],
        }
        for piece in pieces
        if piece.detail is not None
    ]


def check_logprobs(params: Sequence[dict[str, Any]], default: int, context: int) -> None:
    """Raise ApiError if a whole response could hold more than :data:`MAX_LOGPROBS` values.

    ``default`` is the maximum number of tokens of an answer, ``context`` that of a prompt. An
    echoed text, which is not tokenized yet, counts one token per byte.
    """
    values = 0
    for item in params:
        if item.get("logprobs") is not None:
            tokens = min(item.get("max_new_tokens", default), default)
            if item.get("echo"):
                prompt = item.get("prompt_token_ids") or item["prompt"].encode()
                tokens += min(len(prompt), context)
            values += tokens * (1 + item["logprobs"])
    if values > MAX_LOGPROBS:
        raise ApiError(
            f"the number of log-probabilities in a response must be at most {MAX_LOGPROBS}; got"
            f" {values}: stream the response, or lower max_tokens, the log-probabilities per token,"
            " or the number or length of choices and echoed prompts"
        )


def base64_vector(vector: NDArray[np.float32]) -> str:
    """Return a vector as little-endian float32 in base64."""
    return b64encode(vector.astype("<f4").tobytes()).decode()


async def embedding_response(
    request: EmbeddingRequest, vectors: Sequence[NDArray[np.float32]], tokens: int
) -> bytes:
    """Return the response to a request for embeddings; other responses continue meanwhile."""
    encode = base64_vector if request.encoding_format == "base64" else np.ndarray.tolist
    rows = []
    for index, vector in enumerate(vectors):
        row = {"object": "embedding", "index": index, "embedding": encode(vector)}
        rows.append(json.dumps(row, allow_nan=False))
        await asyncio.sleep(0)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    rest = json.dumps({"object": "list", "model": request.model, "usage": usage})
    return f'{rest[:-1]}, "data": [{", ".join(rows)}]}}'.encode()


class ApiError(HTTPException):
    """An error response with OpenAI's error code, if any, and the invalid parameter, if any."""

    def __init__(
        self, message: str, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(status, shorten(message))
        self.code, self.param = code, param

    def body(self) -> dict[str, Any]:
        """Return the body of the response."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status_code == 429 else kind
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def answer_error(error: UnansweredError, names: Mapping[str, str]) -> ApiError:
    """Convert an error; ``names`` maps its parameter names to the client's."""
    message = str(error)
    if not isinstance(error, RequestError):
        return ApiError(message, error.status)
    param = error.param or names.get(message.split()[0].rstrip(":"))
    for name, known in names.items():
        message = message.replace(name, known)
    if error.code != RequestError.CONTEXT:
        return ApiError(message, param=param)
    param = param or ("messages" if "messages" in names else "prompt")
    return ApiError(message, code="context_length_exceeded", param=param)


def validation_error(error: RequestValidationError) -> ApiError:
    """Describe the first problem of an invalid request in one line."""
    problem = error.errors()[0]
    param = ".".join(map(str, problem["loc"][1:]))  # the first item is "body"
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "extra_forbidden" or context.get("max_length") == 0:
        message = "is not supported"
    elif kind == "missing":
        message = "is missing"
    elif kind == "value_error":
        message = str(context["error"])
    else:
        message = f"must {problem['msg'].partition(' should ')[2]}; got {problem['input']!r}"
    subject = param or ("the request body" if kind == "missing" else "the request")
    return ApiError(f"{subject} {message}", param=param or None)
