"""What is to be done on a cluster: programs, how often each runs, and what flows between them.

    prefill (4 runs)  ──kv──►  decode (64 runs)          a flow: from a run of one program,
       │ weights                 ▲      │                to a run of another
       ▼ from the host           └─token┘

A *program* is what all chips of a node run at once, an SPMD program's module for one of them. It is
a list of *segments*, which compute, one after the other; between them it starts and awaits
*traffic* of its own: transfers from and to its host, and collectives among its chips.

A *flow* hands bytes from each run of a program to a run of another, on another node or on the same.
They lie in slots, of which there are a few at each end, and stay there until they are read.

A *state* are bytes that stay on a node: weights, sums of gradients. A program reads those that it
names when it begins, and has written the ones that it writes when it ends.

Bytes of flows and states are of all chips of the node together; bytes of programs of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from hlo_passes.cluster.cluster import Cluster
from hlo_passes.errors import ClusterError, ClusterFileError
from hlo_passes.hardware.file_table import FileTable

COLLECTIVE = "fabric"
"""What stands for both tiers of a collective's bytes."""

NANOSECONDS = 1_000_000_000

MARK = 4
"""Bytes that stand for a collective under way; what it works on is in its program's memory."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a program moves by itself, on each chip.

    Attributes:
      source, destination: names of tiers as the program has them, ``"host"`` and ``"hbm"``; both
        `COLLECTIVE` where chips send each other something.
      of: what of the host's memory is read or written, by name; what is written is read again under
        that name.
      bytes: of one chip, on the wires.
      start: it is issued when the segments before this one have run; at least 1 where a segment
        makes what is sent.
      done: the segment that waits for it; as many as there are for the end of the program.
      end: the segment after the last that reads what has come; ``done < end``.
      seconds: of a collective, how long it takes.
    """

    name: str
    source: str
    destination: str
    of: str
    bytes: int
    start: int
    done: int
    end: int
    seconds: float = 0.0

    @property
    def is_collective(self) -> bool:
        return self.source == COLLECTIVE

    @property
    def held(self) -> tuple[int, int]:
        """The segments in which its bytes lie in a slot of the device: half-open."""
        return self.start - (self.is_collective or self.leaves), self.end

    @property
    def leaves(self) -> bool:
        """Whether it goes from the device to the host."""
        return not self.is_collective and self.source in ("hbm", "dram")


@dataclass(frozen=True, slots=True)
class Program:
    """See the module.

    Attributes:
      node: where it runs.
      segments: the seconds of each.
      memory_bytes: of the device's memory while it is loaded, of one chip, without the slots of
        `traffic`: arguments, results and temporaries.
      reads, writes: states, by name.
    """

    name: str
    node: str
    segments: tuple[float, ...]
    runs: int = 1
    memory_bytes: int = 0
    traffic: tuple[Traffic, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class State:
    """Bytes that stay on a node."""

    name: str
    node: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Flow:
    """Run r of `source` hands `bytes` to run ``r * stride + lag`` of `destination`.

    Attributes:
      source: a program; ``""`` where the caller gives the bytes, on the destination's node.
      destination: a program; ``""`` where the caller takes them, on the source's node.
      at: the segment of the source that has written them when it ends; -1 for the last.
      needed: the segment of the destination that reads them.
      in_flight: how many may have slots at each end at once; None for as many as there is room for.
    """

    name: str
    source: str
    destination: str
    bytes: int
    at: int = -1
    needed: int = 0
    stride: int = 1
    lag: int = 0
    in_flight: int | None = None

    def reader(self, run: int) -> int:
        """The run of the destination that reads what run `run` of the source wrote."""
        return run * self.stride + self.lag


class Operand(NamedTuple):
    """A value that a segment reads or writes, by a name that no other value has, and what it is: a
    state by name, a flow, or traffic of its program."""

    value: str
    of: str | Flow | Traffic


class Task(NamedTuple):
    """One run of a program."""

    program: str
    run: int

    def __str__(self) -> str:
        return f"{self.program}#{self.run}"


@dataclass(frozen=True)
class Work:
    """Programs, flows and states; see the module."""

    programs: tuple[Program, ...]
    flows: tuple[Flow, ...] = ()
    states: tuple[State, ...] = ()

    def program(self, name: str) -> Program:
        return self._programs[name]

    @cached_property
    def _programs(self) -> Mapping[str, Program]:
        return {program.name: program for program in self.programs}

    @cached_property
    def incoming(self) -> Mapping[str, Sequence[Flow]]:
        """The flows that each program reads."""
        return {p.name: [f for f in self.flows if f.destination == p.name] for p in self.programs}

    @cached_property
    def outgoing(self) -> Mapping[str, Sequence[Flow]]:
        """The flows that each program writes."""
        return {p.name: [f for f in self.flows if f.source == p.name] for p in self.programs}

    def sorted(self) -> Mapping[str, Sequence[str]]:
        """The programs, each after those whose flows it reads in the same run, which are its value.

        Raises:
          ClusterError: when flows go round in a circle.
        """
        before = {
            p.name: [f.source for f in self.incoming[p.name] if f.source and not f.lag]
            for p in self.programs
        }
        try:
            return {name: before[name] for name in TopologicalSorter(before).static_order()}
        except CycleError as error:
            raise ClusterError(
                f"programs wait for each other: {' <- '.join(error.args[1])}",
                "A flow to a later run has a lag.",
            ) from error

    def runs(self, flow: Flow) -> range:
        """The runs of its source that hand something on; of what the caller gives, those of the
        destination that read it."""
        if not flow.source:
            return range(self.program(flow.destination).runs)
        runs = self.program(flow.source).runs
        if not flow.destination:
            return range(runs)
        left = self.program(flow.destination).runs - flow.lag
        return range(max(0, min(runs, -(-left // flow.stride))))

    def written_in(self, flow: Flow) -> int:
        """The segment that writes it, by index."""
        return flow.at % len(self.program(flow.source).segments)

    def read_by(self, task: Task) -> Iterator[tuple[Flow, int]]:
        """The flows that a run reads, each with its own number."""
        for flow in self.incoming[task.program]:
            number = task.run
            if flow.source:
                number, rest = divmod(task.run - flow.lag, flow.stride)
                if rest or number not in self.runs(flow):
                    continue
            yield flow, number

    def written_by(self, task: Task) -> Iterator[Flow]:
        """The flows that a run hands something to."""
        return (f for f in self.outgoing[task.program] if task.run in self.runs(f))

    def given_bytes(self, node: str) -> int:
        """Bytes that the caller has on a node: states, and what flows begin or end with."""
        ends = {p.name for p in self.programs if p.node == node}
        given = sum(state.bytes for state in self.states if state.node == node)
        for flow in self.flows:
            if (not flow.source and flow.destination in ends) or (
                not flow.destination and flow.source in ends
            ):
                given += flow.bytes * len(self.runs(flow))
        return given

    # In the order of the arguments and results of the function that computes it.

    def arguments(self, task: Task, segment: int) -> Iterator[Operand]:
        """What a segment of a run reads: states, flows, and what its program's traffic brought."""
        program = self.program(task.program)
        if segment == 0:
            yield from (Operand(name, name) for name in program.reads)
        for flow, number in self.read_by(task):
            if flow.needed == segment:
                yield Operand(f"{flow.name}#{number}", flow)
        for t in self._brought[program.name].get(segment, ()):
            yield Operand(self.value(task, t), t)

    def results(self, task: Task, segment: int) -> Iterator[Operand]:
        """What a segment of a run writes: flows, states, and what its program's traffic takes."""
        program = self.program(task.program)
        for flow in self.written_by(task):
            if self.written_in(flow) == segment:
                yield Operand(f"{flow.name}#{task.run}", flow)
        if segment + 1 == len(program.segments):
            yield from (Operand(name, name) for name in program.writes)
        for t in self._sent[program.name].get(segment, ()):
            yield Operand(begun(task, t) if t.is_collective else self.value(task, t), t)

    @cached_property
    def _brought(self) -> Mapping[str, Mapping[int, Sequence[Traffic]]]:
        """What a program's traffic brought, by the segments that are the first and last to read it:
        those between them are on the same stream."""
        found: dict[str, dict[int, list[Traffic]]] = {p.name: {} for p in self.programs}
        for p in self.programs:
            for t in p.traffic:
                for k in dict.fromkeys((t.done, t.end - 1)):
                    if not t.leaves:
                        found[p.name].setdefault(k, []).append(t)
        return found

    @cached_property
    def _sent(self) -> Mapping[str, Mapping[int, Sequence[Traffic]]]:
        """What a program's traffic takes from the device, by the segment that makes it."""
        found: dict[str, dict[int, list[Traffic]]] = {p.name: {} for p in self.programs}
        for p in self.programs:
            for t in p.traffic:
                if t.leaves or t.is_collective:
                    found[p.name].setdefault(t.start - 1, []).append(t)
        return found

    @cached_property
    def _stored(self) -> Mapping[str, Set[str]]:
        """What of the host each program writes itself, by name."""
        return {p.name: {t.of for t in p.traffic if t.leaves} for p in self.programs}

    def value(self, task: Task, traffic: Traffic) -> str:
        """What its program's traffic brings or takes: of what the host has from the beginning, the
        same in each run."""
        if traffic.is_collective:
            return f"{task}/{traffic.name}"
        is_stored = traffic.of in self._stored[task.program]
        return f"{task if is_stored else task.program}/{traffic.of}"

    def check(self, cluster: Cluster) -> None:
        """
        Raises:
          ClusterError: when it does not fit together, or not to the cluster.
        """
        _check(self, cluster)

    def to_dict(self) -> dict[str, object]:
        """The work as JSON-ready data; `from_dict` reads it back."""
        return {
            "programs": [
                {
                    "name": p.name,
                    "node": p.node,
                    "segments": list(p.segments),
                    "runs": p.runs,
                    "memory_bytes": p.memory_bytes,
                    "traffic": [
                        {key: getattr(t, key) for key in Traffic.__dataclass_fields__}
                        for t in p.traffic
                    ],
                    "reads": list(p.reads),
                    "writes": list(p.writes),
                }
                for p in self.programs
            ],
            "flows": [
                {
                    key: value
                    for key in Flow.__dataclass_fields__
                    if (value := getattr(flow, key)) is not None
                }
                for flow in self.flows
            ],
            "states": [
                {"name": state.name, "node": state.node, "bytes": state.bytes}
                for state in self.states
            ],
        }

    @staticmethod
    def from_dict(data: Mapping[str, object], file: str = "work") -> Work:
        """Reads what `to_dict` wrote; what has a default may be left out.

        Raises:
          ClusterFileError: when a key is missing, unknown, or its value not as expected.
        """
        return _from_dict(data, file)


def begun(task: Task, traffic: Traffic) -> str:
    """The value that stands for a collective before it has run."""
    return f"{task}/{traffic.name} begun"


def pipeline(
    forward: Sequence[Program],
    backward: Sequence[Program],
    microbatches: int,
    *,
    activations: Sequence[int],
    saved: Sequence[int],
) -> Work:
    """The work of a pipeline: stage s hands its activations on, and, going back, takes a gradient
    of as many bytes.

    Args:
      forward: the program of each stage, on its node.
      backward: of each stage, on the same node; none for inference.
      microbatches: how often each runs.
      activations: bytes of what a stage hands to the next, one less than there are stages.
      saved: bytes that a stage keeps of a microbatch from forward to backward.

    Raises:
      ClusterError: when there are not as many of each as there should be.
    """
    stages = len(forward)
    due = {"backward": (stages if backward else 0), "activations": stages - 1}
    due["saved"] = due["backward"]
    found = {"backward": backward, "activations": activations, "saved": saved}
    for key, expected in due.items():
        if len(found[key]) != expected:
            raise ClusterError(
                f"a pipeline of {stages} stages with {len(found[key])} {key}",
                f"Expected {expected}.",
            )
    flows: list[Flow] = []
    for s, size in enumerate(activations):
        flows.append(Flow(f"act{s}", forward[s].name, forward[s + 1].name, size))
    for s, size in enumerate(activations if backward else ()):
        flows.append(Flow(f"grad{s}", backward[s + 1].name, backward[s].name, size))
    for s, size in enumerate(saved):
        flows.append(Flow(f"saved{s}", forward[s].name, backward[s].name, size))
    programs = tuple(replace(p, runs=microbatches) for p in (*forward, *backward))
    return Work(programs, tuple(flows))


def _check(work: Work, cluster: Cluster) -> None:
    def refuse(where: str, expected: str, found: object) -> None:
        raise ClusterError(f"{where}: expected {expected}, found {found!r}", "Mend the work.")

    for kind, names in (
        ("programs", [p.name for p in work.programs]),
        ("flows and states", [f.name for f in work.flows] + [s.name for s in work.states]),
    ):
        for name in names:
            if names.count(name) > 1 or "#" in name or "/" in name:
                refuse(kind, "names that differ, without # and /", name)
    states = {state.name: state.node for state in work.states}
    for state in work.states:
        _divided(state.name, state.bytes, cluster.node(state.node).count)
    for p in work.programs:
        node = cluster.node(p.node)
        if node.machine is None:
            refuse(f"program {p.name}", "a node of chips", p.node)
        if not p.segments or min(p.segments) < 0 or p.runs < 1:
            refuse(f"program {p.name}", "segments of 0 s or more, and runs", (p.segments, p.runs))
        for name in (*p.reads, *p.writes):
            if states.get(name) != p.node:
                refuse(f"program {p.name}", f"a state of {p.node}", name)
        for t in p.traffic:
            first = int(t.leaves or t.is_collective)
            if not first <= t.start <= t.done < t.end or t.done > len(p.segments) or t.bytes < 1:
                refuse(f"program {p.name}, {t.name}", "a start, a done and an end", t)
            for tier in () if t.is_collective else (t.source, t.destination):
                cluster.host_place(node, tier)
    for flow in work.flows:
        _check_flow(work, cluster, flow)
    work.sorted()


def _check_flow(work: Work, cluster: Cluster, flow: Flow) -> None:
    known = {p.name for p in work.programs}
    where = f"flow {flow.name}"
    ends = [name for name in (flow.source, flow.destination) if name]
    for name in ends:
        if name not in known:
            raise ClusterError(f"{where}: no program {name!r}", f"There are {', '.join(known)}.")
        _divided(flow.name, flow.bytes, cluster.node(work.program(name).node).count)
    at = len(work.program(flow.source).segments) if flow.source else 1
    needed = len(work.program(flow.destination).segments) if flow.destination else 1
    if (
        not ends
        or not -at <= flow.at < at
        or not 0 <= flow.needed < needed
        or flow.stride < 1
        or flow.lag < 0
        or flow.bytes < 1
        or (flow.in_flight is not None and flow.in_flight < 1)
    ):
        raise ClusterError(
            f"{where}: expected bytes between segments that there are, found {flow}",
            "Mend the work.",
        )


def _divided(name: str, size: int, count: int) -> None:
    if size % count:
        raise ClusterError(
            f"{name} has {size} bytes, which {count} chips cannot share evenly", "Pad it."
        )


class _Table(FileTable):
    refusal = ClusterFileError

    def optional(self, key: str, default: int, *, low: int = 0) -> int:
        if key not in self.unread:
            return default
        value = self.take(key, "a whole number")
        if not isinstance(value, int) or value < low:
            raise self.error(key, f"a whole number of at least {low}", repr(value))
        return value

    def seconds(self, key: str) -> tuple[float, ...]:
        value = self.take(key, "a list of seconds")
        if not isinstance(value, list) or not all(isinstance(of, int | float) for of in value):
            raise self.error(key, "a list of seconds", repr(value))
        return tuple(float(of) for of in value)

    def names(self, key: str) -> tuple[str, ...]:
        return tuple(self.texts(key)) if key in self.unread else ()


def _from_dict(data: Mapping[str, object], file: str) -> Work:
    root = _Table(data, file)
    programs = tuple(_program(table) for table in root.tables("programs"))
    flows = tuple(_flow(of) for of in root.tables("flows")) if "flows" in root.unread else ()
    states = tuple(_state(of) for of in root.tables("states")) if "states" in root.unread else ()
    root.close()
    return Work(programs, flows, states)


def _program(table: _Table) -> Program:
    traffic = table.tables("traffic") if "traffic" in table.unread else ()
    program = Program(
        table.text("name"),
        table.text("node"),
        table.seconds("segments"),
        table.optional("runs", 1, low=1),
        table.optional("memory_bytes", 0),
        tuple(_traffic(of) for of in traffic),
        table.names("reads"),
        table.names("writes"),
    )
    table.close()
    return program


def _traffic(table: _Table) -> Traffic:
    texts = [table.text(key) for key in ("name", "source", "destination", "of")]
    numbers = [table.whole(key, zero=True) for key in ("bytes", "start", "done", "end")]
    seconds = table.number("seconds", zero=True) if "seconds" in table.unread else 0.0
    table.close()
    return Traffic(texts[0], texts[1], texts[2], texts[3], *numbers, seconds=seconds)


def _flow(table: _Table) -> Flow:
    flow = Flow(
        table.text("name"),
        table.text("source"),
        table.text("destination"),
        table.whole("bytes"),
        table.optional("at", -1, low=-1),
        table.optional("needed", 0),
        table.optional("stride", 1, low=1),
        table.optional("lag", 0),
        table.whole("in_flight") if "in_flight" in table.unread else None,
    )
    table.close()
    return flow


def _state(table: _Table) -> State:
    state = State(table.text("name"), table.text("node"), table.whole("bytes"))
    table.close()
    return state
