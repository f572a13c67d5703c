"""Asynchronous operations: who starts each, who binds its operands, who waits for it.

    start    = ((A), (), ctx)      async-start(a), calls=f     binds the first operand
    update   = ((A, B), C, ctx)    async-update(start, b)      binds the rest, and the result
    done     = C                   async-done(update)

The three are a *chain*. ``a`` and ``b`` are the operands of `f`, in the order of their binding,
and `f` runs at the first link that has them all and says what the result is: here at `update`.
Most chains bind everything at their start; XLA:TPU starts the work of its sparse cores without
operands (docs/async_ops.md in XLA, "Late Binding"). What stands between two links (a tuple and
its elements, a barrier) is looked through, as by xla/hlo/ir/hlo_instruction_utils.h
(TraceAsyncDataflow); a chain that a loop carries has no start in the computation that waits for
it, and is none here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hlo_passes.ir import Computation, Instruction, Module, Shape, ShapeIndex
from hlo_passes.memoize import memoized

ASYNC_LINKS = frozenset({"async-start", "async-update", "async-done"})
"""What the chains of wrapped computations are made of."""

_LOOKED_THROUGH = frozenset({"add-dependency", "bitcast", "copy", "domain", "opt-barrier"})


@dataclass(frozen=True, slots=True)
class AsyncChain:
    """One asynchronous operation, in one computation.

    Attributes:
      links: the start first; the done last, where there is one.
      operands: ids of what the links bind, in order.
      computation: what an ``async-start`` wraps; None of other operations.
      runs_at: the link before which `computation` runs: the first with all operands, and the
        result's shape; None where none has.
    """

    links: tuple[Instruction, ...]
    operands: tuple[int, ...]
    computation: Computation | None
    runs_at: Instruction | None

    @property
    def start(self) -> Instruction:
        return self.links[0]

    @property
    def done(self) -> Instruction | None:
        last = self.links[-1]
        return last if last.opcode.endswith("-done") else None

    def operands_before(self, link: Instruction) -> tuple[int, ...]:
        """Ids of what the links before `link` bind."""
        before = self.links[: self.links.index(link)]
        return self.operands[: sum(len(b.operand_ids) - (b is not self.start) for b in before)]


@memoized
def async_chains(module: Module) -> Mapping[int, AsyncChain]:
    """Returns the chain of each start, update and done, by its id. O(instructions)."""
    links: dict[int, list[Instruction]] = {}
    for computation in module.computations.values():
        for i in computation.instructions:
            if i.opcode.endswith("-start") or i.opcode in ("recv", "send"):
                links[i.id] = [i]
            elif i.opcode.endswith(("-done", "-update")) and i.operand_ids:
                before = links.get(_producer(module, i))
                if before is not None:
                    before.append(i)
                    links[i.id] = before
    return {
        link.id: chain
        for id_, found in links.items()
        if found[0].id == id_
        for chain in (_chain(module, found),)
        for link in chain.links
    }


def wrapped_by(module: Module, link: Instruction) -> Computation | None:
    """The computation that runs asynchronously from `link` on; None of any other instruction."""
    chain = async_chains(module).get(link.id)
    return None if chain is None or chain.runs_at is not link else chain.computation


def dones_of(module: Module, computation: Computation) -> Mapping[int, Instruction]:
    """Maps each asynchronous start of a computation to its done, by the start's id."""
    chains = async_chains(module)
    done = (i for i in computation.instructions if i.opcode.endswith("-done") and i.id in chains)
    return {chains[i.id].start.id: i for i in done}


def _producer(module: Module, link: Instruction) -> int:
    """The id of what gives `link` the state of its operation: the link before, as a rule."""
    i, index = module.instructions[link.operand_ids[0]], list[int]()
    while True:
        if i.opcode == "get-tuple-element":
            index.append(i.tuple_index)
        elif i.opcode == "tuple" and index:
            i = module.instructions[i.operand_ids[index.pop()]]
            continue
        elif i.opcode not in _LOOKED_THROUGH:
            return i.id
        i = module.instructions[i.operand_ids[0]]


def _chain(module: Module, links: list[Instruction]) -> AsyncChain:
    start = links[0]
    called = start.called_computation_ids if start.opcode == "async-start" else ()
    wrapped = module.computations[called[0]] if called else None
    operands: list[int] = []
    runs_at: Instruction | None = None
    for link in links:
        operands += link.operand_ids[link is not start :]
        if wrapped is not None and runs_at is None and len(operands) >= len(wrapped.parameters):
            result = link.shape if link.opcode == "async-done" else link.shape.at((1,))
            if _indices(result) == _indices(wrapped.root.shape):
                runs_at = link
    return AsyncChain(tuple(links), tuple(operands), wrapped, runs_at)


def _indices(shape: Shape) -> list[ShapeIndex]:
    return [index for index, _ in shape.leaves()]
