"""Base class of every set of options.

An option is declared once, as a field of an :class:`Options` model with its default, its bounds
and a description. Python arguments, command-line options, request bodies and files derive from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidationInfo
from pydantic.fields import FieldInfo

from eagle_fsd.utils.text import one_line

Self = TypeVar("Self", bound="Options")


class OptionsError(ValueError):
    """An option is unknown, of the wrong type, or out of its bounds; the message is one line."""


def _check_exists(path: Path, info: ValidationInfo) -> Path:
    if not path.exists():
        raise ValueError(f"{info.field_name} must be an existing path; got {path}")
    return path


def _check_file(path: Path, info: ValidationInfo) -> Path:
    if not path.exists() or path.is_dir():  # a pipe is a file, too
        raise ValueError(f"{info.field_name} must be an existing file; got {path}")
    return path


ExistingPath = Annotated[Path, AfterValidator(_check_exists)]
ExistingFile = Annotated[Path, AfterValidator(_check_file)]


class Options(BaseModel):
    """Immutable options; unknown names are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @classmethod
    def from_dict(cls: type[Self], values: Mapping[str, Any]) -> Self:
        """Validate options from a file or a request body, without converting types.

        Args:
            values: Options by name; NumPy scalars and tensors without dimensions count as numbers.
                Missing options keep their defaults.

        Raises:
            OptionsError: A name is unknown, or a value has the wrong type or is out of bounds.
        """
        try:
            plain = {name: _unwrapped(value) for name, value in values.items()}
            return cls.model_validate(plain, strict=True)
        except ValidationError as error:
            raise OptionsError(validation_message(error, cls)) from error

    def updated(self: Self, **changes: Any) -> Self:
        """Return a copy with some options changed.

        Args:
            **changes: New values by name. ``None`` leaves an option unchanged.

        Raises:
            OptionsError: A name is unknown, or a value has the wrong type or is out of bounds.
        """
        given = {name: value for name, value in changes.items() if value is not None}
        return self.from_dict({**self.model_dump(), **given})


def describe_field(options: type[BaseModel], name: str) -> str:
    """Describe the values that an option accepts, as in ``"an integer in [1, 32]"``."""
    field = options.model_fields[name]
    kind = _without_none(field.annotation)
    if _is_union(kind):  # of booleans and names
        choices = [str(choice) for item in get_args(kind) for choice in get_args(item)]
        return f"true, false or {' or '.join(choices)}"
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if kind is bool:
        return "true or false"
    if kind is int or kind is float:
        finite = any(getattr(item, "allow_inf_nan", None) is False for item in field.metadata)
        noun = "an integer" if kind is int else "a finite number" if finite else "a number"
        return f"{noun} {describe_bounds(field)}".rstrip()
    if kind is str:
        return "a string"
    return f"a valid {getattr(kind, '__name__', kind)}"


def field_bounds(field: FieldInfo) -> dict[str, Any]:
    """Return the bounds of a numeric field by their names: ge, gt, le, lt."""
    names = ("ge", "gt", "le", "lt")
    return {
        key: getattr(item, key) for item in field.metadata for key in names if hasattr(item, key)
    }


def describe_bounds(field: FieldInfo) -> str:
    """Describe a numeric field's bounds, as in ``"in [0, 1]"``; empty without bounds."""
    bounds = {name: _digits(value) for name, value in field_bounds(field).items()}
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if low and high:
        opening, closing = "[" if "ge" in bounds else "(", "]" if "le" in bounds else ")"
        return f"in {opening}{low}, {high}{closing}"
    words = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below"}
    return "".join(f"{words[name]} {value}" for name, value in bounds.items())


def validation_message(error: ValidationError, options: type[BaseModel] | None = None) -> str:
    """Summarize a pydantic error's first problem in one line: option, what it accepts, and value.

    The bounds are described if the model ``options`` that was validated is given.
    """
    problem = error.errors()[0]
    path = ".".join(map(str, problem["loc"]))
    name = str(problem["loc"][0]) if problem["loc"] else ""
    if problem["type"] == "extra_forbidden":
        known = f"; the options are {', '.join(options.model_fields)}" if options else ""
        return one_line(f"unknown option {path}{known}")
    if problem["type"] == "value_error":
        return one_line(problem["ctx"]["error"])
    if problem["type"] == "missing":
        return f"{path} is missing"
    value = problem["input"]
    field = options.model_fields.get(name) if options is not None else None
    # The error of a union names the member that rejected the value.
    if options and field and (len(problem["loc"]) == 1 or _is_union(field.annotation)):
        return one_line(f"{name} must be {describe_field(options, name)}; got {value!r}")
    expected = problem["msg"].removeprefix("Input should be ")
    return one_line(f"{path} must be {expected}; got {value!r}")


def _unwrapped(value: Any) -> Any:
    """Convert a NumPy scalar or a tensor without dimensions to a Python number."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _is_union(annotation: Any) -> bool:
    """Whether an annotation is a union of types other than None."""
    return get_origin(_without_none(annotation)) in (Union, UnionType)


def _without_none(annotation: Any) -> Any:
    """Reduce ``T | None`` and ``Annotated[T, ...] | None`` to ``T``."""
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        if len(kinds) == 1:
            annotation = kinds[0]
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _digits(value: float) -> str:
    """Format a bound: integers in full, other numbers in their shortest form."""
    return str(int(value)) if value == int(value) else f"{value:g}"
