"""The page ``docs/machines.md``, printed from the library so that it cannot go stale.

Run ``python -m hlo_passes.hardware.table > docs/machines.md`` after changing a machine file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hlo_passes.hardware.machine import Machine, load_machine, machine_names

_INTRODUCTION = """\
# Machines

One JAX device each, with the memories it reaches: what `machine=` and `memplan machines`
know. The numbers live in `hlo_passes/hardware/machines/`, each beside its source, and this page is
printed from there (`python -m hlo_passes.hardware.table > docs/machines.md`). A source that
begins with "estimate:" means that nobody has published the number; replace it with your own
measurement by giving `machine=` the path of a copy of the file, or measure the machine that is
here: `memplan calibrate` writes such a file.

Capacity is what a program can use, less what the compiler keeps for itself; of a host's
memory, the share of one device. Peak FLOP/s are those of the fastest unit that XLA may run a
dot of the type on, without sparsity. Bandwidths and rates are decimal (1 GB/s = 1e9 bytes/s),
capacities binary (1 GiB = 2^30 bytes). What is linked to the host only (`nvme`, `cxl`) comes to the
device by the host's memory; where CPU and GPU share one memory, there is no host tier. A transfer
takes the link's latency, then its bytes over nominal bandwidth times efficiency. A collective is
priced as a ring over the interconnect: its steps' latencies, then the bytes that a device sends.
What stands beside that is for `memplan simulate`, not for plans: what all transfers that end in a
memory reach together (`bytes_per_s`, of a host's memory the share of one device), and what the host
takes to launch a kernel by itself (`launch_s`) or in a graph (`captured_launch_s`).

Where a file says what a machine takes in joules, plans can have the fewest of them
(`objective="energy"`): static watts (`static_w`), one operation of a product (`flop_j`), a byte
that is read or written in a memory, and one on the wires of a link (`j_per_byte`). Few of these are
published: what a product takes is what the power limit leaves it.
"""


def machine_page(machines: Iterable[Machine]) -> str:
    """Returns the page in Markdown: an overview, then each machine's numbers and sources."""
    machines = tuple(machines)
    lines = [
        _INTRODUCTION,
        "| machine | other names | device memory | bandwidth | host link | bf16 | clock |",
        "|---|---|--:|--:|--:|--:|--:|",
        *(_overview(machine) for machine in machines),
    ]
    for machine in machines:
        lines += ["", f"## {machine.name}", "", "| number | value | source |", "|---|--:|---|"]
        lines += _numbers(machine)
    return "\n".join(lines) + "\n"


def _overview(machine: Machine) -> str:
    memory = machine.device_memory
    into_device = [link for link in machine.links if link.destination == memory.name]
    # A machine without a host tier (a CPU) shows its fastest way in.
    link = next(
        (link for link in into_device if link.source == "host"),
        max(into_device, key=lambda link: link.bytes_per_s),
    )
    return (
        f"| {machine.name} | {', '.join(machine.aliases)} "
        f"| {memory.capacity_bytes / 2**30:.2f} GiB "
        f"| {machine.hbm_bytes_per_s / 1e9:,.0f} GB/s "
        f"| {link.bytes_per_s / 1e9:.1f} GB/s from {link.source} "
        f"| {machine.flops('bf16') / 1e12:,.0f} TFLOP/s "
        f"| {machine.clock_hz / 1e9:g} GHz |"
    )


def _numbers(machine: Machine) -> Iterator[str]:
    sources = dict(machine.sources)

    def row(key: str, value: str) -> str:
        return f"| `{key}` | {value} | {sources.get(key, '')} |"

    def joules_row(key: str, joules: float | None) -> Iterator[str]:
        if joules is not None:
            yield row(f"{key}.j_per_byte", f"{joules * 1e12:g} pJ")

    yield row("hbm_bytes_per_s", f"{machine.hbm_bytes_per_s / 1e9:,.2f} GB/s")
    yield row("clock_hz", f"{machine.clock_hz / 1e9:g} GHz")
    for key in ("launch_s", "captured_launch_s"):
        if (seconds := getattr(machine, key)) is not None:
            yield row(key, f"{seconds * 1e6:g} µs")
    for dtype, flops in machine.peak_flops:
        yield row(f"peak_flops.{dtype}", f"{flops / 1e12:,.1f} TFLOP/s")
    if machine.static_w is not None:
        yield row("static_w", f"{machine.static_w:g} W")
    for dtype, joules in machine.flop_j:
        yield row(f"flop_j.{dtype}", f"{joules * 1e12:.2g} pJ")
    for tier in machine.tiers:
        key = f"tiers.{tier.name}"
        yield row(f"{key}.capacity_bytes", f"{tier.capacity_bytes:,}")
        if tier.bytes_per_s is not None:
            yield row(f"{key}.bytes_per_s", f"{tier.bytes_per_s / 1e9:,.2f} GB/s")
        yield from joules_row(key, tier.j_per_byte)
    for link in machine.links:
        key = f"links.{link.source}->{link.destination}"
        yield row(f"{key}.nominal_bytes_per_s", f"{link.nominal_bytes_per_s / 1e9:,.2f} GB/s")
        yield row(f"{key}.efficiency", f"{link.efficiency:g}")
        yield row(f"{key}.latency_s", f"{link.latency_s * 1e6:g} µs")
        yield row(f"{key}.engines", f"{link.engines}")
        yield from joules_row(key, link.j_per_byte)
    if (wires := machine.interconnect) is not None:
        key = "interconnect"
        yield row(f"{key}.nominal_bytes_per_s", f"{wires.nominal_bytes_per_s / 1e9:,.2f} GB/s")
        yield row(f"{key}.efficiency", f"{wires.efficiency:g}")
        yield row(f"{key}.step_latency_s", f"{wires.step_latency_s * 1e6:g} µs")
        yield from joules_row(key, wires.j_per_byte)
    for key, source in machine.sources:
        if key.startswith("gpu."):
            yield f"| `{key}` | {getattr(machine.gpu, key.removeprefix('gpu.')):,} | {source} |"


if __name__ == "__main__":
    print(machine_page(load_machine(name) for name in machine_names()), end="")
