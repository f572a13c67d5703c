"""The least time that a loop with transfers takes: each iteration moves what it moves.

    compute   │ c │ c │▒▒▒▒▒▒│ c │ c │▒▒▒▒▒▒│
    link      ├──────────────┼──────────────┤       floor = trips × the longer of the two
              one iteration

An asynchronous pair stands in one computation, so that an iteration ends neither before its
compute nor before its transfers. What else uses the link can only add to that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hlo_passes.analysis.host_copies import evicted_copies, host_copies
from hlo_passes.analysis.moves import Move, moves
from hlo_passes.analysis.stores import stored_copies
from hlo_passes.analysis.traffic import traffic
from hlo_passes.analysis.trip_count import trip_count
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Computation, Instruction, Module
from hlo_passes.simulator.events import Direction, queue_of


def floor_costs(
    module: Module, machine: Machine, costs: Mapping[int, float]
) -> Mapping[int, float]:
    """Returns `costs` with what runs other computations at no less than its transfers take.

    Args:
      costs: seconds of compute of each instruction, of `cost.instruction_costs`.

    O(instructions).
    """
    return _Floors(module, machine, costs).all()


def link_floor_s(module: Module, machine: Machine) -> Mapping[Direction, float]:
    """Returns the seconds for which all transfers of a step but the copies of whole arguments,
    temporaries (`host_copies`) and results (`stores`) occupy each queue of the links, by the queue
    of `timeline.queue_of`."""
    copies = (*host_copies(module), *evicted_copies(module), *stored_copies(module))
    managed = {copy.start.id for copy in copies if copy.start is not None}
    return _Floors(module, machine, {}).within(module.entry, managed)


def busy_s(
    module: Module, machine: Machine, queue: Direction, instructions: Sequence[Instruction]
) -> npt.NDArray[np.float64]:
    """Returns float64[instructions], the seconds for which each keeps a queue of the links busy
    with what the computations that it runs move."""
    floors = _Floors(module, machine, {})
    return np.array([floors.queued_s(i).get(queue, 0.0) for i in instructions], np.float64)


def moved_inside(module: Module, machine: Machine) -> float:
    """Returns the bytes that all transfers of a step move but the copies that a plan has in the
    entry (`link_floor_s`)."""
    copies = (*host_copies(module), *evicted_copies(module), *stored_copies(module))
    managed = {copy.start.id for copy in copies if copy.start is not None}
    floors, rates = _Floors(module, machine, {}), dict[Direction, float]()
    for link in machine.links:
        rates.setdefault(queue_of(link), link.bytes_per_s * link.engines)
    busy = floors.within(module.entry, managed)
    return sum(seconds * rates[queue] for queue, seconds in busy.items())


class _Floors:
    def __init__(self, module: Module, machine: Machine, costs: Mapping[int, float]) -> None:
        self._module = module
        self._machine = machine
        self._costs = costs
        self._moves: Mapping[int, Move] = moves(module, machine, traffic(module))
        self._queued: dict[int, Mapping[Direction, float]] = {}
        self._found: dict[int, float] = {}

    def all(self) -> Mapping[int, float]:
        opened = [i for i in self._module.instructions.values() if self.queued_s(i)]
        return {**self._costs, **{i.id: self._seconds(i) for i in opened}}

    def queued_s(self, i: Instruction) -> Mapping[Direction, float]:
        """Seconds that each queue is busy with what an instruction runs."""
        if i.opcode not in ("while", "call", "conditional"):
            return {}
        if i.id not in self._queued:
            repeated = self._repeated(i)
            parts = [self.within(c) for c in self._called(i)]
            queues = {queue for part in parts for queue in part}
            merge = max if i.opcode == "conditional" else sum
            self._queued[i.id] = {
                queue: repeated * merge(part.get(queue, 0.0) for part in parts) for queue in queues
            }
        return self._queued[i.id]

    def within(
        self, computation: Computation, without: Collection[int] = ()
    ) -> Mapping[Direction, float]:
        """Seconds that each queue is busy with one run of a computation."""
        busy: defaultdict[Direction, float] = defaultdict(float)
        for i in computation.instructions:
            if i.id not in without and (move := self._moves.get(i.id)) is not None:
                link = self._machine.link(move.source, move.destination)
                busy[queue_of(link)] += move.size / link.bytes_per_s / link.engines
            for queue, seconds in self.queued_s(i).items():
                busy[queue] += seconds
        return busy

    def _seconds(self, i: Instruction) -> float:
        if i.id not in self._found:
            found = [self._computation_s(c) for c in self._called(i)]
            merge = max if i.opcode == "conditional" else sum
            self._found[i.id] = self._repeated(i) * merge(found)
        return self._found[i.id]

    def _computation_s(self, computation: Computation) -> float:
        compute = sum(
            self._seconds(i) if self.queued_s(i) else self._costs.get(i.id, 0.0)
            for i in computation.instructions
        )
        return max([compute, *self.within(computation).values()])

    def _called(self, i: Instruction) -> Iterable[Computation]:
        return (self._module.computations[c] for c in i.called_computation_ids)

    def _repeated(self, i: Instruction) -> int:
        count = trip_count(self._module, i) if i.opcode == "while" else None
        return 1 if count is None else count
