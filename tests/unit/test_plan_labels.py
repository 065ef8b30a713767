"""Names of points in a plot: each by its own point, and none on another."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from trunkline.plan.labels import GAP, Box, Point, offsets

ROOM = Box(left=0.0, bottom=0.0, right=600.0, top=300.0)
SIZE = (60.0, 10.0)


def boxes(points: list[Point], sizes: list[Point]) -> list[Box]:
    found = zip(points, offsets(points, sizes, ROOM), sizes, strict=True)
    return [
        Box(left=x + dx, bottom=y + dy, right=x + dx + width, top=y + dy + height)
        for (x, y), (dx, dy), (width, height) in found
    ]


def test_a_name_alone_stands_to_the_right_of_its_point_at_its_height() -> None:
    assert offsets([(100.0, 100.0)], [SIZE], ROOM) == [(GAP, -5.0)]


def test_at_the_right_edge_it_stands_to_the_left() -> None:
    assert offsets([(590.0, 100.0)], [SIZE], ROOM) == [(-GAP - 60.0, -5.0)]


@given(
    points=st.lists(
        st.tuples(st.floats(200, 400), st.floats(100, 200)), min_size=1, max_size=11, unique=True
    )
)
def test_in_a_heap_no_name_is_on_another_or_on_a_point_or_outside(points: list[Point]) -> None:
    found = boxes(points, [SIZE] * len(points))
    assert not any(one.touches(other) for one, other in combinations(found, 2))
    assert all(one.is_inside(ROOM) for one in found)
    dots = [Box(left=x - 3, bottom=y - 3, right=x + 3, top=y + 3) for x, y in points]
    assert not any(one.touches(dot) for one in found for dot in dots)


def test_where_there_is_no_room_at_all_every_name_is_there_still() -> None:
    tight = Box(left=0.0, bottom=0.0, right=20.0, top=20.0)
    assert offsets([(5.0, 5.0), (6.0, 6.0)], [SIZE] * 2, tight) == [(GAP, -5.0)] * 2
