"""Settings for other engines."""

from __future__ import annotations

from typing import get_args

import pytest

from eagle_fsd import EagleFSD, OptionsError, Origin, TreeConfig
from eagle_fsd.evaluation import engines
from eagle_fsd.evaluation.engines import (
    THINKING,
    EngineName,
    series,
    settings,
    thinking_tokens,
)
from eagle_fsd.evaluation.methods import BEFORE_RESULT, EXACT, Method
from eagle_fsd.evaluation.tuning.candidates import PLAIN_TREE
from eagle_fsd.model.acceptance import FuzzyRule, PhaseRule, TargetRule, TopKRule

TREE = TreeConfig(total_tokens=16, depth=5, top_k=4)


def test_series_accept_more_and_more() -> None:
    groups = series("sglang", 0.7)
    assert list(groups) == ["single", "acc"]
    for name, methods in groups.items():
        values = [getattr(method.rule, name) for method in methods]
        assert values == sorted(values, reverse=True)
    for methods in series("tensorrt-llm", 0.0).values():
        gaps = [method.rule.gap for method in methods]
        assert gaps == sorted(gaps)
        assert {method.phase for method in methods} == {THINKING}
    names = [
        method.name
        for engine, temperature in zip(get_args(EngineName), (0.7, 0.0), strict=True)
        for group in series(engine, temperature).values()
        for method in group
    ]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("engine", "temperature", "message"),
    [
        ("sglang", 0.0, "set a --temperature above 0; got 0"),
        ("tensorrt-llm", 0.7, "set --temperature to 0; got 0.7"),
    ],
)
def test_temperature_without_the_rule_is_rejected(
    engine: EngineName, temperature: float, message: str
) -> None:
    with pytest.raises(OptionsError, match=message):
        series(engine, temperature)


def test_settings_of_sglang(model: EagleFSD) -> None:
    method = Method("acc 0.5", rule=TargetRule(acc=0.5))
    shape = "--speculative-num-steps 6 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
    assert settings("sglang", method, TREE, model.tokenizer) == (
        f"{shape} --speculative-accept-threshold-single 1 --speculative-accept-threshold-acc 0.5"
    )
    assert settings("sglang", EXACT, TREE, model.tokenizer) == (
        f"{shape} --speculative-accept-threshold-single 1 --speculative-accept-threshold-acc 1"
    )


def test_settings_of_tensorrt_llm(model: EagleFSD, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's defaults for the markers are another model's tokens."""
    monkeypatch.setattr(engines, "THINKING", ("Step", "####"))
    encode = model.tokenizer.encode
    begin, end = (encode(f"\n{word}", add_special_tokens=False)[-1] for word in ("Step", "####"))
    common = "speculative_config:\n  decoding_type: MTP\n  max_draft_len: 6"
    method = Method("top 5 gap 0.4", rule=TopKRule(5, 0.4), phase=THINKING)
    assert settings("tensorrt-llm", method, TREE, model.tokenizer) == (
        f"{common}\n  use_relaxed_acceptance_for_thinking: true"
        "\n  relaxed_topk: 5\n  relaxed_delta: 0.4"
        f"\n  begin_thinking_phase_token: {begin}\n  end_thinking_phase_token: {end}"
    )
    assert begin != end
    assert settings("tensorrt-llm", EXACT, TREE, model.tokenizer) == common


@pytest.mark.parametrize("engine", get_args(EngineName))
def test_plain_decoding_has_no_flags_of_speculation(engine: EngineName, model: EagleFSD) -> None:
    found = settings(engine, EXACT, PLAIN_TREE, model.tokenizer)
    assert found.startswith("# Plain decoding is the fastest")
    assert "--" not in found
    assert ":" not in found.removeprefix("# Plain decoding is the fastest:")


def test_markers_that_are_no_tokens_are_rejected(model: EagleFSD) -> None:
    """Both would be read as ">", and the phase would never begin."""
    with pytest.raises(OptionsError, match="the target's tokenizer has no token <think>"):
        thinking_tokens(model.tokenizer)


def test_phase_of_a_method_ends_at_its_marker() -> None:
    """On the bundled pair: everything before the final number may be fuzzy, the number is not."""
    model = EagleFSD.from_pretrained()
    (end,) = model.tokenizer.encode("####", add_special_tokens=False)
    rule = BEFORE_RESULT.rule_for(model)
    assert rule == PhaseRule(FuzzyRule(0.2, min_ratio=0.1), None, end)
    text = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Mia has 8 apples. She gives 3 to Tom. How many are left?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(text.input_ids, rule=PhaseRule(FuzzyRule(9.0), None, end))
    new = out.sequences[0, text.input_ids.shape[1] :]
    (place,) = (new == end).nonzero()[0].tolist()
    assert (out.origins[0, :place] == Origin.FUZZY).any()
    assert not (out.origins[0, place + 1 :] == Origin.FUZZY).any()
