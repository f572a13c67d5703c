"""When everything happens: runs of programs in a given order on each node, transfers in between.

    chips a    │ f0 │ f1 │ f2 │▒▒▒│ b0 │ f3 │          an order of tasks a node, given
    a → b           ├act0►├act1►├act2►                 as soon as bytes, slots and wires are there
    chips b               │ f0 │ b0 │ f1 │ b1 │

Of all that could begin, what can begin first does, and is placed for good: a run of a program with
all traffic of its own, or one leg of a flow; a run also before a leg that would still be under way
when it begins. So while a flow looks for its moment, the transfers of the programs that run
meanwhile are on the calendars of the wires already, and it goes into the gaps they leave. Of legs
that could begin at the same moment the one goes first that is read first: earliest deadline first
(Liu and Layland, 1973), the deadline being when its reader would begin if it waited for nothing.

Where all nodes wait for good in the order that was given, what could run next goes first. A slot is
for one flow, which one program writes and one reads: what can happen next can still happen when
something else has (a marked graph: Commoner and others, 1971). So where nothing can, there is no
order in which it could.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from hlo_passes.cluster.calendar import Calendar, first_free
from hlo_passes.cluster.cluster import Cluster, Place
from hlo_passes.cluster.plan import Span
from hlo_passes.cluster.rings import Ring
from hlo_passes.cluster.routes import Leg, loop, route
from hlo_passes.cluster.work import NANOSECONDS, Flow, Program, Task, Traffic, Work
from hlo_passes.errors import ClusterError

type Orders = Mapping[str, Sequence[Task]]
"""Of each node what it runs, in order."""


class Compute(NamedTuple):
    """A segment of a run, and in which slots its flows are: those that it reads, and writes."""

    task: Task
    segment: int
    read: Sequence[int]
    written: Sequence[int]


class Own(NamedTuple):
    """What a run moves by itself."""

    task: Task
    traffic: Traffic


class Hand(NamedTuple):
    """One leg of a flow, from a slot to a slot."""

    flow: str
    number: int
    leg: int
    source: int
    destination: int


class Placed(NamedTuple):
    what: Compute | Own | Hand
    span: Span


@dataclass(frozen=True)
class Scheduled:
    """What happens, in an order in which it can happen one by one."""

    placed: Sequence[Placed]

    @property
    def step_ns(self) -> int:
        return max((of.span.end for of in self.placed), default=0)


def nanoseconds(seconds: float) -> int:
    """Whole ones, not less."""
    return math.ceil(seconds * NANOSECONDS - 1e-6)


class Network:
    """The wires of a cluster, as transfers take them; routes are looked up once."""

    def __init__(self, cluster: Cluster, work: Work) -> None:
        self.cluster = cluster
        # Of a medium whose directions differ, in bytes of the faster one.
        self.capacities: dict[str, int] = {}
        for wire in cluster.wires:
            most = self.capacities.get(wire.medium, 0)
            self.capacities[wire.medium] = max(most, wire.bytes_per_s)
        self.media = {wire.name: wire.medium for wire in cluster.wires}
        self._own: dict[tuple[str, str], tuple[Leg, int]] = {}
        for program in work.programs:
            for traffic in program.traffic:
                self._own[program.name, traffic.name] = self._route(program, traffic)

    def own(self, program: str, traffic: str) -> tuple[Leg, int]:
        """The way of a program's own traffic, and its bytes of all chips."""
        return self._own[program, traffic]

    def _route(self, program: Program, traffic: Traffic) -> tuple[Leg, int]:
        node = self.cluster.node(program.node)
        size = traffic.bytes * node.count
        if traffic.is_collective:
            return loop(self.cluster, node.name), size
        ends = [self.cluster.host_place(node, t) for t in (traffic.source, traffic.destination)]
        legs = route(self.cluster, ends[0], ends[1], size)
        if len(legs) > 1:
            raise ClusterError(
                f"program {program.name}: {traffic.name} would rest on its way to {ends[1]}",
                "Join that to the chips by wires and switches.",
            )
        return legs[0], size


@dataclass(slots=True)
class _Slots:
    """Of each slot of a ring when it is free; None while nobody knows."""

    free: list[int | None]

    def best(self, begin: int) -> tuple[int, int] | None:
        """Of the slots that are known to be free at some time, the first of those that are by
        `begin`, or the one that is first; and when."""
        known = [(of, k) for k, of in enumerate(self.free) if of is not None]
        if not known:
            return None
        ready = [k for of, k in known if of <= begin]
        if ready:
            return ready[0], begin
        then, k = min(known)
        return k, then


@dataclass(slots=True)
class _Bytes:
    """Where one number of a flow is: at which stop, in which slot, since when."""

    stop: int
    slot: int
    since: int


class _Run(NamedTuple):
    """A task that could begin."""

    begin: int
    node: str
    task: Task


class _Leg(NamedTuple):
    """A leg that could begin: `deadline` decides between what could at the same moment."""

    begin: int
    deadline: int
    name: str
    number: int
    end: int
    slot: int


class _Way(NamedTuple):
    """What a transfer takes of which calendars, for how many nanoseconds."""

    calendars: Sequence[Calendar]
    rates: Sequence[int]
    duration: int
    wires: tuple[str, ...]
    bytes_per_s: int

    def first(self, begin: int) -> int:
        return first_free(self.calendars, begin, self.duration, self.rates)

    def take(self, begin: int) -> Span:
        end = begin + self.duration
        for calendar, rate in zip(self.calendars, self.rates, strict=True):
            calendar.take(begin, end, rate)
        return Span(begin, end, self.wires, self.bytes_per_s)


@dataclass
class _Scheduler:
    network: Network
    work: Work
    rings: Mapping[str, Ring]
    orders: Orders
    calendars: dict[str, Calendar] = field(init=False)
    streams: dict[tuple[Place, Place], Calendar] = field(init=False)
    placed: list[Placed] = field(default_factory=list[Placed], init=False)

    def __post_init__(self) -> None:
        self.calendars = {name: Calendar(of) for name, of in self.network.capacities.items()}
        self.streams = {}
        self.ways = {
            name: [self._way_of(leg, ring.bytes) for leg in ring.legs]
            for name, ring in self.rings.items()
        }
        self.own = {
            (program.name, traffic.name): self._own_way(program, traffic)
            for program in self.work.programs
            for traffic in program.traffic
        }
        programs = self.work.programs
        self.starts = {p.name: _grouped(p.traffic, lambda t: t.start) for p in programs}
        self.dones = {p.name: _grouped(p.traffic, lambda t: t.done) for p in programs}
        self.queues = {node: list(order) for node, order in sorted(self.orders.items())}
        self.done: set[Task] = set()
        self.free = dict.fromkeys(self.orders, 0)
        self.slots = {
            name: [_Slots([0] * count) for count in ring.slots] for name, ring in self.rings.items()
        }
        self.at: dict[tuple[str, int], _Bytes] = {}
        self.moving: list[tuple[str, int]] = []
        self.flows = {flow.name: flow for flow in self.work.flows}
        for flow in self.work.flows:
            if not flow.source:
                for number in self.work.runs(flow):
                    self.at[flow.name, number] = _Bytes(0, number, 0)
        self.ahead: dict[Task, int] = {}
        for node in self.queues:
            self._look_ahead(node)
        tasks = [task for order in self.orders.values() for task in order]
        self.reads = {task: list(self.work.read_by(task)) for task in tasks}
        self.before = self.work.before
        self.writes = {task: list(self.work.written_by(task)) for task in tasks}

    def run(self) -> Scheduled | None:
        """None where nothing can go on."""
        while True:
            task = min(self._tasks(), default=None, key=lambda of: of[:2])
            hand = min(self._hands(), default=None, key=lambda of: of[:3])
            if task is not None and (hand is None or task.begin < hand.end):
                self._place_task(task.task, task.begin)
            elif hand is not None:
                self._place_hand(hand)
            elif not self._reorder():
                break
        if self.moving or any(self.queues.values()):
            return None
        # Sorting keeps the order of what begins at once, in which one was placed for the other.
        return Scheduled(sorted(self.placed, key=lambda of: of.span.begin))

    # Runs of programs.

    def _least(self, task: Task) -> int:
        return sum(map(nanoseconds, self.work.program(task.program).segments))

    def _tasks(self) -> Iterator[_Run]:
        for node, queue in self.queues.items():
            if queue and (begin := self._ready(queue[0])) is not None:
                yield _Run(begin, node, queue[0])

    def _reorder(self) -> bool:
        """Of the runs that could be next, and are not, the first one is; False if there is none."""
        could = [
            _Run(begin, node, task)
            for node, queue in self.queues.items()
            for task in {task.program: task for task in reversed(queue)}.values()
            if (begin := self._ready(task)) is not None
        ]
        if not could:
            return False
        _, node, task = min(could)
        self.queues[node].remove(task)
        self.queues[node].insert(0, task)
        self._look_ahead(node)
        return True

    def _look_ahead(self, node: str) -> None:
        """Of each run of a node how long those before it take, from some moment on."""
        queue = self.queues[node]
        self.ahead |= zip(queue, accumulate(map(self._least, queue), initial=0), strict=False)

    def _ready(self, task: Task) -> int | None:
        """When it could begin; None while that is not known."""
        if not self.before[task] <= self.done:
            return None
        program = self.work.program(task.program)
        begin = self.free[program.node]
        for flow, number in self.reads[task]:
            found = self._arrived(flow, number)
            if found is None:
                return None
            if flow.needed == 0:
                begin = max(begin, found.since)
        for flow in self.writes[task]:
            slot, k = self.slots[flow.name][0].best(begin), self.work.written_in(flow)
            if slot is None:
                # It may have read what lies there itself by then.
                if all(of is not flow or of.needed >= k for of, _ in self.reads[task]):
                    return None
            elif k == 0:
                begin = max(begin, slot[1])
        return begin

    def _arrived(self, flow: Flow, number: int) -> _Bytes | None:
        found = self.at.get((flow.name, number))
        last = len(self.rings[flow.name].stops) - 1
        return found if found is not None and found.stop == last else None

    def _place_task(self, task: Task, begin: int) -> None:
        program = self.work.program(task.program)
        reads = [(flow, number, self.at[flow.name, number]) for flow, number in self.reads[task]]
        written: dict[str, int] = {}
        ended: dict[str, int] = {}
        now, end = begin, begin
        for k, seconds in enumerate(program.segments):
            for traffic in self.starts[task.program].get(k, ()):
                ended[traffic.name] = self._place_own(Own(task, traffic), now)
            begins = [ended[t.name] for t in self.dones[task.program].get(k, ())]
            begins += [of.since for flow, _, of in reads if flow.needed == k]
            now = max([now, *begins])
            here = [f for f in self.writes[task] if self.work.written_in(f) == k]
            for flow in here:
                found = self.slots[flow.name][0].best(now)
                assert found is not None  # `_ready` has seen it.
                written[flow.name], now = found
                self.slots[flow.name][0].free[found[0]] = None
            end = now + nanoseconds(seconds)
            of = Compute(
                task,
                k,
                [at.slot for flow, _, at in reads if flow.needed == k],
                [written[flow.name] for flow in here],
            )
            self.placed.append(Placed(of, Span(now, end)))
            for flow in here:
                self.at[flow.name, task.run] = _Bytes(0, written[flow.name], end)
                if len(self.rings[flow.name].stops) > 1:
                    self.moving.append((flow.name, task.run))
            for flow, number, at in reads:
                if flow.needed == k and flow.source:
                    self.slots[flow.name][at.stop].free[at.slot] = end
                    del self.at[flow.name, number]
            now = end
        for traffic in self.starts[task.program].get(len(program.segments), ()):
            ended[traffic.name] = self._place_own(Own(task, traffic), now)
        self.free[program.node] = max([now, *ended.values()])
        self.queues[program.node].remove(task)
        self.done.add(task)

    # Transfers.

    def _place_own(self, own: Own, begin: int) -> int:
        """Returns when it has ended."""
        way = self.own[own.task.program, own.traffic.name]
        begin = way.first(begin)
        self.placed.append(Placed(own, way.take(begin)))
        return begin + way.duration

    def _hands(self) -> Iterator[_Leg]:
        for name, number in self.moving:
            found = self.at[name, number]
            slot = self.slots[name][found.stop + 1].best(found.since)
            if slot is None:
                continue
            way = self.ways[name][found.stop]
            begin, deadline = way.first(slot[1]), self._deadline(name, number)
            yield _Leg(begin, deadline, name, number, begin + way.duration, slot[0])

    def _deadline(self, name: str, number: int) -> int:
        """When its reader would begin, if it and all before it waited for nothing."""
        flow = self.flows[name]
        if not flow.destination:
            return 0
        node = self.work.program(flow.destination).node
        task, following = Task(flow.destination, flow.reader(number)), self.queues[node][0]
        return self.free[node] + self.ahead[task] - self.ahead[following]

    def _place_hand(self, of: _Leg) -> None:
        name, number = of.name, of.number
        found, slots = self.at[name, number], self.slots[name]
        span = self.ways[name][found.stop].take(of.begin)
        hand = Hand(name, number, found.stop, found.slot, of.slot)
        self.placed.append(Placed(hand, span))
        slots[found.stop].free[found.slot] = span.end
        slots[found.stop + 1].free[of.slot] = None
        self.at[name, number] = _Bytes(found.stop + 1, of.slot, span.end)
        if found.stop + 1 == len(self.ways[name]):
            self.moving.remove((name, number))

    # Ways.

    def _way_of(self, leg: Leg, size: int) -> _Way:
        rate = leg.bytes_per_s
        duration = nanoseconds(leg.latency_s) + -(-size * NANOSECONDS // rate)
        return self._taking(leg, rate, duration)

    def _own_way(self, program: Program, traffic: Traffic) -> _Way:
        leg, size = self.network.own(program.name, traffic.name)
        if not traffic.is_collective:
            return self._way_of(leg, size)
        least = nanoseconds(traffic.seconds)
        rate = min(leg.bytes_per_s, -(-size * NANOSECONDS // max(least, 1)))
        return self._taking(leg, rate, max(least, -(-size * NANOSECONDS // rate)))

    def _taking(self, leg: Leg, rate: int, duration: int) -> _Way:
        """It takes its rate of each medium, and all of its stream."""
        stream = self.streams.setdefault((leg.source, leg.destination), Calendar(1))
        calendars = [*(self.calendars[wire.medium] for wire in leg.wires), stream]
        capacities = self.network.capacities
        rates = [-(-rate * capacities[of.medium] // of.bytes_per_s) for of in leg.wires]
        rates.append(1)
        return _Way(calendars, rates, duration, tuple(wire.name for wire in leg.wires), rate)


def _grouped(
    traffic: Iterable[Traffic], key: Callable[[Traffic], int]
) -> Mapping[int, Sequence[Traffic]]:
    found: dict[int, list[Traffic]] = {}
    for t in traffic:
        found.setdefault(key(t), []).append(t)
    return found


def place(
    network: Network, work: Work, rings: Mapping[str, Ring], orders: Orders
) -> Scheduled | None:
    """Places all runs and transfers on the clock.

    Returns:
      None when, in whatever order, something would wait for a slot for good.

    Time, where the order is kept, O(n (t + m) c) for n runs and transfers, of which m want to move
    at once, t nodes and c stretches of the busiest wire's calendar that a transfer is longer than.
    """
    return _Scheduler(network, work, rings, orders).run()
