"""Read the settings that an engine is given, and reject what it cannot do."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_fsd.model.config import SETTINGS_FILE, AcceptanceConfig, Settings, read_settings
from eagle_fsd.utils.options import OptionsError

#: The key of an engine's configuration that holds the settings, and the variable instead of it.
CONFIG_KEY = "eagle_fsd"
VARIABLE = "EAGLE_FSD_SETTINGS"
#: Rules that choose other samples than the target's, or need to know which tokens are exact before
#: the engine has drawn them.
UNSUPPORTED = ("mixture", "deferred", "single", "acc")


def find_settings(config: Any) -> Settings | None:
    """Read the settings from an engine's configuration, else from the environment.

    Either holds the path of an ``fsd.json`` file, of a folder with one, or its contents (in the
    environment: as JSON). Returns None without any. Raises ``OptionsError`` if they are invalid or
    no engine can apply them.
    """
    given = config.get(CONFIG_KEY) if isinstance(config, Mapping) else None
    given = given or os.environ.get(VARIABLE) or None
    if given is None:
        return None
    try:
        if isinstance(given, str) and given.lstrip().startswith("{"):
            given = json.loads(given)
        if isinstance(given, str):
            path = Path(given).expanduser()
            settings = read_settings(path / SETTINGS_FILE if path.is_dir() else path)
        else:
            settings = Settings.from_dict(given)
    except (OSError, ValueError) as error:
        raise OptionsError(f"settings for eagle_fsd: {error}") from error
    check_supported(settings)
    return settings


def check_supported(acceptance: AcceptanceConfig) -> None:
    """Raise an OptionsError if no engine can apply the settings to its chains."""
    if acceptance.fallback != "exact" or acceptance.selection != "longest":
        raise OptionsError(
            "engines draft chains, for which eagle_fsd supports fallback exact and selection"
            f" longest; got {acceptance.fallback} and {acceptance.selection}"
        )
    if acceptance.divergence_on != "raw":
        raise OptionsError(
            "eagle_fsd compares raw distributions in engines; got divergence_on"
            f" {acceptance.divergence_on}"
        )
    name = acceptance.rule.split()[0]
    if name in UNSUPPORTED:
        raise OptionsError(f"rule {acceptance.rule!r} is not available in engines")
    if name == "budget" and acceptance.max_fuzzy_nats is not None:
        raise OptionsError("rule 'budget' takes no max_fuzzy_nats in engines")
