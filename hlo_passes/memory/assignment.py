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

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from hlo_passes.memory._packing import place
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
        size. Of what is equal to a strategy the least group comes first.
      strategies: ``"spatial"`` places by decreasing size, then length of life;
        ``"temporal"`` by decreasing length of life, then size; ``"start"`` by start, then
        decreasing size; they take the smallest gap that fits. ``"load"`` places by
        decreasing (largest load crossed, length of life, area) and takes the lowest gap.

    Returns:
      The packing with the least total; of equals the first strategy's. Rectangles of no
      bytes lie at 0.

    Complexity: a strategy takes O(n log n) steps on unions of intervals (see `occupancy.h`),
      which are as long as there are holes between what is placed; 28,000 buffers of a training
      step, a third of them transfers, take half a second. At worst, with a hole beside every
      buffer, O(n²).
    """
    if not sizes:
        return Packing((), 0)
    items = _items(sizes, live_ranges, range(len(sizes)) if groups is None else groups)
    candidates = [_place(items, strategy, alignment) for strategy in strategies]
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
    """Groups of rectangles, by number.

    Attributes:
      rows: the rectangles, group by group; `begin`: where in `rows` each group begins.
      size: bytes of each group.
      start, end: of each rectangle.
    """

    rows: _Ints
    begin: _Ints
    size: _Ints
    start: _Ints
    end: _Ints


def _items(sizes: Sequence[int], live_ranges: Sequence[LiveRange], groups: Iterable[int]) -> _Items:
    size, start, end = _columns(sizes, live_ranges)
    members: dict[int, list[int]] = {}
    for k, group in enumerate(groups):
        members.setdefault(group, []).append(k)
    ordered = [members[group] for group in sorted(members)]
    rows = np.fromiter(chain.from_iterable(ordered), np.int64, len(size))
    begin = np.cumsum([0, *map(len, ordered)][:-1])
    return _Items(rows, begin, np.maximum.reduceat(size[rows], begin), start, end)


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


def _order(items: _Items, strategy: Strategy) -> _Ints:
    # A sort of several keys keeps the order of what is equal in all of them.
    first = items.rows[items.begin]
    starts = np.minimum.reduceat(items.start[items.rows], items.begin)
    ends = np.maximum.reduceat(items.end[items.rows], items.begin)
    match strategy:
        case "spatial":
            # XLA compares the life of a group's first member only.
            length = items.end[first] - items.start[first]
            return np.lexsort((-length, -items.size))
        case "temporal":
            return np.lexsort((-items.size, starts - ends))
        case "start":
            return np.lexsort((-items.size, starts))
        case "load":
            area = items.size * (ends - starts)
            return np.lexsort((-area, starts - ends, -_load_crossed(items)))


def _load_crossed(items: _Items) -> _Ints:
    """The largest load at any moment of each group's life."""
    start, end = items.start[items.rows], items.end[items.rows]
    size = np.repeat(items.size, np.diff(items.begin, append=len(items.rows)))
    times, load = _load(size, start, end)
    first = np.searchsorted(times, start)
    crossed = _range_max(load, first, np.maximum(np.searchsorted(times, end), first + 1))
    return np.maximum.reduceat(crossed, items.begin)


def _range_max(values: _Ints, first: _Ints, end: _Ints) -> _Ints:
    """The maximum of ``values[first:end]`` for each pair, none of them empty.

    Two windows of a power of two cover a range (Bender and Farach-Colton, "The LCA problem
    revisited", 2000, section 3). O(n log n).
    """
    found = np.empty_like(first)
    length = end - first
    width, windows = 1, values  # The maximum of each window of `width`.
    while True:
        now = (width <= length) & (length < 2 * width)
        found[now] = np.maximum(windows[first[now]], windows[end[now] - width])
        if 2 * width > len(values):
            return found
        windows = np.maximum(windows[:-width], windows[width:])
        width *= 2


def _place(items: _Items, strategy: Strategy, alignment: int) -> Packing:
    order = _order(items, strategy)
    counts = np.diff(items.begin, append=len(items.rows))
    rows = items.rows[np.argsort(np.repeat(np.argsort(order), counts), kind="stable")]
    counts = counts[order]
    times, moments = np.unique(np.concatenate([items.start, items.end]), return_inverse=True)
    start, end = moments[: len(rows)], moments[len(rows) :]
    sizes = items.size[order]
    placed = np.empty(len(sizes), np.int64)
    lowest = strategy == "load"
    place(len(times), sizes, counts, start[rows], end[rows], alignment, lowest, placed)
    offsets = np.empty(len(rows), np.int64)
    offsets[rows] = np.repeat(placed, counts)
    return Packing(tuple(offsets.tolist()), int((placed + sizes).max()))
