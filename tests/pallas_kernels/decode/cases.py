"""Random calls of decode attention, an oracle for them, and the rule that outputs are held to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode import reference
from pallas_kernels.decode.problem import Cache, Problem

GARBAGE = (-1, -(2**31), 2**31 - 1, 10**6)


@dataclass(frozen=True)
class Case:
    """A problem with numbers; the cache is poisoned wherever it must not be read."""

    problem: Problem
    q: jax.Array
    cache: Cache

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `decode_attention` besides `q`, `k`, `v` and `lengths`."""
        return {
            "block_tables": self.cache.block_tables,
            "k_scales": self.cache.k_scales,
            "v_scales": self.cache.v_scales,
            "window": self.problem.window,
            "scale": self.problem.scale,
            "soft_cap": self.problem.soft_cap,
        }

    def arguments(self) -> tuple[jax.Array, ...]:
        return self.q, self.cache.k, self.cache.v, self.cache.lengths


def make(
    lengths: list[int],
    *,
    q_len: int = 1,
    group: int = 2,
    kv_heads: int = 2,
    head_dim: int = 128,
    page_size: int = 16,
    max_pages: int = 4,
    paged: bool = True,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    spare_pages: int = 3,
    seed: int = 0,
) -> Case:
    """Random numbers for sequences of these lengths, in a pool whose pages are shuffled.

    Table entries past a length, or wholly before a window, are garbage. Tokens past a length, pages
    wholly before a window and pages of no sequence are NaN where the type has it, and so are all of
    their scales.
    """
    rng = np.random.default_rng(seed)
    kv_dtype = kv_dtype or dtype
    batch = len(lengths)
    max_pages = max_pages if paged else 1
    num_pages = batch * max_pages + spare_pages if paged else batch
    problem = Problem(
        batch=batch,
        q_len=q_len,
        q_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        num_pages=num_pages,
        page_size=page_size,
        max_pages=max_pages,
        paged=paged,
        dtype=dtype,
        kv_dtype=kv_dtype,
        window=window,
        scale=1 / math.sqrt(head_dim),
        soft_cap=soft_cap,
    )
    pages = rng.permutation(num_pages)[: batch * max_pages].reshape(batch, max_pages)
    if not paged:
        pages = np.arange(batch)[:, None]
    used = np.zeros((num_pages, page_size), bool)
    tables = rng.choice(GARBAGE, pages.shape)
    for row, length in enumerate(lengths):
        begin = 0 if window is None else max(length - q_len - window, 0)
        for page in range(begin // page_size, -(-length // page_size)):
            tables[row, page] = pages[row, page]
            used[pages[row, page], : length - page * page_size] = True

    shape = (num_pages, kv_heads, page_size, head_dim)
    used = used[:, None, :, None]

    def pool() -> jax.Array:
        if kv_dtype == "int8":
            return jnp.asarray(np.where(used, rng.integers(-127, 128, shape), 127), jnp.int8)
        numbers = np.where(used, rng.standard_normal(shape), np.nan)
        return jnp.asarray(numbers.astype(np.float32)).astype(kv_dtype)

    def scales() -> jax.Array | None:
        if kv_dtype == dtype:
            return None
        size = 1 / 64 if kv_dtype == "int8" else 1
        numbers = size * rng.uniform(0.5, 1.5, shape[:3])
        return jnp.asarray(np.where(used[..., 0], numbers, np.nan), jnp.float32)

    q = rng.standard_normal((batch, q_len, group * kv_heads, head_dim)).astype(np.float32)
    cache = Cache(
        pool(),
        pool(),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(tables, jnp.int32) if paged else None,
        scales(),
        scales(),
    )
    return Case(problem, jnp.asarray(q).astype(dtype), cache)


def same_dtype(case: Case) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp of the reference, in the types that the kernels have."""
    return jax.jit(reference.attend, static_argnums=0)(case.problem, case.q, case.cache)


def oracle(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp in float64, one query and key at a time, without a mask."""
    problem = case.problem
    k, v, q = (
        np.asarray(x.astype(jnp.float32), np.float64) for x in (case.cache.k, case.cache.v, case.q)
    )
    if case.cache.k_scales is not None and case.cache.v_scales is not None:
        k = k * np.asarray(case.cache.k_scales, np.float64)[..., None]
        v = v * np.asarray(case.cache.v_scales, np.float64)[..., None]
    out = np.zeros(q.shape)
    lse = np.full((problem.batch, problem.q_heads, problem.q_len), -np.inf)
    for row, length in enumerate(np.asarray(case.cache.lengths)):
        for i in range(problem.q_len):
            position = length - problem.q_len + i
            start = 0 if problem.window is None else max(0, position - problem.window)
            tokens = np.arange(start, position + 1)
            if not tokens.size:
                continue
            pages = np.full(tokens.shape, row)
            if case.cache.block_tables is not None:
                table = np.asarray(case.cache.block_tables)[row]
                pages = table[tokens // problem.page_size]
            slots = tokens % problem.page_size
            for head in range(problem.q_heads):
                kv_head = head // problem.group
                scores = k[pages, kv_head, slots] @ q[row, i, head] * problem.scale
                if problem.soft_cap is not None:
                    scores = problem.soft_cap * np.tanh(scores / problem.soft_cap)
                top = scores.max()
                weights = np.exp(scores - top)
                lse[row, head, i] = top + np.log(weights.sum())
                out[row, i, head] = weights @ v[pages, kv_head, slots] / weights.sum()
    return out, lse


def check(case: Case, got: tuple[Any, Any], same_dtype: tuple[Any, Any]) -> None:
    """|got - oracle| <= 2 |reference of the same type - oracle| + a little, in the max norm."""
    for name, mine, theirs, true in zip(("out", "lse"), got, same_dtype, oracle(case), strict=True):
        mine, theirs = (np.asarray(x).astype(np.float64) for x in (mine, theirs))
        blind = np.isneginf(true)
        np.testing.assert_array_equal(np.isneginf(mine), blind, f"-inf of {name}")
        mine, theirs, true = (np.where(blind, 0, x) for x in (mine, theirs, true))
        assert np.isfinite(mine).all(), f"{name} has what is not finite"
        allowed = 2 * np.abs(theirs - true).max() + 2e-6 * max(1, np.abs(true).max())
        worst = np.abs(mine - true).max()
        assert worst <= allowed, f"{name}: off by {worst:.3g}, allowed is {allowed:.3g}"
