"""Compiles the corpus: `python -m tests.corpus.generate [--target v5e] [program ...]`.

Writes ``modules/<program>.<target>.pb.xz``, the final `HloModuleProto` of each program on
each target, and XLA's own ``memory_analysis`` of it in ``memory.json``, so that the tests
need no compiler. Run it again when a new XLA should be compared with.
"""

from __future__ import annotations

import os

# Before jax is imported: the CPU stands for four devices.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import argparse
import json
import lzma
import math
import re
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from hlo_passes.proto import hlo_pb2
from hlo_passes.xla import compile_for_topology
from memplan.topologies import Topology, topology
from tests.corpus import MEMORY, MODULES
from tests.corpus.programs import PROGRAMS, Argument, Program

TARGETS = {"v5e": "v5e:2x2", "h200": "h200:4", "cpu": "cpu-cxl"}

_SIZES = ("argument", "output", "alias", "temp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("program", nargs="*", help="default: all")
    options = parser.parse_args()
    MODULES.mkdir(exist_ok=True)
    memory = json.loads(MEMORY.read_text()) if MEMORY.exists() else {}
    for target in options.target or TARGETS:
        devices = topology(TARGETS[target])
        for name in options.program or PROGRAMS:
            key = f"{name}.{target}"
            try:
                proto, stats = compile_program(PROGRAMS[name], devices)
            except Exception as error:  # A compiler may lack an operation: leave it out.
                print(f"{key}: {type(error).__name__}: {str(error)[:300]}")
                continue
            data = lzma.compress(strip_paths(proto), preset=9 | lzma.PRESET_EXTREME)
            (MODULES / f"{key}.pb.xz").write_bytes(data)
            memory[key] = {size: getattr(stats, f"{size}_size_in_bytes") for size in _SIZES}
            print(f"{key}: {len(data)} bytes, {memory[key]}")
    MEMORY.write_text(json.dumps(dict(sorted(memory.items())), indent=1) + "\n")


def compile_program(program: Program, devices: Topology) -> tuple[bytes, Any]:
    """Returns the final module and XLA's memory statistics."""
    size = math.prod(program.mesh.values())
    mesh = devices.mesh(tuple(program.mesh.values()), tuple(program.mesh))

    def spec(argument: Argument) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(
            mesh,
            PartitionSpec(*argument.partition),
            memory_kind="pinned_host" if argument.host else "device",
        )
        return jax.ShapeDtypeStruct(argument.shape, argument.dtype, sharding=sharding)

    arguments = jax.tree.map(spec, list(program.arguments))
    traced = jax.jit(program.function, donate_argnums=program.donate).trace(*arguments)
    if devices.platform == "gpu":
        lowered = traced.lower(lowering_platforms=("cuda",))
        module = lowered.compiler_ir("stablehlo")
        executable: Any = compile_for_topology(module, devices.devices[:size], {})
    else:
        executable = traced.lower().compile().runtime_executable()
    final = executable.hlo_modules()[0].as_serialized_hlo_module_proto()
    return final, executable.get_compiled_memory_stats()


def strip_paths(data: bytes) -> bytes:
    """Makes the source files of a module relative, whatever machine compiled it."""
    proto = hlo_pb2.HloModuleProto.FromString(data)
    index = proto.stack_frame_index
    root = f"{Path(__file__).parents[2]}/"
    for n, name in enumerate(index.file_names):
        index.file_names[n] = re.sub(
            r"^.*/(?:site-packages|lib/python[\d.]+)/", "", name
        ).removeprefix(root)
    return proto.SerializeToString()


if __name__ == "__main__":
    main()
