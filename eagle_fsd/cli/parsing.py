"""Commands whose options are the fields of :class:`~eagle_fsd.utils.options.Options` models.

cyclopts parses the command line, and pydantic validates the values. This module adds option names
that differ from the field's name, bounds in the help, and one-line error messages.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, get_args

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.argument import Argument, ArgumentCollection
from cyclopts.exceptions import MissingArgumentError, UnusedCliTokensError, ValidationError
from pydantic import ValidationError as PydanticError

from eagle_fsd.utils.options import Options, describe_bounds, describe_field, validation_message
from eagle_fsd.utils.text import one_line

#: Names of options that differ from the field's name, by ``field`` or ``Model.field``.
SPELLINGS: dict[str, tuple[str, ...]] = {
    "TreeConfig.top_k": ("--tree-top-k",),  # --top-k is sampling's, as in Hugging Face
    "binary": ("--bin",),
    "chat_template": ("--conv-template",),
    "device": ("--device", "--device-map"),
    "device_map": ("--device-map", "--device"),
    "drafter": ("--drafter", "--head"),
    "head": ("--head", "--drafter"),
    "divergences": ("--divergence", "-d"),
    "min_ratios": ("--min-ratio", "-r"),
    "names": ("--name",),
    "servers": ("--server",),
    "thresholds": ("--thresholds", "-T"),
}

#: Names that switch options off.
NEGATIVES = {"browser": "--no-browser", "capture": "--no-capture", "compile": "--no-compile"}

#: Headings of groups of options, in the order of the help.
HEADINGS = (
    *("Training", "Features", "Chats", "Export", "Server", "Evaluation", "Servers"),
    *("Loss of quality", "Selection", "Grid", "Model", "Draft tree", "Acceptance", "Answers"),
    *("Sampling", "Decoding", "Hyperparameters", "Limits"),
)


class Command(App):
    """A command, or a group of commands, whose options are the fields of models."""

    def add(self, *commands: App | Callable[..., None]) -> None:
        """Add commands; the help lists them in the order in which they are added."""
        for command in commands:
            if isinstance(command, App):
                self.command(command)
            else:
                self.command(command, help=_description(command))
        for order, name in enumerate(self):
            if not name.startswith("-"):
                self[name].sort_key = order

    def assemble_argument_collection(
        self, *, default_parameter: Parameter | None = None, parse_docstring: bool = False
    ) -> ArgumentCollection:
        """Apply :data:`SPELLINGS` and :data:`NEGATIVES`, and add the bounds to the descriptions.

        Docstrings are not parsed: fields and parameters have descriptions.
        """
        arguments = super().assemble_argument_collection(default_parameter=default_parameter)
        for model, field, argument in _fields(arguments):
            names = SPELLINGS.get(f"{model.__name__}.{field}") or SPELLINGS.get(field)
            changes: dict[str, Any] = {"name": names} if names else {}
            if field in NEGATIVES:
                changes["negative"] = NEGATIVES[field]
            if describe_bounds(model.model_fields[field]):
                changes["help"] = _with_bounds(argument.parameter.help or "", model, field)
            argument.parameter = Parameter.combine(argument.parameter, Parameter(**changes))
        return arguments


def root_command(name: str, help: str, version: str) -> Command:
    """Create the root command, which raises errors instead of printing them."""
    return Command(
        name,
        help=help,
        version=version,
        help_format="plaintext",
        group_parameters=Group("Options", sort_key=-1),
        default_parameter=Parameter(
            allow_repeating=True,  # the last value overrides the others
            consume_multiple=(1, None),
            negative_bool="",
            negative_iterable="",
            show_default=_format_default,
        ),
        print_error=False,
        exit_on_error=False,
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )


def options(
    heading: str, help: str = "", *, exclude: Collection[str] = (), **settings: Any
) -> Parameter:
    """Declare that the fields of a model are options of a command.

    Use it as ``tree: Annotated[TreeConfig, options("Draft tree")]``, with one of :data:`HEADINGS`.
    Fields in ``exclude`` are not options of this command, ``settings`` are arguments of
    ``cyclopts.Parameter``.
    """
    if exclude:
        settings["parse"] = re.compile(rf"^(?!({'|'.join(exclude)})$)")
    group = Group(heading, help, sort_key=HEADINGS.index(heading))
    return Parameter(name="*", group=group, **settings)


def usage_message(error: Exception) -> str:
    """Return a one-line message for an invalid command line or option."""
    if isinstance(error, ValidationError) and isinstance(error.__cause__, PydanticError):
        return _validation_message(error.__cause__, error.argument)
    if isinstance(error, MissingArgumentError):
        assert error.argument is not None
        missing = f"{error.argument.name} is missing"
        return f"{error.keyword} needs a value" if error.keyword else missing
    if isinstance(error, UnusedCliTokensError):
        return f"unexpected argument {' '.join(error.unused_tokens or ())}"
    if isinstance(error, CycloptsError):
        message = one_line(error).partition(" Available commands:")[0].rstrip(".")
        return message[:1].lower() + message[1:]
    return one_line(error)


def _description(command: Callable[..., None]) -> str:
    """Return the docstring with one line per paragraph, for the help to wrap."""
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")
    return "\n\n".join(map(one_line, paragraphs))


def _model(argument: Argument | None) -> type[Options] | None:
    """Return the model that an argument is converted to, if any."""
    hint = argument.hint if argument is not None else None
    kinds = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, Options)), None)


def _fields(arguments: ArgumentCollection) -> Iterator[tuple[type[Options], str, Argument]]:
    """Yield (model, field name, argument) for every argument that is a field of a model."""
    for parent in arguments:
        model = _model(parent)
        if model is not None:
            for argument in parent.children:
                if argument.parse:
                    yield model, argument.keys[-1], argument


def _with_bounds(text: str, model: type[Options], field: str) -> str:
    """Append the bounds of a field to its description, as a sentence."""
    bounds = describe_field(model, field)
    return f"{text} {bounds[:1].upper()}{bounds[1:]}."


def _format_default(value: Any) -> str | None:
    """Format a default for the help; None if there is no default to show."""
    if value is None or value is False or value in ((), ""):
        return None
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _validation_message(error: PydanticError, parent: Argument | None) -> str:
    """Return :func:`validation_message` with option and value as the user typed them."""
    message = validation_message(error, _model(parent))
    problem = error.errors()[0]
    name = str(problem["loc"][0]) if problem["loc"] else ""
    if parent is not None and name and message.startswith(name):
        option = next(item.name for item in parent.children if item.keys[-1] == name)
        message = re.sub(rf"^{name}(\.\d+)?", option, message)
    return one_line(message.replace(f"got {problem['input']!r}", f"got {problem['input']}"))
