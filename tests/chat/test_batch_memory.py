"""The memory of a queue that has answered thousands of requests."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from api_servers import QUESTION
from prompts import HELLO, request
from resident_memory import resident_memory

from eagle_fsd import EagleFSD
from eagle_fsd.chat.decode_queue import DecodeQueue
from eagle_fsd.chat.session import AnswerRequest, score_prompt

CLIENTS = 16


def random_request(model: EagleFSD, dice: random.Random) -> AnswerRequest:
    """Return a request with drawn options; the first hundred contain the longest rows."""
    turns = [*HELLO, {"role": "assistant", "content": "Hello!"}] * dice.choice([0, 2, 6])
    question = {"role": "user", "content": QUESTION[: dice.choice([5, 40, None])]}
    options: dict[str, Any] = {
        "messages": [*turns, question],
        "temperature": dice.choice([0.0, 0.0, 0.7]),
        "seed": dice.randint(0, 99),
        "max_new_tokens": dice.choice([1, 8, 24]),
        "fsd": {"threshold": dice.choice([0.0, 0.1, 0.4])},
        "logprobs": dice.choice([None, None, 2]),
        "presence_penalty": dice.choice([0.0, 0.0, 0.5]),
        "stop": dice.choice([[], [], ["apples"]]),
    }
    method, client = dice.choice(["fsd", "fsd", "fsd", "ar"]), str(dice.random())
    return replace(request(model, **options), method=method, client=client)


async def send(model: EagleFSD, queue: DecodeQueue, count: int, dice: random.Random) -> None:
    """Let all clients send requests; some leave early, and some need the model for other work."""
    remaining = iter(range(count))

    async def visit() -> None:
        for _ in remaining:
            asked, leaves = random_request(model, dice), dice.random() < 0.2
            if dice.random() < 0.05:
                await queue.call(lambda _, ids=asked.ids: score_prompt(model, ids, 1))
            updates = queue.submit(asked).updates()
            async for _update in updates:
                if leaves:
                    break
            await updates.aclose()

    await asyncio.gather(*(visit() for _ in range(CLIENTS)))
    while len(queue):
        await asyncio.sleep(0.01)


@pytest.mark.slow
def test_memory_does_not_grow(model: EagleFSD, record_property: Any) -> None:
    """After 1,000 mixed requests it is within 2 % of that after 400, when all sizes occurred.

    The allocator's fragmentation moved it by up to 1.2 %; keeping the keys and values of every row
    would nearly double it.
    """
    queue, dice = DecodeQueue(model, max_waiting=CLIENTS, max_batch=8), random.Random(0)
    asyncio.run(send(model, queue, 400, dice))
    before = resident_memory()
    asyncio.run(send(model, queue, 600, dice))
    after = resident_memory()
    queue.close()
    record_property("resident_bytes", [before, after])
    assert after == pytest.approx(before, rel=0.02)
