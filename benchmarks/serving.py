"""Measure the server under 1 to 32 clients.

::

    python benchmarks/serving.py

Every client sends its next request as soon as it has the answer to the last one. All numbers of
clients send the same requests: word problems to the bundled pair, answered greedily and losslessly
with the same tree, over the OpenAI API. The server runs in a process of its own, with one thread.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from measurement import Table, new_parser, parse, parse_tree, progress, save_report

from eagle_fsd import TreeConfig
from eagle_fsd.bundled import BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.bundled.problems import problems
from eagle_fsd.model.config import SETTINGS_FILE
from eagle_fsd.model.loading import load_tokenizer

CLIENTS = (1, 2, 4, 8, 16, 32)
NAME = "pair"
#: Maximum seconds for a server to start, and for each part of an answer.
TIMEOUT = 300.0
COLUMNS = {
    "clients": "clients",
    "tokens_per_second": "tokens/s",
    "p50": "p50 latency (s)",
    "p95": "p95 latency (s)",
    "first_p50": "p50 first token (s)",
    "first_p95": "p95 first token (s)",
}


class Measurement(NamedTuple):
    """The number of tokens of an answer, and the seconds until the first and until the last."""

    tokens: int
    first: float
    seconds: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and save it."""
    parser = new_parser("Measure the server under 1 to 32 clients.")
    parser.add_argument("--count", type=int, default=48, help="requests for each number of clients")
    parser.add_argument("--rounds", type=int, default=2, help="how often all requests are sent")
    parser.add_argument("--max-batch", type=int, help="default: the server's")
    parser.add_argument(
        "--tree", type=parse_tree, default=parse_tree("16/8/2"), help="total_tokens/depth/top_k"
    )
    options = parse(parser, arguments, threads=1)
    count, rounds, new_tokens, clients = options.count, options.rounds, 192, CLIENTS
    if options.quick:
        count, rounds, new_tokens, clients = 4, 1, 8, (1, 4)
    requests = answer_requests(count, new_tokens)
    note = (
        f"{count} requests, sent {rounds} times, at most {new_tokens} new tokens, greedy and"
        f" lossless, tree {options.tree.shape}."
    )
    if options.compile:
        note += " Only steps with one request are compiled."
    with tempfile.TemporaryDirectory() as folder:
        head = Path(folder, "head")  # without settings, which have trees of their own
        shutil.copytree(BUNDLED_HEAD, head, ignore=shutil.ignore_patterns(SETTINGS_FILE))
        words = ["--drafter", str(head), "--device", options.device]
        words += ["--dtype", str(options.dtype).removeprefix("torch.")]
        words += ["--compile" if options.compile else "--no-compile"]
        words += ["--max-batch", str(options.max_batch)] if options.max_batch else []
        begin = time.monotonic()
        with start_server(options.tree, words) as (url, process):
            start, idle = time.monotonic() - begin, memory(process)
            table = Table("Serving", COLUMNS, [])
            asyncio.run(send(url, requests[: 2 * max(clients)], max(clients)))  # a warm-up
            for number in progress(clients, "clients"):
                answers: list[Measurement] = []
                begin = time.perf_counter()
                for _ in range(rounds):
                    answers += asyncio.run(send(url, requests, number))
                seconds = time.perf_counter() - begin
                table.rows.append(summarize(number, answers, seconds))
                table.note = (
                    f"{note} The server started in {start:.1f} s, and took {idle:.0f} MB then and"
                    f" {memory(process):.0f} MB in the end."
                )
                save_report(options, "serving", [table], finished=False)
    save_report(options, "serving", [table])


def answer_requests(count: int, new_tokens: int) -> list[dict[str, Any]]:
    """Return the bodies of requests for completions."""
    tokenizer = load_tokenizer(BUNDLED_TARGET)
    return [
        {
            "prompt": tokenizer.apply_chat_template(
                [{"role": "user", "content": problem.question}],
                add_generation_prompt=True,
                tokenize=False,
            ),
            "model": NAME,
            "temperature": 0.0,
            "max_tokens": new_tokens,
            "fsd": {"threshold": 0.0},
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for problem in problems("test", count)
    ]


@contextmanager
def start_server(
    tree: TreeConfig, arguments: Sequence[str]
) -> Iterator[tuple[str, psutil.Process]]:
    """Run the server, and yield its URL and process once it is ready; or raise RuntimeError."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "eagle_fsd.cli", "serve", "--port", str(port)]
    command += ["--target", str(BUNDLED_TARGET), "--name", NAME, *arguments]
    command += ["--total-tokens", str(tree.total_tokens), "--depth", str(tree.depth)]
    command += ["--tree-top-k", str(tree.top_k)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() > begin + TIMEOUT:
                raise RuntimeError("the server did not start; see its error above")
            time.sleep(0.1)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def memory(process: psutil.Process) -> float:
    """Return the memory of a process in MB, on Linux with its part of shared memory."""
    info = process.memory_full_info()
    return getattr(info, "pss", info.uss) / 1e6


def is_ready(url: str) -> bool:
    """Return whether a server answers."""
    try:
        return NAME in httpx.get(f"{url}/v1/models", trust_env=False).text
    except httpx.HTTPError:
        return False


async def send(url: str, requests: Sequence[dict[str, Any]], clients: int) -> list[Measurement]:
    """Send requests from some clients, and return their answers in the same order."""
    answers: dict[int, Measurement] = {}
    remaining = iter(enumerate(requests))

    async def visit(client: httpx.AsyncClient) -> None:
        for index, request in remaining:
            answers[index] = await ask(client, request)

    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, trust_env=False) as client:
        await asyncio.gather(*(visit(client) for _ in range(clients)))
    return [answers[index] for index in range(len(requests))]


async def ask(client: httpx.AsyncClient, request: dict[str, Any]) -> Measurement:
    """Send a request and read its answer; raises RuntimeError for an error of the server."""
    begin, first, tokens = time.perf_counter(), 0.0, 0
    async with client.stream("POST", "/v1/completions", json=request) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(f"a request failed: {chunk['error']['message']}")
            first = first or time.perf_counter() - begin
            tokens = (chunk.get("usage") or {}).get("completion_tokens", 0)
    if not tokens:
        raise RuntimeError(f"a request failed with status {response.status_code}")
    return Measurement(tokens, first, time.perf_counter() - begin)


def summarize(clients: int, answers: Sequence[Measurement], seconds: float) -> dict[str, Any]:
    """Return a row of a table.

    ``seconds``: Seconds until all had been received.
    """
    latency, first = [item.seconds for item in answers], [item.first for item in answers]
    return {
        "clients": clients,
        "tokens_per_second": sum(item.tokens for item in answers) / seconds,
        "p50": statistics.median(latency),
        "p95": statistics.quantiles(latency, n=20)[-1],
        "first_p50": statistics.median(first),
        "first_p95": statistics.quantiles(first, n=20)[-1],
    }


if __name__ == "__main__":
    main()
