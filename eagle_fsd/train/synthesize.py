"""Have a target write chats from nothing: the user's messages and its own answers to them.

A model that was tuned on chats continues the chat template's header of a user's message with such a
message (Magpie, arXiv 2406.08464). A chat depends on its index and the seed only. Start with
:func:`synthesize`.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.generation import StopStringCriteria

from eagle_fsd.bundled import BUNDLED_TARGET
from eagle_fsd.model.config import SamplingConfig
from eagle_fsd.model.loading import load_tokenizer
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.request import Request
from eagle_fsd.train.chat_file import Chat, ChatFile
from eagle_fsd.train.config import RegenerateServer, SynthesizeConfig, SynthesizeRequest
from eagle_fsd.train.loaded_target import LoadedTarget, fastest_dtype, target_name
from eagle_fsd.train.regenerate import (
    REJECTIONS,
    output_files,
    prepare_output,
    read_lines,
    server_endpoint,
    turn_seed,
    write_turns,
)
from eagle_fsd.utils.chat_api import ChatClient, EndpointError, map_concurrently
from eagle_fsd.utils.chat_templates import ChatTemplate, load_chat_template
from eagle_fsd.utils.files import append_line, atomic_write
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.progress import Progress, ProgressFactory, no_progress
from eagle_fsd.utils.signals import StopSignals, interrupt_on_second_signal

log = logging.getLogger(__name__)

#: Message whose place in a rendered chat shows what the template writes around messages.
MARKER = "qzmarkerzq"
#: Texts that compress by more than this factor repeat themselves; shorter ones are not judged.
MAX_COMPRESSION, MIN_COMPRESSED_BYTES = 4.0, 200
#: Messages whose sets of character sequences of this length overlap by this share (Jaccard) are
#: near-duplicates. The share is estimated from minimal hashes, compared first in bands.
SHINGLE, MAX_OVERLAP, HASHES, BANDS = 4, 0.7, 64, 16
#: After so many chats, at least one in :data:`MIN_YIELD` must be usable.
TRIAL, MIN_YIELD = 100, 50


@dataclass(eq=False)
class Draft:
    """A chat that is being written; ``dropped`` is why it ended early, if it did."""

    index: int
    messages: Chat = field(default_factory=list)
    dropped: str | None = None


@dataclass(frozen=True)
class WrittenTurn:
    """A message for the target to write: ``text`` is what it continues, ``stop`` what ends it."""

    role: str
    text: str
    start: str  # of the message, already in the text
    stop: tuple[str, ...]
    limit: int  # tokens
    sampling: SamplingConfig


def synthesize(
    request: SynthesizeRequest,
    config: SynthesizeConfig | None = None,
    server: RegenerateServer | None = None,
    *,
    token: str | None = None,
    progress: ProgressFactory = no_progress,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> ChatFile:
    """Write ``request.count`` chats, resuming an interrupted run.

    While it runs, all chats are in ``OUT.part0``, in order of completion. ``progress`` counts the
    ``writing`` of usable chats, and ``on_tokens`` is called with numbers of new tokens. Raises
    ValueError if the chat template shows no header of a user's message, the target writes hardly
    any usable chat, or the output was written with other options.
    """
    config, server = config or SynthesizeConfig(), server or RegenerateServer()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise OptionsError("train synthesize requires a single process; see --base-url")
    writer: LocalWriter | ServerWriter
    if server.base_url is None:
        writer = LocalWriter(request, config, token, on_tokens)
    else:
        writer = ServerWriter(request, config, server, token, on_tokens)
    user_header(writer.plan.opening(0), writer.plan.template)  # fails before anything is written
    out, options = request.out, config.model_dump(mode="json", exclude={"batch_size"})
    prepare_output(out, {**writer.fingerprint, **options})
    lines = read_lines(out)
    sieve = Sieve(request.count, lines)
    part = out.with_name(f"{out.name}.part0")
    with progress("writing") as report:
        sieve.advance(report)
        for draft in writer.write(sieve):
            line = {"index": draft.index, "messages": draft.messages}
            lines[draft.index] = line | ({"dropped": draft.dropped} if draft.dropped else {})
            append_line(part, json.dumps(lines[draft.index]))
            sieve.advance(report)
    if len(sieve.kept) < request.count:
        raise KeyboardInterrupt
    atomic_write(out, "".join(json.dumps(line) + "\n" for line in sieve.kept))
    for file in output_files(out):
        if file != out:
            file.unlink()
    log.warning("%s", sieve.summary())
    return ChatFile(out)


# -- what to write ---------------------------------------------------------------------------------


def user_header(chat: Chat, template: ChatTemplate) -> tuple[str, str]:
    """Return the text before and after a user's message that continues a chat.

    Raises ValueError if the template writes nothing before it, or not the message itself.
    """
    message = {"role": "user", "content": MARKER}
    text = template.render([*chat, message], add_generation_prompt=True)
    header, *rest = text.split(MARKER)
    if len(rest) != 1 or not header.strip():
        raise ValueError(
            "the chat template writes no header before a user's message, so that the target cannot"
            " be asked for one; pass --conv-template, or rewrite existing chats with eagle-fsd"
            " train regenerate"
        )
    return header, rest[0]


class Plan:
    """Decide what comes next in a chat, and whether what was written is usable."""

    def __init__(
        self, config: SynthesizeConfig, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate
    ) -> None:
        self.config, self.tokenizer, self.template = config, tokenizer, template
        names = set(SamplingConfig.model_fields) - {"seed"}
        own = config.model_dump(include=names)
        user = {"temperature": config.user_temperature, "top_p": config.user_top_p}
        self._sampling = {
            "assistant": SamplingConfig(**own),
            "user": SamplingConfig(**{**own, **user}),
        }

    def opening(self, index: int) -> Chat:
        """Return the messages that a chat begins with."""
        systems = self.config.system
        if not systems:
            return []
        return [{"role": "system", "content": systems[index % len(systems)]}]

    def next_turn(self, draft: Draft) -> WrittenTurn | None:
        """Return what to write next; None if the chat is complete."""
        config, chat = self.config, draft.messages
        if not chat:
            chat.extend(self.opening(draft.index))
        answers = sum(message["role"] == "assistant" for message in chat)
        if draft.dropped or answers == config.turns:
            return None
        seed = turn_seed(config.seed, draft.index, len(chat))
        if chat and chat[-1]["role"] == "user":
            text = self.template.render(chat, add_generation_prompt=True)
            sampling = self._sampling["assistant"].updated(seed=seed)
            stop = tuple(self.template.stop)
            return WrittenTurn("assistant", text, "", stop, config.max_new_tokens, sampling)
        header, footer = user_header(chat, self.template)
        prefixes = () if answers else config.prefix
        start = ""
        if prefixes:
            start = prefixes[draft.index // max(1, len(config.system)) % len(prefixes)].strip()
        text = f"{header}{start}" if start else header.rstrip(" ")  # words begin with their space
        sampling = self._sampling["user"].updated(seed=seed)
        stop = (self._end(footer),) if footer.strip() else ()
        return WrittenTurn("user", text, start, stop, config.max_user_tokens, sampling)

    def take(self, draft: Draft, turn: WrittenTurn, text: str, complete: bool) -> None:
        """Add a message to its chat, or end the chat before the exchange."""
        for stop in turn.stop:
            before, found, _ = text.partition(stop)
            text, complete = before, complete or bool(found)
        message = (turn.start + text).strip()
        if not complete:
            draft.dropped = "truncated"
        elif not text.strip():
            draft.dropped = "empty"
        elif is_repetitive(message):
            draft.dropped = "repetitive"
        else:
            draft.messages.append({"role": turn.role, "content": message})
            return
        if turn.role == "assistant":
            draft.messages.pop()

    def ids(self, text: str) -> list[int]:
        """Tokenize a rendered chat."""
        adds = self.template.adds_special_tokens
        return list(self.tokenizer(text, add_special_tokens=adds).input_ids)

    def special_token(self, text: str) -> int | None:
        """Return the special token that a text begins with, if any."""
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        is_special = bool(ids) and ids[0] in self.tokenizer.added_tokens_decoder
        return ids[0] if is_special else None

    def _end(self, footer: str) -> str:
        """Return the string that ends a message: a special token, or the next speaker's header."""
        first = self.special_token(footer.lstrip())
        return footer.strip() if first is None else str(self.tokenizer.decode([first]))


def is_repetitive(text: str) -> bool:
    """Return whether a text consists of repetitions, in any language."""
    content = text.encode()
    if len(content) < MIN_COMPRESSED_BYTES:
        return False
    return len(content) > MAX_COMPRESSION * len(zlib.compress(content))


class NearDuplicates:
    """Recognize texts that resemble earlier ones."""

    def __init__(self) -> None:
        factors = np.random.default_rng(0).integers(1, 2**63, (2, HASHES, 1), np.uint64)
        self._factors, self._offsets = factors[0] | np.uint64(1), factors[1]
        self._seen: dict[tuple[int, bytes], list[np.ndarray]] = defaultdict(list)

    def add(self, text: str) -> bool:
        """Remember a text unless it resembles an earlier one; return whether it does."""
        letters = "".join(filter(str.isalnum, text.casefold()))
        starts = range(max(1, len(letters) - SHINGLE + 1))
        shingles = {letters[start : start + SHINGLE].encode() for start in starts}
        codes = np.array([zlib.crc32(shingle) for shingle in shingles], np.uint64)
        minima = (codes * self._factors + self._offsets >> np.uint64(32)).min(1)  # [HASHES]
        keys = [(band, row.tobytes()) for band, row in enumerate(minima.reshape(BANDS, -1))]
        near = (other for key in keys for other in self._seen[key])
        if any((other == minima).mean() >= MAX_OVERLAP for other in near):
            return True
        for key in keys:
            self._seen[key].append(minima)
        return False


class Sieve:
    """Keep the usable chats, in the order of their indices, until there are enough.

    ``lines`` are all chats that were written, by index; those that come early wait for the others.
    """

    def __init__(self, count: int, lines: dict[int, dict[str, Any]]) -> None:
        self.count, self.lines = count, lines
        self.kept: list[dict[str, Any]] = []
        self.dropped: Counter[str] = Counter()
        self.decided = 0
        self._indices = itertools.filterfalse(lines.__contains__, itertools.count())
        self._begun = len(lines)
        self._seen = NearDuplicates()

    @property
    def complete(self) -> bool:
        """Whether there are enough chats."""
        return len(self.kept) >= self.count

    def draw(self) -> Draft | None:
        """Return the next chat to write; None if those begun may suffice."""
        if len(self.kept) + self._begun - self.decided >= self.count:
            return None
        return self.begin()

    def begin(self) -> Draft:
        """Return the next chat to write."""
        self._begun += 1
        return Draft(next(self._indices))

    def advance(self, report: Progress) -> None:
        """Decide on all chats up to the first that is not written yet."""
        while self.decided in self.lines and not self.complete:
            self._decide(self.lines[self.decided])
            self.decided += 1
            usable = max(1, len(self.kept))
            if self.decided >= TRIAL and self.decided > MIN_YIELD * usable:
                raise ValueError(f"hardly any chat is usable: {self.summary()}")
        report(len(self.kept), self.count)

    def _decide(self, line: dict[str, Any]) -> None:
        chat = line["messages"]
        if "dropped" in line:
            self.dropped[line["dropped"]] += 1
        if not any(message["role"] == "assistant" for message in chat):
            return
        first = next(message["content"] for message in chat if message["role"] == "user")
        if self._seen.add(first):
            self.dropped["near-duplicate"] += 1
        else:
            self.kept.append({"index": line["index"], "messages": chat})

    def summary(self) -> str:
        """Say how many chats were kept and messages dropped, by reason."""
        reasons = ", ".join(f"{count} {name}" for name, count in self.dropped.most_common())
        return f"{len(self.kept)} of {self.decided} chats; dropped: {reasons or 'none'}"


# -- who writes it ---------------------------------------------------------------------------------


class LocalWriter:
    """Write chats with a target that is loaded here, many at once."""

    def __init__(
        self,
        request: SynthesizeRequest,
        config: SynthesizeConfig,
        token: str | None,
        on_tokens: Callable[[int], None],
    ) -> None:
        if request.dtype is None and request.device_map in (None, "cpu"):
            request = request.updated(dtype=fastest_dtype())
        loaded = LoadedTarget.load(request, request.device_map, token)
        self.model = EagleFSD(loaded.target.model, None, tokenizer=loaded.tokenizer)
        self.plan = Plan(config, loaded.tokenizer, loaded.chat_template)
        self.fingerprint = {
            "target": loaded.name,
            "template": loaded.chat_template_name,
            "dtype": str(loaded.target.dtype).removeprefix("torch."),
        }
        self._on_tokens = on_tokens
        self._turns: dict[Draft, WrittenTurn] = {}
        self._stop = lru_cache(self._stop_options)

    def write(self, sieve: Sieve) -> Iterator[Draft]:
        """Yield chats in order of completion until the sieve draws no more."""
        size = self.plan.config.batch_size
        return write_turns(
            self.model, size, sieve.draw, self._request, self._finish, self._on_tokens
        )

    def _request(self, draft: Draft) -> Request | None:
        turn = self.plan.next_turn(draft)
        if turn is None:
            return None
        ids = self.plan.ids(turn.text)
        room = self.model.target.context_length - len(ids)
        if room < 1:
            self.plan.take(draft, turn, "", complete=False)
            return None
        self._turns[draft] = turn
        options: Any = {"sampling": turn.sampling, "method": "ar", **self._stop(turn.stop)}
        return self.model.request(ids, min(turn.limit, room), **options)

    def _finish(self, draft: Draft, tokens: list[int]) -> None:
        turn = self._turns.pop(draft)
        complete = bool(tokens) and tokens[-1] in self._stop(turn.stop)["eos_token_id"]
        text = str(self.plan.tokenizer.decode(tokens, skip_special_tokens=True))
        self.plan.take(draft, turn, text, complete)

    def _stop_options(self, stop: tuple[str, ...]) -> dict[str, Any]:
        """Return the options of requests that end at strings, some of which are tokens."""
        special = {text: self.plan.special_token(text) for text in stop}
        tokens = [token for token in special.values() if token is not None]
        ends = [*self.model.eos_token_ids, *self.plan.template.stop_token_ids, *tokens]
        strings = [text for text, token in special.items() if token is None]
        criteria = [StopStringCriteria(self.plan.tokenizer, strings)] if strings else []
        return {"eos_token_id": ends, "stopping_criteria": criteria}


class ServerWriter:
    """Write chats with a server of the target that has a completions endpoint.

    Only the tokenizer is loaded here, for its chat template.
    """

    def __init__(
        self,
        request: SynthesizeRequest,
        config: SynthesizeConfig,
        server: RegenerateServer,
        token: str | None,
        on_tokens: Callable[[int], None],
    ) -> None:
        given = [name for name in ("dtype", "device_map") if getattr(request, name) is not None]
        if given:
            raise OptionsError(
                f"--base-url uses a server's target and takes no {given[0].replace('_', ' ')}"
            )
        tokenizer = load_tokenizer(request.target or BUNDLED_TARGET, token)
        template = load_chat_template(tokenizer, request.chat_template)
        self.plan = Plan(config, tokenizer, template)
        self.endpoint, self.server = server_endpoint(server), server
        self.fingerprint = {
            "target": target_name(request),
            "template": request.chat_template,
            "server": self.endpoint.redacted_url,
            "model": self.endpoint.model,
        }
        self._on_tokens = on_tokens

    def write(self, sieve: Sieve) -> Iterator[Draft]:
        """Yield chats in order of completion until the sieve has enough, or a signal arrives."""
        client, requested = ChatClient(self.endpoint, self._on_tokens), False

        def drafts() -> Iterator[Draft]:
            while not (sieve.complete or signals.requested.is_set()):
                yield sieve.begin()

        written = map_concurrently(
            lambda draft: self._write(client, draft), drafts(), self.server.concurrency
        )
        stop = interrupt_on_second_signal("the chats in progress")
        try:
            with StopSignals(stop) as signals, closing(written):
                for draft, _ in written:
                    yield draft
                    requested = signals.requested.is_set()
                    if sieve.complete and not requested:
                        return
        except EndpointError as error:
            raise ValueError(
                f"the target {self.endpoint.model} at {self.endpoint.redacted_url} failed"
                f" ({error}); the chats so far are saved: run the same command again to resume"
            ) from error

    def _write(self, client: ChatClient, draft: Draft) -> None:
        # The server adds the token that the tokenizer would add.
        bos = str(self.plan.tokenizer.bos_token or "")
        adds = self.plan.tokenizer("").input_ids == [self.plan.tokenizer.bos_token_id]
        while (turn := self.plan.next_turn(draft)) is not None:
            text = turn.text.removeprefix(bos) if adds else turn.text
            options: dict[str, Any] = {
                "temperature": turn.sampling.temperature,
                "top_p": turn.sampling.top_p,
                "seed": (turn.sampling.seed or 0) % 2**31,
                "max_tokens": turn.limit,
            }
            own = {"top_k": turn.sampling.top_k, "min_p": turn.sampling.min_p}
            options["extra_body"] = {name: value for name, value in own.items() if value}
            if turn.stop:
                options["stop"] = list(turn.stop)
            try:
                new, complete, _ = client.continue_text(text, **options)
            except EndpointError as error:
                if error.status not in REJECTIONS:
                    raise
                new, complete = "", False
            self.plan.take(draft, turn, new, complete)
