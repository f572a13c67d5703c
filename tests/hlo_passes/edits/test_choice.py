"""What is evicted and recomputed: enough, no more than that, and at the right price."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlo_passes import pipeline, verify
from hlo_passes.edits.choice import Work, edited_lower_bound_s, least_edits
from hlo_passes.edits.gaps import Temporary, find_temporaries
from hlo_passes.edits.greedy import DEAREST, Terms
from hlo_passes.edits.search import EditSearch
from hlo_passes.hardware.machine import Machine
from hlo_passes.placing import problem
from hlo_passes.placing.problem import Problem
from hlo_passes.plan import Edits, Eviction, Recompute, Refetch
from hlo_passes.rewrite import edits
from tests import corpus
from tests.hlo_passes.edited import Edited, edited
from tests.hlo_passes.streamed import IDLE, SIZE, entry
from tests.hlo_passes.toys import link, toy_machine

# Rules of XLA:GPU: there small temporaries count like large ones.
FAST_LINK = toy_machine(
    platform="gpu",
    links=(
        link("host", "hbm", nominal_bytes_per_s=1e6),
        link("hbm", "host", nominal_bytes_per_s=1e6),
    ),
)
SLOW_LINK = toy_machine(
    platform="gpu",
    links=(
        link("host", "hbm", nominal_bytes_per_s=1e-3),
        link("hbm", "host", nominal_bytes_per_s=1e-3),
    ),
)
NO_LINK = toy_machine(platform="cpu")

SUM = """%sum (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %s = f32[] add(%p, %q)
}"""


def posed(text: str, machine: Machine, *computations: str) -> Problem:
    return problem.pose(entry(text, *computations), machine, ())


def peak(of: Problem) -> int:
    return int(of.arena.load.max())


def fastest(of: Problem, capacity: int) -> Edits:
    """The edits of the first choice."""
    return Work(of).edits(Work(of).choose(capacity)[0].selection)


def temporaries(of: Problem) -> dict[str, Temporary]:
    return {t.name: t for t in find_temporaries(of.ranges, of.ticks)}


# ── What there is to choose ──────────────────────────────────────────────────────────────


def test_a_temporary_knows_its_readers_and_what_it_is_made_of():
    found = temporaries(posed(IDLE, FAST_LINK))
    assert [r.tick for r in found["a"].reads] == [1, 4]
    assert [o.via for o in found["a"].operands or ()] == ["x"]
    assert [o.temporary for o in found["b"].operands or ()] == [found["a"].number]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("%a = f32[64]{0} rng(%zero, %one), distribution=rng_uniform", "random"),
        (
            '%a = f32[64]{0} custom-call(%x), custom_call_target="f", '
            "custom_call_has_side_effect=true",
            "effect",
        ),
        ("%a = f32[64]{0} all-reduce(%x), to_apply=%sum", "communication"),
    ],
)
def test_what_does_more_than_compute_is_not_run_again(line: str, why: str):
    scalars = "%zero = f32[] constant(0)\n%one = f32[] constant(1)\n"
    text = IDLE.replace("%a = f32[64]{0} negate(%x)", scalars + line)
    of = posed(text, NO_LINK, SUM)
    assert temporaries(of)["a"].operands is None, why
    assert not least_edits(of).recomputes


def test_what_is_updated_in_place_stays():
    text = IDLE.replace(
        "%e = f32[64]{0} multiply(%d, %a)",
        "%i = s32[] constant(0)\n%e = f32[64]{0} dynamic-update-slice(%a, %d, %i)",
    )
    assert "a" not in temporaries(posed(text, FAST_LINK))


# ── What is chosen ───────────────────────────────────────────────────────────────────────


def test_nothing_is_edited_where_everything_fits():
    of = posed(IDLE, FAST_LINK)
    assert not fastest(of, peak(of))


def test_a_fast_link_evicts():
    of = posed(IDLE, FAST_LINK)
    chosen = fastest(of, peak(of) - SIZE)
    assert chosen.evictions == (Eviction("a", "b", (Refetch("e", ("e",)),)),)
    assert not chosen.recomputes


@pytest.mark.parametrize("machine", [SLOW_LINK, NO_LINK])
def test_where_the_link_is_slow_or_missing_it_is_computed_again(machine: Machine):
    of = posed(IDLE, machine)
    chosen = fastest(of, peak(of) - SIZE)
    assert chosen.recomputes == (Recompute("a.again1", "a", "e", ("e",)),)
    assert not chosen.evictions


def test_the_fastest_choice_comes_first():
    of = posed(IDLE, SLOW_LINK)
    computed, moved = Work(of).choose(peak(of) - SIZE)
    assert computed.cost_s < moved.cost_s


def test_what_does_not_fit_is_refused():
    of = posed(IDLE, FAST_LINK)
    assert not Work(of).choose(SIZE - 1)


def test_a_late_bitcast_does_not_keep_the_original():
    """It names the bytes as long as it stands there, so it reads the copy itself."""
    text = IDLE.replace(
        "%e = f32[64]{0} multiply(%d, %a)",
        "%v = f32[64]{0} bitcast(%a)\n%e = f32[64]{0} multiply(%d, %v)",
    )
    of = posed(text, FAST_LINK)
    chosen = fastest(of, peak(of) - SIZE)
    assert chosen.evictions == (Eviction("a", "b", (Refetch("v", ("v",)),)),)


def test_an_early_bitcast_is_made_again():
    text = IDLE.replace(
        "%b = f32[64]{0} exponential(%a)",
        "%v = f32[64]{0} bitcast(%a)\n%b = f32[64]{0} exponential(%v)",
    ).replace("multiply(%d, %a)", "multiply(%d, %v)")
    of = posed(text, FAST_LINK)
    chosen = fastest(of, peak(of) - SIZE)
    (eviction,) = chosen.evictions
    assert eviction.refetches == (Refetch("e", ("v.again1",)),)
    assert chosen.recomputes == (Recompute("v.again1", "v", "e", ("e",)),)


TWO = """%two (p: f32[64]) -> (f32[64], f32[64]) {
  %p = f32[64]{0} parameter(0)
  %s = f32[64]{0} sine(%p)
  %c = f32[64]{0} cosine(%p)
  ROOT %t = (f32[64]{0}, f32[64]{0}) tuple(%s, %c)
}"""


def test_what_one_fusion_makes_is_made_again_together():
    of = posed(
        """
  %x = f32[64]{0} parameter(0)
  %f = (f32[64]{0}, f32[64]{0}) fusion(%x), kind=kLoop, calls=%two
  %g = f32[64]{0} get-tuple-element(%f), index=0
  %h = f32[64]{0} get-tuple-element(%f), index=1
  %a = f32[64]{0} add(%g, %h)
  %b = f32[192]{0} concatenate(%a, %a, %a), dimensions={0}
  %c = f32[64]{0} slice(%b), slice={[64:128]}
  %d = f32[64]{0} multiply(%c, %g)
  %e = f32[64]{0} multiply(%d, %h)
  ROOT %r = f32[1]{0} slice(%e), slice={[0:1]}
""",
        NO_LINK,
        TWO,
    )
    done = least_edits(of)
    clones = {(r.original, r.before) for r in done.recomputes}
    assert len(clones) == len(done.recomputes)  # At each tick the maker runs once for both.
    assert any(len(r.readers) == 2 for r in done.recomputes if r.original == "f")
    edited_module = edits.apply(of.module, done)
    verify.verify_equivalent(of.module, edited_module)
    assert peak(problem.pose(edited_module, NO_LINK, ())) < peak(of)


def test_what_else_a_fusion_makes_needs_room_where_its_reader_writes_over_an_operand():
    """%d lies in the bytes of %c, which are there in front of it already: nothing is free for the
    sine that comes with the cosine."""
    of = posed(
        """
  %x = f32[64]{0} parameter(0)
  %f = (f32[64]{0}, f32[64]{0}) fusion(%x), kind=kLoop, calls=%two
  %g = f32[64]{0} get-tuple-element(%f), index=0
  %h = f32[64]{0} get-tuple-element(%f), index=1
  %a = f32[64]{0} add(%g, %h)
  %b = f32[192]{0} concatenate(%a, %a, %a), dimensions={0}
  %c = f32[64]{0} slice(%b), slice={[64:128]}
  %d = f32[64]{0} multiply(%c, %h)
  ROOT %r = f32[1]{0} slice(%d), slice={[0:1]}
""",
        NO_LINK,
        TWO,
    )
    work = Work(of)
    taken = work.select(peak(of) - SIZE, Terms(DEAREST, math.inf, 1))
    again = problem.pose(edits.apply(of.module, work.edits(taken)), NO_LINK, ())
    assert "f.again1" in {i.name for i in again.ticks.instructions}
    assert (before_edits(of, again, Work(again).load) == taken.load).all()


def test_an_element_that_is_read_out_late_leaves_as_soon_as_it_is_made():
    of = posed(
        """
  %x = f32[64]{0} parameter(0)
  %f = (f32[64]{0}, f32[64]{0}) fusion(%x), kind=kLoop, calls=%two
  %g = f32[64]{0} get-tuple-element(%f), index=0
  %b = f32[192]{0} concatenate(%g, %g, %g), dimensions={0}
  %c = f32[64]{0} slice(%b), slice={[64:128]}
  %h = f32[64]{0} get-tuple-element(%f), index=1
  %d = f32[64]{0} multiply(%c, %h)
  ROOT %r = f32[1]{0} slice(%d), slice={[0:1]}
""",
        FAST_LINK,
        TWO,
    )
    work = Work(of)
    taken = work.select(0, Terms(DEAREST, math.inf, 0))
    done = work.edits(taken)
    assert Eviction("h", "h", (Refetch("d", ("d",)),)) in done.evictions
    module = edits.apply(of.module, done)
    by_name = {i.name: i for i in module.entry.instructions}
    names = list(by_name)
    assert names.index("f") < names.index("h") < names.index("h.evict-start") < names.index("b")
    verify.verify_equivalent(of.module, module)
    again = problem.pose(module, FAST_LINK, ())
    (leaving,) = (e for e in again.evictions if e.buffer == "h")
    assert leaving.free <= again.ticks.tick_of[by_name["b"].id]


MACHINES = st.sampled_from([FAST_LINK, SLOW_LINK])


def before_edits(posed: problem.Problem, edited: problem.Problem, excess: np.ndarray) -> np.ndarray:
    """Bytes at the ticks of a module from those of an edited one. What is new stands in front of
    what needs it."""
    at = {i.name: tick for tick, i in enumerate(posed.ticks.instructions)}
    found = np.zeros(posed.ticks.end, np.int64)
    tick = posed.ticks.end - 1
    for i, above in zip(reversed(edited.ticks.instructions), excess[::-1], strict=True):
        tick = at.get(i.name, tick)
        found[tick] = max(found[tick], above)
    return found


@given(edited(), MACHINES, st.floats(0, 1))
def test_edits_need_what_they_say_and_plans_with_them_hold(
    program: Edited, machine: Machine, share: float
):
    module = program.original
    of = problem.pose(module, machine, ())
    work = Work(of)
    least = peak(problem.pose(edits.apply(module, least_edits(of)), machine, ()))
    capacity = int(least + share * (work.load.max() - least))
    choices = work.choose(capacity)
    if not choices:
        return
    edited_module = edits.apply(module, work.edits(choices[0].selection))
    verify.verify_equivalent(module, edited_module)
    again = problem.pose(edited_module, machine, ())
    assert Work(again).load.max() <= capacity
    plan = pipeline.plan_module(module, machine, of.fixed_bytes + 4 * int(work.load.max()))
    assert plan.prediction.step_time_s >= plan.prediction.lower_bound_s * (1 - 1e-9)


@given(edited(), MACHINES, st.floats(0, 1))
def test_every_gap_that_is_taken_is_needed(program: Edited, machine: Machine, share: float):
    of = problem.pose(program.original, machine, ())
    work = Work(of)
    capacity = int(share * work.load.max())
    taken = work.select(capacity, Terms(1e-3, math.inf, 0))
    for t in work.temporaries:
        for start, gap in taken.by_temporary.get(t.number, {}).items():
            if gap.action == "evict" and start != max(r.tick for r in t.reads):
                assert taken.load[start + 1 : gap.end].max(initial=0) + t.size > capacity


@given(edited(), st.floats(0.3, 1))
def test_no_selection_undercuts_the_bound(program: Edited, share: float):
    of = problem.pose(program.original, FAST_LINK, ())
    work = Work(of)
    capacity = int(share * work.load.max())
    choices = work.choose(capacity)
    if not choices:
        return
    bound = edited_lower_bound_s(of, of.fixed_bytes + of.arena.base + capacity)
    search = EditSearch(work, capacity, None)
    assert all(bound <= c.cost_s * (1 + 1e-9) for c in search.rounded(0))
    improved = search.improved(choices[0].selection)
    assert bound <= improved.cost_s * (1 + 1e-9)
    # What is faster, or what is packed in fewer bytes.
    slower = improved.cost_s > choices[0].cost_s
    assert not slower or search.over(improved.selection) < search.over(choices[0].selection)
    again = search.improved(choices[0].selection)
    assert again.selection.gaps == improved.selection.gaps


@given(edited(), st.floats(0.3, 1))
def test_choices_differ_and_fit_and_the_fastest_comes_first(program: Edited, share: float):
    of = problem.pose(program.original, FAST_LINK, ())
    work = Work(of)
    capacity = int(share * work.load.max())
    reserve = np.where(np.arange(len(work.load)) % 2, capacity // 4, 0)
    choices = work.choose(capacity, reserve=reserve)
    assert len({c.selection.gaps for c in choices}) == len(choices)
    assert choices == sorted(choices, key=lambda c: c.cost_s)
    for choice in choices:
        edited_module = edits.apply(program.original, work.edits(choice.selection))
        load = problem.pose(edited_module, FAST_LINK, ()).arena.load
        assert (reserve <= choice.selection.load).all()
        assert choice.selection.load.max() <= capacity
        assert load.max() <= capacity


@given(edited(), st.sampled_from([1, 3, 16]), st.floats(0, 1))
def test_what_is_made_again_takes_no_more_than_was_counted(
    program: Edited, depth: int, share: float
):
    of = problem.pose(program.original, NO_LINK, ())
    work = Work(of)
    taken = work.select(int(share * work.load.max()), Terms(DEAREST, math.inf, depth))
    module = edits.apply(program.original, work.edits(taken))
    verify.verify_equivalent(program.original, module)
    again = problem.pose(module, NO_LINK, ())
    assert (before_edits(of, again, Work(again).load) <= taken.load).all()


@given(edited(), st.floats(0, 1), st.integers(0, 40))
def test_nothing_is_counted_that_is_not_written(program: Edited, share: float, times: int):
    """Clones of what was given back are gone, and what was held for them."""
    of = problem.pose(program.original, NO_LINK, ())
    work = Work(of)
    capacity = int(share * work.load.max())
    taken = work.select(capacity, Terms(DEAREST, math.inf, 16))
    terms = [(t.link_price, t.link_s) for t in work.terms()]
    taken.improve(capacity, capacity, terms, work.smallest, None, times)
    taken.give_back(max(capacity, int(taken.load.max())))
    again = problem.pose(edits.apply(program.original, work.edits(taken)), NO_LINK, ())
    assert taken.costs.sum() == pytest.approx(again.costs.sum())


def test_a_chain_that_is_made_again_counts_where_most_of_it_is_there():
    """d is made again in four steps: of what only those read, two are there at once, which is no
    more than d and g are afterwards."""
    of = posed(
        """
  %x = f32[64]{0} parameter(0)
  %a = f32[64]{0} exponential(%x)
  %b = f32[64]{0} sine(%a)
  %c = f32[64]{0} cosine(%b)
  %d = f32[64]{0} negate(%c)
  %e = f32[512]{0} concatenate(%d, %d, %d, %d, %d, %d, %d, %d), dimensions={0}
  %f = f32[64]{0} slice(%e), slice={[64:128]}
  %g = f32[64]{0} multiply(%f, %d)
  ROOT %r = f32[1]{0} slice(%g), slice={[0:1]}
""",
        NO_LINK,
    )
    work = Work(of)
    taken = work.select(peak(of) - SIZE, Terms(DEAREST, math.inf, 16))
    names = {work.temporaries[n].name for n in taken.by_temporary}
    assert names == {"a", "b", "c", "d"}
    added = taken.load - work.load
    assert added.tolist() == [0, 0, 0, 0, 0, -SIZE, 0, 0]


def test_what_waits_for_clones_alone_counts_with_them():
    """p is made again from w, which is 12 bytes more than its reader makes."""
    parts = ", ".join(["%w"] * 16)
    of = posed(
        f"""
  %x = f32[64]{{0}} parameter(0)
  %w = f32[4]{{0}} slice(%x), slice={{[0:4]}}
  %p = f32[64]{{0}} concatenate({parts}), dimensions={{0}}
  %e = f32[512]{{0}} concatenate(%p, %p, %p, %p, %p, %p, %p, %p), dimensions={{0}}
  %f = f32[64]{{0}} slice(%e), slice={{[64:128]}}
  %h = f32[1]{{0}} slice(%f), slice={{[0:1]}}
  %g = f32[1]{{0}} slice(%p), slice={{[0:1]}}
  ROOT %r = f32[1]{{0}} add(%h, %g)
""",
        NO_LINK,
    )
    work = Work(of)
    taken = work.select(peak(of) - SIZE // 2, Terms(DEAREST, math.inf, 16))
    added = taken.load - work.load
    w = SIZE // 16
    assert added.tolist() == [0, 0, w, w - SIZE, w - SIZE, w - 4, 0]


def test_what_is_made_again_for_a_clone_stays_for_the_program():
    """y is made again for d from n, then n too; e needs n later."""
    of = posed(
        """
  %x = f32[64]{0} parameter(0)
  %n = f32[64]{0} exponential(%x)
  %y = f32[64]{0} cosine(%n)
  %p = f32[64]{0} sine(%y)
  %b = f32[512]{0} concatenate(%p, %p, %p, %p, %p, %p, %p, %p), dimensions={0}
  %c = f32[64]{0} slice(%b), slice={[64:128]}
  %d = f32[64]{0} multiply(%c, %y)
  %e = f32[64]{0} multiply(%d, %n)
  ROOT %r = f32[1]{0} slice(%e), slice={[0:1]}
""",
        NO_LINK,
    )
    work = Work(of)
    taken = work.state(work.load)
    number = {t.name: t.number for t in work.temporaries}
    assert taken.recompute(number["y"], 2, 0, math.inf)
    assert taken.recompute(number["n"], 1, 0, math.inf)
    assert (taken.load - work.load).tolist() == [0, 0, -SIZE, -2 * SIZE, -2 * SIZE, 0, 0, 0]


@pytest.mark.parametrize("name", ["llama_train.cpu", "llama_train.h200", "mlp_grad.cpu"])
@pytest.mark.parametrize("share", [0.3, 0.5])
def test_the_peak_of_an_edited_training_step_is_known(name: str, share: float):
    of = problem.pose(corpus.read(name), NO_LINK, ())
    work = Work(of)
    taken = work.select(int(share * work.load.max()), Terms(DEAREST, math.inf, 16))
    assert len(taken.gaps) > 10
    again = Work(problem.pose(edits.apply(of.module, work.edits(taken)), NO_LINK, ()))
    # Buffers that XLA shares in other ways when there are clones are up to 1 % of it.
    assert 0.99 <= taken.load.max() / again.load.max() <= 1.05


def test_links_have_only_so_many_seconds_at_their_price():
    """Two values are idle; one can be away before the price is that of compute."""
    of = posed(
        """
  %x = f32[64]{0} parameter(0)
  %a = f32[64]{0} exponential(%x)
  %b = f32[64]{0} sine(%x)
  %c = f32[256]{0} concatenate(%a, %b, %a, %b), dimensions={0}
  %d = f32[64]{0} slice(%c), slice={[64:128]}
  %e = f32[64]{0} multiply(%d, %a)
  %f = f32[64]{0} multiply(%e, %b)
  %g = f32[256]{0} concatenate(%f, %f, %f, %f), dimensions={0}
  %h = f32[64]{0} slice(%g), slice={[64:128]}
  %i = f32[64]{0} multiply(%h, %a)
  %j = f32[64]{0} multiply(%i, %b)
  ROOT %r = f32[1]{0} slice(%j), slice={[0:1]}
""",
        toy_machine(platform="gpu"),
    )
    work = Work(of)
    once = work.posed.moving_s(SIZE)

    def actions(link_s: float) -> list[str]:
        taken = work.select(peak(of) - 2 * SIZE, Terms(1e-9, link_s, 16)).by_temporary
        return [t.action for gaps in taken.values() for t in gaps.values()]

    assert actions(math.inf).count("evict") > actions(once).count("evict") >= 1
    assert actions(once).count("recompute") > actions(math.inf).count("recompute")


def test_a_refused_recomputation_leaves_no_trace():
    """Its operand is overwritten before it could be read again."""
    text = """
  %x = f32[64]{0} parameter(0)
  %y = f32[64]{0} negate(%x)
  %a = f32[64]{0} exponential(%y)
  %b = f32[64]{0} sine(%a)
  %i = s32[] constant(0)
  %u = f32[64]{0} dynamic-update-slice(%y, %b, %i)
  %c = f32[64]{0} cosine(%u)
  %d = f32[64]{0} multiply(%c, %a)
  ROOT %r = f32[64]{0} add(%d, %x)
"""
    work = Work(posed(text, NO_LINK))
    number = next(t.number for t in work.temporaries if t.name == "a")
    taken = work.state(work.load)
    every = range(len(work.temporaries))
    before = taken.load.copy(), taken.costs.copy(), [taken.accesses(n) for n in every]
    starts = [s for s, e in pairwise(taken.accesses(number)) if e > s + 1]
    assert starts
    assert not any(taken.recompute(number, s, 0, float("inf")) for s in starts)
    assert (taken.load == before[0]).all()
    assert (taken.costs == before[1]).all()
    assert [taken.accesses(n) for n in every] == before[2]
    assert not taken.by_temporary
    assert not work.edits(taken)
