"""Which arguments stay on the device, and how much memory the others are streamed through.

The budget is shared by three: what is fixed, the weights that stay, and the arena that
temporaries and streamed weights pass through.

    budget  │ fixed │ weights that stay │ arena: temporaries + ring of fetches │

A byte more for weights that stay is a byte less to move each step; a byte more for the
arena lets the link run further ahead. Which weights stay matters as well: the first ones,
because nothing hides their transfer (with room to run ahead, an exchange argument shows
that no other choice of equal bytes is faster); or evenly spread ones, because a small
arena lets the link work only while streamed weights are being used up.

And the largest ones, because the arena must hold the largest weight that is streamed.

So many ways to share are compared, all of them at once in a best-first search (Hart,
Nilsson, Raphael 1968). Each is known by a time that it cannot beat: first that of a link
that never waits for memory, then that of its schedule, and the schedule is tightened while
XLA's packing of it exceeds the budget. The least time of all is always worked on next, so
that the first schedule that is found to fit is the fastest of those compared, and most are
never scheduled at all. Where more is charged for than time (`prices`), costs are compared so.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, count
from typing import NamedTuple

import numpy as np

from hlo_passes.memory.assignment import Packing
from hlo_passes.placing import _schedule
from hlo_passes.placing.budget_bound import budget_lower_bound_s
from hlo_passes.placing.eviction import eviction_rows, schedule_evictions
from hlo_passes.placing.prefetch import (
    DoesNotFit,
    Fetch,
    fetch_rows,
    least_capacity,
    schedule_starts,
)
from hlo_passes.placing.problem import (
    Departure,
    Movable,
    Problem,
    device_sizes,
    fetches,
    streamed_load,
)
from hlo_passes.plan import LogicalTime
from hlo_passes.simulator.events import queue_of

# How many of the largest distinct sizes are tried as the threshold above which all stay.
_PINNED_SIZES = 4

# Down to which share of all bytes, as a power of two, the room to run ahead is tried.
_HALVINGS = 9

# Up to how many weights all sets of them are compared.
_FEW = 8

# In how many parts the bytes of all weights are divided between the device and the host.
_SHARES = 8

# A schedule this close to the certified bound is taken at once.
_CLOSE_ENOUGH = 1.001

# What the caller gives and takes back stays on the device where a step is no slower than this for
# it: on the host it would be between steps, too.
_STORED = 1.005

# How often a schedule is tightened because its packing exceeds the budget.
_TIGHTENED = 8


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to share the budget, scheduled and packed.

    Attributes:
      stay: buffers of the weights that live on the device.
      fetches, starts: what is streamed, and from which tick.
      departures: when each of ``Problem.evictions`` is issued and waited for, of those that there
        are with `stay` on the device.
      step_time_s: predicted.
      packing: offsets in the arena of the fetches, then of ``Problem.arena.temporaries``.
      cost_s: `step_time_s` and what is charged beside it (`Problem.prices`).
    """

    stay: frozenset[str]
    fetches: tuple[Fetch, ...]
    starts: tuple[int, ...]
    departures: tuple[Departure, ...]
    step_time_s: float
    packing: Packing
    cost_s: float


def least_budget(problem: Problem, slots: int | None = None) -> tuple[int, int]:
    """Returns the least budget in bytes for which a plan was found, and the tick that needs
    most: with every weight streamed, and each held only while it is read.

    When `slots` rule out every plan, it is the budget that would do without them.
    """
    _, tick = _needed(problem)
    enough = least = unpacked_budget(problem)
    too_little, most = least - 1, 2 * least + sum(m.size for m in problem.movables)
    # Packing takes some bytes more. By how many it exceeds a budget, is a good guess of what would
    # do; then, by halving, that is known to a thousandth of what is needed.
    close = step = max(problem.arena.alignment, least >> 10)
    while isinstance(excess := fit_or_excess(problem, enough, slots), int):
        if enough > most:
            return least if slots is None else least_budget(problem)[0], tick
        too_little, enough, step = enough, enough + max(excess, step), 2 * step
    while enough - too_little > close:
        middle = (too_little + enough) // 2
        if stream_all(problem, middle, slots) is None:
            too_little = middle
        else:
            enough = middle
    return enough, tick


def unpacked_budget(problem: Problem) -> int:
    """Returns the budget in bytes that `least_budget` begins with: without what packing takes."""
    capacity, _ = _needed(problem)
    return problem.fixed_bytes + problem.arena.base + capacity


def tightest(problem: Problem) -> int:
    """Returns the tick that needs most with every weight streamed, and each held only while it is
    read."""
    return _needed(problem)[1]


def _needed(problem: Problem) -> tuple[int, int]:
    return least_capacity(fetches(problem.movables), problem.arena.load)


def certain_budget(problem: Problem) -> int:
    """Returns bytes that no plan for the module undercuts, in whatever order, and whatever it
    streams, evicts or computes again: what stays, and what one instruction makes, reads last, or
    reads of what may move.

    In another order XLA:GPU and XLA:CPU may pack it where results will be, or what is donated was.
    """
    at_once = np.zeros(problem.ticks.end + 1, np.int64)
    elsewhere = np.zeros_like(at_once)  # What of it may lie there.
    results = device_sizes(problem.module.entry.root.shape)
    largest = max(results, default=0) if problem.machine.platform != "tpu" else 0

    def add(size: int, ticks: set[LogicalTime]) -> None:
        for tick in ticks:
            at_once[tick] += size
            elsewhere[tick] += size if size <= largest else 0

    # Where a donated argument stays on the device, what replaces it is made in its bytes.
    stores = {problem.evictions[m.store].holder for m in problem.movables if m.store is not None}
    for t in problem.arena.temporaries:
        if t.kind == "workspace" or t.name not in stores:
            add(t.size, {t.live_range.start, t.live_range.end - 1})
    for m in problem.movables:
        add(m.size, {tick for read in m.reads for tick in (read.start, read.end - 1)})
    certain = at_once - np.minimum(elsewhere, sum(results))
    return problem.fixed_bytes + problem.arena.tables + int(certain.max())


def choose_placement(problem: Problem, budget: int, slots: int | None = None) -> Choice | None:
    """Chooses what stays and streams the rest.

    Args:
      budget: device bytes.
      slots: at most so many streamed weights on the device at once.

    Returns:
      The fastest choice found whose packed arena fits, or None when there is none.
    """
    found = _search(problem, budget, _candidates(problem, budget), slots)
    return found if isinstance(found, Choice) else None


def stream_all(problem: Problem, budget: int, slots: int | None = None) -> Choice | None:
    """Streams what may move, such that the arena fits when it is packed."""
    found = fit_or_excess(problem, budget, slots)
    return found if isinstance(found, Choice) else None


def fit_or_excess(
    problem: Problem, budget: int, slots: int | None = None, free: int = 0
) -> Choice | int:
    """The same, with `free` bytes left by transfers that can; where it does not fit, by how many
    bytes the packing that came nearest is above the budget. Where nothing could be packed, by how
    many the load of the temporaries, and of what is streamed while it is read, exceeds it."""
    none = frozenset[str]()
    found = _search(problem, budget, [none], slots, free)
    if found:
        return found
    load = int(streamed_load(problem).max(initial=0))
    return max(0, load - capacity_beside(problem, budget, none))


def scheduled(
    problem: Problem,
    budget: int,
    departures: Sequence[Departure],
    jobs: Sequence[Fetch],
    starts: Sequence[int],
) -> Choice | None:
    """Streams everything as it was scheduled; None where the arena does not fit when it is packed.

    Args:
      departures: of each of ``problem.evictions``.
      jobs, starts: in the order of their first reads.
    """
    held = [
        # What lies in bytes that end with it cannot be held for its copy.
        Departure(max(d.start, e.written), max(d.done, e.free) if e.holder else e.free)
        for d, e in zip(departures, problem.evictions, strict=True)
    ]
    done = (0 if job.eviction is None else held[job.eviction].done for job in jobs)
    # In the order of their first readers.
    starts = list(accumulate(map(max, starts, done), max))
    if any(start > job.reads.start for job, start in zip(jobs, starts, strict=True)):
        return None
    fetched = problem.fetched_until(jobs, held)
    packing = problem.arena_until(held).pack(fetched, starts)
    if packing.total - problem.arena.base > capacity_beside(problem, budget, frozenset()):
        return None
    step_s = step_seconds(problem, fetched, starts, held)
    cost_s = step_s + charged_s(problem, fetched)
    return Choice(frozenset(), fetched, tuple(starts), tuple(held), step_s, packing, cost_s)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A schedule to be made, with `capacity` bytes for fetches and the temporaries among
    them; with less than `least` there is none.

    Attributes:
      posed: the problem with `stay` on the device.
    """

    posed: Problem
    stay: frozenset[str]
    fetches: tuple[Fetch, ...]
    capacity: int
    least: int
    tightened: int = 0


def _search(
    problem: Problem,
    budget: int,
    candidates: Iterable[frozenset[str]],
    slots: int | None,
    free: int = 0,
) -> Choice | int:
    """The fastest that fits, or the least bytes that a packing is above the budget; 0 where there
    is none."""
    if problem.ticks.transfers and not problem.ticks.end:
        return 0  # It only hands its arguments back: there is no tick to bring them at.
    serial = count()  # of equals the earlier one
    queue: list[tuple[float, int, int, float, _Attempt, _Schedule | None]] = []

    def push(seconds: float, attempt: _Attempt, schedule: _Schedule | None) -> None:
        leaving = sum(e.size for e in attempt.posed.evictions)
        moved = leaving + sum(f.size for f in attempt.fetches)
        weighed = seconds + charged_s(attempt.posed, attempt.fetches)
        if any(m.store is not None and m.buffer not in attempt.stay for m in problem.movables):
            weighed *= _STORED
        heapq.heappush(queue, (weighed, moved, next(serial), seconds, attempt, schedule))

    for attempt in _attempts(problem, budget, candidates, free):
        push(_unhindered_s(attempt.posed, attempt.fetches), attempt, None)
    enough = _CLOSE_ENOUGH * budget_lower_bound_s(problem, budget)
    nearest = 0
    while queue:
        _, _, _, seconds, attempt, schedule = heapq.heappop(queue)
        if schedule is None:
            schedule = _scheduled(attempt, slots)
            if schedule is None:
                continue
            seconds = step_seconds(
                attempt.posed, schedule.fetches, schedule.starts, schedule.departures
            )
            if seconds + charged_s(attempt.posed, schedule.fetches) > enough:
                push(seconds, attempt, schedule)
                continue
        arena = attempt.posed.arena_until(schedule.departures)
        packing = arena.pack(schedule.fetches, schedule.starts)
        over = packing.total - problem.arena.base - capacity_beside(problem, budget, attempt.stay)
        if over <= 0:
            return Choice(
                attempt.stay,
                schedule.fetches,
                tuple(schedule.starts),
                tuple(schedule.departures),
                seconds,
                packing,
                seconds + charged_s(attempt.posed, schedule.fetches),
            )
        nearest = min(over, nearest or over)
        if attempt.capacity > attempt.least and attempt.tightened < _TIGHTENED:
            # No schedule for less memory is known to be faster. Steps double, so that the last
            # one is the whole way to the least: in a broken up arena it may be the first to fit.
            spare = attempt.capacity - attempt.least
            step = max(over, spare >> (_TIGHTENED - 1 - attempt.tightened))
            capacity = max(attempt.least, attempt.capacity - step)
            push(
                seconds,
                replace(attempt, capacity=capacity, tightened=attempt.tightened + 1),
                None,
            )
    return nearest


def _attempts(
    problem: Problem, budget: int, candidates: Iterable[frozenset[str]], free: int
) -> Iterator[_Attempt]:
    """Yields each candidate with room for what it streams, in up to two ways: between two
    reads a copy is dropped, or kept where there is room for it."""
    load, everything = problem.arena.load, fetches(problem.movables)
    for stay in candidates:
        posed = problem.staying(stay)
        capacity = capacity_beside(problem, budget, stay)
        dropped = tuple(f for f in everything if f.buffer not in stay)
        least, _ = least_capacity(dropped, load)
        if least > capacity:
            continue
        capacity = max(least, capacity - free)
        yield _Attempt(posed, stay, dropped, capacity, least)
        room = capacity - load
        for fetch in dropped:
            room[fetch.reads.start : fetch.reads.end] -= fetch.size
        kept = tuple(fetches(posed.movables, room))
        if len(kept) < len(dropped):
            yield _Attempt(posed, stay, kept, capacity, least_capacity(kept, load)[0])


def capacity_beside(problem: Problem, budget: int, stay: frozenset[str]) -> int:
    """Bytes of the arena above its base when the weights of `stay` lie on the device."""
    staying = sum(m.size for m in problem.movables if m.buffer in stay)
    return budget - problem.fixed_bytes - staying - problem.arena.base


class _Schedule(NamedTuple):
    fetches: tuple[Fetch, ...]
    starts: list[int]
    departures: list[Departure]


def _scheduled(attempt: _Attempt, slots: int | None) -> _Schedule | None:
    problem, arena, fetched = attempt.posed, attempt.posed.arena, attempt.fetches
    departures: list[Departure] = []
    if problem.evictions:
        departures = schedule_evictions(
            problem.evictions,
            attempt.fetches,
            arena.load,
            attempt.capacity,
            problem.costs,
            problem.out_busy,
            problem.link_out,
            problem.margin,
        )
        fetched = problem.fetched_until(fetched, departures)
    load = problem.arena_until(departures).load
    # Among large temporaries the compiler's gaps are no ring; packing will tell.
    at_once, _ = least_capacity(fetched, np.zeros_like(load))
    is_ring = arena.in_order and attempt.capacity - int(load.max(initial=0)) >= at_once
    try:
        starts = schedule_starts(
            fetched,
            load,
            attempt.capacity,
            problem.clock,
            problem.in_busy,
            problem.link,
            slots,
            departures=departures,
            ring_alignment=arena.alignment if is_ring else None,
            margin=problem.margin,
        )
    except DoesNotFit:
        return None
    return _Schedule(fetched, starts, departures)


def _unhindered_s(problem: Problem, jobs: Sequence[Fetch]) -> float:
    """The step's time with memory for all fetches at once."""
    leaving = sum(e.size for e in problem.evictions) / problem.link_out.bytes_per_s
    if not jobs:
        return max(float(problem.clock[-1]), leaving)
    arrived = np.cumsum([job.size for job in jobs]) / problem.link.bytes_per_s
    needed = problem.clock[[job.reads.start for job in jobs]]
    stall = float((problem.link.latency_s + arrived - needed).max())
    return max(float(problem.clock[-1]) + max(0.0, stall), leaving)


def step_seconds(
    problem: Problem,
    jobs: Sequence[Fetch],
    starts: Sequence[int],
    departures: Sequence[Departure] = (),
) -> float:
    """Predicts the step's time: compute in order, one link that serves starts in order in each
    direction.

    The same model as `timeline.simulate`, on transfers alone, so that a choice costs
    microseconds for each.
    """
    return _times(problem, jobs, starts, departures).step_s


def charged_s(problem: Problem, jobs: Sequence[Fetch]) -> float:
    """What is charged beside the seconds of a step that moves this, and all that leaves."""
    moved = sum(job.size for job in jobs) + sum(e.size for e in problem.evictions)
    return problem.charged_s + problem.prices.byte_s * moved


def started_late(problem: Problem, choice: Choice) -> Choice:
    """Returns a choice with each fetch issued no earlier than the link can begin with it: while
    that is busy with the one before, it only holds bytes. The offsets are those that it had."""
    times = _times(problem, choice.fetches, choice.starts, choice.departures)
    latency_s = problem.link.latency_s
    starts = [
        max(start, min(job.reads.start, bisect_right(times.before, begin - latency_s) - 1))
        for job, start, begin in zip(choice.fetches, choice.starts, times.begins, strict=True)
    ]
    # Issued behind an eviction of the same queue, a fetch may wait for that.
    step_s = step_seconds(problem, choice.fetches, starts, choice.departures)
    cost_s = step_s + charged_s(problem, choice.fetches)
    return replace(choice, starts=tuple(starts), step_time_s=step_s, cost_s=cost_s)


class _Times(NamedTuple):
    """Seconds: of the step; at which the link begins with each fetch; and, of each tick, at which
    what is issued there is."""

    step_s: float
    begins: list[float]
    before: list[float]


def _times(
    problem: Problem,
    jobs: Sequence[Fetch],
    starts: Sequence[int],
    departures: Sequence[Departure],
) -> _Times:
    into, out = problem.link, problem.link_out
    return _Times(
        *_schedule.step_times(
            fetch_rows(jobs),
            np.array(starts, np.int64),
            eviction_rows(problem.evictions),
            np.array(departures, np.int64).ravel(),
            problem.clock,
            problem.in_busy,
            problem.out_busy,
            into.bytes_per_s,
            into.latency_s,
            out.bytes_per_s,
            out.latency_s,
            queue_of(into) == queue_of(out),
        )
    )


def _candidates(problem: Problem, budget: int) -> Iterator[frozenset[str]]:
    """Yields sets of weights that could stay: of a few weights all sets; of many, for arenas
    of growing size, several ways to fill the rest of the budget."""
    if len(problem.movables) <= _FEW:
        names = [m.buffer for m in problem.movables]
        yield from map(
            frozenset, (s for k in range(len(names) + 1) for s in combinations(names, k))
        )
        return
    stored = frozenset(m.buffer for m in problem.movables if m.store is not None)
    fetched = _times_fetched(problem)
    seen: set[frozenset[str]] = set()
    # First as where the caller's state is no candidate, and stays.
    for state in (stored, frozenset[str]()) if stored else (stored,):
        free = [m for m in problem.movables if m.buffer not in state]
        room = capacity_beside(problem, budget, state)
        for pinned in _pinned(free, room):
            rest = [m for m in free if m.buffer not in pinned]
            left = room - sum(m.size for m in free if m.buffer in pinned)
            least, _ = least_capacity(fetches(rest), problem.arena.load)
            for ahead in _run_ahead([m.size for m in rest]):
                if least + ahead > left:
                    break
                for more in _selections(rest, fetched, left - least - ahead):
                    stay = state | pinned | more
                    if stay not in seen:
                        seen.add(stay)
                        yield stay


def shares(problem: Problem) -> Iterator[frozenset[str]]:
    """Yields some ways to divide the weights between the device and the host, whatever the
    budget: none stay, an eighth of the bytes, and so on to all; evenly spread, and those fetched
    most often first. Where temporaries leave as well, what is read once in a step (an optimizer's
    state) is the cheapest to have away."""
    total = sum(m.size for m in problem.movables)
    fetched = _times_fetched(problem)
    seen: set[frozenset[str]] = set()
    for part in range(_SHARES + 1):
        room = total * part // _SHARES
        for stay in (_spread(problem.movables, room), _often(problem.movables, fetched, room)):
            if stay not in seen:
                seen.add(stay)
                yield stay


def _times_fetched(problem: Problem) -> Mapping[str, int]:
    """How often each weight is fetched when it is dropped between reads."""
    return Counter(f.buffer for f in fetches(problem.movables))


def _run_ahead(sizes: Sequence[int]) -> list[int]:
    """Bytes that are worth trying for weights that arrive while others are read."""
    total = sum(sizes)
    largest = sorted(set(sizes), reverse=True)[: 1 + _PINNED_SIZES]
    return sorted({0, *largest, *(total >> k for k in range(_HALVINGS))})


def _pinned(movables: Sequence[Movable], room: int) -> Iterator[frozenset[str]]:
    """Sets of all weights above a size: none, then with falling thresholds, then all."""
    yield frozenset()
    sizes = sorted({m.size for m in movables}, reverse=True)
    for threshold in (*sizes[1 : 1 + _PINNED_SIZES], 0):
        above = [m for m in movables if m.size > threshold]
        if sum(m.size for m in above) > room:
            return
        yield frozenset(m.buffer for m in above)


def _selections(
    movables: Sequence[Movable], fetched: Mapping[str, int], room: int
) -> Iterator[frozenset[str]]:
    """Sets of weights of at most `room` bytes: the first read, those fetched most often,
    evenly spread ones, half first, half spread, and of those that are stored the last read: behind
    the last store the link brings nothing more.

    Args:
      fetched: how often each is fetched when it is dropped between reads.
    """
    yield _greedy(movables, room)
    yield _greedy(sorted(movables, key=lambda m: (-fetched[m.buffer], m.reads[0])), room)
    yield _spread(movables, room)
    half = _greedy(movables, room // 2)
    rest = [m for m in movables if m.buffer not in half]
    yield half | _spread(rest, room - sum(m.size for m in movables if m.buffer in half))
    if any(m.store is not None for m in movables):
        late = sorted(movables, key=lambda m: (m.store is None, -m.reads[-1].start))
        yield _greedy(late, room)


def _greedy(movables: Sequence[Movable], room: int) -> frozenset[str]:
    chosen: set[str] = set()
    for m in movables:
        if m.size <= room:
            chosen.add(m.buffer)
            room -= m.size
    return frozenset(chosen)


def _often(movables: Sequence[Movable], fetched: Mapping[str, int], room: int) -> frozenset[str]:
    """Those that are fetched most often; of the last that are fetched equally often, evenly spread
    ones."""
    stay = frozenset[str]()
    for times in sorted({fetched[m.buffer] for m in movables}, reverse=True):
        alike = [m for m in movables if fetched[m.buffer] == times]
        stay |= _spread(alike, room)
        room -= sum(m.size for m in alike)
        if room <= 0:
            break
    return stay


def _spread(movables: Sequence[Movable], room: int) -> frozenset[str]:
    """Bresenham's line: of every run of weights about the same share of bytes stays."""
    chosen: set[str] = set()
    total = max(1, sum(m.size for m in movables))
    credit, left = 0.0, room
    for m in movables:
        credit += m.size * min(1.0, room / total)
        if credit >= m.size and m.size <= left:
            chosen.add(m.buffer)
            credit -= m.size
            left -= m.size
    return frozenset(chosen) | _greedy([m for m in movables if m.buffer not in chosen], left)
