"""What a kernel is compiled for, and what that has on the chip.

jax compiles for hardware that is not there when the mesh in use names an abstract device; the
kernels ask there first, then the default device:

    mesh = AbstractMesh((), (), abstract_device=AbstractDevice("TPU v6e", 1, "tpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        jax.jit(f).trace(x).lower(lowering_platforms=("tpu",))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax

type Platform = Literal["cpu", "gpu", "tpu"]

# By what a device kind begins with, in this order.
_GENERATIONS = {
    "tpu": (
        ("tpu v5 lite", "v5e"),
        ("tpu v5e", "v5e"),
        ("tpu v5", "v5p"),
        ("tpu v6", "v6e"),
        ("tpu7x", "tpu7x"),
        ("tpu v7", "tpu7x"),
    ),
    "gpu": (
        ("nvidia h100", "sm90"),
        ("nvidia h200", "sm90"),
        ("nvidia gh200", "sm90"),
        ("nvidia b200", "sm100"),
        ("nvidia gb200", "sm100"),
        ("nvidia a100", "sm80"),
        ("nvidia a30", "sm80"),
        ("nvidia a10", "sm86"),
        ("nvidia a40", "sm86"),
        ("nvidia rtx a", "sm86"),
        ("nvidia geforce rtx 30", "sm86"),
        ("nvidia l4", "sm89"),
        ("nvidia geforce rtx 40", "sm89"),
    ),
    "cpu": (("", "cpu"),),
}


@dataclass(frozen=True)
class Target:
    """A kind of device.

    Attributes:
      platform: ``"tpu"``, ``"gpu"`` or ``"cpu"``.
      kind: the device kind as jax gives it, as ``"TPU v6 lite"``.
      generation: ``"v5e"``, ``"v5p"``, ``"v6e"``, ``"tpu7x"``, ``"sm80"``, ``"sm86"``, ``"sm89"``,
        ``"sm90"``, ``"sm100"``, ``"cpu"``, or ``"unknown"``.
    """

    platform: Platform
    kind: str
    generation: str

    def __str__(self) -> str:
        return f"{self.kind} ({self.generation})" if self.platform != "cpu" else "CPU"


@dataclass(frozen=True)
class Chip:
    """What the kernels know of a TPU.

    Attributes:
      generation: as of `Target`.
      cores: TensorCores of a jax device.
      vmem_bytes: of each; what `jax.experimental.pallas.tpu.get_tpu_info` says.
    """

    generation: str
    cores: int
    vmem_bytes: int


TPUS = {
    "v5e": Chip("v5e", 1, 128 << 20),
    "v5p": Chip("v5p", 2, 64 << 20),
    "v6e": Chip("v6e", 1, 128 << 20),
    "tpu7x": Chip("tpu7x", 1, 64 << 20),
}
"""The TPUs that the kernels are made for, by generation."""


def target_of(platform: str, kind: str) -> Target:
    """The target of a device, from its platform and kind as jax names them."""
    known: dict[str, Platform] = {"cuda": "gpu", "gpu": "gpu", "tpu": "tpu"}
    family = known.get(platform, "cpu")
    for start, generation in _GENERATIONS[family]:
        if kind.lower().startswith(start):
            return Target(family, kind, generation)
    return Target(family, kind, "unknown")


def current_target() -> Target:
    """What the function that is being traced will be compiled for."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return target_of(abstract.platform or "cpu", abstract.device_kind)
    # The name of a platform, or one of its devices; None where `jax.default_device` sets none.
    default = jax.config.jax_default_device
    device = default if isinstance(default, jax.Device) else jax.devices(default)[0]
    return target_of(device.platform, device.device_kind)
