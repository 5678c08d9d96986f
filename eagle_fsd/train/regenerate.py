"""Replace the assistant's turns in a chat file by turns that the target generates.

A head learns to predict one target: heads trained on text that the target generated have a larger
accepted length than heads trained on other text.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from accelerate import PartialState

from eagle_fsd.model.config import SamplingConfig
from eagle_fsd.train.chat_file import ChatFile, is_answer
from eagle_fsd.train.config import RegenerateConfig, RegenerateRequest, RegenerateServer
from eagle_fsd.train.loaded_target import (
    TRIAL_CHATS,
    LoadedTarget,
    check_device_map,
    open_chat_file,
)
from eagle_fsd.train.writing import (
    Draft,
    LocalWriter,
    NextTurn,
    ServerWriter,
    TokenCallback,
    finish_output,
    ignore_tokens,
    prepare_output,
    read_lines,
    refuse_local_options,
    turn_seed,
)
from eagle_fsd.utils.chat_templates import ChatTemplate
from eagle_fsd.utils.files import append_line
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.processes import start_processes
from eagle_fsd.utils.progress import Progress, ProgressFactory, no_progress

log = logging.getLogger(__name__)


def regenerate(
    request: RegenerateRequest,
    config: RegenerateConfig | None = None,
    server: RegenerateServer | None = None,
    *,
    token: str | None = None,
    progress: ProgressFactory = no_progress,
    on_tokens: TokenCallback = ignore_tokens,
) -> ChatFile | None:
    """Rewrite a chat file with the target; return None on processes other than the first.

    Every process of ``accelerate launch`` or ``torchrun`` calls this, with the same output file. A
    server rewrites the chats if its ``base_url`` is set. ``progress`` reports ``reading`` (in
    bytes) and ``rewriting`` (in chats).
    """
    if server is not None and server.base_url is not None:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise OptionsError("--base-url requires a single process; see --concurrency")
        refuse_local_options(request, "target", "dtype", "chat_template", "device_map")
        with progress("reading") as report:
            chats = open_chat_file(request.data, report)
        with progress("rewriting") as report:
            remote = ServerWriter(server, on_tokens)
            return rewrite_chats(remote, chats, request.out, config=config, progress=report)
    state = start_processes()
    check_device_map(request.device_map, state.num_processes)
    progress = progress if state.is_main_process else no_progress
    device = request.device_map or (state.device if state.num_processes > 1 else None)
    loaded = LoadedTarget.load(request, device, token)
    with progress("reading") as report:
        chats = loaded.open_chats(request.data, progress=report).file
    with progress("rewriting") as report:
        writer = LocalWriter(loaded, on_tokens)
        rewritten = rewrite_chats(writer, chats, request.out, config=config, progress=report)
    is_main = state.is_main_process
    state.destroy_process_group()
    return rewritten if is_main else None


class Rewriting:
    """The script that replaces answers; without a ``template``, a server formats the chats.

    ``rejections`` say which chats ended early, and why.
    """

    def __init__(
        self, chats: ChatFile, config: RegenerateConfig, template: ChatTemplate | None
    ) -> None:
        self.chats, self.config, self.template = chats, config, template
        own = config.model_dump(include=set(SamplingConfig.model_fields))
        self.sampling = SamplingConfig.from_dict(own)
        self.rejections: list[str] = []

    def drafts(self, done: Collection[int], process: int, processes: int) -> Iterator[Draft]:
        """Yield a process's part of the chats that are not done."""
        missing = [index for index in range(len(self.chats)) if index not in done]
        for index in missing[process::processes]:
            yield Draft(index, self.chats[index])

    def next_turn(self, draft: Draft) -> NextTurn | None:
        """Copy messages up to the next answer; see :meth:`Script.next_turn`."""
        rest = draft.source[len(draft.messages) :] if draft.dropped is None else []
        for message in rest:
            if is_answer(message):
                return self._turn(draft)
            draft.messages.append(message)
        return None

    def _turn(self, draft: Draft) -> NextTurn | None:
        sampling = self.sampling.updated(seed=turn_seed(self.config.seed, draft))
        limit = self.config.max_new_tokens
        if self.template is None:
            return NextTurn("assistant", list(map(_as_sent, draft.messages)), sampling, limit)
        try:
            prompt = self.template.render(draft.messages, add_generation_prompt=True)
        except ValueError as error:
            self._end(draft, str(error))
            return None
        return NextTurn("assistant", prompt, sampling, limit=limit, stop=tuple(self.template.stop))

    def take(
        self, draft: Draft, turn: NextTurn, text: str, complete: bool, error: str | None = None
    ) -> None:
        """See :meth:`Script.take`."""
        if text := text.strip():
            draft.messages.append({"role": turn.role, "content": text})
        else:
            self._end(draft, error or "the reply is empty")

    def _end(self, draft: Draft, reason: str) -> None:
        draft.dropped = reason
        self.rejections.append(f"line {self.chats.line(draft.index)}: {reason}")

    def report(self) -> None:
        """Log how many chats ended early."""
        if found := self.rejections:
            count, total = len(found), len(self.chats)
            log.warning("%d of %d chats end early; the first one: %s", count, total, found[0])


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """Encode the arguments of a message's tool calls, which OpenAI's API takes as strings."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"])
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def rewrite_chats(
    writer: LocalWriter | ServerWriter,
    chats: ChatFile,
    out: str | Path,
    config: RegenerateConfig | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> ChatFile:
    """Rewrite chats, resuming an interrupted run.

    The result does not depend on interruptions, processes or the batch size: a turn depends on its
    chat and on a seed of its own. Until all chats are rewritten, lines are in the order of their
    completion, and several processes write to files of their own, ``OUT.part0`` and so on.
    ``OUT.meta.json`` holds the fingerprint of the chats and the options.

    Raises ValueError if the output was written from other chats or options, unless ``overwrite`` is
    set, or if a server fails or rejects the first :data:`TRIAL_CHATS` chats, and KeyboardInterrupt
    if a signal stopped it.
    """
    config, out, template = config or RegenerateConfig(), Path(out), None
    state = PartialState()
    process, processes = state.process_index, state.num_processes
    if isinstance(writer, LocalWriter):
        template = writer.loaded.chat_template
        source = writer.loaded.fingerprint(chats.path)
    else:
        source = {"data": str(chats.path), "bytes": chats.path.stat().st_size, **writer.fingerprint}
    if process == 0:
        options = config.model_dump(exclude={"batch_size"})
        prepare_output(out, {**source, **options}, overwrite)
    state.wait_for_everyone()
    done = set(read_lines(out))  # without the messages
    state.wait_for_everyone()  # until all have read what there is, before it changes
    part = out if processes == 1 else out.with_name(f"{out.name}.part{process}")
    script, count = Rewriting(chats, config, template), len(done)
    held: list[str] = []  # lines, until a server has accepted a request
    accepted = bool(done) or isinstance(writer, LocalWriter)
    with closing(writer.write(script, script.drafts(done, process, processes))) as written:
        for draft in written:
            count += processes
            held.append(json.dumps(draft.line()))
            accepted = accepted or any(map(is_answer, draft.messages))
            if not accepted and len(held) == min(TRIAL_CHATS, len(chats)):
                assert isinstance(writer, ServerWriter)
                raise writer.failure(f"it rejects all chats: {script.rejections[0]}")
            while accepted and held:
                append_line(part, held.pop(0))
            if progress is not None:
                progress(min(count, len(chats)), len(chats))
    script.report()
    if processes == 1 and count < len(chats):
        raise KeyboardInterrupt
    state.wait_for_everyone()
    if process == 0:
        lines = read_lines(out)
        finish_output(out, (lines[index] for index in sorted(lines)))
    state.wait_for_everyone()
    return ChatFile(out)
