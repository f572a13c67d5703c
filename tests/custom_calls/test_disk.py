"""Bytes between files and memory: every alignment, every queue, and errors that name the byte."""

import gc
import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import custom_calls
from custom_calls import _transfer, targets
from tests.custom_calls.transfers import copy_done, copy_start

QUEUES = [True, False]
BLOCK = 4096


def bytes_of(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def buffer_of(size, skew):
    """Memory that begins `skew` bytes into a page."""
    memory = np.zeros(size + 2 * BLOCK, np.uint8)
    begin = -memory.ctypes.data % BLOCK + skew
    return memory[begin : begin + size]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("disk") / "file"
    data = bytes_of(10 * BLOCK + 77)
    path.write_bytes(data.tobytes())
    return path, data


@pytest.mark.parametrize("use_uring", QUEUES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_bytes_of_a_file_arrive_at_any_address(written, use_uring, data):
    path, content = written
    offset = data.draw(st.integers(0, content.size - 1))
    size = data.draw(st.integers(1, content.size - offset))
    # Congruent modulo a block, where all but the edges go directly, or not.
    skew = data.draw(st.one_of(st.just(offset % BLOCK), st.integers(0, BLOCK - 1)))
    depth, chunk = data.draw(st.sampled_from([1, 2, 7])), data.draw(st.sampled_from([1, 3])) * BLOCK
    found = buffer_of(size, skew)
    options = {"depth": depth, "chunk": chunk, "use_uring": use_uring}
    _transfer.read_file(path, found, offset, **options)
    np.testing.assert_array_equal(found, content[offset : offset + size])


@pytest.mark.parametrize("use_uring", QUEUES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_write_changes_its_own_bytes_only(tmp_path_factory, use_uring, data):
    path = tmp_path_factory.mktemp("disk") / "file"
    content = bytes_of(6 * BLOCK + 5)
    path.write_bytes(content.tobytes())
    offset = data.draw(st.integers(0, content.size - 1))
    size = data.draw(st.integers(1, content.size - offset))
    skew = data.draw(st.one_of(st.just(offset % BLOCK), st.integers(0, BLOCK - 1)))
    given_bytes = buffer_of(size, skew)
    given_bytes[:] = bytes_of(size, seed=1)
    _transfer.write_file(path, given_bytes, offset, depth=3, chunk=BLOCK, use_uring=use_uring)
    content[offset : offset + size] = given_bytes
    np.testing.assert_array_equal(np.fromfile(path, np.uint8), content)


@pytest.mark.parametrize("use_uring", QUEUES)
@pytest.mark.parametrize("skew", [0, 8])
def test_a_read_beyond_the_end_says_at_which_byte(written, use_uring, skew):
    path, content = written
    with pytest.raises(OSError, match="the file ends there") as caught:
        _transfer.read_file(path, buffer_of(4 * BLOCK, skew), 8 * BLOCK, use_uring=use_uring)
    said = f"reading {path} at byte {content.size}: the file ends there, "
    assert str(caught.value).startswith(said)


def test_what_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(OSError, match=rf"{tmp_path}/none: cannot be opened \(No such file"):
        _transfer.read_file(tmp_path / "none", bytearray(1), 0)
    with pytest.raises(OSError, match="is no regular file"):
        _transfer.MappedFile(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(OSError, match="empty: is empty"):
        _transfer.MappedFile(tmp_path / "empty")


@pytest.mark.parametrize("chunk", [0, 100])
def test_chunks_are_whole_blocks(written, chunk):
    with pytest.raises(OSError, match="a multiple of 4096"):
        _transfer.read_file(written[0], bytearray(1), 0, chunk=chunk)


@jax.jit
def fetch(source, x):
    destination = copy_start(source, transfer_id=3)
    x = jnp.tanh(x @ x)
    return copy_done(destination, source, x, transfer_id=3), x


def array_in(path, offset, shape, dtype=np.float32):
    """An array whose bytes stay in a file, and what keeps them there."""
    mapped = _transfer.MappedFile(path)
    view = np.frombuffer(mapped, dtype, int(np.prod(shape)), offset).reshape(shape)
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return jax.device_put(view, host, may_alias=True)


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "weights"
    values = np.random.default_rng(0).standard_normal((8, 128, 257), np.float32)
    path.write_bytes(bytes(64) + values.tobytes())
    return path, values


def test_a_transfer_out_of_a_mapped_file_reads_the_file(weights):
    path, values = weights
    array = array_in(path, 64, values.shape)
    assert _transfer.file_place(array.unsafe_buffer_pointer())
    with custom_calls.trace() as events:
        fetched, _ = jax.block_until_ready(fetch(array, jnp.eye(64)))
    np.testing.assert_array_equal(fetched, values)
    assert [(e.engine, e.transfer_id, e.bytes) for e in events] == [
        (targets.FROM_DISK, 3, values.nbytes)
    ]
    assert events[0].start_issued <= events[0].copy_began <= events[0].copy_ended


def test_transfers_of_several_threads_do_not_meet(weights):
    path, values = weights
    arrays = [array_in(path, 64 + v.nbytes * k, v.shape) for k, v in enumerate(values)]
    failures = []

    def run(k):
        for _ in range(20):
            if not np.array_equal(fetch(arrays[k], jnp.eye(8))[0], values[k]):
                failures.append(k)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(arrays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_file_that_was_truncated_is_an_error_that_names_it(weights):
    path, values = weights
    array = array_in(path, 64, values.shape)
    os.truncate(path, 64 + values.nbytes // 2)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(fetch(array, jnp.eye(64)))
    assert f"memplan.copy_done: transfer 3: reading {path} at byte " in str(caught.value)
    # The next run, of a file that is whole, is as if nothing had been.
    path.write_bytes(bytes(64) + values.tobytes())
    np.testing.assert_array_equal(fetch(array_in(path, 64, values.shape), jnp.eye(8))[0], values)


def test_a_file_is_mapped_as_long_as_an_array_of_it_lives(weights):
    path, values = weights
    array = array_in(path, 64, values.shape)
    address = array.unsafe_buffer_pointer()
    assert _transfer.file_place(address)
    assert not _transfer.file_place(address - BLOCK)
    array.delete()
    del array
    gc.collect()  # jax lets go of what XLA held of Python's when Python collects.
    assert not _transfer.file_place(address)
