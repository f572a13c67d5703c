"""What is evicted, computed again and re-ordered gives the numbers of plain `jax.jit`."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, Literal

import jax
import numpy as np
import pytest

import memplan
from hlo_passes import verify
from hlo_passes.edits.choice import Work
from hlo_passes.edits.greedy import Terms, select
from hlo_passes.edits.state import catalog
from hlo_passes.hardware.machine import Machine
from hlo_passes.ir import Module
from hlo_passes.normalize import sink
from hlo_passes.orders import reorder
from hlo_passes.placing import problem
from hlo_passes.plan import Edits
from hlo_passes.rewrite import edits, inject
from memplan.replaying import max_difference, replay
from memplan.topologies import topology
from models.corpus import CORPUS
from tests.sweeps import slow_but

# A rounding to bf16, in units in the last place of f32: operands of matmuls are rounded.
_BF16_ULP = 2**16

Forced = Literal["evict", "recompute", "reorder"]


def values(args: Any) -> Any:
    """Numbers of a size that keeps a training step in range; second moments are not negative."""
    random = np.random.default_rng(0)

    def draw(leaf: Any) -> np.ndarray:
        if np.issubdtype(leaf.dtype, np.integer):
            return random.integers(0, 4, leaf.shape, leaf.dtype)
        return np.abs(random.normal(scale=0.05, size=leaf.shape)).astype(leaf.dtype)

    return jax.tree.map(draw, args)


def captured(name: str, target: str) -> tuple[Module, Machine, Any, Any]:
    fun, args = CORPUS[name].small()
    where = topology(target)
    lowered = memplan.jit(fun, hbm="1TiB", machine=where).lower(*args)
    program = lowered.placing.program
    platform = where.machine.platform
    module = inject.capture(platform, program.stablehlo, program.compiler(None))
    return sink.sink_weight_work(module), where.machine, fun, values(args)


def forced(module: Module, machine: Machine, what: Forced) -> Edits:
    """As much of one kind as there is."""
    if what == "reorder":
        return Edits(reorder.lower_peak(module, machine, 0))
    posed = problem.pose(module, machine, ())
    work = Work(posed)
    terms = Terms(1e-3, math.inf, 0) if what == "evict" else Terms(1e3, math.inf, 16)
    of = catalog(posed, work.temporaries)
    return work.edits(select(of, posed.load, posed.costs, 0, terms))


def check(name: str, target: str, what: Forced) -> None:
    module, machine, fun, args = captured(name, target)
    done = forced(module, machine, what)
    if what == "evict":
        assert done.evictions
        assert not done.recomputes or all("bitcast" in r.original for r in done.recomputes)
    elif what == "recompute":
        assert done.recomputes
    edited = edits.apply(module, done)
    verify.verify_equivalent(module, edited)
    kept = [p for p in module.entry.parameters]
    leaves = jax.tree.leaves(args)
    assert len(kept) == len(leaves)
    found = replay(edited, *leaves)
    before = replay(module, *leaves)
    # What runs again may be fused in another way, and then be rounded to bf16 once less often (in a
    # DiT; elsewhere it is 1 ulp or less). What moves or changes places may not differ.
    ulps = max_difference(found, before)
    assert ulps == 0 if what != "recompute" else ulps <= _BF16_ULP / 16
    assert max_difference(before, jax.jit(fun)(*args)) <= 2 * _BF16_ULP


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what"),
    slow_but(
        [("vit-train", "evict")],
        product(
            ["llama-train", "moe-train", "vit-train", "dit-train", "unet-train", "adam"],
            ["evict", "recompute", "reorder"],
        ),
    ),
)
def test_every_training_step_for_tpu(tpu_compiler: None, name: str, what: Forced) -> None:
    check(name, "v5e", what)
