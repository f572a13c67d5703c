"""What one scan leaves for another one is computed again by the one that reads it.

The forward pass over scanned layers leaves stacks for the backward pass, a slice a layer, and
training takes most of its memory for them. On the host they cross the link twice; computed again
they cost compute, as under ``jax.checkpoint``::

    forward ──► a [L, …] ──┐           forward ──► x [L, …] ──┐
                b [L, …] ──┤ backward                         ├ backward: x_n ─► a_n, b_n, c_n
                c [L, …] ──┘                       W [L, …] ──┘

What a layer leaves is then a least cut, in bytes, between what may not be computed again and what
is read (as in PyTorch's min-cut partitioner, torch/_functorch/partitioners.py). There in each
iteration anyway are slices of what the maker took apart, its constants, and what others read::

    "elementwise"   no product, loop or kernel runs again
    "everything"    all may; a layer leaves what it was given, or less

The operations are the same ones, on the same values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Var
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

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
from memplan.streams.fusion import ScanEqn, bytes_of, merged, scan_of
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
    says, body = maker.says, maker.says.body
    of = dict(zip(maker.results, body.outvars[says.carried :], strict=True))
    read = {s: v for s in readers if isinstance(v := of[s], Var)}
    others = {v: s for s, v in of.items() if isinstance(v, Var) and s not in read}
    carry = body.invars[says.constants : says.first_stack]
    there = {*(v for v in body.invars if v not in carry), *others}
    left = _least_cut(body.eqns, list(read.values()), there, may)
    gone = [s for s, v in read.items() if v not in left]
    if bytes_of(left) >= bytes_of(set(read.values())):
        return
    stacks = {v: s for s, v in read.items() if v in left}
    more = {v: Var(_stacked(v, says.length)) for v in left if v not in stacks}
    found = {**others, **stacks, **more}
    makers = {v: e for e in body.eqns for v in e.outvars}
    needed = _slice([read[s] for s in gone], makers, found)
    kept = [s for s in maker.results if s not in gone]
    outvars = [*body.outvars[: says.carried], *(of[s] for s in kept), *more]
    eqns[n] = as_scan(maker.eqn, replace(says, body=body.replace(outvars=outvars))).replace(
        invars=maker.eqn.invars, outvars=[*maker.last_carry, *kept, *more.values()]
    )
    again = _again(maker, {s: read[s] for s in gone}, needed, found)
    for m in {m for stack in gone for m in readers[stack]}:
        reader = scan_of(eqns[m])
        assert reader is not None
        eqns[m] = merged([again, reader], reader, set(reader.results))


def _least_cut(
    eqns: Sequence[JaxprEqn],
    read: Collection[Var],
    there: Collection[Var],
    may: Callable[[JaxprEqn], bool],
) -> list[Var]:
    """The values of fewest bytes from which all that are `read` can be computed, beside those that
    are there; of such sets the one that computes the least again."""
    makers = {v: e for e in eqns for v in e.outvars}
    operands: dict[Var, list[Var]] = {}
    sources: set[Var] = set()
    pending = [v for v in read if v not in there]
    while pending:
        value = pending.pop()
        if value in operands:
            continue
        eqn = makers.get(value)
        if eqn is None or not may(eqn):
            sources.add(value)
        operands[value] = [] if eqn is None else list(variables(eqn.invars).difference(there))
        pending += operands[value] if value not in sources else []
    if not operands:
        return []
    # Nodes: the source, the sink, and for each value what it is made from and what is made from it.
    number = {v: 2 + 2 * k for k, v in enumerate(operands)}
    unit = -(-bytes_of(operands) // (1 << 29))
    sizes = {v: -(-bytes_of([v]) // unit) for v in operands}
    unbounded = sum(sizes.values()) + 1
    edges = {(number[v], number[v] + 1): size for v, size in sizes.items()}
    for value, of in operands.items():
        made_from = [0] if value in sources else [number[v] + 1 for v in of]
        edges |= {(node, number[value]): unbounded for node in made_from}
    edges |= {(number[v] + 1, 1): unbounded for v in read if v in number}
    rows, columns = np.array(list(edges)).T
    nodes = 2 + 2 * len(operands)
    amounts = np.array(list(edges.values()), np.int32)
    capacity: Any = csr_array((amounts, (rows, columns)), shape=(nodes, nodes))
    left = capacity - maximum_flow(capacity, 0, 1).flow
    left.eliminate_zeros()
    reach = {int(k) for k in breadth_first_order(left.T.tocsr(), 1, return_predecessors=False)}
    return [v for v, k in number.items() if k + 1 in reach and k not in reach]


def _again(
    maker: ScanEqn, made: Mapping[Var, Var], eqns: Sequence[JaxprEqn], there: Mapping[Var, Var]
) -> ScanEqn:
    """A scan without a carry that makes stacks from what the maker left and was given.

    Args:
      made: the stacks, and the values in the maker's body of which they are.
      there: values in the body, and the stacks of them that the maker leaves.
    """
    says = maker.says
    read = variables([*(a for e in eqns for a in e.invars), *made.values()])
    given = [(v, a) for v, a in zip(says.body.invars, maker.eqn.invars, strict=True) if v in read]
    whole = variables(says.body.invars[: says.constants])
    carry = variables(says.body.invars[says.constants : says.first_stack])
    constants = [(v, a) for v, a in given if v in whole]
    taken = [(v, a) for v, a in given if v not in whole and v not in carry]
    taken += [(v, a) for v, a in there.items() if v in read]
    invars, operands = zip(*constants, *taken, strict=True)
    body = says.body.replace(invars=list(invars), outvars=list(made.values()), eqns=list(eqns))
    scan = as_scan(maker.eqn, replace(says, body=body, constants=len(constants), carried=0))
    found = scan_of(scan.replace(invars=list(operands), outvars=list(made)))
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
