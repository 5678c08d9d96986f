"""Options declared once: a dataclass whose fields carry their bounds and their help.

Python arguments, command-line options and files all derive from such a class, so a name, a default
and a bound stand in one place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any, TypeVar

Self = TypeVar("Self", bound="Options")


def number(default: float | None, low: float, high: float, text: str, whole: bool = False) -> Any:
    """A bounded number; whole where ``default`` is, or where ``whole`` says so.

    ``default=None`` makes None, "decided at run time", an allowed value.
    """
    kind = int if whole or isinstance(default, int) else float
    metadata = {"kind": kind, "low": low, "high": high, "help": text}
    return field(default=default, metadata=metadata)


def choice(default: str, choices: tuple[str, ...], text: str) -> Any:
    """One of a few names."""
    return field(default=default, metadata={"kind": str, "choices": choices, "help": text})


def flag(default: bool, text: str) -> Any:
    """On or off."""
    return field(default=default, metadata={"kind": bool, "help": text})


@dataclass(frozen=True)
class Options:
    """Base of the classes whose fields :func:`number`, :func:`choice` and :func:`flag` declare.

    Raises:
        ValueError: A value is out of its bounds; the message names the field and the bounds.
        TypeError: A value is of another type, or a field does not exist.
    """

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, _checked(item, getattr(self, item.name)))

    def updated(self: Self, **changes: Any) -> Self:
        """A copy with the given fields changed; ``None`` leaves a field as it is."""
        changes = {name: value for name, value in changes.items() if value is not None}
        return type(self).from_dict({**asdict(self), **changes})

    @classmethod
    def from_dict(cls: type[Self], values: Mapping[str, Any]) -> Self:
        unknown = sorted(map(str, set(values) - {item.name for item in fields(cls)}))
        if unknown:
            known = ", ".join(item.name for item in fields(cls))
            raise TypeError(f"unknown setting {', '.join(unknown)}; the settings are {known}")
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _checked(item: Field[Any], value: Any) -> Any:
    """``value`` as the field's type, or an error that states the bounds."""
    kind = item.metadata["kind"]
    if value is None and item.default is None:
        return None
    if kind is bool:
        if not isinstance(value, bool):
            raise TypeError(f"{item.name} must be true or false; got {value!r}")
        return value
    if kind is str:
        if value not in item.metadata["choices"]:
            choices = ", ".join(item.metadata["choices"])
            raise ValueError(f"{item.name} must be one of {choices}; got {value!r}")
        return value
    low, high = item.metadata["low"], item.metadata["high"]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{item.name} must be a number; got {value!r}")
    if not low <= value <= high:  # also refuses NaN
        bounds = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise ValueError(f"{item.name} must be {bounds}; got {value!r}")
    if kind is int and value != int(value):
        raise ValueError(f"{item.name} must be a whole number; got {value!r}")
    try:
        return kind(value)
    except OverflowError:
        raise ValueError(f"{item.name} is too large a number") from None
