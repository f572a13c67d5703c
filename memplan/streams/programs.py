"""Programs inside the equations of a program: what they close over, and calls around scans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from hlo_passes.equations import (
    Call,
    Cond,
    DevicePut,
    Remat,
    Scan,
    While,
    decode,
    programs,
    with_programs,
    with_puts,
)


def closed_over(jaxpr: Jaxpr) -> list[Any]:
    """The arrays that a program and those inside it close over, each once."""
    found: dict[int, Any] = {id(const): const for const in jaxpr.consts}
    for eqn in jaxpr.eqns:
        for program in programs(eqn):
            found |= {id(const): const for const in closed_over(program.jaxpr)}
    return list(found.values())


def without_puts(jaxpr: Jaxpr, is_there: Callable[[int, Any], bool]) -> Jaxpr:
    """Without each ``jax.device_put`` of an argument to where it is already, as a step has it whose
    arguments are on the host: where they are is said otherwise here. Returns `jaxpr` itself when
    there is none.

    Args:
      is_there: whether the argument of that number is at a place (see `DevicePut`).
    """
    numbers = {v: n for n, v in enumerate(jaxpr.invars)}
    names: dict[Var, Any] = {}
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        put = decode(eqn)
        eqn = eqn.replace(invars=[_named(a, names) for a in eqn.invars])
        if isinstance(put, DevicePut):
            moved = [
                n
                for n, (a, place) in enumerate(zip(eqn.invars, put.places, strict=True))
                if not (isinstance(a, Var) and a in numbers and is_there(numbers[a], place))
            ]
            there = sorted({*range(len(eqn.invars))} - {*moved})
            names |= {eqn.outvars[n]: eqn.invars[n] for n in there}
            eqn = with_puts(eqn, moved)
        eqns += [eqn] if eqn.outvars or not isinstance(put, DevicePut) else []
    if not names:
        return jaxpr
    return jaxpr.replace(eqns=eqns, outvars=[_named(a, names) for a in jaxpr.outvars])


def without_dead(jaxpr: Jaxpr) -> Jaxpr:
    """Without the equations whose results nobody reads, but for those that have effects."""
    needed = {v for v in jaxpr.outvars if isinstance(v, Var)}
    eqns = list[JaxprEqn]()
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            needed.update(a for a in eqn.invars if isinstance(a, Var))
    return jaxpr.replace(eqns=eqns[::-1])


def _named(atom: Any, names: dict[Var, Any]) -> Any:
    return names.get(atom, atom) if isinstance(atom, Var) else atom


def inline_calls(jaxpr: Jaxpr) -> Jaxpr:
    """Replaces each call around a scan by what it calls, in `jaxpr` and in the programs inside.

    So that a stack that one jitted function makes and another one reads is seen to be one.
    Calls with constants of their own stay. Returns `jaxpr` itself when there is no such call.
    """
    if not any(_has_call_around_scan(eqn) for eqn in jaxpr.eqns):
        return jaxpr
    eqns: list[JaxprEqn] = []
    results = _inline(jaxpr, {}, eqns, _around_scan, _with_calls_inlined)
    return jaxpr.replace(eqns=eqns, outvars=results)


def inline_all_calls(jaxpr: Jaxpr) -> Jaxpr:
    """Replaces each call in a program, and in its loops, branches and checkpoints, by what it
    calls, but for those with constants of their own, or that say how arrays lie; what else has a
    program inside stays as it is."""
    eqns: list[JaxprEqn] = []
    results = _inline(jaxpr, {}, eqns, _called, _with_bodies_inlined)
    return jaxpr.replace(eqns=eqns, outvars=results)


def _has_scan(eqn: JaxprEqn) -> bool:
    return isinstance(decode(eqn), Scan) or any(
        _has_scan(e) for program in programs(eqn) for e in program.jaxpr.eqns
    )


def _has_call_around_scan(eqn: JaxprEqn) -> bool:
    if _around_scan(eqn):
        return True
    return any(_has_call_around_scan(e) for program in programs(eqn) for e in program.jaxpr.eqns)


def _around_scan(eqn: JaxprEqn) -> Jaxpr | None:
    """What a call around a scan calls; None of another equation."""
    call = decode(eqn)
    if isinstance(call, Call) and not call.body.consts and _has_scan(eqn):
        return call.body
    return None


def _called(eqn: JaxprEqn) -> Jaxpr | None:
    call = decode(eqn)
    if isinstance(call, Call) and call.is_bare and not call.body.consts:
        return call.body
    return None


def _with_calls_inlined(eqn: JaxprEqn) -> JaxprEqn:
    return with_programs(eqn, [inline_calls(program.jaxpr) for program in programs(eqn)])


def _with_bodies_inlined(eqn: JaxprEqn) -> JaxprEqn:
    if not isinstance(decode(eqn), Scan | While | Cond | Remat):
        return eqn
    return with_programs(eqn, [inline_all_calls(program.jaxpr) for program in programs(eqn)])


def _inline(
    jaxpr: Jaxpr,
    values: dict[Var, Any],
    eqns: list[JaxprEqn],
    callee_of: Callable[[JaxprEqn], Jaxpr | None],
    inside: Callable[[JaxprEqn], JaxprEqn],
    fresh: bool = False,
) -> list[Any]:
    """Appends the equations of `jaxpr` to `eqns`; returns its results.

    Args:
      values: what its variables are called there.
      callee_of: the program that takes the place of an equation; None where it stays.
      inside: what becomes of the programs inside an equation that stays.
      fresh: give the results of equations new variables, for the same program may be
        called twice.
    """

    for eqn in jaxpr.eqns:
        operands = [_named(a, values) for a in eqn.invars]
        if (callee := callee_of(eqn)) is not None:
            called = dict(zip(callee.invars, operands, strict=True))
            results = _inline(callee, called, eqns, callee_of, inside, fresh=True)
            values.update(zip(eqn.outvars, results, strict=True))
            continue
        outvars = [Var(v.aval) for v in eqn.outvars] if fresh else eqn.outvars
        values.update(zip(eqn.outvars, outvars, strict=True))
        eqns.append(inside(eqn).replace(invars=operands, outvars=outvars))
    return [_named(a, values) for a in jaxpr.outvars]
