"""Watts and joules by counters that are written here: those of a machine of round numbers."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, override

import pytest

from hlo_passes.hardware.machine import load_machine, machine_from_dict
from memplan.calibrate import energy
from memplan.calibrate.energy import Load, Meter, NvidiaSmi, Powercap, meter_of, with_energy
from memplan.calibrate.measuring import Timed


def domain(folder: Path, number: str, name: str, microjoules: int | None) -> Path:
    made = folder / f"intel-rapl:{number}"
    made.mkdir()
    (made / "name").write_text(f"{name}\n")
    (made / "max_energy_range_uj").write_text("1000000\n")
    if microjoules is not None:
        (made / "energy_uj").write_text(f"{microjoules}\n")
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes each time that somebody looks."""
    seconds = itertools.count()
    monkeypatch.setattr("memplan.calibrate.energy.time.monotonic", lambda: float(next(seconds)))


@pytest.mark.usefixtures("clock")
def test_packages_and_their_memory_are_counted_and_a_counter_that_begins_again(tmp_path: Path):
    package = domain(tmp_path, "0", "package-0", 100_000)
    domain(tmp_path, "0:0", "core", 0)  # It is in the package.
    memory = domain(tmp_path, "0:1", "dram", 900_000)
    domain(tmp_path, "1", "package-1", None)  # One that cannot be read.
    meter = Powercap.here(tmp_path)
    assert meter == Powercap((package, memory))

    def run() -> None:
        (package / "energy_uj").write_text("700000")
        (memory / "energy_uj").write_text("300000")

    # 0.6 J and 0.4 J in the four seconds until the time is seen to be over.
    assert meter is not None
    assert meter.watts(run, 3.0) == pytest.approx(1.0 / 3)


def test_without_counters_there_is_no_meter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert Powercap.here(tmp_path) is None
    broken = domain(tmp_path, "0", "package-0", 1)
    (broken / "energy_uj").write_text("what?")
    assert Powercap.here(tmp_path) is None
    assert meter_of("tpu") is None
    for failure in (FileNotFoundError(), subprocess.CalledProcessError(9, "nvidia-smi")):

        def fails(*_: Any, error: Exception = failure, **__: Any) -> None:
            raise error

        monkeypatch.setattr(subprocess, "run", fails)
        assert meter_of("gpu") is None


@pytest.mark.usefixtures("clock")
def test_the_driver_says_watts(monkeypatch: pytest.MonkeyPatch):
    def answer(*args: Any, **_: Any) -> Any:
        return subprocess.CompletedProcess(args, 0, "87.25\n", "")

    monkeypatch.setattr(subprocess, "run", answer)
    meter, runs = meter_of("gpu"), list[int]()
    assert meter == NvidiaSmi()
    assert meter is not None
    assert meter.watts(lambda: runs.append(1), 3.0) == 87.25
    assert runs


class Counting(Meter):
    """40 W, and for each thing that runs what it is said to take."""

    name = "counting"

    def __init__(self) -> None:
        self.running = 0.0

    @override
    def watts(self, run: Callable[[], object], seconds: float) -> float:
        self.running = 0.0
        run()
        return 40.0 + self.running

    def load(self, watts: float, *of: Any) -> Load:
        def run() -> float:
            self.running = watts
            return watts

        return Load(Timed(run, waits=False), *of)


def test_what_each_thing_takes_beside_the_static_watts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(energy.time, "sleep", lambda _: None)
    meter, machine = Counting(), load_machine("v5p")
    ends = ("host", "hbm"), ("hbm", "host")
    found = with_energy(
        machine,
        meter,
        meter.load(20.0, 1e11),  # 200 pJ a byte
        [meter.load(50.0, 5e10, "bf16", 1e14), meter.load(5.0, 5e10, "f32", 1e13)],
        {way: meter.load(watts, 1e10) for way, watts in zip(ends, (7.0, 1.0), strict=True)},
    )
    assert found.static_w == 40.0
    assert found.device_memory.j_per_byte == pytest.approx(2e-10)
    # 10 W of each are bytes'; of the second that is more than there was.
    assert dict(found.flop_j) == pytest.approx({"bf16": 4e-13, "f32": 0.0})
    assert found.link(*ends[0]).j_per_byte == pytest.approx(5e-10)
    assert found.link(*ends[1]).j_per_byte == 0.0
    assert found.transfer_joules(10, *ends[0]) == pytest.approx(7e-9)
    assert machine_from_dict(found.to_dict()) == found
