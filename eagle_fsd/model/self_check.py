"""Check once per target that a pass over a tree gives what plain passes over its paths give.

This refuses models that ignore the attention mask, the position ids or the cache that they are
given, instead of decoding wrongly. It costs three passes over a few tokens.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from eagle_fsd.model.attention import folded_queries, query_groups, use_stock_attention
from eagle_fsd.model.target import WINDOW_FIELDS, Target
from eagle_fsd.model.tree import DraftTree, ancestor_matrix
from eagle_fsd.utils.text import one_line

#: Number of tokens before the tree in each row.
PREFIXES = (6, 4)
#: A tree in level order: two branches of three nodes each.
PARENTS = (0, 0, 0, 1, 2, 3, 4)
DEPTHS = (0, 1, 1, 2, 2, 3, 3)
#: The nodes of each branch below the root.
BRANCHES = ((1, 3, 5), (2, 4, 6))
#: The target's windows are this short during the check, so that a few tokens exceed them.
WINDOW = 4
#: Maximum relative error of the logits at the median node, in float32 and in shorter dtypes. If one
#: branch sees the other, the error is of the order of 1 at all nodes but one.
MAX_ERROR = 0.01
MAX_ERROR_SHORT = 0.1

#: Whether the output projection turns the features of each model that passed into its logits.
_passed: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def check_target(target: Target, projected: bool = True) -> None:
    """Check a target when it is first used; later calls return at once.

    The windows in the model's configuration are shorter for the duration of the check.

    Args:
        target: The target, in evaluation mode.
        projected: Whether a draft head applies the target's output projection.

    Raises:
        ValueError: The target cannot be decoded in trees, or cannot have a draft head, or parts of
            it are offloaded.
    """
    name = type(target.model).__name__
    with _lock:
        if target.model not in _passed:
            _run_check(target, name)
    if projected and not _passed.get(target.model, True):
        raise ValueError(
            f"{name} cannot have a draft head: its logits are not the output projection of its last"
            " hidden states"
        )


def _run_check(target: Target, name: str) -> None:
    if any(parameter.is_meta for parameter in target.model.parameters()):
        raise ValueError(
            "parts of this target are offloaded to CPU memory or disk, but a tree pass needs"
            " all layers on their devices: use a smaller dtype or more devices"
        )
    if query_groups(target.model):
        try:
            return _compare(target, name)
        except ValueError:  # it may handle attention or masks itself
            use_stock_attention(target.model)
    _compare(target, name)


def _compare(target: Target, name: str) -> None:
    """Compare a tree pass with plain passes; raise ``ValueError`` if it fails or differs."""
    try:
        with _short_windows(target.config), torch.inference_mode():
            tree_error, projection_error = _errors(target)
    except torch.OutOfMemoryError:
        raise
    except Exception as cause:
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
    _passed[target.model] = projection_error <= limit


@contextmanager
def _short_windows(config: PreTrainedConfig) -> Iterator[None]:
    """Clip the windows in a configuration, from which transformers and Target build masks."""
    windows: dict[str, int] = {
        field: size
        for field in WINDOW_FIELDS.values()
        if (size := getattr(config, field, None)) is not None
    }
    try:
        for field, size in windows.items():
            setattr(config, field, min(size, WINDOW))
        yield
    finally:
        for field, size in windows.items():
            setattr(config, field, size)


def _errors(target: Target) -> tuple[float, float]:
    """Return the relative errors of logits, NaN if they are not finite.

    Returns:
        The error of a tree pass at the tree's median node, and that of the output projection
        applied to the features of the prompts.
    """
    device, generator = target.device, torch.Generator().manual_seed(0)
    size = min(target.vocab_size, target.embed.weight.shape[0])
    shape = (len(PREFIXES), max(PREFIXES) + len(PARENTS))
    ids = torch.randint(size, shape, generator=generator).to(device)
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
    lengths = torch.tensor(PREFIXES, device=device)
    keys, groups = cache.keys(shape[1], device), query_groups(target.model)
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
    tree_errors, projection_errors = [], []
    for row, length in enumerate(PREFIXES):
        for number, branch in enumerate(BRANCHES):
            expected = plain[row, number, length + 1 : length + 1 + len(branch)]
            tree_errors.append(_relative_error(scored[row, list(branch)], expected))
        found = target.project(features[row, :length])
        projection_errors.append(_relative_error(found, plain[row, 0, :length]))
    return float(torch.cat(tree_errors).median()), float(torch.cat(projection_errors).median())


def _relative_error(found: Tensor, expected: Tensor) -> Tensor:
    """Compare logits ``[S, V]`` relative to their spread: a constant added to all is no error."""
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return (found - expected).norm(dim=-1) / spread
