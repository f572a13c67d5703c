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

Contention of transfers and kernels for device memory is not modelled.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from custom_calls.targets import COPY_DONE
from hlo_passes.analysis.async_chains import async_chains
from hlo_passes.analysis.collectives import Collective, collectives
from hlo_passes.analysis.moves import Move, moves
from hlo_passes.analysis.traffic import traffic
from hlo_passes.analysis.trip_count import trip_count
from hlo_passes.errors import MalformedModuleError, NotOnMachineError
from hlo_passes.hardware.machine import Interconnect, Link, Machine
from hlo_passes.ir import Computation, Instruction, Module
from hlo_passes.plan import Transfer
from hlo_passes.simulator.cost import instruction_costs

TransferId = int | str

Direction = tuple[str, str]
"""Names of the source and the destination tier."""


@dataclass(frozen=True, slots=True)
class Compute:
    """The compute engine is busy for `seconds`."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Start:
    """`size` bytes are queued on the link from tier `source` to tier `destination`."""

    transfer: TransferId
    size: int
    source: str
    destination: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective is queued on the interconnect: `size` bytes leave this device for others,
    and it is busy for `seconds`."""

    transfer: TransferId
    size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Done:
    """The compute engine waits for the end of `transfer`."""

    transfer: TransferId


TimelineEvent = Compute | Start | Exchange | Done


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
      step_time_s: ``compute_s + stall_s``, up to rounding.
      compute_s: the engine computes.
      stall_s: the engine waits, be it at a done or, at the end, for the last transfers.
      computes, transfers, collectives: in program order.
    """

    step_time_s: float
    compute_s: float
    stall_s: float
    computes: tuple[ComputeSpan, ...]
    transfers: tuple[TransferSpan, ...]
    collectives: tuple[TransferSpan, ...] = ()

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


def simulate(events: Iterable[TimelineEvent], machine: Machine) -> Timeline:
    """Runs one step of `events`, in program order, on a clock. O(n log n).

    Raises:
      NotOnMachineError: when a transfer has no link to take, or a collective no interconnect.
      ValueError: when a transfer starts twice, or is waited for before it starts.
    """
    links = _Links(machine)
    now = compute_s = stall_s = 0.0
    computes: list[ComputeSpan] = []
    queued: dict[TransferId, tuple[Start | Exchange, float, float, float]] = {}
    waited: dict[TransferId, float] = {}
    stalls = _Stalls()

    def wait_until(end: float) -> float:
        nonlocal now, stall_s
        seconds = max(0.0, end - now)
        if seconds:
            stalls.add(now, end)
            now, stall_s = end, stall_s + seconds
        return seconds

    for event in events:
        match event:
            case Compute(name, seconds):
                computes.append(ComputeSpan(name, now, now + seconds))
                now, compute_s = now + seconds, compute_s + seconds
            case Start(transfer) | Exchange(transfer):
                if transfer in queued:
                    raise ValueError(f"transfer {transfer!r} starts twice")
                queued[transfer] = (event, now, *links.enqueue(event, now))
            case Done(transfer):
                if transfer not in queued:
                    raise ValueError(f"transfer {transfer!r} is waited for before it starts")
                *_, end = queued[transfer]
                waited[transfer] = waited.get(transfer, 0.0) + wait_until(end)
    wait_until(max((end for *_, end in queued.values()), default=0.0))

    moved: list[TransferSpan] = []
    exchanged: list[TransferSpan] = []
    for transfer, (start, issue, begin, end) in queued.items():
        route = links.route(start)
        hidden_s = max(0.0, end - begin - stalls.within(begin, end))
        times = issue, begin, end, waited.get(transfer, 0.0), hidden_s
        spans = moved if isinstance(start, Start) else exchanged
        spans.append(TransferSpan(transfer, start.size, *route, *times))
    return Timeline(now, compute_s, stall_s, tuple(computes), tuple(moved), tuple(exchanged))


def queue_of(link: Link) -> Direction:
    """Names the queue that a link's transfers stand in: its own, or, where it is not full
    duplex, the one it has in common with the opposite direction."""
    if link.full_duplex:
        return link.source, link.destination
    return min(link.source, link.destination), max(link.source, link.destination)


class _Links:
    """When each engine of each link is free, and when the interconnect is."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        engines: dict[Direction, int] = {}
        for link in machine.links:
            engines[queue_of(link)] = max(engines.get(queue_of(link), 0), link.engines)
        self._free = {queue: [0.0] * count for queue, count in engines.items()}
        self._exchanged = 0.0

    def route(self, start: Start | Exchange) -> Direction:
        if isinstance(start, Start):
            return start.source, start.destination
        return self._machine.device_memory.name, self._interconnect.name

    @property
    def _interconnect(self) -> Interconnect:
        found = self._machine.interconnect
        if found is None:
            known = [f"{link.source}->{link.destination}" for link in self._machine.links]
            raise NotOnMachineError(self._machine.name, "link", "interconnect", known)
        return found

    def enqueue(self, start: Start | Exchange, now: float) -> tuple[float, float]:
        """Returns when the transfer begins and ends."""
        if isinstance(start, Exchange):
            begin = max(now, self._exchanged)
            self._exchanged = begin + start.seconds
            return begin, self._exchanged
        link = self._machine.link(start.source, start.destination)
        free = self._free[queue_of(link)]
        begin = max(now + link.latency_s, free[0])
        end = begin + start.size / link.bytes_per_s
        heapq.heapreplace(free, end)
        return begin, end


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
) -> Iterator[TimelineEvent]:
    """Yields the events of a scheduled module's entry, memplan's or XLA's own alike.

    A `while`, `call` or `conditional` that moves bytes between tiers, or starts a collective
    and goes on, is opened up: a loop's body is repeated trip-count times (once, where the
    count is not known), and of a conditional the dearest branch is taken. One that does
    neither is a single `Compute`.

    A host access that XLA left synchronous is a start with its done right behind it. An
    asynchronous collective occupies the interconnect, where the machine has one; a synchronous
    one holds the engine, and its cost says how long.

    Args:
      module: scheduled.
      costs: of `cost.instruction_costs`, for the same module and machine.
      with_synchronous: whether a synchronous collective is on the interconnect too, for as long as
        it costs, with its done right behind it.

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
    return _ScheduleEvents(module, costs, moved, exchanges).entry()


class _ScheduleEvents:
    def __init__(
        self,
        module: Module,
        costs: Mapping[int, float],
        moves: Mapping[int, Move],
        exchanges: Mapping[int, tuple[Collective, float]],
    ) -> None:
        self._module = module
        self._costs = costs
        self._moves = moves
        self._exchanges = exchanges
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
                yield Compute(i.name + suffix, seconds)

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
