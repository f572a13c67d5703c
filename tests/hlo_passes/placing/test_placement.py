"""Placements against all placements there are, on problems of a few weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hlo_passes.fitting.fit as fitting
import hlo_passes.placing.placement as placement
from hlo_passes.analysis.sharing import Target
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.hardware.machine import Machine, Tier
from hlo_passes.ir import Module
from hlo_passes.memory.assignment import Packing
from hlo_passes.memory.usage import memory_usage
from hlo_passes.pipeline import plan_module
from hlo_passes.placing.arena import Arena
from hlo_passes.placing.budget_bound import budget_lower_bound_s
from hlo_passes.placing.prefetch import Fetch
from hlo_passes.placing.problem import Departure, Evicted, Problem, pose
from hlo_passes.plan import LiveRange, Transfer
from hlo_passes.simulator.timeline import plan_events, simulate
from tests.hlo_passes.toys import link, module_of, toy_machine

KIB = 1024

TPU = toy_machine(
    hbm_bytes_per_s=1e6,
    tiers=(Tier("hbm", 0, 1 << 30), Tier("host", 5, 1 << 30)),
    links=(link("host", "hbm", nominal_bytes_per_s=1e5, latency_s=1e-3), link("hbm", "host")),
)
GPU = replace(TPU, platform="gpu")
GPU_ALIGNMENT = 256


def problem(reads: list[tuple[int, int]], sizes: list[int], machine: Machine = GPU) -> Problem:
    """A chain of kernels: each reads the weight of that number, if there is one (−1: none),
    and so many KiB that are on the device besides. `sizes` are of the weights, in KiB."""
    lines = ["%x = f32[8]{0} parameter(0)"]
    lines += [
        f"%w{k} = f32[{size * KIB // 4}]{{0:S(5)}} parameter({k + 1})"
        for k, size in enumerate(sizes)
    ]
    lines += [
        f"%r{k} = f32[{max(1, rest) * KIB // 4}]{{0}} parameter({len(sizes) + k + 1})"
        for k, (_, rest) in enumerate(reads)
    ]
    for k, size in enumerate(sizes):
        shape = f"f32[{size * KIB // 4}]"
        lines.append(
            f"%go{k} = ({shape}{{0}}, {shape}{{0:S(5)}}, u32[]) copy-start(%w{k})\n"
            f"%here{k} = {shape}{{0}} copy-done(%go{k})"
        )
    x = "x"
    for k, (w, _) in enumerate(reads):
        operands = f"%{x}, %r{k}" + (f", %here{w}" if w >= 0 else "")
        root = "ROOT " if k == len(reads) - 1 else ""
        lines.append(f'{root}%a{k} = f32[8]{{0}} custom-call({operands}), custom_call_target="op"')
        x = f"a{k}"
    body = "\n".join(lines)
    return pose(
        module_of(f"HloModule toy, is_scheduled=true\n\nENTRY %main {{\n{body}\n}}\n"), machine, ()
    )


@st.composite
def problems(draw: st.DrawFn, most: int = 6) -> Problem:
    sizes = draw(st.lists(st.sampled_from([16, 32, 48, 96]), min_size=1, max_size=most))
    reads = [(k, draw(st.sampled_from([1, 100, 1000]))) for k in range(len(sizes))]
    for _ in range(draw(st.integers(0, 3))):
        w = draw(st.integers(-1, len(sizes) - 1))
        reads.insert(draw(st.integers(0, len(reads))), (w, draw(st.sampled_from([1, 500]))))
    return problem(reads, sizes, draw(st.sampled_from([TPU, GPU])))


def all_bytes(posed: Problem) -> int:
    """A budget that holds everything at once."""
    weights = sum(m.size + posed.arena.alignment for m in posed.movables)
    return (
        posed.fixed_bytes
        + posed.arena.base
        + int(posed.load.max())
        + weights
        + posed.arena.alignment
    )


def budgets(posed: Problem, share: float) -> int:
    least = placement.least_budget(posed)[0]
    return least + int((all_bytes(posed) - least) * share)


def best_of_all(posed: Problem, budget: int) -> float:
    """The least step time over all sets of weights that could stay."""
    sizes = {m.buffer: m.size for m in posed.movables}
    sets = chain.from_iterable(combinations(sizes, k) for k in range(len(sizes) + 1))
    found = (
        placement.stream_all(posed.staying(frozenset(stay)), budget - sum(sizes[s] for s in stay))
        for stay in sets
    )
    return min((c.step_time_s for c in found if c is not None), default=float("inf"))


@settings(max_examples=40)
@given(problems(), st.floats(0, 1))
def test_of_few_weights_the_best_sets_are_found(posed: Problem, share: float):
    budget = budgets(posed, share)
    best = best_of_all(posed, budget)
    choice = placement.choose_placement(posed, budget)
    if choice is None:
        assert best == float("inf")
        return
    # What is within a thousandth of the bound is good enough.
    assert best <= choice.step_time_s * (1 + 1e-9) <= 1.002 * best
    assert budget_lower_bound_s(posed, budget) <= best * (1 + 1e-9)


@settings(max_examples=40)
@given(problems(), st.floats(0, 1))
def test_of_many_weights_good_sets_are_found(posed: Problem, share: float):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "_FEW", 0)
        budget = budgets(posed, share)
        choice = placement.choose_placement(posed, budget)
    best = best_of_all(posed, budget)
    assert (choice is None) == (best == float("inf"))
    # Mostly the best; with two or three weights that fit, one can make much of a difference.
    assert choice is None or best <= choice.step_time_s * (1 + 1e-9) <= 1.5 * best


@given(problems(), st.integers(1, 64))
def test_where_packing_exceeds_the_budget_is_known(posed: Problem, missing: int):
    budget = placement.least_budget(posed)[0] - missing
    found = placement.fit_or_excess(posed, budget)
    if isinstance(found, placement.Choice):
        assert found.packing.total <= budget - posed.fixed_bytes
        return
    is_packed = budget >= placement.unpacked_budget(posed)
    assert found > 0 or not is_packed


@given(problems(), st.integers(1, 1000))
def test_the_excess_is_what_the_packing_takes_too_much(posed: Problem, shift: int):
    pack = Arena.pack

    def shifted(self: Arena, jobs: Sequence[Fetch], starts: Sequence[int]) -> Packing:
        packed = pack(self, jobs, starts)
        room = budget - posed.fixed_bytes
        higher = room + shift - packed.total
        return Packing(tuple(o + higher for o in packed.offsets), room + shift)

    budget = all_bytes(posed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arena, "pack", shifted)
        excess = placement.fit_or_excess(posed, budget)
    assert not isinstance(excess, placement.Choice)
    assert excess == shift


@given(problems(), st.floats(0, 1))
def test_the_search_predicts_what_the_timeline_does(posed: Problem, share: float):
    choice = placement.choose_placement(posed, budgets(posed, share))
    if choice is None:
        return
    transfers = [
        Transfer(i, f.buffer, "host", "hbm", f.size, start, f.reads.start, f.reads.end)
        for i, (f, start) in enumerate(zip(choice.fetches, choice.starts, strict=True))
    ]
    timeline = simulate(plan_events(posed.costs.tolist(), transfers), posed.machine)
    assert choice.step_time_s == pytest.approx(timeline.step_time_s, rel=1e-12)


@given(problems(most=10), st.lists(st.floats(0, 1), min_size=2, max_size=4))
def test_more_memory_is_no_slower(posed: Problem, shares: list[float]):
    previous = bound = float("inf")
    for share in sorted(shares):
        budget = budgets(posed, share)
        assert budget_lower_bound_s(posed, budget) <= bound * (1 + 1e-9)
        bound = budget_lower_bound_s(posed, budget)
        choice = placement.choose_placement(posed, budget)
        if choice is None:
            assert previous == float("inf")
            continue
        assert bound <= choice.step_time_s * (1 + 1e-9)
        assert choice.step_time_s <= 1.1 * previous
        previous = choice.step_time_s


@settings(max_examples=40)
@given(problems(most=10), st.floats(0, 1), st.sampled_from([None, 1, 2]))
def test_a_choice_is_a_plan_that_holds(posed: Problem, share: float, slots: int | None):
    budget = budgets(posed, share)
    choice = placement.choose_placement(posed, budget, slots)
    if choice is None:
        return
    staying = sum(m.size for m in posed.movables if m.buffer in choice.stay)
    assert posed.fixed_bytes + staying + choice.packing.total <= budget
    assert not choice.stay & {f.buffer for f in choice.fetches}
    if slots is not None:
        for f in choice.fetches:
            live = sum(
                s <= f.reads.start < g.reads.end
                for g, s in zip(choice.fetches, choice.starts, strict=True)
            )
            assert live <= slots


@pytest.mark.parametrize("told", [0.01, 0.5, 1, 3])
@pytest.mark.parametrize("packing", [1, 100_000, 5_000_000])
def test_the_least_budget_is_near_what_packing_needs(
    monkeypatch: pytest.MonkeyPatch, packing: int, told: float
):
    """However good a guess of it the excess is."""
    posed = problem([(0, 1), (1, 2)], [1 << 22, 1 << 21])
    unpacked = placement.unpacked_budget(posed)
    needed, fits = unpacked + packing, placement.stream_all(posed, 1 << 40)
    assert fits is not None

    def excess(_: Problem, budget: int, *_rest: object) -> placement.Choice | int:
        return fits if budget >= needed else int(told * (needed - budget))

    monkeypatch.setattr(placement, "fit_or_excess", excess)
    least, _ = placement.least_budget(posed)
    assert needed <= least <= needed + max(posed.arena.alignment, unpacked >> 10)


@pytest.mark.parametrize("space", ["", ":S(5)"])
def test_a_donated_argument_counts_wherever_its_result_is(space: str):
    text = f"""HloModule toy, is_scheduled=true, input_output_alias={{ {{}}: (0, {{}}) }}

ENTRY %main {{
  %x = f32[16]{{0}} parameter(0)
  ROOT %r = f32[16]{{0{space}}} copy(%x)
}}
"""
    assert pose(module_of(text), GPU, ()).fixed_bytes == 64


def test_everything_stays_where_there_is_room():
    posed = problem([(0, 1), (1, 1), (2, 1)], [16, 32, 96])
    choice = placement.choose_placement(posed, all_bytes(posed))
    assert choice is not None
    assert (choice.stay, choice.fetches) == (frozenset({"w0", "w1", "w2"}), ())
    assert choice.step_time_s == posed.clock[-1] == budget_lower_bound_s(posed, all_bytes(posed))


def test_what_nothing_hides_stays():
    """Only the first of three equal weights has no compute before it."""
    posed = problem([(0, 1), (-1, 1000), (1, 1), (-1, 1000), (2, 1)], [16, 16, 16])
    choice = placement.choose_placement(posed, placement.least_budget(posed)[0] + 16 * KIB)
    assert choice is not None
    assert choice.stay == {"w0"}
    assert choice.step_time_s == posed.clock[-1]


def test_a_weight_that_is_read_twice_is_dropped_in_between():
    """w0 and w1 do not fit at once; 1000 KiB of compute hide the second fetch of w0."""
    posed = problem([(0, 1), (-1, 1000), (1, 1), (-1, 1000), (0, 1)], [96, 96])
    choice = placement.stream_all(posed, placement.least_budget(posed)[0])
    assert choice is not None
    assert [f.buffer for f in choice.fetches] == ["w0", "w1", "w0"]
    kept = placement.stream_all(posed, all_bytes(posed))
    assert kept is not None
    assert len(kept.fetches) <= 3
    near = problem([(0, 1), (-1, 1), (0, 1)], [96])
    held = placement.stream_all(near, all_bytes(near))
    assert held is not None
    assert [f.reads for f in held.fetches] == [(0, 3)]


@settings(max_examples=40)
@given(problems(), st.sampled_from([None, 2]))
def test_the_least_budget_is_enough_and_little_more(posed: Problem, slots: int | None):
    least, tick = placement.least_budget(posed, slots)
    assert placement.choose_placement(posed, least, slots) is not None
    read = sum(m.size for m in posed.movables if any(r.start <= tick < r.end for r in m.reads))
    needed = posed.fixed_bytes + read + int(posed.load[tick])
    assert placement.choose_placement(posed, needed - 1, slots) is None
    # Packing takes the alignment of each buffer, gaps between them and, on TPU, the tables.
    rounding = posed.arena.alignment * (len(posed.movables) + len(posed.arena.temporaries) + 1)
    gaps = max(m.size for m in posed.movables)
    assert needed <= least <= needed + posed.arena.base + rounding + gaps


@settings(max_examples=40)
@given(problems())
def test_what_is_certain_is_no_more_than_the_least_budget(posed: Problem):
    certain = placement.certain_budget(posed)
    largest = max(m.size for m in posed.movables)
    assert posed.fixed_bytes + largest <= certain <= fitting.least_budget(posed, None)[0]


def one_after_another(*order: str, words: int = 90_000) -> Module:
    """u can lie in the result's bytes, and where it is not there yet, t can."""
    lines = {
        "u": "%u = f32[100000]{0} broadcast(%p), dimensions={}",
        "t": f"%t = f32[{words}]{{0}} broadcast(%p), dimensions={{}}",
        "s": '%s = f32[] custom-call(%t), custom_call_target="op"',
    }
    body = "\n  ".join(lines[name] for name in order)
    return module_of(f"""HloModule toy, is_scheduled=true

ENTRY %main {{
  %p = f32[] parameter(0)
  {body}
  ROOT %o = f32[100000]{{0}} clamp(%s, %u, %s)
}}
""")


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_what_another_order_packs_where_results_will_be_is_not_certain(
    platform: Target, monkeypatch: pytest.MonkeyPatch
):
    machine = replace(GPU, platform=platform)
    given, other = one_after_another(*"uts"), one_after_another(*"tsu")
    taken = [memory_usage(m, platform).total_bytes for m in (given, other)]
    assert taken[1] <= 400_008 < 760_000 < taken[0]
    assert placement.certain_budget(pose(given, machine, ())) <= taken[1]
    searched: list[int] = []

    def search(_: Problem, budget: int, __: int | None, **___: object) -> None:
        searched.append(budget)

    monkeypatch.setattr(fitting, "fit", search)
    with pytest.raises(MemoryBudgetError):
        plan_module(given, machine, taken[1] + GPU_ALIGNMENT)
    assert searched == [taken[1] + GPU_ALIGNMENT]


def test_what_is_larger_than_any_result_is_certain():
    posed = pose(one_after_another(*"uts", words=110_000), GPU, ())
    assert placement.certain_budget(posed) == posed.fixed_bytes + 440_000


def test_on_tpu_nothing_lies_where_results_will_be():
    posed = pose(one_after_another(*"uts"), TPU, ())
    both = 400_000 + 4  # u and s
    assert placement.certain_budget(posed) == posed.fixed_bytes + posed.arena.tables + both


def test_too_few_slots_are_no_matter_of_the_budget():
    posed = problem([(0, 1)], [16])
    assert placement.least_budget(posed, 0) == placement.least_budget(posed)


def test_a_budget_that_is_too_small_is_explained():
    posed = problem([(0, 1), (1, 1)], [16, 96])
    least = fitting.least_budget(posed, None)[0]
    with pytest.raises(MemoryBudgetError, match=rf"estimate of the least is hbm={least} "):
        plan_module(posed.module, posed.machine, least - GPU_ALIGNMENT)
    plan = plan_module(posed.module, posed.machine, least)
    # The plan does not count what XLA holds for each of the two copies under way.
    assert least - 3 * GPU_ALIGNMENT < plan.prediction.total_bytes <= least


def test_one_weight_of_several_sizes_sets_the_bound():
    """Either the largest stays, or it is streamed and the room for it is not for others.

    Of 144 KiB with room for 96: w0 (96 KiB) stays and 48 KiB cross, through no arena at all:
    impossible; with the 48 KiB beside it 96 cross.
    """
    posed = problem([(0, 1), (1, 1)], [96, 48])
    room = posed.fixed_bytes + posed.arena.tables + int(posed.load.min()) + 96 * KIB
    rate = posed.link.bytes_per_s
    assert budget_lower_bound_s(posed, room) >= 96 * KIB / rate


@pytest.mark.parametrize("reads", [[0], [2], [5, 5]])
def test_step_seconds_by_hand(reads: list[int]):
    """10 KiB at 1e5 bytes/s and a latency of 1 ms; what the last reader cannot hide stalls."""
    posed = problem([(-1, 1)] * 6, [])
    jobs = [Fetch("w", 10 * KIB, LiveRange(tick, tick + 1)) for tick in reads]
    arrived = 1e-3 + len(reads) * 10 * KIB / 1e5
    expected = posed.clock[-1] + arrived - posed.clock[reads[-1]]
    assert placement.step_seconds(posed, jobs, [0] * len(reads)) == pytest.approx(expected)


@given(
    st.lists(st.tuples(st.integers(-1, 5), st.integers(1, 100)), min_size=2, max_size=12),
    st.lists(st.integers(1, 60), min_size=6, max_size=6),
    st.integers(0, 400),
)
def test_starts_are_late_at_no_cost(
    reads: list[tuple[int, int]], sizes: list[int], more: int
) -> None:
    posed = problem(reads, sizes)
    choice = placement.stream_all(posed, placement.least_budget(posed)[0] + more * KIB)
    assert choice is not None
    late = placement.started_late(posed, choice)
    assert list(late.starts) == sorted(late.starts)
    assert all(start <= then for start, then in zip(choice.starts, late.starts, strict=True))
    assert placement.step_seconds(posed, late.fetches, late.starts) == pytest.approx(
        placement.step_seconds(posed, choice.fetches, choice.starts)
    )


def test_a_start_waits_while_the_link_is_busy():
    """Three fetches of 102 ms each, issued at once; a kernel takes 10 ms."""
    posed = problem([(-1, 10)] * 40, [])
    jobs = tuple(Fetch("w", 10 * KIB, LiveRange(tick, tick + 1)) for tick in (37, 38, 39))
    starts = (0, 0, 0)
    step_s = placement.step_seconds(posed, jobs, starts)
    choice = placement.Choice(frozenset(), jobs, starts, (), step_s, Packing((), 0), 0.0)
    first, second, third = placement.started_late(posed, choice).starts
    per_tick = float(posed.clock[1])
    assert first == 0
    assert second == int(10 * KIB / 1e5 / per_tick)
    assert third == int(2 * 10 * KIB / 1e5 / per_tick)


def test_a_start_stands_in_front_of_the_wait_for_an_eviction():
    """Two fetches of 102 ms each. The link can begin with the second at a tick at which an eviction
    of 200 ms is waited for."""
    posed = problem([(-1, 10)] * 40, [])
    jobs = tuple(Fetch("w", 10 * KIB, LiveRange(tick, tick + 1)) for tick in (37, 38))
    tick = int(10 * KIB / 1e5 / float(posed.clock[1]))
    posed = replace(posed, evictions=(Evicted("t", 2, 0, 1, "t"),))

    def second(done: int) -> int:
        departures = (Departure(0, done),)
        choice = placement.Choice(frozenset(), jobs, (0, 0), departures, 0.0, Packing((), 0), 0.0)
        return placement.started_late(posed, choice).starts[1]

    assert second(done=tick + 1) == tick
    assert second(done=tick) == tick - 1


def test_what_stays_is_looked_for_as_where_state_is_no_candidate():
    posed = problem([(k, 1) for k in range(12)], [64] * 12, GPU)
    budget = placement.least_budget(posed)[0] + 6 * 64 * KIB
    state, weights = posed.movables[:3], posed.movables[3:]
    plain = replace(posed, movables=weights).staying(frozenset())
    given = replace(posed, movables=(*(replace(m, store=k) for k, m in enumerate(state)), *weights))
    names = frozenset(m.buffer for m in state)
    size = sum(m.size for m in state)
    found = set(placement._candidates(given, budget))
    assert {names | stay for stay in placement._candidates(plain, budget - size)} <= found


def test_what_is_stored_last_stays_where_fetches_of_others_go_on():
    both_ways = [link(*way, nominal_bytes_per_s=1e5) for way in (("host", "hbm"), ("hbm", "host"))]
    posed = problem([(k, 1) for k in range(12)], [64] * 12, replace(GPU, links=tuple(both_ways)))
    budget = placement.least_budget(posed)[0] + 5 * 64 * KIB
    plain = placement.choose_placement(posed, budget)
    pairs = [(m, posed.movables[k + 1]) for k, m in enumerate(posed.movables) if k % 2 == 0]
    movables = [m for k, (a, b) in enumerate(pairs) for m in (replace(a, store=k), b)]
    stores = [
        Evicted(f"new{k}", a.size, a.reads[0].end, a.reads[0].end, "", returned=posed.ticks.end)
        for k, (a, _) in enumerate(pairs)
    ]
    posed = replace(posed, movables=tuple(movables), evictions=tuple(stores))
    stored = placement.choose_placement(posed, budget)
    assert plain is not None
    assert stored is not None
    assert "w10" not in plain.stay
    assert "w10" in stored.stay
