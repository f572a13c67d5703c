"""`write_tokens` and `write_pages`: keys or values go where `decode_attention` reads them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from hlo_passes.analysis.pages import PAGE_WRITES_ATTRIBUTE, PageAccess
from pallas_kernels.arguments import as_int32, check_ints, check_rank
from pallas_kernels.errors import KernelArgumentError

_OP = "write_tokens"
_POOL = "[num_pages, kv_heads, page_size, head_dim]"
_OUTSIDE = "The heads are outside the tokens."

_ROWS = "One row a sequence of new."


def write_tokens(
    pool: jax.Array,
    new: jax.Array,
    lengths: jax.Array,
    *,
    counts: jax.Array | None = None,
    block_tables: jax.Array | None = None,
) -> jax.Array:
    """Writes the last tokens of each sequence; in place, where the pool is donated.

    What it may write, the program declares, as `decode_attention` declares what it reads.

    Args:
      pool: keys or values, as `decode_attention` takes them:
        [num_pages, kv_heads, page_size, head_dim] with `block_tables`, otherwise
        [batch, kv_heads, max_len, head_dim].
      new: [batch, len, kv_heads, head_dim], of any type that the pool's can have.
      lengths: int32[batch], tokens of each sequence, those of `new` included. Without
        `block_tables` and `counts` it may be int32[], of all sequences: then one slice is
        written, and a length past `max_len` writes the last `len` tokens.
      counts: int32[batch], how many of `new`, the last ones, are tokens; the rest is not written.
        All by default.
      block_tables: int32[batch, max_pages], the pages of each sequence in order.

    Returns:
      The pool. What has no place in it is not written.

    Raises:
      KernelArgumentError: when shapes do not go together.
    """
    check_rank(_OP, "pool", pool, 4, _POOL, _OUTSIDE)
    check_rank(_OP, "new", new, 4, "[batch, len, kv_heads, head_dim]", "Tokens come before heads.")
    batch, columns, kv_heads, head_dim = new.shape
    num_pages, page_size = pool.shape[0], pool.shape[2]
    if (kv_heads, head_dim) != (pool.shape[1], pool.shape[3]):
        expected = f"[batch, len, {pool.shape[1]}, {pool.shape[3]}], as pool {pool.shape} has"
        hint = "Both have the same heads, of one width."
        raise KernelArgumentError(_OP, "new", f"of shape {new.shape}", expected, hint)
    if block_tables is None and num_pages != batch:
        raise KernelArgumentError(
            _OP,
            "pool",
            f"of shape {pool.shape}",
            f"[{batch}, kv_heads, max_len, head_dim], one row a sequence",
            "Pass block_tables if these are pages.",
        )
    are_alike = block_tables is None and counts is None and lengths.ndim == 0
    check_ints(_OP, "lengths", lengths, () if are_alike else (batch,), _ROWS)
    if counts is not None:
        check_ints(_OP, "counts", counts, (batch,), _ROWS)
    max_pages = 1
    if block_tables is not None:
        check_rank(_OP, "block_tables", block_tables, 2, f"int32[{batch}, max_pages]", _ROWS)
        max_pages = block_tables.shape[1]
        check_ints(_OP, "block_tables", block_tables, (batch, max_pages), _ROWS)
    access = PageAccess(pool.shape, page_size, batch, max_pages, columns, 0)
    declared = {PAGE_WRITES_ATTRIBUTE: access.to_attribute()}
    new = new.astype(pool.dtype)
    if are_alike:
        new = new.swapaxes(1, 2)
        with set_xla_metadata(**declared):
            return lax.dynamic_update_slice_in_dim(pool, new, lengths - columns, axis=2)
    lengths = as_int32(lengths)[:, None]
    offsets = jnp.arange(-columns, 0)
    positions = jnp.maximum(lengths + offsets, 0)
    if block_tables is None:
        page = jnp.arange(batch)[:, None]
    else:
        index = positions // page_size
        page = jnp.take_along_axis(as_int32(block_tables), index, axis=1, mode="clip")
    # What is written to no page there is, is dropped.
    is_token = lengths + offsets >= 0
    is_token &= positions < max_pages * page_size
    if counts is not None:
        is_token &= offsets >= -as_int32(counts)[:, None]
    page = jnp.where(is_token & (page >= 0), page, num_pages)
    with set_xla_metadata(**declared):
        return pool.at[page, :, positions % page_size].set(new, mode="drop")


def write_pages(pool: jax.Array, stored: jax.Array, pages: jax.Array) -> jax.Array:
    """Writes whole pages that were kept elsewhere; in place, where the pool is donated. What it may
    write, the program declares: pages of one sequence, whose table they are.

    Args:
      pool: [num_pages, kv_heads, page_size, head_dim].
      stored: [n, kv_heads, page_size, head_dim], of the pool's type.
      pages: int32[n], which of the pool's they become; none twice. What becomes no page there is,
        is not written.

    Returns:
      The pool.

    Raises:
      KernelArgumentError: when shapes or types do not go together.
    """
    op, hint = "write_pages", "One page of the pool for each that was stored."
    check_rank(op, "pool", pool, 4, _POOL, _OUTSIDE)
    check_rank(op, "stored", stored, 4, "[n, kv_heads, page_size, head_dim]", _OUTSIDE)
    (num_pages, *page), count = pool.shape, stored.shape[0]
    expected, found = f"{pool.dtype}{[count, *page]}", f"{stored.dtype}{[*stored.shape]}"
    if found != expected:
        raise KernelArgumentError(op, "stored", found, expected, "Pages of both are alike.")
    check_ints(op, "pages", pages, (count,), hint)
    access = PageAccess(pool.shape, pool.shape[2], 1, count, count * pool.shape[2], 0)
    pages = as_int32(pages)
    pages = jnp.where(pages >= 0, pages, num_pages)
    with set_xla_metadata(**{PAGE_WRITES_ATTRIBUTE: access.to_attribute()}):
        return pool.at[pages].set(stored, mode="drop")
