"""What ops ask of their arguments, each thing in one set of words.

All of these raise `KernelArgumentError`; arrays may be those of jax or numpy, tracers, or
`jax.ShapeDtypeStruct`.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import jax.numpy as jnp
from jax.core import Tracer

from pallas_kernels.errors import KernelArgumentError

FLOATS = ("bfloat16", "float16", "float32")
"""Types that kernels compute with."""


def check_rank(op: str, name: str, array: Any, rank: int, layout: str, hint: str) -> None:
    """Something with as many axes as `layout` names."""
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        found = f"a {type(array).__name__}"
        raise KernelArgumentError(op, name, found, f"an array {layout}", "jnp.asarray makes one.")
    if len(array.shape) != rank:
        raise KernelArgumentError(op, name, f"of shape {array.shape}", layout, hint)


def check_float(op: str, name: str, array: Any) -> None:
    """One of `FLOATS`."""
    if array.dtype.name not in FLOATS:
        raise KernelArgumentError(
            op, name, f"of type {array.dtype}", ", ".join(FLOATS), "Convert it first."
        )


def check_filled(op: str, names: tuple[str, str], first: Any, second: Any) -> None:
    """No empty axis; only of no sequences, or rows, there are no results."""
    missing = second.shape[0] == 0 and first.shape[0] != 0
    if missing or 0 in first.shape[1:] or 0 in second.shape[1:]:
        raise KernelArgumentError(
            op,
            " or ".join(names),
            f"of shapes {first.shape} and {second.shape}",
            "no empty axis, but for the first of both",
            "Skip the call.",
        )


def check_groups(op: str, q_heads: int, kv_heads: int, hint: str) -> None:
    """Consecutive query heads share a key/value head."""
    if q_heads % kv_heads:
        raise KernelArgumentError(
            op, "k", f"of {kv_heads} heads", f"a divisor of the {q_heads} heads of q", hint
        )


def check_ints(op: str, name: str, array: Any, shape: tuple[int, ...], hint: str) -> None:
    """Integers of any width, which become int32."""
    check_rank(op, name, array, len(shape), f"int32{list(shape)}", hint)
    if array.shape != shape or not jnp.issubdtype(array.dtype, jnp.integer):
        raise KernelArgumentError(
            op, name, f"{array.dtype}{list(array.shape)}", f"int32{list(shape)}", hint
        )


def as_int32(array: Any) -> Any:
    """Integers as int32; of those that it has no room for, the nearest that it has."""
    own, narrow = jnp.iinfo(array.dtype), jnp.iinfo(jnp.int32)
    if own.max > narrow.max:
        array = array.clip(max(own.min, narrow.min), narrow.max)
    return array.astype(jnp.int32)


def positive(op: str, name: str, value: Any, hint: str) -> float | None:
    """A factor that is a constant of the kernel, as a float; None for None."""
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise KernelArgumentError(op, name, _shown(value), "a positive number, or None", hint)
    return number


def whole(op: str, name: str, value: Any, hint: str) -> int:
    """An int that is a constant of the kernel."""
    number = _index(value)
    if number is None:
        raise KernelArgumentError(op, name, _shown(value), "an int", hint)
    return number


def window_side(op: str, side: Any, window: Any, expected: str) -> int | None:
    """How many keys a query sees on one side of a window, besides its own; None for all."""
    if side is None:
        return None
    number = _index(side)
    if number is None or number < 0:
        found = _shown(side) if isinstance(side, Tracer) else window
        raise KernelArgumentError(op, "window", found, expected, "0 is the query's own key.")
    return number


def _index(value: Any) -> int | None:
    try:
        return operator.index(value)
    except TypeError:  # jax's error for a tracer is one, too
        return None


def _shown(value: Any) -> Any:
    if isinstance(value, Tracer):
        return "traced, no constant"
    return repr(value) if isinstance(value, str) else value
