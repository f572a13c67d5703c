"""What an instruction is called by those who wrote the program."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from hlo_passes.analysis.async_chains import async_chains
from hlo_passes.analysis.live_ranges import LiveRanges
from hlo_passes.ir import HOST_MEMORY_SPACE, Instruction
from hlo_passes.reading.origins import Origins
from memplan.report.view import Step


class Names:
    """The names of a module's instructions.

    Args:
      ranges: of the module.
      labels: the user's names of parameters, where the module does not tell.
    """

    def __init__(self, ranges: LiveRanges, labels: Mapping[str, str]) -> None:
        self._ranges = ranges
        self._module = ranges.dataflow.module
        self._labels = labels
        self._origins = Origins(self._module)

    def step(self, instruction: Instruction) -> Step:
        about = self.about(instruction)
        return Step(instruction.name, about.op_name, self._module.source_line(about))

    def about(self, i: Instruction) -> Instruction:
        """The instruction whose name and source line say what `i` is for."""
        return self._origins.about(i)

    def label(self, i: Instruction) -> str:
        """The user's name of an argument, or of the argument that `i` is a copy or, with
        ``[i]`` behind it, a slice of."""
        start = self.wrapped_by.get(i.computation_id, i)
        if (chain := async_chains(self._module).get(start.id)) is not None:
            start = chain.start
        if start.opcode == "async-start" and (stack := self._stack_of(start)):
            return f"{stack}[i]"
        about = self.about(i)
        if about.opcode != "parameter":
            return ""
        return self._labels.get(about.name) or about.op_name

    @cached_property
    def wrapped_by(self) -> Mapping[int, Instruction]:
        """The start that runs a computation asynchronously, by the computation's id."""
        chains = async_chains(self._module).values()
        return {c.computation.id: c.start for c in chains if c.computation is not None}

    def _stack_of(self, start: Instruction) -> str:
        """What the array on the host is called that a transfer takes a slice from, or puts
        one into."""
        bound = async_chains(self._module)[start.id].operands
        operands = map(self._module.instructions.__getitem__, bound)
        stack = next((o for o in operands if o.shape.memory_space == HOST_MEMORY_SPACE), None)
        if stack is None:
            return ""
        buffer = self._ranges.dataflow.buffer_at(stack)
        arguments = {p.id for p in self._module.entry.parameters}
        argument = next(
            (v.instruction for v in buffer.values if v.instruction.id in arguments), None
        )
        if argument is not None:
            return self.label(argument)
        if buffer.live_out:
            root = self._module.entry.root
            number = next((p.index for p in buffer.positions if p.instruction is root), ())
            return f"result {number[0]}" if number else "the result"
        line = self._module.source_line(buffer.instruction)
        return f"residual of {line}" if line else ""
