"""Check once per target that a pass over a tree gives what plain passes over its paths give."""

from __future__ import annotations

import copy
import functools
import math
import threading
import types
import weakref

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from eagle_fsd.model.attention import folded_queries, not_foldable, query_groups
from eagle_fsd.model.target import WINDOW_FIELDS, Target
from eagle_fsd.model.tree import DraftTree, ancestor_matrix
from eagle_fsd.utils.errors import is_out_of_memory
from eagle_fsd.utils.text import one_line

#: Number of tokens before the tree in each row.
PREFIXES = (6, 4)
#: A tree in level order: two branches of three nodes each.
PARENTS = (0, 0, 0, 1, 2, 3, 4)
DEPTHS = (0, 1, 1, 2, 2, 3, 3)
#: The nodes of each branch below the root.
BRANCHES = ((1, 3, 5), (2, 4, 6))
#: The target's windows are at most this long during the check, so a few tokens exceed them.
WINDOW = 4
#: Maximum relative error of the logits at the median node, in float32 and in shorter dtypes. If one
#: branch sees the other, it is larger, because the logits of all nodes of a row but one are wrong.
MAX_ERROR = 0.01
MAX_ERROR_SHORT = 0.1

#: Attributes of modules that may refer to modules or configurations; others are not copied.
COPIED = (dict, list, tuple, functools.partial, types.MethodType, nn.Module, PreTrainedConfig)

#: Why the output projection of each model that passed does not turn its features into its logits;
#: empty if it does.
_passed: weakref.WeakKeyDictionary[PreTrainedModel, str] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def check_target(target: Target, projected: bool = True) -> None:
    """Check a target in evaluation mode when it is first used.

    Raises ``ValueError`` if it cannot be decoded in trees or, with ``projected``, have a draft
    head.
    """
    name = type(target.model).__name__
    with _lock:
        if target.model not in _passed:
            _run_check(target, name)
    problem = _passed.get(target.model)
    if projected and problem:
        raise ValueError(f"{name} cannot have a draft head or be a draft model: {problem}")


def _run_check(target: Target, name: str) -> None:
    """Check a target, without folded queries if it fails with them."""
    if any(parameter.is_meta for parameter in target.model.parameters()):
        raise ValueError(
            "parts of this target are offloaded to CPU memory or disk, but a tree pass needs"
            " all layers on their devices: use a smaller dtype or more devices"
        )
    target.renew(())
    if query_groups(target.model):
        try:
            _compare(target, name)
            return
        except ValueError:  # it may handle attention or masks itself
            not_foldable.add(target.model)
    _compare(target, name)


def _compare(target: Target, name: str) -> None:
    """Compare a tree pass with plain passes, and record in ``_passed`` that the target passed.

    Raises ``ValueError`` if the tree pass fails or differs. Broken logits are not recorded, so the
    next use checks again.
    """
    groups = query_groups(target.model)
    try:
        with torch.inference_mode():
            checked = _with_short_windows(target)
            tree_error, features, plain = _run_passes(checked, groups)
    except Exception as cause:
        if is_out_of_memory(cause):
            raise
        raise ValueError(
            f"{name} is not supported: a pass over a draft tree fails"
            f" ({type(cause).__name__}: {one_line(cause)})"
        ) from cause
    if math.isnan(tree_error):
        return  # decoding reports broken logits itself
    exact = target.dtype == torch.float32 and not torch.is_autocast_enabled(target.device.type)
    limit = MAX_ERROR if exact else MAX_ERROR_SHORT
    if tree_error > limit:
        raise ValueError(
            f"{name} is not supported: a pass over a draft tree differs from plain passes over"
            " its paths, so the model ignores the attention mask, the position ids or the cache"
            f" that it is given (relative error {tree_error:.2g})"
        )
    _passed[target.model] = _projection_problem(checked, features, plain, limit)


def _with_short_windows(target: Target) -> Target:
    """Return a target with windows of at most :data:`WINDOW`, which shares all tensors."""
    windows = {
        field: WINDOW
        for field in WINDOW_FIELDS.values()
        if (getattr(target.config, field, None) or 0) > WINDOW
    }
    if not windows:
        return target
    shared: list[object] = [target.layout, target.group]
    for module in target.model.modules():
        shared += [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        shared += [
            value
            for name, value in vars(module).items()
            if name.endswith("_hooks") or not isinstance(value, COPIED)
        ]
    checked = copy.deepcopy(target, {id(item): item for item in shared})
    checked.config.update(windows)
    return checked


def _run_passes(target: Target, groups: int) -> tuple[float, list[Tensor], list[Tensor]]:
    """Run a tree pass, which folds ``groups`` query heads per key head, and passes over its paths.

    Return the logits' relative error at the median node, and each prefix's features and logits.
    """
    device, generator = target.device, torch.Generator().manual_seed(0)
    size = min(target.vocab_size, target.embed.weight.shape[0])
    shape = (len(PREFIXES), max(PREFIXES) + len(PARENTS))
    ids = torch.randint(size, shape, generator=generator, device="cpu").to(device)
    prefixes, nodes = ids.split([max(PREFIXES), len(PARENTS)], 1)
    parents = torch.tensor([PARENTS] * len(PREFIXES), device=device)
    tree = DraftTree(
        tokens=nodes,
        parents=parents,
        depths=torch.tensor([DEPTHS] * len(PREFIXES), device=device),
        ancestors=ancestor_matrix(parents, max(DEPTHS)),
        draft_rows=torch.full_like(parents, -1),
        draft_log_probs=torch.empty(len(PREFIXES), 0, 0, device=device),
        max_depth=max(DEPTHS),
    )
    cache = target.new_cache(*shape)
    features = target.prefill(prefixes, 0, cache)
    lengths, keys = torch.tensor(PREFIXES, device=device), cache.keys(shape[1], device)
    with folded_queries(target.model, groups):
        scored = target.forward_tree(tree, lengths, keys, cache, groups=groups).logits
    sequences = [
        # Padding on the right does not affect the tokens before it.
        torch.cat([prefixes[row, :length], nodes[row, [0, *branch]], prefixes[row, length:]])
        for row, length in enumerate(PREFIXES)
        for branch in BRANCHES
    ]
    logits = target.model(input_ids=torch.stack(sequences), use_cache=False).logits
    plain = logits.to(device).float().unflatten(0, (len(PREFIXES), len(BRANCHES)))
    errors = []
    for row, length in enumerate(PREFIXES):
        for number, branch in enumerate(BRANCHES):
            expected = plain[row, number, length + 1 : length + 1 + len(branch)]
            errors.append(_relative_error(scored[row, list(branch)], expected))
    return (
        float(torch.cat(errors).median()),
        [features[row, :length] for row, length in enumerate(PREFIXES)],
        [plain[row, 0, :length] for row, length in enumerate(PREFIXES)],
    )


@torch.inference_mode()
def _projection_problem(
    target: Target, features: list[Tensor], logits: list[Tensor], limit: float
) -> str:
    """Return why the output projection does not turn features into logits; empty if it does."""
    width, hidden = target.lm_head.weight.shape[-1], features[0].shape[-1]
    try:
        found = [target.project(item) for item in features]
    except Exception as cause:
        if is_out_of_memory(cause):
            raise
        if width != hidden:
            return (
                f"its output projection takes vectors of size {width}, but its hidden states have"
                f" size {hidden}"
            )
        return f"its output projection fails ({type(cause).__name__}: {one_line(cause)})"
    errors = [_relative_error(*pair) for pair in zip(found, logits, strict=True)]
    if float(torch.cat(errors).median()) <= limit:
        return ""
    return "its logits are not the output projection of its last hidden states"


def _relative_error(found: Tensor, expected: Tensor) -> Tensor:
    """Return the errors ``[S]`` of logits ``[S, V]``, relative to the spread of the expected."""
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return (found - expected).norm(dim=-1) / spread
