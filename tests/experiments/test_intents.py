"""What is live and idle at a peak is added up; programs are compiled and their intents counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import memplan
from experiments import intents
from experiments.intents import EXPERIMENT
from hlo_passes.hardware.machine import load_machine
from hlo_passes.reading.reader import read_module
from tests.memplan.programs import TOY, streamed_text


def test_all_weights_wait_where_all_come_at_the_beginning():
    """At the first product there are three weights of 256 KiB and its result of 64 KiB; two of the
    weights are idle, and their copies' flags stay."""
    found = memplan.intents(read_module(streamed_text()), machine=load_machine(TOY))
    weight, activation, flag = 256 * 1024, 64 * 1024, 4
    assert intents._at_peak(found) == (
        3 * weight + activation + 2 * flag,
        2 * weight,
        {"host": 3 * weight + activation, "recompute": 0, "": 2 * flag},
    )


@pytest.mark.slow
@pytest.mark.tpu
def test_a_servers_step_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "rows.jsonl"
    EXPERIMENT.run("--program", "serve decode", "--target", "v5e", "--json", str(path))
    (row,) = map(json.loads, path.read_text().splitlines())
    assert row["found"]["pools"] == 16
    assert 0 < row["found"]["bytes"] < row["found"]["module_bytes"]
    assert "serve decode  v5e" in capsys.readouterr().out
