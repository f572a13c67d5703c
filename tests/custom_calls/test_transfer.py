"""The handlers: the bytes that arrive, whoever runs them, and the contracts that they check."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import custom_calls
from custom_calls import targets
from tests.custom_calls.transfers import copy_done, copy_start

SLOW = 100e6  # Bytes/s: a copy of 1 MiB takes 10 ms, far longer than the calls around it.


def array_of(shape, dtype, seed=0):
    bits = np.random.default_rng(seed).integers(0, 2, size=shape)
    return jnp.asarray(bits * 3).astype(dtype)


@jax.jit
def fetch(source):
    return copy_done(copy_start(source), source)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "float8_e4m3fn", "bfloat16", "float32", "complex64"]
)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 129)])
def test_copy_is_the_identity(shape, dtype):
    source = array_of(shape, dtype)
    fetched = fetch(source)
    assert fetched.dtype == source.dtype
    assert np.asarray(fetched).tobytes() == np.asarray(source).tobytes()


def test_empty_buffers_are_transferred_trivially():
    assert fetch(jnp.zeros((0, 4))).shape == (0, 4)


@jax.jit
def overlapped(x, weight):
    """`tanh(x @ x) @ weight`, the weight being fetched during the first product."""
    destination = copy_start(weight, transfer_id=7)
    x = jnp.tanh(x @ x)
    return x @ copy_done(destination, weight, x, transfer_id=7)


@pytest.mark.parametrize("bytes_per_s", [None, SLOW])
def test_compute_between_start_and_done_sees_the_whole_copy(bytes_per_s):
    custom_calls.set_link_bandwidth(bytes_per_s)
    x = jnp.eye(256) / 2
    weight = jax.random.normal(jax.random.key(0), (256, 256))
    expected = np.tanh(0.25) * np.asarray(weight)
    for _ in range(3):
        np.testing.assert_allclose(overlapped(x, weight), expected, rtol=1e-5)


def test_a_temporary_source_outlives_its_copy():
    """Without the use in `copy_done`, XLA may give the source's memory to what follows."""
    custom_calls.set_link_bandwidth(SLOW)

    @jax.jit
    def evict_and_refetch(x):
        temporary = x + 1
        destination = copy_start(temporary, engine=targets.TO_HOST)
        for _ in range(4):
            x = jnp.sort(x[::-1] * 2)
        return copy_done(destination, temporary, x, engine=targets.TO_HOST), x

    x = jnp.arange(2**18, dtype=jnp.float32)
    evicted, _ = evict_and_refetch(x)
    np.testing.assert_array_equal(evicted, np.asarray(x) + 1)


def test_equal_transfers_stay_two():
    """Same source, same attributes: each has its own destination, so nothing is confused."""
    custom_calls.set_link_bandwidth(SLOW)

    @jax.jit
    def twice(source):
        first, second = copy_start(source), copy_start(source)
        return copy_done(first, source), copy_done(second, source)

    source = array_of((512, 64), "float32")
    with custom_calls.trace() as events:
        for fetched in jax.block_until_ready(twice(source)):
            np.testing.assert_array_equal(fetched, source)
    assert len(events) == 2


def test_dones_may_come_in_another_order_than_starts():
    @jax.jit
    def swapped(a, b):
        first = copy_start(a, transfer_id=1)
        second = copy_start(b, transfer_id=2)
        b = copy_done(second, b, transfer_id=2)
        return copy_done(first, a, b, transfer_id=1), b

    a, b = array_of((300,), "float32", 1), array_of((300,), "float32", 2)
    for fetched, source in zip(swapped(a, b), (a, b), strict=True):
        np.testing.assert_array_equal(fetched, source)


def test_a_loop_repeats_its_transfers():
    @jax.jit
    def total(rows):
        def body(carry, row):
            return carry + copy_done(copy_start(row), row), None

        return jax.lax.scan(body, jnp.zeros(rows.shape[1:]), rows)[0]

    rows = array_of((9, 64), "float32")
    np.testing.assert_array_equal(total(rows), np.asarray(rows).sum(0))


def test_threads_and_devices_share_one_executable():
    custom_calls.set_link_bandwidth(SLOW)
    sources = [
        jax.device_put(array_of((128, 128), "float32", seed), device)
        for seed, device in enumerate(jax.devices() * 3)
    ]
    with ThreadPoolExecutor(4) as threads:
        fetched = threads.map(lambda source: np.asarray(fetch(source)), sources)
    for result, source in zip(fetched, sources, strict=True):
        np.testing.assert_array_equal(result, source)


def test_one_run_on_several_devices():
    mesh = jax.make_mesh((len(jax.devices()),), ("x",))
    source = array_of((len(jax.devices()) * 8, 16), "float32")
    sharded = jax.device_put(source, jax.NamedSharding(mesh, jax.P("x")))
    fetch_shards = jax.jit(jax.shard_map(fetch, mesh=mesh, out_specs=jax.P("x")))
    np.testing.assert_array_equal(fetch_shards(sharded), source)


def unaliased_done(destination, source):
    call = jax.ffi.ffi_call(
        targets.COPY_DONE, jax.ShapeDtypeStruct(destination.shape, destination.dtype)
    )
    return call(destination, source, engine=np.int64(0), transfer_id=np.int64(0))


def nameless_start(source):
    call = jax.ffi.ffi_call(targets.COPY_START, jax.ShapeDtypeStruct(source.shape, source.dtype))
    return call(source)


def truncating_start(source):
    call = jax.ffi.ffi_call(targets.COPY_START, jax.ShapeDtypeStruct((1,), source.dtype))
    return call(source, engine=np.int64(0), transfer_id=np.int64(0))


def start_without_done(source):
    return jax.lax.fori_loop(0, 2, lambda _, x: x + 0 * copy_start(source, x)[0], 0.0)


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        (
            lambda x: copy_done(x * 2, x, transfer_id=3),
            "copy_done: transfer 3: no transfer was started into operand 0",
        ),
        (
            lambda x: copy_done(copy_start(x, transfer_id=1), x, transfer_id=2),
            "copy_done: transfer 2: operand 0 is the destination of transfer 1",
        ),
        (
            lambda x: copy_done(copy_start(x), x + 1),
            "copy_done: transfer 0: operand 1 is not the buffer that memplan.copy_start read",
        ),
        (
            lambda x: copy_done(copy_start(x)),
            "copy_done: transfer 0: operand 1 is not the buffer that memplan.copy_start read",
        ),
        (
            lambda x: unaliased_done(copy_start(x), x),
            "the result is not operand 0: output_operand_aliasing is missing",
        ),
        (nameless_start, "copy_start: attribute transfer_id (an int64) is missing"),
        (truncating_start, "source and destination differ in type or dimensions"),
        (lambda x: copy_start(x, engine=2), "engine 2 is not in [0, 2)"),
        (lambda x: copy_start(x.astype(jnp.int4)), "element type S4 is narrower than a byte"),
        (start_without_done, "transfer 0 into the same buffer has no memplan.copy_done yet"),
    ],
)
def test_a_broken_contract_is_an_error_not_a_hang(program, sentence):
    custom_calls.set_link_bandwidth(SLOW)
    source = array_of((2**16,), "float32")
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(jax.jit(program)(source))
    assert sentence in str(error.value)
    # The run that failed leaves nothing behind for the next one.
    np.testing.assert_array_equal(fetch(source), source)
