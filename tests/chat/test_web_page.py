"""What the web page does, without a browser and without gradio."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from eagle_fsd import EagleFSD, FSDSettings
from eagle_fsd.chat.backend import About, BackendError, LocalBackend, Token, Update, request
from eagle_fsd.chat.config import AnswerOptions, Limits
from eagle_fsd.chat.decode_queue import DecodeQueue
from eagle_fsd.chat.web.page import LONGEST_MESSAGE, MOST_EXCHANGES, Exchange, Page, View, Visit
from eagle_fsd.chat.web.rendering import WAITING, notice_html
from eagle_fsd.chat.wire_format import unpack
from eagle_fsd.utils.chat_templates import chat_format, encode_prompt

CHOSEN = {
    "threshold": 0.2,
    "divergence": "js",
    "min_ratio": 0.0,
    "temperature": 0.0,
    "max_new_tokens": 48,
}
FIGURES = {
    "tokens": 2,
    "tau": 2.0,
    "steps": 1,
    "tokens_per_second": 100.0,
    "fuzzy_tokens": 1,
}
QUESTION = "Mia has 8 apples at home. Then she gives 3 apples to Tom. How many apples are left?"


class Script:
    """A backend that says what it is told to, and remembers what it was asked."""

    def __init__(self, *said: str, fail: str = "", endless: bool = False) -> None:
        self.about = About("script", FSDSettings(), Limits())
        self.said, self.fail, self.endless = said, fail, endless
        self.asked: list[tuple[dict[str, Any], bool]] = []
        self.closed = 0

    async def stream(self, params: Mapping[str, Any], plain: bool = False) -> AsyncIterator[Update]:
        self.asked.append((dict(params), plain))
        try:
            yield Update()
            for place, word in enumerate(self.said):
                yield Update([Token(place, word, "fuzzy", 0.1, 0.5)], FIGURES)
                await asyncio.sleep(0)
            if self.fail:
                raise BackendError(self.fail)
            while self.endless:
                await asyncio.sleep(0.001)
                yield Update()
            yield Update((), FIGURES, "stop")
        finally:
            self.closed += 1


class Halfway(Script):
    """Says two words; at ``threshold`` it says one, and then nothing more or fails."""

    def __init__(self, threshold: float, fail: str) -> None:
        super().__init__("so", " far")
        self.threshold, self.half = threshold, Script("so", fail=fail, endless=True)

    async def stream(self, params: Mapping[str, Any], plain: bool = False) -> AsyncIterator[Update]:
        one = self.half if params["fsd"]["threshold"] == self.threshold else super()
        async for update in one.stream(params, plain):
            yield update


def stopped(page: Page, visit: Visit, event: str) -> list[View]:
    """What is drawn of an event that is stopped once nothing new comes."""

    async def stop_it() -> list[View]:
        seen: list[View] = []
        async for view in getattr(page, event)(visit, "Second", CHOSEN):
            seen.append(view)
            if len(seen) > 10:
                page.stop(visit)
        return seen

    return asyncio.run(asyncio.wait_for(stop_it(), 10))


def views(events: AsyncIterator[View]) -> list[View]:
    async def collect() -> list[View]:
        return [view async for view in events]

    return asyncio.run(collect())


def send(page: Page, visit: Visit, message: Any, **chosen: Any) -> list[View]:
    return views(page.send(visit, message, {**CHOSEN, **chosen}))


@pytest.fixture
def visit() -> Visit:
    return Visit()


def test_a_chat_grows_and_travels_with_the_next_question(visit: Visit) -> None:
    backend = Script("5", " apples")
    page = Page(backend, AnswerOptions())
    seen = send(page, visit, "  How many?  ")
    assert seen[0].box == ""
    assert "waiting in line" in seen[0].live
    assert "fsd-fuzzy" in seen[-1].live
    assert 'aria-busy="false"' in seen[-1].live
    assert "100.0" in seen[-1].figures
    send(page, visit, "Sure?")
    assert unpack(backend.asked[1][0]["prompt"]) == [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "5 apples"},
        {"role": "user", "content": "Sure?"},
    ]
    cleared = asyncio.run(page.clear(visit))
    assert cleared.log == cleared.box == ""
    send(page, visit, "Again?")
    assert len(unpack(backend.asked[2][0]["prompt"])) == 1


def test_what_the_page_chooses_goes_to_the_backend(visit: Visit) -> None:
    backend = Script("x")
    page = Page(backend, AnswerOptions(top_p=0.5, seed=3))
    send(page, visit, "Hello", threshold=0.4, divergence="tv", min_ratio=0.25, temperature=0.5)
    params, plain = backend.asked[0]
    assert not plain
    assert (
        params["fsd"] | {"threshold": 0.4, "divergence": "tv", "min_ratio": 0.25} == params["fsd"]
    )
    assert (params["temperature"], params["top_p"], params["seed"]) == (0.5, 0.5, 3)
    assert params["max_new_tokens"] == 48


@pytest.mark.parametrize(
    ("message", "chosen", "words"),
    [
        ("", {}, "say something"),
        (" \n", {}, "say something"),
        (None, {}, "say something"),
        (["Hello"], {}, "say something"),
        ("x" * (LONGEST_MESSAGE + 1), {}, "characters at most"),
        ("Hello", {"threshold": -1}, "threshold must be at least 0"),
        ("Hello", {"threshold": "0.2"}, "threshold must be a number"),
        ("Hello", {"threshold": float("nan")}, "threshold must be"),
        ("Hello", {"divergence": "<img src=x>"}, "&lt;img src=x&gt;"),
        ("Hello", {"divergence": ["js"]}, "divergence must be one of"),
        ("Hello", {"min_ratio": 1.5}, "min_ratio must be between 0 and 1"),
        ("Hello", {"temperature": 3}, "temperature must be between 0 and 2"),
        ("Hello", {"max_new_tokens": 0}, "max_new_tokens must be"),
        ("Hello", {"max_new_tokens": 2.5}, "max_new_tokens must be a whole number"),
        ("Hello", {"max_new_tokens": 5000}, "max_new_tokens must be at most 4096"),
    ],
)
def test_requests_are_checked_again(
    visit: Visit, message: Any, chosen: dict[str, Any], words: str
) -> None:
    backend = Script("x")
    page = Page(backend, AnswerOptions())
    shown = "".join(view.live or "" for view in send(page, visit, message, **chosen))
    compared = views(page.compare(visit, message, {**CHOSEN, **chosen}))
    assert words in shown
    assert words in "".join(view.compare or "" for view in compared)
    assert "<img" not in shown
    assert backend.asked == []
    assert not visit.busy


def test_stop_ends_an_answer_and_keeps_what_was_said(visit: Visit) -> None:
    backend = Script("so", " far", endless=True)
    page = Page(backend, AnswerOptions())

    async def stopped() -> list[View]:
        seen = []
        async for view in page.send(visit, "Hello", CHOSEN):
            seen.append(view)
            if " far" in (view.live or "") and visit.busy:
                refused = [item async for item in page.send(visit, "Me too", CHOSEN)]
                assert "stop it first" in refused[0].live
                page.stop(visit)
        return seen

    seen = asyncio.run(asyncio.wait_for(stopped(), 10))
    assert "stopped" in seen[-1].live
    assert backend.closed == 1
    assert not visit.busy
    assert [exchange.answer for exchange in visit.exchanges] == ["so far"]
    # Who wanted it to end does not want it measured either.
    assert views(page.measure(visit)) == [View()]
    assert len(backend.asked) == 1


def test_who_sees_the_end_may_ask_again_at_once(visit: Visit) -> None:
    page = Page(Script("so"), AnswerOptions())

    async def again() -> list[View]:
        async for view in page.send(visit, "Hello", CHOSEN):
            if 'aria-busy="false"' in (view.live or ""):
                return [item async for item in page.send(visit, "And now?", CHOSEN)]
        raise AssertionError("no answer")

    assert "And now?" in asyncio.run(again())[-1].live
    assert [exchange.question for exchange in visit.exchanges] == ["Hello", "And now?"]


@pytest.mark.parametrize("event", ["send", "compare"])
def test_a_new_chat_ends_what_is_on_its_way(visit: Visit, event: str) -> None:
    page = Page(Script("so", endless=True), AnswerOptions())

    async def both() -> list[View]:
        seen: list[View] = []

        async def follow() -> None:
            async for view in getattr(page, event)(visit, "Hello", CHOSEN):
                seen.append(view)

        following = asyncio.create_task(follow())
        while "so" not in ((seen[-1].live or seen[-1].compare) if seen else ""):
            await asyncio.sleep(0.001)
        seen.append(await page.clear(visit))
        await following
        return seen

    seen = asyncio.run(asyncio.wait_for(both(), 10))
    # What the new chat draws is the last that is drawn.
    assert "fsd-answer" not in seen[-1].live
    assert seen[-1].compare == ""
    assert visit.exchanges == []
    assert not visit.busy


@pytest.mark.parametrize("end", ["answered", "stopped in line", "failed"])
def test_a_refusal_leaves_what_stands_there(visit: Visit, end: str) -> None:
    """The exchange before stands above already: it is not to be there twice."""
    send(Page(Script("so"), AnswerOptions()), visit, "First")
    if end == "stopped in line":
        page = Page(Script(endless=True), AnswerOptions())
        stood = stopped(page, visit, "send")[-1].live
        assert "Second" in page.give_back(visit, " ").box
    else:
        page = Page(Script("so", fail="no" if end == "failed" else ""), AnswerOptions())
        stood = send(page, visit, "Second")[-1].live
    (refused,) = send(page, visit, " ")
    assert refused.live.startswith(stood.removesuffix(notice_html("no")))
    assert "say something first" in refused.live
    assert "First" not in refused.live


def test_leaving_ends_an_answer(visit: Visit) -> None:
    backend = Script("x", endless=True)
    page = Page(backend, AnswerOptions())

    async def leave() -> None:
        events = page.send(visit, "Hello", CHOSEN)
        for _ in range(4):
            await anext(events)
        await events.aclose()

    asyncio.run(leave())
    assert backend.closed == 1
    assert not visit.busy


def test_a_failure_is_told_and_gives_the_question_back(visit: Visit) -> None:
    page = Page(Script("half", fail="<b>no</b> memory"), AnswerOptions())
    last = send(page, visit, "Hello")[-1]
    assert "&lt;b&gt;no&lt;/b&gt; memory" in last.live
    assert not visit.busy
    assert "half" in last.live
    # Nothing more will come of it, here or later.
    for shown in (last.live, visit.exchanges[0].html):
        assert "broken off" in shown
        assert 'aria-busy="true"' not in shown
    assert WAITING not in last.figures
    assert views(page.measure(visit)) == [View()]
    assert page.give_back(visit, "").box == "Hello"
    assert page.give_back(visit, "").box is None  # once
    send(page, visit, "Hello")
    assert page.give_back(visit, "something new").box is None


def test_an_answer_that_was_given_is_not_given_back(visit: Visit) -> None:
    page = Page(Script("so"), AnswerOptions())
    send(page, visit, "Hello")
    assert page.give_back(visit, "") == View()


def test_who_left_in_mid_answer_finds_no_answer_on_its_way(visit: Visit) -> None:
    page = Page(Script("so", endless=True), AnswerOptions())

    async def leave() -> None:
        events = page.send(visit, "Hello", CHOSEN)
        while "so" not in (await anext(events)).live:
            pass
        await events.aclose()

    asyncio.run(leave())
    assert 'aria-busy="false"' in visit.exchanges[0].html


def test_long_answers_are_drawn_less_often(visit: Visit) -> None:
    """A view is the whole answer: one for each token would be quadratic."""
    words = [f" {number}" for number in range(2000)]
    seen = send(Page(Script(*words), AnswerOptions()), visit, "Count")
    assert 2 < len(seen) < 1000
    assert visit.exchanges[0].answer == "".join(words)
    assert "> 1999<" in seen[-1].live


def test_old_exchanges_are_forgotten(visit: Visit) -> None:
    page = Page(Script("x"), AnswerOptions())
    for number in range(MOST_EXCHANGES + 3):
        send(page, visit, f"{number}")
    assert len(visit.exchanges) == MOST_EXCHANGES
    assert visit.exchanges[0].question == "3"
    copy.deepcopy(visit)  # as gradio does with what a visit begins with


def test_plain_decoding_is_measured_on_the_same_prompt(
    visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_fsd.chat.web.page.SETTLE", 0.0)
    backend = Script("x", " y")
    page = Page(backend, AnswerOptions())
    # Nothing was answered yet. (gradio blanks the page for an event that draws nothing.)
    assert views(page.measure(visit)) == [View()]
    send(page, visit, "Hello", max_new_tokens=512)
    seen = views(page.measure(visit))
    (answered, _), (measured, plain) = backend.asked
    assert plain
    assert measured["prompt"] == answered["prompt"]
    assert measured["max_new_tokens"] == 64
    assert "1.0 x" in seen[-1].figures
    # Where there is none, the page does not go on waiting.
    broken = Script(fail="no")
    found = views(Page(broken, AnswerOptions()).measure(visit))
    assert broken.asked
    assert WAITING not in found[-1].figures
    # A newer answer makes an older measurement pointless.
    measuring = page.measure(visit)

    async def overtaken() -> list[View]:
        seen = [await anext(measuring) for _ in range(3)]
        assert WAITING in seen[-1].figures
        visit.turn += 1
        return seen + [view async for view in measuring]

    assert len(asyncio.run(overtaken())) == 3


def test_comparing_asks_exactly_and_with_the_settings(visit: Visit) -> None:
    backend = Script("a", " b")
    page = Page(backend, AnswerOptions())
    send(page, visit, "First")
    send(page, visit, "Second")
    backend.asked.clear()
    seen = views(page.compare(visit, "", {**CHOSEN, "temperature": 0.7}))
    (exact, _), (fsd, _) = backend.asked
    assert exact["fsd"]["threshold"] == 0.0
    assert fsd["fsd"]["threshold"] == 0.2
    assert exact["prompt"] == fsd["prompt"]
    assert exact["seed"] == fsd["seed"]
    # The last question again, where it stood.
    assert [turn["content"] for turn in unpack(fsd["prompt"])] == ["First", "a b", "Second"]
    assert "The same 2 tokens." in seen[-1].compare
    assert "by chance" in seen[-1].compare
    assert "Decoding …" in seen[0].compare
    views(page.compare(visit, "Third", CHOSEN))
    assert unpack(backend.asked[-1][0]["prompt"])[-1]["content"] == "Third"
    assert len(visit.exchanges) == 2
    assert not visit.busy
    # A refusal leaves the comparison in view.
    (refused,) = views(page.compare(visit, "Fourth", {**CHOSEN, "threshold": -1}))
    assert "threshold must be at least 0" in refused.compare
    assert "The same 2 tokens." in refused.compare


@pytest.mark.parametrize("threshold", [0.0, 0.2], ids=["exact", "fsd"])
@pytest.mark.parametrize("end", ["stopped", "failed"])
def test_comparisons_that_are_cut_short_say_so(visit: Visit, threshold: float, end: str) -> None:
    """In the first answer or in the second; neither goes on, and no end of theirs is a parting."""
    page = Page(Halfway(threshold, "<b>no</b>" if end == "failed" else ""), AnswerOptions())
    if end == "failed":
        last = views(page.compare(visit, "Hello", CHOSEN))[-1].compare
        assert "&lt;b&gt;no&lt;/b&gt;" in last
    else:
        last = stopped(page, visit, "compare")[-1].compare
    assert "Not complete. No difference so far." in last
    assert "Decoding" not in last
    assert last.count('aria-busy="false"') == 2
    assert ("broken off" if end == "failed" else "stopped") in last
    assert not visit.busy


def test_who_sees_the_end_of_a_comparison_may_ask_at_once(visit: Visit) -> None:
    page = Page(Script("so"), AnswerOptions())

    async def ask() -> list[View]:
        async for view in page.compare(visit, "Hello", CHOSEN):
            if view.compare.count('aria-busy="false"') == 2:
                return [item async for item in page.send(visit, "And now?", CHOSEN)]
        raise AssertionError("no comparison")

    assert "aria-busy" in asyncio.run(ask())[-1].live


@pytest.fixture(scope="module")
def model() -> EagleFSD:
    return EagleFSD.from_pretrained()


class TestLocalBackend:
    @pytest.fixture
    def backend(self, model: EagleFSD) -> Any:
        found = LocalBackend(model, chat_format(model.tokenizer), Limits(queue=1), "pair")
        yield found
        found.close()

    @staticmethod
    def ask(
        backend: LocalBackend, plain: bool = False, **options: Any
    ) -> tuple[list[Token], list[Update]]:
        async def collect() -> list[Update]:
            chat = [{"role": "user", "content": QUESTION}]
            options.setdefault("max_new_tokens", 64)
            fsd = options.pop("fsd", None)
            return [update async for update in backend.stream(request(chat, options, fsd), plain)]

        updates = asyncio.run(collect())
        return [token for update in updates for token in update.tokens], updates

    @pytest.mark.parametrize("threshold", [0.0, 0.3])
    def test_tokens_are_the_librarys(
        self, model: EagleFSD, backend: LocalBackend, threshold: float
    ) -> None:
        fsd = {"threshold": threshold, "min_ratio": 0.0}
        tokens, updates = self.ask(backend, fsd=fsd)
        chat = [{"role": "user", "content": QUESTION}]
        ids = encode_prompt(chat, model.tokenizer, chat_format(model.tokenizer))
        out = model.generate(ids, max_new_tokens=64, **fsd)
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
        assert updates[-1].figures["tau"] == pytest.approx(out.stats.tau)
        assert updates[-1].figures["tokens"] == len(tokens)
        assert updates[-1].finish_reason in ("stop", "length")
        assert Update.from_dict(updates[-1].as_dict()).figures == updates[-1].figures

    def test_plain_decoding(self, backend: LocalBackend) -> None:
        plain, updates = self.ask(backend, plain=True, logprobs=None)
        exact, _ = self.ask(backend, fsd={"threshold": 0.0})
        assert [token.id for token in plain] == [token.id for token in exact]
        figures = updates[-1].figures
        assert figures["tau"] == 1.0
        assert figures["tokens_per_second"] > 0
        assert {token.origin for token in plain} == {"target"}

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"fsd": {"threshold": 0.6}}, "threshold must be at most 0.5"),
            ({"fsd": {"total_tokens": 900}}, "no setting total_tokens"),
            ({"temperature": 9}, "temperature"),
            ({"logprobs": 99}, "logprobs"),
        ],
    )
    def test_what_it_refuses(
        self, backend: LocalBackend, options: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(BackendError, match=words):
            self.ask(backend, **options)

    def test_prompts_are_bounded(self, backend: LocalBackend) -> None:
        async def collect() -> None:
            chat = [{"role": "user", "content": "apples " * 10_000}]
            async for _ in backend.stream(request(chat, {})):
                pass

        with pytest.raises(BackendError, match="no room for an answer"):
            asyncio.run(collect())

    def test_a_chat_beyond_the_context_says_so(self, backend: LocalBackend) -> None:
        """And goes on with its newest messages."""
        visit, page = Visit(), Page(backend, AnswerOptions())
        for _ in range(2):  # some 1,500 tokens each, of 2,048
            visit.exchanges.append(Exchange("apples " * 1500, "apples", ""))
        last = send(page, visit, QUESTION, max_new_tokens=4)[-1]
        assert "its 2 oldest messages are left out" in last.live

    def test_one_at_a_time_and_leaving_frees_the_line(self, backend: LocalBackend) -> None:
        """A second waits with signs of life, a third is refused; who leaves is forgotten."""
        params = request([{"role": "user", "content": QUESTION}], {"max_new_tokens": 400})

        async def run() -> None:
            gate, loop = asyncio.Event(), asyncio.get_running_loop()

            def hold(gone: Any) -> None:
                asyncio.run_coroutine_threadsafe(gate.wait(), loop).result()

            held = asyncio.ensure_future(backend.queue.call(hold))
            await asyncio.sleep(0.05)
            waiting = backend.stream(params)
            assert await anext(waiting) == Update()  # a sign of life
            with pytest.raises(BackendError, match="requests are waiting"):
                await anext(backend.stream(params))
            await waiting.aclose()
            await asyncio.sleep(0)
            other = backend.stream(params)
            gate.set()
            while not (await anext(other)).tokens:
                pass
            await other.aclose()
            await held
            for _ in range(100):
                if not len(backend.queue):
                    return
                await asyncio.sleep(0.05)
            raise AssertionError("it goes on decoding for nobody")

        asyncio.run(run())

    def test_a_workers_line_and_its_figures(self, model: EagleFSD) -> None:
        events: list[str] = []
        figures: dict[str, Any] = {}

        def watch(event: str, found: dict[str, Any]) -> None:
            events.append(event)
            figures.update(found)

        queue = DecodeQueue(model, 4, watch)
        backend = LocalBackend(model, chat_format(model.tokenizer), Limits(), "pair", queue)
        tokens, _ = self.ask(backend)
        backend.close()
        assert (events[0], events[-1]) == ("begun", "ended")
        assert set(events[1:-1]) == {"step"}
        assert figures["completion_tokens"] == len(tokens)

    def test_warming_up_leaves_no_trace(self, backend: LocalBackend) -> None:
        backend.warm_up()
        assert len(backend.queue) == 0
        assert self.ask(backend)[1][-1].figures["tau"] > 2

    def test_settings_that_a_page_cannot_choose_are_the_pairs(self, model: EagleFSD) -> None:
        settings = replace(model.settings, fallback="stop")
        about = About("x", settings, Limits())
        backend = Script("x")
        backend.about = about
        views(Page(backend, AnswerOptions()).send(Visit(), "Hello", CHOSEN))
        assert backend.asked[0][0]["fsd"]["fallback"] == "stop"
