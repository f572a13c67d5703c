"""At which offset each buffer lies, so that buffers live at the same time do not overlap.

    offset
      │ ┌──────┐                      a rectangle: size high, its live range wide;
    4 │ │  b   │┌─────┐               it may be moved up and down, not sideways
      │ └──────┘│  d  │
    2 │ ┌───┐┌──┴───┐ │               total: the highest top
      │ │ a ││  c   │─┘               lower bound: the largest sum of sizes at any tick
    0 └─┴───┴┴──────┴────► tick

This is dynamic storage allocation, NP-hard (Garey and Johnson 1979, SR2). Several greedy
orders are tried and the best packing is kept. Three are those of XLA's
GlobalDecreasingSizeBestFitHeap (xla/service/heap_simulator/heap_simulator.cc), whose choice
of the free gap is followed too; the last is first fit by the largest load that a buffer
crosses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from hlo_passes.plan import LiveRange, LogicalTime

Strategy = Literal["spatial", "temporal", "start", "load"]

ALL_STRATEGIES: tuple[Strategy, ...] = ("spatial", "temporal", "start", "load")

type _Ints = npt.NDArray[np.int64]


class Packing(NamedTuple):
    """Offsets in bytes, in the order of the input, and the bytes of the whole arena."""

    offsets: tuple[int, ...]
    total: int


def assign_offsets(
    sizes: Sequence[int],
    live_ranges: Sequence[LiveRange],
    alignment: int = 1,
    *,
    groups: Sequence[int] | None = None,
    strategies: Sequence[Strategy] = ALL_STRATEGIES,
) -> Packing:
    """Assigns offsets by the best of several greedy orders.

    Args:
      sizes: bytes of each rectangle.
      live_ranges: half-open, in any unit of time.
      alignment: every offset is a multiple of it.
      groups: rectangles of equal group get the same offset (a loop's carry lives in one
        place, in several ranges); by default each is its own. All have the group's largest
        size.
      strategies: ``"spatial"`` places by decreasing size, then length of life;
        ``"temporal"`` by decreasing length of life, then size; ``"start"`` by start, then
        decreasing size; they take the smallest gap that fits. ``"load"`` places by
        decreasing (largest load crossed, length of life, area) and takes the lowest gap.

    Returns:
      The packing with the least total; of equals the first strategy's. Rectangles of no
      bytes lie at 0.

    Complexity: O(n²) in numpy operations over all buffers placed; 10,000 buffers take about
      a second a strategy.
    """
    n = len(sizes)
    size, start, end = _columns(sizes, live_ranges)
    members: dict[int, list[int]] = {}
    for k, group in enumerate(groups if groups is not None else range(n)):
        members.setdefault(group, []).append(k)
    rows = [np.array(m) for m in members.values()]
    items = _Items(
        rows,
        np.array([size[r].max() for r in rows], np.int64),
        start,
        end,
    )
    candidates = [_place(items, strategy, alignment) for strategy in strategies if n]
    if not candidates:
        return Packing((), 0)
    return min(candidates, key=lambda packing: packing.total)


def max_live_load(
    sizes: Sequence[int],
    live_ranges: Sequence[LiveRange],
    *,
    groups: Sequence[int] | None = None,
) -> int:
    """Returns the largest sum of the sizes of rectangles that are live at one time.

    Rectangles of one group count once. No packing can be smaller, whatever its order and
    alignment. Complexity: O(n log n).
    """
    return peak_load(sizes, live_ranges, groups=groups)[0]


def peak_load(
    sizes: Sequence[int],
    live_ranges: Sequence[LiveRange],
    *,
    groups: Sequence[int] | None = None,
) -> tuple[int, LogicalTime]:
    """Returns `max_live_load` and the first moment at which it is reached."""
    if not sizes:
        return 0, 0
    size, start, end = _columns(sizes, live_ranges)
    if groups is not None:
        start, end = start.copy(), end.copy()
        covered: dict[int, int] = {}
        for k in np.lexsort((end, start)).tolist():
            # What another rectangle of the group holds already is not counted again.
            start[k] = max(start[k], covered.get(groups[k], start[k]))
            end[k] = max(end[k], start[k])
            covered[groups[k]] = int(end[k])
    times, load = _load(size, start, end)
    peak = int(np.argmax(load))
    return int(load[peak]), int(times[peak])


class _Items(NamedTuple):
    rows: list[npt.NDArray[np.intp]]
    size: _Ints
    start: _Ints
    end: _Ints


def _columns(sizes: Sequence[int], live_ranges: Sequence[LiveRange]) -> tuple[_Ints, _Ints, _Ints]:
    ranges = np.array(live_ranges, np.int64).reshape(-1, 2)
    return np.array(sizes, np.int64), ranges[:, 0], ranges[:, 1]


def _load(size: _Ints, start: _Ints, end: _Ints) -> tuple[_Ints, _Ints]:
    """The moments at which the load changes, and the load from each of them on."""
    times, where = np.unique(np.concatenate([start, end]), return_inverse=True)
    change = np.zeros(len(times), np.int64)
    np.add.at(change, where[: len(start)], size)
    np.add.at(change, where[len(start) :], -size)
    return times, np.cumsum(change)


def _order(items: _Items, strategy: Strategy) -> npt.NDArray[np.intp]:
    first = np.array([r[0] for r in items.rows])
    starts = np.array([items.start[r].min() for r in items.rows])
    ends = np.array([items.end[r].max() for r in items.rows])
    match strategy:
        case "spatial":
            # XLA compares the life of a group's first member only.
            length = items.end[first] - items.start[first]
            return np.lexsort((first, -length, -items.size))
        case "temporal":
            return np.lexsort((first, -items.size, starts - ends))
        case "start":
            return np.lexsort((first, -items.size, starts))
        case "load":
            size = np.empty_like(items.start)
            for k, r in enumerate(items.rows):
                size[r] = items.size[k]
            times, load = _load(size, items.start, items.end)
            crossed = np.zeros(len(items.rows), np.int64)
            for k, r in enumerate(items.rows):
                for row in r:
                    a, b = np.searchsorted(times, (items.start[row], items.end[row]))
                    crossed[k] = max(crossed[k], load[a : max(b, a + 1)].max())
            area = items.size * (ends - starts)
            return np.lexsort((first, -area, starts - ends, -crossed))


def _place(items: _Items, strategy: Strategy, alignment: int) -> Packing:
    n = len(items.start)
    # The rectangles placed so far, by increasing offset.
    start, end = np.empty(n, np.int64), np.empty(n, np.int64)
    bottom, top = np.empty(n, np.int64), np.empty(n, np.int64)
    offsets = np.zeros(n, np.int64)
    placed = total = 0
    for k in _order(items, strategy):
        size = int(items.size[k])
        if size == 0:
            continue
        rows = items.rows[k]
        conflicts = np.zeros(placed, bool)
        for row in rows:
            conflicts |= (start[:placed] < items.end[row]) & (end[:placed] > items.start[row])
        offset = _gap(
            bottom[:placed][conflicts],
            top[:placed][conflicts],
            size,
            alignment,
            best=strategy != "load",
        )
        offsets[rows] = offset
        total = max(total, offset + size)
        at = int(np.searchsorted(bottom[:placed], offset))
        grown = placed + len(rows)
        for column, value in (
            (start, items.start[rows]),
            (end, items.end[rows]),
            (bottom, offset),
            (top, offset + size),
        ):
            column[at + len(rows) : grown] = column[at:placed].copy()
            column[at : at + len(rows)] = value
        placed = grown
    return Packing(tuple(offsets.tolist()), total)


def _gap(bottom: _Ints, top: _Ints, size: int, alignment: int, *, best: bool) -> int:
    """The offset of the smallest (`best`) or lowest gap of `size` bytes between the
    rectangles, sorted by `bottom`; above them all when there is none."""
    # Of overlapping rectangles (they do not meet in time) the highest top so far counts.
    floor = np.concatenate([[0], np.maximum.accumulate(top)])
    floor = -(-floor // alignment) * alignment
    room = bottom - floor[:-1]
    fits = np.flatnonzero(room >= size)
    if len(fits) == 0:
        return int(floor[-1])
    return int(floor[fits[np.argmin(room[fits])] if best else fits[0]])
