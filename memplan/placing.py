"""What of a program may live on the host, and the program with that placed there.

`Lowering` ─► layouts, forms ─► stacks ─► candidates ─► Hosting ─► placed program
                                                        (`looks` chooses it)
"""

from __future__ import annotations

import copy
import fnmatch
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Var, jaxpr_as_fun
from jax.sharding import NamedSharding, Sharding

from hlo_passes import xla
from hlo_passes.errors import LayoutsError, OffloadPatternError, SplitError
from hlo_passes.ir import Module
from hlo_passes.plan import Preparation, Split
from hlo_passes.rewrite import inject
from memplan.executable import Program
from memplan.layouts import (
    Chosen,
    Layouts,
    can_be_laid_out,
    choose_layouts,
    choose_streamed,
    tell_xla,
)
from memplan.lowering import Lowering
from memplan.paths import matching
from memplan.products import Form, Inner, Product, find_forms, products, with_forms
from memplan.signature import asks_for_host
from memplan.splitting.choice import lines_in, splittings
from memplan.splitting.live import live_in
from memplan.splitting.shards import WHOLE, Shards, is_explicit, shards_of
from memplan.streams.counted import count_loops
from memplan.streams.hosting import Hosting, Streams, stack_bytes
from memplan.streams.orders import Order
from memplan.streams.programs import inline_all_calls, inline_calls, without_puts
from memplan.streams.recomputing import Recomputed, recompute_residuals
from memplan.streams.rewrite import streamed
from memplan.streams.ring import DEVICE, HOST, constrained
from memplan.streams.turning import order_as_it_was, order_of_turned
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


class Placing:
    """A traced function on a target, and where its arrays may live.

    Attributes:
      program: everything where the user has it, with the layouts and forms.
      asked: only what the user asks for there is on the host.
      layouts: of arguments and results; None where they are jax's.
      forms: of products, where they are not left to XLA.
      recomputed: what scans compute again of what others leave for them.
      aim, splits: what is run in chunks, so that about so many bytes are live; None where nothing
        is.
    """

    def __init__(self, lowering: Lowering, preparation: Preparation | None = None) -> None:
        """
        Args:
          preparation: of a plan that is to be followed; nothing is searched then.

        Raises:
          LayoutsError: when a program with ordered effects is to be laid out.
          OffloadPatternError: when a pattern of ``offload`` matches no argument.
          SplitError: when a pattern of ``split`` matches no line.
        """
        self.lowering = lowering
        self.program = lowering.program
        self.asked = Hosting(lowering.on_host, asked=lowering.on_host)
        self._jaxpr = without_puts(lowering.traced.jaxpr, self._is_there)
        self._preparation = preparation
        self.layouts = self._choose_layouts() if preparation is None else None
        chosen = self.layouts_beside(Hosting(frozenset()))
        self.forms = self._choose_forms()
        if chosen or self.forms:
            self._jaxpr = with_forms(self._jaxpr, self.forms)
            self.program = self._lower(self._as_written, chosen)
        self._may_split = self._choose_split()
        self.recomputed: Recomputed = "nothing"
        self.aim: int | None = None
        self.splits: tuple[Split, ...] = ()
        if preparation is not None and preparation.recomputed != "nothing":
            *_, last = self.recomputing(preparation.recomputed)
            vars(self).update(vars(last))
        if preparation is not None and preparation.aim is not None:
            (last,) = self.splitting([preparation.aim])
            vars(self).update(vars(last))
        self._movable = self._choose_movable()
        self._may_move = self._choose_offered() | lowering.on_host
        if lowering.on_host:
            self.program = self.placed(self.asked, scheduled=False)

    def recomputing(self, most: Recomputed = "everything") -> Iterator[Placing]:
        """The same where scans compute again what others leave for them, the more the later; none
        where there is nothing of that kind."""
        jaxpr = inline_calls(count_loops(self._jaxpr))
        for what in ("elementwise", "everything"):
            again = recompute_residuals(jaxpr, what)
            if again is not jaxpr:
                more = self._with(again)
                more.recomputed, jaxpr = what, again
                yield more
            if what == most:
                return

    def splitting(self, aims: Iterable[int]) -> Iterator[Placing]:
        """The same with parts of it run in chunks, so that about so many bytes are live besides the
        arguments; each program once, and none that is as it was."""
        if not self._may_split:
            return
        jaxpr, shards = self._inlined
        if is_explicit(jaxpr):
            return
        seen = list[tuple[Split, ...]]([()])
        for aim, new, splits in splittings(jaxpr, aims, self._may_split, shards):
            if splits not in seen:
                seen.append(splits)
                more = self._with(new)
                more.aim, more.splits = aim, splits
                yield more

    @functools.cached_property
    def live_bytes(self) -> int:
        """What is live at once besides the arguments, roughly, on each device."""
        return max(live_in(*self._inlined).loads, default=0)

    @functools.cached_property
    def _inlined(self) -> tuple[Jaxpr, Shards]:
        """The program without calls, and how its arrays lie on the devices."""
        jaxpr, shards = inline_all_calls(self._jaxpr), WHOLE
        if self.program.arguments.device_count > 1:
            shards = Shards()
            given = enumerate(zip(jaxpr.invars, self.lowering.arguments, strict=True))
            known = {v: shards_of(self.lowering.sharding(n), a.shape) for n, (v, a) in given}
            shards.carry_on(jaxpr, known)
        return jaxpr, shards

    def _with(self, jaxpr: Jaxpr) -> Placing:
        """The same of another program that does the same."""
        more = copy.copy(self)
        for name, attribute in vars(Placing).items():
            if isinstance(attribute, functools.cached_property):
                vars(more).pop(name, None)
        more._jaxpr = jaxpr
        return more

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
        opened = self.streams.opened(hosting)
        has_loops = bool(rings or opened)
        # XLA:GPU copies a slice by DMA where it sees that the loop's counter says which one.
        tied = self.lowering.target.platform != "gpu"
        # What is fed outside, the program finds on the device.
        is_fed_outside = self.lowering.target.machine.is_fed_outside
        on_host = frozenset[int]() if is_fed_outside else hosting.arguments
        moved = on_host - self.streams.stacks.keys()
        returned = self.streams.returned(hosting)
        run = streamed(
            # Without rings loops that were made for them would be in the way.
            self.streams.jaxpr if has_loops else self._jaxpr,
            rings,
            opened=opened,
            whole=moved - hosting.inside,
            divided={n: s for n in moved if (s := self.lowering.divided(n)) is not None},
            divided_results={
                k: s
                for k, n in returned.items()
                if (s := self.lowering.divided_result(k, n)) is not None
            },
            donated=self.streams.donated,
            turned=self.streams.turned if rings else {},
            turned_results=self.streams.turned_results if rings else {},
            tied=tied,
        )
        stored = self.stored(hosting)
        program = self._lower(
            functools.partial(self._with_stores, run, stored),
            layouts,
            donors=self._donors_beside(hosting),
            hosted=on_host,
            hosted_results={**returned, **stored},
            options=self.ring_options if has_loops and scheduled else {},
        )
        # XLA would copy a whole stack on the host to make an argument and a result one.
        numbers = program.arguments.parameters
        donated = hosting.arguments & self.streams.donated - frozenset(stored.values())
        xla.keep_arguments(program.stablehlo, [numbers[n] for n in donated if n in numbers])
        return program

    def stored(self, hosting: Hosting) -> Mapping[int, int]:
        """The results that go to the host whole, by flat number; to that of the argument whose
        place they take there."""
        found = hosting.arguments & self._replaced.keys()
        return {self._replaced[n]: n for n in sorted(found)}

    def prepared(self, hosting: Hosting) -> Preparation:
        """What a plan with that on the host has to say of the program."""
        lowering, layouts = self.lowering, self.layouts_beside(hosting)
        numbers = {kind: k for k, kind in enumerate(products(lowering.traced.jaxpr))}
        return Preparation(
            function=lowering.traced.fun_name,
            fingerprint=lowering.fingerprint,
            signature=lowering.signature,
            devices=self.program.arguments.device_count,
            budget_bytes=lowering.budget,
            versions=lowering.target.versions,
            offered=tuple(sorted(self._may_move)),
            hosted=tuple(sorted(hosting.arguments)),
            hosted_results=tuple(sorted(hosting.results)),
            depth=hosting.depth,
            share=hosting.share,
            lagging=tuple(sorted(hosting.lagging)),
            hosted_inside=tuple(sorted(hosting.inside)),
            nested=hosting.nested,
            recomputed=self.recomputed,
            aim=self.aim,
            split=self._may_split,
            argument_layouts=tuple(layouts.arguments.items()),
            result_layouts=tuple(layouts.results.items()),
            donors=tuple(self._donors_beside(hosting).items()),
            forms=tuple((numbers[k], f.left, f.right, f.in_rows) for k, f in self.forms.items()),
            objective=str(lowering.objective),
            jitter=None if lowering.jitter is None else lowering.jitter.variation,
        )

    @property
    def ring_options(self) -> Mapping[str, str]:
        """The XLA options that a program whose loops bring something is compiled with."""
        return _RING_OPTIONS.get(self.lowering.target.platform, {})

    def has_transfers_in_loops(self, hosting: Hosting) -> bool:
        """Whether loops bring, or store, anything in their iterations."""
        return bool(self.streams.rings(hosting) or self.streams.opened(hosting))

    def everything(self, depth: int, share: float) -> Hosting:
        """All that may live on the host does."""
        one_memory = self.lowering.target.machine.has_one_memory
        residuals = frozenset[Result]() if one_memory else self.streams.residuals(self._smallest)
        return replace(
            self.asked,
            arguments=self.candidates,
            results=residuals,
            depth=depth,
            share=share,
        )

    def on_host(self, program: Program, hosting: Hosting) -> tuple[list[int], list[int]]:
        """Parameter numbers of the arguments on the host that the entry brings to the device
        whole, and of those that loops bring. (On CPU these are read where they are.)"""
        numbers = program.arguments.parameters
        hosted = sorted(n for n in hosting.arguments if n in numbers)
        in_loops = self.streams.stacks.keys() | hosting.inside
        return (
            [numbers[n] for n in hosted if n not in in_loops],
            [numbers[n] for n in hosted if n in in_loops],
        )

    def stack_size(self, source: Source) -> int:
        """Bytes of a stack on one device; of one that the program makes, estimated as evenly
        divided."""
        if isinstance(source, int):
            return self.lowering.sizes[source]
        return stack_bytes(self.streams.stacks[source]) // self.program.arguments.device_count

    def orders(self, layouts: Layouts) -> dict[Source, Order]:
        """How the dimensions of the program's stacks lie, as it takes them, where that is known."""
        streams = self.streams
        replaced: dict[Source, Source] = {made: n for n, made in streams.replaced_by.items()}
        found: dict[Source, Order] = {}
        for source, stack in streams.sources.items():
            argument = replaced.get(source, source)
            if isinstance(argument, int):
                order, turn = self._usual_orders.get(argument), streams.turned.get(argument)
                order = layouts.arguments.get(argument, order and order_as_it_was(order, turn))
            else:
                k = next((k for k in stack.returned if k in layouts.results), -1)
                turn = streams.turned_results.get(k)
                usual = self._usual_order(stack.aval.dtype, stack.aval.shape)
                order = layouts.results.get(k, usual and order_as_it_was(usual, turn))
            if order is not None:
                found[source] = order_of_turned(order, turn)
        return found

    # --- from here on: how ----------------------------------------------------------------

    @property
    def _smallest(self) -> int:
        """Arrays of fewer bytes stay on the device."""
        return min(int(sum(self.lowering.sizes) * _SMALLEST_SHARE), _SMALLEST_BYTES)

    def _with_stores(
        self, run: Callable[..., list[Any]], stored: Mapping[int, int], *args: Any
    ) -> list[Any]:
        """Runs the program, and takes to the host what is stored there."""
        results = run(*args)
        for k, n in stored.items():
            if self.program.arguments.device_count > 1:
                sharding = self.lowering.hosted_sharding(k, n)
                results[k] = constrained(results[k], sharding)
            results[k] = jax.device_put(results[k], HOST)
        return results

    def _choose_movable(self) -> frozenset[int]:
        """The arguments whose kind and size allow them on the host."""
        return frozenset(
            n
            for n, info in enumerate(self.lowering.arguments)
            if self.lowering.sizes[n] > self._smallest
            and not jnp.issubdtype(info.dtype, jax.dtypes.extended)
        )

    def _choose_offered(self) -> frozenset[int]:
        """Those of them that the user allows there."""
        if self._preparation is not None:
            return frozenset(self._preparation.offered)
        patterns = self.lowering.function.options.offload
        paths = self.lowering.paths
        if self.lowering.function.options.hosted is not None:
            return self.lowering.on_host
        matched = {p: matching(p, paths) for p in patterns or ()}
        if unmatched := [p for p, found in matched.items() if not found]:
            raise OffloadPatternError(unmatched, paths)
        allowed = set(paths if patterns is None else chain.from_iterable(matched.values()))
        return frozenset(n for n in self._movable if paths[n] in allowed)

    def _choose_split(self) -> tuple[str, ...]:
        """Patterns of the lines of which some may be run in chunks."""
        if self._preparation is not None:
            return self._preparation.split
        patterns = self.lowering.function.options.split
        if any(pattern != "*" for pattern in patterns):
            lines = sorted({*filter(None, lines_in(self._jaxpr))})
            for pattern in patterns:
                if not fnmatch.filter(lines, pattern):
                    shown = ", ".join(map(repr, lines[:5]))
                    problem = f"no line of the program matches {pattern!r}. Its lines are {shown}"
                    raise SplitError(patterns, f"{problem}{' and others' * (len(lines) > 5)}.")
        return patterns

    @property
    def left_alone(self) -> Mapping[str, str]:
        """Why arguments stay, by path: those that a loop takes apart but that cannot be
        streamed, and those that cannot be moved whatever reads them."""
        stay = dict.fromkeys(self._donated, "it is donated, and no result takes its place")
        if self.lowering.function.options.offload is not None:
            stay |= {n: "no pattern of offload= names it" for n in self._movable - self._may_move}
        found = stay | self.streams.left_alone
        return {self.lowering.paths[n]: found[n] for n in sorted(found)}

    @functools.cached_property
    def streams(self) -> Streams:
        """The program's stacks."""
        found = self.program.arguments.shardings
        specs = {n: s.spec for n, s in found.items() if isinstance(s, NamedSharding)}
        sharded = {n: [d for d, axes in enumerate(s) if axes is not None] for n, s in specs.items()}
        return Streams(
            self._jaxpr,
            self._may_move,
            [n for n, info in enumerate(self.lowering.arguments) if info.donated],
            self.lowering.places,
            sharded=sharded,
            order_of=self._usual_order if self.lowering.target.platform == "tpu" else None,
            # The others transpose an array on the host where no byte would have to move.
            can_turn=self.lowering.target.platform == "tpu",
            # XLA:CPU has one memory, whose bytes it counts as the device's where a loop writes.
            can_write=not self.lowering.target.machine.has_one_memory,
        )

    @functools.cached_property
    def candidates(self) -> frozenset[int]:
        """The arguments that may live on the host. A donated one may where a result takes its
        place there: a stack by the slice, anything else whole."""
        found = self._may_move - self._donated
        if self.lowering.target.machine.is_fed_outside:
            # A runtime brings whole arrays into memory of its own, and takes none from others.
            found -= self.streams.stacks.keys() | self.streams.donated
        return found

    def _is_there(self, n: int, place: Any) -> bool:
        """Whether a ``jax.device_put`` to a place leaves the flat argument `n`, which the traced
        function sees on the device, where it is."""
        if place is None or place == DEVICE:
            return True
        sharding = self.lowering.sharding(n)
        return isinstance(place, Sharding) and not asks_for_host(place) and place == sharding

    @property
    def _donated(self) -> frozenset[int]:
        """The donated ones that stay."""
        stay = self.streams.donated - self.streams.replaced_by.keys() - self._replaced.keys()
        return self._may_move & (stay - self.lowering.on_host)

    @functools.cached_property
    def _replaced(self) -> Mapping[int, int]:
        """The donated arguments that a result replaces whole, by flat numbers; to the result's.
        One that is returned twice, or as it was given, does not."""
        results, given = self._jaxpr.outvars, set(self._jaxpr.invars)
        counts = Counter(r for r in results if isinstance(r, Var))
        return {
            n: k
            for n, k in self.lowering.places.items()
            if n not in self.streams.replaced_by
            and n in self.lowering.program.arguments.parameters
            and isinstance(made := results[k], Var)
            and counts[made] == 1
            and made not in given
        }

    def _lower(self, run: Callable[..., list[Any]], layouts: Layouts, **given: Any) -> Program:
        given.setdefault("donors", self._donors)
        return self.lowering.lower(run, layouts, **given)

    @property
    def _donors(self) -> Mapping[int, int]:
        if self._preparation is not None:
            return dict(self._preparation.donors)
        return self.layouts.donors if self.layouts is not None else {}

    def _donors_beside(self, hosting: Hosting) -> Mapping[int, int]:
        """With the stacks that are turned for rings."""
        if self._preparation is not None or not self.streams.rings(hosting):
            return self._donors
        return {**self._donors, **{k: n for n, k in self._turned_places.items()}}

    @property
    def _turned_places(self) -> Mapping[int, int]:
        """Of turned arguments, the results that take their place."""
        streams = self.streams
        made = {n: streams.sources[r].returned for n, r in streams.replaced_by.items()}
        return {n: k for n, ks in made.items() if n in streams.turned for k in ks}

    # --- layouts --------------------------------------------------------------------------

    def _choose_layouts(self) -> Chosen | None:
        """The layouts of arguments, and of what else the user leaves to memplan."""
        asked = self.lowering.function.options.layouts
        arguments = self.program.arguments
        if asked is None:
            return None
        if arguments.ordered_effects:
            raise LayoutsError(
                "a program with ordered effects (jax.debug.print(..., ordered=True)) cannot be "
                "laid out anew: make them unordered, or leave layouts= away"
            )
        infos = self.lowering.arguments
        free = {n: p for n, p in arguments.parameters.items() if can_be_laid_out(infos[n])}
        outs = jax.tree.leaves(self.lowering.traced.out_info)
        results = [
            k
            for k, info in enumerate(outs)
            if asked == "all"
            and can_be_laid_out(info)
            and self.lowering.result_sharding(k) is not None
        ]

        def look(layouts: Layouts) -> Module:
            self.lowering.report("choosing layouts", self.lowering.budget)
            # Lowered afresh: jax would hand out one module for the same function, with what was
            # written into it.
            program = self.lowering.lower(self._as_written, Layouts())
            tell_xla(program, layouts)
            return inject.capture(
                self.lowering.target.platform, program.stablehlo, program.compiler(None)
            )

        # jax takes ``Layout.AUTO`` of positional arguments only.
        can_be_left = bool(self.lowering.target.absent) or not self.lowering.traced.args_info[1]
        return choose_layouts(look, free, results, can_be_left=can_be_left)

    def _as_written(self, *args: Any) -> list[Any]:
        return jaxpr_as_fun(self._jaxpr)(*args)

    def _choose_forms(self) -> dict[Product, Form]:
        """How products are to take their operands, with the layouts that were chosen."""
        if self._preparation is not None:
            kinds = products(self.lowering.traced.jaxpr)
            return {
                kinds[k]: Form(cast(Inner, left), cast(Inner, right), in_rows)
                for k, left, right, in_rows in self._preparation.forms
            }
        # XLA:GPU and XLA:CPU turn products into others first, whatever they are told.
        if (
            self.lowering.function.options.layouts != "all"
            or self.lowering.target.platform != "tpu"
        ):
            return {}
        assert self.layouts is not None
        layouts = self.layouts.chosen

        def lower(jaxpr: Jaxpr) -> Program:
            self.lowering.report("choosing layouts", self.lowering.budget)
            return self._lower(jaxpr_as_fun(jaxpr), layouts)

        return find_forms(self.lowering.traced.jaxpr, lower)

    def layouts_beside(self, hosting: Hosting) -> Layouts:
        """The layouts where some arguments are on the host."""
        if self._preparation is not None:
            laid_out = self._preparation.argument_layouts, self._preparation.result_layouts
            return Layouts(*map(dict, laid_out))
        turned = self._layouts_of_turned(hosting)
        if self.layouts is None:
            return turned
        streamed = hosting.arguments and hosting.arguments & self.streams.stacks.keys()
        if not streamed:
            return self.layouts.chosen | turned
        return self.layouts.without(streamed) | self._layouts_of_streamed.only(streamed) | turned

    def _layouts_of_turned(self, hosting: Hosting) -> Layouts:
        """Of stacks whose layers are not on their leading axis, where there are rings: with the
        layers outermost, so that each is one piece of memory."""
        if hosting == Hosting(frozenset()) or not self.streams.rings(hosting):
            return Layouts()
        arguments = {
            n: order_as_it_was(order, turn)
            for n, turn in self.streams.turned.items()
            if n in self.streams.stacks and (order := self._usual_orders.get(n)) is not None
        }
        places = self._turned_places
        return Layouts(arguments, {places[n]: arguments[n] for n in places if n in arguments})

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
            return inject.capture(
                self.lowering.target.platform, program.stablehlo, program.compiler(None)
            )

        return choose_streamed(
            look,
            {n: p for n, p in numbers.items() if n in streamed},
            {k: n for k, n in self.layouts.donors.items() if n in streamed},
            {n: o for n, o in self.layouts.compiled.arguments.items() if n in streamed},
        )

    @functools.cached_property
    def _usual_orders(self) -> dict[int, Order | None]:
        """Of the arguments that loops take apart, as jax has them; of turned ones, as it has them
        turned."""
        taken = [n for n, stack in self.streams.sources.items() if stack.taken]
        found: dict[int, Order | None] = {}
        for n, info in enumerate(self.lowering.arguments):
            if n in taken:
                shape, turn = self.lowering.sharding(n).shard_shape(info.shape), self.streams.turned
                shape = tuple(shape[d] for d in turn.get(n, range(len(shape))))
                found[n] = self._usual_order(info.dtype, shape)
        return found

    def _usual_order(self, dtype: Any, shape: Sequence[int]) -> Order | None:
        if len(shape) < 2 or jnp.issubdtype(dtype, jax.dtypes.extended):
            return None
        return xla.default_layout(self.program.device, dtype, shape)
