"""Targets wrapped by PEFT or ``torch.compile``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pairs import (
    DEFAULT_ARCHITECTURE,
    NEW_TOKENS,
    aligned_pair,
    batch,
    greedy_reference,
    prompt,
    raises_one_line,
    reference,
    small_tree,
    tiny_target,
    untrained_head,
)
from peft import (
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch import nn

from eagle_fsd import EagleFSD


@pytest.fixture(autouse=True)
def _compilation_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")


def _pair(model: nn.Module) -> EagleFSD:
    return EagleFSD(model, copy.deepcopy(aligned_pair().drafter), small_tree())


def _check_decoding(pair: EagleFSD, wrapped: Any, expected: torch.Tensor) -> None:
    """Compare every way to decode greedily with the target's own output."""
    ids, mask = batch()
    assert torch.equal(pair.generate(ids, mask, NEW_TOKENS).sequences, expected)
    assert torch.equal(pair.generate(ids, mask, NEW_TOKENS, method="ar").sequences, expected)
    generate = pair.custom_generate
    found = greedy_reference(wrapped, ids, mask, new=NEW_TOKENS, custom_generate=generate)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("mixed", "modules"),
    [(False, ("q_proj", "v_proj")), (True, ("embed_tokens", "down_proj", "lm_head"))],
)
def test_peft_model_decodes_like_its_own_generate(mixed: bool, modules: tuple[str, ...]) -> None:
    config = LoraConfig(
        r=4, target_modules=list(modules), init_lora_weights=False, task_type="CAUSAL_LM"
    )
    torch.manual_seed(0)
    model = get_peft_model(copy.deepcopy(aligned_pair().model), config, mixed=mixed)
    ids, mask = batch()
    expected = greedy_reference(model.eval(), ids, mask, new=NEW_TOKENS)
    assert not torch.equal(expected, reference(aligned=True))
    pair = _pair(model.train())
    assert type(pair.model) is type(aligned_pair().model)
    _check_decoding(pair, model, expected)
    if not mixed:
        with model.disable_adapter():
            _check_decoding(pair, model, reference(aligned=True))


@pytest.mark.parametrize("architecture", [DEFAULT_ARCHITECTURE, "qwen3"])
def test_output_projection_can_be_replaced_between_calls(architecture: str) -> None:
    """A new module, or an adapter of it, is used by new calls and by an open batch."""
    model = tiny_target(architecture)
    pair, ids = EagleFSD(model, untrained_head(model), small_tree()), prompt(9)
    config = LoraConfig(target_modules=["lm_head"], init_lora_weights=False)
    torch.manual_seed(0)
    open_batch, seen = pair.batch(1), set()
    for change in (
        lambda: None,
        lambda: model.set_output_embeddings(nn.Linear(32, model.config.vocab_size, bias=False)),
        lambda: get_peft_model(model, config),
    ):
        change()
        answer = open_batch.add(pair.request(ids[0], 8))
        while not answer.finished:
            open_batch.step()
        expected = greedy_reference(model, ids, new=8)
        assert torch.equal(pair.generate(ids, max_new_tokens=8).sequences, expected)
        assert answer.tokens == expected[0, 9:].tolist()
        seen.add(tuple(answer.tokens))
    assert len(seen) == 3


def test_adapter_outside_the_model_raises_one_line() -> None:
    virtual: dict[str, Any] = {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}
    alora: dict[str, Any] = {"alora_invocation_tokens": [5], "task_type": "CAUSAL_LM"}
    for config, method in (
        (PromptTuningConfig(**virtual), "PROMPT_TUNING"),
        (PrefixTuningConfig(**virtual), "PREFIX_TUNING"),
        (LoraConfig(target_modules=["q_proj"], **alora), "aLoRA"),
    ):
        model = get_peft_model(tiny_target(), config)
        for target in (model, torch.compile(model)):
            message = f"^the {method} adapter 'default' is not"
            with raises_one_line(message):
                EagleFSD(target, untrained_head(tiny_target()))


@pytest.fixture
def compiler() -> Iterator[None]:
    """Forget compiled code before and after."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_compiled_module_is_unwrapped() -> None:
    model = copy.deepcopy(aligned_pair().model)
    compiled = torch.compile(model)
    pair = _pair(compiled)
    assert pair.model is model
    _check_decoding(pair, compiled, reference(aligned=True))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("used", [False, True])
def test_model_compiled_in_place_decodes_like_the_original(used: bool) -> None:
    """Passes over draft trees run compiled, also if the model is compiled between two calls."""
    model, ids, calls = copy.deepcopy(aligned_pair().model), prompt(6, 3), []
    expected = greedy_reference(model, ids, new=12)

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        return lambda *inputs: calls.append(1) or graph(*inputs)

    pair = _pair(model)
    if used:
        pair.generate(ids, max_new_tokens=12)
    model.compile(backend=backend)
    out = pair.generate(ids, max_new_tokens=12)
    assert torch.equal(out.sequences, expected)
    assert out.stats.accepted == aligned_pair().generate(ids, max_new_tokens=12).stats.accepted
    assert len(calls) >= out.stats.passes
