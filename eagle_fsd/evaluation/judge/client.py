"""Send requests to a judge concurrently."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TypeVar

from eagle_fsd.evaluation.judge.prompts import JudgeError, Prompt
from eagle_fsd.utils.text import one_line

#: Environment variable that holds the API key.
KEY_VARIABLE = "OPENAI_API_KEY"
#: Key to send if none is set: the client requires one, and local servers ignore it.
NO_KEY = "none"
#: Maximum length of a judgment in tokens, as in FastChat.
MAX_TOKENS = 2048
#: Maximum number of characters of an endpoint's error message to quote.
MAX_MESSAGE_LENGTH = 300
#: Name of the threads that wait for replies.
THREAD_NAME = "judge-request"

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class JudgeEndpoint:
    """An OpenAI-compatible endpoint and the model that judges.

    Attributes:
        base_url: The URL up to and including ``/v1``.
        model: The judge's name at the endpoint.
        api_key: The API key. Default: ``$OPENAI_API_KEY``; local servers need none.
        timeout: Seconds to wait for a reply.
        retries: Maximum number of retries after transient failures.
    """

    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 120
    retries: int = 3

    @property
    def redacted_url(self) -> str:
        """The URL without user name and password."""
        credentials, at, location = self.base_url.rpartition("@")
        return f"{credentials.partition('//')[0]}//{location}" if at else self.base_url


class JudgeClient:
    """A client of one endpoint. It is thread-safe.

    Args:
        endpoint: The endpoint.

    Raises:
        JudgeError: The package ``openai`` is not installed, or the URL is invalid.
    """

    def __init__(self, endpoint: JudgeEndpoint) -> None:
        try:
            import openai
        except ImportError as error:
            raise JudgeError("judging requires the package openai: install it") from error
        self.endpoint = endpoint
        self._key = endpoint.api_key or os.environ.get(KEY_VARIABLE) or NO_KEY
        self._openai = openai
        try:
            self._client = openai.OpenAI(
                base_url=endpoint.base_url,
                api_key=self._key,
                timeout=endpoint.timeout,
                max_retries=endpoint.retries,
            )
        except Exception as error:  # the errors of httpx's URL parser share no other base class
            raise self._failure(str(error)) from error

    def ask(self, prompt: Prompt) -> str:
        """Request one judgment, decoded greedily.

        Args:
            prompt: The messages to send.

        Returns:
            The judge's reply; "" if it has no content.

        Raises:
            JudgeError: The endpoint cannot be reached or rejects the request.
        """
        openai = self._openai
        try:
            reply = self._client.chat.completions.create(
                model=self.endpoint.model,
                messages=[
                    {"role": "system", "content": prompt.system},
                    {"role": "user", "content": prompt.user},
                ],
                temperature=0,
                max_tokens=MAX_TOKENS,
            )
            return reply.choices[0].message.content or ""
        except openai.APIStatusError as error:
            message = error.body.get("message") if isinstance(error.body, dict) else None
            raise self._failure(f"{error.status_code}, {message or error.message}") from error
        except openai.APITimeoutError as error:
            raise self._failure(f"no reply within {self.endpoint.timeout:g} s") from error
        except openai.APIConnectionError as error:
            raise self._failure(f"{error.message} {error.__cause__ or ''}") from error
        except (openai.OpenAIError, ValueError) as error:
            raise self._failure(str(error)) from error
        except (AttributeError, TypeError, IndexError) as error:
            # Usually the reply is a web page, because "/v1" is missing from the URL.
            raise self._failure("the reply is not a chat completion; check the URL") from error

    def _failure(self, message: str) -> JudgeError:
        """Build the error for a failed request, without the API key."""
        if self._key != NO_KEY:
            message = message.replace(self._key, "...")
        message = one_line(message)[:MAX_MESSAGE_LENGTH]
        return JudgeError(
            f"the judge {self.endpoint.model} at {self.endpoint.redacted_url} failed ({message});"
            " answers and judgments so far are saved: run the same command again to resume"
        )


def map_concurrently(
    function: Callable[[Item], Result], items: Sequence[Item], concurrency: int
) -> Generator[tuple[Item, Result], None, None]:
    """Apply a function to items in several threads.

    After an exception, no further calls are started; the results of the calls in progress are still
    yielded before it is raised. Closing the iterator, as Ctrl-C does, does not wait for calls in
    progress.

    Args:
        function: The function to call.
        items: Its arguments.
        concurrency: Maximum number of concurrent calls.

    Yields:
        Each item with its result, in order of completion.
    """
    # Daemon threads instead of an executor, for whose threads the interpreter would wait at exit:
    # after Ctrl-C, until the slowest reply arrives.
    waiting: SimpleQueue[Item] = SimpleQueue()
    results: SimpleQueue[tuple[Item, Result] | Exception | None] = SimpleQueue()
    cancelled = Event()

    def work() -> None:
        try:
            while not cancelled.is_set():
                item = waiting.get_nowait()
                results.put((item, function(item)))
        except Empty:
            pass
        except Exception as error:
            cancelled.set()
            results.put(error)
        results.put(None)  # this thread is done

    for item in items:
        waiting.put(item)
    running = min(concurrency, len(items))
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
