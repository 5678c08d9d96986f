"""The settings of Fuzzy Speculative Decoding, declared once.

Python arguments, command-line options, request fields and ``fsd.json`` files all derive from
:class:`FSDSettings`: its fields carry their bounds and their help.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from eagle_fsd.model.divergence import DIVERGENCES

SETTINGS_FILE = "fsd.json"
FALLBACKS = ("exact", "stop")
SELECTIONS = ("longest", "target", "sample")
DISTRIBUTIONS = ("raw", "warped")


def _number(default: float, low: float, high: float, text: str) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "help": text})


def _choice(default: str, choices: tuple[str, ...], text: str) -> Any:
    return field(default=default, metadata={"choices": choices, "help": text})


@dataclass(frozen=True)
class FSDSettings:
    """How a draft tree is grown and what verification keeps of it.

    Raises:
        ValueError: A value is out of its bounds; the message names the field and the bounds.
        TypeError: A value is of another type, or a field does not exist.
    """

    threshold: float = _number(
        0.0, 0.0, math.inf, "T: keep a drafted token where the divergence is below it; 0 is exact"
    )
    divergence: str = _choice("js", tuple(DIVERGENCES), "which divergence is compared with T")
    min_ratio: float = _number(
        0.0, 0.0, 1.0, "a fuzzy token also needs this share of the target's largest probability"
    )
    fallback: str = _choice(
        "exact",
        FALLBACKS,
        "where the divergence is not below T: accept the target's own token, or stop there",
    )
    selection: str = _choice(
        "longest",
        SELECTIONS,
        "which accepted path is kept: the deepest, the target's favourite, or one sampled from"
        " the draft (the only one with a per-token law at temperature above 0)",
    )
    divergence_on: str = _choice(
        "raw",
        DISTRIBUTIONS,
        "compare the models' own distributions, or those left by temperature, top-k and top-p",
    )
    total_tokens: int = _number(60, 1, 1024, "nodes in the draft tree, its root included")
    depth: int = _number(6, 1, 32, "times the draft head expands the tree below the first level")
    top_k: int = _number(10, 1, 256, "nodes expanded at each level, and children of each")

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, _checked(item, getattr(self, item.name)))

    def updated(self, **changes: Any) -> FSDSettings:
        """A copy with the given fields changed; ``None`` leaves a field as it is."""
        changes = {name: value for name, value in changes.items() if value is not None}
        return type(self).from_dict({**asdict(self), **changes})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FSDSettings:
        unknown = sorted(set(values) - {item.name for item in fields(cls)})
        if unknown:
            known = ", ".join(item.name for item in fields(cls))
            raise TypeError(f"unknown setting {', '.join(unknown)}; the settings are {known}")
        return cls(**values)

    @classmethod
    def for_device(cls, device_type: str) -> FSDSettings:
        """The lossless defaults, with the tree that suits the device.

        On a GPU a pass over 60 nodes costs about what a pass over one does (EAGLE-2's tree); on a
        CPU it does not, and a small tree wins.
        """
        return replace(cls(), total_tokens=16, depth=8, top_k=2) if device_type == "cpu" else cls()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _checked(item: Any, value: Any) -> Any:
    """``value`` as the field's type, or an error that states the bounds."""
    if "choices" in item.metadata:
        if value not in item.metadata["choices"]:
            choices = ", ".join(item.metadata["choices"])
            raise ValueError(f"{item.name} must be one of {choices}; got {value!r}")
        return value
    low, high = item.metadata["low"], item.metadata["high"]
    whole = isinstance(item.default, int)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{item.name} must be a number; got {value!r}")
    if not low <= value <= high:  # also refuses NaN
        bounds = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise ValueError(f"{item.name} must be {bounds}; got {value!r}")
    if whole and value != int(value):
        raise ValueError(f"{item.name} must be a whole number; got {value!r}")
    try:
        return int(value) if whole else float(value)
    except OverflowError:
        raise ValueError(f"{item.name} is too large a number") from None


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings a JSON file holds, checked; fields it leaves out are left out.

    Raises:
        ValueError: The file is not a JSON object of known settings within their bounds.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
        values.pop("about", None)  # free-form provenance, written by calibration
        FSDSettings.from_dict(values)
    except (ValueError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    return values
