"""The benchmark, small and on a CPU: all of it runs, and what fails does not end it."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from experiments import attention_bench as bench
from memplan.kernels.timing import Call


def timer(call: Call) -> float:
    call()
    return 1e-3


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fail(*args: Any) -> Any:
    raise AssertionError  # Without a word.


@pytest.mark.parametrize("problem", bench.SMALL, ids=lambda problem: problem.name)
def test_contenders_are_compared_and_one_may_fail(
    problem: bench.Problem, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [("broken", fail), *bench.contenders(problem)]
    with mock.patch.object(bench, "contenders", side_effect=lambda problem: iter(found)):
        bench.compare(problem, bench.Out(tmp_path / "out.jsonl"), timer)
    got = {(line["phase"], line["by"]): line for line in lines(tmp_path / "out.jsonl")}
    for phase in ("forward", "backward"):
        assert got[phase, "broken"]["error"].startswith("AssertionError")
        assert got[phase, "xla"]["of_first"] == 1.0
        assert got[phase, "memplan xla"]["off"] < 2e-2
    assert got["backward", "xla"]["rate"] == pytest.approx(2.5 * got["forward", "xla"]["rate"])
    assert "WRONG" not in capsys.readouterr().out


def test_wrong_numbers_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    problem = bench.SMALL[0]
    found = [*bench.contenders(problem), ("wrong", lambda q, k, v: q * float("nan"))]
    with mock.patch.object(bench, "contenders", side_effect=lambda problem: iter(found)):
        bench.compare(problem, bench.Out(None), timer)
    told = [line for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert len(told) == 2
    assert all(" wrong " in line and "off by inf" in line for line in told)


def test_flops_are_of_the_pairs_that_see_each_other() -> None:
    full, window = bench.SMALL
    assert full.flops() == 4 * 64 * full.batch * 2 * 128 * 128
    pairs = sum(min(i + 1, 32) for i in range(128))
    assert window.flops() == 4 * 64 * window.batch * 2 * pairs


@pytest.mark.parametrize("shape", bench.SMALL_DECODE, ids=lambda shape: shape.name)
def test_decode_is_beside_a_copy(shape: Any, tmp_path: Path) -> None:
    copied = bench.copy_rate(1 << 12, timer)
    assert copied == 2 * (1 << 12) / 1e-3
    bench.decode(shape, copied, bench.Out(tmp_path / "out.jsonl"), timer)
    (line,) = lines(tmp_path / "out.jsonl")
    assert line["of_limit"] == line["rate"] / copied
