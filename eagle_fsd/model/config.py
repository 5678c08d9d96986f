"""The settings of Fuzzy Speculative Decoding, declared once.

Python arguments, command-line options, request fields and ``fsd.json`` files all derive from
:class:`FSDSettings`: its fields carry their bounds and their help.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle_fsd.utils.options import Options, choice, number

SETTINGS_FILE = "fsd.json"
#: What :data:`eagle_fsd.model.divergence.DIVERGENCES` holds, told without a need for torch.
DIVERGENCE_NAMES = tuple(
    prefix + name
    for prefix in ("", "top_k_", "top_p_")
    for name in ("js", "js_reference", "kl", "kl_reversed", "tv")
)
FALLBACKS = ("exact", "stop")
SELECTIONS = ("longest", "target", "sample")
DISTRIBUTIONS = ("raw", "warped")


@dataclass(frozen=True)
class FSDSettings(Options):
    """How a draft tree is grown and what verification keeps of it.

    Raises:
        ValueError: A value is out of its bounds; the message names the field and the bounds.
        TypeError: A value is of another type, or a field does not exist.
    """

    threshold: float = number(
        0.0, 0.0, math.inf, "T: keep a drafted token where the divergence is below it; 0 is exact"
    )
    divergence: str = choice("js", DIVERGENCE_NAMES, "which divergence is compared with T")
    min_ratio: float = number(
        0.0, 0.0, 1.0, "a fuzzy token also needs this share of the target's largest probability"
    )
    fallback: str = choice(
        "exact",
        FALLBACKS,
        "where the divergence is not below T: accept the target's own token, or stop there",
    )
    selection: str = choice(
        "longest",
        SELECTIONS,
        "which accepted path is kept: the deepest, the target's favourite, or one sampled from"
        " the draft (the only one with a per-token law at temperature above 0)",
    )
    divergence_on: str = choice(
        "raw",
        DISTRIBUTIONS,
        "compare the models' own distributions, or those left by temperature, top-k and top-p",
    )
    total_tokens: int = number(60, 1, 1024, "nodes in the draft tree, its root included")
    depth: int = number(6, 1, 32, "times the draft head expands the tree below the first level")
    top_k: int = number(10, 1, 256, "nodes expanded at each level, and children of each")

    @classmethod
    def for_device(cls, device_type: str) -> FSDSettings:
        """The lossless defaults, with the tree that suits the device.

        On a GPU a pass over 60 nodes costs about what a pass over one does (EAGLE-2's tree); on a
        CPU it does not, and a small tree wins.
        """
        return replace(cls(), total_tokens=16, depth=8, top_k=2) if device_type == "cpu" else cls()


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
