"""Elementwise work on hosted arrays becomes scans, with the same numbers; the rest stays."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.core import ShapedArray
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, check_jaxpr, jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from hlo_passes import xla
from hlo_passes.equations import Call, Scan, bind, decode
from memplan.streams.leading_axis import splits_leading_axis
from memplan.streams.orders import OrderOf, is_outside_tiles
from memplan.streams.regions import Limits
from memplan.streams.slicing import Sliced, slice_elementwise

# Small numbers, so that small arrays are worth slicing.
SMALL = Limits(min_bytes=1024, min_slice_bytes=128, chunk_bytes=4096, max_trips=16)


@pytest.fixture
def order_of(tpu_compiler: Callable[[str], Any]) -> OrderOf:
    """Of a TPU."""
    return partial(xla.default_layout, tpu_compiler("v5e:2x2").devices[0])


def sliced(fun: Callable[..., Any], *args: Any, limits: Limits = SMALL, **options: Any) -> Sliced:
    """`fun` with all of its arguments and results on the host."""
    jaxpr = jax.make_jaxpr(fun)(*args)
    arguments, results = range(len(jaxpr.in_avals)), range(len(jaxpr.out_avals))
    result = slice_elementwise(jaxpr, set(arguments), set(results), limits=limits, **options)
    check_jaxpr(result.jaxpr)
    return result


def assert_same(fun: Callable[..., Any], *args: Any, exact: bool = True) -> Sliced:
    """Compares the sliced program with `fun`: to the bit where each operation runs by itself,
    unless sums are taken in another order; closely under jit, which contracts products and
    sums."""
    result = sliced(fun, *args)
    original, leaves = jax.make_jaxpr(fun)(*args), jax.tree.leaves(args)
    assert result.jaxpr.in_avals == original.in_avals
    assert result.jaxpr.out_avals == original.out_avals
    compare(interpret(result.jaxpr, leaves), interpret(original, leaves), exact)
    expected, found = (jax.jit(jaxpr_as_fun(j))(*leaves) for j in (original, result.jaxpr))
    compare(found, expected, exact=False)
    return result


def interpret(jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
    """Runs a program one operation at a time, for XLA fuses, and so rounds, as it likes."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*jaxpr.consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        decoded = decode(eqn)
        if isinstance(decoded, Scan):
            results = interpret_scan(eqn, decoded, operands)
        elif isinstance(decoded, Call):
            results = interpret(decoded.body, operands)
        else:
            results = bind(eqn, *operands)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def interpret_scan(eqn: JaxprEqn, scan: Scan, operands: list[Any]) -> list[Any]:
    constants, stacks = operands[: scan.constants], operands[scan.first_stack :]
    carry, made = operands[scan.constants : scan.first_stack], list[Any]()
    for n in reversed(range(scan.length)) if scan.reverse else range(scan.length):
        results = interpret(scan.body, [*constants, *carry, *(x[n] for x in stacks)])
        carry = results[: scan.carried]
        made.append(results[scan.carried :])
    if scan.reverse:
        made.reverse()
    stacked = [
        lax.convert_element_type_p.bind(
            jnp.stack(ys),
            new_dtype=ys[0].dtype,
            weak_type=cast(ShapedArray, v.aval).weak_type,
            sharding=None,
        )
        for ys, v in zip(zip(*made, strict=True), eqn.outvars[scan.carried :], strict=True)
    ]
    return [*carry, *stacked]


def compare(found: list[Any], expected: list[Any], exact: bool) -> None:
    for f, e in zip(found, expected, strict=True):
        assert (f.dtype, f.shape, f.weak_type) == (e.dtype, e.shape, e.weak_type)
        if exact or not jnp.issubdtype(f.dtype, jnp.inexact):
            np.testing.assert_array_equal(f, e)
        else:
            f, e = (np.asarray(x, np.float64) for x in (f, e))
            eps = 2e-2 if found[0].dtype == jnp.bfloat16 else 2e-5
            np.testing.assert_allclose(f, e, rtol=eps, atol=eps)


def scans(jaxpr: Jaxpr) -> list[JaxprEqn]:
    return [eqn for eqn in jaxpr.eqns if isinstance(decode(eqn), Scan)]


def said(scan: JaxprEqn) -> Scan:
    return cast(Scan, decode(scan))


def lengths(result: Sliced) -> list[int]:
    return [said(eqn).length for eqn in scans(result.jaxpr)]


def whole(result: Sliced, least: int = 1024) -> set[str]:
    """What is done outside scans with arrays of so many bytes, but for reshapes of no cost."""
    return {
        eqn.primitive.name
        for eqn in result.jaxpr.eqns
        if eqn.primitive.name != "scan" and not splits_leading_axis(eqn)
        for v in (*eqn.invars, *eqn.outvars)
        if math.prod((aval := cast(ShapedArray, v.aval)).shape) * aval.dtype.itemsize >= least
    }


def array(*shape: int, dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    values = np.random.default_rng((seed, *shape)).normal(size=shape) * 4
    return jnp.asarray(values > 0 if dtype is bool else values, dtype)


def tree(seed: int, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    """Stacked layers, an embedding, and what is too small to be worth anything."""
    return {
        "bias": array(7, seed=seed, dtype=dtype),
        "embedding": array(96, 32, seed=seed, dtype=dtype),
        "gate": array(4, 8, 16, seed=seed, dtype=dtype),
        "norm": array(4, 16, seed=seed, dtype=dtype),
        "up": array(4, 16, 16, seed=seed, dtype=dtype),
    }


def adamw(p: Any, m: Any, v: Any, g: Any, t: Any) -> tuple[Any, Any, Any]:
    m = 0.9 * m + 0.1 * g
    v = 0.99 * v + 0.01 * g**2
    step = (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.99**t)) + 1e-8)
    return p - 0.1 * (step + 0.01 * p), m, v


def update(params: Any, m: Any, v: Any, grads: Any, t: Any) -> Any:
    moved = [adamw(params[k], m[k], v[k], grads[k], t) for k in params]
    return jax.tree.transpose(
        jax.tree.structure(params),
        jax.tree.structure((0, 0, 0)),
        dict(zip(params, moved, strict=True)),
    )


def clipped(params: Any, m: Any, v: Any, grads: Any, t: Any) -> Any:
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: jnp.where(norm > 1, g / norm, g), grads)
    return update(params, m, v, grads, t), norm


def state() -> tuple[Any, ...]:
    return tree(0), tree(1), jax.tree.map(jnp.abs, tree(2)), tree(3), jnp.int32(3)


# --- it fires -------------------------------------------------------------------------------


def test_adamw_of_a_tree():
    result = assert_same(update, *state())
    assert sorted(lengths(result)) == [3, 4, 4]  # One a leaf; what is small stays.
    assert not whole(result)
    assert {(v.trips, v.whole) for v in result.values} == {(3, None), (4, None)}


def test_a_global_norm_takes_two_scans_a_leaf():
    result = assert_same(clipped, *state(), exact=False)
    assert sorted(lengths(result)) == [3, 3, 4, 4, 4, 4]
    assert not whole(result)
    # Nothing but the norm comes out of the first three.
    assert [len(eqn.outvars) for eqn in scans(result.jaxpr)] == [1, 1, 1, 3, 3, 3]


def test_optax():
    optax = pytest.importorskip("optax")
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-3, 0, 10))
    )
    params, grads = tree(0), tree(1)

    def step(params: Any, opt: Any, grads: Any) -> Any:
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt

    result = assert_same(step, params, optimizer.init(params), grads, exact=False)
    assert sorted(lengths(result)) == [3, 3, 4, 4, 4, 4]
    assert not whole(result)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32, jnp.uint8, bool, jnp.float16])
def test_types(dtype: Any):
    def fun(x: Any, y: Any) -> Any:
        flipped = x ^ y if dtype is bool else x * 3 + y
        return (
            jnp.where(x > y, x, y),
            flipped,
            x.astype(jnp.float32) * 0.5,
            x.astype(bool) & ~(y > 0),
        )

    x, y = (array(8, 16, 16, dtype=dtype, seed=n) for n in range(2))
    assert lengths(assert_same(fun, x, y)) == [8]


def test_weak_types_and_scalars():
    def fun(x: Any, scale: Any) -> Any:
        ones = lax.full_like(x, 1.0)
        return x * scale + ones, jnp.broadcast_to(scale, x.shape) * x, jnp.max(x * scale), -x

    x = lax.convert_element_type_p.bind(
        array(4, 16, 16), new_dtype=np.dtype("float32"), weak_type=True, sharding=None
    )
    result = assert_same(fun, x, 3)
    assert lengths(result) == [4]
    assert not whole(result)


@pytest.mark.parametrize(
    ("reduce", "exact"),
    [(f, True) for f in (jnp.max, jnp.min, jnp.any, jnp.all)]
    + [(f, False) for f in (jnp.sum, jnp.prod, jnp.mean, jnp.linalg.norm)],
)
@pytest.mark.parametrize("shape", [(4, 16, 16), (96, 32)])
def test_reductions(reduce: Callable[[Any], Any], exact: bool, shape: tuple[int, ...]):
    # Near one: XLA:CPU takes a common factor out of a product, which then may be inf times 0.
    result = assert_same(lambda x: (reduce(1 + x * 0.01), -x), array(*shape), exact=exact)
    assert len(lengths(result)) == 1
    assert not whole(result)


def test_a_reduction_over_an_empty_value_of_its_own():
    x = jnp.full((4, 16, 16), -jnp.inf)
    assert lengths(assert_same(lambda x: (jnp.max(x), jnp.max(-x)), x)) == [4]
    x = jnp.full((4, 16, 16), jnp.iinfo(jnp.int32).min)
    assert lengths(assert_same(lambda x: jnp.max(x), x)) == [4]


def test_what_factored_moments_do():
    def fun(p: Any, g: Any, row: Any, scale: Any) -> Any:
        row = 0.9 * row + 0.1 * jnp.mean(g**2, axis=-1)
        factor = lax.rsqrt(row / jnp.mean(row, axis=-1, keepdims=True))
        return p - g * factor[..., None] * scale[:, None, None], row

    args = array(4, 16, 16), array(4, 16, 16, seed=1), abs(array(4, 16)), array(4)
    result = assert_same(fun, *args, exact=False)
    assert lengths(result) == [4]
    assert not whole(result)


def test_only_what_is_moved_is_measured(order_of: OrderOf):
    """Neither the mask nor the rows of 4096 numbers ever leave the loop."""

    def fun(x: Any) -> Any:
        rows = lax.reshape(x, (8, 4096))
        return lax.reshape(jnp.where(rows > 0, rows, -rows), x.shape)

    limits = Limits(min_bytes=1024, min_slice_bytes=128, chunk_bytes=4096, order_of=order_of)
    assert lengths(sliced(fun, array(8, 32, 128), limits=limits)) == [8]
    assert lengths(assert_same(fun, array(8, 32, 128))) == [8]


def test_what_is_alike_in_every_slice():
    """Also where it is all that a scan makes, and where it is returned as well."""

    def fun(x: Any, scale: Any) -> Any:
        alike = jnp.full_like(x, 3) * scale
        return x + alike, alike, jnp.zeros_like(x)

    assert lengths(assert_same(fun, array(4, 16, 16), jnp.float32(2))) == [4]
    later = assert_same(lambda x: jnp.full_like(x, 3) * 2 * jnp.max(x), array(4, 16, 16))
    assert lengths(later) == [4, 4]


def test_a_small_operand_does_not_join_leaves():
    def fun(scale: Any, ps: Any) -> Any:
        return [p * scale[:, None, None] for p in ps]

    result = assert_same(fun, array(4), [array(4, 16, 16), array(4, 16, 16, seed=1)])
    assert lengths(result) == [4, 4]


def test_leaves_that_share_an_array_are_read_once():
    result = assert_same(
        lambda a, b, g: (a - g, b + g), *(array(4, 16, 16, seed=n) for n in (0, 1, 2))
    )
    assert lengths(result) == [4]


def test_what_scans_make_is_sliced():
    def fun(w: Any, m: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])

        grads = jax.grad(loss)(w)
        m = 0.9 * m + grads
        return w - 0.1 * m, m

    result = assert_same(fun, array(4, 16, 16), array(4, 16, 16, seed=1), array(2, 16))
    assert lengths(result) == [4, 4, 4]
    assert not whole(result)


def test_calls_are_inlined_where_they_hide_such_work():
    @jax.jit
    def inner(x: Any) -> Any:
        return jax.nn.silu(jnp.where(x > 0, x, 2 * x)), jax.nn.relu(x)

    def fun(x: Any, y: Any) -> Any:
        with jax.named_scope("outer"):
            a, b = inner(x)
        return a + inner(x)[1], b, inner(y)

    result = assert_same(fun, array(4, 16, 16), array(3, 3))
    assert lengths(result) == [4]
    assert [eqn.params["name"] for eqn in result.jaxpr.eqns if "name" in eqn.params] == ["inner"]
    (scan,) = scans(result.jaxpr)
    assert "test_slicing.py" in source_info_util.summarize(scan.source_info)
    body = said(scan).body.eqns
    assert any(str(eqn.source_info.name_stack).startswith("outer") for eqn in body)


def test_custom_derivatives_are_inlined():
    @jax.custom_vjp
    def double(x: Any) -> Any:
        return x * 2

    double.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))
    assert lengths(assert_same(lambda x: jax.nn.relu(double(x)), array(4, 16, 16))) == [4]


def test_a_stage_reads_what_an_earlier_one_returned():
    """m' leaves the region anyway; g is not fetched again."""

    def fun(p: Any, m: Any, g: Any) -> Any:
        m = 0.9 * m + g
        return p - m / jnp.max(jnp.abs(m)), m

    result = assert_same(fun, *(array(4, 16, 16, seed=n) for n in range(3)))
    assert [len(eqn.invars) for eqn in scans(result.jaxpr)] == [2, 3]  # m, g; max, p, m'


def test_an_intermediate_value_is_computed_again():
    def fun(p: Any, g: Any) -> Any:
        step = jnp.tanh(g)
        return p - step / jnp.max(step)

    result = assert_same(fun, *(array(4, 16, 16, seed=n) for n in range(2)))
    assert [len(eqn.outvars) for eqn in scans(result.jaxpr)] == [1, 1]


def test_no_cycle_through_an_equation_outside():
    """sort stands between two equations of one region."""

    def fun(x: Any, y: Any) -> Any:
        a = x + y
        b = lax.sort(a, dimension=0)
        return a * b + x, b

    result = assert_same(fun, *(array(4, 16, 16, seed=n) for n in range(2)))
    assert lengths(result) == [4, 4]
    assert whole(result) == {"sort"}


def test_donated_arguments():
    args = state()
    result = sliced(update, *args)
    run = jax.jit(jaxpr_as_fun(result.jaxpr), donate_argnums=tuple(range(15)))
    expected = jax.tree.leaves(jax.jit(update)(*args))
    compare(run(*map(jnp.copy, jax.tree.leaves(args))), expected, exact=False)


@pytest.mark.slow
def test_effects_keep_their_order(capfd: pytest.CaptureFixture[str]):
    def fun(x: Any, y: Any) -> Any:
        jax.debug.print("first {}", jnp.max(x), ordered=True)
        jax.debug.print("second {}", y[0, 0, 0], ordered=True)
        return x * y

    result = sliced(fun, jnp.ones((4, 16, 16)), jnp.full((4, 16, 16), 2.0))
    printed = [eqn for eqn in result.jaxpr.eqns if eqn.effects]
    assert ["first" in str(eqn.params) for eqn in printed] == [True, False]
    jax.block_until_ready(
        jax.jit(jaxpr_as_fun(result.jaxpr))(jnp.ones((4, 16, 16)), jnp.full((4, 16, 16), 2.0))
    )
    jax.effects_barrier()
    assert capfd.readouterr().out == "first 1.0\nsecond 2.0\n"


# --- it leaves alone ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fun", "shapes"),
    [
        (lambda x, y: x @ y, [(32, 32), (32, 32)]),
        (lambda x: jnp.where(x > 0, x, 0), [(15, 17)]),
        (lambda x: x * 2, [(4096,)]),
        (lambda x: jnp.cumsum(x, axis=0), [(4, 16, 16)]),
        (lambda x: x[::-1], [(4, 16, 16)]),
        (lambda x: jnp.sum(x, axis=0), [(4, 32, 32)]),
        (lambda x: lax.scan(lambda c, x: (c + x, c * x), 0.0, x), [(4096,)]),
        (lambda x: jax.random.bits(jax.random.key(0), x.shape), [(4, 16, 16)]),
        (lambda x: x, [(4, 16, 16)]),
        (lambda x: x + 1, [(1, 32, 32)]),
    ],
)
def test_nothing_applies(fun: Callable[..., Any], shapes: list[tuple[int, ...]]):
    jaxpr = jax.make_jaxpr(fun)(*(array(*shape) for shape in shapes))
    everything = set(range(8))
    result = slice_elementwise(
        jaxpr,
        everything & set(range(len(jaxpr.in_avals))),
        everything & set(range(len(jaxpr.out_avals))),
        limits=SMALL,
    )
    assert result.jaxpr is jaxpr


def test_nothing_is_on_the_host():
    jaxpr = jax.make_jaxpr(update)(*state())
    assert slice_elementwise(jaxpr, set(), set(), limits=SMALL) == Sliced(jaxpr, ())


def test_other_equations_stay_as_they_are():
    def fun(x: Any, y: Any) -> Any:
        return x * 2, y @ y, jax.jit(jnp.tanh)(y)

    jaxpr = jax.make_jaxpr(fun)(array(4, 16, 16), array(32, 32))
    result = slice_elementwise(jaxpr, {0}, {0}, limits=SMALL)
    kept = {id(eqn) for eqn in result.jaxpr.eqns}
    assert [eqn.primitive.name for eqn in jaxpr.eqns if id(eqn) not in kept] == ["mul"]


def test_a_result_that_is_a_constant():
    result = sliced(lambda x: (x * 2, 3.0), array(4, 16, 16), unsplittable_results={1})
    assert lengths(result) == [4]


def test_a_sharded_leading_axis():
    result = sliced(
        lambda x, y: (x * 2, y * 2), array(4, 16, 16), array(4, 16, 16), unsplittable={0}
    )
    assert lengths(result) == [4]
    assert {(v.kind, v.index, v.whole) for v in result.values} == {
        ("argument", 0, "its leading axis is sharded"),
        ("argument", 1, None),
        ("result", 0, "its leading axis is sharded"),
        ("result", 1, None),
    }


def test_rows_without_a_divisor():
    result = sliced(lambda x: x * 2, array(97, 32))
    assert not lengths(result)
    assert result.values[0].whole == "its 97 rows have no divisor that makes chunks of whole tiles"


def test_a_call_that_states_shardings():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    result = sliced(jax.jit(lambda x: x * 2, in_shardings=sharding), array(4, 16, 16))
    assert not lengths(result)


def test_types_that_name_shardings():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    x = jax.device_put(array(4, 16, 16), NamedSharding(mesh, PartitionSpec(None, "x")))
    with jax.set_mesh(mesh):
        assert not lengths(sliced(lambda x: x * 2, x))


# --- sharded arrays -------------------------------------------------------------------------


def test_other_axes_may_be_sharded():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    args = jax.device_put(state(), NamedSharding(mesh, PartitionSpec()))
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    params = {**args[0], "embedding": jax.device_put(args[0]["embedding"], sharding)}
    with jax.set_mesh(mesh):
        result = assert_same(clipped, params, *args[1:], exact=False)
    assert not whole(result)


# --- tiles ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "trips"),
    [
        ((4, 16, 128), jnp.float32, 4),
        ((96, 128), jnp.float32, 12),
        ((96, 128), jnp.bfloat16, 6),
        ((16, 32, 128), jnp.int8, None),  # XLA does not slice these.
        ((256, 100), jnp.float32, None),  # Kept with its rows as lanes.
        ((256, 3, 128), jnp.float32, None),  # Tiles of 8 × 1 × 128.
    ],
)
def test_slices_are_whole_tiles(
    order_of: OrderOf, shape: tuple[int, ...], dtype: Any, trips: int | None
):
    limits = replace(SMALL, order_of=order_of)
    result = sliced(lambda x: x * 2, array(*shape, dtype=dtype), limits=limits)
    assert result.values[0].trips == trips


def test_the_layouts_that_a_tpu_gives(tpu_compiler: Callable[[str], Any], order_of: OrderOf):
    """The leading axis is where the pass expects it, in and out of the tiles."""
    lengths = (2, 3, 5, 8, 24, 100, 128, 1000, 1600, 4096)
    rng = np.random.default_rng(0)
    shapes = [tuple(map(int, rng.choice(lengths, size=rank))) for rank in (2, 3, 3, 4) * 12]
    shapes = [shape for shape in shapes if 1 << 12 < math.prod(shape) < 1 << 22]
    sharding = SingleDeviceSharding(tpu_compiler("v5e:2x2").devices[0])
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8):
        args = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape in shapes]
        compiled = jax.jit(lambda *xs: [-x for x in xs]).lower(*args).compile()
        for shape, kept in zip(shapes, compiled.input_formats[0], strict=True):
            *major, rows, lanes = kept.layout.major_to_minor
            outside = (rows, lanes) == (0, 1) if not major else 0 in major
            order = order_of(dtype, shape)
            assert order is not None
            assert order == kept.layout.major_to_minor[::-1], (shape, dtype)
            assert is_outside_tiles(order) == outside, (shape, dtype)


# --- random programs ------------------------------------------------------------------------

_OPERATIONS: list[Callable[..., Any]] = [
    lambda a, b: a + b,
    lambda a, b: a * 0.5 - b,
    jnp.maximum,
    lambda a, b: jnp.where(a > b, a, 0.25),
    lambda a, b: jnp.clip(a, -1, 1) + jnp.float32(2),
    lambda a, b: a * jnp.max(b),
    lambda a, b: a + jnp.min(b, axis=0),
    lambda a, b: a - jnp.max(b, axis=-1, keepdims=True),
    lambda a, b: a + b[::-1],
    lambda a, b: jnp.roll(a, 1, axis=1) + b,
    lambda a, b: (a.astype(jnp.bfloat16) + 1).astype(a.dtype),
    lambda a, b: a + jnp.ones_like(a) * jnp.max(jnp.abs(b)),
    lambda a, b: jnp.full_like(a, 2) * jnp.max(b),
    jax.jit(lambda a, b: jnp.abs(a) - jax.nn.relu(b)),
    lambda a, b: lax.scan(lambda c, x: (c + 1, x + c), 0.0, a)[1] + b,
]


@pytest.mark.slow
@given(st.data())
@settings(max_examples=60)
def test_random_programs(data: st.DataObject):
    shape = data.draw(st.sampled_from([(4, 8, 16), (3, 16, 16), (96, 32), (128, 16)]))
    inputs = data.draw(st.integers(1, 4))
    pick = st.integers(0, 99)
    steps = data.draw(
        st.lists(st.tuples(st.sampled_from(_OPERATIONS), pick, pick), min_size=1, max_size=12)
    )
    results = data.draw(st.lists(pick, min_size=1, max_size=3))

    def fun(*args: Any) -> Any:
        values = list(args)
        for operation, a, b in steps:
            values.append(operation(values[a % len(values)], values[b % len(values)]))
        return [values[-1], *(values[r % len(values)] for r in results)]

    args = [array(*shape, seed=n) for n in range(inputs)]
    original = jax.make_jaxpr(fun)(*args)
    hosted = data.draw(st.sets(st.integers(0, inputs - 1)))
    hosted_results = data.draw(st.sets(st.integers(0, len(results))))
    result = slice_elementwise(original, hosted, hosted_results, limits=SMALL)
    check_jaxpr(result.jaxpr)
    compare(interpret(result.jaxpr, args), interpret(original, args), exact=True)
