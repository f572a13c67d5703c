"""``memplan.jit``: ``jax.jit`` within a memory budget.

    step = memplan.jit(f, hbm="4GiB")
      │ trace                     jax's own, once
      ▼
    Traced ── lower ──► Lowered ── plan ──► Plan          nothing is compiled or run
                           │
                           └── compile ──► Compiled       XLA's executable, which follows it

Planning takes two looks at the scheduled module that XLA is about to compile: the first
with every weight on the host, to choose which of them stay on the device; the second, so
placed, to plan each transfer. A look ends XLA's work at its scheduler, early in the
compilation. Then the module is compiled with the plan written into it, and what XLA
reports of the executable is compared with the budget.
"""

from __future__ import annotations

import fnmatch
import functools
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from hlo_passes import inject, pipeline, verify, xla
from hlo_passes.budget import parse_bytes
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.ir import Module
from hlo_passes.machine import Machine
from hlo_passes.plan import Plan
from hlo_passes.reader import read_module
from memplan.executable import Executable, Program, Target, device_bytes, find_target
from memplan.signature import (
    HOST_MEMORY_KIND,
    StaticArguments,
    bound_sharding,
    dynamic_signature,
    leaf_key,
    memory_kind,
    on_device,
)
from memplan.topology import Topology

# XLA's later passes may end above what was planned; then the difference is taken off.
_MAX_ROUNDS = 3

# Weights below this share of all arguments stay on the device: moving them saves next to
# nothing and costs a transfer's latency each.
_SMALLEST_SHARE = 1 / 4096


class PlacementWarning(UserWarning):
    """Arguments had to be moved to the tier that the plan has for them."""


@dataclass(frozen=True)
class Options:
    """What `jit` takes beyond ``jax.jit``; shared by the API and the command line.

    Attributes:
      budget: device bytes; None for all that the machine has.
      machine: see `executable.find_target`.
      offload: glob patterns of the argument paths (``"params.layers.*"``) that may live on
        the host; None for every argument that is not donated.
      slots: at most so many streamed weights on the device at once; None for no limit.
    """

    budget: int | None = None
    machine: str | Machine | Topology | None = None
    offload: tuple[str, ...] | None = None
    slots: int | None = None


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    hbm: str | int | None = None,
    machine: str | Machine | Topology | None = None,
    offload: str | Iterable[str] | None = None,
    slots: int | None = None,
    **jit_options: Any,
) -> Any:
    """Compiles `fun` so that it keeps to `hbm` bytes of device memory.

    Args:
      fun: what ``jax.jit`` takes; without it, a decorator is returned.
      hbm: the budget, ``"12GiB"`` or bytes: arguments + outputs + temporaries − aliased
        bytes on the device, as XLA reports them in ``memory_analysis()`` of the final
        executable, are at most this. None for all that the machine has.
      machine: what it runs on: a machine name (``"v5e"``), a `Machine`, or a `topology` of
        hardware that is not here. None for ``jax.devices()[0]``.
      offload: glob patterns of argument paths that may live on the host, for example
        ``"params.*"``; by default every argument that is not donated.
      slots: at most so many streamed weights on the device at once.
      **jit_options: everything else that ``jax.jit`` takes, with the same meaning.

    Returns:
      A function with the stages of ``jax.jit`` and ``plan`` and ``place`` besides. Where
      the budget is kept without a plan it is what ``jax.jit`` compiles.

    Raises:
      BudgetSyntaxError: when `hbm` cannot be read.
      UnknownMachineError: when `machine` is in no machine file.

    >>> import jax.numpy as jnp
    >>> step = jit(lambda w, x: x @ w, hbm="1GiB")
    >>> float(step(jnp.eye(2), jnp.ones(2)).sum())
    2.0
    """
    options = Options(
        None if hbm is None else parse_bytes(hbm),
        machine,
        (offload,) if isinstance(offload, str) else None if offload is None else tuple(offload),
        slots,
    )
    if fun is None:
        return functools.partial(_PlannedFunction, options=options, jit_options=jit_options)
    return _PlannedFunction(fun, options=options, jit_options=jit_options)


class _PlannedFunction:
    """What `jit` returns."""

    def __init__(
        self, fun: Callable[..., Any], *, options: Options, jit_options: Mapping[str, Any]
    ) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._options = options
        self._jit_options = dict(jit_options)
        self._jitted = jax.jit(fun, **jit_options)
        self._static = StaticArguments.of(
            fun, jit_options.get("static_argnums"), jit_options.get("static_argnames")
        )
        self._compiled: dict[Any, Compiled] = {}
        self._lock = threading.Lock()
        if isinstance(options.machine, str):
            find_target(options.machine)  # A name that does not exist is an error here.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dynamic = self._static.dynamic(args, kwargs)
        leaves, tree = jax.tree.flatten(dynamic)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return self._jitted(*args, **kwargs)  # Inside grad, vmap, another jit: inline.
        compiled = self._find(args, kwargs, leaves, tree)
        return compiled(*dynamic[0], **dynamic[1])

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """As ``jax.jit(...).trace``."""
        target = find_target(self._options.machine)
        seen = functools.partial(_for_target, target)
        args, kwargs = self._static.map_dynamic(lambda a: jax.tree.map(seen, a), args, kwargs)
        dynamic = self._static.dynamic(args, kwargs)
        shardings = [
            s if given is None else given
            for s, given in zip(
                map(bound_sharding, jax.tree.leaves(dynamic)),
                self._given_shardings(dynamic),
                strict=True,
            )
        ]
        traced = self._jitted.trace(*args, **kwargs)
        return Traced(traced, self, target, tuple(shardings))

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """As ``jax.jit(...).lower``; ``.compile()`` keeps to the budget."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As ``jax.jit(...).eval_shape``."""
        return self._jitted.eval_shape(*args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Returns the plan for these arguments (arrays or ``jax.ShapeDtypeStruct``) without
        running anything.

        Raises:
          MemoryBudgetError: when no plan keeps to the budget.
        """
        return self.lower(*args, **kwargs).plan()

    def place(self, *args: Any, **kwargs: Any) -> Any:
        """Moves real arrays to the tiers of the plan.

        Returns:
          The positional arguments as a tuple; with keyword arguments, a pair of that tuple
          and their dict. Static arguments are returned as they are.
        """
        leaves, tree = jax.tree.flatten(self._static.dynamic(args, kwargs))
        compiled = self._find(args, kwargs, leaves, tree)
        placed_args, placed_kwargs = jax.tree.unflatten(tree, compiled.move(leaves))
        positions = iter(placed_args)
        full = tuple(
            a if n in self._static.argnums else next(positions) for n, a in enumerate(args)
        )
        return (full, {**kwargs, **placed_kwargs}) if kwargs else full

    def clear_cache(self) -> None:
        """Forgets every compiled program."""
        with self._lock:
            self._compiled.clear()
        self._jitted.clear_cache()

    def _find(self, args: Any, kwargs: Any, leaves: Sequence[Any], tree: Any) -> Compiled:
        key = (self._static.key(args, kwargs), tree, tuple(map(leaf_key, leaves)))
        with self._lock:
            found = self._compiled.get(key)
        if found is None:
            found = self.lower(*args, **kwargs).compile()
            with self._lock:
                found = self._compiled.setdefault(key, found)
        return found

    def _given_shardings(self, dynamic: Any) -> list[Any]:
        """``in_shardings`` as a flat list; None where the user gave none."""
        leaves = jax.tree.leaves(dynamic)
        given = self._jit_options.get("in_shardings")
        if given is None:
            return [None] * len(leaves)
        args = dynamic[0]
        prefix = given if isinstance(given, tuple) else (given,) * len(args)
        broadcast = jax.tree.broadcast(prefix, args, is_leaf=lambda x: x is None)
        flat = jax.tree.leaves(broadcast, is_leaf=lambda x: x is None)
        return flat + [None] * (len(leaves) - len(flat))


@dataclass(frozen=True)
class Traced:
    """A traced function; ``jaxpr``, ``args_info`` and ``out_info`` as in jax."""

    _traced: jax.stages.Traced
    _function: _PlannedFunction
    _target: Target
    _shardings: tuple[Any, ...]

    @property
    def jaxpr(self) -> Any:
        return self._traced.jaxpr

    @property
    def args_info(self) -> Any:
        return self._traced.args_info

    @property
    def out_info(self) -> Any:
        return self._traced.out_info

    def lower(self) -> Lowered:
        return Lowered(self)


class Lowered:
    """A function lowered for a target; nothing is placed yet."""

    def __init__(self, traced: Traced) -> None:
        self._traced = traced._traced
        self._function = traced._function
        self._target = traced._target
        self._shardings = traced._shardings
        self._options = traced._function._options
        self._everything: Module | None = None

    @functools.cached_property
    def _unplaced(self) -> Program:
        return self._lower(frozenset())

    @property
    def args_info(self) -> Any:
        return self._traced.args_info

    @property
    def out_info(self) -> Any:
        return self._traced.out_info

    def as_text(self, dialect: str | None = None) -> str:
        """The program before placement, as ``jax.stages.Lowered.as_text``."""
        return self._unplaced.lowered.as_text(dialect)

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """The program before placement, as ``jax.stages.Lowered.compiler_ir``."""
        return self._unplaced.lowered.compiler_ir(dialect)

    @property
    def budget(self) -> int:
        """Device bytes that the program may use."""
        return self._options.budget or self._target.machine.device_memory.capacity_bytes

    def plan(self) -> Plan:
        """Plans for the budget as it stands, without compiling further than XLA's scheduler.

        Raises:
          MemoryBudgetError: when no plan keeps to the budget.
        """
        return self._look(self.budget).plan

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Compiled:
        """Compiles the program; within the budget as XLA itself reports it.

        Raises:
          MemoryBudgetError: when no plan keeps to the budget.
        """
        options = compiler_options or self._function._jit_options.get("compiler_options")
        if self._may_fit():
            unplanned = self._compile_unplanned(options)
            if unplanned is not None:
                return unplanned
        overhead = 0
        rounds: list[str] = []
        for _ in range(_MAX_ROUNDS):
            look = self._look(self.budget - overhead)
            executable = self._compile_planned(look, options)
            total = device_bytes(executable, look.hosted_on_cpu)
            predicted = look.plan.prediction.total_bytes
            rounds.append(f"planned {predicted} bytes, XLA reports {total}")
            if total <= self.budget:
                return Compiled(executable, self, look, tuple(rounds))
            overhead = max(overhead, total - predicted)
        raise look.budget_error(self.budget, total)

    # --- from here on: how ----------------------------------------------------------------

    def _leaves(self) -> list[tuple[str, Any]]:
        """The flat arguments as (path, ArgInfo)."""
        flat = jax.tree_util.tree_flatten_with_path(self._traced.args_info)[0]
        signature = dynamic_signature(self._function._fun, self._function._static)
        names = list(signature.parameters) if signature is not None else []
        return [(_path(path, names), info) for path, info in flat]

    def _may_fit(self) -> bool:
        """Whether the arguments alone leave room: else compiling without a plan is wasted."""
        arguments = sum(
            _shard_bytes(info, sharding)
            for (_, info), sharding in zip(self._leaves(), self._shardings, strict=True)
        )
        return arguments <= self.budget

    def _compile_unplanned(self, options: Mapping[str, Any] | None) -> Compiled | None:
        try:
            executable = self._unplaced.compiler(options)()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return None
        if device_bytes(executable, 0) > self.budget:
            return None
        return Compiled(executable, self, None, ())

    def _compile_planned(self, look: _Look, options: Mapping[str, Any] | None) -> Executable:
        def transform(module: Module) -> Module:
            return pipeline.rewrite_module(module, look.plan, self._target.machine)

        if self._target.platform == "cpu":
            import custom_calls

            custom_calls.register()
        return inject.compile_with(
            self._target.platform,
            look.program.stablehlo,
            look.plan.fingerprint,
            transform,
            look.program.compiler(options),
        )

    def _look(self, budget: int) -> _Look:
        machine, platform = self._target.machine, self._target.platform
        candidates = self._candidates()
        program, module = self._capture(candidates)
        numbers = _parameter_numbers(program)
        stay = pipeline.choose_stay(
            module,
            machine,
            budget,
            host_parameters=[numbers[c] for c in candidates if c in numbers],
            slots=self._options.slots,
        )
        hosted = frozenset(c for c in candidates if c in numbers and numbers[c] not in stay)
        if hosted != candidates:
            program, module = self._capture(hosted)
            numbers = _parameter_numbers(program)
        host_parameters = [numbers[h] for h in hosted]
        plan = pipeline.plan_module(
            module,
            machine,
            budget,
            host_parameters=host_parameters,
            slots=self._options.slots,
            labels={p.name: p.op_name for p in module.entry.parameters if p.op_name},
        )
        on_cpu = platform == "cpu"
        held = {p.parameter: p.size for p in plan.placements}
        return _Look(
            program, module, plan, hosted, sum(held[p] for p in host_parameters) if on_cpu else 0
        )

    def _capture(self, hosted: frozenset[int]) -> tuple[Program, Module]:
        program = self._lower(hosted)
        module = inject.capture(
            self._target.platform, program.stablehlo, program.compiler(self._compiler_options)
        )
        return program, module

    @property
    def _compiler_options(self) -> Mapping[str, Any] | None:
        return self._function._jit_options.get("compiler_options")

    def _candidates(self) -> frozenset[int]:
        leaves = self._leaves()
        sizes = [
            _shard_bytes(info, sharding)
            for (_, info), sharding in zip(leaves, self._shardings, strict=True)
        ]
        smallest = sum(sizes) * _SMALLEST_SHARE
        patterns = self._options.offload
        return frozenset(
            n
            for n, ((path, info), size) in enumerate(zip(leaves, sizes, strict=True))
            if not info.donated
            and size > smallest
            and (patterns is None or any(fnmatch.fnmatch(path, p) for p in patterns))
        )

    def _lower(self, hosted: frozenset[int]) -> Program:
        """Lowers the traced program with the arguments `hosted` on the host."""
        run = jaxpr_as_fun(self._traced.jaxpr)
        out_tree = jax.tree.structure(self._traced.out_info)

        def placed(*args: Any, **kwargs: Any) -> Any:
            leaves = jax.tree.leaves((args, kwargs))
            on_device = [
                jax.device_put(leaf, jax.memory.Space.Device) if n in hosted else leaf
                for n, leaf in enumerate(leaves)
            ]
            return jax.tree.unflatten(out_tree, run(*on_device))

        fun = self._function._fun
        placed.__name__ = getattr(fun, "__name__", "fun")
        placed.__qualname__ = placed.__name__
        signature = dynamic_signature(fun, self._function._static)
        if signature is not None:
            placed.__signature__ = signature
        infos, tree = jax.tree.flatten(self._traced.args_info)
        structs = [
            self._struct(info, sharding, n in hosted)
            for n, (info, sharding) in enumerate(zip(infos, self._shardings, strict=True))
        ]
        args, kwargs = jax.tree.unflatten(tree, structs)
        donated_args, donated_kwargs = self._traced.args_info
        given = self._function._jit_options
        passed_on = ("out_shardings", "keep_unused", "compiler_options", "inline")
        jitted = jax.jit(
            placed,
            donate_argnums=tuple(n for n, a in enumerate(donated_args) if _donated(a)),
            donate_argnames=tuple(k for k, a in donated_kwargs.items() if _donated(a)),
            **{k: given[k] for k in passed_on if k in given},
        )
        return self._target.lower(jitted.trace(*args, **kwargs))

    def _struct(self, info: Any, sharding: Any, on_host: bool) -> jax.ShapeDtypeStruct:
        if on_host:
            base = sharding if sharding is not None else self._target.default_sharding()
            sharding = base.with_memory_kind(HOST_MEMORY_KIND)
        return jax.ShapeDtypeStruct(
            info.shape, info.dtype, sharding=sharding, weak_type=info._aval.weak_type
        )


@dataclass(frozen=True)
class _Look:
    """A placed program, the module that XLA scheduled for it, and the plan for that."""

    program: Program
    module: Module
    plan: Plan
    hosted: frozenset[int]
    hosted_on_cpu: int

    def budget_error(self, budget: int, found: int) -> MemoryBudgetError:
        peak = self.plan.prediction
        return MemoryBudgetError(
            budget=budget,
            least=found,
            instruction=self.module.entry.root.name,
            op_name="",
            source_line="",
            largest=(),
            fixed=peak.total_bytes - peak.temp_bytes,
        )


class Compiled:
    """A compiled program within the budget.

    Attributes:
      plan: what it follows; None where XLA's own program keeps to the budget.
      rounds: what each compilation was planned for and what XLA reported.
    """

    def __init__(
        self, executable: Executable, lowered: Lowered, look: _Look | None, rounds: tuple[str, ...]
    ) -> None:
        self._executable = executable
        self._lowered = lowered
        self._hosted = look.hosted if look is not None else frozenset[int]()
        self.plan = look.plan if look is not None else None
        self.hosted_on_cpu = look.hosted_on_cpu if look is not None else 0
        self.rounds = rounds
        if look is not None:
            self.followed = verify.verify_executable(look.plan, self.module)

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

    def move(self, leaves: Sequence[Any]) -> list[Any]:
        """Moves flat arguments to their tiers; those that are there stay."""
        return [self._moved(n, leaf) for n, leaf in enumerate(leaves)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program. Static arguments are left out, as in jax."""
        if not self._hosted:
            return self._executable(*args, **kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        away = [n for n in self._hosted if memory_kind(leaves[n]) != HOST_MEMORY_KIND]
        if away:
            warnings.warn(
                f"{len(away)} arguments were moved to the host for this call; move them once "
                "with place(): args = step.place(*args)",
                PlacementWarning,
                stacklevel=3,
            )
            leaves = self.move(leaves)
            args, kwargs = jax.tree.unflatten(tree, leaves)
        return self._executable(*args, **kwargs)

    def _moved(self, n: int, leaf: Any) -> Any:
        if n not in self._hosted or memory_kind(leaf) == HOST_MEMORY_KIND:
            return leaf
        base = bound_sharding(leaf) or self._lowered._target.default_sharding()
        return jax.device_put(leaf, base.with_memory_kind(HOST_MEMORY_KIND))


def _for_target(target: Target, leaf: Any) -> Any:
    """An argument as the traced function sees it; for absent hardware, a shape on it."""
    if target.topology is None:
        return on_device(leaf)
    sharding = None if isinstance(leaf, jax.Array) else bound_sharding(leaf)
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        weak_type=aval.weak_type,
        sharding=sharding or target.default_sharding(),
    )


def _donated(info: Any) -> bool:
    return any(leaf.donated for leaf in jax.tree.leaves(info))


def _path(path: Any, names: Sequence[str]) -> str:
    """``params.layers.3.mlp.gate`` of an argument.

    The outermost key tells positional from keyword arguments, the next one which it is.
    """
    kind, argument, *rest = path
    name = jax.tree_util.keystr((argument,), simple=True)
    if kind.idx == 0 and argument.idx < len(names):
        name = names[argument.idx]
    below = jax.tree_util.keystr(tuple(rest), simple=True, separator=".")
    return f"{name}.{below}" if below else name


def _shard_bytes(info: Any, sharding: Any) -> int:
    shape = info.shape if sharding is None else sharding.shard_shape(info.shape)
    size = info.dtype.itemsize
    for d in shape:
        size *= d
    return size


def _parameter_numbers(program: Program) -> dict[int, int]:
    """Flat argument index to entry parameter number; jax drops unused arguments."""
    return {flat: n for n, flat in enumerate(xla.kept_arguments(program.lowered))}
