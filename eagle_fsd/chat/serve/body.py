"""The base of request bodies."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, model_validator

from eagle_fsd.utils.options import Options

#: Maximum number of members of an object, more than any request supports.
MAX_MEMBERS = 100


class Body(Options):
    """A JSON object whose types are strict."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        """Limit the number of members, and drop those that are null, which means absent."""
        if not isinstance(values, dict):
            return values
        if len(values) > MAX_MEMBERS:  # describing all of them would take long
            raise ValueError(f"must not have more than {MAX_MEMBERS} members")
        return {name: value for name, value in values.items() if value is not None}
