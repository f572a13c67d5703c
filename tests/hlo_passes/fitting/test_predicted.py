"""Transfers are those with which a selection's packing was predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hlo_passes.edits.choice import Work
from hlo_passes.edits.state import Fitted
from hlo_passes.fitting.predicted import as_predicted, first_ticks
from hlo_passes.fitting.solution import edited, placed
from hlo_passes.placing import placement
from hlo_passes.placing.problem import Problem
from hlo_passes.plan import LiveRange
from tests.hlo_passes.fitting.test_edits import SIZE, posed


@pytest.fixture
def chosen() -> tuple[Work, Fitted, Problem, int]:
    """A module with something taken, its transfers, the module with it, and a budget for it."""
    of = posed()
    work = Work(of)
    capacity = int(work.load.max()) - SIZE // 4
    (choice, *_) = work.choose(capacity)
    predicted = choice.selection.fitted(capacity, None)
    again = edited(of, work.edits(choice.selection))
    assert predicted.packed <= capacity
    assert again.evictions
    return work, predicted, again, of.fixed_bytes + of.arena.base + capacity


def test_what_is_scheduled_is_what_was_predicted(chosen: tuple[Work, Fitted, Problem, int]):
    work, predicted, again, budget = chosen
    found = as_predicted(predicted, work.temporaries, work.posed, again, budget)
    assert found is not None
    assert found.step_time_s == pytest.approx(predicted.cost_s)
    first = first_ticks(work.posed, again)
    names = [t.name for t in work.temporaries]
    starts = {(names[of], first[start]) for (of, _), start in predicted.starts}
    assert {(f.buffer, s) for f, s in zip(found.fetches, found.starts, strict=True)} == starts
    departures = dict(zip((e.buffer for e in again.evictions), found.departures, strict=True))
    for of, (start, done) in predicted.departures.items():
        assert departures[names[of]] == (first[start], first[done])


def test_what_does_not_fit_or_moves_otherwise_is_none(chosen: tuple[Work, Fitted, Problem, int]):
    work, predicted, again, budget = chosen
    none_leaves, none_comes = predicted._replace(departures={}), predicted._replace(starts=[])
    for of, bytes_ in ((none_leaves, budget), (none_comes, budget), (predicted, budget // 2)):
        assert as_predicted(of, work.temporaries, work.posed, again, bytes_) is None


def test_a_copy_that_is_kept_comes_once(chosen: tuple[Work, Fitted, Problem, int]):
    work, predicted, again, budget = chosen
    (movable, *others) = again.movables
    (first, *_) = movable.reads
    later = LiveRange(first.end + 1, first.end + 2)
    twice = replace(again, movables=(replace(movable, reads=(first, later)), *others))
    found = as_predicted(predicted, work.temporaries, work.posed, twice, 2 * budget)
    assert found is not None
    (kept,) = (f.reads for f in found.fetches if f.buffer == movable.buffer)
    assert kept == (first.start, later.end)


def test_what_ends_with_the_bytes_that_it_lies_in_leaves_until_then(
    chosen: tuple[Work, Fitted, Problem, int],
):
    work, predicted, again, budget = chosen
    late = {of: (start, done + 1) for of, (start, done) in predicted.departures.items()}
    predicted = predicted._replace(departures=late)
    held = as_predicted(predicted, work.temporaries, work.posed, again, budget)
    assert held is not None
    assert any(d.done > e.free for d, e in zip(held.departures, again.evictions, strict=True))
    apart = replace(again, evictions=tuple(replace(e, holder="") for e in again.evictions))
    found = as_predicted(predicted, work.temporaries, work.posed, apart, budget)
    assert found is not None
    assert [d.done for d in found.departures] == [e.free for e in apart.evictions]


def test_fetches_are_issued_in_the_order_of_their_readers():
    of = posed()
    work = Work(of)
    taken = next(work.lowest(0))
    again = edited(of, work.edits(taken))
    budget = of.fixed_bytes + of.arena.base + 2 * int(work.load.max())
    usual = placed(again, budget, None)
    assert isinstance(usual, placement.Choice)
    jobs = usual.fetches
    done = [usual.departures[job.eviction].done for job in jobs if job.eviction is not None]
    k = next(k for k in range(1, len(jobs)) if done[k] < jobs[k - 1].reads.start)
    reads = jobs[k - 1].reads.start
    starts = [*usual.starts[: k - 1], reads, 0, *usual.starts[k + 1 :]]
    found = placement.scheduled(again, budget, usual.departures, jobs, starts)
    assert found is not None
    assert found.starts[k - 1] == found.starts[k] == reads
