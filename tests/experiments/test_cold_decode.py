"""What least recently used moves, and the shapes of what is compiled."""

from __future__ import annotations

import numpy as np

from experiments import cold_decode, resuming
from experiments.cold_decode import LLAMA3_8B, bytes_of


def test_lru_moves_all_that_is_read_in_turn_unless_there_is_room_for_all():
    sizes = [3, 5, 2, 4]
    assert cold_decode._moved_by_lru(sizes, sum(sizes)) == 0
    for room in (5, 9, sum(sizes) - 1):
        assert cold_decode._moved_by_lru(sizes, room) == sum(sizes)


def test_a_million_tokens_are_128_gib():
    for tokens, groups in cold_decode._LONGEST.values():
        *_, pools, _, _, _, _, cold = cold_decode.arguments(LLAMA3_8B, 8, tokens, groups)
        held = bytes_of([group.layers for group in cold]) + bytes_of(pools)
        assert abs(held / 2**37 - 1) < 1e-3


def test_a_resumed_prefix_is_computed_or_comes():
    for head in (0, 3, 256):
        (_, pools, tokens, starts, counts, tables), arriving = resuming._arguments(LLAMA3_8B, head)
        come = arriving.layers[0].keys.shape[0]
        assert head + come == resuming._STORED // resuming._PAGE
        assert arriving.pages.shape == (come,)
        rows = sum(table.shape[0] for table in tables)
        assert tokens.shape[0] == starts.shape[0] == counts.shape[0] == rows
        assert max(table.shape[1] for table in tables) == pools[0].keys.shape[0]
        assert np.prod(tokens.shape) >= head * resuming._PAGE + resuming._SUFFIX
