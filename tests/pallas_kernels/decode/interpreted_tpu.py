"""Calls of the TPU kernel in the interpreter, to be run by `isolated`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import jax
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.decode import kernel_tpu
from pallas_kernels.decode.kernel_tpu import Config
from pallas_kernels.targets import target_of
from tests.pallas_kernels.decode import cases, strategies

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


def check(mode: Mode, config: Config, **case: Any) -> None:
    """Compares the kernel with the oracle."""
    made = cases.make(**case)
    with interpreter(mode):
        forward = partial(kernel_tpu.forward, made.problem, TARGET, config=config)
        got = jax.block_until_ready(jax.jit(forward)(made.q, made.cache))
    cases.check(made, got, cases.same_dtype(made))


def check_masks(mode: Mode) -> None:
    """Ends of sequences, windows and queries; empty sequences; heads packed or not."""
    check(mode, Config(32, 3, 1, 2), lengths=[50, 0, 17, 64])
    check(mode, Config(32, 3, 2), lengths=[50, 0, 17, 64], window=20, q_len=3)
    check(mode, Config(16, 2, 2), lengths=[2, 0, 17, 64], window=20, q_len=3, soft_cap=5.0)
    check(mode, Config(64, 2, 1), lengths=[0, 0], page_size=128, paged=False)


def check_types(mode: Mode) -> None:
    """Each type of cache, blocks larger and smaller than a page."""
    check(mode, Config(128, 4, 1, 2), lengths=[1000, 0, 256], page_size=128, max_pages=8)
    check(mode, Config(128, 4, 2), lengths=[500, 9], page_size=32, max_pages=16, kv_dtype="int8")
    check(mode, Config(64, 3, 1), lengths=[100, 7], page_size=32, kv_dtype="float8_e4m3fn")
    check(mode, Config(64, 4, 2), lengths=[100, 128], page_size=128, paged=False, dtype="float32")


def check_parts(mode: Mode) -> None:
    """Heads, and sequences, in two parts."""
    lengths = [100, 0, 17, 128]
    check(mode, Config(64, 4, 1, 1, 2, 1), lengths=lengths, page_size=128, paged=False)
    check(mode, Config(32, 4, 2, 1, 1, 2), lengths=lengths, page_size=32)


def check_random(mode: Mode, examples: int) -> None:
    """Any of the configurations that there are for any problem."""

    @settings(max_examples=examples, database=None, deadline=None)
    @given(strategies.cases(head_dims=(64, 128)), st.data())
    def compare(case: dict[str, Any], data: st.DataObject) -> None:
        problem = cases.make(**case).problem
        choices = list(kernel_tpu.candidates(problem, TARGET))
        check(mode, data.draw(st.sampled_from(choices)), **case)

    compare()


def check_plant(mode: Mode, plant: str) -> None:
    """Breaks the ring on purpose, and sees that the interpreter or the numbers tell."""
    config, case = Config(32, 3, 1), {"lengths": [100, 64], "max_pages": 8}
    check(mode, config, **case)
    if plant == "one slot too few":
        # The next block lands in the slot that is being read.
        kernel_tpu.slot_of = lambda step, slots: lax.rem(step, slots - 1)
    else:
        setattr(kernel_tpu._Ring, "wait", lambda *_: None)  # noqa: B010
    try:
        check(mode, config, **case)
    except (AssertionError, jax.errors.JaxRuntimeError) as error:
        found = str(error)
    else:
        raise AssertionError(f"{plant}: not found")
    wanted = "RACE DETECTED" if (mode, plant) == ("eager", "no wait") else "out has|out: off"
    assert re.search(wanted, found), found
