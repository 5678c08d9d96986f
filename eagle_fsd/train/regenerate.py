"""Replace the assistant's turns in a chat file by turns that the target generates.

The target is loaded here (:func:`rewrite_chats`) or runs behind a server (:func:`request_chats`). A
head learns to predict one target: heads trained on text that the target generated have a larger
accepted length than heads trained on other text.
"""

from __future__ import annotations

import glob
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch import Tensor

from eagle_fsd.model.config import SamplingConfig
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.request import Answer, Request
from eagle_fsd.train.chat_file import Chat, ChatFile, is_answer
from eagle_fsd.train.config import RegenerateConfig, RegenerateRequest, RegenerateServer
from eagle_fsd.train.loaded_target import (
    TRIAL_CHATS,
    LoadedTarget,
    check_device_map,
    open_chat_file,
)
from eagle_fsd.utils.chat_api import ChatClient, Endpoint, EndpointError, map_concurrently
from eagle_fsd.utils.chat_templates import encode_prompt
from eagle_fsd.utils.files import append_line, atomic_write, read_jsonl, truncate_partial_line
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.progress import Progress, ProgressFactory, no_progress
from eagle_fsd.utils.signals import StopSignals, interrupt_on_second_signal

log = logging.getLogger(__name__)

#: Options missing from fingerprints of earlier versions, with the values that those versions used.
_LATER_OPTIONS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
#: Statuses by which a server rejects a single request, such as one that exceeds its context.
REJECTIONS = (400, 413, 422)
#: Options that a server replaces.
LOCAL_OPTIONS = ("target", "dtype", "chat_template", "device_map")
#: How long a process may wait for the others to finish.
PROCESS_TIMEOUT = timedelta(days=7)
#: Upper bound of the turns of a chat, which keeps the seeds of different chats apart.
MAX_TURNS = 1024

#: A chat that is being written.
ChatT = TypeVar("ChatT")


def regenerate(
    request: RegenerateRequest,
    config: RegenerateConfig | None = None,
    server: RegenerateServer | None = None,
    *,
    token: str | None = None,
    progress: ProgressFactory = no_progress,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> ChatFile | None:
    """Rewrite a chat file with the target; return None on processes other than the first.

    Every process that ``accelerate launch`` or ``torchrun`` started calls this; all of them must
    see the same output file. A server rewrites the chats if its ``base_url`` is set. ``progress``
    reports ``reading`` (in bytes) and ``rewriting`` (in chats); ``on_tokens`` is called with
    numbers of new tokens.
    """
    if server is not None and server.base_url is not None:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise OptionsError("--base-url requires a single process; see --concurrency")
        given = [name for name in LOCAL_OPTIONS if getattr(request, name) is not None]
        if given:
            names = ", ".join(given).replace("_", " ")
            raise OptionsError(f"--base-url uses a server's target and takes no {names}")
        with progress("reading") as report:
            chats = open_chat_file(request.data, report)
        with progress("rewriting") as report:
            return request_chats(server, chats, request.out, config, report, on_tokens)
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU")
    state = PartialState(cpu=on_cpu, timeout=PROCESS_TIMEOUT)
    check_device_map(request.device_map, state.num_processes)
    progress = progress if state.is_main_process else no_progress
    device = request.device_map or (state.device if state.num_processes > 1 else None)
    loaded = LoadedTarget.load(request, device, token)
    with progress("reading") as report:
        chats = loaded.open_chats(request.data, progress=report).file
    with progress("rewriting") as report:
        rewritten = rewrite_chats(loaded, chats, request.out, config, report, state, on_tokens)
    is_main = state.is_main_process
    state.destroy_process_group()
    return rewritten if is_main else None


def rewrite_chats(
    loaded: LoadedTarget,
    chats: ChatFile,
    out: str | Path,
    config: RegenerateConfig | None = None,
    progress: Progress | None = None,
    state: PartialState | None = None,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> ChatFile:
    """Rewrite chats with a loaded target, resuming an interrupted run.

    The result does not depend on interruptions, on the number of processes or on the batch size: a
    turn depends on its chat and on a seed of its own. Until all chats are rewritten, lines are in
    the order of their completion, and several processes write to files of their own, ``OUT.part0``
    and so on. ``OUT.meta.json`` holds the fingerprint of the chats and the options; ValueError if
    the output was written from others. ``progress`` counts the chats of all processes as if they
    were equally fast.
    """
    config = config or RegenerateConfig()
    out = Path(out)
    process, processes = 0, 1
    if state is not None:
        process, processes = state.process_index, state.num_processes
    if process == 0:
        options = config.model_dump(exclude={"batch_size"})
        prepare_output(out, {**loaded.fingerprint(chats.path), **options})
    _wait(state)
    done = read_lines(out).keys()
    _wait(state)  # until all have read what there is, before it changes
    missing = [index for index in range(len(chats)) if index not in done]
    part = out if processes == 1 else out.with_name(f"{out.name}.part{process}")
    rejections: list[str] = []
    share = (_Chat(index, chats[index]) for index in missing[process::processes])
    for count, chat in enumerate(_rewrite(loaded, share, config, rejections, on_tokens), 1):
        append_line(part, json.dumps({"index": chat.index, "messages": chat.new}))
        if progress is not None:
            progress(min(len(done) + count * processes, len(chats)), len(chats))
    _report_rejections(rejections, len(chats))
    _wait(state)
    if process == 0:
        _merge(out)
    _wait(state)
    return ChatFile(out)


def _wait(state: PartialState | None) -> None:
    if state is not None:
        state.wait_for_everyone()


def output_files(out: Path) -> list[Path]:
    """Return the files with rewritten chats: the output and the parts that processes wrote."""
    parts = sorted(out.parent.glob(f"{glob.escape(out.name)}.part*"))
    return [file for file in (out, *parts) if file.exists()]


def read_lines(out: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of the output and its parts by the index of their chat."""
    lines = (line for file in output_files(out) for line in read_jsonl(file))
    return {int(line["index"]): line for line in lines}


def _merge(out: Path) -> None:
    """Write all lines to the output, in the order of the chats, and remove its parts."""
    lines = read_lines(out)
    if output_files(out) != [out] or list(lines) != sorted(lines):
        text = "".join(json.dumps(lines[index]) + "\n" for index in sorted(lines))
        atomic_write(out, text)
    for file in output_files(out):
        if file != out:
            file.unlink()


def request_chats(
    server: RegenerateServer,
    chats: ChatFile,
    out: str | Path,
    config: RegenerateConfig | None = None,
    progress: Progress | None = None,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> ChatFile:
    """Rewrite chats with a server, several at once, resuming an interrupted run.

    A chat ends before a turn that the server rejects, for example because its context is full.
    Until all chats are rewritten, the lines of ``out`` are in the order of their completion. The
    first SIGINT or SIGTERM stops after the chats in progress, the second one at once; both raise
    KeyboardInterrupt. Raises ValueError if the server fails or rejects the first
    :data:`TRIAL_CHATS` chats, or if ``out`` was written from other chats or options.
    """
    config = config or RegenerateConfig()
    out = Path(out)
    endpoint = server_endpoint(server)
    fingerprint = {
        "data": str(chats.path),
        "bytes": chats.path.stat().st_size,
        "server": endpoint.redacted_url,
        "model": endpoint.model,
        **config.model_dump(exclude={"batch_size"}),
    }
    prepare_output(out, fingerprint)
    done = set(read_lines(out))
    accepted = bool(done)
    held: list[str] = []  # lines, until the server has accepted a request
    rejections: list[str] = []

    def pending() -> Iterator[tuple[int, Chat]]:
        for index in range(len(chats)):
            if signals.requested.is_set():
                return
            if index not in done:
                yield index, chats[index]

    try:
        client = ChatClient(endpoint, on_tokens)
        rewritten = map_concurrently(
            lambda item: _request_turns(client, *item, config), pending(), server.concurrency
        )
        stop = interrupt_on_second_signal("the chats in progress")
        with StopSignals(stop) as signals, closing(rewritten):
            for (index, _), (chat, rejection) in rewritten:
                done.add(index)
                held.append(json.dumps({"index": index, "messages": chat}))
                if rejection is not None:
                    rejections.append(f"line {chats.line(index)}: {rejection}")
                accepted = accepted or any(map(is_answer, chat))
                if accepted:
                    while held:
                        append_line(out, held.pop(0))
                elif len(held) == min(TRIAL_CHATS, len(chats)):
                    raise EndpointError(f"it rejects all chats: {rejections[0]}")
                if progress is not None:
                    progress(len(done), len(chats))
    except EndpointError as error:
        raise ValueError(
            f"the target {endpoint.model} at {endpoint.redacted_url} failed ({error}); the chats so"
            " far are saved: run the same command again to resume"
        ) from error
    _report_rejections(rejections, len(chats))
    if len(done) < len(chats):
        raise KeyboardInterrupt
    _merge(out)
    return ChatFile(out)


def server_endpoint(server: RegenerateServer) -> Endpoint:
    """Return the endpoint of a server, with the key in its environment variable."""
    assert server.base_url is not None
    assert server.model is not None  # RegenerateServer requires both or neither
    key = os.environ.get(server.api_key_env)
    if key is None and "api_key_env" in server.model_fields_set:
        raise OptionsError(f"the environment variable {server.api_key_env} is not set")
    return Endpoint(server.base_url, server.model, key, server.timeout, server.retries)


def _request_turns(
    client: ChatClient, index: int, chat: Chat, config: RegenerateConfig
) -> tuple[Chat, str | None]:
    """Request the assistant turns in order; also return why the chat ends early, if it does."""
    new: Chat = []
    options: dict[str, Any] = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "max_tokens": config.max_new_tokens,
    }
    own = {"top_k": config.top_k, "min_p": config.min_p}  # not parameters of OpenAI's
    options["extra_body"] = {name: value for name, value in own.items() if value}
    for turn, message in enumerate(chat):
        if not is_answer(message):
            new.append(message)
            continue
        seed = turn_seed(config.seed, index, turn) % 2**31
        try:
            text = client.complete([_as_sent(item) for item in new], seed=seed, **options).strip()
        except EndpointError as error:
            if error.status not in REJECTIONS:
                raise
            return new, str(error)
        if not text:
            return new, "the reply is empty"
        new.append({"role": "assistant", "content": text})
    return new, None


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """Encode the arguments of a message's tool calls, which OpenAI's API takes as strings."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"])
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _report_rejections(rejections: Sequence[str], total: int) -> None:
    if rejections:
        count = len(rejections)
        log.warning("%d of %d chats end early; the first one: %s", count, total, rejections[0])


def turn_seed(seed: int, chat: int, turn: int) -> int:
    """Return the seed of a turn, which no other turn of the file shares."""
    return seed + chat * MAX_TURNS + turn


def prepare_output(out: Path, fingerprint: dict[str, Any]) -> None:
    """Write the fingerprint, or check it against an earlier run's and delete partial lines."""
    file = out.with_name(out.name + ".meta.json")
    if output_files(out):
        before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        before.pop("batch_size", None)  # of earlier versions
        if {**_LATER_OPTIONS, **before} != fingerprint:
            raise ValueError(f"{out} was written from other chats or options; choose another file")
        for written in output_files(out):
            truncate_partial_line(written)
    else:
        atomic_write(file, json.dumps(fingerprint, indent=2) + "\n")


@dataclass(eq=False)
class _Chat:
    """A chat that is being rewritten: its index, its messages, and the new ones so far."""

    index: int
    messages: Chat
    new: Chat = field(default_factory=list)


def _rewrite(
    loaded: LoadedTarget,
    chats: Iterator[_Chat],
    config: RegenerateConfig,
    rejections: list[str],
    on_tokens: Callable[[int], None],
) -> Iterator[_Chat]:
    """Generate the assistant turns of chats, which are yielded in the order in which they end.

    A chat ends when the context is full, or when the chat template rejects it; the template's
    messages are appended to ``rejections``.
    """
    model = EagleFSD(loaded.target.model, None)
    sampling = SamplingConfig.from_dict(config.model_dump(include=set(SamplingConfig.model_fields)))

    def next_request(chat: _Chat) -> Request | None:
        prompt = _next_prompt(loaded, chat, rejections)
        if prompt is None:
            return None
        return model.request(
            prompt,
            min(config.max_new_tokens, loaded.target.context_length - len(prompt)),
            sampling=sampling.updated(seed=turn_seed(config.seed, chat.index, len(chat.new))),
            method="ar",
        )

    def finish(chat: _Chat, tokens: list[int]) -> None:
        text = str(loaded.tokenizer.decode(tokens, skip_special_tokens=True))
        chat.new.append({"role": "assistant", "content": text.strip()})

    def draw() -> _Chat | None:
        return next(chats, None)

    return write_turns(model, config.batch_size, draw, next_request, finish, on_tokens)


def write_turns(
    model: EagleFSD,
    batch_size: int,
    draw: Callable[[], ChatT | None],
    next_request: Callable[[ChatT], Request | None],
    finish: Callable[[ChatT, list[int]], None],
    on_tokens: Callable[[int], None],
) -> Iterator[ChatT]:
    """Write the turns of chats in order, those of several chats at once.

    ``draw`` returns the next chat, or None if there is none for now; ``next_request`` returns the
    request of its next turn, or None if the chat is complete; ``finish`` is given the turn's
    tokens. A chat that goes on takes the place of its last turn. Chats are yielded in the order in
    which they end.
    """
    begun: deque[ChatT] = deque()
    running: dict[Answer, ChatT] = {}
    with closing(model.batch(batch_size)) as batch:
        while True:
            while batch.free and (chat := begun.popleft() if begun else draw()) is not None:
                request = next_request(chat)
                if request is None:
                    yield chat
                else:
                    running[batch.add(request)] = chat
            if not running:
                return
            for answer, chunk in batch.step():
                on_tokens(len(chunk.tokens))
                if answer.error is not None:
                    raise answer.error
                if chunk.finished:
                    chat = running.pop(answer)
                    finish(chat, answer.tokens)
                    begun.append(chat)


def _next_prompt(loaded: LoadedTarget, chat: _Chat, rejections: list[str]) -> Tensor | None:
    """Copy messages up to the next assistant turn, and return its prompt; None if the chat ends."""
    for message in chat.messages[len(chat.new) :]:
        if is_answer(message):
            try:
                ids = encode_prompt(chat.new, loaded.tokenizer, loaded.chat_template)[0]
            except ValueError as error:
                rejections.append(str(error))
                return None
            return ids if len(ids) + 1 < loaded.target.context_length else None
        chat.new.append(message)
    return None
