import threading
import time
import tomllib
from dataclasses import replace
from itertools import islice

import jax
import jax.numpy as jnp
import pytest

import memplan
from hlo_passes.errors import CalibrationError, MachineFileError
from hlo_passes.hardware.machine import load_machine, machine_from_dict, machine_names
from hlo_passes.hardware.rates import KernelRate
from hlo_passes.simulator.cost import step_seconds
from memplan.calibrate import calibrating, copies, programs
from memplan.calibrate.calibrating import calibrate
from memplan.calibrate.measuring import Timed
from memplan.calibrate.writing import machine_text
from memplan.cli import main

SOME = (
    "call",
    "add float32",
    "tanh float32",
    "product nn float32",
    "layers",
    "sum of rows float32",
)


@pytest.fixture
def few(monkeypatch):
    """A few of the programs, of the kinds that the tests are about."""
    chosen = [p for p in programs.programs(1 << 20) if p.name.startswith(SOME)][::2]
    monkeypatch.setattr(calibrating, "programs", lambda cache_bytes: chosen)


@pytest.mark.parametrize("name", machine_names())
def test_a_machine_is_written_as_it_is_read(name):
    machine = load_machine(name)
    assert machine_from_dict(tomllib.loads(machine_text(machine))) == machine


def test_a_measured_machine_predicts_what_was_measured(few, tmp_path, monkeypatch):
    monkeypatch.setattr(calibrating, "UNSTABLE", -1.0)
    heard = []
    found = calibrate("mine", seconds=0, progress=lambda what, done: heard.append((what, done)))
    assert {what for what, _ in heard} == {"compiling", "measuring"}
    assert all(0 <= done <= 1 for _, done in heard)
    file = tmp_path / "mine.toml"
    file.write_text(machine_text(found.machine))
    machine = load_machine(file)
    assert replace(machine, sources=()) == replace(found.machine, sources=())
    assert dict(machine.sources) == dict(found.machine.sources)
    assert machine.name == "mine"
    sources = dict(machine.sources)
    assert sources["hbm_bytes_per_s"].startswith("measured 20")
    for key in ("call_s", "kernels.elementwise f32.run_s", "links.host->dram.latency_s"):
        assert key not in sources or "unstable: measure again" in sources[key]
    assert "kernels.elementwise f32.run_s" in sources
    assert "of it while the device computes" in sources["links.dram->host.nominal_bytes_per_s"]
    # A product of another size: right up to what a busy machine does to it, where the model that
    # is in the library is a hundred times off.
    x = jnp.ones((640, 640))
    module = memplan.read_module(jax.jit(lambda x: jnp.tanh(x @ x)).lower(x).compile())
    reached = 2 * 640**3 / step_seconds(module, machine)
    assert 0.05 * dict(machine.peak_flops)["f32"] < reached < 1.2 * dict(machine.peak_flops)["f32"]
    into, out = machine.links
    assert (into.source, into.destination, out.destination) == ("host", "dram", "host")
    assert 1e8 < into.bytes_per_s < 1e12
    lowered = memplan.jit(lambda x: (x @ x).sum(), hbm="1GiB", machine=str(file)).lower(x)
    assert lowered.compile()(x) == pytest.approx(640.0**3)


def test_a_drive_is_a_tier_and_its_file_goes(few, tmp_path, monkeypatch):
    monkeypatch.setattr("memplan.calibrate.drives._FILE_BYTES", 1 << 24)
    try:
        found = calibrate(disk=tmp_path, seconds=0)
    except CalibrationError as error:
        pytest.skip(str(error))
    assert found.machine.link("nvme", "dram").bytes_per_s > 1e6
    assert found.machine.tier("nvme").capacity_bytes > 0
    assert not [*tmp_path.iterdir()]


def test_where_a_drive_cannot_be_read_past_the_page_cache_is_said(few, tmp_path):
    with pytest.raises(CalibrationError, match=r"disk .*nowhere: expected a folder on a drive"):
        calibrate(disk=tmp_path / "nowhere", seconds=0)


def test_what_differs_from_turn_to_turn_is_said():
    timed = Timed(lambda: None, waits=True)
    timed.seconds = [1.0, 1.01, 1.0, 1.02, 1.01]
    assert timed.timing.spread < 0.02
    assert timed.timing.seconds == 1.0
    timed.seconds = [1.0, 1.5, 1.1, 1.9, 1.2]
    assert timed.timing.spread > 0.3


def test_where_a_copy_is_stopped_nothing_goes_on():
    def stopped():
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        copies._beside(stopped, lambda: time.sleep(0.01))
    assert threading.active_count() == before


def test_it_can_be_stopped(few):
    def stop(what, done):
        if what == "measuring":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(seconds=0, progress=stop)


def test_the_command(few, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", "--seconds", "0", "--name", "here"]) == 0
    printed = capsys.readouterr().out
    assert "elementwise f32" in printed
    assert "Wrote here.toml" in printed
    assert load_machine(tmp_path / "here.toml").name == "here"
    assert main(["machines", "here.toml"]) == 0


def test_a_rate_that_is_misspelt_is_refused(tmp_path):
    text = machine_text(load_machine("cpu")) + '\n[kernels."dot f32"]\nflops_s = 1e-12\n'
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(MachineFileError, match=r"kernels.dot f32.flops_s: expected no such key"):
        load_machine(tmp_path / "bad.toml")


def test_kernels_of_which_a_file_says_nothing_are_priced_by_peaks():
    machine = load_machine("cpu")
    rate = KernelRate("sort f32", run_s=1.0)
    module = memplan.read_module(jax.jit(lambda x: x * 2).lower(jnp.ones(1 << 20)).compile())
    only = replace(machine, kernels=(rate,), cache_bytes=1 << 20)
    assert step_seconds(module, only) == step_seconds(module, machine) > 0


def test_programs_of_all_kinds_are_there():
    names = [program.name for program in programs.programs(1 << 20)]
    assert len(names) == len({*names})
    for program in islice(programs.programs(1 << 20), 0, None, 7):
        jax.eval_shape(program.looped().fun, *program.args)


def test_some_touch_more_than_a_large_cache_holds():
    sizes = [
        sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(p.args))
        for p in programs.programs(50 << 20)
    ]
    assert max(sizes) > 4 * (50 << 20)
