"""The machine library as tables: all machines on a line each, or one with its sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hlo_passes.hardware.machine import HOST_SECONDS, Interconnect, Link, Machine, Tier
from hlo_passes.units import format_bytes
from memplan.report.tables import Column, Table

# So many measurements that were not the same from turn to turn are named.
_UNSTABLE_SHOWN = 8


def machine_overview(machines: Sequence[Machine]) -> Table:
    """Returns one row a machine."""
    columns = (
        Column("machine"),
        Column("other names"),
        Column("memory", right=True),
        Column("bandwidth", right=True),
        Column("fed by", right=True),
        Column("bf16", right=True),
    )
    return Table("", columns, tuple(map(_overview, machines)), "Sources: memplan machines NAME")


def _overview(machine: Machine) -> tuple[str, ...]:
    memory = machine.device_memory
    into = [link for link in machine.links if link.destination == memory.name]
    # What is between the device and its own chip feeds nothing.
    fed = [link for link in into if link.source != "vmem"]
    fastest = max(fed, key=lambda link: link.bytes_per_s)
    peaks = dict(machine.peak_flops)
    return (
        machine.name,
        ", ".join(machine.aliases),
        f"{format_bytes(memory.capacity_bytes)} {memory.name}",
        f"{machine.hbm_bytes_per_s / 1e9:,.0f} GB/s",
        f"{fastest.bytes_per_s / 1e9:,.1f} GB/s from {fastest.source}",
        _teraflops(peaks["bf16"]) if "bf16" in peaks else "–",
    )


def _teraflops(flops: float) -> str:
    tera = flops / 1e12
    return f"{tera:,.0f} TFLOP/s" if tera >= 1 else f"{tera:.2g} TFLOP/s"


def machine_sources(machine: Machine) -> Iterator[Table]:
    """Yields the tables of one machine: its numbers, each with its source."""
    sources = dict(machine.sources)

    def rows(prefix: str, values: dict[str, str]) -> Iterator[tuple[str, ...]]:
        for key, value in values.items():
            yield key, value, sources.get(f"{prefix}{key}", "")

    def table(title: str, prefix: str, values: dict[str, str]) -> Table:
        columns = (Column("number"), Column("value", right=True), Column("source"))
        return Table(title, columns, tuple(rows(prefix, values)))

    yield table(
        machine.name,
        "",
        {
            "hbm_bytes_per_s": f"{machine.hbm_bytes_per_s / 1e9:,.1f} GB/s",
            "clock_hz": f"{machine.clock_hz / 1e9:g} GHz",
            **{key: _short(seconds) for key in HOST_SECONDS if (seconds := getattr(machine, key))},
            **{f"peak_flops.{d}": f"{f / 1e12:,.1f} TFLOP/s" for d, f in machine.peak_flops},
            **({} if machine.static_w is None else {"static_w": f"{machine.static_w:g} W"}),
            **{f"flop_j.{d}": _picojoules(joules) for d, joules in machine.flop_j},
        },
    )
    if machine.kernels:
        yield rates_table(machine)
    if machine.corrections:
        yield corrections_table(machine)
    for tier in machine.tiers:
        values = {"capacity_bytes": f"{tier.capacity_bytes:,}"}
        if tier.bytes_per_s is not None:
            values["bytes_per_s"] = f"{tier.bytes_per_s / 1e9:,.2f} GB/s"
        values |= _energy(tier)
        yield table(_tier_title(tier), f"tiers.{tier.name}.", values)
    for link in machine.links:
        yield table(
            f"{link.source} → {link.destination}",
            f"links.{link.source}->{link.destination}.",
            {
                "nominal_bytes_per_s": f"{link.nominal_bytes_per_s / 1e9:,.2f} GB/s",
                "efficiency": f"{link.efficiency:g}",
                "latency_s": f"{link.latency_s * 1e6:g} µs",
                "engines": str(link.engines),
                **_energy(link),
            },
        )
    if (wires := machine.interconnect) is not None:
        yield table(
            f"{wires.name}, to other devices",
            "interconnect.",
            {
                "nominal_bytes_per_s": f"{wires.nominal_bytes_per_s / 1e9:,.2f} GB/s",
                "efficiency": f"{wires.efficiency:g}",
                "step_latency_s": f"{wires.step_latency_s * 1e6:g} µs",
                **_energy(wires),
            },
        )


def _short(seconds: float) -> str:
    """Of a call in microseconds, of a byte in nanoseconds."""
    return f"{seconds * 1e6:.3g} µs" if seconds >= 1e-8 else f"{seconds * 1e9:.2g} ns"


def _energy(of: Tier | Link | Interconnect) -> dict[str, str]:
    return {} if of.j_per_byte is None else {"j_per_byte": _picojoules(of.j_per_byte)}


def _picojoules(joules: float) -> str:
    return f"{joules * 1e12:,.3g} pJ"


def rates_table(machine: Machine) -> Table:
    """Returns what kernels were measured to take, one row a kind, for a unit of work each."""
    columns = (
        Column("kernels"),
        *(Column(of, right=True) for of in ("run", "FLOP/s", "cached", "memory")),
        *(Column(of, right=True) for of in ("slow element", "element", "within")),
    )
    rows = tuple(
        (
            rate.kind,
            f"{rate.run_s * 1e6:.2g} µs" if rate.run_s else "–",
            f"{1e-9 / rate.flop_s:,.1f} G" if rate.flop_s else "–",
            f"{1e-9 / rate.cached_byte_s:,.1f} GB/s" if rate.cached_byte_s else "–",
            f"{1e-9 / rate.byte_s:,.1f} GB/s" if rate.byte_s else "–",
            f"{rate.slow_s * 1e9:.2g} ns" if rate.slow_s else "–",
            f"{rate.plain_s * 1e9:.2g} ns" if rate.plain_s else "–",
            f"{rate.spread:.0%}",
        )
        for rate in machine.kernels
    )
    return Table("Kernels: a sum of these", columns, rows)


def corrections_table(machine: Machine) -> Table:
    """Returns by what the model's seconds of kernels are multiplied, one row a kind."""
    columns = Column("kernels"), Column("take", right=True), Column("give or take", right=True)
    rows = tuple((of.kind, f"{of.factor:.2f} ×", f"{of.spread:.2f}") for of in machine.corrections)
    sources = dict(machine.sources)
    said = {sources.get(f"corrections.{of.kind}.factor", "") for of in machine.corrections}
    note = "; ".join(sorted(filter(None, said)))
    return Table("Kernels, relative to the model above", columns, rows, note)


def unstable_table(unstable: Mapping[str, float], measured: int) -> Table:
    """Returns what was not the same from turn to turn, the worst first."""
    worst = sorted(unstable.items(), key=lambda item: -item[1])
    rows = tuple((name, f"{spread:.0%}") for name, spread in worst[:_UNSTABLE_SHOWN])
    title = f"{len(unstable)} of {measured} measurements are unstable"
    said = "Quartiles of their turns lie that far apart: measure again when the machine is idle."
    return Table(title, (Column("what"), Column("turns differ by", right=True)), rows, said)


def _tier_title(tier: Tier) -> str:
    space = f", memory space {tier.memory_space}" if tier.memory_space is not None else ""
    return f"{tier.name}{space}"
