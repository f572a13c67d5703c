"""Writes the schedules of loop bodies into the module.

    before   state  start  c0  c1  done  copy  root(copy)
    after    state  c0  start{0.1}  c1  done{0.1}  root(done)       {loop.transfer}: an attribute

Nothing is added: the copies that a plan drops go, the scalar work around the transfers moves
(see `loops.order`), and starts and dones move to their ticks. The compilers follow the order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.dependences import dependences
from hlo_passes.analysis.marks import LOOP_TRANSFER_ATTRIBUTE
from hlo_passes.errors import LoopMismatchError
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module
from hlo_passes.loops.host_transfers import host_transfers
from hlo_passes.loops.order import UnorderableError, clear_paths, drop_copies
from hlo_passes.loops.schedule import place_transfers
from hlo_passes.plan import LoopSchedule


def rewrite_loops(module: Module, loops: Sequence[LoopSchedule], machine: Machine) -> Module:
    """Returns `module` with the transfers of `loops` at their ticks.

    Args:
      module: the scheduled module that `loops.schedule.schedule_loops` saw.

    Returns:
      `module` itself without loops.

    Raises:
      LoopMismatchError: when a schedule names what the module does not have.
    """
    if not loops:
        return module
    computations = {c.name: c for c in module.computations.values()}
    for loop in loops:
        if loop.computation not in computations:
            raise LoopMismatchError(loop.computation, f"module {module.name!r} has no such one")
    named = {(loop.computation, name) for loop in loops for name in loop.dropped_copies}
    copies = [
        i
        for c in computations.values()
        for i in c.instructions
        if (c.name, i.name) in named and i.opcode == "copy"
    ]
    if len(copies) != len(named):
        raise LoopMismatchError(
            ", ".join(sorted({c for c, _ in named})),
            f"not all of {', '.join(sorted(n for _, n in named))} are copies of it",
        )
    cleared = drop_copies(module, copies)
    dataflow = analyze_dataflow(cleared)
    found = host_transfers(cleared, machine)
    sequences: dict[int, list[int]] = {}
    for loop in loops:
        if not loop.is_resequenced:
            continue
        computation = cleared.computations[computations[loop.computation].id]
        transfers = found.get(computation.id, ())
        if {(t.start.name, t.done.name) for t in transfers} != {
            (t.start_name, t.done_name) for t in loop.transfers
        }:
            raise LoopMismatchError(loop.computation, "its transfers are others")
        try:
            order = clear_paths(cleared, dataflow, computation, transfers)
        except UnorderableError as error:
            raise LoopMismatchError(loop.computation, "its copies cannot be dropped") from error
        halves = {h.id for t in transfers for h in (t.start, t.done)}
        compute = [i for i in order if i not in halves]
        if len(compute) != loop.ticks:
            raise LoopMismatchError(
                loop.computation, f"it has {len(compute)} ticks, expected {loop.ticks}"
            )
        before = dependences(dataflow, computation)
        sequences[computation.id] = place_transfers(computation, compute, loop.transfers, before)
    tags = {
        (computations[loop.computation].id, name): f"{n}.{t.id}"
        for n, loop in enumerate(loops)
        for t in loop.transfers
        for name in (t.start_name, t.done_name)
    }
    return _write(cleared, sequences, tags)


def _write(
    module: Module, sequences: Mapping[int, Sequence[int]], tags: Mapping[tuple[int, str], str]
) -> Module:
    proto = module.to_proto()
    for computation in proto.computations:
        for i in computation.instructions:
            if (tag := tags.get((computation.id, i.name))) is not None:
                i.frontend_attributes.map[LOOP_TRANSFER_ATTRIBUTE] = tag
        if computation.id not in sequences:
            continue
        sequence = sequences[computation.id]
        by_id = {i.id: i for i in computation.instructions}
        ordered = [type(by_id[n])() for n in sequence]
        for copy, n in zip(ordered, sequence, strict=True):
            copy.CopyFrom(by_id[n])
        del computation.instructions[:]
        computation.instructions.extend(ordered)
        proto.schedule.sequences[computation.id].instruction_ids[:] = sequence
    return Module(proto).with_learned(module.learned)
