"""Paths to transfers are cleared, copies go where they can, everything else stays."""

from __future__ import annotations

import pytest

from hlo_passes.analysis.dataflow import analyze_dataflow
from hlo_passes.analysis.dependences import dependences
from hlo_passes.ir import Computation, Module
from hlo_passes.loops.host_transfers import host_transfers
from hlo_passes.loops.order import clear_paths, drop_copies, droppable_copies
from tests.hlo_passes.rings import Ring, ring_machine
from tests.hlo_passes.toys import module_of

MACHINE = ring_machine(10.0)


def body_of(module: Module) -> Computation:
    return next(c for c in module.computations.values() if c.name == "body")


def cleared(module: Module) -> list[str]:
    body = body_of(module)
    transfers = host_transfers(module, MACHINE)[body.id]
    order = clear_paths(module, analyze_dataflow(module), body, transfers)
    return [module.instructions[i].name for i in order]


def test_an_index_leaves_early_and_a_view_comes_late():
    module = Ring(eager=True).module()
    order = cleared(module)
    at = {name: n for n, name in enumerate(order)}
    assert at["i1"] < at["y0"] < at["f0.start"]
    assert order[at["f0.start"] : at["y1"]] == ["f0.start", "f0.done", "w1"]
    assert order[-4:] == ["f1.start", "f1.done", "new1", "out"]
    assert sorted(order) == sorted(i.name for i in body_of(module).instructions)


def test_work_keeps_its_order():
    for ring in (Ring(3), Ring(4, stores=True), Ring(2, copied=True)):
        module = ring.module()
        work = [i.name for i in body_of(module).instructions if i.opcode == "dot"]
        assert [name for name in cleared(module) if name in work] == work


def test_copies_into_slots_go():
    module = Ring(slots=3, copied=True, eager=True).module()
    copies = droppable_copies(module, host_transfers(module, MACHINE))
    assert [c.name for c in copies] == ["copy1", "copy2"]
    without = drop_copies(module, copies)
    names = {i.name: i for i in body_of(without).instructions}
    assert "copy1" not in names
    assert names["new1"].id in names["out"].operand_ids
    assert drop_copies(module, ()) is module


def with_slot_read_early(ring: Ring, slot: int) -> Module:
    """What is fetched into a slot is read beside the value that it had."""
    text = ring.text()
    done, view, y0 = (
        next(line for line in text.splitlines() if f"%{name} =" in line)
        for name in (f"f{slot}.done", f"new{slot}", "y0")
    )
    text = text.replace(f"{done}\n", "").replace(f"{view}\n", "")
    early = [done, view, y0.replace("dot(%x,", f"dot(%new{slot},")]
    return module_of(text.replace(y0, "\n".join(early)))


def test_a_copy_of_what_is_read_beside_the_old_value_stays():
    module = with_slot_read_early(Ring(copied=True, eager=True), 1)
    assert droppable_copies(module, host_transfers(module, MACHINE)) == ()


@pytest.mark.parametrize("slot", [1, 2, 3, 4])
def test_the_copies_beside_one_that_stays_go(slot: int):
    module = with_slot_read_early(Ring(slots=5, copied=True, eager=True), slot)
    copies = droppable_copies(module, host_transfers(module, MACHINE))
    assert [c.name for c in copies] == [f"copy{n}" for n in range(1, 5) if n != slot]


def test_a_copy_that_has_to_wait_for_something_stays():
    """The checker would miss it: what XLA orders by hand is proven to be there still."""
    text = Ring(slots=3, copied=True, eager=True).text()
    copy = next(line for line in text.splitlines() if "%copy1 =" in line)
    module = module_of(text.replace(copy, f"{copy}, control-predecessors={{%y0}}"))
    copies = droppable_copies(module, host_transfers(module, MACHINE))
    assert [c.name for c in copies] == ["copy2"]


@pytest.mark.parametrize("stores", [False, True])
def test_a_slot_is_read_before_it_is_fetched_into(stores: bool):
    module = Ring(stores=stores).module()
    body = body_of(module)
    before = dependences(analyze_dataflow(module), body)
    ids = {i.name: i.id for i in body.instructions}
    assert ids["y0"] in before[ids["f1.start"]]
    assert ids["y0"] not in before[ids["f0.start"]]  # It has a slot of its own.
    if stores:
        # The last layer's output takes the place of what the first store reads.
        assert ids["p0.done"] in before[ids["y1"]]
        assert ids["p1.done"] not in before[ids["y1"]]
