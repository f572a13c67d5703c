"""The description of a GPU from which XLA compiles for it on a machine that has none.

XLA takes it as the text form of ``stream_executor.GpuTargetConfigProto``
(``xla/stream_executor/device_description.proto``)::

    topology = jax.experimental.topologies.get_topology_desc(
        platform="cuda", topology="1x1x1",
        target_config=gpu_target_config(load_machine("h200")),
    )

Hardware numbers come from the machine. What follows from the compute capability, from 7.0 on,
stands here, and so do the versions of the software stack, which only choose among code paths:
nothing is linked against them.
"""

from __future__ import annotations

from hlo_passes.errors import NotOnMachineError
from hlo_passes.hardware.machine import Machine

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
_LIMITS = """\
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
"""

# Threads of one multiprocessor, of the same table; 2048 elsewhere.
_THREADS_PER_CORE = {"7.5": 1024, "8.6": 1536, "8.7": 1536, "8.9": 1536, "12.0": 1536, "12.1": 1536}

# The stack that jax-cuda13-plugin 0.12 was seen to accept; of h200.txtpb in XLA.
_SOFTWARE = """\
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
  cub_version: "3.1.2"
"""


def gpu_target_config(machine: Machine) -> str:
    """Returns the text proto that `get_topology_desc` takes as ``target_config``.

    Raises:
      NotOnMachineError: when the machine is no GPU, or its file has no ``[gpu]`` table.
    """
    gpu = machine.gpu
    if gpu is None:
        raise NotOnMachineError(machine.name, "GPU description", "gpu", [])
    major, minor = gpu.compute_capability.split(".")
    # XLA writes the architecture as nvcc does: sm_90a is "9.0a".
    suffix = {"ACCELERATED_FEATURES": "a", "FAMILY_COMPATIBLE_FEATURES": "f"}.get(
        gpu.feature_extension, ""
    )
    return f"""\
gpu_device_info {{
{_LIMITS}\
  threads_per_core_limit: {_THREADS_PER_CORE.get(gpu.compute_capability, 2048)}
  core_count: {gpu.core_count}
  fpus_per_core: {gpu.fpus_per_core}
  shared_memory_per_core: {gpu.shared_memory_per_core_bytes}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block_optin_bytes}
  l2_cache_size: {gpu.l2_cache_bytes}
  clock_rate_ghz: {machine.clock_hz / 1e9:g}
  memory_bandwidth: {machine.hbm_bytes_per_s:.0f}
  device_memory_size: {machine.device_memory.capacity_bytes}
  pcie_bandwidth: {gpu.pcie_bytes_per_s}
  cuda_compute_capability {{
    major: {major}
    minor: {minor}
    feature_extension: {gpu.feature_extension}
  }}
  device_vendor: "NVIDIA Corporation"
  name: "{gpu.description}"
  platform_version: "Compute Capability {gpu.compute_capability}{suffix}"
  device_address_bits: 64
  ecc_enabled: true
{_SOFTWARE}\
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.description}"
"""
