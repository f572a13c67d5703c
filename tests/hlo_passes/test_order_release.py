"""What frees memory runs as soon as it can, and nothing else moves."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlo_passes.order_release import released_early
from tests.hlo_passes.test_order_search import PILED_UP, drawn, peak_of, problem, results


def test_what_reads_something_large_for_the_last_time_follows_it():
    found = released_early(PILED_UP, 0)
    assert found.order.tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8]
    assert found.moves


def test_where_there_is_room_nothing_moves():
    # 33 at most, and 24 where the third of the large ones is made.
    assert not released_early(PILED_UP, 33).moves
    assert released_early(PILED_UP, 24).order.tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8]
    posed = results([[], [0], [], [2], [3], [0]], [8, 1, 16, 16, 1, 1])
    # 5 frees 8 bytes of the 40 of 3.
    assert released_early(posed, 40).order.tolist() == [0, 1, 2, 3, 4, 5]
    assert released_early(posed, 39).order.tolist() == [0, 1, 5, 2, 3, 4]


def test_what_makes_more_than_it_frees_stays():
    posed = results([[], [], [0], [1, 2]], [8, 16, 9, 1])
    assert not released_early(posed, 0).moves
    assert released_early(results([[], [], [0], [1, 2]], [8, 16, 7, 1]), 0).moves


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


@pytest.mark.parametrize("opens", [(0, 1, 0, -1, 0), (0, 1, -1, 0, 0)])
def test_asynchronous_spans_stay_what_they_are(opens: tuple[int, ...]):
    # 1 and what ends it hide what stands between them, and 4 would free what 0 makes.
    posed = results([[], [], [1], [2], [0]], [8, 1, 16, 16, 1], opens=opens)
    found = released_early(posed, 0)
    assert found.order.tolist() == [0, 4, 1, 2, 3]
    inside = results([[], [0], [1], [2], [1, 0]], [8, 1, 16, 16, 1], opens=opens)
    assert not released_early(inside, 0).moves or opens[2] == -1


def test_what_needs_room_to_run_does_not_raise_the_peak():
    posed = results([[], [], [0], [1, 2]], [8, 16, 4, 1], workspace=[0, 0, 32, 0])
    assert (
        not released_early(posed, 0).moves
        or peak_of(posed, released_early(posed, 0).order.tolist()) <= posed.present.peak
    )


@settings(max_examples=200)
@given(st.integers(0, 10**9), st.integers(1, 30), st.floats(0, 1))
def test_any_program_keeps_its_dependences_and_its_peak(seed: int, n: int, share: float):
    posed = drawn(random.Random(seed), n)
    capacity = int(share * posed.present.peak)
    found = released_early(posed, capacity)
    order = found.order.tolist()
    assert peak_of(posed, order) <= peak_of(posed, range(posed.steps))
    assert found.moves == (order != list(range(posed.steps)))
    if share == 1:
        assert not found.moves
