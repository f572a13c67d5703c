"""A program as it is written in one way, and its plans.

A module is captured twice: first with everything on the host that may be there, to choose what
stays on the device; then so placed, to plan each transfer. A capture ends XLA's work at its
scheduler, early in the compilation. Programs with loops over stacks are captured with rings of
different depth, and the fastest plan is taken.
"""

from __future__ import annotations

import functools
import logging
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict

import jax

from hlo_passes import pipeline
from hlo_passes.analysis.host_compute import host_compute
from hlo_passes.equations import Path
from hlo_passes.errors import HostComputeError, MemoryBudgetError, MemplanError
from hlo_passes.ir import Learned, Module
from hlo_passes.memory.usage import memory_usage
from hlo_passes.pipeline import Room
from hlo_passes.placing.prices import FREE, Prices
from hlo_passes.plan import Plan
from hlo_passes.rewrite import inject
from hlo_passes.simulator import cost, energy
from memplan.candidates import Against, Candidate, Promise, Refused
from memplan.executable import Program
from memplan.known import Known
from memplan.placing import Placing
from memplan.streams.choice import choose_kept, ring_seconds, storing
from memplan.streams.hosting import Hosting
from memplan.streams.records import record_streams


class _Ring(NamedTuple):
    """How the loops of a program are streamed.

    Attributes:
      slots, share: see `Stream`.
      lags: what a layer made is stored while the next one comes, in loops beside which less is
        live than elsewhere. With more slots it is in all.
    """

    slots: int
    share: float
    lags: bool = False

    @property
    def layers(self) -> float:
        """How many layers it has room for where most is live."""
        return 1 + (self.slots - 1) * self.share

    def __str__(self) -> str:
        more = ", stored late where there is room" if self.lags else ""
        slots = f"{self.slots} slot{'s'[: self.slots != 1]}"
        return f"rings of {slots} for {self.share:.0%} of a layer{more}"


# The rings that are tried, in this order. Where all layers take equally long, two slots are enough:
# one is filled while the other is computed with. With less, more stacks have room on the device,
# which is better where the link is the bottleneck anyway.
_RINGS = (_Ring(2, 1.0), _Ring(1, 1.0, lags=True), _Ring(1, 1.0), _Ring(2, 0.25), _Ring(3, 1.0))

# Where stacks take no more than this share of the budget, they are left on the device at first;
# and rings are tried only where a step then is slow (`Candidate.is_slow`). What rings save is
# little there, and each has to be captured two or three times.
_SMALL_STACKS = 0.5

# Where a plan came out slower than had been expected, another choice of arguments that stay is
# tried if that is expected to take no more than this part of its step.
_PROMISING = 0.8

# Budgets: where so much is needed beyond the stacks, rings of them are not tried. With rings XLA
# may also copy less of what else a loop carries.
_HOPELESS = 2

_log = logging.getLogger("memplan")


class _Asked(TypedDict):
    """What a plan depends on besides the module, the machine and the budget."""

    host_parameters: Collection[int]
    sliced_parameters: Collection[int]
    slots: int | None
    prices: Prices


class Unplanned(NamedTuple):
    """A program before anything is planned.

    Attributes:
      compute_s: seconds of a step.
      besides_bytes: needed besides its arguments.
      compute_j: joules of a step beside static watts; 0 where nothing is known of them.
    """

    compute_s: float
    besides_bytes: int
    compute_j: float = 0.0


class Written:
    """Plans a program that is written in one way; what XLA has shown once is kept.

    Attributes:
      placing: the program, and what of it may be where.
      known: what executables said, of this and the other ways.
    """

    def __init__(self, placing: Placing, known: Known) -> None:
        self.placing, self.known = placing, known
        self._lowering = placing.lowering
        # The module as it was shown last, with what is on the chip counted and left out.
        self._captured: dict[Hashable, tuple[Program, dict[bool, Module]]] = {}
        self._planned: dict[Hashable, Any] = {}  # Also that there is none, a `MemoryBudgetError`.
        self._planned_for: Hashable = None  # What that depends on besides.
        self._least: dict[Hashable, tuple[int, frozenset[str]]] = {}
        self._prices = FREE

    def forget(self) -> None:
        """Has XLA show the program anew."""
        self._captured.clear()
        self._least.clear()
        self._planned.clear()

    def show(
        self,
        hosting: Hosting,
        options: Mapping[str, Any] | None,
        program: Program,
        module: Module,
    ) -> None:
        """Takes note of what XLA schedules now of the program so placed."""
        shown = dict.fromkeys((False, True), module)
        self._captured[hosting, _options_key(options)] = program, shown

    def plan_for(
        self, budget: int, options: Mapping[str, Any] | None, prices: Prices = FREE
    ) -> None:
        """Has plans made with such prices from now on; forgets what was planned for another budget,
        or when less was known."""
        self._prices = prices
        key = budget, _options_key(options), self.known.counts_chip, self.known.seen
        if key != self._planned_for:
            self._planned.clear()
            self._planned_for = key

    def in_turn(
        self,
        inside: frozenset[int],
        nested: bool,
        budget: int,
        options: Mapping[str, Any] | None,
        against: Against,
        found: list[Candidate],
        failed: list[Exception],
    ) -> Iterator[Candidate]:
        """Yields plans with one ring after another, as long as the next may be faster, and has no
        more layers than one that was refused.

        Args:
          inside: what loops bring whole.
          against: what the program comes to against that as it is written.
          found, failed: what came of each ring is added to one of them.
        """
        best: Candidate | None = None
        refused = math.inf
        for ring in self._rings(budget):
            if ring is not None and ring.layers > refused:
                continue
            if best is not None:
                if ring is None or ring.slots > best.hosting.depth + 1:
                    return  # One slot more was no better.
                if best.hosting.lagging and ring.layers == best.hosting.depth:
                    continue  # Nor would it be with what is stored early.
            what = self.named(ring)
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
                    if ring.lags:
                        everything = self._storing_late(everything, budget, options)
                        if not everything.lagging:
                            continue
                    candidate = self._with_stacks(
                        everything,
                        budget,
                        options,
                        lambda hosting: self._plan_placed(hosting, budget, options),
                    )
            except MemoryBudgetError as error:
                _log.info("planning%s: need %d bytes", how, error.least)
                failed.append(error)
                if ring is not None:
                    refused = min(refused, ring.layers)
                elif error.least - self._stack_bytes > _HOPELESS * budget:
                    return  # Nor would it fit with all stacks on the host.
                continue
            except (MemplanError, jax.errors.JaxRuntimeError) as error:
                _log.warning("a plan%s was dropped: %s", how, error)
                failed.append(error)
                continue
            if against.again_s:
                candidate = candidate.with_again(against.again_s, against.again_j)
            _log.info("planning%s: a step of %.3g ms", how, candidate.step_time_s * 1e3)
            found.append(candidate)
            yield candidate
            best = candidate if best is None or candidate.is_faster_than(best) else best
            if best.is_hidden or (ring is None and not best.is_slow):
                return

    def named(self, ring: _Ring | None) -> str:
        """In what way the program's loops are written, for a person; nothing where it has none that
        could be."""
        parts: list[str] = []
        if self.placing.recomputed != "nothing":
            parts.append(f"{self.placing.recomputed} recomputed")
        if self.placing.splits:
            parts.append(f"{len(self.placing.splits)} in chunks")
        if self.placing.streams.rings(self._with_first_ring):
            parts.append("no rings" if ring is None else str(ring))
        return ", ".join(parts)

    def promise(self, budget: int, options: Mapping[str, Any] | None) -> Promise | Refused | None:
        """What a plan with the first of its rings probably comes to; None where XLA or the checker
        refuses what was made of it, so that only others are left."""
        ring, (inside, nested) = self._rings(budget)[0], next(self.inside(budget))
        everything = self._everything(ring, inside, nested)
        self._lowering.report("estimating", budget, way=self.named(ring))

        def promised(hosting: Hosting) -> Promise:
            hosting = self._with_any_ring(hosting)
            seconds = min(expected for _, expected in self._stay(hosting, budget, options))
            _, module = self.capture(hosting, options)
            return Promise(seconds, cost.step_seconds(module, self._lowering.target.machine))

        try:
            if ring is None:
                return promised(everything)
            return self._with_stacks(everything, budget, options, promised)
        except MemoryBudgetError as error:
            return Refused(error.least)
        except (MemplanError, jax.errors.JaxRuntimeError):
            return None

    def look_without_rings(self, budget: int) -> Hosting | None:
        """What is on the host when this program is planned first; None where that has rings, whose
        transfers would be taken for compute."""
        ring = self._rings(budget)[0]
        everything = self._everything(ring, *next(self.inside(budget)))
        return None if self.placing.streams.rings(everything) else everything

    def _everything(self, ring: _Ring | None, inside: frozenset[int], nested: bool) -> Hosting:
        """All that may live on the host does; stacks only if there is a ring."""
        everything = self._with_first_ring
        if ring is not None:
            everything = self.placing.everything(ring.slots, ring.share)
        everything = replace(everything, inside=inside, nested=nested)
        return everything if ring else everything.without(self.placing.streams.stacks)

    def unplanned(self, hosting: Hosting, options: Mapping[str, Any] | None) -> Unplanned:
        """What XLA makes of this program, all by the machine model: it may have said how long the
        kernels of one take, and what it holds on the chip, that those of another are compared with.
        """
        _, module = self.capture(hosting, options)
        module, machine = module.with_learned(Learned()), self._lowering.target.machine
        usage = memory_usage(module, machine.platform, machine=machine)
        joules = energy.compute_joules(module, machine)
        return Unplanned(cost.step_seconds(module, machine), usage.besides_bytes, joules)

    def _rings(self, budget: int) -> tuple[_Ring | None, ...]:
        """The rings to try, and None for none: one of them, if there is nothing to stream."""
        streams, everything = self.placing.streams, self._with_first_ring
        if not streams.rings(everything):
            return _RINGS[:1]
        slots = self._lowering.function.options.slots
        # More chunks are there to be tried instead.
        rings = _RINGS[:1] if self.placing.splits else _RINGS
        rings = tuple(ring for ring in rings if slots is None or ring.slots <= slots)
        is_small = self._stack_bytes <= _SMALL_STACKS * budget
        return (None, *rings) if is_small else (*rings, None)

    @functools.cached_property
    def _with_first_ring(self) -> Hosting:
        """All that may live on the host does."""
        return self.placing.everything(_RINGS[0].slots, _RINGS[0].share)

    @functools.cached_property
    def _stack_bytes(self) -> int:
        """Of all stacks that may be on the host."""
        streams, everything = self.placing.streams, self._with_first_ring
        hosted = (*everything.arguments, *everything.results)
        return sum(self.placing.stack_size(s) for s in hosted if s in streams.stacks)

    def inside(self, budget: int) -> Iterator[tuple[frozenset[int], bool]]:
        """The arguments that loops are to bring in each iteration, and whether also loops inside
        loops: at first none, then outermost loops, where what a loop reads may be there for all of
        it; then all that can."""
        found = self.placing.streams.read_by_loops
        inside = frozenset(found) & self.placing.candidates
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

    def _with_stacks[T](
        self,
        everything: Hosting,
        budget: int,
        options: Mapping[str, Any] | None,
        planned: Callable[[Hosting], T],
    ) -> T:
        """What is planned with such rings, and as many stacks on the device as are worth it.

        What a stack on the device takes is known beforehand but for packing, so that it may be
        more than there is room for.

        Raises:
          MemoryBudgetError: when there is no plan even with none there.
        """
        if not self.placing.streams.rings(everything):
            return planned(everything)
        room = self._room(everything, budget, options).bytes
        _, module = self.capture(everything, options)
        seconds = ring_seconds(module, self._lowering.target.machine)
        while True:
            kept = choose_kept(
                self.placing.streams,
                everything,
                seconds,
                self._lowering.target.machine,
                room,
                self.placing.stack_size,
                self._prices.byte_s,
            )
            try:
                return planned(everything.without(kept))
            except MemoryBudgetError as error:
                if not kept:
                    raise
                room -= max(error.least - budget, room // 8)

    def _storing_late(
        self, everything: Hosting, budget: int, options: Mapping[str, Any] | None
    ) -> Hosting:
        """The same where loops beside which less is live than elsewhere store late.

        Raises:
          MemoryBudgetError: when there is no plan even without.
        """
        room = self._room(everything, budget, options)
        return replace(everything, lagging=storing(self.placing.streams, everything, room))

    def _plan_placed(
        self, hosting: Hosting, budget: int, options: Mapping[str, Any] | None
    ) -> Candidate:
        """Plans with these stacks on the host; of the other arguments as many as must be, or none
        where a step waits long for them and is faster so."""
        hosting = self._with_any_ring(hosting)
        return self._once(
            ("placed", hosting), lambda: self._faster_placed(hosting, budget, options)
        )

    def _with_any_ring(self, hosting: Hosting) -> Hosting:
        """Where no stack is there, all rings are one: that is planned once."""
        if self.placing.streams.rings(hosting):
            return hosting
        first = _RINGS[0]
        return replace(hosting, depth=first.slots, share=first.share, lagging=frozenset())

    def _once[T](self, key: Hashable, make: Callable[[], T]) -> T:
        """What is planned, or the error that it ends with, made once."""
        key = key, self._prices
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
        unmoved = hosting.without(hosting.arguments - self.placing.streams.stacks.keys())
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
                if best is not None and expected_s > _PROMISING * best.cost_s:
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
        return self._once(
            ("stay", hosting, room), lambda: self._choose_stay(hosting, room, options)
        )

    def _choose_stay(
        self, hosting: Hosting, room: int, options: Mapping[str, Any] | None
    ) -> tuple[tuple[frozenset[int], float], ...]:
        program, module = self.capture(hosting, options)
        numbers = program.arguments.parameters
        machine = self._lowering.target.machine
        choices = pipeline.choose_stay(module, machine, room, **self._asked(program, hosting))
        return tuple(
            (frozenset(n for n in hosting.arguments if numbers[n] in stay), seconds)
            for stay, seconds in choices
        )

    def _plan_once(
        self, hosting: Hosting, budget: int, options: Mapping[str, Any] | None
    ) -> Candidate:
        return self._once(("whole", hosting), lambda: self.plan_with(hosting, budget, options))

    def plan_with(
        self, hosting: Hosting, budget: int, options: Mapping[str, Any] | None
    ) -> Candidate:
        """Plans with all of that on the host."""
        program, module = self.capture(hosting, options)
        numbers, paths = program.arguments.parameters, self._lowering.paths
        named = {number: paths[n] for n, number in numbers.items()}
        plan = pipeline.plan_module(
            module,
            self._lowering.target.machine,
            budget,
            **self._asked(program, hosting),
            jitter=self._lowering.jitter,
            labels={
                p.name: named[p.parameter_number]
                for p in module.entry.parameters
                if p.parameter_number in named
            },
        )
        plan = replace(
            plan,
            preparation=self.placing.prepared(hosting),
            splits=self.placing.splits,
            streams=record_streams(self.placing.streams, hosting, paths, self.placing.stack_size),
            left_alone=self.placing.left_alone,
            compiler_options={
                **(
                    self.placing.ring_options
                    if self.placing.has_transfers_in_loops(hosting)
                    else {}
                ),
                **{k: str(v) for k, v in (options or {}).items()},
            },
        )
        return self.as_candidate(program, plan, hosting)

    def as_candidate(self, program: Program, plan: Plan, hosting: Hosting) -> Candidate:
        numbers = program.arguments.parameters
        # Whose place is taken on the host, XLA:CPU knows to be there.
        known = {numbers[n] for n in self.placing.stored(hosting).values()}
        away = sum(
            p.size
            for p in plan.placements
            if p.tier != plan.device_tier and p.parameter not in known
        )
        return Candidate(
            self.placing,
            program,
            plan,
            hosting,
            hosted_bytes=away if self._lowering.target.machine.has_one_memory else 0,
            counts_chip=self.known.counts_chip,
            prices=self._prices,
        )

    def _room(self, everything: Hosting, budget: int, options: Mapping[str, Any] | None) -> Room:
        """What there is for stacks on the device beside rings.

        Raises:
          MemoryBudgetError: when there is no plan even without any.
        """

        def room() -> Room:
            program, module = self.capture(everything, options)
            # What a program needs at least hardly depends on how long its kernels take, and takes
            # long to find: it is known for other budgets, and when more was learnt of these.
            key = everything, _options_key(options), module.learned.on_chip
            least, roomy = self._least.get(key, (sys.maxsize, frozenset[str]()))
            if least <= budget:
                return Room(budget - least, roomy)
            machine = self._lowering.target.machine
            asked = self._asked(program, everything)
            found = pipeline.room_within(module, machine, budget, **asked)
            self._least[key] = budget - found.bytes, found.roomy
            return found

        return self._once(("room", everything), room)

    def _asked(self, program: Program, hosting: Hosting) -> _Asked:
        host, sliced = self.placing.on_host(program, hosting)
        slots = self._lowering.function.options.slots
        prices = self._prices
        return {
            "host_parameters": host,
            "sliced_parameters": sliced,
            "slots": slots,
            "prices": prices,
        }

    def capture(
        self, hosting: Hosting, options: Mapping[str, Any] | None
    ) -> tuple[Program, Module]:
        """The program so placed, and its module as XLA schedules it.

        Raises:
          HostComputeError: when that computes on the host what the user's does not.
        """
        key = hosting, _options_key(options)
        if key not in self._captured:
            program = self.placing.placed(hosting)
            module = inject.capture(
                self._lowering.target.platform, program.stablehlo, program.compiler(options)
            )
            if not self._lowering.computes_on_host and (found := host_compute(module)):
                raise HostComputeError(module.name, [i.name for i in found])
            self.show(hosting, options, program, module)
        program, shown = self._captured[key]
        # The same one as before, if nothing was learnt since: what was found of it is kept with it.
        counts_chip = self.known.counts_chip and self.known.has_chip
        module = shown[counts_chip] = self.known.said_of(shown[counts_chip])
        return program, module


def _options_key(options: Mapping[str, Any] | None) -> Hashable:
    return tuple((options or {}).items())
