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
names when it begins, and has written the ones that it writes when it ends. Where one writes what
others read or write as well, they take turns at it: in rounds, as many as that of them with fewest
runs has, and in each one after the other in the *order of the work*, with its share of its runs.
Four gradients and one update, listed so, are four gradients and then an update. That order is the
one in which the work lists programs, but that each is after those whose flows it reads in the same
run; nothing else depends on how they are listed.

Bytes of flows and states are of all chips of the node together; bytes of programs of one.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple, NoReturn, cast

from hlo_passes.cluster.cluster import LONGEST_S, Cluster, Place
from hlo_passes.errors import ClusterError, ClusterFileError
from hlo_passes.hardware.file_table import FileTable, is_number

COLLECTIVE = "fabric"
"""What stands for both tiers of a collective's bytes."""

NANOSECONDS = 1_000_000_000

_MOST_RUNS = 1 << 20
"""Each is several descriptors of a chain."""

MARK = 4
"""Bytes that stand for a collective under way; what it works on is in its program's memory."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a program moves by itself, on each chip.

    Attributes:
      source, destination: names of tiers as the program has them, ``"host"`` and ``"hbm"``; both
        `COLLECTIVE` where chips send each other something.
      of: what of the host's memory is read or written, by name; what is written is read again under
        that name, by what starts behind the segment that waits for it.
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
    state, a flow, or traffic of its program."""

    value: str
    of: State | Flow | Traffic


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
        """The programs in the order of the work, each with those whose flows it reads in the same
        run, which are before it.

        Raises:
          ClusterError: when flows go round in a circle.
        """
        before = {
            p.name: [f.source for f in self.incoming[p.name] if f.source and not f.lag]
            for p in self.programs
        }
        listed = {p.name: k for k, p in enumerate(self.programs)}
        return {name: before[name] for name in topological(before, listed.__getitem__)}

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

    @cached_property
    def before(self) -> Mapping[Task, Set[Task]]:
        """The runs that end before each begins, whatever the chips do: that of its program before
        it, those whose flows it reads, and those that have its states before it, where one of the
        two writes."""
        found: dict[Task, set[Task]] = {}
        for program in self.programs:
            for run in range(program.runs):
                task = Task(program.name, run)
                found[task] = {Task(program.name, run - 1)} if run else set()
                found[task] |= {Task(f.source, n) for f, n in self.read_by(task) if f.source}
        for state in self.states:
            writer: list[Task] = []
            readers: list[Task] = []
            for task in self.turns(state.name):
                found[task].update(writer)
                if state.name in self.program(task.program).writes:
                    found[task].update(readers)
                    writer, readers = [task], []
                else:
                    readers.append(task)
        return found

    def turns(self, state: str) -> Sequence[Task]:
        """The runs that read or write a state, in the order in which they would one by one."""
        programs = [
            p for p in map(self.program, self.sorted()) if state in p.reads or state in p.writes
        ]
        rounds = min((p.runs for p in programs), default=0)
        turns = [
            (run * rounds // p.runs, k, run)
            for k, p in enumerate(programs)
            for run in range(p.runs)
        ]
        return [Task(programs[k].name, run) for _, k, run in sorted(turns)]

    @cached_property
    def _states(self) -> Mapping[str, State]:
        return {state.name: state for state in self.states}

    @cached_property
    def _held(self) -> Mapping[str, Mapping[Task | None, tuple[str, str]]]:
        """What each state holds when a run begins and when it has ended, and, of None, in a
        replay's beginning and end."""
        found: dict[str, dict[Task | None, tuple[str, str]]] = {}
        for name in self._states:
            of = found[name] = {}
            value = name
            for task in self.turns(name):
                before = value
                if name in self.program(task.program).writes:
                    value = f"{name}#{task}"
                of[task] = before, value
            of[None] = name, value
        return found

    def left(self, state: str) -> str:
        """The value of a state in the end."""
        return self._held[state][None][1]

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
            for name in program.reads:
                yield Operand(self._held[name][task][0], self._states[name])
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
            for name in program.writes:
                yield Operand(self._held[name][task][1], self._states[name])
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
          ClusterFileError: when it, or the cluster, is none that a file could say.
          ClusterError: when it does not fit together, or not to the cluster.
        """
        cluster.check()
        Work.from_dict(self.to_dict())
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
                    if (value := getattr(flow, key)) is not None or key != "in_flight"
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
    return f"begun {task}/{traffic.name}"


def topological[T: Hashable](
    before: Mapping[T, Iterable[T]], key: Callable[[T], Any]
) -> Iterator[T]:
    """Each after those before it; of those that could be next, the one with the least key.

    Raises:
      ClusterError: when some wait for each other.
    """
    sorter = TopologicalSorter(before)
    try:
        sorter.prepare()
    except CycleError as error:
        raise ClusterError(
            f"programs wait for each other: {' <- '.join(map(str, error.args[1]))}",
            "A flow to a later run has a lag; those that share a state take turns as listed.",
        ) from error
    ready: list[tuple[Any, T]] = []
    while sorter.is_active():
        for of in sorter.get_ready():
            heapq.heappush(ready, (key(of), of))
        _, of = heapq.heappop(ready)
        yield of
        sorter.done(of)


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
    if not work.programs:
        _refuse("programs", "at least one", "none")
    _check_names("programs", [p.name for p in work.programs])
    _check_names("flows and states", [of.name for of in (*work.flows, *work.states)])
    states = {state.name: state.node for state in work.states}
    for state in work.states:
        _divided(state.name, state.bytes, cluster.node(state.node).count)
    for p in work.programs:
        where = f"program {p.name}"
        if cluster.node(p.node).machine is None:
            _refuse(where, "a node of chips", repr(p.node))
        for names in (p.reads, p.writes):
            _check_names(f"{where}, states", names)
            for name in names:
                if states.get(name) != p.node:
                    _refuse(where, f"a state of {p.node}", repr(name))
        _check_traffic(p, cluster)
    for flow in work.flows:
        _check_flow(work, cluster, flow)
    # Is there any order?
    for _ in topological(work.before, lambda _: 0):
        pass


def _refuse(where: str, expected: str, found: object) -> NoReturn:
    raise ClusterError(f"{where}: expected {expected}, found {found}", "Mend the work.")


def _check_names(where: str, names: Sequence[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            _refuse(where, "names that differ", f"{name!r} twice")


def _check_traffic(p: Program, cluster: Cluster) -> None:
    node = cluster.node(p.node)
    stores = {t.of: t for t in p.traffic if t.leaves}
    hosted: dict[str, tuple[Place, int]] = {}
    for t in p.traffic:
        where = f"program {p.name}, {t.name}"
        first = int(t.leaves or t.is_collective)
        if not first <= t.start <= t.done < t.end or t.done > len(p.segments):
            _refuse(where, "a start, a done and an end", t)
        if COLLECTIVE in (t.source, t.destination):
            if t.source != t.destination:
                _refuse(where, f"{COLLECTIVE!r} at both ends", t)
            continue
        ends = [cluster.host_place(node, tier) for tier in (t.source, t.destination)]
        if [end == node.memory for end in ends] != [t.leaves, not t.leaves]:
            _refuse(where, f"one end in {node.memory}, and one in its host", t)
        if hosted.setdefault(t.of, (ends[t.leaves], t.bytes)) != (ends[t.leaves], t.bytes):
            _refuse(where, f"{t.of!r} in one place, with as many bytes each time", t)
        store = stores.get(t.of, t)
        if store is not t and (t.leaves or t.start <= store.done):
            _refuse(where, f"a fetch that starts behind the segment that waits for {store.name}", t)
    # Those by which what it moves is known.
    _check_names(f"program {p.name}, traffic", [t.name for t in p.traffic])
    collectives = [t.name for t in p.traffic if t.is_collective]
    _check_names(f"program {p.name}, traffic", [*collectives, *hosted])


def _check_flow(work: Work, cluster: Cluster, flow: Flow) -> None:
    known = [p.name for p in work.programs]
    where = f"flow {flow.name}"
    ends = [name for name in (flow.source, flow.destination) if name]
    for name in ends:
        if name not in known:
            raise ClusterError(f"{where}: no program {name!r}", f"There are {', '.join(known)}.")
        _divided(flow.name, flow.bytes, cluster.node(work.program(name).node).count)
    at = len(work.program(flow.source).segments) if flow.source else 1
    needed = len(work.program(flow.destination).segments) if flow.destination else 1
    if not ends or not -at <= flow.at < at or flow.needed >= needed:
        _refuse(where, "bytes between segments that there are", flow)


def _divided(name: str, size: int, count: int) -> None:
    if size % count:
        raise ClusterError(
            f"{name} has {size} bytes, which {count} chips cannot share evenly", "Pad it."
        )


class _Table(FileTable):
    refusal = ClusterFileError

    def optional(self, key: str, default: int, *, zero: bool = False) -> int:
        return self.whole(key, zero=zero) if key in self.unread else default

    def runs(self) -> int:
        runs = self.optional("runs", 1)
        if runs > _MOST_RUNS:
            raise self.error("runs", f"at most {_MOST_RUNS}", str(runs))
        return runs

    def index(self, key: str, default: int) -> int:
        """One that may count from the end."""
        value = self.unread.pop(key, default)
        if not isinstance(value, int) or not is_number(value):
            raise self.error(key, "a whole number", repr(value))
        return value

    def printed(self, key: str) -> str:
        """A name as compilers give them."""
        value = self.text(key)
        if not value.isprintable() or not value:
            raise self.error(key, "letters that are printed", repr(value))
        return value

    def seconds(self, key: str) -> tuple[float, ...]:
        expected = f"a list of seconds, each from 0 to {LONGEST_S:g}"
        values = self.take(key, expected)
        found: list[float] = []
        for value in cast("list[object]", values) if isinstance(values, list) else ():
            # Written so that a NaN, which compares false with everything, is refused.
            if isinstance(value, int | float) and is_number(value) and 0 <= value <= LONGEST_S:
                found.append(float(value))
            else:
                raise self.error(key, expected, repr(value))
        if not found:
            raise self.error(key, expected, repr(values))
        return tuple(found)

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
    name = table.word("name")
    table.key = f"programs.{name}"
    program = Program(
        name,
        table.text("node"),
        table.seconds("segments"),
        table.runs(),
        table.optional("memory_bytes", 0, zero=True),
        tuple(_traffic(of) for of in traffic),
        table.names("reads"),
        table.names("writes"),
    )
    table.close()
    return program


def _traffic(table: _Table) -> Traffic:
    texts = [table.printed(key) for key in ("name", "source", "destination", "of")]
    size = table.whole("bytes")
    start, done, end = (table.whole(key, zero=True) for key in ("start", "done", "end"))
    seconds = table.number("seconds", zero=True) if "seconds" in table.unread else 0.0
    if seconds > LONGEST_S:
        raise table.error("seconds", f"at most {LONGEST_S:g}", f"{seconds:g}")
    table.close()
    return Traffic(texts[0], texts[1], texts[2], texts[3], size, start, done, end, seconds)


def _flow(table: _Table) -> Flow:
    name = table.word("name")
    table.key = f"flows.{name}"
    flow = Flow(
        name,
        table.text("source"),
        table.text("destination"),
        table.whole("bytes"),
        table.index("at", -1),
        table.optional("needed", 0, zero=True),
        table.optional("stride", 1),
        table.optional("lag", 0, zero=True),
        table.whole("in_flight") if "in_flight" in table.unread else None,
    )
    table.close()
    return flow


def _state(table: _Table) -> State:
    name = table.word("name")
    table.key = f"states.{name}"
    state = State(name, table.text("node"), table.whole("bytes"))
    table.close()
    return state
