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

So arenas between the least that works and the most that helps are tried with both ways to
choose, each with and without the largest weights pinned first, each is scheduled and timed,
and the fastest wins; of equals the one that moves fewer bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hlo_passes.assignment import ALL_STRATEGIES, Packing, assign_offsets
from hlo_passes.memory import BACKENDS
from hlo_passes.plan import LiveRange
from hlo_passes.prefetch import DoesNotFit, Fetch, least_capacity, schedule_starts
from hlo_passes.problem import Movable, Problem, fetches

# Shares of the arena's useful range that are tried.
_ARENA_SHARES = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)

# How many of the largest distinct sizes are tried as the threshold above which all stay.
_PINNED_SIZES = 4

# How many of the best choices that can be packed are compared, and how many capacities are
# tried for each.
_REFINED = 4
_CAPACITIES = 12

# Bytes below which the TPU compiler can well hold a temporary in VMEM (16 to 128 MiB).
_SMALL_TEMPORARY = 4 << 20

# The TPU compiler keeps a table of 16 KiB in HBM for every tuple, and most tuples come after
# planning, when it moves operands to VMEM. For each entry instruction that the planner sees:
# 8 to 12 KiB over Llama decoders of 8 and 32 layers (libtpu 0.0.51).
_TPU_TABLE_BYTES = 12 << 10


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to share the budget.

    Attributes:
      stay: buffers of the weights that live on the device.
      keep_s: see `problem.fetches`.
      fetches, starts: what is streamed, and from which tick.
      step_time_s: predicted.
    """

    stay: frozenset[str]
    keep_s: float
    fetches: tuple[Fetch, ...]
    starts: tuple[int, ...]
    step_time_s: float

    @property
    def moved_bytes(self) -> int:
        return sum(f.size for f in self.fetches)

    @property
    def rank(self) -> tuple[float, int]:
        """Less is better."""
        return (self.step_time_s, self.moved_bytes)


def least_budget(problem: Problem) -> tuple[int, int]:
    """Returns the least budget in bytes that any placement can keep, before packing, and
    the tick that sets it: every weight streamed, each held only while it is read."""
    capacity, tick = least_capacity(fetches(problem.movables, problem.clock, 0.0), problem.load)
    return problem.fixed_bytes + capacity, tick


def choose_placement(problem: Problem, budget: int, slots: int | None = None) -> Choice | None:
    """Chooses what stays and streams the rest.

    Args:
      budget: device bytes.
      slots: at most so many streamed weights on the device at once.

    Returns:
      The fastest choice found whose packed arena fits, or None when there is none.
    """
    room = budget - problem.fixed_bytes
    candidates: dict[frozenset[str], Choice] = {}
    for pinned in _pinned(problem.movables, room):
        rest = [m for m in problem.movables if m.buffer not in pinned]
        left = room - sum(m.size for m in problem.movables if m.buffer in pinned)
        least, _ = least_capacity(fetches(rest, problem.clock, 0.0), problem.load)
        if left < least:
            continue
        most = min(left, int(problem.load.max(initial=0)) + sum(m.size for m in rest))
        for share in _ARENA_SHARES:
            capacity = least + int((most - least) * share)
            for more in _selections(rest, left - capacity):
                stay = pinned | more
                if stay in candidates:
                    continue
                choice = _stream(problem, stay, _arena_room(problem, stay, room), slots)
                if choice is not None:
                    candidates[stay] = choice
    best: Choice | None = None
    refined = 0
    for candidate in sorted(candidates.values(), key=lambda c: c.rank):
        # Packing only takes away: the rest of a sorted list cannot do better.
        if best is not None and (best.rank <= candidate.rank or refined >= _REFINED):
            break
        packed = fit(problem, candidate.stay, budget, slots)
        refined += packed is not None
        if packed is not None and (best is None or packed.rank < best.rank):
            best = packed
    return best


def fit(
    problem: Problem, stay: frozenset[str], budget: int, slots: int | None = None
) -> Choice | None:
    """Streams every weight that does not stay, such that the arena fits when it is packed.

    Compilers pack by their own rules and lose some bytes between buffers of different
    sizes. How many depends on the schedule, so schedules for a falling capacity are packed
    as the compiler would, and the fastest that fits is taken.
    """
    room = _arena_room(problem, stay, budget - problem.fixed_bytes)
    streamed = [m for m in problem.movables if m.buffer not in stay]
    least, _ = least_capacity(fetches(streamed, problem.clock, 0.0), problem.load)
    best: Choice | None = None
    for step in range(_CAPACITIES + 1):
        choice = _stream(problem, stay, room - (room - least) * step // _CAPACITIES, slots)
        if choice is None or (best is not None and best.rank <= choice.rank):
            continue
        if pack(problem, choice).total <= room:
            best = choice
    return best


def pack(problem: Problem, choice: Choice) -> Packing:
    """Packs the arena as the target's compiler will: the fetches in order, then the
    temporaries in order."""
    spans = [LiveRange(s, f.reads.end) for f, s in zip(choice.fetches, choice.starts, strict=True)]
    sizes = [f.size for f in choice.fetches] + [r.size for r in problem.arena]
    ranges = spans + [r.live_range for r in problem.arena]
    platform = problem.machine.platform
    backend = BACKENDS[platform]
    if platform != "tpu":
        return assign_offsets(sizes, ranges, backend.alignment, strategies=backend.strategies)
    # Most small temporaries end in VMEM; what does not lies above the rest here, so that it
    # does not break up the ring in the model where it does not on the machine.
    small = [k for k, size in enumerate(sizes) if size < _SMALL_TEMPORARY and k >= len(spans)]
    large = sorted(set(range(len(sizes))) - set(small))
    offsets = [0] * len(sizes)
    total = _TPU_TABLE_BYTES * problem.ticks.end
    for group, strategies in ((large, backend.strategies), (small, ALL_STRATEGIES)):
        packing = assign_offsets(
            [sizes[k] for k in group],
            [ranges[k] for k in group],
            backend.alignment if group is large else 1,
            strategies=strategies,
        )
        for k, offset in zip(group, packing.offsets, strict=True):
            offsets[k] = total + offset
        total += packing.total
    return Packing(tuple(offsets), total)


def _arena_room(problem: Problem, stay: frozenset[str], room: int) -> int:
    return room - sum(m.size for m in problem.movables if m.buffer in stay)


def _stream(
    problem: Problem, stay: frozenset[str], capacity: int, slots: int | None
) -> Choice | None:
    """Schedules the weights that do not stay through an arena of `capacity` bytes.

    Between two reads a copy is kept where fetching it again takes longer than the gap, as
    far as the capacity allows, else dropped.
    """
    streamed = [m for m in problem.movables if m.buffer not in stay]
    longest = max((m.size for m in streamed), default=0) / problem.link.bytes_per_s
    best: Choice | None = None
    tried: list[list[Fetch]] = []
    contiguous = problem.machine.platform == "tpu"
    for keep_s in (longest, 0.0):
        jobs = fetches(streamed, problem.clock, keep_s)
        if jobs in tried:
            continue
        tried.append(jobs)
        try:
            starts = schedule_starts(
                jobs,
                problem.load,
                capacity,
                problem.clock,
                problem.link,
                slots,
                contiguous=contiguous,
            )
        except DoesNotFit:
            continue
        seconds = step_seconds(problem, jobs, starts)
        choice = Choice(stay, keep_s, tuple(jobs), tuple(starts), seconds)
        if best is None or choice.rank < best.rank:
            best = choice
    return best


def step_seconds(problem: Problem, jobs: Sequence[Fetch], starts: Sequence[int]) -> float:
    """Predicts the step's time: compute in order, one link that serves starts in order.

    The same model as `timeline.simulate`, on fetches alone, so that a choice costs
    microseconds for each.
    """
    link, clock = problem.link, problem.clock
    # Starts come before dones of the same tick.
    events = sorted(
        [(start, 0, i) for i, start in enumerate(starts)]
        + [(job.reads.start, 1, i) for i, job in enumerate(jobs)]
    )
    stall = free = 0.0
    finish = np.zeros(len(jobs))
    for tick, is_done, i in events:
        now = clock[tick] + stall
        if is_done:
            stall += max(0.0, finish[i] - now)
        else:
            # The latency of a queued transfer passes while the one before it moves.
            free = max(free, now + link.latency_s) + jobs[i].size / link.bytes_per_s
            finish[i] = free
    return float(clock[-1] + stall)


def budget_lower_bound_s(problem: Problem, budget: int) -> float:
    """No plan within `budget` is faster on this machine model.

    Let m be the largest weight that a plan streams. While it is read it lies in the arena,
    so the weights that stay have at most ``budget - fixed - m``, and at least the rest
    crosses the link, all of it in weights of at most m bytes. The least over all m that
    can make up that rest bounds every plan; and the compute must run.
    """
    sizes = sorted(m.size for m in problem.movables)
    room = budget - problem.fixed_bytes
    total = sum(sizes)
    compute_s = float(problem.clock[-1])
    if total + int(problem.load.max(initial=0)) <= room:
        return compute_s
    below = 0
    moved = float("inf")
    for size in sizes:
        below += size
        needed = total - max(0, room - size)
        if below >= needed:
            moved = min(moved, max(0, needed))
    return max(compute_s, min(moved, total) / problem.link.bytes_per_s)


def _pinned(movables: Sequence[Movable], room: int) -> Iterator[frozenset[str]]:
    """Sets of all weights above a size: none, then with falling thresholds."""
    yield frozenset()
    for threshold in sorted({m.size for m in movables}, reverse=True)[1 : 1 + _PINNED_SIZES]:
        above = [m for m in movables if m.size > threshold]
        if sum(m.size for m in above) > room:
            return
        yield frozenset(m.buffer for m in above)


def _selections(movables: Sequence[Movable], room: int) -> Iterator[frozenset[str]]:
    """Sets of weights of at most `room` bytes: the first read, and evenly spread ones."""
    # A weight that is read in several places far apart saves a transfer for each.
    order = sorted(movables, key=lambda m: (-len(m.reads), m.reads[0]))
    yield _greedy(order, room)
    total = sum(m.size for m in movables)
    if total:
        yield _spread(movables, room, total)
        half = _greedy(order, room // 2)
        rest = [m for m in movables if m.buffer not in half]
        left = room - sum(m.size for m in movables if m.buffer in half)
        yield half | _spread(rest, left, max(1, sum(m.size for m in rest)))


def _greedy(movables: Sequence[Movable], room: int) -> frozenset[str]:
    chosen: set[str] = set()
    for m in movables:
        if m.size <= room:
            chosen.add(m.buffer)
            room -= m.size
    return frozenset(chosen)


def _spread(movables: Sequence[Movable], room: int, total: int) -> frozenset[str]:
    """Bresenham's line: of every run of weights about the same share of bytes stays."""
    chosen: set[str] = set()
    credit, left = 0.0, room
    for m in movables:
        credit += m.size * min(1.0, room / total)
        if credit >= m.size and m.size <= left:
            chosen.add(m.buffer)
            credit -= m.size
            left -= m.size
    return frozenset(chosen) | _greedy([m for m in movables if m.buffer not in chosen], left)
