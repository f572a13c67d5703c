"""Which stacks are worth a place on the device, when the budget has room for some.

A ring takes as long as the longest of what its layers compute and of what crosses the link
in either direction; all of it but the first slice and the last is under way at once:

    T = max(compute, bytes in / bandwidth in, bytes out / bandwidth out)

So a stack on the device gains time where its loops wait for the link, and nothing elsewhere; but
for what each byte that moves is charged beside time (`placing.prices`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hlo_passes.equations import Path
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module
from hlo_passes.loops.host_transfers import nests
from hlo_passes.pipeline import Room
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
    roomy = {_SCOPE.findall(called)[-1] for called in room.roomy if _SCOPE.search(called)}
    rings = streams.rings(hosting)
    return frozenset(p for p, ring in rings.items() if ring.stored and scope_of(p) in roomy)


@dataclass(frozen=True)
class _Ring:
    """What a ring does in a step: seconds, and for each stack the bytes in and out."""

    compute_s: float
    moved: dict[Source, tuple[int, int]]


def choose_kept(
    streams: Streams,
    hosting: Hosting,
    seconds: Mapping[str, float],
    machine: Machine,
    room: int,
    size_of: Callable[[Source], int],
    byte_s: float = 0.0,
) -> frozenset[Source]:
    """Chooses, one after another, the stacks whose place on the device gains most time a byte.

    Their slots in rings gain no room: where most is live there may be none, and of a stack that
    stays a layer's slice is copied as well, if XLA does not fuse that.

    Args:
      hosting: everything that may live on the host does.
      seconds: of `ring_seconds`.
      room: bytes of device memory that `hosting` leaves.
      size_of: bytes of a stack on one device.
      byte_s: what each byte that moves is charged, in seconds.

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
            total += max(ring.compute_s, in_s, out_s) + byte_s * sum(map(sum, moved))
        return total

    kept: frozenset[Source] = frozenset()
    left = {s for ring in rings for s in ring.moved} - hosting.asked
    now = step_s(kept)
    while True:
        gains = {
            s: (now - step_s(kept | {s})) / max(1, size_of(s)) for s in left if size_of(s) <= room
        }
        best = max(gains, key=lambda s: (gains[s], str(s)), default=None)
        if best is None or gains[best] <= 0:
            return kept
        kept |= {best}
        left.remove(best)
        room -= size_of(best)
        now = step_s(kept)


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
        _Ring(seconds.get(scope_of(path), 0.0), {s: (i, o) for s, (i, o) in by_stack.items()})
        for path, by_stack in moved.items()
    ]
