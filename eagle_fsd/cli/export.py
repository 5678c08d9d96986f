"""``eagle-fsd export``: write files that other programs decode with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from pydantic import Field

from eagle_fsd import __version__
from eagle_fsd.bundled import BUNDLED_DRAFTERS, SMOLLM2_HEADS
from eagle_fsd.cli.console import out
from eagle_fsd.cli.parsing import Command, options
from eagle_fsd.model.config import DrafterName
from eagle_fsd.utils.options import ExistingFile, Options

app = Command("export", help="Export a drafter and its settings for other programs.")


class RepositoryRequest(Options):
    """The drafter and the settings of a repository for ``generate`` of transformers."""

    drafter: DrafterName = Field(
        description="Folder of an EAGLE head or a draft model, or the name of a bundled drafter."
    )
    settings: ExistingFile | None = Field(
        None, description="File of settings; default: fsd.json beside the drafter."
    )
    target: str | None = Field(
        None, description="Target in the card; default: a bundled drafter's, or the calibrated one."
    )


@app.command(name="custom-generate")
def custom_generate(
    folder: Annotated[Path, Parameter(name="OUT", help="Folder to write, empty or new.")],
    /,
    *,
    request: Annotated[RepositoryRequest, options("Export")],
) -> None:
    """Write a repository for model.generate(..., custom_generate="user/repo").

    It holds the drafter, its settings, code, requirements and a card, to be uploaded to the Hugging
    Face Hub or used from the folder.
    """
    from eagle_fsd.engines.hugging_face import write_repository

    drafter, target = Path(request.drafter), request.target
    if drafter in BUNDLED_DRAFTERS.values():
        target = target or ("smollm2" if drafter in SMOLLM2_HEADS.values() else "bundled")
    write_repository(folder, drafter, __version__, settings=request.settings, target=target)
    out.print(f"The repository is in {folder}.")
