"""Caches kept between calls, so that the next turn of a chat processes only its new tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from eagle_fsd.model.cache import TreeCache
from eagle_fsd.model.drafters.interface import Drafter
from eagle_fsd.model.target import Target

#: Extra slots allocated when a cache grows.
SPARE = 512


class PrefixCache:
    """The caches of one sequence, kept between the calls of one model.

    Pass it to :meth:`~eagle_fsd.model.pipeline.EagleFSD.stream` with every turn. The prefix that
    the new prompt shares with the cached tokens is not processed again; cached tokens beyond it
    (an edited history, an answer that was cut off) are dropped. A call that is abandoned halfway
    leaves the cache usable. One call at a time can use it.

    Attributes:
        tokens: The tokens in the target's cache.
        entries: Number of entries in the drafter's cache, one per token.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.entries = 0
        self._target: Target | None = None
        self._cache: TreeCache | None = None
        self._draft_cache: TreeCache | None = None
        self._in_use = False

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

    def resume(self, target: Target, drafter: Drafter, prompt: list[int], draft_length: int) -> int:
        """Drop cached tokens that are not a prefix of a prompt.

        The last token of a prompt is the root of the first tree and is never cached. If the drafter
        reads hidden states, one more token is processed again, because they are not stored.

        Args:
            target: The target.
            drafter: Proposes the trees.
            prompt: Token ids.
            draft_length: Slots needed in the drafter's cache; 0 if it has none.

        Returns:
            The number of leading tokens of ``prompt`` that are cached.

        Raises:
            ValueError: The caches belong to another model.
        """
        if self._target not in (None, target):
            raise ValueError("this prefix cache belongs to another model; create a new one")
        self._target = target
        common = 0
        for old, new in zip(self.tokens, prompt[:-1], strict=False):
            if old != new:
                break
            common += 1
        start = common
        if draft_length:
            start = max(0, min(common - bool(drafter.reads), self.entries))
        del self.tokens[start:]
        self.entries = min(self.entries, start)
        return start

    def caches(
        self, target: Target, drafter: Drafter, length: int, draft_length: int
    ) -> tuple[TreeCache, TreeCache | None]:
        """Return the caches, enlarged if necessary.

        Args:
            target: The target.
            drafter: Proposes the trees.
            length: Slots needed in the target's cache.
            draft_length: Slots needed in the drafter's cache; 0 if it has none.

        Returns:
            The target's cache, and the drafter's if it has one.
        """
        self._cache = _enlarged(self._cache, length, len(self.tokens), target.new_cache)
        if not draft_length:
            return self._cache, None
        self._draft_cache = _enlarged(
            self._draft_cache, draft_length, self.entries, drafter.new_cache
        )
        return self._cache, self._draft_cache


def _enlarged(
    cache: TreeCache | None, length: int, kept: int, new_cache: Callable[[int, int], TreeCache]
) -> TreeCache:
    """Return ``cache``, or a longer one that starts with its first ``kept`` slots."""
    if cache is not None and cache.length >= length:
        return cache
    if cache is not None:
        return cache.enlarged(length + SPARE, kept)
    return new_cache(1, length + SPARE)
