"""How far choices are searched for."""

from __future__ import annotations

import pytest

from hlo_passes.edits import search
from hlo_passes.edits.choice import work_on
from hlo_passes.edits.search import EditSearch
from hlo_passes.hardware.machine import load_machine
from hlo_passes.placing import problem
from tests import corpus
from tests.hlo_passes.fitting.test_edits import SIZE, posed


def test_a_module_that_is_too_large_for_a_search_keeps_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
):
    work = work_on(posed())
    (slow, *_) = work.lowest(0)
    capacity = int(work.load.max()) - SIZE // 4
    searched = EditSearch(work, capacity, None).improved(slow)
    assert searched.cost_s < slow.cost_s(capacity, None)
    monkeypatch.setattr(search, "_TICKS", 1)
    assert EditSearch(work, capacity, None).improved(slow).selection.gaps == slow.gaps


@pytest.mark.parametrize(("target", "share"), [("v5e", 0.35), ("h200", 0.6)])
def test_what_is_packed_within_the_capacity_is_not_given_up(target: str, share: float):
    """Faster ones are, as far as it is predicted, packed above it."""
    work = work_on(problem.pose(corpus.read(f"llama_train.{target}"), load_machine(target), ()))
    capacity = int(share * work.load.max())
    searching = EditSearch(work, capacity, None)
    fits = [taken for taken in work.lowest(0) if searching.over(taken) <= 0]
    assert fits
    for taken in fits:
        found = searching.improved(taken)
        assert found.cost_s < taken.cost_s(capacity, None)
        assert found.cost_s == found.selection.fitted(capacity, None).cost_s
        assert searching.over(found.selection) <= 0
