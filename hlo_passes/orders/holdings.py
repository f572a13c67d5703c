"""Which bytes of the device each step of the entry touches, and so holds or frees.

    entry    x = dot(a, w)   y = tanh(x)   cache' = update(cache, y)   z = dot(y, v)
    step     0               1             2                           3
    x        [0 ──────────── 1]                        y may take over x's bytes
    y                        [1 ────────── 2 ───────── 3]
    w, v     w [0]                                     v [3]           fetched from the host

A temporary is held from the step that writes it to the last that reads it; so is every other
value that must lie in the same bytes. What a called computation needs is the workspace of the
step that calls it. Arguments and outputs are there in any order; a temporary that lies in the
bytes of one does so while that holds nothing else (`orders.load.Colocation`).

A weight that is copied from the host is held from its first reader until its last, for the
planner brings it then. Where compute between two readers takes longer than to fetch it again,
these are two holdings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hlo_passes.analysis.dataflow import Buffer, Value
from hlo_passes.analysis.live_ranges import LiveRanges
from hlo_passes.analysis.sharing import can_share
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import DEVICE_MEMORY_SPACE, Instruction
from hlo_passes.memory.allocations import find_allocations
from hlo_passes.orders.load import Bytes, Colocation, Handover
from hlo_passes.placing.ticks import EntryTicks, ManagedTransfer
from hlo_passes.simulator.cost import instruction_costs


class Holdings(NamedTuple):
    """See `orders.load.OrderProblem`.

    Attributes:
      weights: how many of the holdings, the last ones, are of what is fetched from the host.
    """

    sizes: Bytes
    touches: tuple[tuple[int, ...], ...]
    workspace: Bytes
    handovers: tuple[Handover, ...]
    colocations: tuple[Colocation, ...]
    weights: int


def order_holdings(ranges: LiveRanges, ticks: EntryTicks, machine: Machine) -> Holdings:
    """Returns what the steps of the entry, ``ticks.instructions``, hold.

    Args:
      ranges: of a scheduled module; ticks: of the same.

    O(positions of the module).
    """
    collector = _Collector(ranges, ticks, machine)
    colocations = collector.hold_temporaries()
    count = len(collector.sizes)
    fetched = [t for t in ticks.transfers if not t.evicts]
    costs = instruction_costs(ranges.dataflow.module, machine) if fetched else {}
    clock = np.cumsum([0.0, *(costs.get(i.id, 0.0) for i in ticks.instructions)]).tolist()
    for transfer in fetched:
        collector.hold_weight(transfer, clock)
    return Holdings(
        np.array(collector.sizes, np.int64),
        tuple(collector.touches),
        collector.workspace(),
        tuple(collector.handovers()),
        colocations,
        len(collector.sizes) - count,
    )


class _Collector:
    def __init__(self, ranges: LiveRanges, ticks: EntryTicks, machine: Machine) -> None:
        self._ranges, self._ticks, self._machine = ranges, ticks, machine
        self._dataflow = ranges.dataflow
        self._entry = ranges.dataflow.module.entry
        halves = (h for t in ticks.transfers for h in (t.start, t.done) if h is not None)
        self._moved = frozenset(h.id for h in halves)
        values = self._dataflow.values
        self._apart = frozenset(v.id for v in values if v.instruction.id in self._moved)
        self.sizes: list[int] = []
        self.touches: list[tuple[int, ...]] = []
        self._holding_of: dict[int, int] = {}  # a buffer's id → its holding

    def _hold(self, size: int, touches: Iterable[int]) -> int:
        self.sizes.append(size)
        self.touches.append(tuple(sorted(touches)))
        return len(self.sizes) - 1

    def hold_temporaries(self) -> tuple[Colocation, ...]:
        """Holds every temporary that the entry sees; returns when some take no bytes."""
        reused: dict[int, int] = {}
        if any(resident.kind == "colocated" for resident in self._ticks.residents):
            target = self._machine.platform
            reused = find_allocations(self._ranges, target, apart=self._apart).reused
        colocated: defaultdict[int, list[int]] = defaultdict(list)
        for b in self._dataflow.buffers:
            if b.kind == "temp" and b.memory_space == DEVICE_MEMORY_SPACE and self._is_held(b):
                self._holding_of[b.id] = self._hold(b.size, self._steps_at(b.values))
                if b.id in reused:
                    colocated[reused[b.id]].append(self._holding_of[b.id])
        return tuple(
            colocation
            for owner, holdings in colocated.items()
            for colocation in self._colocations(self._dataflow.buffers[owner], holdings)
        )

    def _is_held(self, b: Buffer) -> bool:
        is_seen = any(
            p.instruction.computation_id == self._entry.id for v in b.values for p in v.positions
        )
        return b.size > 0 and is_seen and not any(v.id in self._apart for v in b.values)

    def _colocations(self, owner: Buffer, holdings: list[int]) -> Iterator[Colocation]:
        """What holds at present, and keeps `holdings` in the bytes of an argument or output."""
        given = 1 if owner.kind == "parameter" else 0
        for values in (owner.values[:given], owner.values[given:]):
            touches = self._steps_at(values)
            if touches:
                occupied = self._hold(0, touches)
                for holding in holdings:
                    yield from self._apart_now(holding, holding, occupied)
        for one, two in pairwise(sorted(holdings, key=self.touches.__getitem__)):
            smaller = min(one, two, key=self.sizes.__getitem__)
            yield from self._apart_now(smaller, one, two)

    def _apart_now(self, holding: int, one: int, two: int) -> Iterator[Colocation]:
        for earlier, later in ((one, two), (two, one)):
            gap = self.touches[later][0] - self.touches[earlier][-1]
            if gap >= 0:
                yield Colocation(holding, earlier, later, gap == 0)
                return

    def _steps_at(self, values: Iterable[Value]) -> set[int]:
        """The steps that write or read one of `values`; an argument is there before all, and a
        transfer is no step."""
        steps: set[int] = set()
        for v in values:
            touching = [p.instruction for p in v.positions if not self._is_argument(p.instruction)]
            touching += [use.instruction for use in v.uses]
            steps.update(self._ticks.tick_of[i.id] for i in touching if i.id not in self._moved)
        return steps

    def _is_argument(self, i: Instruction) -> bool:
        return i.opcode == "parameter" and i.computation_id == self._entry.id

    def hold_weight(self, transfer: ManagedTransfer, clock: list[float]) -> None:
        """Holds what `transfer` brings, once for each time that it is worth bringing."""
        buffer = self._dataflow.buffer_at(transfer.done or transfer.source)
        reads = [self._reached(read.user, buffer) for read in transfer.reads]
        if transfer.lives_out:
            reads.append({self._ticks.end - 1})
        is_one_copy = transfer.is_written or transfer.lives_out
        rate = self._machine.host_link.bytes_per_s
        worth_s = float("inf") if is_one_copy else transfer.size / rate
        held: list[set[int]] = []
        for read in sorted(reads, key=min):
            if held and clock[min(read)] - clock[max(held[-1]) + 1] <= worth_s:
                held[-1] |= read
            else:
                held.append(read)
        for touches in held:
            self._hold(transfer.size, touches)

    def _reached(self, user: Instruction, buffer: Buffer) -> set[int]:
        """The steps at which `user`, or what it hands the bytes on to, touches `buffer`."""
        holders = {p.instruction.id for p in buffer.positions}
        touching = holders | {use.instruction.id for use in buffer.uses}
        found, pending = {user.id}, [user.id]
        while pending:
            i = pending.pop()
            for u in self._dataflow.users.get(i, ()) if i in holders else ():
                if u.id in touching and u.id not in found:
                    found.add(u.id)
                    pending.append(u.id)
        return {self._ticks.tick_of[i] for i in found - self._moved}

    def workspace(self) -> Bytes:
        needed = np.zeros(self._ticks.end, np.int64)
        for resident in self._ticks.residents:
            if resident.kind == "workspace":
                needed[resident.live_range.start] += resident.size
        return needed

    def handovers(self) -> Iterator[Handover]:
        """What may take over an operand's bytes, by the rules of `allocations`."""
        dataflow, tick_of = self._dataflow, self._ticks.tick_of
        alone: dict[int, int] = {}
        for buffer_id, holding in self._holding_of.items():
            values = dataflow.buffers[buffer_id].values
            if len(values) == 1:
                alone[values[0].id] = holding
        for born in sorted(alone, key=lambda v: (tick_of[dataflow.values[v].instruction.id], v)):
            value = dataflow.values[born]
            i = value.instruction
            if i.computation_id != self._entry.id or i.opcode == "copy":
                continue
            for operand in i.operand_ids:
                read = dataflow.value_at(dataflow.module.instructions[operand])
                if (
                    read.id in alone
                    and read.instruction.id in i.operand_ids
                    and can_share(
                        dataflow, self._machine.platform, read.positions[0], i, value.index
                    )
                ):
                    yield Handover(alone[read.id], alone[born])
