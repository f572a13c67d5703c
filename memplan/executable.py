"""Lowering and compiling for a target: devices that are here, or a topology."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from hlo_passes import xla
from hlo_passes.errors import NotExecutableError
from hlo_passes.machine import Machine, load_machine
from memplan.topology import Topology, topology


class Executable(Protocol):
    """What memplan needs of a compiled program; ``jax.stages.Compiled`` has it."""

    def memory_analysis(self) -> Any: ...
    def cost_analysis(self) -> Any: ...
    def as_text(self) -> Any: ...
    def runtime_executable(self) -> Any: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class TopologyExecutable:
    """A program compiled by a compile-only client, in the form of ``jax.stages.Compiled``."""

    def __init__(self, name: str, executable: Any) -> None:
        self._name = name
        self._executable = executable

    def memory_analysis(self) -> Any:
        return self._executable.get_compiled_memory_stats()

    def cost_analysis(self) -> Any:
        return self._executable.cost_analysis()

    def as_text(self) -> str:
        return "\n\n".join(m.to_string() for m in self._executable.hlo_modules())

    def runtime_executable(self) -> Any:
        return self._executable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotExecutableError(self._name)


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

    def default_sharding(self) -> Sharding:
        """Where an argument goes that says nothing itself."""
        if self.topology is not None:
            return self.topology.sharding()
        return SingleDeviceSharding(jax.devices()[0])

    def lower(self, traced: jax.stages.Traced) -> Program:
        """Lowers a traced function to StableHLO for this target."""
        if self.topology is None:
            lowered = traced.lower()
        else:
            platform = {"gpu": "cuda"}.get(self.platform, self.platform)
            lowered = traced.lower(lowering_platforms=(platform,))
        return Program(lowered, self)


@dataclass(frozen=True)
class Program:
    """A lowered program and the way to compile it."""

    lowered: jax.stages.Lowered
    target: Target

    @property
    def stablehlo(self) -> Any:
        return self.lowered.compiler_ir("stablehlo")

    def compiler(self, options: Mapping[str, Any] | None) -> Callable[[], Executable]:
        """Returns a function that compiles the program.

        Args:
          options: XLA options, as ``jax.jit(compiler_options=...)`` takes them.
        """
        absent = self.target.topology
        if absent is None or absent.platform != "gpu":
            return lambda: self.lowered.compile(compiler_options=dict(options) if options else None)
        attributes = self.stablehlo.operation.attributes
        devices = absent.devices[: attributes["mhlo.num_partitions"].value]
        return lambda: TopologyExecutable(
            absent.name, xla.compile_for_topology(self.stablehlo, devices, options or {})
        )


def device_bytes(executable: Executable, hosted_bytes: int) -> int:
    """Returns arguments + outputs + temporaries − aliased bytes on the device, as XLA
    reports them for the final executable.

    Args:
      hosted_bytes: on CPU, bytes of the arguments that live on the host: XLA:CPU counts
        them among the device's arguments. Elsewhere 0.
    """
    m = executable.memory_analysis()
    total = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes
    return total - m.alias_size_in_bytes - hosted_bytes


def find_target(machine: str | Machine | Topology | None) -> Target:
    """Resolves the ``machine=`` option.

    Args:
      machine: a topology or its name (``"v5e:2x2"``): compile for it. A machine, or its name
        or file: what the devices that are here should be taken for when they are of that
        platform, else one device of it that need not be here. None: go by
        ``jax.devices()[0].device_kind``.

    Raises:
      UnknownMachineError: when the name or the device kind is in no machine file.
    """
    if isinstance(machine, Topology):
        return Target(machine.machine, machine)
    if machine is None:
        return Target(load_machine(jax.devices()[0].device_kind), None)
    if isinstance(machine, str):
        if ":" in machine:
            found = topology(machine)
            return Target(found.machine, found)
        machine = load_machine(machine)
    if machine.platform == jax.default_backend():
        return Target(machine, None)
    return Target(machine, topology(machine.name))
