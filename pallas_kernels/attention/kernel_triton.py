"""FlashAttention-2 through Triton, for GPUs from Ampere to Hopper.

For the GPUs that Pallas' Mosaic backend does not compile for: it wants Hopper at least. It
needs ``pip install 'memplan[triton]'``, and a jax that jax-triton can be imported under;
without, `refusal` says what is missing. The programs are in `triton_programs`, which is
imported when there is something to compile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.problem import Problem, Segments
from pallas_kernels.targets import Target

# What Triton is told to compile for.
_COMPUTE_CAPABILITIES = {"sm80": 80, "sm86": 86, "sm89": 89, "sm90": 90}

_NO_LIMIT = -1


@dataclass(frozen=True)
class Blocks:
    """How one program is cut and compiled.

    Attributes:
      q, kv: rows of a block, powers of 2 of at least 16.
      warps: of 32 threads.
      stages: of the software pipeline that loads a block while others are computed with.
    """

    q: int
    kv: int
    warps: int
    stages: int


def refusal(problem: Problem, target: Target) -> str | None:
    """Why the kernel does not take the problem, or None."""
    if target.platform != "gpu":
        return f"it needs a GPU, which {target} is not."
    if target.generation not in _COMPUTE_CAPABILITIES:
        known = ", ".join(_COMPUTE_CAPABILITIES)
        return f"it was compiled for {known} and never for {target}."
    if _width(problem) > 256:
        return f"head_dim = {problem.head_dim} is over 256: a block of keys is too large."
    if problem.q_heads > 65535 or problem.batch > 65535:
        return "a grid has 65535 programs at most along heads and along sequences."
    return _import_failure()


@cache
def _import_failure() -> str | None:
    try:
        import_module("jax_triton")
        import_module("pallas_kernels.attention.triton_programs")
    except Exception as error:  # jax-triton reaches into jax: what breaks there is of any type.
        wanted = "jax-triton 0.4.1 runs with triton 3.7 and jax 0.11.2: pip install 'memplan[triton]'"
        return f"jax-triton cannot be imported ({type(error).__name__}: {error}). {wanted}."
    return None


def forward(
    problem: Problem,
    target: Target,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp; `reference.forward` documents the arguments."""
    lse = jax.ShapeDtypeStruct((problem.batch, problem.q_heads, problem.q_len), jnp.float32)
    blocks = forward_blocks(problem, target)
    grid = _cdiv(problem.q_len, blocks.q), problem.q_heads, problem.batch
    out_types = (jax.typeof(q), lse)
    ids = _ids(q, segments)
    return _call("forward", problem, target, blocks, grid, out_types, q, k, v, *ids)


def backward(
    problem: Problem,
    target: Target,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    lse: jax.Array,
    delta: jax.Array,
    d_out: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of the three inputs; `reference.backward` documents the arguments."""
    given = (q, k, v, d_out, lse, delta, *_ids(q, segments))
    blocks = query_blocks(problem, target)
    grid = _cdiv(problem.q_len, blocks.q), problem.q_heads, problem.batch
    d_q = _call("query_gradients", problem, target, blocks, grid, jax.typeof(q), *given)
    blocks = key_blocks(problem, target)
    grid = _cdiv(problem.kv_len, blocks.kv), problem.kv_heads, problem.batch
    types = jax.typeof(k), jax.typeof(v)
    d_k, d_v = _call("key_gradients", problem, target, blocks, grid, types, *given)
    return d_q, d_k, d_v


def _ids(q: jax.Array, segments: Segments | None) -> tuple[jax.Array, jax.Array]:
    """Without segments anything does: the programs do not read it."""
    return (q, q) if segments is None else (segments.q, segments.kv)


def _call(
    program: str,
    problem: Problem,
    target: Target,
    blocks: Blocks,
    grid: tuple[int, int, int],
    out_type: Any,
    *given: jax.Array,
) -> Any:
    band = problem.band
    return import_module("jax_triton").triton_call(
        *given,
        kernel=getattr(import_module("pallas_kernels.attention.triton_programs"), program),
        out_type=out_type,
        grid=grid,
        name=f"attention_{program}",
        num_warps=blocks.warps,
        num_stages=blocks.stages,
        compute_capability=_COMPUTE_CAPABILITIES[target.generation],
        Q_LEN=problem.q_len,
        KV_LEN=problem.kv_len,
        Q_HEADS=problem.q_heads,
        KV_HEADS=problem.kv_heads,
        HEAD_DIM=problem.head_dim,
        WIDTH=_width(problem),
        LEFT=_NO_LIMIT if band.left is None else band.left,
        RIGHT=_NO_LIMIT if band.right is None else band.right,
        OFFSET=band.offset,
        SCALE=problem.scale,
        SOFT_CAP=problem.soft_cap or 0.0,
        SEGMENTS=problem.segments,
        BLOCK_Q=blocks.q,
        BLOCK_KV=blocks.kv,
    )


def _width(problem: Problem) -> int:
    """Of a block in shared memory and registers: a power of 2."""
    return max(16, 1 << (problem.head_dim - 1).bit_length())


def _cdiv(extent: int, size: int) -> int:
    return -(-extent // size)


# --- blocks -------------------------------------------------------------------------------


def forward_blocks(problem: Problem, target: Target) -> Blocks:
    return Blocks(64, 32, 4, 2)


def query_blocks(problem: Problem, target: Target) -> Blocks:
    return Blocks(64, 32, 4, 2)


def key_blocks(problem: Problem, target: Target) -> Blocks:
    return Blocks(32, 64, 4, 2)
