"""How far choices are searched for."""

from __future__ import annotations

from hlo_passes.edits.search import affordable


def test_all_of_a_search_takes_no_longer_in_larger_modules():
    ticks = [1 << k for k in range(22)]
    turns = [affordable(200, n) for n in ticks]
    assert turns[0] == 200
    assert turns[-1] == 0
    assert max(n * n * t for n, t in zip(ticks, turns, strict=True)) == 4096 * 4096 * 200
