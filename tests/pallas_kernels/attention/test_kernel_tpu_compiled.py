"""The TPU compiler takes the kernels, for every shape and chip, with the bytes that are counted."""

import jax.numpy as jnp
import pytest

from experiments import kernel_programs as programs
from memplan.kernels.evidence_tpu import tpu_evidence
from pallas_kernels.attention import kernel_tpu, kernel_tpu_backward
from pallas_kernels.attention.shapes import SHAPES, Shape
from pallas_kernels.attention.tuning import backward_choice, forward_choice
from pallas_kernels.onchip import vmem_total
from pallas_kernels.targets import TPUS
from tests.sweeps import slow_but

pytestmark = pytest.mark.tpu

QUICK = "whisper-large-cross"


def check_compiles(chip: str, shapes: list[Shape]) -> None:
    """Both kernels of each shape, through `attention`."""
    found = tpu_evidence([programs.gradient(shape, "tpu") for shape in shapes], chip)
    for shape, kernels in zip(shapes, found, strict=True):
        names = [kernel.name for kernel in kernels]
        assert names == ["attention_backward", "attention_forward"], (shape.name, kernels)
        problem = programs.attention_problem_of(shape)
        config, _ = forward_choice(problem, TPUS[chip])
        assert kernels[1].own_bytes == vmem_total(kernel_tpu.scratch(problem, config)), shape.name
        config, _ = backward_choice(problem, TPUS[chip])
        scratch = kernel_tpu_backward.scratch(problem, config, jnp.bfloat16)
        assert kernels[0].own_bytes == vmem_total(scratch), shape.name


@pytest.mark.slow
@pytest.mark.parametrize("chip", slow_but(["v5e"], TPUS))
def test_small_shapes(chip: str) -> None:
    check_compiles(chip, [shape for shape in SHAPES if shape.name == QUICK])


@pytest.mark.slow
# All in one compiler process: minutes, on a machine that does other work besides many.
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chip", TPUS)
def test_every_shape(chip: str) -> None:
    check_compiles(chip, [shape for shape in SHAPES if shape.name != QUICK])
