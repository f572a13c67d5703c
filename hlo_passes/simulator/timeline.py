"""One step on a clock: when each kernel computes, each transfer moves, and who waits.

    compute   │ c0 │ c1 │▒▒▒▒│   c2   │ c3 │        ▒ stall: done(w2) waits
    host→hbm     ├──w2──────►├──w3────►│
    ici       ├─all-gather─►│
                 start(w2)   done(w2)

The compute engine runs its events in program order. A `Start` takes no time: it puts a
transfer at the end of its link's queue. A `Done` holds the engine until its transfer has
ended. A link moves its queue first in first out, at full bandwidth for each of its
`engines`; the latency of a queued transfer passes while the one before it moves:

    begin = max(issue + latency, an engine is free)      end = begin + size / bandwidth

The two directions of a link that is not full duplex share one queue. The interconnect is one
more, for asynchronous collectives: each occupies it as long as a ring takes
(`analysis.collectives`). The step ends when the engine and every queue are done; each moment
of it is either compute or stall.

That is what the planner decides by. What else a step meets, `Conditions` say: memories that are
shared (`links`), and launches, of which a host makes one after another, ahead of the engine as far
as it can::

    launches  │l0│l1│l2│l3│
    compute      │c0│▒│c1│▒│c2│▒│c3│      ▒ the engine waits for a launch

A kernel begins when it has been launched; where an event is many kernels, it does not end before
the last of them has been. Where seconds vary from step to step, `drawn_step_times` runs the clock
once for many steps (`numbers`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

import numpy as np
import numpy.typing as npt

from custom_calls.targets import COPY_DONE
from hlo_passes.analysis.async_chains import async_chains
from hlo_passes.analysis.collectives import Collective, collectives
from hlo_passes.analysis.moves import Move, moves
from hlo_passes.analysis.traffic import traffic
from hlo_passes.analysis.trip_count import trip_count
from hlo_passes.errors import MalformedModuleError
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Computation, Instruction, Module
from hlo_passes.plan import Transfer
from hlo_passes.simulator.cost import call_seconds, instruction_costs
from hlo_passes.simulator.events import (
    NO_WORK,
    Compute,
    Direction,
    Done,
    Exchange,
    Start,
    TimelineEvent,
    TransferId,
    Work,
)
from hlo_passes.simulator.links import Links, Moving, SharingLinks
from hlo_passes.simulator.numbers import Draws, Numbers, OneStep, Seconds


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a step meets that its schedule does not say. The planner counts with none of it.

    Attributes:
      is_shared: kernels, transfers and collectives share the memories that they use at once.
      is_launched: a host launches kernels and copies, where the machine says what that takes.
    """

    is_shared: bool = False
    is_launched: bool = False


UNDISTURBED = Conditions()


@dataclass(frozen=True, slots=True)
class Jitter:
    """How much a kernel and a transfer differ from one step to the next, each by itself.

    Attributes:
      variation: standard deviation over mean of its seconds, which are lognormal; not negative.
      steps: how many are drawn, at least one.
      seed: the same one gives the same steps.
    """

    variation: float
    steps: int = 1000
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ComputeSpan:
    """A `Compute` on the clock, in seconds since the step began; half-open."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class TransferSpan:
    """A transfer or a collective on the clock, in seconds since the step began.

    Attributes:
      source, destination: names of tiers; of a collective those of device memory and of the
        interconnect.
      issue: when the engine reached its start; `begin` to `end` its bytes move.
      waited: seconds that the engine stood still at its done.
      hidden_s: of `begin` to `end`, the seconds in which the engine computed.
    """

    transfer: TransferId
    size: int
    source: str
    destination: str
    issue: float
    begin: float
    end: float
    waited: float
    hidden_s: float

    @property
    def overlapped_bytes(self) -> float:
        """The share of `size` that moved while the engine computed."""
        if self.end == self.begin:
            return 0.0
        return self.size * self.hidden_s / (self.end - self.begin)


@dataclass(frozen=True)
class Timeline:
    """One simulated step.

    Attributes:
      step_time_s: ``compute_s + stall_s + launch_s``, up to rounding.
      compute_s: the engine computes.
      stall_s: the engine waits, be it at a done or, at the end, for the last transfers.
      computes, transfers, collectives: in program order.
      stalls: `stall_s` by what is waited for: the tiers that a transfer is between, of a collective
        device memory and the interconnect.
      launch_s: the engine waits for launches.
      memory_s: of `compute_s`, kernels that device memory holds back, as long as they take alone;
        known where events have `Work`.
      shared_s: of `compute_s`, what others that use a memory at the same time add.
    """

    step_time_s: float
    compute_s: float
    stall_s: float
    computes: tuple[ComputeSpan, ...]
    transfers: tuple[TransferSpan, ...]
    collectives: tuple[TransferSpan, ...] = ()
    stalls: Mapping[Direction, float] = field(default_factory=dict[Direction, float])
    launch_s: float = 0.0
    memory_s: float = 0.0
    shared_s: float = 0.0

    @property
    def interconnect_s(self) -> float:
        """Seconds in which a collective occupies the interconnect."""
        return sum(c.end - c.begin for c in self.collectives)

    @cached_property
    def link_s(self) -> Mapping[Direction, float]:
        """Seconds in which at least one transfer moves, by direction."""
        busy: dict[Direction, float] = defaultdict(float)
        until: dict[Direction, float] = defaultdict(float)
        # Spans of one direction begin in the order of their issue.
        for t in self.transfers:
            direction = (t.source, t.destination)
            busy[direction] += max(0.0, t.end - max(t.begin, until[direction]))
            until[direction] = max(until[direction], t.end)
        return dict(busy)

    @property
    def overlapped_bytes(self) -> float:
        """Bytes that moved while the engine computed."""
        return sum(t.overlapped_bytes for t in self.transfers)

    @property
    def moved_bytes(self) -> int:
        return sum(t.size for t in self.transfers)

    def between(self, source: str, destination: str) -> Timeline:
        """Returns the same step with only the transfers of one direction in `transfers`."""
        kept = (t for t in self.transfers if (t.source, t.destination) == (source, destination))
        return replace(self, transfers=tuple(kept), collectives=())


def simulate(
    events: Iterable[TimelineEvent], machine: Machine, conditions: Conditions = UNDISTURBED
) -> Timeline:
    """Runs one step of `events`, in program order, on a clock.

    O(n log n) in events; with shared memories also in how many transfers stand in queues at once.

    Raises:
      NotOnMachineError: when a transfer has no link to take, or a collective no interconnect.
      ValueError: when a transfer starts twice, or is waited for before it starts.
    """
    return _Recording(machine, conditions).run(events)


def drawn_step_times(
    events: Iterable[TimelineEvent], machine: Machine, conditions: Conditions, jitter: Jitter
) -> npt.NDArray[np.float64]:
    """Returns float64[steps], the seconds of steps that are drawn.

    Each kernel and each transfer is multiplied by a number of its own, an event of many kernels by
    what their sum varies. One run of the clock, O(events · steps).

    Raises:
      as `simulate`.
    """
    numbers = Draws(jitter.steps, jitter.variation, jitter.seed)
    run = _Run(machine, conditions, numbers)
    run.through(events)
    # One number, where nothing has varied.
    return np.broadcast_to(np.asarray(run.now, np.float64), (jitter.steps,)).copy()


class _Run:
    """The clock of one step, or of many (`Numbers`)."""

    def __init__(self, machine: Machine, conditions: Conditions, numbers: Numbers) -> None:
        links = SharingLinks if conditions.is_shared else Links
        self._links = links(machine, numbers)
        self._numbers = numbers
        self._launch_s = self._captured_launch_s = 0.0
        if conditions.is_launched:
            self._launch_s = machine.launch_s or 0.0
            self._captured_launch_s = machine.captured_launch_s or 0.0
        self.now: Seconds = numbers.zero()
        # When the host has made all launches so far.
        self._launched: Seconds = numbers.zero()
        self.issued: dict[TransferId, tuple[Moving, Seconds]] = {}

    def through(self, events: Iterable[TimelineEvent]) -> None:
        for event in events:
            match event:
                case Compute():
                    self._compute(event)
                case Start(transfer) | Exchange(transfer):
                    if transfer in self.issued:
                        raise ValueError(f"transfer {transfer!r} starts twice")
                    at = self._numbers.larger(self.now, self._launched)
                    self._launched = self._launched + self._launch_s
                    self.issued[transfer] = self._links.issue(event, at), self.now
                case Done(transfer):
                    if transfer not in self.issued:
                        raise ValueError(f"transfer {transfer!r} is waited for before it starts")
                    moving, _ = self.issued[transfer]
                    self.waits(self._links.end_of(moving, self.now), moving)
        self.waits(self._links.end_of_all(self.now), None)

    def _compute(self, event: Compute) -> None:
        work = event.work
        launches_s = (work.launches + work.graphs) * self._launch_s
        launches_s += work.captured * self._captured_launch_s
        if launches_s:
            # The first of them.
            self.awaits_launches(self._launched + launches_s / (work.launches + work.captured))
            self._launched = self._launched + launches_s
        begin = self.now
        seconds = event.seconds * self._numbers.varied(work.kernels)
        self.now = self._links.compute(begin, seconds, work, event.seconds)
        self.computed(event, begin)
        if launches_s:
            # What is left to compute when the last has been launched.
            self.awaits_launches(self._launched + seconds / (work.launches + work.captured))

    def waits(self, until: Seconds, moving: Moving | None) -> None:
        """Lets the engine stand still until a transfer has ended; of None, until all have."""
        self.now = self._numbers.larger(self.now, until)

    def awaits_launches(self, until: Seconds) -> None:
        """Lets the engine stand still until launches have been made."""
        until = self._numbers.larger(self.now, until)
        self._links.pass_until(self.now, until)
        self.now = until

    def computed(self, event: Compute, begin: Seconds) -> None:
        """Notes a compute that has just ended."""


class _Recording(_Run):
    """One step, of which all is written down."""

    def __init__(self, machine: Machine, conditions: Conditions) -> None:
        super().__init__(machine, conditions, OneStep())
        self._is_shared = conditions.is_shared
        self._computes: list[ComputeSpan] = []
        self._compute_s = self._stall_s = self._launch_waits_s = 0.0
        self._memory_s = self._shared_s = 0.0
        self._waited: dict[TransferId, float] = {}
        self._stalls = _Stalls()
        self._stalls_of: dict[Direction, float] = defaultdict(float)

    def run(self, events: Iterable[TimelineEvent]) -> Timeline:
        self.through(events)
        moved: list[TransferSpan] = []
        exchanged: list[TransferSpan] = []
        for transfer, (moving, issue) in self.issued.items():
            begin, end = cast(float, moving.begin), cast(float, moving.end)
            hidden_s = max(0.0, end - begin - self._stalls.within(begin, end))
            times = cast(float, issue), begin, end, self._waited.get(transfer, 0.0), hidden_s
            spans = moved if isinstance(moving.start, Start) else exchanged
            spans.append(TransferSpan(transfer, moving.start.size, *moving.route, *times))
        return Timeline(
            cast(float, self.now),
            self._compute_s,
            self._stall_s,
            tuple(self._computes),
            tuple(moved),
            tuple(exchanged),
            dict(self._stalls_of),
            self._launch_waits_s,
            self._memory_s,
            self._shared_s,
        )

    def waits(self, until: Seconds, moving: Moving | None) -> None:
        seconds = self._stands_still(until)
        self._stall_s += seconds
        if moving is not None:
            transfer = moving.start.transfer
            self._waited[transfer] = self._waited.get(transfer, 0.0) + seconds
        elif seconds:
            moving = max((m for m, _ in self.issued.values()), key=lambda m: cast(float, m.end))
        if moving is not None and seconds:
            self._stalls_of[moving.route] += seconds

    def awaits_launches(self, until: Seconds) -> None:
        begin = self.now
        super().awaits_launches(until)
        self.now, until = begin, self.now
        self._launch_waits_s += self._stands_still(until)

    def _stands_still(self, until: Seconds) -> float:
        now, end = cast(float, self.now), cast(float, until)
        if end <= now:
            return 0.0
        self._stalls.add(now, end)
        self.now = end
        return end - now

    def computed(self, event: Compute, begin: Seconds) -> None:
        start, end = cast(float, begin), cast(float, self.now)
        self._computes.append(ComputeSpan(event.name, start, end))
        shared_s = max(0.0, end - start - event.seconds) if self._is_shared else 0.0
        self._compute_s += event.seconds + shared_s
        self._memory_s += event.work.memory_s
        self._shared_s += shared_s


class _Stalls:
    """The engine's stalls, disjoint and in order, and how much of one lies in an interval."""

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []
        self._before: list[float] = []  # seconds stalled before each
        self._total = 0.0

    def add(self, begin: float, end: float) -> None:
        self._begins.append(begin)
        self._ends.append(end)
        self._before.append(self._total)
        self._total += end - begin

    def within(self, begin: float, end: float) -> float:
        return self._until(end) - self._until(begin)

    def _until(self, time: float) -> float:
        last = bisect_right(self._begins, time) - 1
        if last < 0:
            return 0.0
        return self._before[last] + min(time, self._ends[last]) - self._begins[last]


def plan_events(
    tick_seconds: Sequence[float], transfers: Iterable[Transfer]
) -> Iterator[TimelineEvent]:
    """Yields the events of a plan: at a tick the starts of its evictions, in the plan's order,
    then their dones; then those of its fetches; then the tick's compute.

    Args:
      tick_seconds: the cost of ``c0, c1, ...``.
      transfers: ``Plan.transfers``. One may be done at the tick behind the last, when the
        step ends.
    """
    starts: dict[tuple[int, str], list[Transfer]] = defaultdict(list)
    dones: dict[tuple[int, str], list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        starts[transfer.start, transfer.kind].append(transfer)
        dones[transfer.done, transfer.kind].append(transfer)
    for tick in range(len(tick_seconds) + 1):
        for kind in ("evict", "prefetch"):
            for t in starts[tick, kind]:
                yield Start(t.id, t.size, t.source, t.destination)
            for t in dones[tick, kind]:
                yield Done(t.id)
        if tick < len(tick_seconds):
            yield Compute(f"c{tick}", tick_seconds[tick])


def scheduled_step(module: Module, machine: Machine) -> Timeline:
    """A step of a scheduled module on a machine's model; see `schedule_events`."""
    return simulate(schedule_events(module, instruction_costs(module, machine), machine), machine)


def schedule_events(
    module: Module,
    costs: Mapping[int, float],
    machine: Machine,
    *,
    with_synchronous: bool = False,
    work: Mapping[int, Work] | None = None,
) -> Iterator[TimelineEvent]:
    """Yields the events of a scheduled module's entry, memplan's or XLA's own alike.

    A `while`, `call` or `conditional` that moves bytes between tiers, or starts a collective
    and goes on, is opened up: a loop's body is repeated trip-count times (once, where the
    count is not known), and of a conditional the dearest branch is taken. One that does
    neither is a single `Compute`.

    A host access that XLA left synchronous is a start with its done right behind it. An
    asynchronous collective occupies the interconnect, where the machine has one; a synchronous
    one holds the engine, and its cost says how long. Where it is known what a call takes, that
    comes first.

    Args:
      module: scheduled.
      costs: of `cost.instruction_costs`, for the same module and machine.
      with_synchronous: whether a synchronous collective is on the interconnect too, for as long as
        it costs, with its done right behind it.
      work: of `work.instruction_work`, for the same module and machine: what computes ask for.

    Raises:
      MalformedModuleError: when the module is not scheduled, or a done has no start.
    """
    if not module.is_scheduled:
        raise MalformedModuleError(
            module.name, "it is not scheduled", "Take a module from after XLA's scheduler."
        )
    exchanges: dict[int, tuple[Collective, float]] = {}
    if machine.interconnect is not None:
        exchanges = {
            start: (
                collective,
                costs[start]
                if collective.done is None
                else collective.seconds(machine.interconnect),
            )
            for start, collective in collectives(module).items()
            if with_synchronous or collective.done is not None
        }
    moved = moves(module, machine, traffic(module))
    if call_s := call_seconds(module, machine):
        yield Compute("call", call_s)
    yield from _ScheduleEvents(module, costs, moved, exchanges, work or {}).entry()


class _ScheduleEvents:
    def __init__(
        self,
        module: Module,
        costs: Mapping[int, float],
        moves: Mapping[int, Move],
        exchanges: Mapping[int, tuple[Collective, float]],
        work: Mapping[int, Work],
    ) -> None:
        self._module = module
        self._costs = costs
        self._moves = moves
        self._exchanges = exchanges
        self._work = work
        self._starts = {
            c.done: module.instructions[id_]
            for id_, (c, _) in exchanges.items()
            if c.done is not None
        }
        self._moving: dict[int, bool] = {}

    def entry(self) -> Iterator[TimelineEvent]:
        return self._computation(self._module.entry, "")

    def _computation(self, computation: Computation, suffix: str) -> Iterator[TimelineEvent]:
        """`suffix` tells the iterations of a loop apart: ``copy-start.3#2``."""
        for i in computation.instructions:
            move = self._moves.get(i.id)
            if move is not None:
                # What it costs besides is for new memory, which the kernels' threads wait for.
                if seconds := self._costs[i.id]:
                    yield Compute(i.name + suffix, seconds)
                yield Start(i.name + suffix, move.size, move.source, move.destination)
                if not move.is_async:
                    yield Done(i.name + suffix)
                continue
            if i.id in self._exchanges:
                collective, seconds = self._exchanges[i.id]
                yield Exchange(i.name + suffix, collective.sent_bytes, seconds)
                if collective.done is None:
                    yield Done(i.name + suffix)
                    continue
            if (start := self._awaited(i)) is not None:
                yield Done(start.name + suffix)
            elif i.opcode in ("while", "call", "conditional") and self._sends_bytes(i):
                yield from self._opened(i, suffix)
            elif seconds := self._costs[i.id]:
                yield Compute(i.name + suffix, seconds, self._work.get(i.id, NO_WORK))

    def _opened(self, caller: Instruction, suffix: str) -> Iterator[TimelineEvent]:
        called = [self._module.computations[c] for c in caller.called_computation_ids]
        if caller.opcode == "while":
            body, condition = called
            count = trip_count(self._module, caller)
            for iteration in range(1 if count is None else count):
                yield from self._computation(condition, f"{suffix}#{iteration}")
                yield from self._computation(body, f"{suffix}#{iteration}")
            return
        if caller.opcode == "conditional":
            called = [max(called, key=self._seconds)]
        for computation in called:
            yield from self._computation(computation, suffix)

    def _seconds(self, computation: Computation) -> float:
        return sum(self._costs[i.id] for i in computation.instructions)

    def _awaited(self, instruction: Instruction) -> Instruction | None:
        """The start of the move or of the collective that `instruction` waits for."""
        if instruction.id in self._starts:
            return self._starts[instruction.id]
        chain = async_chains(self._module).get(instruction.id)
        links: tuple[Instruction, ...] = ()
        if instruction.custom_call_target == COPY_DONE:
            links = (self._module.instructions[instruction.operand_ids[0]],)
        elif chain is not None and chain.done is instruction:
            links = chain.links
        return next((link for link in links if link.id in self._moves), None)

    def _sends_bytes(self, caller: Instruction) -> bool:
        if caller.id not in self._moving:
            called = (self._module.computations[c] for c in caller.called_computation_ids)
            self._moving[caller.id] = any(
                i.id in self._moves
                or i.id in self._exchanges
                or (i.opcode in ("while", "call", "conditional") and self._sends_bytes(i))
                for computation in called
                for i in computation.instructions
            )
        return self._moving[caller.id]
