"""The demo, with a model small enough for a test."""

import json
import logging
from contextlib import nullcontext

import pytest

from memplan import demo
from memplan.topologies import topology

TINY = demo.Workload("decode", "tiny", 2, 1, 16, "200KiB")


@pytest.mark.gpu
@pytest.mark.slow
def test_tables_come_one_by_one(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "SHORT", {TINY: ("h200",)})
    demo.main()
    said = capsys.readouterr()
    assert [line[:5] for line in said.err.splitlines()] == ["[1/3]", "[2/3]", "[3/3]"]
    assert said.out.startswith("Run on this CPU: tiny prefill")
    assert "h200    memplan" in said.out
    assert (tmp_path / "memplan-demo" / "h200-tiny-decode.html").exists()


@pytest.mark.parametrize("fails", [False, True])
def test_the_log_is_as_it_was(fails: bool, monkeypatch: pytest.MonkeyPatch):
    log, levels = logging.getLogger("memplan"), list[int]()

    def run(*_: object) -> None:
        levels.append(log.getEffectiveLevel())
        if fails:
            raise demo.DemoError("it ends here")

    monkeypatch.setattr(demo, "_run", run)
    monkeypatch.setattr(log, "level", logging.INFO)
    with pytest.raises(demo.DemoError) if fails else nullcontext():
        demo.main()
    assert levels == [logging.ERROR]
    assert log.level == logging.INFO


@pytest.mark.slow
@pytest.mark.gpu
def test_as_json(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "FULL", {TINY: ("h200",)})
    demo.main(full=True, json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["cpu"]["largest_difference"] == 0
    assert [row["run"] for row in document["targets"]] == ["XLA alone", "memplan"]
    total = document["targets"][1]["hbm_total_bytes"]
    assert total <= 200 << 10 < topology("h200").machine.device_memory.capacity_bytes
