"""What the web page does: a chat, plain decoding measured beside it, and two answers compared.

Nothing here knows of gradio. The events are asynchronous generators of :class:`View`, markup for
each part of the page; :mod:`eagle_fsd.chat.web.app` draws the page around them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eagle_fsd.chat.backend import Backend, BackendError, Token, choosable, request
from eagle_fsd.chat.config import AnswerOptions
from eagle_fsd.chat.web import rendering as text
from eagle_fsd.model.config import FSDSettings

#: Characters of a message at most; the target's context bounds its tokens.
LONGEST_MESSAGE = 20_000
#: Questions with their answers that a chat keeps; older ones are forgotten.
MOST_EXCHANGES = 40
#: Seconds until plain decoding is measured: a browser on the same machine is drawing the answer.
SETTLE = 0.5
#: Seconds between two views for each token in them: a view is the whole answer, and drawing a long
#: one costs the server and the browser more than the tokens that are new in it.
DRAWING = 0.0002
#: The settings that the page chooses.
CHOSEN = ("threshold", "divergence", "min_ratio")


class PageError(ValueError):
    """What was asked for is not to be had; the message is for the page."""


@dataclass(frozen=True)
class Exchange:
    """A question and its answer, and how the page shows them."""

    question: str
    answer: str
    html: str


@dataclass
class Visit:
    """One visitor's chat.

    Attributes:
        busy: Whether something is decoded for them.
        stop: Whether they want it to end.
        turn: Goes up with every answer and every new chat; what belongs to an older one is not
            drawn.
        measured: The parameters of the last answer, to decode plainly. fsd: Its figures.
        live, compared: What stands in those parts of the page; refusals are told beside it.
        unanswered: A question to give back.
    """

    exchanges: list[Exchange] = field(default_factory=list)
    busy: bool = False
    stop: bool = False
    turn: int = 0
    measured: dict[str, Any] | None = None
    fsd: Mapping[str, float] = field(default_factory=dict)
    live: str = ""
    compared: str = ""
    unanswered: str = ""

    def messages(self, question: str, before: int | None = None) -> list[dict[str, str]]:
        """The chat so far, or its first exchanges, and a new question."""
        found = []
        for exchange in self.exchanges[:before]:
            found.append({"role": "user", "content": exchange.question})
            found.append({"role": "assistant", "content": exchange.answer})
        return [*found, {"role": "user", "content": question}]


@dataclass(frozen=True)
class View:
    """New markup for parts of the page; None leaves a part as it is.

    Attributes:
        box: The text in the message box. log: Earlier exchanges. live: The one on its way.
    """

    box: str | None = None
    log: str | None = None
    live: str | None = None
    figures: str | None = None
    compare: str | None = None


@dataclass
class Answering:
    """An answer as far as it is known."""

    tokens: list[Token] = field(default_factory=list)
    figures: Mapping[str, float] = field(default_factory=dict)
    ended: str | None = None

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    def summary(self, settings: FSDSettings) -> str:
        notes = {
            "length": "cut at the most tokens",
            "stopped": "stopped",
            "failed": "broken off",
        }
        return text.summary(self.figures, settings, notes.get(self.ended or "", ""))


class Page:
    """The events of the page over one backend.

    Args:
        options: How answers are drawn, where the page does not choose it.
    """

    def __init__(self, backend: Backend, options: AnswerOptions) -> None:
        self.backend, self.options = backend, options

    async def send(
        self, visit: Visit, message: Any, chosen: Mapping[str, Any]
    ) -> AsyncIterator[View]:
        """Answer a message."""
        try:
            question = _question(visit, message)
            settings, params = self._params(visit.messages(question), chosen)
        except PageError as error:
            yield View(live=visit.live + text.notice_html(str(error)))
            return
        visit.busy, visit.stop, visit.measured = True, False, None
        visit.turn += 1
        mine = visit.turn
        visit.fsd, visit.unanswered = {}, ""
        asked = text.turn_html("user", text.said_html(question))
        log = "".join(exchange.html for exchange in visit.exchanges)
        answering, notice = Answering(), ""

        def view() -> View:
            visit.live = asked + _bubble(answering, settings)
            # Plain decoding follows an answer that was wanted to its end.
            waiting = text.NONE if answering.ended in ("stopped", "failed") else text.WAITING
            figures = text.figures_html(answering.figures, {}, waiting)
            return View(live=visit.live + notice, figures=figures)

        try:
            yield replace(view(), box="", log=log)
            async for _ in self._follow(params, lambda: visit.stop, into=answering):
                visit.fsd = answering.figures
                if answering.ended is None:
                    yield view()
        except BackendError as error:
            answering.ended, notice = "failed", text.notice_html(str(error))
        finally:
            visit.busy = False
            answering.ended = answering.ended or "stopped"  # who left ended it
            if answering.tokens and visit.turn == mine:
                html = asked + _bubble(answering, settings)
                visit.exchanges.append(Exchange(question, answering.text, html))
                del visit.exchanges[:-MOST_EXCHANGES]
        if visit.turn == mine:
            whole = answering.ended in ("stop", "length")
            visit.measured = params if whole else None
            if notice or not answering.tokens:
                visit.unanswered = question
            yield view()  # whoever sees the end may ask again at once

    @staticmethod
    def give_back(visit: Visit, typed: Any) -> View:
        """Put a question without an answer back into the box, unless there is something new."""
        question, visit.unanswered = visit.unanswered, ""
        return View(None if not question or str(typed or "").strip() else question)

    async def measure(self, visit: Visit) -> AsyncIterator[View]:
        """Decode the last prompt plainly, for its speed.

        Without the details of tokens that the page's answers come with: so plain decoding is at
        its best, and what the page shows of FSD is not flattered.
        """
        params, mine = visit.measured, visit.turn
        yield View()  # gradio blanks the page for an event that draws nothing
        if params is None:
            return
        length = min(text.PLAIN_TOKENS, params["max_new_tokens"])
        params = {**params, "max_new_tokens": length, "logprobs": None}
        await asyncio.sleep(SETTLE)
        yield View()  # it is noticed between two views that a visitor has left
        plain = Answering()
        follow = self._follow(params, lambda: visit.stop or visit.turn != mine, True, plain)
        with contextlib.suppress(BackendError):  # the answer stands
            async for _ in follow:
                if visit.turn == mine and plain.ended is None:
                    yield View(figures=text.figures_html(visit.fsd, plain.figures, text.WAITING))
        if visit.turn == mine:
            yield View(figures=text.figures_html(visit.fsd, plain.figures))

    async def compare(
        self, visit: Visit, message: Any, chosen: Mapping[str, Any]
    ) -> AsyncIterator[View]:
        """Decode what is in the box, or else the last question, exactly and with FSD."""
        try:
            before = None
            if not str(message or "").strip() and visit.exchanges:
                before = len(visit.exchanges) - 1
                message = visit.exchanges[before].question
            question = _question(visit, message)
            messages = visit.messages(question, before)
            settings, params = self._params(messages, chosen)
            exact, exact_params = self._params(messages, {**chosen, "threshold": 0.0})
        except PageError as error:
            yield View(compare=text.notice_html(str(error)) + visit.compared)
            return
        seed = self.options.seed
        seed = secrets.randbits(31) if seed is None else seed  # one for both
        visit.busy, visit.stop, mine = True, False, visit.turn
        left, right, notice = Answering(), Answering(), ""

        def view() -> View:
            """Of both answers as far as they are."""
            sampled = bool(params["temperature"])
            visit.compared = _comparison(left, right, exact, settings, sampled)
            return View(compare=notice + visit.compared)

        try:
            yield view()
            for part, answering in ((exact_params, left), (params, right)):
                follow = self._follow({**part, "seed": seed}, lambda: visit.stop, into=answering)
                async for _ in follow:
                    if visit.turn == mine and answering.ended is None:
                        yield view()
                if visit.stop:
                    break
        except BackendError as error:
            notice = text.notice_html(str(error))
        finally:
            visit.busy = False
            for answering in (left, right):
                answering.ended = answering.ended or ("failed" if notice else "stopped")
        if visit.turn == mine:
            yield view()

    @staticmethod
    def stop(visit: Visit) -> None:
        """End what is being decoded for this visitor."""
        visit.stop = True

    @staticmethod
    async def clear(visit: Visit) -> View:
        """Begin a new chat, once what is on its way has ended: it would be drawn over this."""
        visit.stop, visit.measured = True, None
        visit.turn += 1
        while visit.busy:
            await asyncio.sleep(0.01)
        visit.exchanges.clear()
        visit.live = visit.compared = visit.unanswered = ""
        return View("", "", text.welcome_html(), text.figures_html({}, {}), "")

    def _params(
        self, messages: Sequence[Mapping[str, str]], chosen: Mapping[str, Any]
    ) -> tuple[FSDSettings, dict[str, Any]]:
        """FSD's settings and the request; what is of a wrong kind or size is refused here."""
        about = self.backend.about
        fsd = {**choosable(about.settings), **{name: chosen[name] for name in CHOSEN}}
        values = {name: value for name, value in chosen.items() if name not in CHOSEN}
        try:
            settings = about.settings.updated(**fsd)
            options = self.options.updated(**values)
        except (ValueError, TypeError) as error:
            raise PageError(str(error)) from error
        most = about.limits.max_new_tokens
        if options.max_new_tokens > most:
            raise PageError(f"max_new_tokens must be at most {most}")
        given = {name: value for name, value in options.as_dict().items() if value is not None}
        return settings, request(messages, given, choosable(settings))

    async def _follow(
        self,
        params: Mapping[str, Any],
        over: Callable[[], bool],
        plain: bool = False,
        into: Answering | None = None,
    ) -> AsyncIterator[Answering]:
        """An answer from time to time, and at its end.

        Args:
            over: Whether nobody wants the rest.
            into: What to fill; default: a new one.
        """
        answering, drawn = into or Answering(), 0.0
        # Closed at once when this is: the decoding ends with it.
        async with contextlib.aclosing(self.backend.stream(params, plain)) as updates:
            async for update in updates:
                answering.tokens.extend(update.tokens)
                answering.figures = update.figures or answering.figures
                answering.ended = update.finish_reason
                if over():
                    answering.ended = answering.ended or "stopped"
                    break
                if time.monotonic() - drawn >= DRAWING * len(answering.tokens):
                    yield answering
                    drawn = time.monotonic()
        answering.ended = answering.ended or "stopped"
        yield answering


def _question(visit: Visit, message: Any) -> str:
    if visit.busy:
        raise PageError("an answer is on its way: stop it first")
    question = message.strip() if isinstance(message, str) else ""
    if not question:
        raise PageError("say something first")
    if len(question) > LONGEST_MESSAGE:
        raise PageError(f"a message has {LONGEST_MESSAGE} characters at most")
    return question


def _bubble(answering: Answering, settings: FSDSettings) -> str:
    busy = answering.ended is None
    body = text.answer_html(answering.tokens, settings, busy=busy)
    note = "waiting in line …" if busy and not answering.figures else answering.summary(settings)
    return text.turn_html("assistant", body, note)


def _comparison(
    left: Answering, right: Answering, exact: FSDSettings, settings: FSDSettings, sampled: bool
) -> str:
    ends = {left.ended, right.ended}
    whole = ends <= {"stop", "length"}
    # One that was cut short parts from the other at no place of its own.
    part = text.parting_at_end if whole else text.parting
    place = part(left.tokens, right.tokens)
    names = ("Exact (T = 0)", f"FSD (T = {settings.threshold:g}, {settings.divergence})")
    verdict = text.verdict(left.tokens, right.tokens, whole, sampled)
    if not whole:
        verdict = f"{'Decoding …' if None in ends else 'Not complete.'} {verdict}"
    bodies = [
        text.answer_html(one.tokens, used, place, busy=one.ended is None)
        for one, used in ((left, exact), (right, settings))
    ]
    notes = (left.summary(exact), right.summary(settings))
    return text.compare_html(bodies[0], bodies[1], names, notes, verdict)
