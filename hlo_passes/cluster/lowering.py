"""What was placed on the clock, as one chain over all nodes and its spans.

An arena a memory that something comes to rest in, in which chips have, one after the other:

    │ memory of programs │ slots of their own traffic │ ring of flow 0 │ ring of flow 1 │ ...

Programs of one node run one at a time, so the first two are as large as the largest needs. What the
caller gives is in bound spaces, one a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from hlo_passes.chains.builder import Builder
from hlo_passes.cluster.cluster import Cluster, Place
from hlo_passes.cluster.plan import ClusterPlan, Span
from hlo_passes.cluster.rings import ALIGNMENT, Ring, hosted, own_bytes, own_slots, slot_bytes
from hlo_passes.cluster.schedule import Compute, Hand, Own, Scheduled
from hlo_passes.cluster.work import Flow, Operand, Program, State, Task, Traffic, Work

_NS_A_TICK = 1000
"""A chain's ticks are microseconds here."""


def lower(
    cluster: Cluster, work: Work, rings: Mapping[str, Ring], scheduled: Scheduled
) -> ClusterPlan:
    """Makes the plan of what was placed; the chain's waits are derived from what touches what."""
    lowering = _Lowering(cluster, work, rings)
    clock = tuple(lowering.append(of.what, of.span) for of in scheduled.placed)
    return ClusterPlan(cluster, work, lowering.build.build(release=True), clock)


class _Lowering:
    def __init__(self, cluster: Cluster, work: Work, rings: Mapping[str, Ring]) -> None:
        self.cluster, self.work, self.rings = cluster, work, rings
        self.build = Builder()
        self.states: dict[str, int] = {}
        self.hosted: dict[str, int] = {}
        self.own: dict[tuple[str, str], int] = {}
        self.slots: dict[tuple[str, int, int], int] = {}
        self._streams: dict[str, int] = {}
        places = [*dict.fromkeys(place for ring in rings.values() for place in ring.stops)]
        chips = [n.memory for n in cluster.chips if any(p.node == n.name for p in work.programs)]
        for place in dict.fromkeys((*chips, *places)):
            self._declare_arena(place)
        self._declare_given()
        for place, of in hosted(cluster, work).items():
            for name, size in of.items():
                self._declare_hosted(place, name, size)

    def append(self, what: Compute | Own | Hand, span: Span) -> Span:
        """Appends it to the chain; returns `span`."""
        tick = span.begin // _NS_A_TICK
        match what:
            case Compute():
                self._compute(what, tick)
            case Own(task, traffic):
                self._own(task, traffic, tick)
            case Hand(flow, _, leg, source, destination):
                ring = self.rings[flow]
                ends = self.slots[flow, leg, source], self.slots[flow, leg + 1, destination]
                way = self._stream(f"{ring.stops[leg]}->{ring.stops[leg + 1]}")
                self.build.copy(way, *ends, ring.bytes, tick=tick)
        return span

    # What there is.

    def _declare_arena(self, place: Place) -> None:
        node = self.cluster.node(place.node)
        programs = [p for p in self.work.programs if p.node == node.name]
        is_device = node.machine is not None
        memory = max((p.memory_bytes for p in programs if is_device), default=0)
        memory = -(-memory // ALIGNMENT) * ALIGNMENT
        owns = {p.name: own_slots(p) for p in programs if is_device}
        begin = (memory + max((size for _, size in owns.values()), default=0)) * node.count
        rings = [
            (name, stop, k)
            for name, ring in self.rings.items()
            for stop, at in enumerate(ring.stops)
            if at == place and not ring.is_given
            for k in range(ring.slots[stop])
        ]
        sizes = [slot_bytes(self.cluster, place, self.rings[name].bytes) for name, _, _ in rings]
        total = begin + sum(sizes)
        if not total:
            return
        arena = self.build.arena(str(place), str(place), total, alignment=ALIGNMENT)
        if memory:
            self.build.slot(f"{node.name} programs", arena, 0, memory * node.count)
        for p in programs if is_device else ():
            for t in p.traffic:
                at = (memory + owns[p.name][0][t.name]) * node.count
                size = own_bytes(t) * node.count
                self.own[p.name, t.name] = self.build.slot(f"{p.name}: {t.name}", arena, at, size)
        for key, size in zip(rings, sizes, strict=True):
            name, _, k = key
            label = f"{name}[{k}] at {place}"
            self.slots[key] = self.build.slot(label, arena, begin, self.rings[name].bytes)
            begin += size

    def _declare_given(self) -> None:
        for state in self.work.states:
            place = self.cluster.node(state.node).memory
            space = self.build.bound(state.name, str(place), state.bytes, writable=True)
            self.states[state.name] = self.build.slot(state.name, space, 0, state.bytes)
        for flow in self.work.flows:
            ring = self.rings[flow.name]
            for n in self.work.runs(flow) if ring.is_given else ():
                name, place = f"{flow.name}#{n}", str(ring.stops[0])
                writable = not flow.destination
                space = self.build.bound(name, place, ring.bytes, writable=writable)
                self.slots[flow.name, 0, n] = self.build.slot(name, space, 0, ring.bytes)

    def _declare_hosted(self, place: Place, name: str, size: int) -> None:
        program, _, of = name.partition("/")
        is_made = any(t.of == of and t.leaves for t in self.work.program(program).traffic)
        space = (
            self.build.arena(name, str(place), size, alignment=ALIGNMENT)
            if is_made
            else self.build.bound(name, str(place), size)
        )
        self.hosted[name] = self.build.slot(name, space, 0, size)

    def _stream(self, name: str) -> int:
        if name not in self._streams:
            self._streams[name] = self.build.stream(name)
        return self._streams[name]

    # What happens.

    def _compute(self, of: Compute, tick: int) -> None:
        program = self.work.program(of.task.program)
        name = str(of.task) if len(program.segments) == 1 else f"{of.task}.{of.segment}"
        operands = (
            self._slots(program, self.work.arguments(of.task, of.segment), of.read, last=True),
            self._slots(program, self.work.results(of.task, of.segment), of.written, last=False),
        )
        segment = self.build.segment(name, *operands)
        self.build.execute(self._stream(program.node), segment, tick=tick)

    def _slots(
        self, program: Program, operands: Iterable[Operand], places: Iterable[int], *, last: bool
    ) -> Iterator[int]:
        """The slots of operands; `places` are those of flows, at the last stop or the first."""
        of_flows = iter(places)
        for _, of in operands:
            match of:
                case Flow(name):
                    stop = len(self.rings[name].stops) - 1 if last else 0
                    yield self.slots[name, stop, next(of_flows)]
                case Traffic(name):
                    yield self.own[program.name, name]
                case State(name):
                    yield self.states[name]

    def _own(self, task: Task, traffic: Traffic, tick: int) -> None:
        program = self.work.program(task.program)
        node = self.cluster.node(program.node)
        slot = self.own[program.name, traffic.name]
        if traffic.is_collective:
            segment = self.build.segment(f"{task}/{traffic.name}", (slot,), (slot,))
            self.build.execute(self._stream(f"{node.name} fabric"), segment, tick=tick)
            return
        tiers = traffic.source, traffic.destination
        places = [self.cluster.host_place(node, tier) for tier in tiers]
        stream = self._stream(f"{places[0]}->{places[1]}")
        there = self.hosted[f"{program.name}/{traffic.of}"]
        ends = (slot, there) if traffic.leaves else (there, slot)
        self.build.copy(stream, *ends, traffic.bytes * node.count, tick=tick)
