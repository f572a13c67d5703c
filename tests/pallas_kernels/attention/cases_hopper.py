"""Small problems for the Hopper kernels on the CPU, and what their numbers have to be."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import (
    gpu_ring,
    kernel_gpu,
    kernel_gpu_dkv,
    kernel_gpu_dq,
    reference,
)
from pallas_kernels.attention.kernel_gpu_dkv import Split
from pallas_kernels.attention.problem import Band, Problem, Segments
from tests.pallas_kernels.interpreted import interpreting

_FORWARD = kernel_gpu.Config(64, 64, 2)
_D_QUERY = kernel_gpu_dq.Config(64, 64, 2, 1)
_BY_KEYS = kernel_gpu_dkv.Config(64, 64, 2, Split.KEYS)
_BY_GRADIENT = kernel_gpu_dkv.Config(64, 64, 2, Split.GRADIENTS)


@dataclass(frozen=True)
class Case:
    """A problem, and how each kernel is cut for it.

    Attributes:
      forward, d_query, d_keys: configurations.
      sorted_ids: whether ids of segments ascend, as in a packed batch.
    """

    problem: Problem
    forward: kernel_gpu.Config = _FORWARD
    d_query: kernel_gpu_dq.Config = _D_QUERY
    d_keys: kernel_gpu_dkv.Config = _BY_KEYS
    sorted_ids: bool = True


def _problem(**fields: Any) -> Problem:
    defaults: dict[str, Any] = {
        "batch": 1,
        "q_len": 256,
        "kv_len": 256,
        "q_heads": 2,
        "kv_heads": 2,
        "head_dim": 64,
        "dtype": "bfloat16",
        "band": Band(),
        "scale": 0.125,
    }
    return Problem(**(defaults | fields))


CASES = {
    "full": Case(_problem(q_heads=1, kv_heads=1)),
    "causal, one key/value head": Case(
        _problem(q_len=192, kv_len=192, band=Band(right=0), kv_heads=1),
        forward=kernel_gpu.Config(64, 64, 3),
        d_query=kernel_gpu_dq.Config(64, 64, 2, 2),
    ),
    "ragged band, two sequences": Case(
        _problem(batch=2, q_len=200, kv_len=333, band=Band(70, 10), kv_heads=1),
        d_keys=kernel_gpu_dkv.Config(64, 64, 3, Split.KEYS),
    ),
    "queries before the keys, some see none": Case(
        _problem(q_len=264, kv_len=200, band=Band(right=0, offset=-40), head_dim=32),
        d_keys=kernel_gpu_dkv.Config(64, 128, 2, Split.KEYS),
    ),
    "queries after the keys, soft cap": Case(
        _problem(q_len=136, kv_len=236, band=Band(right=0, offset=100), soft_cap=2.0)
    ),
    "segments in a window": Case(
        _problem(
            batch=2,
            q_len=300,
            kv_len=472,
            band=Band(100, 0, 40),
            kv_heads=1,
            head_dim=96,
            segments=True,
        )
    ),
    "segments in any order": Case(
        _problem(q_len=200, kv_len=264, head_dim=32, segments=True), sorted_ids=False
    ),
    "half precision, negative scale": Case(
        _problem(q_len=128, kv_len=128, dtype="float16", scale=-0.2, band=Band(left=30))
    ),
    "group divided": Case(
        _problem(band=Band(right=0), q_heads=4, kv_heads=1, soft_cap=5.0),
        d_keys=kernel_gpu_dkv.Config(64, 64, 3, Split.KEYS, 2),
    ),
    "by gradient": Case(
        _problem(q_len=200, kv_len=232, band=Band(70, 10), q_heads=1, kv_heads=1),
        d_keys=_BY_GRADIENT,
    ),
    "by gradient, group divided": Case(
        _problem(band=Band(right=0), q_heads=4, kv_heads=1, soft_cap=5.0),
        d_keys=kernel_gpu_dkv.Config(64, 64, 3, Split.GRADIENTS, 2),
    ),
    "by gradient, segments, heads of 256": Case(
        _problem(q_len=264, kv_len=264, band=Band(right=0), head_dim=256, segments=True),
        d_keys=_BY_GRADIENT,
    ),
}


@dataclass(frozen=True)
class Arrays:
    q: jax.Array
    k: jax.Array
    v: jax.Array
    d_out: jax.Array
    segments: Segments | None

    def each(self, change: Callable[[jax.Array], jax.Array]) -> Arrays:
        """All but the segments, changed."""
        q, k, v, d_out = map(change, (self.q, self.k, self.v, self.d_out))
        return Arrays(q, k, v, d_out, self.segments)


def arrays(case: Case) -> Arrays:
    problem, random = case.problem, np.random.default_rng(0)

    def normal(length: int, heads: int) -> jax.Array:
        shape = (problem.batch, length, heads, problem.head_dim)
        return jnp.asarray(random.normal(size=shape), problem.dtype)

    def ids(length: int) -> jax.Array:
        drawn = random.integers(0, 4, (problem.batch, length))
        return jnp.asarray(np.sort(drawn) if case.sorted_ids else drawn // 3, jnp.int32)

    segments = Segments(ids(problem.q_len), ids(problem.kv_len)) if problem.segments else None
    return Arrays(
        normal(problem.q_len, problem.q_heads),
        normal(problem.kv_len, problem.kv_heads),
        normal(problem.kv_len, problem.kv_heads),
        normal(problem.q_len, problem.q_heads),
        segments,
    )


def _delta(out: jax.Array, d_out: jax.Array) -> jax.Array:
    return jnp.einsum("bthd,bthd->bht", out.astype(jnp.float32), d_out.astype(jnp.float32))


def by_reference(problem: Problem, a: Arrays) -> dict[str, np.ndarray]:
    nowhere: Any = None

    @jax.jit
    def results(q: Any, k: Any, v: Any, d_out: Any, segments: Any) -> Any:
        out, lse = reference.attend(problem, q, k, v, segments)
        rest = (q, k, v, segments, lse, _delta(out, d_out), d_out)
        return out, lse, *reference.backward(problem, nowhere, *rest)

    return _named(*results(a.q, a.k, a.v, a.d_out, a.segments))


def by_kernels(case: Case, a: Arrays) -> dict[str, np.ndarray]:
    problem = case.problem
    out, lse = kernel_gpu.forward(problem, case.forward, a.q, a.k, a.v, a.segments)
    rest = (a.q, a.k, a.v, a.segments, lse, _delta(out, a.d_out), a.d_out)
    d_q = kernel_gpu_dq.query_gradient(problem, case.d_query, *rest)
    d_k, d_v = kernel_gpu_dkv.key_gradients(problem, case.d_keys, *rest)
    return _named(out, lse, d_q, d_k, d_v)


def _named(*results: jax.Array) -> dict[str, np.ndarray]:
    names = ("out", "lse", "d_q", "d_k", "d_v")
    return {n: np.asarray(x, np.float64) for n, x in zip(names, results, strict=True)}


def check(name: str) -> None:
    """At most twice as far from f32 as the reference is in the same precision."""
    case = CASES[name]
    given = arrays(case)
    exact = by_reference(case.problem, given.each(lambda x: x.astype(jnp.float32)))
    rounded = by_reference(case.problem, given)
    with interpreting():
        found = by_kernels(case, given)
    for what, expected in exact.items():
        np.testing.assert_array_equal(np.isneginf(found[what]), np.isneginf(expected), what)
        finite = np.isfinite(expected)
        allowed = 2 * np.abs(rounded[what] - expected)[finite].max() + 1e-5
        error = np.abs(found[what] - expected)[finite].max()
        assert error <= allowed, f"{name}: {what} is off by {error}, of {allowed} allowed"


def check_neighbours() -> None:
    """One sequence is NaN all over: the other's tiles that reach past its end do not see it."""
    case = CASES["ragged band, two sequences"]
    given = arrays(case)
    poisoned = given.each(lambda x: x.at[1].set(jnp.nan))
    with interpreting():
        clean, found = by_kernels(case, given), by_kernels(case, poisoned)
    for what, expected in clean.items():
        np.testing.assert_array_equal(found[what][0], expected[0], what)


# --- planted mistakes ---------------------------------------------------------------------


def _nothing(ring: gpu_ring.Ring, step: Any) -> None:
    """No wait, or no release."""


def _release_at_once(ring: gpu_ring.Ring, step: Any) -> None:
    _AWAIT_FULL(ring, step)
    _RELEASE(ring, step)


_AWAIT_FULL = gpu_ring.Ring.await_full
_RELEASE = gpu_ring.Ring.release

MISTAKES: dict[str, dict[str, Callable[..., None]]] = {
    "reads without waiting": {"await_full": _nothing},
    "fills without waiting": {"await_empty": _nothing},
    "gives back before its products are done": {
        "await_full": _release_at_once,
        "release": _nothing,
    },
}


def make(mistake: str, kernel: str) -> None:
    """Runs one kernel with one mistake in it."""
    case = CASES["by gradient" if kernel == "by gradient" else "full"]
    a = arrays(case)
    statistics = jnp.zeros((a.q.shape[0], a.q.shape[2], a.q.shape[1]), jnp.float32)
    rest = (a.q, a.k, a.v, a.segments, statistics, statistics, a.d_out)
    runs = {
        "forward": lambda: kernel_gpu.forward(case.problem, case.forward, a.q, a.k, a.v, None),
        "d_query": lambda: kernel_gpu_dq.query_gradient(case.problem, case.d_query, *rest),
        "d_keys": lambda: kernel_gpu_dkv.key_gradients(case.problem, case.d_keys, *rest),
        "by gradient": lambda: kernel_gpu_dkv.key_gradients(case.problem, case.d_keys, *rest),
    }
    with contextlib.ExitStack() as stack:
        for method, mistaken in MISTAKES[mistake].items():
            stack.enter_context(mock.patch.object(gpu_ring.Ring, method, mistaken))
        stack.enter_context(interpreting())
        jax.block_until_ready(runs[kernel]())
