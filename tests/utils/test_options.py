"""Options: validation, one-line messages, and what the models of the package have in common."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
import pytest
from pydantic import AfterValidator, Field

from eagle_fsd.utils.options import Options, OptionsError, validation_message


class Sample(Options):
    """Every kind of field that the package uses."""

    count: int = Field(2, ge=1, le=4, description="A bounded integer.")
    share: float = Field(0.5, gt=0.0, le=1.0, description="A bounded number.")
    seconds: float = Field(5.0, ge=0.0, allow_inf_nan=False, description="A finite number.")
    mode: Literal["first", "last"] = Field("first", description="One of a few names.")
    flag: bool = Field(False, description="True or false.")
    label: str | None = Field(None, description="An optional string.")
    name: Annotated[str, AfterValidator(str.strip)] | None = Field(None, description="A name.")
    choice: bool | Literal["auto"] | None = Field(None, description="A choice.")
    large: int | None = Field(None, le=2**63 - 1, description="A large bound.")


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"count": 0}, "count must be an integer in [1, 4]; got 0"),
    ({"count": 5}, "count must be an integer in [1, 4]; got 5"),
    ({"count": 2.5}, "count must be an integer in [1, 4]; got 2.5"),
    ({"count": True}, "count must be an integer in [1, 4]; got True"),
    ({"count": "2"}, "count must be an integer in [1, 4]; got '2'"),
    ({"count": math.nan}, "count must be an integer in [1, 4]; got nan"),
    ({"count": 10**400}, f"count must be an integer in [1, 4]; got 1{'0' * 400}"),
    ({"count": np.ones((2, 1))}, "count must be an integer in [1, 4]; got array([[1.], [1.]])"),
    ({"share": 0.0}, "share must be a number in (0, 1]; got 0.0"),
    ({"share": math.nan}, "share must be a number in (0, 1]; got nan"),
    ({"seconds": -1}, "seconds must be a finite number of at least 0; got -1"),
    ({"seconds": math.inf}, "seconds must be a finite number of at least 0; got inf"),
    ({"seconds": "5"}, "seconds must be a finite number of at least 0; got '5'"),
    ({"mode": "best"}, "mode must be one of first, last; got 'best'"),
    ({"mode": ["first"]}, "mode must be one of first, last; got ['first']"),
    ({"flag": 1}, "flag must be true or false; got 1"),
    ({"label": 3}, "label must be a string; got 3"),
    ({"name": 3}, "name must be a string; got 3"),
    ({"choice": "maybe"}, "choice must be true, false or auto; got 'maybe'"),
    ({"large": 2**63}, f"large must be an integer of at most {2**63 - 1}; got {2**63}"),
    ({"falg": True}, "unknown option falg; the options are count, share, seconds, mode,"),
]


def test_invalid_value_raises_one_line_with_bounds() -> None:
    for values, message in INVALID:
        for build in (Sample.from_dict, lambda values: Sample().updated(**values)):
            with pytest.raises(OptionsError) as error:
                build(values)
            assert str(error.value).startswith(message)
            assert str(error.value).isprintable()
    with pytest.raises(OptionsError, match=r"^count must be an integer in \[1, 4\]; got None$"):
        Sample.from_dict({"count": None})
    with pytest.raises(pydantic.ValidationError) as invalid:
        Sample(count=9, mode="best")
    assert re.fullmatch("count must be .*; got 9", validation_message(invalid.value))


def test_valid_values_are_kept() -> None:
    values = {"count": 4, "share": 1.0, "seconds": 7, "mode": "last", "flag": True}
    values |= {"label": None, "choice": None}
    made = Sample.from_dict(values)
    assert made.model_dump() == {**values, "name": None, "large": None}
    assert type(made.seconds) is float
    assert Sample.from_dict(made.model_dump()) == made
    assert made.updated(count=None, share=0.25, flag=False) == Sample(
        **{**values, "share": 0.25, "flag": False}
    )
    assert made.share == 1.0
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        made.count = 1
