"""What the compilers of a GPU say of a Mosaic GPU kernel: registers, spills, SMEM, instructions.

`gpu_evidence` compiles a function for a machine that need not be there, in a process of its own,
with the dumps of Mosaic GPU turned on (``MOSAIC_GPU_DUMP_*``, which the compiler reads from the
environment; seen with jax 0.11 and 0.12):

    function ─► lowered ───► <kernel>_<n>.resources.txt ──┐
                   └► compiled ─► <kernel>_<m>.{ptx,ptxas} ─┴─► KernelEvidence
                                       ├─ the loops that multiply (`ptx`)
                                       └─ ptxas, nvdisasm ─► Sass, where both are installed

Kernels are lowered in one order and compiled in another: of several with one name, the n-th
that was lowered is taken for the n-th that was compiled.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from hlo_passes import xla
from hlo_passes.errors import KernelCompilationError
from memplan.kernels.ptx import Loop, read_loops, read_threads
from memplan.topologies import topology


@dataclass(frozen=True)
class Sass:
    """The instructions of a kernel.

    Attributes:
      instructions: how many.
      opcodes: how many of each, by name without modifiers: ``"HGMMA"``, ``"FFMA"``.
      highest_register: that any uses: more than ptxas reports where setmaxnreg raises the limit.
    """

    instructions: int
    opcodes: Mapping[str, int]
    highest_register: int


@dataclass(frozen=True)
class KernelEvidence:
    """What ptxas and Mosaic GPU report of one kernel.

    Attributes:
      name: of the kernel.
      registers: of a thread, at launch.
      spill_store_bytes, spill_load_bytes: of a thread, to memory and back.
      smem_bytes: of a thread block, the tiles and the barriers.
      threads: of a thread block.
      serialised: whether ptxas gave up on asynchronous wgmma (its notes C7510 to C7514).
      loops: those that multiply.
      sass: None where ptxas or nvdisasm is not installed.
    """

    name: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    smem_bytes: int
    threads: int
    serialised: bool
    loops: tuple[Loop, ...]
    sass: Sass | None

    @property
    def spills(self) -> bool:
        return self.spill_store_bytes + self.spill_load_bytes > 0


@dataclass(frozen=True)
class Job:
    """A function to compile.

    Attributes:
      function: importable, or a `functools.partial` of one: it is pickled.
      arguments: `jax.ShapeDtypeStruct`s, or trees of them.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "function")


def gpu_evidence(
    function: Callable[..., Any], *arguments: Any, machine: str = "h200"
) -> tuple[KernelEvidence, ...]:
    """Compiles a function for a GPU and reads what its kernels take.

    Args:
      function, arguments: as of `Job`.
      machine: of the machine library.

    Returns:
      Of each kernel, sorted by name.

    Raises:
      KernelCompilationError: when it does not lower or compile.
    """
    (found,) = each_gpu_evidence([Job(function, arguments)], machine)
    if isinstance(found, KernelCompilationError):
        raise found
    return found


def each_gpu_evidence(
    jobs: Sequence[Job], machine: str = "h200"
) -> Iterator[tuple[KernelEvidence, ...] | KernelCompilationError]:
    """`gpu_evidence` of one job after another, in one process as long as that lives.

    Yields:
      Of each job, as soon as it is done, what `gpu_evidence` returns or would raise.
    """
    done = 0
    while done < len(jobs):
        for found in _one_process(jobs[done:], machine):
            done += 1
            yield found


def _one_process(
    jobs: Sequence[Job], machine: str
) -> Iterator[tuple[KernelEvidence, ...] | KernelCompilationError]:
    """Of all jobs, or of those up to the one that ended the process."""
    with tempfile.TemporaryDirectory() as dump, tempfile.TemporaryFile() as written:
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "MOSAIC_GPU_DUMP_TO": dump,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        with subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=written,
            env=environment,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                pickle.dump((jobs, machine, dump), process.stdin)
                process.stdin.close()
                for number, job in enumerate(jobs):
                    reason = process.stdout.readline()
                    if not reason:
                        process.wait()
                        written.seek(0)
                        yield KernelCompilationError(job.name, machine, written.read().decode())
                        return
                    error = json.loads(reason)
                    if error is None:
                        yield read_evidence(Path(dump, str(number)))
                    else:
                        yield KernelCompilationError(job.name, machine, error)
            finally:
                # Nobody may want the rest.
                process.kill()


def read_evidence(folder: Path) -> tuple[KernelEvidence, ...]:
    """Reads what one process dumped."""
    reports, resources = _by_kernel(folder, ".ptxas"), _by_kernel(folder, ".resources.txt")
    return tuple(
        _kernel(name, *files)
        for name, paths in reports.items()
        for files in zip(paths, resources[name], strict=True)
    )


def _by_kernel(folder: Path, suffix: str) -> dict[str, list[Path]]:
    """The files <kernel>_<n><suffix>, by kernel, in the order of n."""
    found: dict[str, list[tuple[int, Path]]] = {}
    for path in folder.glob(f"*{suffix}"):
        kernel, _, number = path.name.removesuffix(suffix).rpartition("_")
        found.setdefault(kernel, []).append((int(number), path))
    return {kernel: [path for _, path in sorted(files)] for kernel, files in sorted(found.items())}


def _kernel(name: str, report_file: Path, resources_file: Path) -> KernelEvidence:
    report, resources = report_file.read_text(), resources_file.read_text()
    ptx = report_file.with_suffix(".ptx").read_text()
    barriers = re.findall(r"Barrier\([^)]*num_barriers=(\d+)[^)]*\): (\d+)", resources)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert spills is not None, report
    return KernelEvidence(
        name=name,
        registers=_number(r"Used (\d+) registers", report),
        spill_store_bytes=int(spills[1]),
        spill_load_bytes=int(spills[2]),
        smem_bytes=_number(r"smem_scratch_bytes=(\d+)", resources)
        + 8 * sum(int(n) * int(times) for n, times in barriers),
        serialised="wgmma.mma_async instructions are serialized" in report,
        threads=read_threads(ptx),
        loops=read_loops(ptx),
        sass=_disassemble(report_file.with_suffix(".ptx")),
    )


def read_sass(text: str) -> Sass:
    """Reads what ``nvdisasm -c`` writes."""
    opcodes = Counter(
        re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", text, re.MULTILINE)
    )
    registers = (int(number) for number in re.findall(r"\bR(\d+)\b", text))
    return Sass(opcodes.total(), dict(opcodes), max(registers, default=0))


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, text
    return int(found[1])


def _disassemble(ptx: Path) -> Sass | None:
    ptxas, nvdisasm = shutil.which("ptxas"), shutil.which("nvdisasm")
    if ptxas is None or nvdisasm is None:
        return None
    architecture = re.search(r"^\.target (\w+)", ptx.read_text(), re.MULTILINE)
    assert architecture is not None, ptx
    cubin = ptx.with_suffix(".cubin")
    subprocess.run([ptxas, f"-arch={architecture[1]}", ptx, "-o", cubin], check=True)
    listing = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True)
    return read_sass(listing.stdout)


def compile_all() -> None:
    """The process of its own: a line of JSON for each job, null or what was wrong with it."""
    jobs, machine, dump = pickle.load(sys.stdin.buffer)
    devices = topology(machine).devices[:1]
    kind = AbstractDevice(devices[0].device_kind, 1, "cuda")
    for number, job in enumerate(jobs):
        folder = Path(dump, str(number))
        folder.mkdir()
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)
        reason = None
        try:
            with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
                traced = jax.jit(job.function).trace(*job.arguments)
                lowered = traced.lower(lowering_platforms=("cuda",))
            xla.compile_for_topology(lowered.compiler_ir("stablehlo"), devices, {})
        except Exception:  # Of one; the others are compiled all the same.
            reason = traceback.format_exc()
        print(json.dumps(reason), flush=True)


if __name__ == "__main__":
    # What is pickled is of the module by its name.
    importlib.import_module("memplan.kernels.evidence_gpu").compile_all()
