"""The stages of a function within a budget, as jax has them: Traced, Lowered, Compiled.

A function that does not fit is planned (`looks`), compiled with the plan written into it, and
what XLA reports of the executable is compared with the budget.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax

from hlo_passes import pipeline
from hlo_passes.errors import (
    LoopMismatchError,
    LoweringPlatformsError,
    MemoryBudgetError,
    MemplanError,
    PlanMismatchError,
    StalePlanError,
)
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module
from hlo_passes.plan import Plan
from hlo_passes.rewrite import inject
from memplan import __version__
from memplan.agreeing import follow, is_shared, lead
from memplan.calibration import calibrated
from memplan.compiled import Compiled
from memplan.executable import Executable, Target, device_bytes
from memplan.function import Function
from memplan.kept import PlanWarning, changes, other_versions
from memplan.looks import Look, Looks
from memplan.lowering import Lowering
from memplan.out_of_memory import explain_oom, note
from memplan.paths import dotted
from memplan.placing import Placing
from memplan.topologies import Topology

# XLA's later passes may end above what was planned; then the difference is taken off.
_MAX_ROUNDS = 3

# Without them XLA:CPU makes one library call of products that feed each other: all the weights that
# it reads have to be there at once, and a plan can move none of them.
_FINER_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
}

# Where XLA takes less than planned by more than this part of the budget, and a step takes longer by
# more than this factor than with everything on the device, a plan for what is idle is worth one
# more round, and another one where that ends above the budget. Half of the part is left free, so
# that it does not.
_IDLE, _WAITS = 0.05, 1.05
_IDLE_ROUNDS = 2

# How often a least budget that does not work is raised, each time by twice as much.
_LEAST_ROUNDS = 8
_LEAST_STEP = 1 / 64

# How often what lies between a budget that is too little and the planner's least is halved.
_HALVINGS = 4


_log = logging.getLogger("memplan")

# From so many times the step with everything on the device, the log warns.
_SLOW = 2.0

_Options = tuple[tuple[str, Any], ...]


def _as_key(options: Mapping[str, Any] | None) -> _Options:
    return tuple((options or {}).items())


@dataclass(frozen=True)
class Traced:
    """A traced function, described as in jax."""

    traced: jax.stages.Traced
    function: Function
    target: Target

    @property
    def jaxpr(self) -> Any:
        return self.traced.jaxpr

    @property
    def args_info(self) -> Any:
        return self.traced.args_info

    @property
    def out_info(self) -> Any:
        return self.traced.out_info

    @property
    def in_tree(self) -> Any:
        return self.traced.in_tree

    @property
    def out_tree(self) -> Any:
        return self.traced.out_tree

    @property
    def in_avals(self) -> Any:
        return self.traced.in_avals

    @property
    def out_avals(self) -> Any:
        return self.traced.out_avals

    @property
    def effects(self) -> Any:
        return self.traced.effects

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        return self.traced.donate_argnums

    @property
    def fun_name(self) -> str:
        return self.traced.fun_name

    def lower(
        self, *, lowering_platforms: Sequence[str] | None = None, _private_parameters: Any = None
    ) -> Lowered:
        """Lowers it for its target.

        Args:
          lowering_platforms, _private_parameters: what ``jax.export`` asks for.

        Raises:
          LayoutsError: when a program with ordered effects is to be laid out.
          LoweringPlatformsError: when `lowering_platforms` are given.
          OffloadPatternError: when a pattern of ``offload`` matches no argument.
        """
        if lowering_platforms is not None:
            raise LoweringPlatformsError(self.fun_name, lowering_platforms)
        return Lowered(self)


class Lowered:
    """A function lowered for a target; nothing is placed yet."""

    def __init__(self, traced: Traced) -> None:
        self._lowering = Lowering(traced.traced, traced.function, traced.target)
        self._given: Plan | None = None
        self._follow(self._holding(traced.function.options.plan))
        self._lock = threading.RLock()
        self._own: dict[_Options, Executable | None] = {}
        self._compiled: dict[_Options, Compiled] = {}
        self._plan: Plan | None = None

    @property
    def args_info(self) -> Any:
        return self._lowering.traced.args_info

    @property
    def out_info(self) -> Any:
        return self._lowering.traced.out_info

    @property
    def in_tree(self) -> Any:
        return self._lowering.in_tree

    @property
    def out_tree(self) -> Any:
        return self._lowering.out_tree

    @property
    def in_avals(self) -> Any:
        return self._lowering.traced.in_avals

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        return self._lowering.traced.donate_argnums

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> Any:
        """The program before placement, as ``jax.stages.Lowered.as_text``."""
        return self.placing.program.lowered.as_text(dialect, debug_info=debug_info)

    def cost_analysis(self) -> Any:
        """Of the program before placement, as ``jax.stages.Lowered.cost_analysis``; None for
        devices that are not here."""
        return None if self.absent else self.placing.program.lowered.cost_analysis()

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """The program before placement, as ``jax.stages.Lowered.compiler_ir``."""
        return self.placing.program.lowered.compiler_ir(dialect)

    @property
    def budget(self) -> int:
        """Device bytes that the program may use."""
        given = self._given.preparation if self._given is not None else None
        if given is not None and self._lowering.function.options.budget is None:
            return given.budget_bytes
        return self._lowering.budget

    @property
    def closed_bytes(self) -> int:
        """Of the arrays that the function closes over, which count in every budget and stay."""
        return self._lowering.closed_bytes

    def _room(self, budget: int) -> int:
        """What of a budget is left for what XLA counts."""
        return max(0, budget - self.closed_bytes)

    def _holding(self, plan: Plan | None) -> Plan | None:
        """The plan that the user gave, if it holds."""
        found = changes(plan, self._lowering) if plan is not None else ()
        if found:
            self._plan_anew(found)
        return None if found else plan

    def _plan_anew(self, found: Sequence[str]) -> None:
        """Has the program planned although there was a plan, if the user wants that."""
        error = StalePlanError(self.fun_name, found)
        if self._lowering.function.options.budget is None:
            raise error
        warnings.warn(
            f"{self.fun_name} is planned anew within hbm=, for the plan that was given does not "
            f"hold: {'; '.join(found)}",
            PlanWarning,
            skip_file_prefixes=(os.path.dirname(__file__),),
        )

    def _follow(self, plan: Plan | None) -> None:
        """Takes a plan that was made before, or makes ready to make one."""
        self._given = plan
        preparation = plan.preparation if plan is not None else None
        self.placing = Placing(self._lowering, preparation)
        self._looks = Looks(self.placing)

    def plan(self) -> Plan:
        """Plans for the budget as it stands, without compiling further than XLA's scheduler; but
        what the planner refuses is compiled as XLA has it, to learn what the planner cannot know.

        Raises:
          MemoryBudgetError: when no plan keeps to the budget. The least budget that it names
            is the planner's; `compile` tries it out.
          OrderedEffectsError: when a plan is needed and the program has ordered effects.
          HostResultsError: the same, on CPU, when ``out_shardings`` ask for host memory.
        """
        with self._lock:
            if self._given is not None:
                return self._given
            if self._plan is None:
                if not is_shared(self._lowering):
                    self._plan = self._make_plan()
                elif jax.process_index() == 0:
                    self._plan = lead(self._lowering, self._make_plan, lambda plan: plan)
                else:
                    self._plan = follow(self._lowering)
                    assert self._plan is not None
            return self._plan

    def _make_plan(self) -> Plan:
        try:
            return self._first(
                None,
                lambda tried: self._look_with_credit(self._room(self.budget), 0, 1, tried)[0].plan,
            )
        except MemoryBudgetError as error:
            raise self._told(error, self.budget, error.least) from None

    def within(self, budget: int) -> Plan:
        """Plans for another budget, in bytes, compiling nothing further than XLA's scheduler.

        Raises:
          MemoryBudgetError: as `plan` does. The least budget that it names is the planner's first
            guess.
        """
        with self._lock:
            room = self._room(budget)
            try:
                return self._first(None, lambda tried: self._looks.look(room, tried).plan)
            except MemoryBudgetError as error:
                raise self._told(error, budget, error.least) from None

    def resident(self) -> Plan:
        """The plan that moves nothing, however much memory that takes."""
        with self._lock:
            return self._looks.resident(None).plan

    @property
    def machine(self) -> Machine:
        """What it is lowered for."""
        return self._lowering.target.machine

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Compiled:
        """Compiles the program; within the budget as XLA itself reports it.

        Args:
          compiler_options: XLA options, beside those given to ``jit``.

        Raises:
          MemoryBudgetError: when no plan keeps to the budget. The least budget that it names
            was compiled for, and works.
          StalePlanError: when the plan that was given does not hold for what XLA schedules.
          OrderedEffectsError: when a plan is needed and the program has ordered effects.
          HostResultsError: the same, on CPU, when ``out_shardings`` ask for host memory.
        """

        key = _as_key(compiler_options)
        with self._lock:
            if key not in self._compiled:
                compiled = self._compile(compiler_options)
                if not key:
                    self._plan = compiled.plan or self._plan
                self._compiled[key] = compiled
                self._log(compiled)
                self._looks.forget()
                self._own.clear()
            return self._compiled[key]

    def _log(self, compiled: Compiled) -> None:
        plan = compiled.plan
        # On CPU both memories are one: what moves is only practice.
        slow = plan is not None and plan.prediction.slowdown >= _SLOW
        if not slow or self._lowering.target.platform == "cpu":
            _log.info("%r", compiled)
            return
        _log.warning(
            "%r. What would be faster: a larger hbm=; less that "
            "moves (a smaller offload=, fewer bits a weight); more compute for each byte (a larger "
            "batch).",
            compiled,
        )

    def _compile(self, options: Mapping[str, Any] | None) -> Compiled:
        if self._given is not None:
            compiled = self._compile_given(self._given, options)
            if compiled is not None:
                return compiled
            self._follow(None)
        if not is_shared(self._lowering):
            return self._compile_anew(options)
        if jax.process_index() == 0:
            return lead(self._lowering, lambda: self._compile_anew(options), lambda c: c.plan)
        plan = follow(self._lowering)
        if plan is None:
            executable = self.unplanned(options)
            return Compiled(executable, self.placing, self.budget, None, (), options or {})
        self._follow(plan)
        compiled = self._compile_given(plan, options)
        assert compiled is not None
        return compiled

    def _compile_given(self, plan: Plan, options: Mapping[str, Any] | None) -> Compiled | None:
        """Compiles with a plan that was made before; None where it does not hold and the user wants
        another one then."""
        assert plan.preparation is not None
        own = {k: v for k, v in plan.compiler_options.items() if k not in self.placing.ring_options}
        options, look = {**own, **(options or {})}, self._looks.of(plan)
        for _ in range(_MAX_ROUNDS):
            try:
                executable = self._compile_planned(look, options)
            except (PlanMismatchError, LoopMismatchError):
                continue  # XLA does not promise to schedule a module in the same way again.
            total = device_bytes(executable, look.hosted_on_cpu)
            said = _said(look, total)
            if total <= self._room(self.budget):
                return Compiled(executable, look.placing, self.budget, look, (said,), options)
            self._plan_anew([f"{said}, allowed are {self._room(self.budget)}"])
            return None
        here = self._lowering.target.versions
        others = other_versions(plan.preparation.versions, here)
        self._plan_anew(["XLA schedules the program otherwise than it did", *others])
        return None

    def _compile_anew(self, options: Mapping[str, Any] | None) -> Compiled:
        def within(budget: int) -> _Kept:
            return self._first(options, lambda tried: self._compile_with(budget, tried))

        room = self._room(self.budget)
        found = _kept_to(room, within)
        if isinstance(found, _Kept):
            return self._with_idle_used(found, room)
        least = found.least
        if found.reported < (1 - _IDLE) * least:
            lower = _kept_to(found.reported, within)
            least = found.reported if isinstance(lower, _Kept) else least
        if (executable := self._as_xla_has_it(least, options)) is not None:
            least = min(least, device_bytes(executable, 0))
        raise self._told(found.error, self.budget, least)

    def _first[T](
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

    def _compile_with(self, budget: int, options: Mapping[str, Any]) -> _Kept:
        executable = self._as_xla_has_it(budget, options)
        if executable is None or (total := device_bytes(executable, 0)) > budget:
            return self._compile_within(budget, options)
        if self.placing.asked.arguments:
            # What the user has on the host XLA brings when it is read; a plan, before that.
            with suppress(MemoryBudgetError):
                return self._compile_within(budget, options)
        compiled = Compiled(executable, self.placing, self.budget, None, (), options)
        return _Kept(compiled, None, total)

    @property
    def fun_name(self) -> str:
        """What the function is called."""
        return self._lowering.traced.fun_name

    @property
    def absent(self) -> Topology | None:
        """The devices that it is lowered for, when they are not here."""
        return self._lowering.target.absent

    @property
    def left_alone(self) -> Mapping[str, str]:
        """Why arguments stay on the device, by path: a loop reads them but cannot stream them, they
        are donated, or `offload=` does not name them."""
        return self.placing.left_alone

    def unplanned(self, compiler_options: Mapping[str, Any] | None = None) -> Executable:
        """Compiles the program as ``jax.jit`` does: what a plan is to be compared with.

        Raises:
          jax.errors.JaxRuntimeError: when XLA finds that it does not fit the device.
        """
        with explain_oom():
            return self.placing.program.compiler(compiler_options)()

    def _as_xla_has_it(self, budget: int, options: Mapping[str, Any] | None) -> Executable | None:
        """The program compiled without a plan; None where its arguments alone exceed `budget`, or
        it does not fit the device."""
        if self._lowering.arguments_bytes > budget:
            return None
        key = _as_key(options)
        if key not in self._own:
            begin = time.monotonic()
            executable = self._own[key] = self.placing.program.fitting(options)
            self._looks.took(time.monotonic() - begin)
            if executable is not None:
                self._looks.compiled(executable)
        return self._own[key]

    def _compile_within(self, budget: int, options: Mapping[str, Any] | None) -> _Kept:
        """Plans and compiles until XLA reports no more than `budget` bytes."""
        overhead = 0
        reported: list[int] = []
        rounds: list[str] = []
        mismatch: MemplanError | None = None
        for _ in range(_MAX_ROUNDS):
            caution = 2 ** len(reported)
            look, overhead = self._look_with_credit(budget, overhead, caution, options)
            try:
                executable = self._compile_planned(look, options)
            except (PlanMismatchError, LoopMismatchError) as error:
                # XLA does not promise to schedule a module in the same way again.
                self._looks.forget()
                rounds.append("XLA scheduled the module otherwise than before")
                mismatch = error
                continue
            total = device_bytes(executable, look.hosted_on_cpu)
            predicted = look.plan.prediction.total_bytes
            rounds.append(_said(look, total))
            if total <= budget:
                compiled = Compiled(
                    executable, look.placing, self.budget, look, tuple(rounds), options or {}
                )
                return _Kept(compiled, look, total)
            self._looks.compiled(executable)
            reported.append(total)
            overhead = max(overhead, total - predicted)
        if mismatch is not None and not reported:
            raise mismatch
        raise self._shortage().asked_for(budget, min(reported))

    def _with_idle_used(self, kept: _Kept, budget: int) -> Compiled:
        """What comes of the bytes that XLA left of the budget, if that is faster and within it."""
        compiled, look = kept.compiled, kept.look
        if look is None or look.plan.prediction.slowdown <= _WAITS:
            return compiled
        prediction, options = look.plan.prediction, compiled.options
        if min(budget, prediction.total_bytes) - kept.total <= _IDLE * budget:
            return compiled  # What the planner itself leaves is of no use to it.
        seen = {prediction.total_bytes: kept.total}
        own, unmoved = self._as_xla_has_it(budget, options), self._unmoved(options)
        if own is not None and unmoved is not None:
            seen[unmoved.plan.prediction.total_bytes] = device_bytes(own, 0)
        aim = int(budget * (1 - _IDLE / 2))
        for _ in range(_IDLE_ROUNDS):
            try:
                faster = self._looks.look(calibrated(aim, seen), options)
                if not faster.is_faster_than(look):
                    break
                executable = self._compile_planned(faster, options)
            except (MemoryBudgetError, PlanMismatchError, LoopMismatchError):
                break
            total = device_bytes(executable, faster.hosted_on_cpu)
            compiled.rounds += (_said(faster, total),)
            if total <= budget:
                return Compiled(
                    executable, faster.placing, self.budget, faster, compiled.rounds, options
                )
            seen[faster.plan.prediction.total_bytes] = total
        return compiled

    def _told(self, error: MemoryBudgetError, budget: int, least: int) -> MemoryBudgetError:
        """The same error, with what is known up here: the user's names, why arguments stay."""
        names = {b.op_name: dotted(b.op_name) for b in error.largest if not b.source_line}
        closed = self.closed_bytes
        return error.asked_for(
            budget, least + closed, self.placing.left_alone, names, closed=closed
        )

    def _least_planned(self, error: MemoryBudgetError) -> int:
        """The least budget that the planner was seen to keep to. The one that it names is that of
        one way among those that it tries, and packing takes some of it."""
        too_little, least = min(error.budget, error.least), error.least
        for _ in range(_HALVINGS):
            middle = (too_little + least) // 2
            try:
                self._looks.look(middle, None)
            except MemoryBudgetError:
                too_little = middle
            else:
                least = middle
        return least

    def _look_with_credit(
        self, budget: int, overhead: int, caution: int, options: Mapping[str, Any] | None
    ) -> tuple[Look, int]:
        """As `_look_below`; what that refuses may fit all the same, for XLA was seen to take less
        than predicted. Returns the overhead that the look is made with, too.

        The planner sees temporaries that XLA:TPU will hold in VMEM, and cannot tell which: small
        programs need less than a tenth of the HBM that is predicted, or none.
        """
        try:
            return self._look_below(budget, overhead, caution, options), overhead
        except MemoryBudgetError as error:
            if overhead:
                raise
            own = self._as_xla_has_it(budget, options)
            unmoved = self._unmoved(options) if own is not None else None
            credit = 0
            if own is not None and unmoved is not None:
                credit = unmoved.plan.prediction.total_bytes - device_bytes(own, 0)
            if own is None or unmoved is None or credit <= 0:
                raise error.asked_for(budget, self._least_planned(error)) from None
            if device_bytes(own, 0) <= budget:
                return unmoved, -credit
            return self._look_below(budget, -credit, caution, options), -credit

    def _unmoved(self, options: Mapping[str, Any] | None) -> Look | None:
        """The program as XLA has it, if the planner finds that it fits the device."""
        capacity = self._lowering.target.machine.device_memory.capacity_bytes
        try:
            look = self._looks.look(capacity, options)
        except MemoryBudgetError:
            return None
        return None if look.plan.moved_bytes or look.plan.edits else look

    def _look_below(
        self, budget: int, overhead: int, caution: int, options: Mapping[str, Any] | None
    ) -> Look:
        """Plans for a budget that XLA was seen to exceed by `overhead`, or to stay below by as much
        where it is negative.

        Another plan breaks up XLA's arena in another way: where the budget has room for it,
        `caution` times of what was seen is left free, so that one more compilation is enough.
        """
        errors: list[MemoryBudgetError] = []
        for left_free in dict.fromkeys((max(caution * overhead, overhead), overhead)):
            try:
                return self._looks.look(budget - left_free, options)
            except MemoryBudgetError as error:
                errors.append(error)
        # Which arguments stay depends on the budget, and on them what is needed beside.
        error = min(errors, key=lambda e: e.least)
        raise error.asked_for(budget, error.least + overhead)

    def _shortage(self) -> MemoryBudgetError:
        """Where memory is shortest: what the planner says of a budget that nothing keeps."""
        try:
            self._looks.look(1, None)
        except MemoryBudgetError as error:
            return error
        raise AssertionError("a plan in one byte")

    def _compile_planned(self, look: Look, options: Mapping[str, Any] | None) -> Executable:
        rewritten: list[Module] = []

        def transform(module: Module) -> Module:
            rewritten.append(
                pipeline.rewrite_module(module, look.plan, self._lowering.target.machine)
            )
            return rewritten[-1]

        if self._lowering.target.platform == "cpu":
            # Before compiling: an executable that is loaded from a cache has the calls in it.
            import custom_calls

            custom_calls.register()
        try:
            return inject.compile_with(
                self._lowering.target.platform,
                look.program.stablehlo,
                f"{look.plan.fingerprint}-{__version__}",
                transform,
                look.program.compiler(options),
            )
        except jax.errors.JaxRuntimeError as error:
            note(error, rewritten)
            raise


@dataclass(frozen=True)
class _Kept:
    """A program, the plan that it follows, if any, and the bytes that XLA reports of it."""

    compiled: Compiled
    look: Look | None
    total: int


@dataclass(frozen=True)
class _Refused:
    """A budget that no plan keeps to, and one that works, as far as is known: XLA reports
    `reported` bytes of the program that was compiled for that."""

    error: MemoryBudgetError
    least: int
    reported: int


def _kept_to(budget: int, within: Callable[[int], _Kept]) -> _Kept | _Refused:
    """Plans for a budget, and where the planner refuses, for more: XLA may take less than is
    predicted.

    What the planner holds for the least leaves out what packing loses and what XLA's later passes
    add, so it is raised until it works.
    """
    try:
        return within(budget)
    except MemoryBudgetError as error:
        least, step, refusal = max(error.least, budget + 1), _LEAST_STEP, error
    for _ in range(_LEAST_ROUNDS):
        try:
            kept = within(least)
        except MemoryBudgetError as error:
            least, step = max(error.least, int(least * (1 + step))), 2 * step
        else:
            return kept if kept.total <= budget else _Refused(refusal, least, kept.total)
    return _Refused(refusal, least, least)


def _said(look: Look, total: int) -> str:
    return f"planned {look.plan.prediction.total_bytes} bytes, XLA reports {total}"
