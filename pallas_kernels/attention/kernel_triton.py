"""FlashAttention-2 through Triton, for GPUs from Ampere to Hopper.

For the GPUs that Pallas' Mosaic backend does not compile for: it wants Hopper at least. It
needs ``pip install 'memplan[triton]'``, and a jax that jax-triton works with, for it reaches
into private parts; where it cannot be imported, `refusal` gives the reason. The programs are
in `triton_programs`, which is imported when there is something to compile.
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


# What one program may have of shared memory on sm86 and sm89, the least of all, in bytes.
# https://docs.nvidia.com/cuda/cuda-c-programming-guide, "Technical Specifications per Compute
# Capability".
AMPERE_SHARED_BYTES = 99 << 10


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


# By program and width of a block, the largest blocks of which ptxas (of triton 3.7.1) spills
# no register, or next to none: sums, scores and two operands share 255 registers a thread.
# None of them was timed.
_AMPERE = {
    ("forward", 64): Blocks(128, 64, 4, 3),
    ("forward", 128): Blocks(128, 64, 8, 3),
    ("forward", 256): Blocks(64, 32, 4, 2),
    ("query_gradients", 64): Blocks(128, 64, 8, 2),
    ("query_gradients", 128): Blocks(64, 64, 4, 2),
    ("query_gradients", 256): Blocks(64, 32, 8, 1),
    ("key_gradients", 64): Blocks(32, 128, 8, 2),
    ("key_gradients", 128): Blocks(64, 64, 8, 2),
    ("key_gradients", 256): Blocks(32, 32, 8, 2),
}
_HOPPER = {
    ("forward", 64): Blocks(128, 128, 8, 2),
    ("forward", 128): Blocks(128, 128, 8, 2),
    ("forward", 256): Blocks(128, 64, 8, 2),
    ("query_gradients", 64): Blocks(128, 64, 8, 2),
    ("query_gradients", 128): Blocks(128, 64, 8, 2),
    ("query_gradients", 256): Blocks(128, 32, 8, 2),
    ("key_gradients", 64): Blocks(64, 128, 8, 2),
    ("key_gradients", 128): Blocks(32, 128, 8, 2),
    # Fewer than 64 keys would not spill, and not use wgmma.
    ("key_gradients", 256): Blocks(32, 64, 8, 2),
}
# float32 has no tensor cores: operands come as single elements, many at a time.
_SINGLE = {
    ("forward", 64): Blocks(64, 32, 8, 2),
    ("forward", 128): Blocks(64, 32, 8, 2),
    ("forward", 256): Blocks(32, 16, 4, 2),
    ("query_gradients", 64): Blocks(64, 32, 8, 2),
    ("query_gradients", 128): Blocks(32, 32, 4, 2),
    ("query_gradients", 256): Blocks(32, 16, 8, 1),
    ("key_gradients", 64): Blocks(32, 32, 8, 2),
    ("key_gradients", 128): Blocks(32, 32, 8, 2),
    ("key_gradients", 256): Blocks(16, 16, 8, 1),
}


def blocks_of(program: str, problem: Problem, target: Target) -> Blocks:
    """The blocks of one of the three programs."""
    table = _HOPPER if target.generation == "sm90" else _AMPERE
    if problem.dtype == "float32":
        table = _SINGLE
    return table[program, max(64, _width(problem))]


def refusal(problem: Problem, target: Target) -> str | None:
    """Why the kernel does not take the problem, or None."""
    if target.platform != "gpu":
        return f"it needs a GPU, which {target} is not."
    if target.generation not in _COMPUTE_CAPABILITIES:
        known = ", ".join(_COMPUTE_CAPABILITIES)
        return f"its blocks are chosen for {known}; {target} would want others."
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
        return (
            f"jax-triton cannot be imported ({type(error).__name__}: {error}): "
            "pip install 'memplan[triton]'. Version 0.4.1 was seen working with triton 3.7.1, "
            "under jax 0.11.2 and 0.12.0.1."
        )
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
    blocks = blocks_of("forward", problem, target)
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
    blocks = blocks_of("query_gradients", problem, target)
    grid = _cdiv(problem.q_len, blocks.q), problem.q_heads, problem.batch
    d_q = _call("query_gradients", problem, target, blocks, grid, jax.typeof(q), *given)
    blocks = blocks_of("key_gradients", problem, target)
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
