"""Puts the entry's compute in an order in which less memory is needed at once.

    before   g1  g2  g3  g4  u1  u2  u3  u4      gradients pile up until the optimizer runs
    after    g1  u1  g2  u2  g3  u3  g4  u4      each is used where it is made

Compute takes the same time in every order on the machine model, so that what is gained costs
nothing: no transfer, nothing twice. It is the first thing to do where memory runs short, and
nothing is done where it does not: as many instructions move as are needed, and the others
keep XLA's order.

Moves are found on a model of the entry (`orders.load`); XLA's own rules for the bytes of the
new order (`ticks`) decide whether it is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.live_ranges import LiveRanges, compute_live_ranges
from hlo_passes.analysis.sharing import Target
from hlo_passes.analysis.stores import touching
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module
from hlo_passes.memory.assignment import assign_offsets, max_live_load
from hlo_passes.memory.usage import BACKENDS, measure_memory
from hlo_passes.orders.holdings import Holdings, order_holdings
from hlo_passes.orders.load import Load, OrderProblem
from hlo_passes.orders.quick_peak import peak_at_most
from hlo_passes.orders.release import released_early
from hlo_passes.orders.rules import order_rules
from hlo_passes.orders.search import lower_loads
from hlo_passes.placing.ticks import EntryTicks, entry_ticks
from hlo_passes.plan import Edits, LiveRange
from hlo_passes.rewrite import edits
from hlo_passes.simulator.cost import instruction_costs

# How often orders are looked for: again with less capacity, where XLA's rules need more for
# what was found than the model does.
_ROUNDS = 3

# Of the orders that are found, so many are looked at, best first, for one that packs well.
_TRIES = 4

# By what part of its bytes times seconds an order that frees early has to need less.
_LEAST_GAIN = 1 / 256

# Packing takes time that grows with the square of the buffers: a second for 10,000.
_MOST_PACKED = 20_000


def lower_peak(
    module: Module,
    machine: Machine,
    capacity: int,
    host_parameters: Collection[int] | None = None,
) -> tuple[str, ...]:
    """Finds an order of the entry in which no more than `capacity` bytes are live at once.

    Live are temporaries in the device's memory, and weights that are copied there from the
    host, from their first reader to their last (see `orders.holdings`). Called computations
    stay as they are, and what must keep its place does (`orders.rules`).

    Args:
      module: scheduled.
      capacity: bytes.
      host_parameters: numbers of the arguments on the host; read on CPU only, where the
        module does not say it.

    Returns:
      HLO names of all instructions of the entry but its parameters, in an order whose peak is
      lower than that of XLA's: at most `capacity`, or as low as was found. A weight's copy
      stands in front of its first reader. Empty where XLA's order is good enough, where none
      better was found, or where XLA's own order breaks `orders.rules`: then they do not say
      which others are right (seen with collectives that XLA:TPU v5e fuses, whose start is
      said to write over a donated argument).

    Raises:
      UnscheduledModuleError: when the module has no schedule.

    O(instructions) where little memory is needed; else what `ticks` takes, and a bounded
    search (`orders.search.lower_loads`).
    """
    hosted = host_parameters if machine.has_one_memory else None
    if peak_at_most(module, hosted or ()) <= capacity:
        return ()
    entry = _Entry(module, machine, hosted)
    best, names, target = entry.present, (), capacity
    for _ in range(_ROUNDS if entry.problem.is_in_order else 0):
        if best.peak <= capacity:
            break
        _, *lower = lower_loads(entry.problem, target)
        found = entry.first_that_gains(lower[: -_TRIES - 1 : -1])
        if found is None:
            break
        if found.peak < best.peak:
            best, names = found, entry.names(found.load)
        if found.load.peak > target:
            break
        target -= found.peak - found.load.peak
    return names


def release_early(
    module: Module,
    machine: Machine,
    capacity: int,
    host_parameters: Collection[int] | None = None,
) -> tuple[str, ...]:
    """Finds an order of the entry in which bytes are freed as soon as they can be, where more
    than `capacity` are live; its peak may be that of XLA's.

    Args, and what is returned: as for `lower_peak`; nothing, too, where hardly fewer bytes would
    be live for hardly less time.

    O(instructions · log instructions), and what `ticks` takes.
    """
    hosted = host_parameters if machine.has_one_memory else None
    if peak_at_most(module, hosted or ()) <= capacity:
        return ()
    entry = _Entry(module, machine, hosted)
    if not entry.problem.is_in_order:
        return ()
    early = released_early(entry.problem, capacity)
    costs = instruction_costs(module, machine)
    seconds = np.array([costs[i.id] for i in entry.present.ticks.instructions])
    held, present = (
        float(load.at @ seconds[load.order]) for load in (early, entry.problem.present)
    )
    if held > (1 - _LEAST_GAIN) * present:
        return ()
    found = entry.measured(early)
    return entry.names(found.load) if found.peak <= entry.present.peak else ()


def order_problem(ranges: LiveRanges, ticks: EntryTicks, holdings: Holdings) -> OrderProblem:
    """Poses the question how the entry could be ordered. Step t is ``ticks.instructions[t]``."""
    rules = order_rules(ranges.dataflow, ticks.instructions)
    return OrderProblem(
        before=rules.before,
        sizes=holdings.sizes,
        touches=holdings.touches,
        workspace=holdings.workspace,
        handovers=holdings.handovers,
        colocations=holdings.colocations,
        opens=rules.opens,
        takes_time=rules.takes_time,
    )


@dataclass(frozen=True, eq=False)
class _Measured:
    """What an order needs by XLA's rules.

    Attributes:
      ranges, ticks: of the entry in that order.
      weights: how many holdings of the load, the last ones, are of fetched weights.
    """

    ranges: LiveRanges
    ticks: EntryTicks
    load: Load
    weights: int
    target: Target

    @cached_property
    def _held(self) -> tuple[list[int], list[LiveRange]]:
        held = [r for r in self.ticks.residents if r.kind in ("temp", "workspace")]
        weights = slice(len(self.load.sizes) - self.weights, None)
        first, last = self.load.first[weights], self.load.last[weights] + 1
        return (
            [r.size for r in held] + self.load.sizes[weights].tolist(),
            [r.live_range for r in held] + [*map(LiveRange, first.tolist(), last.tolist())],
        )

    @cached_property
    def peak(self) -> int:
        """The most bytes that are live at once."""
        return max_live_load(*self._held)

    @cached_property
    def packed(self) -> int:
        """Bytes of an arena that holds them; 0 where there are too many to say."""
        if len(self._held[0]) > _MOST_PACKED:
            return 0
        if not self.ticks.transfers:
            return measure_memory(self.ranges, self.target).heap_bytes
        # Weights lie where the planner has them, not XLA.
        backend = BACKENDS[self.target]
        return assign_offsets(*self._held, backend.alignment, strategies=backend.strategies).total


class _Entry:
    """The entry of a module, as it is and as it could be ordered."""

    def __init__(
        self, module: Module, machine: Machine, host_parameters: Collection[int] | None
    ) -> None:
        self._module, self._host_parameters = module, host_parameters
        self._target: Target = machine.platform
        ranges, ticks = self._analyzed(module)
        holdings = order_holdings(ranges, ticks, machine)
        self.problem = order_problem(ranges, ticks, holdings)
        self.present = _Measured(
            ranges, ticks, self.problem.present, holdings.weights, self._target
        )

    def _analyzed(self, module: Module) -> tuple[LiveRanges, EntryTicks]:
        ranges = compute_live_ranges(analyze_dataflow(module))
        return ranges, entry_ticks(ranges, self._target, self._host_parameters)

    def first_that_gains(self, loads: Iterable[Load]) -> _Measured | None:
        """The first of `loads` that needs less than the present order, packed or not."""
        for found in map(self.measured, loads):
            if found.peak < self.present.peak and found.packed <= self.present.packed:
                return found
        return None

    def measured(self, load: Load) -> _Measured:
        load = self._with_views(load)
        reordered = edits.apply(self._module, Edits(order=self.names(load)))
        ranges, ticks = self._analyzed(reordered)
        return _Measured(ranges, ticks, load, self.present.weights, self._target)

    def _with_views(self, load: Load) -> Load:
        """The order with what only shows bytes under another name right behind what makes them.

        Where it stands costs nothing, but one without a reader keeps those bytes: in the middle
        of a time when nobody reads them, it would be all that does.
        """
        instructions = self.present.ticks.instructions
        step_of = {i.id: step for step, i in enumerate(instructions)}
        behind: defaultdict[int, list[int]] = defaultdict(list)
        shown: set[int] = set()
        for step, i in enumerate(instructions):
            if i.opcode in ("bitcast", "get-tuple-element"):
                maker = step_of.get(i.operand_ids[0], -1)
                if self.problem.before[step] == (maker,):
                    behind[maker].append(step)
                    shown.add(step)
        order: list[int] = []
        for step in load.order.tolist():
            pending = [] if step in shown else [step]
            while pending:
                order.append(pending.pop())
                pending += reversed(behind[order[-1]])
        return Load(load.problem, np.array(order, np.intp))

    def names(self, load: Load) -> tuple[str, ...]:
        """The order by name, each copy from the host in front of its first reader, and each to the
        host behind the last reader of what it copies."""
        fetched: defaultdict[int, list[str]] = defaultdict(list)
        stored: defaultdict[int, list[str]] = defaultdict(list)
        tick_of, touched = self.present.ticks.tick_of, touching(self._module)
        for transfer in self.present.ticks.transfers:
            halves = [half.name for half in (transfer.start, transfer.done) if half is not None]
            if transfer.evicts:
                last = load.place[[tick_of[i.id] for i in touched[transfer.source.id]]].max()
                stored[int(last)] += halves
                continue
            readers = [tick_of[read.user.id] for read in transfer.reads]
            first = load.place[readers or [self.present.ticks.end - 1]].min()
            fetched[int(first)] += halves
        names: list[str] = []
        for place, step in enumerate(load.order.tolist()):
            names += fetched[place]
            names.append(self.present.ticks.instructions[step].name)
            names += stored[place]
        return tuple(names)
