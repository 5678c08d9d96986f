"""``eagle-fsd evaluate``: speed and quality of several decoding methods on a question set."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from eagle_fsd.cli.console import out, print_json, print_report, progress
from eagle_fsd.cli.options import (
    AcceptanceOptions,
    Json,
    SettingsFile,
    SettingsOptions,
    TreeOptions,
    given_settings,
)
from eagle_fsd.cli.parsing import options
from eagle_fsd.cli.processes import check_single_process, joined_evaluation
from eagle_fsd.evaluation.config import (
    DEFAULT_METHODS,
    EvaluationConfig,
    EvaluationRequest,
    MethodName,
    ServerOptions,
)
from eagle_fsd.model.config import AcceptanceConfig, TreeConfig
from eagle_fsd.utils.options import OptionsError

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
            help="Methods to compare: fsd uses the settings of this command or of fsd.json, and is"
            " skipped if exact has the same; hf is Hugging Face's generate, rules are other"
            " acceptance rules from the literature.",
        ),
    ] = DEFAULT_METHODS,
    formats: Annotated[
        bool, Parameter(help="List the formats of question files and the graders, and exit.")
    ] = False,
    as_json: Json = False,
    request: RequestOptions = EvaluationRequest(),
    servers: Annotated[ServerOptions, options("Servers")] = ServerOptions(),
    file: SettingsOptions = SettingsFile(),
    tree: TreeOptions = TreeConfig(),
    acceptance: AcceptanceOptions = AcceptanceConfig(),
    config: Annotated[EvaluationConfig, options("Decoding")] = EvaluationConfig(),
) -> None:
    """Answer questions with several methods, and report speed and quality side by side.

    With --server, compare servers instead of methods of decoding.
    """
    if formats:
        print_formats(as_json)
        return
    request = request.model_copy(update={"questions": questions})
    settings = given_settings(file.settings, tree, acceptance)

    def show(report: dict[str, Any]) -> None:
        folder = request.output_folder("servers" if servers.servers else "evaluate")
        print_report(report, folder, as_json)

    if servers.servers:
        from eagle_fsd.evaluation.servers import evaluate_servers

        check_single_process("evaluate --server", loads_target=False)
        if settings.model_fields_set or methods != DEFAULT_METHODS:
            raise OptionsError("--server takes no --method, --settings, tree or acceptance options")
        evaluate_servers(request, servers, config, progress=progress, on_report=show)
        return
    from eagle_fsd.evaluation import evaluate as run

    with joined_evaluation(request, "evaluate") as (own, _):
        run(own, config, methods, settings=settings, progress=progress, on_report=show)


def print_formats(as_json: bool) -> None:
    """Print the formats of question files, and the graders."""
    from eagle_fsd.evaluation.graders import GRADERS
    from eagle_fsd.evaluation.questions.formats import FORMATS

    if as_json:
        names = ("name", "example", "scored")
        listed = [{name: getattr(item, name) for name in names} for item in FORMATS]
        print_json({"formats": listed, "graders": GRADERS})
        return
    out.print(
        "A question file is JSON lines (.jsonl), a JSON array (.json), or text with a prompt per"
        " line (.txt). All rows have the same format. Prompts, messages and questions may also have"
        ' an "id" and a "category".\n'
    )
    for item in FORMATS:
        out.print(f"{item.name}: {item.scored}", style="bold")
        out.print(f"  {item.example}\n")
    out.print("--grader", style="bold")
    for name, meaning in GRADERS.items():
        out.print(f"  {name}: {meaning}")
    out.print(
        "  FILE.py:FUNCTION: FUNCTION(answer, question), called with the model's answer and the row"
        " as a dictionary, returns True, False, or None for no score"
    )
