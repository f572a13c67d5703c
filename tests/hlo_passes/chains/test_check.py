"""The checker against the oracle, and what it says."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlo_passes.chains.builder import Builder
from hlo_passes.chains.chain import Chain, Wait
from hlo_passes.chains.check import ChainReport, check
from hlo_passes.errors import ChainCheckError
from tests.hlo_passes.chains import oracle
from tests.hlo_passes.chains.drawn import chains, programs, sample_builder


def is_taken(chain: Chain) -> bool:
    try:
        check(chain)
    except ChainCheckError:
        return False
    return True


@given(chains(st.integers(1, 8), 1))
@settings(max_examples=150)
def test_of_any_chain_it_says_what_the_oracle_says(chain: Chain):
    assert is_taken(chain) == oracle.is_right(chain)


@given(programs(), st.integers(0, 2**32))
def test_of_a_chain_with_other_waits_it_says_what_the_oracle_says(program: Builder, seed: int):
    """Waits are dropped, turned to the previous replay, and moved; streams are exchanged."""
    chain, rng = program.build(release=True), random.Random(seed)
    descriptors = list(chain.descriptors)
    for _ in range(rng.randint(0, 2)):
        k = rng.randrange(len(descriptors))
        d, kind = descriptors[k], rng.randrange(4)
        if kind == 0:
            d = replace(d, stream=rng.randrange(len(chain.streams)))
        elif kind == 1 and len(d.waits) < 4:
            d = replace(d, waits=(*d.waits, Wait(rng.randrange(len(descriptors)), True)))
        elif d.waits:
            j = rng.randrange(len(d.waits))
            moved = (replace(d.waits[j], is_previous=True),) if kind == 2 else ()
            d = replace(d, waits=d.waits[:j] + moved + d.waits[j + 1 :])
        descriptors[k] = d
    changed = replace(chain, descriptors=tuple(descriptors))
    is_right = is_taken(changed)
    assert is_right == oracle.is_right(changed)
    if is_right:
        expected = oracle.outcome(changed, oracle.chain_order(changed, 3))
        for _ in range(2):
            assert oracle.outcome(changed, oracle.interleaving(changed, 3, rng)) == expected


def test_the_oracle_sees_both_kinds():
    """That the two tests above are of chains that are right and of chains that are not."""
    chain = sample_builder().build()
    assert oracle.is_right(chain)
    for k, d in enumerate(chain.descriptors):
        if d.waits:
            less = replace(d, waits=())
            others = (*chain.descriptors[:k], less, *chain.descriptors[k + 1 :])
            assert not oracle.is_right(replace(chain, descriptors=others))


def small() -> Builder:
    b = Builder()
    hbm = b.arena("hbm", "hbm", 64, alignment=8)
    b.slot("x", b.bound("x", "host", 16), 0, 16)
    b.slot("y", b.bound("y", "host", 16, writable=True), 0, 16)
    b.slot("a", hbm, 0, 16)
    b.slot("b", hbm, 8, 16)
    b.stream("read")
    b.stream("write")
    return b


def said(chain: Chain) -> str:
    with pytest.raises(ChainCheckError) as info:
        check(chain)
    return str(info.value)


def without_waits(chain: Chain, *indices: int) -> Chain:
    return replace(
        chain,
        descriptors=tuple(
            replace(d, waits=()) if k in indices else d for k, d in enumerate(chain.descriptors)
        ),
    )


def test_a_race_is_named():
    b = small()
    b.copy(0, 0, 2, 16)
    b.copy(1, 2, 1, 8, source_offset=4)
    chain = b.build()
    check(chain)
    assert said(without_waits(chain, 1)) == (
        "chain rejected: descriptor '1 write @0 copy a +4B -> y 8B' reads bytes 4 to 12 of 'hbm', "
        'which descriptor "0 read @0 copy x -> a 16B after 1\'" writes, and nothing orders them. '
        "Let 1 be after 0."
    )


def test_a_race_with_the_previous_replay_is_named():
    b = small()
    b.copy(0, 0, 2, 16)
    b.copy(1, 2, 1, 16)
    assert said(without_waits(b.build(), 0)) == (
        "chain rejected: descriptor '0 read @0 copy x -> a 16B' writes bytes 0 to 16 of 'hbm', "
        "which descriptor '1 write @0 copy a -> y 16B after 0' reads in the previous replay, and "
        "nothing orders them. Let 0 be after 1'."
    )


def test_bytes_that_nothing_has_written_are_named():
    b = small()
    b.copy(0, 0, 2, 16)
    b.copy(0, 3, 1, 16)
    assert said(b.build()) == (
        "chain rejected: descriptor '1 read @0 copy b -> y 16B' reads bytes 16 to 24 of 'hbm', "
        "which nothing has written. Write them before, or read what was written."
    )


def test_bytes_that_were_released_are_named():
    b = small()
    b.copy(0, 0, 2, 16)
    b.release(0, 3)
    b.copy(0, 2, 1, 16)
    assert said(b.build()) == (
        "chain rejected: descriptor '2 read @0 copy a -> y 16B' reads bytes 8 to 16 of 'hbm', "
        "which descriptor '1 read @0 release b' left. Write them before, or read what was written."
    )


def test_a_bound_space_is_handed_in_again_and_a_file_is_not():
    b = small()
    b.copy(0, 0, 2, 16)
    b.release(0, 0)
    check(b.build())
    b = small()
    b.slot("f", b.file("f", "ssd", 16, "/f"), 0, 16)
    b.copy(0, 4, 2, 16)
    b.release(0, 4)
    assert "reads bytes 0 to 16 of 'f', which descriptor '1 read @0 release f' left" in said(
        b.build()
    )


def test_a_write_to_what_is_not_writable_is_named():
    b = small()
    b.copy(0, 1, 0, 16)
    assert said(b.build()) == (
        "chain rejected: descriptor '0 read @0 copy y -> x 16B' writes bytes 0 to 16 of 'x', which "
        "may not be written. Declare the space writable, or write elsewhere."
    )


def test_a_copy_onto_itself_is_named():
    b = small()
    b.copy(0, 0, 2, 16)
    b.copy(0, 2, 3, 16)
    assert said(b.build()) == (
        "chain rejected: descriptor '1 read @0 copy a -> b 16B' works on bytes 0 to 16 of 'hbm' "
        "and writes bytes 8 to 24 of 'hbm' at once. Take bytes apart; only a result may have "
        "exactly those of an argument."
    )


@pytest.mark.parametrize(
    ("arguments", "results", "is_right"),
    [((2,), (2,), True), ((2,), (3,), False), ((), (2, 3), False), ((), (2, 2), False)],
)
def test_a_result_may_be_in_place(arguments: tuple[int], results: tuple[int], is_right: bool):
    b = small()
    b.copy(0, 0, 2, 16)
    b.execute(0, b.segment("s", arguments, results))
    assert is_taken(b.build()) == is_right


def test_what_it_takes_is_reported():
    b = small()
    b.arena("pinned", "host", 100, alignment=1)
    b.copy(0, 0, 2, 16)
    b.copy(1, 2, 1, 16)
    b.copy(0, 0, 3, 12)
    assert check(b.build()) == ChainReport({"hbm": 64, "host": 100}, {"hbm": 20, "host": 0})
    # With a and b apart, and a released before b is written.
    b = small()
    b.slot("c", 0, 32, 16)
    b.copy(0, 0, 2, 16)
    b.copy(1, 2, 1, 16)
    b.copy(0, 0, 4, 12)
    assert check(b.build()).used == {"hbm": 28}
    assert check(b.build(release=True)).used == {"hbm": 16}


def test_it_is_linear():
    """Ten times the chain, through one ring, does not take much more than ten times as long."""

    def seconds(count: int) -> float:
        b = small()
        for _ in range(count):
            b.copy(0, 0, 2, 16)
            b.copy(1, 2, 1, 8)
        start = time.process_time()
        check(b.build())
        return time.process_time() - start

    seconds(100)
    assert seconds(5000) < 40 * seconds(500)
