"""Planned programs on the accelerator that is here: the same results, within their budgets."""

from __future__ import annotations

import jax
import pytest

import memplan
from experiments import on_device
from hlo_passes.plan import Plan
from models.corpus import CORPUS

# What else may be in use beside what XLA reports: words of its runtime.
SPARE_BYTES = 1 << 20
# Largest difference from plain jax, as a share of the largest number: XLA picks the algorithm of
# a product for each program anew, and sums in its order.
TOLERANCE = 5e-3


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("percent", [75, 50])
@pytest.mark.parametrize("name", ["llama-prefill", "llama-train", "adam"])
def test_a_planned_program_is_plain_jax_in_less_memory(name: str, percent: int) -> None:
    plain = on_device._plain(name)
    budget = plain.total * percent // 100
    step = memplan.jit(plain.fun, hbm=budget, donate_argnames=CORPUS[name].donate)
    compiled = step.lower(*plain.shapes).compile()
    assert isinstance(compiled.plan, Plan)
    assert compiled.device_bytes <= budget

    args = on_device._placed(compiled, plain.args)
    assert compiled.plan.moved_bytes or compiled.plan.edits.recomputes
    assert on_device._difference(compiled(*args), plain.result) <= TOLERANCE

    _, peak = on_device._measured(compiled, on_device._placed(compiled, plain.args))
    assert peak <= compiled.device_bytes + SPARE_BYTES


@pytest.mark.usefixtures("accelerator")
def test_weights_wait_on_the_host_and_are_brought_in_time() -> None:
    plain = on_device._plain("llama-decode")
    step = memplan.jit(plain.fun, hbm=plain.total // 2, donate_argnames="cache")
    compiled = step.lower(*plain.shapes).compile()
    assert compiled.hosting.arguments
    placed = step.place(*on_device._copied(plain.args))
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(placed)}
    assert kinds == {"device", "pinned_host"}
    assert on_device._difference(step(*placed), plain.result) <= TOLERANCE
