"""What became of the arguments that a caller gives away, and which others he could give.

    a ─► f ─► result 0    aliased: the result takes the argument's bytes             reused
    b ─► g ─► copy ─► r1  aliased, but b is still read when r1 is there: copied      copied
    c ─► h                no result has c's bytes                                    lost
    d ─► k ─► result 2    of the same shape, but d was not given away                kept

A result takes the bytes of one argument, of as many bytes as it has. jax pairs those of equal
shape (and leaves out, with a warning, what has no partner), XLA the rest
(xla/service/optimize_input_output_buffer_alias.cc).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hlo_passes.analysis.dataflow import Dataflow
from hlo_passes.analysis.live_ranges import LiveRanges
from hlo_passes.ir import DEVICE_MEMORY_SPACE, Instruction, Module, Shape, ShapeIndex

Fate = Literal["reused", "copied", "lost", "kept"]

_COPIES = frozenset({"copy", "copy-done"})


@dataclass(frozen=True, slots=True)
class Donation:
    """An argument, or one array of it.

    Attributes:
      parameter, index: which.
      size: bytes.
      fate: what became of it; ``"kept"`` was not given away, though a result of the same
        shape takes no argument's place.
      why: in words, where it is not reused; ``""`` else.
      result: the output that takes its place, or could.
    """

    parameter: Instruction
    index: ShapeIndex
    size: int
    fate: Fate
    why: str
    result: ShapeIndex | None


def donations(ranges: LiveRanges) -> tuple[Donation, ...]:
    """Returns the arguments in device memory that are given away, and those that could be, the
    largest first.

    Args:
      ranges: of a scheduled module. What jax left out as it has no partner is not in it.

    O(instructions).
    """
    found = _Donations(ranges).all()
    return tuple(sorted(found, key=lambda d: (-d.size, d.parameter.parameter_number, d.index)))


class _Donations:
    def __init__(self, ranges: LiveRanges) -> None:
        self._ranges = ranges
        self._dataflow: Dataflow = ranges.dataflow
        self._module: Module = ranges.dataflow.module
        self._parameters = self._module.entry.parameters
        self._aliased = {
            (a.parameter, a.parameter_index): a.output_index
            for a in self._module.input_output_aliases
        }
        self._lost = set(self._module.buffer_donors)
        results = self._module.entry.root.shape.leaves()
        taken = set(self._aliased.values())
        self._free = {index: shape for index, shape in results if index not in taken}

    def all(self) -> Iterator[Donation]:
        free: defaultdict[object, deque[ShapeIndex]] = defaultdict(deque)
        for result, shape in self._free.items():
            free[_kind(shape)].append(result)
        for p in self._parameters:
            for index, shape in p.shape.leaves():
                if shape.memory_space != DEVICE_MEMORY_SPACE:
                    continue
                result = self._aliased.get((p.parameter_number, index))
                if result is not None:
                    why = self._copied(p, index, result)
                    fate: Fate = "copied" if why else "reused"
                    yield Donation(p, index, shape.byte_size, fate, why, result)
                elif (p.parameter_number, index) in self._lost:
                    why = self._unmatched(shape)
                    yield Donation(p, index, shape.byte_size, "lost", why, None)
                elif free[_kind(shape)]:
                    result = free[_kind(shape)].popleft()
                    why = f"result {_worded(result)} has its shape and takes no argument's place"
                    yield Donation(p, index, shape.byte_size, "kept", why, result)

    def _copied(self, p: Instruction, index: ShapeIndex, result: ShapeIndex) -> str:
        """Why the result is copied to the argument's bytes; ``""`` if it is not."""
        copy = self._dataflow.value_at(self._module.entry.root, result).instruction
        if copy.opcode not in _COPIES:
            return ""
        old, time = self._dataflow.value_at(p, index), self._ranges.time_of
        source = self._module.instructions[copy.operand_ids[0]]
        new = self._dataflow.value_at(source).instruction
        if new is p or old.shape.memory_space != source.shape.memory_space:
            return ""  # It is handed back, or was made on the chip.
        users = self._dataflow.users
        readers = {r for p in old.positions for r in users.get(p.instruction.id, ())}
        later = [r for r in readers if time.get(r.id, -1) > time[new.id]]
        if not later:
            return f"%{new.name} is computed elsewhere and copied there by %{copy.name}"
        last = max(later, key=lambda r: time[r.id])
        return f"%{last.name} reads it after %{new.name} has computed the new value"

    def _unmatched(self, shape: Shape) -> str:
        results = [s for _, s in self._module.entry.root.shape.leaves()]
        same = [s for s in results if s.byte_size == shape.byte_size]
        if not same:
            return f"no result has its {shape.byte_size} bytes"
        if any(s.byte_size == shape.byte_size for s in self._free.values()):
            free = next(s for s in self._free.values() if s.byte_size == shape.byte_size)
            return f"the free result of as many bytes is {free}, it is {shape}"
        return "all results of as many bytes take the place of other arguments"


def _kind(shape: Shape) -> object:
    """What an argument and a result must have in common for jax to pair them."""
    return shape.dtype, shape.dimensions, shape.layout


def _worded(index: ShapeIndex) -> str:
    return ".".join(map(str, index)) or "0"
