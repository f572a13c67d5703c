"""`streamed_matmul`: the arguments are checked here, and an implementation is picked.

    streamed_matmul ─► Problem ─► choose(tpu | xla) ─► custom_vjp ─► forward, of x and of d_out

An implementation is a module with `refusal` and `forward`, whose signatures `reference`
documents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike

from pallas_kernels.arguments import FLOATS, check_filled, check_float, check_rank
from pallas_kernels.choosing import choose, kept_or_chosen
from pallas_kernels.errors import KernelArgumentError
from pallas_kernels.result_types import summed_like
from pallas_kernels.streamed_matmul import kernel_tpu, reference
from pallas_kernels.streamed_matmul.problem import Problem
from pallas_kernels.targets import Target, current_target

_OP = "streamed_matmul"


class Implementation(Protocol):
    """A module that implements the product; `reference` documents the signatures."""

    def refusal(self, problem: Problem, target: Target, /) -> str | None: ...

    def forward(
        self,
        problem: Problem,
        target: Target,
        x: jax.Array,
        w: jax.Array,
        w_scales: jax.Array | None,
        /,
    ) -> jax.Array: ...


IMPLEMENTATIONS: dict[str, Implementation] = {"tpu": kernel_tpu, "xla": reference}
"""By name, the best first."""

type Residuals = tuple[jax.Array, jax.Array, jax.Array | None]


def streamed_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    w_scales: jax.Array | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """x @ w, where w stays in host memory or HBM and comes to the matrix unit tile by tile.

    For weights that a device has no room for: while one tile is multiplied the next ones are on
    their way, and of the weights some 24 MiB are on the device at any time. Weights in
    HBM are streamed likewise where they are what a product of few rows waits for. Whether weights
    are on the host is read off the type of `w` (`jax.typeof(w).memory_space`) while tracing;
    inside a jitted function that is where an argument's sharding puts it, or
    `jax.device_put(w, jax.memory.Space.Host)`. Sums are float32.

    Differentiable in `x`, `w` and `w_scales`: the gradient of `x` streams the weights once more,
    that of `w_scales` too; that of `w` is as large as `w`, computed on the device and moved to
    where `w` is, so leave `w` out of the differentiated arguments where it is frozen. Under
    `vmap` only `x` may be mapped; its rows join.

    Args:
      x: [m, k], bfloat16, float16 or float32.
      w: [k, n] of the type of `x`, or int8; in the memory "pinned_host" or "device".
      w_scales: float32[n], factors of the columns of the product, as those of quantised weights.
      out_dtype: type of the result: one of those of `x`, the type of `x` by default.
      implementation: one of `IMPLEMENTATIONS`, or None for the first that takes the arguments.

    Returns:
      [m, n] in the device's memory.

    Raises:
      KernelArgumentError: when shapes, types or memories do not go together.
      ImplementationNameError: when `implementation` names none.
      NotSupportedError: when each implementation, or the one asked for, refuses.
    """
    problem = _problem(x, w, w_scales, out_dtype)
    target = current_target()
    chosen = choose(_OP, IMPLEMENTATIONS, _refusal(problem, target), target, implementation)
    return _product(problem, target, chosen, x, w, w_scales)


def _refusal(problem: Problem, target: Target) -> Callable[[Implementation], str | None]:
    return lambda implementation: implementation.refusal(problem, target)


def _kept(problem: Problem, target: Target, implementation: Implementation) -> Implementation:
    refusal = _refusal(problem, target)
    return kept_or_chosen(_OP, IMPLEMENTATIONS, refusal, target, implementation)


# --- differentiation ----------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(
    problem: Problem,
    target: Target,
    implementation: Implementation,
    x: jax.Array,
    w: jax.Array,
    w_scales: jax.Array | None,
) -> jax.Array:
    # A kernel has no grid of nothing.
    run = implementation.forward if problem.m else reference.forward

    @custom_vmap
    def call(x: jax.Array, w: jax.Array, w_scales: jax.Array | None) -> jax.Array:
        return run(problem, target, x, w, w_scales)

    @call.def_vmap
    def _(size: int, mapped: Any, x: jax.Array, w: jax.Array, w_scales: jax.Array | None) -> Any:
        x_mapped, *others_mapped = mapped
        if any(jax.tree.leaves(others_mapped)):
            raise KernelArgumentError(
                _OP,
                "w or w_scales",
                "mapped by vmap",
                "the same weights for all that is mapped",
                "Call it once for each of the weights, or use jax.lax.map.",
            )
        assert x_mapped, "something is mapped"
        larger = dataclasses.replace(problem, m=size * problem.m)
        chosen = _kept(larger, target, implementation)
        joined = x.reshape(larger.m, problem.k)
        out = _product(larger, target, chosen, joined, w, w_scales)
        return out.reshape(size, problem.m, problem.n), True

    return call(x, w, w_scales)


def _forward(
    problem: Problem,
    target: Target,
    implementation: Implementation,
    x: jax.Array,
    w: jax.Array,
    w_scales: jax.Array | None,
) -> tuple[jax.Array, Residuals]:
    return _product(problem, target, implementation, x, w, w_scales), (x, w, w_scales)


def _backward(
    problem: Problem,
    target: Target,
    implementation: Implementation,
    residuals: Residuals,
    d_out: jax.Array,
) -> tuple[Any, Any, Any]:
    x, w, w_scales = residuals
    wide = d_out.astype(jnp.float32)
    d_sums = (wide if w_scales is None else wide * w_scales).astype(x.dtype)

    back = dataclasses.replace(
        problem,
        k=problem.n,
        n=problem.k,
        out_dtype=problem.dtype,
        scaled=False,
        transposed=not problem.transposed,
    )
    d_x = _product(back, target, _kept(back, target, implementation), d_sums, w, None)
    d_x = summed_like(d_x, x)

    if problem.w_dtype == "int8":
        d_w = np.zeros(w.shape, jax.dtypes.float0)
    else:
        d_w = jax.lax.dot_general(
            *((d_sums, x) if problem.transposed else (x, d_sums)),
            (((0,), (0,)), ((), ())),
            precision=reference.precision(problem.dtype),
            preferred_element_type=jnp.float32,
        )
        d_w = summed_like(d_w, w).astype(w.dtype)
        if problem.on_host:
            d_w = jax.device_put(d_w, jax.memory.Space.Host)
    if w_scales is None:
        return d_x, d_w, None
    plain = dataclasses.replace(problem, scaled=False, out_dtype="float32")
    unscaled = _product(plain, target, _kept(plain, target, implementation), x, w, None)
    return d_x, d_w, summed_like((wide * unscaled).sum(axis=0), w_scales)


_product.defvjp(_forward, _backward)


# --- arguments ----------------------------------------------------------------------------


def _problem(
    x: jax.Array, w: jax.Array, w_scales: jax.Array | None, asked: DTypeLike | None
) -> Problem:
    layout = "[m, k] of x and [k, n] of w"
    for name, array in (("x", x), ("w", w)):
        check_rank(_OP, name, array, 2, layout, "Join the axes that are not contracted.")
    check_filled(_OP, ("x", "w"), x, w)
    (m, k), n = x.shape, w.shape[1]
    if w.shape[0] != k:
        raise KernelArgumentError(
            _OP, "w", f"of shape {w.shape}", f"[{k}, n], as of x {x.shape}", "k is contracted."
        )
    check_float(_OP, "x", x)
    if w.dtype != x.dtype and w.dtype != jnp.int8:
        raise KernelArgumentError(
            _OP,
            "w",
            f"of type {w.dtype}",
            f"{x.dtype}, the type of x, or int8",
            "Convert x, which is the smaller.",
        )
    if w_scales is not None:
        layout, hint = f"float32[{n}]", "One factor a column."
        check_rank(_OP, "w_scales", w_scales, 1, layout, hint)
        if w_scales.shape != (n,) or w_scales.dtype != jnp.float32:
            found = f"{w_scales.dtype}{list(w_scales.shape)}"
            raise KernelArgumentError(_OP, "w_scales", found, layout, hint)
    try:
        out_dtype = (x.dtype if asked is None else jnp.dtype(asked)).name
    except (TypeError, ValueError):
        out_dtype = repr(asked)
    if out_dtype not in FLOATS:
        raise KernelArgumentError(
            _OP, "out_dtype", out_dtype, ", ".join(FLOATS), "Convert the result."
        )
    for name, array in (("x", x), ("w_scales", w_scales)):
        if array is not None and _is_on_host(array):
            raise KernelArgumentError(
                _OP, name, "in host memory", "it on the device", "Only w is streamed."
            )
    return Problem(
        m=m,
        k=k,
        n=n,
        dtype=x.dtype.name,
        w_dtype=w.dtype.name,
        out_dtype=out_dtype,
        scaled=w_scales is not None,
        on_host=_is_on_host(w),
    )


def _is_on_host(array: jax.Array) -> bool:
    return jax.typeof(array).memory_space == jax.memory.Space.Host
