from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import memplan
from hlo_passes.errors import ProfileFileError
from hlo_passes.hardware.corrections import learned, nearest
from hlo_passes.hardware.machine import load_machine
from hlo_passes.simulator.cost import instruction_costs, kinds_of_kernels
from memplan.calibrate.learning import corrected
from memplan.calibrate.writing import machine_text
from memplan.cli import main
from memplan.profiles import Profile

LAYERS, WIDTH = 6, 256


def step(weights, x):
    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return (x**2).sum()

    value, grads = jax.value_and_grad(loss)(weights, x)
    return [w - 1e-3 * g for w, g in zip(weights, grads, strict=True)], value


@pytest.fixture(scope="module")
def args():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return [jax.random.normal(k, (WIDTH, WIDTH)) / 16 for k in keys], jnp.ones((2048, WIDTH))


@pytest.fixture(scope="module")
def profile(args):
    return memplan.profile(jax.jit(step, donate_argnums=0), *args, steps=3)


def test_layers_that_do_the_same_are_one_kernel(profile, args):
    assert not args[0][0].is_deleted()
    runs = {kernel.runs for kernel in profile.kernels.values()}
    assert max(runs) >= 3 * (LAYERS - 1)
    assert min(runs) == 3
    # No machine here has 56 cores.
    assert all(sum(s.modelled.values()) < s.seconds for s in profile.samples)


def test_a_plan_is_made_with_what_was_measured(profile, args):
    lowered = memplan.jit(step, donate_argnums=0, hbm="12MiB", profile=profile).lower(*args)
    without = memplan.jit(step, donate_argnums=0, hbm="12MiB").lower(*args)
    measured_s = sum(k.runs * k.seconds for k in profile.kernels.values()) / 3
    assert lowered.plan().prediction.step_time_s > 0.5 * measured_s
    assert without.plan().prediction.step_time_s < 0.5 * measured_s


def test_what_was_measured_costs_that_and_the_rest_is_corrected(profile, args):
    compiled = jax.jit(step, donate_argnums=0).lower(*args).compile()
    module = memplan.read_module(compiled)
    machine = load_machine("cpu")
    timed = profile.known(machine).timed(module)
    (dot, *_) = (i for i in timed.entry.instructions if "dot" in i.name or "ynn" in i.name)
    assert instruction_costs(timed, machine)[dot.id] in {
        kernel.seconds for kernel in profile.kernels.values()
    }
    other = jax.jit(lambda x: x[:7] @ x.T).lower(args[1]).compile()
    plain = memplan.read_module(other)
    timed = profile.known(machine).timed(plain)
    before, after = (instruction_costs(m, machine) for m in (plain, timed))
    factors = {of.kind: of.factor for of in learned(profile.samples)}
    for id_, kind in kinds_of_kernels(plain, machine).items():
        factor = nearest(factors, kind)
        assert factor is not None
        assert after[id_] == pytest.approx(factor * before[id_])
    assert sum(before.values()) > 0
    machine = corrected(machine, {"p.json": profile}, "2026-12-01")
    assert sum(instruction_costs(plain, machine).values()) == pytest.approx(sum(after.values()))
    again = corrected(machine, {"p.json": profile}, "2026-12-02")
    assert again.corrections[0].factor > machine.corrections[0].factor


def test_a_planned_program_is_measured_too(profile, args):
    planned = memplan.jit(step, donate_argnums=0, hbm="12MiB", profile=profile)
    again = memplan.profile(planned, *planned.place(*args), steps=2)
    assert profile.kernels.keys() & again.kernels.keys()


def test_it_is_kept_in_a_file(profile, tmp_path):
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile


def test_a_machine_file_learns_from_profiles(profile, tmp_path, capsys):
    profile.save(tmp_path / "step.json")
    out = tmp_path / "here.toml"
    machine = load_machine("cpu")
    asked = ["calibrate", "--machine", "cpu", "--profile", str(tmp_path / "step.json")]
    assert main([*asked, "--out", str(out)]) == 0
    assert "learned from step.json" in " ".join(capsys.readouterr().out.split())
    found = load_machine(out)
    assert [of.kind for of in found.corrections] == [of.kind for of in learned(profile.samples)]
    assert replace(found, corrections=(), sources=machine.sources) == machine
    assert "[corrections.any]" in machine_text(found)


def test_a_machine_learns_from_its_own_profiles_only(profile):
    with pytest.raises(
        ProfileFileError, match=r"p.json: expected one of tpu-v5e, found one of cpu"
    ):
        corrected(load_machine("v5e"), {"p.json": profile}, "2026-12-01")
    with pytest.raises(ProfileFileError, match="expected seconds of kernels, found none"):
        corrected(load_machine("cpu"), {"p.json": replace(profile, samples=())}, "2026-12-01")


def test_errors_say_what_is_wrong(profile, args, tmp_path):
    (tmp_path / "p.json").write_text("{}")
    with pytest.raises(ProfileFileError, match=r"p.json: expected a profile of memplan"):
        memplan.jit(step, profile=tmp_path / "p.json")
    with pytest.raises(ProfileFileError, match="expected one of tpu-v5e, found one of cpu-cxl"):
        memplan.jit(step, machine="v5e", hbm="1GiB", profile=profile).lower(*args).plan()
    with pytest.raises(ValueError, match="steps=0"):
        memplan.profile(jax.jit(step), *args, steps=0)
    with jax.profiler.trace(str(tmp_path)):
        jax.jit(jnp.sin)(args[1]).block_until_ready()
    module = memplan.read_module(jax.jit(jnp.cos).lower(args[1]).compile())
    with pytest.raises(ProfileFileError, match="expected kernels of jit_cos, found those of jit_s"):
        Profile.of_trace(tmp_path, module, load_machine("cpu"))
