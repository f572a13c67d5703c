"""Calls of the Hopper kernel in the interpreter, to be run by `isolated`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from pallas_kernels.decode import kernel_gpu
from pallas_kernels.decode.kernel_gpu import Config
from pallas_kernels.targets import target_of
from tests.pallas_kernels.decode import cases, strategies
from tests.pallas_kernels.interpreted import interpreting

TARGET = target_of("cuda", "NVIDIA H200")


def check(config: Config, **case: Any) -> None:
    """Compares the kernel with the oracle."""
    made = cases.make(**case)
    with interpreting():
        forward = partial(kernel_gpu.forward, made.problem, TARGET, config=config)
        got = jax.block_until_ready(jax.jit(forward)(made.q, made.cache))
    cases.check(made, got, cases.same_dtype(made))


def check_masks() -> None:
    """Splits, pages against blocks, windows, soft cap, empty sequences."""
    check(Config(64, 2, 2), lengths=[200, 0, 70], max_pages=16, head_dim=64)
    check(Config(64, 3, 1), lengths=[100, 1], page_size=128, paged=False, soft_cap=5.0)
    check(Config(64, 2, 1), lengths=[90], max_pages=8, head_dim=96)


def check_types() -> None:
    """8-bit types."""
    check(Config(64, 2, 3), lengths=[250], max_pages=16, kv_dtype="int8", q_len=3, window=90)
    check(Config(64, 2, 1), lengths=[70], max_pages=8, kv_dtype="float8_e4m3fn")


def check_rows() -> None:
    """More query rows than a tile has."""
    check(Config(128, 2, 1), lengths=[130], max_pages=16, group=24, kv_heads=1, q_len=3)


def check_random(examples: int) -> None:
    """Any of the problems that the kernel takes, split or not."""

    @settings(max_examples=examples, database=None, deadline=None)
    @given(strategies.cases(head_dims=(64, 96, 128)), st.sampled_from([64, 128]), st.integers(1, 3))
    def compare(case: dict[str, Any], block: int, splits: int) -> None:
        case["dtype"] = "bfloat16"
        if case["kv_dtype"] == "float32":
            case["kv_dtype"] = "bfloat16"
        problem = cases.make(**case).problem
        assert kernel_gpu.refusal(problem, TARGET) is None
        check(Config(block, 2, splits), **case)

    compare()


def check_plant() -> None:
    """A ring that reuses a slot too early, and sees that the interpreter or the numbers tell."""
    config, case = Config(64, 3, 1), {"lengths": [400], "max_pages": 32, "head_dim": 64}
    check(config, **case)
    kernel_gpu.slot_of = lambda step, slots: lax.rem(step, slots - 1)
    try:
        check(config, **case)
    except (AssertionError, jax.errors.JaxRuntimeError):
        return
    raise AssertionError("not found")
