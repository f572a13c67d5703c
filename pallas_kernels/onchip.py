"""What a kernel holds on the chip: bytes of each buffer, and where each lies.

A kernel's buffers are named, with slots and a live range in phases of its loop; those that are
never needed together may share bytes. The offsets are those of memplan's own buffer assignment
(`hlo_passes.memory.assignment`), whose lower bound is the largest sum of what is live at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from hlo_passes.memory.assignment import assign_offsets, max_live_load
from hlo_passes.plan import LiveRange

# A vector register of a TPU: 8 rows of 128 numbers of 32 bits; narrower ones are packed in rows.
_SUBLANES, _LANES = 8, 128


@dataclass(frozen=True)
class Buffer:
    """Bytes on the chip under one name.

    Attributes:
      name: as the kernel calls it.
      size: bytes of all its slots, as they lie on the chip.
      live: phases of the kernel's loop in which it is needed, half-open.
    """

    name: str
    size: int
    live: LiveRange


@dataclass(frozen=True)
class Layout:
    """Where buffers lie.

    Attributes:
      offsets: bytes, by name.
      total: bytes of all, with holes.
      lower_bound: the most that is live at once; no layout takes less.
    """

    offsets: Mapping[str, int]
    total: int
    lower_bound: int


def lay_out(buffers: Iterable[Buffer], alignment: int) -> Layout:
    """Assigns each buffer its bytes; those of one name whose lives meet do not overlap."""
    chosen = tuple(buffers)
    sizes, lives = [b.size for b in chosen], [b.live for b in chosen]
    packing = assign_offsets(sizes, lives, alignment)
    offsets = {b.name: offset for b, offset in zip(chosen, packing.offsets, strict=True)}
    return Layout(offsets, packing.total, max_live_load(sizes, lives))


def vmem_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Bytes of an array in VMEM, whose last two axes are filled up to whole tiles.

    A tile is 8 rows of 128 numbers; of fewer rows, the next power of two, but as many as share
    a row of a register.
    """
    itemsize = jnp.dtype(dtype).itemsize
    *leading, rows, lanes = (1, *shape) if len(shape) == 1 else shape
    tile = min(_SUBLANES, max(4 // itemsize, 1 << (rows - 1).bit_length()))
    filled = math.ceil(rows / tile) * tile * math.ceil(lanes / _LANES) * _LANES
    return math.prod(leading) * filled * itemsize


def vmem_total(scratch: Mapping[str, Any]) -> int:
    """Bytes of VMEM that a kernel's scratch shapes take, as the TPU compiler counts them."""
    return lay_out(vmem_buffers(scratch), alignment=1).total


def vmem_buffers(scratch: Mapping[str, Any]) -> list[Buffer]:
    """The buffers of a kernel's scratch shapes, needed throughout; semaphores are not in VMEM."""
    return [
        Buffer(name, vmem_bytes(memory.shape, memory.dtype), LiveRange(0, 1))
        for name, memory in scratch.items()
        if getattr(memory, "memory_space", None) == pltpu.VMEM
    ]
