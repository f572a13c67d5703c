"""Scans without a carry merge into the scans around them, with the same numbers; others stay."""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.core import ShapedArray
from jax.experimental import io_callback
from jax.extend.core import Jaxpr, Var, check_jaxpr, jaxpr_as_fun

from hlo_passes.equations import programs
from memplan.streams.fusion import fuse_maps
from memplan.streams.hosting import Hosting, Streams
from memplan.streams.programs import inline_calls
from memplan.streams.regions import Limits
from memplan.streams.rewrite import streamed
from memplan.streams.slicing import slice_elementwise
from models.configs import TINY
from models.scanned import ScannedLlama
from models.training import TrainOptions, init_state, train_step
from tests.memplan.streams.test_slicing import compare, interpret, said, scans
from tests.sweeps import slow_but

LAYERS, WIDTH = 3, 4

type Shape = tuple[int, int, int]
"""Of a scan: how many stacks it takes apart, carries and makes."""


def stack(seed: int = 0, length: int = LAYERS, dtype: Any = jnp.float32) -> jax.Array:
    values = np.random.default_rng((seed, length)).normal(size=(length, WIDTH, WIDTH))
    return jnp.asarray(values / 2, dtype)


def shapes(jaxpr: Jaxpr) -> list[Shape]:
    found: list[Shape] = []
    for eqn in scans(jaxpr):
        scan = said(eqn)
        stacks, results = len(eqn.invars) - scan.first_stack, len(eqn.outvars) - scan.carried
        found.append((stacks, scan.carried, results))
    return found


def is_array(var: Var) -> bool:
    """Whether it is more than a number for each layer."""
    return len(cast(ShapedArray, var.aval).shape) > 1


def assert_fused(fun: Callable[..., Any], *args: Any) -> Jaxpr:
    """Compares the fused program with `fun`, to the bit where each operation runs by itself."""
    original, leaves = jax.make_jaxpr(fun)(*args), jax.tree.leaves(args)
    fused = fuse_maps(original)
    check_jaxpr(fused)
    assert fused is not original
    assert fuse_maps(fused) is fused
    compare(interpret(fused, leaves), interpret(original, leaves), exact=True)
    expected, found = (jax.jit(jaxpr_as_fun(j))(*leaves) for j in (original, fused))
    compare(found, expected, exact=False)
    return fused


def assert_left_alone(fun: Callable[..., Any], *args: Any) -> None:
    jaxpr = jax.make_jaxpr(fun)(*args)
    assert fuse_maps(jaxpr) is jaxpr


def forward(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0]


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return (forward(w, x) ** 2).sum()


def step(rate: Any, p: jax.Array, m: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    m = 0.9 * m + g
    return p - rate * m, m


def update(rate: Any, *stacks: jax.Array, reverse: bool = False) -> Any:
    return lax.scan(lambda _, s: (None, step(rate, *s)), None, stacks, reverse=reverse)[1]


def narrowed(w: jax.Array) -> jax.Array:
    return lax.map(lambda w: w.astype(jnp.bfloat16), w)


X = jnp.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH)


# --- after ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
def test_an_update_moves_into_the_backward_scan(reverse: bool):
    def train(w: Any, m: Any, x: Any, count: Any) -> Any:
        g = jax.grad(loss)(w, x)
        count += 1
        return *update(0.1 / count, w, m, g, reverse=reverse), count

    fused = assert_fused(train, stack(), stack(1), X, 1)
    (_, before) = shapes(jax.make_jaxpr(jax.grad(loss))(stack(), X))
    (_, after) = shapes(fused)
    # It takes m as well, w it has, and makes w and m in the place of the gradients.
    assert before[2] == 1
    assert after == (before[0] + 1, before[1], 2)
    assert said(scans(fused)[-1]).reverse


def test_each_update_of_a_tree_moves():
    def train(ws: Any, ms: Any, x: Any) -> Any:
        gs = jax.grad(lambda ws: sum(loss(w, x) for w in ws))(ws)
        return [update(0.1, *leaves) for leaves in zip(ws, ms, gs, strict=True)]

    def together(ws: Any, ms: Any, x: Any) -> Any:
        def layer(x: Any, ws: Any) -> tuple[Any, None]:
            return jnp.sin(x @ ws[0]) @ ws[1], None

        gs = jax.grad(lambda ws: (lax.scan(layer, x, ws)[0] ** 2).sum())(ws)
        return [update(0.1, *leaves) for leaves in zip(ws, ms, gs, strict=True)]

    trees = [stack(), stack(1)], [stack(2), stack(3)]
    assert [made for _, _, made in shapes(assert_fused(together, *trees, X))][-1] == 4
    assert len(scans(assert_fused(train, *trees, X))) == 4


def test_what_clipping_scales_is_left_alone():
    """The norm of the gradients moves; what needs it waits for all of them."""

    def clipped(w: Any, m: Any, x: Any) -> Any:
        g = jax.grad(loss)(w, x)
        norm = lax.map(lambda g: (g**2).sum(), g).sum()
        return update(0.1 / norm, w, m, g), norm

    fused = assert_fused(clipped, stack(), stack(1), X)
    assert [(carried, made) for _, carried, made in shapes(fused)][1:] == [(1, 2), (0, 2)]


def test_a_result_that_is_also_returned_stays():
    def both(w: Any, m: Any, x: Any) -> Any:
        g = jax.grad(loss)(w, x)
        return update(0.1, w, m, g), g

    assert [made for *_, made in shapes(assert_fused(both, stack(), stack(1), X))][-1] == 3


def test_maps_follow_one_another():
    def chain(w: Any, x: Any) -> Any:
        a = lax.scan(lambda x, w: (x @ w, x + w), x, w)[1]
        b = lax.map(lambda s: s[0] * s[1], (a, w))
        return lax.map(lambda s: s[0] + s[1], (b, a))

    assert shapes(assert_fused(chain, stack(), X)) == [(1, 1, 1)]


def test_maps_follow_maps():
    fused = assert_fused(lambda w: lax.map(jnp.sin, lax.map(jnp.cos, w)), stack())
    assert shapes(fused) == [(1, 0, 1)]


def test_a_program_that_runs_twice():
    double = jax.jit(lambda w: lax.map(lambda w: w * 2, w))

    def twice(w: Any, x: Any) -> Any:
        return double(double(lax.scan(lambda x, w: (x @ w, x + w), x, w)[1]))

    inlined = jaxpr_as_fun(inline_calls(jax.make_jaxpr(twice)(stack(), X)))
    first, second = scans(jax.make_jaxpr(inlined)(stack(), X))[1:]
    assert said(first).body is said(second).body
    assert shapes(assert_fused(inlined, stack(), X)) == [(1, 1, 1)]


def test_literals_and_results_handed_on():
    def odd(w: Any, x: Any) -> Any:
        _, a = lax.scan(lambda x, w: (x @ w, (x, w, 1.0)), x, w)
        scale = lax.map(lambda s: (s[0], s[1] * 2.0, s[2]), a)
        return update(0.5, *scale[:2], a[1])

    assert shapes(assert_fused(odd, stack(), X)) == [(1, 1, 2)]


def test_what_the_map_needs_comes_before_and_what_waits_after():
    def train(w: Any, m: Any, x: Any, rate: Any) -> Any:
        g = jax.grad(loss)(w, x)
        norm = (g**2).sum()
        rate = jnp.sqrt(rate)
        return update(rate, w, m, g), norm, rate + norm

    names = [e.primitive.name for e in assert_fused(train, stack(), stack(1), X, 2.0).eqns]
    last = len(names) - 1 - names[::-1].index("scan")
    assert names.index("sqrt") < last < names.index("reduce_sum", last)


@pytest.mark.parametrize(
    "follow",
    [
        pytest.param(lambda y, a: lax.map(lambda a: a @ y, a), id="its last carry"),
        pytest.param(lambda y, a: lax.map(lambda s: s @ a[0], a), id="its results whole"),
        pytest.param(lambda y, a: lax.map(jnp.sin, a[::-1]), id="its results turned around"),
        pytest.param(lambda y, a: lax.map(jnp.sin, a[1:]), id="fewer slices"),
        pytest.param(lambda y, a: lax.scan(lambda c, a: (c + a, a), y, a), id="a carry"),
        pytest.param(
            lambda y, a: lax.map(lambda s: s[0] + s[1], (a, jnp.cumsum(a, 0))),
            id="a stack that waits",
        ),
    ],
)
def test_what_needs_more_than_a_slice_is_left_alone(follow: Callable[..., Any]):
    def program(w: Any, x: Any) -> Any:
        return follow(*lax.scan(lambda x, w: (x @ w, x + w), x, w))

    assert_left_alone(program, stack(), X)


def test_effects_keep_their_order():
    """What is printed after the scan may not be printed before it."""

    def program(w: Any, x: Any) -> Any:
        _, a = lax.scan(lambda x, w: (x @ w, x + w), x, w)
        jax.debug.print("{}", a.sum(), ordered=True)
        scale = io_callback(np.sin, jax.ShapeDtypeStruct((), x.dtype), x[0, 0], ordered=True)
        return lax.map(lambda a: a * scale, a)

    assert_left_alone(program, stack(), X)


def test_a_map_with_effects_is_left_alone():
    def program(w: Any, x: Any) -> Any:
        _, a = lax.scan(lambda x, w: (x @ w, x + w), x, w)
        return lax.map(lambda a: jax.debug.print("{}", a) or a * 2, a)

    assert_left_alone(program, stack(), X)


def test_a_scan_with_effects_takes_maps():
    def layer(x: Any, w: Any) -> Any:
        return lax.psum(x @ w, "i"), x + w

    def program(w: Any, x: Any) -> Any:
        return lax.map(jnp.sin, lax.scan(layer, x, w)[1])

    jaxpr = jax.make_jaxpr(program, axis_env=[("i", 1)])(stack(), X)
    assert shapes(fuse_maps(jaxpr)) == [(1, 1, 1)]


def test_scopes_are_kept():
    def program(w: Any, x: Any) -> Any:
        with jax.named_scope("layers"):
            _, a = lax.scan(lambda x, w: (x @ w, x + w), x, w)
        with jax.named_scope("update"):
            return lax.map(jnp.sin, a)

    (scan,) = scans(assert_fused(program, stack(), X))
    scopes = {e.primitive.name: str(e.source_info.name_stack) for e in said(scan).body.eqns}
    assert str(scan.source_info.name_stack) == "layers"
    assert "update" in scopes["sin"]
    assert "update" not in scopes["dot_general"]


# --- before ---------------------------------------------------------------------------------


def test_a_cast_moves_into_its_only_reader():
    fused = assert_fused(lambda w, x: forward(narrowed(w), x), stack(), X)
    assert shapes(fused) == [(1, 1, 0)]
    assert fused.in_avals[0] in [a.aval for a in scans(fused)[0].invars]


def test_a_cast_is_done_anew_forward_and_backward():
    def train(w: Any, m: Any, x: Any) -> Any:
        narrow = narrowed(w)
        g = jax.grad(loss)(narrow, x)
        return update(0.1, w, m, g)

    original = jax.make_jaxpr(train)(stack(), stack(1), X.astype(jnp.bfloat16))
    fused = assert_fused(train, stack(), stack(1), X.astype(jnp.bfloat16))
    assert len(scans(original)) == 4
    assert [(carried, made) for _, carried, made in shapes(fused)][1] == (1, 2)
    assert len(scans(fused)) == 2


def test_maps_stand_where_the_layer_reads_them():
    """A ring with fewer slots for what is read last goes by that order."""

    def layer(x: Any, w: Any) -> Any:
        return jnp.sin(x @ w["z"]) @ w["a"], None

    def program(w: Any, x: Any) -> Any:
        return lax.scan(layer, x, jax.tree.map(narrowed, w))[0]

    (scan,) = scans(assert_fused(program, {"a": stack(), "z": stack(1)}, X.astype(jnp.bfloat16)))
    names = [e.primitive.name for e in said(scan).body.eqns]
    of_cast = [n for n, name in enumerate(names) if name == "convert_element_type"]
    assert names.index("sin") in range(of_cast[0], of_cast[-1])


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(lambda w, x: (r := narrowed(w), forward(r, x)), id="returned"),
        pytest.param(lambda w, x: forward(r := narrowed(w), x) + r.sum(), id="read whole"),
        pytest.param(lambda w, x: forward(r := narrowed(w), x) + forward(r[1:], x), id="sliced"),
    ],
)
def test_what_is_needed_anyway_is_read_from_there(program: Callable[..., Any]):
    assert_left_alone(program, stack(), X)


def test_work_is_not_done_twice():
    def program(w: Any, x: Any) -> Any:
        r = lax.map(lambda w: w @ w.T, w)
        return forward(r, x), forward(r, x + 1)

    assert_left_alone(program, stack(), X)
    assert_fused(lambda w, x: forward(lax.map(lambda w: w @ w.T, w), x), stack(), X)


def test_no_more_bytes_are_moved():
    """One byte twice is less than four bytes twice."""

    def program(w: Any, x: Any) -> Any:
        r = lax.map(lambda w: w > 0, w)
        return forward(r, x), forward(r, x + 1)

    assert_left_alone(program, stack(), X)


# --- around ---------------------------------------------------------------------------------


def test_inside_a_loop_over_microbatches():
    def train(w: Any, xs: Any) -> Any:
        def add(total: Any, x: Any) -> tuple[Any, None]:
            g = jax.grad(loss)(w, x)
            return lax.map(lambda s: s[0] + s[1], (total, g)), None

        return lax.scan(add, jnp.zeros_like(w), xs)[0]

    (around,) = scans(assert_fused(train, stack(), jnp.stack([X, X / 2])))
    assert len(scans(said(around).body)) == 2


def test_inside_branches_and_remat():
    def program(w: Any, x: Any, b: Any) -> Any:
        chosen = lax.cond(b, lambda w: forward(narrowed(w), x), lambda w: forward(w, x), w)
        return jax.checkpoint(lambda w, x: forward(narrowed(w), x))(w, chosen)

    inner = [p.jaxpr for e in assert_fused(program, stack(), X, True).eqns for p in programs(e)]
    assert [len(scans(p)) for p in inner if scans(p)] == [1, 1, 1]


def test_nothing_to_merge():
    assert_left_alone(lambda w, x: forward(w, x), stack(), X)
    assert_left_alone(lambda x: x + 1, X)


# --- real programs --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("clip_norm", slow_but([1.0], [None, 1.0]))
def test_a_training_step(clip_norm: float | None):
    options = TrainOptions(clip_norm=clip_norm)
    graphdef, params = nnx.split(ScannedLlama(TINY, rngs=nnx.Rngs(0), remat="layer"))
    state = init_state(params, options)
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, TINY.vocab_size)
    leaves, tree = jax.tree.flatten((state, tokens))
    traced = jax.make_jaxpr(
        lambda *flat: train_step(graphdef, options, *jax.tree.unflatten(tree, flat))
    )(*leaves)
    everything = frozenset(range(len(leaves) - 1))
    limits = Limits(min_bytes=512, min_slice_bytes=64)
    original = slice_elementwise(inline_calls(traced), everything, everything, limits=limits).jaxpr
    fused = fuse_maps(original)
    check_jaxpr(fused)
    _, backward, *left = (e for e in scans(fused) if said(e).length == TINY.num_layers)
    gradients = len(jax.tree.leaves(params)) - 3  # Embedding, head and the last norm are no stacks.
    assert len(left) == (gradients if clip_norm else 0)
    read = {v for e in fused.eqns for v in e.invars if isinstance(v, Var)}
    kept = [v for v in read.intersection(backward.outvars[1:]) if is_array(v)]
    assert len(kept) == len(left)
    expected, found = (jax.jit(jaxpr_as_fun(j))(*leaves) for j in (original, fused))
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(f, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_fused_scans_stream(depth: int):
    """Weights and moments on the host, each fetched once by the backward ring."""

    def train(w: Any, m: Any, x: Any) -> Any:
        g = jax.grad(loss)(narrowed(w), x)
        return update(0.1, w, m, g)

    args = stack(length=5), stack(1, length=5), X.astype(jnp.bfloat16)
    streams = Streams(jax.make_jaxpr(train)(*args), range(3), (0, 1), {0: 0, 1: 1})
    assert len(streams.scans) == 2
    assert [len(streams.stacks[n].scans) for n in (0, 1)] == [2, 1]
    hosting = Hosting(frozenset((0, 1)), streams.residuals(0), depth)
    run = streamed(streams.jaxpr, streams.rings(hosting), donated=[0, 1])

    @jax.jit
    def on_host(w: Any, m: Any, x: Any) -> Any:
        host = jax.memory.Space.Host
        return run(jax.device_put(w, host), jax.device_put(m, host), x)

    for f, e in zip(on_host(*args), jax.jit(train)(*args), strict=True):
        np.testing.assert_allclose(f, e, rtol=1e-2, atol=1e-2)


# --- any program ----------------------------------------------------------------------------


@st.composite
def programs_of_scans(draw: st.DrawFn) -> Callable[..., list[jax.Array]]:
    """Scans, maps and whole work on some of the stacks and numbers so far; integers, whose sums
    and products are the same in any order."""
    kinds = st.sampled_from(["scan", "map", "map", "map", "whole", "number"])
    pick = st.integers(0, 99)
    steps = draw(
        st.lists(st.tuples(kinds, pick, pick, pick, st.booleans()), min_size=2, max_size=7)
    )
    returned = draw(st.lists(pick, min_size=1, max_size=2))

    def program(a: jax.Array, b: jax.Array, c: jax.Array) -> list[jax.Array]:
        stacks, numbers = [a, b], [c]
        for kind, *picked, reverse in steps:
            s, t = (stacks[p % len(stacks)] for p in picked[:2])
            n = numbers[picked[2] % len(numbers)]
            match kind:
                case "scan":
                    n, (s, t) = lax.scan(
                        lambda c, x: (c * 3 + x[0], (x[1] + c, x[0])), n, (s, t), reverse=reverse
                    )
                    stacks += [s, t]
                    numbers.append(n)
                case "map":
                    scaled = functools.partial(lambda n, _, x: (_, x[0] * n - x[1]), n)
                    stacks.append(lax.scan(scaled, None, (s, t), reverse=reverse)[1])
                case "whole":
                    stacks.append(s + t[::-1])
                case _:
                    numbers.append(n * 2 + (s.sum() if reverse else 1))
        return [(stacks + numbers)[-(p % 3) - 1] for p in returned]

    return program


@given(programs_of_scans())
@settings(max_examples=40, deadline=None)
def test_any_program_has_the_same_numbers(program: Callable[..., list[jax.Array]]):
    args = jnp.arange(LAYERS), 2 - jnp.arange(LAYERS), jnp.int32(5)
    original = jax.make_jaxpr(program)(*args)
    fused = fuse_maps(original)
    check_jaxpr(fused)
    assert fuse_maps(fused) is fused
    compare(interpret(fused, args), interpret(original, args), exact=True)
