"""Caches that outlive a call, so that the next turn of a chat costs its new tokens only."""

from __future__ import annotations

from collections.abc import Callable

from eagle_fsd.model.cache import TreeCache
from eagle_fsd.model.drafters.eagle import EagleHead
from eagle_fsd.model.target import Target

#: A cache that is outgrown makes room for this many tokens more than are needed.
SPARE = 512


class Conversation:
    """The caches of one sequence between calls of one model.

    Give it to :meth:`~eagle_fsd.model.pipeline.EagleFSD.stream` with every turn. What the new prompt
    and the cached tokens have in common at their beginning is not read again; what follows (an
    edited history, an answer that was cut off) is forgotten. A call that is broken off in the
    middle leaves it fit for the next.

    Attributes:
        tokens: What the target's cache holds.
        pairs: How many pairs (feature, next token) of them the head's cache holds.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.pairs = 0
        self._target: Target | None = None
        self._cache: TreeCache | None = None
        self._head_cache: TreeCache | None = None

    def resume(self, target: Target, head: EagleHead | None, prompt: list[int]) -> int:
        """How many tokens of ``prompt`` need not be read; forgets what does not belong to them.

        The last token of a prompt opens the first tree and is in no cache. With a head one token
        more is read again: its feature belongs to the head's next pair and is kept nowhere.

        Raises:
            ValueError: The conversation is another model's.
        """
        if self._target not in (None, target):
            raise ValueError("this conversation is another model's: begin a new one")
        self._target = target
        common = 0
        for old, new in zip(self.tokens, prompt[:-1], strict=False):
            if old != new:
                break
            common += 1
        start = common if head is None else max(0, min(common - 1, self.pairs))
        del self.tokens[start:]
        self.pairs = min(self.pairs, start)
        return start

    def caches(
        self, target: Target, head: EagleHead | None, length: int, head_length: int
    ) -> tuple[TreeCache, TreeCache | None]:
        """The caches, with room for ``length`` tokens and ``head_length`` pairs."""
        self._cache = _roomy(self._cache, length, len(self.tokens), target.new_cache)
        if head is not None:
            self._head_cache = _roomy(self._head_cache, head_length, self.pairs, head.new_cache)
        return self._cache, self._head_cache


def _roomy(
    cache: TreeCache | None, length: int, kept: int, new_cache: Callable[[int, int], TreeCache]
) -> TreeCache:
    """``cache``, or a larger one that begins with its first ``kept`` slots."""
    if cache is not None and cache.length >= length:
        return cache
    larger = new_cache(1, length + SPARE)
    if cache is not None:
        larger.copy_beginning(cache, kept)
    return larger
