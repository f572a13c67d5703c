"""The checker accepts what the pass makes and refuses what could ever go wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.dependences import dependences
from hlo_passes.errors import MalformedModuleError, VerificationError
from hlo_passes.ir import Module
from hlo_passes.loops.rewrite import rewrite_loops
from hlo_passes.loops.schedule import schedule_loops
from hlo_passes.plan import LoopSchedule, LoopTransfer
from hlo_passes.proto import hlo_pb2
from hlo_passes.verify import verify_equivalent, verify_loops
from tests.hlo_passes.rings import Ring, ring_machine
from tests.hlo_passes.toys import module_of

MACHINE = ring_machine(10.0)


class Case:
    """A ring, scheduled; `order` says how its body is to stand instead."""

    def __init__(self, ring: Ring) -> None:
        self.module = ring.module()
        self.loops = schedule_loops(self.module, MACHINE)
        self.rewritten = rewrite_loops(self.module, self.loops, MACHINE)
        self.body = next(
            c for c in self.rewritten.computations.values() if c.name.startswith("body")
        )

    @property
    def order(self) -> list[str]:
        return [i.name for i in self.body.instructions]

    def moved(self, name: str, before: str) -> list[str]:
        order = [n for n in self.order if n != name]
        order.insert(order.index(before), name)
        return order

    def reordered(self, order: Sequence[str]) -> tuple[tuple[LoopSchedule, ...], Module]:
        """The body in another order, and the plan that says so."""
        proto = self.rewritten.to_proto()
        body = next(c for c in proto.computations if c.id == self.body.id)
        by_name = {i.name: i for i in body.instructions}
        instructions = [hlo_pb2.HloInstructionProto() for _ in order]
        for copy, name in zip(instructions, order, strict=True):
            copy.CopyFrom(by_name[name])
        number = {t.start_name: n for n, t in enumerate(self._by_start(order))}
        for i in instructions:
            tag = i.frontend_attributes.map
            if "memplan.loop_transfer" in tag:
                start = i.name.replace("done", "start")
                index = tag["memplan.loop_transfer"].split(".")[0]
                tag["memplan.loop_transfer"] = f"{index}.{number[start]}"
        del body.instructions[:]
        body.instructions.extend(instructions)
        proto.schedule.sequences[body.id].instruction_ids[:] = [i.id for i in instructions]
        loops = tuple(
            replace(loop, transfers=self._ticks(order)) if loop.depth else loop
            for loop in self.loops
        )
        return loops, Module(proto)

    def _by_start(self, order: Sequence[str]) -> list[LoopTransfer]:
        (body,) = (loop for loop in self.loops if loop.depth)
        return sorted(body.transfers, key=lambda t: order.index(t.start_name))

    def _ticks(self, order: Sequence[str]) -> tuple[LoopTransfer, ...]:
        found = self._by_start(order)
        halves = {name for t in found for name in (t.start_name, t.done_name)}
        ticks = {n: sum(o not in halves for o in order[:k]) for k, n in enumerate(order)}
        return tuple(
            replace(
                t,
                id=n,
                start=ticks[t.start_name],
                done=ticks[t.done_name],
                end=len(order) - len(halves),
            )
            for n, t in enumerate(found)
        )

    def check(self, order: Sequence[str]) -> None:
        loops, module = self.reordered(order)
        verify_equivalent(self.module, module)
        verify_loops(module, loops)


@pytest.fixture(scope="module")
def ring() -> Case:
    return Case(Ring(copied=True))


def test_its_own_order_is_accepted(ring: Case):
    verify_equivalent(ring.module, ring.rewritten)
    verify_loops(ring.rewritten, ring.loops)
    ring.check(ring.order)


def test_a_start_before_the_slots_last_read(ring: Case):
    with pytest.raises(
        VerificationError, match=r"%f1.start writes over what .* left, which %y0 reads"
    ):
        ring.check(ring.moved("f1.start", before="y0"))


def test_a_done_after_its_reader(ring: Case):
    with pytest.raises((VerificationError, MalformedModuleError), match=r"f0\.done|operand id"):
        ring.check(ring.moved("f0.done", before="out"))


def test_a_source_that_is_overwritten_while_it_is_stored():
    case = Case(Ring(stores=True))
    # y1 is the next x: it lies where the x lies that p0 stores.
    late = ["p0.done", "p1.start"]
    order = [n for n in case.order if n not in late]
    k = order.index("p1.done")
    assert order.index("y1") < k
    with pytest.raises(VerificationError, match=r"%y1 writes over what %s left"):
        case.check([*order[:k], *late, *order[k:]])


def test_compute_that_changes_places():
    case = Case(Ring(slots=3, stores=True))
    order = case.order
    assert order.index("y0") < order.index("f2.start")
    with pytest.raises((VerificationError, MalformedModuleError)):
        case.check(case.moved("y1", before="y0"))


def edited(
    case: Case, edit: Callable[[hlo_pb2.HloComputationProto], None]
) -> tuple[tuple[LoopSchedule, ...], Module]:
    proto = case.rewritten.to_proto()
    body = next(c for c in proto.computations if c.id == case.body.id)
    edit(body)
    ids = [i.id for i in body.instructions]
    proto.schedule.sequences[body.id].instruction_ids[:] = ids
    return case.loops, Module(proto)


def test_a_dropped_done(ring: Case):
    def edit(body: hlo_pb2.HloComputationProto) -> None:
        names = {i.name: i for i in body.instructions}
        names["new1"].operand_ids[:] = [names["f0.done"].id]
        kept = [i for i in body.instructions if i.name != "f1.done"]
        del body.instructions[:]
        body.instructions.extend(kept)

    _, module = edited(ring, edit)
    with pytest.raises(
        VerificationError, match=r"expected what %f1\.done holds, found what %f0\.done"
    ):
        verify_equivalent(ring.module, module)


def test_swapped_slots():
    case = Case(Ring(slots=3))

    def edit(body: hlo_pb2.HloComputationProto) -> None:
        names = {i.name: i for i in body.instructions}
        operands = names["out"].operand_ids
        operands[2], operands[3] = operands[3], operands[2]

    _, module = edited(case, edit)
    with pytest.raises(VerificationError, match="expected the result %out"):
        verify_equivalent(case.module, module)


def test_another_index(ring: Case):
    def edit(body: hlo_pb2.HloComputationProto) -> None:
        names = {i.name: i for i in body.instructions}
        names["f1.start"].operand_ids[1] = names["f0.start"].operand_ids[1]

    _, module = edited(ring, edit)
    with pytest.raises(
        VerificationError, match=r"%f1\.start, operand 1: expected what %i1 holds, found what %i0"
    ):
        verify_equivalent(ring.module, module)


def test_a_copy_that_was_to_go(ring: Case):
    assert any(loop.dropped_copies for loop in ring.loops)
    with pytest.raises(VerificationError):
        verify_loops(ring.module, ring.loops)


def test_a_copy_of_a_value_that_the_state_holds_twice():
    # Two elements of the state hold one weight: each needs bytes of its own.
    text = Ring(copied=True).text()
    text = text.replace("f32[8,8]{1,0}, f32[8,8]{1,0},", "f32[8,8]{1,0}, " * 3)
    text = text.replace("%copy1, %stack", "%new1, %copy1, %stack")
    text = text.replace("get-tuple-element(%s), index=3", "get-tuple-element(%s), index=4")
    text = text.replace("%slot0, %stack.0)", "%slot0, %slot2, %stack.0)")
    text = text.replace("  %init =", "  %slot2 = f32[8,8]{1,0} copy(%slot0)\n  %init =")
    module = module_of(text)
    loops = schedule_loops(module, MACHINE)
    assert all(not loop.dropped_copies for loop in loops)
    verify_equivalent(module, rewrite_loops(module, loops, MACHINE))
    verify_loops(rewrite_loops(module, loops, MACHINE), loops)


@pytest.mark.parametrize("change", [{"start": 0}, {"done": 0}, {"size": 1}, {"id": 7}])
def test_ticks_and_sizes_that_the_module_does_not_have(ring: Case, change: dict[str, int]):
    def wrong(loop: LoopSchedule) -> LoopSchedule:
        first, *rest = loop.transfers
        return replace(loop, transfers=(replace(first, **change), *rest))

    loops = tuple(wrong(loop) if loop.depth else loop for loop in ring.loops)
    with pytest.raises(VerificationError):
        verify_loops(ring.rewritten, loops)


def test_a_computation_that_nobody_scheduled(ring: Case):
    loops = tuple(loop for loop in ring.loops if loop.depth == 0)
    with pytest.raises(VerificationError, match=r"of transfer 0, mark: found 1\.0, expected 0\.0"):
        verify_loops(ring.rewritten, loops)


def test_one_that_is_not_there(ring: Case):
    loops = (replace(ring.loops[0], computation="nobody"),)
    with pytest.raises(VerificationError, match="schedules computation %nobody"):
        verify_loops(ring.rewritten, loops)


def is_allowed(case: Case, order: Sequence[str]) -> bool:
    """What the planner's own analysis says of an order."""
    loops, module = case.reordered(order)
    body = module.computations[case.body.id]
    before = dependences(analyze_dataflow(case.rewritten), case.body)
    place = {i.id: n for n, i in enumerate(body.instructions)}
    if any(place[n] > place[i] for i, needed in before.items() for n in needed):
        return False
    return bool(loops)


CASES = [Case(Ring(slots, stores, copied=True)) for slots in (2, 3) for stores in (False, True)]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(CASES), st.data())
def test_the_checker_and_the_planner_agree_on_every_order(case: Case, data: st.DataObject):
    order = case.order
    for _ in range(data.draw(st.integers(1, 3))):
        movable = [n for n in order if n not in ("s", "out")]
        name = data.draw(st.sampled_from(movable))
        k = order.index(name)
        target = data.draw(st.integers(max(1, k - 6), min(len(order) - 2, k + 6)))
        order.remove(name)
        order.insert(target, name)
    try:
        allowed = is_allowed(case, order)
    except MalformedModuleError:
        return  # An operand stands behind its reader: the module cannot even be read.
    try:
        case.check(order)
    except VerificationError:
        assert not allowed
    else:
        assert allowed
