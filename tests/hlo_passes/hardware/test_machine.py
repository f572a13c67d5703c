import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding

from hlo_passes.errors import MachineFileError, NotOnMachineError, UnknownMachineError
from hlo_passes.hardware.machine import (
    Interconnect,
    Link,
    Machine,
    Tier,
    load_machine,
    machine_from_dict,
    machine_names,
)
from hlo_passes.hardware.table import machine_page

LIBRARY = [load_machine(name) for name in machine_names()]
library = pytest.mark.parametrize("machine", LIBRARY, ids=machine_names())

SMALL = """\
name = "small"
aliases = []
platform = "gpu"
hbm_bytes_per_s = 1e9
clock_hz = 1e9

[peak_flops]
bf16 = 1e12

[[tiers]]
name = "hbm"
memory_space = 0
capacity_bytes = 1000

[[tiers]]
name = "ssd"
capacity_bytes = { value = 5000, source = "measured" }

[[links]]
between = ["hbm", "ssd"]
full_duplex = false
engines = 1
nominal_bytes_per_s = { value = 100.0, source = "the vendor" }
efficiency = 0.5
latency_s = 0
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "my.toml"
        path.write_text(text)
        return path

    return write


# --- the library


@library
def test_every_number_of_the_library_has_a_source(machine: Machine):
    def bare(data: object, path: str) -> list[str]:
        if isinstance(data, dict):
            if "source" in data and "value" in data:
                assert data["source"].strip(), path
                return []
            return [found for key, item in data.items() for found in bare(item, f"{path}.{key}")]
        if isinstance(data, list):
            return [found for item in data for found in bare(item, path)]
        return [path] if isinstance(data, int | float) and not isinstance(data, bool) else []

    # XLA's own numbering is no measurement.
    assert set(bare(machine.to_dict(), machine.name)) <= {f"{machine.name}.tiers.memory_space"}


@library
def test_every_tier_is_reached_from_device_memory_and_back(machine: Machine):
    """At most by the host's memory: `Machine.fed_from` goes no further."""
    memory = machine.device_memory.name
    for tier in machine.tiers[1:]:
        if tier.memory_space is None:
            machine = machine.fed_from(tier.name)
        assert machine.transfer_seconds(1, memory, tier.name) > 0
        assert machine.transfer_seconds(1, tier.name, memory) > 0


def test_where_cpu_and_gpu_share_one_memory_there_is_no_host_tier():
    gpus = [machine for machine in LIBRARY if machine.platform == "gpu"]
    assert {m.name for m in gpus if not m.has_host_memory} == {"dgx-spark"}
    spark = load_machine("NVIDIA GB10")
    assert [(tier.name, tier.memory_space) for tier in spark.tiers] == [("dram", 0), ("nvme", None)]
    assert spark.host_link.source == "nvme"


@pytest.mark.parametrize(
    ("name", "base", "tier"), [("rtx-4090-nvme", "rtx-4090", "nvme"), ("h100-cxl", "h100", "cxl")]
)
def test_a_device_with_more_behind_its_host_is_the_same_device(name: str, base: str, tier: str):
    machine, same = load_machine(name), load_machine(base)
    links = tuple(link for link in machine.links if tier not in (link.source, link.destination))
    tiers = tuple(t for t in machine.tiers if t.name != tier)
    changes = {"name": base, "aliases": same.aliases, "tiers": tiers, "links": links}
    changes |= {"interconnect": same.interconnect, "sources": same.sources}
    assert replace(machine, **changes) == same
    assert {machine.link("host", tier), machine.link(tier, "host")} == set(machine.links[2:])


def test_what_is_behind_the_host_comes_as_fast_as_the_slower_link():
    machine = load_machine("rtx-4090-nvme").fed_from("nvme")
    into, drive, host = machine.host_link, machine.link("nvme", "host"), machine.link("host", "hbm")
    assert (into.source, into.destination) == ("nvme", "hbm")
    assert into.bytes_per_s == drive.bytes_per_s < host.bytes_per_s
    assert into.latency_s == drive.latency_s + host.latency_s
    out = machine.link("hbm", "nvme")
    assert out.bytes_per_s == machine.link("host", "nvme").bytes_per_s
    assert machine.fed_from("nvme") == machine
    with pytest.raises(NotOnMachineError, match="no link 'cxl->hbm'"):
        machine.fed_from("cxl")


def test_no_two_machines_share_a_name():
    names = [name for machine in LIBRARY for name in (machine.name, *machine.aliases)]
    assert len(names) == len(set(names))


@library
def test_a_machine_survives_json(machine: Machine):
    assert machine_from_dict(json.loads(json.dumps(machine.to_dict()))) == machine
    assert len({machine, load_machine(machine.name)}) == 1


def test_the_page_in_docs_is_the_library():
    page = Path(__file__).parents[3] / "docs" / "machines.md"
    expected = machine_page(LIBRARY)
    assert page.read_text(encoding="utf-8") == expected, (
        "run `python -m hlo_passes.hardware.table > docs/machines.md`"
    )


@pytest.mark.parametrize(
    ("topology", "name", "devices", "options"),
    [
        ("v4:2x2x1", "tpu-v4", 4, {"chip_config_name": "megacore"}),
        ("v5e:2x2", "tpu-v5e", 4, {}),
        ("v5p:2x2x1", "tpu-v5p", 4, {}),
        ("v6e:2x2", "tpu-v6e", 4, {}),
        ("tpu7x:2x2x1", "tpu7x", 8, {}),  # four chips: a device is half of one
    ],
)
def test_capacity_is_what_the_tpu_compiler_grants(tpu_compiler, topology, name, devices, options):
    described = tpu_compiler(topology, **options).devices
    assert len(described) == devices
    machine = load_machine(described[0].device_kind)
    assert machine.name == name

    def compile_with(hbm_bytes: int):
        rows = hbm_bytes // (8 * 128 * 4)
        sharding = SingleDeviceSharding(described[0])
        argument = jax.ShapeDtypeStruct((rows, 8, 128), jnp.float32, sharding=sharding)
        return jax.jit(lambda x: x * 2, donate_argnums=0).lower(argument).compile()

    capacity = machine.device_memory.capacity_bytes
    compile_with(capacity - 2**24)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_with(capacity + 2**24)


# --- names


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("tpu-v5e", "tpu-v5e"),
        ("V5litepod", "tpu-v5e"),
        ("TPU v5 lite", "tpu-v5e"),
        ("tpu_v5p", "tpu-v5p"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("TPU v4", "tpu-v4"),
        (" cpu ", "cpu-cxl"),
    ],
)
def test_names_and_aliases(given, name):
    assert load_machine(given).name == name


def test_an_unknown_name_suggests_what_is_close():
    with pytest.raises(UnknownMachineError) as error:
        load_machine("h20")
    assert "no machine 'h20'. Did you mean h200" in str(error.value)
    assert "Known: a100, b200, cpu-cxl," in str(error.value)


@pytest.mark.parametrize("given", [3, None, b"v5e", ["v5e"]])
def test_what_is_no_name(given):
    with pytest.raises(UnknownMachineError, match=r"no machine .* Known: a100,"):
        load_machine(given)


def test_an_unknown_name_suggests_nothing_far_fetched():
    with pytest.raises(UnknownMachineError) as error:
        load_machine("abacus")
    assert "Did you mean" not in str(error.value)


# --- questions to a machine


def test_parts_are_found_by_name(write):
    machine = load_machine(write(SMALL))
    assert machine.device_memory == machine.tier("hbm") == Tier("hbm", 0, 1000)
    assert machine.tier("ssd").memory_space is None
    assert machine.link("ssd", "hbm") == Link("ssd", "hbm", 100.0, 0.5, 0, 1, False)
    assert machine.flops("bf16") == 1e12
    assert machine.cycles_seconds(2e9) == 2.0
    assert dict(machine.sources) == {
        "tiers.ssd.capacity_bytes": "measured",
        "links.hbm->ssd.nominal_bytes_per_s": "the vendor",
        "links.ssd->hbm.nominal_bytes_per_s": "the vendor",
    }


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda m: m.tier("cxl"), "machine tpu-v5e: no tier 'cxl'. It has hbm, vmem, host."),
        (
            lambda m: m.link("host", "vmem"),
            "machine tpu-v5e: no link 'host->vmem'. "
            "It has host->hbm, hbm->host, hbm->vmem, vmem->hbm.",
        ),
        (
            lambda m: m.flops("c64"),
            "machine tpu-v5e: no peak FLOP/s for element type 'c64'. It has bf16, f32, s8, s4.",
        ),
    ],
)
def test_what_a_machine_lacks_is_named(ask, sentence):
    with pytest.raises(NotOnMachineError) as error:
        ask(load_machine("tpu-v5e"))
    assert str(error.value) == sentence


def test_a_transfer_takes_the_latency_and_then_the_bandwidth_reached():
    v5e = load_machine("tpu-v5e")
    assert v5e.transfer_seconds(0, "host", "hbm") == v5e.link("host", "hbm").latency_s
    # 14.9625 GB/s: 32 MiB in 2.24 ms.
    seconds = v5e.transfer_seconds(32 * 2**20, "host", "hbm")
    assert math.isclose(seconds, 6e-6 + 32 * 2**20 / (15.75e9 * 0.95))
    with pytest.raises(ValueError, match="a transfer of -1 bytes"):
        v5e.transfer_seconds(-1, "host", "hbm")


@given(st.sampled_from(LIBRARY), st.data(), st.integers(0, 2**40), st.integers(0, 2**40))
def test_one_transfer_of_two_parts_saves_one_latency(machine: Machine, data, first, second):
    link = data.draw(st.sampled_from(machine.links))
    ends = (link.source, link.destination)
    together = machine.transfer_seconds(first + second, *ends)
    apart = machine.transfer_seconds(first, *ends) + machine.transfer_seconds(second, *ends)
    assert math.isclose(together, apart - link.latency_s, rel_tol=1e-9)
    assert together >= machine.transfer_seconds(first, *ends)


# --- files


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('name = "small"\n', "", "name: expected a string, found nothing"),
        ('"gpu"', '"npu"', "platform: expected one of tpu, gpu, cpu, found 'npu'"),
        ("[]", "[3]", "aliases: expected a list of strings, found [3]"),
        ("= 1e12", '= "fast"', "peak_flops.bf16: expected a positive number, found 'fast'"),
        ("= 1e12", "= nan", "peak_flops.bf16: expected a positive number, found nan"),
        ("= 1000", "= 1e3", "tiers.hbm.capacity_bytes: expected a whole number, found 1000.0"),
        ("= 1000", "= 0", "tiers.hbm.capacity_bytes: expected a positive number, found 0"),
        ("= 1000", "= true", "tiers.hbm.capacity_bytes: expected a positive number, found True"),
        ("space = 0", "space = 1", "tiers: expected device memory (memory_space = 0) first"),
        ('"ssd"\ncap', '"hbm"\ncap', "tiers: expected each once, found hbm twice"),
        ('["hbm", "ssd"]', '["hbm"]', "links[0].between: expected a list of 2 strings"),
        ('["hbm", "ssd"]', '["hbm", "cxl"]', "links[0].destination: expected one of ssd, found"),
        ("= 0.5", "= 50", "links.hbm->ssd.efficiency: expected a fraction of at most 1, found 50"),
        ("latency_s = 0", "latency_s = -1", "latency_s: expected a number that is not negative"),
        ("duplex = false", "duplex = 0", "full_duplex: expected true or false, found 0"),
        ("engines = 1", "engine = 1", "engines: expected a positive number, found nothing"),
        ("efficiency", "speed = 1\nefficiency", "ssd.speed: expected no such key, found 1"),
        ('value = 5000, source = "measured"', "value = 5000", "capacity_bytes.source: expected"),
        ("clock_hz = 1e9", "clock_hz 1e9", "my.toml: expected TOML, found Expected '='"),
        ("[peak_flops]\nbf16", "peak_flops", "peak_flops: expected a table, found 1000000000000"),
    ],
)
def test_a_malformed_file_is_one_clear_error(write, old, new, sentence):
    assert old in SMALL
    with pytest.raises(MachineFileError) as error:
        load_machine(write(SMALL.replace(old, new, 1)))
    assert "my.toml" in str(error.value)
    assert sentence in str(error.value)


def test_a_link_is_given_once(write):
    reverse = SMALL[SMALL.index("[[links]]") :].replace(
        'between = ["hbm", "ssd"]', 'source = "ssd"\ndestination = "hbm"'
    )
    with pytest.raises(MachineFileError, match="links: expected each once, found ssd->hbm twice"):
        load_machine(write(SMALL + reverse))


def test_a_file_is_read_by_path_and_by_its_name(write):
    path = write(SMALL)
    assert load_machine(path) == load_machine(str(path))


WIRES = """
[interconnect]
name = "wires"
nominal_bytes_per_s = { value = 50, source = "the vendor" }
efficiency = 0.5
step_latency_s = 0
"""


def test_a_machine_may_have_an_interconnect(write):
    assert load_machine(write(SMALL)).interconnect is None
    machine = load_machine(write(SMALL + WIRES))
    wires = Interconnect("wires", 50, 0.5, 0)
    assert (machine.interconnect, wires.bytes_per_s) == (wires, 25)
    assert dict(machine.sources)["interconnect.nominal_bytes_per_s"] == "the vendor"
    assert machine_from_dict(machine.to_dict()) == machine
    with pytest.raises(MachineFileError, match=r"interconnect\.efficiency: expected a fraction"):
        load_machine(write(SMALL + WIRES.replace("0.5", "1.5")))


@library
def test_all_but_single_devices_of_the_library_have_one(machine: Machine):
    alone = machine.platform == "cpu" or machine.name in ("dgx-spark", "rtx-4090-nvme")
    assert (machine.interconnect is None) == alone


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(MachineFileError, match=r"none\.toml: expected a readable file"):
        load_machine(tmp_path / "none.toml")


def test_a_gpu_of_ones_own_may_describe_itself(write):
    library = load_machine("h200")
    text = (
        SMALL
        + "\n[gpu]\n"
        + "\n".join(f"{key} = {json.dumps(value)}" for key, value in vars(library.gpu).items())
    )
    assert load_machine(write(text)).gpu == library.gpu
    with pytest.raises(MachineFileError, match=r"gpu\.compute_capability: expected major\.minor"):
        load_machine(write(text.replace('"9.0"', '"sm_90"')))
