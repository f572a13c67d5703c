"""One program within budgets: plans and compiles until XLA reports no more than was asked for.

    budget ─► plan ─► compile ─► XLA's report ──► within it? ─► what is idle, used
               ▲                              │
               └──── less, or with credit ◄───┘

The planner predicts what XLA's later passes make of a module, and may be wrong both ways. What
XLA reports of an executable is what counts.
"""

from __future__ import annotations

import logging
import sys
import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import jax

from hlo_passes import pipeline
from hlo_passes.chains.lowering import arena_bytes
from hlo_passes.errors import (
    LoopMismatchError,
    MemoryBudgetError,
    MemplanError,
    PlanMismatchError,
    StalePlanError,
)
from hlo_passes.ir import Module
from hlo_passes.plan import Plan
from hlo_passes.rewrite import inject
from memplan import __version__
from memplan.candidates import Candidate
from memplan.compiled import Compiled
from memplan.executable import Executable, device_bytes
from memplan.kept import other_versions
from memplan.objectives import LATENCY
from memplan.out_of_memory import is_exhausted, note
from memplan.paths import dotted
from memplan.placing import Placing
from memplan.planner import Planner
from memplan.rounds import NEAR, WAITS, Rounds, Seen, aimed_at

# How many plans are compiled for a budget at most, those that XLA schedules otherwise among them.
_MAX_ROUNDS = 5

# Without them XLA:CPU makes one library call of products that feed each other: all the weights that
# it reads have to be there at once, and a plan can move none of them.
_FINER_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
}

# Where XLA takes less than planned by more than this part of the budget, and a step waits, a plan
# for what is idle is worth one more round, and another one where that ends above the budget, or
# made the step faster by as much as counts.
_IDLE = 0.05
_IDLE_ROUNDS = 2

# On TPU, how many plans are compiled with chunks that are larger than what is known fits.
_LARGER_ROUNDS = 2

# On TPU, how many plans are compiled with chunks that are smaller, as long as there is more than
# this part of what the chip has beside it.
_FINER_ROUNDS = 2
_LITTLE = 1 / 8

# How often a least budget that does not work is raised, at first by `NEAR`, then by twice as much.
_LEAST_ROUNDS = 8

# How often what lies between a budget that is too little and the planner's least is halved.
_HALVINGS = 4

_log = logging.getLogger("memplan")


class Budgeted:
    """Plans and executables of one program within budgets, all in bytes of each device.

    Attributes:
      placing: the program, and what of it may be where.
      planner: of its plans.
    """

    def __init__(self, placing: Placing) -> None:
        self.placing = placing
        self.planner = Planner(placing)
        self._lowering = placing.lowering
        self._lock = threading.RLock()
        self._own: dict[tuple[tuple[str, Any], ...], Executable | None] = {}
        self._tries = 0

    def plan(self, budget: int) -> Plan:
        """Plans for a budget; compiles the program as XLA has it where the planner refuses.

        Raises:
          MemoryBudgetError: when no plan keeps to it.
        """
        room = self._room(budget)
        with self._lock, self._telling(budget, None):
            return self._or_finer(None, lambda tried: self._rounds(room, tried).first()[0].plan)

    def within(self, budget: int) -> Plan:
        """Plans for a budget, and compiles nothing further than XLA's scheduler.

        Raises:
          MemoryBudgetError: when the planner finds none.
        """
        room = self._room(budget)
        with self._lock, self._telling(budget, None):
            return self._or_finer(None, lambda tried: self.planner.plan(room, tried).plan)

    def compile(self, budget: int, options: Mapping[str, Any] | None) -> Compiled:
        """Compiles the program within a budget, as XLA itself reports it.

        Raises:
          MemoryBudgetError: when no plan keeps to it.
        """
        room = self._room(budget)
        with self._lock, self._telling(budget, options):
            kept = self._replanned_with_estimates(self._executable_within(room, options), room)
            kept = self._with_larger_chunks(kept, room)
            kept = self._with_finer_chunks(kept, room)
            kept = self._with_idle_used(kept, room)
            return self._compiled(kept, budget)

    def follow(self, plan: Plan, budget: int, options: Mapping[str, Any] | None) -> Compiled:
        """Compiles the program with a plan that was made before.

        Raises:
          StalePlanError: when it does not hold for what XLA schedules, or exceeds the budget.
        """
        assert plan.preparation is not None
        own = {k: v for k, v in plan.compiler_options.items() if k not in self.placing.ring_options}
        options = {**own, **(options or {})}
        candidate, room = self.planner.candidate_of(plan), self._room(budget)
        name = self._lowering.traced.fun_name
        with self._lock:
            for _ in range(_MAX_ROUNDS):
                try:
                    tried = self._try(candidate, options)
                except (PlanMismatchError, LoopMismatchError):
                    continue  # XLA does not promise to schedule a module in the same way again.
                if tried.exhausted is not None:
                    raise tried.exhausted
                if (kept := tried.kept(room, (), options)) is not None:
                    return self._compiled(kept, budget)
                raise StalePlanError(name, [f"{tried.seen}, allowed are {room}"])
        others = other_versions(plan.preparation.versions, self._lowering.target.versions)
        raise StalePlanError(name, ["XLA schedules the program otherwise than it did", *others])

    def forget(self) -> None:
        """Forgets the modules and executables that XLA showed."""
        with self._lock:
            self.planner.forget()
            self._own.clear()

    def _room(self, budget: int) -> int:
        """What of a budget is left for what XLA counts."""
        return max(0, budget - self._lowering.closed_bytes)

    @contextmanager
    def _telling(self, budget: int, options: Mapping[str, Any] | None) -> Generator[None]:
        """Errors about a budget with what is known up here: the user's names, why arguments stay,
        and how to find a budget that works."""
        try:
            yield
        except MemoryBudgetError as error:
            refusal = error
            names = {b.op_name: dotted(b.op_name) for b in error.largest if not b.source_line}
            closed = self._lowering.closed_bytes
            raise error.asked_for(
                budget,
                error.least + closed,
                self.placing.left_alone,
                names,
                closed=closed,
                find_least=lambda: self._least_budget(refusal, budget, options),
            ) from None

    def _or_finer[T](
        self, options: Mapping[str, Any] | None, planned: Callable[[dict[str, Any]], T]
    ) -> T:
        """What is planned with the user's options, or else with those that leave more to plan."""
        options = dict(options or {})
        finer = _FINER_OPTIONS.get(self._lowering.target.platform, {})
        asked = self._lowering.compiler_options.keys() | options.keys()
        try:
            return planned(options)
        except MemoryBudgetError as error:
            if finer.keys() <= asked:
                raise
            try:
                return planned({**finer, **options})
            except MemoryBudgetError as again:
                raise min(error, again, key=lambda e: e.least) from None

    # --- executables ----------------------------------------------------------------------

    def _compiled(self, kept: _Kept, budget: int) -> Compiled:
        rounds = tuple(map(str, kept.seen))
        return Compiled(kept.executable, self.placing, budget, kept.candidate, rounds, kept.options)

    def _executable_within(self, room: int, options: Mapping[str, Any] | None) -> _Kept:
        """Plans and compiles for so many bytes, and where the planner refuses, for its least, if so
        much less may be what XLA takes of it.

        Raises:
          MemoryBudgetError: when that is more, too; its least is what XLA was seen to take.
        """
        before = self._tries
        try:
            return self._or_finer(options, lambda tried: self._compile_with(room, tried))
        except MemoryBudgetError as error:
            refusal = error
        least, step = max(refusal.least, room + 1), NEAR
        most = self._own_bytes(least, options) or sys.maxsize
        if self._tries > before:
            raise refusal.asked_for(room, min(most, least))
        aim = least
        while aim < most and aim - room <= self._slack(room):
            try:
                kept = self._or_finer(options, partial(self._compile_with, aim))
            except MemoryBudgetError as error:
                least = max(least, error.least)
                aim, step = max(error.least, int(aim * (1 + step))), 2 * step
                continue
            kept = self._with_finer_chunks(kept, room)
            if kept.total <= room:
                return kept
            least = kept.total
            break
        raise refusal.asked_for(room, min(most, least))

    def _slack(self, room: int) -> int:
        """Bytes by which XLA may stay below what the planner predicts: what packing makes of them,
        and on TPU what is in VMEM."""
        chip = self._lowering.target.machine.on_chip_memory
        return max(chip.capacity_bytes if chip is not None else 0, int(room * NEAR))

    def _least_budget(
        self, refusal: MemoryBudgetError, budget: int, options: Mapping[str, Any] | None
    ) -> int:
        """A budget that was compiled for and works, from the planner's least upwards: that leaves
        out what packing loses and what XLA's later passes add.

        Raises:
          MemoryBudgetError: when none was found.
        """
        with self._lock, self._telling(budget, options):
            planned = self._least_planned(refusal, options)
            least, step = max(planned, self._room(budget) + 1), NEAR
            for _ in range(_LEAST_ROUNDS):
                try:
                    kept = self._executable_within(least, options)
                except MemoryBudgetError as error:
                    refusal, least = error, max(error.least, int(least * (1 + step)))
                    step *= 2
                else:
                    return self._reduced(least, kept.total, options) + self._lowering.closed_bytes
            raise refusal

    def _reduced(self, works: int, reported: int, options: Mapping[str, Any] | None) -> int:
        """Of a budget that works and what XLA reports for it, the less that does."""
        least = min(works, self._own_bytes(works, options) or works)
        if reported < (1 - _IDLE) * least:
            with suppress(MemoryBudgetError):
                self._executable_within(reported, options)
                return reported
        return least

    def _compile_with(self, room: int, options: Mapping[str, Any]) -> _Kept:
        executable = self._as_xla_has_it(room, options)
        if executable is None or (total := device_bytes(executable, 0)) > room:
            return self._compile_within(room, options)
        if self.placing.asked.arguments:
            # What the user has on the host XLA brings when it is read; a plan, before that.
            with suppress(MemoryBudgetError, PlanMismatchError, LoopMismatchError):
                return self._compile_within(room, options)
        return _Kept(executable, None, total, (), options)

    def _as_xla_has_it(self, room: int, options: Mapping[str, Any] | None) -> Executable | None:
        """The program compiled without a plan; None where its arguments alone exceed `room`, or
        it does not fit the device."""
        if self._lowering.arguments_bytes > room:
            return None
        key = tuple((options or {}).items())
        if key not in self._own:
            self._lowering.report("compiling without a plan", room)
            executable = self._own[key] = self.placing.program.fitting(options)
            if executable is not None:
                self.planner.learn_from(executable)
        return self._own[key]

    def _own_bytes(self, room: int, options: Mapping[str, Any] | None) -> int | None:
        """Bytes that XLA reports of the program `_as_xla_has_it`."""
        own = self._as_xla_has_it(room, options)
        return device_bytes(own, 0) if own is not None else None

    def _rounds(self, room: int, options: Mapping[str, Any]) -> Rounds:
        return Rounds(self.planner, room, options, lambda: self._own_bytes(room, options))

    def _compile_within(self, room: int, options: Mapping[str, Any]) -> _Kept:
        """Plans and compiles until XLA reports no more than `room` bytes."""
        rounds = self._rounds(room, options)
        mismatch: MemplanError | None = None
        exhausted: Exception | None = None
        for candidate in islice(rounds, _MAX_ROUNDS):
            try:
                tried = self._try(candidate, options, replans=mismatch is not None)
            except (PlanMismatchError, LoopMismatchError) as error:
                # XLA does not promise to schedule a module in the same way again, and XLA:GPU may
                # never: the next time, what it schedules is planned then and there.
                _log.info("XLA scheduled the module otherwise than before")
                self.planner.forget(candidate)
                mismatch = error
                continue
            if (kept := tried.kept(room, rounds.seen, options)) is not None:
                return kept
            if tried.executable is not None:
                self.planner.learn_from(tried.executable)
            exhausted = tried.exhausted  # Where the last one fits, its bytes say more.
            rounds.seen.append(Seen(candidate, tried.total, self._unexplained(tried)))
        if mismatch is not None and not rounds.seen:
            raise mismatch
        if exhausted is not None:
            raise exhausted
        least = min(seen.reported for seen in rounds.seen)
        raise self._shortage(options).asked_for(room, least)

    def _unexplained(self, tried: _Tried) -> int:
        """Bytes by which XLA may exceed another plan as well: those that it reports of this one
        beyond what was predicted, or would be now that its executable has been seen."""
        exceeded = max(0, tried.total - tried.candidate.predicted_bytes)
        if not self.planner.knows_chip or tried.rewritten is None:
            return exceeded
        unexplained = max(0, tried.total - self.planner.explained(tried.rewritten))
        return unexplained if tried.candidate.counts_chip else min(exceeded, unexplained)

    def _replanned_with_estimates(self, kept: _Kept, room: int) -> _Kept:
        """What comes of a plan made with what the first executable says, where that takes longer
        than predicted, if it is faster and within the room: where arguments alone are more than
        that, nothing was known before."""
        candidate, options = kept.candidate, kept.options
        if candidate is None or not self.planner.can_be_told:
            return kept
        if candidate.plan.prediction.slowdown <= WAITS:
            return kept
        step_s = self._seconds(kept)
        if step_s <= WAITS * candidate.step_time_s:
            return kept
        self.planner.learn_from(kept.executable)

        def faster() -> Candidate | None:
            found, *_ = self._rounds(room, options).first()
            is_no_dearer = found.charged_s <= candidate.charged_s
            return found if is_no_dearer and found.step_time_s <= step_s / WAITS else None

        tried = self._try_beside(faster, options)
        if tried is None:
            return kept
        better = tried.kept(room, kept.seen, options)
        if better is not None and self._seconds(better) < step_s:
            return better
        return replace(kept, seen=(*kept.seen, tried.seen))

    def _with_larger_chunks(self, kept: _Kept, room: int) -> _Kept:
        """What comes of larger chunks, which are within the room if XLA:TPU holds enough of them on
        the chip: what it holds there of those that it has not compiled, the planner does not know.
        """
        chip = self._lowering.target.machine.on_chip_memory
        if chip is None or kept.candidate is None or not kept.candidate.placing.splits:
            return kept
        smaller = kept.candidate
        if smaller.plan.prediction.slowdown <= WAITS:
            return kept
        for n in range(_LARGER_ROUNDS):
            more = room + (chip.capacity_bytes >> n)
            faster = partial(self._faster, smaller, more, kept.options, near=None)
            tried = self._try_beside(faster, kept.options)
            if tried is None:
                break
            better = tried.kept(room, kept.seen, kept.options)
            if better is not None and self._seconds(better) < self._seconds(kept):
                return better
            kept = replace(kept, seen=(*kept.seen, tried.seen))
        return kept

    def _with_finer_chunks(self, kept: _Kept, room: int) -> _Kept:
        """What comes of ever smaller chunks where nothing moves, if that is faster; or takes less,
        where that is more than the room. XLA:TPU may hold more of them on the chip, which only
        their executables say; those with next to nothing beside it cannot be faster by that. A
        fourth is tried at a time, and where that is no better, at last a half.
        """
        chip = self._lowering.target.machine.on_chip_memory
        part = 4
        for _ in range(_FINER_ROUNDS):
            if chip is None or kept.candidate is None or not kept.candidate.placing.splits:
                break
            temporary = kept.executable.memory_analysis().temp_size_in_bytes
            is_small = temporary <= chip.capacity_bytes * _LITTLE
            if kept.total <= room and (kept.candidate.has_edits or is_small):
                break
            aim = kept.candidate.plan.budget_bytes + chip.capacity_bytes
            finer = partial(self.planner.finer, kept.candidate, part, aim, kept.options)
            tried = self._try_beside(finer, kept.options)
            before = kept
            if tried is not None:
                kept = replace(kept, seen=(*kept.seen, tried.seen))
                found = tried.kept(max(room, kept.total - 1), before.seen, kept.options)
                is_needed = kept.total > room
                if found and (is_needed or WAITS * self._seconds(found) <= self._seconds(kept)):
                    kept = found
            if kept.executable is before.executable:
                if part == 2:
                    break
                part = 2
        return kept

    def _seconds(self, kept: _Kept) -> float:
        """What a step takes by the schedule of its executable."""
        return self.planner.seconds(kept.executable)

    def _with_idle_used(self, kept: _Kept, room: int) -> _Kept:
        """What comes of the bytes that XLA left of the room, if that is faster and within it."""
        options, seen = kept.options, list(kept.seen)
        for n in range(_IDLE_ROUNDS):
            if kept.candidate is None or not _has_use(kept.candidate, room - kept.total, room):
                break
            counts_chip = kept.candidate.counts_chip
            if n == 0:
                own = self._own_bytes(room, options)
                unmoved = self.planner.unmoved(options, counts_chip=counts_chip)
                if own is not None and unmoved is not None:
                    seen.append(Seen(unmoved, own, 0))
            aim = aimed_at(room, seen, counts_chip=counts_chip)
            slower = kept.candidate
            faster = partial(self._faster, slower, aim, options, near=slower)
            tried = self._try_beside(faster, options)
            if tried is None:
                break
            seen.append(tried.seen)
            better = tried.kept(room, kept.seen, options)
            if better is None:
                kept = replace(kept, seen=(*kept.seen, tried.seen))
                continue
            kept = better
            if slower.cost_s <= WAITS * tried.candidate.cost_s:
                break  # Nor would another one gain much.
        return kept

    def _faster(
        self,
        slower: Candidate,
        aim: int,
        options: Mapping[str, Any],
        *,
        near: Candidate | None,
    ) -> Candidate | None:
        """A plan of the same kind for so many bytes, if it is faster."""
        found = self.planner.plan(aim, options, counts_chip=slower.counts_chip, near=near)
        return found if found.is_faster_than(slower) else None

    def _try_beside(
        self, make: Callable[[], Candidate | None], options: Mapping[str, Any]
    ) -> _Tried | None:
        """What comes of a plan that may be better than what is there already; None where there is
        none. What goes wrong with it, the log says."""
        try:
            candidate = make()
            return None if candidate is None else self._try(candidate, options)
        except (MemplanError, jax.errors.JaxRuntimeError) as error:
            _log.info("a plan that may be faster was dropped: %s", error)
            return None

    def _try(
        self, candidate: Candidate, options: Mapping[str, Any], *, replans: bool = False
    ) -> _Tried:
        """What XLA makes of a plan.

        Args:
          replans: where it schedules the module in another way now, that is planned for as many
            bytes, and is what was tried.

        Raises:
          PlanMismatchError, LoopMismatchError: when it does, and no plan is made or found then.
        """
        self._tries += 1
        of = [candidate]
        try:
            executable, rewritten = self._compile_planned(of, options, replans)
        except jax.errors.JaxRuntimeError as error:
            if not is_exhausted(error):
                raise
            # How much it would take XLA:TPU does not say as a number.
            beyond = int(self._lowering.target.capacity_bytes * (1 + NEAR)) + 1
            return _Tried(of[-1], None, beyond, None, error)
        candidate = of[-1]
        total = device_bytes(executable, candidate.hosted_bytes)
        if self._lowering.function.options.in_runtime:
            total += arena_bytes(candidate.plan)
        return _Tried(candidate, executable, total, rewritten, None)

    def _compile_planned(
        self, of: list[Candidate], options: Mapping[str, Any] | None, replans: bool
    ) -> tuple[Executable, Module | None]:
        """The executable of a plan, and the module that was written; None where jax had it.

        Args:
          of: the plan; one that is made meanwhile is added, which then is that of the executable.
        """
        (candidate,) = of
        self._lowering.report(
            "compiling with a plan", candidate.plan.budget_bytes, candidate.step_time_s
        )
        rewritten: list[Module] = []
        machine = self._lowering.target.machine
        in_runtime = self._lowering.function.options.in_runtime

        def written(module: Module) -> Module:
            return pipeline.rewrite_module(module, of[-1].plan, machine, in_runtime=in_runtime)

        def transform(module: Module) -> Module:
            try:
                rewritten.append(written(module))
            except (PlanMismatchError, LoopMismatchError) as mismatch:
                if not replans:
                    raise
                try:
                    of.append(self.planner.planned_at(module, candidate, options))
                except MemoryBudgetError:
                    raise mismatch from None
                rewritten.append(written(module))
            return rewritten[-1]

        token = f"{candidate.plan.fingerprint}-{__version__}{'-gates' if in_runtime else ''}"
        if replans:
            token += f"-{uuid.uuid4()}"  # What comes of it, no key of jax's cache may stand for.
        if self._lowering.target.machine.has_one_memory:
            # Before compiling: an executable that is loaded from a cache has the calls in it.
            import custom_calls

            custom_calls.register()
        try:
            executable = inject.compile_with(
                self._lowering.target.platform,
                candidate.program.stablehlo,
                token,
                transform,
                candidate.program.compiler(options),
            )
        except jax.errors.JaxRuntimeError as error:
            note(error, rewritten)
            raise
        return executable, rewritten[-1] if rewritten else None

    # --- least budgets ----------------------------------------------------------------------

    def _least_planned(self, error: MemoryBudgetError, options: Mapping[str, Any] | None) -> int:
        """The least budget that the planner was seen to keep to. The one that it names is that of
        one way among those that it tries, and packing takes some of it."""
        too_little, least = min(error.budget, error.least), error.least
        for _ in range(_HALVINGS):
            middle = (too_little + least) // 2
            try:
                self.planner.plan(middle, options, objective=LATENCY)
            except MemoryBudgetError:
                too_little = middle
            else:
                least = middle
        return least

    def _shortage(self, options: Mapping[str, Any]) -> MemoryBudgetError:
        """Where memory is shortest: what the planner says of a budget that nothing keeps."""
        try:
            self.planner.plan(1, options, objective=LATENCY)
        except MemoryBudgetError as error:
            return error
        raise AssertionError("a plan in one byte")


@dataclass(frozen=True)
class _Tried:
    """What XLA made of a plan.

    Attributes:
      executable: None where it does not fit the device.
      total: bytes that XLA reports of it; more than the device has, where it does not fit.
      rewritten: the module that was written; None where jax had the executable.
      exhausted: what XLA said where it does not fit.
    """

    candidate: Candidate
    executable: Executable | None
    total: int
    rewritten: Module | None
    exhausted: Exception | None

    @property
    def seen(self) -> Seen:
        return Seen(self.candidate, self.total, 0)

    def kept(self, room: int, before: Iterable[Seen], options: Mapping[str, Any]) -> _Kept | None:
        """The executable, if it is within so many bytes."""
        if self.executable is None or self.total > room:
            return None
        return _Kept(self.executable, self.candidate, self.total, (*before, self.seen), options)


@dataclass(frozen=True)
class _Kept:
    """An executable, the plan that it follows, if any, and the bytes that XLA reports of it.

    Attributes:
      seen: the plans that were compiled on the way.
      options: as of `Compiled`.
    """

    executable: Executable
    candidate: Candidate | None
    total: int
    seen: tuple[Seen, ...]
    options: Mapping[str, Any]


def _has_use(candidate: Candidate, idle: int, room: int) -> bool:
    """Whether a step that waits, or is charged for what it moves, could be better with what XLA
    left idle of the room. Of what it plans for, the planner has no use for what it leaves itself.
    """
    left = candidate.plan.budget_bytes - candidate.plan.prediction.total_bytes
    waits = candidate.plan.prediction.slowdown > WAITS or candidate.charged_s > 0
    return waits and idle - left > _IDLE * room
