"""Many clients at once, and clients that disconnect."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from functools import partial
from typing import Any

import httpx
import psutil
import pytest
from api_servers import (
    CHAT,
    COMPLETIONS,
    ENDLESS,
    HELLO,
    MAX_BATCH,
    MAX_WAITING,
    NAME,
    QUESTION,
    TIMEOUT,
    APIThread,
    ServerProcess,
    fixed_answer,
    seconds_until,
)

from eagle_fsd.chat.backend import FairThread

CLIENTS = 32
MB = 2**20
#: How much a process may grow under load once it is warm: caches differ in length, heaps fragment.
MAX_GROWTH = 32 * MB
#: Outcomes of requests by status; clients also leave, and any other outcome is a fault.
OUTCOMES = {200: "answered", 429: "rejected"}


def random_request(dice: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a route and a body."""
    body: dict[str, Any] = {
        "model": NAME,
        "max_tokens": dice.randint(1, 60),
        "temperature": dice.choice([0, 0, 0.7, 1.5]),
        "stream": dice.random() < 0.5,
        "fsd": {"threshold": dice.choice([0.0, 0.1, 0.4])},
    }
    if dice.random() < 0.5:
        return COMPLETIONS, {**body, "prompt": QUESTION[: dice.randint(5, len(QUESTION))]}
    turns = [*HELLO, {"role": "assistant", "content": "Hello!"}] * dice.randint(0, 6)
    return CHAT, {**body, "messages": [*turns, {"role": "user", "content": QUESTION}]}


async def fetch(client: httpx.AsyncClient, route: str, body: dict[str, Any]) -> tuple[int, str]:
    """Return a response's status, 0 for an incomplete stream, and its body."""
    async with client.stream("POST", route, json=body) as response:
        data = (await response.aread()).decode()
    if response.status_code == 200 and body["stream"]:
        complete = data.endswith("data: [DONE]\n\n") and '"error"' not in data
        return 200 if complete else 0, data
    if response.status_code == 200:
        assert json.loads(data)["choices"]
    return response.status_code, data


async def visit(client: httpx.AsyncClient, number: int, end: float, tally: Counter[str]) -> None:
    """Send requests until a time; clients with odd numbers disconnect within two seconds."""
    dice = random.Random(number)
    while time.monotonic() < end:
        response = fetch(client, *random_request(dice))
        try:
            timeout = dice.uniform(0.0, 2.0) if number % 2 else None
            status, text = await asyncio.wait_for(response, timeout)
        except asyncio.TimeoutError:
            tally["left"] += 1
            continue
        tally[OUTCOMES.get(status, f"{status}: {text}")] += 1
        if status == 429:
            await asyncio.sleep(dice.uniform(0.02, 0.2))


def async_client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=TIMEOUT, limits=httpx.Limits())


def load(url: str, seconds: float, seed: int) -> Counter[str]:
    """Let all clients send requests for some time."""
    tally: Counter[str] = Counter()

    async def work() -> None:
        end = time.monotonic() + seconds
        async with async_client(url) as client:
            numbers = range(seed * CLIENTS, (seed + 1) * CLIENTS)
            await asyncio.gather(*(visit(client, number, end, tally) for number in numbers))

    asyncio.run(work())
    return tally


@pytest.mark.slow
def test_many_clients(record_property: Any) -> None:
    """After a warm-up, 6 seconds of load cause no faults and keep memory and files bounded."""
    options = ("--queue", str(MAX_WAITING), "--max-batch", str(MAX_BATCH))
    server, seconds = ServerProcess("serve", *options), 6
    process = psutil.Process(server.process.pid)

    def queue_length() -> int:
        return server.http.get("/health").json()["queue"]

    try:
        answer = fixed_answer(server.http)
        load(server.url, seconds, seed=0)
        assert seconds_until(lambda: queue_length() == 0, 10) < 10
        memory, files = process.memory_info().rss, process.num_fds()
        tally = load(server.url, seconds, seed=1)
        seconds_until_empty = seconds_until(lambda: queue_length() == 0, 10)
        record_property("tally", dict(tally))
        record_property("seconds_until_empty", seconds_until_empty)
        assert process.memory_info().rss - memory < MAX_GROWTH
        assert seconds_until(lambda: process.num_fds() <= files + 4, 10) < 10
        assert tally.keys() <= {*OUTCOMES.values(), "left"}, tally
        assert tally["answered"] > seconds / 2
        assert tally["left"] > CLIENTS / 4
        assert seconds_until_empty < 10
        assert fixed_answer(server.http) == answer
        assert "Traceback" not in server.log.read_text()
    finally:
        server.stop()


def test_requests_of_a_client_are_read_one_after_another() -> None:
    """A client with many requests delays another by the time of one."""
    thread, order = FairThread("read"), []

    async def work() -> None:
        await asyncio.gather(*(thread.run(name, partial(order.append, name)) for name in "aaab"))

    asyncio.run(work())
    assert order == ["a", "b", "a", "a"]


def test_disconnects_free_the_queue_within_a_second(
    server: APIThread, record_property: Any
) -> None:
    """The batch and the queue are full, and one more request gets 429 until others leave.

    First those that are streamed leave, then the others.
    """
    count = MAX_BATCH + MAX_WAITING
    body = {"model": NAME, "prompt": "Hello!", **ENDLESS, "max_tokens": 1900}

    async def seconds_until_length(length: int) -> float:
        return await asyncio.to_thread(seconds_until, lambda: server.queue_length() == length, 20)

    async def ask(client: httpx.AsyncClient, stream: bool) -> None:
        given = {**body, "stream": stream}
        async with client.stream("POST", COMPLETIONS, json=given) as response:
            await response.aread()

    async def leave(tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def work() -> list[float]:
        async with async_client(server.url) as client:
            tasks = [asyncio.create_task(ask(client, at % 2 == 0)) for at in range(count)]
            assert await seconds_until_length(count) < 20
            rejected = await client.post(COMPLETIONS, json=body)
            assert "the request queue is full; try again later" in rejected.text
            assert rejected.status_code == 429
            await leave(tasks[::2])  # including some that are being decoded
            seconds = [await seconds_until_length(count // 2)]
            await leave(tasks[1::2])
            return [*seconds, await seconds_until_length(0)]

    for _ in range(3):  # the whole machine may stand still for a second
        seconds = asyncio.run(work())
        if max(seconds) < 1.0:
            break
    record_property("seconds", seconds)
    assert max(seconds) < 1.0
