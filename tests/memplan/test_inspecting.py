"""What is found in a program, and what is advised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from hlo_passes.analysis.sharing import Target
from hlo_passes.hardware.machine import Machine, load_machine
from hlo_passes.ir import Module
from hlo_passes.memory.usage import memory_usage
from hlo_passes.plan import LiveRange, Split
from hlo_passes.proto import hlo_pb2
from hlo_passes.reading.reader import read_module
from memplan.report.advising import advise
from memplan.report.build import view_run
from memplan.report.finding_tables import advice_table, finding_tables
from memplan.report.findings import Findings
from memplan.report.inspecting import Inspector
from memplan.report.tables import plain_text
from memplan.report.view import RunView
from pallas_kernels.decode import decode_attention
from tests import corpus
from tests.conftest import Golden
from tests.hlo_passes.streamed import entry
from tests.sweeps import slow_but

SIZE = 64 * 4
# %a is idle while %big is there, which a copy only moves; %q could be given away for %d.
MODULE = entry("""
  %p = f32[64]{0} parameter(0), metadata={op_name="state['w'][0]"}
  %q = f32[64]{0} parameter(1), metadata={op_name="state['w'][1]"}
  %a = f32[128]{0} concatenate(%p, %q), dimensions={0}, \
metadata={op_name="jit(f)/in/cat" source_file="m.py" source_line=3}
  %b = f32[64]{0} slice(%a), slice={[0:64]}
  %big = f32[8,64]{1,0} broadcast(%b), dimensions={1}, metadata={op_name="jit(f)/out/wide"}
  %moved = f32[8,64]{0,1} copy(%big)
  %e = f32[8,64]{0,1} sine(%moved)
  %f = f32[1,64]{0,1} slice(%e), slice={[0:1], [0:64]}
  %g = f32[64]{0} bitcast(%f)
  %h = f32[64]{0} slice(%a), slice={[64:128]}
  %d = f32[64]{0} multiply(%g, %h)
  ROOT %r = (f32[64]{0}) tuple(%d)
""")


def found(machine: Machine | None = None) -> Findings:
    return Inspector(MODULE, "cpu", machine).findings()


def test_what_is_live_at_the_peak_is_grouped_in_three_ways():
    held = found().held
    total = memory_usage(MODULE, "cpu").lower_bound_bytes + 3 * SIZE  # Arguments and a result.
    for groups in held.values():
        assert sum(g.size for g in groups) == total
        assert list(groups) == sorted(groups, key=lambda g: -g.size)
    assert {(g.name, g.size, g.count) for g in held["source"]} >= {
        ("arguments", 2 * SIZE, 2),
        ("m.py:3", 2 * SIZE, 1),
    }
    assert {(g.name, g.size) for g in held["scope"]} >= {
        ("state", 2 * SIZE),
        ("jit(f)/in", 2 * SIZE),
    }
    opcodes = {g.name: g.size for g in held["opcode"]}
    assert opcodes["parameter"] == 2 * SIZE
    assert opcodes["copy"] == opcodes["broadcast"] == 8 * SIZE


def test_the_heap_is_ours_where_xla_says_nothing():
    heap = found().heap
    usage = memory_usage(MODULE, "cpu")
    assert heap is not None
    assert heap.allocated is heap.assigned is None
    assert (heap.size, heap.live) == (usage.temp_bytes, usage.lower_bound_bytes)
    assert heap.fragmentation == usage.temp_bytes - usage.lower_bound_bytes


def test_the_heap_is_xlas_where_it_says_so():
    proto = hlo_pb2.BufferAssignmentProto()
    for i in MODULE.entry.instructions:
        buffer = proto.logical_buffers.add(id=i.id, size=1000)
        buffer.defined_at.instruction_id = i.id
    number = {i.name: i.id for i in MODULE.entry.instructions}
    heap = proto.buffer_allocations.add(index=3, size=5000)
    trace = proto.heap_simulator_traces.add(buffer_allocation_index=3)
    for name in ("a", "big", "e"):
        heap.assigned.add(logical_buffer_id=number[name])
        trace.events.add(buffer_id=number[name])
    proto.buffer_allocations.add(index=4, size=64)
    heap = Inspector(Module(MODULE.to_proto(), assigned=proto), "cpu").findings().heap
    assert heap is not None
    assert (heap.allocated, heap.size, heap.live, heap.assigned) == (5064, 5064, 3000, 3000)
    assert heap.predicted == memory_usage(MODULE, "cpu").temp_bytes
    assert heap.peak is not None
    assert heap.peak.instruction == "e"


def test_what_is_idle_over_the_peak_says_so():
    (idle,) = (i for i in found().idle if i.step.instruction == "a")
    assert idle.at_peak
    assert (idle.size, idle.step.source_line) == (2 * SIZE, "m.py:3")
    assert (idle.after.instruction, idle.before.instruction) == ("b", "h")
    assert idle.ticks == LiveRange(2, 7)
    assert idle.seconds is None
    timed = next(i for i in found(machine=load_machine("cpu-cxl")).idle if i.at_peak)
    assert timed.seconds is not None
    assert timed.seconds > 0


def adam(
    state: dict[str, Any], x: jax.Array, unused: jax.Array
) -> tuple[dict[str, Any], jax.Array]:
    del unused

    def loss(params: dict[str, list[jax.Array]]) -> jax.Array:
        y = x
        for w in params["layers"]:
            y = jnp.tanh(y @ w)
        return jnp.sum(y * y)

    value, grads = jax.value_and_grad(loss)(state["params"])
    mu, nu = state["opt_state"][0]["mu"], state["opt_state"][0]["nu"]
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, grads)
    nu = jax.tree.map(lambda n, g: 0.9 * n + 0.1 * g * g, nu, grads)
    params = jax.tree.map(lambda p, m, n: p - m / jnp.sqrt(n + 1e-8), state["params"], mu, nu)
    return {"params": params, "opt_state": ({"mu": mu, "nu": nu},)}, value


def test_arguments_that_could_leave_are_told_by_the_names_that_they_have_in_common():
    width, rows, layers = 64, 4096, 4
    weights = {"layers": [jnp.zeros((width, width))] * layers}
    state = {"params": weights, "opt_state": ({"mu": weights, "nu": weights},)}
    x, unused = jnp.zeros((rows, width)), jnp.zeros((8, 8))
    compiled = jax.jit(adam, donate_argnums=0, keep_unused=True).lower(state, x, unused).compile()
    module, machine = read_module(compiled), load_machine("cpu-cxl")
    findings = Inspector(module, "cpu", machine).findings()
    resting = {r.name: r for r in findings.resting}
    moments = resting["state.opt_state"]
    weight = width * width * 4
    assert (moments.size, moments.count) == (2 * layers * weight, 2 * layers)
    link = machine.host_link
    there = machine.transfer_seconds(weight, link.source, link.destination)
    back = machine.transfer_seconds(weight, link.destination, link.source)
    assert moments.link_s == pytest.approx(2 * layers * (there + back))
    run = view_run("x", module, machine)
    assert moments.seconds is not None
    assert run.clock is not None
    assert 0 < moments.seconds < run.clock.step_time_s
    # What nobody reads or writes, the link need not bring.
    assert resting["unused"].link_s == 0
    said = [a.sentence for a in advise(run, findings)]
    (sentence,) = (s for s in said if s.startswith("state.opt_state (8 arguments, 128.0 KiB) are"))
    assert "memplan.jit(hbm=...)" in sentence
    assert all(r.seconds is r.link_s is None for r in Inspector(module, "cpu").findings().resting)


def test_what_is_read_at_the_peak_does_not_rest():
    module = entry("""
  %p = f32[64]{0} parameter(0)
  %now = f32[8,64]{1,0} parameter(1)
  %later = f32[64]{0} parameter(2)
  %wide = f32[8,64]{1,0} broadcast(%p), dimensions={1}
  %both = f32[16,64]{1,0} concatenate(%wide, %now), dimensions={0}
  %part = f32[1,64]{1,0} slice(%both), slice={[9:10], [0:64]}
  %row = f32[64]{0} bitcast(%part)
  %sum = f32[64]{0} add(%row, %later)
  ROOT %r = (f32[64]{0}) tuple(%sum)
""")
    resting = Inspector(module, "cpu").findings().resting
    assert {(r.name, r.size) for r in resting} == {("p", SIZE), ("later", SIZE)}


def test_what_moves_bytes_is_listed_with_them():
    findings = found()
    (moved,) = findings.relayouts
    assert (moved.step.instruction, moved.kind) == ("moved", "relayout")
    assert moved.moved_bytes == 16 * SIZE
    assert findings.kernels[0].moved_bytes == 16 * SIZE
    kernels = {k.step.instruction: k for k in findings.kernels}
    assert kernels["d"].moved_bytes == 3 * SIZE
    assert "g" not in kernels


def test_what_goes_through_memory_says_why():
    findings = found()
    pairs = {(p.producer.instruction, p.consumer.instruction): p for p in findings.pairs}
    for ends in (("big", "moved"), ("moved", "e")):
        pair = pairs[ends]
        assert (pair.reason, pair.conversion) == ("layout", "moved")
        assert pair.saved_bytes == 16 * SIZE
        assert pair.seconds is None
    assert pairs["a", "b"].reason == "shared"
    # Nothing is fused here: each total is a sum over %a, %b, %big, %moved, %e, %f, %h and %d.
    assert findings.hbm.unfused == findings.hbm.compiled
    assert findings.hbm.compiled.read == (2 + 1 + 1 + 8 + 8 + 1 + 1 + 2) * SIZE
    assert findings.hbm.compiled.written == (2 + 1 + 8 + 8 + 8 + 1 + 1 + 1) * SIZE
    assert findings.hbm.bound == (2 * SIZE, SIZE)


def test_a_conversion_between_two_kernels_is_advised_against_once():
    machine = load_machine("cpu-cxl")
    findings = found(machine=machine)
    advice = advise(view_run("x", MODULE, machine), findings)
    (fuse,) = (a for a in advice if "they could be one kernel" in a.sentence)
    assert fuse.sentence.startswith(
        "%big and %moved hand f32[8,64] on through memory, 4.0 KiB, since %moved only brings "
        "{1,0} into {0,1}"
    )
    assert fuse.where == "%moved"
    assert fuse.saves_s == pytest.approx(16 * SIZE / machine.hbm_bytes_per_s)


def test_each_finding_becomes_advice_with_its_number():
    machine = load_machine("cpu-cxl")
    findings = found(machine=machine)
    advice = advise(view_run("x", MODULE, machine), findings)
    said = {a.sentence: a for a in advice}
    (donate,) = (a for s, a in said.items() if s.startswith("donate state['w']"))
    assert donate.saves_bytes == SIZE
    (idle,) = (a for s, a in said.items() if "m.py:3" in s and "idle at the peak" in s)
    assert idle.saves_bytes == 2 * SIZE
    (moves,) = (a for s, a in said.items() if s.startswith("%moved only moves 4.0 KiB"))
    assert moves.saves_s == findings.relayouts[0].seconds
    assert [a.share for a in advice] == sorted((a.share for a in advice), reverse=True)


def test_of_chunks_only_those_are_advised_that_none_is_better_than():
    machine = load_machine("cpu-cxl")
    run = view_run("x", MODULE, machine)
    clock, total = run.clock, run.device.total
    assert clock is not None

    def in_chunks(parts: int, share: float, slower: float) -> tuple[list[Split], RunView]:
        device = replace(run.device, arguments=0, aliased=0, temp=0, outputs=int(share * total))
        timed = replace(clock, step_time_s=slower * clock.step_time_s)
        split = Split(parts, "f32[8,64]", total, total // parts, 0, 3, "m.py:3")
        return [split], replace(run, device=device, clock=timed)

    ways = [
        in_chunks(4, 0.5, 1.05),
        in_chunks(8, 0.4, 1.1),
        in_chunks(64, 0.45, 30.0),  # More bytes than 8, and slower.
        in_chunks(16, 0.4, 1.2),  # As many as 8.
        in_chunks(32, 0.3, 1.3),
    ]
    said = [a.sentence for a in advise(run, found(machine=machine), ways)]
    parts = [int(s.split(" in ")[1].split()[0]) for s in said if " chunks along " in s]
    assert parts == [32, 8, 4]


def test_what_saves_next_to_nothing_is_not_advised():
    """Only %q's bytes are ever worth a word in a program of a thousand times as many."""
    run = view_run("x", MODULE)
    device = run.device.__class__(10**9, 0, 0, 0, "memplan")
    assert not advise(run.__class__(**{**vars(run), "device": device}), found())


@pytest.mark.slow
def test_tables_of_findings(golden: Golden):
    module, machine = corpus.read("llama_train.v5e"), load_machine("v5e")
    findings = Inspector(module, "tpu", machine).findings()
    advice = advise(view_run("x", module, machine), findings)
    tables = (advice_table(advice), *finding_tables(findings))
    golden("findings.txt", "\n".join(map(plain_text, tables)))


QUICK = [key for key in corpus.memory() if not key.startswith("llama_train.")]


@pytest.mark.parametrize("key", slow_but(QUICK, corpus.memory()))
def test_every_compiled_module_can_be_looked_into(key: str):
    """What is held at the peak is what the view adds up from live ranges. XLA's heap has a
    buffer some instructions longer than its value lives."""
    module = corpus.read(key)
    findings, run = Inspector(module, corpus.platform(key)).findings(), view_run("x", module)
    advise(run, findings)
    for groups in findings.held.values():
        held = sum(g.size for g in groups)
        assert held == pytest.approx(run.tiers[0].peak_bytes if run.tiers else 0, rel=1e-6)


TRANSPOSED = """HloModule m, is_scheduled=true
ENTRY e {
  w = f32[8,16]{1,0} parameter(0), metadata={op_name="params['w']"}
  x = f32[8,16]{1,0} parameter(1), metadata={op_name="x"}
  c = f32[8,16]{0,1} copy(w)
  ROOT d = f32[16,16]{1,0} dot(c, x), lhs_contracting_dims={0}, rhs_contracting_dims={0}
}
"""


def test_a_conversion_says_for_whom_it_is_and_what_would_save_it():
    module = read_module(TRANSPOSED)
    findings = Inspector(module, "cpu", load_machine("cpu-cxl")).findings()
    (moved,) = findings.relayouts
    assert moved.why == "%d takes {0,1}, params['w'] gives {1,0}"
    (view,) = findings.layouts
    assert (view.name, view.size, view.before, view.after) == ("params['w']", 512, "{1,0}", "{0,1}")
    assert findings.saved_by_layouts == moved.moved_bytes == 1024
    advice = advise(view_run("x", module, load_machine("cpu-cxl")), findings)
    (relaid,) = (a for a in advice if "less to convert" in a.sentence)
    assert "params['w']: {0,1} for {1,0}" in relaid.sentence
    assert relaid.saves_s == moved.seconds


def test_an_argument_that_costs_no_conversion_is_left_alone():
    module = read_module(TRANSPOSED.replace("{0,1} copy(w)", "{1,0} negate(w)"))
    findings = Inspector(module, "cpu").findings()
    assert not findings.layouts
    assert findings.saved_by_layouts == 0


BETWEEN = """HloModule m, is_scheduled=true
ENTRY e {
  a = f32[16,16]{1,0} parameter(0)
  p = f32[16,16]{1,0} convolution(a, a), dim_labels=bf_io->bf
  c = f32[16,16]{0,1} copy(p)
  ROOT q = f32[16,16]{1,0} convolution(c, a), dim_labels=bf_io->bf
}
"""


@pytest.mark.parametrize("target", ["tpu", "gpu"])
def test_conversions_between_products_are_advised_against_where_xla_can_be_told(target: Target):
    module = read_module(BETWEEN)
    machine = load_machine({"tpu": "v5e", "gpu": "h200"}[target])
    findings = Inspector(module, target, machine).findings()
    (moved,) = findings.relayouts
    assert moved.why == "%q takes {0,1}, %p gives {1,0}"
    assert moved.can_be_told == (target == "tpu")
    advice = advise(view_run("x", module, machine), findings)
    told = [a for a in advice if "between products" in a.sentence]
    assert [a.saves_s for a in told] == [moved.seconds] * (target == "tpu")


@pytest.mark.parametrize("is_scanned", [False, True])
def test_pools_of_pages_by_their_names(is_scanned: bool) -> None:
    def step(cache: Any, q: jax.Array, lengths: jax.Array, tables: jax.Array) -> jax.Array:
        def layer(x: jax.Array, pools: tuple) -> tuple[jax.Array, None]:
            k, v = pools
            out = decode_attention(x, k, v, lengths, block_tables=tables, window=32)
            return jnp.tanh(out), None

        if is_scanned:
            return jax.lax.scan(layer, q, cache)[0]
        for pools in cache:
            q, _ = layer(q, pools)
        return q

    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    pool = array(*((3,) if is_scanned else ()), 24, 2, 16, 64)
    cache: Any = (pool, pool) if is_scanned else [(pool, pool)] * 3
    given = cache, array(4, 1, 8, 64), array(4, dtype=jnp.int32), array(4, 5, dtype=jnp.int32)
    compiled = jax.jit(step).lower(*given).compile()
    pages = Inspector(read_module(compiled), "cpu").findings().pages
    names = [f"cache[{k}][i]" for k in range(2)] if is_scanned else None
    assert {p.pool for p in pages} == set(
        names or (f"cache[{layer}][{kind}]" for layer in range(3) for kind in range(2))
    )
    for p in pages:
        assert (p.page_bytes, p.page_tokens) == (2 * 16 * 64 * 4, 16)
        assert (p.sequences, p.pages, p.window) == (4, 5, 32)
        assert p.reads == (3 if is_scanned else 1)
    table = next(t for t in finding_tables(Inspector(read_module(compiled), "cpu").findings(), 9)
                 if t.title == "pools that are read page by page")  # fmt: skip
    assert "32 tokens" in plain_text(table)
