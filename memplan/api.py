"""``memplan.jit``: ``jax.jit`` within a memory budget.

step = memplan.jit(f, hbm="4GiB")
  │ trace                     jax's own, once
  ▼
Traced ── lower ──► Lowered ── plan ──► Plan          nothing is compiled or run
                       │
                       └── compile ──► Compiled       XLA's executable, which follows it
"""

from __future__ import annotations

import functools
import os
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
from jax.experimental.layout import Format

from hlo_passes import xla
from hlo_passes.budget import parse_bytes, whole_number
from hlo_passes.errors import (
    JitterError,
    LayoutsError,
    OffloadSyntaxError,
    PlanFormatError,
    SlotsError,
    SplitError,
    StateFolderError,
    StepRuntimeError,
    TiersError,
)
from hlo_passes.hardware.machine import Machine
from hlo_passes.plan import Plan
from hlo_passes.units import format_bytes
from memplan import disk
from memplan.buckets.buckets import Buckets
from memplan.buckets.errors import BucketsError
from memplan.buckets.function import BucketedFunction
from memplan.compiled import Compiled, PlacementWarning, delete
from memplan.executable import Target, check_machine, find_target
from memplan.function import Function, Options
from memplan.inlined import BudgetWarning, to_device, warn_of_dropped_budget, within_budget
from memplan.layouts import Relaid
from memplan.objectives import LATENCY, Objective
from memplan.out_of_memory import is_exhausted, note
from memplan.profiles import Profile
from memplan.progress import Progress
from memplan.running import StepRuntime
from memplan.signature import StaticArguments, in_device_memory, leaf_key
from memplan.stages import Lowered, Traced
from memplan.storing import storing
from memplan.topologies import Topology

__all__ = ["BudgetWarning", "Compiled", "Lowered", "PlacementWarning", "Traced", "jit"]


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    hbm: str | int | None = None,
    machine: str | Machine | Topology | None = None,
    offload: str | Iterable[str] | None = None,
    slots: int | None = None,
    split: bool | str | Iterable[str] = True,
    layouts: Relaid | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    tiers: Sequence[str] = ("device", "host"),
    buckets: Mapping[str, int | Sequence[int]] | None = None,
    dims: Mapping[str, str] | None = None,
    progress: Callable[[Progress], None] | None = None,
    objective: Objective | str | None = None,
    jitter: float | Literal["measured"] | None = None,
    **jit_options: Any,
) -> Any:
    """Compiles `fun` so that it keeps to `hbm` bytes of device memory.

    Args:
      fun: what ``jax.jit`` takes; without it, a decorator is returned.
      hbm: the budget, ``"12GiB"`` or bytes: arguments + outputs + temporaries − aliased
        bytes on the device, as XLA reports them in ``memory_analysis()`` of the final
        executable, are at most this, on each device: ``Compiled.device_bytes``, in which on
        CPU, unlike in the report, what is on the host does not count, and everywhere the
        arrays that `fun` closes over do. None for all that the machine has.
      machine: what it runs on: a machine name (``"v5e"``), a `Machine`, or a `topology` of
        hardware that is not here. None for ``jax.devices()[0]``.
      offload: glob patterns of argument paths that may live on the host, for example
        ``"params.layers.*"``, also as jax spells them, ``"params['layers']*"``; by default
        every argument, donated ones where a result takes their place.
      slots: at most so many streamed weights on the device at once.
      split: also run parts of the program in chunks, in a loop, where it does not fit otherwise, or
        only slower: an MLP by rows, attention by queries, a loss by tokens, or all
        of a step by examples. Sums are then added up in another order, in float32 or wider;
        nothing else changes. False for none; or glob patterns of the lines (as
        `Split.line` has them) of which some may be, ``"*/loss.py:*"``.
      layouts: ``"arguments"`` to take arguments (and donated results) in the layouts with which
        a step converts the fewest bytes. Conversions then happen once, in ``place``. ``"all"`` to
        give all results in such, too, and on TPUs to tell XLA in which layouts products are to
        take their operands, where that is predicted to be faster: a search of up to 400
        compilations up to XLA's scheduler, in programs that spend more than 1 % on conversions.
        By default all layouts are those of ``jax.jit``.
      plan: made before for this function and such arguments, or the file that `Plan.save` wrote:
        it is followed, nothing is looked at or searched, and what else is said here of how to
        plan does not count. Where it does not hold, that is an error; with `hbm` beside it, a
        `PlanWarning`, and another plan is made. Without `hbm` its own budget is kept to.
      profile: what the kernels of this program were measured to take (`memplan.profile`), or the
        file that `Profile.save` wrote: plans are made with these seconds in the place of the
        machine's model, which says what others take, times what those took that were measured.
      tiers: where arguments live, the fastest first: ``("device", "disk:FOLDER")`` to have on the
        disk what the plan has not on the device (CPU). `place` writes that into a file of the
        folder, and returns arrays that stay there, as those of `memplan.disk.load` do; calls stream
        them.
      buckets: sizes that are compiled, by a name for each: ``{"batch": [1, 4, 16], "tokens": [128,
        512]}``. A call with any sizes up to these runs the program of the next larger ones, with
        arguments that are padded, and has the results that it would have without. What makes that
        so is derived from the function: sums leave out what is padding, the last token is found
        where it is. Where it is not known how, that is an error which names the line. See
        `BucketedFunction`, and `choose_buckets`.
      dims: with `buckets`, which dimensions of which arguments have these sizes, by patterns of
        their paths: ``{"ids": "batch tokens", "cache.*": "batch _ _ _"}``, where ``_`` is a
        dimension of no bucket.
      progress: called with a `Progress` as each step of a compilation begins: a way to plan, or an
        executable to be made. An exception that it raises ends the compilation, and is what the
        call raises; the next call begins anew.
      objective: what a plan is to be best for: ``"latency"``, the fastest step; ``"energy"``, the
        fewest joules a step, on machines whose files say what these are; ``"traffic"``, the fewest
        bytes moved between the device and the host; or an `Objective`, with bounds. The function
        that is returned has it as an attribute, which may be set at any time: each objective has
        programs of its own. A program that keeps to the budget without a plan is the best for each.
        None for ``"latency"``, or what the plan that is given is best for.
      jitter: by how much each kernel and each transfer varies from step to step, as a standard
        deviation over a mean: 0.05. A plan is then chosen by what 99 of 100 steps take at most, and
        transfers start as early as that is worth it. ``"measured"`` for what the machine's file has
        (`memplan calibrate`). None for steps that do not vary.
      **jit_options: everything else that ``jax.jit`` takes, with the same meaning. What
        ``in_shardings`` have in ``pinned_host`` memory is there in every plan, and so is what
        ``out_shardings`` have there, with the donated argument whose place it takes; in which
        memory the others are, is the plan's to say, and on CPU that of all arguments.

    Returns:
      A function with the stages of ``jax.jit`` and ``plan`` and ``place`` besides. Where
      the budget is kept without a plan it is what ``jax.jit`` compiles.

    Raises:
      BucketsError: when `buckets` or `dims` are something else.
      BudgetSyntaxError: when `hbm` cannot be read.
      JitterError: when `jitter` is something else.
      LayoutsError: when `layouts` is something else, or shardings say layouts as well.
      PlanFormatError: when `plan` cannot be read.
      ProfileFileError: when `profile` cannot be read.
      NoEnergyError: at the first call, when joules count on a machine that does not know them.
      ObjectiveError: when `objective` is something else, or, at the first call, when no plan was
        found that keeps its bounds.
      OffloadSyntaxError: when `offload` is neither a pattern nor several.
      SlotsError: when `slots` is no positive integer.
      SplitError: when `split` is something else, or, at the first call, matches no line.
      TiersError: when `tiers` is something else.
      TypeError: when ``jax.jit`` has no such option, or `progress` cannot be called.
      UnknownMachineError: when `machine` is in no machine file.

    >>> import jax.numpy as jnp
    >>> step = jit(lambda w, x: x @ w, hbm="1GiB")
    >>> float(step(jnp.eye(2), jnp.ones(2)).sum())
    2.0
    """
    if slots is not None:
        found = whole_number(slots)
        if found is None or found < 1:
            raise SlotsError(slots)
        slots = found
    if layouts not in (None, "arguments", "all"):
        raise LayoutsError(f"expected 'arguments', 'all' or None, found {layouts!r}")
    if layouts is not None and _has_formats(jit_options):
        raise LayoutsError(
            "in_shardings or out_shardings have layouts (Format): give shardings alone, or "
            "leave layouts= away"
        )
    options = Options(
        None if hbm is None else parse_bytes(hbm),
        machine,
        _patterns(offload),
        slots,
        _split(split),
        layouts,
        _given(plan),
        profile if profile is None or isinstance(profile, Profile) else Profile.load(profile),
        progress,
        _folder(tiers),
        objective=_objective(objective, plan),
        jitter=_jitter(jitter),
    )
    if progress is not None and not callable(progress):
        raise TypeError(f"progress= is to be called with a Progress, found {progress!r}")
    if not isinstance(machine, Machine | Topology | None):
        check_machine(machine)  # A name that does not exist is an error here.
    make: Callable[[Callable[..., Any]], Any] = functools.partial(
        _PlannedFunction, options=options, jit_options=jit_options
    )
    if buckets is not None or dims is not None:
        make = functools.partial(_bucketed, Buckets.of(buckets, dims), options, jit_options)
    if fun is None:
        jax.jit(**jit_options)  # So is an option that does not exist.
        return make
    return make(fun)


class _PlannedFunction:
    """What `jit` returns."""

    def __init__(
        self, fun: Callable[..., Any], *, options: Options, jit_options: Mapping[str, Any]
    ) -> None:
        traced = dict(jit_options)
        if "in_shardings" in jit_options:
            traced["in_shardings"] = in_device_memory(jit_options["in_shardings"])
        self._jitted: Any = jax.jit(fun, **traced)
        functools.update_wrapper(self, fun)
        self._function = _function(fun, options, jit_options)
        self._dispatches: dict[Objective | None, Any] = {}
        self._programs: dict[Any, Lowered] = {}
        self._lock = threading.Lock()
        self._in_runtime: dict[Objective | None, _PlannedFunction] = {}
        self._warns = options.budget is not None
        # Of arguments of such a tree, which flat ones a program deletes; see `Compiled.consumed`.
        self._consumed: dict[Any, tuple[int, ...]] = {}
        self._dispatch = self._dispatcher()

    @property
    def objective(self) -> Objective:
        """What plans are best for from the next call on. What was compiled for another objective is
        kept, and used again when that is set again. Not that of a plan that was given.

        Raises:
          ObjectiveError: when it is set to what is none.
        """
        return self._function.options.objective or LATENCY

    @objective.setter
    def objective(self, given: Objective | str) -> None:
        options = replace(self._function.options, objective=Objective.of(given))
        with self._lock:
            self._function = replace(self._function, options=options)
            self._dispatch = self._dispatcher()

    def _dispatcher(self) -> Any:
        """Calls programs for the objective that is set now."""
        function = self._function
        key = function.options.objective
        if key not in self._dispatches:
            miss = functools.partial(self._miss, function)
            self._dispatches[key] = xla.dispatcher(self._jitted, miss)
        return self._dispatches[key]

    def __repr__(self) -> str:
        asked = self._function.options.budget
        within = "the memory of its device" if asked is None else format_bytes(asked)
        return f"<memplan.jit of {getattr(self, '__qualname__', '?')} within {within}>"

    def __reduce__(self) -> Any:
        function = self._function
        return _planned, (function.fun, function.options, function.jit_options)

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # As functions do.

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if xla.tracing() or jax.config.jax_disable_jit:
            return self._inlined(args, kwargs)
        try:
            results = self._dispatch(*args, **kwargs)
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # From C++ it is a ValueError.
            if is_exhausted(error):
                compiled = self.lower(*args, **kwargs).compiled
                if compiled is not None:
                    note(error, program=lambda: compiled.module)
            raise
        if self._consumed:
            leaves, tree = jax.tree.flatten(self._function.static.dynamic(args, kwargs))
            delete(leaves[n] for n in self._consumed.get(tree, ()))
        return results

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """As ``jax.jit(...).trace``."""
        return self._traced(self._function, args, kwargs)

    def _traced(self, function: Function, args: Any, kwargs: Any) -> Traced:
        given, static = function.jit_options, function.static
        bound = any(given.get(k) is not None for k in ("in_shardings", "out_shardings"))
        leaves, tree = jax.tree.flatten(static.dynamic(args, kwargs))
        target = self._target(leaves)
        try:
            seen = jax.tree.unflatten(tree, target.arguments_seen(leaves, bound))
        except TypeError:
            self._jitted.trace(*args, **kwargs)  # jax says best what is wrong with an argument.
            raise
        args, kwargs = static.with_dynamic(args, kwargs, seen)
        with target.seen_by_kernels(), within_budget():
            return Traced(self._jitted.trace(*args, **kwargs), function, target)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """As ``jax.jit(...).lower``; ``.compile()`` keeps to the budget.

        What was lowered, planned or compiled for such arguments before is not again.
        """
        return self._program(self._function, args, kwargs)[2]

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As ``jax.jit(...).eval_shape``."""
        with self._target(jax.tree.leaves((args, kwargs))).seen_by_kernels(), within_budget():
            return self._jitted.eval_shape(*args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Returns the plan for these arguments (arrays or ``jax.ShapeDtypeStruct``) without
        running anything.

        Raises:
          MemoryBudgetError: when no plan keeps to the budget.
        """
        return self.lower(*args, **kwargs).plan()

    def place(self, *args: Any, **kwargs: Any) -> Any:
        """Moves real arrays to the tiers of the plan, and into the layouts that were chosen.

        Returns:
          The positional arguments as a tuple; with keyword arguments, a pair of that tuple
          and their dict. Static arguments are returned as they are, and so are arrays that are
          there already: where those are donated, a step deletes the ones that were given here.

        Raises:
          TypeError: when there are shapes among them.
          NotExecutableError: when the devices of `machine` are not here.
        """
        dynamic, leaves, lowered = self._program(self._function, args, kwargs)
        moved = lowered.compile().place(leaves)
        placed = jax.tree.unflatten(jax.tree.structure(dynamic), moved)
        args, kwargs = self._function.static.with_dynamic(args, kwargs, placed)
        return (args, kwargs) if kwargs else args

    def runtime(
        self, *args: Any, log: int = 0, within_s: float | None = None, **kwargs: Any
    ) -> StepRuntime:
        """Opens a runtime that brings what a step streams of these arguments, for many steps.

        Unlike a call of the function, it has one arena for what is streamed, which counts in
        ``hbm``, and reads for the next call during this one. CPU and GPU.

        Args:
          log: of how many reads, the last ones, it keeps when they happened.
          within_s: seconds that a step may take. The disk is measured, and one that cannot bring in
            that time what a step moves is an error here, not a slow step.

        Raises:
          DiskTooSlowError: see `within_s`.
          NotReplayableError: when the plan does more than fetch arguments outside of loops.
          NotExecutableError: when the devices of `machine` are not here.
          OSError: when the arena cannot be allocated, or a file cannot be opened.
        """
        found = storing(self._function, lambda: self.trace(*args, **kwargs), args, kwargs)
        if found is not None and xla.devices()[0].platform != "cpu":
            raise StateFolderError(found[0].folder.path, "is changed by programs of a CPU only")
        stored, function = (None, None) if found is None else found
        if function is not None:
            inner = _planned(function.fun, function.options, function.jit_options)
        else:
            own = self._function
            options = replace(own.options, in_runtime=True)
            inner = self._in_runtime.get(options.objective)
            if inner is None:
                inner = _planned(own.fun, options, own.jit_options)
                self._in_runtime[options.objective] = inner
        _, leaves, lowered = inner._program(inner._function, args, kwargs)
        return StepRuntime(lowered.compile(), leaves, log=log, within_s=within_s, stored=stored)

    def clear_cache(self) -> None:
        """Forgets every compiled program."""
        self._jitted.clear_cache()
        with self._lock:
            self._in_runtime.clear()
            self._programs.clear()
            self._consumed.clear()
            self._dispatches.clear()
            self._dispatch = self._dispatcher()

    def _inlined(self, args: Any, kwargs: Any) -> Any:
        """Runs or traces the function as jax does: where a transformation is under way (grad,
        vmap, another jit), whoever compiles that decides about memory."""
        if self._warns and not jax.config.jax_disable_jit:
            self._warns = not warn_of_dropped_budget(getattr(self, "__name__", "f"))  # Once.
        static = self._function.static
        moved = jax.tree.map(to_device, static.dynamic(args, kwargs))
        args, kwargs = static.with_dynamic(args, kwargs, moved)
        return self._jitted(*args, **kwargs)

    def _miss(self, function: Function, /, *args: Any, **kwargs: Any) -> xla.Called:
        """Calls it with arguments of types that are new, or at places that are."""
        dynamic, leaves, lowered = self._program(function, args, kwargs)
        compiled = lowered.compile()
        if compiled.is_jax_own and not compiled.displaced(leaves):
            return xla.call_jitted(self._jitted, *args, **kwargs)
        if compiled.consumed:
            # What one program of that tree consumes is donated to each of them.
            known = self._consumed.get(compiled.in_tree, ())
            self._consumed[compiled.in_tree] = tuple({*known, *compiled.consumed})
        return compiled.call(*dynamic[0], **dynamic[1])

    def _target(self, leaves: Iterable[Any]) -> Target:
        """What arguments like these are compiled for."""
        given = self._function.jit_options
        asked = jax.tree.leaves([given.get(k) for k in ("in_shardings", "out_shardings")])
        leaves = list(leaves)
        shardings = [*asked, *(getattr(leaf, "sharding", None) for leaf in leaves)]
        target, folder = (
            find_target(self._function.options.machine, shardings),
            self._function.options.disk,
        )
        if folder is not None and target.platform == "tpu":
            problem = f"{target.machine.name} streams from its host's memory only"
            raise TiersError(("device", f"disk:{folder}"), problem)
        if self._function.options.in_runtime and target.platform == "tpu":
            raise StepRuntimeError(
                f"{target.machine.name}: runtimes bring what a step streams to CPUs and GPUs only"
            )
        if self._function.options.in_runtime and target.platform != "cpu":
            target = replace(target, machine=replace(target.machine, is_fed_outside=True))
        return disk.fed(target, leaves, all_of_them=folder is not None)

    def _program(
        self, function: Function, args: Any, kwargs: Any
    ) -> tuple[Any, list[Any], Lowered]:
        """Returns the dynamic arguments, the same flat, and the program for them."""
        static, objective = function.static, function.options.objective
        dynamic = static.dynamic(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        try:
            types = map(leaf_key, leaves)
            key = (objective, xla.trace_context(), static.key(args, kwargs), tree, *types)
            hash(key)
        except TypeError:
            self._jitted.trace(*args, **kwargs)  # jax says best what is wrong with an argument.
            raise
        with self._lock:
            lowered = self._programs.get(key)
        if lowered is None:
            lowered = self._traced(function, args, kwargs).lower()
            with self._lock:  # Of threads that lowered it at once, the first one's counts.
                lowered = self._programs.setdefault(key, lowered)
        return dynamic, leaves, lowered


def _planned(
    fun: Callable[..., Any], options: Options, jit_options: Mapping[str, Any]
) -> _PlannedFunction:
    return _PlannedFunction(fun, options=options, jit_options=jit_options)


def _bucketed(
    buckets: Buckets, options: Options, jit_options: Mapping[str, Any], fun: Callable[..., Any]
) -> BucketedFunction:
    if options.plan is not None or options.disk is not None:
        raise BucketsError("buckets= with plan= or a disk in tiers=: not possible yet")

    def plan(fun: Callable[..., Any], hosted: frozenset[str] | None) -> _PlannedFunction:
        return _planned(fun, replace(options, hosted=hosted), jit_options)

    remake = functools.partial(_bucketed, buckets, options, jit_options, fun)
    return BucketedFunction(_function(fun, options, jit_options), buckets, plan, remake)


def _function(
    fun: Callable[..., Any], options: Options, jit_options: Mapping[str, Any]
) -> Function:
    static = StaticArguments.of(
        fun, jit_options.get("static_argnums"), jit_options.get("static_argnames")
    )
    return Function(fun, static, options, dict(jit_options))


def _given(plan: Plan | str | os.PathLike[str] | None) -> Plan | None:
    if plan is None or isinstance(plan, Plan):
        return plan
    try:
        return Plan.load(os.fspath(plan))
    except (OSError, TypeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "found something else"
        raise PlanFormatError(
            "plan=", str(plan), f"a plan, or a file that one was saved to ({problem})"
        ) from None


def _objective(
    objective: Objective | str | None, plan: Plan | str | os.PathLike[str] | None
) -> Objective | None:
    if objective is None:
        return LATENCY if plan is None else None
    return Objective.of(objective)


def _jitter(jitter: object) -> float | Literal["measured"] | None:
    if jitter is None or jitter == "measured":
        return jitter  # pyright: ignore[reportReturnType]
    if isinstance(jitter, bool) or not isinstance(jitter, int | float) or not 0 <= jitter < 10:
        raise JitterError(jitter, "no variation")
    return float(jitter)


def _folder(tiers: Sequence[str]) -> Path | None:
    """The folder that ``tiers=`` name, if they name one."""
    if isinstance(tiers, str) or not all(isinstance(tier, str) for tier in tiers):
        raise TiersError(tiers, "these are no names")
    match tuple(tiers):
        case ("device", "host"):
            return None
        case ("device", name) if name.startswith("disk:") and name != "disk:":
            return Path(name.removeprefix("disk:"))
        case _:
            raise TiersError(tiers, "what is not on the device goes to one place")


def _patterns(offload: str | Iterable[str] | None) -> tuple[str, ...] | None:
    if offload is None:
        return None
    patterns = (offload,) if isinstance(offload, str) else offload
    if not isinstance(patterns, Iterable):
        raise OffloadSyntaxError(offload)
    patterns = tuple(patterns)
    if not all(isinstance(p, str) for p in patterns):
        raise OffloadSyntaxError(offload)
    return patterns


def _split(split: bool | str | Iterable[str]) -> tuple[str, ...]:
    if isinstance(split, bool):
        return ("*",) if split else ()
    patterns = (split,) if isinstance(split, str) else tuple(split)
    if not all(isinstance(p, str) for p in patterns):
        raise SplitError(split, "expected True, False, or patterns of lines.")
    return patterns


def _has_formats(jit_options: Mapping[str, Any]) -> bool:
    given = [jit_options.get("in_shardings"), jit_options.get("out_shardings")]
    return any(isinstance(leaf, Format) for leaf in jax.tree.leaves(given))
