"""In how many shards the arrays of a program lie on the devices, along each of their dimensions.

The compiler decides that after the program is traced. Here it is carried on from the arguments, and
from what the program says of it, along the dimensions that an equation shares with its operands: so
does a partitioner begin, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.sharding import AxisType, NamedSharding, Sharding

from hlo_passes.equations import (
    Cond,
    Remat,
    Scan,
    ShardingConstraint,
    While,
    decode,
    programs,
)
from memplan.splitting.axes import axes_of
from memplan.streams.fusion import bytes_of
from memplan.streams.leading_axis import aval_of, shape_of

type Along = tuple[int, ...]
"""Shards along each dimension of an array."""


class Shards:
    """Those of the arrays of a program, and of the programs inside it."""

    def __init__(self) -> None:
        self._along: dict[Var, Along] = {}

    def bytes(self, v: Var) -> int:
        """What an array takes on each device."""
        return bytes_of([v]) // math.prod(self._along.get(v, ()))

    def along(self, v: Var, d: int) -> int:
        """Into how many an array is divided along a dimension."""
        return self._along[v][d] if v in self._along else 1

    def carry_on(self, jaxpr: Jaxpr, given: Mapping[Var, Along]) -> None:
        """Notes those of a program that is given such arrays."""
        for v, along in given.items():
            if math.prod(along) > 1:
                self._along[v] = along
        for eqn in jaxpr.eqns:
            for k, v in enumerate(eqn.outvars):
                along = self._of_result(eqn, k)
                if math.prod(along) > 1:
                    self._along[v] = along
            self._carry_inside(eqn)

    def _of_result(self, eqn: JaxprEqn, k: int) -> Along:
        shape = shape_of(eqn.outvars[k])
        says = decode(eqn)
        if isinstance(says, ShardingConstraint):
            return shards_of(says.sharding, shape)
        found = [1] * len(shape)
        for axis in axes_of(eqn):
            d = axis.results[k]
            if d is not None:
                operands = zip(eqn.invars, axis.operands, strict=True)
                cut = [(a, e) for a, e in operands if isinstance(a, Var) and e is not None]
                found[d] = max(found[d], *(self.along(a, e) for a, e in cut), 1)
        return tuple(found)

    def _carry_inside(self, eqn: JaxprEqn) -> None:
        says = decode(eqn)
        if not isinstance(says, Scan | While | Cond | Remat):
            return
        first_stack = says.first_stack if isinstance(says, Scan) else len(eqn.invars)
        for program in programs(eqn):
            operands = eqn.invars[program.first : program.first + len(program.jaxpr.invars)]
            given = {
                v: self._along[a][k >= first_stack :]
                for k, (a, v) in enumerate(zip(operands, program.jaxpr.invars, strict=True))
                if isinstance(a, Var) and a in self._along
            }
            self.carry_on(program.jaxpr, given)


def is_explicit(jaxpr: Jaxpr) -> bool:
    """Whether types say how arrays lie on the devices (``jax.set_mesh``, explicit axes): then each
    equation does, and would have to say something else of a chunk."""
    arrays = (v for eqn in jaxpr.eqns for v in (*eqn.invars, *eqn.outvars))
    return any(
        AxisType.Explicit in aval.sharding.mesh.axis_types
        for aval in map(aval_of, arrays)
        if isinstance(getattr(aval, "sharding", None), NamedSharding)
    )


def shards_of(sharding: Sharding, shape: Sequence[int]) -> Along:
    """Into how many a sharding divides an array along each dimension; into none where they would
    differ in size."""
    try:
        part_of = sharding.shard_shape(tuple(shape))
    except ValueError:
        return (1,) * len(shape)
    return tuple(whole // part if part else 1 for whole, part in zip(shape, part_of, strict=True))


WHOLE = Shards()
"""All on one device."""
