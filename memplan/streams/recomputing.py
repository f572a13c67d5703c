"""What one scan leaves for another one is computed again by the one that reads it.

The forward pass over scanned layers leaves stacks for the backward pass, a slice a layer, and
training takes most of its memory for them. On the host they cross the link twice; computed again
they cost compute, as under ``jax.checkpoint``::

    forward ──► a [L, …] ──┐           forward ──► x [L, …] ──┐
                b [L, …] ──┤ backward                         ├ backward: x_n ─► a_n, b_n, c_n
                c [L, …] ──┘                       W [L, …] ──┘

A slice is computed from what is there in the same iteration anyway: slices of what the maker took
apart, its constants, what it still leaves, and what it carried into that iteration, which it
leaves in place of the others.

    "elementwise"   what needs no product, nor a loop or a kernel, once the products are there
    "everything"    all; a layer then leaves what it was given

The operations are the same ones, on the same values.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, cast

from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Var

from hlo_passes.equations import (
    BroadcastInDim,
    Call,
    Concatenate,
    Iota,
    Reduction,
    Reshape,
    Reverse,
    ShardingConstraint,
    Squeeze,
    Transpose,
    as_scan,
    decode,
    is_elementwise,
    programs,
    with_programs,
)
from memplan.streams.fusion import ScanEqn, merged, scan_of
from memplan.streams.rows import variables

Recomputed = Literal["nothing", "elementwise", "everything"]

_LIGHT = (
    BroadcastInDim,
    Concatenate,
    Iota,
    Reduction,
    Reshape,
    Reverse,
    ShardingConstraint,
    Squeeze,
    Transpose,
)


def recompute_residuals(jaxpr: Jaxpr, what: Recomputed) -> Jaxpr:
    """Has scans compute again what they take apart of what other scans leave for them, also in the
    programs inside.

    Args:
      jaxpr: a traced program, without calls around scans (see `programs.inline_calls`).

    Returns:
      A program with the same inputs, outputs and numbers; the very object that was given when
      nothing applies.

    Takes time linear in the equations, times the scans.
    """
    if what == "nothing":
        return jaxpr
    may = _is_light if what == "elementwise" else _is_pure
    inside = [[recompute_residuals(p.jaxpr, what) for p in programs(e)] for e in jaxpr.eqns]
    eqns = [with_programs(e, of) for e, of in zip(jaxpr.eqns, inside, strict=True)]
    for n in range(len(eqns)):
        maker = scan_of(eqns[n])
        if maker is not None and maker.says.carried and not maker.eqn.effects:
            _recompute(eqns, n, maker, variables(jaxpr.outvars), may)
    if all(map(operator.is_, eqns, jaxpr.eqns)):
        return jaxpr
    return jaxpr.replace(eqns=eqns)


def _recompute(
    eqns: list[JaxprEqn],
    n: int,
    maker: ScanEqn,
    returned: Collection[Var],
    may: Callable[[JaxprEqn], bool],
) -> None:
    """Writes the scan that is equation `n`, and those that read what it leaves, anew."""
    readers = _readers(eqns, maker, returned)
    body = maker.says.body
    of = dict(zip(maker.results, body.outvars[maker.says.carried :], strict=True))
    makers = {v: e for e in body.eqns for v in e.outvars}
    carry = body.invars[maker.says.constants : maker.says.first_stack]
    # What an iteration of a reader finds there.
    there = {v: stack for stack, v in of.items() if isinstance(v, Var)}
    gone: list[Var] = []
    for stack in readers:
        value = of[stack]
        if not isinstance(value, Var) or value in carry or there.get(value) is not stack:
            continue
        others = {v: s for v, s in there.items() if v is not value}
        if all(map(may, _slice([value], makers, others))):
            there, gone = others, [*gone, stack]
    needed = _slice([cast(Var, of[s]) for s in gone], makers, there)
    read = variables([*(a for e in needed for a in e.invars), *(of[s] for s in gone)])
    left = [v for v in carry if v in read and v not in there]
    if _bytes(gone) <= maker.says.length * _bytes(left):
        return
    more = [Var(_stacked(v, maker.says.length)) for v in left]
    there |= dict(zip(left, more, strict=True))
    kept = [s for s in maker.results if s not in gone]
    eqns[n] = as_scan(
        maker.eqn,
        replace(
            maker.says,
            body=body.replace(
                outvars=[*body.outvars[: maker.says.carried], *(of[s] for s in kept), *left]
            ),
        ),
    ).replace(invars=maker.eqn.invars, outvars=[*maker.last_carry, *kept, *more])
    again = _again(maker, gone, [of[s] for s in gone], needed, there)
    for m in {m for stack in gone for m in readers[stack]}:
        reader = scan_of(eqns[m])
        assert reader is not None
        eqns[m] = merged([again, reader], reader, set(reader.results))


def _again(
    maker: ScanEqn,
    stacks: Sequence[Var],
    values: Sequence[object],
    eqns: Sequence[JaxprEqn],
    there: Mapping[Var, Var],
) -> ScanEqn:
    """A scan without a carry that makes `stacks` from what the maker left and was given."""
    says, operands = maker.says, maker.eqn.invars
    constants = list(zip(says.body.invars, operands, strict=True))[: says.constants]
    taken = list(zip(says.body.invars, operands, strict=True))[says.first_stack :]
    read = variables([*(a for e in eqns for a in e.invars), *cast(list[Var], values)])
    constants = [(v, a) for v, a in constants if v in read]
    taken = [(v, a) for v, a in (*taken, *there.items()) if v in read]
    body = says.body.replace(
        invars=[*(v for v, _ in constants), *(v for v, _ in taken)],
        outvars=list(values),
        eqns=list(eqns),
    )
    scan = as_scan(maker.eqn, replace(says, body=body, constants=len(constants), carried=0))
    invars = [*(a for _, a in constants), *(a for _, a in taken)]
    found = scan_of(scan.replace(invars=invars, outvars=list(stacks)))
    assert found is not None
    return found


def _readers(
    eqns: Sequence[JaxprEqn], maker: ScanEqn, returned: Collection[Var]
) -> dict[Var, list[int]]:
    """Of the maker's stacks those that only scans of its length read, a slice an iteration: who
    does."""
    readers: dict[Var, list[int]] = {s: [] for s in maker.results if s not in returned}
    for m, eqn in enumerate(eqns):
        for stack in variables(eqn.invars) & readers.keys():
            reader = scan_of(eqn)
            if (
                reader is not None
                and reader.says.length == maker.says.length
                and stack not in reader.whole
            ):
                readers[stack].append(m)
            else:
                del readers[stack]
    return {stack: found for stack, found in readers.items() if found}


def _slice(
    values: Iterable[Var], makers: Mapping[Var, JaxprEqn], there: Collection[Var]
) -> list[JaxprEqn]:
    """The equations that `values` need, in an order that works, where `there` need none."""
    found: dict[int, JaxprEqn] = {}
    pending = [v for v in values if v not in there]
    while pending:
        eqn = makers.get(pending.pop())
        if eqn is not None and id(eqn) not in found:
            found[id(eqn)] = eqn
            pending += [v for v in variables(eqn.invars) if v not in there]
    # The makers are in program order.
    order = dict.fromkeys(map(id, makers.values()))
    return [found[k] for k in order if k in found]


def _is_pure(eqn: JaxprEqn) -> bool:
    return not eqn.effects


def _is_light(eqn: JaxprEqn) -> bool:
    """Whether it takes no more than to read and write its arrays once."""
    says = decode(eqn)
    if isinstance(says, Call):
        return all(map(_is_light, says.body.eqns))
    return is_elementwise(eqn) or isinstance(says, _LIGHT)


def _stacked(value: Var, length: int) -> ShapedArray:
    aval = cast(ShapedArray, value.aval)
    return aval.update(shape=(length, *aval.shape))


def _bytes(arrays: Iterable[Var]) -> int:
    avals = (cast(ShapedArray, v.aval) for v in arrays)
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)
