"""Programs are drawn the same each time, and what was compiled once is only compared again."""

from pathlib import Path

import jax
import pytest

from experiments import memory_accuracy
from experiments.drawn_programs import KINDS, draw, kind
from experiments.memory_accuracy import Comparison, Report


def described(number: int) -> tuple[str, ...]:
    program = draw(number)
    return (str(program.arguments), str(program.donate), str(program.partitions))


@pytest.mark.parametrize("number", range(2 * len(KINDS)))
def test_a_number_is_one_program(number: int):
    assert described(number) == described(number)
    assert kind(number) == kind(number + len(KINDS))


def test_programs_differ():
    assert len({described(n) for n in range(300)}) > 250


def test_arguments_are_few_or_thousands():
    counts = [len(jax.tree.leaves(draw(n).arguments)) for n in range(300)]
    assert min(counts) == 1
    assert 4000 < max(counts) <= 5000


@pytest.mark.parametrize(
    ("temp", "predicted", "is_close"),
    [
        (1000, 5096, True),
        (1000, 5097, False),
        (10_000_000, 10_010_000, True),
        (10_000_000, 9_989_999, False),
    ],
)
def test_close_is_a_thousandth_or_a_few_pages(temp: int, predicted: int, is_close: bool):
    assert Comparison(Report(0, "cpu", temp=temp), 0, 0, 0, predicted).is_close == is_close


def test_close_is_nothing_where_outputs_differ():
    assert not Comparison(Report(0, "cpu", output=8), 0, 16, 0, 0).is_close


@pytest.mark.timeout(300)
def test_a_second_run_compiles_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    command = ["--cache", str(tmp_path), "--target", "cpu", "--count", "4"]
    memory_accuracy.EXPERIMENT.run(*command)
    first = capsys.readouterr().out
    assert ["cpu", "4", "0"] in [line.split()[:3] for line in first.splitlines()]
    monkeypatch.setattr(memory_accuracy, "compile_drawn", None)
    memory_accuracy.EXPERIMENT.run(*command)
    assert capsys.readouterr().out == first
