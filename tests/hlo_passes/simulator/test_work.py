"""What instructions ask of a machine beside time: bytes, launches, and what holds them back."""

from dataclasses import replace

import pytest

from hlo_passes.analysis.kernel_cost import KERNEL_COST_ATTRIBUTE, KernelCost
from hlo_passes.ir import Thunk
from hlo_passes.simulator.cost import instruction_costs
from hlo_passes.simulator.events import Work
from hlo_passes.simulator.timeline import Compute, schedule_events
from hlo_passes.simulator.work import instruction_work
from tests.hlo_passes.toys import module_of, toy_machine

# 100 bytes and 1000 FLOP a second. %dot: 3·400 bytes, 2000 FLOP: 12 s of memory, 2 of arithmetic;
# %small: 2·40 + 400 bytes, 2000 FLOP with a longer inner dimension.
STEP = """HloModule m, is_scheduled=true
ENTRY e {
  x = f32[10,10]{1,0} parameter(0)
  y = f32[10,10]{1,0:S(1)} parameter(1)
  z = f32[10,10]{1,0:S(1)} parameter(2)
  dot = f32[10,10]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  chip = f32[10,10]{1,0:S(1)} dot(y, z), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  neg = f32[10,10]{1,0} negate(dot)
  ROOT t = (f32[10,10]{1,0}, f32[10,10]{1,0:S(1)}) tuple(neg, chip)
}
"""

LOOP = """HloModule m, is_scheduled=true
body {
  s = (s32[], f32[25]{0}) parameter(0)
  k = s32[] get-tuple-element(s), index=0
  x = f32[25]{0} get-tuple-element(s), index=1
  n = f32[25]{0} negate(x)
  a = f32[25]{0} abs(n)
  one = s32[] constant(1)
  next = s32[] add(k, one)
  ROOT t = (s32[], f32[25]{0}) tuple(next, a)
}
condition {
  s.1 = (s32[], f32[25]{0}) parameter(0)
  k.1 = s32[] get-tuple-element(s.1), index=0
  limit = s32[] constant(3)
  ROOT less = pred[] compare(k.1, limit), direction=LT
}
ENTRY e {
  x = f32[25]{0} parameter(0)
  zero = s32[] constant(0)
  t = (s32[], f32[25]{0}) tuple(zero, x)
  ROOT w = (s32[], f32[25]{0}) while(t), condition=condition, body=body, \
backend_config={"known_trip_count":{"n":"3"}}
}
"""


def work_of(text, **changes):
    module = module_of(text)
    machine = toy_machine(**changes)
    costs = instruction_costs(module, machine)
    found = instruction_work(module, machine, costs)
    return {i.name: found[i.id] for i in module.instructions.values() if i.id in found}, costs


def test_what_a_kernel_asks_of_device_memory():
    found, _ = work_of(STEP)
    # An operand that is read twice is read once: 400 bytes, and 400 written, in 8 s.
    assert found["dot"] == Work(800, 8.0, launches=1)
    assert found["neg"] == Work(800, 8.0, launches=1)


def test_a_product_on_the_chip_is_held_back_by_arithmetic():
    found, _ = work_of(STEP)
    assert found["chip"] == Work(0, 0.0, launches=1)


def test_faster_memory_leaves_arithmetic():
    found, _ = work_of(STEP, hbm_bytes_per_s=1e6)
    assert found["dot"].memory_s == 0.0 < found["neg"].memory_s


def test_what_takes_no_time_has_no_work():
    found, _ = work_of(STEP)
    assert found.keys() == {"dot", "chip", "neg"}


def test_a_loop_has_the_work_of_all_iterations():
    found, costs = work_of(LOOP)
    body = 200 + 200 + 12  # What is negated, its absolute value, and the counter with the one.
    assert found["w"].device_bytes == 3 * (body + 9)  # The comparison: two numbers and a pred.
    assert found["w"].launches == 3 * 4
    assert found["w"].memory_s == pytest.approx(3 * (4.21))
    # Two kernels of 2 s in each iteration, and two that hardly count.
    assert found["w"].kernels == pytest.approx(3 * 2, rel=0.2)
    module = module_of(LOOP)
    (event,) = schedule_events(module, costs, toy_machine(), work={module.entry.root.id: Work(1)})
    assert isinstance(event, Compute)
    assert (event.name, event.work) == ("w", Work(1))
    assert event.seconds == pytest.approx(3 * 4.21)


def test_launches_are_those_of_the_executable():
    module = module_of(STEP)
    inside = tuple(Thunk("Gemm", name, "", ()) for name in ("chip", "neg"))
    module.thunks = (
        Thunk("Gemm", "dot", "", ()),
        Thunk("Kernel", "dot", "", ()),
        Thunk("CommandBuffer", "", "", inside),
    )
    machine = toy_machine()
    found = instruction_work(module, machine, instruction_costs(module, machine))
    by_name = {module.instructions[id_].name: work for id_, work in found.items()}
    assert by_name["dot"] == Work(800, 8.0, launches=2)
    assert by_name["chip"] == Work(0, 0.0, graphs=1, captured=1)
    assert by_name["neg"] == replace(by_name["dot"], launches=0, captured=1)


def test_what_a_kernel_declares_is_taken():
    declared = KernelCost(flops=5000, bytes_accessed=100).to_attribute()
    found, costs = work_of(f"""HloModule m, is_scheduled=true
ENTRY e {{
  x = f32[10]{{0}} parameter(0)
  ROOT k = f32[10]{{0}} custom-call(x), custom_call_target="mosaic", \
frontend_attributes={{{KERNEL_COST_ATTRIBUTE}="{declared}"}}
}}
""")
    # 5 s of arithmetic, 1 s of memory, whatever its operands' bytes.
    assert found["k"] == Work(100, 0.0, launches=1)
    assert sum(costs.values()) == 5.0
