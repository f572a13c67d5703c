"""The compilers of hardware that is not here, as the fixtures give them."""

import pytest


@pytest.mark.parametrize(("name", "devices"), [("v5e:2x2", 4), ("v6e:2x4", 8)])
def test_tpu_topologies(tpu_compiler, name: str, devices: int):
    assert len(tpu_compiler(name).devices) == devices
