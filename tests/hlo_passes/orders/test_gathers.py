"""What is gathered from other devices comes late, and no later than hides it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlo_passes.hardware.machine import Interconnect, Machine
from hlo_passes.ir import Module
from hlo_passes.orders.gathers import gathered_late
from hlo_passes.plan import Edits
from hlo_passes.rewrite.edits import apply
from hlo_passes.simulator.timeline import scheduled_step
from hlo_passes.verify import verify_equivalent
from tests import corpus
from tests.hlo_passes.toys import module_of, toy_machine, two_fused_gathers


def wired(bytes_per_s: float) -> Machine:
    return toy_machine(interconnect=Interconnect("ici", bytes_per_s, 1.0, 0.0))


# A gather of 1,200 bytes takes 40 s, and what reads it 48.
MACHINE = wired(30.0)
PAIRS = "source_target_pairs={{0,1},{1,0}}"
GROUPS = "replica_groups={{0,1,2,3}}, dimensions={0}"


def layers(order: str, root: str, weights: int = 4) -> Module:
    """Adds gathered weights to `x`. In `order` a number is a layer's sum; `s`, `d` and `g` before
    one are the start and the done of its gather, or all of it, and `p` and `q` those of what is
    permuted."""
    said = order.split()
    lines = ["x = f32[400] parameter(0)"]
    lines += [f"w.{n} = f32[100] parameter({n + 1})" for n in range(weights)]
    for one in said:
        kind, n = one.rstrip("0123456789"), int(one.lstrip("sdgpq"))
        before = "x" if n == 0 else f"a.{n - 1}"
        gathered = f"d.{n}" if f"s{n}" in said else f"g.{n}"
        lines.append(
            {
                "s": f"s.{n} = (f32[100], f32[400]) all-gather-start(w.{n}), {GROUPS}",
                "d": f"d.{n} = f32[400] all-gather-done(s.{n})",
                "g": f"g.{n} = f32[400] all-gather(w.{n}), {GROUPS}",
                "p": f"p.{n} = (f32[400], f32[400]) collective-permute-start(x), {PAIRS}",
                "q": f"q.{n} = f32[400] collective-permute-done(p.{n})",
                "": f"a.{n} = f32[400] add({before}, {gathered})",
            }[kind]
        )
    lines.append(f"ROOT r = {root}")
    return module_of(
        "HloModule m, is_scheduled=true\n\nENTRY main {\n  " + "\n  ".join(lines) + "\n}\n"
    )


def late(module: Module, machine: Machine = MACHINE) -> str:
    """The order, in the words of `layers`."""
    names = gathered_late(module, machine)
    if names:
        verify_equivalent(module, apply(module, Edits(order=names)))
    return " ".join(name.replace(".", "").replace("a", "") for name in names[:-1])


def test_a_gather_that_is_waited_for_comes_right_before_its_reader():
    module = layers("g0 g1 g2 g3 0 1 2 3", "f32[400] negate(a.3)")
    assert late(module) == "g0 0 g1 1 g2 2 g3 3"


def test_the_order_of_gathers_is_that_of_their_readers():
    module = layers("g3 g1 g0 g2 0 1 2 3", "f32[400] negate(a.3)")
    assert late(module) == "g0 0 g1 1 g2 2 g3 3"


@pytest.mark.parametrize("bytes_per_s", [30.0, 20.0])
def test_an_asynchronous_one_begins_where_it_is_hidden_or_the_link_is_free(bytes_per_s: float):
    module = layers("s0 s1 s2 s3 d0 d1 d2 d3 0 1 2 3", "f32[400] negate(a.3)")
    assert late(module, wired(bytes_per_s)) == "s0 s1 d0 0 s2 d1 1 s3 d2 2 d3 3"


def test_it_begins_no_earlier_than_hides_it():
    # 15 s each, behind sums of 48: one that has two sums before its reader needs the last.
    module = layers("s0 s1 s2 s3 d0 d1 d2 d3 0 1 2 3", "f32[400] negate(a.3)")
    assert late(module, wired(80.0)) == "s0 s1 d0 0 s2 d1 1 s3 d2 2 d3 3"


def test_what_is_late_already_stays():
    module = layers("g0 0 g1 1", "f32[400] negate(a.1)", 2)
    assert gathered_late(module, MACHINE) == ()
    assert gathered_late(layers("g0 g1 0 1", "f32[400] negate(a.1)", 2), toy_machine()) == ()


@pytest.mark.parametrize("bytes_per_s", [30.0, 200.0])
def test_what_is_waited_for_comes_under_no_other_collective_and_out_of_none(bytes_per_s: float):
    into, out_of = "g0 g1 g2 0 p1 1 2 q1", "g0 p1 g1 g2 0 1 q1 2"
    negated = "f32[400] negate(a.2)"
    assert late(layers(into, negated, 3), wired(bytes_per_s)) == "g1 g2 g0 0 p1 1 2 q1"
    assert late(layers(out_of, negated, 3), wired(bytes_per_s)) == "g0 p1 g2 0 g1 1 q1 2"
    # Other gathers, which may come later themselves, are none.
    assert late(layers("s1 g0 g2 0 d1 1 2", negated, 3), wired(bytes_per_s)) == "s1 g0 0 d1 1 g2 2"
    asynchronous = late(layers("s0 d0 s1 0 p1 d1 1 q1", "f32[400] negate(a.1)", 2))
    assert asynchronous == "s0 s1 d0 0 p1 d1 1 q1"


def test_what_is_returned_comes_last():
    module = layers("g0 g1 0", "(f32[400], f32[400]) tuple(a.0, g.1)", 2)
    assert late(module) == "g0 0 g1"


def test_what_another_gather_reads_stays():
    chained = module_of(f"""HloModule m, is_scheduled=true

ENTRY main {{
  w = f32[25] parameter(0)
  x = f32[400] parameter(1)
  g.0 = f32[100] all-gather(w), {GROUPS}
  g.1 = f32[400] all-gather(g.0), {GROUPS}
  a.0 = f32[400] negate(x)
  ROOT r = f32[400] add(a.0, g.1)
}}
""")
    assert late(chained) == "g0 0 g1"


def test_a_donated_weight_is_gathered_before_it_is_written_over():
    module = module_of(f"""HloModule m, is_scheduled=true, input_output_alias={{ {{1}}: (1, {{}}) }}

ENTRY main {{
  x = f32[400] parameter(0)
  w = f32[100] parameter(1)
  g.0 = f32[400] all-gather(w), {GROUPS}
  a.0 = f32[400] negate(x)
  a.1 = f32[100] negate(w)
  a.2 = f32[400] add(a.0, g.0)
  ROOT r = (f32[400], f32[100]) tuple(a.2, a.1)
}}
""")
    assert late(module) == "0 g0 1 2"


def test_what_goes_on_in_fusions_stays():
    assert gathered_late(module_of(two_fused_gathers()), MACHINE) == ()
    for key in ("sharded_grad.v5e", "sharded_grad.h200"):
        module = corpus.read(key)
        names = gathered_late(module, replace(MACHINE, platform="gpu"))
        if names:
            verify_equivalent(module, apply(module, Edits(order=names)))


@st.composite
def drawn(draw: st.DrawFn) -> Module:
    """Layers with gathers anywhere before their sums, of one kind: those that are waited for do not
    occupy the interconnect on the clock, and others would seem hidden by them."""
    count = draw(st.integers(1, 7))
    kind = draw(st.sampled_from(["g", "sd"]))
    said: list[str] = []
    for n in range(count):
        for one in kind:
            least = said.index(f"s{n}") + 1 if one == "d" else 0
            said.insert(draw(st.integers(least, len(said))), f"{one}{n}")
        said.append(str(n))
    return layers(" ".join(said), f"f32[400] negate(a.{count - 1})", count)


@st.composite
def drawn_with_others(draw: st.DrawFn) -> Module:
    """Layers with gathers of both kinds, and others that are asynchronous, anywhere."""
    count = draw(st.integers(1, 7))
    said = [str(n) for n in range(count)]
    for n in range(count):
        end = said.index(str(n))
        for one in draw(st.sampled_from(["g", "ds"])):
            end = draw(st.integers(0, end))
            said.insert(end, f"{one}{n}")
    for n in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(said)))
        said.insert(draw(st.integers(start, len(said))), f"q{n}")
        said.insert(start, f"p{n}")
    return layers(" ".join(said), f"f32[400] negate(a.{count - 1})", count)


@settings(max_examples=300, deadline=None)
@given(drawn_with_others(), st.sampled_from([10.0, 25.0, 30.0, 50.0, 200.0]))
def test_what_hides_other_collectives_is_the_same(module: Module, bytes_per_s: float):
    late(module, wired(bytes_per_s))  # It is checked there.


@settings(max_examples=200, deadline=None)
@given(drawn(), st.sampled_from([10.0, 25.0, 30.0, 50.0, 200.0]))
def test_a_step_takes_no_longer_for_that(module: Module, bytes_per_s: float):
    machine = wired(bytes_per_s)
    names = gathered_late(module, machine)
    if names:
        moved = apply(module, Edits(order=names))
        verify_equivalent(module, moved)
        before, after = (scheduled_step(m, machine).step_time_s for m in (module, moved))
        assert after <= before * (1 + 1e-9)
