"""Scans without a carry become part of the scans that make their stacks, or read their results.

An optimizer's update is a scan over layers of its own, and so is a cast of all weights. What
one scan leaves for another one crosses the link twice, or lies on the device whole::

    backward scan ──► dW [L, …] ──┐                   ┌────────────────┐
    m [L, …] ─────────────────────┤ update  ──►   m ──┤ backward       ├──► m', p'
    p [L, …] ─────────────────────┤ scan          p ──┤ dW_n ─► update │
                                  └──► m', p'         └────────────────┘

    p [L, …] ─► cast ─► r [L, …] ─┬─► forward         p ─┬─► r_n ─► forward
                        scan      └─► backward  ──►      └─► r_n ─► backward

A scan without a carry is a *map*: slice n of its results needs slice n of its stacks, and no
other. So it can be done in iteration n of another scan of the same length, in whatever order
that goes. A stack that both take apart is taken apart once.

**After.** A map moves into the first scan before it that makes one of its stacks, if nothing
else that it reads has to wait for that scan: the scale of a global norm does, for it is known
when all gradients are. Equations between the two that wait for the scan stand behind the
merged one, the others before it::

    scan, e₁, map, e₂    ──►    e₁, scan + map, e₂    or, if e₁ waits,    scan + map, e₁, e₂

**Before.** What is left of the maps moves into the scans that read its results, if these take
them apart and nothing else needs them. Each reader computes them anew. That is done where it
does not make more bytes move, and with several readers only for elementwise work. A cast to
half the bytes for a forward and a backward scan moves 2 + 2, in place of 2 + 1 + 1 + 1.

The operations are the same ones, on the same values. The slots of the merged ring hold slices
of all that the two took apart.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from jax.core import Atom, ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Var

from hlo_passes.equations import (
    BroadcastInDim,
    Iota,
    Reshape,
    Scan,
    Squeeze,
    as_scan,
    decode,
    is_elementwise,
    programs,
    says_where,
    with_programs,
    within,
)
from memplan.streams.rows import live, variables


def fuse_maps(jaxpr: Jaxpr) -> Jaxpr:
    """Merges scans without a carry into scans of the same length that they read or that read
    them, also in the programs inside.

    Args:
      jaxpr: a traced program.

    Returns:
      A program with the same inputs, outputs and numbers; the very object that was given when
      nothing applies. The merged scans keep their direction, source and scopes.

    Takes time linear in the equations, times the scans, times the merged ones.
    """
    eqns = [with_programs(e, [fuse_maps(p.jaxpr) for p in programs(e)]) for e in jaxpr.eqns]
    if not all(map(operator.is_, eqns, jaxpr.eqns)):
        jaxpr = jaxpr.replace(eqns=eqns)
    for merge in (_merge_after, _merge_before):
        while (eqns_after := merge(jaxpr)) is not None:
            jaxpr = jaxpr.replace(eqns=eqns_after)
    return jaxpr


class ScanEqn(NamedTuple):
    """A scan that can be merged.

    Attributes:
      eqn: the equation.
      says: what it says.
    """

    eqn: JaxprEqn
    says: Scan

    @property
    def is_map(self) -> bool:
        return not self.says.carried and not self.eqn.effects

    @property
    def stacks(self) -> set[Var]:
        """What it takes apart."""
        return variables(self.eqn.invars[self.says.first_stack :])

    @property
    def whole(self) -> set[Var]:
        """What it needs before it starts."""
        return variables(self.eqn.invars[: self.says.first_stack])

    @property
    def last_carry(self) -> Sequence[Var]:
        return self.eqn.outvars[: self.says.carried]

    @property
    def results(self) -> Sequence[Var]:
        """The stacked ones."""
        return self.eqn.outvars[self.says.carried :]


def scan_of(eqn: JaxprEqn) -> ScanEqn | None:
    """An equation as a scan that can be merged; None where it is none."""
    says = decode(eqn)
    if not isinstance(says, Scan) or says_where(eqn):
        return None
    # Effects on mutable arrays name them by number.
    if says.body.constvars or not all(isinstance(a.aval, ShapedArray) for a in eqn.invars):
        return None
    return ScanEqn(eqn, says)


def _is_cheap(eqn: JaxprEqn) -> bool:
    """Whether it takes no more than a copy, an element at a time."""
    views = (BroadcastInDim, Iota, Reshape, Squeeze)
    return is_elementwise(eqn) or isinstance(decode(eqn), views)


# --- after the scan that makes their stacks -------------------------------------------------


def _merge_after(jaxpr: Jaxpr) -> list[JaxprEqn] | None:
    """Returns the equations with all maps merged that can follow one scan; None where there is
    no such scan."""
    for n, eqn in enumerate(jaxpr.eqns):
        scan, after = scan_of(eqn), jaxpr.eqns[n + 1 :]
        if scan is None:
            continue
        maps, free = _followers(scan, after)
        if not maps:
            continue
        first = live(free, [a for m in maps for a in m.eqn.invars])
        gone = {id(e) for e in (*first, *(m.eqn for m in maps))}
        rest = [e for e in after if id(e) not in gone]
        needed = variables([*jaxpr.outvars, *(a for e in rest for a in e.invars)])
        return [*jaxpr.eqns[:n], *first, merged([scan, *maps], scan, needed), *rest]
    return None


def _followers(scan: ScanEqn, after: Iterable[JaxprEqn]) -> tuple[list[ScanEqn], list[JaxprEqn]]:
    """Of the equations `after` a scan, the maps that can be merged into it, and the equations
    that do not wait for it."""
    slices, waited = set(scan.results), set(scan.last_carry)
    maps: list[ScanEqn] = []
    free: list[JaxprEqn] = []
    effects_wait = bool(scan.eqn.effects)
    for eqn in after:
        read, other = variables(eqn.invars), scan_of(eqn)
        if not (read & slices or read & waited or (eqn.effects and effects_wait)):
            free.append(eqn)
        elif (
            other is not None
            and other.is_map
            and other.says.length == scan.says.length
            and not other.whole & slices
            and not read & waited
        ):
            maps.append(other)
            slices.update(other.results)
        else:
            waited.update(eqn.outvars)
            effects_wait |= bool(eqn.effects)
    return maps, free


# --- before the scans that read their results -----------------------------------------------


def _merge_before(jaxpr: Jaxpr) -> list[JaxprEqn] | None:
    """Returns the equations with one map merged into all that read its results; None where
    there is no such map."""
    readers: dict[Var, set[int]] = {v: {len(jaxpr.eqns)} for v in variables(jaxpr.outvars)}
    for n, eqn in enumerate(jaxpr.eqns):
        for var in variables(eqn.invars):
            readers.setdefault(var, set()).add(n)
    scans = dict(enumerate(map(scan_of, jaxpr.eqns)))
    for n, scan in scans.items():
        if scan is None or not scan.is_map:
            continue
        into = {m: scans.get(m) for v in scan.results for m in readers.get(v, ())}
        found = {m: r for m, r in into.items() if r is not None and _takes_apart(r, scan)}
        if not into or len(found) < len(into) or not _pays(scan, list(found.values())):
            continue
        eqns = list(jaxpr.eqns)
        for m, reader in found.items():
            eqns[m] = merged([scan, reader], reader, set(reader.results))
        del eqns[n]
        return eqns
    return None


def _takes_apart(reader: ScanEqn, scan: ScanEqn) -> bool:
    """Whether a scan needs of the results of another one only the slice of its iteration."""
    return reader.says.length == scan.says.length and reader.whole.isdisjoint(scan.results)


def _pays(scan: ScanEqn, readers: Sequence[ScanEqn]) -> bool:
    """Whether no more bytes move when each reader computes what a map does."""
    if len(readers) > 1 and not all(map(_is_cheap, scan.says.body.eqns)):
        return False
    fetched = sum(bytes_of(scan.stacks - reader.stacks) for reader in readers)
    taken = sum(bytes_of(reader.stacks.intersection(scan.results)) for reader in readers)
    return fetched <= bytes_of(scan.stacks) + bytes_of(scan.results) + taken


def bytes_of(arrays: Iterable[Var]) -> int:
    """Of all the arrays together, undivided."""
    avals = (cast(ShapedArray, v.aval) for v in arrays)
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)


# --- the merged scan ------------------------------------------------------------------------


def merged(scans: Sequence[ScanEqn], main: ScanEqn, needed: Collection[Var]) -> JaxprEqn:
    """One scan that does what `scans` do, those first whose results others take apart.

    Args:
      main: the one of them that may have a carry.
      needed: the stacked results that it has.
    """
    consts: dict[Var, tuple[Atom, Var]] = {}
    carry: list[Var] = []
    last_carry: list[Atom] = []
    slices: dict[Var, Var] = {}
    made: dict[Var, Atom] = {}
    parts: list[list[JaxprEqn]] = []
    for scan in scans:
        names: dict[Var, Atom] = {}
        body, operands = scan.says.body, scan.eqn.invars
        for k, (var, operand) in enumerate(zip(body.invars, operands, strict=True)):
            name = Var(var.aval)
            # What is no variable is a number.
            key = operand if isinstance(operand, Var) else name
            if k < scan.says.constants:
                names[var] = consts.setdefault(key, (operand, name))[1]
            elif k < scan.says.first_stack:
                names[var] = name
                carry.append(name)
            else:
                names[var] = made[key] if key in made else slices.setdefault(key, name)
        parts.append(list(_renamed(scan, names, inside=main)))
        results = [names[a] if isinstance(a, Var) else a for a in body.outvars]
        last_carry += results[: scan.says.carried]
        made.update(zip(scan.results, results[scan.says.carried :], strict=True))

    stacked = {v: made[v] for v in made if v in needed}
    outvars = [*last_carry, *stacked.values()]
    eqns = live(_in_order(parts), outvars)
    read = variables([*outvars, *(a for e in eqns for a in e.invars)])
    constants = [(operand, name) for operand, name in consts.values() if name in read]
    stacks = [(stack, name) for stack, name in slices.items() if name in read]
    invars = [*(name for _, name in constants), *carry, *(name for _, name in stacks)]
    first = main.eqn.invars[main.says.constants : main.says.first_stack]
    body = main.says.body.replace(invars=invars, outvars=outvars, eqns=eqns)
    says = replace(main.says, body=body, constants=len(constants), carried=len(carry))
    return as_scan(main.eqn, says).replace(
        invars=[*(operand for operand, _ in constants), *first, *(stack for stack, _ in stacks)],
        outvars=[*main.last_carry, *stacked],
    )


def _renamed(scan: ScanEqn, names: dict[Var, Atom], inside: ScanEqn) -> Iterator[JaxprEqn]:
    """Yields the equations of a scan's body; `names` says what its variables are called, and
    grows. Where they come to be inside another scan, they keep the scope of their own."""
    for eqn in scan.says.body.eqns:
        # Two scans may run the same program.
        outvars = [Var(v.aval) for v in eqn.outvars]
        invars = [names[a] if isinstance(a, Var) else a for a in eqn.invars]
        names.update(zip(eqn.outvars, outvars, strict=True))
        scoped = eqn if scan is inside else within(eqn, scan.eqn)
        yield scoped.replace(invars=invars, outvars=outvars)


def _in_order(parts: Sequence[list[JaxprEqn]]) -> list[JaxprEqn]:
    """The equations of all parts, each part right before the first equation that reads it: a
    ring fetches first what a layer reads first."""
    eqns: list[JaxprEqn] = []
    for part in reversed(parts):
        made = {v for e in part for v in e.outvars}
        reads = (k for k, e in enumerate(eqns) if not made.isdisjoint(variables(e.invars)))
        at = next(reads, 0)
        eqns[at:at] = part
    return eqns
