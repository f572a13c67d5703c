"""Devices to compile for that need not be there: ``memplan.topology("v5e:2x2")``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from hlo_passes import xla
from hlo_passes.errors import CompilerMissingError, TopologyError
from hlo_passes.hardware.gpu_target import gpu_target_config
from hlo_passes.hardware.machine import Machine, load_machine
from hlo_passes.ir import HOST_MEMORY_SPACE

# Of each machine libtpu's name, the extent of one host, which every libtpu accepts, and how a
# chip's TensorCores are taken where jax's devices there are not libtpu's default.
_TPU_NAMES = {
    "tpu-v4": ("v4", "2x2x1", "megacore"),
    "tpu-v5e": ("v5e", "2x2", ""),
    "tpu-v5p": ("v5p", "2x2x1", ""),
    "tpu-v6e": ("v6e", "2x2", ""),
    "tpu7x": ("tpu7x", "2x2x1", ""),
}


# libtpu divides by each number: a 0 would end the process.
_EXTENT = re.compile(r"[1-9][0-9]*(x[1-9][0-9]*)*")


@dataclass(frozen=True)
class Topology:
    """Devices of one kind that programs can be compiled for.

    Attributes:
      name: ``"v5e:2x2"``, ``"h200:8"``.
      machine: the device's entry in the machine library.
      devices: compile-only jax devices.
    """

    name: str
    machine: Machine
    devices: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"<Topology {self.name}: {len(self.devices)} of {self.machine!r}>"

    @property
    def platform(self) -> str:
        return self.machine.platform

    def mesh(self, shape: Sequence[int] = (1,), axis_names: Sequence[str] = ("x",)) -> Any:
        """A mesh of the first ``prod(shape)`` devices.

        For GPUs it is an `AbstractMesh`: compile-only GPU devices have no memories, and a
        sharding on them would lose its memory kind.

        Raises:
          TopologyError: when there are fewer devices.
        """
        n = int(np.prod(shape))
        if n > len(self.devices):
            raise TopologyError(
                self.name, f"a mesh of {n} devices; the topology has {len(self.devices)}"
            )
        if self.platform == "gpu":
            return AbstractMesh(tuple(shape), tuple(axis_names), (AxisType.Auto,) * len(shape))
        return Mesh(np.array(self.devices[:n]).reshape(tuple(shape)), tuple(axis_names))

    def with_host_memory(self, capacity_bytes: int) -> Topology:
        """The same where each device has at least so many bytes of its host's memory. The
        machine library divides a host among all devices that it can have."""
        tiers = tuple(
            replace(t, capacity_bytes=max(t.capacity_bytes, capacity_bytes))
            if t.memory_space == HOST_MEMORY_SPACE
            else t
            for t in self.machine.tiers
        )
        return replace(self, machine=replace(self.machine, tiers=tiers))

    def sharding(self, memory_kind: str | None = None) -> Sharding:
        """One device of the topology holds the whole array."""
        return NamedSharding(self.mesh(), PartitionSpec(), memory_kind=memory_kind)


def topology(name: str) -> Topology:
    """Describes devices to compile for, whether or not they are there.

    Args:
      name: a machine (``"v5e"``, ``"h200"``), which means one device, or a machine and
        its extent: ``"v5e:2x2"``, ``"v5p:2x2x1"``, ``"h200:8"``.

    Raises:
      UnknownMachineError: when the machine library has no such machine.
      TopologyError: when the machine or its compiler has no topology of that extent.
      CompilerMissingError: when the compiler for it is not installed.
    """
    if not isinstance(name, str):
        raise TopologyError(name, "expected a machine's name")
    return _topology(name)


@cache
def _topology(name: str) -> Topology:
    machine_name, colon, extent = name.partition(":")
    machine = load_machine(machine_name)
    if colon and machine.platform == "cpu":
        raise TopologyError(name, "a cpu has no extent")
    if colon and _EXTENT.fullmatch(extent) is None:
        raise TopologyError(name, f"expected numbers of at least 1 after ':', found {extent!r}")
    return _described(name, machine, extent)


def one_of(machine: Machine) -> Topology:
    """Describes one device of a machine, which may be one that no library has.

    Raises:
      TopologyError, CompilerMissingError: as `topology`.
    """
    return _described(machine.name, machine, "")


def _described(name: str, machine: Machine, extent: str) -> Topology:
    if machine.platform == "tpu":
        devices = _tpu_devices(name, machine, extent)
    elif machine.platform == "gpu":
        devices = _gpu_devices(name, machine, extent)
    else:
        devices = xla.devices("cpu")
    return Topology(name, machine, tuple(devices))


def _tpu_devices(name: str, machine: Machine, extent: str) -> Sequence[Any]:
    if machine.name not in _TPU_NAMES:
        raise TopologyError(name, f"libtpu has no machine {machine.name!r} to compile for")
    prefix, one_host, config = _TPU_NAMES[machine.name]
    dimensions = one_host.count("x") + 1
    if any(size != "1" for size in extent.split("x")[dimensions:]):
        raise TopologyError(name, f"{machine.name} has {dimensions} dimensions")
    _require(name, "libtpu", "tpu")
    devices = _describe(name, lambda: xla.tpu_topology(f"{prefix}:{extent or one_host}", config))
    return devices if extent else devices[:1]


def _gpu_devices(name: str, machine: Machine, extent: str) -> Sequence[Any]:
    if "x" in extent:
        raise TopologyError(name, f"expected a number of GPUs after ':', found {extent!r}")
    if machine.gpu is None:
        raise TopologyError(
            name,
            f"{machine.name} has no [gpu] table, without which XLA compiles only where the GPU is",
        )
    _require(name, "jax_cuda13_plugin", "cuda")
    config = gpu_target_config(machine)
    return _describe(
        name, lambda: xla.cuda_topology(target_config=config, topology=f"1x1x{extent or 1}")
    )


def _require(name: str, package: str, extra: str) -> None:
    if find_spec(package) is None:
        raise CompilerMissingError(name, package, extra)


def _describe(name: str, describe: Callable[[], Any]) -> Sequence[Any]:
    try:
        return describe().devices
    except Exception as error:  # Plugins raise types of their own; their text is the reason.
        raise TopologyError(name, f"its compiler refuses it: {error}") from error
