"""The target's pass over a draft tree gives the logits and features of plain passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import (
    ARCHITECTURES,
    DEVICES,
    aligned_pair,
    greedy_reference,
    hand_made_tree,
    left_padded,
    path_to,
    plain_logits,
    prompt,
    random_pair,
    small_tree,
    tiny_target,
    untrained_head,
)
from torch import Tensor
from transformers import AutoModel

from eagle_fsd import EagleFSD
from eagle_fsd.model import engine
from eagle_fsd.model.cache import TreeCache
from eagle_fsd.model.self_check import check_target
from eagle_fsd.model.target import Target, TargetPass
from eagle_fsd.model.tree import DraftTree

#   root 40 -- 1:7 -- 3:11 -- 6:80
#           |      \- 4:12
#           |- 2:9 -- 5:11 -- 7:81 -- 8:7
TOKENS = [40, 7, 9, 11, 12, 11, 80, 81, 7]
PARENTS = [0, 0, 0, 1, 1, 2, 3, 5, 7]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tree_pass_matches_a_plain_pass_over_each_path(architecture: str, device: str) -> None:
    """Rows of different lengths in one pass."""
    attention = "eager" if architecture == "qwen2" else "sdpa"
    model = tiny_target(architecture, attention=attention).to(device)
    target = Target(model)
    prefixes = [prompt(5, 1)[0].to(device), prompt(21, 2)[0].to(device)]
    cache, lengths = _prefilled(target, prefixes, length=40)
    tree = hand_made_tree(TOKENS, PARENTS, rows=2, shift=3, device=device)
    scored = _score(target, tree, lengths, cache)
    assert scored.logits.dtype == torch.float32
    for row, prefix in enumerate(prefixes):
        for node in range(tree.size):
            ids = torch.cat([prefix, torch.tensor(path_to(tree, row, node), device=device)])
            expected = plain_logits(model, ids)
            for found, plain in zip((scored.logits, scored.features), expected, strict=True):
                torch.testing.assert_close(
                    found[row, node],
                    plain[-1],
                    atol=1e-4,
                    rtol=1e-4,
                    msg=f"row {row}, node {node}",
                )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tree_pass_after_compaction_matches_a_plain_pass(architecture: str) -> None:
    """Rows keep paths of different lengths; a stale or misplaced key would change every node."""
    model = tiny_target(architecture)
    target = Target(model)
    prefixes = [prompt(6, 1)[0], prompt(3, 2)[0]]
    cache, lengths = _prefilled(target, prefixes, length=48)
    tree = hand_made_tree(TOKENS, PARENTS, rows=2, shift=1)
    _score(target, tree, lengths, cache)
    kept = torch.tensor([[0, 2, 5, 7, 8], [0, 1, 4, 4, 4]])  # row 1 keeps three nodes
    slots = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 4, 4]])
    cache.move(lengths[:, None] + kept, lengths[:, None] + slots)
    counts = torch.tensor([5, 3])
    following = hand_made_tree(TOKENS[::-1], PARENTS, rows=2, shift=5)
    scored = _score(target, following, lengths + counts, cache)
    for row, prefix in enumerate(prefixes):
        sequence = torch.cat([prefix, tree.tokens[row, kept[row, : counts[row]]]])
        for node in range(following.size):
            ids = torch.cat([sequence, torch.tensor(path_to(following, row, node))])
            expected = plain_logits(model, ids)[0][-1]
            torch.testing.assert_close(scored.logits[row, node], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("make", "threshold"), [(random_pair, 10.0), (aligned_pair, 0.0)])
def test_output_does_not_depend_on_the_prefill_chunk(
    make: Callable[[], EagleFSD], threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With everything accepted, the output also depends on the head's cache and first feature.

    Prompt lengths are at, next to and far from the chunk's boundaries, and one and two tokens.
    """
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


def test_prefill_does_not_run_the_output_projection() -> None:
    """Only the nodes of a step go through ``lm_head``."""
    model = tiny_target()
    check_target(Target(model))
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda _m, args, _out: seen.append(args[0][..., 0].numel()))
    EagleFSD(model, None).generate(prompt(60), max_new_tokens=4, method="ar")
    assert seen == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("mistral-wide-window", {"sliding_window": 9}),
        ("qwen2", {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}),
        ("qwen2", {"sliding_window": 3, "layer_types": ["sliding_attention"] * 2}),
    ],
)
def test_sliding_windows_match_hugging_face(architecture: str, options: dict[str, Any]) -> None:
    """In all layers or some, with prompts shorter and longer than the window, and short windows."""
    model = tiny_target(architecture, **options)
    pair = EagleFSD(model, untrained_head(model), small_tree())
    ids, mask = left_padded(prompt(7, 1), prompt(1, 2), prompt(20, 3))
    expected = greedy_reference(model, ids, mask, new=30)
    for method in ("fsd", "ar"):
        assert torch.equal(pair.generate(ids, mask, 30, method=method).sequences, expected)
    model.config.sliding_window = 200
    assert not torch.equal(greedy_reference(model, ids, mask, new=30), expected)


def test_unsupported_targets_are_rejected() -> None:
    model = tiny_target()
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="has layers of type linear_attention"):
        EagleFSD(model, None)
    for attention in ("flash_attention_2", "flex_attention"):
        model = tiny_target()
        model.config._attn_implementation_internal = attention
        with pytest.raises(ValueError, match=f"{attention}.*sdpa, eager"):
            Target(model)
    with pytest.raises(ValueError, match="LlamaModel has no output projection"):
        Target(AutoModel.from_config(tiny_target().config))


def test_decoding_does_not_change_the_model() -> None:
    """Also when a pass fails."""
    model, ids = tiny_target(), prompt(7)
    before = greedy_reference(model, ids, new=8)
    pair = EagleFSD(model, untrained_head(model))
    pair.generate(ids, max_new_tokens=8)
    handle = model.lm_head.register_forward_hook(_raise)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        pair.generate(ids, max_new_tokens=8)
    handle.remove()
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(greedy_reference(model, ids, new=8), before)


def test_output_projection_in_float32_on_bfloat16_layers() -> None:
    """The cache, the masks and the head have the dtype of the layers."""
    model = tiny_target(dtype=torch.bfloat16, tie_word_embeddings=False)
    model.lm_head.float()
    model.lm_head.register_forward_pre_hook(lambda _m, args: (args[0].float(),))
    pair = EagleFSD(model, untrained_head(model).to(torch.bfloat16), small_tree())
    ids = prompt(9)
    expected = greedy_reference(model, ids, new=16)
    for method in ("fsd", "ar"):
        assert torch.equal(pair.generate(ids, None, 16, method=method).sequences, expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_decoding_under_autocast(attention: str) -> None:
    """RoPE makes the keys float32 there, and the values stay bfloat16."""
    model = tiny_target(attention=attention)
    pair = EagleFSD(model, untrained_head(model), small_tree())
    ids, mask = left_padded(prompt(9, 1), prompt(4, 2))
    with torch.autocast("cpu", torch.bfloat16):
        expected = greedy_reference(model, ids, mask, new=12)
        for method in ("fsd", "ar"):
            assert torch.equal(pair.generate(ids, mask, 12, method=method).sequences, expected)
        changed = plain_logits(model, ids[0])[0]
    assert not torch.equal(changed, plain_logits(model, ids[0])[0])


def _raise(*_args: object) -> None:
    raise RuntimeError("broken on purpose")


def _prefilled(target: Target, prefixes: list[Tensor], length: int) -> tuple[TreeCache, Tensor]:
    """Return a cache that holds ``prefixes``, and their lengths."""
    cache = target.new_cache(len(prefixes), length)
    ids = torch.nn.utils.rnn.pad_sequence(prefixes, batch_first=True)
    with torch.no_grad():
        target.prefill(ids, 0, cache)
    return cache, torch.tensor([len(item) for item in prefixes], device=ids.device)


def _score(target: Target, tree: DraftTree, lengths: Tensor, cache: TreeCache) -> TargetPass:
    keys = cache.keys(int(lengths.max()) + tree.size, lengths.device)
    with torch.no_grad():
        return target.forward_tree(tree, lengths, keys, cache)
