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

import functools
import heapq
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Atom, ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from jax.sharding import NamedSharding, Sharding

from hlo_passes.units import format_bytes
from memplan.streams.programs import CALLS, programs

# Primitives whose result at an index needs their operands at that index only.
ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy cos cosh
    digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul
    name ne neg nextafter not or polygamma population_count pow real reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square sub tan tanh xor zeta
    """.split()
)
_REDUCTIONS = frozenset(
    f"reduce_{kind}" for kind in ("sum", "prod", "max", "min", "and", "or", "xor")
)

# The parameter that holds the shape of the result, by primitive.
_SHAPE_PARAMETER = {"broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes"}

# A TPU keeps the two minor axes of an array in tiles of so many rows and lanes.
_TILE_ROWS, _TILE_LANES = 8, 128


@dataclass(frozen=True)
class Limits:
    """What is worth slicing, and into what.

    Attributes:
      min_bytes: smaller arrays stay whole.
      min_slice_bytes: smaller slices are not worth a transfer each.
      chunk_bytes: at most so many bytes of one array in a chunk of rows, where its leading
        axis has such a divisor.
      max_trips: longer leading axes are split into chunks of rows.
      tiled: whether the target keeps arrays in tiles, as TPUs do. Then slices are whole
        tiles: XLA would move the array through another copy on the host, or refuse.
    """

    min_bytes: int = 1 << 20
    min_slice_bytes: int = 1 << 18
    chunk_bytes: int = 16 << 20
    max_trips: int = 512
    tiled: bool = True


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
    extents = frozenset(_extent(v) for _, _, v in values if _is_large(v, limits))
    if not extents:
        return Sliced(jaxpr, ())
    program, renamed = _inlined(jaxpr, extents)
    values = [(k, n, v) for k, n, was in values if isinstance(v := renamed(was), Var)]
    fixed = [jaxpr.invars[n] for n in unsplittable]
    fixed += [jaxpr.outvars[n] for n in unsplittable_results]
    sharded = set(_variables(map(renamed, fixed)))
    regions = _regions(program, [v for *_, v in values], sharded, limits)
    scans = _Scans(program, [r for r in regions if r.whole is None])
    if scans.leaving:
        jaxpr = scans.program()
    return Sliced(jaxpr, tuple(_records(values, regions)))


def splits_leading_axis(eqn: JaxprEqn) -> bool:
    """Whether an equation only splits an array's leading axis in two, or joins the leading two
    axes: a host array's buffer stays where it is, seen in another shape."""
    if eqn.primitive.name != "reshape":
        return False
    shapes = sorted((_shape(eqn.invars[0]), _shape(eqn.outvars[0])), key=len)
    return len(shapes[1]) == len(shapes[0]) + 1 and shapes[0][1:] == shapes[1][2:]


# --- what can be sliced ---------------------------------------------------------------------


_Extent = tuple[tuple[int, ...], int]
"""Length of the leading axis (none for a scalar) and number of elements."""


class _Rule(NamedTuple):
    """How an equation works on slices along its leading axis.

    Attributes:
      sliced: which operands are sliced; a slice of the result needs the others whole.
      reduces: it gives a partial result of each slice, not a slice of the result.
    """

    sliced: tuple[bool, ...]
    reduces: bool = False

    @property
    def is_uniform(self) -> bool:
        """Each slice is the same, and made of nothing that is sliced."""
        return not any(self.sliced)


def _rule(eqn: JaxprEqn) -> _Rule | None:
    """Returns None for an equation that does not work on slices."""
    if eqn.effects or len(eqn.outvars) != 1 or not all(map(_is_plain, (*eqn.invars, *eqn.outvars))):
        return None
    if eqn.ctx.compute_type is not None:
        return None
    name, params, shape = eqn.primitive.name, eqn.params, _shape(eqn.outvars[0])
    if name == "sharding_constraint":
        return _Rule((True,)) if _keeps_leading_axis(params["sharding"]) else None
    if params.get("sharding") is not None or params.get("out_sharding") is not None:
        return None
    shapes = [_shape(v) for v in eqn.invars]
    if name in _REDUCTIONS and shapes[0]:
        return _Rule((True,), 0 in params["axes"])
    if not shape:
        return None
    if name in ELEMENTWISE and all(len(s) in (0, len(shape)) for s in shapes):
        return _Rule(tuple(s[:1] == shape[:1] for s in shapes))  # Axes of length 1 are repeated.
    match name:
        case "broadcast_in_dim" if len(shapes) == 1:
            kept = params["broadcast_dimensions"][:1] == (0,) and shapes[0][0] == shape[0]
            return _Rule((kept,))
        case "iota" if not shapes and params["dimension"]:
            return _Rule(())
        case "reshape" if len(shapes) == 1 and params["dimensions"] is None:
            return _Rule((True,)) if shapes[0][:1] == shape[:1] else None
        case "squeeze" if 0 not in params["dimensions"]:
            return _Rule((True,))
        case _:
            return None


def _keeps_leading_axis(sharding: Sharding) -> bool:
    """Whether each device has all of the leading axis: then a slice is sharded alike."""
    return isinstance(sharding, NamedSharding) and not any(sharding.spec[:1])


def _is_plain(atom: Atom) -> bool:
    """Whether it is an array of numbers whose type names no sharding."""
    aval = atom.aval
    if not isinstance(aval, ShapedArray) or jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return False
    return all(axis is None for axis in aval.sharding.spec)


def _aval(atom: Atom) -> ShapedArray:
    return cast(ShapedArray, atom.aval)


def _shape(atom: Atom) -> tuple[int, ...]:
    return _aval(atom).shape


def _itemsize(atom: Atom) -> int:
    return _aval(atom).dtype.itemsize


def _extent(atom: Atom) -> _Extent:
    return _shape(atom)[:1], math.prod(_shape(atom))


def _bytes(atom: Atom) -> int:
    return math.prod(_shape(atom)) * _itemsize(atom)


def _is_large(atom: Atom, limits: Limits) -> bool:
    return _is_plain(atom) and len(_shape(atom)) > 1 and _bytes(atom) >= limits.min_bytes


# --- calls that hide elementwise work -------------------------------------------------------


def _inlined(jaxpr: Jaxpr, extents: AbstractSet[_Extent]) -> tuple[Jaxpr, Callable[[Atom], Atom]]:
    """Replaces calls that hide work on slices of arrays so large by what they call.

    Returns the program and what its variables are called there.
    """
    names: dict[Var, Atom] = {}

    def renamed(atom: Atom) -> Atom:
        return names.get(atom, atom) if isinstance(atom, Var) else atom

    eqns = list(_inline(jaxpr.eqns, names, extents))
    if not names:
        return jaxpr, renamed
    outvars = [renamed(v) for v in jaxpr.outvars]
    return jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=jaxpr.debug_info), renamed


def _inline(
    eqns: Iterable[JaxprEqn],
    names: dict[Var, Atom],
    extents: AbstractSet[_Extent],
    around: Sequence[JaxprEqn] = (),
) -> Iterator[JaxprEqn]:
    """Yields the equations of a program that is called by the equations `around`, outermost
    first; `names` says what its variables are called there, and grows."""
    for eqn in eqns:
        operands = [names.get(v, v) if isinstance(v, Var) else v for v in eqn.invars]
        callee = _callee(eqn)
        if callee is not None and _hides_slices(callee, extents):
            inside: dict[Var, Atom] = dict(zip(callee.invars, operands, strict=True))
            yield from _inline(callee.eqns, inside, extents, (*around, eqn))
            results = [inside[v] if isinstance(v, Var) else v for v in callee.outvars]
            names.update(zip(eqn.outvars, results, strict=True))
        elif around:
            # A program may be called twice.
            results = [Var(v.aval) for v in eqn.outvars]
            names.update(zip(eqn.outvars, results, strict=True))
            scopes = [e.source_info.name_stack for e in (*around, eqn)]
            source = eqn.source_info.replace(name_stack=functools.reduce(operator.add, scopes))
            yield eqn.replace(invars=operands, outvars=results, source_info=source)
        else:
            yield eqn.replace(invars=operands) if operands != eqn.invars else eqn


def _callee(eqn: JaxprEqn) -> Jaxpr | None:
    """The program that an equation only calls, saying nothing else about it."""
    if eqn.primitive.name not in CALLS or eqn.effects:
        return None
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    layouts = (*eqn.params.get("in_layouts", ()), *eqn.params.get("out_layouts", ()))
    if any(isinstance(s, jax.sharding.Sharding) for s in shardings):
        return None
    if any(s is not None for s in layouts) or eqn.params.get("compiler_options_kvs"):
        return None
    (program,) = programs(eqn)
    return None if program.jaxpr.constvars else program.jaxpr


def _hides_slices(callee: Jaxpr, extents: AbstractSet[_Extent]) -> bool:
    for eqn in callee.eqns:
        inner = _callee(eqn)
        if inner is not None and _hides_slices(inner, extents):
            return True
        if _rule(eqn) and any(_extent(v) in extents for v in (*eqn.invars, *eqn.outvars)):
            return True
    return False


# --- regions --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Region:
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


def _regions(
    jaxpr: Jaxpr, hosted: Sequence[Var], sharded: AbstractSet[Var], limits: Limits
) -> list[_Region]:
    """Returns the regions that the large ones of `hosted` are in."""
    rules = [_rule(eqn) for eqn in jaxpr.eqns]
    joined: dict[Var, list[int]] = {}
    for n, (eqn, rule) in enumerate(zip(jaxpr.eqns, rules, strict=True)):
        if rule is None or rule.is_uniform:
            continue
        for var in _along(eqn, rule):
            joined.setdefault(var, []).append(n)
    users: dict[Var, set[int]] = {v: {len(rules)} for v in _variables(jaxpr.outvars)}
    for n, eqn in enumerate(jaxpr.eqns):
        for var in _variables(eqn.invars):
            users.setdefault(var, set()).add(n)
    found: list[_Region] = []
    for seed in hosted:
        if not _is_large(seed, limits) or any(seed in region.arrays for region in found):
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
                pending += [v for v in along if v in eqn.outvars or _is_large(v, limits)]
        if equations:
            made = {v for n in equations for v in jaxpr.eqns[n].outvars}
            inside = {v for v in made if users.get(v, set()) <= equations}
            moved = [v for v in arrays if v not in inside and _is_large(v, limits)]
            if arrays & sharded:
                trips = "its leading axis is sharded"
            elif limits.tiled and any(_itemsize(v) == 1 for v in arrays.intersection(hosted)):
                trips = "XLA brings host arrays of 8-bit numbers to a TPU whole"
            else:
                trips = _trips(moved, limits)
            found.append(_region(jaxpr, equations, arrays, trips, limits))
    return found


def _along(eqn: JaxprEqn, rule: _Rule | None) -> list[Var]:
    """What an equation reads and makes slice by slice."""
    if rule is None or rule.is_uniform:
        return []
    read = [v for v, sliced in zip(eqn.invars, rule.sliced, strict=True) if sliced]
    return [v for v in read if isinstance(v, Var)] + ([] if rule.reduces else eqn.outvars)


def _region(
    jaxpr: Jaxpr, equations: set[int], arrays: set[Var], trips: int | str, limits: Limits
) -> _Region:
    """The region of `equations`, sliced; whole when `trips` is the reason why."""
    if isinstance(trips, str):
        return _Region(frozenset(equations), frozenset(arrays), whole=trips)
    # What each trip reduces to is kept until the loop ends.
    kept = {
        n
        for n in equations
        if not _reduces(jaxpr.eqns[n])
        or trips * _bytes(jaxpr.eqns[n].outvars[0]) < limits.min_bytes
    }
    whole = None if kept else "it is only reduced over its leading axis, to large results"
    return _Region(frozenset(kept), frozenset(arrays), trips, whole)


def _reduces(eqn: JaxprEqn) -> bool:
    rule = _rule(eqn)
    return rule is not None and rule.reduces


def _trips(moved: Sequence[Var], limits: Limits) -> int | str:
    """How many slices the arrays are cut into; or why they are not."""
    length = _shape(moved[0])[0]
    if length == 1:
        return "its leading axis has one index"
    most, least = max(map(_bytes, moved)), min(map(_bytes, moved))
    rows = 1
    if limits.tiled:
        if not all(is_outside_tiles(_shape(v), _itemsize(v)) for v in moved):
            return "its leading axis lies inside the tiles of the TPU's layout"
        flat = [_itemsize(v) for v in moved if len(_shape(v)) == 2]
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


def is_outside_tiles(shape: Sequence[int], itemsize: int) -> bool:
    """Whether a TPU keeps the slices along the leading axis apart.

    XLA tiles the two axes that need the least padding, as far as seen (libtpu 0.0.51, v5e);
    of equals, not the leading one. In a matrix that axis may be that of the rows of tiles.
    """
    packed = max(1, 4 // itemsize)

    def padding(lanes: int, rows: int) -> float:
        padded = -(-lanes // _TILE_LANES) * _TILE_LANES
        tile = min(_TILE_ROWS, max(packed, 1 << (rows - 1).bit_length()))
        return padded * -(-rows // tile) * tile / (lanes * rows)

    axes = range(len(shape))
    pairs = [(lanes, rows) for lanes in axes for rows in axes if lanes != rows]
    leading = {(0, 1)} if len(shape) == 2 else {pair for pair in pairs if 0 in pair}
    costs = {pair: padding(shape[pair[0]], shape[pair[1]]) for pair in pairs}
    return min(costs[p] for p in costs if p not in leading) <= min(costs[p] for p in leading)


# --- scans ----------------------------------------------------------------------------------


class _Step(NamedTuple):
    """Equations that stand together in the new program.

    Attributes:
      position: where, as far as their operands allow: an index in the old program.
    """

    position: int
    eqns: list[JaxprEqn]

    @property
    def effects(self) -> bool:
        return any(eqn.effects for eqn in self.eqns)


class _Scans:
    """Puts the equations of regions into scans.

    Attributes:
      rules: of every equation.
      makers: the equation that makes a variable.
      region: the region that an equation is in.
      stages: of each variable; see the module.
      leaving: the variables that are made in scans and needed elsewhere.
    """

    def __init__(self, jaxpr: Jaxpr, regions: Sequence[_Region]) -> None:
        self.jaxpr = jaxpr
        self.rules = [_rule(eqn) for eqn in jaxpr.eqns]
        self.makers = {v: n for n, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self.region = {n: region for region in regions for n in region.equations}
        self.stages = self._stages()
        self.leaving = self._leaving()

    def program(self) -> Jaxpr:
        """The program with its scans."""
        scans: dict[tuple[_Region, int], list[Var]] = {}
        for var in self.leaving:
            scans.setdefault((self.region[self.makers[var]], self.stages[var]), []).append(var)
        steps = [self._scan(region, results) for (region, _), results in scans.items()]
        steps += [_Step(n, [eqn]) for n, eqn in enumerate(self.jaxpr.eqns) if n not in self.region]
        read = {v for step in steps for v in _read(step)} | set(_variables(self.jaxpr.outvars))
        # Each scan makes its own slices of arrays that are alike in every slice.
        steps = [s for s in steps if not self._is_uniform(s.position) or read & _made(s)]
        eqns = [eqn for step in _in_order(steps) for eqn in step.eqns]
        return self.jaxpr.replace(eqns=eqns)

    def _is_uniform(self, n: int) -> bool:
        rule = self.rules[n]
        return rule is not None and rule.is_uniform

    def _made_inside(self, n: int, k: int) -> int | None:
        """The equation that makes operand `k` of equation `n` slice by slice in a scan that
        `n` can be in as well; None where there is none."""
        var, region, rule = self.jaxpr.eqns[n].invars[k], self.region.get(n), self.rules[n]
        maker = self.makers.get(var) if isinstance(var, Var) else None
        if region is None or rule is None or maker is None or not rule.sliced[k]:
            return None
        made_by = self.rules[maker]
        if maker not in region.equations or made_by is None or made_by.reduces:
            return None
        return maker

    def _stages(self) -> dict[Var, int]:
        stages: dict[Var, int] = {}
        effects = 0
        for n, eqn in enumerate(self.jaxpr.eqns):
            stage = effects if eqn.effects else 0
            for k, var in enumerate(eqn.invars):
                if isinstance(var, Var) and var in self.makers:
                    after = self.makers[var] in self.region and self._made_inside(n, k) is None
                    stage = max(stage, stages[var] + after)
            if eqn.effects:
                effects = stage
            stages.update(dict.fromkeys(eqn.outvars, stage))
        return stages

    def _leaving(self) -> dict[Var, None]:
        read = [
            v
            for n, eqn in enumerate(self.jaxpr.eqns)
            for k, v in enumerate(eqn.invars)
            if self._made_inside(n, k) is None
        ]
        read += self.jaxpr.outvars
        return dict.fromkeys(v for v in _variables(read) if self.makers.get(v, -1) in self.region)

    def _scan(self, region: _Region, results: list[Var]) -> _Step:
        """The scan that makes `results`, all of one stage."""
        inside, slices, whole = self._inside(region, results)
        rows = _shape(next(iter(region.arrays)))[0] // region.trips
        args = [*whole, *slices]
        body = self._body(inside, args, len(whole), results, rows)
        makers = [self.jaxpr.eqns[self.makers[v]] for v in results]
        reductions = [eqn if _reduces(eqn) else None for eqn in makers]

        def scan(*args: Any) -> list[Any]:
            consts, arrays = args[: len(whole)], args[len(whole) :]

            def trip(_: None, xs: tuple[Any, ...]) -> tuple[None, list[Any]]:
                if rows == 1:
                    xs = tuple(lax.expand_dims(x, (0,)) for x in xs)
                ys = jaxpr_as_fun(body)(*consts, *xs)
                if rows == 1:
                    kept = zip(ys, reductions, strict=True)
                    ys = [y if reduction else lax.squeeze(y, (0,)) for y, reduction in kept]
                return None, ys

            if rows > 1:
                arrays = [x.reshape(region.trips, rows, *x.shape[1:]) for x in arrays]
            _, stacks = lax.scan(trip, None, tuple(arrays), length=region.trips)
            return [
                reduction.primitive.bind(y, **{**reduction.params, "axes": (0,)})
                if reduction
                else y.reshape(_shape(v))
                for y, v, reduction in zip(stacks, results, reductions, strict=True)
            ]

        shapes = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
            for aval in map(_aval, args)
        ]
        made = jax.make_jaxpr(scan)(*shapes).jaxpr
        names = dict(zip(made.invars, args, strict=True))
        names |= dict(zip(made.outvars, results, strict=True))
        # Errors and profiles name the user's line, not this one.
        position = max(self.makers[v] for v in results)
        traceback = self.jaxpr.eqns[position].source_info.traceback
        return _Step(
            position,
            [
                eqn.replace(
                    invars=[names.get(v, v) if isinstance(v, Var) else v for v in eqn.invars],
                    outvars=[names.get(v, v) for v in eqn.outvars],
                    source_info=eqn.source_info.replace(traceback=traceback),
                )
                for eqn in made.eqns
            ],
        )

    def _inside(
        self, region: _Region, results: Sequence[Var]
    ) -> tuple[set[int], dict[Var, None], dict[Var, None]]:
        """What a scan does: its equations, the arrays it slices, what it needs whole."""
        stage = self.stages[results[0]]
        inside: set[int] = set()
        slices: dict[Var, None] = {}
        whole: dict[Var, None] = {}
        pending = [self.makers[v] for v in results]
        while pending:
            n = pending.pop()
            if n in inside:
                continue
            inside.add(n)
            rule = self.rules[n] or _Rule(())
            for k, var in enumerate(self.jaxpr.eqns[n].invars):
                if not isinstance(var, Var):
                    continue
                maker = self.makers.get(var)
                if not rule.sliced[k]:
                    whole[var] = None
                elif maker is None or (var in self.leaving and self.stages[var] < stage):
                    slices[var] = None
                elif self._made_inside(n, k) is not None or self._is_uniform(maker):
                    pending.append(maker)
                else:
                    slices[var] = None
        return inside, slices, whole

    def _body(
        self, inside: set[int], args: list[Var], consts: int, results: list[Var], rows: int
    ) -> Jaxpr:
        """The equations `inside` for a slice of `rows`; the first `consts` arguments are
        whole."""
        whole = {v: Var(v.aval) for v in args[:consts]}
        sliced = {v: _slice_of(v, rows) for v in args[consts:]}
        eqns: list[JaxprEqn] = []
        for n in sorted(inside):
            eqn, rule = self.jaxpr.eqns[n], self.rules[n] or _Rule(())
            (out,) = eqn.outvars
            sliced[out] = Var(out.aval) if rule.reduces else _slice_of(out, rows)
            names = [sliced if s else whole for s in rule.sliced]
            operands = [
                named[v] if isinstance(v, Var) else v
                for v, named in zip(eqn.invars, names, strict=True)
            ]
            params = dict(eqn.params)
            if parameter := _SHAPE_PARAMETER.get(eqn.primitive.name):
                params[parameter] = _shape(sliced[out])
            eqns.append(eqn.replace(invars=operands, outvars=[sliced[out]], params=params))
        return self.jaxpr.replace(
            constvars=[],
            invars=[*whole.values(), *(sliced[v] for v in args[consts:])],
            outvars=[sliced[v] for v in results],
            eqns=eqns,
            effects=set(),
        )


def _slice_of(var: Var, rows: int) -> Var:
    return Var(_aval(var).update(shape=(rows, *_shape(var)[1:])))


def _made(step: _Step) -> set[Var]:
    return {v for eqn in step.eqns for v in eqn.outvars}


def _read(step: _Step) -> set[Var]:
    return {v for eqn in step.eqns for v in _variables(eqn.invars)} - _made(step)


def _variables(atoms: Iterable[Atom]) -> Iterator[Var]:
    return (a for a in atoms if isinstance(a, Var))


def _in_order(steps: Sequence[_Step]) -> Iterator[_Step]:
    """Yields steps after what they read, else by position; those with effects keep theirs.

    Kahn's algorithm (Communications of the ACM, 1962), the ready ones in a heap.
    """
    steps = sorted(steps, key=lambda step: step.position)
    makers = {v: n for n, step in enumerate(steps) for v in _made(step)}
    readers: list[set[int]] = [set() for _ in steps]
    waits = [0] * len(steps)
    effects = [n for n, step in enumerate(steps) if step.effects]
    before = dict(zip(effects[1:], effects, strict=False))
    for n, step in enumerate(steps):
        waited = {makers[v] for v in _read(step) if v in makers}
        if n in before:
            waited.add(before[n])
        waits[n] = len(waited)
        for other in waited:
            readers[other].add(n)
    ready = [n for n, waited in enumerate(waits) if not waited]
    while ready:
        n = heapq.heappop(ready)
        yield steps[n]
        for other in readers[n]:
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(ready, other)


def _records(
    values: Iterable[tuple[str, int, Var]], regions: Iterable[_Region]
) -> Iterator[Sliceable]:
    for kind, index, value in values:
        for region in regions:
            if value in region.arrays:
                trips = region.trips if region.whole is None else None
                yield Sliceable(kind, index, trips, region.whole)
