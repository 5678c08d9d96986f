"""A decoding step neither reads from the device nor mixes devices, shown without a GPU.

``test_separate_processes.py`` runs these tests in a process of their own.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import pytest
import torch
from eagle3_heads import target_model, untrained_eagle3
from pairs import small_tree, tiny_target, untrained_head
from rules import RULES, WRAPPED
from simulated_accelerator import (
    DEVICES,
    HostCopyError,
    move,
    receive_inputs,
    simulated_accelerator,
    without_host_copies,
)
from torch._subclasses.fake_tensor import DataDependentOutputException

from eagle_fsd import AcceptanceConfig, EagleFSD, SamplingConfig
from eagle_fsd.model.acceptance import ExactRule, FuzzyRule
from eagle_fsd.model.drafters.draft_model import DraftModel
from eagle_fsd.model.drafters.eagle3 import Eagle3Flags
from eagle_fsd.model.drafters.interface import NoDrafter
from eagle_fsd.model.engine import Engine
from eagle_fsd.model.execution import LaunchedStep
from eagle_fsd.model.request import Answer, Decision, Request
from eagle_fsd.model.self_check import check_target
from eagle_fsd.model.target import Target
from eagle_fsd.model.verify import AcceptanceRule

GREEDY = SamplingConfig()
SAMPLED = SamplingConfig(temperature=0.7, top_k=20, top_p=0.9)
ALL_RULES: list[AcceptanceRule] = [
    ExactRule(),
    FuzzyRule(0.1, min_ratio=0.2),
    FuzzyRule(0.1, divergence_on="warped"),
    *RULES,
    *WRAPPED[-2:],
]


@lru_cache
def pair(split: bool = False) -> EagleFSD:
    """Return a pair on the first simulated device, or with its second half on the second one."""
    kinds = ["sliding_attention", "full_attention"]
    model = tiny_target("qwen2", sliding_window=6, use_sliding_window=True, layer_types=kinds)
    pair = EagleFSD(model, untrained_head(model), small_tree())
    with simulated_accelerator():
        move(model)
        move(pair.drafter, DEVICES[split])
        if split:  # like accelerate, with a hook on every module that it places
            base = model.base_model
            for module in (base.embed_tokens, base.rotary_emb, base.layers[0]):
                receive_inputs(module, DEVICES[0])
            for module in (base.layers[1], base.norm, model.lm_head):
                receive_inputs(move(module, DEVICES[1]), DEVICES[1])
    return pair


@lru_cache
def draft_model_pair(top_k: int) -> EagleFSD:
    """Return a pair with a draft model, whose layers differ in their windows, on one device."""
    kinds = ["sliding_attention", "full_attention"]
    target = tiny_target()
    draft = tiny_target("qwen2", sliding_window=6, use_sliding_window=True, layer_types=kinds)
    check_target(Target(draft))  # it reads the result
    tree = small_tree(top_k=top_k, total_tokens=5)
    pair = EagleFSD(target, DraftModel(draft), tree)
    with simulated_accelerator():
        move(target)
        move(draft)
    return pair


@lru_cache
def eagle3_pair() -> EagleFSD:
    """Return a pair with an EAGLE-3 head over a part of the vocabulary, on one device."""
    target = target_model()
    head = untrained_eagle3(target, flags=Eagle3Flags(fc_norm=True, norm_output=True))
    pair = EagleFSD(target, head, small_tree())
    with simulated_accelerator():
        move(target)
        move(head)
    return pair


def run_steps(
    pair: EagleFSD,
    sampling: SamplingConfig = GREEDY,
    rule: AcceptanceRule | None = None,
    rows: int = 3,
    drafted: bool = True,
    **acceptance: Any,
) -> tuple[Engine, Any]:
    """Take two steps; returns the engine and the second step.

    Those that would be captured on CUDA must not copy from the host.
    """
    options = AcceptanceConfig(**acceptance)
    decision = Decision.of(sampling, options, rule, details=2)
    chains = pair.drafter.draws_chains and pair.tree.top_k == 1  # as the pipeline requires
    draw = decision.sampler.draw_draft if chains and not decision.sampler.greedy else None
    drafter = pair.drafter if drafted else NoDrafter()
    with simulated_accelerator():
        engine = Engine(pair.target, drafter, pair.tree, draw)
        lengths = range(9, 9 - 4 * rows, -4)
        engine.admit([Answer(Request([1] * length, 20, decision)) for length in lengths])
        engine.prefill()
        _launch(engine)
        captured = pair.target.one_device and not engine.draft.waits and decision.on_device
        with without_host_copies() if captured else nullcontext():
            return engine, _launch(engine)


def _launch(engine: Engine) -> LaunchedStep:
    return engine.execution.launch(engine.state, engine.tree, *engine._visible_slots())


@pytest.mark.parametrize("rule", ALL_RULES, ids=repr)
def test_step_with_every_rule(rule: AcceptanceRule) -> None:
    run_steps(pair(), SAMPLED, rule)


#: A selection with each fallback and divergence.
CHOICES = [
    ("longest", "exact", "kl"),
    ("longest", "stop", "top_k_js"),
    ("priced", "exact", "js_reference"),
    ("priced", "stop", "tv"),
    ("target", "exact", "top_p_js"),
    ("target", "stop", "kl_reversed"),
    ("sample", "exact", "js"),
    ("sample", "stop", "top_p_kl"),
]


@pytest.mark.parametrize(("selection", "fallback", "divergence"), CHOICES)
def test_step_with_every_way_to_choose(selection: str, fallback: str, divergence: str) -> None:
    sampling = GREEDY if selection == "priced" else SAMPLED
    choice = {"selection": selection, "fallback": fallback, "divergence": divergence}
    run_steps(pair(), sampling, threshold=0.2, **choice)


@pytest.mark.parametrize(
    ("rows", "drafted", "split"),
    [(1, True, False), (3, True, True), (1, False, True), (3, False, False)],
)
def test_step_on_one_device_and_on_two(rows: int, drafted: bool, split: bool) -> None:
    engine, launched = run_steps(pair(split), threshold=0.2, rows=rows, drafted=drafted)
    home = torch.device(DEVICES[split])
    for item in (launched._packed, engine.state.roots, engine.state.lengths):
        assert (item.device, item.shape[0]) == (home, rows)
    devices = {store.device for store in engine.cache._stores}
    assert devices == {torch.device(name) for name in DEVICES[: 1 + split]}


@pytest.mark.parametrize(
    ("top_k", "selection", "threshold", "sampling"),
    [
        (1, "longest", 0.0, SAMPLED),  # as a block
        (1, "sample", 0.2, SAMPLED),
        (3, "longest", 0.2, GREEDY),
    ],
)
def test_step_with_a_draft_model(
    top_k: int, selection: str, threshold: float, sampling: SamplingConfig
) -> None:
    run_steps(draft_model_pair(top_k), sampling, threshold=threshold, selection=selection)


@pytest.mark.parametrize("divergence", ["js", "top_p_js"])
def test_step_with_an_eagle3_head(divergence: str) -> None:
    run_steps(eagle3_pair(), SAMPLED, divergence=divergence, threshold=0.2)


def test_reads_copies_and_mixed_devices_are_detected() -> None:
    engine, result = run_steps(pair())
    with simulated_accelerator():
        tensors = [torch.ones(2, device=device) for device in DEVICES]
        with pytest.raises(DataDependentOutputException):
            engine._read(result)
        with pytest.raises(RuntimeError, match=r"gpu:0.*gpu:1"):
            torch.add(*tensors)
    for copy in (
        lambda: torch.tensor([1], device=DEVICES[0]),
        lambda: torch.zeros(2).to(DEVICES[0]),
        lambda: torch.zeros(2, device=DEVICES[0]).copy_(torch.zeros(2)),
    ):
        with simulated_accelerator():
            copy()
            with without_host_copies(), pytest.raises(HostCopyError):
                copy()
