"""When each value is live: the schedule flattened into one time line.

    entry      a   while                       b
    condition      ├ c0 c1
    body           │       ├ d0 d1 d2
    time       0   1  2    3  4  5    6        7
    value a    [───────)                            last read: the loop's start
    carried               [────────────────────)    what the body gives back, until b

A computation that an instruction runs stands before it on the line: first the condition of
a while, then its body; the branches of a conditional one after the other; what an asynchronous
operation wraps before the link at which it has its operands (`call_graph`). Ranges are
half-open: a value defined at t whose last reader is at u has ``LiveRange(t, u + 1)``, so
that an operand and the result of its last reader overlap in one tick unless they share
bytes (see `sharing`).

The rules are those of xla/hlo/utils/hlo_live_range.cc, in its module-scoped form. A range
there is closed; add one to its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hlo_passes.analysis.async_chains import ASYNC_LINKS, async_chains
from hlo_passes.analysis.call_graph import call_graph
from hlo_passes.analysis.dataflow import Buffer, Dataflow, Value
from hlo_passes.errors import UnscheduledModuleError
from hlo_passes.ir import Computation, Instruction, Module
from hlo_passes.memoize import memoized
from hlo_passes.plan import LiveRange, LogicalTime


@dataclass(frozen=True, eq=False)
class LiveRanges:
    """The time line of a module and the life of its values on it.

    Attributes:
      sequence: all instructions that run on their own, in flattened order.
      time_of: instruction id to its index in `sequence`.
      end: the time after the last instruction.
      of_value: indexed by `Value.id`. Values of one buffer that overlap are cut so that
        they follow on each other.
    """

    dataflow: Dataflow
    sequence: tuple[Instruction, ...]
    time_of: Mapping[int, LogicalTime]
    of_value: tuple[LiveRange, ...]

    @property
    def end(self) -> LogicalTime:
        return len(self.sequence)


@memoized
def compute_live_ranges(dataflow: Dataflow) -> LiveRanges:
    """Flattens the schedule and finds the live range of every value.

    Raises:
      UnscheduledModuleError: when the module has no schedule.
    """
    module = dataflow.module
    if not module.is_scheduled:
        raise UnscheduledModuleError(module.name)
    line = _TimeLine(module)
    line.flatten(module.entry)
    ranges = [_life(v, line) for v in dataflow.values]
    for buffer in dataflow.buffers:
        _untangle(buffer, ranges)
    return LiveRanges(dataflow, tuple(line.sequence), line.time_of, tuple(ranges))


def merged(ranges: Iterable[LiveRange]) -> tuple[LiveRange, ...]:
    """Returns the times at which any of some ranges is live, in order; what touches is one."""
    found: list[LiveRange] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1].end:
            found[-1] = LiveRange(found[-1].start, max(found[-1].end, end))
        else:
            found.append(LiveRange(start, end))
    return tuple(found)


class _TimeLine:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.sequence: list[Instruction] = []
        self.time_of: dict[int, LogicalTime] = {}
        self.span: dict[int, LiveRange] = {}
        self.donated = {(a.parameter, a.parameter_index) for a in module.input_output_aliases}
        self.graph = call_graph(module)
        # Of what runs asynchronously: the start, and the done.
        self.asynchronous: dict[int, tuple[Instruction, Instruction]] = {}

    def flatten(self, computation: Computation) -> None:
        start = len(self.sequence)
        for i in computation.instructions:
            for called in self.graph.runs.get(i.id, ()):
                chain = async_chains(self.module).get(i.id)
                if chain is not None:
                    self.asynchronous[called.id] = chain.start, chain.links[-1]
                elif computation.id in self.asynchronous:
                    self.asynchronous[called.id] = self.asynchronous[computation.id]
                self.flatten(called)
            self.time_of[i.id] = len(self.sequence)
            self.sequence.append(i)
        self.span[computation.id] = LiveRange(start, len(self.sequence))

    def is_root(self, i: Instruction) -> bool:
        return self.module.computations[i.computation_id].root is i


def _life(value: Value, line: _TimeLine) -> LiveRange:
    definer = value.instruction
    span = line.span[definer.computation_id]
    time = line.time_of[definer.id]
    if definer.opcode == "parameter":
        # Nothing that stands before the parameter may write over it.
        start = span.start
        in_entry = definer.computation_id == line.module.entry.id
        if in_entry and (definer.parameter_number, value.index) not in line.donated:
            return LiveRange(start, len(line.sequence) + 1)
    else:
        start = time
    last = span.end if line.is_root(definer) else time
    if definer.computation_id in line.asynchronous:
        # What an asynchronous call holds, it holds from its start until it is done; its result
        # from where it has a place.
        first, done = line.asynchronous[definer.computation_id]
        in_flight = [p.instruction for p in value.positions if p.instruction.opcode in ASYNC_LINKS]
        start = min(line.time_of[i.id] for i in in_flight or [first])
        last = max(last, line.time_of[done.id])
    for position in value.positions[1:]:
        i = position.instruction
        last = max(last, line.span[i.computation_id].end if line.is_root(i) else line.time_of[i.id])
    for user in {use.instruction for use in value.uses}:
        runs = line.graph.runs.get(user.id, ())
        if user.opcode == "call" and runs:
            continue  # It reads nothing itself: the callee's parameter is a position above.
        if user.opcode == "while" and runs and runs[-1].id == user.called_computation_ids[0]:
            # The body's parameter takes the operand over: the loop reads it no longer.
            user = runs[-1].parameters[0]
        last = max(last, line.time_of[user.id])
    return LiveRange(start, last + 1)


def _untangle(buffer: Buffer, ranges: list[LiveRange]) -> None:
    """Cuts the lives of a buffer's values so that one ends where the next starts.

    init  [────────)              init  [───)
    body      [────────)     →    body      [────────)
    """
    if len(buffer.values) == 1:
        return
    ordered = sorted((ranges[v.id], v.id) for v in buffer.values)
    for k in range(len(ordered) - 1):
        (one, one_id), (two, two_id) = ordered[k], ordered[k + 1]
        one, two = ranges[one_id], ranges[two_id]
        ranges[two_id] = LiveRange(two.start, max(one.end, two.end))
        ranges[one_id] = LiveRange(one.start, min(one.end, two.start + 1))
