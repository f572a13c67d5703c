"""Clusters that people have, each a function; what they are made of, `cluster` says.

Where a number is nobody's measurement, its source begins with "estimate:".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

from hlo_passes.cluster.cluster import Cluster, Node, Place, Wire
from hlo_passes.errors import ClusterError
from hlo_passes.hardware.machine import Machine, Tier, load_machine

_TPU_CHIPS_A_HOST = 4

# On which axes a slice is closed to rings (https://jax-ml.github.io/scaling-book/tpus).
_WRAPS = {
    "tpu-v4": lambda extent: extent % 4 == 0,
    "tpu-v5e": lambda extent: extent == 16,
    "tpu-v6e": lambda extent: extent == 16,
    "tpu-v5p": lambda extent: extent % 4 == 0,
    "tpu7x": lambda extent: extent % 4 == 0,
}

_GPU_NIC = 50e9, "ConnectX-7, 400 Gb/s (NVIDIA DGX H100/H200 datasheet: one for each GPU)"
_TPU_NIC = (
    12.5e9,
    "https://cloud.google.com/tpu/docs/v5e: 6.4 Tbps a pod of 256 chips, 4 a host",
)
_NIC_EFFICIENCY = 0.9, "estimate: large messages, less headers and congestion"
_NIC_LATENCY = 20e-6, "estimate: the order of one message between two hosts of a data center"


def tpu_slice(topology: str, parts: str = "", *, name: str = "") -> Cluster:
    """A slice of TPUs with its hosts, four chips each.

    Args:
      topology: ``"v5e:4x8"``, a machine and the slice's extent.
      parts: into how many equal parts each axis is cut, ``"4x1"``; each part is a node, for a
        program of its own, and between those that touch are as many links as their sides have.
      name: of the cluster; ``tpu``, and so are its nodes: ``tpu0``, ``tpu1``, ... where there are
        several parts.

    Raises:
      UnknownMachineError: when the library has no such machine.
      ClusterError: when the extent cannot be cut so.
    """
    machine_name, _, extent_text = topology.partition(":")
    machine = load_machine(machine_name)
    if machine.name not in _WRAPS or machine.interconnect is None:
        raise ClusterError(f"{topology}: {machine.name} is no TPU of slices", "Try 'v5e:4x8'.")
    extent = _extent(topology, extent_text)
    cut = _extent(topology, parts) if parts else (1,) * len(extent)
    if len(cut) != len(extent) or any(e % c for e, c in zip(extent, cut, strict=True)):
        raise ClusterError(f"{topology} has no {parts} parts", "Each axis is cut evenly.")
    name = name or "tpu"
    sides = tuple(e // c for e, c in zip(extent, cut, strict=True))
    at = {index: k for k, index in enumerate(itertools.product(*map(range, cut)))}
    names = {index: name if len(at) == 1 else f"{name}{k}" for index, k in at.items()}
    nodes: list[Node] = []
    for of in names.values():
        nodes += _tpus(of, math.prod(sides), machine)
    wires: list[Wire] = []
    sources: list[tuple[str, str]] = []
    for axis, count in enumerate(cut):
        is_ring = _WRAPS[machine.name](extent[axis])
        links: dict[tuple[str, str], int] = {}
        for index in at:
            follows = (*index[:axis], (index[axis] + 1) % count, *index[axis + 1 :])
            if count == 1 or (index[axis] + 1 == count and not is_ring):
                continue
            face = math.prod(sides) // sides[axis]
            for ends in ((names[index], names[follows]), (names[follows], names[index])):
                links[ends] = links.get(ends, 0) + face
        for (source, destination), side in links.items():
            wire = _ici(machine, source, destination, side)
            wires.append(wire)
            sources.append(
                (
                    f"wires.{wire.name}.nominal_bytes_per_s",
                    "half of the ring's two links of an axis",
                )
            )
    return Cluster(f"{name} {topology}", _arranged(nodes), tuple(wires), tuple(sources))


def gpu_nodes(
    machine: str,
    nodes: int = 1,
    gpus: int = 8,
    *,
    parts: int = 1,
    one_nic: bool = False,
    name: str = "",
) -> Cluster:
    """Servers of GPUs joined by NVLink, and by NICs to each other.

    A NIC is behind the same PCIe switch as its GPU, so what leaves through it takes the GPU's own
    PCIe link, as transfers to the host do.

    Args:
      machine: of the library: ``"h200"``.
      nodes, gpus: how many servers, and GPUs in each.
      parts: into how many nodes the GPUs of a server are cut, each for a program of its own.
      one_nic: one NIC a server instead of one a GPU.
      name: what the names of all nodes begin with.

    Raises:
      UnknownMachineError: when the library has no such machine.
      ClusterError: when the GPUs cannot be cut so.
    """
    gpu = load_machine(machine)
    if nodes < 1 or gpus < 1 or parts < 1 or gpus % parts:
        raise ClusterError(f"{nodes} servers of {gpus} GPUs in {parts} parts", "Cut them evenly.")
    made: list[Node] = []
    wires: list[Wire] = []
    sources: list[tuple[str, str]] = []
    own, each = gpu.host_link, gpus // parts
    for k in range(nodes):
        host, nvlink, nic = (f"{name}{of}{k}" for of in ("host", "nvlink", "nic"))
        made += [_host(host, gpu, gpus), Node(nvlink, 1)]
        for part in range(parts):
            mark = f"{k}" if parts == 1 else f"{k}-{part}"
            pcie = Place(f"{name}pcie{mark}", "")
            memory = (gpu.device_memory,)
            made += [
                Node(f"{name}gpu{mark}", each, memory, gpu, host, pcie, nvlink),
                Node(pcie.node, 1),
            ]
            # Each GPU has the width of its own link up to the host's memory.
            ends = pcie, Place(host, "dram")
            for source, destination in (ends, ends[::-1]):
                speed = own.nominal_bytes_per_s, own.efficiency, 0.0
                wires.append(Wire(source, destination, each, *speed, own.full_duplex))
            if nodes > 1 and one_nic:
                speed = own.nominal_bytes_per_s, own.efficiency, 0.0
                for ends in ((pcie, Place(nic, "")), (Place(nic, ""), pcie)):
                    wires.append(Wire(*ends, 1, *speed, own.full_duplex))
            elif nodes > 1:
                wires += _nic(pcie, "network", each, _GPU_NIC[0])
                sources += _nic_sources(str(pcie), "network", _GPU_NIC[1])
        if nodes > 1 and one_nic:
            made.append(Node(nic, 1))
            wires += _nic(Place(nic, ""), "network", 1, _GPU_NIC[0])
            sources += _nic_sources(nic, "network", _GPU_NIC[1])
    made += [Node("network", 1)] if nodes > 1 else []
    return Cluster(f"{nodes} x {gpus} {gpu.name}", _arranged(made), tuple(wires), tuple(sources))


def workstation(*machines: str) -> Cluster:
    """One host with GPUs of any kinds behind its PCIe root, whose links the GPUs do not share.

    Raises:
      UnknownMachineError: when the library has no such machine.
      ClusterError: when there are none.
    """
    if not machines:
        raise ClusterError("a workstation without GPUs", "Name the machine of each.")
    gpus = [load_machine(name) for name in machines]
    memory = max(host_share(gpu) for gpu in gpus)
    nodes = [
        Node(f"gpu{k}", 1, (gpu.device_memory,), gpu, "host", Place("host", "dram"))
        for k, gpu in enumerate(gpus)
    ]
    host = Node("host", 1, (Tier("dram", None, memory * len(gpus)),))
    return Cluster("workstation", (*nodes, host), ())


def over_network(*clusters: Cluster, nic_bytes_per_s: float = _TPU_NIC[0]) -> Cluster:
    """Clusters joined by a data center's network: each host has a NIC.

    Args:
      clusters: whose nodes have different names.
      nic_bytes_per_s: of one host, in one direction.

    Raises:
      ClusterError: when two nodes have one name, or there are none.
    """
    if not clusters:
        raise ClusterError("a network of no clusters", "Name what it joins.")
    nodes = [node for cluster in clusters for node in cluster.nodes]
    names = [node.name for node in nodes]
    for name in names:
        if names.count(name) > 1:
            raise ClusterError(f"two nodes are called {name!r}", "Give tpu_slice(name=).")
    wires = [wire for cluster in clusters for wire in cluster.own_wires]
    sources = [source for cluster in clusters for source in cluster.sources]
    told = _TPU_NIC[1] if nic_bytes_per_s == _TPU_NIC[0] else "given"
    for node in nodes:
        if node.tiers and node.machine is None:
            wires += _nic(node.memory, "dcn", node.count, nic_bytes_per_s)
            sources += _nic_sources(str(node.memory), "dcn", told)
    joined = " + ".join(cluster.name for cluster in clusters)
    return Cluster(joined, _arranged([*nodes, Node("dcn", 1)]), tuple(wires), tuple(sources))


def host_share(machine: Machine) -> int:
    """Bytes of the host's memory that one device has."""
    return next((t.capacity_bytes for t in machine.tiers if t.name == "host"), 0)


def _extent(topology: str, text: str) -> tuple[int, ...]:
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise ClusterError(f"{topology}: found an extent {text!r}", "Expected numbers: '4x8'.")
    return tuple(map(int, sizes))


def _tpus(name: str, count: int, machine: Machine) -> list[Node]:
    hosts = -(-count // _TPU_CHIPS_A_HOST)
    host, fabric = f"{name}-host", f"{name}-ici"
    memory = (machine.device_memory,)
    return [
        Node(name, count, memory, machine, host, Place(host, "dram"), fabric),
        replace(_host(host, machine, min(count, _TPU_CHIPS_A_HOST)), count=hosts),
        Node(fabric, 1),
    ]


def _arranged(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Chips, hosts, switches: as files have them."""
    return tuple(sorted(nodes, key=lambda node: (node.machine is None) + (not node.tiers)))


def _host(name: str, machine: Machine, devices: int) -> Node:
    return Node(name, 1, (Tier("dram", None, host_share(machine) * devices),))


def _ici(machine: Machine, source: str, destination: str, count: int) -> Wire:
    own = machine.interconnect
    assert own is not None
    return Wire(
        Place(f"{source}-ici", ""),
        Place(f"{destination}-ici", ""),
        count,
        own.nominal_bytes_per_s / 2,
        own.efficiency,
        own.step_latency_s,
        True,
    )


def _nic(at: Place, network: str, count: int, bytes_per_s: float) -> list[Wire]:
    speed = bytes_per_s, _NIC_EFFICIENCY[0], _NIC_LATENCY[0]
    ends = at, Place(network, "")
    return [Wire(a, b, count, *speed, True) for a, b in (ends, ends[::-1])]


def _nic_sources(at: str, network: str, told: str) -> list[tuple[str, str]]:
    return [
        (f"wires.{wire}.{key}", source)
        for wire in (f"{at}->{network}", f"{network}->{at}")
        for key, source in (
            ("nominal_bytes_per_s", told),
            ("efficiency", _NIC_EFFICIENCY[1]),
            ("latency_s", _NIC_LATENCY[1]),
        )
    ]
