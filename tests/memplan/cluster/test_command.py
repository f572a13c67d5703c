"""``memplan cluster``, and what it prints and writes."""

from __future__ import annotations

import json

import pytest

from experiments.cluster_works import training, two_slices
from hlo_passes.chains.check import check
from hlo_passes.cluster.plan import ClusterPlan
from memplan import cli
from memplan.chains import read_chain
from tests.hlo_passes.cluster.test_compiled import TRANSFERS


@pytest.fixture
def files(tmp_path):
    """A cluster's file and a work's."""
    slices = two_slices()
    (tmp_path / "c.json").write_text(json.dumps(slices.to_dict()))
    (tmp_path / "w.json").write_text(json.dumps(training(slices).to_dict()))
    return str(tmp_path / "c.json"), str(tmp_path / "w.json")


def test_tables_windows_and_json(files, capsys):
    assert cli.main(["cluster", *files]) == 0
    out = capsys.readouterr().out
    assert "predicted" in out
    assert "a0-ici->a1-ici" in out
    assert cli.main(["cluster", *files, "--windows"]) == 0
    assert capsys.readouterr().out.startswith("window 0, 0.000 to 1.000 ms\n  computes  f0#0 on a0")
    assert cli.main(["cluster", *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["windows"][-1]["end"] == round(found["step_time_s"] * 1e9)


def test_what_it_writes(files, tmp_path, capsys):
    plan, chain, trace = (tmp_path / name for name in ("p.json", "a0.chain", "t.json"))
    words = ["--out", str(plan), "--chain", str(chain), "--node", "a0", "--trace", str(trace)]
    assert cli.main(["cluster", *files, *words]) == 0
    first = capsys.readouterr().out
    check(read_chain(chain))
    spans = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    loaded = ClusterPlan.load(plan)
    on_wires = sum(len(t.span.wires) for t in loaded.timed)
    computing = sum(not t.span.wires for t in loaded.timed)
    assert len(spans) == on_wires + computing
    # A plan alone is read, checked and shown.
    assert cli.main(["cluster", str(plan)]) == 0
    assert capsys.readouterr().out == first


def test_a_plan_that_was_changed_is_refused(files, tmp_path, capsys):
    plan = tmp_path / "p.json"
    assert cli.main(["cluster", *files, "--out", str(plan)]) == 0
    data = json.loads(plan.read_text())
    data["clock"][5][0] -= 10
    plan.write_text(json.dumps(data))
    assert cli.main(["cluster", str(plan)]) == cli.REFUSED
    assert "the cluster's plan is wrong" in capsys.readouterr().err


def test_a_program_may_be_a_module(tmp_path, capsys):
    (tmp_path / "step.hlo").write_text(TRANSFERS)
    (tmp_path / "c.toml").write_text(
        'name = "one"\n'
        'chips = [{ name = "t", machine = "v5e", host = "h" }]\n'
        'hosts = [{ name = "h", tiers = [{ name = "dram", capacity_bytes = 1_000_000_000 }] }]\n'
    )
    entry = '[[programs]]\nname = "p"\nnode = "t"\nmodule = "step.hlo"\nruns = 2\n'
    (tmp_path / "w.toml").write_text(entry)
    words = ["cluster", str(tmp_path / "c.toml"), str(tmp_path / "w.toml"), "--windows"]
    assert cli.main(words) == 0
    assert "h.dram->t.hbm" in capsys.readouterr().out
    for change, message in (
        ("segments = [1.0]\n", "programs.segments: expected no such key beside module"),
        ("plan = 3\n", "programs.plan: expected a string, found 3"),
    ):
        (tmp_path / "w.toml").write_text(entry + change)
        assert cli.main(words) == cli.REFUSED
        assert message in capsys.readouterr().err


def test_what_does_not_go_together_is_refused(files, capsys):
    assert cli.main(["cluster", *files, "--node", "a0"]) == cli.REFUSED
    assert "go together" in capsys.readouterr().err
    assert cli.main(["cluster", files[0]]) == cli.REFUSED
    assert "version: expected" in capsys.readouterr().err
