"""Which buffers take no bytes of their own: they lie in an allocation that exists anyway.

    output        ·   ·   ·   ·   [───────────►    its bytes are free until it is there
    colocated     [──)    [──────)
    donated       ────────)   [───────────────►    argument, then the output in its place
    colocated              [─)

An *owner* is an output's allocation, or that of a donated argument. Buffers are taken by
decreasing size, so that every owner found so far is large enough for the next; it goes to
where an operand of it lies, else to the latest owner that has room in time (xla/service/
buffer_assignment.cc, BufferAssigner::AssignSingleHloBuffer and MaybeAssignBuffer).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from operator import itemgetter

from hlo_passes.analysis.dataflow import Buffer, Dataflow, Value, subshapes
from hlo_passes.analysis.live_ranges import LiveRanges
from hlo_passes.analysis.sharing import Target, can_share
from hlo_passes.memory._packing import Occupancy
from hlo_passes.plan import LiveRange, LogicalTime


def find_colocated(
    ranges: LiveRanges, target: Target, buffers: Iterable[Buffer], apart: Collection[int]
) -> dict[int, int]:
    """Returns the temporaries and outputs that lie in another buffer's allocation.

    Args:
      buffers: those of one memory space that have bytes.
      apart: ids of values that share bytes with nobody.

    Returns:
      Buffer id of each to that of its owner, in the order of the decisions.

    Complexity: O(n log n) for n values, as long as the owners that are free at a time are few
      ranges of them (see `occupancy`).
    """
    owners = _Owners(ranges, target)
    for b in _by_size(ranges.dataflow, buffers):
        if b.kind in ("constant", "tuple"):
            continue
        if any(v.id in apart for v in b.values):
            continue
        if b.kind == "parameter":
            if b.live_out:
                owners.add(b)
            continue
        owner = owners.find(b)
        if owner is not None:
            owners.enter(b, owner)
        elif b.live_out:
            owners.add(b)
    return owners.owner_of


def _by_size(dataflow: Dataflow, buffers: Iterable[Buffer]) -> list[Buffer]:
    # The proto lists callees first, and XLA goes through the callers first.
    computation = {c: -n for n, c in enumerate(dataflow.module.computations)}
    place = {i: n for n, i in enumerate(dataflow.module.instructions)}

    def order(b: Buffer) -> tuple[int, bool, tuple[int, int]]:
        definers = (v.instruction for v in b.values)
        first = min((computation[i.computation_id], place[i.id]) for i in definers)
        return -b.size, not b.live_out, first

    return sorted(buffers, key=order)


type _Life = tuple[LogicalTime, LogicalTime, int]  # start, end, id of the value


class _Owners:
    """The owners found so far, numbered in their order, and who lies in each.

    Attributes:
      owner_of: of each colocated buffer the owner, by buffer ids.
    """

    def __init__(self, ranges: LiveRanges, target: Target) -> None:
        self.owner_of: dict[int, int] = {}
        self._ranges = ranges
        self._dataflow = ranges.dataflow
        self._target: Target = target
        self._buffers: list[Buffer] = []
        # By start. They meet in a tick at most, so that they are by end as well.
        self._lives: list[list[_Life]] = []
        self._number: dict[int, int] = {}  # of an owner, by buffer id
        self._number_of: dict[int, int] = {}  # number of a value's owner, by value id
        self._busy = Occupancy(2 * ranges.end + 4)

    def add(self, buffer: Buffer) -> None:
        """Makes `buffer` an owner, the latest."""
        number = self._number[buffer.id] = len(self._buffers)
        self._buffers.append(buffer)
        self._lives.append([])
        self._hold(buffer.values, number)

    def enter(self, buffer: Buffer, number: int) -> None:
        """Puts `buffer` into the bytes of owner `number`."""
        self.owner_of[buffer.id] = self._buffers[number].id
        self._hold(buffer.values, number)

    def find(self, buffer: Buffer) -> int | None:
        """Returns the number of the owner that takes `buffer` in, if one does."""
        owners = chain(self._of_operands(buffer), self._free(buffer.values))
        return next((number for number in owners if self._fits(buffer, number)), None)

    def _hold(self, values: Sequence[Value], number: int) -> None:
        for v in values:
            start, end = self._ranges.of_value[v.id]
            insort(self._lives[number], (start, end, v.id))
            self._number_of[v.id] = number
            if end - start > 1:
                self._busy.take(_inner(start, end), number, number + 1)

    def _of_operands(self, buffer: Buffer) -> Iterator[int]:
        """The owners in which what defines `buffer` finds an operand."""
        for v in buffer.values:
            if v.index == ():
                for operand in v.instruction.operand_ids:
                    held = self._dataflow.buffer_at(self._dataflow.module.instructions[operand])
                    number = self._number.get(self.owner_of.get(held.id, held.id))
                    if number is not None:
                        yield number

    def _free(self, values: Sequence[Value]) -> Iterator[int]:
        """The owners, latest first, without those in which a value would lie over another."""
        busy = [
            interval
            for v in values
            for interval in self._busy.taken(_inner(*self._ranges.of_value[v.id]))
        ]
        busy.sort(key=itemgetter(1), reverse=True)
        above = len(self._buffers)
        for bottom, top in busy:
            if top < above:
                yield from range(above - 1, top - 1, -1)
            if bottom < above:
                above = bottom
        yield from range(above - 1, -1, -1)

    def _fits(self, buffer: Buffer, number: int) -> bool:
        size = self._buffers[number].size
        if buffer.size > size or (buffer.live_out and buffer.size != size):
            return False
        return all(self._has_room(v, number) for v in buffer.values)

    def _has_room(self, new: Value, number: int) -> bool:
        lives = self._lives[number]
        start, end = self._ranges.of_value[new.id]
        first = bisect_right(lives, start, key=itemgetter(1))
        last = bisect_left(lives, end, key=itemgetter(0))
        if any(self._interfere(new, self._dataflow.values[v]) for _, _, v in lives[first:last]):
            return False
        return new.instruction.opcode != "copy" or number not in self._sources(new)

    def _sources(self, copy: Value) -> Iterator[int | None]:
        """The owners of what a copy copies: it does not go there too."""
        for operand in copy.instruction.operand_ids:
            source = self._dataflow.module.instructions[operand]
            for index, _ in subshapes(source.shape):
                yield self._number_of.get(self._dataflow.value_at(source, index).id)

    def _interfere(self, a: Value, b: Value) -> bool:
        one, two = self._ranges.of_value[a.id], self._ranges.of_value[b.id]
        if one.end == two.start + 1:
            return not self._may_take_over(a, b)
        if two.end == one.start + 1:
            return not self._may_take_over(b, a)
        return True

    def _may_take_over(self, dying: Value, born: Value) -> bool:
        read = [p for p in dying.positions if p.instruction.id in born.instruction.operand_ids]
        return (
            bool(read)
            and born.instruction.opcode != "copy"
            and all(
                can_share(self._dataflow, self._target, p, born.instruction, born.index)
                for p in read
            )
        )


def _inner(start: LogicalTime, end: LogicalTime) -> LiveRange:
    """The part of a life at which it can meet no other, in half ticks: without its first and
    its last tick, at which one may take over from another; of a single tick that tick."""
    if end - start == 1:
        return LiveRange(2 * start, 2 * start + 1)
    return LiveRange(2 * start + 1, 2 * (end - 1))
