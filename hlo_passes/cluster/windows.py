"""A plan window by window: what computes, what moves, what is waited for, what is released.

A window goes from one moment at which some chip begins to compute to the next. What goes on for
longer is in several, with the bytes that move in each.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from hlo_passes.chains.chain import Action, Copy, Execute, Fence, Release, Wait
from hlo_passes.cluster.plan import ClusterPlan, Timed
from hlo_passes.cluster.work import NANOSECONDS
from hlo_passes.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Computing:
    """Nanoseconds of a window in which a segment runs; `is_new` where it begins in it."""

    name: str
    node: str
    ns: int
    is_new: bool


@dataclass(frozen=True, slots=True)
class Moving:
    """Bytes of a transfer or a collective that move in a window."""

    name: str
    stream: str
    bytes: int
    of: int
    wires: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Awaited:
    """What begins in a window waits for something of another stream: a fence."""

    name: str
    stream: str
    awaited: str
    is_previous: bool


@dataclass(frozen=True)
class Window:
    """Nanoseconds `begin` to `end` of the clock, half-open; windows are numbered from 0.

    Attributes:
      released: slots whose bytes are dead from some moment of it on.
    """

    number: int
    begin: int
    end: int
    computing: list[Computing] = field(default_factory=list[Computing])
    moving: list[Moving] = field(default_factory=list[Moving])
    awaited: list[Awaited] = field(default_factory=list[Awaited])
    released: list[str] = field(default_factory=list[str])

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def windows(plan: ClusterPlan) -> Sequence[Window]:
    """All windows of a plan, in order. O(n log n), and as much as there is in them."""
    chain = plan.chain
    begins = {t.span.begin for t in plan.timed if not t.span.wires}
    last = max((t.span.end for t in plan.timed), default=0)
    moments = [0, *sorted(begins - {0, last}), last]
    made = [Window(n, a, b) for n, (a, b) in enumerate(pairwise(moments))]
    collectives = plan.collective_bytes
    for timed in plan.timed:
        name, stream = described(plan, timed.descriptor.action), _stream(plan, timed)
        size = 0
        match timed.descriptor.action:
            case Copy() as copy:
                size = copy.bytes
            case Execute(segment):
                size = collectives.get(chain.segments[segment].name, 0)
            case _:
                pass
        for k, begin, end in _shares(moments, timed):
            if timed.span.wires:
                moved = _moved(timed, size, end) - _moved(timed, size, begin)
                made[k].moving.append(Moving(name, stream, moved, size, timed.span.wires))
            else:
                is_new = begin == timed.span.begin
                made[k].computing.append(Computing(name, stream, end - begin, is_new))
    for moment, waiting, waits in _fences(plan):
        of = made[min(bisect_right(moments, moment), len(made)) - 1]
        for wait in waits:
            name, stream = described(plan, waiting.descriptor.action), _stream(plan, waiting)
            awaited = described(plan, chain.descriptors[wait.index].action)
            of.awaited.append(Awaited(name, stream, awaited, wait.is_previous))
    for moment, slot in _releases(plan):
        of = made[min(bisect_right(moments, moment), len(made)) - 1]
        of.released.append(chain.slots[slot].name)
    return made


def text(made: Sequence[Window]) -> str:
    """Writes windows, a line for each thing that happens. What is waited for of the replay before
    has a ``'``, as in the text of chains."""
    lines: list[str] = []
    for window in made:
        begin, end = _at(window.begin), _at(window.end)
        lines.append(f"window {window.number}, {begin} to {end} ms")
        lines += (
            f"  computes  {of.name} on {of.node}, {format_seconds(of.ns / NANOSECONDS)}"
            + ("" if of.is_new else ", goes on")
            for of in window.computing
        )
        for of in window.moving:
            part = "" if of.bytes == of.of else f" of {format_bytes(of.of)}"
            way = ", ".join(of.wires)
            lines.append(f"  moves     {format_bytes(of.bytes)}{part}: {of.name}, over {way}")
        lines += (
            f"  awaits    {of.awaited}{"'" if of.is_previous else ''}, for {of.name}"
            for of in window.awaited
        )
        lines += (f"  releases  {name}" for name in window.released)
    return "\n".join(lines) + "\n"


def _at(ns: int) -> str:
    return f"{ns / 1e6:,.3f}"


def described(plan: ClusterPlan, action: Action) -> str:
    """What a descriptor does, by the names of its slots or segment."""
    match action:
        case Copy(source, destination):
            return f"{plan.chain.slots[source].name} -> {plan.chain.slots[destination].name}"
        case Execute(segment):
            return plan.chain.segments[segment].name
        case Release(slot):
            return f"release of {plan.chain.slots[slot].name}"
        case Fence():
            return "fence"


def _stream(plan: ClusterPlan, timed: Timed) -> str:
    return plan.chain.streams[timed.descriptor.stream].name


def _shares(moments: Sequence[int], timed: Timed) -> Iterator[tuple[int, int, int]]:
    """The windows that a span lies in, and from when to when."""
    begin, end = timed.span.begin, timed.span.end
    first = min(bisect_right(moments, begin), len(moments) - 1) - 1
    last = max(first + 1, bisect_left(moments, end))
    for k in range(first, last):
        yield k, max(begin, moments[k]), min(end, moments[k + 1])


def _moved(timed: Timed, size: int, moment: int) -> int:
    """Whole bytes that have moved by a moment, if they move evenly."""
    begin, end = timed.span.begin, timed.span.end
    return size * (moment - begin) // (end - begin) if end > begin else size


def _fences(plan: ClusterPlan) -> Iterator[tuple[int, Timed, Sequence[Wait]]]:
    """What begins when, and what it and the fences before it on its stream wait for."""
    timed = {of.at: of for of in plan.timed}
    waits: defaultdict[int, list[Wait]] = defaultdict(list)
    for k, d in enumerate(plan.chain.descriptors):
        waits[d.stream] += d.waits
        if k in timed and waits[d.stream]:
            yield timed[k].span.begin, timed[k], waits.pop(d.stream)


def _releases(plan: ClusterPlan) -> Iterator[tuple[int, int]]:
    """When which slot is released: when what is before that on its stream has ended."""
    timed = {of.at: of.span.end for of in plan.timed}
    ended: defaultdict[int, int] = defaultdict(int)
    for k, d in enumerate(plan.chain.descriptors):
        ended[d.stream] = timed.get(k, ended[d.stream])
        if isinstance(d.action, Release):
            yield ended[d.stream], d.action.slot
