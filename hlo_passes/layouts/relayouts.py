"""Which instructions only put bytes into another order, and what that costs.

    %a f32[8,16]{1,0} ──► copy f32[8,16]{0,1} ──► %dot          a relayout: the dot wants it so
    %b f32[8,16]{1,0} ──► transpose f32[16,8]{1,0} ──► ...      a transpose
    %state{0}         ──► copy (same layout) ──► while          a copy: who had it is still read

A fusion that does nothing else counts like what is in it; it may take a slice to move. Copies
between memories that keep the order are transfers, not relayouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hlo_passes.analysis.traffic import traffic
from hlo_passes.ir import Instruction, Layout, Module
from hlo_passes.loops.host_transfers import nests

Reorder = Literal["relayout", "transpose", "copy"]

_MOVING = frozenset({"copy", "transpose"})
_STANDING = frozenset({"parameter", "bitcast", "reshape", "tuple", "get-tuple-element", "constant"})
_SLICING = frozenset({"dynamic-slice", "slice"})


@dataclass(frozen=True, slots=True)
class Relayout:
    """An instruction that only moves bytes within the device's memory.

    Attributes:
      instruction: outside fusions.
      kind: a ``"copy"`` leaves the order as it is.
      before, after: layouts of what is moved; of a fusion, in it.
      size: bytes that one execution reads and writes.
      executions: how often it runs in a step; a loop of unknown count is counted once.
    """

    instruction: Instruction
    kind: Reorder
    before: Layout
    after: Layout
    size: int
    executions: int

    @property
    def moved_bytes(self) -> int:
        """In a step."""
        return self.size * self.executions


def relayouts(module: Module) -> tuple[Relayout, ...]:
    """Returns the relayouts, transposes and copies of a compiled module, what moves most first.

    Args:
      module: with layouts; scheduled or not.

    O(instructions).
    """
    found = _find(module)
    return tuple(sorted(found, key=lambda r: (-r.moved_bytes, r.instruction.id)))


def _find(module: Module) -> Iterator[Relayout]:
    moved = traffic(module)
    for computation_id, nest in nests(module).items():
        for i in module.computations[computation_id].instructions:
            mover = _mover(module, i)
            if mover is None:
                continue
            before = module.instructions[mover.operand_ids[0]].shape.layout
            after = mover.shape.layout
            kind = _kind(mover, before)
            is_elsewhere = before.memory_space != after.memory_space
            if i.id not in moved or (is_elsewhere and kind == "copy"):
                continue
            size = sum(moved[i.id].read.values()) + sum(moved[i.id].written.values())
            yield Relayout(i, kind, before, after, size, nest.executions)


def _mover(module: Module, i: Instruction) -> Instruction | None:
    """What moves the bytes: the instruction, or of a fusion that does nothing else the first in
    it that changes the order."""
    if i.opcode in _MOVING:
        return i
    if i.opcode != "fusion":
        return None
    body = module.computations[i.called_computation_ids[0]].instructions
    movers = [b for b in body if b.opcode in _MOVING]
    if not movers or any(b.opcode not in _MOVING | _STANDING | _SLICING for b in body):
        return None
    changing = (
        b for b in movers if _kind(b, module.instructions[b.operand_ids[0]].shape.layout) != "copy"
    )
    # Of a slice a copy is what it is anyway.
    usual = None if any(b.opcode in _SLICING for b in body) else movers[0]
    return next(changing, usual)


def _kind(mover: Instruction, before: Layout) -> Reorder:
    if mover.opcode == "transpose":
        return "transpose"
    after = mover.shape.layout
    same = (before.minor_to_major, before.tiles) == (after.minor_to_major, after.tiles)
    return "copy" if same else "relayout"
