"""Tools: what requests declare, and the calls in what a model writes.

Models write calls as JSON objects with a name and arguments, in one of three formats: between
``<tool_call>`` and ``</tool_call>`` (Hermes, Qwen), as a whole answer (Llama 3), or in a list after
``[TOOL_CALLS]`` (Mistral).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from secrets import token_hex
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator

from eagle_fsd.chat.serve.body import Body
from eagle_fsd.chat.text import Piece, TokenDecoder, overlap

MAX_TOOLS = 128
#: The beginnings of calls, with their ends; a call without an end takes the rest of the answer.
MARKERS = {"<tool_call>": "</tool_call>", "[TOOL_CALLS]": "", "<|python_tag|>": ""}
#: Marks a call without a marker, at the beginning of an answer.
BARE = "{"

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Body):
    """A function that a model may call."""

    name: Name
    description: str = ""
    parameters: dict[str, Any] = Field(default={}, description="JSON schema of the arguments.")
    strict: bool = False


class Tool(Body):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function


def _check_choice(value: Any) -> Any:
    """Give one message for any invalid value; a union has an error for each of its types."""
    if value in ("none", "auto", "required"):
        return value
    try:
        choice = Tool.model_validate(value)
    except ValidationError:
        choice = None
    if choice is None or choice.function.model_fields_set != {"name"}:
        raise ValueError("must be none, auto, required, or a function with a name")
    return choice


ToolChoice = Annotated[Literal["none", "auto", "required"] | Tool, BeforeValidator(_check_choice)]


class FunctionCall(Body):
    """A call in a message."""

    name: str
    arguments: str = Field(description="A JSON object.")
    parsed_arguments: Any = Field(default=None, description="Ignored; OpenAI's client adds it.")

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, arguments: str) -> str:
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ValueError("must be a JSON object in a string")
        return arguments


class ToolCall(Body):
    """A tool call in an assistant message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = Field(default=None, description="Ignored; OpenAI's client adds it.")

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it, with arguments as an object."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


class ToolParser:
    """Separate the text of a streamed answer from calls of the tools with these names.

    What may be a call is held back until it is complete. It stays text if it is not a call of one
    of the tools.
    """

    def __init__(self, names: Iterable[str], tokens: TokenDecoder) -> None:
        self._names, self._tokens = {*names}, tokens
        self._held = ""
        self._marker: str | None = None
        self._started = False
        self._after_call = False  # whether only whitespace has followed the last call
        self.calls: list[dict[str, Any]] = []

    def push(self, pieces: Sequence[Piece], end: bool) -> tuple[str, list[dict[str, Any]]]:
        """Add the pieces of an update; return the text and the calls that are now complete."""
        self._held += "".join(map(self._text, pieces))
        text, first = "", len(self.calls)
        before = None
        while self._held and (self._held, self._marker) != before:
            before = self._held, self._marker
            text += self._content(end) if self._marker is None else self._call(end)
        return text, self.calls[first:]

    def _text(self, piece: Piece) -> str:
        """Return the text of a piece; if it has none, that of a marker that is a special token."""
        if piece.text:
            return piece.text
        token = self._tokens.text(piece.token)
        return token if token in (*MARKERS, *MARKERS.values()) else ""

    def _content(self, end: bool) -> str:
        """Take the text before the next marker."""
        if not self._started or self._after_call:
            stripped = self._held.lstrip()
            if not stripped and not end:
                return ""
            if not self._started and stripped.startswith(BARE):
                self._marker, self._held, self._started = "", stripped, True
                return ""
            self._held = stripped if self._after_call else self._held
        self._started, self._after_call = True, False
        found = [(self._held.find(marker), marker) for marker in MARKERS if marker in self._held]
        if found:
            at, self._marker = min(found)
        else:
            at = len(self._held)
            if not end:
                at -= max(overlap(self._held, marker) for marker in MARKERS)
        text, self._held = self._held[:at], self._held[at:]
        return text

    def _call(self, end: bool) -> str:
        """Take a call, or the text of what is not one."""
        marker = self._marker or ""
        closing = MARKERS.get(marker)
        at = self._held.find(closing) if closing else -1
        if at < 0 and not end:
            return ""
        stop = len(self._held) if at < 0 else at + len(closing or "")
        body = self._held[len(marker) : at if at >= 0 else None]
        text, self._held, self._marker = self._held[:stop], self._held[stop:], None
        try:
            calls = self._read(body.strip())
        except (ValueError, RecursionError):  # not JSON, or not of these tools
            return text
        self.calls += calls
        self._after_call = True
        return ""

    def _read(self, body: str) -> list[dict[str, Any]]:
        """Return the calls in JSON text; raises ValueError if it is anything else."""
        values: list[Any] = []
        while body:
            value, position = json.JSONDecoder().raw_decode(body)
            values += value if isinstance(value, list) else [value]
            body = body[position:].lstrip("; \t\r\n")  # Llama separates calls by semicolons
        if not values:
            raise ValueError("no calls")
        calls = []
        for index, value in enumerate(values, len(self.calls)):
            name = value.get("name") if isinstance(value, dict) else None
            if not isinstance(name, str) or name not in self._names:
                raise ValueError("not a tool call")
            arguments = value.get("arguments", value.get("parameters", {}))
            if not isinstance(arguments, dict):
                raise ValueError("the arguments are not an object")
            text = json.dumps(arguments, allow_nan=False)
            function = {"name": name, "arguments": text}
            # Mistral's templates accept ids of this length only.
            identity = {"id": token_hex(5)[:9], "type": "function"}
            calls.append({"index": index, **identity, "function": function})
        return calls
