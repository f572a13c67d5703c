"""Kernel runs in the interpreter, to be called by `isolated.run`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.streamed_matmul import kernel_tpu, reference
from pallas_kernels.streamed_matmul.kernel_tpu import Config
from pallas_kernels.streamed_matmul.problem import Problem
from pallas_kernels.targets import target_of

V6E = AbstractMesh((), (), abstract_device=AbstractDevice("TPU v6e", 1, "tpu"))
CPU = target_of("cpu", "cpu")
BF16 = ("bfloat16", "bfloat16", "bfloat16")

# By what is peculiar about it.
CONFIGS = {
    "two of each": Config(256, 128, 128, 2, 2, 1, 2),
    "x stays": Config(256, 128, 128, 8, 3, 2, 2),
    "x comes again for each column": Config(256, 128, 128, 3, 3, 2, 2),
    "tiles fetched from three chunks at once": Config(256, 128, 128, 2, 5, 2, 3),
    "a column is one chunk": Config(256, 128, 256, 2, 4, 8, 2),
    "more slots than tiles": Config(256, 512, 512, 2, 9, 2, 9),
    "rows in blocks and a rest": Config(16, 256, 256, 4, 3, 2, 2),
}


def arrays(problem: Problem, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(problem.m, problem.k)), problem.dtype)
    shape = (problem.n, problem.k) if problem.transposed else (problem.k, problem.n)
    if problem.w_dtype == "int8":
        w = jnp.asarray(rng.integers(-127, 128, size=shape), jnp.int8)
    else:
        w = jnp.asarray(rng.normal(size=shape), problem.w_dtype)
    scales = jnp.asarray(rng.random(problem.n), jnp.float32) if problem.scaled else None
    return x, w, scales


def interpreted(problem: Problem, config: Config, dma_execution_mode: Any, *given: Any) -> Any:
    """The kernel's result; raises over a race.

    The weights' type does not say that they are on the host: jax 0.12 does not lower a program
    with such a type and the interpreter's ordered callbacks. The kernel goes by the problem.
    """
    params = pltpu.InterpretParams(dma_execution_mode=dma_execution_mode, detect_races=True)
    with use_abstract_mesh(V6E), pltpu.force_tpu_interpret_mode(params):
        return jax.jit(lambda *a: kernel_tpu.stream(problem, config, *a))(*given)


_forward = jax.jit(reference.forward, static_argnums=(0, 1, 5))


def check(problem: Problem, config: Config, mode: str) -> None:
    x, w, scales = arrays(problem)
    here = replace(problem, on_host=False)
    with jax.enable_x64(True):
        wide_x, wide_w = jnp.asarray(x, jnp.float64), jnp.asarray(w, jnp.float64)
        factors = None if scales is None else jnp.asarray(scales, jnp.float64)
        out64 = replace(here, out_dtype="float64")
        exact = np.asarray(_forward(out64, CPU, wide_x, wide_w, factors, jnp.float64))
    same_type = np.asarray(_forward(here, CPU, x, w, scales), np.float64)
    found = np.asarray(interpreted(problem, config, mode, x, w, scales), np.float64)
    error, allowed = abs(found - exact).max(), 2 * abs(same_type - exact).max() + 1e-4
    assert error <= allowed, f"{problem}, {config}, {mode}: {error} > {allowed}"


def schedules(mode: str) -> None:
    for name, config in CONFIGS.items():
        for on_host in (True, False) if name.startswith("x ") else (True,):
            check(Problem(37, 1024, 512, *BF16, on_host=on_host), config, mode)


def types_and_shapes() -> None:
    bf16, f32 = "bfloat16", "float32"
    for problem in (
        Problem(1, 256, 512, bf16, bf16, f32, on_host=True),
        Problem(5, 384, 768, f32, f32, f32, on_host=True, scaled=True),
        Problem(8, 256, 384, bf16, "int8", bf16, scaled=True),
        Problem(8, 256, 384, f32, "int8", f32),
        Problem(13, 512, 384, bf16, bf16, bf16, on_host=True, transposed=True),
        Problem(13, 128, 128, f32, f32, f32, transposed=True),
        Problem(300, 256, 256, bf16, bf16, bf16, scaled=True),
    ):
        check(problem, next(kernel_tpu.candidates(problem)), "eager")


def planted(fault: str, ring: str, mode: str) -> None:
    """A run with a fault in one ring, which has to fail."""
    config = CONFIGS["x comes again for each column"]
    problem = Problem(5, 1024, 512, "bfloat16", "bfloat16", "float32", on_host=True)
    dimensions = {
        "chunks": (2, 256, 128),
        "tiles": (3, 128, 128),
        "x": (3, 5, 128),
    }[ring]
    whole = kernel_tpu._Ring

    def unless_planted(method: Callable[..., Any], faulty: Callable[..., Any]) -> Any:
        return lambda self, item: (faulty if self.buffers.shape == dimensions else method)(
            self, item
        )

    class Faulty(whole):
        pass

    if fault == "slots share a buffer":
        Faulty.buffer = unless_planted(whole.buffer, lambda self, item: self.buffers.at[0])
    else:
        Faulty.wait = unless_planted(whole.wait, lambda self, item: None)
    kernel_tpu._Ring = Faulty
    check(problem, config, mode)
