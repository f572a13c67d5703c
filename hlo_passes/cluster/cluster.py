"""A cluster: chips, hosts and switches, and the wires between them.

    ┌ a: 4 × tpu-v5e ┐  a-host      dcn      b-host  ┌ b: 4 × tpu-v5e ┐
    │  hbm ◄─────────┼─► dram ◄──► switch ◄──► dram ◄─┼────────► hbm  │
    └──┬─────────────┘                                └──┬────────────┘
       └► a-ici (switch: what the chips send each other)  └► b-ici

A *node* stands for `count` equal ones that do the same at the same time, as the chips of an SPMD
program do: 1,024 of them are one node. Bytes and bandwidths of a node and of a wire are those of
all of it together, so what is the same for each is computed once.

A *place* is a memory of a node, written ``node.tier``; a switch has none, and is written by its
name. Bytes follow *wires* from place to place, through switches, and come to rest in memories only.
Two wires between the same ends, in opposite directions, are one *medium* unless they are full
duplex: then a transfer takes a share of its time, whichever way it goes. What several nodes share
is a wire of its own behind a switch: a NIC, a PCIe root.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from hlo_passes.errors import ClusterError, ClusterFileError
from hlo_passes.hardware.file_table import FileTable
from hlo_passes.hardware.machine import (
    Link,
    Machine,
    Tier,
    UnknownMachineError,
    load_machine,
    machine_from_dict,
)

_LIMIT = 1 << 63
"""Of bytes, and of bytes a second: what chains and their runtime count to."""

_COUNT_LIMIT = 1 << 32

LONGEST_S = 1e9
"""Seconds that nothing takes, nor all of it."""


class Place(NamedTuple):
    """A memory of a node; of a switch `tier` is ``""``."""

    node: str
    tier: str

    def __str__(self) -> str:
        return f"{self.node}.{self.tier}" if self.tier else self.node

    @classmethod
    def parse(cls, text: str) -> Place:
        node, _, tier = text.partition(".")
        return cls(node, tier)


@dataclass(frozen=True)
class Node:
    """`count` equal chips, hosts or switches.

    Attributes:
      tiers: their memories, with the capacity of one; a chip has that of the device, a switch none.
      machine: of chips.
      host: of chips, the node whose memories their programs call the host's.
      attached: of chips, where the link of `machine` to the host ends: a memory of the host, or a
        switch.
      fabric: of chips, the switch at which `machine`'s interconnect ends; ``""`` for none.
    """

    name: str
    count: int
    tiers: tuple[Tier, ...] = ()
    machine: Machine | None = None
    host: str = ""
    attached: Place | None = None
    fabric: str = ""

    @property
    def memory(self) -> Place:
        """The first of its memories: of chips the device's."""
        return Place(self.name, self.tiers[0].name)


@dataclass(frozen=True)
class Wire:
    """`count` equal wires side by side, in one direction.

    Attributes:
      source, destination: memories or switches.
      nominal_bytes_per_s: of one.
      efficiency: the fraction of it that one large transfer reaches, in (0, 1].
      latency_s: from the start of a transfer to its first byte.
      full_duplex: whether the wire back, if there is one, is another medium.
    """

    source: Place
    destination: Place
    count: int
    nominal_bytes_per_s: float
    efficiency: float
    latency_s: float
    full_duplex: bool

    @cached_property
    def name(self) -> str:
        return f"{self.source}->{self.destination}"

    @cached_property
    def medium(self) -> str:
        """Wires of one medium share its bandwidth."""
        if self.full_duplex:
            return self.name
        return "<->".join(sorted((str(self.source), str(self.destination))))

    @property
    def bytes_per_s(self) -> int:
        """What all of them carry together, whole ones."""
        return int(self.count * self.nominal_bytes_per_s * self.efficiency)


@dataclass(frozen=True)
class Cluster:
    """Nodes and wires; see the module.

    Attributes:
      own_wires: those that are not of a chip's machine, as a file lists them.
      sources: pairs of a number's key and where the number comes from.
    """

    name: str
    nodes: tuple[Node, ...]
    own_wires: tuple[Wire, ...]
    sources: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        chips = ", ".join(f"{n.count} × {n.machine.name}" for n in self.nodes if n.machine)
        return f"<Cluster {self.name}: {chips}; {len(self.wires)} wires>"

    @property
    def chips(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.machine is not None)

    @cached_property
    def wires(self) -> tuple[Wire, ...]:
        """All of them: those of the chips' machines to the host and to other chips, then
        `own_wires`."""
        of_chips = [wire for node in self.chips for wire in _wires_of(node)]
        return (*of_chips, *self.own_wires)

    def check(self) -> None:
        """
        Raises:
          ClusterFileError: when it is none that a file could say.
        """
        Cluster.from_dict(self.to_dict(), self.name)

    def node(self, name: str) -> Node:
        """
        Raises:
          ClusterError: when there is none of that name.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        known = ", ".join(node.name for node in self.nodes)
        raise ClusterError(f"cluster {self.name} has no node {name!r}", f"It has {known}.")

    def capacity(self, place: Place) -> int:
        """Bytes of a memory, of all that the node stands for.

        Raises:
          ClusterError: when there is no such place.
        """
        node = self.node(place.node)
        for tier in node.tiers:
            if tier.name == place.tier:
                return node.count * tier.capacity_bytes
        known = ", ".join(tier.name for tier in node.tiers) or "none"
        raise ClusterError(f"{place}: {node.name} has no such memory", f"It has {known}.")

    def host_place(self, node: Node, tier: str) -> Place:
        """Which place a program on `node` calls by the name of a tier: ``"host"`` is the host's
        first memory, others are called as they are.

        Raises:
          ClusterError: when there is none.
        """
        if node.tiers and tier == node.memory.tier:
            return node.memory
        host = self.node(node.host)
        place = host.memory if tier == "host" else Place(host.name, tier)
        self.capacity(place)
        return place

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Reads a file, TOML or (``.json``) JSON.

        Raises:
          ClusterFileError: when it is missing, or not in that form.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except (OSError, ValueError) as error:
            raise ClusterFileError(str(path), "", "a readable file", str(error)) from error
        return Cluster.from_dict(data, str(path))

    def to_dict(self) -> dict[str, object]:
        """The cluster as JSON-ready data, in the form of a file; `from_dict` reads it back."""
        sources = dict(self.sources)

        def number(key: str, value: float) -> object:
            return {"value": value, "source": sources[key]} if key in sources else value

        chips: list[object] = []
        hosts: list[object] = []
        switches: list[object] = []
        for node in self.nodes:
            if node.machine is not None:
                chips.append(
                    {
                        "name": node.name,
                        "count": node.count,
                        "machine": _machine_entry(node.machine),
                        "host": node.host,
                        "attached": str(node.attached),
                        **({"fabric": node.fabric} if node.fabric else {}),
                    }
                )
            elif node.tiers:
                tiers = [
                    {
                        "name": t.name,
                        "capacity_bytes": number(
                            f"hosts.{node.name}.{t.name}.capacity_bytes", t.capacity_bytes
                        ),
                    }
                    for t in node.tiers
                ]
                hosts.append({"name": node.name, "count": node.count, "tiers": tiers})
            else:
                switches.append({"name": node.name, "count": node.count})
        wires = [
            {
                "source": str(w.source),
                "destination": str(w.destination),
                "count": w.count,
                **{
                    key: number(f"wires.{w.name}.{key}", getattr(w, key))
                    for key in ("nominal_bytes_per_s", "efficiency", "latency_s")
                },
                "full_duplex": w.full_duplex,
            }
            for w in self.own_wires
        ]
        return {
            "name": self.name,
            "chips": chips,
            "hosts": hosts,
            "switches": switches,
            "wires": wires,
        }

    @staticmethod
    def from_dict(data: Mapping[str, object], file: str = "cluster") -> Cluster:
        """Reads the data of a file; the inverse of `to_dict`.

        A wire has ``source`` and ``destination``, or ``between``, the two ends of two. A chip's
        ``attached`` is the first memory of its host where it is left out; ``count`` is 1.

        Raises:
          ClusterFileError: when a key is missing, unknown, or its value not as expected.
        """
        return _from_dict(data, file)


def _wires_of(node: Node) -> Iterator[Wire]:
    """The wires of the machine of a node of chips."""
    machine = node.machine
    assert machine is not None
    if node.attached is not None:
        device = machine.device_memory.name
        into = machine.host_link
        back = next(
            (k for k in machine.links if (k.source, k.destination) == (device, into.source)), into
        )
        yield _as_wire(node, into, node.attached, node.memory)
        yield _as_wire(node, back, node.memory, node.attached)
    if node.fabric and (own := machine.interconnect) is not None:
        switch = Place(node.fabric, "")
        for ends in ((node.memory, switch), (switch, node.memory)):
            # A step of a ring goes over two of them.
            half_s = own.step_latency_s / 2
            yield Wire(*ends, node.count, own.nominal_bytes_per_s, own.efficiency, half_s, True)


def _as_wire(node: Node, link: Link, source: Place, destination: Place) -> Wire:
    speed = link.nominal_bytes_per_s, link.efficiency, link.latency_s
    return Wire(source, destination, node.count, *speed, link.full_duplex)


def _machine_entry(machine: Machine) -> object:
    """Its name, if the library has the same one."""
    try:
        if load_machine(machine.name) == machine:
            return machine.name
    except UnknownMachineError:
        pass
    return machine.to_dict()


class _Table(FileTable):
    refusal = ClusterFileError

    def count(self) -> int:
        count = self.whole("count") if "count" in self.unread else 1
        if count >= _COUNT_LIMIT:
            raise self.error("count", f"less than {_COUNT_LIMIT}", str(count))
        return count


def _from_dict(data: Mapping[str, object], file: str) -> Cluster:
    root = _Table(data, file)
    name = root.text("name")
    hosts = [_host(table) for table in root.tables("hosts")] if "hosts" in root.unread else []
    switches = (
        [_switch(table) for table in root.tables("switches")] if "switches" in root.unread else []
    )
    chips = [_chips(table, hosts) for table in root.tables("chips")]
    nodes = (*chips, *hosts, *switches)
    root.reject_repeats("chips, hosts, switches", [node.name for node in nodes])
    places = {node.name: [str(Place(node.name, t.name)) for t in node.tiers] for node in nodes}
    joints = [node.name for node in switches]
    for node in chips:
        outside = [end for of in hosts for end in places[of.name]] + joints
        for key, end, known in (
            ("attached", str(node.attached), outside),
            ("fabric", node.fabric, ["", *joints]),
        ):
            if end not in known:
                expected = f"one of {', '.join(filter(None, known))}"
                raise root.error(f"chips.{node.name}.{key}", expected, repr(end))
    ends = (*sorted(place for of in places.values() for place in of), *joints)
    tables = root.tables("wires") if "wires" in root.unread else ()
    wires = tuple(_wire(one, ends) for table in tables for one in table.directed())
    cluster = Cluster(name, nodes, wires, tuple(root.sources))
    root.reject_repeats("wires", [wire.name for wire in cluster.wires])
    for wire in cluster.wires:
        carried = wire.count * wire.nominal_bytes_per_s * wire.efficiency
        if not 1 <= carried < _LIMIT:
            expected = f"from 1 to {_LIMIT} bytes a second in all"
            raise root.error(f"wires.{wire.name}", expected, f"{carried:g}")
        if wire.latency_s > LONGEST_S:
            expected = f"at most {LONGEST_S:g}"
            raise root.error(f"wires.{wire.name}.latency_s", expected, f"{wire.latency_s:g}")
    for node in nodes:
        for tier in node.tiers:
            if node.count * tier.capacity_bytes >= _LIMIT:
                where = f"{Place(node.name, tier.name)}.capacity_bytes"
                raise root.error(where, f"less than {_LIMIT} in all", str(tier.capacity_bytes))
    root.close()
    return cluster


def _host(table: _Table) -> Node:
    name = table.word("name")
    table.key = f"hosts.{name}"
    count = table.count()
    tiers = tuple(_tier(of, table.key) for of in table.tables("tiers"))
    if not tiers:
        raise table.error("tiers", "at least one memory", "none")
    table.reject_repeats("tiers", [tier.name for tier in tiers])
    table.close()
    return Node(name, count, tiers)


def _tier(table: _Table, key: str) -> Tier:
    name = table.word("name")
    table.key = f"{key}.{name}"
    tier = Tier(name, None, table.whole("capacity_bytes"))
    table.close()
    return tier


def _switch(table: _Table) -> Node:
    node = Node(table.word("name"), table.count())
    table.close()
    return node


def _chips(table: _Table, hosts: list[Node]) -> Node:
    name = table.word("name")
    table.key = f"chips.{name}"
    count = table.count()
    machine = _machine(table)
    if not any(link.destination == machine.device_memory.name for link in machine.links):
        expected = f"one with a link to its {machine.device_memory.name}"
        raise table.error("machine", expected, machine.name)
    host = table.choice("host", tuple(node.name for node in hosts))
    attached = next(node.memory for node in hosts if node.name == host)
    if "attached" in table.unread:
        attached = Place.parse(table.text("attached"))
    fabric = table.text("fabric") if "fabric" in table.unread else ""
    table.close()
    return Node(name, count, (machine.device_memory,), machine, host, attached, fabric)


def _machine(table: _Table) -> Machine:
    if isinstance(table.unread.get("machine"), Mapping):
        return machine_from_dict(table.table("machine").unread, f"{table.file}, {table.key}")
    return load_machine(table.text("machine"))


def _wire(table: _Table, ends: tuple[str, ...]) -> Wire:
    source = Place.parse(table.choice("source", ends))
    others = tuple(end for end in ends if end != str(source))
    destination = Place.parse(table.choice("destination", others))
    table.key = f"wires.{source}->{destination}"
    wire = Wire(
        source,
        destination,
        table.count(),
        table.number("nominal_bytes_per_s"),
        table.fraction("efficiency"),
        table.number("latency_s", zero=True),
        table.flag("full_duplex"),
    )
    table.close()
    return wire
