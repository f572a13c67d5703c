"""`hlo_passes.pipeline.PASSES` is what runs: each of them does, for one of a few programs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from hlo_passes.hardware.machine import Machine, load_machine
from hlo_passes.memory.usage import memory_usage
from hlo_passes.pipeline import PASSES, plan_module
from memplan import api as memplan
from memplan.topologies import topology
from tests import corpus


@contextmanager
def recorded() -> Iterator[set[str]]:
    """Yields the names of the passes that run meanwhile."""
    names = {_code(p.run): p.name for p in PASSES}
    found: set[str] = set()

    def started(code: CodeType, _: int) -> Any:
        found.add(names[code])
        return sys.monitoring.DISABLE

    tool, event = sys.monitoring.PROFILER_ID, sys.monitoring.events.PY_START
    sys.monitoring.use_tool_id(tool, "passes")
    try:
        sys.monitoring.register_callback(tool, event, started)
        for code in names:
            sys.monitoring.set_local_events(tool, code, event)
        yield found
    finally:
        for code in names:
            sys.monitoring.set_local_events(tool, code, 0)
        sys.monitoring.free_tool_id(tool)


def _code(run: Callable[..., Any]) -> CodeType:
    function = inspect.unwrap(run)
    return (function.__init__ if inspect.isclass(function) else function).__code__


def scan(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, weights)[0]


def with_full_host(machine: Machine) -> Machine:
    """A machine whose host holds little of what leaves the device, and a second tier the rest."""

    def renamed(name: str) -> str:
        return "cxl" if name == "host" else name

    links = tuple(
        replace(link, source=renamed(link.source), destination=renamed(link.destination))
        for link in machine.links
        if "host" in (link.source, link.destination)
    )
    tiers = tuple(
        replace(tier, capacity_bytes=1 << 20) if tier.name == "host" else tier
        for tier in machine.tiers
    )
    second = replace(machine.tier("host"), name="cxl")
    return replace(machine, tiers=(*tiers, second), links=machine.links + links)


def test_every_pass_runs():
    on = SingleDeviceSharding(topology("v5e").devices[0])
    weights, x = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=on)
        for shape in ((8, 512, 512), (512, 512))
    )
    evicting, machine = corpus.read("mlp_grad.h200"), with_full_host(load_machine("h200"))
    with recorded() as found:
        memplan.jit(scan, hbm="6MiB").lower(weights, x).compile()
        plan = plan_module(evicting, machine, memory_usage(evicting, "gpu").total_bytes * 2 // 5)
    assert plan.edits.evictions
    assert found == {p.name for p in PASSES}
