"""What of an equation's results is as it would be on smaller arrays, and what makes it so.

    reduce_sum  [tokens] ─► []          what is beyond the tokens is taken for 0 first
    slice[-1]   [tokens] ─► [1]         becomes a slice at tokens − 1
    concatenate [tokens], [8]           the second one is written from tokens on
    mul, dot_general's rows, ...        nothing: what is beyond stays there

A rule is given an equation at the sizes of a bucket, its operands, and the sizes of all arrays; it
returns the results, of which the first elements along each dimension (see `dims.Dim`) are those of
the smaller arrays. Whatever else is in them may be anything, also NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.random import threefry_2x32

from hlo_passes.equations import (
    Along,
    BroadcastInDim,
    Concatenate,
    Convolution,
    Cumulative,
    DevicePut,
    DotGeneral,
    DynamicSlice,
    DynamicUpdateSlice,
    Gather,
    Iota,
    Pad,
    RandomBits,
    Reduction,
    Reshape,
    Reverse,
    Scatter,
    ShardingConstraint,
    Slice,
    Sort,
    Split,
    Squeeze,
    Stack,
    TopK,
    Transpose,
    Unstack,
    bind,
    decode,
    is_elementwise,
    name,
    with_dropping,
    with_stable_order,
)
from memplan.buckets.dims import Dim, dim, mask, reshaped, same
from memplan.buckets.sizes import ONE, Probes, Size, product_of
from memplan.neutral import neutral
from memplan.splitting.axes import axes_of
from memplan.streams.leading_axis import aval_of, shape_of


class Value(NamedTuple):
    """An array as large as for a bucket, and which of its elements are those."""

    array: Any
    dims: tuple[Dim, ...]

    @property
    def open(self) -> list[int]:
        """The dimensions along which some elements may not be."""
        return [d for d, along in enumerate(self.dims) if not along.is_fixed]

    @property
    def is_fixed(self) -> bool:
        return not self.open


class Unknown(Exception):
    """An equation whose results would not be the same: what it does."""


@dataclass(frozen=True)
class Step:
    """An equation.

    Attributes:
      eqns: it, at each of the sizes that were looked at; first the bucket's.
      operands: at the bucket's.
      results: sizes of all dimensions.
      probes: the sizes of `eqns`.
      bucket, sizes: of each axis, the bucket's, and what there is of it: int32[].
    """

    eqns: tuple[JaxprEqn, ...]
    operands: tuple[Value, ...]
    results: tuple[tuple[Size, ...], ...]
    probes: Probes
    bucket: Mapping[str, int]
    sizes: Mapping[str, Any]

    @property
    def eqn(self) -> JaxprEqn:
        return self.eqns[0]

    @cached_property
    def says(self) -> tuple[Any, ...]:
        """What each says, of the class of which the first one is."""
        return tuple(map(decode, self.eqns))

    def number(self, found: Sequence[int], what: str) -> Size:
        """A size that an equation says, such as where a slice begins."""
        return size_of(self.probes, found, what)

    def made(self, dims: Sequence[Dim], *arrays: Any, eqn: JaxprEqn | None = None) -> list[Value]:
        """The results on these arrays, of such dimensions all of them."""
        return [Value(array, tuple(dims)) for array in bind(eqn or self.eqn, *arrays)]

    def masked(self, value: Value, dims: Sequence[int], fill: Any) -> Any:
        """The array with `fill` beyond what there is of it along dimensions."""
        which = [d for d in dims if not value.dims[d].is_fixed]
        if not which:
            return value.array
        inside = mask(value.dims, which, value.array.shape, self.bucket, self.sizes)
        return jnp.where(inside, value.array, jnp.asarray(fill, value.array.dtype))

    def single(self, along: Dim, what: str) -> Size:
        """The size of a dimension whose first elements are what there is of it.

        Raises:
          Unknown: of one that was merged of several.
        """
        if along.single is None and not (along.uniform or along.is_fixed):
            raise Unknown(f"{what} along {along}, of which what is there is not the first part")
        return product_of(along.factors)

    def fresh(self, k: int = 0) -> tuple[Dim, ...]:
        """The dimensions of a result whose first elements are what there is of it."""
        return tuple(dim(size) for size in self.results[k])


def size_of(probes: Probes, found: Sequence[int], what: str) -> Size:
    """The size that was found at the probes, for which there is room in the bucket.

    Raises:
      Unknown: when it is none, or there is not.
    """
    size = probes.size(found)
    if size is None:
        shown = ", ".join(map(str, found))
        raise Unknown(f"{what} is no sum of products of sizes ({shown})")
    if not probes.has_room(size):
        raise Unknown(f"{what} is {size}: not largest at the bucket's sizes, or below 0 at some")
    return size


def results_of(step: Step) -> list[Value]:
    """The results of an equation without programs inside.

    Raises:
      Unknown: when they would not be the same.
    """
    says, operands = step.says[0], [value.array for value in step.operands]
    if all(value.is_fixed for value in step.operands):
        sizes = [size for of in step.results for size in of]
        if all(size.number is not None for size in sizes) and len({*map(repr, step.says)}) == 1:
            pairs = zip(bind(step.eqn, *operands), step.results, strict=True)
            return [Value(array, tuple(map(dim, of))) for array, of in pairs]
    if step.eqn.effects:
        raise Unknown("it has effects, which would see what is beyond")
    rule = _RULES.get(type(says))
    if rule is not None:
        return rule(step, says)
    if is_elementwise(step.eqn):
        return _elementwise(step)
    if name(step.eqn) in ("optimization_barrier", "copy_p", "random_clone"):
        return _unchanged(step, None)
    if name(step.eqn) in _KEYS:
        return _keys(step)
    return _by_axes(step)


def _by_axes(step: Step) -> list[Value]:
    """Of an operation that works along other dimensions, on each of these by itself."""
    results = [list(map(dim, of)) for of in step.results]
    there = {(k, d) for k, v in enumerate(step.operands) for d in v.open}
    for axis in axes_of(step.eqn):
        of = [(k, d) for k, d in enumerate(axis.operands) if d is not None]
        if not axis.is_map or not there & {*of}:
            continue
        along = _agreeing([step.operands[k].dims[d] for k, d in of])
        there -= {*of}
        for k, d in enumerate(axis.results):
            if d is not None:
                results[k][d] = along.varied
    if there or not step.operands:
        raise Unknown("of this operation it is not known what it makes of more elements")
    arrays = bind(step.eqn, *(v.array for v in step.operands))
    return [Value(a, tuple(of)) for a, of in zip(arrays, results, strict=True)]


def _agreeing(dims: Sequence[Dim]) -> Dim:
    found = dims[0]
    for other in dims[1:]:
        both = same(found, other)
        if both is None:
            raise Unknown(f"elements along {found} are paired with those along {other}")
        found = both
    return found


def _elementwise(step: Step) -> list[Value]:
    rank = len(step.results[0])
    arrays = [v for v in step.operands if len(v.dims) == rank]
    if any(0 < len(v.dims) != rank for v in step.operands):
        raise Unknown("bits of one number become several")
    dims = tuple(
        # One element is that of all.
        _agreeing([v.dims[d] for v in arrays if v.dims[d].factors != (ONE,)] or [dim(size)])
        for d, size in enumerate(step.results[0])
    )
    return step.made(dims, *(v.array for v in step.operands))


def _broadcast(step: Step, says: BroadcastInDim) -> list[Value]:
    (value,) = step.operands
    dims = [dim(size, uniform=True) for size in step.results[0]]
    for d, k in enumerate(says.dimensions):
        if value.dims[d].factors != (ONE,):
            dims[k] = value.dims[d]
    return step.made(dims, value.array)


def _iota(step: Step, says: Iota) -> list[Value]:
    dims = tuple(dim(size, uniform=d != says.dimension) for d, size in enumerate(step.results[0]))
    return step.made(dims)


def _reshape(step: Step, says: Reshape) -> list[Value]:
    (value,) = step.operands
    dims = reshaped(value.dims, step.results[0]) if says.in_order else None
    if dims is None:
        given, made = (" × ".join(map(str, d)) or "1" for d in (value.dims, step.results[0]))
        raise Unknown(f"a reshape from {given} to {made} takes what is there apart")
    return step.made(dims, value.array)


def _transpose(step: Step, says: Transpose) -> list[Value]:
    (value,) = step.operands
    return step.made(tuple(value.dims[d] for d in says.permutation), value.array)


def _squeeze(step: Step, says: Squeeze) -> list[Value]:
    (value,) = step.operands
    kept = tuple(along for d, along in enumerate(value.dims) if d not in says.dimensions)
    return step.made(kept, value.array)


def _unchanged(step: Step, _: ShardingConstraint | DevicePut | None) -> list[Value]:
    arrays = bind(step.eqn, *(v.array for v in step.operands))
    return [Value(a, v.dims) for a, v in zip(arrays, step.operands, strict=True)]


def _stack(step: Step, says: Stack) -> list[Value]:
    dims = [_agreeing(of) for of in zip(*(v.dims for v in step.operands), strict=True)]
    dims.insert(says.dimension, dim(step.results[0][says.dimension]))
    return step.made(dims, *(v.array for v in step.operands))


def _unstack(step: Step, says: Unstack) -> list[Value]:
    (value,) = step.operands
    if not value.dims[says.dimension].is_fixed:
        raise Unknown("there are as many results as elements")
    kept = value.dims[: says.dimension] + value.dims[says.dimension + 1 :]
    return step.made(kept, value.array)


def _reduction(step: Step, says: Reduction) -> list[Value]:
    (value,) = step.operands
    kept = tuple(along for d, along in enumerate(value.dims) if d not in says.axes)
    if says.kind is not None:
        fill = neutral(says.kind, value.array.dtype)
    else:
        for d in says.axes:
            step.single(value.dims[d], "an index")
        fill = neutral(name(step.eqn).removeprefix("arg"), value.array.dtype)
    return step.made(kept, step.masked(value, says.axes, fill))


def _product(step: Step, says: DotGeneral) -> list[Value]:
    left, right = step.operands
    for a, b in zip(*says.contracted, strict=True):
        _agreeing([left.dims[a], right.dims[b]])
    batch = [_agreeing([left.dims[a], right.dims[b]]) for a, b in zip(*says.batches, strict=True)]
    free = [
        along
        for value, taken in zip(
            (left, right), zip(says.contracted, says.batches, strict=True), strict=True
        )
        for d, along in enumerate(value.dims)
        if d not in (*taken[0], *taken[1])
    ]
    # Of both: 0 times what is beyond may be NaN.
    arrays = (
        step.masked(value, axes, 0)
        for value, axes in zip((left, right), says.contracted, strict=True)
    )
    return step.made((*batch, *free), *arrays)


def _convolution(step: Step, says: Convolution) -> list[Value]:
    left, right = step.operands
    in_groups = says.in_batch_groups or says.in_feature_groups
    if any(d in right.open for d in says.right[2:]) or (in_groups and right.open):
        raise Unknown("a convolution's window has another size")
    if says.in_batch_groups and left.open:
        raise Unknown("a batch is convolved in groups")
    features = (left.dims[says.left[1]], right.dims[says.right[1]])
    if not in_groups:
        _agreeing(features)
    elif not features[0].is_fixed:
        raise Unknown("features are convolved in groups")
    space = says.left[2:]
    for d in space:
        step.single(left.dims[d], "a convolution")
    dims = list(step.fresh())
    dims[says.result[0]] = left.dims[says.left[0]]
    dims[says.result[1]] = right.dims[says.right[0]]
    arrays = step.masked(left, (says.left[1], *space), 0), step.masked(right, says.right[1:2], 0)
    return step.made(dims, *arrays)


def _slice(step: Step, says: Slice) -> list[Value]:
    (value,) = step.operands
    array, dims = value.array, list(value.dims)
    moved: dict[int, Any] = {}
    for d, along in enumerate(value.dims):
        all_of_it = all(
            of.starts[d] == 0 and of.strides[d] == 1 and of.limits[d] == shape_of(eqn.invars[0])[d]
            for of, eqn in zip(step.says, step.eqns, strict=True)
        )
        if all_of_it:
            continue
        step.single(along, "a slice")
        start = step.number([of.starts[d] for of in step.says], "where a slice begins")
        dims[d] = dim(step.results[0][d])
        if start.number is None:
            moved[d] = start.at(step.sizes)
    if not moved:
        return step.made(dims, array)
    shape = shape_of(step.eqn.outvars[0])
    starts = [moved.get(d, says.starts[d]) for d in range(len(dims))]
    if any(n != 1 for n in says.strides):
        raise Unknown("where a slice of every second element begins depends on sizes")
    return [Value(lax.dynamic_slice(array, _of_one_type(starts), shape), tuple(dims))]


def _of_one_type(indices: Sequence[Any]) -> list[Any]:
    """Indices as ``dynamic_slice`` takes them."""
    dtype = jnp.result_type(jnp.int32, *indices)
    return [jnp.asarray(index).astype(dtype) for index in indices]


def _pad(step: Step, says: Pad) -> list[Value]:
    value, fill = step.operands
    array, dims, around = value.array, list(value.dims), list(says.around)
    later: dict[int, Size] = {}
    for d in range(len(around)):
        of = [each.around[d] for each in step.says]
        if not any(map(any, of)):
            continue
        before = step.number([low for low, _, _ in of], "how many are put before others")
        if len({between for _, _, between in of}) > 1:
            raise Unknown("how many elements are put between others depends on sizes")
        step.single(value.dims[d], "padding")
        array = step.masked(Value(array, value.dims), [d], fill.array)
        dims[d] = dim(step.results[0][d])
        if before.number is None:
            if any(high < 0 for _, high, _ in of):
                raise Unknown("how much is cut off behind others depends on sizes")
            # So many are there first at the bucket's sizes; at others there are others.
            later[d] = before
            low, high, between = around[d]
            around[d] = (0, low + high, between)
    array = lax.pad(array, fill.array, around)
    for d, before in later.items():
        array = jnp.roll(array, before.at(step.sizes), d)
    return [Value(array, tuple(dims))]


def _concatenate(step: Step, says: Concatenate) -> list[Value]:
    d = says.dimension
    dims = [
        dim(step.results[0][d]) if k == d else _agreeing([v.dims[k] for v in step.operands])
        for k in range(len(step.results[0]))
    ]
    pieces = [step.single(v.dims[d], "an array that others are put behind") for v in step.operands]
    if all(size.number is not None for size in pieces[:-1]):
        return step.made(dims, *(v.array for v in step.operands))
    array = lax.empty(shape_of(step.eqn.outvars[0]), step.operands[0].array.dtype)
    at: Any = jnp.int32(0)
    for value, size in zip(step.operands, pieces, strict=True):  # Each over what is beyond others.
        array = lax.dynamic_update_slice_in_dim(array, value.array, at, d)
        at = at + size.at(step.sizes)
    return [Value(array, tuple(dims))]


def _split(step: Step, says: Split) -> list[Value]:
    (value,) = step.operands
    d = says.dimension
    step.single(value.dims[d], "a part")
    results: list[Value] = []
    at = Size.of(0)
    for k, parts in enumerate(zip(*(of.sizes for of in step.says), strict=True)):
        size = step.number(parts, "the size of a part")
        dims = (*value.dims[:d], dim(size), *value.dims[d + 1 :])
        start = at.number if at.number is not None else at.at(step.sizes)
        part = lax.dynamic_slice_in_dim(value.array, start, says.sizes[k], d)
        results.append(Value(part, dims))
        at = at.minus(Size({axes: -n for axes, n in size.terms.items()}))
    return results


def _reverse(step: Step, says: Reverse) -> list[Value]:
    (value,) = step.operands
    (array,) = bind(step.eqn, value.array)
    for d in says.dimensions:
        if not value.dims[d].is_fixed and not value.dims[d].uniform:
            beyond = array.shape[d] - step.single(value.dims[d], "another order").at(step.sizes)
            array = jnp.roll(array, -beyond, d)
    return [Value(array, value.dims)]


def _sort(step: Step, says: Sort) -> list[Value]:
    d = says.dimension
    along = _agreeing([v.dims[d] for v in step.operands])
    step.single(along, "an order")
    dims = tuple(_agreeing(of) for of in zip(*(v.dims for v in step.operands), strict=True))
    arrays = [
        step.masked(v._replace(dims=dims), [d], _last(v.array.dtype)) if k < says.keys else v.array
        for k, v in enumerate(step.operands)
    ]
    return step.made(dims, *arrays, eqn=step.eqn if along.is_fixed else with_stable_order(step.eqn))


def _last(dtype: Any) -> Any:
    """What comes after all others in a sorted array, but for those that are the same."""
    return jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else neutral("min", dtype)


def _top_k(step: Step, says: TopK) -> list[Value]:
    (value,) = step.operands
    d = says.dimension
    step.single(value.dims[d], "an index")
    dims = tuple(dim(size) if k == d else value.dims[k] for k, size in enumerate(step.results[0]))
    array = step.masked(value, [d], neutral("max", value.array.dtype))
    return step.made(dims, array)


def _cumulative(step: Step, says: Cumulative) -> list[Value]:
    (value,) = step.operands
    d = says.dimension
    step.single(value.dims[d], "what comes before others")
    kind = "max" if says.kind == "logsumexp" else says.kind
    array = value.array
    if says.reverse:
        array = step.masked(value, [d], neutral(kind, array.dtype))
    dims = (*value.dims[:d], value.dims[d].varied, *value.dims[d + 1 :])
    return step.made(dims, array)


def _along(step: Step, says: Along) -> list[Value]:
    kind = name(step.eqn).removeprefix("reduce_window_")
    if kind not in ("sum", "max", "min") or any(v.open for v in step.operands[1:]):
        return _by_axes(step)
    value = step.operands[0]
    for d in says.dimensions:
        step.single(value.dims[d], "a window")
    dims = tuple(
        dim(size) if d in says.dimensions else value.dims[d]
        for d, size in enumerate(step.results[0])
    )
    array = step.masked(value, says.dimensions, neutral(kind, value.array.dtype))
    return step.made(dims, array)


# --- where it is said in numbers what is read or written -------------------------------------


def _limit(step: Step, value: Value, d: int, size: int) -> Any:
    """The last index at which a slice of so many elements is within an array; None of one along
    which all elements are there."""
    if value.dims[d].is_fixed:
        return None
    return step.single(value.dims[d], "an index").at(step.sizes) - size


def _dynamic_slice(step: Step, says: DynamicSlice) -> list[Value]:
    value, *starts = step.operands
    array, dims = value.array, list(value.dims)
    indices = [start.array for start in starts]
    for d, size in enumerate(step.results[0]):
        whole = product_of(value.dims[d].factors)
        if size == whole:
            continue
        dims[d] = dim(size)
        if value.dims[d].is_fixed and size.number is not None:
            continue
        step.single(value.dims[d], "an index")
        # What is within the smaller array is moved less far into it.
        last = whole.minus(size).at(step.sizes)
        indices[d] = jnp.clip(indices[d], 0, last)
        if size.number is None:
            at = indices[d] + jnp.arange(says.sizes[d], dtype=jnp.int32)
            array = jnp.take(array, at, axis=d, mode="clip")
            indices[d] = 0
    return [Value(lax.dynamic_slice(array, _of_one_type(indices), says.sizes), tuple(dims))]


def _dynamic_update_slice(step: Step, _: DynamicUpdateSlice) -> list[Value]:
    value, update, *starts = step.operands
    indices = [start.array for start in starts]
    partial: list[int] = []
    dims = [along.varied for along in value.dims]
    for d, along in enumerate(value.dims):
        whole, size = product_of(along.factors), product_of(update.dims[d].factors)
        if whole == size:
            dims[d] = _agreeing([along, update.dims[d]]).varied
            indices[d] = 0
        elif not along.is_fixed or size.number is None:
            step.single(value.dims[d], "an index")
            step.single(update.dims[d], "what is written")
            indices[d] = jnp.clip(indices[d], 0, whole.minus(size).at(step.sizes))
            partial += [d] if size.number is None else []
    if not partial:
        return [
            Value(
                lax.dynamic_update_slice(value.array, update.array, _of_one_type(indices)),
                tuple(dims),
            )
        ]
    if len(partial) > 1:
        raise Unknown("a slice is written whose size depends on sizes in several dimensions")
    (d,) = partial
    return [Value(_written(step, value, update, indices, d), tuple(dims))]


def _written(step: Step, value: Value, update: Value, indices: Sequence[Any], d: int) -> Any:
    """An array with as much of a slice written into it as there is, from there on."""
    shape, whole = update.array.shape, value.array.shape
    rows = jnp.arange(shape[d], dtype=jnp.int32)
    there = rows < step.single(update.dims[d], "what is written").at(step.sizes)
    at = [
        jnp.where(there, indices[k] + rows, whole[k]) if k == d else jnp.full_like(rows, index)
        for k, index in enumerate(
            jnp.clip(index, 0, max(n - m, 0)) if k != d else index
            for k, (index, n, m) in enumerate(zip(indices, whole, shape, strict=True))
        )
    ]
    others = tuple(k for k in range(len(shape)) if k != d)
    numbers = lax.ScatterDimensionNumbers(others, (d,), tuple(range(len(shape))))
    return lax.scatter(
        value.array,
        jnp.stack(_of_one_type(at), axis=1),
        update.array,
        numbers,
        unique_indices=False,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )


def _within(
    step: Step, value: Value, indices: Any, axes: Sequence[int], sizes: Sequence[int], outside: str
) -> Any:
    """Indices that do in an array that is larger what they do in the smaller one.

    Args:
      indices: [..., axes].
      sizes: of slices, of each of the axes.
    """
    # Of a gather that is promised to stay within, XLA clips those that do not.
    clips = outside == "clip" or (outside == "promise" and isinstance(step.says[0], Gather))
    indices = _wide(indices)
    columns: list[Any] = []
    for n, (axis, size) in enumerate(zip(axes, sizes, strict=True)):
        column = indices[..., n]
        limit = _limit(step, value, axis, size) if size != value.array.shape[axis] else None
        if limit is not None:
            if outside == "fill":
                column = jnp.where(column > limit, value.array.shape[axis], column)
            elif clips:
                column = jnp.clip(column, 0, limit)
        columns.append(column)
    return jnp.stack(columns, axis=-1) if columns else indices


def _wide(indices: Any) -> Any:
    """Indices of a type that has room for all sizes."""
    return indices if indices.dtype.itemsize >= 4 else indices.astype(jnp.int32)


def _gather(step: Step, says: Gather) -> list[Value]:
    value, places = step.operands
    together = dict(zip(says.batches[1], says.batches[0], strict=True))
    dims: list[Dim | None] = [None] * len(step.results[0])
    of_result = [k for k in range(len(dims)) if k not in says.window]
    for d, k in enumerate(of_result):
        along = places.dims[d]
        dims[k] = _agreeing([along, value.dims[together[d]]]) if d in together else along
    kept = [d for d in range(len(value.dims)) if d not in {*says.collapsed, *says.batches[0]}]
    for d, k in zip(kept, says.window, strict=True):
        size = step.results[0][k]
        if size == product_of(value.dims[d].factors):
            dims[k] = value.dims[d]
        elif size.number is None:
            raise Unknown("slices whose size depends on sizes are gathered")
        else:
            dims[k] = dim(size)
    sizes = [says.sizes[axis] for axis in says.axes]
    indices = _within(step, value, places.array, says.axes, sizes, says.outside)
    return step.made([d for d in dims if d is not None], value.array, indices)


def _scatter(step: Step, says: Scatter) -> list[Value]:
    value, places, updates = step.operands
    together = dict(zip(says.batches[1], says.batches[0], strict=True))
    of_updates = [k for k in range(len(updates.dims)) if k not in says.window]
    beyond: list[int] = []
    dims = [along.varied for along in value.dims]
    for d, k in enumerate(of_updates):
        along = _agreeing([places.dims[d], updates.dims[k]])
        if d in together:
            dims[together[d]] = _agreeing([along, value.dims[together[d]]]).varied
        elif not along.is_fixed:
            beyond.append(d)
    kept = [d for d in range(len(value.dims)) if d not in {*says.inserted, *says.batches[0]}]
    of_slices = dict.fromkeys(range(len(value.dims)), 1)
    for d, k in zip(kept, says.window, strict=True):
        of_slices[d] = updates.array.shape[k]
        along = updates.dims[k]
        if product_of(along.factors) == product_of(value.dims[d].factors):
            dims[d] = _agreeing([along, value.dims[d]]).varied
        elif not along.is_fixed:
            raise Unknown("slices whose size depends on sizes are scattered")
    sizes = [of_slices[axis] for axis in says.axes]
    indices = _within(step, value, places.array, says.axes, sizes, says.outside)
    eqn = step.eqn
    if beyond:
        if not says.axes:
            raise Unknown("slices are scattered that say no place")
        if says.outside == "clip":
            last = [value.array.shape[axis] - of_slices[axis] for axis in says.axes]
            indices = jnp.clip(indices, 0, jnp.asarray(last, indices.dtype))
        # What is beyond is written nowhere.
        rows = [
            _agreeing([along, updates.dims[k]])
            for along, k in zip(places.dims[:-1], of_updates, strict=True)
        ]
        inside = mask(rows, beyond, indices.shape[:-1], step.bucket, step.sizes)
        nowhere = jnp.asarray([value.array.shape[axis] for axis in says.axes], indices.dtype)
        indices = jnp.where(inside[..., None], indices, nowhere)
        eqn = with_dropping(eqn)
    return step.made(dims, value.array, indices, updates.array, eqn=eqn)


# --- random numbers ---------------------------------------------------------------------------

_KEYS = ("random_wrap", "random_unwrap", "random_fold_in", "random_seed")


def _keys(step: Step) -> list[Value]:
    """What is done to each key."""
    rank = len(step.results[0])
    arrays = [v for v in step.operands if v.dims]
    dims = list(step.fresh())
    for d in range(rank):
        along = [v.dims[d] for v in arrays if d < len(v.dims)]
        dims[d] = _agreeing(along) if along else dims[d]
    return step.made(dims, *(v.array for v in step.operands))


def _random_bits(step: Step, says: RandomBits) -> list[Value]:
    """Bits depend on where an element is, counted through all of the shape that is drawn: where
    that is not so in the first dimension only, they are made here as jax makes them, a block of
    threefry (Salmon et al., 2011) for each element (``jax_threefry_partitionable``)."""
    (keys,) = step.operands
    rank = len(keys.dims)
    drawn = step.results[0][rank:]
    dims = (*keys.dims, *map(dim, drawn))
    is_threefry = jax.random.key_impl(keys.array) == "threefry2x32"
    counted = is_threefry and getattr(jax.config, "jax_threefry_partitionable")  # noqa: B009
    if all(size.number is not None for size in drawn[1 if counted else 0 :]):
        return step.made(dims, keys.array)
    dtype = aval_of(step.eqn.outvars[0]).dtype
    if not counted or rank or name(step.eqn) != "random_bits" or dtype != jnp.uint32:
        raise Unknown("of random numbers others are drawn where more are")
    place: Any = jnp.uint32(0)
    for d, size in enumerate(drawn):
        index = lax.broadcasted_iota(jnp.uint32, says.shape, d)
        place = place * jnp.asarray(size.at(step.sizes)).astype(jnp.uint32) + index
    first, second = jax.random.key_data(keys.array)
    counts = jnp.concatenate([jnp.zeros(place.size, jnp.uint32), place.ravel()])
    high, low = jnp.split(threefry_2x32((first, second), counts), 2)
    return [Value((high ^ low).reshape(place.shape), dims)]


_RULES: Mapping[type, Callable[[Step, Any], list[Value]]] = {
    Along: _along,
    BroadcastInDim: _broadcast,
    Concatenate: _concatenate,
    Convolution: _convolution,
    Cumulative: _cumulative,
    DevicePut: _unchanged,
    DotGeneral: _product,
    DynamicSlice: _dynamic_slice,
    DynamicUpdateSlice: _dynamic_update_slice,
    Gather: _gather,
    Iota: _iota,
    Pad: _pad,
    RandomBits: _random_bits,
    Reduction: _reduction,
    Reshape: _reshape,
    Reverse: _reverse,
    Scatter: _scatter,
    ShardingConstraint: _unchanged,
    Slice: _slice,
    Sort: _sort,
    Split: _split,
    Squeeze: _squeeze,
    Stack: _stack,
    TopK: _top_k,
    Transpose: _transpose,
    Unstack: _unstack,
}
