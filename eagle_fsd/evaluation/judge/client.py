"""Asking a judge: one request, and several at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TypeVar

from eagle_fsd.evaluation.judge.prompts import JudgeError, Prompt

#: Where the judge's key is looked for, and what a server that needs none is given.
KEY_VARIABLE = "OPENAI_API_KEY"
NO_KEY = "none"
#: Tokens of a judgment at most, as FastChat has it.
MAX_TOKENS = 2048
#: Characters of what an endpoint says that go into a message.
SAID_LENGTH = 300
#: Of the threads that wait for replies.
THREAD_NAME = "judge-request"

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class JudgeEndpoint:
    """Where the judge is.

    Attributes:
        base_url: Up to and with ``/v1``.
        model: The judge's name there.
        api_key: Default: the environment's OPENAI_API_KEY; local servers need none.
        timeout: Seconds to wait for a reply.
        retries: How often a request that failed for a passing cause is sent again.
    """

    base_url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 120
    retries: int = 3

    @property
    def shown_url(self) -> str:
        """The address without a name and password that it may hold."""
        before, at, after = self.base_url.rpartition("@")
        return f"{before.partition('//')[0]}//{after}" if at else self.base_url


class JudgeClient:
    """One endpoint, with its connections; several threads may ask.

    Raises:
        JudgeError: The package ``openai`` is not there, or the address is none.
    """

    def __init__(self, endpoint: JudgeEndpoint) -> None:
        try:
            import openai
        except ImportError as error:
            raise JudgeError("judges are asked through the package openai: install it") from error
        self.endpoint = endpoint
        self._key = endpoint.api_key or os.environ.get(KEY_VARIABLE) or NO_KEY
        self._errors = openai
        try:
            self._client = openai.OpenAI(
                base_url=endpoint.base_url,
                api_key=self._key,
                timeout=endpoint.timeout,
                max_retries=endpoint.retries,
            )
        except Exception as error:  # The errors of its address's parser are not its own.
            raise self._failure(str(error)) from error

    def ask(self, prompt: Prompt) -> str:
        """What the judge says, greedily drawn; "" where it says nothing.

        Raises:
            JudgeError: The endpoint is down or refuses.
        """
        errors = self._errors
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
        except errors.APIStatusError as error:
            said = error.body.get("message") if isinstance(error.body, dict) else None
            raise self._failure(f"{error.status_code}, {said or error.message}") from error
        except errors.APITimeoutError as error:
            raise self._failure(f"no reply within {self.endpoint.timeout:g} s") from error
        except errors.APIConnectionError as error:
            raise self._failure(f"{error.message} {error.__cause__ or ''}") from error
        except (errors.OpenAIError, ValueError) as error:
            raise self._failure(str(error)) from error
        except (AttributeError, TypeError, IndexError) as error:
            # A server's page in place of its interface: "/v1" is missing, most often.
            raise self._failure("what it sent is no chat completion; is the URL right?") from error

    def _failure(self, said: str) -> JudgeError:
        if self._key != NO_KEY:
            said = said.replace(self._key, "...")
        said = " ".join(said.split())[:SAID_LENGTH]
        return JudgeError(
            f"the judge {self.endpoint.model} at {self.endpoint.shown_url} failed ({said}); the"
            " answers and the judgments so far are kept, and the same command goes on from there"
        )


def in_parallel(
    ask: Callable[[Item], Result], items: Sequence[Item], parallel: int
) -> Iterator[tuple[Item, Result]]:
    """Each item with its result, in the order they come; ``parallel`` are under way at a time.

    When one fails no other is begun; what is under way comes still, then the failure is raised.
    When the caller closes the iterator, as on Ctrl-C, nothing is waited for.
    """
    # Daemons, not an executor's threads: Python waits for those before it ends, after Ctrl-C for
    # as long as the slowest reply takes.
    waiting: SimpleQueue[Item] = SimpleQueue()
    results: SimpleQueue[tuple[Item, Result] | Exception | None] = SimpleQueue()
    called_off = Event()

    def work() -> None:
        try:
            while not called_off.is_set():
                item = waiting.get_nowait()
                results.put((item, ask(item)))
        except Empty:
            pass
        except Exception as error:
            called_off.set()
            results.put(error)
        results.put(None)

    for item in items:
        waiting.put(item)
    running = min(parallel, len(items))
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
        called_off.set()
    if failure is not None:
        raise failure
