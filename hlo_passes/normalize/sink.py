"""Work on weights stands where it is needed, not where the data happened to be ready.

    before   t1 = copy(w1)  t2 = copy(w2)  ...  x1 = dot(x0, t1)  x2 = dot(x1, t2)
    after    t1 = copy(w1)  x1 = dot(x0, t1)  t2 = copy(w2)  x2 = dot(x1, t2)

XLA's scheduler runs what depends on arguments alone (a weight brought into another layout
or type) as early as it can. All results are then live at once, and so is every streamed
weight that they are made from, which no order of transfers can mend. Such work moves to
just before its first reader. Nothing that it reads can change in between: what can, a donated
argument (unless only a store overwrites it, on the host) or a copy that a loop goes on to work
with, does not count.

XLA chose what hides a collective: work that stands between its start and its done stays there,
nothing comes in, and what starts or ends one does not move at all.

Only work on a single argument moves. A program whose every step is a fusion (GPU) draws on
arguments alone as a whole: `x1` above is no more than work on x0 and w1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hlo_passes.analysis.collectives import collectives, has_collective
from hlo_passes.analysis.dataflow import Dataflow, analyze_dataflow
from hlo_passes.analysis.stores import steady_parameters
from hlo_passes.ir import Instruction, Module
from hlo_passes.memoize import memoized
from hlo_passes.normalize.entry_order import in_order

# What is one kernel (or none) without effects, whatever it reads.
_MOVABLE = frozenset(
    {"bitcast", "convert", "copy", "fusion", "get-tuple-element", "reshape", "slice", "transpose"}
)


@memoized
def sink_weight_work(module: Module) -> Module:
    """Moves work that reads only constants and one argument to its first reader.

    Args:
      module: scheduled.

    Returns:
      `module` itself when nothing moves.

    Time O(positions of the module).
    """
    order = module.entry.instructions
    dataflow = analyze_dataflow(module)
    steady = _steady_values(module)
    ordered_by_hand = _ordered_by_hand(order)
    sinking: dict[int, Instruction] = {}
    drawn_on = dict(steady)  # The arguments that a value is made from.
    for i in order:
        if (
            i.opcode not in _MOVABLE
            or i is module.entry.root
            or i.id in ordered_by_hand
            or i.id in steady
            or not all(o in drawn_on for o in i.operand_ids)
            or has_collective(module, i)
        ):
            continue
        arguments = frozenset[int]().union(*(drawn_on[o] for o in i.operand_ids))
        if len(arguments) <= 1:
            sinking[i.id] = i
            if not _is_written_over(dataflow, i):
                drawn_on[i.id] = arguments
    sinking = _within_spans(module, sinking)
    if not sinking:
        return module
    sequence: list[int] = []
    placed: set[int] = set()
    position = {i.id: n for n, i in enumerate(order)}

    def place(i: Instruction) -> None:
        waiting = {i.id}
        pending = [i]
        while pending:
            for o in pending.pop().operand_ids:
                if o in sinking and o not in placed and o not in waiting:
                    waiting.add(o)
                    pending.append(sinking[o])
        placed.update(waiting)
        sequence.extend(sorted(waiting, key=position.__getitem__))

    for i in order:
        if i.id not in sinking:
            place(i)
    for i in sinking.values():  # Without a reader.
        if i.id not in placed:
            place(i)
    if sequence == [i.id for i in order]:
        return module
    return in_order(module, sequence)


def _is_written_over(dataflow: Dataflow, i: Instruction) -> bool:
    """Whether something else comes to lie in the bytes of what `i` makes."""
    return any(len(dataflow.buffer_at(i, index).values) > 1 for index, _ in i.shape.leaves())


def _within_spans(module: Module, sinking: Mapping[int, Instruction]) -> dict[int, Instruction]:
    """Those that would not come to stand inside, or outside, of other collectives."""
    order = module.entry.instructions
    done_of = {start: c.done for start, c in collectives(module).items() if c.done is not None}
    starts = {done: start for start, done in done_of.items()}
    open_at: list[frozenset[int]] = []
    is_open: frozenset[int] = frozenset()
    for i in order:
        is_open -= {starts.get(i.id, -1)}
        open_at.append(is_open)
        is_open |= {i.id} & done_of.keys()
    kept: dict[int, Instruction] = {}
    first_reader: dict[int, int] = {}  # Place in the new order, by id of what is read.
    for place in reversed(range(len(order))):
        i = order[place]
        target = place
        if i.id in sinking:
            new = first_reader.get(i.id, len(order) - 1)
            if open_at[new] == open_at[place]:
                kept[i.id], target = i, new
        for o in i.operand_ids:
            first_reader[o] = min(first_reader.get(o, target), target)
    return {id_: kept[id_] for id_ in sinking if id_ in kept}


def _ordered_by_hand(order: Iterable[Instruction]) -> set[int]:
    found: set[int] = set()
    for i in order:
        if before := i.control_predecessor_ids:
            found.update(before, (i.id,))
    return found


def _steady_values(module: Module) -> dict[int, frozenset[int]]:
    """Ids of what is there from the beginning and never written (arguments that are steady,
    what is copied from them, constants), with the arguments they come from."""
    arguments = {p.id for p in steady_parameters(module)}
    steady: dict[int, frozenset[int]] = {}
    for i in module.entry.instructions:
        if i.opcode == "parameter":
            if i.id in arguments:
                steady[i.id] = frozenset({i.id})
        elif i.opcode in ("constant", "copy-start", "copy-done"):
            if all(o in steady for o in i.operand_ids):
                steady[i.id] = frozenset[int]().union(*(steady[o] for o in i.operand_ids))
    return steady
