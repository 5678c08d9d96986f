"""The target: chunks, windows, data types, and the check of its first use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import tiny_model
from pairs import (
    aligned_pair,
    greedy_reference,
    left_padded,
    plain_logits,
    prompt,
    raises_one_line,
    random_pair,
    small_tree,
    tiny_target,
    untrained_head,
)
from torch import Tensor, nn
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

from eagle_fsd import DraftModel, EagleFSD, EagleHead, NGramDrafter, PrefixCache
from eagle_fsd.model import engine
from eagle_fsd.model.self_check import check_target
from eagle_fsd.model.target import Target


@pytest.mark.parametrize(("make", "threshold"), [(random_pair, 10.0), (aligned_pair, 0.0)])
def test_output_does_not_depend_on_the_prefill_chunk(
    make: Callable[[], EagleFSD], threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With everything accepted, the output also depends on the head's cache and first feature."""
    model = make()
    ids, mask = left_padded(*(prompt(length, length) for length in (20, 9, 4, 2, 1)))
    options = {"attention_mask": mask, "max_new_tokens": 14, "threshold": threshold}
    whole = model.generate(ids, **options)
    assert whole.stats.tau > 1.5
    for chunk in (1, 3, 8, 19):
        monkeypatch.setattr(engine, "PREFILL_CHUNK", chunk)
        parts = model.generate(ids, **options)
        assert torch.equal(parts.sequences, whole.sequences)
        assert parts.stats.accepted == whole.stats.accepted


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("mistral-wide-window", {"sliding_window": 9}),
        ("qwen2", {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}),
        ("qwen2", {"sliding_window": 3, "layer_types": ["sliding_attention"] * 2}),
    ],
)
def test_sliding_windows_match_hugging_face(architecture: str, options: dict[str, Any]) -> None:
    """All or some layers have windows, and prompts are shorter and longer than the windows."""
    model = tiny_target(architecture, **options)
    pair = EagleFSD(model, untrained_head(model), small_tree())
    ids, mask = left_padded(prompt(7, 1), prompt(1, 2), prompt(20, 3))
    expected = greedy_reference(model, ids, mask, new=30)
    for method in ("fsd", "ar"):
        assert torch.equal(pair.generate(ids, mask, 30, method=method).sequences, expected)
    model.config.sliding_window = 200
    assert not torch.equal(greedy_reference(model, ids, mask, new=30), expected)


def test_unsupported_targets_are_rejected() -> None:
    for attention in ("flash_attention_2", "flex_attention"):
        model = tiny_target()
        model.config._attn_implementation_internal = attention
        with pytest.raises(ValueError, match=f"{attention}.*sdpa, eager"):
            Target(model)
    with pytest.raises(ValueError, match="LlamaModel has no output projection"):
        Target(AutoModel.from_config(tiny_target().config))


def test_decoding_does_not_change_the_model() -> None:
    """Neither a successful nor a failed pass leaves hooks or changed settings behind."""
    model, ids = tiny_target(), prompt(7)
    before = greedy_reference(model, ids, new=8)
    pair = EagleFSD(model, untrained_head(model))
    assert torch.equal(pair.generate(ids, max_new_tokens=8).sequences, before)
    handle = model.lm_head.register_forward_hook(_raise)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        pair.generate(ids, max_new_tokens=8)
    handle.remove()
    assert not any(module._forward_hooks for module in model.modules())
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(greedy_reference(model, ids, new=8), before)


def test_decoding_under_autocast() -> None:
    """RoPE makes the keys float32 there, and the values stay bfloat16, also in a kept cache."""
    model = tiny_target()
    pair = EagleFSD(model, untrained_head(model), small_tree())
    ids, mask = left_padded(prompt(9, 1), prompt(4, 2))
    with torch.autocast("cpu", torch.bfloat16):
        expected = greedy_reference(model, ids, mask, new=12)
        for method in ("fsd", "ar"):
            assert torch.equal(pair.generate(ids, mask, 12, method=method).sequences, expected)
        changed = plain_logits(model, ids[0])[0]
    assert not torch.equal(changed, plain_logits(model, ids[0])[0])
    kept, ids = PrefixCache(), prompt(9, 1)
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found = pair.generate(ids, max_new_tokens=12, prefix_cache=kept).sequences
            assert torch.equal(found, greedy_reference(model, ids, new=12))


def _raise(*_args: object) -> None:
    raise RuntimeError("broken on purpose")


def _reject(model: LlamaForCausalLM, reason: str) -> None:
    """Decoding raises the reason in one line, every time."""
    for _ in range(2):
        with raises_one_line(f"LlamaForCausalLM is not supported: .*{reason}"):
            EagleFSD(model, None).generate(prompt(4), max_new_tokens=2, method="ar")


def _change(model: LlamaForCausalLM, **changes: object) -> LlamaForCausalLM:
    """Make the model's body replace keyword arguments whenever a tree cache is used."""

    def replace(_module: nn.Module, args: object, kwargs: dict[str, object]) -> object:
        if kwargs.get("past_key_values") is not None:
            kwargs = {**kwargs, **changes}
        return args, kwargs

    model.model.register_forward_pre_hook(replace, with_kwargs=True)
    return model


def test_target_that_ignores_an_input_is_rejected() -> None:
    """Without keys, a pass fails, as with encoder-decoder models and recurrent ones."""
    for ignored, dtype in (("attention_mask", torch.float32), ("position_ids", torch.bfloat16)):
        model = _change(tiny_target(dtype=dtype), **{ignored: None})
        _reject(model, "differs from plain passes over its paths")
    _reject(_change(tiny_target(), past_key_values=None), "pass over a draft tree fails")


def test_shortage_of_memory_does_not_reject_a_target() -> None:
    model = tiny_target()

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")

    handle = model.model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="ALLOC_FAILED"):
        check_target(Target(model))
    handle.remove()
    check_target(Target(model))


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
    with raises_one_line(message):
        EagleFSD(model, head, small_tree()).generate(ids, max_new_tokens=4)


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


def test_attention_kernels_may_return_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of CUDA's return [B, S, H, D] as a transposed view."""
    attention = F.scaled_dot_product_attention

    def transposed(*args: Any, **options: Any) -> Tensor:
        return attention(*args, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(F, "scaled_dot_product_attention", transposed)
    pair, ids = aligned_pair(), prompt(9)
    found = pair.generate(ids, max_new_tokens=8)
    assert found.stats.tau > 1.0
    assert torch.equal(found.sequences, greedy_reference(pair.model, ids, new=8))
