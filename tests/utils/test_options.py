"""Options: validation, one-line messages, and what the models of the package have in common."""

from __future__ import annotations

import math
from typing import Any, Literal

import pydantic
import pytest
from pydantic import Field

from eagle_fsd.utils.options import Options, OptionsError, describe_field, validation_message


class Sample(Options):
    """Every kind of field that the package uses."""

    count: int = Field(2, ge=1, le=4, description="A bounded integer.")
    share: float = Field(0.5, gt=0.0, le=1.0, description="A bounded number.")
    seconds: float = Field(5.0, ge=0.0, allow_inf_nan=False, description="A finite number.")
    mode: Literal["first", "last"] = Field("first", description="One of a few names.")
    flag: bool = Field(False, description="True or false.")
    label: str | None = Field(None, description="An optional string.")
    large: int | None = Field(None, le=2**63 - 1, description="A large bound.")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count must be an integer in [1, 4]; got 0"),
        ({"count": 5}, "count must be an integer in [1, 4]; got 5"),
        ({"count": 2.5}, "count must be an integer in [1, 4]; got 2.5"),
        ({"count": True}, "count must be an integer in [1, 4]; got True"),
        ({"count": "2"}, "count must be an integer in [1, 4]; got '2'"),
        ({"count": math.nan}, "count must be an integer in [1, 4]; got nan"),
        ({"count": 10**400}, f"count must be an integer in [1, 4]; got 1{'0' * 400}"),
        ({"share": 0.0}, "share must be a number in (0, 1]; got 0.0"),
        ({"share": math.nan}, "share must be a number in (0, 1]; got nan"),
        ({"seconds": -1}, "seconds must be a finite number of at least 0; got -1"),
        ({"seconds": math.inf}, "seconds must be a finite number of at least 0; got inf"),
        ({"seconds": "5"}, "seconds must be a finite number of at least 0; got '5'"),
        ({"mode": "best"}, "mode must be one of first, last; got 'best'"),
        ({"mode": ["first"]}, "mode must be one of first, last; got ['first']"),
        ({"flag": 1}, "flag must be true or false; got 1"),
        ({"label": 3}, "label must be a string; got 3"),
        ({"falg": True}, "unknown option falg; the options are count, share, seconds, mode,"),
    ],
)
@pytest.mark.parametrize("build", [Sample.from_dict, lambda values: Sample().updated(**values)])
def test_invalid_value_raises_one_line_with_bounds(
    build: Any, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionsError) as error:
        build(values)
    assert str(error.value).startswith(message)
    assert str(error.value).isprintable()


def test_none_is_rejected_unless_the_field_is_optional() -> None:
    assert Sample.from_dict({"label": None}).label is None
    with pytest.raises(OptionsError, match=r"^count must be an integer in \[1, 4\]; got None$"):
        Sample.from_dict({"count": None})


def test_values_at_the_bounds_are_kept() -> None:
    values = {"count": 4, "share": 1.0, "seconds": 0.0, "mode": "last", "flag": True, "label": ""}
    made = Sample.from_dict(values)
    assert made.model_dump() == {**values, "large": None}
    assert Sample.from_dict(made.model_dump()) == made


def test_integer_becomes_float_where_the_field_is_a_float() -> None:
    assert type(Sample.from_dict({"seconds": 7}).seconds) is float


def test_updated_returns_a_changed_copy() -> None:
    first = Sample(count=3, label="a")
    second = first.updated(count=None, share=0.25, flag=False)
    assert second == Sample(count=3, share=0.25, label="a")
    assert first.share == 0.5


def test_options_are_frozen() -> None:
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        Sample().count = 9


def test_subclass_inherits_fields_and_bounds() -> None:
    class Extended(Sample):
        extra: int = Field(2, ge=1, description="Another integer.")

    assert list(Extended.model_fields)[-1] == "extra"
    with pytest.raises(OptionsError, match="count must be an integer"):
        Extended.from_dict({"count": 9})


@pytest.mark.parametrize(
    ("name", "description"),
    [
        ("count", "an integer in [1, 4]"),
        ("share", "a number in (0, 1]"),
        ("seconds", "a finite number of at least 0"),
        ("mode", "one of first, last"),
        ("flag", "true or false"),
        ("label", "a string"),
        ("large", f"an integer of at most {2**63 - 1}"),
    ],
)
def test_describe_field_states_type_and_bounds(name: str, description: str) -> None:
    assert describe_field(Sample, name) == description


def test_validation_message_without_the_model_is_one_line() -> None:
    with pytest.raises(pydantic.ValidationError) as error:
        Sample(count=9, mode="best")
    message = validation_message(error.value)
    assert message.startswith("count must be")
    assert message.endswith("got 9")
    assert message.isprintable()
