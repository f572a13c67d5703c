"""Clusters as files, and those that people have."""

import json
import tomllib
from typing import Any

import pytest

from hlo_passes.cluster.cluster import Cluster, Place
from hlo_passes.cluster.presets import gpu_nodes, over_network, tpu_slice, workstation
from hlo_passes.cluster.routes import route
from hlo_passes.errors import ClusterError, ClusterFileError, UnknownMachineError

FILE = """
name = "mine"
chips = [{ name = "big", machine = "h200", host = "box" },
         { name = "small", count = 2, machine = "a100", host = "box", attached = "plx" }]
hosts = [{ name = "box", tiers = [{ name = "dram", capacity_bytes = 64_000_000_000 },
                                  { name = "ssd", capacity_bytes = 1_000_000_000_000 }] }]
switches = [{ name = "plx" }]

[[wires]]
between = ["plx", "box.dram"]
full_duplex = true
nominal_bytes_per_s = { value = 32e9, source = "the root's own x16" }
efficiency = 0.8
latency_s = 0

[[wires]]
between = ["box.dram", "box.ssd"]
full_duplex = false
nominal_bytes_per_s = 7e9
efficiency = 1
latency_s = 1e-4
"""


def data() -> dict[str, Any]:
    return tomllib.loads(FILE)


def test_a_file_and_back(tmp_path):
    (tmp_path / "c.toml").write_text(FILE)
    cluster = Cluster.load(tmp_path / "c.toml")
    assert [node.count for node in cluster.chips] == [1, 2]
    assert cluster.capacity(Place("small", "hbm")) == 2 * cluster.chips[1].tiers[0].capacity_bytes
    (tmp_path / "c.json").write_text(json.dumps(cluster.to_dict()))
    assert Cluster.load(tmp_path / "c.json") == cluster
    assert dict(cluster.sources)["wires.plx->box.dram.nominal_bytes_per_s"] == "the root's own x16"


def test_both_directions_of_half_duplex_are_one_medium():
    media = {wire.name: wire.medium for wire in Cluster.from_dict(data()).wires}
    assert media["box.dram->box.ssd"] == media["box.ssd->box.dram"]
    assert media["plx->box.dram"] != media["box.dram->plx"]


def change(path: str, value: object) -> dict[str, Any]:
    changed = data()
    at: Any = changed
    *way, last = path.split("/")
    for key in way:
        at = at[int(key)] if key.isdecimal() else at[key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return changed


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("name", None, "mine, name: expected a string, found nothing"),
        ("wires/0/bandwidth", 3, "bandwidth: expected no such key"),
        ("wires/0/efficiency", 2, "plx->box.dram.efficiency: expected a fraction"),
        ("wires/0/between", ["plx", "box.hbm"], "expected one of .*box.ssd.* found 'box.hbm'"),
        ("wires/1/between", ["plx", "box.dram"], "each once, found plx->box.dram twice"),
        ("chips/0/host", "tower", "chips.big.host: expected one of box, found 'tower'"),
        ("chips/1/attached", "nowhere", "chips.small.attached: expected one of"),
        ("chips/0/count", 0, "count: expected a positive number, found 0"),
        ("chips/0/name", "a.b", "a word of letters, digits, - and _, found 'a.b'"),
        ("switches/0/name", "box", "each once, found box twice"),
        ("wires/1/nominal_bytes_per_s", 0.5, "box.dram->box.ssd: expected from 1 to .* found 0.5"),
        (
            "wires/0/nominal_bytes_per_s",
            1e300,
            "plx->box.dram: expected from 1 to .* bytes a second",
        ),
        ("wires/0/latency_s", 1e10, "latency_s: expected at most"),
        ("chips/0/attached", "big.hbm", "chips.big.attached: expected one of"),
        ("chips/0/fabric", "box.dram", "chips.big.fabric: expected one of plx, found 'box.dram'"),
        ("hosts/0/tiers/1/name", "dram", "hosts.box.tiers: expected each once, found dram twice"),
        ("hosts/0/tiers/0/capacity_bytes", 1 << 63, "box.dram.capacity_bytes: expected less than"),
        ("hosts/0/tiers", [], "hosts.box.tiers: expected at least one memory"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(path: str, value: object, message: str):
    with pytest.raises(ClusterFileError, match=message):
        Cluster.from_dict(change(path, value), "mine")


def test_files_that_are_none(tmp_path):
    with pytest.raises(ClusterFileError, match="a readable file"):
        Cluster.load(tmp_path / "absent.toml")
    with pytest.raises(UnknownMachineError):
        Cluster.from_dict(change("chips/0/machine", "abacus"))


def test_a_slice_is_a_torus_of_parts():
    whole = tpu_slice("v5e:16x16")
    assert [(n.name, n.count) for n in whole.nodes] == [
        ("tpu", 256),
        ("tpu-host", 64),
        ("tpu-ici", 1),
    ]
    quarters = tpu_slice("v5e:16x16", "4x1")
    links = {w.name: w for w in quarters.own_wires}
    # A ring: each part touches the next, and the last the first, along a side of 16 chips.
    assert links.keys() == {
        f"tpu{a}-ici->tpu{b}-ici" for k in range(4) for a, b in ((k, (k + 1) % 4), ((k + 1) % 4, k))
    }
    assert {wire.count for wire in links.values()} == {16}
    # No slice of 4 is closed, and halves of a ring touch twice.
    assert len(tpu_slice("v5e:4x4", "4x1").own_wires) == 6
    assert {w.count for w in tpu_slice("v5e:16x16", "2x1").own_wires} == {32}


def test_bytes_pass_through_parts_without_resting():
    cluster = tpu_slice("v5e:1x4", "1x4")
    (leg,) = route(cluster, Place("tpu0", "hbm"), Place("tpu3", "hbm"), 1 << 20)
    assert [w.name for w in leg.wires] == [
        "tpu0.hbm->tpu0-ici",
        "tpu0-ici->tpu1-ici",
        "tpu1-ici->tpu2-ici",
        "tpu2-ici->tpu3-ici",
        "tpu3-ici->tpu3.hbm",
    ]
    assert leg.bytes_per_s == 45e9


def test_over_a_network_bytes_rest_in_hosts():
    cluster = over_network(tpu_slice("v5e:2x2", name="a"), tpu_slice("v5e:2x4", name="b"))
    legs = route(cluster, Place("a", "hbm"), Place("b", "hbm"), 1 << 30)
    assert [str(leg.destination) for leg in legs] == ["a-host.dram", "b-host.dram", "b.hbm"]
    assert [leg.bytes_per_s for leg in legs] == pytest.approx(
        [4 * 15.75e9 * 0.95, 12.5e9 * 0.9, 8 * 15.75e9 * 0.95]
    )


def test_gpus_of_a_node_use_nvlink_and_those_of_others_their_nics():
    cluster = gpu_nodes("h200", nodes=2, gpus=8, parts=2)
    near = route(cluster, Place("gpu0-0", "hbm"), Place("gpu0-1", "hbm"), 1 << 30)
    far = route(cluster, Place("gpu0-0", "hbm"), Place("gpu1-1", "hbm"), 1 << 30)
    assert [w.destination.node for leg in near for w in leg.wires] == ["nvlink0", "gpu0-1"]
    # Past the host's memory, and over the GPU's own PCIe link.
    assert [w.destination.node for leg in far for w in leg.wires] == [
        "pcie0-0",
        "network",
        "pcie1-1",
        "gpu1-1",
    ]
    assert len(far) == 1


def test_two_gpus_of_a_workstation_meet_in_its_memory():
    cluster = workstation("h200", "a100")
    legs = route(cluster, Place("gpu0", "hbm"), Place("gpu1", "hbm"), 1 << 20)
    assert [str(leg.destination) for leg in legs] == ["host.dram", "gpu1.hbm"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: tpu_slice("v5e:4x8", "3x1"),
        lambda: tpu_slice("v5e"),
        lambda: tpu_slice("h200:8"),
        lambda: gpu_nodes("h200", gpus=8, parts=3),
        lambda: over_network(tpu_slice("v5e:2x2"), tpu_slice("v5e:2x2")),
        lambda: workstation(),
        lambda: over_network(),
        lambda: route(tpu_slice("v5e:2x2"), Place("tpu", "hbm"), Place("moon", "hbm"), 1),
    ],
)
def test_what_cannot_be_is_refused(make):
    with pytest.raises(ClusterError):
        make()


@pytest.mark.parametrize(
    "cluster",
    [
        tpu_slice("v5p:4x4x8", "1x1x4"),
        gpu_nodes("h200", nodes=2, parts=2, one_nic=True),
        workstation("h200", "a100"),
        over_network(tpu_slice("v5e:2x2", name="a"), tpu_slice("v6e:4x4", name="b")),
    ],
    ids=lambda cluster: cluster.name,
)
def test_presets_are_written_and_read(cluster: Cluster):
    assert Cluster.from_dict(json.loads(json.dumps(cluster.to_dict()))) == cluster


def joined(*wires: tuple[str, str, float, float]) -> Cluster:
    """Two hosts' memories, and switches, with wires of so many bytes a second and latency."""
    tiers = [{"name": "dram", "capacity_bytes": 1 << 40}]
    return Cluster.from_dict(
        {
            "name": "joined",
            "chips": [{"name": "chip", "machine": "h200", "host": "a"}],
            "hosts": [{"name": name, "tiers": tiers} for name in "ab"],
            "switches": [{"name": name} for name in ("s", "t", "u")],
            "wires": [
                {
                    "source": source,
                    "destination": destination,
                    "nominal_bytes_per_s": rate,
                    "efficiency": 1,
                    "latency_s": latency_s,
                    "full_duplex": True,
                }
                for source, destination, rate, latency_s in wires
            ],
        }
    )


def test_the_way_is_the_fastest_and_not_that_of_the_least_sum():
    """Over three wires bytes take their narrowest one's time, not that of each."""
    cluster = joined(
        ("a.dram", "b.dram", 1e9, 0.0),
        ("a.dram", "s", 3e9, 0.0),
        ("s", "t", 3e9, 0.0),
        ("t", "u", 3e9, 0.0),
        ("u", "b.dram", 3e9, 0.0),
    )
    (leg,) = route(cluster, Place("a", "dram"), Place("b", "dram"), 10**7)
    assert leg.seconds(10**7) == pytest.approx(1e-2 / 3)


def test_the_way_to_a_switch_that_is_slower_may_be_the_better_one():
    """What follows is as narrow as the quick way, and the wide way has more latency."""
    cluster = joined(
        ("a.dram", "s", 2e9, 0.0),
        ("a.dram", "t", 1e12, 1e-3),
        ("t", "s", 1e12, 1e-3),
        ("s", "b.dram", 1e9, 0.0),
    )
    (leg,) = route(cluster, Place("a", "dram"), Place("b", "dram"), 10**7)
    assert [str(wire.destination) for wire in leg.wires] == ["s", "b.dram"]
