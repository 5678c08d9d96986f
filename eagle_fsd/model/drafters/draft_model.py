"""An independent draft model: a smaller causal language model with the target's tokenizer.

It drafts trees by EAGLE-2's expansion over its own distributions, or, with ``top_k = 1``, chains.
At temperatures above 0 a chain is sampled from its distributions, as in Leviathan et al.
(arXiv 2211.17192) and in the FSD paper (arXiv 2502.20704).

The depth is that of :class:`TreeConfig`, or adapts below it; see :class:`AdaptiveState`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from eagle_fsd.model.cache import Layout
from eagle_fsd.model.config import TreeConfig
from eagle_fsd.model.drafters.levels import LevelDrafter, LevelState
from eagle_fsd.model.loading import LoadError, load_target, load_tokenizer
from eagle_fsd.model.plain_layers import AttentionInputs
from eagle_fsd.model.self_check import check_target
from eagle_fsd.model.target import Target
from eagle_fsd.model.tree import Draw

log = logging.getLogger(__name__)

#: Models of a family may pad their vocabularies to different sizes, such as Qwen2.5 7B (152064) and
#: 0.5B (151936). Vocabularies whose sizes differ by more are rejected.
MAX_PADDING = 256
#: Values of ``num_assistant_tokens_schedule`` in a generation configuration with which the depth
#: adapts.
ADAPTIVE_SCHEDULES = ("heuristic", "heuristic_transient")


class DraftModel(LevelDrafter):
    """A causal language model that drafts for a larger one.

    The vocabularies may differ in padding: the draft model's surplus tokens are left out, and the
    target's get probability 0.

    The depth of the trees adapts if ``num_assistant_tokens_schedule`` in the model's generation
    configuration is one of :data:`ADAPTIVE_SCHEDULES`, as in Hugging Face's assisted generation.

    Args:
        model: An unmodified Hugging Face causal LM with the target's tokenizer.

    Raises:
        ValueError: The architecture is not supported.
    """

    draws_chains = True

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()
        with _prefixed_errors(model):
            self._inner = Target(model)
        self._vocab_size = self._inner.vocab_size

    def attach(self, target: Target) -> DraftModel:
        own, size = self._inner.vocab_size, target.vocab_size
        if abs(own - size) > MAX_PADDING:
            raise ValueError(
                f"this draft model has a different vocabulary: it has {own} tokens, the target has"
                f" {size}"
            )
        self._vocab_size = size
        if self.device != target.device:
            self.model.to(target.device)
        return self

    @property
    def network(self) -> PreTrainedModel:
        return self.model

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def device(self) -> torch.device:
        return self._inner.device

    @property
    def dtype(self) -> torch.dtype:
        return self._inner.dtype

    @cached_property
    def layout(self) -> Layout:
        return self._inner.layout

    @property
    def adapts(self) -> bool:
        """Whether the depth of the trees adapts."""
        schedule = getattr(self.model.generation_config, "num_assistant_tokens_schedule", None)
        return schedule in ADAPTIVE_SCHEDULES

    def renew(self) -> None:
        self._inner.renew(())

    def start(self, tree: TreeConfig, draw: Draw | None) -> LevelState:
        with _prefixed_errors(self.model):
            check_target(self._inner)
        return (AdaptiveState if self.adapts else LevelState)(self, tree, draw)

    def check_length(self, length: int) -> None:
        """Warn about prompts beyond the stable length; see :meth:`LevelDrafter.check_length`."""
        limit = self._inner.stable_length
        if length > limit:
            log.warning(
                "a prompt of %d tokens exceeds the draft model's context of %d tokens, so fewer"
                " drafted tokens are likely to be accepted",
                length,
                limit,
            )

    def encode(
        self, x: Tensor, tokens: Tensor, positions: Tensor, inputs: AttentionInputs
    ) -> Tensor:
        # The target's vocabulary may be larger.
        tokens = tokens.clamp_max(self._inner.vocab_size - 1)
        _, mask, cache = inputs
        slots = (mask[:, 0] == 0).cumsum(-1) - 1  # positions, see :meth:`LevelDrafter.encode`
        return self._inner.encode(tokens, positions, mask=mask, keys=slots, cache=cache)

    def log_probs(self, hidden: Tensor) -> Tensor:
        logits = self._inner.project(hidden)[..., : self._vocab_size]
        log_probs = F.log_softmax(logits, -1)
        return F.pad(log_probs, (0, self._vocab_size - logits.shape[-1]), value=-torch.inf)


class AdaptiveState(LevelState):
    """A state that chooses the depth of every tree, at most that of its ``TreeConfig``.

    As in Hugging Face's ``heuristic`` schedule, the next tree is two levels deeper for every row
    that accepted a path of full depth, and one level shallower for every other, on average.
    """

    waits = True

    def use(self, tree: TreeConfig) -> None:
        self._tree, self._depth = tree, float(tree.depth)
        super().use(tree)

    def observe(self, tokens: list[list[int]]) -> None:
        """Choose the depth of the next tree; see :meth:`DraftState.observe`."""
        full = min(self.builder.depth + 2, self._tree.total_tokens)  # tokens, with the bonus token
        accepted = sum(len(row) >= full for row in tokens) / len(tokens)
        self._depth = min(max(self._depth + 3 * accepted - 1, 1.0), self._tree.depth)
        super().use(self._tree.updated(depth=round(self._depth)))


@contextmanager
def _prefixed_errors(model: PreTrainedModel) -> Iterator[None]:
    """Prefix errors with the draft model's name, because targets raise the same ones."""
    try:
        yield
    except ValueError as error:
        name = f"draft model {model.name_or_path}".strip()
        raise ValueError(f"{name}: {error}") from error


def load_draft_model(name: str | Path, target: Target, token: str | None = None) -> DraftModel:
    """Load a draft model in its target's data type; its tokenizer, if any, must be the target's."""
    _check_tokenizers(str(name), target.model.config._name_or_path, token)
    model = load_target(name, target.dtype, target.device, "draft model", token=token)
    return DraftModel(model).attach(target)


def _check_tokenizers(name: str, target: str, token: str | None) -> None:
    """Raise ``ValueError`` if both vocabularies can be loaded and differ beyond added tokens."""
    vocabularies = []
    for model in (name, target):
        try:
            tokenizer = load_tokenizer(model, token)
        except LoadError:
            return
        added = tokenizer.get_added_vocab()
        vocabularies.append(
            {item: index for item, index in tokenizer.get_vocab().items() if item not in added}
        )
    if all(vocabularies) and vocabularies[0] != vocabularies[1]:
        raise ValueError(
            f"the draft model {name} has a different tokenizer from the target {target}; a draft"
            " model must have the target's vocabulary"
        )
