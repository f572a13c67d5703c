"""Plans, made for modules as XLA schedules them.

Of the program as it is written, with more and more of it computed again, and with more and more in
chunks, the fastest plan is taken (`fastest.py`).
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import jax

from hlo_passes import pipeline
from hlo_passes.errors import (
    HostResultsError,
    MemoryBudgetError,
    MemplanError,
    OrderedEffectsError,
)
from hlo_passes.ir import Learned, Module
from hlo_passes.memory.spread import drawn_heaps
from hlo_passes.memory.usage import memory_usage
from hlo_passes.placing.prices import Prices
from hlo_passes.plan import Plan
from hlo_passes.reading.reader import read_module
from hlo_passes.simulator import timeline
from memplan.candidates import Against, Candidate
from memplan.executable import Executable
from memplan.fastest import Fastest
from memplan.known import Known
from memplan.objectives import LATENCY, Objective
from memplan.placing import Placing
from memplan.streams.hosting import Hosting
from memplan.written import Written

# Of the budget: where less is live besides the arguments, chunks free next to nothing of it.
_FEW = 1 / 64

# What is live besides the arguments, as a part of what may be for a budget.
_AIMS = tuple(2 ** (-n / 2) for n in range(33))

_log = logging.getLogger("memplan")


class Planner:
    """Plans one program; what XLA has shown once is kept."""

    def __init__(self, placing: Placing) -> None:
        self._placing = placing
        self._lowering = placing.lowering
        profile = placing.lowering.function.options.profile
        self._known = Known() if profile is None else profile.known(placing.lowering.target.machine)
        self._as_written = Written(placing, self._known)
        self._others: dict[Hashable, Written] = {}
        self._chunks: dict[int, tuple[list[Placing], Iterator[Placing]]] = {}

    def _ways(self, budget: int, options: Mapping[str, Any] | None) -> Iterator[Written]:
        """The program as it is written, with more and more computed again, and with more and more
        of it in chunks."""
        yield self._as_written
        yield from map(self._of, self._recomputing)
        if self._placing.live_bytes < _FEW * budget:
            return
        try:
            live = self._may_be_live(budget, options)
        except (MemplanError, jax.errors.JaxRuntimeError) as error:
            _log.warning("chunks were dropped: %s", error)
        else:
            yield from map(self._of, self._in_chunks(live))

    def _may_be_live(self, budget: int, options: Mapping[str, Any] | None) -> int:
        """What may be live besides the arguments, as `Placing.live_bytes` counts it, by what XLA
        needs of the program as it is written; in fourths of powers of 2 below that count, so that
        budgets that are near have the same programs."""
        _, module = self._as_written.capture(self._placing.asked, options)
        machine = self._lowering.target.machine
        usage = memory_usage(module, machine.platform, machine=machine)
        needed = usage.besides_bytes
        room = max(budget - usage.argument_bytes, budget // 2, 1)
        fourths = math.floor(4 * math.log2(max(needed / room, 1)))
        return int(self._placing.live_bytes * 2 ** (-fourths / 4))

    def _in_chunks(self, live: int) -> Iterator[Placing]:
        """With parts of it run in chunks, so that ever less of so many bytes is live."""
        if live not in self._chunks:
            self._chunks[live] = [], self._placing.splitting(int(live * part) for part in _AIMS)
        found, more = self._chunks[live]
        for n in itertools.count():
            if n == len(found):
                found.extend(itertools.islice(more, 1))
            if n == len(found):
                return
            yield found[n]

    def _of(self, placing: Placing) -> Written:
        """The program written in such a way, of which there is one."""
        if placing is self._placing:
            return self._as_written
        key = placing.recomputed, placing.aim
        if key not in self._others:
            self._others[key] = Written(placing, self._known)
        return self._others[key]

    @functools.cached_property
    def _recomputing(self) -> tuple[Placing, ...]:
        """With what scans leave for others computed again, the more the later."""
        return tuple(self._placing.recomputing())

    def _beside(self, candidate: Candidate) -> Iterator[Written]:
        """The program of a candidate, and those before and after it among `_ways`."""
        series = [self._placing, *self._recomputing], *(found for found, _ in self._chunks.values())
        placings = next(placings for placings in series if candidate.placing in placings)
        n = placings.index(candidate.placing)
        yield from map(self._of, placings[max(n - 1, 0) : n + 2])

    def finer(
        self, candidate: Candidate, part: int, budget: int, options: Mapping[str, Any] | None
    ) -> Candidate | None:
        """A plan of the same kind for a program in smaller chunks, the first in which no more than
        that part is live; None where there is no such program.

        Raises:
          MemoryBudgetError: when there is no plan.
        """
        live = next(live for live, (f, _) in self._chunks.items() if candidate.placing in f)
        most = (candidate.placing.aim or 0) / part
        for placing in self._in_chunks(live):
            if (placing.aim or 0) <= most:
                self._known.counts_chip = candidate.counts_chip
                objective, ways = self._lowering.objective, (self._of(placing),)
                return self._best(objective, ways, budget, options)
        return None

    def plan(
        self,
        budget: int,
        options: Mapping[str, Any] | None,
        *,
        counts_chip: bool = False,
        near: Candidate | None = None,
        objective: Objective | None = None,
    ) -> Candidate:
        """Returns the best plan found for `budget` bytes, or for all that the device has: the
        fastest, or what else is asked for (`objectives`).

        A ring that fails is dropped: where the checker or XLA refuses what was made of it, the log
        says so, and the others are tried.

        Args:
          options: XLA options, beside those given to ``jit``.
          counts_chip: whether what XLA was seen to hold on the chip is counted all the same.
          near: the best for about as many bytes, if there is one: other programs than that, the
            one before and the one after it are looked at only where none of them will do.
          objective: what it is to be best for; None for what the user asks for.

        Raises:
          MemoryBudgetError: when none was found.
          OrderedEffectsError: when the program has ordered effects.
          HostResultsError: on CPU, when ``out_shardings`` ask for host memory.
          NoEnergyError, ObjectiveError: as `Objective.best`.
          MemplanError, jax.errors.JaxRuntimeError: of the first ring, when all were dropped.
        """
        if self._placing.program.arguments.ordered_effects:
            raise OrderedEffectsError(self._lowering.traced.fun_name)
        if self._lowering.target.machine.has_one_memory and self._lowering.returns_to_host:
            raise HostResultsError(self._lowering.traced.fun_name)
        budget = min(budget, self._lowering.target.capacity_bytes - self._lowering.closed_bytes)
        self._known.counts_chip = counts_chip
        objective = objective or self._lowering.objective
        if near is not None:
            with suppress(MemplanError, jax.errors.JaxRuntimeError):
                return self._best(objective, self._beside(near), budget, options)
        return self._best(objective, self._ways(budget, options), budget, options)

    def _best(
        self,
        objective: Objective,
        ways: Iterable[Written],
        budget: int,
        options: Mapping[str, Any] | None,
    ) -> Candidate:
        """The best plan of these programs; raises as `plan` does."""
        ways, seen = iter(ways), list[Written]()

        def again() -> Iterator[Written]:
            """The same ways for each plan; each is made when it is first asked for."""
            for n in itertools.count():
                if n == len(seen):
                    seen.extend(itertools.islice(ways, 1))
                if n == len(seen):
                    return
                yield seen[n]

        def cheapest(prices: Prices) -> Candidate:
            against = functools.partial(self._against, budget=budget, options=options)
            return Fastest(budget, options, against, prices).of(again())

        machine = self._lowering.target.machine
        found = objective.best(machine, cheapest, lambda candidate: candidate.plan)
        # What is compared with it later, is compared by what it is best for.
        return found.priced(objective.prices(machine))

    def _against(self, way: Written, budget: int, options: Mapping[str, Any] | None) -> Against:
        """What a program comes to against that as it is written."""
        if way is self._as_written:
            return Against()
        pair = way, self._as_written
        looks = [each.look_without_rings(budget) for each in pair]
        if None in looks:
            looks = [each.placing.asked for each in pair]
        new, old = (
            each.unplanned(look, options)
            for each, look in zip(pair, looks, strict=True)
            if look is not None
        )
        return Against(
            new.compute_s - old.compute_s,
            new.besides_bytes - old.besides_bytes,
            new.compute_j - old.compute_j,
        )

    def resident(self, options: Mapping[str, Any] | None) -> Candidate:
        """The program with all that may be on the device there, whether or not that has so much."""
        self._known.counts_chip = False
        return self._as_written.plan_with(self._placing.asked, sys.maxsize, options)

    def unmoved(
        self, options: Mapping[str, Any] | None, *, counts_chip: bool = False
    ) -> Candidate | None:
        """The program as XLA has it, if the planner finds that it fits the device."""
        capacity = self._lowering.target.capacity_bytes
        try:
            candidate = self.plan(capacity, options, counts_chip=counts_chip, objective=LATENCY)
        except MemoryBudgetError:
            return None
        return None if candidate.has_edits else candidate

    def candidate_of(self, plan: Plan) -> Candidate:
        """The program that a plan was made for, which XLA has not shown yet."""
        assert plan.preparation is not None
        hosting = Hosting.of(plan.preparation)
        program = self._placing.placed(hosting)
        return self._as_written.as_candidate(program, plan, hosting)

    def planned_at(
        self, module: Module, candidate: Candidate, options: Mapping[str, Any] | None
    ) -> Candidate:
        """A plan like a candidate's, for what XLA schedules of its program now.

        Raises:
          MemoryBudgetError: when there is none.
        """
        way, hosting = self._of(candidate.placing), candidate.hosting
        way.show(hosting, options, candidate.program, module)
        self._known.counts_chip = candidate.counts_chip
        budget = candidate.plan.budget_bytes
        way.plan_for(budget, options, candidate.prices)
        found = way.plan_with(hosting, budget, options)
        return found.with_again(candidate.again_s, candidate.again_j)

    def learn_from(self, executable: Executable) -> None:
        """Takes note of what XLA made of this program: how long its kernels take, and what it holds
        on the chip, where it says so, which is for TPU."""
        if self._lowering.target.platform == "tpu":
            self._known.add(read_module(executable))

    @property
    def can_be_told(self) -> bool:
        """Whether an executable would say what is not known of this program: on TPU, the first."""
        return self._lowering.target.platform == "tpu" and self._known.table_bytes is None

    def seconds(self, executable: Executable) -> float:
        """What a step of an executable takes on the machine model, by its own schedule."""
        module = self._known.timed(read_module(executable))
        return timeline.scheduled_step(module, self._lowering.target.machine).step_time_s

    @property
    def knows_chip(self) -> bool:
        """Whether XLA was seen to hold anything on the chip."""
        return self._known.has_chip

    def explained(self, rewritten: Module) -> int:
        """The bytes that are predicted of a module with what is known now of the chip."""
        return self._known.explained(rewritten)

    def drawn_bytes(
        self, candidate: Candidate, options: Mapping[str, Any] | None
    ) -> tuple[int, ...]:
        """What XLA:TPU may report of a plan that was just made: a sample, in bytes."""
        _, module = self._of(candidate.placing).capture(candidate.hosting, options)
        machine = self._lowering.target.machine
        plain = module.with_learned(Learned())
        rewritten = pipeline.rewrite_module(plain, candidate.plan, machine)
        usage = memory_usage(rewritten, "tpu")
        tables = max(usage.table_bytes, self._known.table_bytes or 0)
        beside = usage.total_bytes - usage.temp_bytes + tables
        return tuple(beside + heap for heap in drawn_heaps(rewritten, machine))

    def forget(self, candidate: Candidate | None = None) -> None:
        """Has XLA show the program of a candidate anew, or all."""
        all_ways = self._as_written, *self._others.values()
        for way in all_ways if candidate is None else (self._of(candidate.placing),):
            way.forget()
