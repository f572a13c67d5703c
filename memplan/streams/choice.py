"""Which stacks are worth a place on the device, when the budget has room for some.

A ring takes as long as the longest of what its layers compute and of what crosses the link
in either direction; all of it but the first slice and the last is under way at once:

    T = max(compute, bytes in / bandwidth in, bytes out / bandwidth out)

So a stack on the device gains time where its loops wait for the link, and nothing elsewhere.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hlo_passes.equations import Path
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module
from hlo_passes.loops.host_transfers import nests
from hlo_passes.pipeline import LoopRoom, Room
from hlo_passes.simulator.cost import instruction_costs
from memplan.streams.hosting import Hosting, Streams
from memplan.streams.rewrite import scope_of
from memplan.streams.uses import Source

_SCOPE = re.compile(r"ring(?:_\d+)+")


def ring_seconds(module: Module, machine: Machine) -> Mapping[str, float]:
    """Returns what the instructions of each ring compute in a step, in seconds, by the
    ring's scope.

    Args:
      module: scheduled.
    """
    costs, nest_of = instruction_costs(module, machine), nests(module)
    found: defaultdict[str, float] = defaultdict(float)
    for computation_id, nest in nest_of.items():
        for i in module.computations[computation_id].instructions:
            scopes = _SCOPE.findall(i.op_name)
            if scopes and i.opcode not in ("while", "call", "conditional"):
                found[scopes[-1]] += nest.executions * costs.get(i.id, 0.0)
    return found


def storing(streams: Streams, hosting: Hosting, room: Room) -> frozenset[Path]:
    """Returns the scans that store anything on the host, in loops that have room for more."""
    roomy = {scope for scope, loop in _by_scope(room).items() if loop.has_room}
    rings = streams.rings(hosting)
    return frozenset(p for p, ring in rings.items() if ring.stored and scope_of(p) in roomy)


def _by_scope(room: Room) -> dict[str, LoopRoom]:
    """The loops of the entry that are rings."""
    return {_SCOPE.findall(n)[-1]: loop for n, loop in room.loops.items() if _SCOPE.search(n)}


@dataclass(frozen=True)
class _Ring:
    """What a ring does in a step: seconds, and for each stack the bytes in and out."""

    scope: str
    compute_s: float
    moved: dict[Source, tuple[int, int]]


class _Place(NamedTuple):
    """Where in a step stacks that stay take memory.

    Attributes:
      room: bytes for them.
      slots: those of each that are not there then, by stack.
    """

    room: int
    slots: Mapping[Source, int]


def choose_kept(
    streams: Streams,
    hosting: Hosting,
    seconds: Mapping[str, float],
    machine: Machine,
    room: Room,
    size_of: Callable[[Source], int],
) -> frozenset[Source]:
    """Chooses, one after another, the stacks whose place on the device gains most time a byte.

    Args:
      hosting: everything that may live on the host does.
      seconds: of `ring_seconds`.
      room: what a budget has beyond the least for `hosting`.
      size_of: bytes of a stack on one device.

    O(stacks² · rings).
    """
    rings = _rings(streams, hosting, seconds, size_of)
    inward = machine.host_link
    outward = machine.link(inward.destination, inward.source)
    rates = inward.bytes_per_s, outward.bytes_per_s

    def step_s(kept: frozenset[Source]) -> float:
        total = 0.0
        for ring in rings:
            moved = [both for source, both in ring.moved.items() if source not in kept]
            in_s, out_s = (sum(m[way] for m in moved) / rates[way] for way in (0, 1))
            total += max(ring.compute_s, in_s, out_s)
        return total

    def needs(source: Source, place: _Place) -> int:
        return size_of(source) - place.slots.get(source, 0)

    def left_at(place: _Place) -> int:
        return place.room - sum(needs(source, place) for source in kept)

    places = _places(streams, hosting, rings, room, size_of)
    kept: frozenset[Source] = frozenset()
    left = {s for ring in rings for s in ring.moved} - hosting.asked
    now = step_s(kept)
    while True:
        tightest = min(places, key=left_at)
        free = [(place, left_at(place)) for place in places]
        gains = {
            s: (now - step_s(kept | {s})) / max(1, needs(s, tightest))
            for s in left
            if all(needs(s, place) <= bytes_left for place, bytes_left in free)
        }
        best = max(gains, key=lambda s: (gains[s], str(s)), default=None)
        if best is None or gains[best] <= 0:
            return kept
        kept |= {best}
        left.remove(best)
        now = step_s(kept)


def _places(
    streams: Streams,
    hosting: Hosting,
    rings: Sequence[_Ring],
    room: Room,
    size_of: Callable[[Source], int],
) -> list[_Place]:
    """Each ring, in which stacks that stay have no slots, and all that is none."""

    def slots(of: Iterable[_Ring]) -> dict[Source, int]:
        moved = {source for ring in of for source in ring.moved}
        return {s: hosting.depth * size_of(s) // _length(streams, s) for s in moved}

    scopes = _by_scope(room)
    nested = [ring for ring in rings if ring.scope not in scopes]
    around = (loop.beside for called, loop in room.loops.items() if not _SCOPE.search(called))
    return [
        _Place(room.bytes + room.elsewhere, {}),
        *(_Place(room.bytes + beside, slots(nested)) for beside in around),
        *(
            _Place(room.bytes + scopes[ring.scope].beside, slots([ring]))
            for ring in rings
            if ring.scope in scopes
        ),
    ]


def _rings(
    streams: Streams,
    hosting: Hosting,
    seconds: Mapping[str, float],
    size_of: Callable[[Source], int],
) -> list[_Ring]:
    moved: defaultdict[Path, defaultdict[Source, list[int]]] = defaultdict(
        lambda: defaultdict(lambda: [0, 0])
    )
    for source in (*hosting.arguments, *hosting.results):
        if source not in streams.stacks:
            continue
        for path in streams.stacks[source].scans:
            moved[path][source][0] += streams.scans[path].runs * size_of(source)
        result = streams.replaced_by.get(source, None) if isinstance(source, int) else source
        if result is not None:
            moved[result.path][source][1] += streams.scans[result.path].runs * size_of(source)
    return [
        _Ring(
            scope_of(path),
            seconds.get(scope_of(path), 0.0),
            {s: (i, o) for s, (i, o) in by_stack.items()},
        )
        for path, by_stack in moved.items()
    ]


def _length(streams: Streams, source: Source) -> int:
    return max(1, streams.scans[streams.stacks[source].scans[0]].length)
