"""Options that several commands share, and commands that take theirs from a dataclass."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from eagle_fsd.model.config import FSDSettings, read_settings
from eagle_fsd.utils.options import Options

Target = Annotated[
    str | None, typer.Option(help="Target: a folder or Hub name.", show_default="the bundled one")
]
Head = Annotated[
    str | None,
    typer.Option(help="Draft head: a folder or Hub name.", show_default="the bundled one"),
]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16.", show_default="float32 on the CPU"),
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:1, auto.", show_default="the GPU if there is one"),
]
Template = Annotated[
    str | None,
    typer.Option(
        "--conv-template",
        help="A FastChat template (vicuna_v1.1, llama-2, ...).",
        show_default="the tokenizer's own",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]

#: Where a setting's option is not its name: plain --top-k is sampling's, as in Hugging Face.
SETTING_NAMES = {"top_k": "--tree-top-k"}


@dataclass(frozen=True)
class OptionsFile:
    """A file of options: the option that names it, its help, and who reads it, checked."""

    option: str
    help: str
    read: Callable[[Path], dict[str, Any]]


def with_options(
    options: type[Options],
    parameter: str,
    file: OptionsFile | None = None,
    leave_out: Collection[str] = (),
    names: dict[str, str] | None = None,
    show_defaults: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command an option for every field of a dataclass of options.

    The command's ``parameter`` receives the values that were given, the file's and above them the
    command line's, as a dictionary, checked.

    Args:
        file: An option for a file of such values.
        leave_out: Fields that the command sets itself.
        names: Options by field, where they are not the field's name.
        show_defaults: Whether the fields' defaults are what holds where nothing is given.
    """
    items = [item for item in fields(options) if item.name not in leave_out]
    # Several of these may stand on one command: each keeps to itself.
    own_name, file_name = f"{parameter}_" + "{}", f"{parameter}_options_file"

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def wrapper(**values: Any) -> Any:
            given = {item.name: values.pop(own_name.format(item.name)) for item in items}
            path = values.pop(file_name, None)
            merged = file.read(path) if file and path else {}
            merged.update({name: value for name, value in given.items() if value is not None})
            try:
                options.from_dict(merged)
            except (ValueError, TypeError) as error:
                raise typer.BadParameter(str(error)) from error
            return command(**{parameter: merged}, **values)

        signature = inspect.signature(command, eval_str=True)
        own = [p for name, p in signature.parameters.items() if name != parameter]
        added = []
        for item in items:
            option = (names or {}).get(item.name, "--" + item.name.replace("_", "-"))
            annotation = _field_option(item, option, show_defaults)
            added.append(_parameter(own_name.format(item.name), annotation))
        if file is not None:
            info = typer.Option(file.option, help=file.help)
            added.append(_parameter(file_name, Annotated[Path | None, info]))
        wrapper.__signature__ = inspect.Signature(own + added)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in own + added}
        return wrapper

    return decorate


def with_settings(leave_out: Collection[str] = ()) -> Callable[..., Any]:
    """:func:`with_options` for FSD's settings, in the command's parameter ``settings``."""
    return with_options(
        FSDSettings,
        "settings",
        OptionsFile("--settings", "An fsd.json with settings.", read_settings),
        leave_out,
        names=SETTING_NAMES,
        # What holds by default depends on the head's fsd.json and on the device.
        show_defaults=False,
    )


def with_group(group: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command an option for every annotated field of a dataclass, in its first parameter."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def collected(**values: Any) -> Any:
            return command(group(**{name: values.pop(name) for name in common}), **values)

        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        common = inspect.signature(group, eval_str=True).parameters
        collected.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p.replace(kind=p.KEYWORD_ONLY) for p in (*common.values(), *own)]
        )
        del collected.__wrapped__
        return collected

    return decorate


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def _field_option(item: Field[Any], option: str, show_default: bool) -> Any:
    kind, text = item.metadata["kind"], item.metadata["help"]
    limits: dict[str, Any] = {}
    if kind is bool:
        option += "/--no-" + option.removeprefix("--")
    elif "choices" in item.metadata:
        text += f" ({', '.join(item.metadata['choices'])})"
    else:
        limits["min"] = item.metadata["low"]
        if item.metadata["high"] != math.inf:
            limits["max"] = item.metadata["high"]
    if show_default and item.default is not None:
        limits["show_default"] = str(item.default)
    info = typer.Option(option, help=text[0].upper() + text[1:] + ".", **limits)
    return Annotated[kind | None, info]


@dataclass(frozen=True)
class Pair:
    """A pair as its options name it, and the wording of its chats; the fields are the options."""

    target: Target = None
    head: Head = None
    dtype: Dtype = None
    device: Device = None
    template: Template = None

    def load(self, settings: dict[str, Any]) -> tuple[Any, Any]:
        """The model, with ``settings`` above its own, and its format of chats."""
        from eagle_fsd.utils.chat_templates import chat_format

        model = load_pair(self.target, self.head, self.dtype, self.device, settings)
        return model, chat_format(model.tokenizer, self.template)


def load_pair(
    target: str | None,
    head: str | None,
    dtype: str | None,
    device: str | None,
    settings: dict[str, Any],
) -> Any:
    """The model that the options name, with ``settings`` above its own."""
    from eagle_fsd.model.pipeline import EagleFSD

    model = EagleFSD.from_pretrained(target, head, dtype=dtype, device_map=device)
    model.settings = model.settings.updated(**settings)
    return model
