"""What a compiled module takes of each memory, as XLA itself counts it.

    arguments │ outputs │ aliases (donated: counted in both)        the caller's
    temporaries = heap after packing + tables of pointers           XLA's own
    ├ lower bound: the largest sum of live temporaries              no packing can do better

The names are those of ``Compiled.memory_analysis()``, and the numbers are meant to be its
numbers: `temp_bytes` repeats XLA's buffer assignment (see `allocations`, `sharing`,
`assignment`) with each backend's own alignment and packing order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from hlo_passes.analysis.dataflow import Dataflow, Value, analyze_dataflow
from hlo_passes.analysis.live_ranges import LiveRanges, compute_live_ranges
from hlo_passes.analysis.sharing import ELEMENTWISE, Target
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Instruction, Module, Shape
from hlo_passes.memoize import memoized
from hlo_passes.memory.allocations import HeapRange, find_allocations
from hlo_passes.memory.assignment import Strategy, assign_offsets, peak_load


class Backend(NamedTuple):
    """How a backend lays out its temporaries.

    Attributes:
      alignment: bytes, of the heap's offsets and of each table.
      strategies: the orders of packing of which it keeps the best.
      pointer_bytes: of one entry of a tuple's table.
      table_granularity: bytes that a table's size is rounded up to.
      granularity: bytes that `temp_size_in_bytes` is a multiple of.
      drops_tables: a program whose temporaries are all tables, and scalars that no memory
        holds (`_is_in_register`), reports none.
    """

    alignment: int
    strategies: tuple[Strategy, ...]
    pointer_bytes: int
    table_granularity: int
    granularity: int
    drops_tables: bool


# xla/service/gpu/gpu_constants.h and xla/service/cpu/cpu_compiler.cc for the alignments; the
# TPU's numbers were read off buffer assignments that libtpu (of jax 0.12) dumped.
BACKENDS: dict[Target, Backend] = {
    "cpu": Backend(64, ("spatial", "temporal"), 8, 1, 1, False),
    "gpu": Backend(256, ("spatial", "temporal"), 8, 1, 1, False),
    "tpu": Backend(16384, ("start",), 4, 512, 16384, True),
}

# The module does not say which chip it is for, and an array is padded alike on all of them.
_TPUS_OF_SMALL_TABLES = frozenset({"tpu-v5p", "tpu-v6e", "tpu7x"})

_SCALAR_CORE = ELEMENTWISE | {"conditional", "parameter", "while"}


def _backend(target: Target, machine: Machine | None) -> Backend:
    if machine is not None and machine.name in _TPUS_OF_SMALL_TABLES:
        return BACKENDS[target]._replace(table_granularity=32)
    return BACKENDS[target]


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes in one memory space.

    Attributes:
      argument_bytes, output_bytes, alias_bytes, temp_bytes: ``argument_size_in_bytes`` and
        so on of ``memory_analysis()``.
      heap_bytes: the packed temporaries alone, without tables and rounding.
      lower_bound_bytes: the largest sum of live temporaries; ``<= heap_bytes``.
      peak: the instruction at which it is first reached; None without temporaries.
      live: the values that are live there, in the order of the heap; those of a group share
        their bytes (`latest_values`).
      heap, offsets: the packed temporaries, and where each lies.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    heap_bytes: int
    lower_bound_bytes: int
    peak: Instruction | None
    live: tuple[HeapRange, ...] = field(repr=False)
    heap: tuple[HeapRange, ...] = field(repr=False)
    offsets: tuple[int, ...] = field(repr=False)

    @property
    def total_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes

    @property
    def besides_bytes(self) -> int:
        """What is needed besides the arguments."""
        return self.total_bytes - self.argument_bytes

    @property
    def table_bytes(self) -> int:
        """Of the tables of pointers, and of rounding; 0 where no temporaries are reported."""
        return max(0, self.temp_bytes - self.heap_bytes)


def memory_usage(
    module: Module, target: Target, memory_space: int = 0, machine: Machine | None = None
) -> MemoryUsage:
    """Predicts what ``memory_analysis()`` of the compiled module says.

    Args:
      module: the final module of a compilation, ``read_module(compiled)``. Of a module that
        XLA will still change (a hook's) the number is an estimate.
      memory_space: XLA's number; 0 is the device's main memory, 5 the host's.
      machine: what it was compiled for. Without it, a tuple that a TPU from v5p on takes or
        gives comes out up to 480 bytes too large.

    Raises:
      UnscheduledModuleError: when the module has no schedule.
    """
    ranges = compute_live_ranges(analyze_dataflow(module))
    return measure_memory(ranges, target, memory_space, machine)


@memoized
def measure_memory(
    ranges: LiveRanges, target: Target, memory_space: int = 0, machine: Machine | None = None
) -> MemoryUsage:
    """Does what `memory_usage` does, from live ranges that exist already."""
    dataflow = ranges.dataflow
    backend = _backend(target, machine)
    heap = find_allocations(ranges, target, memory_space).heap
    sizes, events, groups = (
        [h.size for h in heap],
        [h.events for h in heap],
        [h.group for h in heap],
    )
    packing = assign_offsets(
        sizes, events, backend.alignment, groups=groups, strategies=backend.strategies
    )
    bound, moment = peak_load(sizes, events, groups=groups)
    live = [h for h in heap if h.events.start <= moment < h.events.end]
    peak = max(live, key=lambda h: h.events.start).value.instruction if live else None
    module = dataflow.module
    is_dropped = backend.drops_tables and all(_is_in_register(h.value) for h in heap)
    tables = _tables(dataflow, backend, memory_space)
    return MemoryUsage(
        argument_bytes=_argument_bytes(module, backend, memory_space),
        output_bytes=_output_bytes(module, backend, memory_space),
        alias_bytes=_alias_bytes(module, memory_space),
        temp_bytes=0 if is_dropped else _temp_bytes(packing.total, tables, backend),
        heap_bytes=packing.total,
        lower_bound_bytes=bound,
        peak=peak,
        live=tuple(live),
        heap=tuple(heap),
        offsets=packing.offsets,
    )


def _argument_bytes(module: Module, backend: Backend, memory_space: int) -> int:
    return sum(_bytes(p.shape, backend, memory_space) for p in module.entry.parameters)


def _output_bytes(module: Module, backend: Backend, memory_space: int) -> int:
    return _bytes(module.entry.root.shape, backend, memory_space)


def _bytes(shape: Shape, backend: Backend, memory_space: int) -> int:
    """Of what the caller gives or gets: its arrays, and a tuple's table."""
    arrays = sum(s.byte_size for _, s in shape.leaves() if s.memory_space == memory_space)
    if not shape.is_tuple or memory_space != 0:
        return arrays
    return arrays + _table_bytes(shape, backend)


def _alias_bytes(module: Module, memory_space: int) -> int:
    shapes = (module.entry.root.shape.at(a.output_index) for a in module.input_output_aliases)
    return sum(s.byte_size for s in shapes if s.memory_space == memory_space)


def _tables(dataflow: Dataflow, backend: Backend, memory_space: int) -> list[int]:
    """Bytes of each table of pointers that is neither the entry's result nor its argument."""
    given = {p.id for p in dataflow.module.entry.parameters}
    return [
        _table_bytes(b.values[0].shape, backend)
        for b in dataflow.buffers
        if b.kind == "tuple" and not b.live_out and b.memory_space == memory_space
        if b.instruction.id not in given
    ]


def _table_bytes(shape: Shape, backend: Backend) -> int:
    return _round_up(len(shape.tuple_shapes) * backend.pointer_bytes, backend.table_granularity)


def _is_in_register(value: Value) -> bool:
    """Whether the TPU's scalar core computes `value`: a loop's counter, a condition, an index.

    It has a place on the heap, but where nothing else has, XLA reports no temporaries at all
    (seen with libtpu of jax 0.12 in every such program of `experiments.memory_accuracy`).
    """
    return not value.shape.dimensions and value.instruction.opcode in _SCALAR_CORE


def _temp_bytes(heap: int, tables: Iterable[int], backend: Backend) -> int:
    """Bytes of the heap and the tables, set end to end.

    XLA aligns each to where the one before ends. Which comes last, and so ends unaligned,
    depends on a partition that is not stable (BufferAssignment::CombineTempAllocations): we
    take a table, and may be wrong by less than the alignment.
    """
    end = 0
    for size in (heap, *tables):
        end = _round_up(end, backend.alignment) + size
    return _round_up(end, backend.granularity)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def latest_values(live: Iterable[HeapRange]) -> list[HeapRange]:
    """One for each block of bytes: a buffer that is handed on holds them once, and its latest
    value speaks for it."""
    return list({h.group: h for h in sorted(live, key=lambda h: h.events.start)}.values())
