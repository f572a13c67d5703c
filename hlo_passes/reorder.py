"""Puts the entry's compute in an order in which less memory is needed at once.

    before   g1  g2  g3  g4  u1  u2  u3  u4      gradients pile up until the optimizer runs
    after    g1  u1  g2  u2  g3  u3  g4  u4      each is used where it is made

Compute takes the same time in every order on the machine model, so that what is gained costs
nothing: no transfer, nothing twice. It is the first thing to do where memory runs short, and
nothing is done where it does not: as many instructions move as are needed, and the others
keep XLA's order.

Moves are found on a model of the entry (`order_load`); XLA's own rules for the bytes of the
new order (`ticks`) decide whether it is taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from hlo_passes import edits
from hlo_passes.assignment import assign_offsets, max_live_load
from hlo_passes.dataflow import analyze_dataflow
from hlo_passes.ir import Module
from hlo_passes.live_ranges import LiveRanges, compute_live_ranges
from hlo_passes.machine import Machine
from hlo_passes.memory import BACKENDS, measure_memory
from hlo_passes.order_holdings import Holdings, order_holdings
from hlo_passes.order_load import Load, OrderProblem
from hlo_passes.order_rules import order_rules
from hlo_passes.order_search import lower_loads
from hlo_passes.plan import Edits, LiveRange
from hlo_passes.quick_peak import peak_at_most
from hlo_passes.ticks import EntryTicks, entry_ticks

# How often orders are looked for: again with less capacity, where XLA's rules need more for
# what was found than the model does.
_ROUNDS = 3

# Of the orders that are found, so many are looked at, best first, for one that packs well.
_TRIES = 4

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
    host, from their first reader to their last (see `order_holdings`). Called computations
    stay as they are, and what must keep its place does (`order_rules`).

    Args:
      module: scheduled.
      capacity: bytes.
      host_parameters: numbers of the arguments on the host; read on CPU only, where the
        module does not say it.

    Returns:
      HLO names of all instructions of the entry but its parameters, in an order whose peak is
      lower than that of XLA's: at most `capacity`, or as low as was found. A weight's copy
      stands in front of its first reader. Empty where XLA's order is good enough, or none
      better was found.

    Raises:
      UnscheduledModuleError: when the module has no schedule.

    O(instructions) where little memory is needed; else what `ticks` takes, and a bounded
    search (`order_search.lower_loads`).
    """
    hosted = host_parameters if machine.platform == "cpu" else None
    if peak_at_most(module, hosted or ()) <= capacity:
        return ()
    entry = _Entry(module, machine, hosted)
    if entry.present.peak <= capacity or not entry.problem.is_in_order:
        return ()
    best, target = (), capacity
    for _ in range(_ROUNDS):
        _, *lower = lower_loads(entry.problem, target)
        for load in lower[: -_TRIES - 1 : -1]:
            names = entry.names(load)
            need = entry.need(edits.apply(module, Edits(order=names)), load)
            if need.peak < entry.present.peak and need.packed <= entry.present.packed:
                break
        else:
            return best
        best = names
        if need.peak <= capacity or load.peak > target:
            return best
        target -= need.peak - load.peak
    return best


def order_problem(ranges: LiveRanges, ticks: EntryTicks, holdings: Holdings) -> OrderProblem:
    """Poses the question how the entry could be ordered. Step t is ``ticks.instructions[t]``."""
    rules = order_rules(ranges.dataflow, ticks.instructions)
    return OrderProblem(
        before=rules.before,
        sizes=holdings.sizes,
        touches=holdings.touches,
        workspace=holdings.workspace,
        handovers=holdings.handovers,
        lodgings=holdings.lodgings,
        opens=rules.opens,
        takes_time=rules.takes_time,
    )


class _Need(NamedTuple):
    """Bytes that an order needs by XLA's rules.

    Attributes:
      peak: the most that are live at once.
      packed: what the target's packing makes of it.
    """

    peak: int
    packed: int


class _Entry:
    """The entry of a module, as it is and as it could be ordered."""

    def __init__(
        self, module: Module, machine: Machine, host_parameters: Collection[int] | None
    ) -> None:
        self._machine, self._host_parameters = machine, host_parameters
        ranges = compute_live_ranges(analyze_dataflow(module))
        self._ticks = entry_ticks(ranges, machine.platform, host_parameters)
        holdings = order_holdings(ranges, self._ticks, machine)
        self._weights = slice(len(holdings.sizes) - holdings.weights, None)
        self.problem = order_problem(ranges, self._ticks, holdings)
        self.present = self._need(ranges, self._ticks, self.problem.present)

    def need(self, reordered: Module, load: Load) -> _Need:
        """What the entry needs in the order of `load`, which `reordered` has."""
        ranges = compute_live_ranges(analyze_dataflow(reordered))
        ticks = entry_ticks(ranges, self._machine.platform, self._host_parameters)
        return self._need(ranges, ticks, load)

    def _need(self, ranges: LiveRanges, ticks: EntryTicks, load: Load) -> _Need:
        held = [r for r in ticks.residents if r.kind in ("temp", "workspace")]
        sizes, lives = [r.size for r in held], [r.live_range for r in held]
        first, last = load.first[self._weights], load.last[self._weights] + 1
        sizes += load.sizes[self._weights].tolist()
        lives += map(LiveRange, first.tolist(), last.tolist())
        packed, target = 0, self._machine.platform
        if len(sizes) <= _MOST_PACKED:
            if ticks.transfers:  # Weights lie where the planner has them, not XLA.
                backend = BACKENDS[target]
                packing = assign_offsets(
                    sizes, lives, backend.alignment, strategies=backend.strategies
                )
                packed = packing.total
            else:
                packed = measure_memory(ranges, target).heap_bytes
        return _Need(max_live_load(sizes, lives), packed)

    def names(self, load: Load) -> tuple[str, ...]:
        """The order by name, each copy from the host in front of its first reader."""
        fetched: defaultdict[int, list[str]] = defaultdict(list)
        for transfer in self._ticks.transfers:
            halves = (transfer.start, transfer.done)
            readers = [self._ticks.tick_of[read.user.id] for read in transfer.reads]
            first = load.place[readers or [self._ticks.end - 1]].min()
            fetched[int(first)] += [half.name for half in halves if half is not None]
        names: list[str] = []
        for place, step in enumerate(load.order.tolist()):
            names += fetched[place]
            names.append(self._ticks.instructions[step].name)
        return tuple(names)
