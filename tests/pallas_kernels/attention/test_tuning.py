"""Blocks are chosen by numbers that hold: bundles as compiled, bytes as the compiler has them."""

import dataclasses
import json
from typing import Any

import pytest

from experiments.kernel_programs import attention_problem_of
from experiments.kernel_tuning import TUNED, Blocks
from memplan.kernels.evidence_tpu import tpu_evidence
from pallas_kernels.attention import kernel_tpu, tuning
from pallas_kernels.attention.problem import Band, Problem
from pallas_kernels.attention.shapes import SHAPES
from pallas_kernels.onchip import vmem_total
from pallas_kernels.targets import TPUS
from tests.sweeps import slow_but

ROWS = json.loads(TUNED.read_text(encoding="utf-8"))["rows"]
V6E = TPUS["v6e"]


@pytest.mark.parametrize("chip", sorted({row["chip"] for row in ROWS}))
def test_interpolated_bundles_are_near_the_compiled(chip: str) -> None:
    for row in ROWS:
        if row["chip"] == chip:
            predict = tuning.predictor(chip, row["kernel"], row["head_dim"], row["dtype"])
            found = predict(row["block_q"], row["block_kv"])
            assert found.full == pytest.approx(row["full"], rel=0.12)
            assert found.masked == pytest.approx(row["masked"], rel=0.12)


def test_each_chip_has_its_own() -> None:
    assert {row["chip"] for row in ROWS} == set(TPUS)


@pytest.mark.parametrize("generation", TPUS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_choices_fit(generation: str, shape: Any) -> None:
    problem, chip = attention_problem_of(shape), TPUS[generation]
    config, launch = tuning.forward_choice(problem, chip)
    size = vmem_total(kernel_tpu.scratch(problem, config))
    assert size < launch.vmem_limit <= chip.vmem_bytes
    assert launch.cycles > 0
    assert tuning.backward_parts(problem, chip) == 1
    _, launch = tuning.backward_choice(problem, chip)
    assert launch.vmem_limit <= chip.vmem_bytes


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("generation", sorted({row["chip"] for row in ROWS}))
def test_choices_of_float32(generation: str, head_dim: int) -> None:
    problem = Problem(1, 1500, 1500, 2, 1, head_dim, "float32", Band(), 0.1)
    for choose in (tuning.forward_choice, tuning.backward_choice):
        _, launch = choose(problem, TPUS[generation])
        assert launch.cycles > 0


def test_long_sequences_are_taken_in_parts() -> None:
    problem = Problem(1, 1 << 17, 1 << 17, 1, 1, 128, "bfloat16", Band(None, 0, 0), 0.1)
    parts = tuning.backward_parts(problem, V6E)
    assert parts > 1
    part = dataclasses.replace(problem, q_len=problem.q_len // parts, kv_len=problem.q_len // parts)
    assert tuning.backward_parts(part, V6E) == 1


def test_masked_blocks_make_smaller_blocks_worth_it() -> None:
    """A narrow window wastes most of a large block."""
    wide = Problem(1, 8192, 8192, 8, 8, 128, "bfloat16", Band(), 0.1)
    narrow = dataclasses.replace(wide, band=Band(127, 0))
    (large, _), (small, _) = (tuning.forward_choice(p, V6E) for p in (wide, narrow))
    assert small.block_kv < large.block_kv


@pytest.mark.slow
@pytest.mark.tpu
@pytest.mark.parametrize(
    ("kernel", "block_q", "block_kv", "head_dim", "dtype"),
    slow_but(
        [("forward", 512, 256, 128, "bfloat16"), ("backward", 128, 256, 64, "bfloat16")],
        [
            ("forward", 512, 256, 128, "bfloat16"),
            ("forward", 256, 512, 96, "float32"),
            ("backward", 128, 256, 64, "bfloat16"),
            ("backward", 256, 256, 256, "bfloat16"),
        ],
    ),
)
def test_the_compiler_counts_the_same_bytes(
    kernel: str, block_q: int, block_kv: int, head_dim: int, dtype: str
) -> None:
    """It lists them, and says them where the limit is exceeded, rounded to 10 KiB."""
    blocks = Blocks(kernel, block_q, block_kv, head_dim, dtype)
    programs = [blocks.program("v6e", limit) for limit in (1 << 19, 64 << 20)]
    (exceeded,), (listed,) = tpu_evidence(programs, "v6e")
    assert exceeded.exceeded == pytest.approx(blocks.own_bytes, abs=11 << 10)
    assert listed.vmem["scratch operand"] == blocks.own_bytes


def test_padding_to_registers_is_counted() -> None:
    problem = Problem(1, 256, 256, 1, 1, 96, "bfloat16", Band(), 0.1)
    same = dataclasses.replace(problem, head_dim=128)
    config = kernel_tpu.Config(256, 256)
    assert vmem_total(kernel_tpu.scratch(problem, config)) == vmem_total(
        kernel_tpu.scratch(same, config)
    )


def test_a_head_that_is_alone_leaves_a_core_idle() -> None:
    """Backward a core takes whole key/value heads."""
    one = Problem(1, 2048, 2048, 8, 1, 128, "bfloat16", Band(), 0.1)
    two = dataclasses.replace(one, batch=2)
    cycles = [tuning.backward_choice(p, TPUS["v5p"])[1].cycles for p in (one, two)]
    assert cycles[0] == pytest.approx(cycles[1], rel=1e-6)
