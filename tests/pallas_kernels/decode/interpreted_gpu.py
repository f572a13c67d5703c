"""Calls of the Hopper kernel in the interpreter, to be run by `isolated`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode import kernel_gpu, reference
from pallas_kernels.decode.kernel_gpu import Config
from pallas_kernels.targets import target_of
from tests.pallas_kernels.decode import cases

TARGET = target_of("cuda", "NVIDIA H200")


def check(config: Config, **case: Any) -> None:
    """Compares the kernel with the oracle."""
    made = cases.make(**case)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        forward = partial(kernel_gpu.forward, made.problem, TARGET, config=config)
        got = jax.block_until_ready(jax.jit(forward)(made.q, made.cache))
    cases.check(made, got, reference.attend(made.problem, made.q, made.cache))
