"""``eagle-fsd generate``: its output, and where its settings come from."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_fsd import EagleFSD, EagleHead
from eagle_fsd.bundled import BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.cli.console import print_text
from eagle_fsd.model.checkpoint import save_head
from eagle_fsd.model.loading import load_target
from eagle_fsd.model.target import Target

Run = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.usefixtures("loaded_once")

QUESTION = "Mia has 8 apples at home. Then she gives 3 apples to Tom. How many apples are left?"


def generated(run: Run, *arguments: object) -> dict[str, Any]:
    """Run ``generate --json`` and return what it printed."""
    status, out, err = run("generate", "--json", *arguments)
    assert (status, err) == (0, "")
    return json.loads(out)


def test_answer_is_printed_with_statistics(run: Run) -> None:
    status, out, err = run("generate", "--threshold", "0", QUESTION)
    record = generated(run, "--threshold", 0, QUESTION)
    assert (status, out.strip()) == (0, record["text"].strip())
    assert "####" in out
    assert re.search(r"tau [\d.]+, [\d.]+ tokens/s, threshold 0", err)
    assert record["settings"]["threshold"] == record["stats"]["origins"]["fuzzy"] == 0
    assert len(record["tokens"]) == len(record["origins"]) == record["stats"]["tokens"]
    plain = generated(run, "--plain", QUESTION)
    assert (plain["tokens"], plain["stats"]["tau"]) == (record["tokens"], 1.0)
    assert plain["settings"] == {}
    for option in ("--threshold", "--depth", "--draft-vocabulary"):
        status, _, err = run("generate", "--plain", option, 1, QUESTION)
        assert (status, "--plain excludes --settings, tree" in err) == (2, True)


def test_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("all:\n\tcc", " a.c\r\n"):
        print_text(text, "red")
    assert capsys.readouterr().out == "all:\n\tcc a.c\r\n"


def test_interrupted_answer_is_printed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(generation: Any, *_: Any) -> None:
        next(iter(generation))
        raise KeyboardInterrupt

    monkeypatch.setattr("eagle_fsd.cli.generate._print_answer", interrupt)
    status, _, err = run("generate", "--speedup", QUESTION)
    assert status == 130
    assert re.search(r"tokens: \d+ \(.*\); target passes: 1; tau", err)
    assert err.endswith("error: stopped\n")


def test_prompts(run: Run, model: EagleFSD, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts come from arguments or stdin, raw or formatted with a FastChat template."""
    options = ("--max-new-tokens", 5, "--threshold", 0)
    expected = generated(run, *options, QUESTION)
    assert len(expected["tokens"]) == 5
    monkeypatch.setattr(sys, "stdin", io.StringIO(QUESTION))
    assert generated(run, *options, "-")["tokens"] == expected["tokens"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    assert run("generate", "-")[0] == 2
    assert "PROMPT and - exclude each other" in run("generate", QUESTION, "-")[2]
    ids = model.tokenizer("Mia has", return_tensors="pt").input_ids
    continued = model.generate(ids, max_new_tokens=5, threshold=0.0).sequences[0, ids.shape[1] :]
    assert generated(run, "--raw", *options, "Mia has")["tokens"] == continued.tolist()
    # The answer ends at the stop string of the template, which is "###".
    template = ("--conv-template", "one_shot", "--threshold", 0, QUESTION)
    short = generated(run, *template)
    assert model.tokenizer.decode(short["tokens"]) == short["text"] + "####"
    assert run("generate", *template)[1].strip() == short["text"].strip()
    other = generated(run, "--conv-template", "vicuna_v1.1", *options, QUESTION)
    assert other["stats"]["prefilled"] > expected["stats"]["prefilled"]
    sampling = {"temperature": 2.0, "top_k": 5, "seed": 1}
    sampled = model.generate(ids, max_new_tokens=5, threshold=0.0, **sampling).sequences
    words = ("--raw", "--temperature", 2, "--top-k", 5, "--seed", 1, "Mia has")
    assert generated(run, *options, *words)["tokens"] == sampled[0, ids.shape[1] :].tolist()


def settings_of(run: Run, *options: object) -> dict[str, Any]:
    return generated(run, "--max-new-tokens", 1, *options, "x")["settings"]


def test_settings_come_from_files_and_the_command_line(run: Run, tmp_path: Path) -> None:
    """The command line overrides --settings, which overrides the head's fsd.json."""
    values = json.loads((BUNDLED_HEAD / "fsd.json").read_text())
    settings = settings_of(run)
    assert settings == {name: values[name] for name in settings}
    assert settings["threshold"] > 0
    exact = settings_of(run, "--threshold", 0)
    assert {name: exact[name] for name in values["exact"]} == values["exact"]
    head, file = tmp_path / "head", tmp_path / "fsd.json"
    head.mkdir()
    for name in ("config.json", "model.safetensors"):
        (head / name).symlink_to(BUNDLED_HEAD / name)
    pair = ("--target", BUNDLED_TARGET, "--head", head)
    (head / "fsd.json").write_text('{"threshold": 0.05, "min_ratio": 0.5, "depth": 3}')
    found = settings_of(run, *pair, "--min-ratio", 0.25)
    assert (found["threshold"], found["min_ratio"], found["depth"]) == (0.05, 0.25, 3)
    file.write_text('{"threshold": 0.05, "selection": "target", "depth": 3, "top_k": 3}')
    options = ("--threshold", 0.25, "--tree-top-k", 4, "--divergence", "reverse_kl")
    assert settings_of(run, "--settings", file, *options) == {
        **settings,
        **{"threshold": 0.25, "selection": "target", "depth": 3, "top_k": 4},
        "divergence": "kl_reversed",
    }


def test_threshold_that_accepts_nothing_is_explained(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An untrained head, whose tree is chosen by its costs, gets an explanation."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("eagle_fsd.cli.generate.PROBED_TOKENS", 16)
    target = Target(load_target(BUNDLED_TARGET))
    save_head(EagleHead(target.config, False).attach(target), tmp_path / "head")
    untrained = ("--target", BUNDLED_TARGET, "--head", tmp_path / "head", "--device", "cpu")
    for pair, shown in ((untrained, True), ((), False)):
        words = ("--threshold", 0.05, "--max-new-tokens", 24, "--speedup", QUESTION)
        status, _, errors = run("generate", *pair, *words)
        assert status == 0
        assert "as fast as plain decoding" in errors
        assert ("accepts hardly anything beyond lossless decoding" in errors) == shown
        assert ("Plain decoding (--plain) would be faster: drafting took" in errors) == shown
    monkeypatch.setattr("eagle_fsd.cli.generate._print_speedup", lambda *_: 0.9)
    for words in (("--plain",), ("--total-tokens", 1, "--speedup")):
        assert "would be faster" not in run("generate", *words, "--max-new-tokens", 24, QUESTION)[2]
    assert caplog.text.count("timing a few steps to choose the draft tree") == 1


def test_rule_replaces_the_threshold_of_the_head(run: Run, tmp_path: Path) -> None:
    assert settings_of(run, "--rule", "top-ratio 0.2")["threshold"] == 0.0
    status, _, err = run("generate", "--rule", "top-ratio 0.2", QUESTION)
    assert (status, "rule top-ratio 0.2" in err) == (0, True)
    file = tmp_path / "fsd.json"
    file.write_text('{"rule": "margin"}')
    assert settings_of(run, "--settings", file)["rule"] == "margin"
    assert "rule" not in settings_of(run, "--settings", file, "--rule", "fsd")
    file.write_text('{"rule": "fsd", "threshold": 0.2}')
    assert settings_of(run, "--settings", file)["threshold"] == 0.2
    status, _, err = run("generate", "--rule", "margin", "--threshold", "0.1", QUESTION)
    assert status == 2
    assert err.startswith("error: rule 'margin' takes no threshold; got 0.1")
