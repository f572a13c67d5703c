"""When the transfers of loop bodies start and are waited for, as `prefetch` does for weights.

Two layers an iteration, a ring of two slots: `a` is carried, `b` lives within the body.

    tick        0          1          2          3
    compute        layer 0    layer 1
    slot b      start b════done
                [──────────────b──────)
    slot a      [──old a──)
                           start a════done         the end of the body

A fetch starts as late as the link allows, with a margin, and not before what it overwrites
has been read: the old value of the element of the loop's state that it becomes. A store
starts when what it stores is there, and is waited for as late as can be: before something
overwrites its source, reads what it has stored, or stores into the same array behind it.
No transfer stands across another loop that moves bytes, whose memory is not its own.

Starts are chosen backwards in time: of the transfers whose deadline has not yet passed, the
one that can start last goes last. That is the earliest-deadline-first rule (Jackson 1955)
seen from the end, where releases are deadlines: the link serves the nearest deadline first,
and in a body that the link bounds every start falls on its release.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.dependences import dependences
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Computation, Instruction, Module
from hlo_passes.loops.host_transfers import HostTransfer, Nest, host_transfers, nests
from hlo_passes.loops.order import (
    VIEWS,
    UnorderableError,
    clear_paths,
    drop_copies,
    droppable_copies,
    is_scalar_work,
)
from hlo_passes.placing.prefetch import LINK_MARGIN
from hlo_passes.plan import LoopSchedule, LoopTransfer
from hlo_passes.simulator.cost import instruction_costs
from hlo_passes.simulator.loop_floor import floor_costs
from hlo_passes.simulator.timeline import Compute, Done, Start, TimelineEvent, simulate

# How many iterations a body is timed for: the first one finds the link idle.
_TIMED_ITERATIONS = 4

# Two releases count as one when less than this fraction of the shortest transfer is between.
_MOMENTS = 16

# What XLA fills memory with constants by.
_FILLING = frozenset(("bitcast", "broadcast", "convert", "copy", "reshape"))

# XLA's own order stays where no other is faster by more than this.
_AS_GOOD = 1.001


def schedule_loops(module: Module, machine: Machine) -> tuple[LoopSchedule, ...]:
    """Schedules every transfer between host and device that is no weight of the entry.

    Args:
      module: scheduled.

    Returns:
      One schedule for each computation with such transfers, callees first as in the module;
      `loops.rewrite.rewrite_loops` writes them into it.

    O(instructions + dependences + t²) for t transfers in a computation.
    """
    transfers = host_transfers(module, machine)
    nest_of = nests(module)
    transfers = {c: found for c, found in transfers.items() if c in nest_of}
    if not transfers:
        return ()
    copies = droppable_copies(module, transfers)
    cleared = drop_copies(module, copies)
    dropped = {c: [i for i in copies if i.computation_id == c] for c in transfers}
    transfers = {c: f for c, f in host_transfers(cleared, machine).items() if c in nest_of}
    scheduler = _Scheduler(cleared, machine)
    return tuple(
        scheduler.schedule(cleared.computations[c], found, nest_of[c], dropped[c])
        for c, found in transfers.items()
    )


class _Scheduler:
    def __init__(self, module: Module, machine: Machine) -> None:
        self.module = module
        self.machine = machine
        self.dataflow = analyze_dataflow(module)
        self.costs = floor_costs(module, machine, instruction_costs(module, machine))
        self._moving = _moving_computations(module, set(host_transfers(module, machine)))

    def schedule(
        self,
        computation: Computation,
        transfers: Sequence[HostTransfer],
        nest: Nest,
        dropped: Sequence[Instruction],
    ) -> LoopSchedule:
        halves = {h.id for t in transfers for h in (t.start, t.done)}
        given_order = [i.id for i in computation.instructions if i.id not in halves]
        given = _BodySchedule(self, computation, transfers, given_order)
        kept = LoopSchedule(
            computation=computation.name,
            loop=nest.caller.name if nest.caller is not None else "",
            trip_count=nest.trip_count,
            depth=nest.depth,
            executions=nest.executions,
            ticks=given.end,
            transfers=given.as_it_stands(),
            dropped_copies=tuple(i.name for i in dropped),
            is_resequenced=False,
        )
        try:
            order = clear_paths(self.module, self.dataflow, computation, transfers)
            own = _BodySchedule(self, computation, transfers, [i for i in order if i not in halves])
            found = replace(kept, transfers=own.solve(), is_resequenced=True)
        except UnorderableError:
            return kept
        if dropped:
            return found
        if not given.crosses_a_barrier(kept) and _held_bytes(kept) <= _held_bytes(found):
            theirs = self._seconds(computation, [i.id for i in computation.instructions])
            ours = self._seconds(computation, own.sequence(found.transfers))
            if theirs <= ours * _AS_GOOD:
                return kept
        return found

    def is_streaming(self, i: Instruction) -> bool:
        """Whether `i` runs something that moves bytes of its own."""
        return any(c in self._moving for c in i.called_computation_ids)

    def _seconds(self, computation: Computation, sequence: Sequence[int]) -> float:
        """The time of a few executions on end."""
        events = self._events(computation, sequence)
        return simulate(events, self.machine).step_time_s

    def _events(self, computation: Computation, sequence: Sequence[int]) -> Iterator[TimelineEvent]:
        found = host_transfers(self.module, self.machine)[computation.id]
        starts = {t.start.id: t for t in found}
        dones = {t.done.id: t for t in found}
        for iteration in range(_TIMED_ITERATIONS):
            for i in sequence:
                if (t := starts.get(i)) is not None:
                    yield Start(f"{i}#{iteration}", t.size, t.source, t.destination)
                elif (t := dones.get(i)) is not None:
                    yield Done(f"{t.start.id}#{iteration}")
                elif seconds := self.costs.get(i, 0.0):
                    yield Compute(str(i), seconds)


def _moving_computations(module: Module, streaming: set[int]) -> set[int]:
    """Ids of the computations that have transfers, or run one that has."""
    found = set(streaming)
    while True:
        callers = {
            i.computation_id
            for i in module.instructions.values()
            if i.opcode in ("while", "call", "conditional")
            and any(c in found for c in i.called_computation_ids)
        }
        if callers <= found:
            return found
        found |= callers


def _held_bytes(schedule: LoopSchedule) -> int:
    """The most bytes that transfers hold at once."""
    change = np.zeros(schedule.ticks + 2, np.int64)
    for t in schedule.transfers:
        change[t.start] += t.size
        change[max(t.end, t.start + 1)] -= t.size
    return int(np.cumsum(change).max())


@dataclass(slots=True, eq=False)
class _Window:
    """What the order of the computation leaves a transfer.

    Attributes:
      release: the first tick at which it may start.
      due: the last tick at which it may be waited for.
      waits_for, ahead_of: indices of transfers that must be done before it starts, and that
        start after it is done.
    """

    release: int
    due: int
    waits_for: list[int]
    ahead_of: list[int]


class _BodySchedule:
    """One computation in ticks."""

    def __init__(
        self,
        scheduler: _Scheduler,
        computation: Computation,
        transfers: Sequence[HostTransfer],
        compute: Sequence[int],
    ) -> None:
        self._module = scheduler.module
        self._machine = scheduler.machine
        self._computation = computation
        self._transfers = transfers
        self.compute = compute
        self._tick = {i: tick for tick, i in enumerate(compute)}
        self._before = dependences(scheduler.dataflow, computation)
        costs = [scheduler.costs.get(i, 0.0) for i in compute]
        self._clock = np.concatenate([[0.0], np.cumsum(costs)])
        self._barriers = [
            tick
            for tick, i in enumerate(compute)
            if scheduler.is_streaming(scheduler.module.instructions[i])
        ]

    @property
    def end(self) -> int:
        return len(self.compute)

    def solve(self) -> tuple[LoopTransfer, ...]:
        """Chooses starts and dones."""
        windows = self._windows()
        order = _topological(windows)
        starts = self._as_soon_as_possible(order, windows)
        fetches = [k for k in order if self._transfers[k].kind == "prefetch"]
        for k in reversed(order):
            stores = (a for a in windows[k].ahead_of if self._transfers[a].kind == "evict")
            windows[k].due = min([windows[k].due, *(starts[a] for a in stores)])
        starts |= self._just_in_time(fetches, windows)
        for k in order:
            starts[k] = max([starts[k], *(starts[w] for w in windows[k].waits_for)])
        dones = {k: min([w.due, *(starts[a] for a in w.ahead_of)]) for k, w in enumerate(windows)}
        behind: dict[int, int] = {}  # Of the starts of one tick: who waits for whom.
        for k in order:
            same = (w for w in windows[k].waits_for if dones[w] == starts[k])
            behind[k] = max((behind[w] + 1 for w in same), default=0)
        issue = sorted(order, key=lambda k: (starts[k], behind[k], dones[k], k))
        return self._records(issue, starts, dones)

    def as_it_stands(self) -> tuple[LoopTransfer, ...]:
        """Takes starts and dones from the schedule."""
        ticks: dict[int, int] = {}
        tick = 0
        for i in self._computation.instructions:
            ticks[i.id] = tick
            tick += i.id in self._tick
        starts = {k: ticks[t.start.id] for k, t in enumerate(self._transfers)}
        dones = {k: ticks[t.done.id] for k, t in enumerate(self._transfers)}
        return self._records(range(len(starts)), starts, dones)

    def crosses_a_barrier(self, schedule: LoopSchedule) -> bool:
        """Whether a transfer is in flight while something else moves bytes of its own."""
        return any(t.start <= b < t.done for t in schedule.transfers for b in self._barriers)

    def sequence(self, records: Sequence[LoopTransfer]) -> list[int]:
        """Puts the transfers between the ticks."""
        return place_transfers(self._computation, self.compute, records, self._before)

    def _as_soon_as_possible(
        self, order: Sequence[int], windows: Sequence[_Window]
    ) -> dict[int, int]:
        """Starts each transfer when what it waits for has probably ended; moves the releases
        of the fetches there."""
        starts: dict[int, int] = {}
        ready: dict[int, int] = {}  # The first tick by which it has probably ended.
        free = {"prefetch": 0.0, "evict": 0.0}
        for k in order:
            w, kind = windows[k], self._transfers[k].kind
            starts[k] = min(max([w.release, *(ready[b] for b in w.waits_for)]), w.due)
            begin = self._clock[starts[k]] + self._latency_s(k)
            # At the latest it has ended when somebody has waited for it.
            free[kind] = min(max(free[kind], begin) + self._seconds(k), self._clock[w.due])
            ready[k] = min(int(np.searchsorted(self._clock, free[kind])), w.due)
            w.release = starts[k]
        return starts

    def _windows(self) -> list[_Window]:
        number: dict[int, int] = {}
        for k, t in enumerate(self._transfers):
            number[t.start.id] = number[t.done.id] = k
        windows = [_Window(0, self.end, [], []) for _ in self._transfers]
        for i, needed in self._before.items():
            k = number.get(i)
            for n in needed:
                other = number.get(n)
                if k is None and other is not None:
                    windows[other].due = min(windows[other].due, self._tick[i])
                elif k is not None and other is None:
                    windows[k].release = max(windows[k].release, self._tick[n] + 1)
                elif k is not None and other is not None and k != other:
                    windows[k].waits_for.append(other)
                    windows[other].ahead_of.append(k)
        order = _topological(windows)
        for k in order:
            windows[k].release = max(
                [windows[k].release, *(windows[w].release for w in windows[k].waits_for)]
            )
        for k in reversed(order):
            windows[k].due = min([windows[k].due, *(windows[a].due for a in windows[k].ahead_of)])
        for w, t in zip(windows, self._transfers, strict=True):
            for barrier in self._barriers:
                if w.release <= barrier < w.due and t.kind == "prefetch":
                    w.release = barrier + 1
        for w, t in zip(windows, self._transfers, strict=True):
            if t.kind == "evict":
                w.due = min([w.due, *(b for b in self._barriers if b >= w.release)])
        return windows

    def _just_in_time(self, fetches: Sequence[int], windows: Sequence[_Window]) -> dict[int, int]:
        """The latest start of each fetch with which all are there in time, if the link is
        `LINK_MARGIN` times slower than it says; its release where there is none."""
        start: dict[int, int] = {}
        moment = self._moments(fetches, windows)
        waiting = sorted(fetches, key=lambda k: windows[k].due)
        free = np.inf
        candidates: list[int] = []
        served: list[int] = []  # From the last to the first.
        while waiting or candidates:
            if not candidates:
                free = min(free, self._clock[windows[waiting[-1]].due])
            while waiting and self._clock[windows[waiting[-1]].due] >= free:
                candidates.append(waiting.pop())
            last = max(candidates, key=lambda k: (moment[k], windows[k].due, windows[k].release, k))
            candidates.remove(last)
            served.append(last)
            free -= self._seconds(last) * LINK_MARGIN
            begin = free - self._latency_s(last)
            tick = int(np.searchsorted(self._clock, begin, side="right")) - 1
            start[last] = max(tick, windows[last].release)
        latest: dict[int, int] = {}
        for k in reversed(served):
            earlier = (tick for m, tick in latest.items() if m <= moment[k])
            start[k] = max([start[k], *earlier])
            latest[moment[k]] = start[k]
        return start

    def _moments(self, fetches: Sequence[int], windows: Sequence[_Window]) -> dict[int, int]:
        """When each fetch may start, so coarsely that the time between two such moments is
        none to the link: those of one moment go by their deadlines."""
        grain = min((self._seconds(k) for k in fetches), default=1.0) / _MOMENTS
        return {k: round(self._clock[windows[k].release] / grain) for k in fetches}

    def _records(
        self, issue: Sequence[int], starts: Mapping[int, int], dones: Mapping[int, int]
    ) -> tuple[LoopTransfer, ...]:
        last_read = self._last_reads()
        return tuple(
            LoopTransfer(
                id=n,
                start_name=self._transfers[k].start.name,
                done_name=self._transfers[k].done.name,
                source=self._transfers[k].source,
                destination=self._transfers[k].destination,
                size=self._transfers[k].size,
                start=starts[k],
                done=dones[k],
                end=max(dones[k], last_read[k]),
                start_after=self._working_before(starts[k]),
                done_after=self._working_before(dones[k]),
                kind=self._transfers[k].kind,
            )
            for n, k in enumerate(issue)
        )

    def _working_before(self, tick: int) -> str:
        """The name of the last instruction before `tick` that takes time and stays there."""
        for t in reversed(range(tick)):
            i = self._module.instructions[self.compute[t]]
            takes_time = self._clock[t + 1] > self._clock[t]
            if takes_time and not is_scalar_work(self._module, i) and i.id not in self._fills:
                return i.name
        return ""

    @cached_property
    def _fills(self) -> frozenset[int]:
        """What reads nothing but constants. XLA:TPU sinks such work to its reader afterwards,
        so that where it stands says nothing of a transfer beside it."""
        found: set[int] = set()
        for i in self._computation.instructions:
            is_source = i.opcode in ("constant", "iota")
            if is_source or (i.opcode in _FILLING and all(o in found for o in i.operand_ids)):
                found.add(i.id)
        return frozenset(found)

    def _last_reads(self) -> list[int]:
        """Of each transfer the tick after the last instruction that reads what it fetched."""
        root = self._computation.root.id
        bearer: dict[int, int] = {}
        found = [0] * len(self._transfers)
        for k, t in enumerate(self._transfers):
            if t.kind == "prefetch":
                bearer[t.done.id] = k
        for tick, i in enumerate(self.compute):
            instruction = self._module.instructions[i]
            for k in {bearer[o] for o in instruction.operand_ids if o in bearer}:
                found[k] = self.end if i == root else max(found[k], tick + 1)
                if instruction.opcode in VIEWS and not instruction.shape.is_tuple:
                    bearer[i] = k
        return found

    def _seconds(self, k: int) -> float:
        t = self._transfers[k]
        return t.size / self._machine.link(t.source, t.destination).bytes_per_s

    def _latency_s(self, k: int) -> float:
        t = self._transfers[k]
        return self._machine.link(t.source, t.destination).latency_s


def _topological(windows: Sequence[_Window]) -> list[int]:
    """The transfers, each behind those that it waits for.

    Raises:
      UnorderableError: when two of them have to be in flight at once.
    """
    order: list[int] = []
    placed: set[int] = set()
    left = list(range(len(windows)))
    while left:
        free = [k for k in left if placed.issuperset(windows[k].waits_for)]
        if not free:
            raise UnorderableError
        order += free
        placed.update(free)
        left = [k for k in left if k not in placed]
    return order


def place_transfers(
    computation: Computation,
    compute: Sequence[int],
    transfers: Sequence[LoopTransfer],
    before: Mapping[int, Collection[int]],
) -> list[int]:
    """Returns the ids of a computation's instructions with its transfers at their ticks.

    Args:
      compute: ids of all other instructions, in order.
      transfers: in issue order. At a tick each start is issued behind the dones that it
        needs, and the other dones follow.
      before: of `dependences`.
    """
    by_name = {i.name: i.id for i in computation.instructions}
    starting: defaultdict[int, list[int]] = defaultdict(list)
    waiting: defaultdict[int, list[int]] = defaultdict(list)
    for t in transfers:
        starting[t.start].append(by_name[t.start_name])
        waiting[t.done].append(by_name[t.done_name])
    sequence: list[int] = []
    for tick in range(len(compute) + 1):
        dones = waiting[tick]
        for start in starting[tick]:
            needed = [done for done in dones if done in before[start]]
            dones = [done for done in dones if done not in needed]
            sequence += [*needed, start]
        sequence += dones
        sequence += compute[tick : tick + 1]
    return sequence
