"""The stages of a function within a budget, as jax has them: Traced, Lowered, Compiled.

A function that does not fit is planned (`looks`), compiled with the plan written into it, and
what XLA reports of the executable is compared with the budget.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding

from hlo_passes import inject, pipeline, verify, xla
from hlo_passes.errors import (
    LoopMismatchError,
    LoweringPlatformsError,
    MemoryBudgetError,
    MemplanError,
    NotExecutableError,
    PlanMismatchError,
)
from hlo_passes.ir import Module
from hlo_passes.machine import Machine
from hlo_passes.plan import LoopStreams, Plan
from hlo_passes.reader import read_module
from hlo_passes.units import format_bytes
from memplan import __version__
from memplan.executable import Executable, Target, TopologyExecutable, device_bytes
from memplan.function import Function
from memplan.layouts import as_jax_has_it, is_laid_out
from memplan.looks import Look, Looks
from memplan.lowering import Lowering
from memplan.out_of_memory import explain_oom, note
from memplan.paths import dotted
from memplan.placing import Placing
from memplan.signature import (
    DEVICE_MEMORY_KIND,
    HOST_MEMORY_KIND,
    as_single_device,
    memory_kind,
)
from memplan.streams.hosting import Hosting
from memplan.topologies import Topology

# XLA's later passes may end above what was planned; then the difference is taken off.
_MAX_ROUNDS = 3

# Without them XLA:CPU makes one library call of products that feed each other: all the weights that
# it reads have to be there at once, and a plan can move none of them.
_FINER_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
}

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


class PlacementWarning(UserWarning):
    """Arguments had to be moved to the tier that the plan has for them."""


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
        self.placing = Placing(self._lowering)
        self._looks = Looks(self.placing)
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
        return (
            self._lowering.function.options.budget
            or self._lowering.target.machine.device_memory.capacity_bytes
        )

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
            if self._plan is None:
                try:
                    self._plan = self._first(
                        None, lambda tried: self._look_with_credit(self.budget, 0, 1, tried)[0].plan
                    )
                except MemoryBudgetError as error:
                    raise self._told(error, error.budget, error.least) from None
            return self._plan

    def within(self, budget: int) -> Plan:
        """Plans for another budget, in bytes, compiling nothing further than XLA's scheduler.

        Raises:
          MemoryBudgetError: as `plan` does. The least budget that it names is the planner's first
            guess.
        """
        with self._lock:
            return self._first(None, lambda tried: self._looks.look(budget, tried).plan)

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
        def within(budget: int) -> Compiled:
            return self._first(options, lambda tried: self._compile_with(budget, tried))

        try:
            return within(self.budget)
        except MemoryBudgetError as error:
            least = _least(error, within)
            if (executable := self._as_xla_has_it(least, options)) is not None:
                least = min(least, device_bytes(executable, 0))
            raise self._told(error, self.budget, least) from None

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

    def _compile_with(self, budget: int, options: Mapping[str, Any]) -> Compiled:
        executable = self._as_xla_has_it(budget, options)
        if executable is not None and device_bytes(executable, 0) <= budget:
            return Compiled(executable, self, None, (), options)
        return self._compile_within(budget, options)

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

    def _compile_within(self, budget: int, options: Mapping[str, Any] | None) -> Compiled:
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
            rounds.append(f"planned {predicted} bytes, XLA reports {total}")
            if total <= budget:
                return Compiled(executable, self, look, tuple(rounds), options or {})
            self._looks.compiled(executable)
            reported.append(total)
            overhead = max(overhead, total - predicted)
        if mismatch is not None and not reported:
            raise mismatch
        raise self._shortage().asked_for(budget, min(reported))

    def _told(self, error: MemoryBudgetError, budget: int, least: int) -> MemoryBudgetError:
        """The same error, with what is known up here: the user's names, why arguments stay."""
        names = {b.op_name: dotted(b.op_name) for b in error.largest if not b.source_line}
        return error.asked_for(budget, least, self.placing.left_alone, names)

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
        except MemoryBudgetError:
            own = self._as_xla_has_it(budget, options)
            if overhead or own is None:
                raise
            unmoved = self._unmoved(options)
            if unmoved is None:
                raise
            credit = unmoved.plan.prediction.total_bytes - device_bytes(own, 0)
            if credit <= 0:
                raise
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
        least = error.least + overhead if overhead else self._least_planned(error)
        raise error.asked_for(budget, least)

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


class Compiled:
    """A compiled program within the budget.

    Attributes:
      plan: what it follows; None where XLA's own program keeps to the budget.
      layouts: of the arguments and results that are not as jax has them.
      forms: in which layouts products of batches take their operands, where XLA is told.
      options: of XLA, beside those given to ``jit``.
      rounds: what each compilation was planned for and what XLA reported.
      followed: what the checker found of the plan in the executable; None without a plan.
    """

    def __init__(
        self,
        executable: Executable,
        lowered: Lowered,
        look: Look | None,
        rounds: tuple[str, ...],
        options: Mapping[str, Any],
    ) -> None:
        self.options = dict(options)
        self._executable = executable
        self._lowered = lowered
        self._bound: dict[bool, jax.stages.Compiled] = {}
        self.hosting = look.hosting if look is not None else Hosting(frozenset())
        self.plan = look.plan if look is not None else None
        layouts = lowered.placing.layouts_beside(self.hosting)
        parameters = lowered.placing.program.arguments.parameters
        self.layouts = layouts.as_compiled(self.module, parameters) if layouts else layouts
        self.forms = lowered.placing.forms
        self.hosted_on_cpu = look.hosted_on_cpu if look is not None else 0
        self.rounds = rounds
        self.followed = verify.verify_executable(look.plan, self.module) if look else None

    def __repr__(self) -> str:
        used = f"{format_bytes(self.device_bytes)} of {format_bytes(self._lowered.budget)}"
        said = f"{self._lowered.fun_name}: {used} on the device"
        if self.plan is None:
            return f"<Compiled {said}; no plan was needed>"
        said += f"; {self.plan.predicted}"
        if streamed := sum(loop.slots > 0 for loop in self.streams):
            said += f"; loops streamed: {streamed}, slots: {self.hosting.depth}"
        return f"<Compiled {said}>"

    @property
    def streams(self) -> tuple[LoopStreams, ...]:
        """What was decided about each loop over stacks; nothing without a plan."""
        return self.plan.streams if self.plan is not None else ()

    @property
    def left_alone(self) -> Mapping[str, str]:
        """Why an argument that a loop reads is not streamed, by path; nothing without a plan."""
        return self.plan.left_alone if self.plan is not None else {}

    @property
    def is_jax_own(self) -> bool:
        """Whether calling ``jax.jit`` runs this very executable."""
        is_as_written = not self.layouts and not self.forms and not self.options
        return self.plan is None and self._lowered.absent is None and is_as_written

    @functools.cached_property
    def module(self) -> Module:
        """The final, scheduled module."""
        return read_module(self._executable)

    @property
    def device_bytes(self) -> int:
        """Arguments + outputs + temporaries − aliased bytes on the device, as XLA reports; on
        CPU without the arguments on the host, which XLA:CPU counts among the device's."""
        return device_bytes(self._executable, self.hosted_on_cpu)

    def memory_analysis(self) -> Any:
        return self._executable.memory_analysis()

    def cost_analysis(self) -> Any:
        return self._executable.cost_analysis()

    def as_text(self) -> str:
        return self._executable.as_text()

    def runtime_executable(self) -> Any:
        return self._executable.runtime_executable()

    @property
    def args_info(self) -> Any:
        return self._lowered.args_info

    @property
    def out_info(self) -> Any:
        return self._lowered.out_info

    @property
    def in_tree(self) -> Any:
        return self._lowered.in_tree

    @property
    def out_tree(self) -> Any:
        return self._lowered.out_tree

    @property
    def in_avals(self) -> Any:
        return self._lowered.in_avals

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        return self._lowered.donate_argnums

    @property
    def input_shardings(self) -> Any:
        """As in jax; what the plan keeps on the host is in ``pinned_host`` memory."""
        return self._of_jax.input_shardings

    @property
    def output_shardings(self) -> Any:
        return self._of_jax.output_shardings

    @property
    def input_formats(self) -> Any:
        return self._of_jax.input_formats

    @property
    def output_formats(self) -> Any:
        return self._of_jax.output_formats

    @property
    def _of_jax(self) -> jax.stages.Compiled:
        """
        Raises:
          NotExecutableError: for GPUs that are not here, on which jax has no shardings.
        """
        if isinstance(self._executable, TopologyExecutable):
            self._check_executable()
        return self._bound_as(())

    def unscheduled(self) -> Executable:
        """Compiles the same program, its arguments in the same tiers, as XLA schedules it by
        itself: what the plan is to be compared with."""
        return self._lowered.placing.placed(self.hosting, scheduled=False).compiler(None)()

    def displaced(self, leaves: Sequence[Any]) -> list[int]:
        """Which flat arguments are not in the tier that the plan has for them, or in another
        layout."""
        orders = self.layouts.arguments
        return [
            n
            for n, leaf in enumerate(leaves)
            if (memory_kind(leaf) == HOST_MEMORY_KIND) != (n in self.hosting.arguments)
            or (n in orders and not is_laid_out(leaf, orders[n]))
        ]

    def move(self, leaves: Sequence[Any]) -> list[Any]:
        """Moves flat arguments to their tiers, in their layouts; those that are there stay.

        Raises:
          NotExecutableError: when it was compiled for devices that are not here.
        """
        self._check_executable()
        moved = list(leaves)
        for n in self.displaced(leaves):
            kind = HOST_MEMORY_KIND if n in self.hosting.arguments else DEVICE_MEMORY_KIND
            sharding, order = self._sharding(n, leaves[n], kind), self.layouts.arguments.get(n)
            to = sharding if order is None else Format(as_jax_has_it(order), sharding)
            moved[n] = jax.device_put(leaves[n], to)
            if isinstance(sharding, SingleDeviceSharding) and not getattr(
                leaves[n], "committed", False
            ):
                moved[n] = xla.unbound(moved[n])
        return moved

    def _check_executable(self) -> None:
        if self._lowered.absent is not None:
            raise NotExecutableError(self._lowered.absent.name)

    def _sharding(self, n: int, leaf: Any, kind: str) -> Any:
        """Where an argument is bound to, else where the program has it, in another memory."""
        if isinstance(leaf, jax.Array) and leaf.committed:
            return leaf.sharding.with_memory_kind(kind)
        return as_single_device(self._lowered.placing.lowering.sharding(n).with_memory_kind(kind))

    @functools.cached_property
    def consumed(self) -> tuple[int, ...]:
        """The flat arguments that are donated and on the host. XLA is not told so (see
        `Placing.placed`): whoever calls deletes them, or the host would hold them beside their
        results."""
        infos = jax.tree.leaves(self.args_info)
        return tuple(n for n in sorted(self.hosting.arguments) if infos[n].donated)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program. Static arguments are left out, as in jax.

        Raises:
          NotExecutableError: when it was compiled for devices that are not here.
        """
        leaves = jax.tree.leaves((args, kwargs))
        program, args, kwargs, _ = self._prepared(args, kwargs)
        try:
            results = program(*args, **kwargs)
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # From C++ it is a ValueError.
            note(error, program=lambda: self.module)
            raise
        delete(leaves[n] for n in self.consumed)
        return results

    def call(self, *args: Any, **kwargs: Any) -> xla.Called:
        """Runs the program; says how jax may do so itself the next time. What is `consumed` is
        left to the caller."""
        program, args, kwargs, moved = self._prepared(args, kwargs)
        results, fast, again = xla.call_compiled(program, *args, **kwargs)
        return results, None if moved else fast, again

    def _prepared(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[jax.stages.Compiled, tuple[Any, ...], dict[str, Any], bool]:
        """The program that binds its results as these arguments are bound, the arguments where the
        plan has them, and whether they had to be moved there."""
        self._check_executable()
        leaves, tree = jax.tree.flatten((args, kwargs))
        program = self._bound_as(leaves)
        away = self.displaced(leaves) if tree == self.in_tree else []
        if not away:
            return program, args, kwargs, False
        warnings.warn(
            f"{len(away)} arguments were moved to the tier or the layout that the plan has for "
            "them, for this call only; move them once with place(): args = step.place(*args)",
            PlacementWarning,
            skip_file_prefixes=(os.path.dirname(__file__),),
        )
        args, kwargs = jax.tree.unflatten(tree, self.move(leaves))
        return program, args, kwargs, True

    def _bound_as(self, leaves: Iterable[Any]) -> jax.stages.Compiled:
        """The program with the results of ``jax.jit``: bound where an argument is, on one device
        without a mesh. memplan lowers its programs with shardings in which jax sees memories."""
        bound = self._lowered.placing.lowering.program.arguments.committed
        bound = bound or any(isinstance(leaf, jax.Array) and leaf.committed for leaf in leaves)
        if bound not in self._bound:
            self._bound[bound] = xla.bind(self._executable, as_single_device, bound)
        return self._bound[bound]


def delete(arrays: Iterable[Any]) -> None:
    """Frees arrays, as jax does with what is donated."""
    for array in arrays:
        if isinstance(array, jax.Array):
            array.delete()


def _least(error: MemoryBudgetError, within: Callable[[int], Compiled]) -> int:
    """Returns a budget that works, from what the planner holds for the least.

    That leaves out what packing loses and what XLA's later passes add.
    """
    least, step = max(error.least, error.budget + 1), _LEAST_STEP
    for _ in range(_LEAST_ROUNDS):
        try:
            within(least)
        except MemoryBudgetError as again:
            least, step = max(again.least, int(least * (1 + step))), 2 * step
        else:
            break
    return least
