"""The body of a loop, run on one slice of each stack: that of its iteration.

A stack that the body works on at index i only, in iteration i, is replaced by a stack of one
slice, a *row*, and an equation that works at index i by the same equation at index 0::

    dynamic_slice w[L, D, F] (i, 0, f)          ──►  dynamic_slice row[1, D, F] (0, 0, f)
    scatter kv[L, T, H] (i, pos) update         ──►  scatter row[1, T, H] (0, pos) update
    add_any sum (dynamic_update_slice 0 g (i))  ──►  add_any row (dynamic_update_slice 0 g (0))

The last is the derivative of indexing: a stack of zeros but for slice i, added to a sum. An
equation that reads or writes just the slice is not needed any more. Calls in the way are
inlined; remat and branches take rows and give rows. Any other equation needs the stack whole.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
from jax.core import AbstractValue, Atom, ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, mapped_aval, unmapped_aval

from hlo_passes.equations import (
    BroadcastInDim,
    Call,
    Concatenate,
    Cond,
    DynamicSlice,
    DynamicUpdateSlice,
    Gather,
    Program,
    Remat,
    Scatter,
    Squeeze,
    as_broadcast,
    as_squeeze,
    decode,
    is_sum,
    programs,
    with_programs,
    with_shape,
    within,
)
from memplan.streams.counters import Inputs, inputs_inside, known_integers, value_of


class Row(NamedTuple):
    """What a variable of the body, a stack, is at the index of the iteration.

    Attributes:
      stack: what it is at every other index: an input of the body, or zeros made in it.
      is_zeros: whether it is such zeros.
      row: an array [1, ...].
    """

    stack: Var
    is_zeros: bool
    row: Atom


@dataclass
class _Scope:
    """A program that is run.

    Attributes:
      known: its counters.
      values: what its variables are now.
      makers: the equations that make them.
      is_called: whether it may be called again, so that its variables need new names.
    """

    known: Mapping[Var, np.ndarray]
    values: MutableMapping[Var, Any]
    makers: Mapping[Var, JaxprEqn]
    is_called: bool

    def read(self, atom: Atom) -> Any:
        """A row or an atom."""
        return self.values.get(atom, atom) if isinstance(atom, Var) else atom

    def operands(self, eqn: JaxprEqn) -> list[Any]:
        """What an equation reads, rows and atoms."""
        return [self.read(a) for a in eqn.invars]


class Rows:
    """Runs a body.

    Attributes:
      eqns: the equations so far.
      whole: the stacks that are not run on rows: those that were given, and those that an
        equation needs more of. When one is found, run the body anew, with that one whole.
    """

    def __init__(self, at: np.ndarray, body: Jaxpr, whole: Collection[Var]) -> None:
        """`at` is the index in each iteration, in the order of the inputs that are known."""
        self.eqns: list[JaxprEqn] = []
        self.whole = set(whole)
        self._at = at
        self._pattern = body.eqns[0]
        self._around: list[JaxprEqn] = []
        # Of rows, the arrays [...] that they are made of.
        self._slices: dict[Atom, Atom] = {}
        # Of rows of zeros that are nothing but zeros, the equations that make the zeros.
        self._untouched: dict[Atom, JaxprEqn] = {}

    def of_slice(self, stack: Var, found: Var) -> Row:
        """The row of a stack whose slice is `found`."""
        return Row(stack, False, self._expanded(found, self._pattern))

    def of_scalar(self, stack: Var, maker: JaxprEqn) -> Row:
        """The row of a stack that `maker` makes of a literal, each element the same."""
        return Row(stack, False, self._uniform(maker, self._pattern))

    def slice_of(self, row: Row) -> Atom:
        """The array [...] that a row [1, ...] is made of."""
        return self._squeezed(row.row, self._pattern)

    def run(
        self, jaxpr: Jaxpr, operands: Sequence[Any], inputs: Inputs, *, is_called: bool = False
    ) -> list[Any]:
        """Runs a program on rows and atoms; returns its results, rows and atoms.

        Args:
          inputs: what is known of its inputs.
          is_called: whether its variables need new names.
        """
        values = dict(zip(jaxpr.invars, operands, strict=True))
        scope = _Scope(known_integers(jaxpr, inputs), values, makers(jaxpr), is_called)
        for eqn in jaxpr.eqns:
            values.update(zip(eqn.outvars, self._equation(eqn, scope), strict=True))
        return [scope.read(a) for a in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, scope: _Scope) -> Sequence[Any]:
        results = self._on_rows(eqn, scope)
        if results is None and (zeros := self._zeros_among(eqn.invars, scope)):
            # They may be no stack, but as large as one by chance.
            scope = replace(scope, values=ChainMap(zeros, scope.values))
            results = self._on_rows(eqn, scope)
        if results is not None:
            return results
        operands = scope.operands(eqn)
        if rows := _rows(operands):
            self.whole |= {r.stack for r in rows}
            return eqn.outvars
        if decode(eqn) == Squeeze((0,)) and operands[0] in self._slices:
            return [self._slices[operands[0]]]
        outvars = [Var(v.aval) for v in eqn.outvars] if scope.is_called else eqn.outvars
        self._emit(eqn, invars=operands, outvars=outvars)
        return outvars

    def _on_rows(self, eqn: JaxprEqn, scope: _Scope) -> Sequence[Any] | None:
        """The results of an equation that has to do with rows; None where it has not, or where
        it needs the stacks whole."""
        decoded, operands = decode(eqn), scope.operands(eqn)
        rows = _rows(operands)
        gives = any(is_stack(v, len(self._at)) for v in eqn.outvars)
        match decoded:
            case BroadcastInDim() if gives and _is_zero(eqn.invars[0]):
                (stack,) = eqn.outvars
                return None if stack in self.whole else [self._zeros(eqn)]
            case Cond() | Remat():
                return self._inside(eqn, scope) if rows or gives else None
            case Call(is_jit=is_jit) if rows or (gives and is_jit):
                return self._called(eqn, scope)
            case _ if is_sum(eqn) and len(rows) == 2:
                return self._sum(eqn, *rows)
            case _ if len(rows) != 1 or rows[0] is not operands[0]:
                return None
            case DynamicSlice(sizes):
                return self._read(eqn, sizes, rows[0], scope)
            case DynamicUpdateSlice():
                return self._write(eqn, rows[0], scope)
            case Gather():
                return self._gather(eqn, decoded, rows[0], scope)
            case Scatter():
                return self._scatter(eqn, decoded, rows[0], scope)
            case _:
                return None

    # --- zeros ------------------------------------------------------------------------------

    def _zeros(self, maker: JaxprEqn) -> Row:
        row = Row(maker.outvars[0], True, self._uniform(maker, maker))
        self._untouched[row.row] = maker
        return row

    def _zeros_among(self, atoms: Sequence[Atom], scope: _Scope) -> dict[Var, Any]:
        """Arrays of zeros, whole, for those variables that are nothing but zeros."""
        found: dict[Var, Any] = {}
        for var in variables(atoms):
            value = scope.read(var)
            if isinstance(value, Row) and value.row in self._untouched:
                maker = self._untouched[value.row]
                found[var] = self._new(maker, maker.invars, var.aval)
        return found

    # --- equations at the index of the iteration --------------------------------------------

    def _read(
        self, eqn: JaxprEqn, sizes: tuple[int, ...], row: Row, scope: _Scope
    ) -> Sequence[Any] | None:
        _, at, *starts = eqn.invars
        if sizes[0] != 1 or not self._is_index(at, scope):
            return None
        if sizes == _shape(row.row):
            return [row.row]
        return self._at_zero(eqn, [row.row, _zero(at), *map(scope.read, starts)])

    def _write(self, eqn: JaxprEqn, row: Row, scope: _Scope) -> Sequence[Any] | None:
        update, at, *starts = eqn.invars[1:]
        if _shape(update)[0] != 1 or not self._is_index(at, scope):
            return None
        if _shape(update) == _shape(row.row):
            return [row._replace(row=scope.read(update))]
        operands = [row.row, scope.read(update), _zero(at), *map(scope.read, starts)]
        return self._made(eqn, row, operands)

    def _gather(
        self, eqn: JaxprEqn, gather: Gather, row: Row, scope: _Scope
    ) -> Sequence[Any] | None:
        indices = eqn.invars[1]
        if 0 not in gather.axes or gather.sizes[0] != 1:
            return None
        zeroed = self._zeroed(eqn, indices, gather.axes.index(0), scope)
        if zeroed is None:
            return None
        is_slice = gather.sizes == _shape(row.row) and _shape(indices) == (1,)
        if is_slice and gather.collapsed == (0,):
            return [self._squeezed(row.row, eqn)]
        return self._at_zero(eqn, [row.row, zeroed])

    def _scatter(
        self, eqn: JaxprEqn, scatter: Scatter, row: Row, scope: _Scope
    ) -> Sequence[Any] | None:
        _, indices, update = eqn.invars
        if 0 not in scatter.axes:
            return None
        if 0 not in scatter.inserted and _shape(update)[scatter.window[0]] != 1:
            return None
        zeroed = self._zeroed(eqn, indices, scatter.axes.index(0), scope)
        if zeroed is None:
            return None
        is_slice = _shape(update) == _shape(row.row)[1:] and _shape(indices) == (1,)
        if scatter.replaces and is_slice and scatter.inserted == (0,):
            return [row._replace(row=self._expanded(scope.read(update), eqn))]
        return self._made(eqn, row, [row.row, zeroed, scope.read(update)])

    def _sum(self, eqn: JaxprEqn, left: Row, right: Row) -> Sequence[Any] | None:
        if left.is_zeros:
            left, right = right, left
        return self._made(eqn, left, [left.row, right.row]) if right.is_zeros else None

    def _at_zero(self, eqn: JaxprEqn, operands: list[Atom]) -> list[Var]:
        outvars = [Var(v.aval) for v in eqn.outvars]
        self._emit(eqn, invars=operands, outvars=outvars)
        return outvars

    def _made(self, eqn: JaxprEqn, row: Row, operands: list[Atom]) -> list[Row]:
        """What an equation makes of `row`."""
        made = Var(row.row.aval)
        self._emit(eqn, invars=operands, outvars=[made])
        return [row._replace(row=made)]

    def _is_index(self, index: Atom, scope: _Scope) -> bool:
        """Whether a scalar, or each of an array, is in every iteration the stacks' index."""
        value = value_of(index, scope.known, len(self._at))
        return value is not None and bool((value.T == self._at).all())

    def _zeroed(self, eqn: JaxprEqn, indices: Atom, axis: int, scope: _Scope) -> Atom | None:
        """An array [..., axes] of indices with 0 for the index of the iteration; None where
        there is another one in that place."""
        shape = _shape(indices)
        if shape[-1] == 1:
            if not self._is_index(indices, scope):
                return None
            return self._new(as_broadcast(eqn, shape, ()), [_zero(indices)], indices.aval)
        maker = scope.makers.get(cast(Var, indices))
        if maker is None or decode(maker) != Concatenate(len(shape) - 1):
            return None
        if len(maker.invars) != shape[-1]:
            return None
        operands = [scope.read(a) for a in maker.invars]
        zeroed = self._zeroed(eqn, maker.invars[axis], 0, scope)
        if zeroed is None:
            return None
        operands[axis] = zeroed
        return self._new(maker.replace(source_info=eqn.source_info), operands, indices.aval)

    # --- programs inside --------------------------------------------------------------------

    def _called(self, eqn: JaxprEqn, scope: _Scope) -> Sequence[Any] | None:
        (program,) = programs(eqn)
        if program.jaxpr.consts:
            return None
        (inputs,) = inputs_inside(eqn, scope.known, len(self._at))
        self._around.append(eqn)
        results = self.run(program.jaxpr, scope.operands(eqn), inputs, is_called=True)
        self._around.pop()
        return results

    def _inside(self, eqn: JaxprEqn, scope: _Scope) -> Sequence[Any] | None:
        """Remat and branches."""
        inner, operands = programs(eqn), scope.operands(eqn)
        known = inputs_inside(eqn, scope.known, len(self._at))
        found = [
            self._program(p, operands[p.first :], i) for p, i in zip(inner, known, strict=True)
        ]
        if not _rows((*operands, *found[0][1])):
            return None
        kinds = [[_kind(r) for r in results] for _, results in found]
        if any(kind != kinds[0] for kind in kinds):
            self.whole |= {r.stack for _, results in found for r in _rows(results)}
            return eqn.outvars
        outvars = [
            Var(r.row.aval if isinstance(r, Row) else v.aval)
            for v, r in zip(eqn.outvars, found[0][1], strict=True)
        ]
        new = with_programs(eqn, [jaxpr for jaxpr, _ in found])
        invars = [o.row if isinstance(o, Row) else o for o in operands]
        self._emit(new, invars=invars, outvars=outvars)
        return [
            r._replace(row=v) if isinstance(r, Row) else v
            for v, r in zip(outvars, found[0][1], strict=True)
        ]

    def _program(
        self, program: Program, operands: Sequence[Any], inputs: Inputs
    ) -> tuple[Jaxpr, list[Any]]:
        """A program that takes and gives rows, and its results."""
        jaxpr, outside = program.jaxpr, (self.eqns, self._around)
        self.eqns, self._around = [], []
        given = [
            o._replace(row=Var(o.row.aval)) if isinstance(o, Row) else v
            for v, o in zip(jaxpr.invars, operands, strict=True)
        ]
        results = self.run(jaxpr, given, inputs)
        invars, outvars = (
            [a.row if isinstance(a, Row) else a for a in atoms] for atoms in (given, results)
        )
        new = jaxpr.replace(invars=invars, outvars=outvars, eqns=live(self.eqns, outvars))
        self.eqns, self._around = outside
        return new, results

    # --- new equations ----------------------------------------------------------------------

    def _expanded(self, array: Atom, pattern: JaxprEqn) -> Var:
        """An array [...] as a row [1, ...]."""
        aval = cast(ShapedArray, unmapped_aval(1, 0, array.aval))
        like = as_broadcast(pattern, aval.shape, range(1, len(aval.shape)))
        row = self._new(like, [array], aval)
        self._slices[row] = array
        return row

    def _squeezed(self, row: Atom, pattern: JaxprEqn) -> Atom:
        """A row [1, ...] as an array [...]."""
        if row not in self._slices:
            aval = mapped_aval(1, 0, row.aval)
            self._slices[row] = self._new(as_squeeze(pattern, 0), [row], aval)
        return self._slices[row]

    def _uniform(self, maker: JaxprEqn, pattern: JaxprEqn) -> Var:
        """The row of a stack that is a literal, broadcast."""
        (stack,) = maker.outvars
        aval = unmapped_aval(1, 0, mapped_aval(len(self._at), 0, stack.aval))
        like = with_shape(maker, (1, *_shape(stack)[1:]))
        return self._new(like.replace(source_info=pattern.source_info), maker.invars, aval)

    def _new(self, eqn: JaxprEqn, operands: Sequence[Atom], aval: AbstractValue) -> Var:
        """The result of an equation like `eqn`, with other operands."""
        made = Var(aval)
        self._emit(eqn, invars=operands, outvars=[made])
        return made

    def _emit(self, eqn: JaxprEqn, *, invars: Sequence[Any], outvars: Sequence[Var]) -> None:
        scoped = within(eqn, *self._around)
        self.eqns.append(scoped.replace(invars=list(invars), outvars=list(outvars)))


def is_stack(var: Var, length: int) -> bool:
    """Whether it is an array of so many slices, each on all the devices that it is on."""
    aval = var.aval
    if not isinstance(aval, ShapedArray) or aval.shape[:1] != (length,):
        return False
    return aval.sharding.spec[0] is None


def is_broadcast_literal(eqn: JaxprEqn) -> bool:
    """Whether an equation makes an array whose elements are all the same literal."""
    return isinstance(decode(eqn), BroadcastInDim) and isinstance(eqn.invars[0], Literal)


def makers(jaxpr: Jaxpr) -> dict[Var, JaxprEqn]:
    """The equation that makes a variable."""
    return {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}


def live(eqns: Sequence[JaxprEqn], results: Sequence[Atom]) -> list[JaxprEqn]:
    """Those of `eqns` that `results` need, or that have effects."""
    read, kept = variables(results), list[JaxprEqn]()
    for eqn in reversed(eqns):
        if eqn.effects or not read.isdisjoint(eqn.outvars):
            read |= variables(eqn.invars)
            kept.append(eqn)
    return kept[::-1]


def variables(atoms: Iterable[Atom]) -> set[Var]:
    """Those that are no literals."""
    return {a for a in atoms if isinstance(a, Var)}


def _rows(values: Iterable[Any]) -> list[Row]:
    return [v for v in values if isinstance(v, Row)]


def _kind(result: Any) -> Var | bool:
    """What the branches of a cond must give alike: rows of one stack, of zeros, or no row."""
    return isinstance(result, Row) and (result.is_zeros or result.stack)


def _is_zero(atom: Atom) -> bool:
    return isinstance(atom, Literal) and not np.asarray(atom.val).any()


def _zero(index: Atom) -> Literal:
    aval = ShapedArray((), cast(ShapedArray, index.aval).dtype)
    return Literal(np.zeros((), aval.dtype), aval)


def _shape(atom: Atom) -> tuple[int, ...]:
    return cast(ShapedArray, atom.aval).shape
