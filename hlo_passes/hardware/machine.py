"""What a device can hold and how fast bytes move: the numbers every cost is made of.

A `Machine` is one JAX device with the memories around it::

    ┌───────────── device ─────────────┐
    │  vmem S(1)  ◄──link──►  hbm S(0) │  ◄──link──►  host S(5)
    └──────────────────────────────────┘
            interconnect ◄──► other devices

On a CPU machine the first tier (``dram``) stands for device memory, and what XLA has no
memory space for (``cxl``, ``nvme``) hangs off it by links that custom calls drive. On a
machine with a GPU that hangs off the host::

    hbm  ◄──link──►  host  ◄──link──►  nvme

A machine whose CPU and GPU share their memory has no host tier: XLA's host memory is the
device's there, so that what is moved to it frees nothing.

The library is the folder ``machines/``, one TOML file a machine, in which each number
stands beside its source; ``docs/machines.md`` is printed from it. A number that nobody has
published says ``estimate:`` and why.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any, Literal, cast, get_args

from hlo_passes.errors import MachineFileError, NotOnMachineError, UnknownMachineError
from hlo_passes.hardware.corrections import Correction
from hlo_passes.hardware.file_table import FileTable, is_number
from hlo_passes.hardware.rates import KernelRate
from hlo_passes.ir import HOST_MEMORY_SPACE, ON_CHIP_MEMORY_SPACE
from hlo_passes.units import format_bytes

# What a machine file may say of calls and launches.
HOST_SECONDS = (
    *("call_s", "array_s", "handoff_s", "fresh_byte_s", "fresh_copy_byte_s"),
    *("launch_s", "captured_launch_s"),
)

Platform = Literal["tpu", "gpu", "cpu"]


@dataclass(frozen=True)
class Tier:
    """A memory.

    Attributes:
      name: unique on its machine: ``hbm``, ``vmem``, ``host``, ``dram``, ``cxl``, ``nvme``.
      memory_space: XLA's number for it, the ``n`` of ``S(n)`` in a layout; None where XLA
        has none.
      capacity_bytes: what a program can use: less what the compiler reserves, and of a
        host's memory the share of one device.
      bytes_per_s: what all that read and write it reach together, of a host's memory the share of
        one device; None where it is not known, or where that is more than its links carry. Of
        device memory it is `Machine.hbm_bytes_per_s`.
      j_per_byte: joules that a byte takes that is read or written there; None where that is not
        known.
    """

    name: str
    memory_space: int | None
    capacity_bytes: int
    bytes_per_s: float | None = None
    j_per_byte: float | None = None


@dataclass(frozen=True)
class Link:
    """A way for bytes from one tier to another, in one direction.

    Attributes:
      source: name of the tier that is read.
      destination: name of the tier that is written.
      nominal_bytes_per_s: what the wires carry.
      efficiency: the fraction of it that one large transfer reaches, in (0, 1].
      latency_s: from the start of a transfer to its first byte.
      engines: how many transfers can be under way at once without sharing bandwidth.
      full_duplex: whether the opposite direction has wires of its own; if not, a transfer
        there slows this one down.
      through: a tier that the bytes are written to, and read from, on the way.
      j_per_byte: joules that a byte takes on the wires, both ends of them; None where that is not
        known.
    """

    source: str
    destination: str
    nominal_bytes_per_s: float
    efficiency: float
    latency_s: float
    engines: int
    full_duplex: bool
    through: str | None = None
    j_per_byte: float | None = None

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of one large transfer, in bytes per second."""
        return self.nominal_bytes_per_s * self.efficiency


@dataclass(frozen=True)
class Gpu:
    """What XLA has to know of a GPU, besides the rest of `Machine`, to compile without one.

    The fields are those of XLA's ``GpuDeviceInfoProto`` (``device_description.proto``).

    Attributes:
      description: the name the driver gives, as in ``jax.Device.device_kind``.
      compute_capability: ``"9.0"``.
      feature_extension: ``NONE``, or ``ACCELERATED_FEATURES`` for the ``a`` of ``sm_90a``.
      core_count: streaming multiprocessors.
      fpus_per_core: single-precision lanes of one multiprocessor.
      shared_memory_per_core_bytes: of one multiprocessor.
      shared_memory_per_block_optin_bytes: what one block may ask for.
      l2_cache_bytes: of the device.
      pcie_bytes_per_s: the figure of XLA's cost model for collectives through the host.
    """

    description: str
    compute_capability: str
    feature_extension: str
    core_count: int
    fpus_per_core: int
    shared_memory_per_core_bytes: int
    shared_memory_per_block_optin_bytes: int
    l2_cache_bytes: int
    pcie_bytes_per_s: int


@dataclass(frozen=True)
class Interconnect:
    """The wires between devices, as a ring over some of them uses them.

    Attributes:
      name: ``ici``, ``nvlink``, ``xgmi``; ``pcie`` where devices have no wires of their own. That
        transfers to the host take the same wires is not modelled.
      nominal_bytes_per_s: what one device sends into a ring: on a torus, over the two links
        of one axis.
      efficiency: the fraction of it that a large collective reaches, in (0, 1].
      step_latency_s: of each step of a ring, from one device to the next.
      j_per_byte: joules that a byte takes that a device sends; None where that is not known.
    """

    name: str
    nominal_bytes_per_s: float
    efficiency: float
    step_latency_s: float
    j_per_byte: float | None = None

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of one large collective, in bytes per second."""
        return self.nominal_bytes_per_s * self.efficiency


@dataclass(frozen=True)
class Machine:
    """One JAX device and the memories that it reaches.

    Attributes:
      name: as `load_machine` takes it.
      aliases: other names, lower case, JAX's ``device_kind`` among them.
      platform: ``tpu``, ``gpu`` or ``cpu``.
      hbm_bytes_per_s: nominal bandwidth between device memory and compute.
      clock_hz: turns the compiler's ``estimated_cycles`` into seconds.
      peak_flops: pairs of an XLA element type (``bf16``, ``f8e4m3fn``, ``s8``) and the
        FLOP/s of the fastest unit that XLA may run a dot of it on, without sparsity.
      tiers: device memory (memory space 0) first.
      links: each ordered pair of tiers at most once.
      gpu: None where the platform is not ``gpu``, or XLA cannot compile for it without one: AMD's.
      sources: pairs of a number's key (``links.host->hbm.efficiency``) and where the number
        comes from.
      interconnect: None where there is one device, or nothing is known of what joins them.
      kernels: what kernels were measured to take, by kind; none in the library, whose machines
        are priced by their peaks.
      corrections: what was learned of how long kernels take, relative to what the model of this
        machine, its peaks or `kernels`, has for them.
      cache_bytes: the most that a kernel may touch to be fed by a cache; 0 where that is not known.
      call_s, array_s: what a call takes besides its kernels, and for each array that it takes or
        gives: seconds on the host in which the device waits; 0 where calls are queued.
      handoff_s: what it takes to hand a kernel to another thread of XLA:CPU's.
      fresh_byte_s, fresh_copy_byte_s: what each byte takes, besides the kernel or the transfer that
        is the first to write to it, of memory which the system clears for that
        (`analysis.fresh`). A kernel is run by several threads.
      is_fed_outside: what feeds the device's memory does so outside of XLA's programs: a runtime
        (`chains.lowering`).
      launch_s: what the host takes to launch a kernel, a graph or a copy; None where programs run
        by themselves, or it is not known.
      captured_launch_s: what each kernel in a graph takes beside that.
      static_w: watts that the device takes whatever it does; None where nothing is known of its
        energy.
      flop_j: pairs of an XLA element type and the joules of one operation of a dot of it, with all
        that a kernel moves for it on the chip.
    """

    name: str
    aliases: tuple[str, ...]
    platform: Platform
    hbm_bytes_per_s: float
    clock_hz: float
    peak_flops: tuple[tuple[str, float], ...]
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]
    gpu: Gpu | None
    sources: tuple[tuple[str, str], ...]
    interconnect: Interconnect | None = None
    kernels: tuple[KernelRate, ...] = ()
    corrections: tuple[Correction, ...] = ()
    cache_bytes: int = 0
    call_s: float = 0.0
    array_s: float = 0.0
    handoff_s: float = 0.0
    fresh_byte_s: float = 0.0
    fresh_copy_byte_s: float = 0.0
    is_fed_outside: bool = False
    launch_s: float | None = None
    captured_launch_s: float | None = None
    static_w: float | None = None
    flop_j: tuple[tuple[str, float], ...] = ()

    def __repr__(self) -> str:
        memory = self.device_memory
        return (
            f"<Machine {self.name} ({self.platform}): {format_bytes(memory.capacity_bytes)} of "
            f"{memory.name}, {self.hbm_bytes_per_s / 1e9:.0f} GB/s>"
        )

    @property
    def device_memory(self) -> Tier:
        """The tier of memory space 0: ``hbm``, or ``dram`` on a CPU."""
        return self.tiers[0]

    @property
    def host_link(self) -> Link:
        """The link that feeds the device's memory: the first that ends there."""
        device = self.device_memory.name
        return next(link for link in self.links if link.destination == device)

    @property
    def has_one_memory(self) -> bool:
        """Whether XLA's programs see one memory: modules do not say what is elsewhere, and evict
        nothing."""
        return self.platform == "cpu" or self.is_fed_outside

    @property
    def has_host_memory(self) -> bool:
        """Whether what XLA calls host memory is another than the device's."""
        return any(tier.memory_space == HOST_MEMORY_SPACE for tier in self.tiers)

    def fed_from(self, tier: str) -> Machine:
        """Returns the same machine where device memory is fed from another tier: `host_link` is
        the link from there. Of a tier behind the host it is a new one, and so is that back: the
        bytes pass through the host's memory a piece at a time, as fast as the slower link.

        Raises:
          NotOnMachineError: when no link joins the two, nor the tier and the host.
        """
        device, host = self.device_memory.name, self.host_link.source
        ends = {(link.source, link.destination) for link in self.links}
        if (tier, device) not in ends and (tier, host) in ends:
            into = _through(host, self.link(tier, host), self.link(host, device))
            back = _through(host, self.link(device, host), self.link(host, tier))
            return replace(self, links=(into, back, *self.links))
        link = self.link(tier, device)
        return replace(self, links=(link, *(other for other in self.links if other != link)))

    @property
    def on_chip_memory(self) -> Tier | None:
        """The tier of memory space 1: a TPU's ``vmem``."""
        return next((t for t in self.tiers if t.memory_space == ON_CHIP_MEMORY_SPACE), None)

    def tier(self, name: str) -> Tier:
        """Returns a tier by name.

        Raises:
          NotOnMachineError: when the machine has no such tier.
        """
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise NotOnMachineError(self.name, "tier", name, [tier.name for tier in self.tiers])

    def link(self, source: str, destination: str) -> Link:
        """Returns the link from one tier to another.

        Raises:
          NotOnMachineError: when the machine has no such link. Links do not chain: a
            transfer over two of them is two transfers.
        """
        for link in self.links:
            if (link.source, link.destination) == (source, destination):
                return link
        known = [f"{link.source}->{link.destination}" for link in self.links]
        raise NotOnMachineError(self.name, "link", f"{source}->{destination}", known)

    def transfer_seconds(self, size_bytes: int, source: str, destination: str) -> float:
        """Returns how long one transfer takes on an idle link: latency, then bandwidth.

        Args:
          size_bytes: bytes moved, not negative.
          source: name of the tier that is read.
          destination: name of the tier that is written.

        Raises:
          NotOnMachineError: when no link joins the two.
          ValueError: when `size_bytes` is negative.
        """
        if size_bytes < 0:
            raise ValueError(f"a transfer of {size_bytes} bytes: expected 0 or more")
        link = self.link(source, destination)
        return link.latency_s + size_bytes / link.bytes_per_s

    def transfer_joules(self, size_bytes: int, source: str, destination: str) -> float | None:
        """Returns what a transfer takes beside static watts: of the memory that is read, of the
        wires, of a memory on the way, which is written and read, and of the memory that is
        written; None where one of these is not known.

        Raises:
          NotOnMachineError: when no link joins the two.
        """
        link = self.link(source, destination)
        between = () if link.through is None else (link.through,) * 2
        memories = [self.tier(name).j_per_byte for name in (source, *between, destination)]
        each = [*memories, link.j_per_byte]
        known = [joules for joules in each if joules is not None]
        return size_bytes * sum(known) if len(known) == len(each) else None

    @property
    def variation(self) -> float | None:
        """By how much kernels vary around what the file says of them, as a standard deviation over
        a mean, by the spreads of those that were measured; None where none was. Half of them are
        within a spread: of a normal number that is 0.6745 standard deviations."""
        spreads = [rate.spread for rate in self.kernels if rate.spread]
        return median(spreads) / 0.6745 if spreads else None

    @property
    def has_energy(self) -> bool:
        """Whether its file says what a step takes in joules."""
        wires = self.interconnect
        return (
            self.static_w is not None
            and bool(self.flop_j)
            and self.device_memory.j_per_byte is not None
            and (wires is None or wires.j_per_byte is not None)
        )

    def flops(self, dtype: str) -> float:
        """Returns the peak FLOP/s of a dot.

        Args:
          dtype: an XLA element type, ``bf16``.

        Raises:
          NotOnMachineError: when no peak is known for the type.
        """
        for known, flops in self.peak_flops:
            if known == dtype:
                return flops
        known = [known for known, _ in self.peak_flops]
        raise NotOnMachineError(self.name, "peak FLOP/s for element type", dtype, known)

    def cycles_seconds(self, cycles: float) -> float:
        """Returns the seconds in that many cycles of the device's clock."""
        return cycles / self.clock_hz

    def to_dict(self) -> dict[str, object]:
        """Returns the machine as JSON-ready data, in the form of a machine file.

        `machine_from_dict` reads it back to an equal machine.
        """
        sources = dict(self.sources)

        def number(key: str, value: float) -> object:
            return {"value": value, "source": sources[key]} if key in sources else value

        def table(item: Tier | Link | Gpu | Interconnect, prefix: str) -> dict[str, object]:
            return {
                key: number(f"{prefix}.{key}", value) if is_number(value) else value
                for key, value in asdict(item).items()
                if value is not None
            }

        data: dict[str, object] = {
            "name": self.name,
            "aliases": list(self.aliases),
            "platform": self.platform,
            "hbm_bytes_per_s": number("hbm_bytes_per_s", self.hbm_bytes_per_s),
            "clock_hz": number("clock_hz", self.clock_hz),
            "peak_flops": {
                dtype: number(f"peak_flops.{dtype}", flops) for dtype, flops in self.peak_flops
            },
            "tiers": [table(tier, f"tiers.{tier.name}") for tier in self.tiers],
            "links": [
                table(link, f"links.{link.source}->{link.destination}") for link in self.links
            ],
        }
        if self.interconnect is not None:
            data["interconnect"] = table(self.interconnect, "interconnect")
        if self.gpu is not None:
            data["gpu"] = table(self.gpu, "gpu")
        for key in ("cache_bytes", "static_w", *HOST_SECONDS):
            if value := getattr(self, key):
                data[key] = number(key, value)
        if self.flop_j:
            data["flop_j"] = {
                dtype: number(f"flop_j.{dtype}", joules) for dtype, joules in self.flop_j
            }
        for key in ("kernels", "corrections"):
            if of_kinds := getattr(self, key):
                data[key] = {
                    of.kind: {
                        name: number(f"{key}.{of.kind}.{name}", value)
                        for name, value in asdict(of).items()
                        if name != "kind"
                    }
                    for of in of_kinds
                }
        return data


def machine_names() -> tuple[str, ...]:
    """Returns the names of the library's machines, sorted."""
    return tuple(sorted(machine.name for machine in _library()))


def load_machine(name_or_path: str | Path) -> Machine:
    """Returns a machine of the library, or one from a file.

    Args:
      name_or_path: a name or alias in any case, blanks and underscores as good as dashes
        (``"tpu-v5e"``, ``"V5litepod"``, ``"NVIDIA H200"``); or a `Path`, or a string that
        ends in ``.toml``, of a file in the form of those in ``hlo_passes/hardware/machines/``. A
        file may give bare numbers, without sources.

    Raises:
      UnknownMachineError: when no machine has the name.
      MachineFileError: when the file is missing, no TOML, or not in that form.

    >>> load_machine("v5litepod").name
    'tpu-v5e'
    """
    if not isinstance(name_or_path, str | Path):
        raise UnknownMachineError(name_or_path, [], machine_names())
    if isinstance(name_or_path, Path) or name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise MachineFileError(str(path), "", "a readable file", str(error)) from error
        return _machine_from_toml(text, str(path))
    wanted = _normalized(name_or_path)
    by_name = {
        _normalized(name): machine
        for machine in _library()
        for name in (machine.name, *machine.aliases)
    }
    if wanted in by_name:
        return by_name[wanted]
    close = difflib.get_close_matches(wanted, by_name)
    close_names = dict.fromkeys(by_name[name].name for name in close)
    raise UnknownMachineError(name_or_path, list(close_names), machine_names())


def machine_from_dict(data: Mapping[str, object], file: str = "machine") -> Machine:
    """Reads the data of a machine file; the inverse of `Machine.to_dict`.

    Args:
      data: what `tomllib` or `json` reads from such a file.
      file: named in errors.

    Raises:
      MachineFileError: when a key is missing, unknown, or its value not as expected.
    """
    root = FileTable(data, file)
    name = root.text("name")
    aliases = tuple(root.texts("aliases"))
    platform = cast(Platform, root.choice("platform", get_args(Platform)))
    hbm_bytes_per_s = root.number("hbm_bytes_per_s")
    clock_hz = root.number("clock_hz")
    peaks = root.table("peak_flops")
    peak_flops = tuple((dtype, peaks.number(dtype)) for dtype in tuple(peaks.unread))
    tiers = tuple(_tier(table) for table in root.tables("tiers"))
    if not tiers or tiers[0].memory_space != 0:
        found = f"{tiers[0].name} first" if tiers else "no tier"
        raise MachineFileError(file, "tiers", "device memory (memory_space = 0) first", found)
    root.reject_repeats("tiers", [tier.name for tier in tiers])
    ends = tuple(tier.name for tier in tiers)
    links = tuple(_link(one, ends) for table in root.tables("links") for one in table.directed())
    root.reject_repeats("links", [f"{link.source}->{link.destination}" for link in links])
    gpu = _gpu(root.table("gpu")) if platform == "gpu" and "gpu" in root.unread else None
    interconnect = (
        _interconnect(root.table("interconnect")) if "interconnect" in root.unread else None
    )
    kernels = tuple(KernelRate.read(*of) for of in _of_kinds(root, "kernels"))
    corrections = tuple(Correction.read(*of) for of in _of_kinds(root, "corrections"))
    cache_bytes = root.whole("cache_bytes") if "cache_bytes" in root.unread else 0
    flop_j: tuple[tuple[str, float], ...] = ()
    if "flop_j" in root.unread:
        joules = root.table("flop_j")
        flop_j = tuple((dtype, joules.number(dtype, zero=True)) for dtype in tuple(joules.unread))
    further: dict[str, Any] = {
        key: root.number(key) for key in ("static_w", *HOST_SECONDS) if key in root.unread
    }
    root.close()
    return Machine(
        name=name,
        aliases=aliases,
        platform=platform,
        hbm_bytes_per_s=hbm_bytes_per_s,
        clock_hz=clock_hz,
        peak_flops=peak_flops,
        tiers=tiers,
        links=links,
        gpu=gpu,
        sources=tuple(root.sources),
        interconnect=interconnect,
        kernels=kernels,
        corrections=corrections,
        cache_bytes=cache_bytes,
        flop_j=flop_j,
        **further,
    )


def _of_kinds(root: FileTable, key: str) -> Iterator[tuple[str, FileTable]]:
    """The tables in the one of a key, if there is one, by the kinds of kernels they are of."""
    if key in root.unread:
        table = root.table(key)
        for kind in tuple(table.unread):
            yield kind, table.table(kind)


@cache
def _library() -> tuple[Machine, ...]:
    folder = resources.files("hlo_passes.hardware").joinpath("machines")
    return tuple(
        _machine_from_toml(file.read_text(encoding="utf-8"), file.name)
        for file in folder.iterdir()
        if file.name.endswith(".toml")
    )


def _machine_from_toml(text: str, file: str) -> Machine:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise MachineFileError(file, "", "TOML", str(error)) from error
    return machine_from_dict(data, file)


def _through(tier: str, first: Link, second: Link) -> Link:
    """The way over two links, where bytes leave the place between as they come."""
    slower = min(first, second, key=lambda link: link.bytes_per_s)
    wires = first.j_per_byte, second.j_per_byte
    return replace(
        slower,
        source=first.source,
        destination=second.destination,
        latency_s=first.latency_s + second.latency_s,
        j_per_byte=None if None in wires else sum(j for j in wires if j is not None),
        through=tier,
    )


def _normalized(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def _known(table: FileTable, key: str) -> float | None:
    """A number that a file may leave out."""
    return table.number(key, zero=key == "j_per_byte") if key in table.unread else None


def _tier(table: FileTable) -> Tier:
    name = table.text("name")
    table.key = f"tiers.{name}"
    # TOML has no null: a tier that XLA has no memory space for leaves the key out.
    space = table.whole("memory_space", zero=True) if "memory_space" in table.unread else None
    capacity = table.whole("capacity_bytes")
    tier = Tier(name, space, capacity, _known(table, "bytes_per_s"), _known(table, "j_per_byte"))
    table.close()
    return tier


def _link(table: FileTable, tiers: tuple[str, ...]) -> Link:
    source = table.choice("source", tiers)
    destination = table.choice("destination", tuple(tier for tier in tiers if tier != source))
    table.key = f"links.{source}->{destination}"
    link = Link(
        source=source,
        destination=destination,
        nominal_bytes_per_s=table.number("nominal_bytes_per_s"),
        efficiency=table.fraction("efficiency"),
        latency_s=table.number("latency_s", zero=True),
        engines=table.whole("engines"),
        full_duplex=table.flag("full_duplex"),
        through=table.choice("through", tiers) if "through" in table.unread else None,
        j_per_byte=_known(table, "j_per_byte"),
    )
    table.close()
    return link


def _interconnect(table: FileTable) -> Interconnect:
    interconnect = Interconnect(
        name=table.text("name"),
        nominal_bytes_per_s=table.number("nominal_bytes_per_s"),
        efficiency=table.fraction("efficiency"),
        step_latency_s=table.number("step_latency_s", zero=True),
        j_per_byte=_known(table, "j_per_byte"),
    )
    table.close()
    return interconnect


def _gpu(table: FileTable) -> Gpu:
    gpu = Gpu(
        description=table.text("description"),
        compute_capability=table.text("compute_capability"),
        feature_extension=table.choice(
            "feature_extension", ("NONE", "ACCELERATED_FEATURES", "FAMILY_COMPATIBLE_FEATURES")
        ),
        core_count=table.whole("core_count"),
        fpus_per_core=table.whole("fpus_per_core"),
        shared_memory_per_core_bytes=table.whole("shared_memory_per_core_bytes"),
        shared_memory_per_block_optin_bytes=table.whole("shared_memory_per_block_optin_bytes"),
        l2_cache_bytes=table.whole("l2_cache_bytes"),
        pcie_bytes_per_s=table.whole("pcie_bytes_per_s"),
    )
    if re.fullmatch(r"\d+\.\d+", gpu.compute_capability) is None:
        expected = "major.minor, like 9.0"
        raise table.error("compute_capability", expected, repr(gpu.compute_capability))
    table.close()
    return gpu
