"""How far choices are searched for."""

from __future__ import annotations

import pytest

from hlo_passes.edits import search
from hlo_passes.edits.choice import work_on
from hlo_passes.edits.search import EditSearch
from tests.hlo_passes.fitting.test_edits import SIZE, posed


def test_a_module_that_is_too_large_for_a_search_keeps_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
):
    work = work_on(posed())
    (slow, *_) = work.lowest(0)
    capacity = int(work.load.max()) - SIZE // 4
    searched = EditSearch(work, capacity, None).improved(slow)
    assert searched.step_time_s < slow.step_seconds(capacity, None)
    monkeypatch.setattr(search, "_TICKS", 1)
    assert EditSearch(work, capacity, None).improved(slow).taken.all == slow.all
