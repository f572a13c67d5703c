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

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hlo_passes.edits._gap_state import Catalog
from hlo_passes.edits.state import EditState

DEAREST = 3.0
"""Seconds of the step for a second of a link, when links have no time left."""


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
    of: Catalog,
    load: npt.NDArray[np.int64],
    costs: npt.NDArray[np.float64],
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
    selection = EditState(of, load, costs, terms.depth)
    aim = capacity if aim is None else aim
    selection.take(aim, terms.link_price, terms.link_s, smallest)
    complete(selection, aim, smallest)
    selection.give_back(capacity)
    return selection


def complete(selection: EditState, capacity: int, smallest: int = 0) -> None:
    """Takes more gaps, as `select` does, where the load is over `capacity` still."""
    selection.take(capacity, DEAREST, np.inf, smallest)
