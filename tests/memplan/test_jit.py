"""``memplan.jit`` means what ``jax.jit`` means, and gives its numbers."""

import copy
import functools
import pickle
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import custom_calls.targets as targets
import custom_calls.tracing as tracing
import hlo_passes.pipeline as pipeline
import hlo_passes.xla as xla
import memplan.api as memplan
import models.llama as llama
from hlo_passes.errors import HostResultsError, OrderedEffectsError
from models.configs import CONFIGS
from tests.memplan.chains import (
    HALF,
    LAYERS,
    WEIGHT_BYTES,
    WIDTH,
    activations,
    assert_same_bits,
    chain,
    device_total,
    halved,
    weights,
    xla_total,
)


class Traced:
    """`fun`, counting how often jax traces it."""

    def __init__(self, fun: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self.count = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._fun(*args, **kwargs)


def powers(layers: Sequence[jax.Array], times: int, x: jax.Array) -> jax.Array:
    for _ in range(times):
        x = chain(layers, x)
    return x


# --- static arguments -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"static_argnums": 1},
        pytest.param(
            {"static_argnums": (-2,)},
            marks=pytest.mark.since("0.12", "it takes no negative numbers of named arguments"),
        ),
        {"static_argnames": "times"},
        {"static_argnums": (), "static_argnames": ("times",)},
    ],
)
def test_a_static_argument_in_the_middle(options: dict[str, Any]):
    args = weights(), activations()
    step = memplan.jit(powers, hbm=HALF, **options)
    positional = "static_argnums" not in options or options["static_argnums"]
    if positional:
        placed = step.place(args[0], 2, args[1])
        assert placed[1] == 2
        assert_same_bits(step(*placed), jax.jit(powers, **options)(args[0], 2, args[1]))
    placed, named = step.place(args[0], times=2, x=args[1])
    assert named["times"] == 2
    expected = jax.jit(powers, **options)(args[0], times=2, x=args[1])
    assert_same_bits(step(*placed, **named), expected)


def test_a_compiled_function_takes_the_dynamic_arguments_only():
    step = memplan.jit(powers, hbm=HALF, static_argnames="times")
    placed = step.place(weights(), 1, activations())
    compiled = step.trace(*placed).lower().compile()
    assert compiled.plan.transfers
    assert_same_bits(compiled(placed[0], placed[2]), jax.jit(chain)(weights(), activations()))
    with pytest.raises(TypeError, match="input pytree"):
        compiled(*placed)


def test_an_unhashable_static_argument_is_jax_own_error():
    step = memplan.jit(powers, hbm=HALF, static_argnums=1)
    with pytest.raises(ValueError, match="Non-hashable static arguments"):
        step(weights(), [2], activations())


def test_static_values_of_different_types_are_different():
    def scaled(x: jax.Array, by: complex) -> jax.Array:
        return x * by

    step = memplan.jit(scaled, hbm="1MiB", static_argnums=1)
    x = jnp.arange(3)
    assert step(x, 2).dtype == jnp.int32
    assert step(x, 2.0).dtype == jnp.float32


# --- other arguments ------------------------------------------------------------------------


def test_keywords_defaults_and_pytrees():
    def affine(params: dict[str, Any], /, x: jax.Array, *, gain: float = 2.0, **rest: Any):
        return chain(params["layers"], x) * gain + rest.get("shift", 0.0), (None, params["b"])

    params = {"layers": weights(), "b": jnp.ones(3)}
    step = halved(affine, params, activations())
    plain = jax.jit(affine)
    args = step.place(params, activations())
    assert_same_bits(step(*args), plain(params, activations()))
    args, kwargs = step.place(params, x=activations(), gain=3.0, shift=1.0)
    assert_same_bits(step(*args, **kwargs), plain(params, activations(), gain=3.0, shift=1.0))


def test_scalars_and_numpy_arrays_keep_their_types():
    def mixed(layers: Any, x: jax.Array, by: Any) -> jax.Array:
        return chain(layers, x) * by

    layers, x = [np.asarray(w) for w in weights()], np.asarray(activations(), np.float16)
    step = halved(mixed, layers, x, 2.0)
    placed = step.place(layers, x, 2.0)
    assert_same_bits(step(*placed), jax.jit(mixed)(layers, x, 2.0))
    by = np.float32(2.0)
    assert_same_bits(step(*step.place(layers, x, by)), jax.jit(mixed)(layers, x, by))


def test_unused_arguments_are_dropped():
    def ends(layers: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        return chain(layers[1:-1], x)

    args = weights(LAYERS + 2), activations()
    step = halved(ends, *args, share=0.5)
    compiled = step.lower(*args).compile()
    moved = {t.buffer for t in compiled.plan.transfers}
    assert 0 < len(moved) <= LAYERS
    assert_same_bits(step(*step.place(*args)), jax.jit(ends)(*args))


def test_constants_keys_and_effects(capfd: pytest.CaptureFixture[str]):
    table = jnp.arange(WIDTH, dtype=jnp.float32)

    def noisy(layers: Sequence[jax.Array], x: jax.Array, key: jax.Array) -> jax.Array:
        jax.debug.print("rows {}", x.shape[0])
        return chain(layers, x) + table + jax.random.normal(key, x.shape)

    args = weights(), activations(), jax.random.key(0)
    step = memplan.jit(noisy, hbm=HALF)
    placed = step.place(*args)
    assert step.lower(*args).compile().plan.transfers
    assert_same_bits(step(*placed), jax.jit(noisy)(*args))
    jax.effects_barrier()
    assert capfd.readouterr().out == "rows 8\n" * 2


def test_ordered_effects_are_refused_only_where_a_plan_is_needed():
    def noisy(layers: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        jax.debug.print("rows {}", x.shape[0], ordered=True)
        return chain(layers, x)

    args = weights(), activations()
    assert_same_bits(memplan.jit(noisy, hbm="1GiB")(*args), jax.jit(noisy)(*args))
    with pytest.raises(OrderedEffectsError, match="ordered=False"):
        memplan.jit(noisy, hbm=HALF)(*args)


def test_a_donated_argument_is_reused_and_never_hosted():
    def update(layers: Sequence[jax.Array], cache: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = chain(layers, cache[:8])
        return cache.at[8:16].set(y), y

    cache = jnp.tile(activations(), (8, 1))
    total = xla_total(update, weights(), cache, donate_argnames="cache")
    step = memplan.jit(update, hbm=int(total * 0.7), donate_argnames="cache")
    compiled = step.lower(weights(), cache).compile()
    hosted = {p.buffer for p in compiled.plan.placements if p.tier != compiled.plan.device_tier}
    assert hosted
    assert not any("cache" in name for name in hosted)
    assert compiled.memory_analysis().alias_size_in_bytes == cache.nbytes
    expected = jax.jit(update)(weights(), cache)
    placed = step.place(weights(), cache)
    where = placed[1].unsafe_buffer_pointer()
    found = step(*placed)
    assert placed[1].is_deleted()
    assert found[0].unsafe_buffer_pointer() == where
    assert_same_bits(found, expected)


def test_decorator_and_method():
    @memplan.jit(hbm=HALF)
    def step(layers: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        """Documented."""
        return chain(layers, x)

    class Model:
        @memplan.jit(hbm=HALF, static_argnums=0)
        def step(self, layers: Sequence[jax.Array], x: jax.Array) -> jax.Array:
            return chain(layers, x)

    args = weights(), activations()
    expected = jax.jit(chain)(*args)
    assert (step.__name__, step.__doc__) == ("step", "Documented.")
    placed = step.place(*args)
    assert_same_bits(step(*placed), expected)
    assert_same_bits(Model().step(*placed), expected)


# --- inside other transformations -----------------------------------------------------------


@pytest.mark.filterwarnings("ignore::memplan.BudgetWarning")
def test_inside_transformations_it_is_plain_jit():
    step = memplan.jit(chain, hbm=1)  # No plan keeps to that: none is made.
    args = weights(2), activations()

    def loss(fun: Callable[..., jax.Array], layers: Any, x: jax.Array) -> jax.Array:
        return fun(layers, x).sum()

    assert_same_bits(
        jax.grad(functools.partial(loss, step))(*args),
        jax.grad(functools.partial(loss, jax.jit(chain)))(*args),
    )
    batched = jnp.stack([args[1], -args[1]])
    assert_same_bits(
        jax.vmap(step, (None, 0))(args[0], batched),
        jax.vmap(jax.jit(chain), (None, 0))(args[0], batched),
    )
    assert_same_bits(jax.jit(lambda x: step(args[0], x))(args[1]), jax.jit(chain)(*args))
    inner = jax.jit(chain)
    assert_same_bits(jax.jit(lambda: step(*args))(), jax.jit(lambda: inner(*args))())
    with jax.disable_jit():
        assert_same_bits(step(*args), chain(*args))


@pytest.mark.filterwarnings("ignore::memplan.BudgetWarning")
def test_a_tracer_that_is_closed_over():
    @jax.jit
    def outer(x: jax.Array) -> jax.Array:
        return memplan.jit(lambda y: x + y, hbm=1)(jnp.ones(3))

    assert_same_bits(outer(jnp.ones(3)), jnp.full(3, 2.0))


@pytest.mark.parametrize("hbm", [HALF, "1GiB"])
def test_calls_are_dispatched_as_jax_dispatches_its_own(hbm: Any, monkeypatch: Any):
    step = memplan.jit(powers, hbm=hbm, static_argnums=1, donate_argnames="x")
    layers, times, x = step.place(weights(), 2, activations())
    x = step(layers, times, x)
    monkeypatch.setattr(step, "_program", None)  # From here on all is found in C++.
    for _ in range(2):
        x = step(layers, times, x)
    assert_same_bits(x, powers(weights(), 6, activations()))


def test_a_dropped_budget_is_said_once():
    inner = memplan.jit(chain, hbm=1)
    with pytest.warns(memplan.BudgetWarning, match=r"memplan.jit\(jax.grad\(chain\), hbm=...\)"):
        jax.grad(lambda w, x: inner(w, x).sum())(weights(2), activations())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.vmap(inner, (None, 0))(weights(2), activations()[None])
        # Here it is not dropped: the larger program keeps to another one.
        within = memplan.jit(lambda w, x: memplan.jit(chain, hbm=1)(w, x) + 1, hbm="1GiB")
        within(weights(2), activations())
        memplan.jit(chain)  # No budget, nothing to drop.
        jax.jit(memplan.jit(chain))(weights(2), activations())


@pytest.mark.filterwarnings("ignore::memplan.BudgetWarning")
def test_placed_arguments_inside_transformations():
    step = memplan.jit(chain, hbm=HALF)
    layers, x = step.place(weights(), activations())
    assert any(w.sharding.memory_kind == "pinned_host" for w in layers)
    expected = jax.jit(chain)(weights(), activations())
    assert_same_bits(jax.jit(step)(layers, x), expected)
    assert_same_bits(jax.jit(lambda x: step(layers, x))(x), expected)
    assert_same_bits(jax.vmap(step, (None, 0))(layers, x[None])[0], expected)
    gradient = jax.grad(lambda w, x: step(w, x).sum())(layers, x)
    plain = jax.grad(lambda w, x: jax.jit(chain)(w, x).sum())(weights(), activations())
    assert_same_bits(jax.device_get(gradient), jax.device_get(plain))
    with jax.disable_jit():
        np.testing.assert_allclose(step(layers, x), expected, rtol=1e-6)


@pytest.mark.parametrize("hbm", [HALF, "1GiB"])
def test_results_are_where_those_of_jax_are(hbm: Any):
    step, plain = memplan.jit(chain, hbm=hbm), jax.jit(chain)
    device = jax.devices()[1]
    arguments = [
        (weights(), activations()),
        jax.device_put((weights(), activations()), device),
        (weights(), jax.device_put(activations(), jax.devices()[0])),
    ]
    for args in arguments:
        expected = plain(*args)
        for found in (step(*step.place(*args)), step(*step.place(*args))):  # Also by the C++ path.
            assert found.sharding == expected.sharding
            assert found.committed == expected.committed
            assert_same_bits(found, expected)


def test_results_under_an_explicit_mesh():
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Explicit,))
    step = memplan.jit(chain, hbm=HALF)
    args = step.place(weights(), activations())
    with jax.set_mesh(mesh):
        expected = jax.jit(chain)(weights(), activations())
        lowered = step.lower(weights(), activations())
        found = step(*step.place(weights(), activations()))
        assert found.sharding == expected.sharding
        assert_same_bits(found, expected)
        assert jax.jit(jnp.sin)(step(*args)).shape == expected.shape
    assert lowered.compile().plan is not None  # The mesh is that of the trace.


@pytest.mark.filterwarnings("ignore::memplan.PlacementWarning")
def test_copies_and_pickles():
    step = memplan.jit(chain, hbm=HALF)
    assert copy.deepcopy(step)(weights(), activations()).shape == activations().shape
    again = pickle.loads(pickle.dumps(memplan.jit(chain, hbm=HALF)))
    assert again.plan(weights(), activations()) == step.plan(weights(), activations())


# --- when it compiles -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::memplan.PlacementWarning")
def test_it_traces_again_only_for_other_shapes_types_shardings_and_static_values():
    counted = Traced(powers)
    step = memplan.jit(counted, hbm=HALF, static_argnames="times")
    layers, times, x = step.place(weights(), 1, activations())
    for _ in range(3):
        step(layers, times, x)
    step(layers, 1, activations() + 1)
    assert counted.count == 1
    step(layers, 2, x)
    assert counted.count == 2
    step(layers, 1, x[:4])
    assert counted.count == 3
    step(layers, 1, x.astype(jnp.bfloat16))
    assert counted.count == 4
    with jax.default_matmul_precision("highest"):
        step(layers, 1, x)
    assert counted.count == 5
    step(layers, 1, x)
    assert counted.count == 5


def test_a_loop_over_its_own_results_compiles_once(monkeypatch: pytest.MonkeyPatch):
    step = memplan.jit(chain, hbm=HALF)
    layers, x = step.place(weights(), activations())
    x = step(layers, x)
    monkeypatch.setattr(step, "trace", None)
    for _ in range(2):
        x = step(layers, x)
    (device,) = x.devices()
    x = step(layers, jax.device_put(x, device))  # It is there already, but now it is to stay.
    assert x.committed
    assert_same_bits(x, jax.jit(lambda w, x: powers(w, 4, x))(weights(), activations()))


def test_threads_that_call_at_once_compile_once():
    counted = Traced(chain)
    step = memplan.jit(counted, hbm=HALF)
    expected = jax.jit(chain)(weights(), activations())
    with ThreadPoolExecutor(4) as threads, pytest.warns(memplan.PlacementWarning):
        found = list(threads.map(lambda _: step(weights(), activations()), range(8)))
    assert counted.count == 1
    for result in found:
        assert_same_bits(result, expected)


def test_stages():
    step = memplan.jit(chain, hbm=HALF)
    args = weights(), activations()
    assert step.eval_shape(*args).shape == args[1].shape
    traced = step.trace(*args)
    assert str(traced.jaxpr) == str(jax.jit(chain).trace(*args).jaxpr)
    lowered = traced.lower()
    assert lowered.as_text() == jax.jit(chain).lower(*args).as_text()
    plan = step.plan(*args)
    compiled = lowered.compile()
    assert compiled.plan == plan
    assert compiled.cost_analysis()["flops"] > 0
    assert compiled.out_info == traced.out_info
    assert targets.COPY_START in compiled.as_text()
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    assert step.plan(*abstract) == plan


def test_an_exception_in_the_function_is_raised_as_it_is():
    error = LookupError("mine")

    def fails(x: jax.Array) -> jax.Array:
        raise error

    for attempt in (memplan.jit(fails, hbm=1), memplan.jit(fails, hbm=1).lower):
        with pytest.raises(LookupError) as raised:
            attempt(jnp.ones(3))
        assert raised.value is error


def test_an_argument_that_is_no_array_is_jax_own_error():
    step = memplan.jit(chain, hbm=1)
    for attempt in (step, step.lower, step.plan):
        with pytest.raises(TypeError, match="as an abstract array"):
            attempt(weights(1), "x")
        with pytest.raises(TypeError, match="missing"):
            attempt(weights(1))
    with pytest.raises(TypeError, match="callable"):
        memplan.jit(cast(Any, 3), hbm=1)


# --- shardings ------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("x",))


def test_the_budget_of_a_sharded_program_is_one_devices(mesh: Mesh):
    over = NamedSharding(mesh, PartitionSpec(None, "x"))
    layers = jax.device_put(weights(), over)
    x = activations()
    share = xla_total(chain, layers, x)
    step = memplan.jit(chain, hbm=int(share * 0.75), offload="weights.*")
    compiled = step.lower(layers, x).compile()
    assert compiled.plan.transfers
    assert all(t.size == WEIGHT_BYTES // 4 for t in compiled.plan.transfers)
    assert compiled.device_bytes <= share * 0.75
    placed = step.place(layers, x)
    assert all(w.sharding.spec == over.spec for w in placed[0])
    assert_same_bits(step(*placed), jax.jit(chain)(layers, x))


def test_in_and_out_shardings(mesh: Mesh):
    rows = NamedSharding(mesh, PartitionSpec("x"))
    options: dict[str, Any] = {
        "in_shardings": (None, rows),
        "out_shardings": NamedSharding(mesh, PartitionSpec()),
    }
    args = weights(), activations()
    step = memplan.jit(chain, hbm=HALF, **options)
    placed = step.place(*args)
    found, expected = step(*placed), jax.jit(chain, **options)(*args)
    assert step.lower(*args).compile().plan.transfers
    assert found.sharding == expected.sharding
    assert_same_bits(found, expected)


def on_host() -> Any:
    return SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


@pytest.mark.parametrize("hbm", [HALF, "1GiB"])
def test_arguments_that_ask_for_host_memory_are_placed_by_the_plan(hbm: int | str):
    layers, x = weights(), activations()
    expected = jax.jit(chain)(layers, x)
    hosted = jax.device_put(layers, on_host())
    free = memplan.jit(chain, hbm=hbm)
    bound = memplan.jit(chain, hbm=hbm, in_shardings=(on_host(), None))
    for step, given in ((free, hosted), (bound, layers), (bound, hosted)):
        assert_same_bits(step(*step.place(given, x)), expected)
    shapes = [jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=on_host()) for w in layers]
    assert free.plan(shapes, x).transfers == free.plan(layers, x).transfers
    assert bound.plan(layers, x).transfers == free.plan(layers, x).transfers


def test_results_in_host_memory_are_refused_only_where_a_plan_is_needed():
    layers, x = weights(), activations()
    y = memplan.jit(chain, hbm="1GiB", out_shardings=on_host())(layers, x)
    assert y.sharding.memory_kind == "pinned_host"
    with pytest.raises(HostResultsError, match="larger budget"):
        memplan.jit(chain, hbm=HALF, out_shardings=on_host())(layers, x)


def test_arguments_bound_to_another_device():
    device = jax.devices()[2]
    args = weights(), jax.device_put(activations(), device)
    step = memplan.jit(chain, hbm=HALF)
    found = step(*step.place(*args))
    assert found.device == device
    assert_same_bits(found, jax.jit(chain)(*args))


def test_arguments_on_different_devices_are_jax_own_error():
    layers, x = weights(), activations()
    there, elsewhere = jax.devices()[1:3]
    step = memplan.jit(chain, hbm=HALF)
    with pytest.raises(ValueError, match="incompatible devices"):
        step(jax.device_put(layers, there), jax.device_put(x, elsewhere))


# --- numbers and transfers ------------------------------------------------------------------


def tied(table: jax.Array, layers: Sequence[jax.Array], ids: jax.Array) -> jax.Array:
    return chain(layers, table[ids]) @ table.T


def returned(layers: Sequence[jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return chain(layers, x), layers[2]


def everywhere(layers: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for w in layers[1:]:
        x = jnp.tanh(x @ w) @ layers[0]
    return x + layers[0][0]


def ids() -> jax.Array:
    return jnp.array([3, 1, 2])


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (chain, (weights(12), activations())),
        (tied, (activations(64), weights(), ids())),
        (returned, (weights(), activations())),
        (everywhere, (weights(), activations())),
    ],
)
def test_the_numbers_of_plain_jit_and_every_transfer_once_a_call(
    fun: Callable[..., Any], args: tuple[Any, ...], share: float
):
    step = halved(fun, *args, share=share)
    compiled = step.lower(*args).compile()
    assert compiled.device_bytes <= compiled.plan.budget_bytes
    assert not compiled.followed.missing
    expected = jax.jit(fun)(*args)
    placed = step.place(*args)
    for _ in range(3):
        with tracing.trace() as events:
            found = jax.block_until_ready(step(*placed))
        assert [e.transfer_id for e in events] == [t.id for t in compiled.plan.transfers]
        assert [e.bytes for e in events] == [t.size for t in compiled.plan.transfers]
        assert_same_bits(found, expected)


def test_llama_decodes_as_under_plain_jit():
    config = CONFIGS["tiny"]
    graphdef, params = nnx.split(llama.Llama(config, rngs=nnx.Rngs(0)))
    fun = functools.partial(llama.decode_step, graphdef)
    options: dict[str, Any] = {"donate_argnames": "cache"}
    token, cache = jnp.zeros((2, 1), jnp.int32), llama.init_cache(config, 2, 16)
    step = halved(fun, params, token, cache, share=0.7, **options)
    plain = jax.jit(fun, **options)
    params_here, _, mine = step.place(params, token, cache)
    theirs = llama.init_cache(config, 2, 16)
    for _ in range(3):
        logits, mine = step(params_here, token, mine)
        expected, theirs = plain(params, token, theirs)
        assert_same_bits(logits, expected)
        assert_same_bits(mine, theirs)
        token = logits.argmax(-1).reshape(token.shape).astype(token.dtype)


def test_threads_run_one_program_at_once():
    step = memplan.jit(chain, hbm=HALF)
    layers, x = step.place(weights(), activations())
    inputs = [x * n for n in range(1, 9)]
    expected = [jax.jit(chain)(weights(), x) for x in inputs]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda x: step(layers, x), inputs))
    assert_same_bits(found, expected)


# --- where arrays live ----------------------------------------------------------------------


def test_place_moves_once_and_calls_then_say_nothing():
    step = memplan.jit(chain, hbm=HALF)
    args = weights(), activations()
    with pytest.warns(memplan.PlacementWarning, match=r"place\(\)") as caught:
        expected = step(*args)
    assert caught[0].filename == __file__
    assert {w.sharding.memory_kind for w in args[0]} == {"device"}  # Where the user has them.
    placed = step.place(*args)
    kinds = [w.sharding.memory_kind for w in placed[0]]
    assert 0 < kinds.count("pinned_host") < LAYERS
    assert_same_bits(step(*placed), expected)
    again = step.place(*placed)
    assert all(a is b for a, b in zip(again[0], placed[0], strict=True))
    assert_same_bits(placed[0], args[0])


def test_what_is_moved_for_a_call_is_named():
    step = memplan.jit(lambda w, x: chain(w, x), hbm=HALF, offload="w.*")
    with pytest.warns(memplan.PlacementWarning, match=r"only: w\.\d, w\.\d, w\.\d and \d more\. "):
        step(weights(), activations())


def test_numpy_arrays_are_moved_and_nothing_is_said():
    step = memplan.jit(chain, hbm=HALF)
    args = weights(), activations()
    found = step([np.asarray(w) for w in args[0]], np.asarray(args[1]))
    assert_same_bits(found, jax.jit(chain)(*args))


def test_shapes_cannot_be_placed():
    step = memplan.jit(chain, hbm=HALF)
    with pytest.raises(TypeError, match="plan\\(\\) takes shapes"):
        step.place(weights(), jax.ShapeDtypeStruct((8, WIDTH), jnp.float32))


def test_functions_say_what_they_keep_to():
    step = memplan.jit(chain, hbm="3MiB")
    assert repr(step) == "<memplan.jit of chain within 3.0 MiB>"
    assert repr(memplan.jit(chain)) == "<memplan.jit of chain within the memory of its device>"
    lowered = step.lower(weights(), activations())
    assert repr(lowered) == f"<Lowered chain for {lowered.machine.name} within 3.0 MiB>"


def test_arrays_placed_for_a_smaller_budget_come_back():
    args = memplan.jit(chain, hbm=HALF).place(weights(), activations())
    roomy = memplan.jit(chain, hbm="1GiB")
    with pytest.warns(memplan.PlacementWarning, match=r"place\(\)"):
        found = roomy(*args)
    assert_same_bits(found, jax.jit(chain)(weights(), activations()))
    placed = roomy.place(*args)
    assert {w.sharding.memory_kind for w in placed[0]} == {"device"}
    assert_same_bits(roomy(*placed), found)


def test_within_plenty_it_is_what_jax_compiles():
    step = memplan.jit(chain, hbm="1GiB")
    args = weights(), activations()
    compiled = step.lower(*args).compile()
    assert compiled.plan is None
    assert compiled.as_text() == jax.jit(chain).lower(*args).compile().as_text()
    assert device_total(compiled) == compiled.device_bytes
    assert_same_bits(step(*args), jax.jit(chain)(*args))


# --- failures within ------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["choose_stay", "plan_module", "rewrite_module"])
def test_an_exception_in_a_pass_is_raised_as_itself_and_leaves_nothing(
    stage: str, monkeypatch: pytest.MonkeyPatch
):
    error = RuntimeError("in a pass")
    live: set[tuple[str, str]] = set()
    register, clear = xla.register_hook, xla.clear_hook

    def registering(platform: str, name: str, hook: xla.Hook) -> None:
        register(platform, name, hook)
        live.add((platform, name))

    def clearing(platform: str, name: str) -> bool:
        live.remove((platform, name))
        return clear(platform, name)

    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(xla, "register_hook", registering)
    monkeypatch.setattr(xla, "clear_hook", clearing)
    args = weights(), activations()
    step = memplan.jit(chain, hbm=HALF)
    with monkeypatch.context() as broken:
        broken.setattr(pipeline, stage, fails)
        with pytest.raises(RuntimeError) as raised:
            step(*args)
    assert raised.value is error
    assert not live
    assert_same_bits(step(*step.place(*args)), jax.jit(chain)(*args))
    assert not live
