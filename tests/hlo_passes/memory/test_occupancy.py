"""The union of what is taken, against rectangles looked at one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlo_passes.memory._packing import Occupancy, place
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


@pytest.mark.parametrize("live", [LiveRange(-1, 2), LiveRange(3, 3), LiveRange(5, 1 << 40)])
def test_moments_that_there_are_not_are_refused(live: LiveRange) -> None:
    occupancy = Occupancy(MOMENTS)
    with pytest.raises(IndexError, match="moments"):
        occupancy.take(live, 0, 1)
    with pytest.raises(IndexError, match="moments"):
        occupancy.taken(live)


def test_numbers_that_do_not_go_together_are_refused() -> None:
    one = np.ones(1, np.int64)
    with pytest.raises(ValueError, match="equally many"):
        place(2, one, one, one, np.ones(2, np.int64), 1, False, one)
    with pytest.raises(ValueError, match="equally many"):
        place(2, one, one, one, one, 1, False, np.ones(2, np.int64))
    with pytest.raises(ValueError, match="add up"):
        place(2, one, 2 * one, 0 * one, one, 1, False, one)
    with pytest.raises(ValueError, match="alignment"):
        place(2, one, one, 0 * one, one, 0, False, one)


@pytest.mark.parametrize("other", [np.ones(1), np.ones(1, np.int32), np.ones((1, 1), np.int64)])
def test_other_elements_are_refused(other: np.ndarray) -> None:
    one = np.ones(1, np.int64)
    with pytest.raises(TypeError, match=r"int64\[n\]"):
        place(2, other, one, 0 * one, one, 1, False, one)


def test_what_is_to_be_written_can_be() -> None:
    one = np.ones(1, np.int64)
    fixed = np.ones(1, np.int64)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        place(2, one, one, 0 * one, one, 1, False, fixed)
