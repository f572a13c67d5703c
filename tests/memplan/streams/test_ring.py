"""Rings against the scans that they replace: numbers, on CPU, with stacks on the host."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from hlo_passes.equations import Path
from memplan.streams.hosting import Hosting, Streams
from memplan.streams.rewrite import Stream, streamed
from tests.sweeps import slow_but

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
WIDTH = 8

Weights = tuple[jax.Array, jax.Array]


def weights(layers: int) -> Weights:
    up, down = jax.random.split(jax.random.key(0))
    return (
        jax.random.normal(up, (layers, WIDTH, 2 * WIDTH)) / 4,
        jax.random.normal(down, (layers, 2 * WIDTH, WIDTH)) / 4,
    )


def activations() -> jax.Array:
    return jnp.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)


def layer(x: jax.Array, w: Weights) -> tuple[jax.Array, jax.Array]:
    hidden = jnp.tanh(x @ w[0])
    return x + hidden @ w[1], hidden.sum(-1)


def forward(w: Weights, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return lax.scan(layer, x, w)


def backwards(w: Weights, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return lax.scan(layer, x, w, reverse=True)


def loss(w: Weights, x: jax.Array, step: Callable[..., Any] = layer) -> jax.Array:
    y, sums = lax.scan(step, x, w)
    return (y**2).sum() + (sums**2).sum()


def gradients(w: Weights, x: jax.Array) -> Any:
    return jax.value_and_grad(loss, argnums=(0, 1))(w, x)


def remat(w: Weights, x: jax.Array) -> Any:
    return jax.grad(functools.partial(loss, step=jax.checkpoint(layer)))(w, x)


def mapped(w: Weights, x: jax.Array) -> Any:
    return jax.vmap(forward, in_axes=(None, 0))(w, jnp.stack([x, x + 1]))


def microbatches(w: Weights, x: jax.Array) -> Any:
    def add(total: Any, part: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, jax.grad(loss)(w, part)), None

    return lax.scan(add, jax.tree.map(jnp.zeros_like, w), jnp.stack([x, x / 2, -x]))[0]


def generate(w: Weights, x: jax.Array) -> Any:
    """A while loop around the layers, as decoding until the end of a sentence is."""

    def go_on(state: Any) -> jax.Array:
        return (state[0] < 3) & (jnp.abs(state[1]).max() < 1e3)

    return lax.while_loop(go_on, lambda s: (s[0] + 1, forward(w, s[1])[0]), (0, x))


def branches(w: Weights, x: jax.Array) -> Any:
    return lax.cond(x.sum() > 100, lambda: forward(w, x)[0], lambda: backwards(w, 2 * x)[0])


def run_streamed(
    program: Callable[..., Any],
    args: tuple[Any, ...],
    depth: int,
    share: float,
    turned: bool,
    lags: bool,
) -> Any:
    """Runs a program with every stack on the host that can be there; `turned`: the dimensions
    of every slice lie the other way round; `lags`: also with one slot results are stored late."""
    leaves, _ = jax.tree.flatten(args)
    traced, out = jax.make_jaxpr(program, return_shape=True)(*args)
    streams = Streams(traced, range(len(leaves)), (), {})
    stacks = frozenset(s for s in streams.stacks if isinstance(s, int))
    lagging = frozenset(streams.scans) if lags else frozenset[Path]()
    hosting = Hosting(stacks, streams.residuals(0), depth, share, lagging=lagging)
    orders = {
        source: (*range(1, len(stack.aval.shape)), 0) for source, stack in streams.sources.items()
    }
    rings = streams.rings(hosting, orders if turned else None)
    assert stacks
    assert rings
    assert any(ring.taken for ring in rings.values()) == turned
    run = streamed(
        streams.jaxpr, rings, turned=streams.turned, turned_results=streams.turned_results
    )

    @jax.jit
    def on_host(*leaves: Any) -> Any:
        placed = [jax.device_put(a, HOST) if n in stacks else a for n, a in enumerate(leaves)]
        return jax.tree.unflatten(jax.tree.structure(out), run(*placed))

    return on_host(*leaves)


def check(
    program: Callable[..., Any],
    trips: int,
    depth: int,
    share: float = 1.0,
    *,
    turned: bool = False,
    lags: bool = False,
) -> None:
    args = weights(trips), activations()
    expected = jax.tree.leaves(jax.jit(program)(*args))
    found = jax.tree.leaves(run_streamed(program, args, depth, share, turned, lags))
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        # XLA:CPU contracts products and sums in other places of other programs.
        scale = 1 + float(jnp.abs(b).max(initial=0))
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * scale)


@pytest.mark.parametrize("depth", slow_but([1, 3], [1, 2, 3, 4]))
@pytest.mark.parametrize("trips", [0, 1, 2, 7, 32])
@pytest.mark.parametrize("program", [forward, gradients])
def test_the_numbers_of_the_untouched_scan(program: Callable[..., Any], trips: int, depth: int):
    check(program, trips, depth)


@pytest.mark.parametrize("trips", [0, 1, 2, 7])
@pytest.mark.parametrize("program", [gradients, remat, microbatches])
def test_what_a_ring_of_one_slot_made_is_stored_while_the_next_comes(
    program: Callable[..., Any], trips: int
):
    check(program, trips, 1, lags=True)


def test_stacks_whose_slices_are_in_pieces_are_taken_as_rows():
    args = weights(4), activations()
    streams = Streams(jax.make_jaxpr(gradients)(*args), range(3), (), {})
    hosting = Hosting(frozenset({0, 1}), streams.residuals(0), 2)
    orders = {source: tuple(range(len(s.aval.shape))) for source, s in streams.sources.items()}
    rings = streams.rings(hosting, orders)
    assert rings
    assert not any(ring.taken or ring.made for ring in rings.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("depth", "share", "turned"),
    slow_but(
        [(2, 0.3, False), (3, 1.0, True)],
        [(d, s, turned) for d, s in ((1, 1.0), (2, 0.3), (3, 1.0)) for turned in (False, True)],
    ),
)
@pytest.mark.parametrize(
    "program",
    [backwards, remat, mapped, microbatches, generate, branches, jax.jit(gradients)],
    ids=["backwards", "remat", "mapped", "microbatches", "generate", "branches", "jit"],
)
def test_a_scan_wherever_it_stands(
    program: Callable[..., Any], depth: int, share: float, turned: bool
):
    check(program, 5, depth, share, turned=turned)


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0)])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_stack_that_is_given_back_changed_takes_its_own_place(depth: int, order: Any):
    def step(w: Weights, cache: jax.Array, x: jax.Array) -> Any:
        def body(x: jax.Array, slices: Any) -> Any:
            w, kept = slices
            y, _ = layer(x, w)
            return y, kept.at[0].set(y[0])

        return lax.scan(body, x, (w, cache))

    args = weights(6), jnp.ones((6, 512, WIDTH)), activations()
    traced = jax.make_jaxpr(step)(*args)
    (scan,) = (n for n, eqn in enumerate(traced.eqns) if eqn.primitive.name == "scan")
    ring = Stream(depth, taken={2: order}, made={0: order})
    run = streamed(traced, {(scan,): ring}, donated=[2])
    jitted = jax.jit(lambda w, cache, x: run(*(jax.device_put(a, HOST) for a in w), cache, x))
    expected = jax.tree.leaves(jax.jit(step)(*args))
    for a, b in zip(jitted(*args), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    memory = jax.jit(jitted, donate_argnums=1).lower(*args).compile().memory_analysis()
    assert memory is not None
    # XLA:CPU copies an argument that does not lie in rows, whatever is done with it.
    assert memory.temp_size_in_bytes < args[1].nbytes or order != (2, 1, 0)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("is_gradient", [False, True])
def test_a_scan_inside_a_shard_map(is_gradient: bool, depth: int):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def local(w: Weights, x: jax.Array) -> Any:
        def gathering(x: jax.Array, w: Weights) -> Any:
            whole = [jax.lax.all_gather(part, "data", axis=0, tiled=True) for part in w]
            return layer(x, (whole[0], whole[1]))

        return lax.scan(gathering, x, w)

    split = PartitionSpec("model", None)
    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(None, "data", None), split),
        out_specs=(split, PartitionSpec(None, "model")),
        check_vma=False,
    )

    def program(w: Weights, x: jax.Array) -> Any:
        return sharded(w, jnp.concatenate([x, -x]))

    def loss(w: Weights, x: jax.Array) -> jax.Array:
        return sum((jnp.square(v).sum() for v in program(w, x)), jnp.zeros(()))

    check(jax.grad(loss) if is_gradient else program, 5, depth)


@pytest.mark.parametrize("depth", [1, 3])
def test_what_differs_from_device_to_device_keeps_its_type(depth: int):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    split = PartitionSpec("data", None)

    def program(w: Weights, x: jax.Array) -> Any:
        rows = jnp.concatenate([x, -x, x / 2, 2 * x])
        sharded = jax.shard_map(
            forward,
            mesh=mesh,
            in_specs=(PartitionSpec(), split),
            out_specs=(split, PartitionSpec(None, "data")),
        )
        return sharded(w, rows)

    check(program, 5, depth)
