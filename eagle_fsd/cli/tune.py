"""``eagle-fsd tune``: find the fastest draft trees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from eagle_fsd.cli.console import err, out, print_json, print_table, progress
from eagle_fsd.cli.evaluate import Questions
from eagle_fsd.cli.options import (
    AcceptanceOptions,
    Install,
    Json,
    SettingsFile,
    SettingsOptions,
    given_settings,
)
from eagle_fsd.cli.parsing import options
from eagle_fsd.cli.processes import check_single_process
from eagle_fsd.evaluation.config import EvaluationConfig, EvaluationRequest
from eagle_fsd.model.config import AcceptanceConfig, TreeConfig

#: Options of an evaluation that have no meaning here: no answers are scored, and no baselines run.
UNUSED = (
    *("grader", "baseline", "assistant", "execute_code", "unsafe"),
    *("judge_base_url", "judge_model", "judge_parallel", "judge_mode"),
)

if TYPE_CHECKING:
    from eagle_fsd.evaluation.tune import Tuning


def tune(
    questions: Questions = "bundled",
    /,
    *,
    install: Install = False,
    as_json: Json = False,
    request: Annotated[
        EvaluationRequest, options("Evaluation", exclude=("questions", *UNUSED))
    ] = EvaluationRequest(),
    file: SettingsOptions = SettingsFile(),
    acceptance: AcceptanceOptions = AcceptanceConfig(),
    config: Annotated[
        EvaluationConfig, options("Decoding", exclude=("samples", "seeds"))
    ] = EvaluationConfig(),
) -> None:
    """Find the fastest draft trees for this pair on this machine; write them to fsd.json.

    One tree is for lossless decoding; if the acceptance settings of the pair or of the command line
    are not lossless, another is for these. Calibrate again afterwards: a bound on the loss holds
    for one tree only.
    """
    from eagle_fsd.evaluation.tune import tune as run

    check_single_process("tune")
    request = request.model_copy(update={"questions": questions})

    def show(tuning: Tuning) -> None:
        if as_json:
            print_json(tuning.as_dict())
            return
        for headers, cells in tuning.tables():
            print_table(headers, cells)
            out.print()
        for sentence in tuning.conclusions():
            out.print(sentence)
        state = "The result is" if tuning.settings else "Interrupted; what was measured is"
        err.print(f"{state} in {request.output_folder('tune')}.", style="dim")

    run(
        request,
        config,
        settings=given_settings(file.settings, TreeConfig(), acceptance),
        install=install,
        progress=progress,
        on_result=show,
    )
