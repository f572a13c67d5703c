"""Stacks whose layers are not on their leading axis, seen with the layers outermost.

Models that scan over another axis turn each stack before the loop, and its gradient after it. What
works on whole stacks stands between the two, and does the same to turned ones::

    w [D, L, F] ─ transpose ─► [L, D, F] ─► scan          w' [L, D, F] ─► scan ─► g' [L, D, F]
    scan ─► [L, D, F] ─ transpose ─► g [D, L, F]   ──►    m' [L, D, F] ── mul, add, … g'
    m [D, L, F] ── mul, add, … g ─► m                            └─► m' [L, D, F]

So the program is given for turned arguments and results: where a stack lies in memory with its
layers outermost, both are the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from jax import lax
from jax.core import Atom, ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.sharding import NamedSharding, PartitionSpec

from hlo_passes.equations import (
    BroadcastInDim,
    Call,
    Reduction,
    Scan,
    ShardingConstraint,
    Transpose,
    as_transpose,
    decode,
    is_elementwise,
    says_sharding,
    says_where,
    with_shape,
    with_sharding,
)
from memplan.streams.inlining import inlined
from memplan.streams.leading_axis import extent_of, is_plain, shape_of
from memplan.streams.orders import Order, inverse
from memplan.streams.rows import live, variables

type Turn = tuple[int, ...]
"""Of each axis of a turned array, the axis that it was."""


class Turned(NamedTuple):
    """A program that takes and gives turned arrays.

    Attributes:
      arguments, results: how, by flat number; the others are as they were.
    """

    jaxpr: Jaxpr
    arguments: Mapping[int, Turn]
    results: Mapping[int, Turn]


def turn_stacks(jaxpr: Jaxpr) -> Turned:
    """Turns the stacks that scans of a program take apart, or make, through a transpose.

    Returns:
      A program with the same numbers, but for the order of the terms of a sum. Arrays that one
      loop has turned in one way and another one otherwise follow the first.

    Takes time linear in the equations.
    """
    bare = _with_bare_transposes(jaxpr)
    moved = [a for eqn in bare.eqns if _moves_leading(eqn) for a in (*eqn.invars, *eqn.outvars)]
    program, _ = inlined(bare, frozenset(extent_of(a) for a in moved if is_plain(a)))
    turns = _turns(program)
    arguments = {n: turns[v] for n, v in enumerate(program.invars) if v in turns}
    outvars = [(k, v) for k, v in enumerate(program.outvars) if isinstance(v, Var)]
    results = {k: turns[v] for k, v in outvars if v in turns}
    if not arguments and not results:
        return Turned(jaxpr, {}, {})
    return Turned(_Turning(turns).program(program), arguments, results)


def as_turned(array: Any, turn: Turn | None) -> Any:
    """An argument as the turned program takes it."""
    return array if turn is None else lax.transpose(array, turn)


def as_it_was(array: Any, turn: Turn | None) -> Any:
    """A result of the turned program as the user's gives it."""
    return array if turn is None else lax.transpose(array, inverse(turn))


def order_as_it_was(order: Order, turn: Turn | None) -> Order:
    """How the dimensions of an array lie, from how those of the turned one do."""
    return order if turn is None else tuple(turn[d] for d in order)


def order_of_turned(order: Order, turn: Turn | None) -> Order:
    """How the dimensions of the turned array lie, from how those of the array do."""
    return order if turn is None else tuple(inverse(turn)[d] for d in order)


# --- which arrays are turned ------------------------------------------------------------------


def _with_bare_transposes(jaxpr: Jaxpr) -> Jaxpr:
    """Calls that do nothing but transpose (``jnp.moveaxis``) become that."""

    def bare(eqn: JaxprEqn) -> JaxprEqn:
        match decode(eqn):
            case Call(body=called) if len(called.eqns) == 1:
                (inner,) = called.eqns
            case _:
                return eqn
        turn = decode(inner)
        if not isinstance(turn, Transpose):
            return eqn
        if list(inner.invars) != list(called.invars) or called.outvars != inner.outvars:
            return eqn
        return as_transpose(eqn, turn.permutation)

    return jaxpr.replace(eqns=list(map(bare, jaxpr.eqns)))


def _moves_leading(eqn: JaxprEqn) -> bool:
    turn = decode(eqn)
    return isinstance(turn, Transpose) and turn.permutation[0] != 0


def _turns(jaxpr: Jaxpr) -> dict[Var, Turn]:
    """How the variables are turned that are."""
    alike = _Alike()
    for eqn in jaxpr.eqns:
        if _is_alike(eqn):
            alike.join(v for v in (*eqn.invars, *eqn.outvars) if _is_like(v, eqn))
    apart: set[Var] = set()
    for eqn in jaxpr.eqns:
        scan = decode(eqn)
        if isinstance(scan, Scan):
            apart |= variables(eqn.invars[scan.first_stack :])
            apart |= set(eqn.outvars[scan.carried :])
    leading = {alike.of(v) for v in apart}
    found: dict[Var, Turn] = {}
    for eqn in filter(_moves_leading, jaxpr.eqns):
        (before,), (after,) = eqn.invars, eqn.outvars
        turn = cast(Transpose, decode(eqn)).permutation
        if not isinstance(before, Var) or not is_plain(before):
            continue
        for outer, inner, way in ((before, after, turn), (after, before, inverse(turn))):
            if alike.of(inner) in leading and alike.of(outer) not in leading:
                found.setdefault(alike.of(outer), way)
    everything = {*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)}
    return {v: found[alike.of(v)] for v in everything if alike.of(v) in found}


def _is_alike(eqn: JaxprEqn) -> bool:
    """Whether an equation does to each element what it does to it in a turned array."""
    if eqn.effects or says_where(eqn) or len(eqn.outvars) != 1:
        return False
    if not all(map(is_plain, (*eqn.invars, *eqn.outvars))):
        return False
    constraint = decode(eqn)
    if isinstance(constraint, ShardingConstraint):
        return isinstance(constraint.sharding, NamedSharding) and constraint.is_plain
    if says_sharding(eqn):
        return False
    shape = shape_of(eqn.outvars[0])
    return is_elementwise(eqn) and all(shape_of(a) in ((), shape) for a in eqn.invars)


def _is_of_scalar(eqn: JaxprEqn) -> bool:
    """Whether each element of what an equation makes is the same number."""
    return isinstance(decode(eqn), BroadcastInDim) and not shape_of(eqn.invars[0])


def _is_like(atom: Atom, eqn: JaxprEqn) -> bool:
    return isinstance(atom, Var) and shape_of(atom) == shape_of(eqn.outvars[0])


class _Alike:
    """Sets of variables that are turned together; each is known by one of its members."""

    def __init__(self) -> None:
        self._parent: dict[Var, Var] = {}

    def of(self, var: Var) -> Var:
        while (parent := self._parent.get(var, var)) is not var:
            var = parent
        return var

    def join(self, members: Iterable[Atom]) -> None:
        first, *others = (self.of(cast(Var, v)) for v in members)
        for other in others:
            if other is not first:
                self._parent[other] = first


# --- the program of turned arrays -------------------------------------------------------------


class _Turning:
    def __init__(self, turns: Mapping[Var, Turn]) -> None:
        self._turns = turns
        self._eqns: list[JaxprEqn] = []
        # Of those that are turned, the turned ones; and those that something needs as they were.
        self._turned: dict[Var, Var] = {}
        self._plain: dict[Var, Var] = {}

    def program(self, jaxpr: Jaxpr) -> Jaxpr:
        invars = [self._new(v) if v in self._turns else v for v in jaxpr.invars]
        for eqn in jaxpr.eqns:
            self._equation(eqn)
        outvars = list(map(self._at_hand, jaxpr.outvars))
        return jaxpr.replace(invars=invars, outvars=outvars, eqns=live(self._eqns, outvars))

    def _equation(self, eqn: JaxprEqn) -> None:
        decoded = decode(eqn)
        made = eqn.outvars[0] if len(eqn.outvars) == 1 else None
        turn = self._turns.get(made) if made is not None else None
        if isinstance(decoded, Transpose) and isinstance(eqn.invars[0], Var):
            self._transpose(eqn, eqn.invars[0], decoded.permutation)
        elif made is not None and turn is not None and _is_alike(eqn):
            self._alike(eqn, made, turn)
        elif made is not None and turn is not None and _is_of_scalar(eqn):
            shape = tuple(shape_of(made)[d] for d in turn)
            operands = list(map(self._at_hand, eqn.invars))
            self._emit(with_shape(eqn, shape), operands, [self._new(made)])
        elif isinstance(decoded, Reduction) and self._reduces_all(eqn, decoded.axes):
            self._emit(eqn, list(map(self._at_hand, eqn.invars)), eqn.outvars)
        else:
            self._as_it_was(eqn)

    def _reduces_all(self, eqn: JaxprEqn, axes: Sequence[int]) -> bool:
        return len(eqn.invars) == 1 and len(axes) == len(shape_of(eqn.invars[0]))

    def _transpose(self, eqn: JaxprEqn, operand: Var, turn: Turn) -> None:
        """From what is at hand to what is asked for, in one turn or none."""
        (made,) = eqn.outvars
        source = cast(Var, self._at_hand(operand))
        if operand in self._turns:
            back = inverse(self._turns[operand])
            turn = tuple(back[d] for d in turn)
        if made in self._turns:
            turn = tuple(turn[d] for d in self._turns[made])
        if turn == tuple(range(len(turn))):
            self._names(made, source)
            return
        target = self._new(made) if made in self._turns else made
        self._emit(as_transpose(eqn, turn), [source], [target])

    def _alike(self, eqn: JaxprEqn, made: Var, turn: Turn) -> None:
        constraint = decode(eqn)
        if isinstance(constraint, ShardingConstraint):
            sharding = cast(NamedSharding, constraint.sharding)
            spec = (*sharding.spec, *(None for _ in turn))
            turned = sharding.update(spec=PartitionSpec(*(spec[d] for d in turn)))
            loose = [n for n, d in enumerate(turn) if d in constraint.unconstrained]
            eqn = with_sharding(eqn, turned, loose)
        self._emit(eqn, list(map(self._at_hand, eqn.invars)), [self._new(made)])

    def _as_it_was(self, eqn: JaxprEqn) -> None:
        """An equation that needs the arrays as they were, and makes them so."""
        operands = [self._as_was(a, eqn) for a in eqn.invars]
        self._emit(eqn, operands, eqn.outvars)
        for made in eqn.outvars:
            if made in self._turns:
                self._emit_transpose(eqn, made, self._new(made), self._turns[made])

    def _at_hand(self, atom: Atom) -> Atom:
        """The array, turned where it is."""
        if not isinstance(atom, Var):
            return atom
        return (self._turned if atom in self._turns else self._plain).get(atom, atom)

    def _as_was(self, atom: Atom, reader: JaxprEqn) -> Atom:
        if not isinstance(atom, Var) or atom not in self._turned:
            return self._plain.get(atom, atom) if isinstance(atom, Var) else atom
        if atom not in self._plain:
            self._plain[atom] = Var(atom.aval)
            turn = inverse(self._turns[atom])
            self._emit_transpose(reader, self._turned[atom], self._plain[atom], turn)
        return self._plain[atom]

    def _names(self, made: Var, source: Var) -> None:
        """Takes note that `made` is at hand."""
        (self._turned if made in self._turns else self._plain)[made] = source

    def _new(self, var: Var) -> Var:
        aval = cast(ShapedArray, var.aval)
        shape = tuple(aval.shape[d] for d in self._turns[var])
        self._turned[var] = Var(aval.update(shape=shape))
        return self._turned[var]

    def _emit_transpose(self, pattern: JaxprEqn, before: Var, after: Var, turn: Turn) -> None:
        self._emit(as_transpose(pattern, turn), [before], [after])

    def _emit(self, eqn: JaxprEqn, invars: Sequence[Atom], outvars: Sequence[Var]) -> None:
        self._eqns.append(eqn.replace(invars=list(invars), outvars=list(outvars)))
