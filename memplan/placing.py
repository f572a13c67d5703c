"""What of a program may live on the host, and the program with that placed there.

traced program ─► paths, sizes, stacks ─► candidates ─► Hosting ─► placed program
                                                        (`looks` chooses it)
"""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.extend.core import Jaxpr, jaxpr_as_fun
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from hlo_passes import inject, xla
from hlo_passes.errors import LayoutsError, OffloadPatternError
from hlo_passes.ir import Module
from memplan.executable import Program, Target
from memplan.function import Function
from memplan.layouts import (
    Chosen,
    Layouts,
    as_jax_has_it,
    can_be_laid_out,
    choose_layouts,
    choose_streamed,
    tell_xla,
)
from memplan.products import Form, Product, find_forms, with_forms
from memplan.signature import HOST_MEMORY_KIND
from memplan.streams.hosting import Hosting, Streams, stack_bytes
from memplan.streams.orders import Order
from memplan.streams.rewrite import streamed
from memplan.streams.uses import Result, Source

# Weights below this share of all arguments, and below this many bytes, stay on the device:
# moving them saves next to nothing and costs a transfer's latency each (10 µs or so, which is
# what a link of 15 to 55 GB/s needs for a few hundred KiB).
_SMALLEST_SHARE = 1 / 4096
_SMALLEST_BYTES = 1 << 20

# XLA:TPU pipelines transfers of loops by itself, into the slot that is in use; with rings in
# the program it has to leave them alone. The option holds for a whole compilation, so every
# such transfer of the program is memplan's to schedule then.
_RING_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "tpu": {"xla_tpu_pipeline_memory_host_transfers": "false"}
}

# What of jax.jit's options concerns the program that memplan lowers itself; the others act
# when the user's function is traced.
_PASSED_ON = ("out_shardings", "keep_unused")


class Placing:
    """A traced function on a target, and where its arrays may live.

    Attributes:
      program: lowered, everything where the user has it.
      layouts: of arguments and results; None where they are jax's.
      forms: of products, where they are not left to XLA.
    """

    def __init__(self, traced: jax.stages.Traced, function: Function, target: Target) -> None:
        """
        Raises:
          LayoutsError: when a program with ordered effects is to be laid out.
          OffloadPatternError: when a pattern of ``offload`` matches no argument.
        """
        self.traced = traced
        self.function = function
        self.target = target
        self.program = target.lower(traced, self._compiler_options)
        self._jaxpr = traced.jaxpr
        self.layouts = self._choose_layouts()
        self.forms = self._choose_forms()
        if self.layouts is not None and (self.layouts.chosen or self.forms):
            self._jaxpr = with_forms(traced.jaxpr, self.forms)
            self.program = self._lowered(self._as_written, {}, self.layouts.chosen)
        self._may_move = self._choose_movable()

    @functools.cached_property
    def in_tree(self) -> Any:
        return jax.tree.structure(self.traced.args_info)

    @functools.cached_property
    def out_tree(self) -> Any:
        return jax.tree.structure(self.traced.out_info)

    def placed(
        self, hosting: Hosting, *, scheduled: bool = True, layouts: Layouts | None = None
    ) -> Program:
        """Lowers the program with what `hosting` says on the host.

        Args:
          scheduled: prepare loops for memplan's schedule; otherwise each iteration brings
            what it reads, and XLA does with that what it does by itself.
          layouts: others than were chosen.
        """
        if layouts is None:
            layouts = self.layouts_beside(hosting)
        rings = self.streams.rings(
            hosting if scheduled else replace(hosting, depth=0), self.orders(layouts)
        )
        # XLA:GPU copies a slice by DMA where it sees that the loop's counter says which one.
        tied = self.target.platform != "gpu"
        run = streamed(
            # Without rings loops that were made for them would be in the way.
            self.streams.jaxpr if rings else self._jaxpr,
            rings,
            whole=hosting.arguments - self.streams.stacks.keys(),
            donated=self.streams.donated,
            tied=tied,
        )

        program = self._lowered(
            run,
            self.ring_options if rings and scheduled else {},
            layouts,
            hosting.arguments,
        )
        # XLA would copy a whole stack on the host to make an argument and a result one.
        numbers = program.arguments.parameters
        donated = hosting.arguments & self.streams.donated & frozenset(numbers)
        xla.keep_arguments(program.stablehlo, [numbers[n] for n in donated])
        return program

    def _lowered(
        self,
        run: Callable[..., list[Any]],
        options: Mapping[str, Any],
        layouts: Layouts,
        hosted: frozenset[int] = frozenset(),
    ) -> Program:
        """Lowers a function of the flat arguments as the user's is lowered.

        Args:
          options: of XLA, beside the user's.
          layouts: of the arguments and results.
          hosted: the arguments that are on the host.
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
        if told_by_jax.results:
            given["out_shardings"] = self._out_shardings(told_by_jax)
        merged = {**self._compiler_options, **options}
        jitted = jax.jit(
            placed,
            donate_argnums=tuple(n for n, a in enumerate(donated_args) if _donated(a)),
            donate_argnames=tuple(k for k, a in donated_kwargs.items() if _donated(a)),
            compiler_options=merged,
            **given,
        )
        program = self.target.lower(jitted.trace(*args, **kwargs), merged)
        if self.target.absent:
            tell_xla(program, layouts)
        return program

    @property
    def ring_options(self) -> Mapping[str, str]:
        """The XLA options that a program with streamed loops is compiled with."""
        return _RING_OPTIONS.get(self.target.platform, {})

    def sharding(self, n: int) -> Any:
        """Where the program has the flat argument `n`, before placement."""
        found = self.program.arguments.shardings.get(n)
        if found is None or isinstance(found, SingleDeviceSharding):
            return self.program.replicated()
        return found

    def everything(self, depth: int, share: float) -> Hosting:
        """All that may live on the host does."""
        on_cpu = self.target.platform == "cpu"
        residuals = frozenset[Result]() if on_cpu else self.streams.residuals(self._smallest)
        return Hosting(self.candidates, residuals, depth, share)

    def on_host(self, program: Program, hosting: Hosting) -> tuple[list[int], list[int]]:
        """Parameter numbers of the arguments on the host that come to the device whole, and
        of those that come by the slice."""
        numbers = program.arguments.parameters
        hosted = sorted(n for n in hosting.arguments if n in numbers)
        stacks = self.streams.stacks
        return (
            [numbers[n] for n in hosted if n not in stacks],
            [numbers[n] for n in hosted if n in stacks],
        )

    def stack_size(self, source: Source) -> int:
        """Bytes of a stack on one device; of one that the program makes, estimated as evenly
        divided."""
        if isinstance(source, int):
            return self.sizes[source]
        return stack_bytes(self.streams.stacks[source]) // self.program.arguments.device_count

    def orders(self, layouts: Layouts) -> dict[Source, Order]:
        """How the dimensions of the program's stacks lie, where that is known."""
        streams = self.streams
        replaced: dict[Source, Source] = {made: n for n, made in streams.replaced_by.items()}
        found: dict[Source, Order] = {}
        for source, stack in streams.sources.items():
            argument = replaced.get(source, source)
            if isinstance(argument, int):
                order = layouts.arguments.get(argument, self._usual_orders.get(argument))
            else:
                given = (layouts.results[k] for k in stack.returned if k in layouts.results)
                order = next(given, self._usual_order(stack.aval.dtype, stack.aval.shape))
            if order is not None:
                found[source] = order
        return found

    # --- from here on: how ----------------------------------------------------------------

    @property
    def _compiler_options(self) -> dict[str, Any]:
        return dict(self.function.jit_options.get("compiler_options") or {})

    @functools.cached_property
    def _leaves(self) -> list[tuple[str, Any]]:
        """The flat arguments as (path, ArgInfo)."""
        flat = jax.tree_util.tree_flatten_with_path(self.traced.args_info)[0]
        signature = self.function.signature
        names = list(signature.parameters) if signature is not None else []
        return [(_path(path, names), info) for path, info in flat]

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self._leaves]

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Bytes of each flat argument on one device; 0 where the program does not use it."""
        found = self.program.arguments
        return [
            _shard_bytes(info, found.shardings.get(n)) if n in found.parameters else 0
            for n, (_, info) in enumerate(self._leaves)
        ]

    @property
    def arguments_bytes(self) -> int:
        """With more than the budget, compiling without a plan is wasted."""
        return sum(self.sizes)

    @property
    def _smallest(self) -> int:
        """Arrays of fewer bytes stay on the device."""
        return min(int(sum(self.sizes) * _SMALLEST_SHARE), _SMALLEST_BYTES)

    @property
    def returns_to_host(self) -> bool:
        asked = jax.tree.leaves(self.function.jit_options.get("out_shardings"))
        return any(getattr(s, "memory_kind", None) == HOST_MEMORY_KIND for s in asked)

    def _choose_movable(self) -> frozenset[int]:
        """The arguments that the user and their kind allow on the host."""
        patterns = self.function.options.offload
        paths = self.paths
        unmatched = [p for p in patterns or () if not fnmatch.filter(paths, p)]
        if unmatched:
            raise OffloadPatternError(unmatched, paths)
        return frozenset(
            n
            for n, ((path, info), size) in enumerate(zip(self._leaves, self.sizes, strict=True))
            if size > self._smallest
            and not jnp.issubdtype(info.dtype, jax.dtypes.extended)
            and (patterns is None or any(fnmatch.fnmatch(path, p) for p in patterns))
        )

    @property
    def left_alone(self) -> Mapping[str, str]:
        """The arguments, by path, that a loop takes apart but that cannot be streamed, each
        with the reason."""
        return {self.paths[n]: reason for n, reason in self.streams.left_alone.items()}

    @functools.cached_property
    def streams(self) -> Streams:
        """The program's stacks."""
        found = self.program.arguments.shardings
        specs = {n: s.spec for n, s in found.items() if isinstance(s, NamedSharding)}
        return Streams(
            self._jaxpr,
            self._may_move,
            [n for n, (_, info) in enumerate(self._leaves) if info.donated],
            sharded=[n for n, spec in specs.items() if len(spec) and spec[0] is not None],
            tiled=self.target.platform == "tpu",
        )

    @functools.cached_property
    def candidates(self) -> frozenset[int]:
        """The arguments that may live on the host. A donated one may where a stack takes its
        place: the others are written while they would be away. XLA:CPU has one memory, whose
        bytes it counts as the device's where a program writes to it."""
        on_cpu = self.target.platform == "cpu"
        replaced = frozenset(self.streams.replaced_by if not on_cpu else ())
        return self._may_move - (self.streams.donated - replaced)

    # --- layouts --------------------------------------------------------------------------

    def _choose_layouts(self) -> Chosen | None:
        """The layouts of arguments, and of what else the user leaves to memplan."""
        asked = self.function.options.layouts
        arguments = self.program.arguments
        if asked is None:
            return None
        if arguments.ordered_effects:
            raise LayoutsError(
                "a program with ordered effects (jax.debug.print(..., ordered=True)) cannot be "
                "laid out anew: make them unordered, or leave layouts= away"
            )
        infos = jax.tree.leaves(self.traced.args_info)
        free = {n: p for n, p in arguments.parameters.items() if can_be_laid_out(infos[n])}
        outs = jax.tree.leaves(self.traced.out_info)
        results = [
            k
            for k, info in enumerate(outs)
            if asked == "all" and can_be_laid_out(info) and self._known_sharding(k) is not None
        ]

        def look(layouts: Layouts) -> Module:
            # Lowered afresh: jax would hand out one module for the same function, with what was
            # written into it.
            program = self._lowered(self._as_written, {}, Layouts())
            tell_xla(program, layouts)
            return inject.capture(self.target.platform, program.stablehlo, program.compiler(None))

        # jax takes ``Layout.AUTO`` of positional arguments only.
        can_be_left = bool(self.target.absent) or not self.traced.args_info[1]
        return choose_layouts(look, free, results, can_be_left=can_be_left)

    def _as_written(self, *args: Any) -> list[Any]:
        return jaxpr_as_fun(self._jaxpr)(*args)

    def _choose_forms(self) -> dict[Product, Form]:
        """How products are to take their operands, with the layouts that were chosen."""
        # XLA:GPU and XLA:CPU turn products into others first, whatever they are told.
        if self.function.options.layouts != "all" or self.target.platform != "tpu":
            return {}
        assert self.layouts is not None
        layouts, search_s = self.layouts.chosen, self.function.options.search_s

        def lower(jaxpr: Jaxpr) -> Program:
            return self._lowered(jaxpr_as_fun(jaxpr), {}, layouts)

        return find_forms(self.traced.jaxpr, lower, search_s)

    def layouts_beside(self, hosting: Hosting) -> Layouts:
        """The layouts where some arguments are on the host."""
        if self.layouts is None:
            return Layouts()
        streamed = hosting.arguments & self.streams.stacks.keys()
        if not streamed:
            return self.layouts.chosen
        return self.layouts.without(streamed) | self._layouts_of_streamed.only(streamed)

    @functools.cached_property
    def _layouts_of_streamed(self) -> Chosen:
        """Of the stacks where they are on the host."""
        assert self.layouts is not None
        # With one slot the loops are the shortest; what they convert is the same.
        everything = self.everything(1, 1.0)
        streamed = everything.arguments & self.streams.stacks.keys()
        others = self.layouts.without(streamed)
        numbers = self.program.arguments.parameters

        def look(layouts: Layouts) -> Module:
            program = self.placed(everything, layouts=others | layouts)
            return inject.capture(self.target.platform, program.stablehlo, program.compiler(None))

        return choose_streamed(
            look,
            {n: p for n, p in numbers.items() if n in streamed},
            {k: n for k, n in self.layouts.donors.items() if n in streamed},
            {n: o for n, o in self.layouts.compiled.arguments.items() if n in streamed},
        )

    @functools.cached_property
    def _usual_orders(self) -> dict[int, Order | None]:
        """Of the arguments that loops take apart, as jax has them."""
        taken = [n for n, stack in self.streams.sources.items() if stack.taken]
        return {
            n: self._usual_order(info.dtype, self.sharding(n).shard_shape(info.shape))
            for n, (_, info) in enumerate(self._leaves)
            if n in taken
        }

    def _usual_order(self, dtype: Any, shape: Sequence[int]) -> Order | None:
        if len(shape) < 2 or jnp.issubdtype(dtype, jax.dtypes.extended):
            return None
        return xla.default_layout(self.program.device, dtype, shape)

    def _known_sharding(self, k: int) -> Any:
        """Where a result is, as far as that is known before XLA says."""
        asked = self.function.jit_options.get("out_shardings")
        leaf = jax.tree.leaves(
            jax.tree.broadcast(asked, self.traced.out_info, is_leaf=lambda s: s is None),
            is_leaf=lambda s: s is None,
        )[k]
        if isinstance(leaf, Sharding):
            return leaf
        return self.program.replicated() if self.program.arguments.device_count == 1 else None

    def _out_shardings(self, layouts: Layouts) -> Any:
        leaves: list[Any] = []
        donors = self.layouts.donors if self.layouts is not None else {}
        for k in range(self.out_tree.num_leaves):
            sharding, order = self._known_sharding(k), layouts.results.get(k)
            if k in donors and k in layouts.results:
                sharding = self.sharding(donors[k])
            is_usual = k not in layouts.results
            leaves.append(sharding if is_usual else Format(as_jax_has_it(order), sharding))
        return jax.tree.unflatten(self.out_tree, leaves)

    def _structs(self, hosted: frozenset[int], layouts: Layouts) -> list[jax.ShapeDtypeStruct]:
        """The flat arguments, bound as jax resolved them, or to the host."""
        shardings: dict[int, Any] = dict(self.program.arguments.shardings)
        shardings |= {n: self.sharding(n).with_memory_kind(HOST_MEMORY_KIND) for n in hosted}
        for n, order in layouts.arguments.items():
            sharding = shardings.get(n) or self.sharding(n)
            shardings[n] = sharding if order is None else Format(as_jax_has_it(order), sharding)
        return [
            jax.ShapeDtypeStruct(
                info.shape, info.dtype, sharding=shardings.get(n), weak_type=info._aval.weak_type
            )
            for n, (_, info) in enumerate(self._leaves)
        ]


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
