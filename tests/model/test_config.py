"""The one declaration of settings: bounds, types, names, and the files that hold them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_fsd.model.config import DIVERGENCE_NAMES, FSDSettings, read_settings
from eagle_fsd.model.divergence import DIVERGENCES

NUMBERS = ("threshold", "min_ratio", "total_tokens", "depth", "top_k")
WHOLE = ("total_tokens", "depth", "top_k")
CHOICES = ("divergence", "fallback", "selection", "divergence_on")

#: Field, a value just outside its bounds, and the bounds as the message must state them.
OUTSIDE = [
    ("threshold", -1e-9, "at least 0"),
    ("threshold", -math.inf, "at least 0"),
    ("min_ratio", -0.01, "between 0 and 1"),
    ("min_ratio", 1.01, "between 0 and 1"),
    ("min_ratio", math.inf, "between 0 and 1"),
    ("total_tokens", 0, "between 1 and 1024"),
    ("total_tokens", 1025, "between 1 and 1024"),
    ("depth", 0, "between 1 and 32"),
    ("depth", 33, "between 1 and 32"),
    ("top_k", -5, "between 1 and 256"),
    ("top_k", 257, "between 1 and 256"),
    ("depth", math.inf, "between 1 and 32"),
]

INSIDE = [
    ("threshold", 0.0),
    ("threshold", 1e30),
    ("threshold", math.inf),
    ("min_ratio", 0.0),
    ("min_ratio", 1.0),
    ("total_tokens", 1),
    ("total_tokens", 1024),
    ("depth", 1),
    ("depth", 32),
    ("top_k", 1),
    ("top_k", 256),
]


def test_the_fields() -> None:
    """A field that comes or goes changes every interface: here it must be said."""
    assert {item.name for item in dataclasses.fields(FSDSettings)} == {*NUMBERS, *CHOICES}


@pytest.mark.parametrize("made", [FSDSettings(), FSDSettings.for_device("cpu")])
def test_defaults_are_lossless(made: FSDSettings) -> None:
    """Nobody loses quality without asking: ``T`` is 0 on every device."""
    assert made.threshold == 0.0
    assert made.divergence == "js"
    assert made.min_ratio == 0.0
    assert made.fallback == "exact"
    assert made.selection == "longest"


def test_the_tree_suits_the_device() -> None:
    """EAGLE-2's 60/10 tree on a GPU; 12 to 24 nodes on a CPU, as the issue asks."""
    cuda, cpu = FSDSettings.for_device("cuda"), FSDSettings.for_device("cpu")
    assert (cuda.total_tokens, cuda.top_k) == (60, 10)
    assert 5 <= cuda.depth <= 7
    assert 12 <= cpu.total_tokens <= 24


@pytest.mark.parametrize(("name", "value"), INSIDE)
def test_bounds_are_included(name: str, value: float) -> None:
    """Both ends of every range are values, and come out unchanged."""
    assert getattr(FSDSettings(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value", "bounds"), OUTSIDE)
def test_outside_the_bounds_is_an_error_that_states_them(
    name: str, value: float, bounds: str
) -> None:
    """One line: the field, the bounds, and what was given."""
    with pytest.raises(ValueError, match=f"{name} must be {bounds}") as caught:
        FSDSettings(**{name: value})
    assert repr(value) in str(caught.value)
    assert "\n" not in str(caught.value)


def _kept_or_refused(name: str, value: float) -> float | None:
    """The value that the settings hold, or None where it was refused with the field's name."""
    try:
        return getattr(FSDSettings(**{name: value}), name)
    except ValueError as error:
        message = str(error)
    assert name in message
    return None


@given(st.sampled_from(NUMBERS), st.floats() | st.integers(-(10**6), 10**6))
def test_any_number_is_kept_or_refused_by_name(name: str, value: float) -> None:
    """No number slips through changed, and a refusal always names its field."""
    kept = _kept_or_refused(name, value)
    if kept is not None:
        assert kept == value
        assert type(kept) is (int if name in WHOLE else float)


@pytest.mark.parametrize("name", NUMBERS)
def test_nan_is_refused(name: str) -> None:
    """NaN compares false with every bound; it must not pass for that."""
    with pytest.raises(ValueError, match=name):
        FSDSettings(**{name: math.nan})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("sign", [1, -1])
def test_integers_beyond_float_range_are_no_overflow(name: str, sign: int) -> None:
    """A 400-digit whole number (valid JSON) meets its bounds like any other.

    Only a threshold may be that large, and it is then infinite.
    """
    kept = _kept_or_refused(name, sign * 10**400)
    assert kept is None or (name, kept) == ("threshold", math.inf)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [2.5, 1.0000001])
def test_whole_numbers_are_required(name: str, value: float) -> None:
    """Half a node is an error, not a rounded value."""
    with pytest.raises(ValueError, match=f"{name} must be a whole number"):
        FSDSettings(**{name: value})


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_float_becomes_an_int(name: str) -> None:
    """JSON writers may say ``6.0``; shapes need ``6``."""
    value = getattr(FSDSettings(**{name: 6.0}), name)
    assert value == 6
    assert type(value) is int


@pytest.mark.parametrize("name", ["threshold", "min_ratio"])
def test_an_int_becomes_a_float(name: str) -> None:
    """``threshold=1`` is meant as 1.0."""
    assert type(getattr(FSDSettings(**{name: 1}), name)) is float


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, False, "0.2", None, [1], {}, 1j])
def test_numbers_must_be_numbers(name: str, value: Any) -> None:
    """Strings are not parsed, and a bool is not 0 or 1."""
    with pytest.raises(TypeError, match=f"{name} must be a number") as caught:
        FSDSettings(**{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("value", ["", "nonsense", "JS", 1, True, None, ["js"], {}])
def test_unknown_choices_are_refused_with_the_choices(name: str, value: Any) -> None:
    """The message lists what could have been meant."""
    with pytest.raises((ValueError, TypeError), match=f"{name} must be one of") as caught:
        FSDSettings(**{name: value})
    item = next(item for item in dataclasses.fields(FSDSettings) if item.name == name)
    for choice in item.metadata["choices"]:
        assert choice in str(caught.value)


def test_every_divergence_is_a_choice() -> None:
    """Settings and the table of divergences cannot drift apart."""
    assert tuple(DIVERGENCES) == DIVERGENCE_NAMES
    for name in DIVERGENCE_NAMES:
        assert FSDSettings(divergence=name).divergence == name


def test_unknown_field() -> None:
    """A misspelt setting is an error that lists the real ones, in every way in."""
    with pytest.raises(TypeError, match="treshold"):
        FSDSettings(treshold=0.1)
    for make in (FSDSettings.from_dict, lambda values: FSDSettings().updated(**values)):
        with pytest.raises(TypeError, match=r"unknown setting depht, treshold; .*threshold"):
            make({"treshold": 0.1, "depht": 3})


def test_settings_cannot_be_changed_in_place() -> None:
    """A change would bypass the checks."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        FSDSettings().threshold = -1.0


def test_updated_changes_what_is_given() -> None:
    """``None`` leaves a field as it is; 0 does not; the original stays."""
    first = FSDSettings(threshold=0.2, min_ratio=0.1, depth=3, selection="target")
    second = first.updated(threshold=0, min_ratio=None, depth=4)
    assert second == FSDSettings(threshold=0.0, min_ratio=0.1, depth=4, selection="target")
    assert first.threshold == 0.2
    assert first.updated() == first


def test_updated_checks() -> None:
    """Arguments of a call pass the same bounds as the constructor's."""
    with pytest.raises(ValueError, match="threshold must be at least 0"):
        FSDSettings().updated(threshold=-0.1)
    with pytest.raises(TypeError, match="depth must be a number"):
        FSDSettings().updated(depth="3")


def test_as_dict_round_trips() -> None:
    """Through a dictionary and through JSON."""
    made = FSDSettings(threshold=0.15, divergence="top_p_tv", fallback="stop", top_k=3)
    assert FSDSettings.from_dict(made.as_dict()) == made
    assert FSDSettings.from_dict(json.loads(json.dumps(made.as_dict()))) == made


# -- files ---------------------------------------------------------------------------------------


def _written(folder: Path, text: str | bytes) -> Path:
    path = folder / "fsd.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_read_settings_gives_what_the_file_holds(tmp_path: Path) -> None:
    """Nothing but the file's own fields, so that the device's tree fills the rest."""
    path = _written(tmp_path, '{"threshold": 0.15, "min_ratio": 0.1, "depth": 6}')
    assert read_settings(path) == {"threshold": 0.15, "min_ratio": 0.1, "depth": 6}
    assert read_settings(str(path)) == read_settings(path)
    assert read_settings(_written(tmp_path, "{}")) == {}


def test_read_settings_leaves_out_the_provenance(tmp_path: Path) -> None:
    """``about`` is free text of the calibration, not a setting."""
    path = _written(tmp_path, '{"threshold": 0.15, "about": {"date": "2025-01-01"}}')
    assert read_settings(path) == {"threshold": 0.15}


def test_read_settings_takes_what_as_dict_gives(tmp_path: Path) -> None:
    """A calibration writes ``as_dict`` and reads the same settings back."""
    made = FSDSettings(threshold=0.3, divergence="kl", selection="sample", total_tokens=17)
    path = _written(tmp_path, json.dumps(made.as_dict()))
    assert FSDSettings.from_dict(read_settings(path)) == made


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "line 1"),
        ('{"threshold": 0.1', "line 1"),
        (b"\xff\xfe\x00", "decode"),
        ("[0.1]", "not a JSON object"),
        ("0.1", "not a JSON object"),
        ("null", "not a JSON object"),
        ('{"threshold": -0.1}', "threshold must be at least 0"),
        ('{"threshold": NaN}', "threshold must be at least 0"),
        ('{"threshold": "0.1"}', "threshold must be a number"),
        ('{"threshold": null}', "threshold must be a number"),
        ('{"threshold": true}', "threshold must be a number"),
        ('{"depth": 2.5}', "depth must be a whole number"),
        ('{"depth": 1' + "0" * 400 + "}", "depth"),
        ('{"total_tokens": 4096}', "between 1 and 1024"),
        ('{"divergence": "jsd"}', "divergence must be one of js, "),
        ('{"divergence": ["js"]}', "divergence must be one of js, "),
        ('{"tau": 4}', "unknown setting tau"),
    ],
)
def test_a_bad_file_is_one_error_with_its_path(
    tmp_path: Path, text: str | bytes, reason: str
) -> None:
    """Whatever is wrong with it: a ValueError that says where and what."""
    path = _written(tmp_path, text)
    with pytest.raises(ValueError, match=reason) as caught:
        read_settings(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    """Absent is not the same as damaged: callers tell the two apart."""
    with pytest.raises(FileNotFoundError):
        read_settings(tmp_path / "fsd.json")
