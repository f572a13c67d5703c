"""XLA's own buffer assignment, as its dumps and executables hold it.

    logical buffers   what an instruction defines, one for each array and table of pointers
    allocations       blocks of bytes, and which buffers lie where in them
    heap traces       alloc a, alloc b, free a, share c with b, ... in the order of the schedule

What is live at the peak is read off the trace: it is what XLA packed, whatever `allocations`
makes of the same module. The messages are those of xla/service/hlo.proto; the trace is written
by HeapSimulator (xla/service/heap_simulator/heap_simulator.cc).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hlo_passes.errors import MalformedModuleError
from hlo_passes.ir import Instruction, Module, ShapeIndex
from hlo_passes.proto import hlo_pb2

AllocationKind = Literal["argument", "output", "constant", "temporary", "thread-local"]

# HeapSimulatorTrace.Event.Kind.
_FREE, _SHARE_WITH = 1, 2


@dataclass(frozen=True, slots=True)
class LogicalBuffer:
    """What an instruction defines.

    Attributes:
      instruction, index: where.
      size: bytes.
      memory_space: XLA's number ("color").
    """

    instruction: Instruction
    index: ShapeIndex
    size: int
    memory_space: int

    def __str__(self) -> str:
        """As `dataflow.Value` has it: ``fusion.3{1}``."""
        index = "{" + ",".join(map(str, self.index)) + "}" if self.index else ""
        return f"{self.instruction.name}{index}"


@dataclass(frozen=True, slots=True)
class Allocation:
    """A block of bytes.

    Attributes:
      number: XLA's.
      size: bytes.
      memory_space: XLA's number.
      kind: an argument that is donated, and written over by an output, is an ``"argument"``.
      buffers: those that lie in it, each with its offset in bytes; several may have the same
        bytes, one after the other.
    """

    number: int
    size: int
    memory_space: int
    kind: AllocationKind
    buffers: tuple[tuple[LogicalBuffer, int], ...]


@dataclass(frozen=True, slots=True)
class HeapPeak:
    """The moment at which a heap holds most.

    Attributes:
      size: bytes that are live, packed without any loss.
      instruction: at which that is first so.
      live: the buffers, largest first; of those that share bytes, all that are still needed.
    """

    size: int
    instruction: Instruction
    live: tuple[LogicalBuffer, ...]


@dataclass(frozen=True, eq=False)
class BufferAssignment:
    """Where XLA put the arrays of a module.

    Attributes:
      allocations: in XLA's order.
      peaks: of each heap that was packed, by the number of its allocation.
    """

    allocations: tuple[Allocation, ...]
    peaks: Mapping[int, HeapPeak]

    def size(self, kind: AllocationKind, memory_space: int = 0) -> int:
        """Bytes of the allocations of one kind."""
        return sum(
            a.size for a in self.allocations if a.kind == kind and a.memory_space == memory_space
        )

    def heap(self, memory_space: int = 0) -> tuple[Allocation, HeapPeak] | None:
        """The largest heap of a memory space, and its peak; None where there is none."""
        heaps = (
            a for a in self.allocations if a.number in self.peaks and a.memory_space == memory_space
        )
        heap = max(heaps, key=lambda a: a.size, default=None)
        return None if heap is None else (heap, self.peaks[heap.number])


def buffer_assignment(module: Module) -> BufferAssignment | None:
    """Reads XLA's buffer assignment of a module; None where it came without one.

    Raises:
      MalformedModuleError: when it names buffers or instructions that are not there.

    Complexity: linear in the events.
    """
    proto = module.assigned
    if proto is None:
        return None
    buffers: dict[int, LogicalBuffer] = {}
    for b in proto.logical_buffers:
        at = b.defined_at
        instruction = module.instructions.get(at.instruction_id)
        if instruction is None:
            raise _mismatch(module, f"an instruction {at.instruction_id}, the module has none")
        buffers[b.id] = LogicalBuffer(instruction, tuple(at.shape_index), b.size, b.color)
    try:
        allocations = tuple(
            Allocation(
                a.index,
                a.size,
                a.color,
                _kind(a),
                tuple((buffers[s.logical_buffer_id], s.offset) for s in a.assigned),
            )
            for a in proto.buffer_allocations
        )
        # XLA may number allocations anew after it wrote which one a trace is of (jaxlib 0.11.2,
        # libtpu 0.0.48 to 0.0.50): the buffers say so too.
        allocated = {
            s.logical_buffer_id: a.index for a in proto.buffer_allocations for s in a.assigned
        }
        peaks = {
            allocated[trace.events[0].buffer_id]: _peak(trace.events, buffers)
            for trace in proto.heap_simulator_traces
            if trace.events
        }
    except KeyError as error:
        raise _mismatch(module, f"a buffer {error.args[0]}, which is defined nowhere") from None
    return BufferAssignment(allocations, peaks)


def _kind(a: hlo_pb2.BufferAllocationProto) -> AllocationKind:
    if a.is_entry_computation_parameter:
        return "argument"
    if a.is_thread_local:
        return "thread-local"
    if a.is_constant:
        return "constant"
    return "output" if a.maybe_live_out else "temporary"


def _peak(
    events: Sequence[hlo_pb2.HeapSimulatorTrace.Event], buffers: Mapping[int, LogicalBuffer]
) -> HeapPeak:
    loads = list(_replay(events, buffers, set()))
    most = max(loads)
    at = loads.index(most)
    live: set[int] = set()
    deque(_replay(events[: at + 1], buffers, live), maxlen=0)
    found = sorted((buffers[b] for b in live), key=lambda b: (-b.size, b.instruction.id, b.index))
    return HeapPeak(most, buffers[events[at].buffer_id].instruction, tuple(found))


def _replay(
    events: Iterable[hlo_pb2.HeapSimulatorTrace.Event],
    buffers: Mapping[int, LogicalBuffer],
    live: set[int],
) -> Iterator[int]:
    """Yields the bytes that are held after each event, and keeps `live` up to date.

    Buffers that share bytes hold them until the last of them is freed; who comes later may find
    the one that they were allocated for freed already.
    """
    load, holders = 0, Counter[int]()
    block: dict[int, int] = {}  # Of each buffer, the one that its bytes were allocated for.
    for event in events:
        n = event.buffer_id
        if event.kind == _FREE:
            live.remove(n)
            holders[block[n]] -= 1
            load -= 0 if holders[block[n]] else buffers[block[n]].size
        else:
            live.add(n)
            block[n] = block[event.share_with_canonical_id] if event.kind == _SHARE_WITH else n
            load += 0 if holders[block[n]] else buffers[block[n]].size
            holders[block[n]] += 1
        yield load


def _mismatch(module: Module, what: str) -> MalformedModuleError:
    return MalformedModuleError(
        module.name,
        f"its buffer assignment has {what}",
        "Expected both of one HloProto, or of one executable.",
    )
