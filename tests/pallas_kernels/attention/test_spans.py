"""Which blocks a tile looks at, against every pair of a row and a column."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.attention.problem import Band
from pallas_kernels.attention.spans import Span, segment_spans, span, transposed

LENGTHS = st.integers(1, 70)
TILES = st.sampled_from([4, 8, 16])
LIMITS = st.one_of(st.none(), st.integers(0, 30))
BANDS = st.builds(Band, LIMITS, LIMITS, st.integers(-40, 40))


def visible(band: Band, rows: int, columns: int) -> np.ndarray:
    distance = np.arange(columns)[None, :] - (np.arange(rows)[:, None] + band.offset)
    seen = np.ones((rows, columns), bool)
    if band.left is not None:
        seen &= distance >= -band.left
    if band.right is not None:
        seen &= distance <= band.right
    return seen


def check(found: Span, tile: np.ndarray, block: int) -> None:
    """`tile` is bool[rows, columns]: nothing outside is seen, all in the middle is."""
    start, full_start, full_stop, stop = map(int, found)
    assert start <= full_start <= full_stop <= stop <= -(-tile.shape[1] // block)
    assert not tile[:, : start * block].any()
    assert not tile[:, stop * block :].any()
    assert tile[:, full_start * block : full_stop * block].all()
    assert full_stop * block <= tile.shape[1] or full_start == full_stop


@given(BANDS, LENGTHS, LENGTHS, TILES, TILES)
def test_blocks_of_a_band(band: Band, rows: int, columns: int, tile: int, block: int):
    seen = visible(band, rows, columns)
    for first in range(0, rows, tile):
        found = span(band, first, tile, rows, block, columns)
        part = seen[first : first + tile]
        check(found, part, block)
        blocks = sum(part[:, i : i + block].any() for i in range(0, columns, block))
        # A tile that only sees columns past the end is given the last block, if that is cut.
        assert found.stop - found.start in (blocks, 1)


@given(BANDS, LENGTHS, LENGTHS)
def test_the_band_seen_from_the_keys(band: Band, rows: int, columns: int):
    turned = visible(transposed(band), columns, rows)
    np.testing.assert_array_equal(turned, visible(band, rows, columns).T)


@given(st.lists(st.integers(0, 3), min_size=16, max_size=16), st.booleans(), BANDS)
def test_blocks_of_segments_in_a_band(ids: list[int], is_sorted: bool, band: Band):
    row_ids = np.array([sorted(ids) if is_sorted else ids], np.int32)
    column_ids = np.repeat(row_ids, 2, axis=1)
    seen = visible(band, 16, 32) & (row_ids[0][:, None] == column_ids[0][None, :])
    found = np.asarray(segment_spans(jnp.asarray(row_ids), jnp.asarray(column_ids), 4, 8))
    for index in range(4):
        of_segments = Span(*map(int, found[0, index]))
        of_band = span(band, 4 * index, 4, 16, 8, 32)
        check(of_segments.meet(of_band), seen[4 * index : 4 * index + 4], 8)


def test_a_causal_tile_has_full_blocks_and_then_masked_ones():
    causal = Band(right=0)
    assert span(causal, 128, 128, 1024, 64, 1024) == Span(0, 0, 2, 4)
    assert span(Band(100, 0), 256, 64, 1024, 64, 1024) == Span(2, 4, 4, 5)
