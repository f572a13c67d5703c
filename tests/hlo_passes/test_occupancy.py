"""The union of what is taken, against rectangles looked at one by one."""

from hypothesis import given
from hypothesis import strategies as st

from hlo_passes.occupancy import Occupancy
from hlo_passes.plan import LiveRange

MOMENTS = 300  # Three sizes of blocks.


@st.composite
def ranges(draw: st.DrawFn) -> LiveRange:
    start = draw(st.integers(0, MOMENTS - 2))
    return LiveRange(start, draw(st.integers(start + 1, MOMENTS - 1)))


offsets = st.tuples(st.integers(0, 40), st.integers(1, 10)).map(lambda o: (o[0], sum(o)))


@given(st.lists(st.tuples(ranges(), offsets), max_size=30), ranges())
def test_taken_is_what_rectangles_live_at_the_time_take(rectangles, asked) -> None:
    occupancy = Occupancy(MOMENTS)
    for live, (bottom, top) in rectangles:
        occupancy.take(live, bottom, top)
    expected = {
        n for live, (bottom, top) in rectangles if live.overlaps(asked) for n in range(bottom, top)
    }
    found = occupancy.taken(asked)
    assert {n for bottom, top in found for n in range(bottom, top)} == expected


def test_neighbours_count_as_one() -> None:
    occupancy = Occupancy(MOMENTS)
    for n in (5, 1, 3, 2, 4):
        occupancy.take(LiveRange(7, 8), n, n + 1)
    assert set(occupancy.taken(LiveRange(7, 8))) == {(1, 6)}


def test_nothing_is_taken_at_first() -> None:
    assert Occupancy(MOMENTS).taken(LiveRange(0, MOMENTS - 1)) == []
