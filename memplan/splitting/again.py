"""Arrays that are made again for those that read them late.

    q, k ─► scores ─► weights ─► ...              q, k ─► scores ─► weights ─► ...
                          ╎ kept for long                ┊ kept
                          ▼                              ▼
                  ... ─► late                            scores' ─► weights' ─► late

As large an array is then nowhere for long, and what makes it again can be in chunks with its late
readers: so does attention without a kernel in derivatives take as much memory as its operands.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Var

from memplan.splitting.axes import axes_of
from memplan.splitting.live import Live, kind_of
from memplan.splitting.regions import Graph

_SMALL = 1 / 16
"""Of the smallest array that is made again: one no larger than that part of it is kept for it."""
_LARGE = 1 / 8
"""Of an array that is made again: what is as large is made again with it."""
_MOST = 64
"""Equations that are done again, at most."""


def kept_for_late(graph: Graph, live: Live, seed: Var, n: int) -> list[Var]:
    """An array that is read before an equation, and then or later, and all others as large that are
    read so and are made of it, or it of them; none where the array is not."""
    large = _LARGE * graph.shards.bytes(seed)
    kept = [v for v in live.born if graph.shards.bytes(v) >= large and _is_kept_until(graph, v, n)]
    if seed not in kept:
        return []
    own = _makers(graph, [seed], frozenset())
    return [seed, *(v for v in kept if v is not seed and own & _makers(graph, [v], frozenset()))]


def made_again(
    graph: Graph, live: Live, wanted: Sequence[Var], n: int
) -> tuple[Jaxpr, dict[Var, Var]] | None:
    """The program in which some arrays are made a second time for all that read them from an
    equation on.

    What they are made of is kept where it is small, there anyway, or not known how to be cut.

    Args:
      wanted: of `kept_for_late`.

    Returns:
      That, and the arrays that are made again, by what they are in the program as it was; None
      where it would take too much.
    """
    at = min(r for v in wanted for r in graph.readers[v] if r >= n)
    there = {v for v in live.born if live.born[v] < at <= live.last[v]}.difference(wanted)
    again = _makers(graph, wanted, there)
    if len(again) > _MOST or any(graph.maker[v] not in again for v in wanted):
        return None
    names = dict[Var, Var]()
    clones = list[JaxprEqn]()
    for k in sorted(again):
        eqn = _reading(graph.eqns[k], names)
        outvars = [Var(v.aval) for v in eqn.outvars]
        names |= dict(zip(eqn.outvars, outvars, strict=True))
        clones.append(eqn.replace(outvars=outvars))
    eqns = [*graph.eqns[:at], *clones, *(_reading(eqn, names) for eqn in graph.eqns[at:])]
    return graph.jaxpr.replace(eqns=eqns, debug_info=graph.jaxpr.debug_info), names


def _is_kept_until(graph: Graph, v: Var, n: int) -> bool:
    readers = graph.readers.get(v)
    return bool(readers) and v not in graph.jaxpr.outvars and readers[0] < n <= readers[-1]


def _makers(graph: Graph, wanted: Sequence[Var], there: Collection[Var]) -> set[int]:
    """The equations that make some arrays of what is there, or small, or of what no chunk is; what
    is made of nothing else than numbers and arguments, a mask, is not kept either."""
    small = _SMALL * min(map(graph.shards.bytes, wanted))
    is_free = dict[Var, bool]()
    found, pending = set[int](), list(wanted)
    while pending and len(found) <= _MOST:
        v = pending.pop()
        maker = graph.maker.get(v)
        if maker is None or maker in found:
            continue
        is_kept = v in there or graph.shards.bytes(v) <= small
        if is_kept and not _is_free(graph, v, is_free):
            continue
        if axes_of(eqn := graph.eqns[maker]):
            found.add(maker)
            pending += [a for a in eqn.invars if isinstance(a, Var)]
    return found


def _is_free(graph: Graph, v: Var, known: dict[Var, bool]) -> bool:
    """Whether an array is made, element by element, of no other than arguments."""
    if v not in known:
        known[v] = False  # While it is looked at.
        eqn = graph.eqns[graph.maker[v]] if v in graph.maker else None
        known[v] = eqn is None or (
            kind_of(eqn) in ("view", "transpose", "elementwise")
            and len(known) < _MOST
            and all(_is_free(graph, a, known) for a in eqn.invars if isinstance(a, Var))
        )
    return known[v]


def _reading(eqn: JaxprEqn, names: Mapping[Var, Var]) -> JaxprEqn:
    """An equation that reads arrays under other names."""
    if not any(isinstance(a, Var) and a in names for a in eqn.invars):
        return eqn
    return eqn.replace(invars=[names.get(a, a) if isinstance(a, Var) else a for a in eqn.invars])
