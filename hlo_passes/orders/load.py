"""How many bytes an order of steps needs, as numbers: no HLO from here on.

    order      a0   a1   a2   a3   a4
    holding x  [█████████████)           from the first step that touches it to the last
    holding y       [████████████████)
    workspace            ▒▒              what one step needs while it runs
    load       x   x+y  x+y  +▒   y      a2 reads x for the last time and leaves z in its bytes:
                         └ z takes over

An order is an array of step numbers; the present one is 0, 1, 2, ... A step must stand behind
those in `OrderProblem.before`.

The load is that of XLA's buffer assignment (`allocations`), as far as it depends on the order
of the entry: a result may take over the bytes of an operand that dies where it is made, and
some temporaries take no bytes of their own while they fit into those of an output.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

type Indices = npt.NDArray[np.intp]
type Bytes = npt.NDArray[np.int64]


class Handover(NamedTuple):
    """Holding `born` lies in the bytes of `dying` where the last step that touches `dying` is
    the first that touches `born`."""

    dying: int
    born: int


class Colocation(NamedTuple):
    """A condition for holding `holding` to take no bytes: no step touches `earlier` once one
    touches `later`; one step may touch both if `may_touch`."""

    holding: int
    earlier: int
    later: int
    may_touch: bool


class Conditions(NamedTuple):
    """The columns of `Colocation`s."""

    holding: Indices
    earlier: Indices
    later: Indices
    may_touch: Indices


class Touched(NamedTuple):
    """Holdings, and the steps that touch them."""

    holding: Indices
    step: Indices


@dataclass(frozen=True, eq=False)
class OrderProblem:
    """Steps that can be ordered in many ways, and the bytes that they hold.

    Attributes:
      before: of each step those that must stand before it.
      sizes: int64[holdings], bytes.
      touches: of each holding the steps that write or read it: one or more, in order.
      workspace: int64[steps], bytes that a step needs for itself.
      handovers: in the order in which XLA considers them.
      colocations: holdings that none is about take their bytes always.
      opens: int64[steps], 1 where something asynchronous begins, −1 where it ends, else 0.
      takes_time: bool[steps]. What takes time stays under as many asynchronous operations as
        it is under now.
    """

    before: tuple[tuple[int, ...], ...]
    sizes: Bytes
    touches: tuple[tuple[int, ...], ...]
    workspace: Bytes
    handovers: tuple[Handover, ...]
    colocations: tuple[Colocation, ...]
    opens: Bytes
    takes_time: npt.NDArray[np.bool_]

    @property
    def steps(self) -> int:
        return len(self.before)

    @property
    def is_in_order(self) -> bool:
        """Whether the present order is one that may be."""
        return all(e < step for step, earlier in enumerate(self.before) for e in earlier)

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """Of each step those that must stand behind it."""
        after: list[list[int]] = [[] for _ in self.before]
        for step, earlier in enumerate(self.before):
            for e in earlier:
                after[e].append(step)
        return tuple(map(tuple, after))

    @cached_property
    def present(self) -> Load:
        """The order that there is."""
        return Load(self, np.arange(self.steps))

    @cached_property
    def pairs(self) -> tuple[Indices, Indices]:
        """`handovers`, column by column."""
        pairs = np.array(self.handovers, np.intp).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    @cached_property
    def conditions(self) -> Conditions:
        """`colocations`, column by column."""
        return Conditions(*np.array(self.colocations, np.intp).reshape(-1, 4).T)

    @cached_property
    def touched(self) -> Touched:
        """`touches`, pair by pair."""
        holdings = [h for h, steps in enumerate(self.touches) for _ in steps]
        steps = [step for steps in self.touches for step in steps]
        return Touched(np.array(holdings, np.intp), np.array(steps, np.intp))

    @cached_property
    def needs(self) -> tuple[Indices, Indices]:
        """`before`, pair by pair: steps, and what must stand before them."""
        later = [step for step, earlier in enumerate(self.before) for _ in earlier]
        earlier = [e for earlier in self.before for e in earlier]
        return np.array(later, np.intp), np.array(earlier, np.intp)

    @cached_property
    def offsets(self) -> Indices:
        """Where each holding begins in `touched`."""
        lengths = np.array([0, *map(len, self.touches)], np.intp)
        return np.cumsum(lengths)[:-1]


@dataclass(frozen=True, eq=False)
class Load:
    """An order, and what it needs. Each property is O(steps + touches), in numpy, once.

    Attributes:
      order: steps by place.
    """

    problem: OrderProblem
    order: Indices

    @cached_property
    def place(self) -> Indices:
        """Places by step."""
        place = np.empty(self.problem.steps, np.intp)
        place[self.order] = np.arange(self.problem.steps)
        return place

    @cached_property
    def first(self) -> Indices:
        """Of each holding the place of the first step that touches it."""
        return self._reduced(np.minimum)

    @cached_property
    def last(self) -> Indices:
        """Of each holding the place of the last step that touches it."""
        return self._reduced(np.maximum)

    def _reduced(self, of: np.ufunc) -> Indices:
        problem = self.problem
        if not problem.touches:
            return np.zeros(0, np.intp)
        return of.reduceat(self.place[problem.touched.step], problem.offsets)

    @cached_property
    def sizes(self) -> Bytes:
        """int64[holdings], the bytes that each takes: none where it is colocated."""
        sizes, colocations = self.problem.sizes, self.problem.conditions
        is_apart = (
            self.last[colocations.earlier] < self.first[colocations.later] + colocations.may_touch
        )
        held = sizes.copy()
        held[colocations.holding] = 0
        outside = colocations.holding[~is_apart]
        held[outside] = sizes[outside]
        return held

    @cached_property
    def at(self) -> Bytes:
        """int64[places], bytes live while the step there runs."""
        held = covered(self.sizes, self.first, self.last + 1, self.problem.steps)
        held += self.problem.workspace[self.order]
        handed = self._handed_over()
        np.subtract.at(held, self.first[handed], self.sizes[handed])
        return held

    def _handed_over(self) -> Indices:
        """The holdings that take another's bytes over: one gives them to one."""
        dying, born = self.problem.pairs
        met = (self.last[dying] == self.first[born]) & (self.sizes[dying] > 0)
        met &= self.sizes[born] > 0
        dying, born = dying[met], born[met]
        if len(np.unique(dying)) == len(dying) and len(np.unique(born)) == len(born):
            return born
        given: set[int] = set()
        taken: set[int] = set()
        for d, b in zip(dying.tolist(), born.tolist(), strict=True):
            if d not in given and b not in taken:
                given.add(d)
                taken.add(b)
        return np.array(sorted(taken), np.intp)

    @cached_property
    def between(self) -> Bytes:
        """int64[places + 1], bytes live between the step before each place and the one there."""
        return covered(self.sizes, self.first + 1, self.last + 1, self.problem.steps + 1)

    @cached_property
    def peak(self) -> int:
        return int(self.at.max(initial=0))

    @cached_property
    def peaks(self) -> Indices:
        """The places at which the peak is reached."""
        return np.flatnonzero(self.at == self.peak)

    @cached_property
    def open(self) -> Bytes:
        """int64[places + 1], asynchronous operations under way in front of each place."""
        return np.cumsum(np.concatenate([[0], self.problem.opens[self.order]]))

    @property
    def is_allowed(self) -> bool:
        """Whether all that takes time is under as many asynchronous operations as at present.

        Those that it is under at present are tied to it by `before`: so they are the same.
        """
        timed = np.flatnonzero(self.problem.takes_time)
        present = self.problem.present
        return bool(np.array_equal(self.open[self.place[timed]], present.open[timed]))


def covered(sizes: Bytes, start: Indices, end: Indices, length: int) -> Bytes:
    """Returns the sum of `sizes` over each of `length` points, in half-open ranges of them."""
    change = np.zeros(length + 1, np.int64)
    np.add.at(change, start, sizes)
    np.subtract.at(change, end, sizes)
    return np.cumsum(change)[:length]
