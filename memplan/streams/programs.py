"""Equations with a program inside: which operand is which input of it.

scan     constants, carry, slices of the stacks       a loop of known length
while    constants of the body, carry                 a loop
cond     of each branch: all operands but the index
remat, shard_map                                      all operands
jit, custom derivatives, other calls                  all operands
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
)

Path = tuple[int, ...]
"""Where an equation is: its index in the program; or the path of the equation around it, of
a cond the branch, and the index in the program inside that."""

# An equation of these may be replaced by the program inside it.
CALLS = frozenset(
    "jit pjit closed_call core_call eval_jaxpr custom_jvp_call custom_vjp_call".split()
)
REMATS = frozenset(("checkpoint", "remat", "remat2"))


class Program(NamedTuple):
    """A program inside an equation.

    Attributes:
      jaxpr: what runs.
      consts: values of its ``constvars``.
      first: the operand of the equation that is its first input; the others follow.
      step: what its equations' paths have behind the path of the equation around it.
    """

    jaxpr: Jaxpr
    consts: tuple[Any, ...]
    first: int
    step: Path = ()


def programs(eqn: JaxprEqn) -> tuple[Program, ...]:
    """The programs inside an equation that take its operands; none where it has none, or is
    of a kind that is not known."""
    name, params = eqn.primitive.name, eqn.params
    if name == "while":
        return (_program(params["body_jaxpr"], params["cond_nconsts"]),)
    if name == "cond":
        return tuple(_program(b, 1, (n,)) for n, b in enumerate(params["branches"]))
    if name in ("scan", "shard_map") or name in CALLS or name in REMATS:
        return (_program(params[_parameter(eqn)], 0),)
    return ()


def closed_over(jaxpr: Jaxpr, consts: Sequence[Any]) -> list[Any]:
    """The arrays that a program and those inside it close over, each once.

    Args:
      consts: values of the program's own ``constvars``.
    """
    found: dict[int, Any] = {id(const): const for const in consts}
    for eqn in jaxpr.eqns:
        for program in programs(eqn):
            inside = closed_over(program.jaxpr, program.consts)
            found |= {id(const): const for const in inside}
    return list(found.values())


def with_programs(eqn: JaxprEqn, jaxprs: Sequence[Jaxpr]) -> JaxprEqn:
    """An equation with other programs inside, in the order of `programs`; the same object where
    they are the same."""
    if all(new is old.jaxpr for new, old in zip(jaxprs, programs(eqn), strict=True)):
        return eqn
    if eqn.primitive.name == "cond":
        return eqn.replace(params={**eqn.params, "branches": tuple(jaxprs)})
    (jaxpr,) = jaxprs
    names = ("jaxpr", "body_jaxpr", "call_jaxpr")
    name = next(n for n in names if n in eqn.params)
    return eqn.replace(params={**eqn.params, name: jaxpr})


def inline_calls(jaxpr: Jaxpr) -> Jaxpr:
    """Replaces each call around a scan by what it calls, in `jaxpr` and in the programs inside.

    So that a stack that one jitted function makes and another one reads is seen to be one.
    Calls with constants of their own stay. Returns `jaxpr` itself when there is no such call.
    """
    if not any(_has_call_around_scan(eqn) for eqn in jaxpr.eqns):
        return jaxpr
    return _Inliner().program(jaxpr)


def _program(jaxpr: Jaxpr | ClosedJaxpr, first: int, step: Path = ()) -> Program:
    if isinstance(jaxpr, ClosedJaxpr):
        return Program(jaxpr.jaxpr, tuple(jaxpr.consts), first, step)
    return Program(jaxpr, (), first, step)


def _parameter(eqn: JaxprEqn) -> str:
    return "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"


def _has_scan(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "scan" or any(
        _has_scan(e) for program in programs(eqn) for e in program.jaxpr.eqns
    )


def _has_call_around_scan(eqn: JaxprEqn) -> bool:
    if _is_inlined(eqn):
        return True
    return any(_has_call_around_scan(e) for program in programs(eqn) for e in program.jaxpr.eqns)


def _is_inlined(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in CALLS and not programs(eqn)[0].consts and _has_scan(eqn)


class _Inliner:
    def program(self, jaxpr: Jaxpr) -> Jaxpr:
        eqns: list[JaxprEqn] = []
        results = self._equations(jaxpr, {}, eqns)
        return jaxpr.replace(eqns=eqns, outvars=results)

    def _equations(
        self, jaxpr: Jaxpr, values: dict[Var, Any], eqns: list[JaxprEqn], fresh: bool = False
    ) -> list[Any]:
        """Appends the equations of `jaxpr` to `eqns`; returns its results.

        Args:
          values: what its variables are called there.
          fresh: give the results of equations new variables, for the same program may be
            called twice.
        """

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else values.get(atom, atom)

        for eqn in jaxpr.eqns:
            operands = [read(a) for a in eqn.invars]
            if _is_inlined(eqn):
                (inner, *_) = programs(eqn)
                called = dict(zip(inner.jaxpr.invars, operands, strict=True))
                results = self._equations(inner.jaxpr, called, eqns, fresh=True)
                values.update(zip(eqn.outvars, results, strict=True))
                continue
            outvars = [_like(v) for v in eqn.outvars] if fresh else eqn.outvars
            values.update(zip(eqn.outvars, outvars, strict=True))
            params = self._parameters(eqn) if _has_call_around_scan(eqn) else eqn.params
            eqns.append(eqn.replace(invars=operands, outvars=outvars, params=params))
        return [read(a) for a in jaxpr.outvars]

    def _parameters(self, eqn: JaxprEqn) -> dict[str, Any]:
        def inside(found: Jaxpr | ClosedJaxpr) -> Jaxpr | ClosedJaxpr:
            if isinstance(found, ClosedJaxpr):
                return found.replace(jaxpr=self.program(found.jaxpr))
            return self.program(found)

        match eqn.primitive.name:
            case "while":
                return {**eqn.params, "body_jaxpr": inside(eqn.params["body_jaxpr"])}
            case "cond":
                return {**eqn.params, "branches": tuple(map(inside, eqn.params["branches"]))}
            case _:
                return {**eqn.params, _parameter(eqn): inside(eqn.params[_parameter(eqn)])}


def _like(var: Var) -> Var:
    return Var(var.aval)
