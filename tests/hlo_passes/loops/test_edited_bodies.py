"""Bodies whose own temporaries are the peak: edited, written, checked, and refused when wrong."""

from dataclasses import replace

import pytest

from hlo_passes import pipeline
from hlo_passes.errors import (
    MemoryBudgetError,
    PlanMismatchError,
    VerificationError,
)
from hlo_passes.ir import Module
from hlo_passes.plan import Edits, Plan
from hlo_passes.proto import hlo_pb2
from hlo_passes.simulator.cost import step_seconds
from hlo_passes.verify import verify_equivalent
from tests.hlo_passes.looped import FAST, SIZE, SLOW, TRIPS, WORK, loop, module, taken
from tests.hlo_passes.toys import least_budget, module_of


@pytest.mark.parametrize(("machine", "kind"), [(FAST, "evictions"), (SLOW, "recomputes")])
def test_temporaries_of_an_iteration_leave_or_are_computed_again(machine, kind: str):
    budget = taken(module()) - SIZE
    plan = pipeline.plan_module(module(), machine, budget)
    (body,) = plan.bodies
    assert not plan.edits
    assert getattr(body.plan.edits, kind)
    assert (body.computation, body.loop, body.executions) == ("body", "w", TRIPS)
    assert body.moved_bytes == TRIPS * sum(t.size for t in body.plan.transfers)
    written = pipeline.rewrite_module(module(), plan, machine)
    assert taken(written) <= budget
    assert Plan.from_json(plan.to_json()) == plan


def test_what_fits_is_left_alone():
    plan = pipeline.plan_module(module(), FAST, taken(module()))
    assert not plan.bodies
    assert pipeline.rewrite_module(module(), plan, FAST).entry is not None


def test_the_seconds_of_all_iterations_count():
    plan = pipeline.plan_module(module(), SLOW, taken(module()) - SIZE)
    (body,) = plan.bodies
    again = body.plan.prediction.recompute_s
    assert again > 0
    assert plan.prediction.recompute_s == pytest.approx(TRIPS * again)
    plain = step_seconds(module(), SLOW)
    assert plan.prediction.step_time_s == pytest.approx(plain + TRIPS * again)
    # Another plan might do without.
    assert plan.prediction.lower_bound_s <= plain * (1 + 1e-9)


def test_a_budget_below_the_least_says_what_is():
    least = least_budget(module(), FAST)
    assert least < taken(module()) - SIZE
    assert pipeline.plan_module(module(), FAST, least).bodies
    with pytest.raises(MemoryBudgetError, match=f"hbm={least} ") as refused:
        pipeline.plan_module(module(), FAST, least - SIZE)
    assert refused.value.least == least
    # In the body, not at the loop.
    assert refused.value.instruction == "d"
    assert refused.value.largest[0].name == "d"


def test_the_entry_makes_room_once_rather_than_each_iteration():
    """A temporary that waits for the end of the loop."""
    text = (
        loop(WORK, before="%k = f32[4096]{0} exponential(%p)")
        .replace(
            "ROOT %out = f32[4096]{0} get-tuple-element(%w), index=1",
            "%y = f32[4096]{0} get-tuple-element(%w), index=1\n"
            "  ROOT %out = f32[8192]{0} concatenate(%y, %k), dimensions={0}",
        )
        .replace("-> f32[4096]{0} {\n  %p", "-> f32[8192]{0} {\n  %p")
    )
    of = module_of(text)
    plan = pipeline.plan_module(of, FAST, taken(of) - SIZE)
    assert plan.edits
    assert not plan.bodies


def test_a_loop_inside_of_a_loop():
    inner = loop(WORK).partition("\n")[2].partition("ENTRY")[0]
    for name in ("condition", "body", "s.1", "s.2", "i.1", "i.2", "x", "one", "next", "trips"):
        inner = inner.replace(f"%{name} ", f"%{name}.in ").replace(f"%{name},", f"%{name}.in,")
        inner = inner.replace(f"%{name})", f"%{name}.in)").replace(f"({name}:", f"({name}.in:")
    for name in "abcdefgh":
        inner = inner.replace(f"%{name} ", f"%{name}.in ").replace(f"%{name},", f"%{name}.in,")
        inner = inner.replace(f"%{name})", f"%{name}.in)")
    for name in ("new", "again", "less"):
        inner = inner.replace(f"%{name} ", f"%{name}.in ").replace(f"%{name})", f"%{name}.in)")
    outer = """
      %none = s32[] constant(0)
      %begin = s32[] copy(%none)
      %u = (s32[], f32[4096]{0}) tuple(%begin, %x)
      %v = (s32[], f32[4096]{0}) while(%u), condition=%condition.in, body=%body.in
      %new = f32[4096]{0} get-tuple-element(%v), index=1
    """
    of = module_of(loop(outer, inner=inner))
    plan = pipeline.plan_module(of, SLOW, taken(of) - SIZE)
    (body,) = plan.bodies
    assert (body.loop, body.executions) == ("v", TRIPS * TRIPS)
    assert taken(pipeline.rewrite_module(of, plan, SLOW)) <= taken(of) - SIZE


def test_an_order_of_another_body_is_refused():
    plan = pipeline.plan_module(module(), SLOW, taken(module()) - SIZE)
    (body,) = plan.bodies
    elsewhere = replace(body, computation="nowhere")
    with pytest.raises(PlanMismatchError, match="a loop's body %nowhere, but"):
        pipeline.rewrite_module(module(), replace(plan, bodies=(elsewhere,)), SLOW)
    lost = replace(body, plan=replace(body.plan, edits=Edits(order=("a", "b"))))
    with pytest.raises(PlanMismatchError, match="an order of 2 instructions"):
        pipeline.rewrite_module(module(), replace(plan, bodies=(lost,)), SLOW)


def test_a_clone_that_reads_something_else_is_refused():
    plan = pipeline.plan_module(module(), SLOW, taken(module()) - SIZE)
    written = pipeline.rewrite_module(module(), plan, SLOW)
    proto = hlo_pb2.HloModuleProto.FromString(written.to_bytes())
    body = next(c for c in proto.computations if c.name == "body")
    named = {i.name: i for i in body.instructions}
    clone = named[plan.bodies[0].plan.edits.recomputes[0].clone]
    others = [named[n].id for n in "xd" if named[n].id not in clone.operand_ids]
    clone.operand_ids[:] = others[:1]
    with pytest.raises(VerificationError, match="reads what it read in the original"):
        verify_equivalent(module(), Module(proto))


def test_what_is_added_takes_no_number_of_the_state():
    """In a body whose state has the highest number, a clone gets that number in the program."""
    proto = hlo_pb2.HloModuleProto.FromString(module().to_bytes())
    body = next(c for c in proto.computations if c.name == "body")
    state = next(i for i in body.instructions if i.opcode == "parameter")
    highest = max(i.id for i in body.instructions) + 1
    for i in body.instructions:
        i.operand_ids[:] = [highest if o == state.id else o for o in i.operand_ids]
    ids = proto.schedule.sequences[body.id].instruction_ids
    ids[:] = [highest if n == state.id else n for n in ids]
    state.id = highest
    of = Module(proto)
    plan = pipeline.plan_module(of, SLOW, taken(of) - SIZE)
    assert taken(pipeline.rewrite_module(of, plan, SLOW)) <= taken(of) - SIZE
