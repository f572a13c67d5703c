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
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol, overload

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap

from pallas_kernels.arguments import (
    check_filled,
    check_float,
    check_groups,
    check_ints,
    check_rank,
    positive,
    whole,
    window_side,
)
from pallas_kernels.attention import hopper, kernel_triton, reference, tpu
from pallas_kernels.attention.problem import Band, Problem, Segments
from pallas_kernels.choosing import choose, kept_or_chosen
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

OUT_NAME, LSE_NAME = "attention_out", "attention_lse"
"""Of what the backward pass needs besides the inputs, for the policies of `jax.checkpoint`."""

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

    Differentiable in `q`, `k` and `v` in reverse mode, also through the returned log-sum-exp;
    second derivatives are XLA's, with the scores in memory. Works under `vmap` and `shard_map`.
    What a mask hides has to be finite: it is multiplied by zero. Which implementation runs is
    decided while tracing, by the device that is traced for
    (`pallas_kernels.targets.current_target`).

    Under `jax.checkpoint` a backward pass runs the forward kernel again, unless the policy
    keeps what it gave:

        jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")

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
    chosen = choose(_OP, IMPLEMENTATIONS, _refusal(problem, target), target, implementation)
    out, lse = _attention(problem, target, chosen, *alike((q, k, v, segments)))
    return out if lse is None else (out, lse)


def _refusal(problem: Problem, target: Target) -> Callable[[Implementation], str | None]:
    return lambda implementation: implementation.refusal(problem, target)


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
    out, lse = _batched("forward", implementation, problem, target)(q, k, v, segments)
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
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
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
    arrays = (q, k, v, segments, lse, delta, d_out)
    return *_gradients(problem, target, implementation, *arrays), None


_attention.defvjp(_forward, _backward)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _gradients(
    problem: Problem, target: Target, implementation: Implementation, *arrays: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`Implementation.backward`, that can be differentiated again."""
    return _batched("backward", implementation, problem, target)(*arrays)


@_gradients.defjvp
def _second_derivatives(
    problem: Problem,
    target: Target,
    implementation: Implementation,
    arrays: tuple[Any, ...],
    tangents: tuple[Any, ...],
) -> tuple[Any, Any]:
    _, changes = jax.jvp(partial(reference.backward, problem, target), arrays, tangents)
    return _gradients(problem, target, implementation, *arrays), changes


def _batched(
    stage: Literal["forward", "backward"],
    implementation: Implementation,
    problem: Problem,
    target: Target,
) -> Callable[..., Any]:
    """A stage of a problem, whose mapped axes join the batch."""
    # A kernel has no grid of nothing.
    run = getattr(implementation if problem.batch else reference, stage)

    @custom_vmap
    def call(*arrays: Any) -> Any:
        return run(problem, target, *arrays)

    @call.def_vmap
    def _(size: int, mapped: Any, *arrays: Any) -> tuple[Any, Any]:
        def joined(array: jax.Array, is_mapped: bool) -> jax.Array:
            stacked = array if is_mapped else jnp.broadcast_to(array, (size, *array.shape))
            return stacked.reshape(size * problem.batch, *stacked.shape[2:])

        larger = dataclasses.replace(problem, batch=size * problem.batch)
        refusal = _refusal(larger, target)
        chosen = kept_or_chosen(_OP, IMPLEMENTATIONS, refusal, target, implementation)
        given = jax.tree.map(joined, arrays, tuple(mapped))
        results = _batched(stage, chosen, larger, target)(*given)
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
    layout = "[batch, len, heads, head_dim]"
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_rank(_OP, name, array, 4, layout, "Add the axes that are missing, of length 1.")
    check_float(_OP, "q", q)
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
    check_filled(_OP, ("q", "k"), q, k)
    check_groups(_OP, q_heads, kv_heads, "Each key/value head serves equally many query heads.")
    # Kernels take the maximum of scores before they scale them.
    scale = positive(_OP, "scale", scale, "Scale q for a negative factor, or a traced one.")
    soft_cap = positive(_OP, "soft_cap", soft_cap, "None leaves scores alone.")
    return Problem(
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=q.dtype.name,
        band=_band(causal, window, q_offset, q_len, kv_len),
        scale=1 / math.sqrt(head_dim) if scale is None else scale,
        soft_cap=soft_cap,
    )


def _band(
    causal: bool,
    window: int | tuple[int | None, int | None] | None,
    q_offset: int,
    q_len: int,
    kv_len: int,
) -> Band:
    sides = window if isinstance(window, tuple) else (window, window)
    if len(sides) != 2:
        raise KernelArgumentError(
            _OP, "window", window, "(left, right), or one int for both", "None is no limit."
        )
    expected = "at least 0 keys on a side, or None"
    left, right = (window_side(_OP, side, window, expected) for side in sides)
    if causal:
        right = 0
    offset = whole(_OP, "q_offset", q_offset, "It is a constant of the kernel.")
    # A side that no key lies beyond is no limit: kernels then need no mask for it, nor to count
    # that far in 32 bits.
    if left is not None and left >= q_len - 1 + offset:
        left = None
    if right is not None and right >= kv_len - 1 - offset:
        right = None
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
    check_ints(_OP, "q_segment_ids", q_ids, (problem.batch, problem.q_len), "One id a token.")
    check_ints(_OP, "kv_segment_ids", kv_ids, (problem.batch, problem.kv_len), "One id a token.")
    return Segments(q_ids.astype(jnp.int32), kv_ids.astype(jnp.int32))
