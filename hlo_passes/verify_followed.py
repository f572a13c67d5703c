"""How far an executable's loop bodies follow the plan. See `verify`.

    plan     start 0 after c0    start 1 after c1    done 0 after c1    done 1 after c2
    final    c0  start 0  c1  ?  start 1  done 0  c2  done 1

The compiler may still add to a body and move what it was given. Looked at is the order of
starts and dones, and that each stands behind the work that it stands behind in the plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hlo_passes.ir import Computation, Instruction, Module
from hlo_passes.plan import LoopSchedule, LoopTransfer, Plan
from hlo_passes.verify_loops import LOOP_TRANSFER_ATTRIBUTE


class FollowedLoops(NamedTuple):
    """Of the transfers in ``Plan.loops`` those that the executable does not have, and those
    that stand elsewhere, each as ``<computation>/<start_name>``."""

    missing: tuple[str, ...]
    reordered: tuple[str, ...]


def follow_loops(plan: Plan, final: Module) -> FollowedLoops:
    """Looks for the plan's loop transfers in the module that XLA ended with. O(instructions)."""
    missing: list[str] = []
    reordered: list[str] = []
    if plan.loops:
        halves = _Halves(final)
        for n, loop in enumerate(plan.loops):
            absent, moved = _follow(halves, n, loop)
            missing += (f"{loop.computation}/{t.start_name}" for t in absent)
            reordered += (f"{loop.computation}/{t.start_name}" for t in moved)
    return FollowedLoops(tuple(missing), tuple(reordered))


class _Halves:
    """Starts and dones of the executable by their tag, or else by their names."""

    def __init__(self, final: Module) -> None:
        self._final = final
        self._tagged: dict[tuple[str, str], Instruction] = {}
        self._computations = {c.name: c for c in final.computations.values()}
        for i in final.instructions.values():
            tag = i.proto.frontend_attributes.map.get(LOOP_TRANSFER_ATTRIBUTE, "")
            for kind in ("start", "done"):
                if tag and i.opcode.endswith(f"-{kind}"):
                    self._tagged[tag, kind] = i
        self._names: dict[str, Mapping[str, Instruction]] = {}

    def find(self, n: int, loop: LoopSchedule, t: LoopTransfer, kind: str) -> Instruction | None:
        tagged = self._tagged.get((f"{n}.{t.id}", kind))
        if tagged is not None or loop.computation not in self._computations:
            return tagged
        named = self.names(self._computations[loop.computation])
        return named.get(t.start_name if kind == "start" else t.done_name)

    def computation(self, i: Instruction) -> Computation:
        return self._final.computations[i.computation_id]

    def names(self, computation: Computation) -> Mapping[str, Instruction]:
        if computation.name not in self._names:
            self._names[computation.name] = {i.name: i for i in computation.instructions}
        return self._names[computation.name]


def _follow(
    halves: _Halves, n: int, loop: LoopSchedule
) -> tuple[list[LoopTransfer], list[LoopTransfer]]:
    absent: list[LoopTransfer] = []
    events: list[tuple[int, int, LoopTransfer]] = []  # (place, planned tick, transfer)
    moved: dict[int, LoopTransfer] = {}
    place: dict[int, int] = {}
    for t in loop.transfers:
        start, done = (halves.find(n, loop, t, kind) for kind in ("start", "done"))
        if start is None or done is None or start.computation_id != done.computation_id:
            absent.append(t)
            continue
        body = halves.computation(start)
        place = place or {i.id: k for k, i in enumerate(body.instructions)}
        for half, tick, after in ((start, t.start, t.start_after), (done, t.done, t.done_after)):
            events.append((place[half.id], tick, t))
            earlier = halves.names(body).get(after)
            if earlier is not None and place[earlier.id] > place[half.id]:
                moved[t.id] = t
    events.sort(key=lambda e: e[0])
    kept = longest_ascent([(tick,) for _, tick, _ in events])
    moved |= {t.id: t for k, (_, _, t) in enumerate(events) if k not in kept}
    return absent, [moved[id_] for id_ in sorted(moved)]


def longest_ascent(ranks: Sequence[tuple[int, ...]]) -> set[int]:
    """The indices of a longest subsequence that does not descend (patience sorting,
    Fredman 1975). Time O(n log n)."""
    tails: list[tuple[int, ...]] = []  # the least rank that ends an ascent of each length
    at_tail: list[int] = []
    before: list[int] = []
    for k, rank in enumerate(ranks):
        length = bisect_right(tails, rank)
        before.append(at_tail[length - 1] if length else -1)
        tails[length : length + 1] = [rank]
        at_tail[length : length + 1] = [k]
    kept: set[int] = set()
    k = at_tail[-1] if at_tail else -1
    while k >= 0:
        kept.add(k)
        k = before[k]
    return kept
