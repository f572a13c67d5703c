"""Scanned layers through rings of slots, by the compilers of hardware that is not here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from hlo_passes import xla
from hlo_passes.ir import Module
from hlo_passes.memory.usage import memory_usage
from hlo_passes.pipeline import plan_module, rewrite_module
from hlo_passes.plan import Plan
from hlo_passes.reading.reader import read_module
from hlo_passes.rewrite import inject
from hlo_passes.verify import verify_executable
from memplan import topologies

LAYERS, WIDTH, ROWS = 8, 2048, 2048
SLOT_BYTES, ROW_BYTES = 2 * WIDTH * WIDTH, 2 * ROWS * WIDTH
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device

TARGETS = [
    pytest.param("v5e", marks=pytest.mark.tpu),
    pytest.param("h200", marks=pytest.mark.gpu),
]
# Where the bytes that are counted are held against those that XLA reports.
LIBTPU = pytest.mark.since("0.12.0.1", "its libtpu reserves more than what is counted")
COUNTED = [pytest.param("v5e", marks=[pytest.mark.tpu, LIBTPU]), TARGETS[1]]

# XLA's own pipelining of host transfers would undo the ring.
TPU_OPTIONS = {"xla_tpu_pipeline_memory_host_transfers": "false"}


def fetch(stack: jax.Array, index: Any, after: jax.Array) -> jax.Array:
    index, _ = lax.optimization_barrier((jnp.asarray(index, jnp.int32), after))
    return jax.device_put(lax.dynamic_index_in_dim(stack, index, keepdims=False), DEVICE)


def store(stack: jax.Array, value: jax.Array, index: Any) -> jax.Array:
    return lax.dynamic_update_index_in_dim(stack, jax.device_put(value, HOST), index, 0)


def forward(stack: jax.Array, x: jax.Array, slots: int, saved: jax.Array | None = None) -> Any:
    """Layers of a ring; with `saved` the input of each goes to the host."""
    carried = slots - 1
    trips = (LAYERS - carried) // slots

    def layer(x: jax.Array, held: list[jax.Array], saved: Any, k: Any, ahead: Any) -> Any:
        if ahead is not None:
            held = [*held, fetch(stack, ahead, x)]
        if saved is not None:
            saved = store(saved, x, k)
        return jnp.tanh(x @ held[0]), held[1:], saved

    def body(state: Any, j: jax.Array) -> Any:
        x, held, saved = state
        for u in range(slots):
            k = j * slots + u
            x, held, saved = layer(x, held, saved, k, k + carried)
        return (x, held, saved), None

    state = x, [fetch(stack, k, x) for k in range(carried)], saved
    (x, held, saved), _ = lax.scan(body, state, jnp.arange(trips))
    for k in range(trips * slots, LAYERS):
        x, held, saved = layer(x, held, saved, k, k + carried if k + carried < LAYERS else None)
    return x if saved is None else (x, saved)


def compiled(name: str, step: Callable[..., Any]) -> tuple[Plan, Module, Any]:
    """The plan, the executable's module and what the compiler says of its memory."""
    topology = topologies.topology(name)
    device = topology.sharding()
    stack = jax.ShapeDtypeStruct(
        (LAYERS, WIDTH, WIDTH), jnp.bfloat16, sharding=device.with_memory_kind("pinned_host")
    )
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16, sharding=device)
    on_tpu = topology.platform == "tpu"

    def lowered() -> tuple[Any, Callable[[], Any]]:
        jitted = jax.jit(lambda *args: step(*args), compiler_options=TPU_OPTIONS if on_tpu else {})
        traced = jitted.trace(stack, x)
        if on_tpu:
            program = traced.lower()
            return program.compiler_ir("stablehlo"), program.compile
        stablehlo = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
        devices = topology.devices[:1]
        return stablehlo, lambda: xla.compile_for_topology(stablehlo, devices, {})

    machine = topology.machine
    scheduled = inject.capture(topology.platform, *lowered())
    plan = plan_module(scheduled, machine, machine.device_memory.capacity_bytes)
    stablehlo, compile_module = lowered()
    executable = inject.compile_with(
        topology.platform,
        stablehlo,
        plan.fingerprint,
        lambda module: rewrite_module(module, plan, machine),
        compile_module,
    )
    if on_tpu:
        return plan, read_module(executable), executable.memory_analysis()
    (module,) = executable.hlo_modules()
    final = read_module(module.as_serialized_hlo_module_proto())
    return plan, final, executable.get_compiled_memory_stats()


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("slots", [2, 3])
def test_layers_take_the_memory_of_their_slots(name: str, slots: int):
    plan, final, reported = compiled(name, lambda stack, x: forward(stack, x, slots))
    assert verify_executable(plan, final).exactly
    assert plan.moved_bytes == LAYERS * SLOT_BYTES
    assert plan.prediction.lower_bound_s <= plan.prediction.step_time_s
    # The state's row, the next one, and a third where an iteration is an odd number of layers.
    rows = 2 + slots % 2
    assert reported.temp_size_in_bytes <= 1.02 * (slots * SLOT_BYTES + rows * ROW_BYTES)
    predicted = memory_usage(final, "tpu" if name == "v5e" else "gpu").temp_bytes
    assert predicted == pytest.approx(reported.temp_size_in_bytes, rel=0.01)


@pytest.mark.parametrize("name", COUNTED)
def test_residuals_go_to_the_host_layer_by_layer(name: str):
    def step(stack: jax.Array, x: jax.Array) -> Any:
        saved = jax.device_put(lax.empty((LAYERS, ROWS, WIDTH), jnp.bfloat16), HOST)
        y, saved = forward(stack, x, 2, saved)
        return y, fetch(saved, LAYERS - 1, y)

    plan, final, reported = compiled(name, step)
    assert verify_executable(plan, final).exactly
    assert plan.moved_bytes == LAYERS * (SLOT_BYTES + ROW_BYTES) + ROW_BYTES
    assert {t.kind for loop in plan.loops for t in loop.transfers} == {"prefetch", "evict"}
    predicted = memory_usage(final, "tpu" if name == "v5e" else "gpu").temp_bytes
    assert predicted == pytest.approx(reported.temp_size_in_bytes, rel=0.01)
