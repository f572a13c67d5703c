"""Equations that share the leading axis of a hosted array, and into how many slices it is cut.

    m ── mul ── sub ─► m'       one region: what is reached from a hosted value through
    g ──┘        └─ v           equations that work on slices, and large values they share

A reduction over the axis belongs to it when its result is small: each trip gives a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from jax.core import Atom
from jax.extend.core import Jaxpr, JaxprEqn, Var

from hlo_passes.units import format_bytes
from memplan.streams.leading_axis import (
    Rule,
    aval_of,
    bytes_of,
    is_plain,
    is_reduction,
    itemsize_of,
    rule_of,
    shape_of,
    variables,
)
from memplan.streams.orders import OrderOf, is_outside_tiles

# A TPU keeps the two minor axes of an array in tiles of so many rows.
_TILE_ROWS = 8


@dataclass(frozen=True)
class Limits:
    """What is worth slicing, and into what.

    Attributes:
      min_bytes: smaller arrays stay whole.
      min_slice_bytes: smaller slices are not worth a transfer each.
      chunk_bytes: at most so many bytes of one array in a chunk of rows, where its leading
        axis has such a divisor.
      max_trips: longer leading axes are split into chunks of rows.
      order_of: of a target that keeps arrays in tiles, as TPUs do. There slices are whole
        tiles: XLA would move the array through another copy on the host, or refuse.
    """

    min_bytes: int = 1 << 20
    min_slice_bytes: int = 1 << 18
    chunk_bytes: int = 16 << 20
    max_trips: int = 512
    order_of: OrderOf | None = None


@dataclass(frozen=True, eq=False)
class Region:
    """Equations that share their leading axis.

    Attributes:
      equations: their indices.
      arrays: what they read and make along that axis.
      trips: iterations of a scan over it, where it is sliced.
      whole: why it is not.
    """

    equations: frozenset[int]
    arrays: frozenset[Var]
    trips: int = 1
    whole: str | None = None


def is_large(atom: Atom, limits: Limits) -> bool:
    return is_plain(atom) and len(shape_of(atom)) > 1 and bytes_of(atom) >= limits.min_bytes


def find_regions(
    jaxpr: Jaxpr, hosted: Sequence[Var], sharded: AbstractSet[Var], limits: Limits
) -> list[Region]:
    """Returns the regions that the large ones of `hosted` are in."""
    rules = [rule_of(eqn) for eqn in jaxpr.eqns]
    joined: dict[Var, list[int]] = {}
    for n, (eqn, rule) in enumerate(zip(jaxpr.eqns, rules, strict=True)):
        if rule is None or rule.is_uniform:
            continue
        for var in _along(eqn, rule):
            joined.setdefault(var, []).append(n)
    users: dict[Var, set[int]] = {v: {len(rules)} for v in variables(jaxpr.outvars)}
    for n, eqn in enumerate(jaxpr.eqns):
        for var in variables(eqn.invars):
            users.setdefault(var, set()).add(n)
    found: list[Region] = []
    for seed in hosted:
        if not is_large(seed, limits) or any(seed in region.arrays for region in found):
            continue
        equations: set[int] = set()
        arrays = {seed}
        pending = [seed]
        while pending:
            for n in joined.get(pending.pop(), ()):
                if n in equations:
                    continue
                equations.add(n)
                eqn, rule = jaxpr.eqns[n], rules[n]
                along = set(_along(eqn, rule)) - arrays
                arrays |= along
                # Leaves may share a small operand (a scale for each layer) and no more.
                pending += [v for v in along if v in eqn.outvars or is_large(v, limits)]
        if equations:
            made = {v for n in equations for v in jaxpr.eqns[n].outvars}
            inside = {v for v in made if users.get(v, set()) <= equations}
            moved = [v for v in arrays if v not in inside and is_large(v, limits)]
            if arrays & sharded:
                trips = "its leading axis is sharded"
            elif limits.order_of and any(itemsize_of(v) == 1 for v in arrays.intersection(hosted)):
                trips = "XLA brings host arrays of 8-bit numbers to a TPU whole"
            else:
                trips = _trips(moved, limits)
            found.append(_region(jaxpr, equations, arrays, trips, limits))
    return found


def _along(eqn: JaxprEqn, rule: Rule | None) -> list[Var]:
    """What an equation reads and makes slice by slice."""
    if rule is None or rule.is_uniform:
        return []
    read = [v for v, sliced in zip(eqn.invars, rule.sliced, strict=True) if sliced]
    return [v for v in read if isinstance(v, Var)] + ([] if rule.reduces else eqn.outvars)


def _region(
    jaxpr: Jaxpr, equations: set[int], arrays: set[Var], trips: int | str, limits: Limits
) -> Region:
    """The region of `equations`, sliced; whole when `trips` is the reason why."""
    if isinstance(trips, str):
        return Region(frozenset(equations), frozenset(arrays), whole=trips)
    # What each trip reduces to is kept until the loop ends.
    kept = {
        n
        for n in equations
        if not is_reduction(jaxpr.eqns[n])
        or trips * bytes_of(jaxpr.eqns[n].outvars[0]) < limits.min_bytes
    }
    whole = None if kept else "it is only reduced over its leading axis, to large results"
    return Region(frozenset(kept), frozenset(arrays), trips, whole)


def _trips(moved: Sequence[Var], limits: Limits) -> int | str:
    """How many slices the arrays are cut into; or why they are not."""
    length = shape_of(moved[0])[0]
    if length == 1:
        return "its leading axis has one index"
    most, least = max(map(bytes_of, moved)), min(map(bytes_of, moved))
    rows = 1
    if limits.order_of:
        orders = [limits.order_of(aval_of(v).dtype, shape_of(v)) for v in moved]
        if not all(order and is_outside_tiles(order) for order in orders):
            return "its leading axis lies inside the tiles of the TPU's layout"
        flat = [itemsize_of(v) for v in moved if len(shape_of(v)) == 2]
        rows = max((_tile_rows(itemsize) for itemsize in flat), default=1)
    if rows == 1 and length <= limits.max_trips and least // length >= limits.min_slice_bytes:
        return length
    if most <= limits.chunk_bytes:
        return f"it is not larger than a chunk ({format_bytes(limits.chunk_bytes)})"
    possible = [
        n
        for n in range(2, min(limits.max_trips, length) + 1)
        if length % n == 0 and length // n % rows == 0 and least // n >= limits.min_slice_bytes
    ]
    if not possible:
        return f"its {length} rows have no divisor that makes chunks of whole tiles"
    return next((n for n in possible if most <= n * limits.chunk_bytes), possible[-1])


def _tile_rows(itemsize: int) -> int:
    """Rows that a TPU packs into one tile of an array: 8 of 32 bits."""
    return _TILE_ROWS * max(1, 4 // itemsize)
