"""Calls that hide elementwise work on large arrays are replaced by what they call.

jit(update)(m, g)  ──►  the equations of `update`, with m and g in place of its arguments
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from jax.core import Atom
from jax.extend.core import Jaxpr, JaxprEqn, Var

from hlo_passes.equations import Call, decode, within
from memplan.streams.leading_axis import Extent, extent_of, rule_of


def inlined(jaxpr: Jaxpr, extents: AbstractSet[Extent]) -> tuple[Jaxpr, Callable[[Atom], Atom]]:
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
    extents: AbstractSet[Extent],
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
            yield within(eqn, *around).replace(invars=operands, outvars=results)
        else:
            yield eqn.replace(invars=operands) if operands != eqn.invars else eqn


def _callee(eqn: JaxprEqn) -> Jaxpr | None:
    """The program that an equation only calls, saying nothing else about it."""
    call = decode(eqn)
    if not isinstance(call, Call) or not call.is_bare or eqn.effects or call.body.constvars:
        return None
    return call.body


def _hides_slices(callee: Jaxpr, extents: AbstractSet[Extent]) -> bool:
    for eqn in callee.eqns:
        inner = _callee(eqn)
        if inner is not None and _hides_slices(inner, extents):
            return True
        if rule_of(eqn) and any(extent_of(v) in extents for v in (*eqn.invars, *eqn.outvars)):
            return True
    return False
