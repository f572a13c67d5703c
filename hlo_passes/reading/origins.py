"""Which of the user's lines an instruction is for, also where XLA made it up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from hlo_passes.ir import Instruction, Module

# Instructions that XLA made up about another one: the name to show is the other's.
ABOUT_OPERAND = frozenset(
    {"bitcast", "copy", "get-tuple-element", "copy-start", "copy-done"}
    | {"async-start", "async-done"}
)


class Origins:
    """Names and lines of a module's instructions."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._fused: dict[int, Instruction | None] = {}

    def about(self, i: Instruction) -> Instruction:
        """The instruction whose name and source line say what `i` is for."""
        while not i.op_name:
            if i.opcode == "fusion" and (fused := self._fused_for(i.called_computation_ids[0])):
                return fused
            if i.opcode not in ABOUT_OPERAND or not i.operand_ids:
                return i
            i = self._module.instructions[i.operand_ids[0]]
        return i

    def line(self, i: Instruction) -> str:
        """``file:line`` of the user's call that `i` is for, or else of the nearest one that it
        reads, or that reads it; ``""`` where there is none."""
        about = self.about(i)
        for neighbours in (self._operands, self._readers):
            found = self._nearest(about, neighbours, self._module.source_line)
            if found is not None:
                return self._module.source_line(found)
        return ""

    def _fused_for(self, computation: int) -> Instruction | None:
        """Of what a fusion computes the last thing that has a name: XLA:GPU gives none to fusions
        with several results, nor to the tuple that is their root."""
        if computation not in self._fused:
            root = self._module.computations[computation].root
            self._fused[computation] = self._nearest(root, self._operands, lambda i: i.op_name)
        return self._fused[computation]

    def _nearest(
        self,
        i: Instruction,
        neighbours: Callable[[Instruction], Iterable[int]],
        says: Callable[[Instruction], str],
    ) -> Instruction | None:
        seen = {i.id}
        queue = deque([i])
        while queue and not says(queue[0]):
            for n in neighbours(queue.popleft()):
                if n not in seen:
                    seen.add(n)
                    queue.append(self._module.instructions[n])
        return queue[0] if queue else None

    @staticmethod
    def _operands(i: Instruction) -> Iterable[int]:
        return i.operand_ids

    def _readers(self, i: Instruction) -> Iterable[int]:
        return self._readers_of.get(i.id, ())

    @cached_property
    def _readers_of(self) -> Mapping[int, Sequence[int]]:
        found: dict[int, list[int]] = {}
        for i in self._module.instructions.values():
            for operand in i.operand_ids:
                found.setdefault(operand, []).append(i.id)
        return found
