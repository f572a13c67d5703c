"""Chains that are replayed: the bytes, the order, and what is said when a disk fails."""

import ctypes
import os
import re
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from custom_calls.runtime import Runtime, events
from hlo_passes.chains.binary import to_bytes
from hlo_passes.chains.builder import Builder
from hlo_passes.chains.chain import Chain, Copy, Execute, SpaceKind

BLOCK = 4096
LAYERS, SLOTS = 7, 3


def view(run, chain, slot):
    """A slot's bytes, where they are."""
    size = chain.slots[slot].bytes
    return np.frombuffer((ctypes.c_uint8 * size).from_address(run.address(slot)), np.uint8)


def mixed(arguments, results):
    """What stands for compute: results that every byte of the arguments changes."""
    total = np.uint64(sum(int(a.astype(np.uint64) @ np.arange(1, a.size + 1)) for a in arguments))
    for k, result in enumerate(results):
        result[:] = (np.arange(result.size, dtype=np.uint64) * 31 + total + k).astype(np.uint8)


def drive(run, chain, stream):
    while (k := run.enter(stream)) is not None:
        segment = chain.segments[k]
        arguments = [view(run, chain, slot).copy() for slot in segment.arguments]
        mixed(arguments, [view(run, chain, slot) for slot in segment.results])
        run.leave(stream)


def streamed(path, size):
    """Layers of a file through a ring of slots, each read by a segment that changes a state."""
    b = Builder()
    weights = b.file("weights", "ssd", LAYERS * size, str(path))
    ring = b.arena("ring", "dram", SLOTS * size, alignment=BLOCK)
    state = b.bound("state", "dram", 64, writable=True)
    stored = [b.slot(f"layer{k}", weights, k * size, size) for k in range(LAYERS)]
    slots = [b.slot(f"slot{k}", ring, k * size, size) for k in range(SLOTS)]
    x = b.slot("x", state, 0, 64)
    reads = [b.stream("read0"), b.stream("read1")]
    compute = b.stream("compute")
    for k in range(LAYERS):
        b.copy(reads[k % 2], stored[k], slots[k % SLOTS], size, tick=k)
        segment = b.segment(f"layer{k}", (slots[k % SLOTS], x), (x,))
        b.execute(compute, segment, tick=k)
    return b.build(), compute


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("runtime") / "weights"
    size = 5 * BLOCK + 100
    data = np.random.default_rng(0).integers(0, 256, LAYERS * size, dtype=np.uint8)
    path.write_bytes(data.tobytes())
    return path, data.reshape(LAYERS, size)


@pytest.mark.parametrize("use_uring", [True, False])
def test_layers_stream_through_slots(written, use_uring):
    path, layers = written
    chain, compute = streamed(path, layers.shape[1])
    state, expected = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    run = Runtime(
        to_bytes(chain), [state.ctypes.data], chunk=BLOCK, depth=4, use_uring=use_uring, log=1000
    )
    for replays in (3, 2):  # What the arenas hold goes on.
        run.start(replays)
        drive(run, chain, compute)
        run.wait()
        for _ in range(replays):
            for layer in layers:
                mixed([layer, expected.copy()], [expected])
        np.testing.assert_array_equal(state, expected)
    log = events(run)
    assert len(log) == 5 * len(chain.descriptors)
    assert (log["issued"] <= log["began"]).all()
    assert (log["began"] <= log["ended"]).all()
    ended = {(e["replay"], e["descriptor"]): e for e in log}
    for d, descriptor in enumerate(chain.descriptors):
        for wait in descriptor.waits:
            for replay in range(wait.is_previous, 5):
                before = ended[replay - wait.is_previous, wait.index]
                assert before["ended"] <= ended[replay, d]["began"]


def test_the_next_replays_reads_begin_before_this_ones_end(written):
    path, layers = written
    chain, compute = streamed(path, layers.shape[1])
    state = np.zeros(64, np.uint8)
    run = Runtime(to_bytes(chain), [state.ctypes.data], log=100)
    run.start(2)
    for k in range(LAYERS):  # All of the first replay but its last segment's end.
        run.enter(compute)
        if k < LAYERS - 1:
            run.leave(compute)
    # That one has layer 6 in slot 0; layer 1 of the next replay goes to slot 1.
    slot = next(k for k, slot in enumerate(chain.slots) if slot.name == "slot1")
    deadline = time.monotonic() + 10
    while not np.array_equal(view(run, chain, slot), layers[1]) and time.monotonic() < deadline:
        time.sleep(0.001)
    np.testing.assert_array_equal(view(run, chain, slot), layers[1])
    run.leave(compute)
    drive(run, chain, compute)
    run.wait()


# --- any chain, against one thing after the other


@st.composite
def programs(draw, path):
    """Copies between a file and arenas, and segments, on a few streams."""
    b = Builder()
    size = 3 * BLOCK
    file = b.file("file", "ssd", size, str(path), writable=True)
    arenas = [b.arena(f"arena{k}", "dram", size, alignment=BLOCK) for k in range(2)]
    bound = b.bound("bound", "dram", size, writable=True)
    spaces = [file, *arenas, bound]
    streams = [b.stream(f"copies{k}") for k in range(draw(st.integers(1, 3)))]
    compute = b.stream("compute")
    count = 0

    def slot(among, length):
        nonlocal count
        count += 1
        space = draw(st.sampled_from(among))
        # On and off the disk's blocks.
        offset = draw(st.sampled_from([0, 64, BLOCK, BLOCK + 8]))
        return b.slot(f"slot{count}", space, offset, length)

    for arena in arenas:  # Nothing is read before it was written.
        whole = b.slot(f"all{arena}", arena, 0, size)
        b.copy(streams[0], b.slot(f"from{arena}", bound, 0, size), whole, size)
    for k in range(draw(st.integers(1, 12))):
        length = draw(st.sampled_from([1, 100, BLOCK, BLOCK + 100]))
        if draw(st.integers(0, 3)) == 0:
            arguments = [slot(spaces[1:], length) for _ in range(draw(st.integers(0, 2)))]
            results = [slot(spaces[1:], length)]
            b.execute(compute, b.segment(f"segment{k}", arguments, results))
        else:
            source = draw(st.sampled_from(spaces))
            others = spaces[1:] if source == file else spaces
            a, z = slot([source], length), slot(others, length)
            if not overlap(b.build(), a, z):
                b.copy(draw(st.sampled_from(streams)), a, z, length)
    return b.build(), compute, draw(st.integers(1, 3))


def overlap(chain, a, z):
    x, y = chain.slots[a], chain.slots[z]
    apart = x.offset + x.bytes <= y.offset or y.offset + y.bytes <= x.offset
    return x.space == y.space and not apart


def one_by_one(chain: Chain, memory, replays):
    def of(slot, offset=0, size=None):
        s = chain.slots[slot]
        begin = s.offset + offset
        return memory[s.space][begin : begin + (s.bytes if size is None else size)]

    for _ in range(replays):
        for descriptor in chain.descriptors:
            match descriptor.action:
                case Copy(a, z, size, at, to):
                    of(z, to, size)[:] = of(a, at, size).copy()
                case Execute(k):
                    segment = chain.segments[k]
                    arguments = [of(slot).copy() for slot in segment.arguments]
                    mixed(arguments, [of(slot) for slot in segment.results])
                case _:
                    pass


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_chain_leaves_what_one_thing_after_the_other_leaves(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("chain") / "file"
    chain, compute, replays = data.draw(programs(path))
    random = np.random.default_rng(0)
    memory = [random.integers(0, 256, space.bytes, dtype=np.uint8) for space in chain.spaces]
    path.write_bytes(memory[0].tobytes())
    bound = memory[-1].copy()
    use_uring = data.draw(st.booleans())
    run = Runtime(to_bytes(chain), [bound.ctypes.data], chunk=BLOCK, use_uring=use_uring)
    run.start(replays)
    drive(run, chain, compute)
    run.wait()
    one_by_one(chain, memory, replays)
    np.testing.assert_array_equal(np.fromfile(path, np.uint8), memory[0])
    np.testing.assert_array_equal(bound, memory[-1])
    used = [k for k, s in enumerate(chain.spaces) if s.kind == SpaceKind.ARENA]
    for k in used:
        whole = next(i for i, s in enumerate(chain.slots) if s.name == f"all{k}")
        np.testing.assert_array_equal(view(run, chain, whole), memory[k])


# --- copies of one stream


LARGE = 16 << 20


def two_copies(path, first, second):
    """Two copies on one stream, each from and to a space and an offset; what happened in 20 replays
    of them, an array of two events each."""
    b = Builder()
    spaces = {
        "file": b.file("file", "ssd", 2 * LARGE, str(path), writable=True),
        "arena": b.arena("arena", "dram", 2 * LARGE, alignment=BLOCK),
    }
    stream = b.stream("copies")
    for k, ends in enumerate((first, second)):
        source, destination = (
            b.slot(f"{k}{space}", spaces[space], offset, LARGE) for space, offset in ends
        )
        b.copy(stream, source, destination, LARGE)
    run = Runtime(to_bytes(b.build()), [], log=40)
    run.start(20)
    run.wait()
    log = events(run)
    return log[np.lexsort((log["descriptor"], log["replay"]))].reshape(20, 2)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([("file", 0), ("arena", 0)], [("file", LARGE), ("arena", BLOCK)]),
        ([("file", 0), ("arena", 0)], [("arena", LARGE - BLOCK), ("file", LARGE)]),
        ([("arena", 0), ("file", 0)], [("file", LARGE - BLOCK), ("arena", LARGE)]),
        ([("arena", 0), ("file", 0)], [("arena", LARGE), ("file", BLOCK)]),
    ],
)
def test_copies_that_share_bytes_do_not_overlap(tmp_path, first, second):
    (tmp_path / "file").write_bytes(bytes(2 * LARGE))
    log = two_copies(tmp_path / "file", first, second)
    assert (log["ended"][:, 0] <= log["began"][:, 1]).all()
    assert (log["ended"][:-1, 1] <= log["began"][1:, 0]).all()


def test_copies_that_share_none_overlap(tmp_path):
    (tmp_path / "file").write_bytes(bytes(2 * LARGE))
    log = two_copies(
        tmp_path / "file",
        [("file", 0), ("arena", 0)],
        [("file", LARGE), ("arena", LARGE)],
    )
    assert (log["began"][:, 1] < log["ended"][:, 0]).any()
    assert (log["ended"][:, 0] <= log["ended"][:, 1]).all()


# --- what goes wrong


def test_a_file_that_ends_too_early_names_the_descriptor(tmp_path, written):
    path = tmp_path / "weights"
    _, layers = written
    path.write_bytes(layers.tobytes())
    chain, compute = streamed(path, layers.shape[1])
    state = np.zeros(64, np.uint8)
    run = Runtime(to_bytes(chain), [state.ctypes.data])
    os.truncate(path, layers.shape[1] * 4 + 10)
    run.start(3)
    drive(run, chain, compute)
    with pytest.raises(OSError, match="the file ends there") as caught:
        run.wait()
    # All of these are under way at once: any of them may come to the end first.
    size = layers.shape[1]
    said = [
        rf"descriptor \d+ \(copy layer4 to slot1\) of stream read0, .* at byte {size * 4 + 10}: ",
        rf"descriptor \d+ \(copy layer5 to slot2\) of stream read1, .* at byte {size * 5}: ",
        rf"descriptor \d+ \(copy layer6 to slot0\) of stream read0, .* at byte {size * 6}: ",
    ]
    assert re.match("|".join(said), str(caught.value))
    assert f", replay 0: reading {path} at byte " in str(caught.value)
    # Nothing is replayed any more.
    run.start(1)
    assert run.enter(compute) is None
    with pytest.raises(OSError, match="the file ends there"):
        run.wait()


def test_files_are_looked_at_before_anything_runs(tmp_path, written):
    chain, _ = streamed(tmp_path / "none", 100)
    with pytest.raises(OSError, match=r"^file weights: .*none: cannot be opened \(No such file"):
        Runtime(to_bytes(chain), [0])
    (tmp_path / "none").write_bytes(bytes(699))
    with pytest.raises(OSError, match="none has 699 bytes, the chain needs 700"):
        Runtime(to_bytes(chain), [0])


def test_an_arena_that_is_too_large_is_named():
    b = Builder()
    b.arena("weights", "dram", 1 << 60, alignment=BLOCK)
    with pytest.raises(OSError, match=f"^arena weights of {1 << 60} bytes: its addresses cannot"):
        Runtime(to_bytes(b.build()), [])


def test_bytes_that_are_no_chain_are_refused_with_their_offset(written):
    path, layers = written
    data = bytearray(to_bytes(streamed(path, layers.shape[1])[0]))
    data[40] ^= 1
    with pytest.raises(ValueError, match=r"^byte 24: "):
        Runtime(data, [0])


def test_bound_spaces_need_their_addresses(written):
    path, layers = written
    chain, _ = streamed(path, layers.shape[1])
    with pytest.raises(ValueError, match="has 1 bound spaces, found 0 addresses"):
        Runtime(to_bytes(chain), [])


def test_arenas_take_what_the_chain_says():
    b = Builder()
    b.arena("a", "dram", 10 * BLOCK, alignment=1 << 16)
    b.arena("b", "dram", 1, alignment=BLOCK)
    big = b.slot("big", b.arena("c", "dram", (2 << 20) + BLOCK, alignment=BLOCK), 0, 1)
    run = Runtime(to_bytes(b.build()), [])
    assert run.allocated_bytes() == 10 * BLOCK + BLOCK + (2 << 20) + BLOCK
    assert run.address(big) % (2 << 20) == 0


@pytest.mark.parametrize("with_driver", [True, False])
def test_cancelling_ends_it_for_all_who_wait(written, with_driver):
    path, layers = written
    chain, compute = streamed(path, layers.shape[1])
    state = np.zeros(64, np.uint8)
    run = Runtime(to_bytes(chain), [state.ctypes.data])
    run.start(1_000_000)
    driver = threading.Thread(target=drive, args=(run, chain, compute))
    if with_driver:
        driver.start()
    threading.Timer(0.05, run.cancel).start()
    with pytest.raises(OSError, match=r"^the replay was cancelled$"):
        run.wait()
    if with_driver:
        driver.join(10)
        assert not driver.is_alive()


def test_dropping_a_runtime_that_runs_ends_it(written):
    path, layers = written
    chain, _ = streamed(path, layers.shape[1])
    state = np.zeros(64, np.uint8)
    run = Runtime(to_bytes(chain), [state.ctypes.data])
    run.start(10)
    del run  # Streams wait for a segment that nobody runs.


def test_logs_of_more_than_memory_are_refused(written):
    chain, _ = streamed(written[0], written[1].shape[1])
    for log in (-1, 1 << 62):
        with pytest.raises(ValueError, match="log must be from 0"):
            Runtime(to_bytes(chain), [0], log=log)
