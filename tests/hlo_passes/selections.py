"""Choices small enough to try everything: every selection, and of each every schedule."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations, product

import numpy as np
from hypothesis import strategies as st

from hlo_passes.edits.choice_bytes import least_bytes
from hlo_passes.edits.choices import Choices, Gap, Weight
from hlo_passes.hardware.machine import Machine
from hlo_passes.plan import LiveRange
from hlo_passes.simulator.timeline import Compute, Done, Start, simulate
from tests.hlo_passes.toys import link, toy_machine


@dataclass(frozen=True, slots=True)
class Selection:
    """What was chosen.

    Attributes:
      evicted, recomputed: indices of gaps.
      staying: indices of weights.
    """

    evicted: frozenset[int]
    recomputed: frozenset[int]
    staying: frozenset[int]


def machine_of(choices: Choices) -> Machine:
    def way(source: str, destination: str, rate: float):
        return link(
            source,
            destination,
            nominal_bytes_per_s=rate,
            latency_s=choices.latency_s,
            full_duplex=not choices.shared_queue,
        )

    out = way("hbm", "host", choices.out_bytes_per_s)
    return toy_machine(links=(way("host", "hbm", choices.in_bytes_per_s), out))


def selections(choices: Choices) -> Iterator[Selection]:
    """Every selection."""
    options = [
        ["keep", *["evict"] * gap.is_evictable, *["recompute"] * (gap.recompute_s is not None)]
        for gap in choices.gaps
    ]
    may_stay = [i for i, weight in enumerate(choices.weights) if weight.may_stay]
    sets = [frozenset(s) for n in range(len(may_stay) + 1) for s in combinations(may_stay, n)]
    for taken in product(*options):
        evicted, recomputed = (
            frozenset(i for i, option in enumerate(taken) if option == wanted)
            for wanted in ("evict", "recompute")
        )
        yield from (Selection(evicted, recomputed, staying) for staying in sets)


def optimum_s(choices: Choices, capacity: int) -> float:
    """The least step time of all selections and schedules; infinity when none fits."""
    found = (schedule_s(choices, capacity, chosen) for chosen in selections(choices))
    return min(found, default=float("inf"))


def schedule_s(choices: Choices, capacity: int, chosen: Selection) -> float:
    """The least step time of all schedules of one selection; infinity when none fits."""
    groups: dict[int, list[int]] = {}
    for i in sorted(chosen.evicted, key=lambda i: choices.gaps[i].start):
        groups.setdefault(choices.gaps[i].value, []).append(i)
    streamed = [w for i, w in enumerate(choices.weights) if i not in chosen.staying]
    ways = [
        *(list(_evictions(choices, gaps)) for gaps in groups.values()),
        *(list(_fetches(choices, weight)) for weight in streamed),
    ]
    base = choices.load.copy()
    for i in chosen.staying:
        base += choices.weights[i].size
    for i in chosen.recomputed:
        gap = choices.gaps[i]
        base[gap.start : gap.end] -= gap.size
    least = float("inf")
    for way in product(*ways):
        if (base + sum(part.bytes for part in way) > capacity).any():
            continue
        moves = [move for part in way for move in part.moves]
        for queue in _queues(moves):
            least = min(least, step_s(choices, chosen, queue))
    return least


def _queues(moves: list["_Move"]) -> Iterator[tuple["_Move", ...]]:
    """All orders of the starts of each tick."""
    ticks = sorted({move.start for move in moves})
    orders = (permutations([m for m in moves if m.start == tick]) for tick in ticks)
    for queue in product(*orders):
        yield tuple(move for order in queue for move in order)


@dataclass(frozen=True)
class _Move:
    """`start` and `done` as in `Transfer`; `is_late` is issued behind the dones of evictions."""

    size: int
    source: str
    destination: str
    start: int
    done: int
    is_late: bool = False


@dataclass(frozen=True)
class _Part:
    """One way to move a value or a weight, and what it changes in the bytes of each tick."""

    moves: tuple[_Move, ...]
    bytes: np.ndarray


def _evictions(choices: Choices, gaps: list[int]) -> Iterator[_Part]:
    first = choices.gaps[gaps[0]]
    released = min(g.written for g in choices.gaps if g.value == first.value)
    for start in range(released, first.end + 1):
        for done in range(start, first.end + 1):
            backs = (range(done, choices.gaps[i].end + 1) for i in gaps)
            for back in product(*backs):
                moves = [_Move(first.size, "hbm", "host", start, done)]
                change = np.zeros(choices.ticks, dtype=int)
                for i, fetched in zip(gaps, back, strict=True):
                    gap = choices.gaps[i]
                    moves.append(_Move(gap.size, "host", "hbm", fetched, gap.end, fetched == done))
                    change[max(done, gap.start) : gap.end] -= gap.size
                    change[fetched : gap.end] += gap.size
                yield _Part(tuple(moves), change)


def _fetches(choices: Choices, weight: Weight) -> Iterator[_Part]:
    reads = len(weight.reads)
    for cuts in (c for n in range(reads) for c in combinations(range(1, reads), n)):
        edges = [0, *cuts, reads]
        groups = [weight.reads[a:b] for a, b in pairwise(edges)]
        for starts in product(*(range(group[0].start + 1) for group in groups)):
            change = np.zeros(choices.ticks, dtype=int)
            moves: list[_Move] = []
            for start, group in zip(starts, groups, strict=True):
                moves.append(_Move(weight.size, "host", "hbm", start, group[0].start))
                change[start : group[-1].end] += weight.size
            yield _Part(tuple(moves), change)


def step_s(choices: Choices, chosen: Selection, queue: tuple[_Move, ...]) -> float:
    """The simulated time of one schedule, with starts of a tick in the order of `queue`."""
    moves = list(enumerate(queue))
    events: list[Compute | Start | Done] = []
    for tick in range(choices.ticks):
        starting = [(n, m) for n, m in moves if m.start == tick]
        due = [(n, m) for n, m in moves if m.done == tick]
        events += [_start(n, m) for n, m in starting if not m.is_late]
        again = [(i, choices.gaps[i]) for i in sorted(chosen.recomputed)]
        events += [Compute(f"again{i}", g.recompute_s or 0.0) for i, g in again if g.end == tick]
        events += [Done(n) for n, m in due if m.source == "hbm"]
        events += [_start(n, m) for n, m in starting if m.is_late]
        events += [Done(n) for n, m in due if m.source == "host"]
        events.append(Compute(f"c{tick}", float(choices.costs[tick])))
    return simulate(events, machine_of(choices)).step_time_s


def _start(n: int, move: _Move) -> Start:
    return Start(n, move.size, move.source, move.destination)


_SECONDS = st.sampled_from([0.0, 0.5, 1.0, 3.0])
_SIZES = st.integers(1, 30)


@st.composite
def tiny_choices(draw, ticks: int = 4) -> tuple[Choices, int]:
    """Two values with up to three gaps and a weight, on a step of a few ticks, and a capacity."""
    load = np.full(ticks, draw(st.integers(0, 10)), dtype=np.int64)
    gaps: list[Gap] = []
    for value in range(draw(st.integers(0, 2))):
        size = draw(_SIZES)
        made = draw(st.integers(0, ticks - 3))
        later = draw(st.sets(st.integers(made + 1, ticks - 1), min_size=1, max_size=2))
        uses = [made, *sorted(later)]
        load[made : uses[-1] + 1] += size
        for before, after in pairwise(uses):
            if after == before + 1 or len(gaps) == 3:
                continue
            again_s = draw(st.none() | _SECONDS)
            is_evictable = draw(st.booleans()) or again_s is None
            gaps.append(Gap(value, size, made + 1, before + 1, after, is_evictable, again_s))
    weights: list[Weight] = []
    for _ in range(draw(st.integers(0, 3 - len(gaps)))):
        reads = sorted(draw(st.sets(st.integers(0, ticks - 1), min_size=1, max_size=2)))
        ranges = tuple(LiveRange(t, t + 1) for t in reads)
        weights.append(Weight(draw(_SIZES), ranges, draw(st.booleans())))
    choices = Choices(
        costs=np.array(draw(st.lists(_SECONDS, min_size=ticks, max_size=ticks))),
        load=load,
        gaps=tuple(gaps),
        weights=tuple(weights),
        out_bytes_per_s=draw(st.sampled_from([5.0, 10.0, 40.0])),
        in_bytes_per_s=draw(st.sampled_from([5.0, 10.0, 40.0])),
        latency_s=draw(st.sampled_from([0.0, 0.25])),
        shared_queue=draw(st.booleans()),
    )
    least, most = int(least_bytes(choices).max()), int(load.max()) + sum(w.size for w in weights)
    return choices, draw(st.integers(least, max(least, most)))
