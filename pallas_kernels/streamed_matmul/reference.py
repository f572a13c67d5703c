"""The product as XLA computes it: all weights come to the device, then one dot.

It is what the kernel is measured against, and what runs where there is no kernel. Between
the transfer of a weight matrix and its own dot XLA finds nothing to overlap.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.streamed_matmul.problem import Problem
from pallas_kernels.targets import Target


def refusal(problem: Problem, target: Target) -> str | None:
    """It takes everything."""
    del problem, target
    return None


def precision(dtype: str) -> lax.Precision | None:
    """Products of float32 keep its 24 bits: who wants fewer of them passes bfloat16."""
    return lax.Precision.HIGHEST if dtype == "float32" else None


def forward(
    problem: Problem,
    target: Target,
    x: jax.Array,
    w: jax.Array,
    w_scales: jax.Array | None,
    accumulate: DTypeLike = jnp.float32,
) -> jax.Array:
    """The product, with the signature that all implementations have.

    Args:
      x: [m, k].
      w: [k, n], or [n, k] where `problem.transposed`; in host memory where `problem.on_host`.
      w_scales: f32[n] where `problem.scaled`, else None.
      accumulate: type of the sums.

    Returns:
      `problem.out_dtype`[m, n] in the device's memory.
    """
    del target
    if problem.on_host:
        w = jax.device_put(w, jax.memory.Space.Device)
    sums = lax.dot_general(
        x,
        w.astype(x.dtype),
        (((1,), (1 if problem.transposed else 0,)), ((), ())),
        precision=precision(problem.dtype),
        preferred_element_type=accumulate,
    )
    if w_scales is not None:
        sums *= w_scales.astype(accumulate)
    return sums.astype(problem.out_dtype)
