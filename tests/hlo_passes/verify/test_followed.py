"""How far an executable's loops follow the plan is seen, not guessed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hlo_passes.ir import Module
from hlo_passes.loops.rewrite import rewrite_loops
from hlo_passes.loops.schedule import schedule_loops
from hlo_passes.plan import Plan
from hlo_passes.proto import hlo_pb2
from hlo_passes.verify import Followed, verify_executable
from tests.hlo_passes.rings import Ring, ring_machine
from tests.hlo_passes.toys import plan_of

MACHINE = ring_machine(10.0)


def planned() -> tuple[Plan, Module]:
    module = Ring().module()
    loops = schedule_loops(module, MACHINE)
    rewritten = rewrite_loops(module, loops, MACHINE)
    return replace(plan_of(rewritten, []), loops=loops), rewritten


def body_edited(module: Module, edit: Callable[[hlo_pb2.HloComputationProto], None]) -> Module:
    proto = module.to_proto()
    body = next(c for c in proto.computations if c.name == "body")
    edit(body)
    ids = [i.id for i in body.instructions]
    proto.schedule.sequences[body.id].instruction_ids[:] = ids
    return Module(proto)


def move(body: hlo_pb2.HloComputationProto, name: str, before: str) -> None:
    copies = {i.name: hlo_pb2.HloInstructionProto() for i in body.instructions}
    for i in body.instructions:
        copies[i.name].CopyFrom(i)
    order = [n for n in copies if n != name]
    order.insert(order.index(before), name)
    del body.instructions[:]
    body.instructions.extend(copies[n] for n in order)


def test_a_module_as_it_was_rewritten_follows_exactly():
    plan, module = planned()
    followed = verify_executable(plan, module)
    assert followed == Followed(0, (), (), 3, (), ())
    assert followed.exactly


def test_transfers_are_known_by_name_where_their_tags_are_gone():
    plan, module = planned()
    proto = module.to_proto()
    for c in proto.computations:
        for i in c.instructions:
            i.frontend_attributes.Clear()
    assert verify_executable(plan, Module(proto)).exactly


def test_a_start_before_the_work_that_it_stands_behind():
    plan, module = planned()
    early = body_edited(module, lambda body: move(body, "f1.start", "y0"))
    followed = verify_executable(plan, early)
    assert followed.loops_reordered == ("body/f1.start",)
    assert not followed.exactly


def test_starts_that_have_changed_places():
    plan, module = planned()
    late = body_edited(module, lambda body: move(body, "f0.start", "f0.done"))
    (moved,) = verify_executable(plan, late).loops_reordered
    assert moved in ("body/f0.start", "body/f1.start")


def test_a_transfer_that_is_not_there():
    plan, module = planned()

    def rename(body: hlo_pb2.HloComputationProto) -> None:
        for i in body.instructions:
            if i.name == "f1.start":
                i.name = "other"
                i.frontend_attributes.Clear()

    followed = verify_executable(plan, body_edited(module, rename))
    assert followed.loops_missing == ("body/f1.start",)
    assert followed.loop_transfers == 2
