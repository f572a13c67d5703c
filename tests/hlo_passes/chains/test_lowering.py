"""Plans as chains."""

from dataclasses import replace
from itertools import combinations, pairwise

import jax
import jax.numpy as jnp
import pytest

import memplan
from hlo_passes.chains.chain import Copy, Execute, Fence, SpaceKind, extent
from hlo_passes.chains.check import check
from hlo_passes.chains.lowering import BLOCK, FileSource, arena_bytes, cuts, lower
from hlo_passes.errors import NotReplayableError

WIDTHS = (512, 384, 640, 512, 256, 768, 512)


def uneven(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    for w in reversed(weights):
        x = jnp.tanh(x @ w.T)
    return x


@pytest.fixture(scope="module")
def plan():
    """Of weights of several sizes, each read twice."""
    sizes = (*WIDTHS, 512)
    weights = [jax.ShapeDtypeStruct((a, b), jnp.float32) for a, b in pairwise(sizes)]
    x = jax.ShapeDtypeStruct((4, 512), jnp.float32)
    return memplan.jit(uneven, hbm="5MiB").plan(weights, x)


@pytest.fixture(scope="module")
def files(plan):
    found, offset = {}, 4096 + 64
    for t in plan.transfers:
        if t.buffer not in found:
            found[t.buffer] = FileSource("weights", offset)
            offset += t.size + 128
    return found


def test_a_chain_is_right_and_its_arena_as_large_as_was_said(plan, files):
    lowered = lower(plan, files)
    assert check(lowered.chain).footprint == {plan.device_tier: arena_bytes(plan)}
    assert len({t.buffer for t in plan.transfers}) < len(plan.transfers)  # Some come twice.
    copies = [d.action for d in lowered.chain.descriptors if isinstance(d.action, Copy)]
    assert [c.bytes for c in copies] == [t.size for t in plan.transfers]


def test_what_is_there_at_once_lies_apart(plan, files):
    lowered = lower(plan, files)
    spaces = {
        t.buffer: extent(lowered.chain.slots, lowered.slots[t.buffer]) for t in plan.transfers
    }
    for one, other in combinations(plan.transfers, 2):
        if one.buffer != other.buffer and one.start < other.end and other.start < one.end:
            assert not spaces[one.buffer].overlaps(spaces[other.buffer])


def test_every_segment_has_what_is_read_in_it(plan, files):
    chain = lower(plan, files).chain
    executed = [
        chain.segments[d.action.segment] for d in chain.descriptors if isinstance(d.action, Execute)
    ]
    at = cuts(plan)
    assert [s.name for s in executed] == [f"{a}:{b}" for a, b in pairwise(at)]
    for (begin, end), segment in zip(pairwise(at), executed, strict=True):
        held = {chain.slots[s].name for s in segment.arguments}
        for t in plan.transfers:
            if t.done <= begin < t.end:
                assert t.end >= end
                assert f"{plan.labels[t.buffer]} here" in held


def test_slots_begin_as_far_into_a_block_as_their_sources_do(plan, files):
    lowered = lower(plan, files)
    for name, slot in lowered.slots.items():
        assert lowered.chain.slots[slot].offset % BLOCK == files[name].offset % BLOCK


def test_what_is_in_no_file_is_bound(plan, files):
    first = plan.transfers[0].buffer
    lowered = lower(plan, {k: f for k, f in files.items() if k != first})
    kinds = [space.kind for space in lowered.chain.spaces]
    assert lowered.bound == (first,)
    assert sorted(kinds) == [SpaceKind.ARENA, SpaceKind.FILE, SpaceKind.BOUND]
    check(lowered.chain)


def test_what_leaves_the_device_is_refused(plan, files):
    first, *others = plan.transfers
    leaving = replace(plan, transfers=(replace(first, kind="evict"), *others))
    with pytest.raises(NotReplayableError, match=r"weights\.\d\) leaves the device"):
        lower(leaving, files)


def before(chain, index):
    """All that has ended when a descriptor begins, of its own replay."""
    found, pending = set(), [index]
    while pending:
        k = pending.pop()
        stream = chain.descriptors[k].stream
        earlier = [m for m in range(k) if chain.descriptors[m].stream == stream][-1:]
        waits = [w.index for w in chain.descriptors[k].waits if not w.is_previous]
        new = {*earlier, *waits} - found
        found |= new
        pending += new
    return found


def test_what_was_read_is_written_over_after_the_commit(plan, files):
    twins = {
        name: FileSource("twin", at.offset // BLOCK * 10 * BLOCK) for name, at in files.items()
    }
    there = {name: FileSource("weights", at.offset) for name, at in twins.items()}
    lowered = lower(plan, there, twins)
    chain = lowered.chain
    assert check(chain).footprint == {plan.device_tier: arena_bytes(plan)}
    assert lowered.steps == 2
    streams = [d.stream for d in chain.descriptors]
    first, second = (
        k
        for k, d in enumerate(chain.descriptors)
        if d.stream == lowered.commits and isinstance(d.action, Execute)
    )
    write = next(k for k, s in enumerate(chain.streams) if s.name == "write")
    writes = [
        k
        for k, d in enumerate(chain.descriptors)
        if streams[k] == write and isinstance(d.action, Copy)
    ]
    half = len(writes) // 2
    assert {*writes[:half]} <= before(chain, first)
    assert {*writes[half:]} <= before(chain, second)
    assert all(first in before(chain, k) for k in writes[half:])
    # And the next replay's begin after the second.
    assert any(w.is_previous and w.index == second for k in writes[:half] for w in waits(chain, k))


def waits(chain, index):
    """Those of a descriptor, and of the fences before it."""
    found = [*chain.descriptors[index].waits]
    while index and isinstance(chain.descriptors[index - 1].action, Fence):
        index -= 1
        found += chain.descriptors[index].waits
    return found
