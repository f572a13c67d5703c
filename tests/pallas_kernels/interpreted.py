"""Mosaic GPU kernels for Hopper on the CPU, by jax's GPU interpreter.

The interpreter (jax 0.12) has no wgmma with an operand in registers and no accumulator that
starts from a value, so while `interpreting` these names of Pallas are stood in for:

    pl.run_state, plgpu.WGMMAAccumulatorRef.init
    plgpu.wgmma, plgpu.wgmma_wait, plgpu.wgmma_accumulator_load

Everything else of a kernel, each copy and each barrier, is the interpreter's. A wgmma is carried
out as late as it may be: when its accumulator is read or its scope ends. Then it reads its
operands from SMEM, so that a slot that was given back before the wgmma was waited for is a race.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Accumulator:
    """An f32 accumulator, and the wgmmas that were issued into it and not carried out yet."""

    def __init__(self, value: jax.Array) -> None:
        self.value = value
        self.issued: list[tuple[Any, Any]] = []

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def __getitem__(self, index: Any) -> jax.Array:
        assert index is ...
        _wgmma_wait(0)
        return self.value

    def carry_out(self) -> None:
        """The first that was issued."""
        a, b = (x if isinstance(x, jax.Array) else plgpu.load(x) for x in self.issued.pop(0))
        # As wgmma reads: in the order of TMA and not of the threads.
        plgpu.commit_smem()
        self.value += jnp.dot(a, b, preferred_element_type=jnp.float32)


# What the warpgroup that is being traced has in flight, in the order of issue.
_in_flight: list[Accumulator] = []


def _wgmma(accumulator: Accumulator, a: Any, b: Any) -> None:
    accumulator.issued.append((a, b))
    _in_flight.append(accumulator)


def _wgmma_wait(n: int) -> None:
    while len(_in_flight) > n:
        _in_flight.pop(0).carry_out()


def _wgmma_accumulator_load(accumulator: Accumulator, *, wait_n: int) -> jax.Array:
    _wgmma_wait(wait_n)
    assert not accumulator.issued, "read before its wgmma is done"
    return accumulator.value


def _run_state(body: Callable[[Any], None]) -> Callable[[Any], Any]:
    def run(initial: Any) -> Any:
        body(initial)
        return jax.tree.map(lambda x: x[...], initial, is_leaf=lambda x: isinstance(x, Accumulator))

    return run


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Kernels that are traced meanwhile run on the CPU; races raise, from jax 0.12 on."""
    options: dict[str, Any] = {"detect_races": True}
    if "on_race" in {field.name for field in dataclasses.fields(plgpu.InterpretGPUParams)}:
        options["on_race"] = "raise"
    with (
        mock.patch.object(plgpu.WGMMAAccumulatorRef, "init", Accumulator),
        mock.patch.object(plgpu, "wgmma", _wgmma),
        mock.patch.object(plgpu, "wgmma_wait", _wgmma_wait),
        mock.patch.object(plgpu, "wgmma_accumulator_load", _wgmma_accumulator_load),
        mock.patch.object(pl, "run_state", _run_state),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(**options)),
    ):
        yield
