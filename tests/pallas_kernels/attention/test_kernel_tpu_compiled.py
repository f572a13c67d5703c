"""The TPU compiler takes the kernels, for every shape and chip, within the bundles and bytes that
they are chosen for."""

import pytest

from experiments.kernels import full_head_bundles
from memplan.kernels.evidence_tpu import Evidence, Job, collect
from pallas_kernels.attention.shapes import SHAPES
from pallas_kernels.targets import TPUS

pytestmark = pytest.mark.tpu

# Of a head of 2048 x 2048 x 128 on a v6e, all of it seen. jax's splash attention takes 11,802 with
# the best of its blocks, and what is known to have been measured on hardware 11.7 thousand.
_BUNDLES_V6E = 11_400


def compiled(chip: str, names: list[str]) -> list[Evidence]:
    """Both kernels of each shape, through `attention`."""
    jobs = [
        Job("experiments.kernels:attention_shape", {"name": name, "kernel": kernel})
        for name in names
        for kernel in ("forward", "backward")
    ]
    return collect(chip, jobs)


@pytest.mark.parametrize("chip", TPUS)
def test_small_shapes(chip: str) -> None:
    for evidence in compiled(chip, ["whisper-large-cross"]):
        assert evidence.vmem_bytes is None, f"takes {evidence.vmem_bytes} bytes of VMEM"


@pytest.mark.slow
@pytest.mark.parametrize("chip", TPUS)
def test_every_shape(chip: str) -> None:
    for evidence in compiled(chip, [shape.name for shape in SHAPES]):
        assert evidence.vmem_bytes is None, f"takes {evidence.vmem_bytes} bytes of VMEM"


def test_a_head_takes_fewer_bundles_than_splash_attention() -> None:
    bundles, spills = full_head_bundles("v6e", 1024, 2048)
    assert bundles <= _BUNDLES_V6E
    assert spills <= 2000
