"""A traced function and its flat arguments, and other functions of them lowered in its place.

What memplan makes of a program takes the same arguments, by the same names, and returns the
same tree of results; only where they are, and how they are laid out, is said anew.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.extend.core import Jaxpr
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from hlo_passes import xla
from hlo_passes.equations import programs, says_where
from hlo_passes.errors import JitterError, TopologyError
from hlo_passes.simulator.timeline import Jitter
from memplan.executable import Program, Target
from memplan.function import Function
from memplan.layouts import Layouts, as_jax_has_it, tell_xla
from memplan.objectives import LATENCY, Objective
from memplan.progress import Reporter
from memplan.signature import HOST_MEMORY_KIND, argument_paths, asks_for_host
from memplan.streams.programs import closed_over

# What of jax.jit's options concerns the program that memplan lowers itself; the others act
# when the user's function is traced.
_PASSED_ON = ("out_shardings", "keep_unused")

_NAME = re.compile(r"module @\S+")


class Lowering:
    """A traced function on a target.

    Attributes:
      program: lowered as the user has it.
    """

    def __init__(self, traced: jax.stages.Traced, function: Function, target: Target) -> None:
        self.traced = traced
        self.function = function
        self.target = target
        with warnings.catch_warnings():
            if target.platform != "cpu" and self.returns_to_host:
                # Arguments are on the device here. Where what takes their place is to be on the
                # host, so are they in all that is lowered later, and jax pairs them there.
                warnings.filterwarnings("ignore", "Some donated buffers were not usable")
            self.program = target.lower(traced, self.compiler_options)

    @functools.cached_property
    def in_tree(self) -> Any:
        return jax.tree.structure(self.traced.args_info)

    @functools.cached_property
    def out_tree(self) -> Any:
        return jax.tree.structure(self.traced.out_info)

    @functools.cached_property
    def arguments(self) -> list[Any]:
        """Shape, dtype and donation of each flat argument (``jax.stages.ArgInfo``)."""
        return jax.tree.leaves(self.traced.args_info)

    @functools.cached_property
    def paths(self) -> list[str]:
        """``params.layers.3.mlp.gate`` of each flat argument."""
        return argument_paths(self.function.signature, self.traced.args_info)

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Bytes of each flat argument on one device; 0 where the program does not use it."""
        found = self.program.arguments
        return [
            _shard_bytes(info, found.shardings.get(n)) if n in found.parameters else 0
            for n, info in enumerate(self.arguments)
        ]

    @functools.cached_property
    def closed_bytes(self) -> int:
        """Of the arrays that the function closes over. XLA keeps them on every device, as
        constants of the program, and counts them nowhere."""
        return sum(getattr(a, "nbytes", 0) for a in closed_over(self.traced.jaxpr))

    @functools.cached_property
    def places(self) -> Mapping[int, int]:
        """The results that take the place of donated arguments, by flat numbers: of the same kind
        and divided alike, of several the one whose path ends most like the argument's, else in
        order, as in jax."""
        results = jax.tree_util.tree_flatten_with_path(self.traced.out_info)[0]
        ends = [jax.tree_util.keystr(p, simple=True, separator=".").split(".") for p, _ in results]
        infos = [info for _, info in results]
        alike: list[tuple[int, int, int]] = []
        for n, argument in enumerate(self.arguments):
            path = self.paths[n].split(".")
            alike += (
                (-_common_end(path, ends[k]), n, k)
                for k, result in enumerate(infos)
                if argument.donated
                and (argument.shape, argument.dtype) == (result.shape, result.dtype)
                and self._can_take_place(k, n)
            )
        found: dict[int, int] = {}
        taken: set[int] = set()
        for _, n, k in sorted(alike):
            if n not in found and k not in taken:
                found[n] = k
                taken.add(k)
        return found

    @functools.cached_property
    def report(self) -> Reporter:
        """Tells what its compilation is at."""
        return Reporter(self.traced.fun_name, self.function.options.progress)

    @property
    def objective(self) -> Objective:
        """What plans are to be best for."""
        return self.function.options.objective or LATENCY

    @functools.cached_property
    def jitter(self) -> Jitter | None:
        """By how much kernels and transfers vary from step to step.

        Raises:
          JitterError: when the machine's file is to say it, and does not.
        """
        asked = self.function.options.jitter
        if asked == "measured":
            if self.target.machine.variation is None:
                raise JitterError(asked, f"the file of {self.target.machine.name} has no spreads")
            asked = self.target.machine.variation
        return None if asked is None else Jitter(asked)

    @property
    def budget(self) -> int:
        """Device bytes that the user allows."""
        return self.function.options.budget or self.target.capacity_bytes

    @functools.cached_property
    def signature(self) -> tuple[str, ...]:
        """``params.w: float32[8,512]`` of each flat argument."""
        return tuple(
            f"{path}: {info._aval.str_short()}{' donated' if info.donated else ''}"
            f"{' on the host' if n in self.on_host else ''}"
            for n, (path, info) in enumerate(zip(self.paths, self.arguments, strict=True))
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of the program as jax lowers it, whatever it is called."""
        text = _NAME.sub("module", self.program.lowered.as_text(), count=1)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @functools.cached_property
    def computes_on_host(self) -> bool:
        """Whether the user has something computed on the host: by ``compute_on``, or because
        shardings have arguments there."""
        return bool(self.on_host) or _says_where(self.traced.jaxpr)

    @property
    def arguments_bytes(self) -> int:
        """Of those that may be on the device. With more than the budget, compiling without a plan
        is wasted."""
        return sum(size for n, size in enumerate(self.sizes) if n not in self.on_host)

    @property
    def returns_to_host(self) -> bool:
        asked = jax.tree.leaves(self.function.jit_options.get("out_shardings"))
        return any(map(asks_for_host, asked))

    @functools.cached_property
    def on_host(self) -> frozenset[int]:
        """The flat arguments that no plan has on the device: ``in_shardings`` ask for host memory,
        or ``out_shardings`` do for what takes their place; or that is where another program has
        them. Of what shardings say, nothing on CPU, whose one memory is the device's, but for a
        runtime's; and not where only an array happens to be there: plans put them there, too."""
        if (hosted := self.function.options.hosted) is not None:
            return frozenset(
                n for n in self.program.arguments.parameters if self.paths[n] in hosted
            )
        if self.target.platform == "cpu" and not self.function.options.in_runtime:
            return frozenset()
        places, results = self.places, self._asked_of_results
        asked = {n for n, s in enumerate(self._asked_of_arguments) if asks_for_host(s)}
        asked |= {n for n, k in places.items() if asks_for_host(results[k])}
        return frozenset(
            n
            for n in asked & self.program.arguments.parameters.keys()
            if not jnp.issubdtype(self.arguments[n].dtype, jax.dtypes.extended)
        )

    def sharding(self, n: int) -> Any:
        """Where the program has the flat argument `n`, before placement."""
        found = self.program.arguments.shardings.get(n)
        if found is None or isinstance(found, SingleDeviceSharding):
            return self.program.replicated()
        return found

    def divided(self, n: int) -> NamedSharding | None:
        """How the flat argument `n` is divided among devices; None where each has all of it."""
        return _dividing(self.sharding(n))

    def result_sharding(self, k: int) -> Any:
        """Where the flat result `k` is; None where only XLA will say."""
        asked = self._asked_of_results[k]
        if asked is not None:
            return asked
        return self.program.replicated() if self.program.arguments.device_count == 1 else None

    def hosted_sharding(self, k: int, n: int) -> Any:
        """How the flat result `k` lies across devices where it takes the place of the flat argument
        `n` on the host. The memory that the user's sharding names is the device's where they named
        none."""
        return self._asked_of_results[k] or self.sharding(n)

    def divided_result(self, k: int, n: int) -> NamedSharding | None:
        """How the flat result `k` is divided among devices where it takes the place of the flat
        argument `n` on the host; None where each has all of it."""
        return _dividing(self.hosted_sharding(k, n))

    def _can_take_place(self, k: int, n: int) -> bool:
        """Whether a device has as much of the flat result `k` as of the flat argument `n`, and the
        user does not ask for them in two memories. A layout that they ask for is kept where that
        puts it."""
        given, asked = self._asked_of_arguments[n], self._asked_of_results[k]
        if isinstance(asked, Format):
            return False
        if None not in (given, asked) and asks_for_host(given) != asks_for_host(asked):
            return False
        shape, shardings = self.arguments[n].shape, (self.sharding(n), self.hosted_sharding(k, n))
        argument, result = (sharding.shard_shape(shape) for sharding in shardings)
        return argument == result

    @functools.cached_property
    def _asked_of_arguments(self) -> list[Any]:
        """What ``in_shardings`` say of each flat argument; None where they say nothing."""
        asked, (args, _) = self.function.jit_options.get("in_shardings"), self.traced.args_info
        asked = tuple(asked) if isinstance(asked, list) else asked
        found = _for_each_leaf(asked, args)
        return found + [None] * (len(self.arguments) - len(found))

    @functools.cached_property
    def _asked_of_results(self) -> list[Any]:
        """What ``out_shardings`` say of each flat result; None where they say nothing."""
        asked = self.function.jit_options.get("out_shardings")
        leaves = _for_each_leaf(asked, self.traced.out_info)
        mesh = self.program.arguments.mesh
        return [NamedSharding(mesh, s) if isinstance(s, PartitionSpec) else s for s in leaves]

    def lower(
        self,
        run: Callable[..., list[Any]],
        layouts: Layouts,
        *,
        donors: Mapping[int, int] | None = None,
        hosted: frozenset[int] = frozenset(),
        hosted_results: Mapping[int, int] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Program:
        """Lowers a function of the flat arguments as the user's is lowered.

        Args:
          layouts: of the arguments and results.
          donors: of results, the arguments whose place they take, by flat number.
          hosted: the arguments that are on the host.
          hosted_results: the results that `run` gives on the host, each in the place of such an
            argument, by flat number; to the argument's.
          options: of XLA, beside the user's.
        """

        def placed(*args: Any, **kwargs: Any) -> Any:
            return jax.tree.unflatten(self.out_tree, run(*jax.tree.leaves((args, kwargs))))

        placed.__name__ = placed.__qualname__ = getattr(self.function.fun, "__name__", "fun")
        if self.function.signature is not None:
            placed.__signature__ = self.function.signature
        told_by_jax = Layouts() if self.target.absent else layouts
        args, kwargs = jax.tree.unflatten(self.in_tree, self._structs(hosted, told_by_jax))
        donated_args, donated_kwargs = self.traced.args_info
        given = {k: v for k, v in self.function.jit_options.items() if k in _PASSED_ON}
        if None in told_by_jax.arguments.values():
            given["in_shardings"] = _left_to_xla(args, told_by_jax)
        on_host = hosted_results or {}
        if told_by_jax.results or (on_host and given.get("out_shardings") is not None):
            given["out_shardings"] = self._out_shardings(told_by_jax, donors or {}, on_host)
        merged = {**self.compiler_options, **(options or {})}
        jitted = jax.jit(
            placed,
            donate_argnums=tuple(n for n, a in enumerate(donated_args) if _donated(a)),
            donate_argnames=tuple(k for k, a in donated_kwargs.items() if _donated(a)),
            compiler_options=merged,
            **given,
        )
        with self._in_mesh():
            program = self.target.lower(jitted.trace(*args, **kwargs), merged)
        if self.target.absent:
            tell_xla(program, layouts)
        if on_host:
            # With some results on the host and others anywhere, jax would pair them by kind alone.
            numbers = program.arguments.parameters
            xla.alias_arguments(
                program.stablehlo,
                {numbers[n]: k for n, k in self.places.items() if n in numbers},
                {numbers[n] for n in on_host.values()},
            )
        return program

    @contextmanager
    def _in_mesh(self) -> Generator[None]:
        """The mesh that the user had set when the function was traced."""
        mesh = self.program.arguments.mesh
        if mesh.empty or jax.sharding.get_mesh() == mesh:
            yield
        else:
            with jax.set_mesh(mesh):
                yield

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Of XLA, as the user gave them to ``jit``."""
        return dict(self.function.jit_options.get("compiler_options") or {})

    def _out_shardings(
        self, layouts: Layouts, donors: Mapping[int, int], on_host: Mapping[int, int]
    ) -> Any:
        leaves: list[Any] = []
        for k, asked in enumerate(self._asked_of_results):
            sharding = asked
            if k in on_host:
                n = on_host[k]
                sharding = self._on_host(self.hosted_sharding(k, n), n)
            elif k in layouts.results:
                sharding = self.sharding(donors[k]) if k in donors else self.result_sharding(k)
            if k in layouts.results:
                sharding = Format(as_jax_has_it(layouts.results[k]), sharding)
            leaves.append(sharding)
        return jax.tree.unflatten(self.out_tree, leaves)

    def _structs(self, hosted: frozenset[int], layouts: Layouts) -> list[jax.ShapeDtypeStruct]:
        """The flat arguments, bound as jax resolved them, or to the host."""
        shardings: dict[int, Any] = dict(self.program.arguments.shardings)
        shardings |= {n: self._on_host(self.sharding(n), n) for n in hosted}
        for n, order in layouts.arguments.items():
            sharding = shardings.get(n) or self.sharding(n)
            shardings[n] = sharding if order is None else Format(as_jax_has_it(order), sharding)
        return [
            jax.ShapeDtypeStruct(
                info.shape, info.dtype, sharding=shardings.get(n), weak_type=info._aval.weak_type
            )
            for n, info in enumerate(self.arguments)
        ]

    def _on_host(self, sharding: Any, n: int) -> Any:
        """A sharding of the flat argument `n`, or of what takes its place, in host memory."""
        found = sharding.with_memory_kind(HOST_MEMORY_KIND)
        if self.target.absent and found.memory_kind != HOST_MEMORY_KIND:
            raise TopologyError(
                self.target.absent.name,
                f"{self.paths[n]} is bound to a mesh of its devices, and GPUs that are not here "
                "have no memories: take a mesh from Topology.mesh(), which names none",
            )
        return found


def _for_each_leaf(asked: Any, tree: Any) -> list[Any]:
    """What a prefix of a tree says of each of its leaves; None where it says nothing.

    That is a None too, and none of the tree's own, which has no leaves (equinox's, for example)."""
    nothing = object()
    said = jax.tree.map(lambda s: nothing if s is None else s, asked, is_leaf=lambda s: s is None)
    found = jax.tree.leaves(jax.tree.broadcast(said, tree))
    return [None if s is nothing else s for s in found]


def _common_end(one: Sequence[str], other: Sequence[str]) -> int:
    """How many of the last parts of two paths are the same."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _left_to_xla(args: Any, layouts: Layouts) -> Any:
    """As ``in_shardings`` has it that some layouts are XLA's choice: a shape cannot say so."""
    leaves, tree = jax.tree.flatten(args)
    free = [layouts.arguments.get(n, ()) is None for n in range(len(leaves))]
    formats = [
        Format(Layout.AUTO, leaf.sharding) if is_free else None
        for leaf, is_free in zip(leaves, free, strict=True)
    ]
    return jax.tree.unflatten(tree, formats)


def _donated(info: Any) -> bool:
    return any(leaf.donated for leaf in jax.tree.leaves(info))


def _shard_bytes(info: Any, sharding: Any) -> int:
    shape = info.shape if sharding is None else sharding.shard_shape(info.shape)
    if jnp.issubdtype(info.dtype, jax.dtypes.extended):
        return math.prod(shape) * info.dtype.itemsize
    return -(-math.prod(shape) * jax.dtypes.itemsize_bits(info.dtype) // 8)  # int4: half a byte.


def _dividing(sharding: Any) -> NamedSharding | None:
    """A sharding that divides, whatever memory it names."""
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return None
    return NamedSharding(sharding.mesh, sharding.spec)


def _says_where(jaxpr: Jaxpr) -> bool:
    """Whether an equation says where it is computed."""
    return any(
        says_where(eqn) or any(_says_where(program.jaxpr) for program in programs(eqn))
        for eqn in jaxpr.eqns
    )
