"""Types of a kernel's arguments and results under `shard_map`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def alike[Arrays](arrays: Arrays) -> Arrays:
    """The same arrays, which differ from device to device wherever one of them does.

    A function with a gradient of its own needs that: jax then adds up, over devices, gradients
    of what was the same on all, and does not accept one that differs for an argument that does not.
    """
    axes = frozenset[str]().union(*map(_varying_axes, jax.tree.leaves(arrays)))

    def widened(x: jax.Array) -> jax.Array:
        missing = tuple(axes - _varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(widened, arrays)


def summed_like(gradient: jax.Array, argument: jax.Array) -> jax.Array:
    """A gradient of an argument, added up over devices that all have the same argument.

    Where `alike` cannot be used: jax copies no array that is in host memory.
    """
    same = tuple(_varying_axes(gradient) - _varying_axes(argument))
    return lax.psum(gradient, same) if same else gradient


def _varying_axes(x: jax.Array) -> frozenset[str]:
    kind: Any = jax.typeof(x)
    # Of jax 0.12, and of 0.11.
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


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
