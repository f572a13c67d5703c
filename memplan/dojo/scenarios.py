"""What an episode is about: a program, a machine and a budget, posed as the planner poses them.

module ─ normalized ─► Problem, on the machine as it is ─► priced anew, on machines near it
                          └► orders of the compute, each with its gaps
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hlo_passes import pipeline
from hlo_passes.edits.choice import Work, least_selection
from hlo_passes.edits.gaps import find_temporaries
from hlo_passes.fitting import fit
from hlo_passes.fitting.solution import edited
from hlo_passes.hardware.machine import Machine, Platform
from hlo_passes.ir import Module
from hlo_passes.placing import placement, problem
from hlo_passes.placing.problem import Problem
from hlo_passes.plan import Edits

SPREAD = 0.4
"""Of a machine that is drawn: the standard deviation of the logarithm of each of its bandwidths,
latencies and peaks. The library's GPUs differ from each other by twice that and more."""


@dataclass(frozen=True)
class Program:
    """A scheduled module, whose arguments on the host may stay on the device.

    Attributes:
      name: unique among the programs of an environment.
      platform: that it was compiled for.
    """

    name: str
    module: Module
    platform: Platform


def drawn_near(machine: Machine, variant: int) -> Machine:
    """Returns a machine with other bandwidths, latencies and peaks, the same for the same number;
    0 is the machine itself. Its memories are as large: budgets are drawn anyway."""
    if not variant:
        return machine
    draws = np.random.default_rng([variant, *machine.name.encode()])

    def factor() -> float:
        return math.exp(draws.normal(0.0, SPREAD))

    arithmetic = factor()
    wires = {
        frozenset((link.source, link.destination)): (factor(), factor()) for link in machine.links
    }

    def drawn(source: str, destination: str) -> tuple[float, float]:
        return wires[frozenset((source, destination))]

    return replace(
        machine,
        name=f"{machine.name}~{variant}",
        hbm_bytes_per_s=machine.hbm_bytes_per_s * factor(),
        peak_flops=tuple((dtype, flops * arithmetic) for dtype, flops in machine.peak_flops),
        links=tuple(
            replace(
                link,
                nominal_bytes_per_s=link.nominal_bytes_per_s
                * drawn(link.source, link.destination)[0],
                latency_s=link.latency_s * drawn(link.source, link.destination)[1],
            )
            for link in machine.links
        ),
    )


@dataclass(frozen=True, eq=False)
class Gaps:
    """The gaps of temporaries that may be taken in one order of the compute, the largest first.

    Attributes:
      temporary, start, end: int64[gaps]: which, and the accesses that it is between.
      size: int64[gaps], bytes.
      maker_s: float64[gaps], seconds to make it again, without what that needs; infinity where it
        cannot be.
      written: int64[gaps], the tick at which the temporary is made.
    """

    temporary: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    maker_s: npt.NDArray[np.float64]
    written: npt.NDArray[np.int64]

    @cached_property
    def number(self) -> Mapping[tuple[int, int], int]:
        """Temporary and start of each to its own number."""
        pairs = zip(self.temporary.tolist(), self.start.tolist(), strict=True)
        return {pair: k for k, pair in enumerate(pairs)}

    @cached_property
    def of_temporary(self) -> Mapping[int, npt.NDArray[np.int64]]:
        """The numbers of each temporary's gaps."""
        return {n: np.flatnonzero(self.temporary == n) for n in set(self.temporary.tolist())}


class Ordered:
    """A program on a machine, its compute in one order.

    Attributes:
      posed: every argument that may move on the host.
      order: what brought it into that order.
    """

    def __init__(self, posed: Problem, order: Edits) -> None:
        self.posed, self.order = posed, order
        self.temporaries = find_temporaries(posed.ranges, posed.ticks)
        self._works: dict[frozenset[str], Work] = {}

    def on_machine(self, machine: Machine) -> Ordered:
        """The same with the seconds of another machine."""
        other = copy.copy(self)
        other.posed, other._works = problem.on_machine(self.posed, machine), {}
        return other

    def work(self, stay: frozenset[str]) -> Work:
        """What there is to choose with some arguments on the device."""
        if stay not in self._works:
            if len(self._works) == _KEPT:
                del self._works[next(iter(self._works))]
            self._works[stay] = Work(self.posed.staying(stay), self.temporaries)
        return self._works[stay]

    @cached_property
    def gaps(self) -> Gaps:
        """Those that are worth a look: what the planner leaves alone for its size is left out."""
        work, end = self.work(frozenset()), self.posed.ticks.end
        rows = [
            (
                t.number,
                *gap,
                t.size,
                float(self.posed.costs[t.written]) if t.operands is not None else math.inf,
                t.written,
            )
            for t in work.temporaries
            if not t.obstacle
            and t.size >= max(1, work.smallest)
            # What is read behind the last tick is handed back.
            and all(r.tick != end for r in t.reads)
            for gap in pairwise(t.accesses)
            if gap[1] > gap[0] + 1
        ]
        rows.sort(key=lambda row: (-row[3] * (row[2] - row[1]), row[0], row[1]))
        table = np.array(rows, np.float64).reshape(-1, 6)
        n, start, end, size, maker_s, written = table.T
        whole = (column.astype(np.int64) for column in (n, start, end, size))
        return Gaps(*whole, maker_s=maker_s, written=written.astype(np.int64))


# How many selections of arguments that stay have their temporaries kept ready.
_KEPT = 64


class Situation:
    """A program on one machine, without a budget.

    Attributes:
      base_s: seconds of a step with everything on the device, in the compiler's order.
      total: bytes of the device for that.
      floor: bytes that are live at once where most are, with every argument streamed and all taken
        away that the planner can; what packing takes is not in them.
    """

    def __init__(self, program: Program, machine: Machine, orders: Sequence[Ordered]) -> None:
        self.program, self.machine, self.orders = program, machine, orders
        # The program with some arguments on the device, by their numbers; see `plans`.
        self.resident: dict[frozenset[int], Problem] = {}
        posed = orders[0].posed
        self.base_s = float(posed.clock[-1])
        # What takes the place of a donated argument is where that is: they stay on the host.
        self.movables = tuple(m for m in posed.movables if m.store is None)
        self.floor = min(_least(o.posed) for o in orders)
        everything = frozenset(m.buffer for m in self.movables)
        free = placement.capacity_beside(posed, 0, everything)
        self.total = int(posed.arena.load.max(initial=0)) - free

    def budget(self, share: float) -> int:
        """Bytes: of a share 0 `floor`, of 1 `total`."""
        return self.floor + round(share * (self.total - self.floor))


def _least(posed: Problem) -> int:
    taken = least_selection(posed)
    most = 0 if taken is None else int(taken.load.max())
    return most - placement.capacity_beside(posed, 0, frozenset())


class Situations:
    """Programs on machines, each posed when it is first asked for.

    Args:
      pairs: of programs and machines of their platform.
    """

    def __init__(self, pairs: Sequence[tuple[Program, Machine]]) -> None:
        self._posed: dict[tuple[str, str], tuple[Ordered, ...]] = {}
        self._found: dict[tuple[str, str, int], Situation] = {}
        self.pairs = tuple(pairs)

    def situation(self, pair: int, variant: int) -> Situation:
        """The program of a pair on its machine (0), or on one drawn near it."""
        program, machine = self.pairs[pair]
        key = program.name, machine.name
        if (*key, variant) not in self._found:
            if key not in self._posed:
                self._posed[key] = tuple(_orders(pipeline.pose_module(program.module, machine)))
            orders, near = self._posed[key], drawn_near(machine, variant)
            if variant:
                orders = tuple(o.on_machine(near) for o in orders)
            self._found[*key, variant] = Situation(program, near, orders)
        return self._found[*key, variant]


def _orders(posed: Problem) -> Iterator[Ordered]:
    """XLA's order, and those that the planner knows whatever the budget is."""
    yield Ordered(posed, Edits())
    for order in fit.orders_at_any_budget(posed):
        yield Ordered(edited(posed, order), order)
