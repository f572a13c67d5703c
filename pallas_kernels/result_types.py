"""Types of a kernel's results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def result_type(
    shape: tuple[int, ...], dtype: DTypeLike, *operands: jax.Array
) -> jax.ShapeDtypeStruct:
    """Of a kernel's result that differs from device to device wherever one of `operands` does.

    Under `shard_map` jax wants to know of each result over which mesh axes it varies. The name
    of that attribute changed between jax 0.11 and 0.12; an array computed from the operands has
    it right in both.
    """

    def computed(*arrays: jax.Array) -> jax.Array:
        first = sum(x.ravel()[0].astype(dtype) for x in arrays)
        return jnp.broadcast_to(first, shape)

    return jax.eval_shape(computed, *operands)
