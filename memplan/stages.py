"""The stages of a function within a budget, as jax has them: Traced, Lowered, Compiled.

What keeps to the budget `budgeted` finds; a plan that the user gave is followed here, and several
processes of one program take one plan.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from hlo_passes.errors import (
    LoweringPlatformsError,
    StalePlanError,
)
from hlo_passes.hardware.machine import Machine
from hlo_passes.plan import Plan
from hlo_passes.units import format_bytes
from memplan.agreeing import follow, is_shared, lead
from memplan.budgeted import Budgeted
from memplan.compiled import Compiled
from memplan.executable import Executable, Target
from memplan.function import Function
from memplan.kept import PlanWarning, changes
from memplan.lowering import Lowering
from memplan.out_of_memory import explain_oom
from memplan.placing import Placing
from memplan.topologies import Topology

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
        # What is asked of it, its file may not know.
        self._lowering.objective.prices(self.machine)
        _ = self._lowering.jitter
        self._given: Plan | None = None
        self._prepare(self._holding(traced.function.options.plan))
        self._is_x64 = jax.config.jax_enable_x64
        self._lock = threading.RLock()
        self._compiled: dict[_Options, Compiled] = {}
        self._plan: Plan | None = None

    def __repr__(self) -> str:
        within = f"for {self.machine.name} within {format_bytes(self.budget)}"
        return f"<Lowered {self.fun_name} {within}>"

    @property
    def placing(self) -> Placing:
        """Of the program, what may be where."""
        return self._budgeted.placing

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

    @contextmanager
    def _alone(self) -> Generator[None]:
        """One thread at a time; what is traced anew is so as the function was."""
        with self._lock, jax.enable_x64(self._is_x64):
            yield

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

    def _prepare(self, plan: Plan | None) -> None:
        """Takes a plan that was made before, or makes ready to make one."""
        self._given = plan
        preparation = plan.preparation if plan is not None else None
        self._budgeted = Budgeted(Placing(self._lowering, preparation))

    def plan(self) -> Plan:
        """Plans for the budget as it stands, without compiling further than XLA's scheduler; but
        what the planner refuses is compiled as XLA has it, to learn what the planner cannot know.

        Raises:
          MemoryBudgetError: when no plan keeps to the budget.
          OrderedEffectsError: when a plan is needed and the program has ordered effects.
          HostResultsError: the same, on CPU, when ``out_shardings`` ask for host memory.
        """
        with self._alone():
            if self._given is not None:
                return self._given
            if self._plan is None:
                if not is_shared(self._lowering):
                    self._plan = self._budgeted.plan(self.budget)
                elif jax.process_index() == 0:
                    self._plan = lead(
                        self._lowering, lambda: self._budgeted.plan(self.budget), lambda plan: plan
                    )
                else:
                    self._plan = follow(self._lowering)
                    assert self._plan is not None
            return self._plan

    def within(self, budget: int) -> Plan:
        """Plans for another budget, in bytes, compiling nothing further than XLA's scheduler.

        Raises:
          MemoryBudgetError: as `plan` does.
        """
        with self._alone():
            return self._budgeted.within(budget)

    def resident(self) -> Plan:
        """The plan that moves nothing, however much memory that takes."""
        with self._alone():
            return self._budgeted.planner.resident(None).plan

    @property
    def machine(self) -> Machine:
        """What it is lowered for."""
        return self._lowering.target.machine

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Compiled:
        """Compiles the program; within the budget as XLA itself reports it.

        Args:
          compiler_options: XLA options, beside those given to ``jit``.

        Raises:
          MemoryBudgetError: when no plan keeps to the budget. Which one works, its method
            `least_budget` finds out.
          StalePlanError: when the plan that was given does not hold for what XLA schedules.
          OrderedEffectsError: when a plan is needed and the program has ordered effects.
          HostResultsError: the same, on CPU, when ``out_shardings`` ask for host memory.
        """

        key = _as_key(compiler_options)
        with self._alone():
            if key not in self._compiled:
                compiled = self._compile(compiler_options)
                if not key:
                    self._plan = compiled.plan or self._plan
                self._compiled[key] = compiled
                self._report(compiled)
                self._budgeted.forget()
            return self._compiled[key]

    @property
    def compiled(self) -> Compiled | None:
        """What `compile` gave without options; None where it did not yet."""
        return self._compiled.get(())

    def _report(self, compiled: Compiled) -> None:
        plan, capacity = compiled.plan, self._lowering.target.capacity_bytes
        if self.budget > capacity:
            _log.warning("%s: hbm=%s, and its device has %s", self.fun_name, self.budget, capacity)
        followed = compiled.followed
        if followed is not None and (left := (*followed.missing, *followed.loops_missing)):
            _log.warning("%s: XLA left out %d of the plan's transfers", self.fun_name, len(left))
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
            self._prepare(None)
        if not is_shared(self._lowering):
            return self._budgeted.compile(self.budget, options)
        if jax.process_index() == 0:
            return lead(
                self._lowering,
                lambda: self._budgeted.compile(self.budget, options),
                lambda compiled: compiled.plan,
            )
        plan = follow(self._lowering)
        if plan is None:
            executable = self.unplanned(options)
            return Compiled(executable, self.placing, self.budget, None, (), options or {})
        budgeted = Budgeted(Placing(self._lowering, plan.preparation))
        return budgeted.follow(plan, self.budget, options)

    def _compile_given(self, plan: Plan, options: Mapping[str, Any] | None) -> Compiled | None:
        """Compiles with a plan that was made before; None where it does not hold and the user wants
        another one then."""
        try:
            return self._budgeted.follow(plan, self.budget, options)
        except StalePlanError as error:
            found = error.changes
        self._plan_anew(found)
        return None

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
