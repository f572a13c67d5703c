"""What kernels are compiled for: the abstract device, then the default one, then the first."""

from typing import Any

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import targets
from pallas_kernels.targets import current_target, target_of


class Accelerator:
    """The first device of a machine that has one."""

    platform, device_kind = "tpu", "TPU v6 lite"


@pytest.fixture(autouse=True)
def _accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = jax.devices
    found = lambda platform=None: on_cpu(platform) if platform else [Accelerator()]  # noqa: E731
    monkeypatch.setattr(targets.jax, "devices", found)


def test_without_a_default_it_is_the_first_device() -> None:
    assert current_target() == target_of("tpu", "TPU v6 lite")


@pytest.mark.parametrize("default", ["cpu", jax.devices("cpu")[1]], ids=["platform", "device"])
def test_the_default_device_goes_before_the_first(default: Any) -> None:
    with jax.default_device(default):
        assert current_target().platform == "cpu"
        traced = []
        jax.jit(lambda x: traced.append(current_target()))(1.0)
        assert traced[0].platform == "cpu"
    assert current_target().platform == "tpu"


def test_an_abstract_device_goes_before_the_default() -> None:
    device = AbstractDevice("TPU v5p", 1, "tpu")
    mesh = AbstractMesh((), (), abstract_device=device)
    with jax.default_device("cpu"), jax.sharding.use_abstract_mesh(mesh):
        assert current_target().generation == "v5p"
