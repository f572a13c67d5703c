"""At most how many bytes of temporaries are live at once: a bound from one look at the schedule.

    entry   a = dot(p, q)   b = bitcast(a)   c = add(b, p)   d = tanh(c)
    a       [████████████████████████████████]              a view lives on what it shows
    c                                        [████████████████]

Every result is taken to have bytes of its own, until its last reader or the last reader of
a view of it; what XLA lays in the bytes of an operand or output is counted there. Whatever a
called computation makes is taken to be there all at once.

Where little memory is needed this says so in a second for 100,000 instructions; only `ticks`
says how much it is.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from hlo_passes.analysis.host_copies import host_copies
from hlo_passes.analysis.stores import steady_parameters, stored_copies
from hlo_passes.ir import DEVICE_MEMORY_SPACE, Computation, Instruction, Module, Shape
from hlo_passes.orders.load import covered

_VIEWS = frozenset(
    {"add-dependency", "bitcast", "domain", "get-tuple-element", "opt-barrier", "tuple"}
)
_CALLS = frozenset({"async-start", "call", "conditional", "while"})


def peak_at_most(module: Module, host_parameters: Collection[int] = ()) -> int:
    """Returns bytes of which `reorder` finds no more to be live at once.

    Args:
      module: scheduled.
      host_parameters: numbers of the arguments on the host, where the module does not say it.

    O(instructions + operands).
    """
    return _Bound(module).of_entry(host_parameters)


class _Bound:
    def __init__(self, module: Module) -> None:
        self._module = module
        self._bytes_of_shape: dict[int, int] = {}
        self._bytes_inside: dict[int, int] = {}

    def of_entry(self, host_parameters: Collection[int]) -> int:
        entry = self._module.entry
        instructions = entry.instructions
        outputs = _outputs(self._module)
        fetched = {c.done.id for c in host_copies(self._module)}
        fetched |= {
            p.id for p in steady_parameters(self._module) if p.parameter_number in host_parameters
        }
        stored = {(copy.start or copy.done).id for copy in stored_copies(self._module)}
        first, last = _reads(entry, stored)
        sizes, start, end = [], [], []
        inside = np.zeros(len(instructions), np.int64)
        for place, i in enumerate(instructions):
            if i.opcode in _CALLS:
                inside[place] = sum(map(self._inside, i.called_computation_ids))
            is_fetched = i.id in fetched
            size = self._bytes(i.shape) if is_fetched or _makes(i) else 0
            if size and i.id not in outputs:
                sizes.append(size)
                start.append(first.get(i.id, place) if is_fetched else place)
                end.append(last[i.id] + 1)
        held = covered(
            np.array(sizes, np.int64), np.array(start, np.intp), np.array(end, np.intp), len(inside)
        )
        return int((held + inside).max(initial=0))

    def _inside(self, computation_id: int) -> int:
        """All bytes that a computation makes, and those that it calls."""
        if computation_id not in self._bytes_inside:
            total = 0
            for i in self._module.computations[computation_id].instructions:
                total += self._bytes(i.shape) if _makes(i) else 0
                if i.opcode in _CALLS:
                    total += sum(map(self._inside, i.called_computation_ids))
            self._bytes_inside[computation_id] = total
        return self._bytes_inside[computation_id]

    def _bytes(self, shape: Shape) -> int:
        # Shapes are shared, and many instructions have the same one.
        found = self._bytes_of_shape.get(id(shape))
        if found is None:
            leaves = (leaf for _, leaf in shape.leaves())
            found = sum(s.byte_size for s in leaves if s.memory_space == DEVICE_MEMORY_SPACE)
            self._bytes_of_shape[id(shape)] = found
        return found


def _makes(i: Instruction) -> bool:
    """Whether `i` gives bytes that were not there before."""
    return not (
        i.opcode in _VIEWS
        or i.opcode in ("constant", "parameter")
        or i.opcode.endswith(("-done", "-update"))
    )


def _reads(entry: Computation, stored: Collection[int]) -> tuple[dict[int, int], dict[int, int]]:
    """The places of the first reader of each result, where there is one, and of the last
    that reads it or what shows it.

    Args:
      stored: ids of what begins to copy a result to the host, which frees it.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place in reversed(range(len(entry.instructions))):
        i = entry.instructions[place]
        until = last.setdefault(i.id, place)
        shows = i.opcode in _VIEWS or i.opcode.endswith(("-done", "-start", "-update"))
        shows &= i.id not in stored
        for o in i.operand_ids:
            first[o] = place
            last[o] = max(last.get(o, 0), until if shows else place)
    return first, last


def _outputs(module: Module) -> set[int]:
    """Ids of the arrays that the entry returns."""
    returned, pending = set[int](), [module.entry.root]
    while pending:
        i = pending.pop()
        returned.add(i.id)
        if i.opcode == "tuple" or i.opcode == "bitcast":
            pending += [module.instructions[o] for o in i.operand_ids]
    return {i for i in returned if not module.instructions[i].shape.is_tuple}
