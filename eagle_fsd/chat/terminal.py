"""FastChat's terminal chat, decoding with FSD: its loop and its commands, our model and display."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from fastchat.conversation import get_conv_template
from fastchat.serve import cli as fastchat_cli
from fastchat.serve import inference
from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import Tensor

from eagle_fsd.chat.config import AnswerOptions
from eagle_fsd.chat.session import Answer, fit_chat
from eagle_fsd.chat.text import Piece, harmless
from eagle_fsd.chat.wire_format import NAME, clean, display, register, unpack
from eagle_fsd.model.config import FSDSettings
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.prefix_cache import Conversation
from eagle_fsd.model.verify import Origin
from eagle_fsd.utils.chat_templates import Chat, ChatFormat

STYLES = ("simple", "rich", "programmatic")
ORIGIN_STYLES = {Origin.EXACT: "green", Origin.FUZZY: "bold yellow"}
#: Ends a message of the programmatic style; FastChat's.
END_OF_MESSAGE = " __END_OF_A_MESSAGE_47582648__\n"


@dataclass
class ChatSession:
    """A pair, and what is kept between the turns of one chat with it.

    Attributes:
        notes: Where what is not the chat itself is printed.
        answer: The last one.
    """

    model: EagleFSD
    wording: ChatFormat
    options: AnswerOptions
    settings: FSDSettings
    show_origins: bool = False
    notes: Console = field(default_factory=lambda: Console(stderr=True, highlight=False))
    conversation: Conversation = field(default_factory=Conversation)
    answer: Answer | None = None

    def stream(
        self, prompt: str, stop: str | Sequence[str] | None, stop_token_ids: Sequence[int] | None
    ) -> Iterator[dict[str, Any]]:
        """What FastChat's loop shows: the text so far, and the pieces that are new in it.

        Args:
            prompt: A chat in transport, or one that another template of FastChat's has worded
                (that of a file of old). stop, stop_token_ids: That template's.
        """
        chat = unpack(prompt)
        stops = [stop] if isinstance(stop, str) else list(stop or ())
        ends = list(stop_token_ids or ())
        try:
            if chat is None:
                ids = self.model.tokenizer(prompt, return_tensors="pt").input_ids
            else:
                ids = self._fitting(chat)
                stops, ends = [*self.wording.stop], [*self.wording.stop_token_ids]
            self.answer = answer = Answer(
                self.model,
                ids,
                self.options,
                stops,
                ends,
                self.settings,
                conversation=self.conversation,
            )
        except ValueError as error:
            self.answer = None
            self.note(str(error))
            yield {"text": "", "pieces": [], "finish_reason": "stop"}
            return
        for pieces in answer:
            yield {
                "text": answer.text,
                "pieces": pieces,
                "usage": answer.usage(),
                "finish_reason": answer.finish_reason,
            }

    def _fitting(self, chat: Chat) -> Tensor:
        """Ids of as many of the last turns as the context has room for."""
        ids, dropped = fit_chat(self.model, self.wording, chat)
        if dropped:
            self.note(f"the chat outgrew the context: its {dropped} oldest messages are left out")
        return ids

    def set(self, name: str, value: str) -> str:
        """Change a setting of FSD's in mid-chat; what to tell the user of it."""
        name = name.replace("-", "_")
        try:
            if value:
                kind = next(
                    item.metadata["kind"] for item in fields(FSDSettings) if item.name == name
                )
                self.settings = self.settings.updated(**{name: kind(value)})
        except (ValueError, TypeError) as error:
            return str(error)
        return f"{name} is {getattr(self.settings, name)}"

    def note(self, text: str) -> None:
        self.notes.print(text, style="dim", markup=False, soft_wrap=True)

    def tell_figures(self) -> None:
        """One dim line on how the last answer was decoded."""
        if self.answer is None or not self.answer.new_tokens:
            return
        figures, count = self.answer.figures(), self.answer.new_tokens
        self.note(
            f"{figures['tokens_per_second']:.1f} tokens/s, tau {figures['tau']:.2f},"
            f" {figures['fuzzy_tokens'] / count:.0%} fuzzy of {count} tokens,"
            f" threshold {self.settings.threshold:g}"
        )


FASTCHATS_COMMANDS = ("!!exit", "!!reset", "!!remove", "!!regen", "!!save", "!!load")
#: Commands that set what FSD has settings for, in mid-chat: named as the options are.
COMMANDS = {
    "!!tree-top-k" if item.name == "top_k" else "!!" + item.name.replace("_", "-"): item.name
    for item in fields(FSDSettings)
}


class _Asking:
    """What our displays have in common: commands of our own, and names in place of marks."""

    session: ChatSession

    def prompt_for_input(self, role: str) -> str:
        while True:
            try:
                said = clean(super().prompt_for_input(display(role)))  # type: ignore[misc]
            except KeyboardInterrupt:  # it may have been meant for an answer that just ended
                self.session.note("\n!!exit or Ctrl-D ends the chat")
                continue
            if said.startswith("!!"):  # FastChat's own know no spaces behind them
                said = said.rstrip()
            command, _, value = said.strip().partition(" ")
            if name := COMMANDS.get(command.replace("_", "-")):
                self.session.note(self.session.set(name, value.strip()))
            elif said.startswith("!!") and command not in FASTCHATS_COMMANDS:
                self.session.note(f"there is no {command} (eagle-fsd chat --help tells them all)")
            elif refused := _refusal(said):
                self.session.note(refused)
            else:
                return said

    def prompt_for_output(self, role: str) -> None:
        super().prompt_for_output(harmless(display(role)))  # type: ignore[misc]


class SimpleDisplay(_Asking, fastchat_cli.SimpleChatIO):
    """FastChat's simple style; tokens appear as they are accepted."""

    def __init__(self, session: ChatSession, multiline: bool) -> None:
        super().__init__(multiline)
        self.session, self.out = session, Console(highlight=False)

    def stream_output(self, output_stream: Iterable[dict[str, Any]]) -> str:
        text = ""
        for output in output_stream:
            shown = _coloured(output["pieces"], self.session.show_origins)
            self.out.print(shown, end="", soft_wrap=True)
            text = output["text"]
        self.out.print()
        self.session.tell_figures()
        return text

    def print_output(self, text: str) -> None:
        super().print_output(harmless(text))


class RichDisplay(_Asking, fastchat_cli.RichChatIO):
    """FastChat's rich style; with origins shown, coloured text in the place of its Markdown."""

    def __init__(self, session: ChatSession, multiline: bool, mouse: bool) -> None:
        super().__init__(multiline, mouse)
        self.session = session
        self._completer.words += list(COMMANDS)

    def stream_output(self, output_stream: Iterable[dict[str, Any]]) -> str:
        if not self.session.show_origins:
            text = ""

            def watched() -> Iterator[dict[str, Any]]:
                nonlocal text
                for output in output_stream:
                    text = output["text"]
                    yield {**output, "text": harmless(text)}

            super().stream_output(watched())
        else:
            text, shown = "", Text()
            with Live(shown, console=self._console, refresh_per_second=12) as live:
                for output in output_stream:
                    text = output["text"]
                    shown.append_text(_coloured(output.get("pieces", ()), True))
                    live.refresh()
            self._console.print()
        self.session.tell_figures()
        return text

    def print_output(self, text: str) -> None:
        fastchat_cli.RichChatIO.stream_output(self, [{"text": harmless(text)}])


class _UntilEnd(fastchat_cli.ProgrammaticChatIO):
    """FastChat's style for programs; at the end of input it ends, where FastChat's own spins."""

    def prompt_for_input(self, role: str) -> str:
        said = ""
        while not said.endswith(END_OF_MESSAGE):
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            said += line
        said = said.removesuffix(END_OF_MESSAGE)
        sys.stdout.write(f"[!OP:{role}]: {said}\n")
        sys.stdout.flush()
        return said


class ProgrammaticDisplay(_Asking, _UntilEnd):
    """The style for programs, with our commands; what is not the chat goes to standard error."""

    def __init__(self, session: ChatSession) -> None:
        super().__init__()
        self.session = session

    def stream_output(self, output_stream: Iterable[dict[str, Any]]) -> str:
        text = super().stream_output(output_stream)
        self.session.tell_figures()
        return text


def chat(
    session: ChatSession,
    style: str = "simple",
    system: str | None = None,
    history: bool = True,
    multiline: bool = False,
    mouse: bool = False,
) -> None:
    """Run FastChat's chat loop until the user leaves it.

    Args:
        style: One of :data:`STYLES`.
        system: What the system says first.
        history: Whether the model is shown earlier turns.
        multiline, mouse: As FastChat's terminal has them.
    """
    register()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # of any encoding: what it lacks is no error
            stream.reconfigure(errors="replace")
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            # A line may be edited, and pasted lines are one; without, the system cuts it at 4095.
            import readline  # noqa: F401
    display_of = {
        "simple": lambda: SimpleDisplay(session, multiline),
        "rich": lambda: RichDisplay(session, multiline, mouse),
        "programmatic": lambda: ProgrammaticDisplay(session),
    }

    def stream(_model: Any, _tokenizer: Any, params: dict[str, Any], *_: Any, **__: Any) -> Any:
        return session.stream(params["prompt"], params.get("stop"), params.get("stop_token_ids"))

    # FastChat reads a context length from a configuration, but not from one of transformers 5.
    config = SimpleNamespace(max_position_embeddings=session.model.target.context)
    loaded = SimpleNamespace(config=config), session.model.tokenizer
    # FastChat's loop looks these up when it begins: so it gets a loaded pair, and our decoding.
    with (
        patch.object(inference, "load_model", lambda *_, **__: loaded),
        patch.object(inference, "get_generate_stream_function", lambda *_: stream),
        contextlib.suppress(KeyboardInterrupt),
    ):
        inference.chat_loop(
            NAME,
            "cpu",
            num_gpus=1,
            max_gpu_memory=None,
            dtype=None,
            load_8bit=False,
            cpu_offloading=False,
            conv_template=NAME,
            conv_system_msg=system,
            temperature=session.options.temperature,
            repetition_penalty=session.options.repetition_penalty,
            max_new_tokens=session.options.max_new_tokens,
            chatio=display_of[style](),
            judge_sent_end=False,
            debug=False,
            history=history,
        )


def _coloured(pieces: Sequence[Piece], origins: bool) -> Text:
    text = Text()
    for piece in pieces:
        text.append(
            harmless(piece.text), style=ORIGIN_STYLES.get(piece.origin, "") if origins else ""
        )
    return text


def _refusal(said: str) -> str | None:
    """Why FastChat's loop would break on a ``!!load`` or ``!!save``; None: it will not."""
    command, _, name = said.strip().partition(" ")
    name = name.strip()
    if command == "!!save" and name:
        path = Path(name)
        file = Path(name + ".json") if "." not in name else path  # as FastChat does
        if path.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            return f"{name} is no place for a file"
    if command == "!!load" and name:
        path = next((item for item in (Path(name), Path(name + ".json")) if item.exists()), None)
        if path is None:
            return None  # FastChat says so itself
        if not path.is_file():
            return f"{path} is no file"
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            get_conv_template(saved["template_name"])
            texts = [
                saved["system_message"],
                *(item for turn in saved["messages"] for item in turn),
            ]
            if not all(isinstance(item, str) for item in texts):
                raise TypeError("a turn is a role and a text")
            [(role, text) for role, text in saved["messages"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{path} holds no saved chat ({type(error).__name__})"
    return None
