"""What XLA says of its own buffers, and that memplan says the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from hlo_passes.errors import MalformedModuleError
from hlo_passes.ir import Module
from hlo_passes.memory.usage import memory_usage
from hlo_passes.proto import hlo_pb2
from hlo_passes.reading.buffer_assignment import BufferAssignment, buffer_assignment
from hlo_passes.reading.reader import read_module
from memplan.api import jit
from memplan.topologies import topology
from models.corpus import CORPUS
from tests.corpus import platform
from tests.hlo_passes.streamed import entry
from tests.sweeps import slow_but

WORKLOADS = slow_but(["vit-forward"], CORPUS)
TARGETS = [
    "cpu",
    pytest.param("v5e", marks=pytest.mark.tpu),
    pytest.param("h200", marks=pytest.mark.gpu),
]


def dumped(target: str, workload: str, folder: Path) -> Module:
    """What XLA writes of a program of the corpus in its small configuration."""
    program = CORPUS[workload]
    fun, args = program.small()
    machine = None if target == "cpu" else topology(target)
    lowered = jit(fun, machine=machine, donate_argnames=program.donate).lower(*args)
    lowered.unplanned({"xla_dump_to": str(folder), "xla_dump_hlo_as_proto": True})
    (path,) = folder.glob("*after_optimizations.hlo.pb")
    return read_module(path)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_peak_and_what_is_live_there_are_xlas(target: str, workload: str, tmp_path: Path):
    module = dumped(target, workload, tmp_path)
    said = buffer_assignment(module)
    assert said is not None
    usage = memory_usage(module, platform(f"x.{target}"))
    heap = said.heap()
    if heap is None:  # XLA:TPU has all of a small program on the chip.
        assert not usage.lower_bound_bytes
    else:
        allocation, peak = heap
        assert peak.size == usage.lower_bound_bytes <= allocation.size
        assert {str(b) for b in peak.live} == {str(h.value) for h in usage.live}
    assert said.size("argument") == usage.argument_bytes


TRACE = """
  %x = f32[64]{0} parameter(0)
  %a = f32[64]{0} negate(%x)
  %b = f32[64]{0} sine(%a)
  %c = f32[128]{0} concatenate(%a, %b), dimensions={0}
  %d = f32[128]{0} cosine(%c)
  ROOT %r = f32[1]{0} slice(%d), slice={[0:1]}
"""
ALLOC, FREE, SHARE = 0, 1, 2


def assigned_to(module: Module, proto: hlo_pb2.BufferAssignmentProto) -> BufferAssignment:
    found = buffer_assignment(Module(module.to_proto(), assigned=proto))
    assert found is not None
    return found


def assigned(*events: tuple[int, str, str]) -> BufferAssignment:
    """With the heap's trace: kind, buffer, and the one that it shares bytes with."""
    module = entry(TRACE)
    proto = hlo_pb2.BufferAssignmentProto()
    number = {i.name: n for n, i in enumerate(module.entry.instructions)}
    for i in module.entry.instructions:
        buffer = proto.logical_buffers.add(id=number[i.name], size=i.shape.byte_size)
        buffer.defined_at.instruction_id = i.id
    heap = proto.buffer_allocations.add(index=7, size=1024)
    for name in "abcd":
        heap.assigned.add(logical_buffer_id=number[name], offset=256)
    trace = proto.heap_simulator_traces.add(buffer_allocation_index=7)
    for kind, buffer, shares_with in events:
        trace.events.add(
            kind=kind,
            buffer_id=number[buffer],
            share_with_canonical_id=number.get(shares_with, 0),
        )
    return assigned_to(module, proto)


def test_what_shares_bytes_holds_them_once_and_until_the_last():
    # The bytes of %a go on as %b, which comes after %a is gone.
    said = assigned((ALLOC, "a", ""), (FREE, "a", ""), (SHARE, "b", "a"), (ALLOC, "c", ""))
    heap = said.heap()
    assert heap is not None
    allocation, peak = heap
    assert [(str(b), offset) for b, offset in allocation.buffers] == [(n, 256) for n in "abcd"]
    assert peak.size == 256 + 512
    assert [str(b) for b in peak.live] == ["c", "b"]
    assert peak.instruction.name == "c"


def test_the_first_of_equal_peaks_counts():
    heap = assigned((ALLOC, "c", ""), (FREE, "c", ""), (ALLOC, "d", "")).heap()
    assert heap is not None
    assert heap[1].instruction.name == "c"


def test_a_trace_of_other_buffers_is_refused():
    proto = hlo_pb2.BufferAssignmentProto()
    proto.buffer_allocations.add().assigned.add(logical_buffer_id=3)
    with pytest.raises(MalformedModuleError, match="a buffer 3, which is defined nowhere"):
        assigned_to(entry(TRACE), proto)


def test_the_assignment_of_another_module_is_refused():
    proto = hlo_pb2.BufferAssignmentProto()
    proto.logical_buffers.add(id=1).defined_at.instruction_id = 12345
    with pytest.raises(MalformedModuleError, match="instruction 12345"):
        assigned_to(entry(TRACE), proto)


def test_a_module_without_one_has_none():
    assert buffer_assignment(entry(TRACE)) is None


def test_each_kind_of_allocation_counts_for_itself():
    proto = hlo_pb2.BufferAssignmentProto()
    proto.buffer_allocations.add(size=1, is_entry_computation_parameter=True, maybe_live_out=True)
    proto.buffer_allocations.add(size=10, maybe_live_out=True)
    proto.buffer_allocations.add(size=100, is_constant=True)
    proto.buffer_allocations.add(size=1000, is_thread_local=True)
    proto.buffer_allocations.add(size=10000)
    proto.buffer_allocations.add(size=100000, color=1)
    said = assigned_to(entry(TRACE), proto)
    assert said.size("argument") == 1
    assert said.size("output") == 10
    assert said.size("constant") == 100
    assert said.size("thread-local") == 1000
    assert said.size("temporary") == 10000
    assert said.size("temporary", memory_space=1) == 100000
    assert said.heap() is None
