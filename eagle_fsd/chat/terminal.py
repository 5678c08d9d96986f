"""Terminal chat: FastChat's loop and commands, decoding with FSD.

Start with :func:`run_chat`, which runs FastChat's loop on a :class:`ChatSession`, or on a
:class:`ServerSession` with an OpenAI-compatible server. The display classes extend FastChat's
styles with colored tokens, statistics, and commands that set decoding options.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

from fastchat.conversation import get_conv_template
from fastchat.serve import cli as fastchat_cli
from fastchat.serve import inference
from pydantic import ValidationError
from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import Tensor

from eagle_fsd.chat.config import AnswerOptions, RequestOptions
from eagle_fsd.chat.session import AnswerRequest, ChatAnswer, fit_chat
from eagle_fsd.chat.text import Piece
from eagle_fsd.chat.wire_format import TEMPLATE_NAME, decode_chat, register_template, strip_markers
from eagle_fsd.model.config import AcceptanceConfig, TreeConfig
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.model.prefix_cache import PrefixCache
from eagle_fsd.model.verify import Origin
from eagle_fsd.utils.chat_api import ChatClient
from eagle_fsd.utils.chat_templates import Chat, ChatTemplate
from eagle_fsd.utils.options import Options, OptionsError, validation_message
from eagle_fsd.utils.terminal import ORIGIN_STYLES, origin_legend
from eagle_fsd.utils.text import escape_control_chars, one_line

STYLES = ("simple", "rich", "programmatic")
#: End of a message in FastChat's programmatic style.
END_OF_MESSAGE = " __END_OF_A_MESSAGE_47582648__\n"
FILE_COMMANDS = ("!!save", "!!load")
FASTCHAT_COMMANDS = ("!!exit", "!!reset", "!!remove", "!!regen", *FILE_COMMANDS)


def _command(option: str) -> str:
    return "!!" + option.replace("_", "-")


#: For each command, the attribute of the session or the pair that holds its option, and the
#: option's name. ``!!tree-top-k`` sets the tree's ``top_k``.
COMMANDS = (
    {_command(name): ("options", name) for name in AnswerOptions.model_fields}
    | {_command(name): ("acceptance", name) for name in AcceptanceConfig.model_fields}
    | {
        _command("tree_top_k" if name == "top_k" else name): ("tree", name)
        for name in TreeConfig.model_fields
    }
)
HELP = """\
!!exit, an empty message, Ctrl-D  end the chat
!!reset                           start a new chat
!!remove                          remove the last question and answer
!!regen                           generate the last answer again
!!save FILE, !!load FILE          save or load the chat
!!temperature 0.7                 set an option; without a value, show it
Ctrl-C                            stop the answer and keep its text so far
Options: """


@dataclass(kw_only=True)
class TerminalSession(ABC):
    """The model or server of a terminal chat, and the options that commands change."""

    options: AnswerOptions
    name: str = "the model"
    show_origins: bool = False
    notes: Console = field(default_factory=lambda: Console(stderr=True, highlight=False))

    @property
    @abstractmethod
    def label(self) -> str:
        """Description of the model in the opening line: its acceptance options, or its server."""

    @property
    def owners(self) -> dict[str, Any]:
        """The objects whose options :data:`COMMANDS` set, by the attribute that holds these."""
        return {"options": self}

    @property
    def option_names(self) -> list[str]:
        """The options that commands set."""
        owned = (name for name, (part, _) in COMMANDS.items() if part in self.owners)
        return [name.removeprefix("!!") for name in owned]

    @abstractmethod
    def stream(
        self, prompt: str, stop: str | Sequence[str] | None, stop_token_ids: Sequence[int] | None
    ) -> Iterator[dict[str, Any]]:
        """Yield FastChat's outputs of an answer, with the new pieces as ``pieces``.

        The prompt is an encoded chat (:mod:`~eagle_fsd.chat.wire_format`), or formatted by another
        FastChat template that a loaded file names, which has the stop strings and tokens.
        """

    @abstractmethod
    def print_stats(self) -> None:
        """Print one line about how the last answer was decoded."""

    def set_option(self, command: str, value: str) -> str | None:
        """Set an option by a command such as ``!!min-ratio``, or show it if the value is empty.

        Returns the message to print; None if there is no such command.
        """
        command = command.replace("_", "-")
        part, name = COMMANDS.get(command, ("", ""))
        owner = self.owners.get(part)
        if owner is None:
            return None
        config: Options = (
            owner.tree_for(owner.acceptance) if part == "tree" else getattr(owner, part)
        )
        if value:
            try:
                given = type(config).model_validate({name: value})
                config = config.updated(**{name: getattr(given, name)})
            except ValidationError as error:
                return validation_message(error, type(config))
            except OptionsError as error:
                return str(error)
            setattr(owner, part, config)
        return f"{command.removeprefix('!!')} is {getattr(config, name)}"

    def note(self, text: str | Text) -> None:
        """Print text that is not part of the chat."""
        text = text if isinstance(text, Text) else Text(escape_control_chars(text))
        self.notes.print(text, style="dim", soft_wrap=True)

    def print_opening(self) -> None:
        """Print one line: the model or server, the commands, and the colors of a pair's tokens."""
        decodes = "acceptance" in self.owners
        example = "!!threshold" if decodes else "!!temperature"
        commands = " ".join(("!!help", example, *FASTCHAT_COMMANDS))
        name = escape_control_chars(self.name)
        opening = Text(f"{name}, {self.label}. Commands: {commands}.")
        if self.show_origins:
            opening.append(" Colors: ").append_text(origin_legend())
        elif decodes:
            opening.append(" Colors: off (--show-origins)")
        self.note(opening)


@dataclass
class ChatSession(TerminalSession):
    """A pair, whose options commands change, and the state of one chat with it."""

    model: EagleFSD
    chat_template: ChatTemplate
    prefix_cache: PrefixCache = field(default_factory=PrefixCache)
    answer: ChatAnswer | None = None

    @property
    def label(self) -> str:
        return self.model.acceptance.label

    @property
    def owners(self) -> dict[str, Any]:
        return {"options": self, "acceptance": self.model, "tree": self.model}

    def stream(
        self, prompt: str, stop: str | Sequence[str] | None, stop_token_ids: Sequence[int] | None
    ) -> Iterator[dict[str, Any]]:
        chat, self.answer = decode_chat(prompt), None
        stop = [stop] if isinstance(stop, str) else stop or ()
        try:
            if chat is None:
                ids = self.model.tokenizer(prompt, return_tensors="pt").input_ids
            else:
                ids = self._fit(chat)
                stop, stop_token_ids = self.chat_template.stop, self.chat_template.stop_token_ids
            options = RequestOptions(
                **self.options.model_dump(), stop=stop, stop_token_ids=stop_token_ids or ()
            )
            self.answer = answer = ChatAnswer(self.model, AnswerRequest(ids, options))
            for pieces in answer.stream(self.prefix_cache):
                yield {"text": answer.text, "pieces": pieces}
        except (ValueError, FloatingPointError, MemoryError) as error:
            self.note(one_line(error))
            text = "" if self.answer is None else self.answer.text
            self.answer = None
            yield {"text": text, "pieces": []}

    def _fit(self, chat: Chat) -> Tensor:
        ids, dropped = fit_chat(self.model, self.chat_template, chat)
        if dropped:
            self.note(f"the chat is too long; its {dropped} oldest messages are left out")
        return ids

    def print_stats(self) -> None:
        if self.answer is None or not self.answer.new_tokens:
            return
        stats, count = self.answer.stats(), self.answer.new_tokens
        self.note(
            f"{stats['tokens_per_second']:.1f} tokens/s, tau {stats['tau']:.2f},"
            f" {stats['fuzzy_tokens'] / count:.0%} fuzzy of {count} tokens,"
            f" {self.label}"
        )


@dataclass
class ServerSession(TerminalSession):
    """A chat with a model of an OpenAI-compatible server; the origins of tokens are not known."""

    client: ChatClient
    tokens: int = 0  # of the last answer, if the server counts them
    seconds: float = 0.0

    @property
    def label(self) -> str:
        return self.client.endpoint.redacted_url

    def stream(
        self, prompt: str, stop: str | Sequence[str] | None, stop_token_ids: Sequence[int] | None
    ) -> Iterator[dict[str, Any]]:
        chat, text, begin = decode_chat(prompt), "", time.perf_counter()
        self.tokens = 0
        try:
            if chat is None:
                raise ValueError(
                    "this chat was saved with another FastChat template, in which the server cannot"
                    " continue it"
                )
            for new, tokens in self.client.stream(chat, **self._parameters()):
                text, self.tokens = text + new, tokens
                piece = Piece(new, token=0, origin=Origin.TARGET)
                yield {"text": text, "pieces": [piece]}
        except ValueError as error:
            self.note(str(error))
        finally:  # also if Ctrl-C ends the answer
            self.seconds = time.perf_counter() - begin
        yield {"text": text, "pieces": []}

    def _parameters(self) -> dict[str, Any]:
        """Return a request's parameters; those beyond OpenAI's API unless they are the defaults."""
        common = {"temperature", "top_p", "seed", "presence_penalty", "frequency_penalty"}
        others = self.options.model_dump(exclude={*common, "max_new_tokens"}, exclude_defaults=True)
        parameters = self.options.model_dump(include=common, exclude_none=True)
        return {**parameters, "max_tokens": self.options.max_new_tokens, "extra_body": others}

    def print_stats(self) -> None:
        if self.tokens:
            self.note(f"{self.tokens / self.seconds:.1f} tokens/s, {self.tokens} tokens")


class _CommandInput:
    """Mixin for FastChat's styles: additional commands, and roles without markers.

    Styles override :meth:`show`, not ``stream_output``.
    """

    session: TerminalSession

    def stream_output(self, output_stream: Iterable[dict[str, Any]]) -> str:
        """Print an answer as it is generated; return its text, which Ctrl-C cuts short."""
        text = ""

        def followed() -> Iterator[dict[str, Any]]:
            nonlocal text
            for output in output_stream:
                text = output["text"]
                yield output

        try:
            self.show(followed())
        except KeyboardInterrupt:
            if isinstance(output_stream, Generator):
                output_stream.close()  # FastChat's loop keeps it, and with it a server's answer
            self.session.note("\nstopped")
        self.session.print_stats()
        return text

    def show(self, output_stream: Iterable[dict[str, Any]]) -> None:
        """Print an answer as it is generated."""
        super().stream_output(output_stream)  # type: ignore[misc]

    def prompt_for_input(self, role: str) -> str:
        """Read lines until one is for FastChat's loop, handling the additional commands."""
        while True:
            try:
                line = super().prompt_for_input(strip_markers(role))  # type: ignore[misc]
            except KeyboardInterrupt:  # possibly meant for an answer that has just ended
                self.session.note("\n!!exit or Ctrl-D ends the chat")
                continue
            line = strip_markers(line)
            if not line.lstrip().startswith("!!"):
                return line
            line = line.strip()  # FastChat does not recognize commands with surrounding spaces
            command, argument = [*line.split(maxsplit=1), ""][:2]
            message = self.session.set_option(command, argument)
            if command == "!!help":
                message = HELP + " ".join(self.session.option_names)
            elif message is None and command not in FASTCHAT_COMMANDS:
                message = f"unknown command {command} (see !!help)"
            elif message is None and argument and command not in FILE_COMMANDS:
                message = f"{command} takes no argument; got {argument}"
            if message is None:
                try:
                    message = _file_error(command, argument)
                except OSError as error:  # a folder that may not be searched, or a long name
                    message = f"cannot use {argument}: {error.strerror}"
            if message is None:
                return f"{command} {argument}".rstrip()  # FastChat keeps further spaces
            self.session.note(message)

    def prompt_for_output(self, role: str) -> None:
        """Print the role before a message."""
        role = escape_control_chars(strip_markers(role))
        super().prompt_for_output(role)  # type: ignore[misc]


class SimpleDisplay(_CommandInput, fastchat_cli.SimpleChatIO):
    """FastChat's simple style, which prints tokens as they are accepted."""

    def __init__(self, session: TerminalSession, multiline: bool) -> None:
        super().__init__(multiline)
        self.session, self.out = session, Console(highlight=False)

    def show(self, output_stream: Iterable[dict[str, Any]]) -> None:
        """Print an answer as it is generated."""
        for output in output_stream:
            styled = _styled(output["pieces"], self.session.show_origins)
            self.out.print(styled, end="", soft_wrap=True)
        self.out.print()

    def print_output(self, text: str) -> None:
        """Print an earlier message; see ``ChatIO``."""
        super().print_output(escape_control_chars(text))


class RichDisplay(_CommandInput, fastchat_cli.RichChatIO):
    """FastChat's rich style: Markdown, or colored text if origins are shown."""

    def __init__(self, session: TerminalSession, multiline: bool, mouse: bool) -> None:
        super().__init__(multiline, mouse)
        self.session = session
        self._completer.words += map(_command, session.option_names)

    def show(self, output_stream: Iterable[dict[str, Any]]) -> None:
        """Print an answer as it is generated."""
        if self.session.show_origins:
            styled = Text()
            with Live(styled, console=self._console, refresh_per_second=12) as live:
                for output in output_stream:
                    styled.append_text(_styled(output["pieces"], show_origins=True))
                    live.refresh()
            self._console.print()
        else:
            super().show(
                {**output, "text": escape_control_chars(output["text"])} for output in output_stream
            )

    def print_output(self, text: str) -> None:
        """Print an earlier message; see ``ChatIO``."""
        super().show([{"text": escape_control_chars(text)}])


class _ProgrammaticInput(fastchat_cli.ProgrammaticChatIO):
    """FastChat's programmatic style, but raising EOFError at the end of input.

    FastChat's own implementation loops forever there.
    """

    def prompt_for_input(self, role: str) -> str:
        """Read a message up to its end marker."""
        message = ""
        while not message.endswith(END_OF_MESSAGE):
            line = sys.stdin.readline()
            if not line:
                raise EOFError
            message += line
        message = message.removesuffix(END_OF_MESSAGE)
        sys.stdout.write(f"[!OP:{role}]: {message}\n")
        sys.stdout.flush()
        return message


class ProgrammaticDisplay(_CommandInput, _ProgrammaticInput):
    """FastChat's programmatic style; notes and statistics go to standard error."""

    def __init__(self, session: TerminalSession) -> None:
        super().__init__()
        self.session = session


def run_chat(
    session: TerminalSession,
    style: str = "simple",
    system: str | None = None,
    history: bool = True,
    multiline: bool = False,
    mouse: bool = False,
) -> None:
    """Run FastChat's chat loop until the user leaves it."""
    register_template()
    if isinstance(sys.stdin, io.TextIOWrapper):  # replace undecodable bytes
        sys.stdin.reconfigure(errors="replace")
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            # Enables line editing, and lines longer than the terminal's own limit.
            import readline

            readline.parse_and_bind("set enable-bracketed-paste on")  # a paste is one message

    def stream(_model: Any, _tokenizer: Any, params: dict[str, Any], *_: Any, **__: Any) -> Any:
        return session.stream(params["prompt"], params.get("stop"), params.get("stop_token_ids"))

    session.print_opening()
    # FastChat's loop reads a context length, which it passes to `stream`.
    loaded = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=0)), None
    names = {
        "load_model": lambda *_, **__: loaded,
        "get_generate_stream_function": lambda *_: stream,
    }
    # The same loop with these two functions among its globals; FastChat's module is not changed.
    original = inference.chat_loop
    chat_loop = FunctionType(
        original.__code__, {**vars(inference), **names}, argdefs=original.__defaults__
    )
    with contextlib.suppress(KeyboardInterrupt):
        chat_loop(
            TEMPLATE_NAME,
            "cpu",
            num_gpus=1,
            max_gpu_memory=None,
            dtype=None,
            load_8bit=False,
            cpu_offloading=False,
            conv_template=TEMPLATE_NAME,
            conv_system_msg=system,
            temperature=session.options.temperature,
            repetition_penalty=session.options.repetition_penalty,
            max_new_tokens=session.options.max_new_tokens,
            chatio=_display(session, style, multiline, mouse),
            judge_sent_end=False,
            debug=False,
            history=history,
        )


def _display(session: TerminalSession, style: str, multiline: bool, mouse: bool) -> Any:
    if style == "simple":
        return SimpleDisplay(session, multiline)
    if style == "rich":
        return RichDisplay(session, multiline, mouse)
    if style == "programmatic":
        return ProgrammaticDisplay(session)
    raise ValueError(f"style must be one of {', '.join(STYLES)}; got {style!r}")


def _styled(pieces: Sequence[Piece], show_origins: bool) -> Text:
    text = Text()
    for piece in pieces:
        style = ORIGIN_STYLES[piece.origin.name.lower()] if show_origins else ""
        text.append(escape_control_chars(piece.text), style)
    return text


def _file_error(command: str, name: str) -> str | None:
    """Return why FastChat's loop would crash on ``!!save`` or ``!!load``; None if it would not."""
    if command == "!!save" and name:
        file = Path(name if "." in name else name + ".json")  # as FastChat names it
        target = file if file.exists() else file.parent
        if name.endswith("/") or file.is_dir() or not os.access(target, os.W_OK):
            return f"cannot write to {name}"
    if command == "!!load" and name:
        candidates = (Path(name), Path(name + ".json"))
        path = next((item for item in candidates if item.exists()), candidates[0])
        if not path.exists():
            return None  # FastChat reports it
        if not path.is_file():
            return f"{path} is not a file"
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            get_conv_template(saved["template_name"])
            strings = [saved["system_message"]]
            if not isinstance(saved["messages"], list):
                raise TypeError("messages must be a list")
            for role, text in saved["messages"]:
                strings += [role, text]
            if not all(isinstance(item, str) for item in strings):
                raise TypeError("messages must be strings")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            return f"{path} does not contain a saved chat ({type(error).__name__})"
    return None
