"""Start ticks: three hand-drawn schedules, and what must hold of every schedule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlo_passes.memory.assignment import assign_offsets
from hlo_passes.placing import _schedule
from hlo_passes.placing.prefetch import DoesNotFit, Fetch, least_capacity, schedule_starts
from hlo_passes.plan import LiveRange
from tests.hlo_passes.toys import link

FAST = link("host", "hbm", nominal_bytes_per_s=1e9)
SLOW = link("host", "hbm", nominal_bytes_per_s=1e-3)


def fetch(name: str, size: int, first: int, end: int) -> Fetch:
    return Fetch(name, size, LiveRange(first, end))


def seconds(ticks: int) -> np.ndarray:
    """A clock of one second a tick."""
    return np.arange(ticks + 1, dtype=float)


def idle(ticks: int) -> np.ndarray:
    """Compute that leaves the link alone."""
    return np.zeros(ticks)


def load(*sizes: int) -> np.ndarray:
    return np.array(sizes, np.int64)


def test_capacity_decides():
    """Of 10 bytes c waits for a's to come free, and a tick longer for the temporary's.

    tick  0    1    2    3    4    5
    temp            [4──)
    a 6   ════[read)
    b 4   ═════════[read)              10 bytes with a at 0 and 1, 8 with the temporary at 2
    c 6                  ════[read)    not at 2: b's 4 and the temporary's 4
    """
    fetches = [fetch("a", 6, 1, 2), fetch("b", 4, 2, 3), fetch("c", 6, 4, 5)]
    starts = schedule_starts(fetches, load(0, 0, 4, 0, 0), 10, seconds(5), idle(5), SLOW)
    assert starts == [0, 0, 3]


def test_what_moves_bytes_itself_takes_the_link():
    """As in `test_link_decides`, but what runs from tick 4 on occupies the link for two seconds.

    tick  0    1    2    3    4    5    6    7    8
    link  ├─────── a ──────►├ b ►├ runs ──►├ b ─►│        starts 0 and 3
    """
    fetches = [fetch("a", 20, 8, 9), fetch("b", 20, 8, 9)]
    busy = np.array([0, 0, 0, 0, 1, 1, 0, 0, 0], float)
    toy = link("host", "hbm")
    assert schedule_starts(fetches, load(*[0] * 9), 100, seconds(9), busy, toy) == [0, 3]


def test_what_runs_waits_for_the_link_and_others_for_it():
    """A loop of four seconds, for three of which the link is its own, behind a fetch of three
    seconds; then one of two, which b reads.

    second   0    1    2    3    4    5    6    7    8    9
    compute  │ a  │ loop ──────────────────│         │ b  │
    link     ├──── fetch ──►├──── loop ───►├─ next ─►│
    """
    rows = np.array([30, 2, 3, -1, 20, 2, 3, -1])
    clock = np.array([0, 1, 5, 6], float)
    none, idle_s, own = np.zeros(0, np.int64), np.zeros(3), np.array([0, 3, 0], float)
    links = 10.0, 0.0, 10.0, 0.0

    def step_s(in_busy: np.ndarray, out_busy: np.ndarray, *, is_one_queue: bool = False) -> float:
        starts = np.array([0, 2])
        times = _schedule.step_times(
            rows, starts, none, none, clock, in_busy, out_busy, *links, is_one_queue
        )
        return times[0]

    assert step_s(idle_s, idle_s) == 8  # The loop ends at 5.
    assert step_s(own, idle_s) == 9
    assert step_s(idle_s, own) == 8
    assert step_s(own, own, is_one_queue=True) == 9


def test_link_decides():
    """At 10 bytes a second, taken for 1.5 times slower, 20 bytes take 3 seconds.

    tick  0    1    2    3    4    5    6    7    8
    a                                            read
    b                                            read
    link       ├─────── a ──────►├───── b ──────►│        starts 2 and 5
    """
    fetches = [fetch("a", 20, 8, 9), fetch("b", 20, 8, 9)]
    toy = link("host", "hbm")
    assert schedule_starts(fetches, load(*[0] * 9), 100, seconds(9), idle(9), toy) == [2, 5]
    late = link("host", "hbm", latency_s=1.5)
    assert schedule_starts(fetches, load(*[0] * 9), 100, seconds(9), idle(9), late) == [0, 3]


def test_slots_decide():
    """With two slots the third fetch waits for the first one's last read.

    tick  0    1    2    3    4
    a     ════[read)                slot 0
    b     ═════════[read)           slot 1
    c               ════[read)      slot 0
    """
    fetches = [fetch(n, 1, t, t + 1) for n, t in (("a", 1), ("b", 2), ("c", 3))]
    for slots, expected in ((None, [0, 0, 0]), (3, [0, 0, 0]), (2, [0, 0, 2]), (1, [0, 2, 3])):
        found = schedule_starts(fetches, load(*[0] * 5), 100, seconds(5), idle(5), SLOW, slots)
        assert found == expected, slots
    together = [fetch("a", 1, 1, 2), fetch("b", 1, 1, 2)]
    with pytest.raises(DoesNotFit):
        schedule_starts(together, load(0, 0, 0), 100, seconds(3), idle(3), SLOW, 1)


def test_a_ring_needs_one_gap():
    """Of 10 bytes 6 are free at tick 3, but not side by side.

    tick  0    1    2    3    4    5    6
    6-10  c═════════[read)         d's 5 bytes fit at 3 by their number alone, but only at 4
    2-6   b════[read──────────)    is there one gap for them
    0-2   a════[read)
    """
    fetches = [
        fetch("a", 2, 1, 2),
        fetch("b", 4, 1, 4),
        fetch("c", 4, 2, 3),
        fetch("d", 5, 5, 6),
    ]
    ticks = load(*[0] * 6)
    assert schedule_starts(fetches, ticks, 10, seconds(6), idle(6), SLOW) == [0, 0, 0, 3]
    ring = schedule_starts(fetches, ticks, 10, seconds(6), idle(6), SLOW, ring_alignment=1)
    assert ring == [0, 0, 0, 4]


def test_a_ring_is_aligned():
    fetches = [fetch("a", 3, 1, 3), fetch("b", 3, 2, 3)]
    ticks = load(0, 0, 0)
    assert schedule_starts(fetches, ticks, 7, seconds(3), idle(3), SLOW, ring_alignment=4) == [0, 0]
    with pytest.raises(DoesNotFit):
        schedule_starts(fetches, ticks, 6, seconds(3), idle(3), SLOW, ring_alignment=4)


def test_nothing_to_fetch():
    assert schedule_starts([], load(3), 2, seconds(1), idle(1), SLOW) == []
    assert least_capacity([], load(3, 5)) == (5, 1)
    assert least_capacity([], load()) == (0, 0)


def test_what_does_not_fit_names_its_tick():
    with pytest.raises(DoesNotFit) as refused:
        schedule_starts([fetch("a", 6, 1, 3)], load(0, 1, 5), 10, seconds(3), idle(3), FAST)
    assert (refused.value.tick, refused.value.bytes_needed) == (2, 11)


TICKS = 12


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Fetch], np.ndarray]:
    fetches: list[Fetch] = []
    for k in range(draw(st.integers(0, 7))):
        first = draw(st.integers(0, TICKS - 1))
        end = draw(st.integers(first + 1, min(TICKS, first + 3)))
        fetches.append(fetch(f"w{k}", draw(st.integers(1, 9)), first, end))
    fetches.sort(key=lambda f: f.reads)
    return fetches, load(*(draw(st.integers(0, 6)) for _ in range(TICKS)))


def used(fetches: list[Fetch], starts: list[int], ticks: np.ndarray) -> list[int]:
    """Bytes live at each tick, counted one by one."""
    return [
        int(ticks[t])
        + sum(f.size for f, s in zip(fetches, starts, strict=True) if s <= t < f.reads.end)
        for t in range(TICKS)
    ]


clocks = st.lists(st.sampled_from([0.0, 0.1, 1.0, 3.0]), min_size=TICKS, max_size=TICKS).map(
    lambda s: np.concatenate([[0.0], np.cumsum(s)])
)


@given(problems())
def test_least_capacity_is_what_is_read_at_once(problem: tuple[list[Fetch], np.ndarray]):
    fetches, ticks = problem
    just_in_time = used(fetches, [f.reads.start for f in fetches], ticks)
    least, tick = least_capacity(fetches, ticks)
    assert least == max(just_in_time) == just_in_time[tick]


@given(problems(), clocks, st.integers(-3, 30))
def test_a_schedule_exists_from_the_least_capacity_on(
    problem: tuple[list[Fetch], np.ndarray], clock: np.ndarray, more: int
):
    fetches, ticks = problem
    capacity = least_capacity(fetches, ticks)[0] + more
    if more < 0 and fetches and capacity >= ticks.max():
        with pytest.raises(DoesNotFit):
            schedule_starts(fetches, ticks, capacity, clock, idle(len(ticks)), link("host", "hbm"))
    if more >= 0:
        starts = schedule_starts(
            fetches, ticks, capacity, clock, idle(len(ticks)), link("host", "hbm")
        )
        assert max(used(fetches, starts, ticks)) <= capacity


@given(problems(), clocks, st.integers(0, 30), st.sampled_from([None, 1, 2, 4]), st.booleans())
def test_what_holds_of_every_schedule(
    problem: tuple[list[Fetch], np.ndarray],
    clock: np.ndarray,
    more: int,
    slots: int | None,
    is_ring: bool,
):
    fetches, ticks = problem
    capacity = least_capacity(fetches, ticks)[0] + more
    toy = link("host", "hbm", latency_s=0.05)
    alignment = 2 if is_ring else None
    try:
        starts = schedule_starts(
            fetches, ticks, capacity, clock, idle(len(ticks)), toy, slots, ring_alignment=alignment
        )
    except DoesNotFit:
        assert is_ring or slots is not None
        return
    assert starts == sorted(starts)
    assert all(s <= f.reads.start for f, s in zip(fetches, starts, strict=True))
    assert max(used(fetches, starts, ticks)) <= capacity
    ones = [Fetch(f.buffer, 1, f.reads) for f in fetches]
    if slots is not None:
        assert max(used(ones, starts, np.zeros(TICKS, np.int64))) <= slots
    # No earlier than a link that is half as slow again needs.
    for k, start in enumerate(starts):
        ends = clock[start + 1] + toy.latency_s
        is_late = False
        for f in fetches[k:]:
            ends += 1.5 * f.size / toy.bytes_per_s
            is_late = is_late or ends > clock[f.reads.start] - 1e-9
        assert is_late or start == fetches[k].reads.start or start == starts[k - 1]
    if is_ring:
        # What starts at one tick starts in this order.
        ranges = [
            LiveRange(s * TICKS + k, f.reads.end * TICKS)
            for k, (f, s) in enumerate(zip(fetches, starts, strict=True))
        ]
        packing = assign_offsets([f.size for f in fetches], ranges, 2, strategies=("start",))
        assert packing.total <= capacity - ticks.max()


@given(problems(), clocks, st.integers(0, 20), st.integers(0, 20))
def test_more_memory_starts_nothing_later(
    problem: tuple[list[Fetch], np.ndarray], clock: np.ndarray, more: int, yet_more: int
):
    fetches, ticks = problem
    capacity = least_capacity(fetches, ticks)[0] + more
    toy = link("host", "hbm")
    small = schedule_starts(fetches, ticks, capacity, clock, idle(len(ticks)), toy)
    large = schedule_starts(fetches, ticks, capacity + yet_more, clock, idle(len(ticks)), toy)
    assert all(b <= a for a, b in zip(small, large, strict=True))
