"""What the TPU compiler made of a kernel: instruction bundles, spills, VMEM.

    tpu_evidence([(function, arguments), ...], "v6e")
      ─► a process with libtpu's dump flags ─► final_bundles.txt ... ─► of each, its kernels

libtpu reads its flags when it is loaded, so each call is a process of its own. A TPU runs a
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
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from hlo_passes.errors import KernelCompilationError
from memplan.topologies import Topology, topology

type Program = tuple[Callable[..., Any], tuple[Any, ...]]
"""What to jit, importable or a `functools.partial` of what is, and its arguments:
trees of `jax.ShapeDtypeStruct`, or of `jax.core.ShapedArray` in the memory that it names."""

_TIMEOUT_S = 1200
_FLAGS = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_hlo_text=false"


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
class KernelEvidence:
    """A compiled kernel.

    Attributes:
      name: of the kernel.
      regions: the whole kernel first, then by start, outer ones first.
      capacity: of each unit, its slots in a bundle.
      vmem: bytes that it holds in VMEM, by what for, in the compiler's words: "scratch operand",
        "input window", "output window". A window is there for an operand that is elsewhere, of
        two slots if there is a grid.
      exceeded: bytes of VMEM that the kernel needs, registers that were spilled included, where
        they are more than its limit, and None where they are not. The rest is then empty.
    """

    name: str
    regions: tuple[Region, ...] = ()
    capacity: Mapping[str, int] = field(default_factory=dict)
    vmem: Mapping[str, int] = field(default_factory=dict)
    exceeded: int | None = None

    @property
    def bundles(self) -> int:
        """Of the whole kernel, each once."""
        return self.regions[0].bundles

    @property
    def spills(self) -> int:
        """Registers stored because there were too few, at how many places in the code."""
        return self.regions[0].use["VSTORE:SPILL"]

    @property
    def own_bytes(self) -> int:
        """Of VMEM, for its buffers and windows."""
        return sum(size for what, size in self.vmem.items() if what != "internal scratch")

    @property
    def outermost(self) -> Region:
        """The loop that its time is spent in; the whole kernel if it turns but once."""
        return max(self.loops(), key=lambda region: region.bundles, default=self.regions[0])

    def product_turn(self, inner: int = 1) -> int:
        """Bundles of a turn of the loop with matrix products, as if all its conditions held.

        Loops in it that have none are not counted: they turn only where something is cut off.

        Args:
          inner: how often an inner loop over products turns; 1 where there is none.
        """
        loops = sorted(
            (region for region in self.regions if region.is_loop),
            key=lambda region: region.bundles,
        )
        busy = [region for region in loops if region.use["MATMUL"]]
        turn = busy[0 if inner == 1 else 1]
        idle = [each for each in loops if each not in busy and turn.start <= each.start < turn.end]
        repeated = (inner - 1) * busy[0].bundles
        return turn.bundles + repeated - sum(each.bundles for each in idle)

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


def tpu_evidence(programs: Sequence[Program], machine: str) -> list[tuple[KernelEvidence, ...]]:
    """Compiles programs for a TPU, one after the other in a new process.

    Args:
      programs: of each argument the device holds the whole.
      machine: of the machine library: "v6e".

    Returns:
      Of each program its kernels, sorted by name; where one exceeds its limit of VMEM, that
      alone.

    Raises:
      KernelCompilationError: when a program does not lower, or does not compile for another
        reason.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = os.environ.get("LIBTPU_INIT_ARGS", "") + " " + _FLAGS.format(folder)
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "LIBTPU_INIT_ARGS": flags.strip(),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        done = subprocess.run(
            [sys.executable, "-m", __name__, machine, folder],
            input=pickle.dumps(list(programs)),
            env=environment,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    lines = [line for line in done.stdout.decode().splitlines() if line.startswith("[{")]
    if done.returncode or len(lines) != len(programs):
        function, _ = programs[min(len(lines), len(programs) - 1)]
        output = (done.stdout + done.stderr).decode()
        raise KernelCompilationError(_name(function), machine, output)
    return [tuple(map(_from_json, json.loads(line))) for line in lines]


def _name(function: Any) -> str:
    return getattr(function, "__name__", None) or _name(function.func)


def _from_json(fields: dict[str, Any]) -> KernelEvidence:
    regions = tuple(Region(**region) for region in fields.pop("regions"))
    return KernelEvidence(**fields, regions=regions)


# --- in the other process -------------------------------------------------------------------


def _serve(machine: str, folder: Path) -> None:
    target = topology(machine)
    for function, arguments in pickle.load(sys.stdin.buffer):
        for old in folder.iterdir():
            old.unlink()
        kernels = _compile(target, function, arguments, folder)
        print(json.dumps([asdict(kernel) for kernel in kernels]), flush=True)


def _placed(target: Topology, x: Any) -> jax.ShapeDtypeStruct:
    on_host = getattr(x, "memory_space", None) == jax.memory.Space.Host
    sharding = target.sharding("pinned_host" if on_host else None)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _compile(
    target: Topology, function: Callable[..., Any], arguments: Any, folder: Path
) -> tuple[KernelEvidence, ...]:
    device = target.devices[0]
    placed = jax.tree.map(partial(_placed, target), arguments)
    abstract = AbstractDevice(device.device_kind, device.num_cores, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract)):
        lowered = jax.jit(function).trace(*placed).lower(lowering_platforms=("tpu",))
    try:
        lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        exceeded = re.search(
            r"on stack for %([\w-]+)[\s\S]*Scoped allocation with size ([\d.]+)([KMG]?) and limit",
            str(error),
        )
        if exceeded is None:
            raise
        unit = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[exceeded[3]]
        return (KernelEvidence(exceeded[1], exceeded=int(float(exceeded[2]) * unit)),)
    names = sorted(set(re.findall(r'kernel_name = "([^"]+)"', lowered.as_text())))
    return tuple(kernel for name in names for kernel in read_dump(folder, name))


def read_dump(folder: Path, name: str) -> tuple[KernelEvidence, ...]:
    """Reads what libtpu wrote of the kernels of a name, in the order in which they were compiled.

    Raises:
      FileNotFoundError: when it wrote nothing of that name.
    """
    # A file is of one instruction, "<time>-<kernel>.<n>-72-final_bundles.txt".
    listings = sorted(folder.glob(f"*-{name}.*-[0-9]*-final_bundles.txt"))
    listings = [path for path in listings if "schedule-analysis" not in path.name]
    if not listings:
        raise FileNotFoundError(f"{folder}: no *-{name}.*-final_bundles.txt")
    return tuple(_read_kernel(name, listing) for listing in listings)


def _read_kernel(name: str, listing: Path) -> KernelEvidence:
    prefix = re.sub(r"-\d+-final_bundles\.txt$", "", listing.name)

    def beside(ending: str) -> str:
        (path,) = listing.parent.glob(f"{prefix}-[0-9]*-{ending}")
        return path.read_text(encoding="utf-8", errors="replace")

    units, capacity, use = _utilization(beside("final_hlo-static-per-bundle-utilization.txt"))
    text = listing.read_text(encoding="utf-8", errors="replace")
    regions = [
        Region(
            start,
            end,
            is_loop,
            {unit: sum(row[i] for row in use[start:end]) for i, unit in enumerate(units)},
        )
        for start, end, is_loop in _spans(text, len(use))
    ]
    by_unit = dict(zip(units, capacity, strict=True))
    return KernelEvidence(name, tuple(regions), by_unit, _vmem(beside("post-delay-converter.txt")))


def _vmem(text: str) -> dict[str, int]:
    """Bytes of the allocations that are listed, by the first two words of what they are for.

    Those of spilled registers are left out: each is listed by itself, though they share bytes.
    """
    found = re.findall(
        r"#(allocation\w+) \[shape = '[^']*', space=vmem, size = (0x[0-9a-f]+), [^\]]*?scoped, "
        r"tag = '([\w/]+ [\w/]+)",
        text,
    )
    totals: dict[str, int] = {}
    for _, size, what in {each[0]: each for each in found}.values():
        if not what.startswith("spilled"):
            totals[what] = totals.get(what, 0) + int(size, 16)
    return totals


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
