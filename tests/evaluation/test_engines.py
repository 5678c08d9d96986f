"""Settings for other engines."""

from __future__ import annotations

from typing import get_args

import pytest

from eagle_fsd import EagleFSD, OptionsError, TreeConfig
from eagle_fsd.evaluation import engines
from eagle_fsd.evaluation.config import EngineName
from eagle_fsd.evaluation.engines import ENGINES, THINKING, series, settings
from eagle_fsd.evaluation.methods import EXACT, Method
from eagle_fsd.evaluation.tuning.candidates import PLAIN_TREE
from eagle_fsd.model.acceptance import TargetRule, TopKRule

TREE = TreeConfig(total_tokens=16, depth=5, top_k=4)


def test_series_accept_more_and_more() -> None:
    assert tuple(ENGINES) == get_args(EngineName)
    sglang, tensorrt = series("sglang", 0.7), series("tensorrt-llm", 0.0)
    assert list(sglang) == ["single", "acc"]
    for name, methods in sglang.items():
        values = [getattr(method.rule, name) for method in methods]
        assert values == sorted(values, reverse=True)
    for methods in tensorrt.values():
        gaps = [method.rule.gap for method in methods]
        assert gaps == sorted(gaps)
        assert {method.phase for method in methods} == {THINKING}
    groups = (*sglang.values(), *tensorrt.values())
    names = [method.name for methods in groups for method in methods]
    assert len(set(names)) == len(names)
    with pytest.raises(OptionsError, match="set a --temperature above 0; got 0"):
        series("sglang", 0.0)
    with pytest.raises(OptionsError, match=r"set --temperature to 0; got 0\.7"):
        series("tensorrt-llm", 0.7)


def test_settings_are_printed_as_each_engine_takes_them(
    model: EagleFSD, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default markers of TensorRT-LLM are another model's tokens."""
    monkeypatch.setattr(engines, "THINKING", ("Step", "####"))
    encode = model.tokenizer.encode
    begin, end = (encode(f"\n{word}", add_special_tokens=False)[-1] for word in ("Step", "####"))
    assert begin != end
    shape = "--speculative-num-steps 6 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
    common = "speculative_config:\n  decoding_type: MTP\n  max_draft_len: 6"
    name: EngineName
    for name, method, expected in (
        (
            "sglang",
            Method("acc 0.5", rule=TargetRule(acc=0.5)),
            f"{shape} --speculative-accept-threshold-single 1"
            " --speculative-accept-threshold-acc 0.5",
        ),
        (
            "sglang",
            EXACT,
            f"{shape} --speculative-accept-threshold-single 1 --speculative-accept-threshold-acc 1",
        ),
        (
            "tensorrt-llm",
            Method("top 5 gap 0.4", rule=TopKRule(5, 0.4), phase=THINKING),
            f"{common}\n  use_relaxed_acceptance_for_thinking: true"
            "\n  relaxed_topk: 5\n  relaxed_delta: 0.4"
            f"\n  begin_thinking_phase_token: {begin}\n  end_thinking_phase_token: {end}",
        ),
        ("tensorrt-llm", EXACT, common),
    ):
        assert settings(name, method, TREE, model.tokenizer) == expected
    for name in ENGINES:
        found = settings(name, EXACT, PLAIN_TREE, model.tokenizer)
        assert found.startswith("# Plain decoding is the fastest: ")
        assert "\n" not in found


def test_markers_that_are_no_tokens_are_rejected(model: EagleFSD) -> None:
    """Both would be read as ">", and the phase would never begin."""
    ENGINES["sglang"].check(model.tokenizer)
    with pytest.raises(OptionsError, match="the target's tokenizer has no token <think>"):
        ENGINES["tensorrt-llm"].check(model.tokenizer)
