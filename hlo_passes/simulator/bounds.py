"""How fast a step could be at best: a bound that no schedule of its transfers can beat.

Let S(d) be the moment when tick d's compute can begin. Three things hold it back:

    compute    S(d) ≥ S(d-1) + c(d-1)
    link       S(d) ≥ latency + need(d) / bandwidth
    memory     S(d) ≥ S(t) + c(t) + latency + (need(d) - gone(t) - headroom(t)) / bandwidth
               for every t < d for which the bracket is positive

`need(d)` is the bytes that must have arrived before tick d. The last line says that the
link cannot run ahead of the memory: of all transfers that have started by the end of tick
t, at most `headroom(t)` bytes are on the device then, and `gone(t)` may have left again::

    S(t) + c(t)                                             S(d)
     │─ gone(t) ─│▓▓ headroom(t) ▓▓│◄─ the rest starts later ─►│  = need(d)

One sweep takes the maximum over all t, since the part with t does not depend on d. The
beginning of the step is such a moment too: nothing has started then, or, where the planner
is free to keep some of the arguments on the device, at most `resident` bytes are there.

A transfer is made on one engine: its latency and length, and the compute behind it, are a bound,
too.

All are bounds on the machine model of `timeline`, with order and costs of the compute fixed.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hlo_passes.hardware.machine import Link, Machine
from hlo_passes.plan import LogicalTime
from hlo_passes.simulator.timeline import Direction


@dataclass(frozen=True, slots=True)
class Demand:
    """A transfer that every schedule has to make.

    Attributes:
      size: bytes.
      source, destination: tier names.
      deadline: the tick whose compute needs it; the number of ticks for what only has to
        be done when the step ends.
      end: the earliest tick at which its bytes may leave the device again: the one after
        its last reader, or, if it may be dropped and fetched anew, after its first.
    """

    size: int
    source: str
    destination: str
    deadline: LogicalTime
    end: LogicalTime


def lower_bound_s(
    tick_seconds: Sequence[float],
    demands: Iterable[Demand],
    machine: Machine,
    headroom: Sequence[float] | None = None,
    resident: float = 0,
) -> float:
    """Returns seconds that no schedule with these transfers can undercut.

    Args:
      tick_seconds: compute of each tick.
      demands: at least one transfer each; further transfers only add time.
      machine: whose links and device memory are meant.
      headroom: for each tick, the bytes of device memory left for the destinations of
        demands (the budget less everything else that is live); None where memory is no
        concern.
      resident: bytes of demands that need no transfer, whichever they are, as they may lie
        on the device when the step begins. What stays for the whole step has at most
        ``min(headroom)``.

    Raises:
      NotOnMachineError: when a demand has no link to take.

    O(n log n) in ticks and demands.
    """
    directions: dict[Direction, list[Demand]] = defaultdict(list)
    for demand in demands:
        machine.link(demand.source, demand.destination)
        if demand.size:  # no bytes, no transfer
            directions[demand.source, demand.destination].append(demand)
    sweeps = [
        _Sweep(
            machine.link(*direction),
            wanted,
            headroom if direction[1] == machine.device_memory.name else None,
            resident,
        )
        for direction, wanted in directions.items()
    ]

    reached = 0.0
    for tick in range(len(tick_seconds) + 1):
        reached = max([reached, *(sweep.earliest(tick) for sweep in sweeps)])
        if tick < len(tick_seconds):
            reached += tick_seconds[tick]
            for sweep in sweeps:
                sweep.ends(tick, reached)

    if resident:  # then no single transfer is sure to be made
        return reached

    # tails[d]: compute from tick d on.
    tails = [0.0, *accumulate(reversed(tick_seconds))][::-1]
    for (source, destination), wanted in directions.items():
        link = machine.link(source, destination)
        alone = (link.latency_s + d.size / link.bytes_per_s + tails[d.deadline] for d in wanted)
        reached = max(reached, *alone)
    return reached


class _Sweep:
    """The link and memory bounds of one direction, from tick 0 on."""

    def __init__(
        self,
        link: Link,
        demands: Iterable[Demand],
        headroom: Sequence[float] | None,
        resident: float,
    ) -> None:
        self._rate = link.bytes_per_s * link.engines
        self._latency = link.latency_s
        self._headroom = headroom
        self._due: dict[LogicalTime, int] = defaultdict(int)
        self._ends: dict[LogicalTime, int] = defaultdict(int)
        for demand in demands:
            self._due[demand.deadline] += demand.size
            self._ends[demand.end] += demand.size
        self._needed = self._gone = 0
        # Bytes that can have started by a moment, and moment - bytes / rate. The first is
        # the beginning of the step.
        self._moments: list[tuple[float, float]] = [(resident, -resident / self._rate)]
        self._latest = float("-inf")  # of the moments that need more than had started

    def earliest(self, tick: LogicalTime) -> float:
        """When everything that `tick` needs can have arrived."""
        self._needed += self._due[tick]
        self._gone += self._ends[tick]
        while self._moments and self._moments[0][0] < self._needed:
            self._latest = max(self._latest, heapq.heappop(self._moments)[1])
        return self._latest + self._latency + self._needed / self._rate

    def ends(self, tick: LogicalTime, moment: float) -> None:
        """Notes that the compute of `tick` does not end before `moment`."""
        if self._headroom is not None:
            started = self._gone + self._headroom[tick]
            heapq.heappush(self._moments, (started, moment - started / self._rate))
