"""Settings for other engines."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from typing import get_args

import pytest

from eagle_fsd import EagleFSD, OptionsError, TreeConfig
from eagle_fsd.bundled import BUNDLED_TARGET
from eagle_fsd.evaluation import engines
from eagle_fsd.evaluation.config import CalibrationGrid, EngineName, EvaluationRequest
from eagle_fsd.evaluation.engines import ENGINES, THINKING, flags
from eagle_fsd.evaluation.methods import EXACT, Method
from eagle_fsd.evaluation.search.prediction import PLAIN_TREE
from eagle_fsd.evaluation.selection import candidate_methods
from eagle_fsd.model.acceptance import TargetRule, TopKRule
from eagle_fsd.model.config import Settings
from eagle_fsd.model.drafters.ngram import AdaptiveNGramDrafter, NGramDrafter

TREE = TreeConfig(total_tokens=16, depth=5, top_k=4)


def test_engines_offer_what_they_can_apply() -> None:
    """Flags take the engine's own rule, fsd.json takes ours where vLLM can run it."""
    assert tuple(ENGINES) == get_args(EngineName)
    grid = CalibrationGrid(thresholds=(0.05, 0.1), min_ratios=(0.3,))
    fsd = ["T=0.05 r=0.3", "T=0.1 r=0.3"]
    names = {
        (engine, drafter): [
            method.name
            for method in candidate_methods(grid, engine, temperature, True, drafter=drafter)
        ]
        for engine, temperature, drafter in (
            ("vllm", 0.0, None),
            ("vllm", 0.7, "ngram"),
            ("sglang", 0.7, None),
            ("tensorrt-llm", 0.0, None),
        )
    }
    assert names["vllm", None] == [*fsd, "budget", "top-ratio", "margin", "cascade"]
    assert names["vllm", "ngram"] == ["budget", "top-ratio", "margin"]
    assert names["sglang", None][::6] == ["single 0.9", "acc 0.9"]
    assert names["tensorrt-llm", None][::5] == [f"top {top} gap 0.1" for top in (2, 5, 10)]
    for engine, temperature, settings, message in (
        ("sglang", 0.0, None, "set a --temperature above 0; got 0"),
        ("tensorrt-llm", 0.7, None, r"set --temperature to 0; got 0\.7"),
        ("vllm", 0.0, Settings(fallback="stop"), "supports fallback exact"),
    ):
        with pytest.raises(OptionsError, match=message):
            candidate_methods(grid, engine, temperature, True, settings)


def test_settings_are_printed_as_each_engine_takes_them(
    model: EagleFSD, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The default markers of TensorRT-LLM are another model's tokens."""
    monkeypatch.setattr(engines, "THINKING", ("Step", "####"))
    encode = model.tokenizer.encode
    begin, end = (encode(f"\n{word}", add_special_tokens=False)[-1] for word in ("Step", "####"))
    assert begin != end
    shape = "--speculative-num-steps 6 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16"
    common = "speculative_config:\n  decoding_type: MTP\n  max_draft_len: 6"
    request = EvaluationRequest(out=tmp_path)
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
        assert flags(name, method, TREE, model, request) == expected
    for name in ENGINES:
        found = flags(name, EXACT, PLAIN_TREE, model, request)
        assert found.startswith("# Plain decoding is the fastest: ")
        assert "\n" not in found


def test_vllm_starts_with_the_settings(model: EagleFSD, tmp_path: Path) -> None:
    """Heads are exported first; n-grams need no model."""
    ngram, chain = copy.copy(model), TreeConfig(total_tokens=8, depth=6, top_k=1)
    ngram.drafter = NGramDrafter()
    speculative = {}
    for pair, drafter in ((model, None), (ngram, "ngram")):
        request = EvaluationRequest(out=tmp_path, drafter=drafter)
        *export, serve = flags("vllm", EXACT, chain, pair, request).split("\n")
        assert [line[:27] for line in export] == ["eagle-fsd train export --fo"][: drafter is None]
        words = shlex.split(serve)
        assert words[1:4] == ["vllm", "serve", str(BUNDLED_TARGET)]
        assert json.loads(words[7]) == {"eagle_fsd": str(tmp_path / "fsd.json")}
        assert words[8:] == ["--dtype", "float32"]
        speculative[drafter] = json.loads(words[5])
    exported = {"method": "eagle", "num_speculative_tokens": 7, "model": str(tmp_path / "head")}
    assert speculative[None] == exported
    assert speculative["ngram"]["method"] == "ngram"
    for options in ({"quantize": "int8"}, {"draft_vocabulary": 100}):
        with pytest.raises(OptionsError, match="vLLM would load the models without --"):
            ENGINES["vllm"].check(model, EvaluationRequest(**options))
    ngram.drafter = AdaptiveNGramDrafter()
    with pytest.raises(OptionsError, match="vLLM has no drafter like AdaptiveNGramDrafter"):
        ENGINES["vllm"].check(ngram, EvaluationRequest())


def test_markers_that_are_no_tokens_are_rejected(model: EagleFSD) -> None:
    """Both would be read as ">", and the phase would never begin."""
    ENGINES["sglang"].check(model, EvaluationRequest())
    with pytest.raises(OptionsError, match="the target's tokenizer has no token <think>"):
        ENGINES["tensorrt-llm"].check(model, EvaluationRequest())
