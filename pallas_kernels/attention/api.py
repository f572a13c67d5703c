"""`attention`: the arguments are checked here, and an implementation is picked.

    attention ─► Problem ─► choose(tpu | hopper | triton | xla) ─► custom_vjp ┬─► forward
                                                                            └─► backward

An implementation is a module with `refusal`, `forward` and `backward`, whose signatures
`reference` documents. Each is one array program over [batch, ...]; under `vmap` the mapped axis
joins the batch, so that kernels never see it.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from pallas_kernels.attention import hopper, kernel_triton, reference, tpu
from pallas_kernels.attention.problem import Band, Problem, Segments
from pallas_kernels.choosing import choose
from pallas_kernels.errors import KernelArgumentError
from pallas_kernels.result_types import alike
from pallas_kernels.targets import Target, current_target

_OP = "attention"


class Implementation(Protocol):
    """A module that implements attention; `reference` documents the signatures."""

    def refusal(self, problem: Problem, target: Target, /) -> str | None: ...

    def forward(
        self,
        problem: Problem,
        target: Target,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: Segments | None,
        /,
    ) -> tuple[jax.Array, jax.Array | None]: ...

    def backward(
        self,
        problem: Problem,
        target: Target,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segments: Segments | None,
        lse: jax.Array,
        delta: jax.Array,
        d_out: jax.Array,
        /,
    ) -> tuple[jax.Array, jax.Array, jax.Array]: ...


IMPLEMENTATIONS: dict[str, Implementation] = {
    "tpu": tpu,
    "hopper": hopper,
    "triton": kernel_triton,
    "xla": reference,
}
"""By name, the best first."""

_DTYPES = ("bfloat16", "float16", "float32")

type Residuals = tuple[jax.Array, jax.Array, jax.Array, Segments | None, jax.Array, jax.Array]


@overload
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = ...,
    window: int | tuple[int | None, int | None] | None = ...,
    q_offset: int = ...,
    q_segment_ids: jax.Array | None = ...,
    kv_segment_ids: jax.Array | None = ...,
    scale: float | None = ...,
    soft_cap: float | None = ...,
    return_lse: Literal[False] = ...,
    implementation: str | None = ...,
) -> jax.Array: ...
@overload
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = ...,
    window: int | tuple[int | None, int | None] | None = ...,
    q_offset: int = ...,
    q_segment_ids: jax.Array | None = ...,
    kv_segment_ids: jax.Array | None = ...,
    scale: float | None = ...,
    soft_cap: float | None = ...,
    return_lse: Literal[True],
    implementation: str | None = ...,
) -> tuple[jax.Array, jax.Array]: ...
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    q_offset: int = 0,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention without scores in memory (Dao et al., 2022, arXiv:2205.14135).

    Differentiable once in `q`, `k` and `v`, also through the returned log-sum-exp; works under
    `vmap` and `shard_map`. What a mask hides has to be finite: it is multiplied by zero. Which
    implementation runs is decided while tracing, by the device that is traced for
    (`pallas_kernels.targets.current_target`).

    Args:
      q: [batch, q_len, q_heads, head_dim], bfloat16, float16 or float32.
      k, v: [batch, kv_len, kv_heads, head_dim] of the same type; `kv_heads` divides `q_heads`,
        and consecutive query heads share a key/value head (Ainslie et al., 2023).
      causal: query i sees no key after position i + `q_offset`.
      window: (left, right): a query sees that many keys before and after its position, besides
        the one at it; None for no limit; one int for both sides. As `jax.nn`'s
        `local_window_size`.
      q_offset: position of the first query among the keys: 0, or kv_len - q_len for queries
        that are the last tokens.
      q_segment_ids, kv_segment_ids: int32[batch, q_len] and int32[batch, kv_len]: a query sees
        keys of its own segment only. Of self-attention the first is enough.
      scale: factor of the scores, positive; 1/sqrt(head_dim) by default.
      soft_cap: scores become soft_cap * tanh(score / soft_cap) (Gemma 2, arXiv:2408.00118).
      return_lse: also return the log-sum-exp of the scores.
      implementation: one of `IMPLEMENTATIONS`, or None for the first that takes the arguments.

    Returns:
      Like `q`; with `return_lse` also f32[batch, q_heads, q_len], the natural logarithm. A query
      that sees no key has output 0 and log-sum-exp -inf.

    Raises:
      KernelArgumentError: when shapes, types or options do not go together.
      ImplementationNameError: when `implementation` names none.
      NotSupportedError: when each implementation, or the one asked for, refuses.
    """
    problem = problem_of(q, k, v, causal, window, q_offset, scale, soft_cap)
    segments = _segments(problem, q_segment_ids, kv_segment_ids)
    problem = dataclasses.replace(problem, segments=segments is not None, lse=return_lse)
    target = current_target()
    chosen = choose(
        _OP, IMPLEMENTATIONS, lambda i: i.refusal(problem, target), target, implementation
    )
    out, lse = _attention(problem, target, chosen, *alike((q, k, v, segments)))
    return out if lse is None else (out, lse)


# --- differentiation ----------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(
    problem: Problem,
    target: Target,
    implementation: Implementation,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
) -> tuple[jax.Array, jax.Array | None]:
    call = _batched(implementation.forward, problem, target)
    out, lse = call(q, k, v, segments)
    return out, lse if problem.lse else None


def _forward(
    problem: Problem,
    target: Target,
    implementation: Implementation,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
) -> tuple[tuple[jax.Array, jax.Array | None], Residuals]:
    with_lse = dataclasses.replace(problem, lse=True)
    out, lse = _attention(with_lse, target, implementation, q, k, v, segments)
    assert lse is not None
    return (out, lse if problem.lse else None), (q, k, v, segments, out, lse)


def _backward(
    problem: Problem,
    target: Target,
    implementation: Implementation,
    residuals: Residuals,
    gradients: tuple[jax.Array, jax.Array | None],
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, segments, out, lse = residuals
    d_out, d_lse = gradients
    delta = jnp.einsum("bthd,bthd->bht", out.astype(jnp.float32), d_out.astype(jnp.float32))
    if d_lse is not None:
        # d score = weight * (d_weight - delta), and lse adds weight * d_lse to it.
        delta -= d_lse
    call = _batched(implementation.backward, problem, target)
    d_q, d_k, d_v = call(q, k, v, segments, lse, delta, d_out)
    return d_q, d_k, d_v, None


_attention.defvjp(_forward, _backward)


def _batched(function: Callable[..., Any], problem: Problem, target: Target) -> Callable[..., Any]:
    """`function` of a problem, whose mapped axes join the batch."""

    @custom_vmap
    def call(*arrays: Any) -> Any:
        return function(problem, target, *arrays)

    @call.def_vmap
    def _(size: int, mapped: Any, *arrays: Any) -> tuple[Any, Any]:
        def joined(array: jax.Array, is_mapped: bool) -> jax.Array:
            whole = array if is_mapped else jnp.broadcast_to(array, (size, *array.shape))
            return whole.reshape(size * problem.batch, *whole.shape[2:])

        larger = dataclasses.replace(problem, batch=size * problem.batch)
        results = _batched(function, larger, target)(*jax.tree.map(joined, arrays, tuple(mapped)))
        apart = jax.tree.map(lambda x: x.reshape(size, problem.batch, *x.shape[1:]), results)
        return apart, jax.tree.map(lambda _: True, apart)

    return call


# --- arguments ----------------------------------------------------------------------------


def problem_of(
    q: jax.Array | jax.ShapeDtypeStruct,
    k: jax.Array | jax.ShapeDtypeStruct,
    v: jax.Array | jax.ShapeDtypeStruct,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    q_offset: int = 0,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Problem:
    """What `attention` makes of its arguments, without segments.

    Raises:
      KernelArgumentError: as `attention`.
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise KernelArgumentError(
                _OP,
                name,
                f"of shape {array.shape}",
                "[batch, len, heads, head_dim]",
                "Add the axes that are missing, of length 1.",
            )
    if q.dtype.name not in _DTYPES:
        raise KernelArgumentError(
            _OP, "q", f"of type {q.dtype}", ", ".join(_DTYPES), "Convert it first."
        )
    for name, array in (("k", k), ("v", v)):
        if array.dtype != q.dtype:
            raise KernelArgumentError(
                _OP,
                name,
                f"of type {array.dtype}",
                f"{q.dtype}, the type of q",
                "Convert one; for a cache of 8-bit keys and values there is decode_attention.",
            )
    batch, q_len, q_heads, head_dim = q.shape
    _, kv_len, kv_heads, _ = k.shape
    if k.shape != (batch, kv_len, kv_heads, head_dim):
        raise KernelArgumentError(
            _OP,
            "k",
            f"of shape {k.shape}",
            f"[{batch}, kv_len, kv_heads, {head_dim}], as of q {q.shape}",
            "Batches and head widths are equal.",
        )
    if v.shape != k.shape:
        raise KernelArgumentError(
            _OP, "v", f"of shape {v.shape}", f"{k.shape}, the shape of k", "They are paired."
        )
    if 0 in q.shape or 0 in k.shape:
        raise KernelArgumentError(
            _OP, "q or k", f"of shapes {q.shape} and {k.shape}", "no empty axis", "Skip the call."
        )
    if q_heads % kv_heads:
        raise KernelArgumentError(
            _OP,
            "k",
            f"of {kv_heads} heads",
            f"a divisor of the {q_heads} heads of q",
            "Each key/value head serves equally many query heads.",
        )
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise KernelArgumentError(
            _OP, "soft_cap", soft_cap, "a positive number, or None", "None leaves scores alone."
        )
    # Kernels take the maximum of scores before they scale them.
    if scale is not None and not 0 < scale < math.inf:
        raise KernelArgumentError(
            _OP, "scale", scale, "a positive number, or None", "Negate q for a negative one."
        )
    return Problem(
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=q.dtype.name,
        band=_band(causal, window, q_offset, q_len, kv_len),
        scale=1 / math.sqrt(head_dim) if scale is None else float(scale),
        soft_cap=None if soft_cap is None else float(soft_cap),
    )


def _band(
    causal: bool,
    window: int | tuple[int | None, int | None] | None,
    q_offset: int,
    q_len: int,
    kv_len: int,
) -> Band:
    left, right = window if isinstance(window, tuple) else (window, window)
    for side in (left, right):
        if side is not None and not (isinstance(side, int | np.integer) and side >= 0):
            raise KernelArgumentError(
                _OP, "window", window, "at least 0 keys on a side, or None", "0 is the key itself."
            )
    if causal:
        right = 0
    offset = operator.index(q_offset)
    # A side that no key lies beyond is no limit: kernels then need no mask for it, nor to count
    # that far in 32 bits.
    if left is not None and left >= q_len - 1 + offset:
        left = None
    if right is not None and right >= kv_len - 1 - offset:
        right = None
    left, right = (None if side is None else int(side) for side in (left, right))
    return Band(left, right, offset)


def _segments(
    problem: Problem, q_ids: jax.Array | None, kv_ids: jax.Array | None
) -> Segments | None:
    if q_ids is None and kv_ids is None:
        return None
    if q_ids is None:
        raise KernelArgumentError(
            _OP, "q_segment_ids", None, "ids, as kv_segment_ids has some", "Pass both."
        )
    if kv_ids is None:
        if problem.q_len != problem.kv_len:
            raise KernelArgumentError(
                _OP,
                "kv_segment_ids",
                None,
                f"ids of {problem.kv_len} keys, which are not as many as queries",
                "Only where both have the same length may one stand for both.",
            )
        kv_ids = q_ids
    for name, ids, length in (
        ("q_segment_ids", q_ids, problem.q_len),
        ("kv_segment_ids", kv_ids, problem.kv_len),
    ):
        if ids.shape != (problem.batch, length) or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise KernelArgumentError(
                _OP,
                name,
                f"{ids.dtype}{list(ids.shape)}",
                f"int32[{problem.batch}, {length}]",
                "One id a token.",
            )
    return Segments(q_ids.astype(jnp.int32), kv_ids.astype(jnp.int32))
