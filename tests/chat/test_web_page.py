"""Behavior of the web page and its local backend. Neither a browser nor Gradio is needed."""

from __future__ import annotations

import asyncio
import base64
import copy
import itertools
import json
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from api_servers import QUESTION
from prompts import tokenize

from eagle_fsd import AcceptanceConfig, EagleFSD
from eagle_fsd.chat.backend import About, BackendError, LocalBackend, Token, Update, request_params
from eagle_fsd.chat.config import AnswerOptions, Limits
from eagle_fsd.chat.web.page import (
    MAX_EXCHANGES,
    MAX_MESSAGE_LENGTH,
    ChatState,
    Exchange,
    Page,
    View,
    max_threshold,
)
from eagle_fsd.chat.web.rendering import NONE, PENDING, error_html
from eagle_fsd.utils.chat_templates import load_chat_template
from eagle_fsd.utils.options import OptionsError

CONTROLS = {
    "threshold": 0.2,
    "divergence": "js",
    "min_ratio": 0.0,
    "temperature": 0.0,
    "max_new_tokens": 48,
}
STATS = {"tokens": 2, "tau": 2.0, "steps": 1, "tokens_per_second": 100.0, "fuzzy_tokens": 1}


class ScriptedBackend:
    """A backend with fixed answers; it records its requests.

    An answer may end with an error, or never, with a heartbeat every ``endless`` seconds.
    """

    def __init__(self, *words: str, error: str = "", endless: float = 0.0) -> None:
        self.about = About("script", AcceptanceConfig(), Limits())
        self.words, self.error, self.endless = words, error, endless
        self.requests: list[tuple[dict[str, Any], str]] = []
        self.clients: set[str] = set()
        self.closed = 0

    async def stream(
        self, params: Mapping[str, Any], client: str = "", method: str = "fsd"
    ) -> AsyncGenerator[Update, None]:
        self.requests.append((dict(params), method))
        self.clients.add(client)
        try:
            yield Update()
            for index, word in enumerate(self.words):
                yield Update([Token(index, word, "fuzzy", 0.1, 0.5)], STATS)
                await asyncio.sleep(0)
            if self.error:
                raise BackendError(self.error)
            while self.endless:
                await asyncio.sleep(self.endless)
                yield Update()
            yield Update((), STATS, "stop")
        finally:
            self.closed += 1


class InterruptedBackend(ScriptedBackend):
    """Answers with two words, but at ``threshold`` stops or fails after the first one."""

    def __init__(self, threshold: float, error: str) -> None:
        super().__init__("so", " far")
        self.threshold = threshold
        self.interrupted = ScriptedBackend("so", error=error, endless=0.001)

    async def stream(
        self, params: Mapping[str, Any], client: str = "", method: str = "fsd"
    ) -> AsyncGenerator[Update, None]:
        interrupted = params["fsd"]["threshold"] == self.threshold
        source = self.interrupted if interrupted else super()
        async for update in source.stream(params, client, method):
            yield update


def collect(views: AsyncIterator[View]) -> list[View]:
    async def run() -> list[View]:
        return [view async for view in views]

    return asyncio.run(run())


def send(page: Page, state: ChatState, message: Any, **controls: Any) -> list[View]:
    return collect(page.send(state, message, {**CONTROLS, **controls}))


def run_and_stop(page: Page, state: ChatState, event: str) -> list[View]:
    """Stop an event once it has sent a few views."""

    async def run() -> list[View]:
        views: list[View] = []
        async for view in getattr(page, event)(state, "Second", CONTROLS):
            views.append(view)
            if len(views) > 10:
                page.stop(state)
        return views

    return asyncio.run(asyncio.wait_for(run(), 10))


@pytest.fixture
def state() -> ChatState:
    return ChatState()


def test_requests_carry_the_earlier_messages(state: ChatState) -> None:
    backend = ScriptedBackend("5", " apples")
    page = Page(backend, AnswerOptions())
    views = send(page, state, "  How many?  ")
    assert views[0].box == ""
    assert "Waiting in the queue" in views[0].live
    assert "fsd-fuzzy" in views[-1].live
    assert 'aria-busy="false"' in views[-1].live
    assert "100.0" in views[-1].stats
    send(page, state, "Sure?")
    assert backend.requests[1][0]["messages"] == [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "5 apples"},
        {"role": "user", "content": "Sure?"},
    ]
    cleared = asyncio.run(page.clear(state))
    assert cleared.log == cleared.box == ""
    send(page, state, "Again?")
    assert len(backend.requests[2][0]["messages"]) == 1


def test_requests_carry_controls_and_options(state: ChatState) -> None:
    """Also those of the baseline and of a comparison, which come from the same client."""
    backend = ScriptedBackend("x")
    backend.about = About("x", AcceptanceConfig(fallback="stop"), Limits())
    page, state.client = Page(backend, AnswerOptions(top_p=0.5, seed=3)), "one"
    send(page, state, "Hello", threshold=0.4, divergence="tv", min_ratio=0.25, temperature=0.5)
    params, method = backend.requests[0]
    assert method == "fsd"
    expected = AcceptanceConfig(threshold=0.4, divergence="tv", min_ratio=0.25, fallback="stop")
    assert params["fsd"] == expected.model_dump()
    assert (params["temperature"], params["top_p"], params["seed"]) == (0.5, 0.5, 3)
    assert params["max_new_tokens"] == 48
    collect(page.measure_baseline(state))
    collect(page.compare(state, "", CONTROLS))
    assert len(backend.requests) == 4
    assert backend.clients == {"one"}
    # A rule of the server's has none of the controls.
    backend.about = About("x", AcceptanceConfig(rule="margin"), Limits())
    send(page, state, "Hello", threshold=0.0)
    assert backend.requests[-1][0]["fsd"] == AcceptanceConfig(rule="margin").model_dump()
    *_, compared = collect(page.compare(state, "Hello", {**CONTROLS, "threshold": 0.0}))
    assert "Rule margin" in compared.comparison
    assert [params["fsd"].get("rule") for params, _ in backend.requests[-2:]] == [None, "margin"]


#: Messages and controls, and a part of the error message.
INVALID: tuple[tuple[Any, dict[str, Any], str], ...] = (
    ("", {}, "Enter a message"),
    (" \n", {}, "Enter a message"),
    (None, {}, "Enter a message"),
    (["Hello"], {}, "Enter a message"),
    ("x" * (MAX_MESSAGE_LENGTH + 1), {}, "at most 20,000 characters"),
    ("Hello", {"threshold": -1}, "threshold must be a number of at least 0; got -1"),
    ("Hello", {"threshold": float("nan")}, "threshold must be"),
    ("Hello", {"divergence": "<img src=x>"}, "&lt;img src=x&gt;"),
    ("Hello", {"divergence": ["js"]}, "divergence must be one of"),
    ("Hello", {"temperature": -1}, "temperature must be a finite number of at least 0"),
    ("Hello", {"max_new_tokens": 2.5}, "max_new_tokens must be an integer"),
    ("Hello", {"max_new_tokens": 5000}, "max_new_tokens must be at most 4096; got 5000"),
)


def test_invalid_input_shows_an_error(state: ChatState) -> None:
    backend = ScriptedBackend("x")
    page = Page(backend, AnswerOptions())
    for message, controls, error in INVALID:
        (sent,) = send(page, state, message, **controls)
        (compared,) = collect(page.compare(state, message, {**CONTROLS, **controls}))
        assert error in sent.live
        assert error in compared.comparison
        assert "<img" not in sent.live
    assert backend.requests == []
    assert not state.busy


def test_slider_needs_a_finite_threshold() -> None:
    about = ScriptedBackend().about
    assert max_threshold(about) == about.limits.max_threshold
    raised = replace(about, acceptance=AcceptanceConfig(threshold=0.9))
    assert max_threshold(raised) == 0.9
    endless = replace(about, acceptance=AcceptanceConfig(threshold=math.inf))
    with pytest.raises(OptionsError, match="threshold must be finite for the web page's slider;"):
        max_threshold(endless)


def test_stop_keeps_the_partial_answer(state: ChatState) -> None:
    backend = ScriptedBackend("so", " far", endless=0.001)
    page = Page(backend, AnswerOptions())

    async def run() -> View:
        async for view in page.send(state, "Hello", CONTROLS):
            if " far" in (view.live or "") and state.busy:
                rejected = [item async for item in page.send(state, "Me too", CONTROLS)]
                assert "Stop it first" in rejected[0].live
                page.stop(state)
        return view

    assert "Stopped" in asyncio.run(asyncio.wait_for(run(), 10)).live
    assert backend.closed == 1
    assert not state.busy
    assert [exchange.answer for exchange in state.exchanges] == ["so far"]
    # A stopped answer has no baseline.
    assert collect(page.measure_baseline(state)) == [View()]
    assert len(backend.requests) == 1

    async def disconnect() -> None:
        views = page.send(state, "Hello", CONTROLS)
        while "so" not in (await anext(views)).live:
            pass
        await views.aclose()

    asyncio.run(disconnect())
    assert backend.closed == 2
    assert not state.busy
    assert 'aria-busy="false"' in state.exchanges[1].html


def test_next_message_can_be_sent_from_the_last_view() -> None:
    page = Page(ScriptedBackend("so"), AnswerOptions())

    async def run(state: ChatState, event: str, answers: int) -> View:
        async for view in getattr(page, event)(state, "Hello", CONTROLS):
            html = view.comparison or view.live or ""
            if html.count('aria-busy="false"') == answers:
                return [item async for item in page.send(state, "And now?", CONTROLS)][-1]
        raise AssertionError("no answer")

    for event, answers in (("send", 1), ("compare", 2)):
        state = ChatState()
        assert "And now?" in asyncio.run(run(state, event, answers)).live
        assert state.exchanges[-1].question == "And now?"


def test_clear_stops_generation_and_renders_last() -> None:
    page = Page(ScriptedBackend("so", endless=0.001), AnswerOptions())

    async def run(state: ChatState, event: str) -> View:
        views: list[View] = []

        async def follow() -> None:
            async for view in getattr(page, event)(state, "Hello", CONTROLS):
                views.append(view)

        task = asyncio.create_task(follow())
        while "so" not in ((views[-1].live or views[-1].comparison) if views else ""):
            await asyncio.sleep(0.001)
        views.append(await page.clear(state))
        await task
        return views[-1]

    for event in ("send", "compare"):
        state = ChatState()
        last = asyncio.run(asyncio.wait_for(run(state, event), 10))
        assert "fsd-answer" not in last.live
        assert last.comparison == ""
        assert state.exchanges == []
        assert not state.busy


def test_input_errors_leave_the_newest_exchange() -> None:
    """The exchange before it is in the log already and must not appear twice."""
    for end in ("answered", "stopped in the queue", "failed"):
        state = ChatState()
        send(Page(ScriptedBackend("so"), AnswerOptions()), state, "First")
        if end == "stopped in the queue":
            page = Page(ScriptedBackend(endless=0.001), AnswerOptions())
            newest = run_and_stop(page, state, "send")[-1].live
            assert "Second" in page.restore_question(state, " ").box
        else:
            error = "no" if end == "failed" else ""
            page = Page(ScriptedBackend("so", error=error), AnswerOptions())
            newest = send(page, state, "Second")[-1].live
        (rejected,) = send(page, state, " ")
        assert rejected.live.startswith(newest.removesuffix(error_html("no")))
        assert "Enter a message first" in rejected.live
        assert "First" not in rejected.live


def test_backend_errors_are_shown_and_the_question_is_restored(state: ChatState) -> None:
    answering = Page(ScriptedBackend("so"), AnswerOptions())
    send(answering, state, "Hello")
    assert answering.restore_question(state, "") == View()
    page = Page(ScriptedBackend("half", error="<b>no</b> memory"), AnswerOptions())
    last = send(page, state, "Hello")[-1]
    assert "&lt;b&gt;no&lt;/b&gt; memory" in last.live
    assert not state.busy
    assert "half" in last.live
    for html in (last.live, state.exchanges[-1].html):
        assert "Failed" in html
        assert 'aria-busy="true"' not in html
    assert PENDING not in last.stats
    assert collect(page.measure_baseline(state)) == [View()]
    assert page.restore_question(state, "").box == "Hello"
    assert page.restore_question(state, "").box is None  # only once
    send(page, state, "Hello")
    assert page.restore_question(state, "something new").box is None


@pytest.mark.usefixtures("no_delay")
def test_stop_is_offered_only_while_there_is_something_to_stop(state: ChatState) -> None:
    page = Page(ScriptedBackend("so"), AnswerOptions())
    assert {view.stoppable for view in send(page, state, "First")} == {True}
    assert collect(page.measure_baseline(state))[-1].stoppable is False
    compared = [view.stoppable for view in collect(page.compare(state, "", CONTROLS))]
    assert compared == [True] * (len(compared) - 1) + [False]
    failing = Page(ScriptedBackend("so", error="no"), AnswerOptions())
    assert send(failing, state, "Second")[-1].stoppable is False
    endless = Page(ScriptedBackend("so", endless=0.001), AnswerOptions())
    for event in ("send", "compare"):
        assert run_and_stop(endless, state, event)[-1].stoppable is False
    # Rejected input changes nothing.
    assert send(page, state, " ")[-1].stoppable is None
    assert asyncio.run(page.clear(state)).stoppable is False


def exported(html: str) -> dict[str, Any]:
    """Return the content of the file that an exchange offers."""
    (data,) = re.findall(r'download="[\w.-]+" href="data:application/json;base64,([\w+/=]*)"', html)
    return json.loads(base64.b64decode(data))


def test_answers_can_be_exported(state: ChatState) -> None:
    page = Page(ScriptedBackend("</a>", " far\ud800"), AnswerOptions(seed=3))
    send(page, state, "First")
    views = send(page, state, "And <b>now</b>?", threshold=0.3)
    assert not any("download" in view.live for view in views[:-1])
    answer = exported(views[-1].live)
    assert answer["model"] == "script"
    questions = [message["content"] for message in answer["messages"]][::2]
    assert questions == ["First", "And <b>now</b>?"]
    assert answer["settings"]["fsd"] == AcceptanceConfig(threshold=0.3).model_dump()
    assert (answer["settings"]["seed"], answer["settings"]["max_new_tokens"]) == (3, 48)
    assert (answer["stats"], answer["finish_reason"]) == (STATS, "stop")
    assert answer["answer"] == "</a> far?"  # JSON has no lone surrogates
    first = {"id": 0, "text": "</a>", "origin": "fuzzy", "divergence": 0.1, "probability": 0.5}
    assert answer["tokens"][0] == {**first, "top": []}
    # A partial answer can be exported too; the log keeps answers without their files.
    stopped = Page(ScriptedBackend("so", endless=0.001), AnswerOptions())
    assert exported(run_and_stop(stopped, state, "send")[-1].live)["finish_reason"] == "stopped"
    assert not any("download" in exchange.html for exchange in state.exchanges)


def test_long_answers_and_chats_are_bounded(state: ChatState) -> None:
    """A view holds the whole answer, so one per token would be quadratic."""
    words = [f" {number}" for number in range(2000)]
    views = send(Page(ScriptedBackend(*words), AnswerOptions()), state, "Count")
    assert 2 < len(views) < 1000
    assert state.exchanges[0].answer == "".join(words)
    assert "> 1999<" in views[-1].live
    page = Page(ScriptedBackend("x"), AnswerOptions())
    for number in range(MAX_EXCHANGES + 3):
        send(page, state, f"{number}")
    assert len(state.exchanges) == MAX_EXCHANGES
    assert state.exchanges[0].question == "3"
    copy.deepcopy(state)  # Gradio copies initial states


@pytest.fixture
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_fsd.chat.web.page.BASELINE_DELAY", 0.0)


@pytest.mark.usefixtures("no_delay")
def test_baseline_decodes_the_same_prompt_autoregressively(state: ChatState) -> None:
    """It may fail, and the next answer cancels it."""
    backend = ScriptedBackend("x", " y")
    page = Page(backend, AnswerOptions())
    # Before the first answer. (Gradio clears the outputs of an event that yields nothing.)
    assert collect(page.measure_baseline(state)) == [View()]
    send(page, state, "Hello", max_new_tokens=512)
    views = collect(page.measure_baseline(state))
    (answered, _), (measured, method) = backend.requests
    assert method == "ar"
    assert measured["messages"] == answered["messages"]
    assert measured["max_new_tokens"] == 64
    assert "1.0x" in views[-1].stats
    failing = ScriptedBackend(error="no")
    views = collect(Page(failing, AnswerOptions()).measure_baseline(state))
    assert failing.requests
    assert PENDING not in views[-1].stats
    assert NONE in views[-1].stats

    async def run() -> list[View]:
        baseline = page.measure_baseline(state)
        views = [await anext(baseline) for _ in range(3)]
        assert PENDING in views[-1].stats
        state.turn += 1
        return views + [view async for view in baseline]

    assert len(asyncio.run(run())) == 3


def test_compare_decodes_exactly_and_with_fsd(state: ChatState) -> None:
    backend = ScriptedBackend("a", " b")
    page = Page(backend, AnswerOptions())
    send(page, state, "First")
    send(page, state, "Second")
    backend.requests.clear()
    views = collect(page.compare(state, "", {**CONTROLS, "temperature": 0.7}))
    (exact, _), (fsd, _) = backend.requests
    assert exact["fsd"]["threshold"] == 0.0
    assert fsd["fsd"]["threshold"] == 0.2
    assert exact["messages"] == fsd["messages"]
    assert exact["seed"] == fsd["seed"]
    # With an empty message box the last question, which the chat shows, is decoded again.
    assert [turn["content"] for turn in fsd["messages"]] == ["First", "a b", "Second"]
    assert "Second" not in views[-1].comparison
    assert "Generating …" in views[0].comparison
    assert NONE in views[0].stats  # not those of the answer before
    assert "100.0" not in views[0].stats
    assert "100.0" in views[-1].stats
    assert "The answers are identical (2 tokens)." in views[-1].comparison
    assert "sampling alone" in views[-1].comparison
    last = collect(page.compare(state, "Third", CONTROLS))[-1].comparison
    assert "Third" in last
    assert backend.requests[-1][0]["messages"][-1]["content"] == "Third"
    assert len(state.exchanges) == 2
    assert not state.busy
    # Input errors leave the last comparison in place, the next message removes it.
    (rejected,) = collect(page.compare(state, "Fourth", {**CONTROLS, "threshold": -1}))
    assert "threshold must be" in rejected.comparison
    assert rejected.comparison.startswith(last)
    assert send(page, state, "Fifth")[0].comparison == ""


def test_interrupted_comparisons_are_marked_incomplete() -> None:
    """Whichever answer is interrupted, its end does not count as a difference."""
    for threshold, end in itertools.product((0.0, 0.2), ("stopped", "failed")):
        state = ChatState()
        backend = InterruptedBackend(threshold, "<b>no</b>" if end == "failed" else "")
        page = Page(backend, AnswerOptions())
        if end == "failed":
            last = collect(page.compare(state, "Hello", CONTROLS))[-1].comparison
            assert "&lt;b&gt;no&lt;/b&gt;" in last
        else:
            last = run_and_stop(page, state, "compare")[-1].comparison
        assert "Incomplete. No difference so far." in last
        assert "Generating" not in last
        assert last.count('aria-busy="false"') == 2
        assert end.capitalize() in last
        assert not state.busy


class TestLocalBackend:
    @pytest.fixture
    def backend(self, model: EagleFSD) -> Iterator[LocalBackend]:
        backend = LocalBackend(
            model, load_chat_template(model.tokenizer), Limits(max_batch=1, queue=1), "pair"
        )
        yield backend
        backend.close()

    @staticmethod
    def ask(
        backend: LocalBackend, method: str = "fsd", **params: Any
    ) -> tuple[list[Token], list[Update]]:
        """Return an answer's tokens and updates; ``params`` override the request's."""

        async def run() -> list[Update]:
            request = request_params([{"role": "user", "content": QUESTION}])
            given = {**request, "max_new_tokens": 40, "temperature": 0.0, **params}
            return [update async for update in backend.stream(given, method=method)]

        updates = asyncio.run(run())
        return [token for update in updates for token in update.tokens], updates

    def test_tokens_equal_generate(self, model: EagleFSD, backend: LocalBackend) -> None:
        """With the pair and, greedily and losslessly, without the drafter."""
        ids = tokenize(model, [{"role": "user", "content": QUESTION}])
        for method, threshold in (("fsd", 0.3), ("fsd", 0.0), ("ar", 0.0)):
            fsd = {"threshold": threshold, "min_ratio": 0.0}
            tokens, updates = self.ask(backend, method, fsd=fsd)
            out = model.generate(ids, max_new_tokens=40, method=method, **fsd)
            assert [token.id for token in tokens] == out.sequences[0, ids.shape[1] :].tolist()
            origins = [token.origin for token in tokens]
            assert {name: origins.count(name) for name in ("exact", "fuzzy", "target")} == (
                out.stats.as_dict()["origins"]
            )
            assert ("fuzzy" in origins) == (threshold > 0)
            for token in tokens:
                if token.origin == "fuzzy":
                    assert 0 <= token.divergence < threshold
                assert 0 < token.probability <= 1
                assert len(token.top) == 3
            assert updates[-1].stats["tau"] == pytest.approx(out.stats.tau)
            assert updates[-1].stats["tokens"] == len(tokens)
            assert updates[-1].stats["tokens_per_second"] > 0
            assert updates[-1].finish_reason in ("stop", "length")

    def test_long_chats_are_shortened_or_rejected(self, backend: LocalBackend) -> None:
        with pytest.raises(BackendError, match="no room for an answer"):
            self.ask(backend, messages=[{"role": "user", "content": "apples " * 10_000}])
        state, page = ChatState(), Page(backend, AnswerOptions())
        for _ in range(2):  # about 1,500 tokens each; the context has 2,048
            state.exchanges.append(Exchange("apples " * 1500, "apples", ""))
        last = send(page, state, QUESTION, max_new_tokens=4)[-1]
        assert "2 oldest messages dropped" in last.live

    def test_requests_wait_in_the_queue(self, backend: LocalBackend) -> None:
        """The second request gets heartbeats, the third is rejected."""
        params = request_params([{"role": "user", "content": QUESTION}])

        async def run() -> None:
            gate, loop = asyncio.Event(), asyncio.get_running_loop()

            def hold(*_: Any) -> None:
                asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()

            held = asyncio.ensure_future(backend.queue.call(hold))
            await asyncio.sleep(0.05)
            waiting = backend.stream(params)
            assert await anext(waiting) == Update()
            with pytest.raises(BackendError, match="try again later"):
                await anext(backend.stream(params))
            await waiting.aclose()
            gate.set()
            await held

        asyncio.run(run())
