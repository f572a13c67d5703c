"""What a step's time is made of: the chain of events of which each waits for the one before.

    compute   │ c0 │ c1 │▒▒▒▒▒▒▒│ c2 │▒▒│
    host→hbm       ├─w1─►├──w2──►              start(w1) stands behind c0
    hbm→host                         ├─a─►
    path      ═════╡═════╪═══════╪════╪══╡     c0, w1, w2, c2, a

The path is walked backwards from the end of the step. A compute is preceded by what ended
when it began: the compute before it or, after a stall, the transfer waited for. A transfer is
preceded by the one before it in its queue or, where the link was idle, by the engine at the
moment when it issued the start. What lies on the path makes the step longer if it takes
longer; nothing else does, at first (Kelley and Walker, "Critical-Path Planning and
Scheduling", 1959).

A fetch that found its link idle, and for which the engine then waits, was issued too late: in
a plan, since what lay in its place was still read. Such a chain is put down to memory, not to
the link.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import ON_CHIP_MEMORY_SPACE
from hlo_passes.simulator.timeline import ComputeSpan, Timeline, TransferId, TransferSpan

Engine = Literal["compute", "link in", "link out", "on-chip copies", "interconnect", "memory"]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of the path: ``[begin, end)`` seconds of the step that `by` takes.

    Attributes:
      by: a compute, a transfer or a collective.
      head: of transfers the one whose issue the chain through the queue begins with.
    """

    begin: float
    end: float
    by: ComputeSpan | TransferSpan
    head: TransferSpan | None = None


@dataclass(frozen=True, slots=True)
class Binding:
    """What holds the step's time.

    Attributes:
      engine: what has most of the path. ``"link in"`` carries bytes to the device's memory;
        ``"memory"`` stands for fetches that are issued too late to be hidden.
      seconds: of the path, by engine; they add up to the step.
      at: where memory has a part, the compute behind which the dearest of its fetches is
        issued, `transfer` the fetch; else ``""`` and None.
    """

    engine: Engine
    seconds: Mapping[Engine, float]
    at: str = ""
    transfer: TransferId | None = None

    @property
    def shares(self) -> Mapping[Engine, float]:
        """`seconds` as fractions of the step, largest first."""
        step_s = sum(self.seconds.values())
        ordered = sorted(self.seconds.items(), key=lambda item: -item[1])
        return {engine: s / step_s if step_s else 1.0 for engine, s in ordered}


def critical_path(timeline: Timeline) -> tuple[Stretch, ...]:
    """Returns the path in the order of time, without gaps, from 0 to the end of the step.

    A transfer's latency counts as the transfer's. O(n log n).
    """
    return tuple(reversed(_Walk(timeline).stretches()))


def binding(timeline: Timeline, machine: Machine) -> Binding:
    """Returns what holds the time of a simulated step.

    Args:
      machine: the one that it was simulated on.
    """
    seconds: dict[Engine, float] = defaultdict(float)
    late: dict[TransferId, float] = defaultdict(float)
    behind: dict[TransferId, str] = {}
    last = ""
    for stretch in critical_path(timeline):
        length = stretch.end - stretch.begin
        if isinstance(stretch.by, ComputeSpan):
            seconds["compute"] += length
            last = stretch.by.name
            continue
        assert stretch.head is not None
        engine = _engine(stretch.head, stretch.by, machine)
        seconds[engine] += length
        if engine == "memory":
            late[stretch.head.transfer] += length
            behind.setdefault(stretch.head.transfer, last)
    if not seconds:
        return Binding("compute", {"compute": 0.0})
    most = max(seconds, key=seconds.__getitem__)
    if not late:
        return Binding(most, dict(seconds))
    dearest = max(late, key=late.__getitem__)
    return Binding(most, dict(seconds), behind[dearest], dearest)


def _engine(head: TransferSpan, by: TransferSpan, machine: Machine) -> Engine:
    device = machine.device_memory.name
    spaces = {tier.name: tier.memory_space for tier in machine.tiers}
    if by.destination not in spaces:
        return "interconnect"
    if ON_CHIP_MEMORY_SPACE in (spaces[by.source], spaces[by.destination]):
        return "on-chip copies"
    if by.destination != device:
        return "link out"
    return "memory" if head.destination == device and head.issue > 0 else "link in"


class _Walk:
    """Backwards along the path of one step."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._queued = [*timeline.transfers, *timeline.collectives]
        self._ended: dict[float, list[int]] = defaultdict(list)
        for place, span in enumerate(self._queued):
            self._ended[span.end].append(place)
        self._compute_ends = [span.end for span in timeline.computes]

    def stretches(self) -> list[Stretch]:
        found: list[Stretch] = []
        now, computed = self._timeline.step_time_s, len(self._timeline.computes)
        while now > 0:
            # A compute of no length ends where it begins: each is looked at once.
            computed = min(computed, bisect_right(self._compute_ends, now))
            if computed and self._compute_ends[computed - 1] == now:
                computed -= 1
                span = self._timeline.computes[computed]
                found.append(Stretch(span.begin, now, span))
                now = span.begin
                continue
            place = next(p for p in self._ended[now] if self._queued[p].issue < now)
            chain = self._chain(place)
            head = chain[-1]
            for span in chain:
                begin = span.issue if span is head else span.begin
                found.append(Stretch(begin, span.end, span, head))
            now = head.issue
        return found

    def _chain(self, place: int) -> list[TransferSpan]:
        """A transfer and those before it in its queue, as long as each waits for the next."""
        chain = [self._queued[place]]
        while (before := self._before(place)) is not None:
            place = before
            chain.append(self._queued[place])
        return chain

    def _before(self, place: int) -> int | None:
        span = self._queued[place]
        ends = {span.source, span.destination}
        return next(
            (
                p
                for p in reversed(self._ended.get(span.begin, ()))
                if p < place and {self._queued[p].source, self._queued[p].destination} == ends
            ),
            None,
        )
