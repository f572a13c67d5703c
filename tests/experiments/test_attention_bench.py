"""The benchmark, small and on a CPU: all of it runs, and what fails does not end it."""

from typing import Any
from unittest import mock

import pytest

from experiments import attention_bench as bench
from experiments.running import Row
from memplan.kernels.timing import Call


def timer(call: Call) -> float:
    call()
    return 1e-3


def fail(*args: Any) -> Any:
    raise AssertionError  # Without a word.


@pytest.mark.parametrize("problem", bench.SMALL, ids=lambda problem: problem.name)
def test_contenders_are_compared_and_one_may_fail(problem: bench.Problem) -> None:
    found = [("broken", fail), *bench.contenders(problem)]
    with mock.patch.object(bench, "contenders", side_effect=lambda problem: iter(found)):
        rows = [row(problem, phase) for phase in ("forward", "backward")]
    for by in (row["by"] for row in rows):
        assert by["broken"]["error"].startswith("AssertionError")
        assert by["xla"]["of_first"] == 1.0
        assert by["memplan xla"]["off"] < 2e-2
    forward, backward = (row["by"]["xla"]["rate"] for row in rows)
    assert backward == pytest.approx(2.5 * forward)
    forward_table, backward_table = bench.EXPERIMENT.tables(rows)
    for table in (forward_table, backward_table):
        ((name, *rates, share, _),) = table.rows
        assert name == problem.name
        assert len(rates) == 2  # What never runs has no column; below the table stands why.
        assert "broken: AssertionError" in table.note
        assert float(share) == pytest.approx(1.0)
        assert {"–", "WRONG"}.isdisjoint(rates)


def row(problem: bench.Problem, phase: str) -> Row:
    case = {"problem": problem.name, "phase": phase}
    return {**case, **bench.compare(problem, phase, timer)}


def test_wrong_numbers_are_told() -> None:
    problem = bench.SMALL[0]
    found = [*bench.contenders(problem), ("wrong", lambda q, k, v: q * float("nan"))]
    with mock.patch.object(bench, "contenders", side_effect=lambda problem: iter(found)):
        rows = [row(problem, phase) for phase in ("forward", "backward")]
    for table in bench.EXPERIMENT.tables(rows):
        (cells,) = table.rows
        told = [c.heading for c, cell in zip(table.columns, cells, strict=True) if cell == "WRONG"]
        assert told == ["wrong, TFLOP/s"]


def test_flops_are_of_the_pairs_that_see_each_other() -> None:
    full, window = bench.SMALL
    assert full.flops() == 4 * 64 * full.batch * 2 * 128 * 128
    pairs = sum(min(i + 1, 32) for i in range(128))
    assert window.flops() == 4 * 64 * window.batch * 2 * pairs


@pytest.mark.parametrize("shape", bench.SMALL_DECODE, ids=lambda shape: shape.name)
def test_decode_is_beside_a_copy(shape: Any) -> None:
    copied = bench.copy_rate(1 << 12, timer)
    assert copied == 2 * (1 << 12) / 1e-3
    copy: Row = {"problem": "copy", "phase": "copy", "rate": copied}
    found: Row = {"problem": shape.name, "phase": "decode", **bench.decode(shape, timer)}
    (table,) = bench.EXPERIMENT.tables([copy, found])
    (cells,) = table.rows
    share = found["by"]["memplan xla"]["rate"] / copied
    assert cells[-2] == f"{share:.2f}"
