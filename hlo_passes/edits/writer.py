"""Writes gaps that were taken down as edits of the entry.

    temporary   written ── read ─┤ gap: evicted ├── reads ──┤ gap: recomputed ├── reads
    piece       the original     │              refetch      │                 a clone

A temporary falls into *pieces*, one behind each gap that was taken. Every read has its piece:
the last that is there. A clone reads its operands like any other instruction, at the tick in
front of which it stands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hlo_passes.edits.gaps import Temporary, bitcast_sources
from hlo_passes.edits.state import Action, EditState, Taken
from hlo_passes.placing.problem import Problem
from hlo_passes.plan import Edits, Eviction, LiveRange, LogicalTime, Recompute, Refetch


def edits_of(posed: Problem, temporaries: Sequence[Temporary], taken: EditState) -> Edits:
    """Writes down what was taken of the entry's temporaries as edits of the module of `posed`."""
    return _Writer(posed, temporaries, taken).edits()


class Piece(NamedTuple):
    """A temporary from a gap's end until the next gap.

    Attributes:
      action: how it came to be there.
      reads: from its first access to the tick after its last.
    """

    action: Action
    reads: LiveRange


def pieces_of(taken: Mapping[LogicalTime, Taken], last: LogicalTime) -> list[Piece]:
    """The pieces behind the gaps of a temporary that were taken, in order; the original is not
    among them.

    Args:
      taken: of the temporary, in order.
      last: its last access.
    """
    ends = [*list(taken)[1:], last]
    return [
        Piece(gap.action, LiveRange(gap.end, end + 1))
        for gap, end in zip(taken.values(), ends, strict=False)
    ]


class _Reader(NamedTuple):
    tick: LogicalTime
    name: str
    via: str


class _Writer:
    """Writes a selection down as edits."""

    def __init__(
        self, posed: Problem, temporaries: Sequence[Temporary], selection: EditState
    ) -> None:
        self._taken = selection.by_temporary
        self._temporaries = temporaries
        self._names = [i.name for i in posed.ticks.instructions]
        self._tick_of_name = {name: tick for tick, name in enumerate(self._names)}
        self._bitcast_of = bitcast_sources(posed.module, temporaries)
        self._pieces = [
            pieces_of(self._taken.get(t.number, {}), selection.accesses(t.number)[-1])
            for t in temporaries
        ]
        # Who reads each piece, by (temporary, piece).
        self._readers: defaultdict[tuple[int, int], list[_Reader]] = defaultdict(list)
        self._recomputes: list[Recompute] = []
        self._clones: dict[tuple[int, LogicalTime], str] = {}
        self._count: defaultdict[str, int] = defaultdict(int)
        self._makers: dict[tuple[int, LogicalTime], int] = {}
        self._refetches: defaultdict[int, list[Refetch]] = defaultdict(list)
        self._written: set[tuple[int, int]] = set()

    def edits(self) -> Edits:
        for t in self._temporaries:
            for read in t.reads:
                self._read(t.number, _Reader(read.tick, read.reader, read.via))
        # What is made again before one tick stands in the order of the program.
        for n, k in sorted(self._readers, key=lambda p: (self._pieces[p[0]][p[1]].reads.start, p)):
            self._write(n, k)
        evictions = [self._eviction(t) for t in self._temporaries]
        return Edits((), tuple(self._recomputes), tuple(e for e in evictions if e is not None))

    def _read(self, n: int, reader: _Reader) -> None:
        """Takes note of a reader, and of those of what it needs in turn."""
        k = self._serving(n, reader.tick)
        if k is None:
            return
        via = reader.via
        if via in self._bitcast_of and self._serving(n, self._tick_of_name[via]) == k:
            return  # The bitcast itself reads the piece.
        is_new = (n, k) not in self._readers
        self._readers[n, k].append(reader)
        piece = self._pieces[n][k]
        if not is_new or piece.action == "evict":
            return
        t = self._temporaries[n]
        tick = piece.reads.start
        key = t.maker.id, tick
        if key in self._clones:
            return
        name = self._clones[key] = self._name(t.maker.name)
        for operand in t.operands or ():
            if operand.temporary is not None:
                self._read(operand.temporary, _Reader(tick, name, operand.via))

    def _serving(self, n: int, tick: LogicalTime) -> int | None:
        """The piece of a temporary that is read at `tick`; None for the original."""
        found = [k for k, piece in enumerate(self._pieces[n]) if piece.reads.start <= tick]
        return found[-1] if found else None

    def _name(self, original: str) -> str:
        self._count[original] += 1
        return f"{original}.again{self._count[original]}"

    def _write(self, n: int, k: int) -> None:
        """Writes the clones of a piece, those that they read first."""
        if (n, k) in self._written:
            return
        self._written.add((n, k))
        t, piece = self._temporaries[n], self._pieces[n][k]
        tick = self._first_tick(n, k)
        before = self._names[tick]
        readers = [(r.name, r.via) for r in self._readers[n, k]]
        if piece.action == "recompute":
            for operand in t.operands or ():
                m = operand.temporary
                below = None if m is None else self._serving(m, tick)
                if m is not None and below is not None:
                    self._write(m, below)
        direct, bitcasts = self._shown_as(t, before, readers)
        if piece.action == "recompute":
            self._write_maker(t, tick, before, direct)
        else:
            self._refetches[n].append(Refetch(before, direct))
        self._recomputes += bitcasts

    def _first_tick(self, n: int, k: int) -> LogicalTime:
        """What is fetched comes for its first reader; what is made again when all is there."""
        if self._pieces[n][k].action == "recompute":
            return self._pieces[n][k].reads.start
        return min(r.tick for r in self._readers[n, k])

    def _shown_as(
        self, t: Temporary, before: str, readers: Sequence[tuple[str, str]]
    ) -> tuple[tuple[str, ...], list[Recompute]]:
        """Makes the bitcasts through which a piece is read anew.

        Returns:
          Who reads the piece itself, and the bitcasts, each behind what it is a bitcast of.
        """
        names: dict[str, str] = {}
        pending = [via for _, via in readers if via != t.name]
        while pending:
            via = pending.pop()
            if via != t.name and via not in names:
                names[via] = self._name(via)
                pending.append(self._bitcast_of[via])
        served = [*readers, *((names[via], self._bitcast_of[via]) for via in names)]

        def readers_of(via: str) -> tuple[str, ...]:
            return tuple(dict.fromkeys(reader for reader, seen in served if seen == via))

        order = sorted(names, key=lambda via: self._tick_of_name[via])
        bitcasts = [Recompute(names[via], via, before, readers_of(via)) for via in order]
        return readers_of(t.name), bitcasts

    def _write_maker(
        self, t: Temporary, tick: LogicalTime, before: str, readers: tuple[str, ...]
    ) -> None:
        key = t.maker.id, tick
        name = self._clones[key]
        if t.handle is t.maker:
            self._recomputes.append(Recompute(name, t.name, before, readers))
            return
        element = self._name(t.name)
        if key in self._makers:
            at = self._makers[key]
            made = self._recomputes[at]
            self._recomputes[at] = replace(made, readers=(*made.readers, element))
        else:
            self._makers[key] = len(self._recomputes)
            self._recomputes.append(Recompute(name, t.maker.name, before, (element,)))
        self._recomputes.append(Recompute(element, t.name, before, readers))

    def _eviction(self, t: Temporary) -> Eviction | None:
        if not self._refetches[t.number]:
            return None
        gone = min(self._taken[t.number])
        after = t.name if gone == t.written else self._names[gone]
        refetches = sorted(self._refetches[t.number], key=lambda r: self._tick_of_name[r.before])
        return Eviction(t.name, after, tuple(refetches))
