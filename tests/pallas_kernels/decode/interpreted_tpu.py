"""Calls of the TPU kernel in the interpreter, to be run by `isolated`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.decode import kernel_tpu, reference
from pallas_kernels.targets import target_of
from tests.pallas_kernels.decode import cases

TARGET = target_of("tpu", "TPU v6 lite")

type Mode = Literal["eager", "on_wait"]


@contextlib.contextmanager
def interpreter(mode: Mode) -> Iterator[None]:
    device = AbstractDevice(TARGET.kind, 1, "tpu")
    params = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True)
    with (
        jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)),
        pltpu.force_tpu_interpret_mode(params),
    ):
        yield


def check(mode: Mode, config: kernel_tpu.Config, **case: Any) -> None:
    """Compares the kernel with the oracle."""
    made = cases.make(**case)
    with interpreter(mode):
        got = jax.jit(
            lambda q, cache: kernel_tpu.forward(made.problem, TARGET, q, cache, config)
        )(made.q, made.cache)
        jax.block_until_ready(got)
    cases.check(made, got, reference.attend(made.problem, made.q, made.cache))
