"""What of a traced program is live at once, roughly, before XLA has seen it.

Arrays that XLA most likely makes no room for (views, and element-wise results that one other such
equation reads) count as what they are made of. It is for choosing what XLA is then asked about.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from jax.extend.core import Jaxpr, JaxprEqn, Var

from hlo_passes.equations import (
    BroadcastInDim,
    DynamicUpdateSlice,
    Iota,
    Reduction,
    Reshape,
    Scan,
    Squeeze,
    Transpose,
    decode,
    is_elementwise,
    is_sum,
    programs,
)
from memplan.streams.fusion import bytes_of


@dataclass(frozen=True)
class Live:
    """What is live while each equation runs.

    Attributes:
      loads: bytes at each equation, with what programs inside have at once.
      arrays: those made by then, and read then or later.
    """

    loads: tuple[int, ...]
    arrays: tuple[frozenset[Var], ...]


def live_in(jaxpr: Jaxpr) -> Live:
    """What is live in a program besides what it is given, and what takes the place of that."""
    roots = dict[Var, frozenset[Var]]()
    born, last = dict[Var, int](), dict[Var, int]()
    given = [*jaxpr.invars, *jaxpr.constvars]
    roots |= {v: frozenset([v]) for v in given}
    readers = dict[Var, list[JaxprEqn]]()
    for eqn in jaxpr.eqns:
        for v in {a for a in eqn.invars if isinstance(a, Var)}:
            readers.setdefault(v, []).append(eqn)
    results = {v for v in jaxpr.outvars if isinstance(v, Var)}
    for n, eqn in enumerate(jaxpr.eqns):
        read = frozenset[Var]().union(*(roots[a] for a in eqn.invars if isinstance(a, Var)))
        last |= dict.fromkeys(read, n)
        for v in eqn.outvars:
            if v not in results and _is_virtual(eqn, readers.get(v, ())):
                roots[v] = read
            elif v in results and _is_in_place(eqn):
                roots[v] = frozenset()
            else:
                roots[v], born[v], last[v] = frozenset([v]), n, n
    end = len(jaxpr.eqns) - 1
    for v in results:
        last |= dict.fromkeys(roots[v], end)
    return _at_each(jaxpr, born, last)


def _at_each(jaxpr: Jaxpr, born: dict[Var, int], last: dict[Var, int]) -> Live:
    begins, ends = dict[int, list[Var]](), dict[int, list[Var]]()
    for v, n in born.items():
        begins.setdefault(n, []).append(v)
        ends.setdefault(last.get(v, n), []).append(v)
    loads, arrays = list[int](), list[frozenset[Var]]()
    load, alive = 0, set[Var]()
    for n, eqn in enumerate(jaxpr.eqns):
        for v in begins.get(n, ()):
            alive.add(v)
            load += bytes_of([v])
        loads.append(load + within(eqn))
        arrays.append(frozenset(alive))
        for v in ends.get(n, ()):
            alive.discard(v)
            load -= bytes_of([v])
    return Live(tuple(loads), tuple(arrays))


def within(eqn: JaxprEqn) -> int:
    """Bytes that the programs inside an equation have at once, beyond what they are given."""
    loads = [live_in(program.jaxpr).loads for program in programs(eqn)]
    return max((max(found, default=0) for found in loads), default=0)


def _is_virtual(eqn: JaxprEqn, readers: Collection[JaxprEqn]) -> bool:
    match decode(eqn):
        case Reshape(in_order=True) | Squeeze() | BroadcastInDim() | Iota():
            return True
        case Transpose():
            return len(readers) == 1
        case None if is_elementwise(eqn):
            return len(readers) == 1 and _fuses(next(iter(readers)))
        case _:
            return False


def _fuses(reader: JaxprEqn) -> bool:
    """Whether it reads element-wise operands without their being there."""
    return is_elementwise(reader) or isinstance(
        decode(reader), Reduction | BroadcastInDim | Reshape | Squeeze
    )


def _is_in_place(eqn: JaxprEqn) -> bool:
    """Whether what a loop carries takes the place of what it carried."""
    return isinstance(decode(eqn), DynamicUpdateSlice | Scan) or is_sum(eqn)
