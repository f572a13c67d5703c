"""A server is asked for a few requests of a trace, by clients that misbehave."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from experiments.serving import EXPERIMENT


@pytest.mark.slow
def test_prefixes_are_found_and_answers_are_those_of_each_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Two conversations in turn, each of which begins with the same three blocks each time.
    requests = 40
    np.savez(
        tmp_path / "turns.npz",
        time=np.arange(requests, dtype=float),
        n_in=np.full(requests, 3 * 512),
        n_out=np.full(requests, 512),
        last=2 + 3 * (np.arange(requests) % 2),
        plen=np.full(requests, 3),
        parent=np.array([1, 1, 1, 4, 1, 1]),
        meta=[512],
    )
    EXPERIMENT.run(
        str(tmp_path / "turns.npz"), "--requests", str(requests), "--seconds", "4",
        "--pages", "140", "--checked", "10", "--policy", "none", "hints, clients that misbehave",
    )  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    (none,) = (line.split() for line in lines if line.lstrip().startswith("none"))
    (hints,) = (line.split()[3:] for line in lines if "misbehave" in line)
    assert none[1:4] == ["40", "40", "0.0000"]
    assert int(hints[2]) >= 30
    assert float(hints[3]) > 0.3
    for said in (none, hints):
        end = said.index("of")
        assert said[end - 1 : end + 3] == ["0", "of", "10", "0"]
        before, _, after = said[end + 3 : end + 6]
        assert int(after) <= int(before)
