"""What is converted, which layouts of arguments save it, and what remains for whom."""

from __future__ import annotations

import dataclasses
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlo_passes.ir import Module
from hlo_passes.layouts.choice import choose_orders, conversions
from hlo_passes.layouts.flow import LayoutFlow, Link, Site, layout_flow
from hlo_passes.layouts.maps import Order, order_of
from hlo_passes.layouts.plan import LayoutPlan, conversion_bytes, converted, plan_layouts
from hlo_passes.layouts.relayouts import relayouts
from hlo_passes.reading.reader import read_module

BYTES = 4 * 8 * 16
W = "f32[8,16]"


def module(body: str, called: str = "") -> Module:
    return read_module(f"HloModule m, is_scheduled=true\n{called}\nENTRY e {{\n{body}\n}}\n")


def dot(a: str, b: str) -> str:
    contracted = "lhs_contracting_dims={0}, rhs_contracting_dims={0}"
    return f"  ROOT d = f32[16,16]{{1,0}} dot({a}, {b}), {contracted}"


ONE_WEIGHT = f"""
  w = {W}{{1,0}} parameter(0)
  x = {W}{{1,0}} parameter(1)
  c = {W}{{0,1}} copy(w)
{dot("c", "x")}
"""


def planned(m: Module, *free: int) -> LayoutPlan:
    return plan_layouts(m, free)


def test_a_weight_is_stored_as_it_is_read():
    plan = planned(module(ONE_WEIGHT), 0)
    assert plan.parameters == {0: (0, 1)}
    assert (plan.bytes_before, plan.bytes_after, plan.remaining) == (2 * BYTES, 0, ())


def test_what_is_not_free_stays_and_says_why():
    plan = planned(module(ONE_WEIGHT), 1)
    assert not plan.parameters
    (only,) = plan.remaining
    assert (only.instruction.name, only.reader.name, only.size) == ("w", "c", 2 * BYTES)
    assert only.given is not None
    assert only.taken is not None
    assert (only.given.instruction.name, only.given.order) == ("w", (1, 0))
    assert (only.taken.instruction.name, only.taken.order) == ("d", (0, 1))


def test_without_conversions_nothing_changes():
    text = f"  w = {W}{{0,1}} parameter(0)\n  x = {W}{{1,0}} parameter(1)\n{dot('w', 'x')}"
    plan = planned(module(text), 0, 1)
    assert (plan.parameters, plan.bytes_before, plan.bound) == ({}, 0, 0)


def test_two_readers_who_disagree_keep_one_conversion():
    plan = planned(
        module(f"""
  w = {W}{{1,0}} parameter(0)
  c = {W}{{0,1}} copy(w)
{dot("c", "w")}
"""),
        0,
    )
    assert (plan.bytes_before, plan.bytes_after) == (2 * BYTES, 2 * BYTES)
    assert not plan.parameters
    assert plan.bound == pytest.approx(2 * BYTES, rel=1e-3)


def test_elementwise_work_takes_any_order():
    plan = planned(
        module(f"""
  w = {W}{{1,0}} parameter(0)
  x = {W}{{1,0}} parameter(1)
  s = {W}{{1,0}} add(w, x)
  n = {W}{{1,0}} negate(s)
  c = {W}{{0,1}} copy(n)
{dot("c", "c")}
"""),
        0,
        1,
    )
    assert plan.parameters == {0: (0, 1), 1: (0, 1)}
    assert plan.bytes_after == 0


def test_a_conversion_moves_to_the_smallest_array():
    """One of two operands is given: their product is converted, as it is, not both."""
    plan = planned(
        module(f"""
  w = {W}{{1,0}} parameter(0)
  t = f32[16,8]{{1,0}} transpose(w), dimensions={{1,0}}
  n = f32[16,8]{{1,0}} negate(t)
  ROOT d = f32[8,8]{{1,0}} dot(n, n), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
"""),
        0,
    )
    # Row-major [16, 8] is [8, 16] with its dimension 1 outermost.
    assert plan.parameters == {0: (0, 1)}
    assert plan.bytes_after == 0


LOOP = """
cond {
  a = (s32[], f32[4,8,16]{2,1,0}, f32[16,16]{1,0}) parameter(0)
  i = s32[] get-tuple-element(a), index=0
  n = s32[] constant(4)
  ROOT less = pred[] compare(i, n), direction=LT
}
moved {
  at = s32[] parameter(0)
  p = f32[4,8,16]{2,1,0} parameter(1)
  zero = s32[] constant(0)
  s = f32[1,8,16]{2,1,0} dynamic-slice(p, at, zero, zero), dynamic_slice_sizes={1,8,16}
  b = f32[8,16]{1,0} bitcast(s)
  ROOT t = f32[16,8]{1,0} transpose(b), dimensions={1,0}
}
body {
  a = (s32[], f32[4,8,16]{2,1,0}, f32[16,16]{1,0}) parameter(0)
  i = s32[] get-tuple-element(a), index=0
  w = f32[4,8,16]{2,1,0} get-tuple-element(a), index=1
  x = f32[16,16]{1,0} get-tuple-element(a), index=2
  m = f32[16,8]{1,0} fusion(i, w), kind=kLoop, calls=moved
  d = f32[16,16]{1,0} dot(m, m), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  one = s32[] constant(1)
  j = s32[] add(i, one)
  ROOT r = (s32[], f32[4,8,16]{2,1,0}, f32[16,16]{1,0}) tuple(j, w, d)
}
"""
LOOP_ENTRY = """
  w = f32[4,8,16]{2,1,0} parameter(0)
  x = f32[16,16]{1,0} parameter(1)
  zero = s32[] constant(0)
  init = (s32[], f32[4,8,16]{2,1,0}, f32[16,16]{1,0}) tuple(zero, w, x)
  loop = (s32[], f32[4,8,16]{2,1,0}, f32[16,16]{1,0}) while(init), condition=cond, body=body
  ROOT out = f32[16,16]{1,0} get-tuple-element(loop), index=2
"""


def test_a_stack_is_stored_as_its_slices_are_read():
    """What XLA does not do by itself: a transpose in the body becomes an order of the stack."""
    plan = planned(module(LOOP_ENTRY, LOOP), 0)
    assert plan.bytes_before == 4 * 2 * BYTES  # A slice in each of four iterations.
    assert plan.parameters == {0: (1, 2, 0)}
    assert plan.bytes_after == 0


def test_what_a_loop_hands_on_is_converted_as_often_as_it_runs():
    """x comes from the body in rows, and is carried in columns."""
    called = LOOP.replace("d = f32[16,16]{1,0} dot", "c = f32[16,16]{1,0} dot").replace(
        "  one = ", "  d = f32[16,16]{0,1} copy(c)\n  one = "
    )
    carried = "f32[16,16]{0,1}"
    called = called.replace(", f32[16,16]{1,0})", f", {carried})").replace(
        "x = f32[16,16]{1,0} get", f"x = {carried} get"
    )
    entry = LOOP_ENTRY.replace("f32[16,16]{1,0}", carried)
    plan = planned(module(entry, called), 1)
    moved = [c for c in converted(module(entry, called)) if c.reader.name == "d"]
    assert [c.size for c in moved] == [4 * 2 * 4 * 16 * 16]
    assert plan.bytes_before == 4 * 2 * BYTES + moved[0].size


DONATION = ", input_output_alias={ {}: (0, {}, may-alias) }"
STEP = f"""HloModule m, is_scheduled=true{DONATION}
ENTRY e {{
  w = {W}{{1,0}} parameter(0)
  x = f32[8,8]{{1,0}} parameter(1)
  c = {W}{{0,1}} copy(w)
  d = {W}{{0,1}} dot(x, c), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  n = {W}{{0,1}} add(c, d)
  ROOT r = {W}{{1,0}} copy(n)
}}
"""


def test_a_donated_argument_and_its_result_stay_alike():
    free = plan_layouts(read_module(STEP), [0], [0])
    assert free.parameters == {0: (0, 1)}
    assert free.results == {0: (0, 1)}
    # The result is given, and so is what it replaces; of what is not donated it is not.
    assert not plan_layouts(read_module(STEP), [0]).parameters
    kept = read_module(STEP.replace(DONATION, ""))
    assert plan_layouts(kept, [0]).parameters == {0: (0, 1)}


def test_a_loop_carries_one_order():
    """What the body gives comes back as what it takes: to save the copy of the one would make
    another of the other."""
    called = LOOP.replace("d = f32[16,16]{1,0} dot", "c = f32[16,16]{0,1} dot").replace(
        "  one = ",
        "  d = f32[16,16]{1,0} copy(c)\n"
        "  e = f32[16,16]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={1}\n"
        "  one = ",
    )
    plan = plan_layouts(module(LOOP_ENTRY, called), [0, 1], [0])
    assert [c.reader.name for c in plan.remaining] == ["d"]


def test_within_a_kernel_that_computes_an_order_may_change():
    """What it reads in columns it could as well read in rows: it moves the bytes anyway."""
    plan = planned(
        module(
            f"""
  w = {W}{{1,0}} parameter(0)
  c = {W}{{0,1}} copy(w)
  f = f32[16,8]{{0,1}} fusion(c), kind=kLoop, calls=turned
  a = f32[8,8]{{1,0}} dot(f, f), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
  b = f32[8,8]{{1,0}} dot(w, w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  ROOT r = f32[8,8]{{1,0}} add(a, b)
""",
            f"""
turned {{
  p = {W}{{0,1}} parameter(0)
  t = f32[16,8]{{0,1}} transpose(p), dimensions={{1,0}}
  ROOT n = f32[16,8]{{0,1}} negate(t)
}}
""",
        )
    )
    assert (plan.bytes_before, plan.bytes_after) == (2 * BYTES, 0)


def test_a_kernel_that_reads_two_orders_converts_nothing():
    text = f"""
  w = {W}{{1,0}} parameter(0)
  x = {W}{{0,1}} parameter(1)
  ROOT f = {W}{{1,0}} fusion(w, x), kind=kLoop, calls=mixed
"""
    called = f"""
mixed {{
  p = {W}{{1,0}} parameter(0)
  q = {W}{{0,1}} parameter(1)
  ROOT a = {W}{{1,0}} add(p, q)
}}
"""
    plan = planned(module(text, called), 0, 1)
    assert (plan.parameters, plan.bytes_before) == ({}, 0)


def test_who_gives_an_order_is_found_behind_what_hands_it_on():
    (only,) = converted(
        module(f"""
  w = {W}{{1,0}} parameter(0)
  x = {W}{{1,0}} parameter(1)
  n = {W}{{1,0}} negate(w)
  c = {W}{{0,1}} copy(n)
  s = {W}{{0,1}} sine(c)
{dot("s", "x")}
""")
    )
    assert (only.instruction.name, only.reader.name) == ("n", "c")
    assert only.given is not None
    assert only.taken is not None
    assert (only.given.instruction.name, only.taken.instruction.name) == ("w", "d")
    assert only.argument is None  # What was computed from one is none.


def test_tiles_of_a_tpu_are_not_torn():
    """[64, 12, 128] in tiles of 8 x 128 is no view of [768, 128]: an order is not handed on."""
    text = """
  w = f32[64,12,128]{2,1,0:T(8,128)} parameter(0)
  r = f32[768,128]{1,0:T(8,128)} reshape(w)
  c = f32[768,128]{0,1:T(8,128)} copy(r)
  ROOT d = f32[768,768]{1,0:T(8,128)} dot(c, c), lhs_contracting_dims={1}, rhs_contracting_dims={1}
"""
    assert not planned(module(text), 0).parameters


@pytest.mark.parametrize("m", [module(ONE_WEIGHT), module(LOOP_ENTRY, LOOP)])
def test_two_ways_to_count_agree(m: Module):
    """By reads whose orders differ, and by the traffic of what only moves."""
    moved = sum(r.moved_bytes for r in relayouts(m) if r.kind != "copy")
    assert moved > 0
    assert conversion_bytes(m) == pytest.approx(moved, rel=0.01)  # Traffic has the index, too.


# --- the choice is the best there is ---------------------------------------------------------


@st.composite
def flows(draw: st.DrawFn) -> LayoutFlow:
    """Random graphs of small arrays: a few sites, some fixed, reads and ties in between."""
    n = draw(st.integers(2, 5))
    base = module(f"  ROOT p = f32[{draw(st.sampled_from(['2,3', '2,3,5']))}] parameter(0)")
    shape = base.entry.root.shape
    every = list(permutations(range(len(shape.dimensions))))
    flow = LayoutFlow()
    for k in range(n):
        order = draw(st.sampled_from(every))
        layout = dataclasses.replace(shape.layout, minor_to_major=order)
        extent = draw(st.integers(1, 9))
        sized = dataclasses.replace(shape, layout=layout, byte_size=shape.byte_size * extent)
        flow.shapes[Site(k)] = sized
        flow.executions[Site(k)] = draw(st.integers(1, 3))
        if draw(st.booleans()):
            flow.fixed.add(Site(k))
    (link,) = layout_flow(
        module(f"  p = {shape} parameter(0)\n  ROOT n = {shape} negate(p)"), [0], [0]
    ).links
    for _ in range(draw(st.integers(1, 7))):
        a, b = draw(st.integers(0, n - 1)), draw(st.integers(0, n - 1))
        if a != b:
            tie = draw(st.booleans())
            flow.links.append(Link(Site(a), Site(b), link.maps, 0, tie))
    return flow


def least(flow: LayoutFlow) -> int:
    """Over all orders of all sites that keep what is fixed and tied."""
    observed = {s: order_of(shape) for s, shape in flow.shapes.items()}
    fixed = set(flow.fixed)
    ties = [link for link in flow.links if link.is_tie]
    for link in [t for t in ties if observed[t.before] != observed[t.after]]:
        fixed |= {link.before, link.after}
        ties.remove(link)
    labels: list[Order] = sorted(set(observed.values()))
    best = None
    for orders in product(*([observed[s]] if s in fixed else labels for s in flow.shapes)):
        chosen = dict(zip(flow.shapes, orders, strict=True))
        if any(chosen[t.before] != chosen[t.after] for t in ties):
            continue
        cost = sum(c.size for c in conversions(flow, chosen))
        best = cost if best is None else min(best, cost)
    assert best is not None
    return best


@settings(max_examples=60)
@given(flows())
def test_no_orders_convert_less(flow: LayoutFlow):
    choice = choose_orders(flow)
    observed = {s: order_of(shape) for s, shape in flow.shapes.items()}
    assert all(choice.orders[s] == observed[s] for s in flow.fixed)
    found, best = sum(c.size for c in conversions(flow, choice.orders)), least(flow)
    assert found == best
    assert choice.bound <= best + 1e-6
