"""Replace the assistant's answers in a chat file by answers that the target generates.

Heads that were trained on text of their own target usually have a larger accepted length.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import closing
from pathlib import Path
from typing import Any

from accelerate import PartialState

from eagle_fsd.train.chat_file import Chat, ChatFile, is_answer
from eagle_fsd.train.config import RegenerateConfig, RegenerateRequest, RegenerateServer
from eagle_fsd.train.loaded_target import (
    TRIAL_CHATS,
    LoadedTarget,
    check_device_map,
    open_chat_file,
)
from eagle_fsd.train.writing import (
    LocalWriter,
    NextTurn,
    ServerWriter,
    TokenCallback,
    TurnReply,
    Writing,
    finish_output,
    ignore_tokens,
    locate_lines,
    prepare_output,
    read_line,
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
    bytes) and ``rewriting`` (in chats), and ``on_tokens`` new tokens, in the first process only.
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
    if not state.is_main_process:
        progress, on_tokens = no_progress, ignore_tokens
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
    """Replace the answers of chats; without a ``template``, a server formats the chats.

    ``rejections`` say which chats ended early, and why.
    """

    def __init__(
        self, chats: ChatFile, config: RegenerateConfig, template: ChatTemplate | None
    ) -> None:
        self.chats, self.config, self.template = chats, config, template
        self.rejections: list[str] = []

    def write(self, index: int) -> Writing:
        """Copy a chat with other answers, up to one that fails."""
        messages: Chat = []
        for message in self.chats[index]:
            if not is_answer(message):
                messages.append(message)
                continue
            try:
                turn = self._turn(index, messages)
            except ValueError as error:  # the template rejects the chat
                reply = TurnReply(error=str(error))
            else:
                reply = yield turn
            if not (text := reply.text.strip()):
                reason = reply.error or "the reply is empty"
                self.rejections.append(f"line {self.chats.lines[index]}: {reason}")
                break
            messages.append({"role": "assistant", "content": text})
        return {"index": index, "messages": messages}

    def _turn(self, index: int, messages: Chat) -> NextTurn:
        sampling = self.config.sampling(seed=turn_seed(self.config.seed, index, messages))
        limit = self.config.max_new_tokens
        if self.template is None:
            return NextTurn(list(map(_as_sent, messages)), sampling, limit)
        prompt = self.template.render(messages, add_generation_prompt=True)
        return NextTurn(prompt, sampling, limit, stop=tuple(self.template.stop))


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

    With a loaded target, a turn depends on its chat and on a seed of its own, so interruptions, the
    number of processes and the batch size change the result by rounding only. Until all chats are
    rewritten, lines are in the order of their completion, and several processes write to files of
    their own, ``OUT.part0`` and so on. ``OUT.meta.json`` identifies the chats and the options.

    Raises ValueError if the output was written from other chats or options, unless ``overwrite`` is
    set, if a server fails, or if none of the first :data:`TRIAL_CHATS` chats gets an answer, and
    KeyboardInterrupt if a signal stopped it.
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
    done = set(locate_lines(out))
    state.wait_for_everyone()  # until all have read what there is, before it changes
    part = out if processes == 1 else out.with_name(f"{out.name}.part{process}")
    rewriting, count = Rewriting(chats, config, template), len(done)
    missing = [index for index in range(len(chats)) if index not in done]
    own = map(rewriting.write, missing[process::processes])
    held: list[str] = []  # lines, until one has an answer
    accepted = bool(done)
    if progress is not None:
        progress(count, len(chats))
    with closing(writer.write(own, config.batch_size)) as written:
        for line in written:
            count += processes
            held.append(json.dumps(line))
            accepted = accepted or any(map(is_answer, line["messages"]))
            if not accepted and len(held) == min(TRIAL_CHATS, len(chats)):
                reason = rewriting.rejections[0]
                raise ValueError(
                    f"the target answers none of the first {len(held)} chats: {reason}"
                )
            while accepted and held:
                append_line(part, held.pop(0))
            if progress is not None:
                progress(min(count, len(chats)), len(chats))
    if found := rewriting.rejections:
        log.warning("%d of %d chats end early; the first one: %s", len(found), len(chats), found[0])
    if processes == 1 and count < len(chats):
        raise KeyboardInterrupt
    for unwritten in held:
        append_line(part, unwritten)
    state.wait_for_everyone()
    if process == 0:
        lines = locate_lines(out)
        finish_output(out, (read_line(*lines[index]) for index in sorted(lines)))
    state.wait_for_everyone()
    return ChatFile(out)
