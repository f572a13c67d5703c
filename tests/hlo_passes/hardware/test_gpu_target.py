import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from hlo_passes.errors import NotOnMachineError
from hlo_passes.hardware.gpu_target import gpu_target_config
from hlo_passes.hardware.machine import load_machine, machine_names

ALL = [load_machine(name) for name in machine_names()]
GPUS = [machine.name for machine in ALL if machine.gpu is not None]


def field(text: str, name: str) -> str:
    (value,) = re.findall(rf"^ *{name}: (.+)$", text, re.MULTILINE)
    return value


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (
            "h200",
            {
                "core_count": "132",
                "memory_bandwidth": "4800000000000",
                "device_memory_size": "151397597184",
                "clock_rate_ghz": "1.98",
                "l2_cache_size": "52428800",
                "shared_memory_per_core": "233472",
                "shared_memory_per_block_optin": "232448",
                "pcie_bandwidth": "34359738368",
                "feature_extension": "ACCELERATED_FEATURES",
                "platform_version": '"Compute Capability 9.0a"',
                "device_description_str": '"NVIDIA H200 141GB HBM3e"',
            },
        ),
        (
            "a100",
            {
                "memory_bandwidth": "2039040000000",
                "feature_extension": "NONE",
                "platform_version": '"Compute Capability 8.0"',
                "threads_per_core_limit": "2048",
            },
        ),
        (
            "rtx-5090",
            {
                "core_count": "170",
                "threads_per_core_limit": "1536",
                "platform_version": '"Compute Capability 12.0"',
            },
        ),
    ],
)
def test_the_config_says_what_the_machine_says(name, fields):
    text = gpu_target_config(load_machine(name))
    assert {key: field(text, key) for key in fields} == fields


@pytest.mark.parametrize("name", ["tpu-v5e", "mi300x"])
def test_what_xla_compiles_for_with_no_config_has_none(name):
    with pytest.raises(NotOnMachineError, match=f"machine {name}: no GPU description"):
        gpu_target_config(load_machine(name))


def test_only_amds_gpus_have_no_config():
    without = [m.name for m in ALL if m.platform == "gpu" and m.gpu is None]
    assert without == ["mi300x", "mi325x"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", GPUS)
def test_xla_compiles_for_it_without_a_gpu(gpu_compiler, name):
    machine = load_machine(name)
    described = gpu_compiler(target_config=gpu_target_config(machine), topology="1x1x1")
    (device,) = described.devices
    # Where two machines have the same GPU, its name is the plain one's.
    assert load_machine(device.device_kind).gpu == machine.gpu
    matrix = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=SingleDeviceSharding(device))
    compiled = jax.jit(lambda a, b: a @ b).lower(matrix, matrix).compile()
    assert "is_scheduled=true" in str(compiled.as_text())
