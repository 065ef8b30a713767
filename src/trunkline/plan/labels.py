"""Where the names of points stand in a plot: beside their points, inside it, not on one another.

Pure: boxes in, offsets out, in one unit. Must never: move a point. Read `page.py` for who draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

GAP = 6.0
"""Between a point and its name, and half of what a point is wide."""
_STEPS = 24
"""Places above and below a point that are tried, a third of a line apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Left, bottom, right and top."""

    left: float
    bottom: float
    right: float
    top: float

    def touches(self, other: Box) -> bool:
        is_beside = self.right <= other.left or other.right <= self.left
        return not (is_beside or self.top <= other.bottom or other.top <= self.bottom)

    def is_inside(self, other: Box) -> bool:
        is_between = other.left <= self.left and self.right <= other.right
        return is_between and other.bottom <= self.bottom and self.top <= other.top


Point = tuple[float, float]


def offsets(points: Sequence[Point], sizes: Sequence[Point], inside: Box) -> list[Point]:
    """Of the lower left corner of each name from its point. Where there is no room for one, it
    stands to the right of its point, on whatever is there.
    """
    taken = [Box(left=x - GAP, bottom=y - GAP, right=x + GAP, top=y + GAP) for x, y in points]
    found: dict[int, Point] = {}
    # From the top: of points in a heap, the upper ones' names go up, and the lower ones' down.
    for index in sorted(range(len(points)), key=lambda one: (-points[one][1], points[one][0])):
        (x, y), size = points[index], sizes[index]
        tried = list(_places(size))
        boxes = [
            Box(left=x + dx, bottom=y + dy, right=x + dx + size[0], top=y + dy + size[1])
            for dx, dy in tried
        ]
        fits = (
            number
            for number, box in enumerate(boxes)
            if box.is_inside(inside) and not any(box.touches(other) for other in taken)
        )
        number = next(fits, 0)
        found[index] = tried[number]
        taken.append(boxes[number])
    return [found[index] for index in range(len(points))]


def _places(size: Point) -> Iterator[Point]:
    """The nearest first: right of the point, left of it, then higher and lower."""
    width, height = size
    for step in range(_STEPS):
        for sign in (1.0, -1.0) if step else (1.0,):
            dy = -height / 2 + sign * step * height / 3
            yield GAP, dy
            yield -GAP - width, dy
