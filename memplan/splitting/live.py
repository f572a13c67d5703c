"""What of a traced program is live at once on a device, roughly, before XLA has seen it.

Arrays that XLA most likely makes no room for (views, and element-wise results that one other such
equation reads) count as what they are made of. It is for choosing what XLA is then asked about.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from jax.core import Atom
from jax.extend.core import Jaxpr, JaxprEqn, Var

from hlo_passes.equations import (
    BroadcastInDim,
    DynamicUpdateSlice,
    Iota,
    Reduction,
    Reshape,
    Scan,
    Squeeze,
    Transpose,
    While,
    decode,
    is_elementwise,
    is_sum,
    is_unchanged,
    name,
    programs,
)
from memplan.splitting.axes import Axis
from memplan.splitting.regions import Chunks
from memplan.splitting.shards import Shards

type Kind = Literal["view", "transpose", "elementwise", "reduction", "other"]
"""What an equation is to XLA's fusion."""


@dataclass(frozen=True)
class Step:
    """What is done to memory at once.

    Attributes:
      reads: arrays that have to be there.
      makes: arrays that are new, and their bytes.
      views: arrays that are made of what is read.
      takes: of what is new, what is read that it is written over, if nobody reads that later.
      own: bytes that are live inside, beyond what is read and made.
    """

    reads: Sequence[Var]
    makes: Sequence[tuple[Var, int]]
    views: Sequence[Var] = ()
    takes: Mapping[Var, Var] = field(default_factory=dict[Var, Var])
    own: int = 0


@dataclass(frozen=True)
class Live:
    """What is live in each step.

    Attributes:
      loads: bytes.
      born, last: of each array that is made, when that is, and when it is read last.
    """

    loads: Sequence[int]
    born: Mapping[Var, int]
    last: Mapping[Var, int]

    def at(self, n: int) -> list[Var]:
        """The arrays made by then, and read then or later."""
        return [v for v, begin in self.born.items() if begin <= n <= self.last[v]]


def live_in(jaxpr: Jaxpr, shards: Shards) -> Live:
    """What is live in a program besides what it is given, and what takes the place of that."""
    return live_through(steps_of(jaxpr, shards), results_of(jaxpr))


def results_of(jaxpr: Jaxpr) -> set[Var]:
    return {v for v in jaxpr.outvars if isinstance(v, Var)}


def live_through(steps: Sequence[Step], results: Iterable[Var] = ()) -> Live:
    """What is live in steps.

    Args:
      results: what is read after the last one.
    """
    roots = dict[Var, frozenset[Var]]()
    born, last, size = dict[Var, int](), dict[Var, int](), dict[Var, int]()
    nothing = frozenset[Var]()
    for n, step in enumerate(steps):
        read = [roots[v] for v in step.reads if v in roots]
        for root in read:
            for v in root:
                last[v] = n
        if step.views:
            roots |= dict.fromkeys(step.views, nothing.union(*read))
        for v, own in step.makes:
            roots[v], born[v], last[v], size[v] = frozenset([v]), n, n, own
    for v in results:
        last |= dict.fromkeys(roots.get(v, nothing), len(steps))
    for n, step in enumerate(steps):
        for v, a in step.takes.items():
            dying = (r for r in roots.get(a, nothing) if last[r] == n and size[r] == size.get(v))
            if (under := next(dying, None)) is not None:
                last[under] = n - 1
    more = [0] * (len(steps) + 2)
    for v, begin in born.items():
        more[begin] += size[v]
        more[last[v] + 1] -= size[v]
    loads, load = list[int](), 0
    for n, step in enumerate(steps):
        load += more[n]
        loads.append(load + step.own)
    return Live(loads, born, last)


def steps_of(jaxpr: Jaxpr, shards: Shards) -> list[Step]:
    """Of the equations of a program."""
    readers, results = readers_in(jaxpr.eqns), results_of(jaxpr)
    return [_step(eqn, readers, results, within(eqn, shards), shards) for eqn in jaxpr.eqns]


def readers_in(eqns: Iterable[JaxprEqn]) -> dict[Var, list[Kind]]:
    """Of each array that equations read, what those are."""
    found = dict[Var, list[Kind]]()
    for eqn in eqns:
        for v in dict.fromkeys(a for a in eqn.invars if isinstance(a, Var)):
            found.setdefault(v, []).append(kind_of(eqn))
    return found


def live_in_chunk(
    eqns: Iterable[tuple[JaxprEqn, Axis | None]],
    chunks: Chunks,
    shards: Shards,
    *,
    cut: Mapping[Var, int],
    readers: Mapping[Var, Sequence[Kind]],
    leaving: Collection[Var],
    results: Collection[Var] = (),
) -> int:
    """The most bytes that are live while equations are run on a chunk.

    Args:
      eqns: with how they are cut; None of one that every chunk does as it is.
      cut: the arrays of which there is a chunk. What is not made here is sliced when it is read.
      readers: of what is made, also those that add it to other chunks, or write it to its place.
      leaving: what is read after all of them.
      results: what of that is where something given was.
    """
    steps, there = list[Step](), set[Var]()
    for eqn, axis in eqns:
        sliced = {a for a in eqn.invars if isinstance(a, Var) and a in cut} - there
        steps += [Step((), [(v, chunks.of(shards.bytes(v)))]) for v in sliced]
        there.update(sliced, eqn.outvars)
        own = within(eqn, shards) if axis is None else _within_chunk(eqn, axis, chunks, shards)
        step = _step(eqn, readers, results, own, shards)
        makes = [(v, chunks.of(size) if v in cut else size) for v, size in step.makes]
        steps.append(replace(step, makes=makes))
    return max(live_through(steps, leaving).loads, default=0)


def _within_chunk(eqn: JaxprEqn, axis: Axis, chunks: Chunks, shards: Shards) -> int:
    """Bytes that are live inside an equation on a chunk, beyond what it is given."""
    if not axis.inside:
        return within(eqn, shards)
    own = 0
    for program, inside in zip(programs(eqn), axis.inside, strict=True):
        body = program.jaxpr
        cut = {v: d for v, d in inside.cut.items() if v not in body.invars}
        eqns = ((e, inside.axes.get(n)) for n, e in enumerate(body.eqns))
        results, readers = results_of(body), readers_in(body.eqns)
        found = live_in_chunk(
            eqns, chunks, shards, cut=cut, readers=readers, leaving=results, results=results
        )
        own = max(own, found)
    return own


@functools.lru_cache(1 << 16)
def within(eqn: JaxprEqn, shards: Shards) -> int:
    """Bytes that the programs inside an equation have at once, beyond what they are given."""
    loads = (live_in(program.jaxpr, shards).loads for program in programs(eqn))
    return max((max(found, default=0) for found in loads), default=0)


def _step(
    eqn: JaxprEqn,
    readers: Mapping[Var, Sequence[Kind]],
    results: Collection[Var],
    own: int,
    shards: Shards,
) -> Step:
    makes, views = list[tuple[Var, int]](), list[Var]()
    for v in eqn.outvars:
        if is_unchanged(eqn) or (v not in results and _is_virtual(eqn, readers.get(v, ()))):
            views.append(v)
        elif v not in results or not _is_in_place(eqn):
            makes.append((v, shards.bytes(v)))
    takes = {v: a for v, a in _carried(eqn) if isinstance(a, Var)}
    return Step([a for a in eqn.invars if isinstance(a, Var)], makes, views, takes, own)


def _is_virtual(eqn: JaxprEqn, readers: Sequence[Kind]) -> bool:
    match kind_of(eqn):
        case "view":
            return True
        case "transpose":
            return len(readers) == 1
        case "elementwise":
            return len(readers) == 1 and readers[0] in ("elementwise", "view", "reduction")
        case _:
            return False


def _carried(eqn: JaxprEqn) -> Iterable[tuple[Var, Atom]]:
    """The results that lie where operands were, and those."""
    match decode(eqn):
        case DynamicUpdateSlice():
            return [(eqn.outvars[0], eqn.invars[0])]
        case Scan() as scan:
            return zip(eqn.outvars, eqn.invars[scan.constants : scan.first_stack], strict=False)
        case While() as loop:
            return zip(eqn.outvars, eqn.invars[loop.first_carried :], strict=True)
        case _:
            return ()


def _is_in_place(eqn: JaxprEqn) -> bool:
    """Whether what a loop carries takes the place of what it carried."""
    return isinstance(decode(eqn), DynamicUpdateSlice | Scan | While) or is_sum(eqn)


@functools.lru_cache(1 << 16)
def kind_of(eqn: JaxprEqn) -> Kind:
    match decode(eqn):
        case Reshape(in_order=True) | Squeeze() | BroadcastInDim() | Iota():
            return "view"
        case Transpose():
            return "transpose"
        case Reduction():
            return "reduction"
        case _ if name(eqn) == "empty" or is_unchanged(eqn):
            return "view"  # What a loop carries takes the place of the former.
        case _:
            return "elementwise" if is_elementwise(eqn) else "other"
