"""Lowering and compiling for a target: devices that are here, or a topology."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
)

from hlo_passes import xla
from hlo_passes.errors import UnknownDeviceError, UnknownMachineError
from hlo_passes.hardware.machine import Machine, load_machine, machine_names
from memplan import __version__
from memplan.out_of_memory import is_exhausted
from memplan.signature import as_shape, bound_sharding, on_device, on_one_device
from memplan.topologies import Topology, one_of, topology


class Executable(Protocol):
    """What memplan needs of a compiled program; ``jax.stages.Compiled`` has it."""

    def memory_analysis(self) -> Any: ...
    def cost_analysis(self) -> Any: ...
    def as_text(self) -> Any: ...
    def runtime_executable(self) -> Any: ...


class TopologyExecutable:
    """A program compiled by a compile-only client, in the form of ``jax.stages.Compiled``."""

    def __init__(self, executable: Any) -> None:
        self._executable = executable

    def memory_analysis(self) -> Any:
        return self._executable.get_compiled_memory_stats()

    def cost_analysis(self) -> Any:
        return self._executable.cost_analysis()

    def as_text(self) -> str:
        return "\n\n".join(m.to_string() for m in self._executable.hlo_modules())

    def runtime_executable(self) -> Any:
        return self._executable


@dataclass(frozen=True)
class Target:
    """Where a program will run.

    Attributes:
      machine: one device of it.
      topology: None when the devices are here.
    """

    machine: Machine
    topology: Topology | None

    @property
    def platform(self) -> str:
        return self.machine.platform

    @property
    def absent(self) -> Topology | None:
        """The devices, when they are not here."""
        return None if self.platform == "cpu" else self.topology

    @cached_property
    def capacity_bytes(self) -> int:
        """Device memory: what the machine has, or what the devices that are here let programs have
        of it (``XLA_PYTHON_CLIENT_MEM_FRACTION`` on a GPU), where that is less."""
        capacity = self.machine.device_memory.capacity_bytes
        if self.topology is not None or self.platform == "cpu":
            return capacity
        limit = (xla.devices()[0].memory_stats() or {}).get("bytes_limit", capacity)
        return min(capacity, limit)

    @property
    def versions(self) -> Mapping[str, str]:
        """Of the packages that make executables for it."""
        compiler = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-pjrt",), "cpu": ()}[self.platform]
        found = {"memplan": __version__}
        for package in ("jax", "jaxlib", *compiler):
            with suppress(PackageNotFoundError):  # A pod's own.
                found[package] = version(package)
        return found

    def arguments_seen(self, leaves: Sequence[Any], bound_elsewhere: bool) -> list[Any]:
        """The flat arguments as the traced function sees them: on the device; for absent
        hardware, shapes on it.

        Args:
          bound_elsewhere: the function's own shardings say which devices it runs on.
        """
        if self.topology is None:
            return [on_device(leaf) for leaf in leaves]
        # Arrays that are here say nothing about the devices that are not.
        shardings = [None if isinstance(a, jax.Array) else bound_sharding(a) for a in leaves]
        if not bound_elsewhere and not any(s is not None for s in shardings):
            shardings = [self.topology.sharding()] * len(leaves)
        return [as_shape(leaf, s) for leaf, s in zip(leaves, shardings, strict=True)]

    @contextmanager
    def seen_by_kernels(self) -> Generator[None]:
        """Pallas kernels that ask, while traced or lowered, what they are for, are told this."""
        mesh = jax.sharding.get_abstract_mesh()
        if self.absent is None or mesh.abstract_device is not None:
            yield
            return
        device = self.absent.devices[0]
        cores = getattr(device, "num_cores", None)
        abstract = AbstractDevice(device.device_kind, cores, device.platform)
        with jax.sharding.use_abstract_mesh(mesh.update(abstract_device=abstract)):
            yield

    def lower(self, traced: jax.stages.Traced, options: Mapping[str, Any]) -> Program:
        """Lowers a traced function to StableHLO for this target.

        Args:
          options: the XLA options that the function was traced with.
        """
        if self.topology is None:
            lowered = traced.lower()
        else:
            platform = {"gpu": "cuda"}.get(self.platform, self.platform)
            callbacks = xla.callbacks_for_absent_gpu() if platform == "cuda" else nullcontext()
            with self.seen_by_kernels(), callbacks:
                lowered = traced.lower(lowering_platforms=(platform,))
        return Program(lowered, self, options)


@dataclass(frozen=True)
class Program:
    """A lowered program and the way to compile it.

    Attributes:
      options: the XLA options that it was traced with.
    """

    lowered: jax.stages.Lowered
    target: Target
    options: Mapping[str, Any]

    @property
    def stablehlo(self) -> Any:
        return self.lowered.compiler_ir("stablehlo")

    @cached_property
    def arguments(self) -> xla.LoweredArguments:
        return xla.lowered_arguments(self.lowered)

    @property
    def device(self) -> Any:
        """One of those that it runs on."""
        absent = self.target.absent
        devices = self.arguments.devices if absent is None else absent.devices
        assert devices is not None
        return devices[0]

    def replicated(self) -> Sharding:
        """Each device that the program runs on holds the whole array."""
        found = self.arguments
        for sharding in found.shardings.values():
            if isinstance(sharding, NamedSharding):
                return NamedSharding(sharding.mesh, PartitionSpec())
        if not found.mesh.empty:
            return NamedSharding(found.mesh, PartitionSpec())
        if found.devices is None:
            mesh = AbstractMesh((found.device_count,), ("devices",), (AxisType.Auto,))
            return NamedSharding(mesh, PartitionSpec())
        if len(found.devices) == 1:
            return on_one_device(found.devices[0])
        return NamedSharding(Mesh(np.array(found.devices), ("devices",)), PartitionSpec())

    def compiler(self, options: Mapping[str, Any] | None) -> Callable[[], Executable]:
        """Returns a function that compiles the program.

        Args:
          options: further XLA options, as ``Lowered.compile(compiler_options)`` takes them.
        """
        absent, bound = self.target.absent, self.arguments.devices
        # jax cannot compile for GPUs that are not here, and a function without arguments it
        # compiles for one of the devices that are.
        if absent is None or (bound is not None and bound[0].platform == absent.platform == "tpu"):
            # Without options jax would hand out its first executable again, whatever a hook is
            # to make of the program this time.
            return lambda: self.lowered.compile(compiler_options=dict(options or {}))
        devices = absent.devices[: self.arguments.device_count]
        merged = {**self.options, **(options or {})}
        return lambda: TopologyExecutable(xla.compile_for_topology(self.stablehlo, devices, merged))

    def fitting(self, options: Mapping[str, Any] | None) -> Executable | None:
        """Compiles the program; None when it does not fit the device."""
        try:
            return self.compiler(options)()
        except jax.errors.JaxRuntimeError as error:
            if not is_exhausted(error):
                raise
            return None


def check_machine(name: Any) -> None:
    """Checks what is known of ``machine=`` before jax looks for its devices, which is not to happen
    where a function is decorated.

    Raises:
      UnknownMachineError, TopologyError, CompilerMissingError: as `find_target`.
    """
    if isinstance(name, str) and ":" in name:
        topology(name)
    else:
        load_machine(name)


def _topology_of(sharding: Any) -> Topology | None:
    """The devices of a sharding, if they are not here."""
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        devices = tuple(sharding.mesh.devices.flat)
    elif isinstance(sharding, Sharding) and not isinstance(sharding, NamedSharding):
        devices = tuple(sorted(sharding.device_set, key=lambda d: d.id))
    else:
        return None
    if not devices or not xla.is_absent(devices[0]):
        return None
    machine = load_machine(devices[0].device_kind)
    return Topology(f"{machine.name}:{len(devices)}", machine, devices)


def device_bytes(executable: Executable, hosted_bytes: int) -> int:
    """Returns arguments + outputs + temporaries − aliased bytes on the device, as XLA
    reports them for the final executable.

    Args:
      hosted_bytes: of the arguments that live on the host, where XLA sees one memory and counts
        them among the device's. Elsewhere 0.
    """
    m = executable.memory_analysis()
    total = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes
    return total - m.alias_size_in_bytes - hosted_bytes


def _machine_of(device: Any) -> Machine:
    try:
        return load_machine(device.device_kind)
    except UnknownMachineError:
        raise UnknownDeviceError(device.device_kind, machine_names()) from None


def find_target(machine: str | Machine | Topology | None, shardings: Iterable[Any] = ()) -> Target:
    """Resolves the ``machine=`` option.

    Args:
      shardings: of arguments and results, as far as the user gives them. Without `machine`,
        compile-only devices among them are what it is compiled for.
      machine: a topology or its name (``"v5e:2x2"``): compile for it. A machine, or its name
        or file: what the devices that are here should be taken for when they are of that
        platform, else one device of it that need not be here. None: go by
        ``jax.devices()[0].device_kind``.

    Raises:
      UnknownMachineError: when `machine` is in no machine file.
      UnknownDeviceError: when the device kind is in none.
    """
    here = xla.devices()  # Before jax looks for them itself, which is not quiet everywhere.
    if isinstance(machine, Topology):
        return Target(machine.machine, machine)
    if machine is None:
        found = next((t for t in map(_topology_of, shardings) if t is not None), None)
        if found is not None:
            return Target(found.machine, found)
        return Target(_machine_of(here[0]), None)
    if isinstance(machine, str) and ":" in machine:
        found = topology(machine)
        return Target(found.machine, found)
    if not isinstance(machine, Machine):
        machine = load_machine(machine)
    if machine.platform == here[0].platform:
        return Target(machine, None)
    return Target(machine, one_of(machine))
