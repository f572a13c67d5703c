"""Memory over a step: as it is where it is short, the most of each stretch where it is long."""

import pytest

from experiments import over_time
from experiments.over_time import EXPERIMENT, measure
from hlo_passes.reading.reader import read_module
from memplan.report.build import view_run

# 1 KiB an array: the argument, what dies at once, and the result.
SHORT = read_module("""HloModule m, is_scheduled=true
ENTRY e {
  p = f32[256]{0} parameter(0)
  a = f32[256]{0} sine(p)
  b = f32[256]{0} cosine(a)
  c = f32[256]{0} tanh(b)
  ROOT d = f32[256]{0} exponential(c)
}
""")


def test_a_short_step_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch):
    run = view_run("run", SHORT)
    device = run.tiers[0]
    found = measure(run)
    assert (found["name"], found["instructions"]) == ("run", device.end)
    assert len(found["bytes"]) == device.end
    assert max(found["bytes"]) == device.peak_bytes
    for time, held in zip(device.times, device.totals, strict=True):
        assert time >= device.end or found["bytes"][time] == held
    monkeypatch.setattr(over_time, "_STRETCHES", 1)
    assert measure(run)["bytes"] == [device.peak_bytes]


def test_each_run_is_a_line():
    row = {"workload": "w", "target": "t", "runs": [measure(view_run("run", SHORT))] * 2}
    (table,) = EXPERIMENT.tables([row])
    assert [cells[0] for cells in table.rows] == ["run", "run"]
    assert EXPERIMENT.plot is not None
    (axes,) = EXPERIMENT.plot([row]).axes
    assert len(axes.lines) == 2
