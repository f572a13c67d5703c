"""An order in which what is gathered from other devices is not there long before it is read.

    XLA      gather w0  gather w1  gather w2  dot w0  dot w1  dot w2      all three at once
    here     gather w0  dot w0  gather w1  dot w1  gather w2  dot w2

    XLA      start w2  dot w0  done w2  dot w1  dot w2                    there from its start on
    here     dot w0  start w2  dot w1  done w2  dot w2                    and hidden all the same

Weights that are divided among devices (FSDP) are gathered before they are read, and take as many
times their bytes from then on. XLA:GPU gathers many of them first, or early: its scheduler may hold
far more than a budget leaves. Here each gather ends in front of its first reader, and an
asynchronous one begins where the compute from there to its end takes as long, before the next one
needs the interconnect, or as soon as those before it leave that free. Gathers may come in another
order than XLA's, also among other collectives, for all devices have the same one; but one that is
waited for stays where it would come under another collective that is asynchronous, or out of one,
for what hides those is XLA's choice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from hlo_passes.analysis.collectives import Collective, collectives, is_fused_start
from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.dependences import dependences
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Instruction, Module
from hlo_passes.simulator.cost import instruction_costs

_KIND = "all-gather"
_VIEWS = frozenset({"bitcast", "get-tuple-element"})

# How many times the seconds of a gather there are from its start to its done.
_MARGIN = 1.1


def gathered_late(module: Module, machine: Machine) -> tuple[str, ...]:
    """Returns the HLO names of all instructions of the entry but its parameters in such an order;
    none where that is the present one, or the machine has no interconnect.

    O(positions of the module).
    """
    if machine.interconnect is None:
        return ()
    entry = module.entry.instructions
    place = {i.id: n for n, i in enumerate(entry)}
    found = {i: collective for i, collective in collectives(module).items() if i in place}
    # What XLA:TPU fuses goes on in what computes meanwhile, and all else stays around that.
    if all(c.kind != _KIND for c in found.values()) or any(
        is_fused_start(module, i) for i in entry
    ):
        return ()
    order = _Order(module, machine, place, found).order()
    present = [i for i in entry if i.opcode != "parameter"]
    return tuple(i.name for i in order) if order != present else ()


@dataclass(slots=True)
class _Gather:
    """A gather that may stand later.

    Attributes:
      start: what begins it, and `rest`: its done, if it has one, and other names for its result.
      reader: the first of what stays in its place that has to come after it, by place there.
      is_waited_for: by what begins it.
      begin: in front of which of what stays it begins.
    """

    start: Instruction
    rest: list[Instruction]
    seconds: float
    reader: int
    is_waited_for: bool
    begin: int = 0


class _Order:
    def __init__(
        self, module: Module, machine: Machine, place: dict[int, int], all_: dict[int, Collective]
    ) -> None:
        assert machine.interconnect is not None
        found = {i: gather for i, gather in all_.items() if gather.kind == _KIND}
        others = [
            (place[i], place[other.done])
            for i, other in all_.items()
            if other.kind != _KIND and other.done is not None
        ]

        def above(n: int) -> list[tuple[int, int]]:
            """The other collectives that are under way in front of a place."""
            return [(start, done) for start, done in others if start < n <= done]

        self._module = module
        entry = [i for i in module.entry.instructions if i.opcode != "parameter"]
        self._after: defaultdict[int, list[int]] = defaultdict(list)
        for later, earlier in dependences(analyze_dataflow(module), module.entry).items():
            for one in earlier:
                self._after[one].append(later)
        members = {i: self._members(i, gather.done) for i, gather in found.items()}
        moved = {id_ for rest in members.values() for id_ in rest} | members.keys()
        for i, rest in members.items():
            readers = self._readers(i, rest)
            has_links = found[i].done is not None and self._after[i] != [found[i].done]
            # What another one begins with stays.
            stays = has_links or not readers or not moved.isdisjoint(readers)
            if not stays and found[i].done is None:
                stays = above(place[i]) != above(min(place[r] for r in readers))
            if stays:
                moved -= {i, *rest}
        self._stays = [i for i in entry if i.id not in moved]
        at = {i.id: n for n, i in enumerate(self._stays)}
        self._gathers: list[_Gather] = []
        for i, rest in sorted(members.items(), key=lambda of: place[of[0]]):
            if i in moved:
                self._gathers.append(
                    _Gather(
                        module.instructions[i],
                        [module.instructions[r] for r in sorted(rest, key=place.__getitem__)],
                        found[i].seconds(machine.interconnect),
                        min(at[r] for r in self._readers(i, rest)),
                        found[i].done is None,
                    )
                )
        self._gathers.sort(key=lambda gather: gather.reader)
        self._place, self._stay_places = place, [place[i.id] for i in self._stays]
        # What stays, each with the gathers in front of it that are waited for.
        costs = instruction_costs(module, machine)
        self._seconds = np.array([costs[i.id] for i in self._stays])
        for gather in self._gathers:
            if gather.is_waited_for:
                self._seconds[gather.reader] += costs[gather.start.id]
        self._clock = np.concatenate([[0.0], np.cumsum(self._seconds)])

    def _members(self, start: int, done: int | None) -> list[int]:
        """A gather's done, and what shows its result under other names."""
        found = [] if done is None else [done]
        pending = [start if done is None else done]
        while pending:
            for reader in self._after[pending.pop()]:
                if self._module.instructions[reader].opcode in _VIEWS:
                    found.append(reader)
                    pending.append(reader)
        return found

    def _readers(self, start: int, rest: list[int]) -> set[int]:
        """What has to come after it."""
        return {r for one in (start, *rest) for r in self._after[one]} - {start, *rest}

    def order(self) -> list[Instruction]:
        self._begin_late()
        begins: defaultdict[int, list[_Gather]] = defaultdict(list)
        ends: defaultdict[int, list[_Gather]] = defaultdict(list)
        for gather in self._gathers:
            begins[gather.begin].append(gather)
            ends[gather.reader].append(gather)
        order: list[Instruction] = []
        for n in range(len(self._stays) + 1):
            for is_waited_for in (False, True):
                order += [g.start for g in begins[n] if g.is_waited_for == is_waited_for]
            for gather in ends[n]:
                order += gather.rest
            order += self._stays[n : n + 1]
        return order

    def _begin_late(self) -> None:
        free_s = np.inf
        for gather, at_once in reversed([*zip(self._gathers, self._at_once(), strict=True)]):
            gather.begin = gather.reader
            if gather.is_waited_for:
                continue
            end_s = min(self._clock[gather.reader], free_s)
            latest = end_s - _MARGIN * gather.seconds
            late = int(np.searchsorted(self._clock, latest, side="right")) - 1
            gather.begin = min(max(late, at_once, self._earliest(gather)), gather.reader)
            free_s = min(free_s, float(self._clock[gather.begin]))

    def _at_once(self) -> list[int]:
        """In front of which of what stays each gather would begin, if all did as soon as the one
        before is there: to begin earlier gains nothing."""
        free_s, soonest_s = 0.0, list[float]()
        arrives_s: defaultdict[int, float] = defaultdict(float)
        for gather in self._gathers:
            soonest_s.append(free_s)
            if not gather.is_waited_for:
                free_s += gather.seconds
                arrives_s[gather.reader] = free_s
        now_s, reached_s = 0.0, list[float]()
        for n, seconds in enumerate(self._seconds.tolist()):
            reached_s.append(now_s)
            now_s = max(now_s, arrives_s[n]) + seconds
        return (np.searchsorted(reached_s, soonest_s, side="right") - 1).tolist()

    def _earliest(self, gather: _Gather) -> int:
        """Where it begins now: no earlier."""
        return bisect_left(self._stay_places, self._place[gather.start.id])
