"""The waits that the builder derives: enough, and none too many."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlo_passes.chains.builder import Builder
from hlo_passes.chains.chain import Chain, Copy, Execute, Fence, Release, SpaceKind, Wait
from hlo_passes.chains.check import check
from hlo_passes.errors import ChainCheckError, ChainError
from tests.hlo_passes.chains import oracle
from tests.hlo_passes.chains.drawn import fenced_builder, programs, sample, sample_builder


def with_one_wait_less(chain: Chain) -> Iterator[Chain]:
    for k, d in enumerate(chain.descriptors):
        for j in range(len(d.waits)):
            less = replace(d, waits=d.waits[:j] + d.waits[j + 1 :])
            yield replace(
                chain, descriptors=(*chain.descriptors[:k], less, *chain.descriptors[k + 1 :])
            )


@given(programs(), st.booleans(), st.integers(0, 2**32))
def test_every_order_gives_what_chain_order_gives(program: Builder, release: bool, seed: int):
    chain, rng = program.build(release=release), random.Random(seed)
    check(chain)
    expected = oracle.outcome(chain, oracle.chain_order(chain, 3))
    for _ in range(4):
        assert oracle.outcome(chain, oracle.interleaving(chain, 3, rng)) == expected


@given(programs())
def test_no_wait_can_be_left_out(program: Builder):
    for less in with_one_wait_less(program.build()):
        with pytest.raises(ChainCheckError, match="and nothing orders them"):
            check(less)


def test_without_a_wait_some_order_goes_wrong():
    rng, chain = random.Random(0), sample_builder(1).build()
    expected = oracle.outcome(chain, oracle.chain_order(chain, 3))
    lesser = list(with_one_wait_less(chain))
    assert len(lesser) > 5
    for less in lesser:
        orders = (oracle.interleaving(less, 3, rng) for _ in range(200))
        assert any(oracle.outcome(less, order) != expected for order in orders)


def test_what_a_ring_waits_for():
    """A read of the next weight waits for the last use of its slot, also across replays."""
    chain = sample_builder().build()
    # Copies w0, x; layer; copy w1; layer; copies out, the second on the stream of the first.
    assert [list(map(str, d.waits)) for d in chain.descriptors] == [
        ["4'"],
        ["6'"],
        ["1"],
        ["2"],
        ["3"],
        ["4"],
        [],
    ]


def test_many_waits_are_fences():
    chain = fenced_builder().build()
    *reads, fence, execute = chain.descriptors
    assert [d.action for d in reads] == [Copy(0, k + 1, 16) for k in range(6)]
    assert fence.action == Fence()
    assert fence.stream == execute.stream == 0
    assert fence.waits == (Wait(0), Wait(1), Wait(2), Wait(3))
    assert execute.action == Execute(0)
    assert execute.waits == (Wait(4), Wait(5))
    assert all(d.waits == (Wait(7, True),) for d in reads)


def released(chain: Chain) -> list[tuple[int, str]]:
    """After which index which slot is released."""
    return [
        (k, chain.slots[d.action.slot].name)
        for k, d in enumerate(chain.descriptors)
        if isinstance(d.action, Release)
    ]


def test_slots_are_released_after_their_last_access():
    assert released(sample()) == [(5, "ring"), (8, "act of layer")]
    assert sample().descriptors[5].stream == sample().descriptors[4].stream
    assert released(sample_builder().build()) == []


def in_eight_bytes() -> Builder:
    """An arena of 8 bytes with slots 0 for all of them, 1 and 2 for the last four; 3 and 4 are an
    argument and a result."""
    b = Builder()
    hbm = b.arena("hbm", "hbm", 8, alignment=1)
    b.slot("whole", hbm, 0, 8)
    b.slot("part", hbm, 4, 4)
    b.slot("again", hbm, 4, 4)
    b.slot("x", b.bound("x", "hbm", 8), 0, 8)
    b.slot("y", b.bound("y", "hbm", 8, writable=True), 0, 8)
    b.stream("s")
    return b


def test_bytes_that_are_read_under_another_name_are_not_released():
    b = in_eight_bytes()
    b.copy(0, 3, 0, 8)
    b.copy(0, 1, 4, 4)
    b.copy(0, 2, 4, 4)
    chain = b.build(release=True)
    assert released(chain) == [(3, "again")]
    check(chain)


def test_of_two_names_that_end_at_once_neither_is_released_where_a_third_is_read():
    b = in_eight_bytes()
    b.copy(0, 3, 0, 8)
    b.execute(0, b.segment("both", (0, 1), ()))
    b.copy(0, 2, 4, 4)
    chain = b.build(release=True)
    assert released(chain) == [(3, "again")]
    check(chain)


def test_bytes_that_are_written_under_another_name_are_released():
    b = in_eight_bytes()
    b.copy(0, 3, 0, 8)
    b.copy(0, 0, 4, 8)
    b.copy(0, 3, 1, 4)
    b.copy(0, 1, 4, 4)
    chain = b.build(release=True)
    assert released(chain) == [(2, "whole"), (5, "part")]
    check(chain)


def test_what_was_released_by_hand_is_not_released_again():
    b = sample_builder()
    b.release(1, 3)
    assert released(b.build(release=True)) == [(5, "ring"), (8, "act of layer")]


@given(programs())
@settings(max_examples=50)
def test_releases_change_no_waits(program: Builder):
    with_, without = program.build(release=True), program.build()
    kept = [k for k, d in enumerate(with_.descriptors) if not isinstance(d.action, Release)]
    index = {k: n for n, k in enumerate(kept)}
    assert without.descriptors == tuple(
        replace(d, waits=tuple(replace(w, index=index[w.index]) for w in d.waits))
        for d in (with_.descriptors[k] for k in kept)
    )
    # What is last read is free for what comes: of a chain that releases nothing all stays used.
    assert all(check(with_).used[tier] <= of for tier, of in check(without).used.items())


def test_spaces_are_what_they_were_declared_to_be():
    kinds = [(s.kind, s.writable, s.alignment, s.path) for s in sample().spaces]
    assert kinds[0] == (SpaceKind.ARENA, True, 512, "")
    assert kinds[2] == (SpaceKind.FILE, True, 0, "/mnt/cache")
    assert kinds[3] == (SpaceKind.BOUND, False, 0, "")


def test_parts_that_do_not_fit_are_refused():
    b = sample_builder()
    b.copy(0, 0, 2, 1025)
    with pytest.raises(ChainError, match=r"descriptors\[7\].bytes: expected 1 to 1024, found 1025"):
        b.build()
