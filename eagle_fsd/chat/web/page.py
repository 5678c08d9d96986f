"""Behavior of the web page: chatting, measuring the speedup, and comparing two answers.

This module does not depend on Gradio. The events are asynchronous generators of :class:`View`, the
new HTML of each part of the page; :mod:`eagle_fsd.chat.web.app` connects them to the components.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from eagle_fsd.chat.backend import About, Backend, BackendError, Token, request_params
from eagle_fsd.chat.config import AnswerOptions
from eagle_fsd.chat.web import rendering
from eagle_fsd.model.config import AcceptanceConfig
from eagle_fsd.utils.options import OptionsError

#: Characters of a message. The target's context limits its tokens.
MAX_MESSAGE_LENGTH = 20_000
#: Questions and answers that a chat keeps; older ones are dropped.
MAX_EXCHANGES = 40
#: Seconds between an answer and its baseline, in which a browser on the same machine renders the
#: answer.
BASELINE_DELAY = 0.5
#: Seconds between two views per token in them. A view holds the whole answer, so rendering a long
#: one after every token would be quadratic.
SECONDS_PER_TOKEN = 0.0002
#: Acceptance options with a control on the page.
ACCEPTANCE_CONTROLS = ("threshold", "divergence", "min_ratio")


class PageError(ValueError):
    """The page cannot do what the user asked for; the message is shown to the user."""


@dataclass(frozen=True)
class Exchange:
    """A question and its answer, as plain text and as the HTML of both."""

    question: str
    answer: str
    html: str


@dataclass
class ChatState:
    """The state of one visitor's page."""

    exchanges: list[Exchange] = field(default_factory=list)
    busy: bool = False  #: whether an answer or a comparison is being generated
    stop: bool = False  #: whether the visitor wants it to stop
    #: Incremented by every answer and every new chat. Views of an older turn are not shown.
    turn: int = 0
    #: Request parameters of the last complete answer, for its baseline.
    baseline_params: dict[str, Any] | None = None
    fsd_stats: Mapping[str, float] = field(default_factory=dict)  #: of the last answer
    live: str = ""  #: HTML of the newest exchange; errors are shown below it
    comparison: str = ""
    unanswered: str = ""  #: a question to put back into the message box
    client: str = ""  #: identifies the visitor to the backend

    def messages(self, question: str, count: int | None = None) -> list[dict[str, str]]:
        """Return the messages of the first exchanges (default: of all), followed by a question."""
        messages = []
        for exchange in self.exchanges[:count]:
            messages.append({"role": "user", "content": exchange.question})
            messages.append({"role": "assistant", "content": exchange.answer})
        return [*messages, {"role": "user", "content": question}]


@dataclass(frozen=True)
class View:
    """New HTML (of the box: text) for parts of the page; None leaves a part as it is."""

    box: str | None = None
    log: str | None = None  #: the earlier exchanges
    live: str | None = None  #: the newest exchange
    stats: str | None = None
    comparison: str | None = None
    stoppable: bool | None = None  #: whether there is anything to stop


@dataclass
class PartialAnswer:
    """An answer as far as it has been received.

    ``finish_reason`` is ``"stop"`` or ``"length"`` once it is complete, ``"stopped"`` or
    ``"failed"`` if it never will be; None while more tokens are expected.
    """

    acceptance: AcceptanceConfig
    tokens: list[Token] = field(default_factory=list)
    stats: Mapping[str, float] = field(default_factory=dict)
    finish_reason: str | None = None

    @property
    def busy(self) -> bool:
        """Whether more tokens are expected."""
        return self.finish_reason is None

    @property
    def complete(self) -> bool:
        """Whether the model ended the answer, or the token limit did."""
        return self.finish_reason in ("stop", "length")

    def html(self, difference: int | None = None) -> str:
        """Render the tokens."""
        return rendering.answer_html(self.tokens, self.acceptance, difference, busy=self.busy)

    def summary(self) -> str:
        """Summarize statistics and finish reason in one line."""
        statuses = {"length": "Reached max new tokens", "stopped": "Stopped", "failed": "Failed"}
        status = statuses.get(self.finish_reason or "", "")
        return rendering.summarize(self.stats, self.acceptance, status)


class Page:
    """The events of the page."""

    def __init__(self, backend: Backend, options: AnswerOptions) -> None:
        self.backend, self.options = backend, options

    async def send(
        self, state: ChatState, message: Any, controls: Mapping[str, Any]
    ) -> AsyncGenerator[View, None]:
        """Answer a message."""
        try:
            question = _validate_question(state, message)
            acceptance, params = self._validate_controls(state.messages(question), controls)
        except PageError as error:
            yield View(live=state.live + rendering.error_html(str(error)))
            return
        state.busy, state.stop, state.baseline_params = True, False, None
        state.turn += 1
        turn = state.turn
        state.fsd_stats, state.unanswered, state.comparison = {}, "", ""
        question_html = rendering.message_html("user", rendering.question_html(question))
        log = "".join(exchange.html for exchange in state.exchanges)
        answer, error_html = PartialAnswer(acceptance), ""

        def view() -> View:
            state.live = question_html + _answer_message(answer)
            if answer.tokens:
                state.live += rendering.strip_html(
                    answer.tokens, acceptance, max_threshold(self.backend.about)
                )
            if answer.tokens and not answer.busy:
                state.live += rendering.export_html(self._export(answer, params))
            # Only complete answers are followed by a baseline.
            pending = answer.busy or answer.complete
            speedup = rendering.PENDING if pending else rendering.NONE
            stats = rendering.stats_html(answer.stats, {}, speedup)
            return View(live=state.live + error_html, stats=stats, stoppable=pending)

        try:
            yield replace(view(), box="", log=log, comparison="")
            async for _ in self._receive(state, answer, params, lambda: state.stop):
                state.fsd_stats = answer.stats
                if answer.busy:
                    yield view()
        except BackendError as error:
            answer.finish_reason, error_html = "failed", rendering.error_html(str(error))
        finally:
            state.busy = False
            answer.finish_reason = answer.finish_reason or "stopped"  # the visitor left
            if answer.tokens and state.turn == turn:
                html = question_html + _answer_message(answer)
                text = "".join(token.text for token in answer.tokens)
                state.exchanges.append(Exchange(question, text, html))
                del state.exchanges[:-MAX_EXCHANGES]
        if state.turn == turn:
            state.baseline_params = params if answer.complete else None
            if error_html or not answer.tokens:
                state.unanswered = question
            yield view()  # last: a visitor who sees the end may ask again at once

    @staticmethod
    def restore_question(state: ChatState, text: Any) -> View:
        """Put an unanswered question back into the message box, unless the visitor is typing."""
        question, state.unanswered = state.unanswered, ""
        return View(box=None if not question or str(text or "").strip() else question)

    async def measure_baseline(self, state: ChatState) -> AsyncGenerator[View, None]:
        """Decode the last prompt autoregressively, to show the speedup.

        The baseline is decoded without the per-token details that the page's answers carry, which
        favors it: the speedup is not overstated.
        """
        params, turn = state.baseline_params, state.turn
        yield View()  # Gradio clears the outputs of an event that yields nothing
        if params is None:
            return
        length = min(rendering.BASELINE_TOKENS, params["max_new_tokens"])
        params = {**params, "max_new_tokens": length, "logprobs": None}
        await asyncio.sleep(BASELINE_DELAY)
        yield View()  # Gradio cancels the event here if the visitor left meanwhile
        baseline = PartialAnswer(self.backend.about.acceptance)
        updates = self._receive(
            state, baseline, params, lambda: state.stop or state.turn != turn, method="ar"
        )
        with contextlib.suppress(BackendError):  # the answer itself is complete
            async for _ in updates:
                if state.turn == turn and baseline.busy:
                    stats = rendering.stats_html(state.fsd_stats, baseline.stats, rendering.PENDING)
                    yield View(stats=stats)
        if state.turn == turn:
            stats = rendering.stats_html(state.fsd_stats, baseline.stats)
            yield View(stats=stats, stoppable=state.busy)  # a comparison may have begun

    async def compare(
        self, state: ChatState, message: Any, controls: Mapping[str, Any]
    ) -> AsyncGenerator[View, None]:
        """Decode a message, or else the last question, both exactly and with FSD."""
        try:
            count, question_html = None, ""
            if not str(message or "").strip() and state.exchanges:
                count = len(state.exchanges) - 1
                message = state.exchanges[count].question
            question = _validate_question(state, message)
            if count is None:  # the chat does not show the question yet
                question_html = rendering.message_html("user", rendering.question_html(question))
            messages = state.messages(question, count)
            acceptance, params = self._validate_controls(messages, controls)
            exact = acceptance.updated(threshold=0.0)
            exact_params = {**params, "fsd": exact.model_dump()}
        except PageError as error:
            yield View(comparison=state.comparison + rendering.error_html(str(error)))
            return
        seed = self.options.seed
        seed = secrets.randbits(31) if seed is None else seed  # the same one for both answers
        state.busy, state.stop, state.baseline_params = True, False, None
        state.turn += 1  # ends the baseline of the last answer, whose statistics are replaced
        turn = state.turn
        left, right, error_html = PartialAnswer(exact), PartialAnswer(acceptance), ""

        def view() -> View:
            comparison = _comparison_html(left, right, sampled=params["temperature"] > 0)
            state.comparison = question_html + comparison
            busy = left.busy or right.busy
            stats = rendering.stats_html(right.stats, {})
            comparison = state.comparison + error_html
            return View(comparison=comparison, stats=stats, stoppable=busy)

        try:
            yield view()
            for side, answer in ((exact_params, left), (params, right)):
                seeded = {**side, "seed": seed}
                async for _ in self._receive(state, answer, seeded, lambda: state.stop):
                    if state.turn == turn and answer.busy:
                        yield view()
                if state.stop:
                    break
        except BackendError as error:
            error_html = rendering.error_html(str(error))
        finally:
            state.busy = False
            for answer in (left, right):
                answer.finish_reason = answer.finish_reason or (
                    "failed" if error_html else "stopped"
                )
        if state.turn == turn:
            yield view()

    @staticmethod
    def stop(state: ChatState) -> None:
        """Stop the answer that is being generated."""
        state.stop = True

    @staticmethod
    async def clear(state: ChatState) -> View:
        """Start a new chat, after stopping the answer that is being generated."""
        state.stop, state.baseline_params = True, None
        state.turn += 1
        while state.busy:
            await asyncio.sleep(0.01)
        state.exchanges.clear()
        state.live = state.comparison = state.unanswered = ""
        return View("", "", rendering.welcome_html(), rendering.stats_html({}, {}), "", False)

    def _export(self, answer: PartialAnswer, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return everything that is known about an answer, as JSON values."""
        settings = {
            name: value for name, value in params.items() if name not in ("messages", "logprobs")
        }
        return {
            "model": self.backend.about.name,
            "messages": params["messages"],
            "settings": settings,
            "answer": "".join(token.text for token in answer.tokens),
            "finish_reason": answer.finish_reason,
            "stats": dict(answer.stats),
            "tokens": [asdict(token) for token in answer.tokens],
        }

    def _validate_controls(
        self, messages: Sequence[Mapping[str, str]], controls: Mapping[str, Any]
    ) -> tuple[AcceptanceConfig, dict[str, Any]]:
        """Return the acceptance options and the request parameters, or raise PageError."""
        about = self.backend.about
        values = dict(controls)
        chosen = {name: values.pop(name) for name in ACCEPTANCE_CONTROLS}
        if about.acceptance.rule != "fsd":  # which has none of them
            chosen = {}
        try:
            acceptance = about.acceptance.updated(**chosen)
            options = self.options.updated(**values)
        except OptionsError as error:
            raise PageError(str(error)) from error
        limit = about.limits.max_new_tokens
        if options.max_new_tokens > limit:
            raise PageError(f"max_new_tokens must be at most {limit}; got {options.max_new_tokens}")
        return acceptance, request_params(messages, options, acceptance)

    async def _receive(
        self,
        state: ChatState,
        answer: PartialAnswer,
        params: Mapping[str, Any],
        stopped: Callable[[], bool],
        method: str = "fsd",
    ) -> AsyncGenerator[None, None]:
        """Fill ``answer`` from the backend; yield when it should be rendered, and at its end."""
        rendered = 0.0
        # Closing the stream at once is what ends the decoding.
        async with contextlib.aclosing(
            self.backend.stream(params, state.client, method)
        ) as updates:
            async for update in updates:
                answer.tokens.extend(update.tokens)
                answer.stats = update.stats or answer.stats
                answer.finish_reason = update.finish_reason
                if stopped():
                    break
                if time.monotonic() - rendered >= SECONDS_PER_TOKEN * len(answer.tokens):
                    yield
                    rendered = time.monotonic()
        answer.finish_reason = answer.finish_reason or "stopped"
        yield


def max_threshold(about: About) -> float:
    """Return the maximum of the threshold's slider; raises OptionsError if it is infinite."""
    threshold = about.acceptance.threshold
    if math.isinf(threshold):
        raise OptionsError(f"threshold must be finite for the web page's slider; got {threshold}")
    return max(about.limits.max_threshold, threshold)


def _validate_question(state: ChatState, message: Any) -> str:
    if state.busy:
        raise PageError("An answer is being generated. Stop it first.")
    question = message.strip() if isinstance(message, str) else ""
    if not question:
        raise PageError("Enter a message first.")
    if len(question) > MAX_MESSAGE_LENGTH:
        raise PageError(f"A message can have at most {MAX_MESSAGE_LENGTH:,} characters.")
    return question


def _answer_message(answer: PartialAnswer) -> str:
    queued = answer.busy and not answer.stats
    note = "Waiting in the queue …" if queued else answer.summary()
    return rendering.message_html("assistant", answer.html(), note)


def _comparison_html(left: PartialAnswer, right: PartialAnswer, sampled: bool) -> str:
    complete = left.complete and right.complete
    index = rendering.first_difference(left.tokens, right.tokens, complete)
    difference = rendering.describe_difference(left.tokens, right.tokens, complete, sampled)
    if left.busy or right.busy:
        difference = f"Generating … {difference}"
    elif not complete:
        difference = f"Incomplete. {difference}"
    fsd = right.acceptance
    name = f"FSD (T = {fsd.threshold:g}, {fsd.divergence})"
    if fsd.rule != "fsd":
        name = fsd.label.capitalize()
    return rendering.comparison_html(
        (left.html(index), right.html(index)),
        ("Exact (T = 0)", name),
        (left.summary(), right.summary()),
        difference,
    )
