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
from transformers import PreTrainedConfig, PreTrainedModel

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

_passed: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
_lock = threading.Lock()


def check_target(target: Target) -> None:
    """Check a target when it is first used; later calls return at once.

    The windows in the model's configuration are shorter for the duration of the check.

    Args:
        target: The target, in evaluation mode.

    Raises:
        ValueError: The target cannot be decoded in trees, or parts of it are offloaded.
    """
    with _lock:
        if target.model in _passed:
            return
        name = type(target.model).__name__
        if any(parameter.is_meta for parameter in target.model.parameters()):
            raise ValueError(
                "parts of this target are offloaded to CPU memory or disk, but a tree pass needs"
                " all layers on their devices: use a smaller dtype or more devices"
            )
        try:
            with _short_windows(target.config), torch.inference_mode():
                error = _error(target)
        except torch.OutOfMemoryError:
            raise
        except Exception as cause:
            raise ValueError(
                f"{name} is not supported: a pass over a draft tree fails"
                f" ({type(cause).__name__}: {one_line(cause)})"
            ) from cause
        if math.isnan(error):
            return  # decoding reports broken logits itself
        exact = target.dtype == torch.float32 and not torch.is_autocast_enabled(target.device.type)
        if error > (MAX_ERROR if exact else MAX_ERROR_SHORT):
            raise ValueError(
                f"{name} is not supported: a pass over a draft tree differs from plain passes over"
                " its paths, so the model ignores the attention mask, the position ids or the cache"
                f" that it is given (relative error {error:.2g})"
            )
        _passed.add(target.model)


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


def _error(target: Target) -> float:
    """Return the relative error of the logits at the tree's median node; NaN if not finite."""
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
        ancestors=ancestor_matrix(parents),
        draft_rows=torch.full_like(parents, -1),
        draft_log_probs=torch.empty(len(PREFIXES), 0, target.vocab_size, device=device),
        max_depth=max(DEPTHS),
    )
    cache = target.new_cache(*shape)
    target.prefill(prefixes, 0, cache)
    lengths = torch.tensor(PREFIXES, device=device)
    scored = target.forward_tree(tree, lengths, max(PREFIXES), cache).logits
    sequences, found = [], []
    for row, length in enumerate(PREFIXES):
        for branch in BRANCHES:
            # Padding on the right does not affect the tokens before it.
            path = [prefixes[row, :length], nodes[row, [0, *branch]], prefixes[row, length:]]
            sequences.append(torch.cat(path))
            found.append(scored[row, list(branch)])
    logits = target.model(input_ids=torch.stack(sequences), use_cache=False).logits
    starts = [length + 1 for length in PREFIXES for _ in BRANCHES]
    plain = [
        row[start : start + len(BRANCHES[0])] for row, start in zip(logits, starts, strict=True)
    ]
    expected = torch.cat(plain).to(device).float()
    # Relative to the spread of the logits, because a constant added to all of them is no error.
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((torch.cat(found) - expected).norm(dim=-1) / spread).median())
