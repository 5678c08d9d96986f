"""lm-evaluation-harness on tasks in local files, and what it should find with the bundled pair."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import eagle_fsd
from eagle_fsd import EagleFSD

#: Where ``make slow`` installs the harness and what it needs besides the other packages.
LM_EVAL = Path(sys.prefix) / "lm-eval"
requires_harness = pytest.mark.skipif(
    not LM_EVAL.exists(), reason="lm-eval is not installed; see make slow"
)

#: The samples of each task, as the harness logs them: numbers and flags are strings.
Samples = dict[str, list[dict[str, Any]]]
QUESTIONS = [
    "Mia has 8 apples. Then",
    "At the museum, Mia buys 4 boxes",
    "There are 5 boxes. First,",
    "Then she gives",
]
ANSWER_LENGTH = 24
STOP = "."
TIMEOUT = 600
#: Arguments of a task that generates answers.
ANSWERS: dict[str, Any] = {
    "output_type": "generate_until",
    "doc_to_text": "question",
    "doc_to_target": "question",
    "metric_list": [{"metric": "exact_match"}],
}
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "question",
        "doc_to_choice": "choices",
        "doc_to_target": 0,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "question",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "answers": {
        **ANSWERS,
        "generation_kwargs": {
            "until": [STOP],
            "max_gen_toks": ANSWER_LENGTH,
            "temperature": 0,
            "fsd": {"threshold": 0.0},
        },
    },
}


def greedy_answer(model: EagleFSD, question: str, max_new_tokens: int = ANSWER_LENGTH) -> str:
    ids = model.tokenizer(question, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=max_new_tokens, threshold=0.0).sequences
    return model.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def score(model: EagleFSD, ids: list[int], start: int) -> tuple[float, bool]:
    """Return the log-likelihood of ``ids[start:]``, and whether they are the greedy answer."""
    with torch.no_grad():
        log_probs = model.model(torch.tensor([ids], device=model.model.device))
        log_probs = log_probs.logits[0, :-1].log_softmax(-1).cpu()
    rows, tokens = log_probs[start - 1 :], torch.tensor(ids[start:])
    total = float(rows.gather(1, tokens[:, None]).sum())
    return total, bool((rows.argmax(-1) == tokens).all())


def run_beside_harness(
    arguments: Sequence[object], folder: Path | None = None, **variables: str
) -> str:
    """Run Python with the harness and without the Hub; return what it prints."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{LM_EVAL}{os.pathsep}{Path(eagle_fsd.__file__).parents[1]}",
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1",
        **variables,
    }
    command = [sys.executable, *map(str, arguments)]
    run = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert run.returncode == 0, run.stderr[-5000:]
    return run.stdout


def run_harness(
    program: Sequence[str],
    folder: Path,
    model: EagleFSD,
    arguments: Sequence[str],
    tasks: Mapping[str, Mapping[str, Any]] = TASKS,
) -> tuple[Samples, dict[str, Any]]:
    """Run the harness in a process; return the samples by task and the content of the results file.

    It needs an empty folder and no network. ``arguments`` follow its own.
    """
    documents = [
        {"question": text, "choices": [greedy_answer(model, text)[:20], " 7 pears", "?"]}
        for text in QUESTIONS
    ]
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in documents), encoding="utf-8")
    for name, task in tasks.items():
        files = {"data_files": {"test": str(data)}}
        common = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
        content = yaml.safe_dump({"task": name, **common, **task})
        (folder / f"{name}.yaml").write_text(content, encoding="utf-8")
    command = [*program, "--tasks", ",".join(tasks), "--include_path", str(folder)]
    command += ["--log_samples", "--output_path", str(folder / "results"), *arguments]
    run_beside_harness(command, folder, HF_HOME=str(folder / "cache"))
    samples = {}
    for name in tasks:
        (file,) = (folder / "results").rglob(f"samples_{name}_*.jsonl")
        samples[name] = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(samples[name]) == len(QUESTIONS)
    (file,) = (folder / "results").rglob("results_*.json")
    return samples, json.loads(file.read_text())


def check_results(samples: Samples, model: EagleFSD) -> None:
    """Check the results of :data:`TASKS`, where some choices are greedy answers."""
    flags = set()
    for sample in samples["choices"]:
        requests = sample["arguments"].values()
        for request, ((found, flag),) in zip(requests, sample["resps"], strict=True):
            context, choice = request["arg_0"], request["arg_1"]
            start = len(model.tokenizer(context).input_ids)
            expected, greedy = score(model, model.tokenizer(context + choice).input_ids, start)
            assert float(found) == pytest.approx(expected, abs=1e-4)
            assert flag == str(greedy)
            flags.add(flag)
    assert flags == {"False", "True"}
    for sample in samples["perplexity"]:
        ids = model.tokenizer(sample["doc"]["question"]).input_ids
        expected, _ = score(model, [model.tokenizer.bos_token_id, *ids], 1)
        ((found,),) = sample["resps"]
        assert float(found) == pytest.approx(expected, abs=1e-4)
    for sample in samples["answers"]:
        answer = greedy_answer(model, sample["doc"]["question"])
        assert sample["resps"] == [[answer.partition(STOP)[0]]]
