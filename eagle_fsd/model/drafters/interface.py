"""What the engine expects of a drafter: :class:`Drafter`, and its :class:`DraftState` in a call.

Shape letters: ``B`` rows, ``F`` number of values of the features, ``N`` tree nodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor, nn

from eagle_fsd.model.cache import Layout, TreeCache
from eagle_fsd.model.config import TreeConfig
from eagle_fsd.model.tree import DraftTree, Draw, single_node

if TYPE_CHECKING:
    from eagle_fsd.model.random_numbers import RandomNumbers
    from eagle_fsd.model.target import Target
    from eagle_fsd.model.verify import Verification


class DraftState(ABC):
    """A drafter's state in an engine: a row for each row of the engine, in the same order.

    Attributes:
        on_device: Whether :meth:`draft` consists of tensor operations with static shapes only, so
            that it can be compiled.
        waits: Whether the next draft depends on :meth:`observe`, so it cannot begin before
            the last step's tokens are on the host.
    """

    on_device = True
    waits = False

    def use(self, tree: TreeConfig) -> None:
        """Change the shape of the trees; by default, nothing.

        ``tree`` is at most as deep as that of :meth:`Drafter.start`, and may have a single node.
        """
        return

    def renew(self, tree: TreeConfig) -> None:
        """Forget what follows from the network, which may have changed; :meth:`use` a tree."""
        self.use(tree)

    def reserve(self, rows: int, max_length: int, cache: TreeCache | None) -> None:
        """Make room for more or longer rows, keeping those that there are; by default, nothing.

        Steps begin with at most ``max_length`` tokens per row, and ``cache`` has at least
        :meth:`Drafter.cache_length` slots and the contents of the one before; None if that is 0.
        """
        return

    def admit(self, first: int, prompts: Sequence[Sequence[int]]) -> None:
        """Start over with new prompts in the rows from ``first`` on; by default, nothing."""
        return

    def prefill(self, first: int, ids: Tensor, start: int, stop: int, features: Tensor) -> None:
        """Process a chunk of new prompts; by default, nothing.

        ``ids`` ``[B, longest]`` are the prompts of the rows from ``first`` on, padded on the right,
        the last token of each included, and ``features`` ``[B, stop - start, F]`` the hidden states
        that the drafter reads at positions ``start`` to ``stop``.
        """
        return

    def show(self, rows: int) -> None:
        """Let the next steps decode the first ``rows`` rows; by default, nothing."""
        return

    def keys(self, max_length: int) -> Tensor | None:
        """Return the slots of the drafter's cache that the next draft reads; None for no cache.

        ``max_length`` is an upper bound, known to the host, of the number of tokens before the
        roots.
        """
        return None

    @abstractmethod
    def draft(self, roots: Tensor, keys: Tensor | None, random: RandomNumbers) -> DraftTree:
        """Propose a tree below the last token of each row, ``roots`` ``[B]``.

        ``keys`` is the result of :meth:`keys`, and ``random`` holds the random numbers of this
        step.
        """

    def commit(self, features: Tensor, kept: Verification) -> None:
        """Record the tokens that verification kept; by default, nothing.

        ``features`` ``[B, N, F]`` are the hidden states that the drafter reads, at every node.
        """
        return

    def observe(self, tokens: list[list[int]]) -> None:
        """Receive each row's new tokens, once they are on the host; by default, nothing."""
        return

    def copy_rows(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Overwrite rows, except in the cache; by default, nothing.

        All ``source`` rows are read before any ``target`` row is written.
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
        draws_chains: Whether a tree with ``top_k = 1`` is sampled from the draft's distributions at
            temperatures above 0.
    """

    reads: tuple[int, ...] = ()
    projects = False
    learns = False
    draws_chains = False

    @property
    def network(self) -> nn.Module | None:
        """The module with the drafter's weights; None if it has none."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def fresh(self) -> Drafter:
        """Return a drafter that has learned nothing: itself, unless it learns from its calls."""
        return self

    @abstractmethod
    def attach(self, target: Target) -> Drafter:
        """Check that the drafter fits a target, and move it to the target's device.

        Called again with every request, because the drafter may have served another target.

        Args:
            target: The target.

        Returns:
            The drafter itself.

        Raises:
            ValueError: The drafter belongs to another target.
        """

    def renew(self) -> None:
        """Adapt to changes of the network, whenever prompts join; by default, nothing."""
        return

    @abstractmethod
    def start(self, tree: TreeConfig, draw: Draw | None) -> DraftState:
        """Create a state without rows.

        Args:
            tree: Shape of the deepest trees.
            draw: Samples from the draft's distributions, see :class:`TreeBuilder`. None unless
                :attr:`draws_chains` is set, the trees are chains, and the rows are sampled.
        """

    @cached_property
    def layout(self) -> Layout:
        """What the drafter's caches allocated; empty before the first, and without caches."""
        return Layout()

    @abstractmethod
    def max_nodes(self, tree: TreeConfig) -> int:
        """Return the largest number of nodes of a ``tree``, its root included."""

    def max_expanded(self, tree: TreeConfig) -> int:
        """Return the largest number of distributions of a ``tree``; by default, nodes minus one."""
        return self.max_nodes(tree) - 1

    def cache_length(self, max_length: int, tree: TreeConfig) -> int:
        """Return the number of slots that the drafter's cache needs per row; 0 for no cache.

        Steps begin with at most ``max_length`` tokens per row, and trees have the shape ``tree``.
        """
        return 0

    def new_cache(self, rows: int, length: int) -> TreeCache:
        """Create a cache for ``rows`` rows of ``length`` slots, see :meth:`cache_length`."""
        return TreeCache(rows, length, self.layout)


class NoDrafter(Drafter):
    """Proposes nothing: every tree consists of its root, and decoding is autoregressive."""

    def attach(self, target: Target) -> NoDrafter:
        return self

    def start(self, tree: TreeConfig, draw: Draw | None) -> DraftState:
        return _NoDraft()

    def max_nodes(self, tree: TreeConfig) -> int:
        return 1


class _NoDraft(DraftState):
    def draft(self, roots: Tensor, keys: Tensor | None, random: RandomNumbers) -> DraftTree:
        return single_node(roots)
