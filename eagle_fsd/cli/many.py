"""Options that take several values at once: ``--thresholds 0 0.1 0.2``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typer.core import TyperCommand


def is_number(text: str) -> bool:
    """Whether ``text`` reads as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def many_values(options: Mapping[str, Callable[[str], bool]]) -> type[TyperCommand]:
    """A command whose ``options`` may be followed by several values.

    Such an option can be repeated anyway; here every further value that its test takes counts as
    one more of it, so that a question set's name after the values is still an argument.
    """

    class ManyValues(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            return super().parse_args(ctx, spread(args, options))

    return ManyValues


def spread(args: Sequence[str], options: Mapping[str, Callable[[str], bool]]) -> list[str]:
    """``["-T", "0", "0.1"]`` becomes ``["-T", "0", "-T", "0.1"]``."""
    found: list[str] = []
    current, waiting = "", False  # the option that values go to; whether it has none yet
    for arg in args:
        name, equals, value = arg.partition("=")
        if name in options:
            found += [current] * waiting + [name, value] * bool(equals)
            current, waiting = name, not equals
        elif waiting or (current and options[current](arg)):
            # The first value is taken whatever it is: the parser says what is wrong with it.
            found += [current, arg]
            waiting = False
        else:
            current = ""
            found.append(arg)
    return found + [current] * waiting
