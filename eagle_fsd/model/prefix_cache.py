"""The caches of target and drafter, and the tokens that they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from eagle_fsd.model.cache import TreeCache
from eagle_fsd.model.description import Description
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.target import Target


@dataclass
class CachedRow:
    """The tokens of a row in the target's cache, and the number of entries in the drafter's.

    ``epoch`` is that of :class:`RowCaches` when the row was filled, ``used`` the number of its last
    :meth:`RowCaches.touch`. Slots from ``written`` on are zero in both caches.
    """

    tokens: list[int] = field(default_factory=list)
    entries: int = 0
    epoch: int = 0
    used: int = 0
    written: int = 0

    def truncate(self, length: int) -> None:
        """Drop the tokens beyond a length."""
        del self.tokens[length:]
        # The last entry may be of a pair with the token that follows.
        self.entries = min(self.entries, max(0, length - 1))


class RowCaches:
    """The caches of an engine and the tokens that they hold; allocated by :meth:`reserve`."""

    spare = 0  # extra slots of a new or longer cache

    def __init__(self) -> None:
        self.rows: list[CachedRow] = []
        self.epoch = 0  # number of changes of the model that `renew` has seen
        self.target_cache: TreeCache | None = None
        self.draft_cache: TreeCache | None = None
        self._touched = 0
        self._target: Target | None = None
        self._described: Description | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return sum(cache.nbytes for cache in self._caches)

    @property
    def _caches(self) -> list[TreeCache]:
        return [cache for cache in (self.target_cache, self.draft_cache) if cache is not None]

    def renew(self, described: Description, keep: bool) -> bool:
        """Do not reuse what the caches hold if the models have changed; return whether they have.

        With ``keep``, rows are in use, whose caches must not be dropped.
        """
        before, self._described = self._described, described
        if before in (None, described):
            return False
        self.epoch += 1
        if not keep:  # the data types may have changed
            self.release()
        return True

    def release(self) -> None:
        """Free the caches, and forget what they hold."""
        self.target_cache = self.draft_cache = None
        self.rows = [CachedRow(epoch=row.epoch, used=row.used) for row in self.rows]

    def fitting_rows(self, length: int, draft_length: int) -> int:
        """Return how many rows of ``length`` and ``draft_length`` slots fit in the two caches."""
        needed = (self.target_cache, length), (self.draft_cache, draft_length)
        return min(
            0 if cache is None or cache.length < slots else cache.rows
            for cache, slots in needed
            if slots
        )

    def reserve(
        self,
        target: Target,
        drafter: Drafter,
        *,
        rows: int,
        length: int,
        draft_length: int,
    ) -> None:
        """Allocate or enlarge caches; ``draft_length`` is 0 if the drafter has none."""
        if self._target not in (None, target):
            raise ValueError("this prefix cache belongs to another model; create a new one")
        self._target = target
        self.target_cache = self._enlarged(self.target_cache, target, rows, length)
        if draft_length:
            self.draft_cache = self._enlarged(self.draft_cache, drafter, rows, draft_length)
        self.rows += [CachedRow(epoch=self.epoch) for _ in range(rows - len(self.rows))]

    def _enlarged(
        self, cache: TreeCache | None, model: Target | Drafter, rows: int, length: int
    ) -> TreeCache:
        """Return a model's cache, a larger one with its contents, or the first one."""
        if cache is None:
            return model.new_cache(rows, length + self.spare)
        if cache.rows >= rows and cache.length >= length:
            return cache
        longer = cache.length if cache.length >= length else length + self.spare
        return cache.enlarged(max(rows, cache.rows), longer)

    def shared(self, row: int, prompt: Sequence[int], drafter: Drafter | None) -> int:
        """Return how many leading tokens of a prompt, without its last, a row's caches can serve.

        ``drafter`` is None if it has no cache. Its cache lacks the tokens of the last step. If it
        reads hidden states, which are not stored, the last common token does not count.
        """
        cached = self.rows[row]
        if cached.epoch != self.epoch:
            return 0
        common = 0
        for old, new in zip(cached.tokens, prompt[:-1], strict=False):
            if old != new:
                break
            common += 1
        if drafter is None:
            return common
        return max(0, min(common - bool(drafter.reads), cached.entries))

    def touch(self, row: int) -> None:
        """Note that a row has been used."""
        self._touched += 1
        self.rows[row].used = self._touched

    def clear(self, row: int, length: int) -> None:
        """Drop tokens beyond a length; zero their slots: an additive mask lets NaNs through."""
        cached = self.rows[row]
        cached.truncate(length)
        for cache in self._caches:
            cache.clear(row, length, cached.written)
        cached.written = length

    def copy_rows(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Overwrite rows; all are read before any is written."""
        longest = max(self.rows[row].written for row in (*source, *target))
        for cache in self._caches:
            cache.copy_rows(source, target, longest)
        read = [replace(self.rows[row], tokens=self.rows[row].tokens.copy()) for row in source]
        for row, copied in zip(target, read, strict=True):
            self.rows[row] = copied


class PrefixCache(RowCaches):
    """Key-value caches that are kept from one turn of a chat to the next.

    Pass the same object to :meth:`~eagle_fsd.model.pipeline.EagleFSD.stream` with every turn of a
    chat, with the same ``method``. The prefix that a prompt shares with the cached tokens is not
    processed again, except for its last few tokens; cached tokens beyond it (an edited history) are
    dropped. A call may be abandoned halfway. A cache serves one model, and one call at a time.
    """

    spare = 512
    _in_use = False

    @property
    def tokens(self) -> list[list[int]]:
        """For each row, the tokens in the target's cache."""
        return [row.tokens for row in self.rows]

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
