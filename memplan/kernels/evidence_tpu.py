"""What the TPU compiler made of a kernel: instruction bundles, spills, VMEM.

    collect("v6e", [Job("experiments.kernels:splash", {"block_q": 1024})])
      ─► a process with libtpu's dump flags ─► final_bundles.txt ─► Evidence

libtpu reads its flags when it is loaded, so each `collect` is a process of its own. A TPU runs a
bundle, a very long instruction word, in a cycle, but where it waits for a copy or a semaphore.
Loops and branches are read from the dump: a loop ends with a branch back to where a region
started.

    0x20 LB: > { ... } /* Start region 3 */      depth: the >
    0x9e   : > { ... sbr.rel (%p) target = $region3 ... } /* End region 3 */

Seen working with libtpu 0.0.51.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from hlo_passes.errors import KernelCompilationError
from memplan.topologies import Topology, topology

_TIMEOUT_S = 1200
_FLAGS = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_hlo_text=false"


@dataclass(frozen=True)
class Job:
    """A function to compile.

    Attributes:
      build: "module:function" that takes a `Topology` and `arguments` and returns what to jit,
        its arguments as shapes with shardings, and the name of the kernel in it.
      arguments: of `build`, as JSON has them.
    """

    build: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Region:
    """A stretch of a kernel's code: a loop's body, or what stands under a condition.

    Attributes:
      start, end: addresses of its bundles, half-open.
      is_loop: whether it ends with a branch back to its start.
      use: of each unit, how many of its slots are taken in all bundles.
    """

    start: int
    end: int
    is_loop: bool
    use: Mapping[str, int]

    @property
    def bundles(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Evidence:
    """A compiled kernel.

    Attributes:
      kernel: its name.
      regions: the whole kernel first, then by start, outer ones first.
      capacity: of each unit, its slots in a bundle.
      vmem_bytes: what the compiler says that the kernel asked for beyond its limit, registers
        that were spilled included; None where the limit was not exceeded. The rest is then empty.
    """

    kernel: str
    regions: tuple[Region, ...]
    capacity: Mapping[str, int]
    vmem_bytes: int | None = None

    @property
    def bundles(self) -> int:
        """Of the whole kernel, each once."""
        return self.regions[0].bundles

    @property
    def spills(self) -> int:
        """Registers stored because there were too few."""
        return self.regions[0].use["VSTORE:SPILL"]

    def loops(self) -> list[Region]:
        """Those that are in no other loop."""
        found: list[Region] = []
        for region in self.regions:
            if region.is_loop and not any(region.end <= outer.end for outer in found):
                found.append(region)
        return found

    def inside(self, outer: Region) -> list[Region]:
        """The regions within one that are in no other within it."""
        found: list[Region] = []
        for region in self.regions:
            within = outer.start <= region.start and region.end <= outer.end
            if within and region.bundles < outer.bundles:
                if not any(region.end <= other.end for other in found):
                    found.append(region)
        return found


def collect(name: str, jobs: Sequence[Job]) -> list[Evidence]:
    """Compiles jobs for a TPU, one after the other in a new process.

    Args:
      name: of a topology: "v6e".

    Raises:
      KernelCompilationError: when a job fails in another way than by its VMEM.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = os.environ.get("LIBTPU_INIT_ARGS", "") + " " + _FLAGS.format(folder)
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": flags.strip()}
        done = subprocess.run(
            [sys.executable, "-m", __name__, name, folder],
            input=json.dumps([asdict(job) for job in jobs]),
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != len(jobs):
        failed = jobs[len(lines)] if len(lines) < len(jobs) else jobs[-1]
        raise KernelCompilationError(failed.build, name, done.stdout + done.stderr)
    return [_from_json(line) for line in lines]


def _from_json(line: str) -> Evidence:
    fields = json.loads(line)
    fields["regions"] = tuple(Region(**region) for region in fields["regions"])
    return Evidence(**fields)


# --- in the other process -------------------------------------------------------------------


def _serve(name: str, folder: Path) -> None:
    target = topology(name)
    for job in json.load(sys.stdin):
        for old in folder.iterdir():
            old.unlink()
        module, _, function = job["build"].partition(":")
        build = getattr(import_module(module), function)
        print(json.dumps(asdict(_compile(target, build, job["arguments"], folder))), flush=True)


def _compile(
    target: Topology, build: Callable[..., Any], arguments: Mapping[str, Any], folder: Path
) -> Evidence:
    device = target.devices[0]
    abstract = AbstractDevice(device.device_kind, device.num_cores, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        function, shapes, kernel = build(target, **arguments)
        lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("tpu",))
    try:
        lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        exceeded = re.search(r"Scoped allocation with size ([\d.]+)([KMG]?) and limit", str(error))
        if exceeded is None:
            raise
        unit = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[exceeded[2]]
        return Evidence(kernel, (), {}, int(float(exceeded[1]) * unit))
    return read_dump(folder, kernel)


def read_dump(folder: Path, kernel: str) -> Evidence:
    """Reads what libtpu wrote of a kernel.

    Raises:
      FileNotFoundError: when it wrote nothing of that name.
    """

    def only(ending: str) -> str:
        found = [
            p for p in folder.glob(f"*{kernel}*-{ending}") if "schedule-analysis" not in p.name
        ]
        if not found:
            raise FileNotFoundError(f"{folder}: no *{kernel}*-{ending}")
        return found[0].read_text(encoding="utf-8", errors="replace")

    units, capacity, use = _utilization(only("final_hlo-static-per-bundle-utilization.txt"))
    spans = _spans(only("final_bundles.txt"), len(use))
    regions = [
        Region(
            start,
            end,
            is_loop,
            {unit: sum(row[i] for row in use[start:end]) for i, unit in enumerate(units)},
        )
        for start, end, is_loop in spans
    ]
    return Evidence(kernel, tuple(regions), dict(zip(units, capacity, strict=True)))


def _utilization(text: str) -> tuple[list[str], list[int], list[list[int]]]:
    lines = text.splitlines()
    units = [unit.strip() for unit in lines[1].split(",")]
    first = lines.index("== UTILIZATION:") + 1
    rows = [[int(x) for x in line.split()] for line in lines[first:] if line.strip()]
    return units, [int(x) for x in lines[2].split()], rows


def _spans(text: str, bundles: int) -> list[tuple[int, int, bool]]:
    """Start, end and whether it is a loop, of the whole and of each region."""
    starts: dict[str, int] = {}
    ends: dict[str, int] = {}
    backward: dict[str, int] = {}
    address = -1
    for line in text.splitlines():
        if re.match(r"\s*(0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:[> ]*\{", line):
            address += 1
        for comment in re.findall(r"/\* ((?:Start|End)[^*]*)\*/", line):
            for region in re.findall(r"Start region (\d+)", comment):
                starts[region] = address
            for region in re.findall(r"End region (\d+)", comment):
                ends[region] = address + 1
        for region in re.findall(r"sbr\.rel [^;]*target = \$region(\d+)", line):
            if region in starts:
                backward[region] = address + 1
    if address + 1 != bundles:
        raise ValueError(f"read {address + 1} bundles, expected {bundles}")
    spans = {(0, bundles): False}
    for region, start in starts.items():
        end = max(ends.get(region, 0), backward.get(region, 0))
        if end > start:
            spans[start, end] = spans.get((start, end), False) or region in backward
    ordered = sorted(spans.items(), key=lambda item: (item[0][0], -item[0][1]))
    return [(start, end, is_loop) for (start, end), is_loop in ordered]


if __name__ == "__main__":
    _serve(sys.argv[1], Path(sys.argv[2]))
