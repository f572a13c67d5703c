"""Fences of a plan: drawn by hand, and complete against every pair of slots."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hlo_passes.placing.fences import derive_fences, slot_name
from hlo_passes.plan import Event, Fence, LiveRange, Slot, Transfer


def transfer(i: int, buffer: str, start: int, done: int, end: int) -> Transfer:
    return Transfer(i, buffer, "host", "hbm", 4, start, done, end)


END = 100  # Behind every tick of these tests.


def slot(buffer: str, offset: int, size: int, start: int, end: int) -> Slot:
    return Slot(buffer, "arena", offset, size, LiveRange(start, end))


def test_a_ring_of_two():
    """c takes a's bytes, after c1 has read them.

    tick      0    1    2    3    4
    bytes 4   b═════════[read)
          0   a════[read) c═══[read)
    """
    transfers = [transfer(0, "a", 0, 1, 2), transfer(1, "b", 0, 2, 3), transfer(2, "c", 2, 3, 4)]
    slots = [slot("a#0", 0, 4, 0, 2), slot("b#1", 4, 4, 0, 3), slot("c#2", 0, 4, 2, 4)]
    assert [
        (str(f.before), str(f.after), f.reason) for f in derive_fences(transfers, slots, END)
    ] == [
        ("done:0", "compute:1", "data"),
        ("done:1", "compute:2", "data"),
        ("compute:1", "start:2", "reuse"),
        ("done:2", "compute:3", "data"),
    ]


def test_the_last_of_several_earlier_readers_speaks_for_all():
    """w lies on what x and the temporary held; y lies elsewhere."""
    transfers = [transfer(0, "w", 5, 6, 7)]
    slots = [
        slot("w#0", 0, 8, 5, 7),
        slot("x", 0, 4, 0, 2),
        slot("temporary", 6, 4, 1, 4),
        slot("y", 8, 4, 0, 5),
    ]
    assert derive_fences(transfers, slots, END) == (
        Fence(Event("compute", 3), Event("start", 0), "reuse"),
        Fence(Event("done", 0), Event("compute", 6), "data"),
    )


def test_fresh_bytes_need_no_reuse_fence():
    later = slot("later", 0, 4, 3, 4)
    fences = derive_fences([transfer(0, "w", 0, 1, 2)], [slot("w#0", 0, 4, 0, 2), later], END)
    assert [f.reason for f in fences] == ["data"]
    assert derive_fences([], [later], END) == ()


def test_a_buffer_that_is_fetched_twice_has_two_slots():
    assert slot_name("w", 0) != slot_name("w", 1)
    transfers = [transfer(0, "w", 0, 0, 1), transfer(1, "w", 1, 2, 3)]
    slots = [slot("w#0", 0, 4, 0, 1), slot("w#1", 0, 4, 1, 3)]
    reuse = [f for f in derive_fences(transfers, slots, END) if f.reason == "reuse"]
    assert reuse == [Fence(Event("compute", 0), Event("start", 1), "reuse")]


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[Transfer], list[Slot]]:
    """Slots at random places, transfers' and temporaries'; ones that meet are dropped."""
    held: list[Slot] = []
    transfers: list[Transfer] = []
    for _ in range(draw(st.integers(1, 12))):
        start = draw(st.integers(0, 9))
        end = draw(st.integers(start + 1, 10))
        is_transfer = draw(st.booleans())
        i = len(transfers)
        name = f"w#{i}" if is_transfer else f"t{len(held)}"
        new = slot(name, draw(st.integers(0, 8)), draw(st.integers(1, 4)), start, end)
        if any(shares(new, old) and new.live_range.overlaps(old.live_range) for old in held):
            continue
        held.append(new)
        if is_transfer:
            transfers.append(transfer(i, "w", start, draw(st.integers(start, end - 1)), end))
    return transfers, held


def shares(a: Slot, b: Slot) -> bool:
    return a.offset < b.offset + b.size and b.offset < a.offset + a.size


@given(plans())
def test_every_reuse_is_ordered_and_nothing_is_said_twice(plan: tuple[list[Transfer], list[Slot]]):
    transfers, slots = plan
    fences = derive_fences(transfers, slots, END)
    assert len(set(fences)) == len(fences)
    by_name = {s.buffer: s for s in slots}
    for t in transfers:
        assert Fence(Event("done", t.id), Event("compute", t.done), "data") in fences
        waits = [f.before for f in fences if f.after == Event("start", t.id)]
        assert len(waits) <= 1
        assert all(w.kind == "compute" and w.index < t.start for w in waits)
        own = by_name[slot_name(t.buffer, t.id)]
        readers = [
            s.live_range.end - 1
            for s in slots
            if s is not own and shares(s, own) and s.live_range.end <= own.live_range.start
        ]
        assert max(readers, default=None) == (waits[0].index if waits else None)
