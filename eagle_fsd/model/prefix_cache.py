"""The caches of target and drafter, and the tokens that they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from eagle_fsd.model.cache import TreeCache
from eagle_fsd.model.description import Description
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.target import Target

#: Extra slots allocated when caches grow.
SPARE = 512


class PrefixCache:
    """Caches that know their tokens, so that a prompt's known prefix is not processed again.

    Pass the same object to :meth:`~eagle_fsd.model.pipeline.EagleFSD.stream` with every turn of a
    chat. The prefix that the new prompt shares with the cached tokens is not processed again;
    cached tokens beyond it (an edited history, an answer that was cut off) are dropped. A call that
    is abandoned halfway leaves the cache usable. One call at a time can use it.

    Attributes:
        tokens: For each row, the tokens in the target's cache.
        entries: For each row, the number of entries in the drafter's cache, one per token.
        epoch: Number of changes of the model that :meth:`renew` has seen.
        epochs: For each row, :attr:`epoch` when its prompt was added; its tokens were processed by
            another model if it has changed since.
        used: For each row, when it was last in use, as a number of calls of :meth:`touch`; 0 if it
            never was.
        target_cache: The target's cache; None before :meth:`reserve`.
        draft_cache: The drafter's cache; None if it has none.
    """

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.entries: list[int] = []
        self.epoch, self.epochs = 0, list[int]()
        self.used: list[int] = []
        self._touched = 0
        self.target_cache: TreeCache | None = None
        self.draft_cache: TreeCache | None = None
        self._target: Target | None = None
        self._described: Description | None = None
        self._in_use = False

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        caches = self.target_cache, self.draft_cache
        return sum(cache.nbytes for cache in caches if cache is not None)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep other calls from using the caches.

        Raises:
            ValueError: Another call uses them.
        """
        if self._in_use:
            raise ValueError(
                "this prefix cache is in use by another call: finish or close its stream first"
            )
        self._in_use = True
        try:
            yield
        finally:
            self._in_use = False

    def renew(self, described: Description, keep: bool) -> bool:
        """Do not reuse what the caches hold if the model has changed since the last call.

        Args:
            described: Description of the model and of the drafter.
            keep: Whether rows are in use, whose caches must not be dropped.

        Returns:
            Whether the model has changed.
        """
        before, self._described = self._described, described
        if before in (None, described):
            return False
        self.epoch += 1
        if not keep:  # the data types may have changed
            self.target_cache = self.draft_cache = None
            self.tokens, self.entries = [[] for _ in self.tokens], [0] * self.rows
        return True

    def reserve(
        self,
        target: Target,
        drafter: Drafter,
        rows: int,
        length: int,
        draft_length: int,
        spare: int = SPARE,
    ) -> None:
        """Allocate the caches, or enlarge them if necessary.

        Args:
            target: The target.
            drafter: Proposes the trees.
            rows: Number of rows.
            length: Slots per row needed in the target's cache.
            draft_length: Slots per row needed in the drafter's cache; 0 if it has none.
            spare: Extra slots to allocate.

        Raises:
            ValueError: The caches belong to another model.
        """
        if self._target not in (None, target):
            raise ValueError("this prefix cache belongs to another model; create a new one")
        self._target = target
        if self.target_cache is None:
            self.target_cache = target.new_cache(rows, length + spare)
        self.target_cache = _enlarged(self.target_cache, rows, length, spare)
        if draft_length:
            if self.draft_cache is None:
                self.draft_cache = drafter.new_cache(rows, draft_length + spare)
            self.draft_cache = _enlarged(self.draft_cache, rows, draft_length, spare)
        new = rows - self.rows
        self.tokens += [[] for _ in range(new)]
        self.entries += [0] * new
        self.epochs += [self.epoch] * new
        self.used += [0] * new

    def shared(self, row: int, prompt: Sequence[int], drafter: Drafter | None) -> int:
        """Return the number of leading tokens of a prompt that a row holds.

        The last token of a prompt is the root of the first tree and is never cached. If the drafter
        reads hidden states, one more token is processed again, because they are not stored.

        Args:
            row: Index of the row.
            prompt: Token ids.
            drafter: The drafter, if it has a cache.
        """
        if self.epochs[row] != self.epoch:
            return 0
        common = 0
        for old, new in zip(self.tokens[row], prompt[:-1], strict=False):
            if old != new:
                break
            common += 1
        if drafter is None:
            return common
        return max(0, min(common - bool(drafter.reads), self.entries[row]))

    def touch(self, row: int) -> None:
        """Note that a row has been used.

        Args:
            row: Index of the row.
        """
        self._touched += 1
        self.used[row] = self._touched

    def truncate(self, row: int, length: int) -> None:
        """Drop the tokens of a row beyond a length.

        Args:
            row: Index of the row.
            length: Number of tokens to keep.
        """
        del self.tokens[row][length:]
        # The last entry may be of a pair with the token that follows.
        self.entries[row] = min(self.entries[row], max(0, length - 1))

    def clear(self, row: int) -> None:
        """Drop the tokens of a row, and overwrite its keys and values.

        Args:
            row: Index of the row.
        """
        self.truncate(row, 0)
        for cache in (self.target_cache, self.draft_cache):
            if cache is not None:
                cache.clear(row)

    def copy_rows(self, source: Sequence[int], target: Sequence[int], length: int) -> None:
        """Overwrite rows. All are read before any is written.

        Args:
            source: Indices of the rows to read.
            target: Indices of the rows to write.
            length: Number of slots to copy.
        """
        for cache in (self.target_cache, self.draft_cache):
            if cache is not None:
                cache.copy_rows(source, target, length)
        lists: tuple[list[Any], ...] = self.tokens, self.entries, self.epochs, self.used
        read = [(list(self.tokens[row]), *(each[row] for each in lists[1:])) for row in source]
        for row, state in zip(target, read, strict=True):
            for each, value in zip(lists, state, strict=True):
                each[row] = value


def _enlarged(cache: TreeCache, rows: int, length: int, spare: int) -> TreeCache:
    """Return the cache, or a larger one with its contents."""
    if cache.rows >= rows and cache.length >= length:
        return cache
    longer = cache.length if cache.length >= length else length + spare
    return cache.enlarged(max(rows, cache.rows), longer)
