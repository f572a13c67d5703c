"""A program on larger arrays, with results that are those on smaller ones.

    f at a bucket's sizes ─┐
    f at the least ones   ─┼─ trace ─►  the same equations, ─ rules ─►  f on the bucket's sizes,
    f in between          ─┘            other numbers                   told how many are there

A program is traced at the sizes of the bucket, at the least of those that come into it, and in
between; its equations have to be the same. The numbers in which they differ are functions of the
sizes; in the padded program these are computed from the sizes it is told. Equation by equation it
is known which elements of each array are those that there would be without padding (`rules`); an
equation for which that is not known is an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from hlo_passes.equations import (
    Call,
    Cond,
    Remat,
    Scan,
    While,
    bind,
    name,
    of_type,
    programs,
    says_alike,
    with_programs,
)
from memplan.buckets.dims import Dim, dim
from memplan.buckets.errors import PaddingError
from memplan.buckets.rules import Step, Unknown, Value, results_of, size_of
from memplan.buckets.sizes import Probes, Size
from memplan.streams.leading_axis import shape_of
from memplan.streams.rewrite import line_of

_LESS = "Give this program no bucket, or write what is done there for a fixed size."
_ONE_PROGRAM = (
    "A bucket is for sizes at which a function does the same: let one end where it begins to do "
    "something else (sizes of 1 are often a case of their own)."
)


def padded(
    probes: Probes, jaxprs: Sequence[Jaxpr], arrays: Sequence[Any], sizes: Mapping[str, Any]
) -> list[Value]:
    """Runs, or traces, a program on arrays of a bucket's sizes.

    Args:
      jaxprs: the program, at each of the points of `probes`.
      arrays: of the sizes of the first, whatever is beyond those that are told.
      sizes: of each axis how many elements there are, int32[].

    Returns:
      The results, and which of their elements are those without padding.

    Raises:
      PaddingError: when they would not be the same.
    """
    given = [
        Value(array, _dims(probes, [jaxpr.invars[n] for jaxpr in jaxprs]))
        for n, array in enumerate(arrays)
    ]
    return _Walk(probes, sizes).run(jaxprs, given)


def _dims(probes: Probes, atoms: Sequence[Any]) -> tuple[Dim, ...]:
    return tuple(dim(size) for size in _sizes(probes, atoms))


def _sizes(probes: Probes, atoms: Sequence[Any]) -> tuple[Size, ...]:
    shapes = [getattr(atom.aval, "shape", ()) for atom in atoms]
    if len({*map(len, shapes)}) > 1:
        raise Unknown("an array has dimensions at some sizes that it has not at others")
    what = "how many elements a dimension has"
    return tuple(size_of(probes, numbers, what) for numbers in zip(*shapes, strict=True))


class _Walk:
    """Runs programs on values."""

    def __init__(
        self, probes: Probes, sizes: Mapping[str, Any], around: tuple[JaxprEqn, ...] = ()
    ) -> None:
        self.probes = probes
        self.bucket = probes.points[0]
        self.sizes = sizes
        self.around = around

    def _within(self, step: Step) -> _Walk:
        """For what is inside an equation."""
        return _Walk(self.probes, self.sizes, (*self.around, step.eqn))

    def _line(self, eqn: JaxprEqn) -> str:
        """Where an equation is in the user's program; or the innermost around it that is there."""
        for each in (eqn, *reversed(self.around)):
            if line := source_info_util.summarize(each.source_info):
                return line
        return "its beginning"

    def run(self, jaxprs: Sequence[Jaxpr], given: Sequence[Value]) -> list[Value]:
        known: dict[Var, Value] = dict(zip(jaxprs[0].invars, given, strict=True))
        # What a variable of each program is called in the first.
        names = [
            dict(
                zip(
                    (*j.invars, *j.constvars),
                    (*jaxprs[0].invars, *jaxprs[0].constvars),
                    strict=True,
                )
            )
            for j in jaxprs
        ]
        if len({len(j.eqns) for j in jaxprs}) > 1:
            counts = ", ".join(str(len(j.eqns)) for j in jaxprs)
            raise self._other(jaxprs, f"has {counts} equations")
        for n, var in enumerate(jaxprs[0].constvars):
            known[var] = self._constant(jaxprs, n)
        for eqns in zip(*(j.eqns for j in jaxprs), strict=True):
            self._equation(eqns, known, names)
        results = zip(*(j.outvars for j in jaxprs), strict=True)
        try:
            return [self._read(atoms, known, names) for atoms in results]
        except Unknown as unknown:
            raise PaddingError(f"a result: {unknown}", self._end(jaxprs[0]), _LESS) from None

    def _end(self, jaxpr: Jaxpr) -> str:
        """The last line of a program."""
        return self._line(jaxpr.eqns[-1]) if jaxpr.eqns else "its end"

    def _other(self, jaxprs: Sequence[Jaxpr], what: str) -> PaddingError:
        """The error about programs of which one has more equations than another."""
        rows = itertools.zip_longest(*(j.eqns for j in jaxprs))
        differing = (
            [eqn for eqn in row if eqn is not None]
            for row in rows
            if len({None if eqn is None else name(eqn) for eqn in row}) > 1
        )
        line = self._line(next(differing)[0])
        at = "; ".join(_told(point) for point in self.probes.points)
        return PaddingError(f"the program {what} at sizes of {at}", line, _ONE_PROGRAM)

    def _constant(self, jaxprs: Sequence[Jaxpr], n: int) -> Value:
        """An array that the program closes over."""
        consts = [j.consts[n] for j in jaxprs]
        try:
            dims = _dims(self.probes, [j.constvars[n] for j in jaxprs])
        except Unknown as unknown:
            raise PaddingError(str(unknown), "an array it closes over", _LESS) from None
        first = consts[0]
        for const in consts[1:]:
            both = tuple(slice(min(n, m)) for n, m in zip(first.shape, const.shape, strict=True))
            if const is not first and not _are_equal(first[both], const[both]):
                raise PaddingError(
                    f"an array {jax.typeof(first)} that it closes over has other elements at other "
                    "sizes, not fewer of them",
                    "where it is made",
                    "Make it with jax.numpy, of what has no size, or give it as an argument.",
                )
        return Value(first, dims)

    def _read(
        self, atoms: Sequence[Any], known: Mapping[Var, Value], names: Sequence[Mapping[Var, Var]]
    ) -> Value:
        first = atoms[0]
        if isinstance(first, Literal):
            if not all(isinstance(a, Literal) for a in atoms):
                raise Unknown("a number at some sizes is an array at others")
            return Value(self._number([a.val for a in atoms], first.aval), ())
        pairs = zip(names, atoms, strict=True)
        called = [of.get(a) if isinstance(a, Var) else None for of, a in pairs]
        if len({*called}) > 1:
            raise Unknown("it reads other arrays at other sizes")
        return known[first]

    def _number(self, found: Sequence[Any], aval: Any) -> Any:
        """A number of the program, which may depend on sizes."""
        if all(n is found[0] or n == found[0] or (n != n and found[0] != found[0]) for n in found):
            return found[0]
        whole = not jnp.issubdtype(aval.dtype, jnp.inexact)
        numbers = [int(n) if whole else float(n) for n in found]
        function = self.probes.number(numbers, np.float32 if whole else aval.dtype)
        if function is None:
            shown = ", ".join(str(n) for n in found)
            raise Unknown(f"a number depends on sizes in a way that is not known ({shown})")
        return jnp.asarray(function(self.sizes)).astype(aval.dtype)

    def _equation(
        self,
        eqns: tuple[JaxprEqn, ...],
        known: dict[Var, Value],
        names: Sequence[dict[Var, Var]],
    ) -> None:
        eqn = eqns[0]
        if len({*map(name, eqns)}) > 1:
            told = " or ".join(dict.fromkeys(map(name, eqns)))
            raise PaddingError(f"it is {told}, by the size", self._line(eqn), _ONE_PROGRAM)
        try:
            operands = tuple(
                self._read(atoms, known, names)
                for atoms in zip(*(e.invars for e in eqns), strict=True)
            )
            sizes = tuple(
                _sizes(self.probes, made) for made in zip(*(e.outvars for e in eqns), strict=True)
            )
            if not all(says_alike(eqn, other) for other in eqns[1:]):
                raise Unknown("what it does depends on sizes, and it is not known how")
            with line_of(eqn), eqn.ctx.manager:
                step = Step(eqns, operands, sizes, self.probes, self.bucket, self.sizes)
                results = self._results(step)
        except Unknown as unknown:
            raise PaddingError(f"{name(eqn)}: {unknown}", self._line(eqn), _LESS) from None
        variables = zip(*(e.outvars for e in eqns), strict=True)
        for made, value in zip(variables, results, strict=True):
            known[made[0]] = value
            for of, var in zip(names, made, strict=True):
                of[var] = made[0]

    def _results(self, step: Step) -> list[Value]:
        if not programs(step.eqn):
            return results_of(step)
        if step.eqn.effects and not all(value.is_fixed for value in step.operands):
            raise Unknown("it has effects, which would see what is beyond")
        match step.says[0]:
            case Call():
                bodies = [programs(eqn)[0].jaxpr for eqn in step.eqns]
                return self._within(step).run(bodies, step.operands)
            case Remat():
                return self._remat(step)
            case Scan():
                return self._scan(step)
            case While():
                return self._while(step)
            case Cond():
                return self._cond(step)
            case _:
                if all(value.is_fixed for value in step.operands):
                    return results_of(step)
                raise Unknown("what is in it may see how many elements there are")

    def _remat(self, step: Step) -> list[Value]:
        bodies = [programs(eqn)[0].jaxpr for eqn in step.eqns]
        dims: list[tuple[Dim, ...]] = []

        def run(*arrays: Any) -> list[Any]:
            given = [Value(a, v.dims) for a, v in zip(arrays, step.operands, strict=True)]
            made = self._within(step).run(bodies, given)
            dims[:] = [value.dims for value in made]
            return _typed(made, bodies[0].outvars)

        arrays = [value.array for value in step.operands]
        closed = jax.make_jaxpr(run)(*arrays)
        body = closed.jaxpr.replace(
            constvars=[], consts=[], invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars]
        )
        results = bind(with_programs(step.eqn, [body]), *closed.consts, *arrays)
        return [Value(array, of) for array, of in zip(results, dims, strict=True)]

    def _scan(self, step: Step) -> list[Value]:
        scans = [scan for scan in step.says if isinstance(scan, Scan)]
        scan, bodies = scans[0], [scan.body for scan in scans]
        first, carried = scan.first_stack, scan.carried
        length = step.number([scan.length for scan in scans], "how often it runs")
        constants, carry = step.operands[: scan.constants], step.operands[scan.constants : first]
        stacks = step.operands[first:]
        for stack in stacks:
            step.single(stack.dims[0], "slices that a loop takes")
        made: list[Value] = []

        def trip(of: Sequence[tuple[Dim, ...]]) -> Callable[[Any, Any], Any]:
            def body(carried_in: Any, xs: Any) -> Any:
                i, slices = xs
                given = [Value(a, d) for a, d in zip(carried_in, of, strict=True)]
                rest = [Value(a, v.dims[1:]) for a, v in zip(slices, stacks, strict=True)]
                made[:] = self._within(step).run(bodies, [*constants, *given, *rest])
                arrays = _typed(made, bodies[0].outvars)
                if length.number is None:
                    # A trip beyond those that there are leaves all as it was.
                    there = i < length.at(self.sizes)
                    arrays[:carried] = [
                        lax.select(jnp.broadcast_to(there, new.shape), new, old)
                        for new, old in zip(arrays[:carried], carried_in, strict=True)
                    ]
                return arrays[:carried], arrays[carried:]

            return body

        begin = [
            of_type(jnp.asarray(v.array), var.aval)
            for v, var in zip(carry, bodies[0].invars[scan.constants : first], strict=True)
        ]
        counts = jnp.arange(scan.length, dtype=jnp.int32)
        dims = [value.dims for value in carry]
        for _ in range(3):
            end, results = lax.scan(
                trip(dims),
                begin,
                (counts, [v.array for v in stacks]),
                length=scan.length,
                reverse=scan.reverse,
                unroll=scan.unroll,
            )
            after = [value.dims for value in made[:carried]]
            if _joined(dims, after) == dims:
                break
            dims = _joined(dims, after)
        else:
            raise Unknown("what a loop carries is there in other parts after each trip")
        whole = [
            Value(array, (dim(length), *value.dims))
            for array, value in zip(results, made[carried:], strict=True)
        ]
        return [*(Value(a, d) for a, d in zip(end, dims, strict=True)), *whole]

    def _while(self, step: Step) -> list[Value]:
        loops = [loop for loop in step.says if isinstance(loop, While)]
        loop = loops[0]
        asked, first = loop.condition_constants, loop.first_carried
        of_condition, of_body = step.operands[:asked], step.operands[asked:first]
        carry = step.operands[first:]
        # As `vmap` has them; a row that has ended stays as it is.
        by_rows = bool(shape_of(loop.condition.outvars[0]))
        made: list[Value] = []

        def given(arrays: Sequence[Any], dims: Sequence[tuple[Dim, ...]]) -> list[Value]:
            return [Value(a, d) for a, d in zip(arrays, dims, strict=True)]

        begin = [
            of_type(jnp.asarray(v.array), var.aval)
            for v, var in zip(carry, loop.body.invars[loop.body_constants :], strict=True)
        ]
        dims = [value.dims for value in carry]
        for _ in range(3):

            def goes_on(arrays: Any, of: Any = dims) -> Any:
                """bool[], or one for each row, of which those beyond what there is never do."""
                conditions = [loop.condition for loop in loops]
                (found,) = self._within(step).run(conditions, [*of_condition, *given(arrays, of)])
                return step.masked(found, range(len(found.dims)), False)

            def body(arrays: Any, of: Any = dims) -> Any:
                bodies = [loop.body for loop in loops]
                made[:] = self._within(step).run(bodies, [*of_body, *given(arrays, of)])
                new = _typed(made, loop.body.outvars)
                if by_rows:
                    new = [
                        _of_rows(goes_on(arrays), *pair) for pair in zip(new, arrays, strict=True)
                    ]
                return new

            def condition(arrays: Any) -> Any:
                return jnp.any(goes_on(arrays))

            end = lax.while_loop(condition, body, begin)
            after = [value.dims for value in made]
            if _joined(dims, after) == dims:
                return given(end, dims)
            dims = _joined(dims, after)
        raise Unknown("what a loop carries is there in other parts after each trip")

    def _cond(self, step: Step) -> list[Value]:
        branches = [[p.jaxpr for p in programs(eqn)] for eqn in step.eqns]
        number, *operands = step.operands
        dims: list[list[tuple[Dim, ...]]] = []

        def branch(n: int) -> Callable[..., list[Any]]:
            bodies = [of[n] for of in branches]

            def run(*arrays: Any) -> list[Any]:
                given = [Value(a, v.dims) for a, v in zip(arrays, operands, strict=True)]
                made = self._within(step).run(bodies, given)
                dims.append([value.dims for value in made])
                return _typed(made, bodies[0].outvars)

            return run

        functions = [branch(n) for n in range(len(branches[0]))]
        results = lax.switch(number.array, functions, *(v.array for v in operands))
        found = dims[0]
        for other in dims[1:]:
            found = _joined(found, other)
        return [Value(array, of) for array, of in zip(results, found, strict=True)]


def _of_rows(which: Any, new: Any, old: Any) -> Any:
    """Of those rows the new ones."""
    which = which.reshape(which.shape + (1,) * (new.ndim - which.ndim))
    return jnp.where(which, new, old)


def _joined(
    dims: Sequence[tuple[Dim, ...]], others: Sequence[tuple[Dim, ...]]
) -> list[tuple[Dim, ...]]:
    """The dimensions of arrays that are either of two."""
    found: list[tuple[Dim, ...]] = []
    for of, other in zip(dims, others, strict=True):
        joined: list[Dim] = []
        for a, b in zip(of, other, strict=True):
            if a.uniform and b.uniform:
                joined.append(a)
            elif a.uniform or b.uniform or a.factors == b.factors:
                joined.append((b if a.uniform else a).varied)
            else:
                raise Unknown(f"elements along {a} take the place of those along {b}")
        found.append(tuple(joined))
    return found


def _typed(values: Sequence[Value], variables: Sequence[Any]) -> list[Any]:
    return [
        of_type(jnp.asarray(value.array), var.aval)
        for value, var in zip(values, variables, strict=True)
    ]


def _are_equal(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def _told(point: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in point.items())
