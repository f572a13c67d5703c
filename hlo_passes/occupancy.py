"""Which offsets are taken during a range of time, while rectangles are placed in any order.

    offset
      │ ┌─────────┐                  taken during q: [0, 2) and [3, 4), whatever the number of
    3 │ └─────────┘                  rectangles that take them: adjacent ones count as one
    2 │ ┌──────┐┌─────┐
      │ │      │└─────┘┌───┐
    0 └─┴──────┴───────┴───┴► time
               [─ q ─)

What is live during a range either holds bytes when it begins or starts within it. So two
indices are kept, and each of their nodes has the *union* of its rectangles' offsets:

    held      a segment tree (Bentley 1977): a rectangle stands at the O(log n) nodes whose
              spans make up its life, and what is held at a moment at the nodes above its leaf
    started   blocks of 1, 16, 256, ... moments: a rectangle stands in one of each size

A packing leaves few holes, so that the unions are short lists: training steps of 100,000
instructions, with thousands of rectangles live at once, have 10 to 100 intervals a query.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from hlo_passes.plan import LiveRange

Interval = tuple[int, int]
"""Half-open range of offsets."""

_BLOCK_BITS = 4
_BLOCK_MASK = (1 << _BLOCK_BITS) - 1


class Occupancy:
    """The offsets taken over `moments` moments; none at first."""

    def __init__(self, moments: int) -> None:
        self._leaves = 1 << moments.bit_length()
        self._held: defaultdict[int, list[Interval]] = defaultdict(list)
        levels = -(-moments.bit_length() // _BLOCK_BITS) + 1
        self._started = [defaultdict[int, list[Interval]](list) for _ in range(levels)]

    def take(self, live_range: LiveRange, bottom: int, top: int) -> None:
        """Takes the offsets from `bottom` to `top` during a range. O(log moments) unions."""
        first, end = live_range
        left, right = first + self._leaves, end + self._leaves
        while left < right:
            if left & 1:
                _unite(self._held[left], bottom, top)
                left += 1
            if right & 1:
                right -= 1
                _unite(self._held[right], bottom, top)
            left >>= 1
            right >>= 1
        for blocks in self._started:
            if not _unite(blocks[first], bottom, top):
                break  # Then the larger blocks around have it too.
            first >>= _BLOCK_BITS

    def taken(self, live_range: LiveRange) -> list[Interval]:
        """Returns intervals whose union is what is taken at any moment of a range; they may
        overlap, and stand in no order. Time O(log moments) and what is returned."""
        first, end = live_range
        found: list[Interval] = []
        node = first + self._leaves
        while node:
            if (held := self._held.get(node)) is not None:
                found += held
            node >>= 1
        first += 1
        for blocks in self._started:
            if first >= end:
                break
            while first < end and first & _BLOCK_MASK:
                if (started := blocks.get(first)) is not None:
                    found += started
                first += 1
            while first < end and end & _BLOCK_MASK:
                end -= 1
                if (started := blocks.get(end)) is not None:
                    found += started
            first >>= _BLOCK_BITS
            end >>= _BLOCK_BITS
        return found


def _unite(union: list[Interval], bottom: int, top: int) -> bool:
    """Adds an interval to sorted intervals that do not touch, in place. Returns whether that
    changed them. O(log) and the move of what lies above."""
    first = bisect_left(union, (bottom,))
    if first and union[first - 1][1] >= bottom:
        first -= 1
    end = bisect_left(union, (top + 1,), first)
    if first < end:
        lowest, highest = union[first][0], union[end - 1][1]
        if end - first == 1 and lowest <= bottom and top <= highest:
            return False
        bottom, top = min(bottom, lowest), max(top, highest)
    union[first:end] = [(bottom, top)]
    return True
