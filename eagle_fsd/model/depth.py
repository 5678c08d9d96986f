"""Choose the depth of the next step's trees, with ``depth="auto"``.

A step may use the tree of the options or one of a few shallower ones (:func:`shapes_of`).
:class:`DepthPolicy` chooses the one that promises the most tokens per second, from

- the accepted lengths that have been read, see :class:`AcceptanceRates`;
- the probabilities that the draft gave its best path, which say something about levels that no
  accepted path has reached;
- the seconds that steps of every shape took.

These are numbers that the host has anyway, up to the last step that it has read, so the device is
never waited for. Only calls whose tokens do not depend on the draft tree use the policy, because
its choices depend on timings.

The accepted length of one step says little about that of the next: what adapts is the depth for a
kind of text, a drafter, a number of rows and a machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence

from eagle_fsd.model.config import TreeConfig

#: Shapes of a tree, which bounds compilations and CUDA graphs.
MAX_SHAPES = 4
#: Weight of a step's lengths after one more step.
DECAY = 0.98
#: Weight of a level's draft probability, relative to a level that was verified.
CONFIDENCE_WEIGHT = 0.25
#: Rate of acceptance on the first level before any step, and the number of verified levels that
#: such a rate, or that of the levels above, counts for.
FIRST_RATE, PRIOR = 0.9, 2.0
#: Times per shape that are kept, and the number from which a shape can be compared with others.
MAX_TIMES, MIN_TIMES = 16, 3
#: Steps between two that take the shape that has not been used for longest: while some shapes
#: cannot be compared yet, and later.
EXPLORE_NEW_EVERY, EXPLORE_EVERY = 4, 64


def shapes_of(tree: TreeConfig) -> tuple[TreeConfig, ...]:
    """Return the shapes that steps may use, the deepest first.

    The depth is halved from one to the next, and the number of nodes per level stays the same.

    Args:
        tree: The deepest shape; alone unless it is adaptive.
    """
    shapes, levels = [tree], levels_of(tree)
    while tree.adaptive and len(shapes) < MAX_SHAPES and shapes[-1].depth > 1 and levels > 2:
        depth = min(shapes[-1].depth, levels - 1) // 2
        nodes = -(-tree.total_tokens * (depth + 2) // (levels_of(tree) + 1))
        shapes.append(tree.updated(depth=depth, total_tokens=nodes, adaptive=True))
        levels = depth + 1
    return tuple(shapes)


def levels_of(tree: TreeConfig) -> int:
    """Return the number of drafted tokens on the longest path that a tree can have.

    Args:
        tree: The tree's shape.
    """
    return min(tree.depth + 1, tree.total_tokens - 1)


class AcceptanceRates:
    """How often a drafted token is accepted, given that its parent was, by level of the tree.

    Levels 1, 2, 3 to 4, 5 to 8 and so on share a rate. The rate of levels with little evidence is
    close to that of the levels above, so that steps with shallow trees also say when deep ones
    pay again. Steps before count less and less.
    """

    def __init__(self) -> None:
        self._tried: list[float] = []
        self._accepted: list[float] = []

    def forget(self) -> None:
        """Let all that has been added count less."""
        self._tried = [DECAY * value for value in self._tried]
        self._accepted = [DECAY * value for value in self._accepted]

    def add(self, accepted: int, levels: int, best_path: Sequence[float] = ()) -> None:
        """Add the result of a step for one row.

        Args:
            accepted: Number of drafted tokens that were accepted. If these are all levels, more
                might have been.
            levels: Number of levels of the tree.
            best_path: ``1 + levels`` probabilities that the draft gave its best path, by depth;
                default: unknown.
        """
        while 2 ** len(self._tried) < 2 * levels:
            self._tried.append(0.0)
            self._accepted.append(0.0)
        for index in range((levels - 1).bit_length() + 1):
            above, last = 2**index // 2, min(2**index, levels)
            width = last - above
            self._tried[index] += min(max(accepted + 1 - above, 0), width)
            self._accepted[index] += min(max(accepted - above, 0), width)
            if best_path and best_path[above] > 0.0:
                rate = (best_path[last] / best_path[above]) ** (1 / width)
                self._tried[index] += CONFIDENCE_WEIGHT * width
                self._accepted[index] += CONFIDENCE_WEIGHT * width * rate

    def lengths(self, levels: int) -> list[float]:
        """Return the expected number of tokens that a step emits, for trees of 0 levels and more.

        Args:
            levels: Number of levels of the deepest tree.
        """
        reached, found, rate, last = 1.0, [1.0], FIRST_RATE, 1
        for level in range(1, levels + 1):
            if level == 1 or level > last:
                index = (level - 1).bit_length()
                last = 2**index
                if index < len(self._tried):
                    rate = (self._accepted[index] + PRIOR * rate) / (self._tried[index] + PRIOR)
            reached *= rate
            found.append(found[-1] + reached)
        return found


class DepthPolicy:
    """Choose among the shapes of a tree; one policy serves all calls of a pair."""

    def __init__(self) -> None:
        self._rates = AcceptanceRates()
        self._times: dict[Hashable, list[_Times]] = {}
        self._steps = 0

    def choose(self, shapes: Sequence[TreeConfig], setting: Hashable) -> int:
        """Choose the shape of the next step.

        Args:
            shapes: Result of :func:`shapes_of`.
            setting: What else the duration of a step depends on, such as the number of rows.

        Returns:
            Index of the shape.
        """
        self._steps += 1
        times = self._times_of(shapes, setting)
        known = [index for index, item in enumerate(times) if len(item.seconds) >= MIN_TIMES]
        period = EXPLORE_EVERY if len(known) == len(shapes) else EXPLORE_NEW_EVERY
        if 0 not in known:
            index = 0
        elif self._steps % period == 0:
            index = min(range(len(shapes)), key=lambda index: times[index].last)
        else:
            lengths = self._rates.lengths(levels_of(shapes[0]))
            speeds = [lengths[levels_of(shapes[index])] / times[index].typical for index in known]
            index = known[speeds.index(max(speeds))]
        times[index].last = self._steps
        return index

    def add_step(self, rows: Sequence[tuple[int, Sequence[float]]], levels: int) -> None:
        """Add the result of a step.

        Args:
            rows: For each row, the number of accepted drafted tokens and the probabilities of the
                best path; see :meth:`AcceptanceRates.add`.
            levels: Number of levels of the trees.
        """
        self._rates.forget()
        for accepted, best_path in rows:
            self._rates.add(accepted, levels, best_path)

    def add_time(
        self, shapes: Sequence[TreeConfig], setting: Hashable, index: int, seconds: float
    ) -> None:
        """Add the duration of a step.

        Args:
            shapes: As for :meth:`choose`.
            setting: As for :meth:`choose`.
            index: Index of the step's shape.
            seconds: The duration.
        """
        self._times_of(shapes, setting)[index].add(seconds)

    def _times_of(self, shapes: Sequence[TreeConfig], setting: Hashable) -> list[_Times]:
        key = shapes[0], setting
        if key not in self._times:
            self._times[key] = [_Times() for _ in shapes]
        return self._times[key]


class _Times:
    """Durations of steps with a shape.

    Attributes:
        seconds: The latest ones.
        typical: Their lower quartile: a shape's first steps compile, capture or allocate.
        last: Number of the latest step that the shape was chosen for.
    """

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=MAX_TIMES)
        self.typical, self.last = 0.0, 0

    def add(self, seconds: float) -> None:
        """Add a duration.

        Args:
            seconds: The duration.
        """
        self.seconds.append(seconds)
        self.typical = sorted(self.seconds)[len(self.seconds) // 4]
