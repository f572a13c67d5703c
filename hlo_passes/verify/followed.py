"""How far an executable follows the plan. See `verify`.

    plan     start 0 after c0    start 1 after c1    done 0 after c1    done 1 after c2
    final    c0  start 0  c1  ?  start 1  done 0  c2  done 1

The compiler may still add to a body and move what it was given. Looked at is the order of
starts and dones, and that each stands behind the work that it stands behind in the plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from custom_calls import targets
from hlo_passes.ir import Computation, Instruction, Module
from hlo_passes.plan import LoopSchedule, LoopTransfer, Plan
from hlo_passes.verify.hlo import check_scheduled
from hlo_passes.verify.program import issue_rank
from hlo_passes.verify.schedule import LOOP_TRANSFER_ATTRIBUTE, TRANSFER_ATTRIBUTE, event_of


@dataclass(frozen=True, slots=True)
class Followed:
    """How far a final executable follows the plan's transfers.

    Attributes:
      transfers: how many of the plan's transfers it has.
      missing: ids of those that it has not.
      reordered: ids of a smallest set of transfers that would have to move for the order of
        all starts and dones to be the plan's.
      loop_transfers, loops_missing, loops_reordered: the same of the transfers in
        ``Plan.loops``, called ``<computation>/<start_name>``, and of those in ``Plan.bodies``,
        called ``<computation>/<id>``.
    """

    transfers: int
    missing: tuple[int, ...]
    reordered: tuple[int, ...]
    loop_transfers: int = 0
    loops_missing: tuple[str, ...] = ()
    loops_reordered: tuple[str, ...] = ()

    @property
    def exactly(self) -> bool:
        return not (self.missing or self.reordered or self.loops_missing or self.loops_reordered)


def verify_executable(plan: Plan, final: Module) -> Followed:
    """Looks for the plan's transfers in the module that XLA ended with.

    The compiler may still move what was handed back to it. What that means is for the
    caller to judge: it is reported, not raised.

    Args:
      final: the executable's module. A transfer is known by its attribute; one that has
        lost it by its name, ``memplan_copy_start.<id>`` and ``memplan_copy_done.<id>``, and
        in a loop by the names that the plan has for it.

    Raises:
      VerificationError: when `final` has no schedule.
    """
    check_scheduled(final)
    missing, moved = _follow_entry(plan, final.entry)
    loops = _follow_loops(plan, final)
    return Followed(
        len(plan.transfers) - len(missing),
        missing,
        moved,
        sum(len(loop.transfers) for loop in plan.loops)
        + sum(len(body.plan.transfers) for body in plan.bodies)
        - len(loops.missing),
        loops.missing,
        loops.reordered,
    )


def _follow_entry(plan: Plan, entry: Computation) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids of the transfers that an entry, or a body planned as one, does not have, and of
    those that stand elsewhere."""
    if any(i.custom_call_target in targets.GATES for i in entry.instructions):
        return _follow_gates(plan, entry)
    events = [e for i in entry.instructions if (e := event_of(i)) is not None]
    started = {e.index for e in events if e.kind == "start"}
    present = started & {e.index for e in events if e.kind == "done"}
    missing = tuple(t.id for t in plan.transfers if t.id not in present)
    planned = [e for e in events if e.index in present and e.index < len(plan.transfers)]
    # Dones of one tick wait for each other: their order makes no difference.
    ranks = [issue_rank(plan, e)[: 3 if e.kind == "start" else 2] for e in planned]
    kept = _longest_ascent(ranks)
    return missing, tuple(sorted({e.index for k, e in enumerate(planned) if k not in kept}))


def _follow_gates(plan: Plan, entry: Computation) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same where a runtime has the transfers."""
    labels = [
        i.proto.frontend_attributes.map.get(TRANSFER_ATTRIBUTE, "")
        for i in entry.instructions
        if i.custom_call_target in targets.GATES
    ]
    gates = [int(label) for label in labels if label.isdigit()]
    missing = tuple(t.id for t in plan.transfers if gates.count(t.id) != 2)
    ticks: list[tuple[int, ...]] = []
    for k, n in enumerate(gates):
        t = plan.transfers[n]
        ticks.append((t.end if n in gates[:k] else t.done,))
    kept = _longest_ascent(ticks)
    return missing, tuple(sorted({n for k, n in enumerate(gates) if k not in kept}))


class _FollowedLoops(NamedTuple):
    """Of the transfers in loops those that the executable does not have, and those that stand
    elsewhere, by name (`Followed`)."""

    missing: tuple[str, ...]
    reordered: tuple[str, ...]


def _follow_loops(plan: Plan, final: Module) -> _FollowedLoops:
    """Looks for the plan's loop transfers in the module that XLA ended with. O(instructions)."""
    missing: list[str] = []
    reordered: list[str] = []
    if plan.loops:
        halves = _Halves(final)
        for n, loop in enumerate(plan.loops):
            absent, moved = _follow(halves, n, loop)
            missing += (f"{loop.computation}/{t.start_name}" for t in absent)
            reordered += (f"{loop.computation}/{t.start_name}" for t in moved)
    named = {c.name: c for c in final.computations.values()}
    for body in plan.bodies:
        lost: Sequence[int] = [t.id for t in body.plan.transfers]
        elsewhere: Sequence[int] = ()
        if body.computation in named:
            lost, elsewhere = _follow_entry(body.plan, named[body.computation])
        missing += (f"{body.computation}/{n}" for n in lost)
        reordered += (f"{body.computation}/{n}" for n in elsewhere)
    return _FollowedLoops(tuple(missing), tuple(reordered))


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
    kept = _longest_ascent([(tick,) for _, tick, _ in events])
    moved |= {t.id: t for k, (_, _, t) in enumerate(events) if k not in kept}
    return absent, [moved[id_] for id_ in sorted(moved)]


def _longest_ascent(ranks: Sequence[tuple[int, ...]]) -> set[int]:
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
