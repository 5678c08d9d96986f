"""Every causal-LM type of transformers decodes as ``generate`` does or is refused.

The regular suite tests one type for every reason of refusal. ``make slow`` compares all types with
the table in docs/targets.md.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import transformers
from families import TYPES, tiny_model
from family_table import (
    Row,
    check,
    greedy,
    prompts,
    table,
)

from eagle_fsd import EagleFSD
from eagle_fsd.model import engine

PAGE = Path(__file__).parents[2] / "docs" / "targets.md"
#: One type for every reason.
REFUSED = ("bamba", "bart", "bloom", "openai-gpt")
of_this_version = pytest.mark.skipif(
    f"transformers {transformers.__version__}," not in PAGE.read_text(encoding="utf-8"),
    reason="docs/targets.md is about another version of transformers",
)


@cache
def documented() -> dict[str, Row]:
    """Return the rows of the page's table."""
    found = re.findall(r"^\| `([^`]+)` \|(.*)\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    rows = ((name, *map(str.strip, cells.split("|"))) for name, cells in found)
    return {row[0]: Row(*row) for row in rows if len(row) == len(Row._fields)}


@pytest.mark.parametrize(
    ("model_type", "changes", "limit"),
    [
        ("llama4_text", {"floor_scale": 32}, 31),  # scales queries by positions that it counts
        ("doge", {"keep_window_size": 32, "sliding_window": None}, 32),  # then chooses among keys
    ],
)
def test_length_that_attention_depends_on_is_the_limit(
    model_type: str, changes: dict[str, Any], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of a target's first use cannot notice it: it decodes a few tokens."""
    monkeypatch.setitem(families.OVERRIDES, model_type, changes)
    model, ids = tiny_model(model_type), prompts()[0]
    plain, room = EagleFSD(model, None), limit - ids.shape[1]
    out = plain.generate(ids, max_new_tokens=room, method="ar")
    assert torch.equal(out.sequences[:, ids.shape[1] :], greedy(model, ids)[0][:, :room])
    with pytest.raises(ValueError, match=f"reach {limit + 1} tokens, but .* beyond {limit}"):
        plain.generate(ids, max_new_tokens=room + 1, method="ar")


@of_this_version
@pytest.mark.parametrize("model_type", REFUSED)
def test_refusals_are_as_documented(model_type: str) -> None:
    row = documented()[model_type]
    assert row.decoding == "refused"
    assert check(model_type) == row


@of_this_version
def test_every_reason_is_tested() -> None:
    reasons = {
        row.type: row.reason.partition(" of type ")[0]
        for row in documented().values()
        if row.decoding == "refused"
    }
    assert {reasons[model_type] for model_type in REFUSED} == set(reasons.values())


@of_this_version
def test_page_holds_the_table_of_every_type() -> None:
    assert tuple(documented()) == TYPES
    summary, *lines = table(list(documented().values()))
    text = PAGE.read_text(encoding="utf-8")
    assert summary.partition(" (")[0] in text
    assert "\n".join(lines) in text


@of_this_version
@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_type_is_as_documented(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts longer than a window are processed in several chunks."""
    monkeypatch.setattr(engine, "PREFILL_CHUNK", 8)
    assert check(model_type) == documented()[model_type]
