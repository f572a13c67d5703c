"""How arrays lie on the devices, carried on from the arguments."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Var
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from hlo_passes.equations import Scan, decode
from memplan.splitting.shards import Shards, is_explicit, shards_of
from memplan.streams.fusion import bytes_of
from memplan.streams.programs import inline_all_calls

MESH = AbstractMesh((2, 4), ("x", "y"), (AxisType.Auto,) * 2)


def sharding(*axes):
    return NamedSharding(MESH, PartitionSpec(*axes))


def scanned(x, w):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), jnp.sum(x, -1)), x, w)[1]


@pytest.mark.parametrize(
    ("function", "x", "w", "expected"),
    [
        (lambda x, w: x @ w, ("x",), (None, "y"), (2, 4)),
        (lambda x, w: (x @ w).T, ("x",), (None, "y"), (4, 2)),
        (lambda x, w: (x @ w).reshape(4, 2, 8), ("x",), (None, "y"), (2, 1, 4)),
        (lambda x, w: (x @ w).reshape(64), ("x",), (), (2,)),
        (lambda x, w: jnp.sum(x @ w, 0), ("x",), (None, "y"), (4,)),
        (lambda x, w: x.T @ x, (("x", "y"),), (), (1, 1)),
        (lambda x, w: lax.with_sharding_constraint(x @ w, sharding("y")), ("x",), (), (4, 1)),
        (lambda x, w: scanned(x, jnp.stack([w] * 3)), ("x",), (), (1, 2)),
        (lambda x, w: jax.checkpoint(jnp.dot)(x, w) + 1, ("y",), (), (4, 1)),
    ],
)
def test_of_a_result(function, x, w, expected):
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    jaxpr = inline_all_calls(jax.make_jaxpr(function)(shape, shape).jaxpr)
    shards = Shards()
    given = [shards_of(sharding(*axes), (8, 8)) for axes in (x, w)]
    shards.carry_on(jaxpr, dict(zip(jaxpr.invars, given, strict=True)))
    (result,) = jaxpr.outvars
    assert isinstance(result, Var)
    assert tuple(shards.along(result, d) for d in range(len(expected))) == expected
    assert shards.bytes(result) * math.prod(expected) == bytes_of([result])


def test_in_a_loop():
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    stack = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)
    jaxpr = jax.make_jaxpr(scanned)(shape, stack).jaxpr
    shards = Shards()
    shards.carry_on(jaxpr, {jaxpr.invars[0]: (2, 1)})
    scan = decode(jaxpr.eqns[-1])
    assert isinstance(scan, Scan)
    assert all(shards.along(eqn.outvars[0], 0) == 2 for eqn in scan.body.eqns)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_what_types_say(kind):
    mesh = AbstractMesh((2,), ("x",), (kind,))
    shape = jax.ShapeDtypeStruct(
        (8, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("x"))
    )
    jaxpr = jax.make_jaxpr(jnp.sin)(shape).jaxpr
    assert is_explicit(jaxpr) == (kind == AxisType.Explicit)
