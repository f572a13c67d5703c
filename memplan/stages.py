"""The stages of a function within a budget, as jax has them: Traced, Lowered, Compiled.

Planning takes two looks at the scheduled module that XLA is about to compile: the first
with every weight on the host, to choose which of them stay on the device; the second, so
placed, to plan each transfer. A look ends XLA's work at its scheduler, early in the
compilation. Then the module is compiled with the plan written into it, and what XLA
reports of the executable is compared with the budget.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from hlo_passes import inject, pipeline, verify, xla
from hlo_passes.errors import (
    HostResultsError,
    LoopMismatchError,
    MemoryBudgetError,
    MemplanError,
    NotExecutableError,
    OffloadPatternError,
    OrderedEffectsError,
    PlanMismatchError,
)
from hlo_passes.ir import Module
from hlo_passes.machine import Machine
from hlo_passes.plan import LoopStreams, Plan
from hlo_passes.reader import read_module
from hlo_passes.units import format_bytes
from memplan import __version__
from memplan.executable import Executable, Program, Target, device_bytes
from memplan.signature import (
    DEVICE_MEMORY_KIND,
    HOST_MEMORY_KIND,
    StaticArguments,
    dynamic_signature,
    memory_kind,
)
from memplan.streams.choice import choose_kept, ring_seconds
from memplan.streams.hosting import Hosting, Streams, stack_bytes
from memplan.streams.records import record_streams
from memplan.streams.rewrite import streamed
from memplan.streams.uses import Result, Source
from memplan.topologies import Topology

# XLA's later passes may end above what was planned; then the difference is taken off.
_MAX_ROUNDS = 3

# How often a least budget that does not work is raised, each time by twice as much.
_LEAST_ROUNDS = 8
_LEAST_STEP = 1 / 64

# Weights below this share of all arguments, and below this many bytes, stay on the device:
# moving them saves next to nothing and costs a transfer's latency each (10 µs or so, which is
# what a link of 15 to 55 GB/s needs for a few hundred KiB).
_SMALLEST_SHARE = 1 / 4096
_SMALLEST_BYTES = 1 << 20

# The rings that are tried, in this order: slots, and the share of a layer's bytes that has so
# many (see `Stream`). Where all layers take equally long, two slots are enough: one is filled
# while the other is computed with. With less, more stacks have room on the device, which is
# better where the link is the bottleneck anyway.
_RINGS = ((2, 1.0), (1, 1.0), (2, 0.25), (3, 1.0))

# A plan replaces another one when it is faster by more than this factor.
_WORTH_IT = 0.99

# XLA:TPU pipelines transfers of loops by itself, into the slot that is in use; with rings in
# the program it has to leave them alone. The option holds for a whole compilation, so every
# such transfer of the program is memplan's to schedule then.
_RING_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "tpu": {"xla_tpu_pipeline_memory_host_transfers": "false"}
}

# What of jax.jit's options concerns the program that memplan lowers itself; the others act
# when the user's function is traced.
_PASSED_ON = ("out_shardings", "keep_unused")


class PlacementWarning(UserWarning):
    """Arguments had to be moved to the tier that the plan has for them."""


@dataclass(frozen=True)
class Options:
    """What `memplan.jit` takes beyond ``jax.jit``; shared by the API and the command line.

    Attributes:
      budget: device bytes; None for all that the machine has.
      machine: see `executable.find_target`.
      offload: glob patterns of the argument paths (``"params.layers.*"``) that may live on
        the host; None for every argument.
      slots: at most so many streamed weights on the device at once; None for no limit.
    """

    budget: int | None = None
    machine: str | Machine | Topology | None = None
    offload: tuple[str, ...] | None = None
    slots: int | None = None


@dataclass(frozen=True)
class Function:
    """A function as the user gave it, with the options of both ``jit``."""

    fun: Callable[..., Any]
    static: StaticArguments
    options: Options
    jit_options: Mapping[str, Any]

    @functools.cached_property
    def signature(self) -> inspect.Signature | None:
        """Of the dynamic arguments."""
        return dynamic_signature(self.fun, self.static)


@dataclass(frozen=True)
class Traced:
    """A traced function; ``jaxpr``, ``args_info`` and ``out_info`` as in jax."""

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

    def lower(self) -> Lowered:
        """Lowers it for its target.

        Raises:
          OffloadPatternError: when a pattern of ``offload`` matches no argument.
        """
        return Lowered(self)


class Lowered:
    """A function lowered for a target; nothing is placed yet."""

    def __init__(self, traced: Traced) -> None:
        self._traced = traced.traced
        self._function = traced.function
        self._target = traced.target
        self._program = self._target.lower(self._traced, self._jit_compiler_options)
        self._may_move = self._choose_movable()
        self._captured: dict[Any, tuple[Program, Module]] = {}

    @property
    def args_info(self) -> Any:
        return self._traced.args_info

    @property
    def out_info(self) -> Any:
        return self._traced.out_info

    @functools.cached_property
    def in_tree(self) -> Any:
        return jax.tree.structure(self._traced.args_info)

    @functools.cached_property
    def out_tree(self) -> Any:
        return jax.tree.structure(self._traced.out_info)

    def as_text(self, dialect: str | None = None) -> Any:
        """The program before placement, as ``jax.stages.Lowered.as_text``."""
        return self._program.lowered.as_text(dialect)

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """The program before placement, as ``jax.stages.Lowered.compiler_ir``."""
        return self._program.lowered.compiler_ir(dialect)

    @property
    def budget(self) -> int:
        """Device bytes that the program may use."""
        return self._function.options.budget or self._target.machine.device_memory.capacity_bytes

    def plan(self) -> Plan:
        """Plans for the budget as it stands, without compiling further than XLA's scheduler.

        Raises:
          MemoryBudgetError: when no plan keeps to the budget. The least budget that it names
            is the planner's; `compile` tries it out.
          OrderedEffectsError: when a plan is needed and the program has ordered effects.
          HostResultsError: the same, on CPU, when ``out_shardings`` ask for host memory.
        """
        try:
            return self._look(self.budget, None).plan
        except MemoryBudgetError as error:
            raise error.asked_for(error.budget, error.least, self.left_alone) from None

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
        unplanned = functools.cache(lambda: self._compile_unplanned(compiler_options))

        def within(budget: int) -> Compiled:
            executable = unplanned() if self._arguments_bytes <= budget else None
            if executable is not None and device_bytes(executable, 0) <= budget:
                return Compiled(executable, self, None, ())
            return self._compile_within(budget, compiler_options)

        try:
            return within(self.budget)
        except MemoryBudgetError as error:
            least = _least(error, within)
            raise error.asked_for(self.budget, least, self.left_alone) from None

    def placed(self, hosting: Hosting, *, scheduled: bool = True) -> Program:
        """Lowers the program with what `hosting` says on the host.

        Args:
          scheduled: prepare loops for memplan's schedule; otherwise each iteration brings
            what it reads, and XLA does with that what it does by itself.
        """
        rings = self._streams.rings(hosting if scheduled else replace(hosting, depth=0))
        # XLA:GPU copies a slice by DMA where it sees that the loop's counter says which one.
        tied = self._target.platform != "gpu"
        run = streamed(
            self._streams.jaxpr,
            rings,
            whole=hosting.arguments - self._streams.stacks.keys(),
            donated=self._streams.donated,
            tied=tied,
        )

        def placed(*args: Any, **kwargs: Any) -> Any:
            return jax.tree.unflatten(self.out_tree, run(*jax.tree.leaves((args, kwargs))))

        placed.__name__ = placed.__qualname__ = getattr(self._function.fun, "__name__", "fun")
        if self._function.signature is not None:
            placed.__signature__ = self._function.signature
        args, kwargs = jax.tree.unflatten(self.in_tree, self._structs(hosting.arguments))
        donated_args, donated_kwargs = self._traced.args_info
        given = {k: v for k, v in self._function.jit_options.items() if k in _PASSED_ON}
        options = self._jit_compiler_options
        if rings and scheduled:
            options |= self.ring_options
        jitted = jax.jit(
            placed,
            donate_argnums=tuple(n for n, a in enumerate(donated_args) if _donated(a)),
            donate_argnames=tuple(k for k, a in donated_kwargs.items() if _donated(a)),
            compiler_options=options,
            **given,
        )
        program = self._target.lower(jitted.trace(*args, **kwargs), options)
        # XLA would copy a whole stack on the host to make an argument and a result one.
        numbers = program.arguments.parameters
        donated = hosting.arguments & self._streams.donated & frozenset(numbers)
        xla.keep_arguments(program.stablehlo, [numbers[n] for n in donated])
        return program

    @property
    def ring_options(self) -> Mapping[str, str]:
        """The XLA options that a program with streamed loops is compiled with."""
        return _RING_OPTIONS.get(self._target.platform, {})

    @property
    def fun_name(self) -> str:
        """What the function is called."""
        return self._traced.fun_name

    @property
    def absent(self) -> Topology | None:
        """The devices that it is lowered for, when they are not here."""
        return self._target.absent

    def sharding(self, n: int) -> Any:
        """Where the program has the flat argument `n`, before placement."""
        return self._program.arguments.shardings.get(n) or self._program.replicated()

    # --- from here on: how ----------------------------------------------------------------

    @property
    def _jit_compiler_options(self) -> dict[str, Any]:
        return dict(self._function.jit_options.get("compiler_options") or {})

    @functools.cached_property
    def _leaves(self) -> list[tuple[str, Any]]:
        """The flat arguments as (path, ArgInfo)."""
        flat = jax.tree_util.tree_flatten_with_path(self._traced.args_info)[0]
        signature = self._function.signature
        names = list(signature.parameters) if signature is not None else []
        return [(_path(path, names), info) for path, info in flat]

    @property
    def _paths(self) -> list[str]:
        return [path for path, _ in self._leaves]

    @functools.cached_property
    def _sizes(self) -> list[int]:
        """Bytes of each flat argument on one device; 0 where the program does not use it."""
        found = self._program.arguments
        return [
            _shard_bytes(info, found.shardings.get(n)) if n in found.parameters else 0
            for n, (_, info) in enumerate(self._leaves)
        ]

    @property
    def _arguments_bytes(self) -> int:
        """With more than the budget, compiling without a plan is wasted."""
        return sum(self._sizes)

    @property
    def _smallest(self) -> int:
        """Arrays of fewer bytes stay on the device."""
        return min(int(sum(self._sizes) * _SMALLEST_SHARE), _SMALLEST_BYTES)

    @property
    def _returns_to_host(self) -> bool:
        asked = jax.tree.leaves(self._function.jit_options.get("out_shardings"))
        return any(getattr(s, "memory_kind", None) == HOST_MEMORY_KIND for s in asked)

    def _choose_movable(self) -> frozenset[int]:
        """The arguments that the user and their kind allow on the host."""
        patterns = self._function.options.offload
        paths = self._paths
        unmatched = [p for p in patterns or () if not fnmatch.filter(paths, p)]
        if unmatched:
            raise OffloadPatternError(unmatched, paths)
        return frozenset(
            n
            for n, ((path, info), size) in enumerate(zip(self._leaves, self._sizes, strict=True))
            if size > self._smallest
            and not jnp.issubdtype(info.dtype, jax.dtypes.extended)
            and (patterns is None or any(fnmatch.fnmatch(path, p) for p in patterns))
        )

    @property
    def left_alone(self) -> Mapping[str, str]:
        """The arguments, by path, that a loop takes apart but that cannot be streamed, each
        with the reason."""
        return {self._paths[n]: reason for n, reason in self._streams.left_alone.items()}

    @functools.cached_property
    def _streams(self) -> Streams:
        """The program's stacks."""
        found = self._program.arguments.shardings
        specs = {n: s.spec for n, s in found.items() if isinstance(s, NamedSharding)}
        return Streams(
            self._traced.jaxpr,
            self._may_move,
            [n for n, (_, info) in enumerate(self._leaves) if info.donated],
            sharded=[n for n, spec in specs.items() if len(spec) and spec[0] is not None],
            tiled=self._target.platform == "tpu",
        )

    @functools.cached_property
    def _candidates(self) -> frozenset[int]:
        """The arguments that may live on the host. A donated one may where a stack takes its
        place: the others are written while they would be away. XLA:CPU has one memory, whose
        bytes it counts as the device's where a program writes to it."""
        on_cpu = self._target.platform == "cpu"
        replaced = frozenset(self._streams.replaced_by if not on_cpu else ())
        return self._may_move - (self._streams.donated - replaced)

    def _structs(self, hosted: frozenset[int]) -> list[jax.ShapeDtypeStruct]:
        """The flat arguments, bound as jax resolved them, or to the host."""
        shardings = dict(self._program.arguments.shardings)
        shardings |= {n: self.sharding(n).with_memory_kind(HOST_MEMORY_KIND) for n in hosted}
        return [
            jax.ShapeDtypeStruct(
                info.shape, info.dtype, sharding=shardings.get(n), weak_type=info._aval.weak_type
            )
            for n, (_, info) in enumerate(self._leaves)
        ]

    def unplanned(self, compiler_options: Mapping[str, Any] | None = None) -> Executable:
        """Compiles the program as ``jax.jit`` does: what a plan is to be compared with.

        Raises:
          jax.errors.JaxRuntimeError: when XLA finds that it does not fit the device.
        """
        return self._program.compiler(compiler_options)()

    def _compile_unplanned(self, options: Mapping[str, Any] | None) -> Executable | None:
        """The same; None when it does not fit."""
        try:
            return self.unplanned(options)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return None

    def _compile_within(self, budget: int, options: Mapping[str, Any] | None) -> Compiled:
        """Plans and compiles until XLA reports no more than `budget` bytes."""
        overhead = 0
        reported: list[int] = []
        rounds: list[str] = []
        mismatch: MemplanError | None = None
        for _ in range(_MAX_ROUNDS):
            look = self._look_below(budget, overhead, options)
            try:
                executable = self._compile_planned(look, options)
            except (PlanMismatchError, LoopMismatchError) as error:
                # XLA:TPU was seen to schedule a module for 256 chips in two ways.
                self._captured.clear()
                rounds.append("XLA scheduled the module otherwise than before")
                mismatch = error
                continue
            total = device_bytes(executable, look.hosted_on_cpu)
            predicted = look.plan.prediction.total_bytes
            rounds.append(f"planned {predicted} bytes, XLA reports {total}")
            if total <= budget:
                return Compiled(executable, self, look, tuple(rounds))
            reported.append(total)
            overhead = max(overhead, total - predicted)
        if mismatch is not None and not reported:
            raise mismatch
        raise self._shortage().asked_for(budget, min(reported))

    def _look_below(self, budget: int, overhead: int, options: Mapping[str, Any] | None) -> _Look:
        """Plans for a budget that XLA was seen to exceed by `overhead`.

        Another plan breaks up XLA's arena in another way: where the budget has room for it,
        twice of what was seen is left free, so that one more compilation is enough.
        """
        try:
            return self._look(budget - 2 * overhead, options)
        except MemoryBudgetError as error:
            if not overhead:
                raise error.asked_for(budget, error.least) from None
        try:
            return self._look(budget - overhead, options)
        except MemoryBudgetError as error:
            raise error.asked_for(budget, error.least + overhead) from None

    def _shortage(self) -> MemoryBudgetError:
        """Where memory is shortest: what the planner says of a budget that nothing keeps."""
        try:
            self._look(1, None)
        except MemoryBudgetError as error:
            return error
        raise AssertionError("a plan in one byte")

    def _compile_planned(self, look: _Look, options: Mapping[str, Any] | None) -> Executable:
        def transform(module: Module) -> Module:
            return pipeline.rewrite_module(module, look.plan, self._target.machine)

        if self._target.platform == "cpu":
            # Before compiling: an executable that is loaded from a cache has the calls in it.
            import custom_calls

            custom_calls.register()
        return inject.compile_with(
            self._target.platform,
            look.program.stablehlo,
            f"{look.plan.fingerprint}-{__version__}",
            transform,
            look.program.compiler(options),
        )

    def _look(self, budget: int, options: Mapping[str, Any] | None) -> _Look:
        if self._program.arguments.ordered_effects:
            raise OrderedEffectsError(self._traced.fun_name)
        if self._target.platform == "cpu" and self._returns_to_host:
            raise HostResultsError(self._traced.fun_name)
        best: _Look | None = None
        failure: MemoryBudgetError | None = None
        for depth, share in self._rings:
            if best is not None and depth > best.hosting.depth + 1:
                break  # One slot more was no better.
            try:
                look = self._look_with_rings(depth, share, budget, options)
            except MemoryBudgetError as error:
                failure = min(failure or error, error, key=lambda e: e.least)
                continue
            if best is None or look.step_time_s < best.step_time_s * _WORTH_IT:
                best = look
            if best.is_hidden:
                break
        if best is None:
            assert failure is not None
            raise failure
        return best

    @property
    def _rings(self) -> tuple[tuple[int, float], ...]:
        """The rings to try; one of them, if there is nothing to stream."""
        if not self._streams.rings(self._everything(*_RINGS[0])):
            return _RINGS[:1]
        slots = self._function.options.slots
        return tuple(ring for ring in _RINGS if slots is None or ring[0] <= slots)

    def _everything(self, depth: int, share: float) -> Hosting:
        """All that may live on the host does."""
        on_cpu = self._target.platform == "cpu"
        residuals = frozenset[Result]() if on_cpu else self._streams.residuals(self._smallest)
        return Hosting(self._candidates, residuals, depth, share)

    def _look_with_rings(
        self, depth: int, share: float, budget: int, options: Mapping[str, Any] | None
    ) -> _Look:
        """Plans with such rings, and as many stacks on the device as are worth it.

        What a stack on the device takes is known beforehand but for packing, so that it may be
        more than there is room for.
        """
        everything = self._everything(depth, share)
        program, module = self._capture(everything, options)
        if not self._streams.rings(everything):
            return self._look_at(everything, budget, options)
        room = budget - self._least(module, program, everything)
        seconds = ring_seconds(module, self._target.machine)
        while True:
            kept = choose_kept(
                self._streams,
                everything,
                seconds,
                self._target.machine,
                room,
                self._stack_size,
            )
            try:
                return self._look_at(everything.without(kept), budget, options)
            except MemoryBudgetError as error:
                if not kept:
                    raise
                room -= max(error.least - budget, room // 8)

    def _look_at(self, hosting: Hosting, budget: int, options: Mapping[str, Any] | None) -> _Look:
        """Plans with these stacks on the host; of the other arguments as many as must be."""
        machine, slots = self._target.machine, self._function.options.slots
        program, module = self._capture(hosting, options)
        numbers = program.arguments.parameters
        host_parameters, sliced = self._on_host(program, hosting)
        stay = pipeline.choose_stay(
            module,
            machine,
            budget,
            host_parameters=host_parameters,
            sliced_parameters=sliced,
            slots=slots,
        )
        hosting = hosting.without([n for n in hosting.arguments if numbers[n] in stay])
        program, module = self._capture(hosting, options)
        host_parameters, sliced = self._on_host(program, hosting)
        plan = pipeline.plan_module(
            module,
            machine,
            budget,
            host_parameters=host_parameters,
            sliced_parameters=sliced,
            slots=slots,
            labels={p.name: p.op_name for p in module.entry.parameters if p.op_name},
        )
        plan = replace(
            plan,
            streams=record_streams(self._streams, hosting, self._paths, self._stack_size),
            left_alone=self.left_alone,
            compiler_options=self.ring_options if self._streams.rings(hosting) else {},
        )
        held = {p.parameter: p.size for p in plan.placements}
        on_cpu = self._target.platform == "cpu"
        hosted_on_cpu = sum(held[p] for p in host_parameters + sliced) if on_cpu else 0
        return _Look(program, plan, hosting, hosted_on_cpu)

    def _least(self, module: Module, program: Program, hosting: Hosting) -> int:
        """The least budget of a program so placed."""
        host_parameters, sliced = self._on_host(program, hosting)
        return pipeline.least_budget(
            module,
            self._target.machine,
            host_parameters=host_parameters,
            sliced_parameters=sliced,
            slots=self._function.options.slots,
        )

    def _on_host(self, program: Program, hosting: Hosting) -> tuple[list[int], list[int]]:
        """Parameter numbers of the arguments on the host that come to the device whole, and
        of those that come by the slice."""
        numbers = program.arguments.parameters
        hosted = sorted(n for n in hosting.arguments if n in numbers)
        stacks = self._streams.stacks
        return (
            [numbers[n] for n in hosted if n not in stacks],
            [numbers[n] for n in hosted if n in stacks],
        )

    def _stack_size(self, source: Source) -> int:
        """Bytes of a stack on one device; of one that the program makes, estimated as evenly
        divided."""
        if isinstance(source, int):
            return self._sizes[source]
        return stack_bytes(self._streams.stacks[source]) // self._program.arguments.device_count

    def _capture(
        self, hosting: Hosting, options: Mapping[str, Any] | None
    ) -> tuple[Program, Module]:
        """The program so placed, and its module as XLA schedules it."""
        key = hosting, tuple((options or {}).items())
        if key not in self._captured:
            program = self.placed(hosting)
            module = inject.capture(
                self._target.platform, program.stablehlo, program.compiler(options)
            )
            self._captured[key] = program, module
        return self._captured[key]


@dataclass(frozen=True)
class _Look:
    """A placed program and the plan for the module that XLA scheduled for it.

    Attributes:
      hosting: what lives on the host.
      hosted_on_cpu: their bytes on CPU, where XLA counts them with the device's; else 0.
    """

    program: Program
    plan: Plan
    hosting: Hosting
    hosted_on_cpu: int

    @property
    def step_time_s(self) -> float:
        return self.plan.prediction.step_time_s

    @property
    def is_hidden(self) -> bool:
        """Whether compute hides all transfers, as far as counts."""
        return self.step_time_s * _WORTH_IT <= self.plan.prediction.compute_s


class Compiled:
    """A compiled program within the budget.

    Attributes:
      plan: what it follows; None where XLA's own program keeps to the budget.
      rounds: what each compilation was planned for and what XLA reported.
      followed: what the checker found of the plan in the executable; None without a plan.
    """

    def __init__(
        self, executable: Executable, lowered: Lowered, look: _Look | None, rounds: tuple[str, ...]
    ) -> None:
        self._executable = executable
        self._lowered = lowered
        self.hosting = look.hosting if look is not None else Hosting(frozenset())
        self.plan = look.plan if look is not None else None
        self.hosted_on_cpu = look.hosted_on_cpu if look is not None else 0
        self.rounds = rounds
        self.followed = verify.verify_executable(look.plan, self.module) if look else None

    def __repr__(self) -> str:
        used = f"{format_bytes(self.device_bytes)} of {format_bytes(self._lowered.budget)}"
        said = f"{self._lowered.fun_name}: {used} on the device"
        if self.plan is None:
            return f"<Compiled {said}; no plan was needed>"
        said += f"; {format_bytes(self.plan.moved_bytes)} moved in a step"
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
        return self.plan is None and self._lowered.absent is None

    @functools.cached_property
    def module(self) -> Module:
        """The final, scheduled module."""
        return read_module(self._executable)

    @property
    def device_bytes(self) -> int:
        """Arguments + outputs + temporaries − aliased bytes on the device, as XLA reports."""
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

    def unscheduled(self) -> Executable:
        """Compiles the same program, its arguments in the same tiers, as XLA schedules it by
        itself: what the plan is to be compared with."""
        return self._lowered.placed(self.hosting, scheduled=False).compiler(None)()

    def displaced(self, leaves: Sequence[Any]) -> list[int]:
        """Which flat arguments are not in the tier that the plan has for them."""
        return [
            n
            for n, leaf in enumerate(leaves)
            if (memory_kind(leaf) == HOST_MEMORY_KIND) != (n in self.hosting.arguments)
        ]

    def move(self, leaves: Sequence[Any]) -> list[Any]:
        """Moves flat arguments to their tiers; those that are there stay."""
        moved = list(leaves)
        for n in self.displaced(leaves):
            kind = HOST_MEMORY_KIND if n in self.hosting.arguments else DEVICE_MEMORY_KIND
            moved[n] = jax.device_put(leaves[n], self._sharding(n, leaves[n], kind))
        return moved

    def _sharding(self, n: int, leaf: Any, kind: str) -> Any:
        """Where an argument is bound to, else where the program has it, in another memory."""
        if isinstance(leaf, jax.Array) and leaf.committed:
            return leaf.sharding.with_memory_kind(kind)
        return self._lowered.sharding(n).with_memory_kind(kind)

    @functools.cached_property
    def _consumed(self) -> tuple[int, ...]:
        """The flat arguments that are donated and on the host. XLA is not told so (see
        `Lowered.placed`): they are deleted, or the host would hold them beside their results."""
        infos = jax.tree.leaves(self.args_info)
        return tuple(n for n in sorted(self.hosting.arguments) if infos[n].donated)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program. Static arguments are left out, as in jax.

        Raises:
          NotExecutableError: when it was compiled for devices that are not here.
        """
        if self._lowered.absent is not None:
            raise NotExecutableError(self._lowered.absent.name)
        leaves, tree = jax.tree.flatten((args, kwargs))
        away = self.displaced(leaves) if tree == self.in_tree else []
        if away:
            warnings.warn(
                f"{len(away)} arguments were moved to the tier that the plan has for them, for "
                "this call only; move them once with place(): args = step.place(*args)",
                PlacementWarning,
                skip_file_prefixes=(os.path.dirname(__file__),),
            )
            args, kwargs = jax.tree.unflatten(tree, self.move(leaves))
        run: Any = self._executable
        results = run(*args, **kwargs)
        for n in self._consumed:
            if isinstance(leaves[n], jax.Array):
                leaves[n].delete()
        return results


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


def _donated(info: Any) -> bool:
    return any(leaf.donated for leaf in jax.tree.leaves(info))


def _path(path: Any, names: Sequence[str]) -> str:
    """``params.layers.3.mlp.gate`` of an argument.

    The outermost key tells positional from keyword arguments, the next one which it is.
    """
    kind, argument, *rest = path
    name = jax.tree_util.keystr((argument,), simple=True)
    if kind.idx == 0 and argument.idx < len(names):
        name = str(names[argument.idx])
    below = jax.tree_util.keystr(tuple(rest), simple=True, separator=".")
    return f"{name}.{below}" if below else name


def _shard_bytes(info: Any, sharding: Any) -> int:
    shape = info.shape if sharding is None else sharding.shard_shape(info.shape)
    if jnp.issubdtype(info.dtype, jax.dtypes.extended):
        return math.prod(shape) * info.dtype.itemsize
    return -(-math.prod(shape) * jax.dtypes.itemsize_bits(info.dtype) // 8)  # int4: half a byte.
