"""Runs a module compiled for a TPU or GPU on the CPU, to check its numbers.

    compiled, or captured and rewritten
      └─ portable ─► the same values, for any device ─► XLA:CPU ─► compare with jax.jit

A rewriter that fetches the wrong weight, drops an eviction or clones the wrong producer
gives wrong numbers here. What a replay proves is the *dataflow*: every instruction reads
the values that it should. It proves nothing about time or place: a start, its done and
its buffer are one value here, so a slot that is overwritten too early, or a use that runs
ahead of its transfer, goes unseen. Those are what the checker proves
(`hlo_passes.verify`), from the schedule and without numbers. A rewritten module is right
when both agree.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlo_passes import xla
from hlo_passes.errors import ReplayError
from hlo_passes.ir import Module, Shape
from hlo_passes.reading.reader import read_module
from hlo_passes.replay.portable import portable

_NUMPY_DTYPES: dict[str, Any] = {
    "pred": np.bool_,
    **{f"s{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"u{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"f{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    **{f"c{bits}": np.dtype(f"complex{bits}") for bits in (64, 128)},
    "bf16": jnp.bfloat16,
    "s4": jnp.int4,
    "u4": jnp.uint4,
    "f8e4m3fn": jnp.float8_e4m3fn,
    "f8e5m2": jnp.float8_e5m2,
}


def replay(source: Any, *args: Any) -> list[np.ndarray]:
    """Runs one device's program on the CPU, whatever it was compiled for.

    Args:
      source: a compiled or scheduled module, as anything that `memplan.read_module` takes:
        a ``jax.stages.Compiled``, a `Module`, its bytes or a path.
      *args: what the compiled function takes: pytrees of numpy or jax arrays, or the flat
        entry parameters in order. Python scalars take the parameter's dtype. Memory kinds
        and donation are ignored: nothing is overwritten.

    Returns:
      The program's outputs, flat, in order.

    Raises:
      ReplayError: when the arguments do not fit the module, or an instruction has no
        meaning on one CPU: collectives, cuDNN and other custom calls.

    A module and its rewriting replay to the same bits, unless a producer was cloned; against
    ``jax.jit`` the values differ by rounding. A fusion keeps in f32 what another
    rounds to bf16, a few units in the last place; and where a TPU's compiler rounds the f32
    operands of a matmul to bf16 (``jax.default_matmul_precision``), the module says so and
    the replay does it.
    """
    module = read_module(source)
    runnable = portable(module)
    arguments = _arguments(module, jax.tree.leaves(args))
    try:
        return xla.run_on_cpu(runnable.to_bytes(), arguments)
    except Exception as error:  # XLA raises several types; the first lines name the operation.
        raise ReplayError(
            module.name,
            f"XLA:CPU refuses the portable module: {' '.join(str(error).split())[:400]}",
            "The operation exists on the module's own target only.",
        ) from error


def max_difference(found: Any, expected: Any) -> float:
    """The largest difference between two results, in units in the last place.

    Args:
      found, expected: pytrees of arrays with as many leaves.

    Returns:
      Of floats: the largest ``|found - expected|`` of each array, divided by the spacing of
      its dtype at the largest finite magnitude that is expected. So 1.0 is one rounding of
      the largest element, in bf16 as in f32. Of integers and booleans: the largest
      difference. 0.0 means equal; NaN equals NaN; ``inf`` means that shapes, dtypes or the
      places of NaN and infinities differ.

    >>> max_difference(jnp.bfloat16(1.0078125), jnp.bfloat16(1))
    1.0
    """
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max((_difference(np.asarray(a), np.asarray(b)) for a, b in pairs), default=0.0)


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf
    is_float = jnp.issubdtype(expected.dtype, jnp.inexact)
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    a, b = found.astype(wide), expected.astype(wide)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return math.inf
    a, b = a[finite], b[finite]
    if not np.all(np.isfinite(a)):
        return math.inf
    largest = float(np.max(np.abs(a - b), initial=0.0))
    if not largest or not is_float:
        return largest
    info = jnp.finfo(expected.dtype)
    scale = max(float(np.max(np.abs(b))), float(info.tiny))
    return largest / (float(info.eps) * 2.0 ** math.floor(math.log2(scale)))


def _arguments(module: Module, leaves: list[Any]) -> list[np.ndarray]:
    parameters = module.entry.parameters
    if len(leaves) != len(parameters):
        raise ReplayError(
            module.name,
            f"it takes {len(parameters)} arrays, found {len(leaves)}",
            "jax.jit drops arguments that the function does not use: leave them out, or "
            "compile with jax.jit(..., keep_unused=True).",
        )
    return [_argument(module, p.name, p.shape, a) for p, a in zip(parameters, leaves, strict=True)]


def _argument(module: Module, name: str, shape: Shape, leaf: Any) -> np.ndarray:
    dtype = _NUMPY_DTYPES.get(shape.dtype)
    if isinstance(leaf, bool | int | float | complex) and not shape.dimensions:
        return np.asarray(leaf, dtype)
    array = np.asarray(leaf)
    if dtype is None or (array.shape, array.dtype) != (shape.dimensions, np.dtype(dtype)):
        raise ReplayError(
            f"{module.name}, parameter {name}",
            f"expected {shape}, found {array.dtype}{list(array.shape)}",
            "Arguments are not converted, so that the numbers stay comparable.",
        )
    return array
