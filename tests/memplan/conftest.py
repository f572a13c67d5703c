"""The reports of the small program, made once; the command line, called as a function."""

from dataclasses import replace
from pathlib import Path

import pytest

import memplan.budgeted as budgeted
import memplan.cli as cli
import memplan.known as known
from hlo_passes.hardware.machine import Machine, load_machine
from hlo_passes.reading.reader import read_module
from memplan.placing import Placing
from memplan.report.build import view_run
from memplan.report.view import Report
from tests.memplan.programs import TOY, streamed_text


@pytest.fixture(scope="session")
def toy() -> Machine:
    """1 GB/s of everything, 1 MiB of device memory."""
    return load_machine(TOY)


@pytest.fixture(scope="session")
def report(toy: Machine) -> Report:
    """XLA's order, and a weight ahead, within 850 KiB."""
    before = view_run("XLA alone", read_module(streamed_text()), toy)
    after = view_run("memplan", read_module(streamed_text(ahead=1)), toy)
    return Report("jit_step", "toy", 850 * 1024, (before, replace(after, is_planned=True)), "0.0")


@pytest.fixture
def streamed_file(tmp_path: Path) -> Path:
    """The program in XLA's order, as a text dump."""
    path = tmp_path / "step.hlo"
    path.write_text(streamed_text())
    return path


@pytest.fixture
def run(capsys):
    """`run(*words)`: stdout of a command that succeeds."""

    def run(*words: object) -> str:
        assert cli.main(list(map(str, words))) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run


@pytest.fixture
def refused(capsys):
    """`refused(*words)`: the sentence on stderr of a command that fails."""

    def refused(*words: object) -> str:
        assert cli.main(list(map(str, words))) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "Traceback" not in captured.err
        assert captured.err.startswith("memplan: ")
        return captured.err

    return refused


@pytest.fixture
def planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are for the budget that is asked for, whatever XLA leaves of it, or holds elsewhere."""
    monkeypatch.setattr(budgeted, "_IDLE", 1.0)
    monkeypatch.setattr(known, "held_on_chip", lambda _: {})


@pytest.fixture
def planned_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """What loops leave for others is kept or streamed, even where computing it again is faster."""
    monkeypatch.setattr(Placing, "recomputing", lambda self: ())
