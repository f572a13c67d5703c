"""Captures the programs of the dojo: `python -m experiments.dojo_capture [program ...]`.

Each is scheduled by the target's own compiler at its planning size, and written into
``dojo_programs/`` without what says where it was compiled. No accelerator is needed.
"""

from __future__ import annotations

import lzma
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import jax

from hlo_passes.ir import Module
from hlo_passes.rewrite import inject
from memplan.api import jit
from memplan.topologies import topology
from models.corpus import CORPUS

MODULES = Path(__file__).parent / "dojo_programs"

TARGETS = ("h200", "v5e")

PROGRAMS = {
    "llama-prefill": True,
    "moe-prefill": True,
    "dit-train": False,
    "llama-train": False,
    "vit-train": False,
}
"""Of `models.corpus`, and whether every argument that may be there is in host memory: what is short
of memory is short of it for arguments, or for temporaries."""


def captured(name: str, target: str) -> Module:
    """Returns a program as XLA schedules it for a target."""
    entry, where = CORPUS[name], topology(target)
    fun, args = entry.planning()
    step = jit(fun, hbm="1TiB", machine=where, donate_argnames=entry.donate)
    placing = step.lower(*args).placing
    hosting = placing.asked
    if PROGRAMS[name]:
        hosting = replace(hosting, arguments=placing.candidates)
    program = placing.placed(hosting, scheduled=False)
    return inject.capture(where.platform, program.stablehlo, program.compiler(None))


def write(module: Module, path: Path) -> None:
    """Writes a module without its metadata: planning needs none, and it names files of the machine
    that compiled it."""
    proto = module.to_proto()
    proto.ClearField("stack_frame_index")
    for computation in proto.computations:
        for i in computation.instructions:
            i.ClearField("metadata")
    path.write_bytes(lzma.compress(proto.SerializeToString(), preset=9 | lzma.PRESET_EXTREME))


def main(programs: Iterable[str]) -> None:
    jax.config.update("jax_platforms", "cpu")
    MODULES.mkdir(exist_ok=True)
    for target in TARGETS:
        for name in programs:
            path = MODULES / f"{name}.{target}.pb.xz"
            write(captured(name, target), path)
            print(path.name, path.stat().st_size, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or PROGRAMS)
