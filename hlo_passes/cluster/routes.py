"""Over which wires bytes go from one place to another."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from hlo_passes.cluster.cluster import Cluster, Place, Wire
from hlo_passes.errors import ClusterError


class Leg(NamedTuple):
    """Wires that one transfer takes at once, from a memory to a memory."""

    source: Place
    destination: Place
    wires: tuple[Wire, ...]

    @property
    def bytes_per_s(self) -> int:
        """What its narrowest wire carries."""
        return min(wire.bytes_per_s for wire in self.wires)

    @property
    def latency_s(self) -> float:
        return sum(wire.latency_s for wire in self.wires)

    def seconds(self, size: int) -> float:
        return self.latency_s + size / self.bytes_per_s


def route(cluster: Cluster, source: Place, destination: Place, size: int) -> Sequence[Leg]:
    """The way on which `size` bytes arrive first, if nothing else is under way.

    Where no wires lead from one memory to the other through switches alone, or that takes longer,
    bytes come to rest in hosts' memories in between, a leg each.

    Raises:
      ClusterError: when no way leads there.

    Dijkstra's algorithm (1959) over memories, whose edges are the fastest legs; those are found by
    it over switches, with all ways to a switch of which no other one has less latency and a wider
    narrowest wire (Hansen 1980). O(m r w log (r w)) for m memories and w wires of r rates.
    """
    hosts = {Place(n.name, t.name) for n in cluster.nodes if n.machine is None for t in n.tiers}
    best: dict[Place, float] = {source: 0.0}
    order = count()  # Of equal ways the first that was found.
    heap: list[tuple[float, int, Place, tuple[Leg, ...]]] = [(0.0, next(order), source, ())]
    while heap:
        seconds, _, at, legs = heapq.heappop(heap)
        if at == destination and legs:
            return legs
        if seconds > best[at] or (legs and at not in hosts):
            continue
        for leg in _legs(cluster, at, size):
            then = seconds + leg.seconds(size)
            if leg.destination == source or then >= best.get(leg.destination, float("inf")):
                continue
            best[leg.destination] = then
            heapq.heappush(heap, (then, next(order), leg.destination, (*legs, leg)))
    raise ClusterError(
        f"no wires lead from {source} to {destination}", "Add one, or a switch between them."
    )


def loop(cluster: Cluster, node: str) -> Leg:
    """What a ring over the chips of a node goes over: to their fabric and back.

    Raises:
      ClusterError: when they have none.
    """
    at = cluster.node(node)
    ends = str(at.memory), at.fabric
    wires = [w for w in cluster.wires if (str(w.source), str(w.destination)) in (ends, ends[::-1])]
    if not at.fabric or len({wire.medium for wire in wires}) != 2:
        raise ClusterError(
            f"a collective on {node}, whose chips have no fabric to send to and from at once",
            "Give them one, and a machine with an interconnect.",
        )
    return Leg(at.memory, at.memory, tuple(wires))


def _legs(cluster: Cluster, source: Place, size: int) -> Iterator[Leg]:
    """The fastest leg to each memory that is reached through switches alone."""
    outgoing: dict[Place, list[Wire]] = {}
    for wire in cluster.wires:
        outgoing.setdefault(wire.source, []).append(wire)
    # Latency and rate of the ways to each place.
    known: dict[Place, list[tuple[float, float]]] = {source: [(0.0, math.inf)]}
    arrived: set[Place] = set()
    order = count()
    # Of equally fast ways that of fewer wires.
    heap: list[tuple[float, int, int, Place, tuple[Wire, ...]]] = [(0.0, 0, 0, source, ())]
    while heap:
        *_, at, wires = heapq.heappop(heap)
        if at in arrived:
            continue
        if wires and at.tier:
            arrived.add(at)
            yield Leg(source, at, wires)
            continue
        for wire in outgoing.get(at, ()):
            leg = Leg(source, wire.destination, (*wires, wire))
            latency, rate = leg.latency_s, leg.bytes_per_s
            others = known.setdefault(leg.destination, [])
            if all(latency < of or rate > wide for of, wide in others):
                others.append((latency, rate))
                key = leg.seconds(size), len(leg.wires), next(order)
                heapq.heappush(heap, (*key, leg.destination, leg.wires))
