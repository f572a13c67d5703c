"""What frees memory runs as soon as it can, and nothing else moves."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hlo_passes.orders.load import Load
from hlo_passes.orders.release import released_early
from tests.hlo_passes.orders.test_search import PILED_UP, drawn, peak_of, problem, results


def moves(load: Load) -> bool:
    return not np.array_equal(load.order, load.problem.present.order)


def test_what_reads_something_large_for_the_last_time_follows_it():
    found = released_early(PILED_UP, 0)
    assert found.order.tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8]
    assert moves(found)


def test_where_there_is_room_nothing_moves():
    # 33 at most, and 24 where the third of the large ones is made.
    assert not moves(released_early(PILED_UP, 33))
    assert released_early(PILED_UP, 24).order.tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8]
    posed = results([[], [0], [], [2], [3], [0]], [8, 1, 16, 16, 1, 1])
    # 5 frees 8 bytes of the 40 of 3.
    assert released_early(posed, 40).order.tolist() == [0, 1, 2, 3, 4, 5]
    assert released_early(posed, 39).order.tolist() == [0, 1, 5, 2, 3, 4]


def test_what_makes_more_than_it_frees_stays():
    posed = results([[], [], [0], [1, 2]], [8, 16, 9, 1])
    assert not moves(released_early(posed, 0))
    assert moves(released_early(results([[], [], [0], [1, 2]], [8, 16, 7, 1]), 0))


def test_one_release_makes_the_next_possible():
    # 3 is the last to need what 0 makes, 4 what 3 makes; 1 and 2 are large.
    posed = results([[], [], [], [0], [3], [1, 2, 4]], [8, 32, 32, 4, 1, 1])
    assert released_early(posed, 0).order.tolist() == [0, 3, 4, 1, 2, 5]


def test_a_release_waits_for_all_other_readers():
    posed = results([[], [], [0], [0], [1, 2, 3]], [8, 32, 4, 2, 1])
    assert released_early(posed, 0).order.tolist() == [0, 1, 2, 3, 4]


def test_views_move_with_what_frees_their_bytes():
    # 2 shows what 0 makes under another name, 3 reads that.
    touches = [[0, 2, 3], [1, 4], [3, 4]]
    posed = problem([[], [], [0], [2], [1, 3]], [8, 32, 1], touches)
    posed.takes_time[2] = False
    assert released_early(posed, 0).order.tolist() == [0, 2, 3, 1, 4]


def test_what_takes_time_stays_outside_of_asynchronous_spans():
    # 1 starts what 3 waits for; 4 could free what 0 makes before it, in it, and behind it.
    opens = [0, 1, 0, -1, 0]
    before = results([[], [], [1], [2], [0]], [8, 1, 16, 16, 1], opens=opens)
    assert released_early(before, 0).order.tolist() == [0, 4, 1, 2, 3]
    inside = results([[], [0], [1], [2], [0, 1]], [8, 1, 16, 16, 1], opens=opens)
    assert not moves(released_early(inside, 0))
    behind = results([[], [0], [1], [2], [0, 1]], [8, 1, 16, 16, 1], opens=[0, 1, -1, 0, 0])
    assert released_early(behind, 0).order.tolist() == [0, 1, 2, 4, 3]


def test_what_needs_room_to_run_does_not_raise_the_peak():
    # 3 could run while what 1 makes is there.
    before, touches = [[], [], [1], [0, 1]], [[0, 3], [1, 2], [2], [3]]
    sizes = [8, 40, 16, 4]
    assert released_early(problem(before, sizes, touches), 0).order.tolist() == [0, 1, 3, 2]
    needy = problem(before, sizes, touches, workspace=[0, 0, 0, 32])
    assert not moves(released_early(needy, 0))


@settings(max_examples=200)
@given(st.integers(0, 10**9), st.integers(1, 30), st.floats(0, 1))
def test_any_program_keeps_its_dependences_and_its_peak(seed: int, n: int, share: float):
    posed = drawn(random.Random(seed), n)
    capacity = int(share * posed.present.peak)
    found = released_early(posed, capacity)
    order = found.order.tolist()
    assert peak_of(posed, order) <= peak_of(posed, range(posed.steps))
    assert moves(found) == (order != list(range(posed.steps)))
    if share == 1:
        assert not moves(found)
