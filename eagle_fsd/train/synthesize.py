"""Have a target write whole chats: the user's messages and its answers to them.

A model that was tuned on chats continues the chat template's header of a user's message with such a
message (Magpie, arXiv 2406.08464). With a loaded target and the same options, a chat depends on its
index only, except for rounding. Start with :func:`synthesize`.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing

import numpy as np
from transformers import PreTrainedTokenizerBase

from eagle_fsd.bundled import BUNDLED_TARGET
from eagle_fsd.model.config import SamplingConfig
from eagle_fsd.model.loading import load_tokenizer
from eagle_fsd.train.chat_file import Chat, ChatFile
from eagle_fsd.train.config import RegenerateServer, SynthesizeConfig, SynthesizeRequest
from eagle_fsd.train.loaded_target import LoadedTarget, fastest_dtype, target_name
from eagle_fsd.train.writing import (
    Line,
    LocalWriter,
    NextTurn,
    ServerWriter,
    TokenCallback,
    TurnReply,
    Writing,
    finish_output,
    ignore_tokens,
    output_files,
    prepare_output,
    read_fingerprint,
    read_lines,
    refuse_local_options,
    special_token,
    turn_seed,
)
from eagle_fsd.utils.chat_templates import ChatTemplate, load_chat_template
from eagle_fsd.utils.files import append_line, read_jsonl
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.progress import Progress, ProgressFactory, no_progress

log = logging.getLogger(__name__)

#: Message whose place in a rendered chat shows what the template writes around messages.
MARKER = "qzmarkerzq"
#: Texts with at least so many characters, and more than so many per compressed byte, are
#: repetitive.
MIN_JUDGED_LENGTH, MAX_COMPRESSION = 200, 4.0
#: Messages whose sets of character sequences of this length overlap by this share (Jaccard) are
#: near-duplicates. The share is estimated from minimal hashes, compared first in bands.
SHINGLE, MAX_OVERLAP, HASHES, BANDS = 4, 0.7, 64, 16
#: After so many chats, at least one in :data:`MIN_YIELD` must be usable.
TRIAL, MIN_YIELD = 100, 50


def synthesize(
    request: SynthesizeRequest,
    config: SynthesizeConfig | None = None,
    server: RegenerateServer | None = None,
    *,
    token: str | None = None,
    progress: ProgressFactory = no_progress,
    on_tokens: TokenCallback = ignore_tokens,
) -> ChatFile:
    """Write ``request.count`` chats, resuming an interrupted run.

    While it runs, all new chats are in ``OUT.part0``, in order of completion. ``progress`` reports
    ``writing`` (in usable chats). Raises ValueError if the chat template shows no header of a
    user's message, the target writes few usable chats, a server fails, or the output has more
    chats than ``request.count`` or other options; KeyboardInterrupt if a signal stops it.
    """
    config = config or SynthesizeConfig()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise OptionsError("train synthesize requires a single process; see --base-url")
    writer: LocalWriter | ServerWriter
    if server is None or server.base_url is None:
        if request.dtype is None:
            dtype = None
            if output_files(request.out):  # the run is resumed
                dtype = read_fingerprint(request.out).get("dtype")
            request = request.updated(dtype=dtype or fastest_dtype(request.device_map))
        loaded = LoadedTarget.load(request, request.device_map, token)
        tokenizer, template = loaded.tokenizer, loaded.chat_template
        writer = LocalWriter(loaded, on_tokens)
        source = {"dtype": str(loaded.target.dtype).removeprefix("torch.")}
    else:  # only the tokenizer is needed, for its chat template
        refuse_local_options(request, "dtype", "device_map")
        tokenizer = load_tokenizer(request.target or BUNDLED_TARGET, token)
        template = load_chat_template(tokenizer, request.chat_template)
        begins = tokenizer("").input_ids == [tokenizer.bos_token_id]
        writer = ServerWriter(server, on_tokens, str(tokenizer.bos_token) if begins else "")
        source = writer.fingerprint
    plan = Plan(config, tokenizer, template)
    user_header(plan.opening(0), template)  # fails before anything is written
    names = {"target": target_name(request), "template": request.chat_template}
    options = config.model_dump(mode="json", exclude={"batch_size"})
    prepare_output(request.out, {**names, **source, **options})
    kept = read_jsonl(request.out) if request.out.exists() else []
    if len(kept) > request.count:
        raise ValueError(
            f"count must be at least {len(kept)}, the number of chats in {request.out}; got"
            f" {request.count}"
        )
    if len(kept) == request.count:
        return ChatFile(request.out)
    lines: dict[int, Line] = {}
    for index in range(kept[-1]["index"] if kept else 0):  # the complete run left out the others
        lines[index] = {"index": index, "messages": [], "dropped": "in an earlier run"}
    lines |= read_lines(request.out)
    sieve = Sieve(request.count, lines)
    indices = sieve.indices(ahead=isinstance(writer, ServerWriter))
    chats = (None if index is None else plan.write(index) for index in indices)
    written = writer.write(chats, config.batch_size)
    part = request.out.with_name(f"{request.out.name}.part0")
    with progress("writing") as report, closing(written):
        sieve.advance(report)
        while not sieve.complete and (line := next(written, None)) is not None:
            lines[line["index"]] = line
            append_line(part, json.dumps(line))
            sieve.advance(report)
    if not sieve.complete:
        raise KeyboardInterrupt
    finish_output(request.out, (json.dumps(line).encode() + b"\n" for line in sieve.kept))
    log.warning("%s", sieve.summary())
    return ChatFile(request.out)


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
            "the chat template writes no header before a user's message, so the target cannot"
            " be asked for one; pass --conv-template, or rewrite existing chats with eagle-fsd"
            " train regenerate"
        )
    return header, rest[0]


class Plan:
    """What chats consist of, and whether what was written is usable."""

    def __init__(
        self, config: SynthesizeConfig, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate
    ) -> None:
        self.config, self.tokenizer, self.template = config, tokenizer, template

    def opening(self, index: int) -> Chat:
        """Return the messages that a chat begins with."""
        systems = self.config.system
        if not systems:
            return []
        return [{"role": "system", "content": systems[index % len(systems)]}]

    def write(self, index: int) -> Writing:
        """Write a chat, which ends before an exchange with an unusable message."""
        chat = self.opening(index)
        line: Line = {"index": index, "messages": chat}
        for exchange in range(self.config.turns):
            start = "" if exchange else self._prefix(index)
            reply = yield self._user_turn(index, chat, start)
            question = {"role": "user", "content": (start + reply.text).strip()}
            if flaw := find_flaw(reply, question["content"]):
                return {**line, "dropped": flaw}
            reply = yield self._assistant_turn(index, [*chat, question])
            answer = {"role": "assistant", "content": reply.text.strip()}
            if flaw := find_flaw(reply, answer["content"]):
                return {**line, "dropped": flaw}
            chat += [question, answer]
        return line

    def _prefix(self, index: int) -> str:
        prefixes = self.config.prefix or ("",)
        return prefixes[index // max(1, len(self.config.system)) % len(prefixes)].strip()

    def _user_turn(self, index: int, chat: Chat, start: str) -> NextTurn:
        config = self.config
        header, footer = user_header(chat, self.template)
        text = f"{header}{start}" if start else header.rstrip(" ")  # words begin with their space
        sampling = config.sampling(
            seed=turn_seed(config.seed, index, chat),
            temperature=config.user_temperature,
            top_p=config.user_top_p,
        )
        # A special token ends the message, or the next speaker's header.
        end = special_token(self.tokenizer, footer.lstrip())
        ends = footer.strip() if end is None else str(self.tokenizer.decode([end]))
        return self._turn(text, sampling, config.max_user_tokens, (ends,) if ends else ())

    def _assistant_turn(self, index: int, chat: Chat) -> NextTurn:
        text = self.template.render(chat, add_generation_prompt=True)
        sampling = self.config.sampling(seed=turn_seed(self.config.seed, index, chat))
        return self._turn(text, sampling, self.config.max_new_tokens, tuple(self.template.stop))

    def _turn(
        self, text: str, sampling: SamplingConfig, limit: int, stop: tuple[str, ...]
    ) -> NextTurn:
        special = (special_token(self.tokenizer, string) for string in stop)
        tokens = (token for token in special if token is not None)
        ends = *self.template.stop_token_ids, *tokens
        return NextTurn(text, sampling, limit, stop=stop, stop_token_ids=ends)


def find_flaw(reply: TurnReply, message: str) -> str | None:
    """Return why a message is unusable, if it is."""
    if reply.error is not None:
        return "rejected"
    if not reply.complete:
        return "truncated"
    if not reply.text.strip():
        return "empty"
    return "repetitive" if is_repetitive(message) else None


def is_repetitive(text: str) -> bool:
    """Return whether a text repeats itself, judged by how well it compresses."""
    limit = MAX_COMPRESSION * len(zlib.compress(text.encode()))
    return len(text) >= MIN_JUDGED_LENGTH and len(text) > limit


class NearDuplicates:
    """Recognize texts that resemble earlier ones."""

    def __init__(self) -> None:
        factors = np.random.default_rng(0).integers(1, 2**63, (2, HASHES, 1), np.uint64)
        self._factors, self._offsets = factors[0] | np.uint64(1), factors[1]
        self._seen: dict[tuple[int, bytes], list[np.ndarray]] = defaultdict(list)

    def resembles_earlier(self, text: str) -> bool:
        """Return whether a text resembles an earlier one; remember it if not."""
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

    def __init__(self, count: int, lines: dict[int, Line]) -> None:
        self.count, self.lines = count, lines
        self.kept: list[Line] = []
        self.dropped: Counter[str] = Counter()
        self.decided = 0
        self._next = 0  # all chats before it are written or begun
        self._seen = NearDuplicates()

    @property
    def complete(self) -> bool:
        """Whether there are enough chats."""
        return len(self.kept) >= self.count

    def indices(self, ahead: bool) -> Iterator[int | None]:
        """Yield chats to write until there are enough; None while those begun may suffice.

        ``ahead`` begins chats nevertheless.
        """
        while not self.complete:
            while self._next in self.lines:  # written before an interruption
                self._next += 1
            if ahead or len(self.kept) + self._next - self.decided < self.count:
                self._next += 1
                yield self._next - 1
            else:
                yield None

    def advance(self, report: Progress) -> None:
        """Decide on all chats up to the first that is not written yet."""
        while self.decided in self.lines and not self.complete:
            self._decide(self.lines[self.decided])
            self.decided += 1
            usable = max(1, len(self.kept))
            if self.decided >= TRIAL and self.decided > MIN_YIELD * usable:
                raise ValueError(f"hardly any chat is usable: {self.summary()}")
        report(len(self.kept), self.count)

    def _decide(self, line: Line) -> None:
        """Keep a chat with an answer, unless its first question is a near-duplicate."""
        chat = line["messages"]
        if "dropped" in line:
            self.dropped[line["dropped"]] += 1
        if not any(message["role"] == "assistant" for message in chat):
            return
        first = next(message["content"] for message in chat if message["role"] == "user")
        if self._seen.resembles_earlier(first):
            self.dropped["near-duplicate"] += 1
        else:
            self.kept.append({"index": line["index"], "messages": chat})

    def summary(self) -> str:
        """Describe how many chats were kept and messages dropped, by reason."""
        reasons = ", ".join(f"{count} {name}" for name, count in self.dropped.most_common())
        return f"{len(self.kept)} of {self.decided} chats; dropped: {reasons or 'none'}"
