"""Place labels beside points so that they cover neither points nor each other."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Left, top, right and bottom edge.
Box = tuple[float, float, float, float]


@dataclass
class LabelPlacer:
    """Finds free space for labels in a plot.

    Coordinates are in pixels; it does not matter whether ``y`` points up or down.

    Args:
        frame: The plot's left, top, right and bottom edge.
        character: Approximate width of a character.
        line: Height of a line.
        radius: Radius of a marker.
    """

    frame: Box
    character: float
    line: float
    radius: float
    _taken: list[Box] = field(default_factory=list)

    def reserve(self, x: float, y: float) -> None:
        """Keep labels away from a marker.

        Args:
            x: The marker's center.
            y: The marker's center.
        """
        radius = self.radius
        self.block((x - radius, y - radius, x + radius, y + radius))

    def block(self, box: Box) -> None:
        """Keep labels out of a box.

        Args:
            box: Its left, top, right and bottom edge.
        """
        self._taken.append(box)

    def place(self, x: float, y: float, text: str) -> tuple[float, float] | None:
        """Place a label beside a marker.

        Args:
            x: The marker's center.
            y: The marker's center.
            text: The label.

        Returns:
            The center of the label; None without free space.
        """
        half, high = self.character * len(text) / 2, self.line / 2
        aside, beyond = self.radius + 2 + half, self.radius + 2 + high
        left, top, right, bottom = self.frame
        for right_by, down_by in (
            (aside, -high),
            (aside, high),
            (-aside, -high),
            (-aside, high),
            (0, -beyond),
            (0, beyond),
            (aside, -2 * self.line),
            (aside, 2 * self.line),
            (-aside, -2 * self.line),
            (-aside, 2 * self.line),
        ):
            at, level = x + right_by, y + down_by
            box = (at - half, level - high, at + half, level + high)
            inside = left <= box[0] and box[2] <= right and top <= box[1] and box[3] <= bottom
            if inside and not any(_overlap(box, other) for other in self._taken):
                self._taken.append(box)
                return at, level
        return None


def _overlap(first: Box, second: Box) -> bool:
    return (
        first[0] < second[2]
        and second[0] < first[2]
        and first[1] < second[3]
        and second[1] < first[3]
    )
