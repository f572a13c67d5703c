"""Seconds worked out by hand on a machine with round numbers, and XLA's own beside them."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from hlo_passes.analysis.kernel_cost import KERNEL_COST_ATTRIBUTE, KernelCost
from hlo_passes.analysis.learned import with_learned
from hlo_passes.hardware.machine import Interconnect, load_machine
from hlo_passes.ir import Learned, Module
from hlo_passes.normalize.barriers import remove_barriers
from hlo_passes.reading.reader import read_module
from hlo_passes.simulator.cost import estimates, instruction_costs, step_seconds
from hlo_passes.simulator.timeline import scheduled_step
from tests.hlo_passes.toys import link, module_of, toy_machine


def costs_of(text, machine=None):
    module = module_of(text)
    found = instruction_costs(module, machine or toy_machine())
    return {module.instructions[i].name: seconds for i, seconds in found.items()}


def entry(*lines):
    body = "\n  ".join(lines)
    return f"HloModule m\nENTRY e {{\n  {body}\n}}\n"


def dot(dtype="f32", precision="default", m=8):
    return entry(
        f"a = {dtype}[{m},16] parameter(0)",
        f"b = {dtype}[16,4] parameter(1)",
        f"ROOT d = {dtype}[{m},4] dot(a, b), lhs_contracting_dims={{1}}, "
        f"rhs_contracting_dims={{0}}, operand_precision={{{precision},{precision}}}",
    )


def test_a_small_matmul_waits_for_memory():
    # (8·16 + 16·4 + 8·4) · 4 bytes at 100 B/s, against 1024 FLOP at 1000 FLOP/s.
    assert costs_of(dot())["d"] == pytest.approx(8.96)


FAST_MEMORY = {"hbm_bytes_per_s": 1e9}


@pytest.mark.parametrize(
    ("dtype", "precision", "seconds"),
    [
        ("f32", "default", 1.024),
        ("bf16", "default", 0.512),
        ("bf16", "highest", 0.512),
        # An f32 product as three or six bf16 ones.
        ("f32", "high", 3 * 1.024),
        ("f32", "highest", 6 * 1.024),
        # A type that the machine does not know runs at its slowest.
        ("f64", "default", 1.024),
    ],
)
def test_a_matmul_out_of_fast_memory_computes(dtype, precision, seconds):
    found = costs_of(dot(dtype, precision), toy_machine(**FAST_MEMORY))
    assert found["d"] == pytest.approx(seconds)


def test_a_gpu_leaves_its_tensor_cores_for_the_highest_precision():
    machine = replace(load_machine("h200"), hbm_bytes_per_s=1e18)
    fast, slow = (costs_of(dot("f32", p), machine)["d"] for p in ("default", "highest"))
    assert fast == pytest.approx(1024 / 494.7e12)
    assert slow == pytest.approx(1024 / 66.9e12, rel=1e-3)


def test_memory_runs_at_the_bandwidth_of_one_long_stream():
    text = entry("a = f32[100] parameter(0)", "ROOT n = f32[100] negate(a)")
    assert costs_of(text)["n"] == pytest.approx(8.0)
    stream = link("hbm", "vmem", nominal_bytes_per_s=100.0, efficiency=0.5)
    assert costs_of(text, toy_machine(links=(stream,)))["n"] == pytest.approx(16.0)


def test_operands_on_the_chip_are_free():
    text = entry(
        "a = f32[100]{0:S(1)} parameter(0)",
        "b = f32[100]{0:S(3)} parameter(1)",
        "ROOT n = f32[100]{0:S(1)} add(a, b)",
    )
    # No tier of the machine has memory space 3.
    assert costs_of(text)["n"] == pytest.approx(4.0)


@pytest.mark.parametrize(
    "root",
    [
        "f32[50,2] bitcast(a)",
        "(f32[100]) tuple(a)",
        "f32[100] parameter(1)",
        "f32[] constant(1)",
    ],
)
def test_what_moves_nothing_costs_nothing(root):
    assert set(costs_of(entry("a = f32[100] parameter(0)", f"ROOT r = {root}")).values()) == {0.0}


def test_transfers_are_left_to_their_link():
    found = costs_of(
        entry(
            "a = f32[100]{0:S(5)} parameter(0)",
            "s = (f32[100]{0}, f32[100]{0:S(5)}, u32[]) copy-start(a)",
            "d = f32[100]{0} copy-done(s)",
            "c = f32[100]{0} copy(a)",
            "ROOT t = (f32[100], f32[100]) tuple(c, d)",
        )
    )
    assert set(found.values()) == {0.0}


def estimated(cycles):
    config = f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    return entry("a = f32[100] parameter(0)", f"ROOT n = f32[100] negate(a), {config}")


def test_the_compilers_own_estimate_comes_first():
    assert costs_of(estimated(1500))["n"] == 1.5


@pytest.mark.parametrize("cycles", [0, (1 << 63) - 1])
def test_an_estimate_of_nothing_or_of_all_there_is_is_none(cycles):
    assert costs_of(estimated(cycles))["n"] == pytest.approx(8.0)


def with_cycles_of(lines: Sequence[str], cycles: int) -> Module:
    return with_learned(module_of(entry(*lines)), estimates(module_of(estimated(cycles))), {})


@pytest.mark.parametrize(("cycles", "seconds"), [(9500, 9.5), (1500, 8.0)])
def test_an_executable_lends_its_estimate_above_the_roofline(cycles, seconds):
    module = with_cycles_of(["a = f32[100] parameter(0)", "ROOT n = f32[100] negate(a)"], cycles)
    found = instruction_costs(module, toy_machine())
    assert found[module.entry.root.id] == pytest.approx(seconds)


@pytest.mark.parametrize(
    "root", ["n = f32[100] abs(a)", "m = f32[100] negate(a)", "n = f16[100] negate(a)"]
)
def test_an_estimate_is_for_one_name_opcode_and_shape(root):
    dtype = root[4:7]
    module = with_cycles_of([f"a = {dtype}[100] parameter(0)", f"ROOT {root}"], 9500)
    found = instruction_costs(module, toy_machine())
    assert found[module.entry.root.id] == pytest.approx(8.0 if dtype == "f32" else 4.0)


def test_a_clone_takes_as_long_as_its_original():
    lines = [
        "a = f32[100] parameter(0)",
        'c = f32[100] negate(a), frontend_attributes={memplan.recompute="n"}',
        "ROOT n = f32[100] negate(a)",
    ]
    module = with_cycles_of(lines, 9500)
    found = instruction_costs(module, toy_machine())
    assert {i.name: found[i.id] for i in module.entry.instructions} == {"a": 0, "c": 9.5, "n": 9.5}


def test_what_is_lent_goes_with_the_module_and_is_no_part_of_it():
    lines = ["a = f32[100] parameter(0)", "ROOT n = f32[100] negate(a)"]
    plain, module = module_of(entry(*lines)), with_cycles_of(lines, 9500)
    assert module.fingerprint == plain.fingerprint
    assert Module(module.to_proto(), module).learned == Learned({"n": 9500})
    assert instruction_costs(plain, toy_machine())[plain.entry.root.id] == pytest.approx(8.0)
    assert plain.learned == Learned()
    # What is found once of a module is not what was found of another.
    assert remove_barriers(plain) is plain
    lent = Learned({"n": 9500})
    assert remove_barriers(plain.with_learned(lent)).learned == lent


SUM = """HloModule m, is_scheduled=true
add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}
ENTRY e {
  p = f32[100] parameter(0)
  s = f32[100] all-reduce(p), replica_groups={{0,1,2,3}}, to_apply=add
  t = f32[100] all-reduce-start(p), replica_groups={{0,1,2,3}}, to_apply=add
  u = f32[100] all-reduce-done(t)
  ROOT r = f32[100] add(s, u)
}
"""


def test_a_synchronous_collective_takes_as_long_as_the_interconnect():
    module = module_of(SUM)
    wires = Interconnect("ici", 10.0, efficiency=1.0, step_latency_s=1.0)
    alone = costs_of(SUM)
    found = instruction_costs(module, toy_machine(interconnect=wires))
    by_name = {i.name: found[i.id] for i in module.entry.instructions}
    # 6 steps, and each device sends 2 · 3/4 of 400 bytes; 800 bytes pass through device memory.
    assert by_name["s"] == pytest.approx(6 + 600 / 10)
    assert alone["s"] == pytest.approx(8.0)
    # What an asynchronous one takes of the interconnect is the timeline's.
    assert by_name["t"] == alone["t"]
    # A slow memory is as much in the way.
    fast = replace(wires, nominal_bytes_per_s=1e9, step_latency_s=0.0)
    found = instruction_costs(module, toy_machine(interconnect=fast))
    assert found[next(i.id for i in module.entry.instructions if i.name == "s")] == alone["s"]


@pytest.mark.parametrize(("flops", "size", "seconds"), [(5000, 10, 5.0), (0, 700, 7.0)])
def test_a_kernels_declared_cost_is_taken(flops, size, seconds):
    estimate = f'{{"flops":"{flops}","transcendentals":"0","bytes_accessed":"{size}"}}'
    found = costs_of(
        entry(
            "a = f32[100] parameter(0)",
            'ROOT k = f32[100] custom-call(a), custom_call_target="tpu_custom_call", '
            f'backend_config={{"custom_call_config":{{"cost_estimate":{estimate}}}}}',
        )
    )
    assert found["k"] == seconds


def test_a_kernel_multiplies_what_the_machine_multiplies():
    """Numbers that come before it, as lengths do, do not say how fast."""
    peaks = (("f32", 1000.0), ("f64", 10.0))
    cost = KernelCost(flops=5000, bytes_accessed=10).to_attribute()
    call = (
        'ROOT k = f32[100] custom-call(n, a), custom_call_target="mosaic_gpu_v2", '
        f'frontend_attributes={{{KERNEL_COST_ATTRIBUTE}="{cost}"}}'
    )
    module = entry("n = s32[4] parameter(0)", "a = f32[100] parameter(1)", call)
    assert costs_of(module, toy_machine(peak_flops=peaks))["k"] == pytest.approx(5.0)


def test_a_kernel_of_ours_costs_the_cycles_that_it_is_expected_to_take():
    call = (
        'ROOT k = f32[100] custom-call(a), custom_call_target="tpu_custom_call", '
        'frontend_attributes={kernel_metadata={"estimated_cycles": "1500"}}'
    )
    seconds = costs_of(entry("a = f32[100] parameter(0)", call))["k"]
    assert seconds == pytest.approx(1.5)


def test_another_custom_call_costs_its_bytes():
    call = 'ROOT k = f32[100] custom-call(a), custom_call_target="mine"'
    assert costs_of(entry("a = f32[100] parameter(0)", call))["k"] == pytest.approx(8.0)


CONTROL = """HloModule m

%cheap (a: f32[100]) -> f32[100] {
  %a = f32[100] parameter(0)
  ROOT %n1 = f32[100] negate(%a)
}

%dear (b: f32[100]) -> f32[100] {
  %b = f32[100] parameter(0)
  %n2 = f32[100] negate(%b)
  ROOT %n3 = f32[100] negate(%n2)
}

%body (state: (s32[], f32[100])) -> (s32[], f32[100]) {
  %state = (s32[], f32[100]) parameter(0)
  %k = s32[] get-tuple-element(%state), index=0
  %x = f32[100] get-tuple-element(%state), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%k, %one)
  %y = f32[100] negate(%x)
  ROOT %out = (s32[], f32[100]) tuple(%next, %y)
}

%condition (state.1: (s32[], f32[100])) -> pred[] {
  %state.1 = (s32[], f32[100]) parameter(0)
  %k.1 = s32[] get-tuple-element(%state.1), index=0
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%k.1, %limit), direction=LT
}

ENTRY %main (p: pred[], x.1: f32[100], i: s32[]) -> (f32[100], f32[100], (s32[], f32[100])) {
  %p = pred[] parameter(0)
  %x.1 = f32[100] parameter(1)
  %i = s32[] parameter(2)
  %called = f32[100] call(%x.1), to_apply=%dear
  %either = f32[100] conditional(%p, %x.1, %x.1), true_computation=%cheap,
      false_computation=%dear
  %z = s32[] constant(0)
  %init = (s32[], f32[100]) tuple(%START, %x.1)
  %loop = (s32[], f32[100]) while(%init), condition=%condition, body=%body
  ROOT %all = (f32[100], f32[100], (s32[], f32[100])) tuple(%called, %either, %loop)
}
"""


def test_control_flow_costs_what_it_calls():
    found = costs_of(CONTROL.replace("%START", "%z"))
    assert found["called"] == pytest.approx(16.0)
    assert found["either"] == pytest.approx(16.0)
    # The counter: 4 bytes and a constant's 4, and 4 written. The test: 4 + 4 + 1.
    assert found["loop"] == pytest.approx(5 * (8.0 + 0.12 + 0.09))
    # What is called is part of who calls it.
    module = module_of(CONTROL.replace("%START", "%z"))
    step_s = found["called"] + found["either"] + found["loop"]
    assert step_seconds(module, toy_machine()) == pytest.approx(step_s)


def test_a_loop_of_unknown_length_runs_once():
    assert costs_of(CONTROL.replace("%START", "%i"))["loop"] == pytest.approx(8.21)


def test_the_roofline_of_a_tpu_matmul_is_near_xlas_estimate(tpu_compiler):
    machine = load_machine("v5e")
    device = SingleDeviceSharding(tpu_compiler("v5e:2x2").devices[0])
    x = jax.ShapeDtypeStruct((2048, 4096), jnp.bfloat16, sharding=device)
    w = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=device)
    module = read_module(jax.jit(jnp.matmul).lower(x, w).compile())
    (kernel,) = (i for i in module.entry.instructions if i.opcode == "fusion")
    estimate = instruction_costs(module, machine)[kernel.id]
    roofline = 2 * 2048 * 4096 * 4096 / 197e12
    assert 1.0 < estimate / roofline < 1.2
    proto = module.to_proto()
    for computation in proto.computations:
        for instruction in computation.instructions:
            instruction.backend_config = b""
    assert instruction_costs(type(module)(proto), machine)[kernel.id] == pytest.approx(roofline)


NEW = """
HloModule new, is_scheduled=true

ENTRY e {
  a = f32[10000000] parameter(0)
  b = f32[10000000] negate(a)
  c = f32[10000000] exponential(b)
  ROOT d = f32[10000000] add(b, c)
}
"""
NEW_COPY = """
HloModule new, is_scheduled=true

ENTRY e {
  a = f32[10000000]{0:S(5)} parameter(0)
  s = (f32[10000000], f32[10000000]{0:S(5)}, u32[]) copy-start(a)
  ROOT d = f32[10000000] copy-done(s)
}
"""


def test_memory_that_the_system_clears_takes_longer():
    old, new = (costs_of(NEW, toy_machine(fresh_byte_s=s)) for s in (0.0, 1e-3))
    # What is negated and its exponential: the result may lie where one of them did.
    more = {name: new[name] - old[name] for name in "bcd"}
    assert more["b"] == pytest.approx(4e4)
    assert sum(more.values()) in (pytest.approx(8e4), pytest.approx(12e4))


def test_what_was_measured_has_that_among_its_seconds():
    module = module_of(NEW).with_learned(Learned(seconds={"b": 5.0}))
    found = instruction_costs(module, toy_machine(fresh_byte_s=1e-3))
    seconds = {module.instructions[i].name: of for i, of in found.items()}
    assert seconds["b"] == 5.0
    assert seconds["c"] > 1e4


def test_a_transfer_waits_for_new_memory_too():
    step_s = [
        scheduled_step(module_of(NEW_COPY), toy_machine(fresh_copy_byte_s=s)).step_time_s
        for s in (0.0, 1e-3)
    ]
    assert step_s[1] - step_s[0] == pytest.approx(4e4)
