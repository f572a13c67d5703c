"""A computation with its transfers' paths cleared: what leads to a start stands as early as
it can, what only shows a fetched value under another name stands at its reader.

    before   c0  start(i)  i2 = add(i, 1)  c1  done  b = bitcast(done)  c2  c3(b)
    after    i2 = add(i, 1)  c0  start(i)  c1  c2  done  b = bitcast(done)  c3(b)

A slice's index is a few scalar instructions that XLA's scheduler runs wherever there is
room, and its result is a bitcast away from the layer that reads it. Neither takes time, but
each would hold a transfer where it stands. All other work keeps its order.

XLA:GPU's copy insertion runs before its scheduler: to a slot that the loop carries it copies
what was fetched, for a fetch that starts before the slot's last read would overwrite it::

    new = done ─► copy ─► root tuple, element 1       two buffers of one layer each
    new = done ─────────► root tuple, element 1       one, if the fetch starts after that read

Such a copy goes where the dependences leave room for a fetch that starts later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hlo_passes.analysis.dataflow import Dataflow, analyze_dataflow
from hlo_passes.analysis.dependences import dependences
from hlo_passes.ir import Computation, Instruction, Module
from hlo_passes.loops.host_transfers import HostTransfer

VIEWS = frozenset({"bitcast", "get-tuple-element", "opt-barrier", "tuple"})
"""Opcodes that name bytes and touch none."""

# What computes an index, if it is small. None has effects, and on one kernel more or less at
# another place no time depends.
_SCALAR_WORK = frozenset(
    """add and clamp compare constant convert copy divide dynamic-slice fusion maximum minimum
    multiply negate or remainder reshape select slice subtract xor""".split()
)
_SMALL_BYTES = 1024


class UnorderableError(Exception):
    """Two things must stand before each other."""


def clear_paths(
    module: Module,
    dataflow: Dataflow,
    computation: Computation,
    transfers: Sequence[HostTransfer],
) -> tuple[int, ...]:
    """Returns an order of the computation in which no transfer is in flight for longer than
    it must: all that leads to it before, its start, its done and its first reader together.

    Args:
      dataflow: of `module`.
      transfers: of the computation.

    Raises:
      UnorderableError: when there is no order that keeps that of the other work.

    O(instructions + dependences).
    """
    return _Order(module, dataflow, computation, transfers).all()


class _Order:
    def __init__(
        self,
        module: Module,
        dataflow: Dataflow,
        computation: Computation,
        transfers: Sequence[HostTransfer],
    ) -> None:
        self._instructions = computation.instructions
        self._root = computation.root.id
        self._before = dependences(dataflow, computation)
        self._halves = {h.id for t in transfers for h in (t.start, t.done)}
        fixed = {computation.root.id} | self._halves
        self._early = _leading_to(module, transfers) - fixed
        late = _views_of(computation, transfers) - fixed - self._early
        self._on_demand = self._halves | late
        self._after: dict[int, list[int]] = {}
        for i in self._early:
            for needed in self._before[i]:
                self._after.setdefault(needed, []).append(i)
        self._sequence: list[int] = []
        self._placed: set[int] = set()

    def all(self) -> tuple[int, ...]:
        fixed = [i for i in self._instructions if i.id not in self._on_demand | self._early]
        for i in self._instructions:
            if i.id in self._early and not self._before[i.id]:
                self._place(i.id)
        for i in fixed:
            if i.id != self._root or i is not fixed[-1]:
                self._demand(i.id)
        for i in self._instructions:  # Without a reader.
            if i.id in self._halves:
                self._demand(i.id)
        for i in self._instructions:
            self._demand(i.id)
        return tuple(self._sequence)

    def _demand(self, goal: int) -> None:
        pending, waiting = [goal], {goal}
        while pending:
            if pending[-1] in self._placed:
                waiting.discard(pending.pop())
                continue
            missing = sorted(n for n in self._before[pending[-1]] if n not in self._placed)
            for n in missing:
                if n in waiting or n not in self._on_demand | self._early:
                    raise UnorderableError
            if missing:
                pending.append(missing[0])
                waiting.add(missing[0])
            else:
                self._place(pending[-1])

    def _place(self, i: int) -> None:
        pending = [i]
        for placed in pending:
            if placed in self._placed:
                continue
            self._sequence.append(placed)
            self._placed.add(placed)
            pending += (n for n in self._after.get(placed, ()) if self._before[n] <= self._placed)


def _leading_to(module: Module, transfers: Sequence[HostTransfer]) -> set[int]:
    """Ids of the work of no account from which the transfers' operands come."""
    found: set[int] = set()
    pending = [o for t in transfers for o in t.start.operand_ids]
    while pending:
        i = module.instructions[pending.pop()]
        if i.id not in found and (i.opcode in VIEWS or is_scalar_work(module, i)):
            found.add(i.id)
            pending += i.operand_ids
    return found


def is_scalar_work(module: Module, i: Instruction) -> bool:
    """Whether `i` computes next to nothing from next to nothing, without effects."""
    shapes = [i.shape, *(module.instructions[o].shape for o in i.operand_ids)]
    return i.opcode in _SCALAR_WORK and all(
        leaf.byte_size <= _SMALL_BYTES for shape in shapes for _, leaf in shape.leaves()
    )


def _views_of(computation: Computation, transfers: Sequence[HostTransfer]) -> set[int]:
    """Ids of what only shows fetched bytes under another name."""
    found = {t.done.id for t in transfers}
    for i in computation.instructions:
        if i.opcode in VIEWS and any(o in found for o in i.operand_ids):
            found.add(i.id)
    return found


def droppable_copies(
    module: Module, transfers: Mapping[int, Sequence[HostTransfer]]
) -> tuple[Instruction, ...]:
    """Returns the copies of fetched values into a loop's state that a later start makes
    superfluous, by computation and in schedule order.

    Args:
      transfers: of `host_transfers`.
    """
    dropped: list[Instruction] = []
    for computation_id in transfers:
        dropped += _droppable(module, computation_id, transfers[computation_id])
    return tuple(dropped)


def _droppable(
    module: Module, computation_id: int, transfers: Sequence[HostTransfer]
) -> list[Instruction]:
    """Each copy that may be dropped with those before it. All are tried, then each half of what
    cannot be: mostly few cannot, and a try takes a look at the whole module."""
    dropped: list[Instruction] = []
    pending = [_copies_into_state(module, module.computations[computation_id], transfers)]
    while pending:
        copies = pending.pop()
        if copies and _is_orderable(module, computation_id, transfers, [*dropped, *copies]):
            dropped += copies
        elif len(copies) > 1:
            half = len(copies) // 2
            pending += copies[half:], copies[:half]
    return dropped


def _is_orderable(
    module: Module,
    computation_id: int,
    transfers: Sequence[HostTransfer],
    copies: Sequence[Instruction],
) -> bool:
    without = drop_copies(module, copies)
    computation = without.computations[computation_id]
    moved = [
        t._replace(start=without.instructions[t.start.id], done=without.instructions[t.done.id])
        for t in transfers
    ]
    try:
        clear_paths(without, analyze_dataflow(without), computation, moved)
    except UnorderableError:
        return False
    return True


def _copies_into_state(
    module: Module, computation: Computation, transfers: Sequence[HostTransfer]
) -> list[Instruction]:
    """Copies of a fetched value whose only user is the root, of which no element holds the
    value already, and which XLA lets stand anywhere behind that."""
    root = computation.root
    fetched = {t.done.id for t in transfers if t.kind == "prefetch"}
    users: dict[int, list[Instruction]] = {}
    for i in computation.instructions:
        for o in (*i.operand_ids, *i.control_predecessor_ids):
            users.setdefault(o, []).append(i)

    def shown(i: Instruction) -> int:
        while i.opcode in ("bitcast", "copy"):
            i = module.instructions[i.operand_ids[0]]
        return i.id

    carried = [shown(module.instructions[o]) for o in root.operand_ids]
    return [
        i
        for i in computation.instructions
        if i.opcode == "copy"
        and not i.control_predecessor_ids
        and users.get(i.id) == [root]
        and root.opcode == "tuple"
        and shown(i) in fetched
        and carried.count(shown(i)) == 1
        and module.instructions[i.operand_ids[0]].shape == i.shape
    ]


def drop_copies(module: Module, copies: Sequence[Instruction]) -> Module:
    """Returns `module` with every reader of one of `copies` reading what it copies."""
    if not copies:
        return module
    source = {copy.id: copy.operand_ids[0] for copy in copies}
    proto = module.to_proto()
    for computation in proto.computations:
        for n in reversed(range(len(computation.instructions))):
            if computation.instructions[n].id in source:
                del computation.instructions[n]
        for i in computation.instructions:
            i.operand_ids[:] = [source.get(o, o) for o in i.operand_ids]
    for sequence in proto.schedule.sequences.values():
        ids = sequence.instruction_ids
        ids[:] = [n for n in ids if n not in source]
    return Module(proto).with_learned(module.learned)
