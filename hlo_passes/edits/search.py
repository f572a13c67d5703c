"""Selections near the fractions of the linear program, and what is better than one that is known.

    choices ──► relax ──► gaps by their fractions ──► completed, needless ones given back
                                                              │
    a selection ──► some gaps given back, others taken ◄──────┘   many times; the faster is kept

The program does not know what has to run again for what runs again, so that what it chooses is
carried out one gap after another (`state.EditState`), and completed where it then does not fit.
Greedy selections see one gap at a time, the program all of them: where link and memory are short
at once, what comes of it is far better.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hlo_passes.edits.choice import EditChoice, Work
from hlo_passes.edits.greedy import complete
from hlo_passes.edits.relaxation import Relaxation, relax
from hlo_passes.edits.state import EditState

# Fractions from which a gap is taken.
_LIKELY = (0.5, 0.9, 0.1)

# How often gaps of a selection are given back, and others taken, in search of a better one.
_TIMES = 200

# Of modules with more ticks each time takes longer, and there is more than a search to be done:
# with twice as many it is an eighth of that.
_TICKS = 4096


def affordable(times: int, ticks: int) -> int:
    """How often something is done in a module of so many ticks that is done `times` in others."""
    return int(times * min(1.0, (_TICKS / max(1, ticks)) ** 3))


class EditSearch:
    """Selections of one module's gaps.

    Args:
      capacity: bytes of the arena above its base.
      slots: at most so many streamed arrays on the device at once.
    """

    def __init__(self, work: Work, capacity: int, slots: int | None) -> None:
        self._work, self._capacity, self._slots = work, capacity, slots
        load = work.posed.arena.load
        self._times = affordable(_TIMES, len(load))
        self._choices, self._starts = work.choices(load, work.smallest, may_stay=False)

    @cached_property
    def _relaxation(self) -> Relaxation | None:
        return relax(self._choices, self._capacity)

    def rounded(self, reserve: npt.NDArray[np.int64] | int) -> Iterator[EditChoice]:
        """Yields choices near the fractions of the linear program.

        Args:
          reserve: int64[ticks], bytes of the capacity that are left free; the program leaves none.
        """
        relaxation = self._relaxation
        if relaxation is None:
            return
        for likely in _LIKELY:
            taken = self._carried_out(relaxation, likely, reserve)
            if (cost_s := taken.cost_s(self._capacity, self._slots)) < np.inf:
                yield EditChoice(taken, cost_s)

    def improved(self, taken: EditState, packed: int | None = None, longer: int = 1) -> EditChoice:
        """What a search from a selection finds that is faster, or packed within the capacity.

        Args:
          packed: bytes within which it is to be packed; those of the capacity, if not said.
          longer: by which factor.
        """
        better, capacity = taken.copied(), self._capacity
        terms = [(terms.link_price, terms.link_s) for terms in self._work.terms()]
        within = capacity if packed is None else packed
        times = longer * self._times
        better.improve(capacity, within, terms, self._work.smallest, self._slots, times)
        return EditChoice(better, better.fitted(capacity, self._slots).cost_s)

    def over(self, taken: EditState) -> int:
        """By how many bytes its packing is above the capacity, as far as that is known."""
        return taken.fitted(self._capacity, self._slots).packed - self._capacity

    def _carried_out(
        self, relaxation: Relaxation, likely: float, reserve: npt.NDArray[np.int64] | int
    ) -> EditState:
        """Evicts, then recomputes in the order of time, what is chosen by `likely` or more."""
        work, capacity = self._work, self._capacity
        taken = work.state(work.load + reserve)
        for k in np.flatnonzero(relaxation.evicted >= likely).tolist():
            taken.evict(*self._starts[k])
        recomputed = np.flatnonzero(relaxation.recomputed >= likely).tolist()
        for k in sorted(recomputed, key=lambda k: self._choices.gaps[k].end):
            n, start = self._starts[k]
            if start not in taken.by_temporary.get(n, {}):
                taken.recompute(n, start, capacity, np.inf)
        complete(taken, capacity, work.smallest)
        taken.give_back(capacity)
        return taken
