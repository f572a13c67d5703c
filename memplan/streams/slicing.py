"""Elementwise work on whole arrays becomes scans over their leading axis.

An optimizer's update is ``jax.tree.map`` over whole arrays. Where these live on the host,
each would come to the device whole; a scan over slices needs a few slices at a time::

    m    [L, D, F] ──┐                          m    [L, D, F] ──┐ a slice [D, F] a trip
    g    [L, D, F] ──┤ mul, add, sqrt, …        g    [L, D, F] ──┤
    lr   []        ──┤                  ──►     lr   []        ──┤ scan, L trips
                     ├─► m'  [L, D, F]                           ├─► m'  [L, D, F]
                     └─► Σg² []                                  └─► Σg² [L] ─ reduce_sum ─► []

**Regions.** From every hosted value the pass follows the equations that work on each index
of the leading axis by itself, through results, operands and other equations that read the
same large value. What it reaches, a *region*, shares its leading axis. Reductions over that
axis belong to it when their result is small: each trip gives a partial result, and the
partial results are reduced after the loop (a carried accumulator would need an identity
element per type, and would sum one slice after another). A sum then differs from the
original's in the order of its terms; everything else is the same computation.

**Stages.** What depends on a reduced value cannot be in the loop that makes it: norm →
scale → update are two scans. The *stage* of an equation is the number of scans that must
have ended before it, on the longest path; equations outside the regions hand it on. A scan
holds the equations of one region at one stage, so scans and equations outside cannot form a
cycle. A later stage that needs an earlier one's intermediate value computes it anew from the
slices: a value that crosses stages would travel to the host and back. Only results that
leave the region anyway are read again.

**One scan per region**, not one for the whole tree: leaves that share no large value get
loops of their own. Merging them would save no transfer. What cannot overlap is the fetch of
the first slice and the store of the last one, which is the same share of a merged loop's
bytes, while its slots would have to hold a slice of every leaf at once.

**Slices.** Arrays with a short leading axis (stacked layers) are sliced index by index.
Others (embeddings) are split into chunks of rows, ``[V, D] → [n, V/n, D]``: reshapes which
XLA makes bitcasts of the host's buffer when each chunk is a whole number of tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from jax.extend.core import Jaxpr, Var

from memplan.streams.inlining import inlined
from memplan.streams.leading_axis import (
    extent_of,
    variables,
)
from memplan.streams.region_scans import Scans
from memplan.streams.regions import Limits, Region, find_regions, is_large


@dataclass(frozen=True)
class Sliceable:
    """A hosted value that elementwise work reads or makes.

    Attributes:
      kind: ``"argument"`` or ``"result"``.
      index: its flat index.
      trips: iterations of the scans that now do this work; None where it was left as it was.
      whole: why it was left so; None where it is done in scans.
    """

    kind: str
    index: int
    trips: int | None
    whole: str | None


@dataclass(frozen=True)
class Sliced:
    """A program whose elementwise work on hosted values is done in scans.

    Attributes:
      jaxpr: the program; the very object that was given when nothing applies.
      values: the hosted values that the pass found such work on, arguments first. What else
        reads a value whole is for `uses` to say.
    """

    jaxpr: Jaxpr
    values: tuple[Sliceable, ...]


def slice_elementwise(
    jaxpr: Jaxpr,
    hosted: AbstractSet[int],
    hosted_results: AbstractSet[int],
    *,
    unsplittable: AbstractSet[int] = frozenset(),
    unsplittable_results: AbstractSet[int] = frozenset(),
    limits: Limits | None = None,
) -> Sliced:
    """Turns elementwise work on whole hosted arrays into scans over their leading axis.

    Args:
      jaxpr: a traced program.
      hosted: which of its inputs live on the host (flat indices, constants not counted).
      hosted_results: which of its outputs will.
      unsplittable: inputs whose leading axis is sharded over devices.
      unsplittable_results: the same of outputs.
      limits: see `Limits`.

    Returns:
      A program with the same inputs and outputs, and the same numbers, but for sums and
      products over a leading axis, which are taken in another order. Calls (``jit``, custom
      derivatives) are inlined where they hide elementwise work on a hosted value; every
      other equation stays as it is.

    Takes time linear in the equations, times the stages.
    """
    limits = limits or Limits()
    values = [("argument", n, jaxpr.invars[n]) for n in sorted(hosted)]
    values += [("result", n, jaxpr.outvars[n]) for n in sorted(hosted_results)]
    extents = frozenset(extent_of(v) for _, _, v in values if is_large(v, limits))
    if not extents:
        return Sliced(jaxpr, ())
    program, renamed = inlined(jaxpr, extents)
    values = [(k, n, v) for k, n, was in values if isinstance(v := renamed(was), Var)]
    fixed = [jaxpr.invars[n] for n in unsplittable]
    fixed += [jaxpr.outvars[n] for n in unsplittable_results]
    sharded = set(variables(map(renamed, fixed)))
    regions = find_regions(program, [v for *_, v in values], sharded, limits)
    scans = Scans(program, [r for r in regions if r.whole is None])
    if scans.leaving:
        jaxpr = scans.program()
    return Sliced(jaxpr, tuple(_records(values, regions)))


def _records(
    values: Iterable[tuple[str, int, Var]], regions: Iterable[Region]
) -> Iterator[Sliceable]:
    for kind, index, value in values:
        for region in regions:
            if value in region.arrays:
                trips = region.trips if region.whole is None else None
                yield Sliceable(kind, index, trips, region.whole)
