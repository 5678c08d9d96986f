"""Measure the server under 1 to 32 clients, and compare it with an older revision.

::

    python benchmarks/serving.py --revision f9e6384

Every client sends its next request as soon as it has the answer to the last one. All numbers of
clients send the same requests: word problems to the bundled pair, answered greedily and losslessly
with the same tree, over OpenAI's API. The servers run in processes of their own, one thread each,
and answer in turn. The older revision, whose server may be several processes, is unpacked into a
temporary folder.
"""

from __future__ import annotations

import asyncio
import json
import operator
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from measurement import Table, new_parser, parse, parse_tree, progress, save_report
from revisions import NEW, OLD, ROOT, unpack

from eagle_fsd import TreeConfig
from eagle_fsd.bundled import BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.bundled.problems import chat_messages, problems
from eagle_fsd.model.config import SETTINGS_FILE
from eagle_fsd.model.loading import load_tokenizer

CLIENTS = (1, 2, 4, 8, 16, 32)
NAME = "pair"
#: Seconds for a server to start, and for an answer.
TIMEOUT = 300.0
COLUMNS = {
    "clients": "clients",
    "tokens_per_second": "tokens/s",
    "p50": "p50 latency (s)",
    "p95": "p95 latency (s)",
    "first_p50": "p50 first token (s)",
    "first_p95": "p95 first token (s)",
}
SERVER_COLUMNS = {
    "name": "server",
    "processes": "processes",
    "start": "start-up (s)",
    "idle": "memory after start-up (MB)",
    "loaded": "memory at the end (MB)",
}


@dataclass(frozen=True)
class Measurement:
    """One answer.

    ``first``: Seconds from the request to the first tokens. ``seconds``: Seconds from the request
    to the end of the answer.
    """

    text: str
    tokens: int
    first: float
    seconds: float


@dataclass(frozen=True)
class Server:
    """A server that is ready.

    ``start``: Seconds until it was ready.
    """

    url: str
    process: psutil.Process
    start: float

    def memory(self) -> list[float]:
        """Return the memory of each process in MB, on Linux with its part of shared memory."""
        found = []
        for process in (self.process, *self.process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                info = process.memory_full_info()
                found.append(getattr(info, "pss", info.uss) / 1e6)
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables and save them."""
    parser = new_parser("Measure the server under 1 to 32 clients.")
    parser.add_argument("--revision", help="also measure this revision, f9e6384 or later")
    parser.add_argument("--count", type=int, default=48, help="requests for each number of clients")
    parser.add_argument("--rounds", type=int, default=2, help="how often all requests are sent")
    parser.add_argument("--max-batch", type=int, help="of the working tree; default: the server's")
    parser.add_argument(
        "--tree", type=parse_tree, default=parse_tree("16/8/2"), help="total_tokens/depth/top_k"
    )
    options = parse(parser, arguments, threads=1)
    count, rounds, new_tokens, clients = options.count, options.rounds, 192, CLIENTS
    if options.quick:
        count, rounds, new_tokens, clients = 4, 1, 8, (1, 4)
    requests = answer_requests(count, new_tokens)
    servers: dict[str, Server] = {}
    memory: dict[str, list[list[float]]] = {}  # of each process, after start-up and later
    results: dict[str, list[dict[str, Any]]] = {}
    texts: dict[str, list[list[str]]] = {}
    note = (
        f"{count} requests, sent {rounds} times, at most {new_tokens} new tokens, greedy and"
        f" lossless, tree {options.tree.shape}."
    )
    if options.compile:
        note += " Only the working tree's steps with one request are compiled."
    titles = {NEW: "Serving, working tree", OLD: f"Serving, revision {options.revision}"}

    def save(finished: bool) -> None:
        tables = [Table(titles[name], COLUMNS, rows, note) for name, rows in results.items()]
        if options.revision:
            tables.append(compare(results, texts))
        rows = [
            {
                "name": titles[name].removeprefix("Serving, "),
                "processes": len(memory[name][0]),
                "start": server.start,
                "idle": sum(memory[name][0]),
                "loaded": sum(memory[name][-1]),
            }
            for name, server in servers.items()
        ]
        tables.append(Table("Serving, start-up and memory", SERVER_COLUMNS, rows))
        save_report(options, "serving", tables, finished=finished)

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # Without the settings beside it, whose format has changed.
        shutil.copytree(BUNDLED_HEAD, folder / "head", ignore=shutil.ignore_patterns(SETTINGS_FILE))
        batch = ["--max-batch", str(options.max_batch)] if options.max_batch else []
        compiled = "--compile" if options.compile else "--no-compile"
        dtype = str(options.dtype).removeprefix("torch.")
        common = ["--drafter", str(folder / "head"), "--device", options.device, "--dtype", dtype]
        extra = {NEW: [*common, compiled, *batch], OLD: [*common, "--no-compile"]}
        roots = {NEW: ROOT}
        if options.revision:
            unpack(options.revision, folder / "revision")
            roots[OLD] = folder / "revision"
        for name, root in roots.items():
            servers[name] = stack.enter_context(start_server(root, options.tree, extra[name]))
            memory[name] = [servers[name].memory()]
        for server in servers.values():
            asyncio.run(send(server.url, requests[: 2 * max(clients)], max(clients)))  # a warm-up
        for number in progress(clients, "clients"):
            answers: dict[str, list[Measurement]] = {name: [] for name in servers}
            seconds = dict.fromkeys(servers, 0.0)
            for name, server in [*servers.items()] * rounds:
                begin = time.perf_counter()
                answers[name] += asyncio.run(send(server.url, requests, number))
                seconds[name] += time.perf_counter() - begin
            for name, found in answers.items():
                texts.setdefault(name, []).append([item.text for item in found])
                memory[name].append(servers[name].memory())
                results.setdefault(name, []).append(summarize(number, found, seconds[name]))
            save(finished=False)
    save(finished=True)


def answer_requests(count: int, new_tokens: int) -> list[dict[str, Any]]:
    """Return the bodies of requests for completions that all revisions understand."""
    tokenizer = load_tokenizer(BUNDLED_TARGET)
    return [
        {
            "prompt": tokenizer.apply_chat_template(
                chat_messages((problem.question, ""))[:-1],
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
def start_server(root: Path, tree: TreeConfig, arguments: Sequence[str]) -> Iterator[Server]:
    """Run the server of the package in a folder; yield it once it is ready.

    Raises RuntimeError if it does not start.
    """
    port, *others = free_ports(3)
    command = [sys.executable, "-m", "eagle_fsd.cli", "serve"]
    if not (root / "eagle_fsd/chat/serve/api.py").exists():  # it has three servers
        command += ["all", "--controller-port", str(others[0]), "--worker-port", str(others[1])]
    command += ["--port", str(port), "--target", str(BUNDLED_TARGET), "--name", NAME, *arguments]
    command += ["--total-tokens", str(tree.total_tokens), "--depth", str(tree.depth)]
    command += ["--tree-top-k", str(tree.top_k)]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    process = subprocess.Popen(command, env=environment, cwd=root, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() > begin + TIMEOUT:
                raise RuntimeError(f"the server of {root} did not start; see its error above")
            time.sleep(0.1)
        yield Server(url, psutil.Process(process.pid), time.monotonic() - begin)
    finally:
        process.terminate()
        process.wait()


def free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]


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
    """Send a request and read its answer; raises RuntimeError if it fails."""
    begin, first, text, tokens = time.perf_counter(), 0.0, "", 0
    async with client.stream("POST", "/v1/completions", json=request) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            first = first or time.perf_counter() - begin
            text += "".join(choice["text"] for choice in chunk.get("choices", ()))
            tokens = (chunk.get("usage") or {}).get("completion_tokens", 0)
    if not tokens:
        raise RuntimeError(f"a request failed with status {response.status_code}: {text}")
    return Measurement(text, tokens, first, time.perf_counter() - begin)


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


def compare(results: dict[str, list[dict[str, Any]]], texts: dict[str, list[list[str]]]) -> Table:
    """Return the table of speed and time to the first token of both revisions."""
    rows = []
    answers = zip(texts[OLD], texts[NEW], strict=True)
    for old, new, both in zip(results[OLD], results[NEW], answers, strict=True):
        rows.append(
            {
                "clients": new["clients"],
                "old": old["tokens_per_second"],
                "new": new["tokens_per_second"],
                "ratio": new["tokens_per_second"] / old["tokens_per_second"],
                "old_first": old["first_p50"],
                "new_first": new["first_p50"],
                "identical": 100 * statistics.fmean(map(operator.eq, *both)),
            }
        )
    columns = {
        "clients": "clients",
        "old": "old (tokens/s)",
        "new": "new (tokens/s)",
        "ratio": "new / old",
        "old_first": "old p50 first token (s)",
        "new_first": "new p50 first token (s)",
        "identical": "same answer (%)",
    }
    return Table("Serving, new against old", columns, rows)


if __name__ == "__main__":
    main()
