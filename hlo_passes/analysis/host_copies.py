"""Which copies of the entry the planner may move: weights that come from host memory.

    p = parameter, S(5) ─► copy-start ─► copy-done, S(0) ─► readers

A donated parameter's copy is among them only where a store takes its place (`stores`), which
the planner has wait for it: once its output is written, another copy made from the same bytes
would not be the same. Nor are several copies of one parameter of which one is worked on in place:
no copy can stand for the others.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.marks import EVICTION_ATTRIBUTE
from hlo_passes.analysis.stores import steady_parameters
from hlo_passes.ir import DEVICE_MEMORY_SPACE, HOST_MEMORY_SPACE, Instruction, Module


class HostCopy(NamedTuple):
    """A pair of the entry that brings `parameter` to the device."""

    parameter: Instruction
    start: Instruction
    done: Instruction


def host_copies(module: Module) -> tuple[HostCopy, ...]:
    """Returns the entry's copies of steady host parameters, in the order of their starts.

    XLA may copy one parameter several times. Parameters that are read in any other way (by
    a fusion that reads host memory, through an asynchronous slice) have none.
    """
    steady = {p.id for p in steady_parameters(module)}
    found: dict[int, HostCopy] = {}
    for done in module.entry.instructions:
        if done.opcode != "copy-done" or done.shape.memory_space != DEVICE_MEMORY_SPACE:
            continue
        start = module.instructions[done.operand_ids[0]]
        source = module.instructions[start.operand_ids[0]]
        if source.id in steady and source.shape.memory_space == HOST_MEMORY_SPACE:
            found[start.id] = HostCopy(source, start, done)
    copies = Counter(copy.parameter.id for copy in found.values())
    written = {
        copy.parameter.id
        for copy in found.values()
        if copies[copy.parameter.id] > 1 and _is_written(module, copy.done)
    }
    starts = (found[i.id] for i in module.entry.instructions if i.id in found)
    return tuple(copy for copy in starts if copy.parameter.id not in written)


def _is_written(module: Module, copy: Instruction) -> bool:
    """Whether something works on a copy in place."""
    values = analyze_dataflow(module).buffer_at(copy).values
    return sum(not value.is_phi for value in values) > 1


class EvictedCopy(NamedTuple):
    """A pair of the entry that takes the result of `source` to the host, or brings it back."""

    source: Instruction
    start: Instruction
    done: Instruction
    evicts: bool


def evicted_copies(module: Module) -> tuple[EvictedCopy, ...]:
    """Returns the copies that `edits.apply` made, in the order of their starts."""
    starts = [
        i
        for i in module.entry.instructions
        if i.opcode == "copy-start" and EVICTION_ATTRIBUTE in i.proto.frontend_attributes.map
    ]
    if not starts:
        return ()
    named = {i.name: i for i in module.entry.instructions}
    awaited = {i.operand_ids[0]: i for i in module.entry.instructions if i.opcode == "copy-done"}
    return tuple(
        EvictedCopy(
            named[i.proto.frontend_attributes.map[EVICTION_ATTRIBUTE]],
            i,
            awaited[i.id],
            awaited[i.id].shape.memory_space == HOST_MEMORY_SPACE,
        )
        for i in starts
    )
