"""What equations say is what the user's program says, and others are left as they are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import JaxprEqn, Var, check_jaxpr, jaxpr_as_fun
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from hlo_passes.equations import (
    BroadcastInDim,
    Call,
    Concatenate,
    Cond,
    Cumulative,
    DotGeneral,
    DynamicSlice,
    DynamicUpdateSlice,
    Gather,
    Iota,
    Pad,
    Reduction,
    Remat,
    Reshape,
    Reverse,
    Scan,
    Scatter,
    ShardMap,
    Slice,
    Sort,
    Split,
    Squeeze,
    TopK,
    While,
    as_broadcast,
    as_reverse,
    as_scan,
    as_squeeze,
    bind,
    decode,
    programs,
    says_alike,
    with_axes,
    with_dropping,
    with_programs,
    with_shape,
)

X = jnp.arange(12.0).reshape(4, 3)


def traced(fun: Callable[..., Any], *args: Any) -> JaxprEqn:
    """The last equation of a function."""
    return jax.make_jaxpr(fun)(*args or (X,)).eqns[-1]


def total(x: Any) -> Any:
    return lax.scan(lambda c, r: (c + r, (c, r * 2)), jnp.zeros(3), x, reverse=True, unroll=2)


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return x * 2


doubled.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))


@pytest.mark.parametrize(
    ("fun", "said"),
    [
        (lambda x: lax.broadcast_in_dim(x, (2, 4, 3), (1, 2)), BroadcastInDim((1, 2))),
        (lambda x: lax.concatenate([x, x], 1), Concatenate(1)),
        (
            lambda x: lax.dot_general(x, x, (((1,), (1,)), ((0,), (0,)))),
            DotGeneral(((1,), (1,)), ((0,), (0,))),
        ),
        (lambda x: lax.dynamic_slice(x, (1, 0), (2, 3)), DynamicSlice((2, 3))),
        (lambda x: lax.dynamic_update_slice(x, x[:1], (2, 0)), DynamicUpdateSlice()),
        (lambda _: lax.broadcasted_iota(jnp.int32, (4, 3), 1), Iota(1)),
        (lambda x: x.sum(1), Reduction((1,), "sum")),
        (lambda x: x.max(0), Reduction((0,), "max")),
        (lambda x: lax.argmax(x, 1, jnp.int32), Reduction((1,), None)),
        (lambda x: lax.cumsum(x, 1), Cumulative(1, "sum", False)),
        (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 0, 0))), Pad(((0, 0, 0), (1, 0, 0)))),
        (lambda x: lax.slice(x, (0, 1), (4, 2)), Slice((0, 1), (4, 2), (1, 1))),
        (lambda x: lax.top_k(x, 1), TopK(1)),
        (lambda x: lax.split(x, (1, 2), 1), Split(1, (1, 2))),
        (lambda x: lax.sort(x, dimension=0), Sort(0, 1)),
        (lambda x: lax.reshape(x, (2, 6)), Reshape(True)),
        (lambda x: lax.rev(x, (1,)), Reverse((1,))),
        (lambda x: lax.squeeze(x[None], (0,)), Squeeze((0,))),
        (lambda x: x * 2, None),
    ],
)
def test_operations(fun: Callable[..., Any], said: object):
    assert decode(traced(fun)) == said


def test_equations_of_other_sizes_are_alike():
    def of(fun: Callable[..., Any], rows: int) -> JaxprEqn:
        return traced(fun, jnp.ones((rows, 3)))

    for fun in (
        lambda x: x[-1:],
        lambda x: jnp.take(x, jnp.array([0]), axis=0, mode="fill"),
        lambda x: lax.scan(lambda c, r: (c + r, c), jnp.zeros(3), x),
        lambda x: x.reshape(-1),
    ):
        assert says_alike(of(fun, 4), of(fun, 7))
    assert not says_alike(of(lambda x: x.sum(0), 4), of(lambda x: x.sum(1), 4))
    assert not says_alike(of(lambda x: x.sum(0), 4), of(lambda x: x.max(0), 4))


def test_a_scatter_that_drops():
    eqn = traced(lambda x: x.at[jnp.array([1, 9])].set(7.0, mode="clip"), X)
    inside = programs(eqn)[0].jaxpr.eqns[-1] if programs(eqn) else eqn
    (made,) = bind(with_dropping(inside), X, jnp.array([[1], [9]]), jnp.full((2, 3), 7.0))
    assert made[1].tolist() == [7.0] * 3
    assert made[3].tolist() == X[3].tolist()


def test_indices():
    rows = jnp.array([[2], [1]])
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    eqn = traced(lambda x: lax.gather(x, rows, numbers, (1, 3)))
    assert decode(eqn) == Gather(
        axes=(0,), collapsed=(0,), sizes=(1, 3), window=(1,), batches=((), ()), outside="promise"
    )
    says = decode(traced(lambda x: lax.gather(x, rows, numbers, (1, 3), mode="clip")))
    assert isinstance(says, Gather)
    assert says.outside == "clip"

    places = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    for scatter, replaces in ((lax.scatter, True), (lax.scatter_add, False)):
        eqn = traced(lambda x, scatter=scatter: scatter(x, rows, X[:2], places))
        assert decode(eqn) == Scatter(
            axes=(0,),
            inserted=(0,),
            window=(1,),
            replaces=replaces,
            batches=((), ()),
            outside="fill",
        )


def test_loops_and_branches():
    scan = decode(traced(total))
    assert isinstance(scan, Scan)
    assert (scan.constants, scan.carried, scan.first_stack) == (0, 1, 1)
    assert (scan.length, scan.reverse, scan.unroll) == (4, True, 2)

    def count(x: Any, n: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * x), (0, x))

    loop = decode(traced(count, X, 3))
    assert isinstance(loop, While)
    assert (loop.condition_constants, loop.body_constants, loop.first_carried) == (1, 1, 2)

    eqn = traced(lambda x, b: lax.cond(b, jnp.sin, jnp.cos, x), X, True)
    assert isinstance(decode(eqn), Cond)
    assert [(p.first, p.step) for p in programs(eqn)] == [(1, (0,)), (1, (1,))]


def test_calls():
    mesh = jax.make_mesh((1,), ("a",), axis_types=(AxisType.Auto,))
    sharded = jax.sharding.NamedSharding(mesh, P())

    def call(fun: Callable[..., Any]) -> tuple[bool, bool]:
        found = decode(traced(fun))
        assert isinstance(found, Call)
        return found.is_jit, found.is_bare

    assert call(jax.jit(jnp.sin)) == (True, True)
    assert call(jax.jit(jnp.sin, out_shardings=sharded)) == (True, False)
    assert call(doubled) == (False, True)
    assert isinstance(decode(traced(jax.checkpoint(jnp.sin))), Remat)
    found = decode(traced(jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("a"), out_specs=P("a"))))
    assert isinstance(found, ShardMap)
    assert (found.in_specs, found.axis_names) == ((P("a"),), {"a"})


@pytest.mark.parametrize(
    "fun",
    [
        jax.jit(jnp.sin),
        doubled,
        jax.checkpoint(jnp.sin),
        lambda x: lax.cond(x[0, 0] > 1, jnp.cos, jnp.sin, x),
        lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x),
    ],
)
def test_other_programs_inside(fun: Callable[..., Any]):
    eqn = traced(fun)
    inside = [p.jaxpr for p in programs(eqn)]
    assert with_programs(eqn, inside) is eqn
    other = [j.replace(eqns=list(j.eqns)) for j in inside]
    found = [p.jaxpr for p in programs(with_programs(eqn, other))]
    assert all(map(lambda new, given: new is given, found, other))


def test_a_scan_of_what_a_scan_says_is_the_same_program():
    jaxpr = jax.make_jaxpr(total)(X)
    eqns = [as_scan(e, s) if isinstance(s := decode(e), Scan) else e for e in jaxpr.eqns]
    again = jaxpr.replace(eqns=eqns)
    check_jaxpr(again)
    assert decode(again.eqns[-1]) == decode(jaxpr.eqns[-1])
    for found, expected in zip(jaxpr_as_fun(again)(X), jax.tree.leaves(total(X)), strict=True):
        assert (found == expected).all()


def test_other_equations():
    like = traced(lambda x: x * 2)

    def result(eqn: JaxprEqn, x: jax.Array) -> jax.Array:
        jaxpr = jax.make_jaxpr(lambda x: x)(x)
        made = Var(jax.typeof(bind(eqn, x)[0]))
        new = eqn.replace(invars=list(jaxpr.invars), outvars=[made])
        (found,) = jaxpr_as_fun(jaxpr.replace(eqns=[new], outvars=[made]))(x)
        return found

    assert result(as_broadcast(like, (2, 4, 3), (1, 2)), X).tolist() == [X.tolist()] * 2
    assert result(as_squeeze(like, 0), X[None]).tolist() == X.tolist()
    assert result(as_reverse(like, 0), X).tolist() == X[::-1].tolist()
    assert result(with_axes(traced(lambda x: x.sum(1)), (0,)), X).tolist() == X.sum(0).tolist()
    flat = with_shape(traced(lambda x: lax.reshape(x, (2, 6))), (12,))
    assert result(flat, X).shape == (12,)
    assert with_shape(like, (12,)) is like
