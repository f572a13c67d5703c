"""Plans, made for modules as XLA schedules them.

A module is captured twice: first with everything on the host that may be there, to choose what
stays on the device; then so placed, to plan each transfer. A capture ends XLA's work at its
scheduler, early in the compilation. Programs with loops over stacks are captured with rings of
different depth, and the fastest plan is taken.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from hlo_passes import pipeline
from hlo_passes.analysis.learned import held_on_chip, with_learned
from hlo_passes.equations import Path
from hlo_passes.errors import (
    HostResultsError,
    MemoryBudgetError,
    MemplanError,
    OrderedEffectsError,
)
from hlo_passes.ir import Learned, Module, ShapeIndex
from hlo_passes.memory.spread import drawn_heaps
from hlo_passes.memory.usage import memory_usage
from hlo_passes.plan import Plan
from hlo_passes.reading.reader import read_module
from hlo_passes.rewrite import inject
from hlo_passes.simulator import cost, timeline
from memplan.candidates import Candidate, FinerChunks
from memplan.executable import Executable, Program
from memplan.placing import Placing
from memplan.streams.choice import choose_kept, ring_seconds
from memplan.streams.hosting import Hosting
from memplan.streams.records import record_streams

# The rings that are tried, in this order: slots, and the share of a layer's bytes that has so
# many (see `Stream`). Where all layers take equally long, two slots are enough: one is filled
# while the other is computed with. With less, more stacks have room on the device, which is
# better where the link is the bottleneck anyway.
_RINGS = ((2, 1.0), (1, 1.0), (2, 0.25), (3, 1.0))

# Where stacks take no more than this share of the budget, they are left on the device at first;
# and rings are tried only where a step then is slow (`Candidate.is_slow`). What rings save is
# little there, and each has to be captured two or three times.
_SMALL_STACKS = 0.5

# Where a step takes no longer than its compute by this factor, none is looked for that computes
# again what scans leave for others.
_SOON_ENOUGH = 1.02

# Chunks are tried where a step takes longer than that.
_GOOD = 1.05

# Of the budget: where less is live besides the arguments, chunks free next to nothing of it.
_FEW = 1 / 64

# What is live besides the arguments, as a part of what may be for a budget.
_AIMS = tuple(2 ** (-n / 2) for n in range(33))

# Where a plan came out slower than had been expected, another choice of arguments that stay is
# tried if that is expected to take no more than this part of its step.
_PROMISING = 0.8

# Budgets: where so much is needed beyond the stacks, rings of them are not tried. With rings XLA
# may also copy less of what else a loop carries.
_HOPELESS = 2

_log = logging.getLogger("memplan")


def _layers(ring: tuple[int, float]) -> float:
    """How many layers a ring has room for."""
    slots, share = ring
    return 1 + (slots - 1) * share


def _worded(ring: tuple[int, float] | None) -> str:
    """What the log calls the way in which a program's loops are streamed."""
    if ring is None:
        return "no rings"
    slots, share = ring
    return f"rings of {slots} slot{'s'[: slots != 1]} for {share:.0%} of a layer"


@dataclass
class _Known:
    """What executables of a program said of its instructions; see `learned`.

    Attributes:
      on_chip: what each executable seen holds on the chip of an instruction.
      table_bytes: of the latest one's tables; None before the first.
      counts_chip: whether what they hold on the chip is counted all the same.
      seen: how many there were.
    """

    cycles: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    on_chip: dict[Hashable, frozenset[ShapeIndex]] = field(
        default_factory=dict[Hashable, frozenset[ShapeIndex]]
    )
    table_bytes: int | None = None
    counts_chip: bool = False
    seen: int = 0

    def said_of(self, module: Module) -> Module:
        on_chip = {} if self.counts_chip else self.on_chip
        return with_learned(module, self.cycles, on_chip, self.table_bytes)


class Planner:
    """Plans one program; what XLA has shown once is kept."""

    def __init__(self, placing: Placing) -> None:
        self._placing = placing
        self._lowering = placing.lowering
        # The module as it was shown last, with what is on the chip counted and left out.
        self._captured: dict[Hashable, tuple[Program, dict[bool, Module]]] = {}
        self._known = _Known()
        self._others: dict[Hashable, Planner] = {}
        self._chunks: dict[int, tuple[list[Placing], Iterator[Placing]]] = {}
        self._planned: dict[tuple[str, Hosting], Candidate | MemoryBudgetError] = {}
        self._planned_for: Hashable = None  # What that depends on besides.

    def _planners(self, budget: int, options: Mapping[str, Any] | None) -> Iterator[Planner]:
        """Of the program as it is written, with more and more computed again, and with more and
        more of it in chunks."""
        yield self
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
        _, module = self._capture(self._placing.asked, options)
        machine = self._lowering.target.machine
        usage = memory_usage(module, machine.platform, machine=machine)
        needed = usage.total_bytes - usage.argument_bytes
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

    def _of(self, placing: Placing) -> Planner:
        """The planner of the same program written in another way; each way has one."""
        key = placing.recomputed, placing.aim
        if key not in self._others:
            self._others[key] = planner = Planner(placing)
            planner._known = self._known
        return self._others[key]

    @functools.cached_property
    def _recomputing(self) -> tuple[Placing, ...]:
        """With what scans leave for others computed again, the more the later."""
        return tuple(self._placing.recomputing())

    def _beside(self, candidate: Candidate) -> Iterator[Planner]:
        """Of the program of a candidate, and of those before and after it among `_planners`."""
        series = [self._placing, *self._recomputing], *(found for found, _ in self._chunks.values())
        placings = next(placings for placings in series if candidate.placing in placings)
        n = placings.index(candidate.placing)
        for placing in placings[max(n - 1, 0) : n + 2]:
            yield self if placing is self._placing else self._of(placing)

    def finer(
        self, candidate: Candidate, budget: int, options: Mapping[str, Any] | None
    ) -> Candidate | None:
        """A plan of the same kind for a program in smaller chunks, the first in which half as much
        is live; None where there is no such program.

        Raises:
          MemoryBudgetError: when there is no plan.
        """
        live = next(live for live, (f, _) in self._chunks.items() if candidate.placing in f)
        most = (candidate.placing.aim or 0) / 2
        for placing in self._in_chunks(live):
            if (placing.aim or 0) <= most:
                self._known.counts_chip = candidate.counts_chip
                return self._fastest((self._of(placing),), budget, options)
        return None

    def plan(
        self,
        budget: int,
        options: Mapping[str, Any] | None,
        *,
        counts_chip: bool = False,
        near: Candidate | None = None,
    ) -> Candidate:
        """Returns the fastest plan found for `budget` bytes, or for all that the device has.

        A ring that fails is dropped: where the checker or XLA refuses what was made of it, the log
        says so, and the others are tried.

        Args:
          options: XLA options, beside those given to ``jit``.
          counts_chip: whether what XLA was seen to hold on the chip is counted all the same.
          near: the best for about as many bytes, if there is one: other programs than that, the
            one before and the one after it are looked at only where none of them will do.

        Raises:
          MemoryBudgetError: when none was found.
          OrderedEffectsError: when the program has ordered effects.
          HostResultsError: on CPU, when ``out_shardings`` ask for host memory.
          MemplanError, jax.errors.JaxRuntimeError: of the first ring, when all were dropped.
        """
        if self._placing.program.arguments.ordered_effects:
            raise OrderedEffectsError(self._lowering.traced.fun_name)
        if self._lowering.target.machine.has_one_memory and self._lowering.returns_to_host:
            raise HostResultsError(self._lowering.traced.fun_name)
        budget = min(budget, self._lowering.target.capacity_bytes - self._lowering.closed_bytes)
        self._known.counts_chip = counts_chip
        if near is not None:
            with suppress(MemplanError, jax.errors.JaxRuntimeError):
                return self._fastest(self._beside(near), budget, options)
        return self._fastest(self._planners(budget, options), budget, options)

    def _fastest(
        self, planners: Iterable[Planner], budget: int, options: Mapping[str, Any] | None
    ) -> Candidate:
        """The fastest plan of these programs; raises as `plan` does."""
        best: Candidate | None = None
        rest: Iterator[Candidate] = iter(())
        found: list[Candidate] = []
        failed: list[Exception] = []
        finer = FinerChunks()
        for planner in planners:
            if planner._placing.splits and best is not None and not best.placing.splits:
                if not best.has_edits or best.step_time_s <= _GOOD * best.compute_s:
                    break
            planner._plans_for(budget, options)
            before = len(failed)
            try:
                again_s = planner._again_s(self, budget, options)
            except (MemplanError, jax.errors.JaxRuntimeError) as error:
                _log.warning("%s was dropped: %s", planner._way(None), error)
                failed.append(error)
                continue
            candidate = None
            # A loop over chunks that brings what it reads, brings it for each of them.
            ways = itertools.islice(planner._inside(budget), 1 if planner._placing.splits else None)
            for inside, nested in ways:
                in_turn = planner._in_turn(inside, nested, budget, options, again_s, found, failed)
                # Which slots are best is asked of the best of the programs only.
                candidate = next(in_turn, None)
                if candidate is not None and (best is None or candidate.is_faster_than(best)):
                    best, rest = candidate, in_turn
                if best is not None and best.is_hidden:
                    break
            refusals = [e.least for e in failed[before:] if isinstance(e, MemoryBudgetError)]
            needs = min(refusals, default=math.inf)
            if planner._placing.splits:
                if finer.is_over(planner._placing.aim or 0, candidate, needs):
                    break
                continue
            finer.without = min(finer.without, needs)
            if best is not None and best.step_time_s <= _SOON_ENOUGH * best.compute_s:
                break
        for candidate in rest:
            best = candidate if best is None or candidate.is_faster_than(best) else best
        if best is None:
            refused = [e for e in failed if isinstance(e, MemoryBudgetError)]
            raise min(refused, key=lambda e: e.least, default=failed[0])
        return best

    def _plans_for(self, budget: int, options: Mapping[str, Any] | None) -> None:
        """Forgets what was planned for another budget, or when less was known."""
        key = budget, _options_key(options), self._known.counts_chip, self._known.seen
        if key != self._planned_for:
            self._planned.clear()
            self._planned_for = key

    def _in_turn(
        self,
        inside: frozenset[int],
        nested: bool,
        budget: int,
        options: Mapping[str, Any] | None,
        again_s: float,
        found: list[Candidate],
        failed: list[Exception],
    ) -> Iterator[Candidate]:
        """Yields plans with one ring after another, as long as the next may be faster, and has no
        more layers than one that was refused.

        Args:
          inside: what loops bring whole.
          again_s: seconds of compute that the program as it is written does not have.
          found, failed: what came of each ring is added to one of them.
        """
        best: Candidate | None = None
        refused = math.inf
        for ring in self._rings(budget):
            if ring is not None and _layers(ring) > refused:
                continue
            if best is not None and (ring is None or ring[0] > best.hosting.depth + 1):
                return  # One slot more was no better.
            what = self._way(ring)
            how = f" with {what}" if what else ""
            fastest_s = min((candidate.step_time_s for candidate in found), default=None)
            self._lowering.report("planning", budget, fastest_s, way=what)
            everything = self._everything(ring, inside, nested)
            try:
                if ring is None:
                    # Where a ring's slots and loops take more than they save, the entry's own
                    # temporaries can still be evicted and recomputed.
                    candidate = self._plan_placed(everything, budget, options)
                else:
                    candidate = self._plan_with_rings(everything, budget, options, best)
            except MemoryBudgetError as error:
                _log.info("planning%s: need %d bytes", how, error.least)
                failed.append(error)
                if ring is not None:
                    refused = min(refused, _layers(ring))
                elif error.least - self._stack_bytes > _HOPELESS * budget:
                    return  # Nor would it fit with all stacks on the host.
                continue
            except (MemplanError, jax.errors.JaxRuntimeError) as error:
                _log.warning("a plan%s was dropped: %s", how, error)
                failed.append(error)
                continue
            if candidate is None:
                continue
            candidate = candidate.with_again(again_s) if again_s else candidate
            _log.info("planning%s: a step of %.3g ms", how, candidate.step_time_s * 1e3)
            found.append(candidate)
            yield candidate
            best = candidate if best is None or candidate.is_faster_than(best) else best
            if best.is_hidden or (ring is None and not best.is_slow):
                return

    def _way(self, ring: tuple[int, float] | None) -> str:
        """In what way the program's loops are written, for a person; nothing where it has none that
        could be."""
        parts: list[str] = []
        if self._placing.recomputed != "nothing":
            parts.append(f"{self._placing.recomputed} recomputed")
        if self._placing.splits:
            parts.append(f"{len(self._placing.splits)} in chunks")
        if self._placing.streams.rings(self._placing.everything(*_RINGS[0])):
            parts.append(_worded(ring))
        return ", ".join(parts)

    def _again_s(self, written: Planner, budget: int, options: Mapping[str, Any] | None) -> float:
        """Seconds of compute that the program as it is written does not have."""
        if self is written:
            return 0.0
        looks = [planner._look_without_rings(budget) for planner in (self, written)]
        if None in looks:
            looks = [planner._placing.asked for planner in (self, written)]
        again_s, written_s = (
            planner._compute_s(look, options)
            for planner, look in zip((self, written), looks, strict=True)
            if look is not None
        )
        return again_s - written_s

    def _look_without_rings(self, budget: int) -> Hosting | None:
        """What is on the host when this program is planned first; None where that has rings, whose
        transfers would be taken for compute."""
        ring = self._rings(budget)[0]
        everything = self._everything(ring, *next(self._inside(budget)))
        return None if self._placing.streams.rings(everything) else everything

    def _everything(
        self, ring: tuple[int, float] | None, inside: frozenset[int], nested: bool
    ) -> Hosting:
        """All that may live on the host does; stacks only if there is a ring."""
        everything = self._placing.everything(*(ring or _RINGS[0]))
        everything = replace(everything, inside=inside, nested=nested)
        return everything if ring else everything.without(self._placing.streams.stacks)

    def _compute_s(self, hosting: Hosting, options: Mapping[str, Any] | None) -> float:
        """Seconds of compute, all by the machine model: of this program XLA may have said how long
        kernels take that those of another are compared with."""
        _, module = self._capture(hosting, options)
        return cost.step_seconds(module.with_learned(Learned()), self._lowering.target.machine)

    def resident(self, options: Mapping[str, Any] | None) -> Candidate:
        """The program with all that may be on the device there, whether or not that has so much."""
        self._known.counts_chip = False
        return self._plan_with(self._placing.asked, sys.maxsize, options)

    def unmoved(
        self, options: Mapping[str, Any] | None, *, counts_chip: bool = False
    ) -> Candidate | None:
        """The program as XLA has it, if the planner finds that it fits the device."""
        capacity = self._lowering.target.capacity_bytes
        try:
            candidate = self.plan(capacity, options, counts_chip=counts_chip)
        except MemoryBudgetError:
            return None
        return None if candidate.has_edits else candidate

    def candidate_of(self, plan: Plan) -> Candidate:
        """The program that a plan was made for, which XLA has not shown yet."""
        assert plan.preparation is not None
        hosting = Hosting.of(plan.preparation)
        return self._as_candidate(self._placing.placed(hosting), plan, hosting)

    def planned_at(
        self, module: Module, candidate: Candidate, options: Mapping[str, Any] | None
    ) -> Candidate:
        """A plan like a candidate's, for what XLA schedules of its program now.

        Raises:
          MemoryBudgetError: when there is none.
        """
        planner, hosting = self._planner_of(candidate), candidate.hosting
        shown = dict.fromkeys((False, True), module)
        planner._captured[hosting, _options_key(options)] = candidate.program, shown
        self._known.counts_chip = candidate.counts_chip
        found = planner._plan_with(hosting, candidate.plan.budget_bytes, options)
        return found.with_again(candidate.again_s)

    def learn_from(self, executable: Executable) -> None:
        """Takes note of what XLA made of this program: how long its kernels take, and what it holds
        on the chip, where it says so, which is for TPU."""
        if self._lowering.target.platform == "tpu":
            final = read_module(executable)
            self._known.cycles |= cost.estimates(final)
            self._known.seen += 1
            # What one of them held there and another did not, may be anywhere in the next.
            known = self._known.on_chip
            for instruction, held in held_on_chip(final).items():
                known[instruction] = held & known.get(instruction, held)
            self._known.table_bytes = memory_usage(final, "tpu").table_bytes

    @property
    def can_be_told(self) -> bool:
        """Whether an executable would say what is not known of this program: on TPU, the first."""
        return self._lowering.target.platform == "tpu" and self._known.table_bytes is None

    def seconds(self, executable: Executable) -> float:
        """What a step of an executable takes on the machine model, by its own schedule."""
        machine = self._lowering.target.machine
        return timeline.scheduled_step(read_module(executable), machine).step_time_s

    @property
    def knows_chip(self) -> bool:
        """Whether XLA was seen to hold anything on the chip."""
        return any(self._known.on_chip.values())

    def explained(self, rewritten: Module) -> int:
        """The bytes that are predicted of a module with what is known now of the chip."""
        usage = memory_usage(with_learned(rewritten, {}, self._known.on_chip), "tpu")
        return usage.total_bytes - usage.table_bytes + (self._known.table_bytes or 0)

    def drawn_bytes(
        self, candidate: Candidate, options: Mapping[str, Any] | None
    ) -> tuple[int, ...]:
        """What XLA:TPU may report of a plan that was just made: a sample, in bytes."""
        _, module = self._planner_of(candidate)._capture(candidate.hosting, options)
        machine = self._lowering.target.machine
        plain = module.with_learned(Learned())
        rewritten = pipeline.rewrite_module(plain, candidate.plan, machine)
        usage = memory_usage(rewritten, "tpu")
        tables = max(usage.table_bytes, self._known.table_bytes or 0)
        beside = usage.total_bytes - usage.temp_bytes + tables
        return tuple(beside + heap for heap in drawn_heaps(rewritten, machine))

    def forget(self, candidate: Candidate | None = None) -> None:
        """Has XLA show the program of a candidate anew, or all."""
        planners = (self, *self._others.values())
        for planner in planners if candidate is None else (self._planner_of(candidate),):
            planner._captured.clear()
            planner._planned.clear()

    def _planner_of(self, candidate: Candidate) -> Planner:
        planners = (self, *self._others.values())
        return next(p for p in planners if p._placing is candidate.placing)

    def _rings(self, budget: int) -> tuple[tuple[int, float] | None, ...]:
        """The rings to try, and None for none: one of them, if there is nothing to stream."""
        streams, everything = self._placing.streams, self._placing.everything(*_RINGS[0])
        if not streams.rings(everything):
            return _RINGS[:1]
        slots = self._lowering.function.options.slots
        # More chunks are there to be tried instead.
        rings = _RINGS[:1] if self._placing.splits else _RINGS
        rings = tuple(ring for ring in rings if slots is None or ring[0] <= slots)
        is_small = self._stack_bytes <= _SMALL_STACKS * budget
        return (None, *rings) if is_small else (*rings, None)

    @functools.cached_property
    def _stack_bytes(self) -> int:
        """Of all stacks that may be on the host."""
        streams, everything = self._placing.streams, self._placing.everything(*_RINGS[0])
        hosted = (*everything.arguments, *everything.results)
        return sum(self._placing.stack_size(s) for s in hosted if s in streams.stacks)

    def _inside(self, budget: int) -> Iterator[tuple[frozenset[int], bool]]:
        """The arguments that loops are to bring in each iteration, and whether also loops inside
        loops: at first none, then outermost loops, where what a loop reads may be there for all of
        it; then all that can."""
        found = self._placing.streams.read_by_loops
        inside = frozenset(found) & self._placing.candidates
        if self._lowering.target.machine.has_one_memory:
            # XLA:CPU drops a copy that is not a call of memplan's.
            inside = frozenset[int]()
        read = Counter[Path](), Counter[Path]()
        for n in inside:
            for of, begin in zip(read, (0, 1), strict=True):
                loops = {loop for nest in found[n] for loop in nest[begin:]}
                of.update(dict.fromkeys(loops, self._lowering.sizes[n]))
        largest, largest_nested = (max(of.values(), default=0) for of in read)
        if not inside or largest < budget:
            yield frozenset(), False
        if inside and (largest_nested < budget or not largest_nested):
            yield inside, False
        if inside and largest_nested:
            yield inside, True

    def _plan_with_rings(
        self,
        everything: Hosting,
        budget: int,
        options: Mapping[str, Any] | None,
        best: Candidate | None,
    ) -> Candidate | None:
        """Plans with such rings, and as many stacks on the device as are worth it.

        What a stack on the device takes is known beforehand but for packing, so that it may be
        more than there is room for. Rings that need more than the budget with nothing there are
        not planned with where there is a plan already: it would take long, and be slow or fail.
        """
        program, module = self._capture(everything, options)
        if not self._placing.streams.rings(everything):
            return self._plan_placed(everything, budget, options)
        room = budget - self._least(module, program, everything)
        if room < 0 and best is not None:
            return None
        seconds = ring_seconds(module, self._lowering.target.machine)
        while True:
            kept = choose_kept(
                self._placing.streams,
                everything,
                seconds,
                self._lowering.target.machine,
                room,
                self._placing.stack_size,
            )
            try:
                return self._plan_placed(everything.without(kept), budget, options)
            except MemoryBudgetError as error:
                if not kept:
                    raise
                room -= max(error.least - budget, room // 8)

    def _plan_placed(
        self, hosting: Hosting, budget: int, options: Mapping[str, Any] | None
    ) -> Candidate:
        """Plans with these stacks on the host; of the other arguments as many as must be, or none
        where a step waits long for them and is faster so. Where no stack is there, all rings are
        one: that is planned once."""
        if not self._placing.streams.rings(hosting):
            hosting = replace(hosting, depth=_RINGS[0][0], share=_RINGS[0][1])
        return self._once("placed", hosting, lambda: self._faster_placed(hosting, budget, options))

    def _once(self, what: str, hosting: Hosting, make: Callable[[], Candidate]) -> Candidate:
        """What is planned with that on the host, or the error that it ends with, made once."""
        key = what, hosting
        if key not in self._planned:
            try:
                self._planned[key] = make()
            except MemoryBudgetError as error:
                self._planned[key] = error.with_traceback(None)  # That holds modules.
        found = self._planned[key]
        if isinstance(found, MemoryBudgetError):
            raise found
        return found

    def _faster_placed(
        self, hosting: Hosting, budget: int, options: Mapping[str, Any] | None
    ) -> Candidate:
        candidate = self._plan_with_fewer(hosting, budget, options)
        unmoved = hosting.without(hosting.arguments - self._placing.streams.stacks.keys())
        fits = sum(self._lowering.sizes) - self._bytes(unmoved.arguments) <= budget
        if not candidate.is_slow or not fits:
            return candidate
        try:
            other = self._plan_once(unmoved, budget, options)
        except MemoryBudgetError:
            return candidate
        return other if other.is_faster_than(candidate) else candidate

    def _bytes(self, arguments: Collection[int]) -> int:
        return sum(self._lowering.sizes[n] for n in arguments)

    def _plan_with_fewer(
        self, hosting: Hosting, budget: int, options: Mapping[str, Any] | None
    ) -> Candidate:
        """Plans with these stacks on the host; of the other arguments as many as must be.

        What an argument that stays takes is known beforehand but for packing, and for what XLA
        schedules otherwise then: where there is no plan, fewer stay, and at last none.
        """
        room = budget
        failures: list[MemoryBudgetError] = []
        tried: set[frozenset[int]] = set()
        while True:
            try:
                choices = self._stay(hosting, room, options)
            except MemoryBudgetError:
                if not failures:
                    raise
                choices = ((frozenset[int](), math.inf),)
            best: Candidate | None = None
            for stay, expected_s in choices:
                if stay in tried:
                    continue
                if best is not None and expected_s > _PROMISING * best.step_time_s:
                    break
                tried.add(stay)
                try:
                    candidate = self._plan_once(hosting.without(stay), budget, options)
                except MemoryBudgetError as error:
                    failures.append(error)
                else:
                    best = candidate if best is None or candidate.is_faster_than(best) else best
            if best is not None:
                return best
            if not choices[0][0]:
                raise min(failures, key=lambda e: e.least)
            room -= max(failures[-1].least - budget, room // 8)

    def _stay(
        self, hosting: Hosting, room: int, options: Mapping[str, Any] | None
    ) -> tuple[tuple[frozenset[int], float], ...]:
        """The arguments, by flat number, that so many bytes leave on the device, and the seconds
        that a step probably takes then: a few choices, the fastest first."""
        program, module = self._capture(hosting, options)
        numbers = program.arguments.parameters
        host_parameters, sliced = self._placing.on_host(program, hosting)
        choices = pipeline.choose_stay(
            module,
            self._lowering.target.machine,
            room,
            host_parameters=host_parameters,
            sliced_parameters=sliced,
            slots=self._lowering.function.options.slots,
        )
        return tuple(
            (frozenset(n for n in hosting.arguments if numbers[n] in stay), seconds)
            for stay, seconds in choices
        )

    def _plan_once(
        self, hosting: Hosting, budget: int, options: Mapping[str, Any] | None
    ) -> Candidate:
        return self._once("whole", hosting, lambda: self._plan_with(hosting, budget, options))

    def _plan_with(
        self, hosting: Hosting, budget: int, options: Mapping[str, Any] | None
    ) -> Candidate:
        """Plans with all of that on the host."""
        machine, slots = self._lowering.target.machine, self._lowering.function.options.slots
        program, module = self._capture(hosting, options)
        numbers, paths = program.arguments.parameters, self._lowering.paths
        host_parameters, sliced = self._placing.on_host(program, hosting)
        named = {number: paths[n] for n, number in numbers.items()}
        plan = pipeline.plan_module(
            module,
            machine,
            budget,
            host_parameters=host_parameters,
            sliced_parameters=sliced,
            slots=slots,
            labels={
                p.name: named[p.parameter_number]
                for p in module.entry.parameters
                if p.parameter_number in named
            },
        )
        plan = replace(
            plan,
            preparation=self._placing.prepared(hosting),
            splits=self._placing.splits,
            streams=record_streams(self._placing.streams, hosting, paths, self._placing.stack_size),
            left_alone=self._placing.left_alone,
            compiler_options={
                **(
                    self._placing.ring_options
                    if self._placing.has_transfers_in_loops(hosting)
                    else {}
                ),
                **{k: str(v) for k, v in (options or {}).items()},
            },
        )
        return self._as_candidate(program, plan, hosting)

    def _as_candidate(self, program: Program, plan: Plan, hosting: Hosting) -> Candidate:
        numbers = program.arguments.parameters
        # Whose place is taken on the host, XLA:CPU knows to be there.
        known = {numbers[n] for n in self._placing.stored(hosting).values()}
        away = sum(
            p.size
            for p in plan.placements
            if p.tier != plan.device_tier and p.parameter not in known
        )
        return Candidate(
            self._placing,
            program,
            plan,
            hosting,
            hosted_bytes=away if self._lowering.target.machine.has_one_memory else 0,
            counts_chip=self._known.counts_chip,
        )

    def _least(self, module: Module, program: Program, hosting: Hosting) -> int:
        """The least budget of a program so placed."""
        host_parameters, sliced = self._placing.on_host(program, hosting)
        return pipeline.least_budget(
            module,
            self._lowering.target.machine,
            host_parameters=host_parameters,
            sliced_parameters=sliced,
            slots=self._lowering.function.options.slots,
        )

    def _capture(
        self, hosting: Hosting, options: Mapping[str, Any] | None
    ) -> tuple[Program, Module]:
        """The program so placed, and its module as XLA schedules it."""
        key = hosting, _options_key(options)
        if key not in self._captured:
            program = self._placing.placed(hosting)
            module = inject.capture(
                self._lowering.target.platform, program.stablehlo, program.compiler(options)
            )
            self._captured[key] = program, dict.fromkeys((False, True), module)
        program, shown = self._captured[key]
        # The same one as before, if nothing was learnt since: what was found of it is kept with it.
        counts_chip = self._known.counts_chip and self.knows_chip
        module = shown[counts_chip] = self._known.said_of(shown[counts_chip])
        return program, module


def _options_key(options: Mapping[str, Any] | None) -> Hashable:
    return tuple((options or {}).items())
