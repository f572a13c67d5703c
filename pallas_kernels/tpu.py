"""What the TPU kernels share: copies in groups, matrix products, moves between lanes and rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
"""Numbers of 32 bits in a row of a vector register."""


class Launch(NamedTuple):
    """How a kernel is started, apart from its blocks.

    Attributes:
      cores: of the device; each takes an equal share of the work.
      vmem_limit: bytes; the kernel takes those of its scratch, and the compiler some for spills.
      cycles: that it is expected to take, for memplan's planner to read in the module.
    """

    cores: int
    vmem_limit: int
    cycles: int

    def parameters(self) -> dict[str, Any]:
        """As `pl.pallas_call` takes them, with a grid of cores."""
        return {
            "grid": (self.cores,),
            "compiler_params": pltpu.CompilerParams(
                dimension_semantics=("arbitrary" if self.cores == 1 else "parallel",),
                vmem_limit_bytes=self.vmem_limit,
                # The kernels' own ranges are in bounds by construction, and checks take as many
                # bundles as an item's copies do.
                disable_bounds_checks=True,
            ),
            "metadata": {"estimated_cycles": str(self.cycles)},
        }


class Copies:
    """Copies between HBM and slots that are started together, and later awaited together.

    To wait for copies, a kernel describes them again: only their sizes and semaphores count.
    """

    def __init__(self) -> None:
        self._groups: list[tuple[Any, list[Any]]] = []

    def add(self, source: Any, destination: Any, semaphore: Any, when: Any = True) -> None:
        """One more, that is there `when` a scalar condition holds."""
        copy = pltpu.make_async_copy(source, destination, semaphore)
        for condition, copies in self._groups:
            if condition is when:
                copies.append(copy)
                return
        self._groups.append((when, [copy]))

    def start(self) -> None:
        """Starts them all."""
        self._each(lambda copy: copy.start())

    def wait(self) -> None:
        """Waits until all have arrived."""
        self._each(lambda copy: copy.wait())

    def _each(self, act: Callable[[Any], None]) -> None:
        for condition, copies in self._groups:

            @pl.when(condition)
            def _(copies: list[Any] = copies) -> None:
                for copy in copies:
                    act(copy)


def dot(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """f32 product of two matrices over an axis of each; of f32 ones as exact as there is."""
    return lax.dot_general(
        a,
        b,
        (((contracted[0],), (contracted[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def wide(x: jax.Array, width: int) -> jax.Array:
    """[rows, LANES], a row's number in all its lanes, to [rows, width]: the registers again."""
    return jnp.concatenate([x] * -(-width // LANES), axis=1)[:, :width]


def along_lanes(x: jax.Array) -> jax.Array:
    """[rows, LANES], a row's number in all its lanes, to [1, rows].

    Takes the diagonal of each square, which is less work than to transpose it.
    """
    square = (LANES, LANES)
    row, lane = (lax.broadcasted_iota(jnp.int32, square, axis) for axis in (0, 1))
    diagonals = [
        jnp.where(row == lane, x[start : start + LANES], 0).sum(axis=0, keepdims=True)
        for start in range(0, x.shape[0], LANES)
    ]
    return jnp.concatenate(diagonals, axis=1)


def pad_up(length: int, multiple: int) -> int:
    """The least multiple that is not below."""
    return -(-length // multiple) * multiple
