"""Is a cluster's plan right? See `check`, which shares nothing with what makes plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from hlo_passes.chains import check as chains
from hlo_passes.chains.chain import Copy, Execute, Extent, Space, SpaceKind, extent, touched
from hlo_passes.cluster.cluster import Place, Wire
from hlo_passes.cluster.plan import ClusterPlan, Timed
from hlo_passes.cluster.work import MARK, Flow, Operand, Program, State, Task, Traffic, begun
from hlo_passes.errors import (
    ChainCheckError,
    ChainError,
    ClusterCheckError,
    ClusterError,
    ClusterFileError,
)

_NS = 1_000_000_000

_NOTHING = ""
"""What bytes hold that are no one value's."""


def check(plan: ClusterPlan) -> None:
    """Proves a plan right, or says why not, from what is written in it alone.

    - *What it is for*: the cluster and the work are such as files may say, and fit together.
    - *Order*: the chain is right in whatever order its streams run (`chains.check`): every two
      accesses to the same bytes are ordered by streams and waits, within a replay and from one to
      the next, nothing is read that nobody wrote, and no wait holds up the chain for good.
    - *Clock*: nothing begins before what it waits for, or what is before it on its stream, ends.
    - *Work*: each segment of each run of each program runs once, on its node, in order, for as long
      as it takes; collectives, too, between the segments that start and await them.
    - *Values*: every segment reads, in the slots of its arguments, the very values that the work
      says, wherever they have come from; what the caller is due is where it looks. No flow is ever
      in more slots of a memory than it may have.
    - *Wires*: each copy goes from memory to memory over wires that follow each other through
      switches; its bytes fit through in its time; of no medium more is taken at any moment, be it
      shared by whom it may, than it has.
    - *Memory*: what arenas and given bytes take of each memory, it has; of an arena, programs have
      what they need, and nobody else touches it.

    Raises:
      ClusterCheckError: at the first thing that is wrong.

    Time O(n (s + log n)) for n descriptors on s streams.
    """
    if len(plan.clock) != sum(isinstance(d.action, Copy | Execute) for d in plan.chain.descriptors):
        raise ClusterCheckError("the clock has not one span for each copy and execution")
    try:
        plan.work.check(plan.cluster)
        chains.check(plan.chain)
    except (ClusterError, ClusterFileError, ChainError, ChainCheckError) as error:
        raise ClusterCheckError(str(error)) from error
    _check_clock(plan)
    _Values(plan).check()
    _check_wires(plan)
    _check_memory(plan)


def _refuse(plan: ClusterPlan, timed: Timed, problem: str) -> ClusterCheckError:
    name = plan.chain.streams[timed.descriptor.stream].name
    return ClusterCheckError(f"descriptor {timed.at} on {name!r} {problem}")


# --- clock ----------------------------------------------------------------------------------


def _check_clock(plan: ClusterPlan) -> None:
    spans = iter(plan.clock)
    ended: list[int] = []
    stream_ended = [0] * len(plan.chain.streams)
    for k, d in enumerate(plan.chain.descriptors):
        awaited = [ended[wait.index] for wait in d.waits if not wait.is_previous]
        ready = max([stream_ended[d.stream], *awaited])
        end = ready
        if isinstance(d.action, Copy | Execute):
            span = next(spans)
            if span.bytes_per_s < 0:
                raise _refuse(plan, Timed(k, d, span), f"moves {span.bytes_per_s} bytes a second")
            if span.begin < ready or span.end < span.begin:
                raise _refuse(
                    plan,
                    Timed(k, d, span),
                    f"begins at {span.begin} ns, and what it waits for ends at {ready}",
                )
            end = span.end
        ended.append(end)
        stream_ended[d.stream] = end


# --- work and values ------------------------------------------------------------------------


class _Values:
    """Follows values through slots, in chain order, which stands for all orders."""

    def __init__(self, plan: ClusterPlan) -> None:
        self.plan, self.chain, self.work = plan, plan.chain, plan.work
        # Values lie in extents; several slots may have the same one.
        self.extents = [extent(plan.chain.slots, k) for k in range(len(plan.chain.slots))]
        self.overlapping = _overlapping(self.extents)
        self.values = dict.fromkeys(self.extents, _NOTHING)
        # What the caller hands in, and what is there in the end, by name: states are both.
        self.given, self.taken = set[str](), dict[str, str]()
        # Where flows have been that may only have so many slots.
        self.limits: dict[str, Flow] = {}
        self.lying: dict[tuple[Flow, str], set[Extent]] = {}
        self.declare()
        for k, slot in enumerate(plan.chain.slots):
            space = self.space(k)
            if space.kind == SpaceKind.FILE:
                raise ClusterCheckError(f"{space.name!r} is a file")
            if space.kind == SpaceKind.ARENA:
                continue
            if (space.name, 0, space.bytes) != (slot.name, slot.offset, slot.bytes):
                raise ClusterCheckError(
                    f"{slot.name!r} is not all of {space.name!r}, which is bound"
                )
            if slot.name in self.given:
                self.put(k, slot.name)
        self.due: dict[str, tuple[Task, int]] = {}
        self.collectives: dict[str, tuple[Task, Traffic]] = {}
        for program in self.work.programs:
            for run in range(program.runs):
                task = Task(program.name, run)
                for k in range(len(program.segments)):
                    is_all = len(program.segments) == 1
                    self.due[str(task) if is_all else f"{task}.{k}"] = task, k
                for t in program.traffic:
                    if t.is_collective:
                        self.collectives[f"{task}/{t.name}"] = task, t
        # Of each node the run that is under way and its next segment, and of each program its run.
        self.under_way: dict[str, tuple[Task, int]] = {}
        self.last: dict[str, int] = {}

    def declare(self) -> None:
        for state in self.work.states:
            self.given.add(state.name)
            self.taken[state.name] = self.work.left(state.name)
        for flow in self.work.flows:
            ends = [f"{flow.name}#{n}" for n in self.work.runs(flow)]
            self.given.update(ends if not flow.source else ())
            self.taken.update(zip(ends, ends, strict=True) if not flow.destination else ())
            if flow.source and flow.destination and flow.in_flight is not None:
                self.limits.update(dict.fromkeys(ends, flow))
        for program in self.work.programs:
            for t in program.traffic:
                value = self.work.value(Task(program.name, 0), t)
                if not t.is_collective and not t.leaves and value.startswith(f"{program.name}/"):
                    self.given.add(value)

    def space(self, slot: int) -> Space:
        return self.chain.spaces[self.chain.slots[slot].space]

    def put(self, slot: int, value: str) -> None:
        for other in self.overlapping[self.extents[slot]]:
            self.values[other] = _NOTHING
        self.values[self.extents[slot]] = value
        if value in self.limits:
            where = self.limits[value], self.space(slot).tier
            self.lying.setdefault(where, set()).add(self.extents[slot])

    def held(self, slot: int) -> str:
        return self.values[self.extents[slot]]

    def check(self) -> None:
        for timed in self.plan.timed:
            match timed.descriptor.action:
                case Copy(source, destination, size, start, end):
                    sizes = {self.chain.slots[k].bytes for k in (source, destination)}
                    if start or end or sizes != {size}:
                        raise _refuse(self.plan, timed, "copies a part of a slot")
                    self.put(destination, self.held(source))
                case Execute(segment):
                    self.execute(timed, segment)
                case _:
                    pass
        for name in (*self.due, *self.collectives):
            raise ClusterCheckError(f"{name!r} never runs")
        for k, slot in enumerate(self.chain.slots):
            if slot.name in self.taken and self.space(k).kind == SpaceKind.BOUND:
                if self.held(k) != self.taken.pop(slot.name):
                    raise ClusterCheckError(f"{slot.name!r} is not left where its caller has it")
        for name in sorted(self.taken):
            raise ClusterCheckError(f"{name!r} is in no bound space")
        for (flow, tier), slots in self.lying.items():
            if flow.in_flight is not None and len(slots) > flow.in_flight:
                found = f"{flow.name!r} is in {len(slots)} slots of {tier}"
                raise ClusterCheckError(f"{found}, and may have {flow.in_flight}")

    def execute(self, timed: Timed, index: int) -> None:
        name = self.chain.segments[index].name
        stream = self.chain.streams[timed.descriptor.stream].name
        if name in self.collectives:
            task, traffic = self.collectives.pop(name)
            at = f"{self.work.program(task.program).node} fabric"
            seconds = traffic.seconds
            read = [Operand(begun(task, traffic), traffic)]
            written = [Operand(name, traffic)]
        elif name in self.due:
            task, k = self.due.pop(name)
            program = self.work.program(task.program)
            at, seconds = program.node, program.segments[k]
            self.follow(timed, program, task, k)
            read, written = self.work.arguments(task, k), self.work.results(task, k)
        else:
            raise _refuse(self.plan, timed, f"runs {name!r}, which is not due")
        if stream != at:
            raise _refuse(self.plan, timed, f"runs {name!r}, which belongs on {at!r}")
        if timed.span.end - timed.span.begin < int(seconds * _NS):
            raise _refuse(self.plan, timed, f"takes less than {seconds} s")
        node = self.plan.cluster.node(self.work.program(task.program).node)
        segment = self.chain.segments[index]
        for slot in (*segment.arguments, *segment.results):
            if self.space(slot).tier != str(node.memory):
                raise _refuse(self.plan, timed, f"works on {self.chain.slots[slot].name!r} afar")
        self.operands(timed, segment.arguments, read, node.count, is_read=True)
        self.operands(timed, segment.results, written, node.count, is_read=False)

    def follow(self, timed: Timed, program: Program, task: Task, k: int) -> None:
        """Runs of a node one at a time, those of a program in order, segments in order."""
        due = self.under_way.get(program.node, (task, 0))
        if due != (task, k) or (k == 0 and self.last.get(program.name, -1) != task.run - 1):
            raise _refuse(self.plan, timed, f"runs segment {k} of {task} out of order")
        self.last[program.name] = task.run
        if k + 1 < len(program.segments):
            self.under_way[program.node] = task, k + 1
        else:
            self.under_way.pop(program.node, None)

    def operands(
        self,
        timed: Timed,
        slots: Sequence[int],
        operands: Iterable[Operand],
        count: int,
        *,
        is_read: bool,
    ) -> None:
        expected = list(operands)
        found = [self.chain.slots[k].bytes for k in slots]
        if found != (sizes := [self.size(of, count) for of in expected]):
            raise _refuse(self.plan, timed, f"has operands of {found} bytes, expected {sizes}")
        for slot, operand in zip(slots, expected, strict=True):
            if is_read and self.held(slot) != operand.value:
                value = self.held(slot)
                raise _refuse(self.plan, timed, f"reads {value}, and should read {operand.value}")
            if not is_read:
                self.put(slot, operand.value)

    def size(self, operand: Operand, count: int) -> int:
        match operand.of:
            case Flow() as flow:
                return flow.bytes
            case Traffic() as traffic:
                return (MARK if traffic.is_collective else traffic.bytes) * count
            case State(bytes=size):
                return size


def _overlapping(extents: Iterable[Extent]) -> Mapping[Extent, Sequence[Extent]]:
    """For each extent the others that have some of its bytes."""
    order = sorted(set(extents))
    found: dict[Extent, list[Extent]] = {of: [] for of in order}
    for k, of in enumerate(order):
        for other in order[k + 1 :]:
            if not other.overlaps(of):
                break
            found[of].append(other)
            found[other].append(of)
    return found


# --- wires ----------------------------------------------------------------------------------


def _check_wires(plan: ClusterPlan) -> None:
    wires = {wire.name: wire for wire in plan.cluster.wires}
    fabrics = {
        f"{Task(p.name, run)}/{t.name}": (p, t)
        for p in plan.work.programs
        for t in p.traffic
        if t.is_collective
        for run in range(p.runs)
    }
    changes: defaultdict[str, list[tuple[int, Fraction]]] = defaultdict(list)
    for timed in plan.timed:
        begin, end, names, rate = timed.span
        taken = end - begin
        match timed.descriptor.action:
            case Copy(source, destination, size):
                ends = [_place(plan, slot) for slot in (source, destination)]
                latency = sum(wires[name].latency_s for name in names if name in wires)
                taken -= int(latency * _NS)
            case Execute(segment) if plan.chain.segments[segment].name in fabrics:
                program, traffic = fabrics[plan.chain.segments[segment].name]
                node = plan.cluster.node(program.node)
                ends, size = [node.memory, node.memory], traffic.bytes * node.count
            case _:
                if names or rate:
                    raise _refuse(plan, timed, "computes, and takes wires")
                continue
        _check_way(plan, timed, wires, ends)
        if taken * rate < size * _NS:
            raise _refuse(
                plan, timed, f"moves {size} bytes in {taken} ns, at {rate} bytes a second"
            )
        for name in names:
            share = Fraction(rate, wires[name].bytes_per_s)
            changes[wires[name].medium] += [(begin, share), (end, -share)]
    for medium, of in changes.items():
        level = Fraction(0)
        # What ends at a moment makes room for what begins then.
        for moment, change in sorted(of):
            level += change
            if level > 1:
                raise ClusterCheckError(
                    f"at {moment} ns {float(level):.6g} times what {medium} carries are taken of it"
                )


def _check_way(
    plan: ClusterPlan, timed: Timed, wires: Mapping[str, Wire], ends: Sequence[Place]
) -> None:
    """Over wires that follow each other, through switches, from the one end to the other."""
    at = ends[0]
    for k, name in enumerate(timed.span.wires):
        wire = wires.get(name)
        if wire is None or wire.source != at or (k and at.tier):
            raise _refuse(plan, timed, f"is at {at}, where no wire {name} goes on")
        at = wire.destination
    if at != ends[1] or not timed.span.wires:
        raise _refuse(plan, timed, f"comes to {at} instead of {ends[1]}")


def _place(plan: ClusterPlan, slot: int) -> Place:
    return Place.parse(plan.chain.spaces[plan.chain.slots[slot].space].tier)


# --- memory ---------------------------------------------------------------------------------


def _check_memory(plan: ClusterPlan) -> None:
    taken: defaultdict[str, int] = defaultdict(int)
    for space in plan.chain.spaces:
        taken[space.tier] += space.bytes
    for tier, size in taken.items():
        try:
            capacity = plan.cluster.capacity(Place.parse(tier))
        except ClusterError as error:
            raise ClusterCheckError(str(error)) from error
        if size > capacity:
            raise ClusterCheckError(f"{tier} has {capacity} bytes, and {size} are taken")
    used = {slot for d in plan.chain.descriptors for slot in touched(d.action, plan.chain.segments)}
    extents = [extent(plan.chain.slots, k) for k in range(len(plan.chain.slots))]
    overlapping = _overlapping(extents)
    for node in plan.cluster.chips:
        need = max((p.memory_bytes for p in plan.work.programs if p.node == node.name), default=0)
        name = f"{node.name} programs"
        found = [k for k, slot in enumerate(plan.chain.slots) if slot.name == name]
        has = [plan.chain.slots[k].bytes for k in found if _place(plan, k) == node.memory]
        if need and (len(has) != 1 or has[0] < need * node.count):
            raise ClusterCheckError(f"programs of {node.name} have not {need} bytes a chip")
        for k in found:
            if k in used or overlapping[extents[k]] or extents.count(extents[k]) > 1:
                raise ClusterCheckError(f"{name!r} is touched by others")
