"""Which idle temporaries leave the device, and which are computed again.

    load      ▁▃▅▇███▇▅▃▁        over the capacity: ticks at which something has to go
    capacity  ─────────────
    gaps          a ├─────┤      each gap that is taken lowers the load while it lasts
              b ├──────────┤     evicted: the links are busy; recomputed: compute is
                  c  ├┤

This is a covering problem: at every tick enough bytes have to go, for the least time.
Gaps are taken in the order of their price for each byte and tick that is over the capacity
(the greedy of Dobson, "Worst-case analysis of greedy heuristics for integer programming with
nonnegative data", Mathematics of Operations Research 7, 1982), until none is; then those that
turned out not to be needed are given back.

What moves occupies a link, and that costs something only where the link has no time left. So
link seconds have a *price* in seconds of the step, and there are only so many of them; what
then still has to go pays more for them than for compute. The whole is done for a few prices
and seconds, from nothing to that of compute: the best by the predicted step counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hlo_passes.edits.gaps import Temporary
from hlo_passes.edits.state import Action, EditState, Rates
from hlo_passes.plan import LogicalTime

# How often all gaps are gone through; what is computed again may hold others longer.
_ROUNDS = 4

DEAREST = 3.0
"""Seconds of the step for a second of a link, when links have no time left."""


class _Option(NamedTuple):
    """A gap and what can be done with it.

    Attributes:
      score: seconds for each byte and tick over the capacity; the least comes first.
      most_s: seconds for which the gap can be had in another way.
    """

    score: float
    temporary: int
    start: LogicalTime
    action: Action
    most_s: float


@dataclass(frozen=True, slots=True)
class Terms:
    """On which terms gaps are taken.

    Attributes:
      link_price: seconds of the step that a second of a link is worth.
      link_s: seconds of links at that price; more of them are worth `DEAREST`.
      depth: see `EditState`.
    """

    link_price: float
    link_s: float
    depth: int


def select(
    temporaries: Sequence[Temporary],
    load: npt.NDArray[np.int64],
    costs: npt.NDArray[np.float64],
    rates: Rates,
    capacity: int,
    terms: Terms,
    smallest: int = 0,
    aim: int | None = None,
) -> EditState:
    """Takes gaps until the load is within `capacity` everywhere, or none is left that helps.

    Args:
      load: int64[ticks], bytes; costs: float64[ticks], seconds.
      capacity: bytes.
      smallest: temporaries of fewer bytes are left alone.
      aim: bytes, of fewer than `capacity`, within which the load is brought before what is not
        needed is given back.
    """
    selection = EditState(temporaries, load, costs, rates, terms.depth)
    _take(selection, capacity if aim is None else aim, terms.link_price, terms.link_s, smallest)
    complete(selection, capacity if aim is None else aim, smallest)
    selection.give_back(capacity)
    return selection


def complete(selection: EditState, capacity: int, smallest: int = 0) -> None:
    """Takes more gaps, as `select` does, where the load is over `capacity` still."""
    _take(selection, capacity, DEAREST, np.inf, smallest)


def _take(
    selection: EditState, capacity: int, link_price: float, link_s: float, smallest: int
) -> None:
    left_s = link_s
    refused: set[tuple[int, LogicalTime]] = set()
    for _ in range(_ROUNDS):
        if selection.load.max(initial=0) <= capacity:
            break
        changed = False
        for option in sorted(_options(selection, capacity, link_price, smallest)):
            n, start = option.temporary, option.start
            end = selection.gap_end(n, start)
            if start in selection.taken[n]:
                continue
            if selection.load[start + 1 : end].max(initial=0) <= capacity:
                continue
            if option.action == "recompute":
                if (n, start) not in refused:
                    is_taken = selection.recompute(n, start, capacity, option.most_s)
                    changed |= is_taken
                    if not is_taken:
                        refused.add((n, start))
                continue
            needed_s = selection.moving_s(n)
            if needed_s <= left_s:
                left_s -= needed_s
                changed |= selection.evict(n, start)
        if not changed:
            break


def _options(
    selection: EditState, capacity: int, link_price: float, smallest: int
) -> Iterator[_Option]:
    """Yields the gaps that cover ticks over the capacity, each way they can be taken."""
    rates = selection.rates
    over = np.concatenate([[0], np.cumsum(selection.load > capacity)])
    clock = selection.clock
    for t in selection.temporaries:
        if t.obstacle or t.size < smallest or not t.size:
            continue
        accesses = selection.accesses[t.number]
        is_away = selection.is_away(t.number)
        for start, end in pairwise(accesses):
            covered = int(over[end] - over[start + 1]) if end > start + 1 else 0
            if not covered or start in selection.taken[t.number]:
                continue
            benefit = t.size * covered
            price = np.inf
            if rates.can_evict:
                needed = selection.moving_s(t.number)
                idle = clock[end] - clock[start + 1 if is_away else t.written + 1]
                price = link_price * needed + max(0.0, needed - idle)
                yield _Option(float(price / benefit), t.number, start, "evict", np.inf)
            if t.operands is not None and selection.depth:
                score = rates.maker_s[t.maker.id] / benefit
                yield _Option(score, t.number, start, "recompute", float(price))
