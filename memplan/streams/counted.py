"""Loops that index stacks by their counter become scans that take the stacks apart.

What a ring can stream is a scan with stacks. Loops over layers are also written so::

    fori_loop(0, L, body, x)                          scan(body, x, (w, kv))
    body:  w[i] ──────► layer ──► x'                  body:  w_i ──► layer ──► x'
           kv[i] ────►    │                 ──►              kv_i ─►   │
           kv.at[i].set ◄─┘ carried                                    └──► kv_i', a result

**When.** The loop runs as often as the stack has slices, and all that its body does with the
stack it does at index i, in iteration i. That i is the iteration is not matched by patterns
but computed (`counters`). A ``scan`` qualifies, which a ``fori_loop`` with static bounds is,
and a ``while`` whose number of iterations can be computed; with a bound that is data there is
no length that a scan could have.

**How.** The body is run on one slice of each stack (`rows`). A stack that turns out to be
needed whole is given whole, and the body run again. Of a carried stack, the slice that the
body hands on becomes a result of the scan: no other iteration touches it. Elements that the
body adds to a sum at index i only are not added to zero at the other indices any more, which
is the same but for the sign of a zero.

**Backwards.** Where i runs from L-1 to 0, so does the new scan, if the old one has no results
and no stacks but of counters: others would have to be turned around.

**Residuals.** The forward loop of a derivative keeps w[i] of each iteration. That is w.

Offsets (``w[i + 1]``), other orders (``w[order[i]]``), other lengths and other axes than the
leading one stay as they are; `uses` says by what they are indexed.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from jax.core import Atom, ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Var, mapped_aval

from hlo_passes.equations import Scan, While, as_reverse, as_scan, decode, programs, with_programs
from memplan.streams.counters import Inputs, inputs_inside, known_integers, unknown, while_inputs
from memplan.streams.rows import (
    Row,
    Rows,
    is_broadcast_literal,
    is_stack,
    live,
    makers,
    variables,
)


def count_loops(jaxpr: Jaxpr) -> Jaxpr:
    """Turns indexing by the counter of a loop into stacks and results of a scan.

    Args:
      jaxpr: a traced program.

    Returns:
      A program with the same inputs, outputs and numbers; the very object that was given when
      nothing applies. Equations keep their source and their scopes.

    Takes time linear in the equations, times the depth of the loops, times the stacks that
    are tried in vain.
    """
    return _program(jaxpr, unknown(jaxpr))


def _program(jaxpr: Jaxpr, inputs: Inputs) -> Jaxpr:
    """`jaxpr` with its loops counted, also those inside."""
    known, made_by = known_integers(jaxpr, inputs), makers(jaxpr)
    names: dict[Var, Atom] = {}
    eqns: list[JaxprEqn] = []

    def renamed(atoms: Sequence[Atom]) -> list[Atom]:
        return [names.get(a, a) if isinstance(a, Var) else a for a in atoms]

    for eqn in jaxpr.eqns:
        new = with_programs(eqn, _inside(eqn, known, inputs.count))
        if (invars := renamed(new.invars)) != new.invars:
            new = new.replace(invars=invars)
        loop = _as_loop(new, known, inputs.count)
        counted = loop and (_counted(loop, made_by) or _backwards(loop, made_by))
        eqns += counted.eqns if counted else [new]
        names |= counted.names if counted else {}
    if len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns)):
        return jaxpr
    return jaxpr.replace(eqns=eqns, outvars=renamed(jaxpr.outvars))


def _inside(eqn: JaxprEqn, known: Mapping[Var, np.ndarray], count: int) -> list[Jaxpr]:
    """The programs inside an equation with their loops counted."""
    inner = programs(eqn)
    if not any(programs(e) for p in inner for e in p.jaxpr.eqns):
        return [p.jaxpr for p in inner]
    inputs = inputs_inside(eqn, known, count)
    return [_program(p.jaxpr, i) for p, i in zip(inner, inputs, strict=True)]


class _Loop(NamedTuple):
    """A loop of known length.

    Attributes:
      eqn: a ``scan`` or ``while``.
      body: what it runs.
      operands: the constants, the carry and the stacks, as the body takes them.
      constants, carried: how many they are.
      inputs: what is known of the inputs of the body.
      reverse: whether it goes through its stacks from the last slice to the first.
      unroll: iterations that are compiled one after another.
    """

    eqn: JaxprEqn
    body: Jaxpr
    operands: Sequence[Atom]
    constants: int
    carried: int
    inputs: Inputs
    reverse: bool = False
    unroll: int = 1


class _Counted(NamedTuple):
    """What stands for a loop: equations, and results that are arrays at hand."""

    eqns: list[JaxprEqn]
    names: dict[Var, Atom]


def _as_loop(eqn: JaxprEqn, known: Mapping[Var, np.ndarray], count: int) -> _Loop | None:
    """The loop that an equation is; None where it is none, or its length is not known."""
    # Effects on mutable arrays name them by number.
    if not all(isinstance(a.aval, ShapedArray) for a in eqn.invars):
        return None
    match decode(eqn):
        case Scan(body, constants, carried, length, reverse, unroll) if length:
            (inputs,) = inputs_inside(eqn, known, count)
            return _Loop(eqn, body, eqn.invars, constants, carried, inputs, reverse, unroll)
        case While() as loop if inputs := while_inputs(eqn, known, count):
            operands = eqn.invars[loop.condition_constants :]
            carried = len(eqn.outvars)
            return _Loop(eqn, loop.body, operands, loop.body_constants, carried, inputs)
        case _:
            return None


def _backwards(loop: _Loop, made_by: Mapping[Var, JaxprEqn]) -> _Counted | None:
    """What stands for a loop that indexes its stacks from the last slice to the first."""
    slices = loop.inputs.values[loop.constants + loop.carried :]
    if len(loop.body.outvars) > loop.carried or any(v is None for v in slices):
        return None
    return _counted(loop, made_by, backwards=True)


def _counted(
    loop: _Loop, made_by: Mapping[Var, JaxprEqn], *, backwards: bool = False
) -> _Counted | None:
    """What stands for a loop; None where it indexes no stack by its counter.

    Args:
      made_by: the equations that make the variables around the loop.
      backwards: the new scan takes its stacks in the other order than the old one.
    """
    body, length = loop.body, loop.inputs.count
    at = np.arange(length)[:: -1 if backwards else 1]
    read = variables(a for eqn in body.eqns for a in eqn.invars)
    outside = body.invars[: loop.constants + loop.carried]
    stacks = {v for v in outside if v in read and is_stack(v, length)}
    whole: set[Var] = set()
    while stacks - whole:
        rows = Rows(at, body, whole)
        slices: dict[Var, Var] = {}
        given: list[Row | Var] = []
        for var, operand in zip(body.invars, loop.operands, strict=True):
            maker = made_by.get(operand) if isinstance(operand, Var) else None
            if var not in stacks - whole:
                given.append(var)
            elif maker and is_broadcast_literal(maker):
                given.append(rows.of_scalar(var, maker))
            else:
                slices[var] = Var(mapped_aval(length, 0, var.aval))
                given.append(rows.of_slice(var, slices[var]))
        results = rows.run(body, given, loop.inputs)
        carry = given[loop.constants :][: loop.carried]
        for before, after in zip_longest(carry, results):
            stack = before.stack if isinstance(before, Row) else None
            if stack is not (after.stack if isinstance(after, Row) else None):
                rows.whole |= {r.stack for r in (before, after) if isinstance(r, Row)}
        if rows.whole == whole:
            return _as_scan(loop, rows, slices, results, backwards)
        whole = rows.whole
    return None


def _as_scan(
    loop: _Loop, rows: Rows, slices: Mapping[Var, Var], results: list[Row | Atom], backwards: bool
) -> _Counted:
    """The loop as a scan.

    Args:
      rows: what ran the body.
      slices: the slices of stacks, inputs of the new body.
      results: of the body.
      backwards: whether the scan takes its stacks in the other order than the old one.
    """
    body, outvars = loop.body, loop.eqn.outvars
    operands = dict(zip(body.invars, loop.operands, strict=True))
    constants, carry = body.invars[: loop.constants], body.invars[loop.constants :][: loop.carried]
    # No iteration before has changed the slice.
    at_hand = {s: operands[v] for v, s in slices.items()}
    operands |= at_hand

    names: dict[Var, Atom] = {}
    carried: list[tuple[Atom, Var, Var]] = []
    stacked: list[tuple[Atom, Var]] = []
    for k, (result, out) in enumerate(zip(results, outvars, strict=True)):
        value = rows.slice_of(result) if isinstance(result, Row) else result
        if k < loop.carried and not isinstance(result, Row):
            carried.append((value, out, carry[k]))
        elif isinstance(value, Var) and value in at_hand:
            names[out] = at_hand[value]
        else:
            stacked.append((value, out))
    made = [*(r for r, *_ in carried), *(r for r, _ in stacked)]
    eqns = live(rows.eqns, made)
    read = variables([*made, *(a for eqn in eqns for a in eqn.invars)])

    consts = [v for v in constants if v in read]
    old_slices = [v for v in body.invars[loop.constants + loop.carried :] if v in read]
    new_slices = [s for s in slices.values() if s in read]
    turned = [_turned(loop.eqn, operands[v]) for v in old_slices] if backwards else []
    operands |= {v: eqn.outvars[0] for v, eqn in zip(old_slices, turned, strict=False)}
    invars = [*consts, *(v for *_, v in carried), *old_slices, *new_slices]
    scan = Scan(
        body.replace(invars=invars, outvars=made, eqns=eqns),
        len(consts),
        len(carried),
        loop.inputs.count,
        loop.reverse != backwards,
        loop.unroll,
    )
    counted = as_scan(loop.eqn, scan).replace(
        invars=[operands[v] for v in invars],
        outvars=[*(out for _, out, _ in carried), *(out for _, out in stacked)],
    )
    return _Counted([*turned, counted], names)


def _turned(loop: JaxprEqn, stack: Atom) -> JaxprEqn:
    """Makes a stack with its slices in the other order."""
    return as_reverse(loop, 0).replace(invars=[stack], outvars=[Var(stack.aval)])
