"""Writes the equations of regions into scans over their leading axis.

    stage 0    scan { norm of each slice }  ─► reduce ─► scale
    stage 1    scan { update of each slice, with the scale }

The *stage* of an equation is the number of scans that must have ended before it, on the longest
path. A scan has the equations of one region at one stage (see `slicing`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Var, jaxpr_as_fun

from hlo_passes.equations import bind, with_axes, with_shape
from memplan.streams.leading_axis import (
    Rule,
    aval_of,
    is_reduction,
    rule_of,
    shape_of,
    variables,
)
from memplan.streams.regions import Region


class _Step(NamedTuple):
    """Equations that stand together in the new program.

    Attributes:
      position: where, as far as their operands allow: an index in the old program.
    """

    position: int
    eqns: list[JaxprEqn]

    @property
    def effects(self) -> bool:
        return any(eqn.effects for eqn in self.eqns)


class Scans:
    """Puts the equations of regions into scans.

    Attributes:
      rules: of every equation.
      makers: the equation that makes a variable.
      region: the region that an equation is in.
      stages: of each variable; see the module.
      leaving: the variables that are made in scans and needed elsewhere.
    """

    def __init__(self, jaxpr: Jaxpr, regions: Sequence[Region]) -> None:
        self.jaxpr = jaxpr
        self.rules = [rule_of(eqn) for eqn in jaxpr.eqns]
        self.makers = {v: n for n, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self.region = {n: region for region in regions for n in region.equations}
        self.stages = self._stages()
        self.leaving = self._leaving()

    def program(self) -> Jaxpr:
        """The program with its scans."""
        scans: dict[tuple[Region, int], list[Var]] = {}
        for var in self.leaving:
            scans.setdefault((self.region[self.makers[var]], self.stages[var]), []).append(var)
        steps = [self._scan(region, results) for (region, _), results in scans.items()]
        steps += [_Step(n, [eqn]) for n, eqn in enumerate(self.jaxpr.eqns) if n not in self.region]
        read = {v for step in steps for v in _read(step)} | set(variables(self.jaxpr.outvars))
        # Each scan makes its own slices of arrays that are alike in every slice.
        steps = [s for s in steps if not self._is_uniform(s.position) or read & _made(s)]
        eqns = [eqn for step in _in_order(steps) for eqn in step.eqns]
        return self.jaxpr.replace(eqns=eqns)

    def _is_uniform(self, n: int) -> bool:
        rule = self.rules[n]
        return rule is not None and rule.is_uniform

    def _made_inside(self, n: int, k: int) -> int | None:
        """The equation that makes operand `k` of equation `n` slice by slice in a scan that
        `n` can be in as well; None where there is none."""
        var, region, rule = self.jaxpr.eqns[n].invars[k], self.region.get(n), self.rules[n]
        maker = self.makers.get(var) if isinstance(var, Var) else None
        if region is None or rule is None or maker is None or not rule.sliced[k]:
            return None
        made_by = self.rules[maker]
        if maker not in region.equations or made_by is None or made_by.reduces:
            return None
        return maker

    def _stages(self) -> dict[Var, int]:
        stages: dict[Var, int] = {}
        effects = 0
        for n, eqn in enumerate(self.jaxpr.eqns):
            stage = effects if eqn.effects else 0
            for k, var in enumerate(eqn.invars):
                if isinstance(var, Var) and var in self.makers:
                    after = self.makers[var] in self.region and self._made_inside(n, k) is None
                    stage = max(stage, stages[var] + after)
            if eqn.effects:
                effects = stage
            stages.update(dict.fromkeys(eqn.outvars, stage))
        return stages

    def _leaving(self) -> dict[Var, None]:
        read = [
            v
            for n, eqn in enumerate(self.jaxpr.eqns)
            for k, v in enumerate(eqn.invars)
            if self._made_inside(n, k) is None
        ]
        read += self.jaxpr.outvars
        return dict.fromkeys(v for v in variables(read) if self.makers.get(v, -1) in self.region)

    def _scan(self, region: Region, results: list[Var]) -> _Step:
        """The scan that makes `results`, all of one stage."""
        inside, slices, whole = self._inside(results)
        rows = shape_of(next(iter(region.arrays)))[0] // region.trips
        args = [*whole, *slices]
        body = self._body(inside, args, len(whole), results, rows)
        makers = [self.jaxpr.eqns[self.makers[v]] for v in results]
        reductions = [eqn if is_reduction(eqn) else None for eqn in makers]

        def scan(*args: Any) -> list[Any]:
            consts, arrays = args[: len(whole)], args[len(whole) :]

            def trip(_: None, xs: tuple[Any, ...]) -> tuple[None, list[Any]]:
                if rows == 1:
                    xs = tuple(lax.expand_dims(x, (0,)) for x in xs)
                ys = jaxpr_as_fun(body)(*consts, *xs)
                if rows == 1:
                    kept = zip(ys, reductions, strict=True)
                    ys = [y if reduction else lax.squeeze(y, (0,)) for y, reduction in kept]
                return None, ys

            if rows > 1:
                arrays = [x.reshape(region.trips, rows, *x.shape[1:]) for x in arrays]
            _, stacks = lax.scan(trip, None, tuple(arrays), length=region.trips)
            return [
                bind(with_axes(reduction, (0,)), y)[0] if reduction else y.reshape(shape_of(v))
                for y, v, reduction in zip(stacks, results, reductions, strict=True)
            ]

        shapes = [_struct(aval_of(a)) for a in args]
        made = jax.make_jaxpr(scan)(*shapes).jaxpr
        names = dict(zip(made.invars, args, strict=True))
        names |= dict(zip(made.outvars, results, strict=True))
        # Errors and profiles name the user's line, not this one.
        position = max(self.makers[v] for v in results)
        traceback = self.jaxpr.eqns[position].source_info.traceback
        return _Step(
            position,
            [
                eqn.replace(
                    invars=[names.get(v, v) if isinstance(v, Var) else v for v in eqn.invars],
                    outvars=[names.get(v, v) for v in eqn.outvars],
                    source_info=eqn.source_info.replace(traceback=traceback),
                )
                for eqn in made.eqns
            ],
        )

    def _inside(self, results: Sequence[Var]) -> tuple[set[int], dict[Var, None], dict[Var, None]]:
        """What a scan does: its equations, the arrays it slices, what it needs whole."""
        stage = self.stages[results[0]]
        inside: set[int] = set()
        slices: dict[Var, None] = {}
        whole: dict[Var, None] = {}
        pending = [self.makers[v] for v in results]
        while pending:
            n = pending.pop()
            if n in inside:
                continue
            inside.add(n)
            rule = self.rules[n] or Rule(())
            for k, var in enumerate(self.jaxpr.eqns[n].invars):
                if not isinstance(var, Var):
                    continue
                maker = self.makers.get(var)
                if not rule.sliced[k]:
                    whole[var] = None
                elif maker is None or (var in self.leaving and self.stages[var] < stage):
                    slices[var] = None
                elif self._made_inside(n, k) is not None or self._is_uniform(maker):
                    pending.append(maker)
                else:
                    slices[var] = None
        return inside, slices, whole

    def _body(
        self, inside: set[int], args: list[Var], consts: int, results: list[Var], rows: int
    ) -> Jaxpr:
        """The equations `inside` for a slice of `rows`; the first `consts` arguments are
        whole."""
        whole = {v: Var(v.aval) for v in args[:consts]}
        sliced = {v: _slice_of(v, rows) for v in args[consts:]}
        eqns: list[JaxprEqn] = []
        for n in sorted(inside):
            eqn, rule = self.jaxpr.eqns[n], self.rules[n] or Rule(())
            (out,) = eqn.outvars
            sliced[out] = Var(out.aval) if rule.reduces else _slice_of(out, rows)
            names = [sliced if s else whole for s in rule.sliced]
            operands = [
                named[v] if isinstance(v, Var) else v
                for v, named in zip(eqn.invars, names, strict=True)
            ]
            shaped = with_shape(eqn, shape_of(sliced[out]))
            eqns.append(shaped.replace(invars=operands, outvars=[sliced[out]]))
        return self.jaxpr.replace(
            constvars=[],
            invars=[*whole.values(), *(sliced[v] for v in args[consts:])],
            outvars=[sliced[v] for v in results],
            eqns=eqns,
            effects=set(),
        )


def _slice_of(var: Var, rows: int) -> Var:
    return Var(aval_of(var).update(shape=(rows, *shape_of(var)[1:])))


def _struct(aval: ShapedArray) -> jax.ShapeDtypeStruct:
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)


def _made(step: _Step) -> set[Var]:
    return {v for eqn in step.eqns for v in eqn.outvars}


def _read(step: _Step) -> set[Var]:
    return {v for eqn in step.eqns for v in variables(eqn.invars)} - _made(step)


def _in_order(steps: Sequence[_Step]) -> Iterator[_Step]:
    """Yields steps after what they read, else by position; those with effects keep theirs.

    Kahn's algorithm (Communications of the ACM, 1962), the ready ones in a heap.
    """
    steps = sorted(steps, key=lambda step: step.position)
    makers = {v: n for n, step in enumerate(steps) for v in _made(step)}
    readers: list[set[int]] = [set() for _ in steps]
    waits = [0] * len(steps)
    effects = [n for n, step in enumerate(steps) if step.effects]
    before = dict(zip(effects[1:], effects, strict=False))
    for n, step in enumerate(steps):
        waited = {makers[v] for v in _read(step) if v in makers}
        if n in before:
            waited.add(before[n])
        waits[n] = len(waited)
        for other in waited:
            readers[other].add(n)
    ready = [n for n, waited in enumerate(waits) if not waited]
    while ready:
        n = heapq.heappop(ready)
        yield steps[n]
        for other in readers[n]:
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(ready, other)
