"""The obvious way to run a pipeline: see `fifo`."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hlo_passes.cluster.calendar import Calendar, first_free
from hlo_passes.cluster.cluster import Cluster, Place
from hlo_passes.cluster.routes import Leg, loop, route
from hlo_passes.cluster.schedule import Orders, nanoseconds
from hlo_passes.cluster.work import NANOSECONDS, Task, Traffic, Work


class Fifo(NamedTuple):
    """Predicted seconds of a step, and the most bytes of flows that each memory holds at once."""

    step_time_s: float
    held: Mapping[str, int]


def fifo(cluster: Cluster, work: Work, orders: Orders) -> Fifo | None:
    """Runs tasks in order, each as soon as what it reads is there. A transfer is issued when its
    producer ends, a program's own where its program has it; each wire serves first come first, and
    memory is taken as it is needed. None where something waits for good.
    """
    return _Run(cluster, work, orders).run()


@dataclass
class _Node:
    tasks: list[Task]
    at: int = 0
    segment: int = 0
    is_busy: bool = False


class _Run:
    def __init__(self, cluster: Cluster, work: Work, orders: Orders) -> None:
        self.cluster, self.work = cluster, work
        self.nodes = {name: _Node(list(order)) for name, order in orders.items()}
        self.calendars: defaultdict[object, Calendar] = defaultdict(lambda: Calendar(1))
        for wire in cluster.wires:
            self.calendars[wire.medium] = Calendar(int(wire.bytes_per_s))
        self.last: Counter[object] = Counter()
        self.events: list[tuple[int, int, Callable[[int], None]]] = []
        self.issued = 0
        self.there = {f"{f.name}#{n}" for f in work.flows if not f.source for n in work.runs(f)}
        self.held: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.end = 0

    def run(self) -> Fifo | None:
        for name in self.nodes:
            self.begin(name, 0)
        while self.events:
            now, _, happens = heapq.heappop(self.events)
            self.end = max(self.end, now)
            happens(now)
        if any(node.at < len(node.tasks) for node in self.nodes.values()):
            return None
        return Fifo(self.end / NANOSECONDS, dict(self.most))

    def later(self, moment: int, happens: Callable[[int], None]) -> None:
        self.issued += 1
        heapq.heappush(self.events, (moment, self.issued, happens))

    def hold(self, place: Place, size: int) -> None:
        self.held[str(place)] += size
        self.most[str(place)] = max(self.most[str(place)], self.held[str(place)])

    def begin(self, name: str, now: int) -> None:
        """A node comes to a segment: its program's transfers that start there are issued."""
        node = self.nodes[name]
        if node.at == len(node.tasks):
            return
        task = node.tasks[node.at]
        for t in self.work.program(task.program).traffic:
            if t.start == node.segment:
                self.issue_own(name, task, t, now)
        self.advance(name, now)

    def advance(self, name: str, now: int) -> None:
        node = self.nodes[name]
        if node.is_busy or node.at == len(node.tasks):
            return
        task, k = node.tasks[node.at], node.segment
        program = self.work.program(task.program)
        due = [f"{task}/{t.name}" for t in program.traffic if t.done == k]
        due += [f"{f.name}#{n}" for f, n in self.work.read_by(task) if f.needed == k]
        if not self.there.issuperset(due):
            return
        if k == len(program.segments):
            node.at, node.segment = node.at + 1, 0
            self.begin(name, now)
            return
        node.is_busy = True
        for f in self.work.written_by(task):
            if self.work.written_in(f) == k and f.destination:
                self.hold(self.cluster.node(name).memory, f.bytes)
        end = now + nanoseconds(program.segments[k])
        self.later(end, lambda moment: self.ended(name, task, k, moment))

    def ended(self, name: str, task: Task, k: int, now: int) -> None:
        node = self.nodes[name]
        memory = self.cluster.node(name).memory
        for f, _ in self.work.read_by(task):
            if f.needed == k and f.source:
                self.hold(memory, -f.bytes)
        for f in self.work.written_by(task):
            if self.work.written_in(f) != k or not f.destination:
                continue
            value, reader = f"{f.name}#{task.run}", self.work.program(f.destination).node
            if reader == name:
                self.there.add(value)
            else:
                legs = route(self.cluster, memory, self.cluster.node(reader).memory, f.bytes)
                self.issue(list(legs), value, f.bytes, reader, now)
        node.is_busy, node.segment = False, k + 1
        self.begin(name, now)

    def issue_own(self, name: str, task: Task, t: Traffic, now: int) -> None:
        node = self.cluster.node(name)
        size, value = t.bytes * node.count, f"{task}/{t.name}"
        if t.is_collective:
            leg, duration = loop(self.cluster, name), nanoseconds(t.seconds)
            rate = min(int(leg.bytes_per_s), -(-size * NANOSECONDS // max(1, duration)))
        else:
            ends = [self.cluster.host_place(node, tier) for tier in (t.source, t.destination)]
            (leg,) = route(self.cluster, ends[0], ends[1], size)
            rate = int(leg.bytes_per_s)
            duration = nanoseconds(leg.latency_s) + -(-size * NANOSECONDS // rate)
        end = self.serve(leg, duration, rate, now)
        self.later(end, lambda moment: self.arrived(value, name, moment))

    def issue(self, legs: list[Leg], value: str, size: int, reader: str, now: int) -> None:
        leg, *left = legs
        rate = int(leg.bytes_per_s)
        duration = nanoseconds(leg.latency_s) + -(-size * NANOSECONDS // rate)
        end = self.serve(leg, duration, rate, now)
        self.later(end - duration, lambda _: self.hold(leg.destination, size))

        def landed(moment: int) -> None:
            self.hold(leg.source, -size)
            if left:
                self.issue(left, value, size, reader, moment)
            else:
                self.arrived(value, reader, moment)

        self.later(end, landed)

    def serve(self, leg: Leg, duration: int, rate: int, now: int) -> int:
        """When it ends, behind all that was issued before on any of its wires."""
        media: list[object] = [wire.medium for wire in leg.wires]
        taken = [*media, (leg.source, leg.destination)]
        rates = [rate] * len(media) + [1]
        begin = max([now, *(self.last[of] for of in taken)])
        begin = first_free([self.calendars[of] for of in taken], begin, duration, rates)
        for of, share in zip(taken, rates, strict=True):
            self.calendars[of].take(begin, begin + duration, share)
            self.last[of] = begin
        return begin + duration

    def arrived(self, value: str, name: str, now: int) -> None:
        self.there.add(value)
        self.advance(name, now)
