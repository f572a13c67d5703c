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

Transfers that cannot start before a given tick (an eviction, and the refetch behind it) add
a bound of their own. A link is a machine, a transfer a job with a head (the time before it
can start), a length and a tail (the compute that still follows). The largest of
min head + sum of lengths + min tail over all sets of jobs is what Jackson's preemptive
schedule takes, and no schedule is shorter (Carlier, "The one-machine sequencing problem",
European Journal of Operational Research 11, 1982, section 2).

Both are bounds on the machine model of `hlo_passes.timeline`, with order and costs of the
compute fixed.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hlo_passes.hardware.machine import Link, Machine
from hlo_passes.plan import LogicalTime
from hlo_passes.simulator.timeline import Direction, queue_of


@dataclass(frozen=True, slots=True)
class Demand:
    """A transfer that every schedule has to make.

    Attributes:
      size: bytes.
      source, destination: tier names.
      release: the earliest tick at which it can start; 0 for what lies on the host before
        the step.
      deadline: the tick whose compute needs it; the number of ticks for what only has to
        be done when the step ends.
      end: the earliest tick at which its bytes may leave the device again: the one after
        its last reader, or, if it may be dropped and fetched anew, after its first.
    """

    size: int
    source: str
    destination: str
    release: LogicalTime
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
    queues: dict[Direction, list[Demand]] = defaultdict(list)
    for demand in demands:
        link = machine.link(demand.source, demand.destination)
        if not demand.size:
            continue  # no bytes, no transfer
        directions[demand.source, demand.destination].append(demand)
        queues[queue_of(link)].append(demand)
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
    arrivals: list[float] = []  # the engine is done with everything before the tick
    for tick in range(len(tick_seconds) + 1):
        arrivals.append(reached)
        reached = max([reached, *(sweep.earliest(tick) for sweep in sweeps)])
        if tick < len(tick_seconds):
            reached += tick_seconds[tick]
            for sweep in sweeps:
                sweep.ends(tick, reached)

    if resident:  # then no single transfer is sure to be made
        return reached

    # tails[d]: compute from tick d on.
    tails = [0.0, *accumulate(reversed(tick_seconds))][::-1]
    bounds = [reached]
    for wanted in queues.values():
        jobs: list[_Job] = []
        engines = max(machine.link(d.source, d.destination).engines for d in wanted)
        for d in wanted:
            link = machine.link(d.source, d.destination)
            length = d.size / link.bytes_per_s
            head, tail = arrivals[d.release] + link.latency_s, tails[d.deadline]
            jobs.append(_Job(head, length / engines, tail))
            # One transfer does not use more than one engine.
            bounds.append(head + length + tail)
        bounds.append(_jackson_s(jobs))
    return max(bounds)


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


@dataclass(frozen=True, slots=True)
class _Job:
    head: float
    length: float
    tail: float


def _jackson_s(jobs: Iterable[_Job]) -> float:
    """The length of Jackson's preemptive schedule: of the jobs that have arrived, the one
    with the longest tail is always the one in work."""
    arriving = sorted(jobs, key=lambda job: job.head)
    waiting: list[tuple[float, float]] = []  # (-tail, seconds left)
    now = longest = 0.0
    i = 0
    while i < len(arriving) or waiting:
        if not waiting:
            now = max(now, arriving[i].head)
        while i < len(arriving) and arriving[i].head <= now:
            heapq.heappush(waiting, (-arriving[i].tail, arriving[i].length))
            i += 1
        minus_tail, left = heapq.heappop(waiting)
        until = arriving[i].head if i < len(arriving) else float("inf")
        if now + left <= until:
            now += left
            longest = max(longest, now - minus_tail)
        else:
            heapq.heappush(waiting, (minus_tail, left - (until - now)))
            now = until
    return longest
