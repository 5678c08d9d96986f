"""``fsd.json``: the file that tuning and calibration write."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_fsd.bundled import BUNDLED_DRAFTERS
from eagle_fsd.evaluation.config import EvaluationRequest
from eagle_fsd.model.config import SETTINGS_FILE, TreeConfig, settings_dict
from eagle_fsd.model.identity import identify
from eagle_fsd.model.pipeline import EagleFSD
from eagle_fsd.utils.options import OptionsError


def settings_files(request: EvaluationRequest, folder: Path, install: bool) -> list[Path]:
    """Return the files to write: in the output folder and, with ``install``, beside the drafter."""
    if not install:
        return [folder / SETTINGS_FILE]
    name = request.drafter or "bundled"
    drafter = BUNDLED_DRAFTERS.get(name, Path(name))
    if not (drafter.is_dir() and os.access(drafter, os.W_OK)):
        raise OptionsError(f"--install requires a drafter in a writable folder; got {drafter}")
    return [folder / SETTINGS_FILE, drafter / SETTINGS_FILE]


def settings_values(
    model: EagleFSD,
    pair: EagleFSD,
    lossless: Mapping[int, TreeConfig],
    request: EvaluationRequest,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the contents of the file for a pair with its tree and acceptance settings.

    ``lossless`` holds trees by the number of prompts that are decoded at once; those that ``model``
    has for other numbers are kept.
    """
    trees = {1: model.exact_tree, **model.batch_trees, **lossless}
    dtype = model.target.dtype
    return {
        **settings_dict(pair.tree, pair.acceptance),
        "exact": trees.pop(1).model_dump(),
        "batch": {str(rows): trees[rows].model_dump() for rows in sorted(trees)},
        "target": identify(request.target or "bundled", model.model, dtype).model_dump(),
        "drafter": identify(request.drafter or "bundled", model.drafter, dtype).model_dump(),
        "about": dict(about),
    }
