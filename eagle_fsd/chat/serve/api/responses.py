"""Responses, built with the types of OpenAI's client from the outputs of workers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from secrets import token_hex
from typing import Any

from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_choice import CompletionChoice, Logprobs
from pydantic import BaseModel


class ResponseBuilder:
    """Builds the response to a request, as a whole or as the chunks of a stream.

    Args:
        chat: Whether the request is a chat; else it is a completion.
        model: The model's name.
        choices: Number of choices.
        n: Number of choices for each prompt.
        logprobs: Whether log-probabilities are requested.
    """

    def __init__(self, chat: bool, model: str, choices: int, n: int, logprobs: bool) -> None:
        self.chat, self.n, self.logprobs = chat, n, logprobs
        response_id = f"{'chatcmpl' if chat else 'cmpl'}-{token_hex(12)}"
        self.fields: dict[str, Any] = {
            "id": response_id,
            "created": int(time.time()),
            "model": model,
        }
        self.outputs: list[Mapping[str, Any]] = [{"text": ""}] * choices
        self.columns: list[dict[str, list[Any]]] = [{} for _ in range(choices)]

    def add(self, index: int, output: Mapping[str, Any]) -> Iterator[BaseModel]:
        """Add a worker's output.

        Args:
            index: The choice.
            output: The output.

        Yields:
            The chunks of a streamed response.
        """
        if self.chat and "usage" not in self.outputs[index]:
            opening = {"index": index, "delta": {"role": "assistant", "content": ""}}
            yield self._chunk([{**opening, "logprobs": None, "finish_reason": None}])
        text = output["text"][len(self.outputs[index]["text"]) :]
        columns, finish_reason = output.get("logprobs") or {}, output["finish_reason"]
        self.outputs[index] = output
        for name, values in columns.items():
            self.columns[index].setdefault(name, []).extend(values)
        if text or columns.get("tokens") or finish_reason:
            content = {"delta": {"content": text} if text else {}} if self.chat else {"text": text}
            yield self._chunk([self._choice(index, content, columns, finish_reason)])

    def usage_chunk(self) -> BaseModel:
        """Return the last chunk of a stream, which has no choices."""
        return self._chunk([], self._usage())

    def response(self) -> BaseModel:
        """Return the whole response."""
        choices = []
        for index, output in enumerate(self.outputs):
            message = {"role": "assistant", "content": output["text"], "refusal": None}
            content = {"message": message} if self.chat else {"text": output["text"]}
            reason = output["finish_reason"]
            choices.append(self._choice(index, content, self.columns[index], reason))
        if not self.chat:
            return self._chunk(choices, self._usage())
        return ChatCompletion.model_validate(
            {
                **self.fields,
                "object": "chat.completion",
                "choices": choices,
                "usage": self._usage(),
            }
        )

    def _chunk(self, choices: list[Any], usage: CompletionUsage | None = None) -> BaseModel:
        fields = {**self.fields, "choices": choices, "usage": usage}
        if self.chat:
            return ChatCompletionChunk.model_validate({**fields, "object": "chat.completion.chunk"})
        # Not validated: the types lack the null of an unfinished choice and of a first token.
        fields["choices"] = [CompletionChoice.construct(**choice) for choice in choices]
        return Completion.construct(**fields, object="text_completion")

    def _choice(
        self, index: int, content: dict[str, Any], columns: Mapping[str, Any], finish_reason: Any
    ) -> dict[str, Any]:
        logprobs: Any = None
        if self.logprobs and self.chat:
            logprobs = {"content": _chat_logprobs(columns), "refusal": None}
        elif self.logprobs:
            logprobs = Logprobs.construct(**columns)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    def _usage(self) -> CompletionUsage:
        """Return token counts, tau, and tokens by origin; a prompt counts once."""
        prompt = sum(output["usage"]["prompt_tokens"] for output in self.outputs[:: self.n])
        tokens = sum(output["usage"]["completion_tokens"] for output in self.outputs)
        names = ("fuzzy_tokens", "exact_tokens", "target_tokens", "steps")
        stats = [output.get("fsd", {}) for output in self.outputs]  # FastChat's workers have none
        totals = {name: sum(item.get(name, 0) for item in stats) for name in names}
        steps = totals.pop("steps")
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens, **totals}
        usage["total_tokens"] = prompt + tokens
        return CompletionUsage.model_validate({**usage, "tau": tokens / steps if steps else None})


def _chat_logprobs(columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Convert log-probabilities from the format of OpenAI's completions to that of its chats."""

    def entry(token: str, value: float) -> dict[str, Any]:
        return {"token": token, "logprob": value, "bytes": list(token.encode())}

    names = ("tokens", "token_logprobs", "top_logprobs")
    rows = zip(*(columns.get(name, []) for name in names), strict=True)
    return [
        {**entry(token, value), "top_logprobs": [entry(*item) for item in (top or {}).items()]}
        for token, value, top in rows
    ]
