"""`decode_attention`: the arguments are checked here, and an implementation is picked.

    decode_attention ─► Problem, Cache ─► choose(tpu | hopper | xla) ─► forward

An implementation is a module with `refusal` and `forward`, whose signatures `reference`
documents. Under `vmap` the mapped axis joins the batch, and of mapped caches the pools join
into one, so that kernels never see it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NoReturn, Protocol, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_batching import custom_vmap
from jax.experimental.xla_metadata import set_xla_metadata

from hlo_passes.analysis.kernel_cost import KERNEL_COST_ATTRIBUTE
from hlo_passes.analysis.pages import PAGE_READS_ATTRIBUTE, PageAccess
from pallas_kernels.arguments import (
    as_int32,
    check_filled,
    check_float,
    check_groups,
    check_ints,
    check_rank,
    positive,
    window_side,
)
from pallas_kernels.choosing import choose, kept_or_chosen
from pallas_kernels.decode import kernel_gpu, kernel_tpu, reference
from pallas_kernels.decode.problem import Cache, Problem
from pallas_kernels.errors import KernelArgumentError, NotDifferentiableError
from pallas_kernels.targets import Target, current_target

_OP = "decode_attention"


class Implementation(Protocol):
    """A module that implements decode attention; `reference` documents the signatures."""

    def refusal(self, problem: Problem, target: Target, /) -> str | None: ...

    def forward(
        self, problem: Problem, target: Target, q: jax.Array, cache: Cache, /
    ) -> tuple[jax.Array, jax.Array]: ...


IMPLEMENTATIONS: dict[str, Implementation] = {
    "tpu": kernel_tpu,
    "hopper": kernel_gpu,
    "xla": reference,
}
"""By name, the best first."""

_NARROW_DTYPES = ("int8", "float8_e4m3fn")

# Hints of several errors.
_OUTSIDE = "The heads are outside the tokens: [.., kv_heads, page_size, head_dim]."
_ROWS = "One row a sequence of q."


@overload
def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    *,
    block_tables: jax.Array | None = ...,
    k_scales: jax.Array | None = ...,
    v_scales: jax.Array | None = ...,
    window: int | None = ...,
    scale: float | None = ...,
    soft_cap: float | None = ...,
    return_lse: Literal[False] = ...,
    checked: bool = ...,
    implementation: str | None = ...,
) -> jax.Array: ...
@overload
def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    *,
    block_tables: jax.Array | None = ...,
    k_scales: jax.Array | None = ...,
    v_scales: jax.Array | None = ...,
    window: int | None = ...,
    scale: float | None = ...,
    soft_cap: float | None = ...,
    return_lse: Literal[True],
    checked: bool = ...,
    implementation: str | None = ...,
) -> tuple[jax.Array, jax.Array]: ...
def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    *,
    block_tables: jax.Array | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    checked: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of the last tokens of each sequence to its cache (Kwon et al., 2023,
    arXiv:2309.06180), the keys split where that fills the machine (Dao et al., 2023,
    Flash-Decoding).

    For inference: it has no gradient. It works under `vmap`, and under `shard_map` with the
    batch or the key/value heads sharded. Which implementation runs is decided while tracing, by
    the device that is traced for (`pallas_kernels.targets.current_target`).

    Args:
      q: [batch, q_len, q_heads, head_dim], bfloat16, float16 or float32: the last q_len tokens
        of each sequence, whose keys and values are in the cache already. Query i stands at
        position lengths - q_len + i and sees no key after it.
      k, v: [num_pages, kv_heads, page_size, head_dim] with `block_tables`, otherwise
        [batch, kv_heads, max_len, head_dim] (why the heads are outside: see `problem`). Of the
        type of `q`, or int8 or float8_e4m3fn with scales. `kv_heads` divides `q_heads`, and
        consecutive query heads share a key/value head (Ainslie et al., 2023).
      lengths: int32[batch], tokens of each sequence, those of `q` included; 0 for a row that is
        not in use. What the cache holds past a length may be anything, also NaN.
      block_tables: int32[batch, max_pages]: page i holds tokens i * page_size and following.
        Entries past the last page of a sequence are never followed and may hold anything.
      k_scales, v_scales: f32[num_pages, kv_heads, page_size], one a token and head; without
        `block_tables` f32[batch, kv_heads, max_len]. A key is its stored number times its scale.
      window: a query sees that many keys before its position, besides the one at it; None for
        all. Pages wholly before it are not read.
      scale: factor of the scores, 1/sqrt(head_dim) by default.
      soft_cap: scores become soft_cap * tanh(score / soft_cap) (Gemma 2, arXiv:2408.00118).
      return_lse: also return the log-sum-exp of the scores.
      checked: report lengths past the capacity and entries of `block_tables` that name no page.
        Of arrays under a transformation, where the numbers are not known yet, the check is a
        host callback that the kernel waits for, and the error arrives as the program runs, with
        the same sentence within jax's; that costs a round trip to the host each call. Without it
        lengths are clamped to the capacity, and what a wrong page holds is undefined.
      implementation: one of `IMPLEMENTATIONS`, or None for the first that takes the arguments.

    Returns:
      Like `q`; with `return_lse` also f32[batch, q_heads, q_len], the natural logarithm. A query
      that sees no key (of an unused row, or before the start of a sequence shorter than q_len)
      has output 0 and log-sum-exp -inf.

    Raises:
      KernelArgumentError: when shapes, types or options do not go together; when `checked`
        finds something.
      ImplementationNameError: when `implementation` names none.
      NotSupportedError: when each implementation, or the one asked for, refuses.
      NotDifferentiableError: when it is differentiated.
    """
    problem = problem_of(q, k, v, lengths, block_tables, window, scale, soft_cap)
    _check_scales(problem, k, k_scales, v_scales)
    target = current_target()
    chosen = choose(_OP, IMPLEMENTATIONS, _refusal(problem, target), target, implementation)
    lengths = as_int32(lengths)
    block_tables = None if block_tables is None else as_int32(block_tables)
    if checked:
        lengths, block_tables = _checked(problem, lengths, block_tables)
    lengths = jnp.clip(lengths, 0, problem.capacity)
    cache = Cache(k, v, lengths, block_tables, k_scales, v_scales)
    out, lse = _decode(problem, target, chosen, q, cache)
    return (out, lse) if return_lse else out


def _refusal(problem: Problem, target: Target) -> Callable[[Implementation], str | None]:
    return lambda implementation: implementation.refusal(problem, target)


# --- transformations ----------------------------------------------------------------------


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _decode(
    problem: Problem, target: Target, implementation: Implementation, q: jax.Array, cache: Cache
) -> tuple[jax.Array, jax.Array]:
    return _traced_once(problem, target, implementation, q, cache)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _traced_once(
    problem: Problem, target: Target, implementation: Implementation, q: jax.Array, cache: Cache
) -> tuple[jax.Array, jax.Array]:
    """The forward pass, which layers of one shape share: to lower a kernel takes a second."""
    return _batched(implementation, problem, target)(q, cache)


@_decode.defjvp
def _refuse_derivative(*_: Any) -> NoReturn:
    raise NotDifferentiableError(_OP, "Train with attention, which has a gradient.")


def _batched(
    implementation: Implementation, problem: Problem, target: Target
) -> Callable[[jax.Array, Cache], Any]:
    """The forward pass of a problem, whose mapped axes join the batch."""
    # A kernel has no grid of nothing.
    run = implementation.forward if problem.batch else reference.forward

    @custom_vmap
    def call(q: jax.Array, cache: Cache) -> Any:
        said = {
            PAGE_READS_ATTRIBUTE: _page_reads(problem).to_attribute(),
            KERNEL_COST_ATTRIBUTE: problem.cost.to_attribute(),
        }
        with set_xla_metadata(**said):
            return run(problem, target, q, cache)

    @call.def_vmap
    def _(size: int, mapped: Any, q: jax.Array, cache: Cache) -> tuple[Any, Any]:
        def joined(array: jax.Array, is_mapped: bool) -> jax.Array:
            whole = array if is_mapped else jnp.broadcast_to(array, (size, *array.shape))
            return whole.reshape(size * array.shape[is_mapped], *whole.shape[2:])

        q_mapped, cache_mapped = mapped
        pools = ("k", "v", "k_scales", "v_scales")
        pools = {name: getattr(cache, name) for name in pools}
        pools_mapped = {name: getattr(cache_mapped, name) for name in pools}
        tables = cache.block_tables
        num_pages = problem.num_pages
        if tables is not None:
            tables = joined(tables, cache_mapped.block_tables)
        if tables is None or any(jax.tree.leaves(pools_mapped)):
            pools = jax.tree.map(joined, pools, pools_mapped)
            num_pages *= size
            if tables is not None:
                start = jnp.arange(size, dtype=jnp.int32) * problem.num_pages
                tables += jnp.repeat(start, problem.batch)[:, None]
        larger = dataclasses.replace(problem, batch=size * problem.batch, num_pages=num_pages)
        lengths = joined(cache.lengths, cache_mapped.lengths)
        whole = Cache(lengths=lengths, block_tables=tables, **pools)
        refusal = _refusal(larger, target)
        chosen = kept_or_chosen(_OP, IMPLEMENTATIONS, refusal, target, implementation)
        results = _batched(chosen, larger, target)(joined(q, q_mapped), whole)
        apart = jax.tree.map(lambda x: x.reshape(size, problem.batch, *x.shape[1:]), results)
        return apart, jax.tree.map(lambda _: True, apart)

    return call


def _page_reads(problem: Problem) -> PageAccess:
    """What the compiled program says of its reads, to whoever looks at it (``memplan inspect``)."""
    p = problem
    return PageAccess(
        (p.num_pages, p.kv_heads, p.page_size, p.head_dim),
        p.page_size, p.batch, p.max_pages, p.q_len, p.window,
    )  # fmt: skip


# --- arguments ----------------------------------------------------------------------------


type _Array = jax.Array | jax.ShapeDtypeStruct


def problem_of(
    q: _Array,
    k: _Array,
    v: _Array,
    lengths: _Array,
    block_tables: _Array | None = None,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Problem:
    """What `decode_attention` makes of its arguments.

    Raises:
      KernelArgumentError: as `decode_attention`.
    """
    pool = "[num_pages, kv_heads, page_size, head_dim], or without block_tables "
    pool += "[batch, kv_heads, max_len, head_dim]"
    layouts = (("q", q, "[batch, q_len, q_heads, head_dim]"), ("k", k, pool), ("v", v, pool))
    for name, array, layout in layouts:
        check_rank(_OP, name, array, 4, layout, "Add the axes that are missing, of length 1.")
    check_float(_OP, "q", q)
    if k.dtype != q.dtype and k.dtype.name not in _NARROW_DTYPES:
        raise KernelArgumentError(
            _OP,
            "k",
            f"of type {k.dtype}",
            f"{q.dtype}, the type of q, or {' or '.join(_NARROW_DTYPES)}",
            "Convert q, which is small.",
        )
    if v.dtype != k.dtype or v.shape != k.shape:
        raise KernelArgumentError(
            _OP,
            "v",
            f"{v.dtype}{list(v.shape)}",
            f"{k.dtype}{list(k.shape)}, as k",
            "They are paired.",
        )
    batch, q_len, q_heads, head_dim = q.shape
    num_pages, kv_heads, page_size, _ = k.shape
    if k.shape[3] != head_dim:
        raise KernelArgumentError(
            _OP,
            "k",
            f"of shape {k.shape}",
            f"heads {head_dim} wide, as of q {q.shape}",
            _OUTSIDE,
        )
    check_filled(_OP, ("q", "k"), q, k)
    check_groups(_OP, q_heads, kv_heads, _OUTSIDE)
    check_ints(_OP, "lengths", lengths, (batch,), _ROWS)
    if block_tables is None and num_pages != batch:
        raise KernelArgumentError(
            _OP,
            "k",
            f"of shape {k.shape}",
            f"[{batch}, kv_heads, max_len, head_dim], one row a sequence",
            "Pass block_tables if these are pages.",
        )
    if block_tables is not None:
        layout = f"int32[{batch}, max_pages]"
        check_rank(_OP, "block_tables", block_tables, 2, layout, _ROWS)
        max_pages = max(1, block_tables.shape[1])
        check_ints(_OP, "block_tables", block_tables, (batch, max_pages), _ROWS)
    window = window_side(_OP, window, window, "at least 0 keys, or None")
    scale = positive(_OP, "scale", scale, "Scale q for a negative factor, or a traced one.")
    soft_cap = positive(_OP, "soft_cap", soft_cap, "None leaves scores alone.")
    return Problem(
        batch=batch,
        q_len=q_len,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        num_pages=num_pages,
        page_size=page_size,
        max_pages=1 if block_tables is None else block_tables.shape[1],
        paged=block_tables is not None,
        dtype=q.dtype.name,
        kv_dtype=k.dtype.name,
        window=window,
        scale=1 / math.sqrt(head_dim) if scale is None else scale,
        soft_cap=soft_cap,
    )


def _check_scales(
    problem: Problem, k: jax.Array, k_scales: jax.Array | None, v_scales: jax.Array | None
) -> None:
    hint = "One a token and head; all 1 if there are none."
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if scales is not None:
            check_rank(_OP, name, scales, 3, f"float32{list(k.shape[:3])}", hint)
        found = None if scales is None else f"{scales.dtype}{list(scales.shape)}"
        if not problem.is_quantized:
            if scales is not None:
                raise KernelArgumentError(
                    _OP, name, found, f"None for {k.dtype} keys", "Only 8-bit caches have scales."
                )
        elif found != (expected := f"float32{list(k.shape[:3])}"):
            raise KernelArgumentError(_OP, name, found, expected, hint)


# --- numbers ------------------------------------------------------------------------------


def _checked(
    problem: Problem, lengths: jax.Array, block_tables: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """The same arrays, which are only there once their numbers have been looked at."""

    def check(lengths: Any, block_tables: Any) -> tuple[Any, Any]:
        _check_numbers(problem, np.asarray(lengths), block_tables)
        return lengths, block_tables

    operands = (lengths, block_tables)
    if not any(isinstance(x, Tracer) for x in operands):
        return check(*operands)
    # Not a debug callback: the kernel must not start before the check is through, so it takes
    # the arrays from it.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
    return jax.pure_callback(check, shapes, *operands, vmap_method="sequential")


def _check_numbers(problem: Problem, lengths: np.ndarray, block_tables: Any) -> None:
    """Raises a `KernelArgumentError` for the first length or used table entry out of range."""
    for row, length in enumerate(lengths):
        if not 0 <= length <= problem.capacity:
            raise KernelArgumentError(
                _OP,
                f"lengths[{row}]",
                length,
                f"from 0 to {problem.capacity}, the tokens that a sequence has room for",
                "Lengths count the tokens of q, and 0 is a row that is not in use.",
            )
    if block_tables is None:
        return
    tables = np.asarray(block_tables)
    used = np.arange(problem.max_pages) * problem.page_size < lengths[:, None]
    wrong = np.argwhere(used & ((tables < 0) | (tables >= problem.num_pages)))
    if wrong.size:
        row, page = wrong[0]
        raise KernelArgumentError(
            _OP,
            f"block_tables[{row}, {page}]",
            tables[row, page],
            f"a page from 0 to {problem.num_pages - 1}, as sequence {row} has {lengths[row]} "
            f"tokens in pages of {problem.page_size}",
            "Only entries past the last page of a sequence may hold anything.",
        )
