"""``eagle-fsd evaluate``: speed and quality of several decoding methods on a question set."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from eagle_fsd.cli.console import print_json, print_report, progress
from eagle_fsd.cli.options import (
    AcceptanceOptions,
    Json,
    SettingsFile,
    SettingsOptions,
    TreeOptions,
    given_settings,
)
from eagle_fsd.cli.parsing import options
from eagle_fsd.evaluation.config import (
    DEFAULT_METHODS,
    EvaluationConfig,
    EvaluationRequest,
    MethodName,
)
from eagle_fsd.model.config import AcceptanceConfig, TreeConfig

Questions = Annotated[str, Parameter(help=EvaluationRequest.model_fields["questions"].description)]
RequestOptions = Annotated[EvaluationRequest, options("Evaluation", exclude=("questions",))]


def evaluate(
    questions: Questions = "bundled",
    /,
    *,
    methods: Annotated[
        tuple[MethodName, ...],
        Parameter(
            name=("--method", "-m"),
            help="Methods to compare: fsd uses the settings of this command, hf is Hugging Face's"
            " generate, rules are other acceptance rules from the literature.",
        ),
    ] = DEFAULT_METHODS,
    as_json: Json = False,
    request: RequestOptions = EvaluationRequest(),
    file: SettingsOptions = SettingsFile(),
    tree: TreeOptions = TreeConfig(),
    acceptance: AcceptanceOptions = AcceptanceConfig(),
    config: Annotated[EvaluationConfig, options("Decoding")] = EvaluationConfig(),
) -> None:
    """Answer questions with several methods, and report speed and quality side by side.

    Args:
        questions: The question set.
        methods: Methods to compare.
        as_json: Print the report as JSON.
        request: What is evaluated, and where the results go.
        file: An ``fsd.json`` file.
        tree: Shape of the draft tree.
        acceptance: What verification accepts.
        config: How answers are decoded.
    """
    from eagle_fsd.evaluation import evaluate as run

    request = request.model_copy(update={"questions": questions})

    def show(report: dict[str, Any]) -> None:
        if as_json:
            print_json(report)
        else:
            print_report(report, request.output_folder("evaluate"))

    run(
        request,
        config,
        methods,
        settings=given_settings(file.settings, tree, acceptance),
        progress=progress,
        on_report=show,
    )
