"""Request chat completions from an OpenAI-compatible endpoint, concurrently."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, TypeVar

from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.text import one_line

#: Environment variable that holds the API key.
KEY_VARIABLE = "OPENAI_API_KEY"
#: Key to send if none is set: the client requires one.
NO_KEY = "none"
#: Maximum number of characters of an endpoint's error message to quote.
MAX_MESSAGE_LENGTH = 300
#: Name of the threads that wait for replies.
THREAD_NAME = "chat-request"

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible endpoint and the model to use there."""

    base_url: str  # up to and including "/v1"
    model: str
    api_key: str | None = field(default=None, repr=False)  # default: $OPENAI_API_KEY, if set
    timeout: float = 120  # seconds to wait for a reply, in every attempt
    retries: int = 3  # after transient failures, as the package ``openai`` defines them

    @property
    def redacted_url(self) -> str:
        """The URL without user name and password."""
        credentials, _, location = self.base_url.rpartition("@")
        scheme, slashes, _ = credentials.partition("//")
        return f"{scheme}//{location}" if slashes else location


class EndpointError(ValueError):
    """A request failed; the message is one line without the API key.

    ``status`` is the HTTP status of the reply; None if there was none.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ChatClient:
    """A thread-safe client of one endpoint; raises EndpointError if the URL is invalid."""

    def __init__(self, endpoint: Endpoint) -> None:
        import openai  # takes a second

        self.endpoint = endpoint
        self._key = endpoint.api_key or os.environ.get(KEY_VARIABLE) or NO_KEY
        self._client: Any
        try:
            self._client = openai.OpenAI(
                base_url=endpoint.base_url,
                api_key=self._key,
                timeout=endpoint.timeout,
                max_retries=endpoint.retries,
            )
        except Exception as error:  # the errors of httpx's URL parser share no other base class
            raise self._failure(str(error)) from error

    def answer(
        self, prompt: str | Sequence[Mapping[str, Any]], **options: Any
    ) -> tuple[str, bool, int]:
        """Request the assistant's next message in a chat, or the continuation of a text.

        Returns the text ("" without content), whether it is complete, and its number of tokens (0
        if not reported). Options are further parameters of the request, such as ``temperature``.
        Raises EndpointError if the endpoint cannot be reached or rejects the request.
        """
        model = self.endpoint.model
        with self._failures():
            if isinstance(prompt, str):
                reply = self._client.completions.create(model=model, prompt=prompt, **options)
                text = reply.choices[0].text
            else:
                messages = [dict(item) for item in prompt]
                reply = self._client.chat.completions.create(
                    model=model, messages=messages, **options
                )
                text = reply.choices[0].message.content
            tokens = reply.usage.completion_tokens if reply.usage else 0
            return str(text or ""), reply.choices[0].finish_reason == "stop", tokens

    def stream(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> Generator[tuple[str, int], None, None]:
        """Yield the assistant's next message in pieces as they arrive, each as (text, 0).

        A server that reports the usage adds ("", number of tokens) at the end. For options and
        errors, see :meth:`answer`.
        """
        with self._failures():
            chunks = self._client.chat.completions.create(
                model=self.endpoint.model,
                messages=[dict(item) for item in messages],
                stream=True,
                stream_options={"include_usage": True},
                **options,
            )
            with chunks:
                for chunk in chunks:
                    for choice in chunk.choices:
                        yield str(choice.delta.content or ""), 0
                    if chunk.usage:
                        yield "", chunk.usage.completion_tokens

    def list_models(self) -> list[tuple[str, str]]:
        """Return the name and the owner ("" if unknown) of each model that the endpoint lists."""
        with self._failures():
            return [
                (str(item.id), str(getattr(item, "owned_by", None) or ""))
                for item in self._client.models.list().data
            ]

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Raise EndpointError for the errors of a request."""
        import httpx
        import openai

        try:
            yield
        except openai.APIStatusError as error:
            body = error.body.get("message") if isinstance(error.body, dict) else None
            message = f"{error.status_code}, {body or error.message}"
            raise self._failure(message, error.status_code) from error
        except openai.APITimeoutError as error:
            raise self._failure(f"no reply within {self.endpoint.timeout:g} s") from error
        except openai.APIConnectionError as error:
            raise self._failure(f"{error.message} {error.__cause__ or ''}") from error
        except (openai.OpenAIError, httpx.HTTPError, ValueError) as error:  # also mid-stream
            raise self._failure(str(error)) from error
        except (AttributeError, TypeError, IndexError) as error:
            # Usually the reply is a web page, because "/v1" is missing from the URL.
            raise self._failure("the reply is not in OpenAI's format; check the URL") from error

    def _failure(self, message: str, status: int | None = None) -> EndpointError:
        if self._key != NO_KEY:
            message = message.replace(self._key, "...")
        return EndpointError(one_line(message)[:MAX_MESSAGE_LENGTH], status)


def find_model(base_url: str, model: str | None) -> tuple[Endpoint, str]:
    """Choose a model that an endpoint lists, by default the first one; return its owner, too.

    Raises EndpointError if the endpoint does not answer, OptionsError without such a model.
    """
    endpoint = Endpoint(base_url, "")
    listed = dict(ChatClient(endpoint).list_models())
    if not listed:
        raise OptionsError(f"{endpoint.redacted_url} lists no model")
    model = model or next(iter(listed))
    if model not in listed:
        raise OptionsError(
            f"{endpoint.redacted_url} lists {', '.join(listed)}; got --server-model {model}"
        )
    return replace(endpoint, model=model), listed[model]


def map_concurrently(
    function: Callable[[Item], Result], items: Iterable[Item], concurrency: int
) -> Generator[tuple[Item, Result], None, None]:
    """Yield each item with the function's result, computed in threads, in order of completion.

    An item is requested when a thread is free, by one thread at a time. After an exception, no
    further calls are started; the results of the calls in progress are still yielded before it is
    raised. Closing the iterator, as Ctrl-C does, does not wait for calls in progress.
    """
    # Daemon threads instead of an executor, for whose threads the interpreter would wait at exit:
    # after Ctrl-C, until the slowest reply arrives.
    waiting, lock = iter(items), Lock()
    results: SimpleQueue[tuple[Item, Result] | Exception | None] = SimpleQueue()
    cancelled = Event()

    def work() -> None:
        try:
            while not cancelled.is_set():
                with lock:
                    found = list(islice(waiting, 1))
                if not found or cancelled.is_set():
                    break
                results.put((found[0], function(found[0])))
        except Exception as error:
            cancelled.set()
            results.put(error)
        results.put(None)  # this thread is done

    running = concurrency
    failure: Exception | None = None
    try:
        for _ in range(running):
            Thread(target=work, name=THREAD_NAME, daemon=True).start()
        while running:
            result = results.get()
            if result is None:
                running -= 1
            elif isinstance(result, Exception):
                failure = failure or result
            else:
                yield result
    finally:
        cancelled.set()
    if failure is not None:
        raise failure
