"""Equations that are cut: chunk by chunk they make what they make as a whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Var, jaxpr_as_fun

from hlo_passes.equations import name
from memplan.splitting.axes import axes_of
from memplan.splitting.loops import in_chunks
from memplan.splitting.regions import Chunks, Graph, Region
from memplan.splitting.shards import WHOLE
from memplan.streams.leading_axis import shape_of
from memplan.streams.programs import inline_all_calls

A = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8) % 7 - 3
B = np.arange(4 * 8 * 2, dtype=np.float32).reshape(4, 8, 2) % 5 - 2
IMAGE, KERNEL = A.reshape(2, 4, 4, 6), np.ones((3, 3, 6, 2), np.float32)
PLACES = np.array([[0, 3], [2, 1], [5, 5], [4, 0]])


def conv(x, w, **groups):
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **groups
    )


# What is run, on what, and how many axes it has: of those that change the numbers' order, sums.
EQUATIONS = {
    "product": (lambda a, b: lax.dot_general(a, b, (((2,), (1,)), ((0,), (0,)))), (A, B), 4),
    "element-wise": (lambda a, b: a * b, (A, A[:, :1]), 3),
    "with a number": (lambda a: a * 2, (A,), 3),
    "sum": (lambda a: lax.reduce_sum_p.bind(a, axes=(1,), out_sharding=None), (A,), 3),
    "max": (lambda a: lax.reduce_max_p.bind(a, axes=(0, 2), out_sharding=None), (A,), 3),
    "argmax": (lambda a: lax.argmax(a, 1, np.int32), (A,), 2),
    "broadcast": (lambda a: lax.broadcast_in_dim(a, (4, 6, 2, 8), (0, 1, 3)), (A,), 4),
    "broadcast of one": (lambda a: lax.broadcast_in_dim(a, (4, 6, 8), (0, 1, 2)), (A[:, :1],), 3),
    "merged": (lambda a: lax.reshape(a, (24, 8)), (A,), 2),
    "parted": (lambda a: lax.reshape(a, (2, 2, 6, 8)), (A,), 3),
    "ones": (lambda a: lax.reshape(a, (1, 4, 1, 48)), (A,), 2),
    "squeezed": (lambda a: lax.squeeze(a, (1,)), (A[:, :1],), 2),
    "transposed": (lambda a: lax.transpose(a, (2, 0, 1)), (A,), 3),
    "iota": (lambda: lax.broadcasted_iota(np.int32, (4, 6), 0), (), 2),
    "concatenated": (lambda a: lax.concatenate([a, a], 1), (A,), 2),
    "sliced": (lambda a: lax.slice(a, (0, 1, 0), (4, 4, 8)), (A,), 2),
    "padded": (lambda a: lax.pad(a, np.float32(0), ((0, 0, 0), (1, -1, 0), (0, 0, 0))), (A,), 2),
    "reversed": (lambda a: lax.rev(a, (1,)), (A,), 2),
    "sorted": (lambda a: lax.sort(a, dimension=1), (A,), 2),
    "sorted together": (lambda a: lax.sort([a, a * 2], dimension=2), (A,), 2),
    "running": (lambda a: lax.cumsum(a, 2), (A,), 2),
    "split": (lambda a: lax.split(a, (2, 4), 1), (A,), 2),
    "largest": (lambda a: lax.top_k(a, 3), (A,), 2),
    "stacked": (lambda a: jnp.stack([a, a], 1), (A,), 3),
    "unstacked": (lambda a: jnp.unstack(a, axis=1), (A,), 2),
    "tiled": (lambda a: jnp.tile(a, (1, 2, 1)), (A,), 2),
    "window": (lambda a: lax.reduce_window_max_p.bind(
        a, window_dimensions=(1, 2, 1), window_strides=(1, 2, 1), padding=((0, 0),) * 3,
        base_dilation=(1,) * 3, window_dilation=(1,) * 3), (A,), 2),
    "dynamic slice": (lambda a, k: lax.dynamic_slice(a, (0, k, 0), (4, 2, 8)), (A, np.int32(3)), 2),
    "update": (lambda a, k: lax.dynamic_update_slice(a, a[:, :2], (0, k, 0)), (A, np.int32(3)), 2),
    "convolution": (conv, (IMAGE, KERNEL), 3),
    "features in groups": (
        lambda x, w: conv(x, w, feature_group_count=2), (IMAGE, KERNEL[:, :, :3]), 1,
    ),
    "batches in groups": (
        lambda x, w: conv(x, w, batch_group_count=2), (IMAGE, KERNEL), 1,
    ),
    "rows": (lambda a, i: a[i], (A[0], PLACES), 3),
    "entries of rows": (lambda a, i: jnp.take_along_axis(a, i, 1), (A[:, :, 0], PLACES), 2),
    "rows added": (lambda a, i: a.at[i].add(i[..., None] * 0.5), (A[0], PLACES), 3),
    "scanned": (lambda a, b: lax.scan(lambda c, x: (c / 2 + x, (c, x.sum())), b, a), (A, A[0]), 2),
    "scanned with a truth": (
        lambda a: lax.scan(lambda c, x: (jnp.logical_or(c, True), x * 2), jnp.array(False), a),
        (A,), 2,
    ),
    "added up": (
        lambda a, b: lax.scan(lambda c, x: (c + (x * b).sum(0), None), jnp.ones(8), a)[0],
        (A, A[0]), 2,
    ),
    "added up twice": (
        lambda a: lax.scan(lambda c, x: (c + x.sum(0).sum(), None), jnp.array(0.5), a)[0], (A,), 2,
    ),
    "added up in parts": (
        lambda a, b: lax.scan(
            lambda c, x: ([*map(jnp.add, c, jnp.split((x * b).sum(0), 2))], None),
            [jnp.ones(4)] * 2, a,
        )[0],
        (A, A[0]), 1,
    ),
    "while": (
        lambda a: lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.sin(c[0]), c[1] + 1), (a, 0)),
        (A,), 3,
    ),
    "while it adds up": (
        lambda a: lax.while_loop(
            lambda c: c[2] < 3, lambda c: (jnp.sin(c[0]), c[1] + c[0].sum(0), c[2] + 1),
            (a, a[0] * 0, 0),
        ),
        (A,), 3,
    ),
    "one of two": (
        lambda a, b, k: lax.cond(k > 1, lambda a, b: (a, a * b), lambda a, b: (a - b, a), a, b),
        (A, A + 1, np.int32(2)), 3,
    ),
    "computed again": (lambda a: jax.checkpoint(lambda a: jnp.sin(a).sum(0))(a), (A,), 3),
}  # fmt: skip


def equation_of(function, args):
    """A program, and the number of its last equation of which something can be cut."""
    jaxpr = inline_all_calls(jax.make_jaxpr(function)(*args).jaxpr)
    return jaxpr, max(n for n, eqn in enumerate(jaxpr.eqns) if axes_of(eqn))


@pytest.mark.parametrize(("function", "args", "count"), EQUATIONS.values(), ids=EQUATIONS)
def test_chunks_make_what_the_whole_makes(function, args, count):
    jaxpr, n = equation_of(function, args)
    eqn = jaxpr.eqns[n]
    axes = axes_of(eqn)
    assert len(axes) == count
    expected = jaxpr_as_fun(jaxpr)(*args)
    for axis in axes:
        cut = {v: d for v, d in axis.pairs(eqn) if isinstance(v, Var) and d is not None}
        region = Region({n: axis}, cut)
        assert region.rows > 1
        for each in {1, region.rows // 2, 1 + region.rows // 2}:  # Some leave rows for a first one.
            new = in_chunks(Graph(jaxpr, WHOLE), region, Chunks(region.rows, each))
            assert sum(e.primitive.name == "scan" for e in new.eqns) > sum(
                e.primitive.name == "scan" for e in jaxpr.eqns
            ) - bool(axis.inside)
            found = jaxpr_as_fun(new)(*args)
            for a, b in zip(expected, found, strict=True):
                assert (a.shape, a.dtype) == (b.shape, b.dtype)
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "primitive"),
    [
        (lambda a: lax.bitcast_convert_type(a, np.uint8), "bitcast_convert_type"),
        (lambda a: jax.random.bits(jax.random.key(0), a.shape), "random_bits"),
        (lambda a: lax.linalg.cholesky(a[:, :, :6]), "cholesky"),
    ],
)
def test_what_is_not_known_is_not_cut(function, primitive):
    jaxpr = inline_all_calls(jax.make_jaxpr(function)(A).jaxpr)
    (eqn,) = (eqn for eqn in jaxpr.eqns if name(eqn) == primitive)
    assert not axes_of(eqn)


def scanned(trip, *begin):
    return lambda a: lax.scan(trip, begin, a)


@pytest.mark.parametrize(
    "function",
    [
        scanned(lambda c, x: ((c[0] + x.sum(0),), c[0]), B[0, :, 0]),
        scanned(lambda c, x: ((d := c[0] + x.sum(0),), d), B[0, :, 0]),
        scanned(lambda c, x: ((d := c[0] + x.sum(0),), jnp.sin(d)), B[0, :, 0]),
        scanned(lambda c, x: ((x.sum(0),), jnp.sin(c[0])), B[0, :, 0]),
        scanned(lambda c, x: ((c[0] * 2 + x.sum(0),), None), B[0, :, 0]),
        scanned(lambda c, x: ((c[0] + c[0] + x.sum(0),), None), B[0, :, 0]),
        scanned(lambda c, x: ((c[0] + x.sum(0) + 1,), None), B[0, :, 0]),
        scanned(lambda c, x: ((c[0] + x.sum(0), c[1] + c[0]), None), B[0, :, 0], B[0, :, 1]),
        scanned(lambda c, x: ((jnp.maximum(c[0], x.max(0)),), None), B[0, :, 0]),
        lambda a: lax.while_loop(lambda c: c[0].sum() < 0, lambda c: (c[0] + 1,), (a[0],)),
        lambda a: lax.while_loop(
            lambda c: c[1][0] < 9, lambda c: (c[0], c[1] + c[0].sum(0)), (a[0], a[0, 0])
        ),
        lambda a: lax.cond(a[0, 0, 0] > 1, lambda a: a[0].sum(0), lambda a: a[0, 0] * 2, a),
    ],
)
def test_what_becomes_of_a_sum_in_a_loop_decides_whether_it_is_cut(function):
    """Of six rows some would count what those before them have made twice, or not at all."""
    jaxpr, n = equation_of(function, (A,))
    for eqn in jaxpr.eqns[: n + 1]:
        if name(eqn) in ("scan", "while", "cond"):
            cut = [axis.pairs(eqn) for axis in axes_of(eqn)]
            assert not any(d is not None and shape_of(a)[d] == 6 for axis in cut for a, d in axis)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("way", ["product", "sum", "in a program inside"])
def test_narrow_sums_are_wide_until_the_last_chunk(dtype, way):
    a = jax.random.normal(jax.random.key(0), (1024, 64)).astype(dtype)
    functions = {
        "product": lambda a: lax.dot_general(a, a, (((0,), (0,)), ((), ())), None, dtype),
        "sum": lambda a: lax.reduce_sum_p.bind(a, axes=(0,), out_sharding=None),
    }
    functions["in a program inside"] = jax.checkpoint(functions["product"])
    jaxpr, n = equation_of(functions[way], (a,))
    axis = next(axis for axis in axes_of(jaxpr.eqns[n]) if not axis.is_map)
    new = in_chunks(Graph(jaxpr, WHOLE), Region({n: axis}, {jaxpr.invars[0]: 0}), Chunks(1024, 4))
    exact = functions[way](a.astype(jnp.float32)) if way != "sum" else a.astype(float).sum(0)
    (found,) = jaxpr_as_fun(new)(a)
    assert found.dtype == dtype
    error = np.abs(found.astype(np.float32) - exact) / (1 + np.abs(exact))
    assert error.max() <= float(jnp.finfo(dtype).eps)
