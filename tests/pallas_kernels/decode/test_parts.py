"""Attention to a cache in several arrays is that to all of it in one."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode import Cache, decode_attention, decode_attention_in_parts
from pallas_kernels.errors import KernelArgumentError
from tests.pallas_kernels.decode import cases

PAGE = 16


def in_parts(case: cases.Case, count: int, seed: int = 0) -> list[Cache]:
    """Whole pages before the queries at random in some of `count` parts, in any order; the rest in
    the last one. Each part has pools of its own, where what must not be read is no number."""
    rng = np.random.default_rng(seed)
    cache, problem = case.cache, case.problem
    lengths, tables = np.asarray(cache.lengths), np.asarray(cache.block_tables)
    rows: list[list[list[int]]] = [[] for _ in range(count)]
    held = np.zeros((count, problem.batch), np.int32)
    for row, length in enumerate(lengths):
        whole = max(0, length - problem.q_len) // PAGE
        of = [*rng.integers(0, count, whole), *[count - 1] * (-(-length // PAGE) - whole)]
        for part in range(count):
            pages = [int(tables[row, n]) for n, where in enumerate(of) if where == part]
            is_last = part == count - 1
            held[part, row] = length - sum(held[:-1, row]) if is_last else len(pages) * PAGE
            rows[part].append(pages if is_last else rng.permutation(pages).tolist())
    return [_part(cache, rows[part], held[part]) for part in range(count)]


@partial(jax.jit, static_argnames=("scale", "soft_cap"))
def attend(q: jax.Array, parts: list[Cache], **options: Any) -> jax.Array:
    return decode_attention_in_parts(q, parts, **options)


def _part(cache: Cache, rows: list[list[int]], lengths: np.ndarray) -> Cache:
    pages = sorted({page for row in rows for page in row}, reverse=True)
    most = max(1, *map(len, rows))
    table = [[pages.index(p) for p in row] + [-1] * (most - len(row)) for row in rows]

    def own(pool: Any) -> Any:
        return None if pool is None else np.asarray(pool)[[*pages, pool.shape[0] - 1]]

    return Cache(
        own(cache.k), own(cache.v), jnp.asarray(lengths, jnp.int32), jnp.asarray(table, jnp.int32),
        own(cache.k_scales), own(cache.v_scales),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(
    "made",
    [
        {"lengths": [64, 1, 0, 33], "q_len": 1},
        {"lengths": [64, 2, 50], "q_len": 5, "group": 3},
        {"lengths": [40, 64], "q_len": 2, "soft_cap": 2.0, "group": 1},
        {"lengths": [64, 47], "q_len": 1, "kv_dtype": "int8"},
    ],
)
def test_parts_are_the_whole(made: dict[str, Any], count: int):
    case = cases.make(**made, dtype="float32", page_size=PAGE)
    whole = decode_attention(*case.arguments(), **case.options())
    found = attend(
        case.q, in_parts(case, count), scale=case.problem.scale, soft_cap=case.problem.soft_cap
    )
    np.testing.assert_allclose(found, whole, rtol=2e-5, atol=2e-6)


def test_narrow_types_are_merged_in_float32():
    case = cases.make([64, 64, 64], page_size=PAGE)
    whole = np.asarray(decode_attention(*case.arguments(), **case.options()), np.float32)
    found = attend(case.q, in_parts(case, 3))
    assert found.dtype == case.q.dtype
    assert np.abs(np.asarray(found, np.float32) - whole).max() < 2**-7 * np.abs(whole).max()


def test_every_query_sees_all_of_an_earlier_part():
    case = cases.make([48], q_len=4, dtype="float32", page_size=PAGE)
    changed = in_parts(case, 2, seed=1)
    zeros = Cache(
        changed[0].k, jnp.zeros_like(changed[0].v), changed[0].lengths, changed[0].block_tables
    )
    before, after = (
        np.asarray(attend(case.q, [first, changed[1]])) for first in (changed[0], zeros)
    )
    assert int(changed[0].lengths[0]) > 0
    assert (np.abs(before - after).max(axis=(0, 2, 3)) > 1e-3).all()


def test_what_is_wrong_is_said():
    case = cases.make([20, 20], page_size=PAGE)
    with pytest.raises(KernelArgumentError, match="parts is empty: expected one part or more"):
        decode_attention_in_parts(case.q, [])
    good = in_parts(case, 2)
    flat = Cache(good[0].k[0], good[0].v, good[0].lengths, good[0].block_tables)
    with pytest.raises(KernelArgumentError, match="k is of shape"):
        decode_attention_in_parts(case.q, [flat, good[1]])
