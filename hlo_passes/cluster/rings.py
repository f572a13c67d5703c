"""Where flows lie: a fixed number of slots at each stop of the way, taken in turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hlo_passes.cluster.cluster import Cluster, Place
from hlo_passes.cluster.routes import Leg, route
from hlo_passes.cluster.work import MARK, Flow, Program, Traffic, Work
from hlo_passes.errors import ClusterError
from hlo_passes.units import format_bytes

ALIGNMENT = 512
"""Bytes: what the place of a slot on each chip is a multiple of."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The slots of a flow.

    Attributes:
      bytes: of a slot, of all chips of a node together.
      stops: the memories in which its bytes come to rest, the source's first.
      legs: the way from each stop to the next.
      slots: how many there are at each stop.
      is_given: the caller has them, one for each run.
    """

    bytes: int
    stops: tuple[Place, ...]
    legs: tuple[Leg, ...]
    slots: tuple[int, ...]
    is_given: bool


def rings_within(cluster: Cluster, work: Work) -> Sequence[Mapping[str, Ring]]:
    """The rings of all flows, by name, with as many slots as the memories hold: one of each, and
    then all that are of use. Where not all fit, in several ways: two of what moves first, or those
    of what stays where it is, or of all in turn.

    Raises:
      ClusterError: when there is no way, or not even one slot of each fits.
    """
    rings = {flow.name: _ring(cluster, work, flow) for flow in work.flows}
    used = _used(cluster, work)
    for ring in rings.values():
        for place in () if ring.is_given else ring.stops:
            used[place] += slot_bytes(cluster, place, ring.bytes)
    for place, size in used.items():
        if size > (capacity := cluster.capacity(place)):
            raise ClusterError(
                f"{place}: programs, states and one slot of each flow take {format_bytes(size)}, "
                f"and there are {format_bytes(capacity)}",
                "Move a program, or cut it smaller.",
            )
    most = {
        flow.name: min(runs := len(work.runs(flow)), flow.in_flight or runs) for flow in work.flows
    }
    moves = [name for name, ring in rings.items() if len(ring.stops) > 1]
    stays = [name for name, ring in rings.items() if len(ring.stops) == 1 and not ring.is_given]
    two = {name: min(2, count) for name, count in most.items()}
    ways = (
        ((moves, two), (stays, most), (moves, most)),
        ((stays, most), (moves, most)),
        (([*stays, *moves], most),),
    )
    found: list[Mapping[str, Ring]] = []
    for way in ways:
        grown, left = dict(rings), dict(used)
        for names, enough in way:
            _grow(cluster, grown, left, names, enough)
        if grown not in found:
            found.append(grown)
    return found


def slot_bytes(cluster: Cluster, place: Place, size: int) -> int:
    """What a slot takes of a place, aligned on each of its node's members."""
    count = cluster.node(place.node).count
    return -(-size // (count * ALIGNMENT)) * ALIGNMENT * count


def own_slots(program: Program) -> tuple[Mapping[str, int], int]:
    """Where on each chip the slots of a program's own traffic begin, and the bytes of all.

    First fit in the order in which they are needed; those of the same segments lie apart.
    """
    offsets: dict[str, int] = {}
    # Offsets of what is still held, and until which segment.
    held: list[tuple[int, int, int]] = []
    most = 0
    for t in sorted(program.traffic, key=lambda t: (t.held[0], -t.bytes, t.name)):
        size, at = -(-own_bytes(t) // ALIGNMENT) * ALIGNMENT, 0
        held = [of for of in held if of[2] > t.held[0]]
        for begin, end, _ in sorted(held):
            if begin - at >= size:
                break
            at = max(at, end)
        offsets[t.name] = at
        held.append((at, at + size, t.held[1]))
        most = max(most, at + size)
    return offsets, most


def own_bytes(traffic: Traffic) -> int:
    """What a program's own traffic takes on each chip."""
    return MARK if traffic.is_collective else traffic.bytes


def hosted(cluster: Cluster, work: Work) -> Mapping[Place, Mapping[str, int]]:
    """What programs' own traffic reads or writes on hosts: bytes by place and name."""
    found: dict[Place, dict[str, int]] = defaultdict(dict)
    for program in work.programs:
        node = cluster.node(program.node)
        for t in program.traffic:
            if not t.is_collective:
                tier = t.destination if t.leaves else t.source
                place = cluster.host_place(node, tier)
                found[place][f"{program.name}/{t.of}"] = t.bytes * node.count
    return found


def _used(cluster: Cluster, work: Work) -> dict[Place, int]:
    """Bytes of each memory that something is in, but for slots of flows."""
    used: dict[Place, int] = {}
    for node in cluster.chips:
        programs = [p for p in work.programs if p.node == node.name]
        if programs:
            memory = max(p.memory_bytes for p in programs) + max(own_slots(p)[1] for p in programs)
            used[node.memory] = memory * node.count + work.given_bytes(node.name)
    for place, of in hosted(cluster, work).items():
        used[place] = used.get(place, 0) + sum(of.values())
    for flow in work.flows:
        for place in _ring(cluster, work, flow).stops:
            used.setdefault(place, 0)
    return used


def _ring(cluster: Cluster, work: Work, flow: Flow) -> Ring:
    ends = [
        cluster.node(work.program(name).node).memory
        for name in (flow.source, flow.destination)
        if name
    ]
    if len(ends) == 1:
        return Ring(flow.bytes, (ends[0],), (), (len(work.runs(flow)),), True)
    if ends[0] == ends[1]:
        return Ring(flow.bytes, (ends[0],), (), (1,), False)
    legs = route(cluster, ends[0], ends[1], flow.bytes)
    stops = (ends[0], *(leg.destination for leg in legs))
    return Ring(flow.bytes, stops, tuple(legs), (1,) * len(stops), False)


def _grow(
    cluster: Cluster,
    rings: dict[str, Ring],
    used: dict[Place, int],
    names: Iterable[str],
    most: Mapping[str, int],
) -> None:
    """Gives rings a slot more at each stop, in turn, as long as there is room for it."""
    growing = list(names)
    while growing:
        for name in list(growing):
            ring = rings[name]
            more = {place: slot_bytes(cluster, place, ring.bytes) for place in ring.stops}
            fits = all(used[p] + size <= cluster.capacity(p) for p, size in more.items())
            if ring.slots[0] >= most[name] or not fits:
                growing.remove(name)
                continue
            for place, size in more.items():
                used[place] += size
            rings[name] = replace(ring, slots=tuple(n + 1 for n in ring.slots))
