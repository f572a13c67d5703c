"""Rings of slots in SMEM, by which one warpgroup hands tiles to others.

Step i of a kernel's loop uses slot i mod `slots`. Each slot has two mbarriers, and a warpgroup
that waits for one waits for each of its phases, once: Mosaic GPU keeps the parity of the next
phase in a register of the warpgroup.

    barrier     arrivals a phase                   waited for by
    full[s]     one a copy: TMA, once it landed    each consumer, before it reads slot s
    empty[s]    one a consumer, once its wgmmas    the producer, before it fills slot s again
                that read slot s are done          and, of the last fills, before it ends

Phase n of full[s] completes after phase n - 1 of empty[s], and that after each consumer saw
phase n - 1 of full[s]. So nobody is ever two phases apart, which is as much as a parity tells.
It is why a consumer that has no use for a step still waits for `full` before it arrives at
`empty`: arriving early, it would count twice in one phase and stand in for the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.gpu_tiles import CONSUMERS
from pallas_kernels.attention.spans import Scalar
from pallas_kernels.gpu import Ref


def ring_barriers(slots: int, copies: int = 1, consumers: int = CONSUMERS) -> tuple[Any, Any]:
    """Scratch types of `Ring.full` and `Ring.empty`, where `copies` fill one slot."""
    return (
        plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
        plgpu.Barrier(num_arrivals=consumers, num_barriers=slots),
    )


@dataclass(frozen=True)
class Ring:
    """Slots that the producer fills and the consumers empty; the module has the protocol.

    Attributes:
      slots: how many.
      full, empty: `slots` barriers each.
    """

    slots: int
    full: Ref
    empty: Ref

    def slot(self, step: Scalar) -> jax.Array:
        """Which slot a step uses."""
        return lax.rem(jnp.int32(step), jnp.int32(self.slots))

    def await_full(self, step: Scalar) -> None:
        """Consumer: before it reads the slot of `step`."""
        plgpu.barrier_wait(self.full.at[self.slot(step)])

    def release(self, step: Scalar) -> None:
        """Consumer: once it has read the slot of `step`."""
        plgpu.barrier_arrive(self.empty.at[self.slot(step)])

    def await_empty(self, step: Scalar) -> None:
        """Producer: before it writes to the slot of `step`."""

        @pl.when(step >= self.slots)
        def _() -> None:
            plgpu.barrier_wait(self.empty.at[self.slot(step)])

    def hand_over(self, step: Scalar) -> None:
        """Producer: once it has written to the slot of `step` itself."""
        plgpu.barrier_arrive(self.full.at[self.slot(step)])

    def fill(self, step: Scalar, *copies: tuple[Ref, Ref]) -> None:
        """Producer: has TMA write to the slot of `step`, from GMEM to slots each."""
        self.await_empty(step)
        slot = self.slot(step)
        for source, slots in copies:
            plgpu.copy_gmem_to_smem(source, slots.at[slot], self.full.at[slot])

    def drain(self, steps: Scalar) -> None:
        """Producer: awaits the releases of the last slots, of `steps` altogether."""

        @pl.loop(jnp.maximum(steps - self.slots, 0), steps)
        def _(step: jax.Array) -> None:
            plgpu.barrier_wait(self.empty.at[self.slot(step)])
