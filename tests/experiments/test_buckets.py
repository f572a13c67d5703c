"""Choices of buckets are compared by what they pad; calls of every length are run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments import buckets
from experiments.buckets import EXPERIMENT


def test_no_choice_pads_less_than_the_chosen():
    lengths = np.random.default_rng(0).lognormal(9, 1, 400).astype(int) + 1
    for count in (3, 8):
        found = {
            name: buckets._padding(lengths, choice, count)
            for name, choice in buckets._CHOICES.items()
        }
        assert all(1 <= row["used"] <= count for row in found.values())
        assert min(row["padding"] for row in found.values()) == found["chosen"]["padding"] > 0


@pytest.mark.slow
def test_calls_wait_for_no_compilation(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trace, path = tmp_path / "lengths.jsonl", tmp_path / "rows.jsonl"
    with trace.open("w") as file:
        for n in range(120):
            length = 512 + 97 * (n % 50)
            blocks = [1000 * n + k for k in range(-(-length // 512))]
            row = {"timestamp": n, "input_length": length, "output_length": 1, "hash_ids": blocks}
            file.write(json.dumps(row) + "\n")
    EXPERIMENT.run(
        str(trace), "--target", "cpu", "--config", "tiny", "--buckets", "4",
        "--calls", "120", "--json", str(path),
    )  # fmt: skip
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = {row["case"].get("way"): row["found"] for row in rows}
    assert found["buckets"]["compilations"] == 0
    assert found["jax.jit"]["compilations"] >= found["jax.jit"]["lengths"]
    (memory,) = (row["found"] for row in rows if row["case"]["part"] == "memory")
    assert memory["arena"] == max(memory["bytes"].values()) <= memory["budget"]
    assert "Padding, of all tokens computed" in capsys.readouterr().out
