"""How many bytes does what an instruction runs need beside what the caller holds? See `verify`.

    body        state   c0   c1   c2   root        needed inside at c1: a + b + c − state
    element 1   [────────────)    [──────          its bytes are free while c1 runs
    temporaries      [a───────)
                          [b───)

The most that lives at once, whatever the packing. The bytes of a loop's state, and of what branches
give, are the caller's, and count for what lies in them.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

from hlo_passes.ir import DEVICE_MEMORY_SPACE, Computation, Instruction, Module, Shape
from hlo_passes.verify.hlo import RUNNING, View, ends_of
from hlo_passes.verify.memory import Memory, Version
from hlo_passes.verify.taking import Taking


class Inside:
    """The needs of a module's computations, each found once. O(positions of the module)."""

    def __init__(self, module: Module, memory: Memory, taking: Taking) -> None:
        self._module, self._memory, self._taking = module, memory, taking
        self._needs: dict[tuple[int, frozenset[View]], int] = {}

    def need(self, i: Instruction, dying: frozenset[View]) -> int:
        """Bytes on the device that `i` needs for what it runs; 0 where it runs nothing.

        Args:
          dying: the parts of operands that die there, so that their bytes may be free before
            the end.
        """
        most = 0
        for n, computation_id in enumerate(i.called_computation_ids if i.opcode in RUNNING else ()):
            given = dying
            if i.opcode == "conditional":  # Each branch has an operand.
                given = frozenset(View(0, v.part) for v in dying if v.operand == n + 1)
            if (computation_id, given) not in self._needs:
                body = _Body(self._module.computations[computation_id], i, self._memory, given)
                inside = {j.id: self.need(j, body.dying(j)) for j in body.instructions}
                self._needs[computation_id, given] = body.need(inside, self._taking)
            most = max(most, self._needs[computation_id, given])
        return most


class _Body:
    """A computation and the blocks of bytes in it, each known by the first to lie there.

    Attributes:
      blocks: bytes of each block that counts here.
      held: of these, what the caller holds for it.
    """

    def __init__(
        self,
        computation: Computation,
        caller: Instruction,
        memory: Memory,
        dying: frozenset[View],
    ) -> None:
        self.instructions = computation.instructions
        self._walk = memory.walk(computation)
        self._ends = ends_of(self.instructions)
        self.blocks: dict[Version, int] = {}
        for i in self.instructions:
            for index, version in self._walk.held[i.id].items():
                shape = i.shape.at(index)
                if version.writer is i and i.opcode != "constant" and needs_bytes(i, shape):
                    size = self.blocks.get(version.first, 0)
                    self.blocks[version.first] = max(size, shape.byte_size)
        given = [(p.id, index) for p in computation.parameters for index in self._walk.held[p.id]]
        results = self._walk.held[computation.root.id]
        self._returned: dict[Version, Version] = {}
        if caller.opcode == "while" and computation.root.shape == computation.parameters[0].shape:
            # What a loop's body returns has the bytes of what it was given.
            for p, index in given:
                self._returned[results[index].first] = self._walk.held[p][index].first
            callers = {self._walk.held[p][index].first for p, index in given}
        else:
            free = {
                self._walk.held[p.id][index].first
                for p in computation.parameters
                for index in self._walk.held[p.id]
                if View(p.parameter_number, index) in dying
            }
            operands = {self._walk.held[p][index].first for p, index in given} - free
            self.blocks = {v: size for v, size in self.blocks.items() if v not in operands}
            callers = free | {version.first for version in results.values()}
        self.held = sum(self.blocks.get(version, 0) for version in callers)

    def dying(self, i: Instruction) -> frozenset[View]:
        """The parts of operands of `i` that count here and are read there for the last time."""
        return frozenset(
            View(n, index)
            for n, o in enumerate(i.operand_ids if i.opcode in RUNNING else ())
            for index, v in self._walk.held[o].items()
            if self._block(v) in self.blocks and all(end <= self._ends[i.id] for _, end in v.reads)
        )

    def need(self, inside: dict[int, int], taking: Taking) -> int:
        """Bytes beside what the caller holds.

        Args:
          inside: what each instruction needs for what it runs itself.
        """
        change = [0] * (len(self.instructions) + 2)
        spans: defaultdict[Version, list[tuple[int, int]]] = defaultdict(list)
        for version in self._walk.versions:
            start = 0 if version.writer.opcode == "parameter" else version.place
            last = max([self._ends[version.writer.id], *(end for _, end in version.reads)])
            spans[self._block(version)].append((start, last + 1))
        for block, of_block in spans.items():
            until = 0
            for start, end in sorted(of_block):
                change[max(start, until)] += self.blocks.get(block, 0) if end > until else 0
                change[end] -= self.blocks.get(block, 0) if end > until else 0
                until = max(until, end)
        for place, i in enumerate(self.instructions):
            change[place] += inside[i.id]
            change[self._ends[i.id] + 1] -= inside[i.id]
            taken = self._taken(i, place, taking)
            change[place] -= taken
            change[place + 1] += taken
        return max(0, max(accumulate(change)) - self.held)

    def _block(self, version: Version) -> Version:
        return self._returned.get(version.first, version.first)

    def _taken(self, i: Instruction, place: int, taking: Taking) -> int:
        """Bytes of operands that die at `i`, in which results of it may lie."""
        taken: dict[Version, int] = {}
        for index, version in self._walk.held[i.id].items():
            size = self.blocks.get(version.first, 0)
            if version.writer is not i or version.over is not None or not size:
                continue
            for n, operand in enumerate(i.operand_ids):
                for part, old in self._walk.held[operand].items():
                    block = self._block(old)
                    if (
                        block not in taken
                        and block is not self._block(version)
                        and self.blocks.get(block) == size
                        and all(end <= place for _, end in old.reads)
                        and version not in taken
                        and taking.is_allowed(i, index, n, part)
                    ):
                        taken[block] = size
                        taken[version] = 0
        return sum(taken.values())


def needs_bytes(i: Instruction, shape: Shape) -> bool:
    """Whether a result takes up device memory that XLA's buffer assignment gives out."""
    if shape.memory_space != DEVICE_MEMORY_SPACE or shape.byte_size == 0:
        return False
    # The last elements of a start's tuple are semaphores, not data.
    is_start = i.opcode.endswith("-start") or i.opcode in ("send", "recv")
    return not (is_start and i.shape.is_tuple and str(shape) in ("u32[]", "s32[]"))
