"""``eagle-fsd lm-eval``: the model of lm-evaluation-harness, on tasks in local files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import (
    ANSWER_LENGTH,
    ANSWERS,
    QUESTIONS,
    TASKS,
    Samples,
    check_results,
    greedy_answer,
    requires_harness,
    run_beside_harness,
    run_harness,
)

from eagle_fsd import EagleFSD
from eagle_fsd.bundled import BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.utils.chat_templates import FastChatTemplate

Run = Callable[..., tuple[int, str, str]]

PROGRAM = ["-m", "eagle_fsd.cli", "lm-eval"]
TREE = {"total_tokens": 12, "depth": 5, "tree_top_k": 2}


#: Prints the trees of a pair with several model arguments, the errors of invalid ones, and answers
#: of the bundled target that end at a special token, which is no end token.
PRINT = """
import json, sys
from lm_eval.api.instance import Instance
from eagle_fsd.evaluation.lm_eval_model import EagleFSDModel
several, texts = map(json.loads, sys.argv[2:])
for options in several:
    pair = EagleFSDModel(settings=sys.argv[1], **options).pair
    trees = [pair.tree, pair.exact_tree, *pair.batch_trees.values()]
    print(json.dumps([tree.model_dump() for tree in trees]))
for options in ({"thresold": 0.1}, {"pretrained": "a", "target": "b"}, {"compile": "auto"}):
    try:
        EagleFSDModel(**options)
    except ValueError as error:
        print(error)
model = EagleFSDModel(drafter="ngram")
model.pair.model.generation_config.eos_token_id = model.tokenizer.pad_token_id
model.tokenizer.eos_token = model.tokenizer.pad_token
arguments = {"until": ["<|end|>"], "max_gen_toks": 80}
requests = [Instance("generate_until", {}, (text, arguments), 0) for text in texts]
print(json.dumps(model.generate_until(requests, disable_tqdm=True)))
"""


def answers(**arguments: object) -> dict[str, Any]:
    """Return a task that generates answers with some generation arguments."""
    return {**ANSWERS, "generation_kwargs": {"max_gen_toks": ANSWER_LENGTH, **arguments}}


#: Stop strings: of several tokens, ending within a token, beginning in a prompt.
STOPS = ["8 - 2", "n the en", "gives 1"]
MORE_TASKS = {
    "stops": answers(until=STOPS, max_gen_toks=80),
    "whole": answers(until=[]),
    "sampled": answers(until=[], do_sample=True, temperature=1.0, top_p=0.9, seed=3),
    "fuzzy": answers(until=[], fsd={"threshold": 10.0, "min_ratio": 0.0}),
}


def model_args(**options: object) -> list[str]:
    return ["--model_args", ",".join(f"{name}={value}" for name, value in options.items())]


@pytest.fixture(scope="module")
def results(
    model: EagleFSD, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Samples, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("lm-eval")
    options = model_args(pretrained=BUNDLED_TARGET, drafter=BUNDLED_HEAD, threshold=0.0, **TREE)
    return run_harness(PROGRAM, folder, model, [*options, "--batch_size", "3"], TASKS | MORE_TASKS)


@pytest.fixture
def samples(results: tuple[Samples, dict[str, Any]]) -> Samples:
    return results[0]


@pytest.mark.slow
@requires_harness
@pytest.mark.xdist_group("lm-eval")
class TestHarness:
    def test_log_likelihoods_and_answers_are_the_targets(
        self, samples: Samples, model: EagleFSD
    ) -> None:
        check_results(samples, model)
        for sample in samples["whole"]:
            assert sample["resps"] == [[greedy_answer(model, sample["doc"]["question"])]]

    def test_answers_end_at_the_first_stop_string(self, samples: Samples, model: EagleFSD) -> None:
        found = set()
        for sample in samples["stops"]:
            answer = greedy_answer(model, sample["doc"]["question"], 80)
            ends = {answer.find(stop): stop for stop in STOPS if stop in answer}
            assert sample["resps"] == [[answer[: min(ends, default=len(answer))]]]
            found.add(ends[min(ends)] if ends else None)
        assert found == {"8 - 2", "n the en", None}

    def test_options_take_effect(self, results: tuple[Samples, dict[str, Any]]) -> None:
        samples, file = results
        texts = {name: [item["resps"] for item in samples[name]] for name in MORE_TASKS}
        assert texts["sampled"] != texts["whole"]
        found = file["config"]["eagle_fsd"]
        assert found["settings"]["total_tokens"] == TREE["total_tokens"]
        assert found["settings"]["top_k"] == TREE["tree_top_k"]
        assert found["settings"]["threshold"] == 0.0
        origins = found["stats"]["origins"]
        assert origins["fuzzy"]
        assert sum(origins.values()) == found["stats"]["tokens"]
        assert found["stats"]["tau"] > 2.0

    def test_fastchat_template_and_plain_decoding(self, model: EagleFSD, tmp_path: Path) -> None:
        options = model_args(chat_template="falcon", method="ar")
        tasks = {"whole": answers(until=[])}
        samples, file = run_harness(
            PROGRAM, tmp_path, model, [*options, "--apply_chat_template"], tasks
        )
        assert file["config"]["eagle_fsd"]["stats"]["tau"] == 1.0
        assert file["chat_template"] == "FastChat's falcon"
        template = FastChatTemplate("falcon")
        for sample in samples["whole"]:
            prompt = sample["arguments"]["gen_args_0"]["arg_0"]
            chat = [{"role": "user", "content": sample["doc"]["question"]}]
            assert prompt == template.render(chat, add_generation_prompt=True)
            assert sample["resps"] == [[greedy_answer(model, prompt)]]

    def test_models_that_are_made_in_python(self, model: EagleFSD, tmp_path: Path) -> None:
        """Tree options override all trees of the settings; stop strings may be special tokens.

        Without tree options, lossless decoding and batches keep their own trees.
        """
        own, exact, batch = ({"total_tokens": n, "depth": 4, "top_k": 2} for n in (12, 10, 8))
        file = tmp_path / "fsd.json"
        file.write_text(json.dumps({**own, "exact": exact, "batch": {"4": batch}}))
        options = [{}, {"threshold": 0.2}, {"total_tokens": 6, "tree_top_k": 1}]
        output = run_beside_harness(["-c", PRINT, file, *map(json.dumps, (options, QUESTIONS))])
        *trees, texts = [json.loads(line) for line in output.splitlines() if line[:1] == "["]
        changed = {"total_tokens": 6, "depth": 4, "top_k": 1}
        assert trees == [[own, exact, batch]] * 2 + [[changed, changed]]
        assert "unknown option thresold" in output
        assert "pretrained is another name of target: pass only one of them" in output
        assert "compile=auto is not supported" in output
        assert texts == [greedy_answer(model, text, 80) for text in QUESTIONS]


def test_missing_harness(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "eagle_fsd.evaluation.lm_eval_model", raising=False)
    status, _, errors = run("lm-eval", "--tasks", "gsm8k")
    assert status == 1
    assert errors.startswith("error: lm-evaluation-harness is missing")
    assert "pip install 'eagle_fsd[lm-eval]'" in errors
