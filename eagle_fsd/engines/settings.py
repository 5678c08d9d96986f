"""Read the settings that an engine is given, and reject what it cannot do."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from eagle_fsd.model.acceptance import CascadeRule, FuzzyRule, WrappedRule, rule_for
from eagle_fsd.model.config import (
    SETTINGS_FILE,
    AcceptanceConfig,
    ModelIdentity,
    Settings,
    read_settings,
)
from eagle_fsd.model.identity import EXPORTED_KEY, fingerprint_of_files
from eagle_fsd.model.verify import AcceptanceRule
from eagle_fsd.utils.options import OptionsError

#: Key of the settings in an engine's configuration, and the environment variable that is read
#: without it.
CONFIG_KEY = "eagle_fsd"
VARIABLE = "EAGLE_FSD_SETTINGS"
#: Rules that choose other samples than the target's, or depend on those of later tokens, and the
#: rules of SGLang's own flags.
UNSUPPORTED = ("mixture", "deferred", "single", "acc")


def find_settings(config: Any) -> Settings | None:
    """Read the settings from an engine's configuration, else from the environment.

    Either holds the path of an ``fsd.json`` file, of a folder with one, or its contents (in the
    environment: as JSON). Returns None without any. Raises ``OptionsError`` if they are invalid or
    no plugin can apply them.
    """
    given = config.get(CONFIG_KEY) if isinstance(config, Mapping) else None
    if given in (None, ""):
        given = os.environ.get(VARIABLE)
    if given in (None, ""):
        return None
    try:
        if isinstance(given, str) and given.lstrip().startswith("{"):
            given = json.loads(given)
        if isinstance(given, str):
            path = Path(given).expanduser()
            settings = read_settings(path / SETTINGS_FILE if path.is_dir() else path)
        elif isinstance(given, Mapping):
            settings = Settings.from_dict(given)
        else:
            raise ValueError(f"neither a path nor an object; got {given!r}")
    except (OSError, ValueError) as error:
        raise OptionsError(f"settings for eagle_fsd: {error}") from error
    if not settings.lossless:
        check_supported(settings)
    return settings


def rule_of(config: Any) -> AcceptanceRule | None:
    """Return the rule of an engine's configuration; None if it is decoded exactly."""
    settings = find_settings(config)
    return None if settings is None or settings.lossless else rule_for(settings)


def check_supported(acceptance: AcceptanceConfig) -> None:
    """Raise ``OptionsError`` if the plugins of vLLM and SGLang cannot apply the settings."""
    if acceptance.fallback != "exact" or acceptance.selection != "longest":
        raise OptionsError(
            "eagle_fsd supports fallback exact and selection longest in engines; got"
            f" {acceptance.fallback} and {acceptance.selection}"
        )
    if acceptance.divergence_on != "raw":
        raise OptionsError(
            "eagle_fsd compares raw distributions in engines; got divergence_on"
            f" {acceptance.divergence_on}"
        )
    name = acceptance.rule.split()[0]
    if name in UNSUPPORTED:
        raise OptionsError(f"eagle_fsd has no rule {acceptance.rule!r} in engines")
    if name == "budget" and acceptance.max_fuzzy_nats is not None:
        raise OptionsError("eagle_fsd's rule 'budget' takes no max_fuzzy_nats in engines")


def innermost(rule: AcceptanceRule) -> AcceptanceRule:
    """Return the rule that other rules restrict."""
    while isinstance(rule, WrappedRule):
        rule = rule.rule
    return rule


def reads_draft(rule: AcceptanceRule) -> bool:
    """Whether a rule compares the target's distribution with the draft's."""
    return isinstance(innermost(rule), (FuzzyRule, CascadeRule))


def describe(settings: Settings, engine: str) -> str:
    """Describe the rule that an engine applies, and what is certified about it there."""
    certificate = settings.certificate
    if certificate is None or certificate.decoder.lower() != engine.lower():
        return f"eagle_fsd: {settings.label}; not certified for {engine}"
    return f"eagle_fsd: {settings.label}; {certificate}"


def check_version(engine: str, found: str, supported: str) -> None:
    """Raise ``OptionsError`` unless a version of an engine matches the pattern ``supported``."""
    if not fnmatchcase(found, supported):
        raise OptionsError(f"this version of eagle_fsd supports {engine} {supported}; got {found}")


def check_weights(settings: Settings, folders: Mapping[str, str], log: logging.Logger) -> None:
    """Raise ``OptionsError`` if an engine's models are not those that were calibrated.

    ``folders`` has the keys ``target`` and ``drafter``. Models that cannot be compared are logged.
    """
    for kind, folder in folders.items():
        recorded: ModelIdentity | None = getattr(settings, kind)
        if recorded is None:
            continue
        file, found = Path(folder, "config.json"), None
        if file.is_file():
            exported = json.loads(file.read_text(encoding="utf-8")).get(EXPORTED_KEY)
            if exported is None:
                found = fingerprint_of_files(folder, getattr(torch, recorded.dtype))
            else:
                found = exported.get(recorded.dtype)
        if found is None:
            log.warning("eagle_fsd: cannot tell whether %s is the calibrated %s", folder, kind)
        elif found != recorded.fingerprint:
            raise OptionsError(
                f"the settings for eagle_fsd were calibrated for the {kind} {recorded.name}, and"
                f" {folder} has other weights"
            )
