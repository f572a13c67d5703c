"""What must stand before what in a computation, whatever order its schedule has.

    slot   = get-tuple-element(state, 1) ─► dot(x, slot)          reads the old bytes
    new    = async-start(dynamic-slice(stack)) ─► ... root tuple, element 1
                                                                  dot ──► start of new

An instruction comes after its operands, its control predecessors, and, when it writes bytes
that something else lies in, after all that read those: what a loop carries, what is updated
in place. An asynchronous start reads its operands, and writes its result, until its done.

Anything between host and device may then move freely within these orders, and XLA needs no
copy that it did not need before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise

from hlo_passes.analysis.async_chains import dones_of
from hlo_passes.analysis.call_graph import call_graph
from hlo_passes.analysis.collectives import is_fused_start
from hlo_passes.analysis.dataflow import Buffer, Dataflow
from hlo_passes.ir import Computation


def dependences(dataflow: Dataflow, computation: Computation) -> Mapping[int, frozenset[int]]:
    """Maps each instruction of `computation` to those that must stand before it.

    Args:
      dataflow: of the module.

    Returns:
      Ids to ids, not closed transitively. The values of one buffer follow on each other in
      the order of the present schedule; their reads may stand anywhere in it.

    O(positions of the module).
    """
    before = {i.id: {*i.operand_ids, *i.control_predecessor_ids} for i in computation.instructions}
    view = _View(dataflow, computation)
    for buffer in dataflow.buffers:
        if len(buffer.values) > 1 and buffer.kind != "tuple":
            _order_accesses(view, buffer, before)
    return {i: frozenset(needed) for i, needed in before.items()}


class _View:
    """Everything that runs inside an instruction of the computation, seen as that one."""

    def __init__(self, dataflow: Dataflow, computation: Computation) -> None:
        self.module = dataflow.module
        self.place = {i.id: n for n, i in enumerate(computation.instructions)}
        dones = dones_of(dataflow.module, computation)
        self.end = {start: done.id for start, done in dones.items()}
        self.top: dict[int, int] = {}
        runs = call_graph(dataflow.module).runs
        for i in computation.instructions:
            self.top[i.id] = i.id
            pending = list(runs.get(i.id, ()))
            while pending:
                for inner in pending.pop().instructions:
                    self.top[inner.id] = i.id
                    pending += runs.get(inner.id, ())


def _order_accesses(view: _View, buffer: Buffer, before: Mapping[int, set[int]]) -> None:
    """Adds that all reads of each of a buffer's values come before the next one is written."""
    # What is written outside is there from the beginning.
    written: defaultdict[int, list[int]] = defaultdict(list)
    sent: list[int] = []
    for value in buffer.values:
        writer = view.top.get(value.instruction.id, -1)
        readers = (view.top.get(use.instruction.id, -1) for use in value.uses)
        written[writer] += [r for r in readers if r >= 0]
        is_own = value.instruction.id in view.place
        if is_own and value.index == (0,) and is_fused_start(view.module, value.instruction):
            sent.append(writer)
    writers = sorted(written, key=lambda w: view.place.get(w, -1))
    for start in sent:  # It writes nothing there: its done reads what lies there.
        if (place := writers.index(start)) > 0:
            written[writers[place - 1]] += written[start]
            del writers[place]
    for earlier, writer in pairwise(writers):
        mine = {writer, view.end.get(writer, writer)}
        for access in (earlier, *written[earlier]):
            last = view.end.get(access, access)
            if last >= 0 and last not in mine and access not in mine:
                before[writer].add(last)
