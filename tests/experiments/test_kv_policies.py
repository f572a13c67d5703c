"""The table of policies, on a few requests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments.kv_policies import EXPERIMENT


def test_each_policy_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Two blocks that are asked for in turn, and room for one.
    requests = 40
    np.savez(
        tmp_path / "turns.npz",
        time=np.arange(requests, dtype=float),
        n_in=np.full(requests, 512),
        last=np.arange(requests) % 2,
        plen=np.ones(requests, int),
        parent=np.array([1, 2]),
        meta=[512],
    )
    picture = tmp_path / "kv.svg"
    EXPERIMENT.run(
        str(tmp_path / "turns.npz"), "--capacity", "1", "2", "--plot", str(picture),
    )  # fmt: skip
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "turns" in line]
    found = {" ".join(row[1:-3]): row[-3:-1] for row in rows}
    assert found["LRU"] == ["0.0000", "1.0000"]
    assert found["Belady"] == ["0.5000", "1.0000"]
    assert "hints that lie" in found
    assert picture.read_text().lstrip().startswith("<?xml")
