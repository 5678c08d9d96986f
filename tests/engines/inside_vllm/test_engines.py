"""The bundled pairs in vLLM, with and without a rule.

Run by ``make engines`` with an interpreter that has vLLM.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM; run make engines")

from engines_worker import measure

from eagle_fsd import AcceptanceConfig, EagleFSD, TreeConfig
from eagle_fsd.bundled import (
    BUNDLED_DRAFT_MODEL,
    BUNDLED_EAGLE3,
    BUNDLED_HEAD,
    BUNDLED_TARGET,
)
from eagle_fsd.evaluation.questions.formats import bundled_questions
from eagle_fsd.model.identity import fingerprint_of_files
from eagle_fsd.train.config import ExportRequest
from eagle_fsd.train.export import export_head

CHAIN = 5
QUESTIONS = 10
HEADS = {"eagle": BUNDLED_HEAD, "eagle3": BUNDLED_EAGLE3}
DRAFTERS = {**HEADS, "draft_model": BUNDLED_DRAFT_MODEL}
#: A rule that accepts nothing, calibrated for the bundled target.
INERT = {
    "rule": "regret",
    "exact_first": 10_000,
    "target": {
        "name": "bundled",
        "dtype": "float32",
        "fingerprint": fingerprint_of_files(BUNDLED_TARGET, torch.float32),
    },
}


def drafting(method: str | None, *values: Any) -> Any:
    """Return arguments of a test; tests of a method run in the same process, which decodes once."""
    return pytest.param(method, *values, marks=pytest.mark.xdist_group(str(method)))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """The token ids of some bundled problems."""
    tokenizer = EagleFSD.from_pretrained().tokenizer
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question.turns[0]}],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        for question in bundled_questions(QUESTIONS)
    ]


def measure_logged(request: dict[str, Any], log: Path) -> list[dict[str, Any]]:
    """Decode, and write what the plugin logs to a file."""
    logging.basicConfig(filename=log, level=logging.INFO, force=True)
    return measure(request)


@pytest.fixture(scope="module")
def decode(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that answers the prompts with vLLM, and caches what it measured.

    It returns a measurement of one request at a time, in which ``batched`` is that of four at once.
    Every engine has a process of its own, which is forked: the import of vLLM takes many seconds.
    """
    folder, cached = tmp_path_factory.mktemp("vllm"), {}

    def run(method: str | None = None, settings: Any = None, attempt: int = 0) -> dict[str, Any]:
        key = json.dumps([method, settings, attempt])
        if key in cached:
            return cached[key]
        request: dict[str, Any] = {
            "target": str(BUNDLED_TARGET),
            "prompts": prompts,
            "max_tokens": 200,
            "concurrency": [1, 4],
        }
        if method is not None:
            speculative: dict[str, Any] = {"method": method, "num_speculative_tokens": CHAIN}
            if method in HEADS:
                out = folder / method
                if not out.exists():
                    export_head(ExportRequest(head=HEADS[method], format="vllm", out=out))
                speculative["model"] = str(out)
            elif method == "draft_model":
                speculative["model"] = str(BUNDLED_DRAFT_MODEL)
            else:
                speculative["prompt_lookup_max"] = 3
            request["speculative_config"] = speculative
        if settings is not None:
            request["settings"] = settings
        log = folder / "log"
        with multiprocessing.get_context("fork").Pool(1) as process:  # ends it, whatever happens
            alone, batched = process.apply_async(measure_logged, (request, log)).get(timeout=300)
        cached[key] = {**alone, "batched": batched, "log": log.read_text()}
        log.unlink()
        return cached[key]

    return run


@pytest.mark.parametrize("method", [drafting(method) for method in (*DRAFTERS, "ngram")])
def test_a_rule_that_accepts_nothing_changes_no_answer(decode: Any, method: str) -> None:
    """With each kind of draft, vLLM answers as without drafting."""
    found, plain = decode(method, INERT), decode()
    assert found["answers"] == plain["answers"]
    assert found["batched"]["answers"] == plain["batched"]["answers"]
    assert found["tau"] > 1.0


def decode_here(
    prompts: list[list[int]], drafter: Path, settings: dict[str, Any]
) -> tuple[list[list[int]], float]:
    """Return this library's answers with the same chains, and its tokens per step."""
    pair = EagleFSD.from_pretrained(drafter=drafter)
    pair.tree = TreeConfig(total_tokens=CHAIN + 1, depth=CHAIN - 1, top_k=1)
    answers, steps = [], 0
    for ids in prompts:
        acceptance = AcceptanceConfig(**settings)
        out = pair.generate(torch.tensor([ids]), max_new_tokens=200, acceptance=acceptance)
        answers.append(out.sequences[0, len(ids) :].tolist())
        steps += out.stats.passes
    return answers, sum(map(len, answers)) / steps


@pytest.mark.parametrize(("method", "drafter"), [drafting(*item) for item in DRAFTERS.items()])
def test_drafters_accept_as_many_tokens_as_here(
    decode: Any, prompts: list[list[int]], method: str, drafter: Path
) -> None:
    """The number of tokens per step in chains is that of this library within 2 %.

    vLLM's own tau also counts tokens that are accepted after the end of an answer, and its prefill
    emits the first token.
    """
    answers, tau = decode_here(prompts, drafter, {})
    found = decode(method, INERT)
    assert found["answers"] == answers
    emitted = sum(len(answer) - 1 for answer in answers)
    assert emitted / found["drafts"] == pytest.approx(tau, rel=0.02)


@pytest.mark.xdist_group("eagle")
def test_a_threshold_of_0_changes_nothing(decode: Any) -> None:
    found = decode("eagle", {"threshold": 0.0})
    assert found["answers"] == decode()["answers"]
    assert found["tau"] == decode("eagle", INERT)["tau"]


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        drafting("eagle", {"threshold": 0.2, "min_ratio": 0.1}),
        drafting("eagle3", {"threshold": 0.2, "min_ratio": 0.1}),
        drafting("draft_model", {"rule": "top-ratio 0.2"}),
        drafting("eagle", {"rule": "regret", "exact_first": 8}),
    ],
    ids=["eagle-fsd", "eagle3-fsd", "draft-model-top-ratio", "eagle-regret"],
)
def test_rules_accept_as_many_tokens_as_here(
    decode: Any, prompts: list[list[int]], method: str, settings: dict[str, Any]
) -> None:
    """Answers take as many steps as in this library, and fewer than lossless decoding's.

    They are not the library's, which also drafts the first token of an answer.
    """
    exact, fuzzy = decode(method, INERT), decode(method, settings)
    tau = decode_here(prompts, DRAFTERS[method], settings)[1]
    assert fuzzy["tau"] == pytest.approx(tau, rel=0.05)
    assert fuzzy["tau"] - 1.0 > 1.05 * (exact["tau"] - 1.0)
    assert fuzzy["batched"]["tau"] == pytest.approx(fuzzy["tau"], rel=0.05)
    assert "not certified for vLLM" in fuzzy["log"]
    first = settings.get("exact_first", 0)
    for answer, expected in zip(fuzzy["answers"], exact["answers"], strict=True):
        assert answer[:first] == expected[:first]


@pytest.mark.xdist_group("eagle")
def test_fuzzy_decoding_is_faster_than_exact(decode: Any) -> None:
    settings = ({"threshold": 0.0}, {"threshold": 0.2, "min_ratio": 0.1})
    for attempt in range(3):  # the machine may be busy during one of them
        exact, fuzzy = (decode("eagle", item, attempt)["tokens_per_second"] for item in settings)
        if fuzzy > exact:
            return
    raise AssertionError((exact, fuzzy))


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        drafting(None, {"threshold": 0.1}, "nothing is drafted"),
        drafting("ngram", {"threshold": 0.1}, "needs an EAGLE head or a draft model"),
        drafting("eagle3", str(BUNDLED_HEAD), "other weights"),
    ],
)
def test_settings_that_would_not_apply_are_refused(
    decode: Any, method: str | None, settings: Any, message: str
) -> None:
    """vLLM does not start, and the error says why."""
    with pytest.raises(RuntimeError, match=message):
        decode(method, settings)
