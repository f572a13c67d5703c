"""Ranges of blocks, against masks of all pairs."""

import dataclasses

import hypothesis
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st

from pallas_kernels.attention.blocks import (
    Ranges,
    count_items,
    key_ranges,
    paths,
    query_ranges,
)
from pallas_kernels.attention.problem import Band, Problem, Segments

PLAIN = Problem(1, 10, 10, 1, 1, 64, "bfloat16", Band(), 1.0)


def visible(problem: Problem) -> npt.NDArray[np.bool_]:
    """bool[q_len, kv_len]: where a query sees a key, by position."""
    band = problem.band
    at = np.arange(problem.q_len)[:, None] + band.offset
    key = np.arange(problem.kv_len)
    left = at - key <= (np.inf if band.left is None else band.left)
    right = key - at <= (np.inf if band.right is None else band.right)
    return left & right


def tiles(seen: npt.NDArray[np.bool_], rows: int, columns: int) -> npt.NDArray[np.bool_]:
    """bool[row blocks, column blocks, rows, columns], with nothing seen in what fills blocks."""
    height, width = (-(-n // size) for n, size in zip(seen.shape, (rows, columns), strict=True))
    padded = np.zeros((height * rows, width * columns), bool)
    padded[: seen.shape[0], : seen.shape[1]] = seen
    return padded.reshape(height, rows, width, columns).swapaxes(1, 2)


def check(
    ranges: Ranges, sequence: int, seen: npt.NDArray[np.bool_], size: tuple[int, int]
) -> None:
    """What is seen lies within the ranges; within the full ones all is, of rows that there are."""
    blocks = tiles(seen, *size)
    ones = tiles(np.ones_like(seen), *size)
    some = blocks.any(axis=(2, 3))
    for row in range(blocks.shape[0]):
        r = Ranges(*(int(x[sequence if x.shape[0] > 1 else 0, row]) for x in ranges))
        assert 0 <= r.first < r.last <= blocks.shape[1]
        inside = np.zeros(blocks.shape[1], bool)
        inside[r.first : r.last] = True
        assert not some[row][~inside].any()
        for column in range(max(r.first, r.full_first), min(r.last, r.full_last)):
            there = ones[row, column].any(axis=1)
            assert blocks[row, column][there].all()


@st.composite
def problems(draw: st.DrawFn) -> tuple[Problem, int, int]:
    sides = st.none() | st.integers(0, 20)
    lengths = st.integers(1, 40)
    band = Band(draw(sides), draw(sides), draw(st.integers(-30, 30)))
    problem = dataclasses.replace(PLAIN, q_len=draw(lengths), kv_len=draw(lengths), band=band)
    return problem, draw(st.integers(1, 12)), draw(st.integers(1, 12))


@hypothesis.given(problems())
def test_bands(drawn: tuple[Problem, int, int]) -> None:
    problem, q, kv = drawn
    seen = visible(problem)
    check(key_ranges(problem, None, q, kv), 0, seen, (q, kv))
    check(query_ranges(problem, None, q, kv), 0, seen.T, (kv, q))


@hypothesis.given(problems(), st.integers(0, 99), st.booleans())
@hypothesis.settings(max_examples=40)
def test_segments(drawn: tuple[Problem, int, int], seed: int, is_packed: bool) -> None:
    # Of one size, or each example would be compiled anew.
    problem, q, kv = dataclasses.replace(drawn[0], q_len=23, kv_len=30), 5, 4
    rng = np.random.default_rng(seed)
    q_ids, kv_ids = (rng.integers(0, 4, (2, n)) for n in (problem.q_len, problem.kv_len))
    if is_packed:
        q_ids.sort(axis=1)
        kv_ids.sort(axis=1)
    problem = dataclasses.replace(problem, batch=2, segments=True)
    segments = Segments(jnp.asarray(q_ids, jnp.int32), jnp.asarray(kv_ids, jnp.int32))
    band = visible(problem)
    for sequence in range(2):
        seen = band & (q_ids[sequence][:, None] == kv_ids[sequence])
        check(key_ranges(problem, segments, q, kv), sequence, seen, (q, kv))
        check(query_ranges(problem, segments, q, kv), sequence, seen.T, (kv, q))


def test_packed_segments_are_skipped() -> None:
    ids = jnp.repeat(jnp.arange(4, dtype=jnp.int32), 4)[None]
    problem = dataclasses.replace(PLAIN, q_len=16, kv_len=16, segments=True)
    ranges = key_ranges(problem, Segments(ids, ids), 4, 4)
    assert ranges.first.tolist() == [[0, 1, 2, 3]]
    assert ranges.last.tolist() == [[1, 2, 3, 4]]
    assert ranges.full_last.tolist() == [[1, 2, 3, 4]]


def test_causal_blocks_are_skipped_and_the_diagonal_is_masked() -> None:
    problem = dataclasses.replace(PLAIN, q_len=16, kv_len=16, band=Band(None, 0, 0))
    ranges = key_ranges(problem, None, 4, 4)
    assert ranges.last.tolist() == [[1, 2, 3, 4]]
    assert ranges.full_last.tolist() == [[0, 1, 2, 3]]
    assert count_items(problem, 4, 4, "queries") == (6, 4, 4)
    assert paths(ranges) == (True, True)


@pytest.mark.parametrize(("kv_len", "expected"), [(16, (True, False)), (14, (True, True))])
def test_only_a_ragged_end_of_everything_needs_a_mask(
    kv_len: int, expected: tuple[bool, bool]
) -> None:
    problem = dataclasses.replace(PLAIN, q_len=14, kv_len=kv_len)
    assert paths(key_ranges(problem, None, 4, 4)) == expected
