"""What the engine expects of a drafter: :class:`Drafter`, and its :class:`DraftState` in a call.

Shape letters: ``B`` rows, ``S`` tokens, ``F`` number of values of the features, ``N`` tree nodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor

from eagle_fsd.model.cache import TreeCache
from eagle_fsd.model.config import TreeConfig
from eagle_fsd.model.tree import DraftTree, single_node

if TYPE_CHECKING:
    from eagle_fsd.model.sampling import Sampler
    from eagle_fsd.model.target import Target
    from eagle_fsd.model.verify import Verification


class DraftState(ABC):
    """A drafter's state in one call: a row for each row of the engine, in the same order.

    Attributes:
        on_device: Whether :meth:`draft` consists of tensor operations with static shapes only, so
            that it can be compiled.
        waits: Whether the next draft depends on :meth:`observe`, so that it cannot begin before
            the last step's tokens are on the host.
    """

    on_device = True
    waits = False

    def prefill(self, ids: Tensor, start: int, stop: int, features: Tensor) -> None:
        """Process a chunk of the prompts; by default, nothing.

        Args:
            ids: ``[B, longest]`` prompts, padded on the right, the last token of each included.
            start: Position of the chunk's first token.
            stop: Position after the chunk's last token.
            features: ``[B, stop - start, F]`` the hidden states that the drafter reads.
        """
        return

    def keys(self, max_length: int) -> Tensor | None:
        """Return the slots of the drafter's cache that the next draft reads; None for no cache.

        Args:
            max_length: Upper bound of the number of tokens before the roots, known to the host.
        """
        return None

    @abstractmethod
    def draft(self, roots: Tensor, keys: Tensor | None) -> DraftTree:
        """Propose a tree.

        Args:
            roots: ``[B]`` last token of each row.
            keys: Result of :meth:`keys`.
        """

    def commit(self, features: Tensor, kept: Verification) -> None:
        """Take over the tokens that verification kept; by default, nothing.

        Args:
            features: ``[B, N, F]`` the hidden states that the drafter reads, at every node.
            kept: The result of verifying the tree.
        """
        return

    def observe(self, tokens: list[list[int]]) -> None:
        """Take over the tokens that a step emitted, once they are on the host; default: nothing.

        Args:
            tokens: The new tokens of each row.
        """
        return

    def move_row(self, source: int, target: int) -> None:
        """Overwrite a row with another; by default, nothing.

        Args:
            source: Index of the row to copy.
            target: Index of the row to overwrite.
        """
        return

    def keep(self, count: int) -> None:
        """Drop all rows but the first ones; by default, nothing.

        Args:
            count: Number of rows to keep.
        """
        return


class Drafter(ABC):
    """Proposes draft trees. One drafter serves any number of calls, whose states it creates.

    Attributes:
        reads: The hidden states of the target that the drafter reads, as indices into Hugging
            Face's ``hidden_states``: ``i`` is the input of decoder layer ``i``, -1 the last hidden
            state after the final norm. Several are concatenated.
        projects: Whether the drafter applies the target's output projection.
        learns: Whether drafts depend on earlier calls.
    """

    reads: tuple[int, ...] = ()
    projects = False
    learns = False

    def fresh(self) -> Drafter:
        """Return a drafter that has learned nothing: itself, unless it learns from its calls."""
        return self

    @abstractmethod
    def attach(self, target: Target) -> Drafter:
        """Check that the drafter fits a target, and move it to the target's device.

        Args:
            target: The target.

        Returns:
            The drafter itself.

        Raises:
            ValueError: The drafter belongs to another target.
        """

    @abstractmethod
    def start(
        self,
        prompts: list[Tensor],
        max_length: int,
        tree: TreeConfig,
        sampler: Sampler,
        cache: TreeCache | None,
    ) -> DraftState:
        """Create the state of a call.

        Args:
            prompts: ``[S]`` token ids of each row, on the target's device.
            max_length: Maximum number of tokens in a row, prompt included.
            tree: Shape of the draft trees.
            sampler: The call's sampler.
            cache: A cache of at least :meth:`cache_length` slots, which may hold the beginning of
                the prompt already; None if that is 0.
        """

    @abstractmethod
    def max_nodes(self, tree: TreeConfig) -> int:
        """Return the largest number of nodes of a tree, its root included.

        Args:
            tree: Shape of the draft trees.
        """

    def cache_length(self, max_length: int, tree: TreeConfig) -> int:
        """Return the number of slots that the drafter's cache needs per row; 0 for no cache.

        Args:
            max_length: Maximum number of tokens in a row, prompt included.
            tree: Shape of the draft trees.
        """
        return 0

    def new_cache(self, rows: int, length: int) -> TreeCache:
        """Create a cache, if :meth:`cache_length` is not 0.

        Args:
            rows: Number of sequences.
            length: Slots per sequence.
        """
        raise NotImplementedError


class NoDrafter(Drafter):
    """Proposes nothing: every tree consists of its root, and decoding is autoregressive."""

    def attach(self, target: Target) -> NoDrafter:
        return self

    def start(
        self,
        prompts: list[Tensor],
        max_length: int,
        tree: TreeConfig,
        sampler: Sampler,
        cache: TreeCache | None,
    ) -> DraftState:
        return _NoDraft()

    def max_nodes(self, tree: TreeConfig) -> int:
        return 1


class _NoDraft(DraftState):
    def draft(self, roots: Tensor, keys: Tensor | None) -> DraftTree:
        return single_node(roots)
