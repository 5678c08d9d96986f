"""Write chats turn by turn, with a loaded target or a server of it; interrupted runs can resume.

A :data:`Writing` decides what a chat says: ``regenerate`` replaces the answers of a given one, and
``synthesize`` writes both sides.
"""

from __future__ import annotations

import glob
import json
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.generation import StopStringCriteria

from eagle_fsd.model.config import SamplingConfig, TargetOptions
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.request import Answer, Request
from eagle_fsd.train.chat_file import Chat
from eagle_fsd.train.config import RegenerateServer
from eagle_fsd.train.loaded_target import LoadedTarget
from eagle_fsd.utils.chat_api import ChatClient, Endpoint, EndpointError, map_concurrently
from eagle_fsd.utils.detokenization import CONTEXT_TOKENS, answer_text
from eagle_fsd.utils.files import atomic_path, atomic_write, read_jsonl, truncate_partial_line
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.signals import StopSignals

#: Options missing from fingerprints of earlier versions, with the values that those versions used.
_LATER_OPTIONS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
#: Statuses by which a server rejects a single request, such as one that exceeds its context.
REJECTIONS = (400, 413, 422)
#: Number of seeds of a chat, one for every message; a longer chat shares seeds with the next one.
SEEDS_PER_CHAT = 1024

#: Called with numbers of new tokens.
TokenCallback = Callable[[int], None]
#: A line of the output: the index of a chat, and its messages.
Line = dict[str, Any]
#: A chat that is being written: it yields its turns, is sent the replies, and returns its line.
Writing = Generator["NextTurn", "TurnReply", Line]
#: Lines in the order in which their chats end.
Lines = Generator[Line, None, None]


def ignore_tokens(count: int) -> None:
    """Ignore the number of new tokens; the default :data:`TokenCallback`."""


@dataclass(frozen=True)
class TurnReply:
    """What the target wrote, whether it is ``complete``, and the ``error`` if it wrote nothing."""

    text: str = ""
    complete: bool = False
    error: str | None = None


@dataclass(frozen=True)
class NextTurn:
    """A message for the target to write, of at most ``limit`` tokens, up to one of ``stop``.

    Servers may leave special tokens out of text, so these are in ``stop_token_ids``, too.
    ``prompt`` is the text that it continues, or a chat that a server formats.
    """

    prompt: str | Chat
    sampling: SamplingConfig
    limit: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def reply(self, text: str, complete: bool) -> TurnReply:
        """Cut what was written at a stop string, which completes it."""
        for stop in self.stop:
            text, found, _ = text.partition(stop)
            complete = complete or bool(found)
        return TurnReply(text, complete)


def resume(chat: Writing, reply: TurnReply | None = None) -> NextTurn | Line:
    """Return the next turn of a chat, given the reply to the one before; at the end, its line."""
    try:
        return next(chat) if reply is None else chat.send(reply)
    except StopIteration as end:
        line: Line = end.value
        return line


def turn_seed(seed: int, index: int, messages: Chat) -> int:
    """Return the seed of a chat's next turn, see :data:`SEEDS_PER_CHAT`."""
    return seed + index * SEEDS_PER_CHAT + len(messages)


def special_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    """Return the special token that a text begins with, if any."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None


#: Errors of an answer that end its chat only: no room for it, or logits that are not finite.
CHAT_ERRORS = (MemoryError, FloatingPointError)


class LocalWriter:
    """Write chats with a loaded target, many at once."""

    def __init__(self, loaded: LoadedTarget, on_tokens: TokenCallback = ignore_tokens) -> None:
        self.loaded, self.on_tokens = loaded, on_tokens
        self.model = EagleFSD(loaded.target.model, None, tokenizer=loaded.tokenizer)
        self._ends = lru_cache(self._find_ends)

    def write(self, chats: Iterator[Writing | None], batch_size: int) -> Lines:
        """Yield lines in the order in which chats end; where ``chats`` yields None, none begins.

        Turns of chats in progress precede new chats.
        """
        begun: deque[tuple[Writing, TurnReply]] = deque()
        running: dict[Answer, tuple[Writing, NextTurn]] = {}
        with closing(self.model.batch(batch_size)) as batch:
            while True:
                while batch.free:
                    chat, reply = begun.popleft() if begun else (next(chats, None), None)
                    if chat is None:
                        break
                    turn = resume(chat, reply)
                    if not isinstance(turn, NextTurn):
                        yield turn
                    elif (request := self._request(turn)) is not None:
                        running[batch.add(request)] = chat, turn
                    else:
                        begun.append((chat, TurnReply(error="the context is full")))
                if not running:
                    return
                for answer, chunk in batch.step():
                    self.on_tokens(len(chunk.tokens))
                    if answer.error is not None and not isinstance(answer.error, CHAT_ERRORS):
                        raise answer.error
                    if chunk.finished:
                        chat, turn = running.pop(answer)
                        error = answer.error
                        reply = (
                            turn.reply(*self._read(answer, turn))
                            if error is None
                            else TurnReply(error=str(error))
                        )
                        begun.append((chat, reply))

    def _request(self, turn: NextTurn) -> Request | None:
        """Return the request of a turn; None if the context has no room for two tokens."""
        adds = self.loaded.chat_template.adds_special_tokens
        ids = self.loaded.tokenizer(turn.prompt, add_special_tokens=adds).input_ids
        room = self.model.target.stable_length - len(ids)
        if room < 2:
            return None
        ends, criteria = self._ends(turn.stop)
        options: Any = {"eos_token_id": ends, "stopping_criteria": criteria, "method": "ar"}
        return self.model.request(ids, min(turn.limit, room), sampling=turn.sampling, **options)

    def _read(self, answer: Answer, turn: NextTurn) -> tuple[str, bool]:
        """Return the text of a turn, and whether a token ended it."""
        context = answer.request.tokens[-CONTEXT_TOKENS:]
        text = answer_text(self.loaded.tokenizer, answer.tokens, context)
        ends, _ = self._ends(turn.stop)
        return text, bool(answer.tokens) and answer.tokens[-1] in ends

    def _find_ends(self, stop: tuple[str, ...]) -> tuple[list[int], list[StopStringCriteria]]:
        """Return the tokens and the criteria that end a turn, given strings that end it."""
        tokenizer, template = self.loaded.tokenizer, self.loaded.chat_template
        special = {text: special_token(tokenizer, text) for text in stop}
        tokens = [token for token in special.values() if token is not None]
        strings = [text for text, token in special.items() if token is None]
        criteria = [StopStringCriteria(tokenizer, strings)] if strings else []
        return [*self.model.eos_token_ids, *template.stop_token_ids, *tokens], criteria


class ServerWriter:
    """Write chats with a server, several at once.

    ``bos_token`` is left out of texts to continue, because the server adds it.
    """

    def __init__(
        self,
        server: RegenerateServer,
        on_tokens: TokenCallback = ignore_tokens,
        bos_token: str = "",
    ) -> None:
        assert server.base_url is not None
        assert server.model is not None  # RegenerateServer requires both or neither
        url, model = server.base_url, server.model
        key = os.environ.get(server.api_key_env)
        if not key and "api_key_env" in server.model_fields_set:
            raise OptionsError(f"the environment variable {server.api_key_env} is not set or empty")
        self.endpoint = Endpoint(
            url, model, api_key=key, timeout=server.timeout, retries=server.retries
        )
        self.fingerprint = {"server": self.endpoint.redacted_url, "model": model}
        self.concurrency, self.on_tokens, self.bos_token = server.concurrency, on_tokens, bos_token
        self._lock = Lock()

    def write(self, chats: Iterator[Writing | None], batch_size: int) -> Lines:
        """Yield lines in the order in which chats end; ``batch_size`` is left to the server.

        The first SIGINT or SIGTERM ends the iteration after the chats in progress, the second one
        raises KeyboardInterrupt. Raises ValueError if the server fails.
        """

        def begin() -> Iterator[Writing]:
            for chat in chats:
                if signals.requested.is_set():
                    return
                if chat is not None:
                    yield chat

        def finish(chat: Writing) -> Line:
            turn = resume(chat)
            while isinstance(turn, NextTurn):
                try:
                    reply = turn.reply(*self._send(client, turn))
                except EndpointError as error:
                    if error.status not in REJECTIONS:
                        raise
                    reply = TurnReply(error=str(error))
                turn = resume(chat, reply)
            return turn

        try:
            client = ChatClient(self.endpoint)
            written = map_concurrently(finish, begin(), self.concurrency)
            with StopSignals("the chats in progress") as signals, closing(written):
                for _, line in written:
                    yield line
        except EndpointError as error:
            endpoint = self.endpoint
            raise ValueError(
                f"the target {endpoint.model} at {endpoint.redacted_url} failed ({error}); the"
                " chats so far are saved: run the same command again to resume"
            ) from error

    def _send(self, client: ChatClient, turn: NextTurn) -> tuple[str, bool]:
        """Request a turn; return its text, and whether it is complete."""
        sampling = turn.sampling
        own = {  # not parameters of OpenAI's API
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop_token_ids": turn.stop_token_ids,
        }
        options: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": (sampling.seed or 0) % 2**31,
            "max_tokens": turn.limit,
            "extra_body": {name: value for name, value in own.items() if value},
        }
        if turn.stop:
            options["stop"] = list(turn.stop)
        prompt = turn.prompt
        if isinstance(prompt, str):
            prompt = prompt.removeprefix(self.bos_token)
        text, complete, tokens = client.answer(prompt, **options)
        with self._lock:  # several threads request turns
            self.on_tokens(tokens)
        return text, complete


def refuse_local_options(request: TargetOptions, *names: str) -> None:
    """Raise OptionsError for options of a loaded target, which a server replaces."""
    spelled = {name: f"--{name.replace('_', '-')}" for name in names}
    spelled["chat_template"] = "--conv-template"
    if given := [spelled[name] for name in names if getattr(request, name) is not None]:
        raise OptionsError(f"--base-url uses a server's target and excludes {', '.join(given)}")


# -- the output ------------------------------------------------------------------------------------


def prepare_output(out: Path, fingerprint: dict[str, Any], overwrite: bool = False) -> None:
    """Delete partial lines of an earlier run, and write the fingerprint of this one.

    Raises ValueError for an output of other chats or options, unless ``overwrite`` deletes it.
    """
    before = read_fingerprint(out)
    before.pop("batch_size", None)  # of earlier versions
    if before and "dtype" in fingerprint:
        before.setdefault("dtype", fingerprint["dtype"])  # absent in earlier versions
    same = {**_LATER_OPTIONS, **before} == fingerprint
    for written in output_files(out):
        if same:
            truncate_partial_line(written)
        elif overwrite:
            written.unlink()
        else:
            raise ValueError(f"{out} was written from other chats or options; choose another file")
    atomic_write(_fingerprint_file(out), json.dumps(fingerprint, indent=2) + "\n")


def read_fingerprint(out: Path) -> dict[str, Any]:
    """Return what an earlier run recorded; empty if there was none."""
    file = _fingerprint_file(out)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def _fingerprint_file(out: Path) -> Path:
    return out.with_name(f"{out.name}.meta.json")


def output_files(out: Path) -> list[Path]:
    """Return the files with written chats: the output and its parts, ``OUT.part0`` and so on."""
    parts = sorted(out.parent.glob(f"{glob.escape(out.name)}.part[0-9]*"))
    return [file for file in (out, *parts) if file.exists()]


def read_lines(out: Path) -> dict[int, Line]:
    """Return the lines of the output and its parts by the index of their chat."""
    lines = (line for file in output_files(out) for line in read_jsonl(file))
    return {int(line["index"]): line for line in lines}


def locate_lines(out: Path) -> dict[int, tuple[Path, int, int]]:
    """Return file, offset and size of each chat's line in the output and its parts."""
    found = {}
    for path in output_files(out):
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n") and line.strip():
                    try:
                        found[int(json.loads(line)["index"])] = path, offset, len(line)
                    except ValueError as error:
                        raise ValueError(f"{path}, line {number}: not JSON") from error
                offset += len(line)
    return found


def read_line(path: Path, offset: int, size: int) -> bytes:
    """Read a line that :func:`locate_lines` found."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def finish_output(out: Path, lines: Iterable[bytes]) -> None:
    """Write lines to the output, and remove its parts."""
    with atomic_path(out) as temporary, temporary.open("wb") as whole:
        whole.writelines(lines)
    for file in output_files(out):
        if file != out:
            file.unlink()
