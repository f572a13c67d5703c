"""A program with a region of it as a loop over chunks.

    before ─► for i in range(trips):                                          ─► after
                  slices of what is cut, at i
                  the region's equations, on chunks
                  results written into their place; sums added to what there is

What the loop makes for others is written where it will stay. What chunks are summed to is kept in
float32 where they are narrower, and so is what is added: but for convolutions, which not every
compiler has with a wider result, sums in loops, and scatters, which add what is narrow one by one
anyway. Where chunks of a size leave some rows, these are one chunk more
before the loop: so its sum is what the loop begins with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Atom
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from hlo_passes.equations import (
    Convolution,
    Iota,
    Remat,
    bind,
    decode,
    is_sum,
    of_type,
    programs,
    with_chunks,
    with_last_features,
    with_programs,
    with_wide_sum,
)
from memplan.neutral import neutral
from memplan.splitting.axes import Axis, Inside, whole_in
from memplan.splitting.regions import Chunks, Graph, Region
from memplan.streams.leading_axis import aval_of, shape_of

_TWO_OF = {
    "sum": jnp.add,
    "prod": jnp.multiply,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "xor": jnp.bitwise_xor,
}


def in_chunks(graph: Graph, region: Region, chunks: Chunks) -> Jaxpr:
    """The program with a region as a loop over chunks."""
    jaxpr = graph.jaxpr
    before, after = graph.beside(region)
    loop = _Loop(graph, region, chunks)
    eqns = [jaxpr.eqns[n] for n in before] + loop.equations() + [jaxpr.eqns[n] for n in after]
    return jaxpr.replace(eqns=eqns, debug_info=jaxpr.debug_info)


class _Loop:
    def __init__(self, graph: Graph, region: Region, chunks: Chunks) -> None:
        self.chunks, self.blocks = chunks, region.blocks
        self.eqns = [(graph.eqns[n], region.axes[n]) for n in sorted(region.axes)]
        self.given = graph.given(region)
        leaving = graph.leaving(region)
        self.results = [
            (eqn, axis, k)
            for eqn, axis in self.eqns
            for k, v in enumerate(eqn.outvars)
            if v in leaving
        ]

    def equations(self) -> list[JaxprEqn]:
        """Of the loop, and what is around it; the arrays have the names that they had."""
        avals = map(aval_of, self.given)
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
        made = jax.make_jaxpr(self._run)(*shapes)
        assert not made.consts
        outvars = [eqn.outvars[k] for eqn, _, k in self.results]
        names = dict(zip(made.jaxpr.invars, self.given, strict=True))
        names |= dict(zip(made.jaxpr.outvars, outvars, strict=True))
        # Errors and profiles name the user's line, not this one.
        traceback = self.results[-1][0].source_info.traceback
        return [
            eqn.replace(
                invars=[names.get(a, a) if isinstance(a, Var) else a for a in eqn.invars],
                outvars=[names.get(v, v) for v in eqn.outvars],
                source_info=eqn.source_info.replace(traceback=traceback),
            )
            for eqn in made.jaxpr.eqns
        ]

    def _run(self, *given: Any) -> list[Any]:
        whole = dict(zip(self.given, given, strict=True))
        begin = [self._begin(eqn, axis, k, whole) for eqn, axis, k in self.results]

        each, (trips, left) = self.chunks.each, divmod(self.chunks.rows, self.chunks.each)
        if left:
            chunk = _Chunk(Chunks(self.chunks.rows, left), self.blocks, 0, whole)
            begin = self._run_chunk(chunk, begin, is_first=True)

        def trip(carry: list[Any], i: Any) -> tuple[list[Any], None]:
            chunk = _Chunk(self.chunks, self.blocks, left + i * each, whole)
            return self._run_chunk(chunk, carry), None

        end, _ = lax.scan(trip, begin, jnp.arange(trips, dtype=jnp.int32))
        avals = [aval_of(eqn.outvars[k]) for eqn, _, k in self.results]
        pairs = zip(end, avals, strict=True)
        return [of_type(value.reshape(aval.shape), aval) for value, aval in pairs]

    def _begin(self, eqn: JaxprEqn, axis: Axis, k: int, whole: Mapping[Var, Any]) -> Any:
        """What a result is before the first chunk."""
        aval = aval_of(eqn.outvars[k])
        combine = axis.combine(k)
        if combine is None:
            shape, d = aval.shape, axis.results[k]
            return lax.empty(shape if d is None else in_blocks(shape, d, self.blocks), aval.dtype)
        if combine == "fold":
            first = eqn.invars[axis.folds[k]]
            return first.val if isinstance(first, Literal) else whole[first]
        return jnp.full(aval.shape, neutral(combine, aval.dtype), combined_in(combine, aval.dtype))

    def _run_chunk(
        self, chunk: _Chunk, carry: Sequence[Any], *, is_first: bool = False
    ) -> list[Any]:
        for (eqn, axis, k), value in zip(self.results, carry, strict=True):
            if axis.combine(k) == "fold":
                chunk.folded[eqn.outvars[k]] = value
        for eqn, axis in self.eqns:
            chunk.run(eqn, axis)
        new = list[Any]()
        for (eqn, axis, k), before in zip(self.results, carry, strict=True):
            d, combine = axis.results[k], axis.combine(k)
            value = chunk.of(eqn.outvars[k], d)
            with _line_of(eqn):
                if d is not None:
                    value = value.reshape(in_blocks(value.shape, d, self.blocks))
                    d += self.blocks > 1
                    at = chunk.place(before.shape[d])
                    new.append(lax.dynamic_update_slice_in_dim(before, value, at, d))
                elif combine is None or combine == "fold":
                    new.append(value)
                else:
                    value = value.astype(before.dtype)
                    new.append(value if is_first else _TWO_OF[combine](before, value))
        return new


class _Chunk:
    """What there is of one chunk.

    Attributes:
      chunks: as large as this one.
      row: where in each block it begins.
      whole: what it is a chunk of.
      folded: of results, what the chunks before have made of them.
    """

    def __init__(self, chunks: Chunks, blocks: int, row: Any, whole: Mapping[Var, Any]) -> None:
        self.chunks, self.blocks, self.row = chunks, blocks, row
        self.whole = whole
        self.folded = dict[Var, Any]()
        self._values = dict[tuple[Var, int | None], Any]()

    def of(self, a: Any, d: int | None) -> Any:
        """An array, or the chunk of it along a dimension."""
        if isinstance(a, Literal):
            return a.val
        if (a, d) not in self._values:
            array = self.whole[a]
            if d is not None:
                shape = self._shape(a, d)
                blocks = array.reshape(in_blocks(array.shape, d, self.blocks))
                size, along = shape[d] // self.blocks, d + (self.blocks > 1)
                at = self.place(blocks.shape[along])
                array = lax.dynamic_slice_in_dim(blocks, at, size, along).reshape(shape)
            self._values[a, d] = array
        return self._values[a, d]

    def place(self, size: int) -> Any:
        """Where the chunk begins along a dimension of which a block has so many elements."""
        return self.row * (size // self.chunks.rows)

    def put(self, a: Any, d: int | None, value: Any) -> None:
        self._values[a, d] = value

    def run(self, eqn: JaxprEqn, axis: Axis) -> None:
        if not eqn.outvars:
            return  # Nothing that anybody could read is left of it.
        with _line_of(eqn), eqn.ctx.manager:
            operands = [self.of(a, d) for a, d in zip(eqn.invars, axis.operands, strict=True)]
            for k, operand in axis.folds.items():
                # Where nobody reads what comes of it, each chunk may begin anew.
                operands[operand] = self.folded.get(eqn.outvars[k], operands[operand])
            results = self._results(eqn, axis, operands)
        for v, d, value in zip(eqn.outvars, axis.results, results, strict=True):
            self.put(v, d, value)

    def _results(self, eqn: JaxprEqn, axis: Axis, operands: Sequence[Any]) -> Sequence[Any]:
        if axis.inside:
            pairs = zip(programs(eqn), axis.inside, strict=True)
            new = [self._inside(program.jaxpr, inside, axis, eqn) for program, inside in pairs]
            return bind(with_programs(eqn, new), *operands)
        result = self._shape(eqn.outvars[0], d := axis.results[0])
        if d is not None and decode(eqn) == Iota(d):
            return [self._numbers(aval_of(eqn.outvars[0]), d)]
        operand = self._shape(eqn.invars[0], axis.operands[0]) if operands else ()
        chunk, operands = with_chunks(eqn, operand, result), _as_wide(eqn, operands)
        if axis.combine(0) == "sum":
            chunk, operands = with_wide_sum(chunk, operands)
        if isinstance(says := decode(chunk), Convolution):
            return [_convolved(chunk, says, operands)]
        return bind(chunk, *operands)

    def _numbers(self, whole: Any, d: int) -> Any:
        """Of the elements of a chunk, where they are in the whole along a dimension."""
        size = whole.shape[d] // self.blocks
        own = self.chunks.of(size)
        shape = (*whole.shape[:d], own * self.blocks, *whole.shape[d + 1 :])
        # Counted in whole numbers: those of the result may have no room for, or no place of, each.
        count = jnp.arange(own * self.blocks, dtype=jnp.int32)
        if self.blocks > 1:
            count = count + count // own * (size - own)
        count = (count + self.place(size)).astype(whole.dtype)
        return lax.broadcast_in_dim(count, shape, (d,))

    def _shape(self, a: Atom, d: int | None) -> tuple[int, ...]:
        """Of a chunk along a dimension."""
        return tuple(self.chunks.of(n) if k == d else n for k, n in enumerate(shape_of(a)))

    def _inside(self, body: Jaxpr, inside: Inside, axis: Axis, around: JaxprEqn) -> Jaxpr:
        """A program inside an equation, on chunks."""
        shapes = list[jax.ShapeDtypeStruct]()
        for v in body.invars:
            aval, shape = aval_of(v), self._shape(v, inside.cut.get(v))
            shapes.append(jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type))

        def run(*inputs: Any) -> list[Any]:
            chunk = _Chunk(self.chunks, self.blocks, self.row, {})
            for v, value in zip(body.invars, inputs, strict=True):
                chunk.put(v, inside.cut.get(v), value)
            for n, eqn in enumerate(body.eqns):
                chunk.run(eqn, inside.axes.get(n) or whole_in(eqn))
            results = [
                chunk.of(v, inside.cut.get(v) if isinstance(v, Var) else None) for v in body.outvars
            ]
            types = [aval_of(v).dtype for v in body.outvars]
            if isinstance(decode(around), Remat):  # What a loop carries has one type all along.
                types = [combined_in(axis.combine(k), dtype) for k, dtype in enumerate(types)]
            pairs = zip(results, types, strict=True)
            return [jnp.asarray(value).astype(dtype) for value, dtype in pairs]

        made = jax.make_jaxpr(run)(*shapes)
        assert not made.consts
        return made.jaxpr


def in_blocks(shape: Sequence[int], d: int, blocks: int) -> tuple[int, ...]:
    """A shape with one of its dimensions as blocks of it."""
    whole = (shape[d],) if blocks == 1 else (blocks, shape[d] // blocks)
    return *shape[:d], *whole, *shape[d + 1 :]


def _convolved(eqn: JaxprEqn, says: Convolution, operands: Sequence[Any]) -> Any:
    """A convolution with its dimensions in the order for which XLA:CPU has a library, batch, space,
    features. In the entry it puts them so itself (``ConvCanonicalization``), in loops it does not:
    gradients of weights take twenty times as long there.
    """
    (batch, feature, *space), (out, in_, *window) = says.left, says.right
    left, right = (batch, *space, feature), (*window, in_, out)
    batch, feature, *space = says.result
    result = (batch, *space, feature)
    pairs = zip(operands, (left, right), strict=True)
    turned = [lax.transpose(operand, order) for operand, order in pairs]
    (made,) = bind(with_last_features(eqn), *turned)
    return lax.transpose(made, tuple(map(result.index, range(len(result)))))


def _as_wide(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """What is added up, in the type of the widest: of what chunks are summed to, some is float32
    where the program has it narrower."""
    if not is_sum(eqn):
        return operands
    types = {operand.dtype for operand in operands}
    if len(types) == 1:
        return operands
    widest = max(types, key=lambda dtype: dtype.itemsize)
    return [operand.astype(widest) for operand in operands]


def combined_in(combine: str | None, dtype: Any) -> Any:
    """The type of what chunks are combined to."""
    narrow = combine == "sum" and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.float32 if narrow else dtype


def _line_of(eqn: JaxprEqn) -> Any:
    return source_info_util.user_context(
        eqn.source_info.traceback, name_stack=eqn.source_info.name_stack
    )
