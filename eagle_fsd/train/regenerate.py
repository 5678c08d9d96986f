"""Replace the assistant's turns in a chat file by turns that the target generates.

The target is loaded here (:func:`rewrite_chats`) or runs behind a server (:func:`request_chats`). A
head learns to predict one target: heads trained on text that the target generated have a larger
accepted length than heads trained on other text.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from eagle_fsd.model.config import SamplingConfig
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.train.chat_file import Chat, ChatFile, is_answer
from eagle_fsd.train.config import RegenerateConfig, RegenerateRequest, RegenerateServer
from eagle_fsd.train.loaded_target import TRIAL_CHATS, LoadedTarget, open_chat_file
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
#: Upper bound of the turns of a chat, which keeps the seeds of different chats apart.
MAX_TURNS = 1024


def regenerate(
    request: RegenerateRequest,
    config: RegenerateConfig | None = None,
    server: RegenerateServer | None = None,
    *,
    token: str | None = None,
    progress: ProgressFactory = no_progress,
) -> ChatFile:
    """Rewrite a chat file with the target.

    Args:
        request: The chats, the target and the file to write.
        config: How turns are generated; default: sampled from the target's distribution.
        server: A server that rewrites the chats if its ``base_url`` is set; default: load the
            target.
        token: Access token for the Hub.
        progress: Reports ``reading`` (in bytes) and ``rewriting`` (in chats).

    Returns:
        The rewritten chats.

    Raises:
        OptionsError: An option of the target is set together with a server, or there are several
            processes.
        ValueError: No chat is valid, the chat template or the server rejects the chats, or the
            output was written from other chats or options.
        OSError: A file cannot be read or written.
        LoadError: The target cannot be loaded.
        KeyboardInterrupt: A signal stopped the requests to a server; the chats so far are saved.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise OptionsError(
            "regenerate requires a single process; to use several GPUs, start a server for the"
            " target and pass --base-url"
        )
    if server is not None and server.base_url is not None:
        given = [name for name in LOCAL_OPTIONS if getattr(request, name) is not None]
        if given:
            names = ", ".join(given).replace("_", " ")
            raise OptionsError(f"--base-url uses a server's target and takes no {names}")
        with progress("reading") as report:
            chats = open_chat_file(request.data, report)
        with progress("rewriting") as report:
            return request_chats(server, chats, request.out, config, report)
    loaded = LoadedTarget.load(request, request.device_map, token)
    with progress("reading") as report:
        chats = loaded.open_chats(request.data, progress=report).file
    with progress("rewriting") as report:
        return rewrite_chats(loaded, chats, request.out, config, report)


def rewrite_chats(
    loaded: LoadedTarget,
    chats: ChatFile,
    out: str | Path,
    config: RegenerateConfig | None = None,
    progress: Progress | None = None,
) -> ChatFile:
    """Rewrite chats with a loaded target, resuming an interrupted run.

    The result does not depend on interruptions: batches always start at the same chats, and a
    batch's seed depends on its position. ``OUT.meta.json`` holds the fingerprint of the chats and
    the options.

    Args:
        loaded: The target.
        chats: The chats.
        out: JSON Lines of ``{"index", "messages"}`` to write.
        config: How turns are generated; default: sampled from the target's distribution.
        progress: Called with the chats rewritten and the number of chats.

    Returns:
        The rewritten chats.

    Raises:
        ValueError: ``out`` was written from other chats or options.
        OSError: A file cannot be written.
    """
    config = config or RegenerateConfig()
    out = Path(out)
    fingerprint = {**loaded.fingerprint(chats.path), **config.model_dump()}
    _check_fingerprint(out, fingerprint)
    truncate_partial_line(out)
    done = len(read_jsonl(out)) if out.exists() else 0
    size = config.batch_size
    rejections: list[str] = []
    for start in range(done - done % size, len(chats), size):
        batch = [chats[index] for index in range(start, min(start + size, len(chats)))]
        rewritten = _rewrite_batch(loaded, batch, config, _seed(config, start), rejections)
        for index, chat in enumerate(rewritten, start):
            if index >= done:
                append_line(out, json.dumps({"index": index, "messages": chat}))
        if progress is not None:
            progress(start + len(batch), len(chats))
    _report_rejections(rejections, len(chats))
    return ChatFile(out)


def request_chats(
    server: RegenerateServer,
    chats: ChatFile,
    out: str | Path,
    config: RegenerateConfig | None = None,
    progress: Progress | None = None,
) -> ChatFile:
    """Rewrite chats with a server, several at once, resuming an interrupted run.

    A chat ends before a turn that the server rejects, for example because its context is full.
    Until all chats are rewritten, the lines of ``out`` are in the order of their completion. The
    first SIGINT or SIGTERM stops after the chats in progress, the second one at once.

    Args:
        server: The server.
        chats: The chats.
        out: As for :func:`rewrite_chats`.
        config: How turns are generated; default: sampled from the target's distribution.
        progress: Called with the chats rewritten and the number of chats.

    Returns:
        The rewritten chats.

    Raises:
        OptionsError: The environment variable with the key is not set.
        ValueError: The server fails or rejects the first :data:`TRIAL_CHATS` chats, or ``out`` was
            written from other chats or options.
        OSError: A file cannot be written.
        KeyboardInterrupt: A signal stopped the requests.
    """
    config = config or RegenerateConfig()
    out = Path(out)
    endpoint = _endpoint(server)
    fingerprint = {
        "data": str(chats.path),
        "bytes": chats.path.stat().st_size,
        "server": endpoint.redacted_url,
        "model": endpoint.model,
        **config.model_dump(exclude={"batch_size"}),
    }
    _check_fingerprint(out, fingerprint)
    truncate_partial_line(out)
    done = {line["index"] for line in read_jsonl(out)} if out.exists() else set()
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
        client = ChatClient(endpoint)
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
    lines = read_jsonl(out)
    ordered = sorted(lines, key=lambda line: int(line["index"]))
    if lines != ordered:
        atomic_write(out, "".join(json.dumps(line) + "\n" for line in ordered))
    return ChatFile(out)


def _endpoint(server: RegenerateServer) -> Endpoint:
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
        seed = _seed(config, index, turn) % 2**31
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


def _seed(config: RegenerateConfig, chat: int, turn: int = 0) -> int:
    """Return the seed of a turn, which no other turn of the file shares."""
    return config.seed + chat * MAX_TURNS + turn


def _check_fingerprint(out: Path, fingerprint: dict[str, Any]) -> None:
    """Write the fingerprint, or check it against that of an earlier run."""
    file = out.with_name(out.name + ".meta.json")
    if out.exists():
        before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if {**_LATER_OPTIONS, **before} != fingerprint:
            raise ValueError(f"{out} was written from other chats or options; choose another file")
    else:
        atomic_write(file, json.dumps(fingerprint, indent=2) + "\n")


def _rewrite_batch(
    loaded: LoadedTarget,
    chats: Sequence[Chat],
    config: RegenerateConfig,
    seed: int,
    rejections: list[str],
) -> list[Chat]:
    """Generate the assistant turns in order.

    A chat ends when the context is full, or when the chat template rejects it; the template's
    messages are appended to ``rejections``.
    """
    model = EagleFSD(loaded.target.model, None)
    tokenizer = loaded.tokenizer
    sampling = config.model_dump(include=set(SamplingConfig.model_fields))
    rewritten: list[Chat] = [[] for _ in chats]
    for turn in range(max(map(len, chats))):
        prompts = []
        for chat, new in zip(chats, rewritten, strict=True):
            if turn >= len(chat) or len(new) < turn:
                continue  # the chat has ended
            if not is_answer(chat[turn]):
                new.append(chat[turn])
                continue
            try:
                ids = encode_prompt(new, tokenizer, loaded.chat_template)[0].tolist()
            except ValueError as error:
                rejections.append(str(error))
                continue
            if len(ids) + 1 < loaded.target.context_length:
                prompts.append((new, ids))
        if not prompts:
            continue
        padded = tokenizer.pad(
            {"input_ids": [ids for _, ids in prompts]}, padding_side="left", return_tensors="pt"
        ).to(loaded.target.device)
        output = model.generate(
            padded["input_ids"],
            padded["attention_mask"],
            max_new_tokens=config.max_new_tokens,
            sampling=SamplingConfig.from_dict({**sampling, "seed": seed + turn}),
            method="ar",
        )
        texts = tokenizer.batch_decode(
            output.sequences[:, padded["input_ids"].shape[1] :], skip_special_tokens=True
        )
        for (new, _), text in zip(prompts, texts, strict=True):
            new.append({"role": "assistant", "content": text.strip()})
    return rewritten
