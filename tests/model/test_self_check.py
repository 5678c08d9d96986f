"""The check of a target's first use: what it admits, what it rejects, and what it leaves behind."""

from __future__ import annotations

import threading

import pytest
import torch
from families import tiny_model
from pairs import (
    greedy_reference,
    new_random_pair,
    prompt,
    small_tree,
    tiny_target,
    untrained_head,
)
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_fsd import DraftModel, EagleFSD, EagleHead, NGramDrafter
from eagle_fsd.model.self_check import check_target
from eagle_fsd.model.target import Target


def _reject(model: LlamaForCausalLM, reason: str) -> None:
    """Decoding raises the reason in one line, every time, with a head and without."""
    for _ in range(2):
        with pytest.raises(
            ValueError, match=f"LlamaForCausalLM is not supported: .*{reason}"
        ) as error:
            EagleFSD(model, None).generate(prompt(4), max_new_tokens=2, method="ar")
        assert str(error.value).isprintable()


def _change(model: LlamaForCausalLM, **changes: object) -> LlamaForCausalLM:
    """Make the model's body replace keyword arguments whenever a tree cache is used."""

    def replace(_module: nn.Module, args: object, kwargs: dict[str, object]) -> object:
        if kwargs.get("past_key_values") is not None:
            kwargs = {**kwargs, **changes}
        return args, kwargs

    model.model.register_forward_pre_hook(replace, with_kwargs=True)
    return model


@pytest.mark.parametrize("ignored", ["attention_mask", "position_ids"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_target_that_ignores_an_input_is_rejected(ignored: str, dtype: torch.dtype) -> None:
    model = _change(tiny_target(dtype=dtype), **{ignored: None})
    _reject(model, "differs from plain passes over its paths")


def test_target_that_keeps_no_keys_is_rejected() -> None:
    """As encoder-decoder models do with a cache of one kind, and recurrent models."""
    _reject(_change(tiny_target(), past_key_values=None), "pass over a draft tree fails")


def test_target_that_ignores_the_window_is_rejected() -> None:
    """A few tokens show it, because the window is short during the check."""
    model = tiny_target()
    model.config.sliding_window = 4096
    _reject(model, "differs from plain passes over its paths")
    assert model.config.sliding_window == 4096


def test_other_threads_do_not_see_the_short_window() -> None:
    """Another thread decodes with the model while a pass of the check is in progress."""
    model, ids = tiny_target("mistral-wide-window"), prompt(30)
    expected = greedy_reference(model, ids, new=8)
    found: list[Tensor] = []

    def decode(*_: object) -> None:
        handle.remove()
        thread = threading.Thread(target=lambda: found.append(greedy_reference(model, ids, new=8)))
        thread.start()
        thread.join()

    handle = model.model.register_forward_pre_hook(decode)
    check_target(Target(model))
    assert torch.equal(found[0], expected)
    model.config.sliding_window = 4
    assert not torch.equal(greedy_reference(model, ids, new=8), expected)


@pytest.mark.parametrize(("model_type", "size"), [("electra", 32), ("rembert", 96)])
def test_output_embedding_need_not_have_the_hidden_size(model_type: str, size: int) -> None:
    """Only a draft head needs that, and is told so."""
    model, ids = tiny_model(model_type), prompt(9)
    expected = greedy_reference(model, ids, new=20)
    for drafter in (NGramDrafter(), DraftModel(tiny_target()), None):
        pair = EagleFSD(model, drafter, small_tree())
        out = pair.generate(ids, max_new_tokens=20, method="fsd" if drafter else "ar")
        assert torch.equal(out.sequences, expected)
    head = EagleHead(LlamaConfig(vocab_size=96, hidden_size=64, num_attention_heads=4))
    message = (
        f"cannot have a draft head .*: its output projection takes vectors of size {size}, but"
    )
    with pytest.raises(ValueError, match=message) as error:
        EagleFSD(model, head, small_tree()).generate(ids, max_new_tokens=4)
    assert str(error.value).isprintable()


def test_head_needs_a_target_whose_logits_are_a_projection() -> None:
    """Plain decoding does not."""
    model, ids = tiny_target(), prompt(5)

    def cube(_module: nn.Module, _inputs: object, output: object) -> object:
        output.logits = output.logits**3
        return output

    model.register_forward_hook(cube)
    pair = EagleFSD(model, untrained_head(model), small_tree())
    for _ in range(2):
        with pytest.raises(ValueError, match="LlamaForCausalLM cannot have a draft head"):
            pair.generate(ids, max_new_tokens=4)
    plain = pair.generate(ids, max_new_tokens=4, method="ar")
    assert torch.equal(plain.sequences, greedy_reference(model, ids, new=4))


def test_exception_in_a_pass_is_reported_in_one_line() -> None:
    model = tiny_target()

    def fail(*_: object) -> Tensor:
        raise KeyError("no such\nlayer")

    model.lm_head.register_forward_hook(fail)
    _reject(model, r"fails \(KeyError: 'no such")


def test_memory_errors_are_not_taken_for_missing_support() -> None:
    model = tiny_target()

    def fail(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    handle = model.lm_head.register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        check_target(Target(model))
    handle.remove()
    check_target(Target(model))


def test_target_is_checked_once() -> None:
    """Also when another object wraps the same model."""
    pair = new_random_pair()
    passes: list[int] = []
    pair.model.base_model.register_forward_hook(lambda *_: passes.append(1))
    out = pair.generate(prompt(5), max_new_tokens=4, method="ar")
    first = len(passes)
    assert torch.equal(out.sequences, greedy_reference(pair.model, prompt(5), new=4))
    passes.clear()
    EagleFSD(pair.model, None).generate(prompt(5), max_new_tokens=4, method="ar")
    assert first == len(passes) + 3 == 5 + 3


def test_broken_logits_are_left_to_decoding() -> None:
    model = tiny_target()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="NaN"):
        EagleFSD(model, None).generate(prompt(4), max_new_tokens=2, method="ar")
