"""A machine file of the machine that is here: what is measured, and what is known besides."""

from __future__ import annotations

import os
import platform as host_platform
import re
import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import jax

from hlo_passes import xla
from hlo_passes.analysis.fresh import fresh_bytes
from hlo_passes.analysis.handoffs import handoffs
from hlo_passes.analysis.kernel_work import KernelWork
from hlo_passes.errors import CalibrationError
from hlo_passes.hardware.machine import Link, Machine, Tier, load_machine
from hlo_passes.hardware.rates import COEFFICIENTS
from hlo_passes.reading.reader import read_module
from memplan.calibrate.copies import SIZES, LinkTimes, link_times, timed_copies
from memplan.calibrate.drives import Drive
from memplan.calibrate.energy import Load, Meter, meter_of, with_energy
from memplan.calibrate.exchanges import (
    Exchange,
    interconnect_of,
    spreads_of,
    timed_exchanges,
)
from memplan.calibrate.fitting import Fit, Sample, fit, works_of
from memplan.calibrate.measuring import Timed, in_turns
from memplan.calibrate.programs import Program, arrays, programs

# XLA:CPU makes one kernel of a loop that does little: it says nothing of kernels.
_ONE_KERNEL = "xla_cpu_small_call"

# A program that is not in a loop takes at least this long, or a call is most of it.
_LONG_S = 5e-5

# Of a processor that does not say what cache its cores have.
_CACHE_BYTES = 1 << 20

UNSTABLE = 0.1
"""A number whose turns differ by more than this says so."""

# What is fitted to CPUs besides rates of kernels; of the machine as of the fit.
_OF_CALLS = ("call_s", "array_s", "handoff_s", "fresh_byte_s")

_STREAM = "add float32"
_HOST, _DRIVE, _WIRES = "host", "nvme", "shared"
_CLOCK_HZ = 1e9


@dataclass(frozen=True)
class Calibration:
    """
    Attributes:
      machine: what was measured, each number with its source.
      fit: of the kernels; the errors of programs among it.
      spreads: of what was measured, by what it is.
      meter: what said the watts; None where nothing does, and nothing is known of energy.
    """

    machine: Machine
    fit: Fit
    spreads: Mapping[str, float]
    meter: Meter | None

    @property
    def unstable(self) -> Mapping[str, float]:
        """What was measured and differs from turn to turn by more than `UNSTABLE`."""
        return {name: spread for name, spread in self.spreads.items() if spread > UNSTABLE}


def calibrate(
    name: str | None = None,
    *,
    disk: Path | None = None,
    seconds: float = 60.0,
    progress: Callable[[str, float], None] = lambda what, done: None,
) -> Calibration:
    """Measures ``jax.devices()[0]`` and what feeds it.

    Args:
      name: of the machine; None for the device's kind.
      disk: a folder on a drive that is to be a tier, too. A file of 256 MiB is there meanwhile.
      seconds: for the turns; as many as make five are taken in any case. Compilations come on top.
      progress: told what is done and which part of it; what it raises ends it, and nothing stays.

    Raises:
      CalibrationError: when the folder's drive cannot be read past the page cache.
    """
    device = xla.devices()[0]
    meter = meter_of(device.platform)
    drive = _drive(disk)
    try:
        kernels: list[_Compiled] = []
        all_programs = [*programs(_cache_bytes(_known(device)))]
        for n, program in enumerate(all_programs):
            progress("compiling", n / len(all_programs))
            if (compiled := _compiled(program, device)) is not None:
                kernels.append(compiled)
        copied, exchanged = timed_copies(device), timed_exchanges(xla.devices())
        timed = [*(kernel.timed for kernel in kernels), *copied.values()]
        timed += [exchange.timed for exchange in exchanged.values()]
        timed += drive.timed.values() if drive is not None else []
        for done in in_turns(timed, seconds):
            progress("measuring", done)
        links = [*link_times(copied)]
        found = _calibration(name, device, kernels, links, exchanged, drive, disk)
        if meter is None:
            return found
        progress("measuring energy", 0.0)
        ways = {("in", (_HOST, found.machine.device_memory.name)): links[0]}
        ways |= {("out", (found.machine.device_memory.name, _HOST)): links[1]}
        copies = {
            ends: Load(copied[way, SIZES[-1]], times.bytes_per_s)
            for (way, ends), times in ways.items()
        }
        return _with_energy(found, meter, device, kernels, copies)
    finally:
        if drive is not None:
            drive.close()


@dataclass(frozen=True)
class _Compiled:
    """A program that was compiled, and is measured."""

    name: str
    works: Sequence[tuple[KernelWork, int]]
    arrays: int
    handoffs: int
    fresh_bytes: int
    timed: Timed

    @property
    def sample(self) -> Sample:
        seconds = self.timed.timing.seconds
        return Sample(self.works, seconds, self.arrays, self.handoffs, self.fresh_bytes)


def _compiled(program: Program, device: Any) -> _Compiled | None:
    """None where XLA makes nothing of it that says something of kernels."""
    args = jax.device_put(arrays(program), device)
    is_long = not program.is_looped or program.once_s >= _LONG_S
    for tried in (program.looped(), *([program] if is_long else [])):
        function = jax.jit(tried.fun)
        module = read_module(function.lower(*args).compile())
        marks = (i.proto.frontend_attributes.map for i in module.instructions.values())
        if not any(_ONE_KERNEL in mark for mark in marks):
            timed = Timed(partial(function, *args), waits=device.platform == "cpu")
            results = sum(1 for _ in module.entry_result_shape.leaves())
            count = len(module.entry_parameter_shapes) + results
            handed = fresh = 0
            if device.platform == "cpu":
                handed, fresh = handoffs(module), sum(fresh_bytes(module).values())
            return _Compiled(tried.name, works_of(module), count, handed, fresh, timed)
    return None


def _drive(folder: Path | None) -> Drive | None:
    try:
        return None if folder is None else Drive(folder)
    except OSError as error:
        raise CalibrationError(
            f"disk {folder}",
            "a folder on a drive that is read past the page cache",
            error.strerror or str(error),
            "Give a folder of another file system, or leave it away.",
        ) from error


def _calibration(
    name: str | None,
    device: Any,
    kernels: Sequence[_Compiled],
    links: Sequence[LinkTimes],
    exchanged: Mapping[str, Exchange],
    drive: Drive | None,
    folder: Path | None,
) -> Calibration:
    samples = [kernel.sample for kernel in kernels]
    spreads = {kernel.name: kernel.timed.timing.spread for kernel in kernels}
    spreads |= {
        way: link.spread for way, link in zip(("copies in", "copies out"), links, strict=True)
    }
    if (fresh := links[0].fresh) is not None:
        spreads["copies to new memory"] = fresh.spread
    spreads |= dict(spreads_of(exchanged))
    if drive is not None:
        spreads |= {f"disk {what} {n}": t.timing.spread for (what, n), t in drive.timed.items()}
    machine = _base(name, device, links)
    cache_bytes = _cache_bytes(machine)
    found = fit(samples, cache_bytes)
    peaks = dict(machine.peak_flops) | _peaks(samples)
    machine = replace(
        machine,
        hbm_bytes_per_s=_stream_bytes_per_s(kernels, samples),
        peak_flops=tuple(peaks.items()),
        kernels=found.rates,
        cache_bytes=cache_bytes,
    )
    if device.platform == "cpu":
        machine = replace(machine, **{key: getattr(found, key) for key in _OF_CALLS})
        machine = replace(machine, fresh_copy_byte_s=links[0].fresh_byte_s)
    if exchanged:
        known = machine.interconnect
        wires = interconnect_of(_WIRES if known is None else known.name, exchanged)
        machine = replace(machine, interconnect=wires)
    if drive is not None and folder is not None:
        machine = _with_drive(machine, drive, folder)
    machine = _with_sources(machine, device, found, spreads, _turns_by_kind(kernels))
    return Calibration(_with_computing(machine, links), found, spreads, None)


def _with_energy(
    found: Calibration,
    meter: Meter,
    device: Any,
    kernels: Sequence[_Compiled],
    copies: Mapping[tuple[str, str], Load],
) -> Calibration:
    """With what the machine takes for its static watts, for bytes, and for operations."""
    loads = [_load(kernel) for kernel in kernels]
    streams = [one for k, one in zip(kernels, loads, strict=True) if k.name.startswith(_STREAM)]
    stream = max(streams, key=lambda one: one.bytes_per_s * one.timed.timing.seconds)
    products: dict[str, Load] = {}
    for load in loads:
        known = products.get(load.dtype)
        if load.dtype and (known is None or load.flops_per_s > known.flops_per_s):
            products[load.dtype] = load
    machine = with_energy(found.machine, meter, stream, products.values(), copies)
    said = f"measured {datetime.now(UTC).date().isoformat()}, {device.device_kind}, {meter.name}"
    keys = ["static_w", *(f"flop_j.{dtype}" for dtype, _ in machine.flop_j)]
    keys += [f"tiers.{t.name}.j_per_byte" for t in machine.tiers if t.j_per_byte is not None]
    ways = (f"{link.source}->{link.destination}" for link in machine.links if link.j_per_byte)
    keys += [f"links.{way}.j_per_byte" for way in ways]
    sources = dict(machine.sources) | dict.fromkeys(keys, said)
    return replace(found, machine=replace(machine, sources=tuple(sources.items())), meter=meter)


def _load(kernel: _Compiled) -> Load:
    """What a program that was measured does in a second; of its products the type that most of them
    have."""
    seconds, flops = kernel.timed.timing.seconds, dict[str, int]()
    for work, times in kernel.works:
        if work.flops:
            dtype = work.kind.rpartition(" ")[2]
            flops[dtype] = flops.get(dtype, 0) + work.flops * times
    dtype = max(flops, key=lambda dtype: flops[dtype], default="")
    size = sum(work.bytes * times for work, times in kernel.works)
    return Load(kernel.timed, size / seconds, dtype, flops.get(dtype, 0) / seconds)


def _stream_bytes_per_s(kernels: Sequence[_Compiled], samples: Sequence[Sample]) -> float:
    """Of what does next to nothing with the most bytes."""
    found: dict[int, float] = {}
    for kernel, sample in zip(kernels, samples, strict=True):
        if kernel.name.startswith(_STREAM):
            size = sum(work.bytes * times for work, times in sample.works)
            found[max(work.bytes for work, _ in sample.works)] = size / sample.seconds
    return found[max(found)]


def _peaks(samples: Sequence[Sample]) -> dict[str, float]:
    """The most FLOP/s that a program was seen to reach, by type."""
    found: dict[str, float] = {}
    for sample in samples:
        by_type: dict[str, int] = {}
        for work, times in sample.works:
            if work.flops:
                dtype = work.kind.rpartition(" ")[2]
                by_type[dtype] = by_type.get(dtype, 0) + work.flops * times
        for dtype, flops in by_type.items():
            found[dtype] = max(found.get(dtype, 0.0), flops / sample.seconds)
    return found


def _base(name: str | None, device: Any, links: Sequence[LinkTimes]) -> Machine:
    """What is known of the device without its kernels: of one in the library what that says."""
    machine = _known(device)
    memory, host = machine.device_memory.name, _HOST
    measured = dict(zip([(host, memory), (memory, host)], links, strict=True))
    made = [
        Link(source, destination, times.bytes_per_s, 1.0, times.latency_s, 1, times.is_full_duplex)
        for (source, destination), times in measured.items()
    ]
    others = [link for link in machine.links if (link.source, link.destination) not in measured]
    return replace(machine, name=name or machine.name, aliases=(), links=(*made, *others))


def _known(device: Any) -> Machine:
    """What is known of a device before anything is measured."""
    return _cpu() if device.platform == "cpu" else load_machine(device.device_kind)


def _cpu() -> Machine:
    """What a CPU's machine begins with: one memory, of which a part stands for the host's."""
    capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        name=_processor(),
        aliases=(),
        platform="cpu",
        hbm_bytes_per_s=1.0,
        clock_hz=_CLOCK_HZ,
        peak_flops=(),
        tiers=(Tier("dram", 0, capacity), Tier(_HOST, None, capacity)),
        links=(),
        gpu=None,
        sources=(("clock_hz", "not measured: no cost on a CPU is in cycles"),),
    )


def _cache_bytes(machine: Machine) -> int:
    """Of the cache that is the device's own: what a GPU's multiprocessors share, or the second
    level of all cores."""
    if machine.gpu is not None:
        return machine.gpu.l2_cache_bytes
    with suppress(ValueError, OSError):
        if (size := os.sysconf("SC_LEVEL2_CACHE_SIZE")) > 0:
            return size * (os.cpu_count() or 1)
    return _CACHE_BYTES


def _processor() -> str:
    """The processor's name, as a machine may be called."""
    found = host_platform.processor() or host_platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                found = line.partition(":")[2]
                break
    words = re.findall(r"[a-z0-9]+", found.lower())
    return "-".join([*words, f"{os.cpu_count()}-cores"])


def _with_drive(machine: Machine, drive: Drive, folder: Path) -> Machine:
    memory = machine.device_memory.name if machine.platform == "cpu" else _HOST
    latency_s = drive.timed["latency", 1].timing.seconds
    made = [
        Link(*ends, drive.bytes_per_s(what), 1.0, latency_s, 1, False)
        for what, ends in (("read", (_DRIVE, memory)), ("write", (memory, _DRIVE)))
    ]
    tier = Tier(_DRIVE, None, shutil.disk_usage(folder).free)
    tiers = [t for t in machine.tiers if t.name != _DRIVE]
    links = [link for link in machine.links if _DRIVE not in (link.source, link.destination)]
    return replace(machine, tiers=(*tiers, tier), links=(*links, *made))


def _turns_by_kind(kernels: Sequence[_Compiled]) -> Mapping[str, float]:
    """By how much turns differ in the middle one of the programs with a kind of kernel."""
    found: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        for kind in {work.kind for work, _ in kernel.works}:
            found[kind].append(kernel.timed.timing.spread)
    return {kind: statistics.median(of) for kind, of in found.items()}


def _with_sources(
    machine: Machine,
    device: Any,
    found: Fit,
    spreads: Mapping[str, float],
    turns: Mapping[str, float],
) -> Machine:
    """Says of each number that was measured when, where and how well. What many programs say
    together is as stable as the middle one of them."""
    today = datetime.now(UTC).date().isoformat()
    where = f"measured {today}, {device.device_kind}, jax {jax.__version__}, {os.cpu_count()} cores"
    with suppress(AttributeError):
        where += f", {device.client.platform_version.splitlines()[0]}"

    def said(spread: float) -> str:
        unstable = "; unstable: measure again when the machine is idle" if spread > UNSTABLE else ""
        return f"{where}; turns differ by {spread:.0%}{unstable}"

    streams = [spread for name, spread in spreads.items() if name.startswith(_STREAM)]
    sources = dict(machine.sources)
    sources["hbm_bytes_per_s"] = said(max(streams))
    sources["cache_bytes"] = f"{where}; as the system says"
    for key in _OF_CALLS:
        if getattr(machine, key):
            sources[key] = said(statistics.median(turns.values()))
    if machine.fresh_copy_byte_s:
        sources["fresh_copy_byte_s"] = said(spreads["copies to new memory"])
    for dtype, _ in machine.peak_flops:
        sources[f"peak_flops.{dtype}"] = f"{where}; the most that a product reached"
    for tier in machine.tiers:
        sources.setdefault(f"tiers.{tier.name}.capacity_bytes", f"{where}; as the system says")
    memory = machine.device_memory.name
    for link in machine.links:
        if link.efficiency == 1.0:
            ends = f"links.{link.source}->{link.destination}"
            sources[f"{ends}.nominal_bytes_per_s"] = said(_link_spread(link, memory, spreads))
            sources[f"{ends}.efficiency"] = "the bandwidth is what was measured"
            sources[f"{ends}.latency_s"] = said(_link_spread(link, memory, spreads))
            sources[f"{ends}.engines"] = "transfers of one direction share its bandwidth"
    if machine.interconnect is not None and machine.interconnect.efficiency == 1.0:
        of_exchanges = {spread for name, spread in spreads.items() if name.startswith("all-")}
        sources["interconnect.nominal_bytes_per_s"] = said(max(of_exchanges))
        sources["interconnect.efficiency"] = "the bandwidth is what was measured"
        sources["interconnect.step_latency_s"] = sources["interconnect.nominal_bytes_per_s"]
    for rate in found.rates:
        for key in COEFFICIENTS:
            sources[f"kernels.{rate.kind}.{key}"] = (
                f"{said(turns[rate.kind])}; programs with it are within {rate.spread:.0%}"
            )
    return replace(machine, sources=tuple(sources.items()))


def _with_computing(machine: Machine, links: Sequence[LinkTimes]) -> Machine:
    """Says of the way in and the way out what is left of them while the device computes."""
    sources = dict(machine.sources)
    memory = machine.device_memory.name
    for ends, times in zip((f"{_HOST}->{memory}", f"{memory}->{_HOST}"), links, strict=True):
        said = f"; {times.part_computing:.0%} of it while the device computes"
        sources[f"links.{ends}.nominal_bytes_per_s"] += said
    return replace(machine, sources=tuple(sources.items()))


def _link_spread(link: Link, memory: str, spreads: Mapping[str, float]) -> float:
    if _DRIVE in (link.source, link.destination):
        return max(spread for name, spread in spreads.items() if name.startswith("disk"))
    return spreads["copies in" if link.destination == memory else "copies out"]
