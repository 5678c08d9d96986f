"""The sweep: Pareto front, sentences, divergences, pictures, and the command as a whole."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from eagle_fsd import EagleFSD
from eagle_fsd.evaluation.config import Decoding
from eagle_fsd.evaluation.methods import RULES
from eagle_fsd.evaluation.questions.formats import bundled_questions
from eagle_fsd.evaluation.sweep import (
    Divergences,
    conclusions,
    pareto_front,
    watch_divergences,
)
from eagle_fsd.utils.chat_templates import chat_format

Command = Callable[..., tuple[int, str, str]]


def row(method: str, speed: float, right: float, lost: int = 0, gained: int = 0) -> dict[str, Any]:
    found = {
        "method": method,
        "tokens_per_second": speed,
        "speedup": speed / 50,
        "speed_over_exact": speed / 100,
        "speed_over_exact_interval": [speed / 100 - 0.01, speed / 100 + 0.01],
        "accuracy": right,
        "log_likelihood": -1.0,
    }
    if method != "exact":
        p = 1.0 if abs(lost - gained) < 4 else 0.01
        found["against_exact"] = {
            "accuracy_change": (gained - lost) / 100,
            "lost": lost,
            "gained": gained,
            "paired": 100,
            "mcnemar_p": p,
        }
    return found


ROWS = [
    row("plain", 50, 0.90),
    row("exact", 100, 0.90),
    row("a", 120, 0.89, 2, 1),
    row("b", 110, 0.88, 2, 0),
    row("c", 150, 0.80, 10, 0),
    row("d", 130, 0.88, 4, 2),
]


def test_the_front_is_what_nothing_beats() -> None:
    assert [item["method"] for item in pareto_front(ROWS)] == ["exact", "a", "d", "c"]
    unscored = [{**item, "accuracy": None} for item in ROWS]
    assert [item["method"] for item in pareto_front(unscored)] == ["c"]


def test_two_sentences() -> None:
    """The fastest without a measurable loss, and the fastest within the bound; plain is neither."""
    unharmed, bounded = conclusions(ROWS, largest_loss=0.02)
    assert "whose loss of accuracy is not measurable (p > 0.05): d, 2.60 times plain" in unharmed
    assert "1.30 times exact; -2.0 points (4 lost, 2 gained of 100" in unharmed
    assert "a measured loss of 2 points at most: d" in bounded
    assert "10 points at most: c" in conclusions(ROWS, largest_loss=0.1)[1]
    assert conclusions([item for item in ROWS if item["method"] != "exact"]) == []
    noisy = {**ROWS[2], "speed_over_exact_interval": [0.9, 1.5]}
    assert all(text.endswith("exact decoding.") for text in conclusions([ROWS[1], noisy]))
    slower = [ROWS[1], row("slow", 80, 0.9)]
    assert all(sentence.endswith("exact decoding.") for sentence in conclusions(slower))
    none = [ROWS[1], row("c", 150, 0.8, 10)]
    assert conclusions(none)[0].endswith("exact decoding.")


def test_divergences_are_summed_up_on_both_sides() -> None:
    found = Divergences(
        torch.tensor([True, True, True, False]), {"js": torch.tensor([0.1, 0.2, 0.3, 0.6])}
    )
    summary = found.summary()
    assert summary["drafted"] == 3
    assert summary["not_drafted"] == 1
    assert summary["js"]["drafted"] == pytest.approx([0.15, 0.2, 0.25])
    assert summary["js"]["not_drafted"] == pytest.approx([0.6] * 3)


def test_nodes_are_watched_along_exact_decoding() -> None:
    """One node a target pass at least; the bounded divergences within their bounds."""
    model = EagleFSD.from_pretrained()
    questions = bundled_questions(2)
    found = watch_divergences(
        model, questions, chat_format(model.tokenizer), ["js", "tv"], Decoding(max_new_tokens=32)
    )
    assert len(found.drafted) >= 10
    assert 0 <= float(found.values["js"].min()) <= float(found.values["js"].max()) <= 0.6932
    assert float(found.values["tv"].max()) <= 1.0 + 1e-6
    # The draft is surer of itself where it has what the target chose.
    js, inside = found.values["js"], found.drafted
    assert js[inside].mean() < js[~inside].mean()


def test_the_command_end_to_end(tmp_path: Path, run: Command) -> None:
    command = ["sweep", "--count", 2, "--max-new-tokens", 32, "--out", tmp_path]
    command += ["--thresholds", 0, 0.1, 0.4, "--divergence", "js", "kl", "--min-ratio", 0, 0.3]
    status, printed, _ = run(*command, "--json")
    assert status == 0
    report = json.loads(printed)
    names = [item["method"] for item in report["rows"]]
    grid = [f"{d} T={t}{r}" for d in ("js", "kl") for r in ("", " r=0.3") for t in (0.1, 0.4)]
    assert names == ["plain", "exact", *grid, *RULES]
    assert set(report["divergences"]) == {"drafted", "not_drafted", "questions", "js", "kl"}
    assert len(report["conclusions"]) == 2
    assert report == json.loads((tmp_path / "report.json").read_text())
    with (tmp_path / "report.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["method"] for line in lines] == names
    assert {line["revision"] for line in lines} == {report["environment"]["revision"]}
    assert float(lines[1]["tau"]) == report["rows"][1]["tau"]
    assert int(lines[0]["memory_bytes"]) > 2**20
    text = (tmp_path / "report.md").read_text()
    assert all(sentence in text for sentence in report["conclusions"])
    assert "| tokens a pass | >= 1 |" in text
    for name in ("tradeoff", "divergence", "accepted"):
        with Image.open(tmp_path / f"{name}.png") as picture:
            about = json.loads(picture.text["Description"])
            assert about["environment"]["versions"]["torch"] == version("torch")
            assert len(np.unique(np.asarray(picture.convert("L")))) > 20  # not blank
    before = (tmp_path / "exact.jsonl").read_text()
    status, printed, _ = run(*command)  # nothing is answered twice
    assert status == 0
    assert "Fastest of those whose loss of accuracy is not measurable" in printed
    assert (tmp_path / "exact.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--thresholds", "0", "-0.1"), 2, "-0.1"),
        (("--thresholds", "nan"), 2, "threshold must be at least 0"),
        (("--thresholds", "much"), 2, "'--thresholds'"),
        (("--divergence", "nonsense"), 2, "divergence must be one of"),
        (("--min-ratio", "0", "3"), 2, "min_ratio must be between 0 and 1"),
        (("--baseline", "vllm"), 2, "--baseline knows only 'hf'"),
        (("--assistant", "x"), 2, "--assistant belongs to --baseline hf"),
        (("--assistant", "/nowhere", "--baseline", "hf"), 1, "cannot be loaded"),
        (("--assistant", "x", "--baseline", "hf", "--batch", "2"), 2, "--batch 1 only"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], status: int, words: str, tmp_path: Path, run: Command
) -> None:
    found, _, errors = run("sweep", *arguments, "--out", tmp_path / "out")
    assert found == status
    assert len(errors.splitlines()) == 1
    assert words in errors
