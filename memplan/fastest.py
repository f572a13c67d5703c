"""The fastest plan of a program that can be written in many ways.

    ways ─► what each promises ─► good? ─► planned
                                    └────► put off ─► the most promising are planned, until none
                                                      promises more than there is
         ├─► refused, in chunks ─► put off ─► planned where there is no plan
         └─► in chunks, and as much is live as without them ─► left out

What a program promises is known from its choice of edits, before that is packed. A plan takes far
longer to make, most of all where much has to go, and the ways that promise little are many.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from hlo_passes.errors import MemoryBudgetError, MemplanError
from hlo_passes.placing.prices import FREE, Prices
from memplan.candidates import (
    PATIENCE,
    Against,
    Candidate,
    FinerChunks,
    Promise,
    Refused,
    Step,
)
from memplan.written import Written

# Where a step takes no longer than its compute by this factor, none is looked for that computes
# again what scans leave for others.
_SOON_ENOUGH = 1.02

_log = logging.getLogger("memplan")


class _PutOff(NamedTuple):
    """A program that was not planned yet, and what it comes to against that as it is written."""

    promise: Promise
    way: Written
    against: Against


class Fastest:
    """A search among programs that do the same.

    Args:
      budget: bytes.
      options: XLA's, beside those given to ``jit``.
      against: what a program comes to against that as it is written.
      prices: what plans are charged for beside seconds.
    """

    def __init__(
        self,
        budget: int,
        options: Mapping[str, Any] | None,
        against: Callable[[Written], Against],
        prices: Prices = FREE,
    ) -> None:
        self._budget, self._options, self._prices = budget, options, prices
        self._against = against
        self._best: Candidate | None = None
        self._rest: Iterator[Candidate] = iter(())  # With other rings than the best has.
        self._found: list[Candidate] = []
        self._failed: list[Exception] = []
        self._finer = FinerChunks()
        self._put_off: list[_PutOff] = []
        # And the bytes that are needed.
        self._refused: list[tuple[float, Written, Against]] = []

    def of(self, ways: Iterable[Written]) -> Candidate:
        """The fastest plan for any of these programs: as they are written first, then in ever
        smaller chunks.

        Raises:
          MemoryBudgetError: when there is none, of all refusals that with the least.
          MemplanError, jax.errors.JaxRuntimeError: when all were dropped, of the first.
        """
        ways = iter(ways)
        for way in ways:
            self._look_at(itertools.chain((way,), ways))
            promised = bool(self._put_off)
            self._plan_most_promising()
            if self._best is not None or not promised:
                break
            # None of those could be packed: what promises less may be.
            self._finer.begin_again()
        best = self._best
        for candidate in self._rest:
            best = candidate if best is None or candidate.is_faster_than(best) else best
        if best is None:
            refused = [e for e in self._failed if isinstance(e, MemoryBudgetError)]
            raise min(refused, key=lambda e: e.least, default=self._failed[0])
        return best

    def _look_at(self, ways: Iterable[Written]) -> None:
        """Plans what promises a good step, and puts others off, until none is worth a look."""
        for way in ways:
            splits, best = way.placing.splits, self._best
            if splits and best is not None and not best.placing.splits:
                if not best.has_edits or best.is_good:
                    break
            way.plan_for(self._budget, self._options, self._prices)
            try:
                against = self._against(way)
            except (MemplanError, jax.errors.JaxRuntimeError) as error:
                _log.warning("%s was dropped: %s", way.named(None), error)
                self._failed.append(error)
                continue
            if splits and against.more_bytes >= 0:
                # As XLA has them, loops over chunks may keep more than they save.
                step, needs = None, math.inf
            else:
                step, needs = self._comes_to(way, against)
            if splits:
                if self._finer.is_over(way.placing.aim or 0, step, needs):
                    break
                continue
            self._finer.without = min(self._finer.without, needs)
            if self._best is not None and (
                self._best.cost_s <= _SOON_ENOUGH * self._best.compute_s
            ):
                break

    def _comes_to(self, way: Written, against: Against) -> tuple[Step | None, float]:
        """What a program promises, or its plan where that is not put off; and the fewest bytes that
        were needed where it was refused."""
        promise = way.promise(self._budget, self._options)
        if isinstance(promise, Refused) and way.placing.splits:
            # It may be planned with other rings, which takes long, and smaller chunks need less.
            self._refused.append((promise.least, way, against))
            return None, promise.least
        if isinstance(promise, Promise):
            promise = promise.with_again(against.again_s, self._prices.joule_s * against.again_j)
            if not self._is_good(promise):
                self._put_off.append(_PutOff(promise, way, against))
                return promise, math.inf
        return self._planned(way, against)

    def _is_good(self, promise: Promise) -> bool:
        return promise.is_good and (self._best is None or promise.is_faster_than(self._best))

    def _plan_most_promising(self) -> None:
        """Plans what was put off, as long as it promises more than there is; and what was refused
        only where that leads to no plan, which says what it needs."""
        vain = 0
        for promise, way, against in sorted(self._put_off, key=lambda p: p.promise.waits_s):
            best = self._best
            if best is not None and (vain == PATIENCE or not promise.is_faster_than(best)):
                break
            self._planned(way, against)
            vain += best is not None and self._best is best
        for _, way, against in sorted(self._refused, key=lambda r: r[0]):
            if self._best is not None:
                break
            self._planned(way, against)
        self._put_off.clear()
        self._refused.clear()

    def _planned(self, way: Written, against: Against) -> tuple[Candidate | None, float]:
        """A plan for a program, and the fewest bytes that were needed where it was refused."""
        candidate, before = None, len(self._failed)
        # A loop over chunks that brings what it reads, brings it for each of them.
        ways_inside = itertools.islice(way.inside(self._budget), 1 if way.placing.splits else None)
        for inside, nested in ways_inside:
            in_turn = way.in_turn(
                inside, nested, self._budget, self._options, against, self._found, self._failed
            )
            # Which slots are best is asked of the best of the programs only.
            candidate = next(in_turn, None)
            if candidate is not None and (
                self._best is None or candidate.is_faster_than(self._best)
            ):
                self._best, self._rest = candidate, in_turn
            if self._best is not None and self._best.is_hidden:
                break
        failed = self._failed[before:]
        refusals = (e.least for e in failed if isinstance(e, MemoryBudgetError))
        return candidate, min(refusals, default=math.inf)
