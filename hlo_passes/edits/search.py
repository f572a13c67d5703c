"""Which gaps programs would take: a linear one, rounded; then mixed-integer ones.

    choices ──► relax ──► round_up ──► carried out ──► one more to be packed
                             │            ▲  │
                             └─ improve ──┘  └──► step_seconds, which says what is better

Programs do not know what has to run again for what runs again, so that what they choose is
carried out one gap after another (`edits.state`), and completed where it then does not fit.
Greedy selections see one gap at a time, programs all of them: where the former have compute wait
for links, a rounded one can be twice as fast; elsewhere it is seldom better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hlo_passes.edits.choice import EditChoice, Work
from hlo_passes.edits.choices import Choices, Selection
from hlo_passes.edits.greedy import complete
from hlo_passes.edits.improve import LIKELY, improve, round_up
from hlo_passes.edits.relaxation import relax
from hlo_passes.edits.state import EditState

# A selection with which a step takes less than this, over its compute, is not improved.
_GOOD_ENOUGH = 1.001


class EditSearch:
    """Programs about one module.

    Args:
      capacity: bytes of the arena above its base.
      slots: at most so many streamed arrays on the device at once.
    """

    def __init__(self, work: Work, capacity: int, slots: int | None) -> None:
        self._work, self._capacity, self._slots = work, capacity, slots
        load = work.posed.arena.load
        self._choices, self._starts = work.choices(load, work.smallest, may_stay=False)

    def rounded(self, reserve: npt.NDArray[np.int64]) -> Iterator[EditChoice]:
        """Yields choices near the fractions of the linear program.

        Args:
          reserve: int64[ticks], bytes of the capacity that are left free.
        """
        choices = self._with(reserve)
        relaxation = relax(choices, self._capacity)
        if relaxation is None:
            return
        for likely in LIKELY:
            selection = round_up(choices, self._capacity, relaxation, likely)
            if selection is not None:
                taken = self._carried_out(selection, reserve)
                seconds = taken.step_seconds(self._capacity, self._slots)
                if seconds < np.inf:
                    yield EditChoice(None, taken, seconds)

    def improved(
        self, best: EditChoice, reserve: npt.NDArray[np.int64], search_s: float
    ) -> EditChoice:
        """Searches for a better choice for `search_s` seconds.

        Args:
          reserve: int64[ticks], bytes of the capacity that are left free.
        """
        if best.step_time_s <= float(self._work.posed.clock[-1]) * _GOOD_ENOUGH:
            return best
        found = [best]

        def evaluate(selection: Selection) -> float:
            taken = self._carried_out(selection, reserve)
            seconds = taken.step_seconds(self._capacity, self._slots)
            if seconds < found[0].step_time_s:
                found[0] = replace(best, taken=taken, step_time_s=seconds)
            return seconds

        start = self._selection(best.taken)
        improve(self._with(reserve), self._capacity, start, search_s, evaluate)
        return found[0]

    def _with(self, reserve: npt.NDArray[np.int64]) -> Choices:
        return replace(self._choices, load=self._choices.load + reserve)

    def _selection(self, taken: EditState) -> Selection:
        """What programs know of gaps that are taken."""
        number = {start: k for k, start in enumerate(self._starts)}
        evicted: set[int] = set()
        recomputed: list[tuple[int, int]] = []
        for n, gaps in taken.taken.items():
            for start, gap in gaps.items():
                k = number.get((n, start))
                if k is not None and gap.action == "evict":
                    evicted.add(k)
                elif k is not None:
                    recomputed.append((k, 0))
        return Selection(frozenset(evicted), tuple(sorted(recomputed)), frozenset())

    def _carried_out(self, selection: Selection, reserve: npt.NDArray[np.int64]) -> EditState:
        work, starts, capacity = self._work, self._starts, self._capacity
        taken = work.state(work.load + reserve)
        for k in sorted(selection.evicted):
            if starts[k][1] in taken.accesses(starts[k][0]):
                taken.evict(*starts[k])
        by_end = sorted(selection.recomputed, key=lambda r: self._choices.gaps[r[0]].end)
        for k, _ in by_end:
            if starts[k][1] not in taken.taken.get(starts[k][0], {}):
                taken.recompute(*starts[k], capacity, np.inf)
        complete(taken, capacity, work.smallest)
        taken.give_back(capacity)
        return taken
