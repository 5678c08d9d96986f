"""Settings that engines are given, and what is kept between their steps."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from certificates import CERTIFICATE
from torch import Tensor

from eagle_fsd import AcceptanceConfig, OptionsError, Origin
from eagle_fsd.bundled import BUNDLED_DRAFT_MODEL, BUNDLED_HEAD, BUNDLED_TARGET
from eagle_fsd.engines.bookkeeping import EngineRule, RuleStates
from eagle_fsd.engines.settings import check_weights, describe, find_settings
from eagle_fsd.model.acceptance import rule_for
from eagle_fsd.model.config import Certificate, Settings, read_settings


def test_settings_come_from_the_configuration_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EAGLE_FSD_SETTINGS", raising=False)
    assert find_settings(None) is None
    assert find_settings({"other": 1}) is None
    values = {"threshold": 0.2, "exact_first": 4}
    (tmp_path / "fsd.json").write_text(json.dumps(values))
    expected = Settings(threshold=0.2, exact_first=4)
    for given in (values, json.dumps(values), str(tmp_path), str(tmp_path / "fsd.json")):
        assert find_settings({"eagle_fsd": given}) == expected
    monkeypatch.setenv("EAGLE_FSD_SETTINGS", str(tmp_path))
    assert find_settings({}) == expected
    assert find_settings({"eagle_fsd": {"rule": "typical"}}) == Settings(rule="typical")
    assert find_settings({"eagle_fsd": {}}) == Settings()
    lossless = {"fallback": "stop"}  # no rule to apply
    assert find_settings({"eagle_fsd": lossless}) == Settings(fallback="stop")


def test_settings_that_engines_cannot_apply_are_rejected(tmp_path: Path) -> None:
    for values, words in (
        ({"rule": "mixture"}, "no rule 'mixture' in engines"),
        ({"rule": "budget", "max_fuzzy_nats": 1.0}, "takes no max_fuzzy_nats"),
        ({"threshold": 0.1, "selection": "target"}, "got exact and target"),
        ({"threshold": 0.1, "fallback": "stop"}, "got stop and longest"),
        ({"threshold": 0.1, "divergence_on": "warped"}, "got divergence_on warped"),
        ({"treshold": 0.1}, "treshold"),
        (str(tmp_path / "missing.json"), "missing.json"),
        ([0.1], "neither a path nor an object"),
    ):
        with pytest.raises(OptionsError, match=words):
            find_settings({"eagle_fsd": values})


def test_a_certificate_counts_in_the_engine_it_was_measured_in() -> None:
    settings = Settings(threshold=0.1, certificate=Certificate(**CERTIFICATE))
    assert describe(settings, "vLLM") == f"eagle_fsd: threshold 0.1; {settings.certificate}"
    typed = Settings(threshold=0.1, certificate=Certificate(**CERTIFICATE | {"decoder": "vLLM"}))
    assert describe(typed, "vLLM") == f"eagle_fsd: threshold 0.1; {typed.certificate}"
    for other, engine in ((settings, "SGLang"), (Settings(threshold=0.1), "vLLM")):
        words = f"eagle_fsd: threshold 0.1; not certified for {engine}"
        assert describe(other, engine) == words


def test_weights_other_than_the_calibrated_ones_are_rejected(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    settings = read_settings(BUNDLED_HEAD / "fsd.json")
    log = logging.getLogger("test")
    check_weights(settings, {"target": str(BUNDLED_TARGET)}, log)
    check_weights(Settings(), {"target": "anything"}, log)
    with pytest.raises(OptionsError, match=r"calibrated for the target .* has other weights"):
        check_weights(settings, {"target": str(BUNDLED_DRAFT_MODEL)}, log)
    check_weights(settings, {"drafter": str(tmp_path)}, log)
    assert "cannot tell whether" in caplog.text


def test_states_follow_requests() -> None:
    """States follow requests in any order; new and forgotten requests start with a fresh state."""
    states = RuleStates(rule_for(AcceptanceConfig(rule="regret", exact_first=4)))

    def of(names: list[str], emitted: Tensor) -> Tensor:
        return states.of(names, lambda: emitted, emitted.device)

    first = of(["a", "b"], torch.tensor([1.0, 9.0]))
    assert first.tolist() == [[0.0, 1.0], [0.0, 9.0]]  # nats of the limit, tokens of the delay
    states.store(first + 0.5)
    many = [str(number) for number in range(200)]
    assert not of(many, torch.zeros(200)).any()
    states.keep_only(["a", "b"])
    assert of(["b", "a"], torch.tensor([12.0, 3.0])).tolist() == [[0.5, 12.0], [0.5, 3.0]]
    states.forget(["a"])
    for _ in range(2):  # also after a step that stores nothing
        assert of(["a", "b"], torch.zeros(2)).tolist() == [[0.0, 0.0], [0.5, 0.0]]


def test_accepted_tokens_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    rule = EngineRule(rule_for(AcceptanceConfig()), logging.getLogger("test"))
    with caplog.at_level("INFO"):
        rule.count(torch.tensor([[Origin.FUZZY, Origin.FUZZY, Origin.TARGET, Origin.PADDING]]))
        rule.count(torch.tensor([[Origin.FUZZY, Origin.TARGET], [Origin.EXACT, Origin.TARGET]]))
        rule.report()
        rule.report()
    assert caplog.messages == ["eagle_fsd: the rule accepted 3 of 7 tokens"]
