"""What of a program lives on the host, and what of that is worth a place on the device.

A program's *stacks* are the arrays that scans take apart, a slice an iteration: arguments
(weights, optimizer state, a cache), and what one scan makes and others read (what the forward
pass leaves for the backward pass). On the host a stack costs as many slices of device memory
as its rings have slots, and it crosses the link each time that a scan goes over it. An
argument that is donated goes to the host together with the result that takes its place.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from hlo_passes.equations import Path
from hlo_passes.plan import Preparation
from memplan.streams.counted import count_loops
from memplan.streams.fusion import fuse_maps
from memplan.streams.orders import (
    Order,
    OrderOf,
    is_outside_tiles,
    lies_in_rows,
    order_of_view,
)
from memplan.streams.programs import inline_calls
from memplan.streams.regions import Limits
from memplan.streams.rewrite import Stream
from memplan.streams.slicing import slice_elementwise
from memplan.streams.turning import Turned, turn_stacks
from memplan.streams.uses import Result, Source, Stack, find_uses


@dataclass(frozen=True)
class Hosting:
    """A choice of what lives on the host.

    Attributes:
      arguments: flat numbers of arguments, stacks or not.
      results: stacked results of scans.
      depth, share: of every ring, see `Stream`.
      lagging: scans whose rings of one slot store what a layer made while the next one comes.
      inside: those of the arguments that come whole in each iteration of the loops that read
        them; the others come before such a loop, and stay for all of it.
      nested: also in each iteration of loops inside loops.
      asked: those of the arguments that the user asks for there; they stay.
    """

    arguments: frozenset[int]
    results: frozenset[Result] = frozenset()
    depth: int = 2
    share: float = 1.0
    inside: frozenset[int] = frozenset()
    nested: bool = False
    asked: frozenset[int] = frozenset()
    lagging: frozenset[Path] = frozenset()

    @classmethod
    def of(cls, preparation: Preparation) -> Hosting:
        """The choice of a plan."""
        results = frozenset(Result(path, n) for path, n in preparation.hosted_results)
        return cls(
            frozenset(preparation.hosted),
            results,
            preparation.depth,
            preparation.share,
            frozenset(preparation.hosted_inside),
            preparation.nested,
            lagging=frozenset(preparation.lagging),
        )

    def without(self, sources: Collection[Source]) -> Hosting:
        """The same with `sources` on the device, but for those that are asked for on the host."""
        kept = frozenset(sources) - self.asked
        return replace(
            self,
            arguments=self.arguments - kept,
            results=self.results - kept,
            inside=self.inside - kept,
        )


class Streams:
    """A traced program and its stacks.

    Attributes:
      jaxpr: the program, equal to the one given: loops that index stacks by their counter are
        scans over them (see `counted`), calls around scans are gone, elementwise work on the
        candidates is done in scans (see `slicing`), and of these those that need no loop of
        their own are parts of others (see `fusion`). It takes and gives stacks with their layers
        on the leading axis (see `turning`).
      turned, turned_results: how, by flat number, those that have them on another one.
      scans: all of them.
      sources: all arguments and stacked results, by what they are.
      stacks: those of them that can be streamed.
      replaced_by: a donated argument among them to the result that takes its place.
      read_by_loops: an argument that loops read whole, and may bring in each iteration, to the
        loops around each place where it is read, the outermost first.
      left_alone: why an argument that a loop of the program reads cannot be streamed.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        candidates: Collection[int],
        donated: Collection[int],
        places: Mapping[int, int],
        *,
        sharded: Mapping[int, Collection[int]] = MappingProxyType({}),
        order_of: OrderOf | None = None,
        can_turn: bool = True,
        can_write: bool = True,
    ) -> None:
        """
        Args:
          candidates: flat numbers of the arguments that may live on the host.
          donated: those of the arguments whose memory results may take.
          places: the flat results that take the place of donated arguments.
          sharded: by number, the axes of arguments that are divided among devices.
          order_of: of a target that keeps arrays in tiles, as TPUs do.
          can_turn: whether the target sees an array on the host as another one of the same bytes.
          can_write: whether loops can write stacks on the host, in the place of donated ones.
        """
        self.donated = frozenset(donated)
        places = {n: k for n, k in places.items() if n in candidates}
        counted = inline_calls(count_loops(jaxpr))
        counted, self.turned, self.turned_results = (
            turn_stacks(counted) if can_turn else Turned(counted, {}, {})
        )
        divided = {n for n, axes in sharded.items() if self.turned.get(n, (0,))[0] in axes}
        written = places if can_write else {}
        sliced = slice_elementwise(
            counted,
            frozenset(candidates) if can_write else frozenset(candidates) - self.donated,
            frozenset(written.values()),
            unsplittable=frozenset(divided),
            unsplittable_results=frozenset(written[n] for n in divided if n in written),
            limits=Limits(order_of=order_of),
        )
        self.jaxpr = fuse_maps(sliced.jaxpr)
        uses = find_uses(self.jaxpr)
        self.scans = uses.scans
        self.sources = found = {s.source: s for s in uses.stacks}
        reasons = {s.source: _reason(s, order_of) for s in uses.stacks}
        returned = {k: s.source for s in uses.stacks for k in s.returned}
        arguments: dict[int, str] = {}
        self.replaced_by: dict[int, Result] = {}
        for n in candidates:
            if n not in found or not found[n].is_in_loop:
                continue
            arguments[n] = reasons[n] or ("it is returned" if found[n].returned else "")
            if arguments[n] or n not in self.donated:
                continue
            place = places.get(n, -1)
            made = returned.get(place)
            lies_alike = self.turned.get(n) == self.turned_results.get(place)
            if not isinstance(made, Result) or not lies_alike:
                arguments[n] = "it is donated, and no scan makes what takes its place"
            elif not can_write:
                arguments[n] = "it is donated, and on CPU what a loop writes is the device's"
            elif not reasons[made]:
                self.replaced_by[n] = made
            else:
                arguments[n] = f"what takes its place is {reasons[made]}"
        # Of those that only loops of `slicing` take apart there is nothing to say.
        own = find_uses(counted).stacks
        in_loops = {s.source for s in own if s.is_in_loop}
        self.left_alone = {n: r for n, r in arguments.items() if r and n in in_loops}
        self.read_by_loops = {
            n: frozenset(found[n].read_in)
            for n in candidates
            if n in found and n not in self.donated and self._is_read_by_loops(found[n])
        }
        self.left_alone = {n: r for n, r in self.left_alone.items() if n not in self.read_by_loops}
        streamed: set[Source] = {n for n, reason in arguments.items() if not reason}
        streamed |= set(self.replaced_by.values())
        streamed |= {
            s.source
            for s in uses.stacks
            if isinstance(s.source, Result) and s.scans and not s.returned and not reasons[s.source]
        }
        self.stacks: dict[Source, Stack] = {s: found[s] for s in found if s in streamed}

    def _is_read_by_loops(self, argument: Stack) -> bool:
        """Whether loops can bring an argument in each iteration. Where stacks are
        streamed in such a loop by the slice, or in one inside that reads it, it comes before."""
        if not argument.read_in or not argument.is_kept or argument.taken:
            return False
        ringed = {scan[:n] for s in self.sources.values() for scan in s.scans for n in _ends(scan)}
        return all(
            not self._takes_stacks(loops[0]) and not ringed.intersection(loops[1:])
            for loops in argument.read_in
        )

    def _takes_stacks(self, loop: Path) -> bool:
        return any(loop in stack.scans for stack in self.sources.values())

    def residuals(self, smallest: int) -> frozenset[Result]:
        """What scans leave for other scans, of at least `smallest` bytes."""
        return frozenset(
            source
            for source, stack in self.stacks.items()
            if isinstance(source, Result) and not stack.returned and stack_bytes(stack) >= smallest
        )

    def stored(self, hosting: Hosting) -> frozenset[Result]:
        """The results of scans that go to the host."""
        replaced = {self.replaced_by[a] for a in hosting.arguments if a in self.replaced_by}
        return hosting.results | replaced

    def opened(self, hosting: Hosting) -> frozenset[Path]:
        """The loops that bring whole arguments in each iteration under a choice."""
        found = (self.read_by_loops[n] for n in hosting.inside & self.read_by_loops.keys())
        nests = frozenset[tuple[Path, ...]]().union(*found)
        return frozenset(p for loops in nests for p in (loops if hosting.nested else loops[:1]))

    def returned(self, hosting: Hosting) -> Mapping[int, int]:
        """The results of the program that scans leave on the host, by flat number; to that of the
        argument whose place they take."""
        replaced = sorted(hosting.arguments & self.replaced_by.keys())
        return {k: n for n in replaced for k in self.sources[self.replaced_by[n]].returned}

    def rings(
        self, hosting: Hosting, orders: Mapping[Source, Order] | None = None
    ) -> dict[Path, Stream]:
        """The scans that are streamed under a choice.

        Args:
          orders: of the dimensions of stacks; the others lie in rows.
        """
        stored: defaultdict[Path, set[int]] = defaultdict(set)
        for result in self.stored(hosting):
            stored[result.path].add(result.number)
        paths = set(stored)
        for source in (*hosting.arguments, *self.stored(hosting)):
            if source in self.stacks:
                paths.update(self.stacks[source].scans)
        rings = {
            p: Stream(
                hosting.depth,
                hosting.share,
                frozenset(stored[p]),
                lags=hosting.depth > 1 or p in hosting.lagging,
            )
            for p in paths
        }
        if hosting.depth and rings:
            # A stack that stays on the device is then updated in place.
            for result in self.replaced_by.values():
                rings.setdefault(result.path, Stream(1))
        taken: defaultdict[Path, dict[int, Order]] = defaultdict(dict)
        made: defaultdict[Path, dict[int, Order]] = defaultdict(dict)
        for source, order in (orders or {}).items():
            for scan in self.sources[source].taken:
                seen = order_of_view(order, len(scan.aval.shape))
                if seen is not None and not lies_in_rows(seen):
                    taken[scan.path][scan.number] = seen
            if isinstance(source, Result) and order[-1] == 0 and not lies_in_rows(order):
                made[source.path][source.number] = order
        return {p: replace(r, taken=taken[p], made=made[p]) for p, r in rings.items()}


def _ends(path: Path) -> range:
    """Where the paths of what is around it end, its own included."""
    return range(1, len(path) + 1)


def stack_bytes(stack: Stack) -> int:
    """Of all its shards together."""
    return math.prod(stack.aval.shape) * stack.aval.dtype.itemsize


def _reason(stack: Stack, order_of: OrderOf | None) -> str:
    """Why a stack cannot be streamed; ``""`` when it can."""
    if stack.whole:
        return "; ".join(dict.fromkeys(stack.whole))
    if jnp.issubdtype(stack.aval.dtype, jax.dtypes.extended):
        return f"{stack.aval.dtype} arrays are not numbers to be moved"
    if order_of is None:
        return ""
    taken = [t.aval for t in stack.taken]
    for aval in (*taken, *([stack.aval] if isinstance(stack.source, Result) else ())):
        if aval.dtype.itemsize < 2:
            return f"XLA:TPU cannot slice {aval.dtype} arrays on the host"
        if aval.dtype.itemsize > 4:
            return f"XLA:TPU makes two arrays of {aval.dtype}, and brings the whole for that"
        order = order_of(aval.dtype, aval.shape) if len(aval.shape) > 2 else None
        if order is None or not is_outside_tiles(order):
            return f"XLA:TPU has its leading axis inside the tiles of {list(aval.shape)}"
    return ""
