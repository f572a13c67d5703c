"""The checker accepts right rewrites, and says what is wrong with others."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hlo_passes.errors import VerificationError
from hlo_passes.ir import Module
from hlo_passes.plan import (
    Plan,
    Transfer,
)
from hlo_passes.proto import hlo_pb2
from hlo_passes.verify import verify_executable
from tests.hlo_passes.streamed import (
    SIZE,
    STEPS,
    Streamed,
    streamed,
    streamed_plan,
    verify_rewrite,
)
from tests.hlo_passes.toys import module_of


def accept(program: Streamed, plan: Plan, lines: list[str]) -> Module:
    rewritten = module_of(program.text(lines))
    verify_rewrite(program.module(), plan, rewritten)
    return rewritten


def rewrite_rejection(program: Streamed, plan: Plan, lines: list[str]) -> str:
    with pytest.raises(VerificationError) as rejected:
        accept(program, plan, lines)
    return str(rejected.value)


@given(st.one_of(streamed(), streamed(cpu=True)), st.randoms(use_true_random=False))
def test_a_right_rewrite_is_accepted(program: Streamed, choose: random.Random):
    plan = program.plan(choose)
    rewritten = accept(program, plan, program.rewritten(plan))
    assert verify_executable(plan, rewritten).exactly


@given(st.one_of(streamed(), streamed(cpu=True)), st.randoms(use_true_random=False), st.data())
def test_a_rewrite_in_another_order_is_rejected(
    program: Streamed, choose: random.Random, data: st.DataObject
):
    plan = program.plan(choose)
    lines = program.rewritten(plan)
    assume(len(lines) > 1)
    k = data.draw(st.integers(0, len(lines) - 2))
    assume(not lines[k + 1].startswith("ROOT"))
    # Neighbours that are both dones wait for each other.
    assume(not (lines[k].startswith("%here") and lines[k + 1].startswith("%here")))
    lines[k : k + 2] = lines[k + 1], lines[k]
    name = lines[k + 1].split()[0]
    assume(
        f"{name})" not in lines[k] and f"{name}," not in lines[k] and f"{name}}}" not in lines[k]
    )
    rewrite_rejection(program, plan, lines)


PROGRAM = Streamed(STEPS)


def changed(old: str, new: str, program: Streamed = PROGRAM) -> str:
    """Why the rewrite is rejected in which `old` has become `new`."""
    plan = plan_for(program)
    text = "\n".join(program.rewritten(plan))
    assert text.count(old) == 1, text
    return rewrite_rejection(program, plan, text.replace(old, new).splitlines())


def plan_for(program: Streamed) -> Plan:
    return replace(streamed_plan(), module_fingerprint=program.module().fingerprint)


def test_a_wrong_operand_is_rejected():
    assert changed("multiply(%a2, %here2)", "multiply(%a2, %here0)") == (
        "plan rejected: %a3 at tick 3 reads %here0, expected %here2, of transfer 2 "
        "(%a3 = f32[64] multiply, train.py:4)."
    )
    assert "%a2, operand 1: expected what %a1 holds, found what %a0 holds" in changed(
        "multiply(%a1, %a1)", "multiply(%a1, %a0)"
    )


def test_a_changed_instruction_is_rejected():
    assert "%a2 is not the instruction that %a2 was" in changed(
        "multiply(%a1, %a1)", "add(%a1, %a1)"
    )


def test_lost_or_added_compute_is_rejected():
    extra = "%a2 = f32[64]{0} multiply"
    assert "%extra is new" in changed(extra, f"%extra = f32[64]{{0}} negate(%a1)\n{extra}")
    assert "%after is new" in changed(
        "ROOT %a4 = f32[64]{0} multiply(%a3, %here3)",
        "ROOT %after = f32[64]{0} multiply(%a3, %here3)",
    )
    plan = plan_for(PROGRAM)
    lines = [line.removeprefix("ROOT ") for line in PROGRAM.rewritten(plan)]
    assert "%more is new" in rewrite_rejection(
        PROGRAM, plan, [*lines, "ROOT %more = f32[64]{0} negate(%a4)"]
    )


def test_another_result_is_rejected():
    plan = plan_for(PROGRAM)
    lines = PROGRAM.rewritten(plan)
    lines[-1] = lines[-1].removeprefix("ROOT ")
    k = next(k for k, line in enumerate(lines) if line.startswith("%a3"))
    lines[k] = "ROOT " + lines[k]
    assert "expected the result %a4, found %a3" in rewrite_rejection(PROGRAM, plan, lines)


def test_a_missing_half_is_rejected():
    untagged = 'frontend_attributes={memplan.transfer="2"}'
    done = f"%here2 = f32[64]{{0}} copy-done(%go2), {untagged}"
    assert "tick 3: expected %a3, found %here2" in changed(done, done.replace(f", {untagged}", ""))
    plan = plan_for(PROGRAM)
    lines = [line for line in PROGRAM.rewritten(plan) if "%here2 =" not in line]
    lines = [line.replace("%here2", "%here0") for line in lines]
    assert rewrite_rejection(PROGRAM, plan, lines) == (
        "plan rejected: %go2 is waited for by nothing, expected one done "
        "(%go2 = (f32[64], f32[64]S(5), u32[]) copy-start)."
    )


def test_a_transfer_too_many_is_rejected():
    go = "%go3 = (f32[64]{0}"
    more = "%go9 = (f32[64]{0}, f32[64]{0:S(5)}, u32[]) copy-start(%w0), "
    more += 'frontend_attributes={memplan.transfer="9"}'
    assert "%go9 is waited for by nothing, expected one done" in changed(go, f"{more}\n{go}")
    again = more.replace('"9"', '"0"')
    assert "%go9 is waited for by nothing, expected one done" in changed(go, f"{again}\n{go}")


def test_a_transfer_of_another_buffer_is_rejected():
    assert "expected %w0, as %done0 holds it, found %w1, as %here2 holds it" in changed(
        'copy-start(%w0), frontend_attributes={memplan.transfer="2"}',
        'copy-start(%w1), frontend_attributes={memplan.transfer="2"}',
    )


def test_a_transfer_at_another_tick_is_rejected():
    plan = plan_for(PROGRAM)
    lines = PROGRAM.rewritten(plan)
    k = next(k for k, line in enumerate(lines) if line.startswith("%go3"))
    later = [*lines[:k], lines[k + 1], lines[k], *lines[k + 2 :]]
    assert rewrite_rejection(PROGRAM, plan, later) == (
        "plan rejected: start:3 of %w1 stands at tick 3, expected tick 2 "
        "(%go3 = (f32[64], f32[64]S(5), u32[]) copy-start)."
    )
    swapped = [*lines]
    one, two = (next(k for k, s in enumerate(lines) if s.startswith(f"%go{i}")) for i in (0, 1))
    swapped[one], swapped[two] = swapped[two], swapped[one]
    assert "start:0 of %w0 stands out of order in tick 0" in rewrite_rejection(
        PROGRAM, plan, swapped
    )


def test_a_change_around_the_entry_is_rejected():
    plan = plan_for(PROGRAM)
    text = PROGRAM.text(PROGRAM.rewritten(plan))
    aliased = text.replace("=true", "=true, input_output_alias={ {}: (0, {}) }")
    with pytest.raises(VerificationError, match="the module differs outside its computations"):
        verify_rewrite(PROGRAM.module(), plan, module_of(aliased))
    helper = "%helper {\n  ROOT %p = f32[64]{0} parameter(0)\n}\n\nENTRY"
    with pytest.raises(VerificationError, match="differs"):
        verify_rewrite(PROGRAM.module(), plan, module_of(text.replace("ENTRY", helper)))


def edited(change: Callable[[hlo_pb2.HloModuleProto], None]) -> str:
    """Why the rewrite is rejected whose proto `change` has edited."""
    plan = plan_for(PROGRAM)
    proto = module_of(PROGRAM.text(PROGRAM.rewritten(plan))).to_proto()
    change(proto)
    with pytest.raises(VerificationError) as rejected:
        verify_rewrite(PROGRAM.module(), plan, Module(proto))
    return str(rejected.value)


def test_a_schedule_that_cannot_run_is_rejected():
    def swap(proto: hlo_pb2.HloModuleProto) -> None:
        ids = proto.schedule.sequences[proto.entry_computation_id].instruction_ids
        ids[-1], ids[-3] = ids[-3], ids[-1]

    def repeat(proto: hlo_pb2.HloModuleProto) -> None:
        ids = proto.schedule.sequences[proto.entry_computation_id].instruction_ids
        ids.append(ids[-1])

    def renumber(proto: hlo_pb2.HloModuleProto) -> None:
        ids = proto.schedule.sequences[proto.entry_computation_id].instruction_ids
        ids[-1] = proto.computations[0].instructions[-1].id = 7 << 32
        proto.computations[0].root_id = 7 << 32

    assert "is scheduled before what it needs" in edited(swap)
    assert "%a4 is scheduled twice" in edited(repeat)
    assert "%a4 has id 30064771072, which is not of computation 0" in edited(renumber)


def test_a_lost_control_edge_is_rejected():
    original = Streamed(STEPS)
    text = original.text(
        [
            "%start0 = (f32[64]{0}, f32[64]{0:S(5)}, u32[]) copy-start(%w0)",
            "%done0 = f32[64]{0} copy-done(%start0)",
            "%a = f32[64]{0} negate(%x)",
            "ROOT %b = f32[64]{0} multiply(%x, %done0), control-predecessors={%a}",
        ]
    )
    module = module_of(text)
    lost = module_of(
        text.replace(", control-predecessors={%a}", "")
        .replace("copy-start(%w0)", 'copy-start(%w0), frontend_attributes={memplan.transfer="0"}')
        .replace(
            "copy-done(%start0)", 'copy-done(%start0), frontend_attributes={memplan.transfer="0"}'
        )
    )
    transfer = Transfer(0, "w0", "host", "hbm", SIZE, 0, 0, 2)
    plan = replace(streamed_plan(), transfers=(transfer,), fences=())
    with pytest.raises(VerificationError, match="%b lost a control predecessor"):
        verify_rewrite(module, plan, lost)


ON_CPU = Streamed(STEPS, cpu=True)


def test_on_cpu_every_fence_is_an_edge():
    assert changed(", control-predecessors={%a1}", "", ON_CPU) == (
        "plan rejected: %go3 may run before %a1 has finished, against the reuse fence compute:1 -> "
        "start:3 (%go3 = f32[64] custom-call). Order them by an operand or a control predecessor."
    )
    plan = plan_for(ON_CPU)
    text = "\n".join(ON_CPU.rewritten(plan)).replace(", control-predecessors={%a1}", "")
    go = "%go3 = f32[64]{0} custom-call"
    by_operand = text.replace(f"{go}(%w1)", f"{go}(%w1, %a1)")
    assert by_operand != text
    accept(ON_CPU, plan, by_operand.splitlines())


def test_on_cpu_a_done_names_its_source_and_its_alias():
    assert "transfer 2 of %w0, operands of %here2: found %go2, expected %go2, %w0" in changed(
        "custom-call(%go2, %w0)", "custom-call(%go2)", ON_CPU
    )
    plan = plan_for(ON_CPU)
    bare = [
        line.replace(", output_to_operand_aliasing={{}: (0, {})}", "")
        for line in ON_CPU.rewritten(plan)
    ]
    assert "aliasing of %here0: found [], expected [((), 0, ())]" in rewrite_rejection(
        ON_CPU, plan, bare
    )


# ── verify_executable ────────────────────────────────────────────────────────────────────


def test_an_executable_that_follows_the_plan():
    plan = plan_for(PROGRAM)
    followed = verify_executable(plan, module_of(PROGRAM.text(PROGRAM.rewritten(plan))))
    assert (followed.transfers, followed.missing, followed.reordered) == (4, (), ())


def test_a_transfer_that_moved_is_reported():
    plan = plan_for(PROGRAM)
    lines = PROGRAM.rewritten(plan)
    two, three = (
        next(k for k, line in enumerate(lines) if line.startswith(f"%go{i}")) for i in (2, 3)
    )
    lines.insert(three, lines.pop(two))
    followed = verify_executable(plan, module_of(PROGRAM.text(lines)))
    assert (followed.missing, followed.reordered, followed.exactly) == ((), (2,), False)


def test_a_transfer_that_is_gone_is_reported():
    plan = plan_for(PROGRAM)
    lines = [line.replace("%here2)", "%here0)") for line in PROGRAM.rewritten(plan)]
    lines = [line for line in lines if not line.startswith(("%go2", "%here2"))]
    followed = verify_executable(plan, module_of(PROGRAM.text(lines)))
    assert (followed.transfers, followed.missing, followed.reordered) == (3, (2,), ())


def test_a_transfer_without_its_attribute_is_known_by_its_name():
    plan = plan_for(ON_CPU)
    lines = [
        line.split(", frontend_attributes")[0]
        .replace("%go", "%memplan_copy_start.")
        .replace("%here", "%memplan_copy_done.")
        for line in ON_CPU.rewritten(plan)
    ]
    assert verify_executable(plan, module_of(ON_CPU.text(lines))).exactly
