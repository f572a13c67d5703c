"""The transfers of a program that no argument's plan covers: slices fetched, slices stored.

    body    i   start = async-start(dynamic-slice(stack S(5), i))        a fetch
                ...
                done  = async-done(start) ─► a layer's weights
            x   start = async-start(dynamic-update-slice(buffer S(5), x, i))      a store
                done  = async-done(start)

Every asynchronous pair that carries bytes between host and device memory is one, in the
entry, in the bodies of loops and in what is called, but for the copies of whole arguments, of
the entry (`host_copies`) and of bodies (`bodies`). XLA:TPU writes ``dynamic-slice-start`` and the
like, XLA:GPU a fusion of one such instruction as ``fusion-start``; both are an ``async-start``
that wraps a computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from hlo_passes.analysis.async_chains import dones_of
from hlo_passes.analysis.host_copies import host_copies
from hlo_passes.analysis.moves import moves
from hlo_passes.analysis.stores import stored_copies
from hlo_passes.analysis.traffic import traffic
from hlo_passes.analysis.trip_count import trip_count
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import HOST_MEMORY_SPACE, Instruction, Module
from hlo_passes.loops.bodies import copies_of_bodies
from hlo_passes.memoize import memoized


class HostTransfer(NamedTuple):
    """One asynchronous pair between host and device memory.

    Attributes:
      size: bytes that one execution moves.
      source, destination: tier names.
      kind: ``"prefetch"`` brings data to the device, ``"evict"`` takes it away.
    """

    start: Instruction
    done: Instruction
    size: int
    source: str
    destination: str
    kind: Literal["prefetch", "evict"]


@memoized
def host_transfers(module: Module, machine: Machine) -> Mapping[int, tuple[HostTransfer, ...]]:
    """Returns the transfers of each computation that has any, by its id, in schedule order.

    A start without a done of its own in the same computation is left out. O(instructions).
    """
    host = next((t.name for t in machine.tiers if t.memory_space == HOST_MEMORY_SPACE), None)
    managed = {copy.start.id for copy in host_copies(module)} | copies_of_bodies(module)
    managed |= {copy.start.id for copy in stored_copies(module) if copy.start is not None}
    moved = moves(module, machine, traffic(module))
    found: dict[int, tuple[HostTransfer, ...]] = {}
    for computation in module.computations.values():
        if computation.is_fusion:
            continue
        dones = dones_of(module, computation)
        transfers: list[HostTransfer] = []
        for start in computation.instructions:
            move, done = moved.get(start.id), dones.get(start.id)
            if move is None or done is None or not move.is_async or start.id in managed:
                continue
            if start.opcode == "custom-call" or host not in (move.source, move.destination):
                continue
            kind = "prefetch" if move.source == host else "evict"
            transfers.append(
                HostTransfer(start, done, move.size, move.source, move.destination, kind)
            )
        if transfers:
            found[computation.id] = tuple(transfers)
    return found


class Nest(NamedTuple):
    """Where a computation runs.

    Attributes:
      caller: the instruction that runs it; None for the entry.
      trip_count: of `caller`, if it is a loop and its count is known.
      depth: how many loops and calls it lies in; 0 for the entry.
      executions: how often it runs in a step; a loop whose count is unknown counts once.
    """

    caller: Instruction | None
    trip_count: int | None
    depth: int
    executions: int


def nests(module: Module) -> Mapping[int, Nest]:
    """Returns the nest of every computation that runs on its own, by its id."""
    found = {module.entry.id: Nest(None, None, 0, 1)}
    pending = [module.entry]
    while pending:
        computation = pending.pop()
        outer = found[computation.id]
        for i in computation.instructions:
            if i.opcode not in ("while", "call", "conditional"):
                continue
            count = trip_count(module, i) if i.opcode == "while" else None
            repeated = outer.executions * (1 if count is None else count)
            for called in i.called_computation_ids:
                if called not in found:
                    found[called] = Nest(i, count, outer.depth + 1, repeated)
                    pending.append(module.computations[called])
    return found
