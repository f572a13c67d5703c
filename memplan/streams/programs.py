"""Programs inside the equations of a program: what they close over, and calls around scans."""

from __future__ import annotations

from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from hlo_passes.equations import Call, Scan, decode, programs, with_programs


def closed_over(jaxpr: Jaxpr) -> list[Any]:
    """The arrays that a program and those inside it close over, each once."""
    found: dict[int, Any] = {id(const): const for const in jaxpr.consts}
    for eqn in jaxpr.eqns:
        for program in programs(eqn):
            found |= {id(const): const for const in closed_over(program.jaxpr)}
    return list(found.values())


def inline_calls(jaxpr: Jaxpr) -> Jaxpr:
    """Replaces each call around a scan by what it calls, in `jaxpr` and in the programs inside.

    So that a stack that one jitted function makes and another one reads is seen to be one.
    Calls with constants of their own stay. Returns `jaxpr` itself when there is no such call.
    """
    if not any(_has_call_around_scan(eqn) for eqn in jaxpr.eqns):
        return jaxpr
    eqns: list[JaxprEqn] = []
    results = _inline(jaxpr, {}, eqns)
    return jaxpr.replace(eqns=eqns, outvars=results)


def _has_scan(eqn: JaxprEqn) -> bool:
    return isinstance(decode(eqn), Scan) or any(
        _has_scan(e) for program in programs(eqn) for e in program.jaxpr.eqns
    )


def _has_call_around_scan(eqn: JaxprEqn) -> bool:
    if _inlined(eqn):
        return True
    return any(_has_call_around_scan(e) for program in programs(eqn) for e in program.jaxpr.eqns)


def _inlined(eqn: JaxprEqn) -> Jaxpr | None:
    """The program that takes the place of an equation; None where it stays."""
    call = decode(eqn)
    if isinstance(call, Call) and not call.body.consts and _has_scan(eqn):
        return call.body
    return None


def _inline(
    jaxpr: Jaxpr, values: dict[Var, Any], eqns: list[JaxprEqn], fresh: bool = False
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
        if (callee := _inlined(eqn)) is not None:
            called = dict(zip(callee.invars, operands, strict=True))
            results = _inline(callee, called, eqns, fresh=True)
            values.update(zip(eqn.outvars, results, strict=True))
            continue
        outvars = [Var(v.aval) for v in eqn.outvars] if fresh else eqn.outvars
        values.update(zip(eqn.outvars, outvars, strict=True))
        inside = with_programs(eqn, [inline_calls(p.jaxpr) for p in programs(eqn)])
        eqns.append(inside.replace(invars=operands, outvars=outvars))
    return [read(a) for a in jaxpr.outvars]
