"""Compiled modules as programs: segments, transfers with their slots, collectives."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from hlo_passes import pipeline
from hlo_passes.cluster.compiled import program_of
from hlo_passes.cluster.presets import tpu_slice
from hlo_passes.cluster.search import plan_cluster
from hlo_passes.cluster.work import Work
from hlo_passes.hardware.machine import Interconnect, load_machine
from hlo_passes.memory.usage import memory_usage
from hlo_passes.reading.reader import read_module
from hlo_passes.simulator.timeline import scheduled_step
from tests.hlo_passes.toys import module_of, toy_machine, two_fused_gathers

# w is fetched while x is negated, used twice; y is evicted and fetched again.
TRANSFERS = """HloModule m, is_scheduled=true
ENTRY e {
  x = f32[100]{0} parameter(0)
  w = f32[100]{0:S(5)} parameter(1)
  ws = (f32[100]{0}, f32[100]{0:S(5)}, u32[]) copy-start(w)
  y = f32[100]{0} negate(x)
  wd = f32[100]{0} copy-done(ws)
  a = f32[100]{0} add(y, wd)
  ys = (f32[100]{0:S(5)}, f32[100]{0}, u32[]) copy-start(y)
  b = f32[100]{0} multiply(a, wd)
  yd = f32[100]{0:S(5)} copy-done(ys)
  zs = (f32[100]{0}, f32[100]{0:S(5)}, u32[]) copy-start(yd)
  c = f32[100]{0} negate(b)
  zd = f32[100]{0} copy-done(zs)
  ROOT d = f32[100]{0} add(c, zd)
}
"""


def test_segments_and_transfers_of_a_module():
    module, machine = module_of(TRANSFERS), toy_machine()
    program = program_of(module, machine, name="p", node="n")
    # A segment between each start and done; none has run before the first, nor before the last
    # start, which comes behind a done.
    assert program.segments == pytest.approx((0.0, 8.0, 12.0, 12.0, 0.0, 8.0, 12.0))
    rows = [(t.name, t.source, t.of, t.bytes, t.start, t.done, t.end) for t in program.traffic]
    assert rows == [
        ("ws", "host", "w", 400, 1, 2, 5),
        ("ys", "hbm", "ys", 400, 3, 4, 5),
        ("zs", "host", "ys", 400, 5, 6, 7),
    ]
    assert [t.held for t in program.traffic] == [(1, 5), (2, 5), (5, 7)]
    usage = memory_usage(module, "tpu", machine=machine)
    assert 0 < program.memory_bytes < usage.total_bytes


def test_collectives_of_a_module():
    machine = toy_machine(interconnect=Interconnect("ici", 1000.0, 1.0, 0.5))
    program = program_of(module_of(two_fused_gathers()), machine, name="p", node="n")
    assert [(t.is_collective, t.bytes, t.seconds) for t in program.traffic] == [
        (True, 1200, pytest.approx(1.5 + 1.2))
    ] * 2


def test_the_step_is_that_of_the_timeline():
    module = module_of(TRANSFERS)
    host = replace(load_machine("v5e"), links=toy_machine().links)
    cluster = tpu_slice("v5e:1x1")
    node = replace(cluster.chips[0], machine=host)
    cluster = replace(cluster, nodes=(node, *cluster.nodes[1:]))
    plan = plan_cluster(cluster, Work((program_of(module, host, name="p", node="tpu"),)))
    assert plan.step_time_s == pytest.approx(scheduled_step(module, host).step_time_s, rel=1e-6)


def test_a_sharded_program_of_a_tpu(tpu_compiler):
    """Weights in shards over four chips, gathered layer by layer."""
    devices = tpu_compiler("v5e:2x2").devices
    mesh = Mesh(np.array(devices), ("x",))

    def step(ws, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    ws = jax.ShapeDtypeStruct(
        (4, 2048, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "x"))
    )
    x = jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, P("x")))
    module = read_module(jax.jit(step).lower(ws, x).compile())
    machine = load_machine("v5e")
    program = program_of(module, machine, name="step", node="tpu", runs=2)
    plan = plan_cluster(tpu_slice("v5e:2x2"), Work((program,)))
    step_s = scheduled_step(module, machine).step_time_s
    assert plan.step_time_s == pytest.approx(2 * step_s, rel=1e-3)


def test_a_planned_program_of_a_tpu(tpu_compiler):
    """What a plan streams from the host is on the cluster's wires."""
    device = tpu_compiler("v5e:2x2").devices[0]
    host = SingleDeviceSharding(device, memory_kind="pinned_host")
    near = SingleDeviceSharding(device)
    ws = [jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16, sharding=host) for _ in range(6)]
    x = jax.ShapeDtypeStruct((4096, 2048), jnp.bfloat16, sharding=near)

    def step(ws, x):
        for w in ws:
            x = jnp.tanh(x @ jax.device_put(w, near))
        return x

    machine = load_machine("v5e")
    module = read_module(jax.jit(step).lower(ws, x).compile())
    found = memory_usage(module, "tpu", machine=machine)
    plan = pipeline.plan_module(module, machine, found.total_bytes - 3 * (2048 * 2048 * 2))
    rewritten = pipeline.rewrite_module(module, plan, machine)
    program = program_of(rewritten, machine, name="step", node="tpu")
    assert sorted(t.bytes for t in program.traffic) == sorted(t.size for t in plan.transfers)
    of_cluster = plan_cluster(tpu_slice("v5e:1x1"), Work((program,)))
    assert of_cluster.step_time_s == pytest.approx(plan.prediction.step_time_s, rel=0.02)
