"""Options shared by several commands, and functions that load the pair they describe."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from pydantic import Field

from eagle_fsd.cli.parsing import options
from eagle_fsd.model.config import (
    AcceptanceConfig,
    PairOptions,
    Settings,
    TreeConfig,
    one_rule,
    read_settings,
)
from eagle_fsd.utils.options import ExistingFile, Options

if TYPE_CHECKING:
    from eagle_fsd.model.pipeline import EagleFSD
    from eagle_fsd.utils.chat_templates import ChatTemplate

_FROM_FILES = "Default: --settings, then the drafter's fsd.json, then"


class SettingsFile(Options):
    """A file of tree and acceptance options."""

    settings: ExistingFile | None = Field(
        None,
        description="An fsd.json file that overrides the drafter's; the command line overrides it.",
    )


class Pair(PairOptions, SettingsFile):
    """A target and a drafter, and how to load them."""


#: Flag to print JSON instead of text.
Json = Annotated[bool, Parameter(name="--json", help="Print JSON.")]
Install = Annotated[
    bool, Parameter(help="Also write fsd.json beside the drafter, where other commands find it.")
]
ShowOrigins = Annotated[bool, Parameter(help="Color exact, fuzzy and target tokens differently.")]
PairArguments = Annotated[Pair, options("Model")]
SettingsOptions = Annotated[SettingsFile, options("Model")]
TreeOptions = Annotated[
    TreeConfig,
    options("Draft tree", f"{_FROM_FILES} what suits the device.", show_default=False),
]
AcceptanceOptions = Annotated[
    AcceptanceConfig, options("Acceptance", f"{_FROM_FILES} lossless.", show_default=False)
]
#: Acceptance options of commands whose grid sets the threshold, the divergence and the floor.
OtherAcceptanceOptions = Annotated[
    AcceptanceConfig,
    options(
        "Acceptance",
        "Default: --settings. Those of the drafter's fsd.json do not apply.",
        exclude=("threshold", "divergence", "min_ratio", "rule"),
        show_default=False,
    ),
]


def given_settings(file: Path | None, tree: TreeConfig, acceptance: AcceptanceConfig) -> Settings:
    """Collect tree and acceptance options of an ``fsd.json`` file and of the command line.

    Fields of ``tree`` and ``acceptance`` that are set explicitly override the file's.
    """
    found = read_settings(file) if file is not None else Settings()
    shape = {name: getattr(tree, name) for name in tree.model_fields_set}
    # A tree given on the command line is also that of lossless decoding and of several prompts. The
    # certificate is that of the file's own options.
    excluded = {"exact", "batch"} if shape else set()
    if shape or acceptance.given():
        excluded.add("certificate")
    return Settings.from_dict(
        {
            **found.model_dump(exclude_unset=True, exclude=excluded),
            **found.acceptance,  # also options that dumps omit
            **shape,
            **one_rule(acceptance.given()),
        }
    )


def load_pair(
    pair: Pair, tree: TreeConfig, acceptance: AcceptanceConfig, plain: bool = False
) -> EagleFSD:
    """Load a pair. Options that are set explicitly override its ``fsd.json``.

    If ``plain`` is set, a target other than the bundled one needs no drafter.
    """
    from eagle_fsd.evaluation.processes import load_models
    from eagle_fsd.model.drafters.interface import NoDrafter

    settings = given_settings(pair.settings, tree, acceptance)
    model = load_models(pair, NoDrafter() if plain and pair.target and not pair.drafter else None)
    model.configure(settings)
    model.compile = pair.compile or False
    if model.compile is True:  # calls that wait for it say why
        logging.getLogger("eagle_fsd.model.compilation").setLevel(logging.INFO)
    return model


def load_chat(
    pair: Pair, tree: TreeConfig, acceptance: AcceptanceConfig
) -> tuple[EagleFSD, ChatTemplate]:
    """Load a pair and its chat template; passes are compiled in the background by default."""
    from eagle_fsd.model.default_tree import fit_tree
    from eagle_fsd.utils.chat_templates import load_chat_template

    if pair.compile is None:
        pair = pair.updated(compile="auto")
    model = load_pair(pair, tree, acceptance)
    fit_tree(model)
    return model, load_chat_template(model.tokenizer, pair.chat_template)
