"""State on the disk: steps that change it, what a crash leaves, and what is refused."""

import gc
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from hlo_passes.chains.check import check
from hlo_passes.errors import StateFolderError, StepRuntimeError
from memplan import disk, state
from tests.memplan.state_training import BUDGET, batch, initial, opened, train

ROOT = Path(__file__).parents[2]
STEPS = 12


def same(one, other):
    leaves = zip(*(jax.tree.leaves(tree) for tree in (one, other)), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in leaves)


@pytest.fixture(scope="module")
def expected():
    """The state after each number of steps, as plain jax has it; and the losses."""
    step, states, losses = jax.jit(train), [initial()], []
    for _ in range(STEPS):
        after, value = step(states[-1], *batch())
        states.append(jax.tree.map(np.asarray, after))
        losses.append(float(value))
    return states, losses


@pytest.fixture
def folder(tmp_path):
    state.save(tmp_path / "state", initial())
    return tmp_path / "state"


def test_steps_change_what_is_on_the_disk(folder, expected):
    states, losses = expected
    run, given = opened(folder)
    with run:
        assert run.compiled.device_bytes <= 3 << 20
        assert list(check(run.chain).footprint) == [run.compiled.plan.device_tier]
        for k in range(5):
            given, value = run(given, *batch())
            assert float(value) == losses[k]
        run.wait()
        assert same(state.load(folder, like=initial()), states[5])
    assert json.loads((folder / "epoch.json").read_text()) == {"epoch": 5}
    run, given = opened(folder)  # From the odd file.
    with run:
        for k in range(5, 8):
            given, value = run(given, *batch())
            assert float(value) == losses[k]
    assert same(state.load(folder, like=initial()), states[8])


def test_any_reader_of_safetensors_reads_it(folder):
    numpy = pytest.importorskip("safetensors.numpy")
    found = numpy.load_file(folder / "even.safetensors")
    assert np.array_equal(found["p.3.w"], initial()["p"][3]["w"])


def killed(folder, after_s):
    """Trains until it is killed; returns the epoch that is left."""
    words = [sys.executable, "-m", "tests.memplan.state_training", str(folder), str(STEPS)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # It has compiled.
        time.sleep(after_s)
        process.kill()
    return state.Folder.at(folder).epoch()


@pytest.mark.parametrize(
    "points", [2, pytest.param(50, marks=pytest.mark.slow)], ids=lambda n: f"{n} points"
)
def test_killed_at_any_point_it_goes_on_from_a_whole_step(folder, expected, points):
    states, _ = expected
    choose, epoch = random.Random(points), 0
    fresh = folder.with_name("fresh")
    shutil.copytree(folder, fresh)
    for _ in range(points):
        if epoch >= STEPS - 2:  # From the beginning again.
            shutil.rmtree(folder)
            shutil.copytree(fresh, folder)
            epoch = 0
        before, epoch = epoch, killed(folder, choose.uniform(0, 0.15))
        assert before <= epoch <= STEPS
        assert same(state.load(folder, like=initial()), states[epoch])


@pytest.mark.slow
def test_a_result_of_an_older_step_is_refused(folder):
    run, given = opened(folder)
    with run:
        first, _ = run(given, *batch())
        run(first, *batch())
        with pytest.raises(
            StepRuntimeError, match=r"is not what the last step left there, at epoch 2"
        ):
            run(first, *batch())
        with pytest.raises(RuntimeError, match=r"has been deleted"):
            run(given, *batch())


@pytest.mark.slow
def test_state_that_was_loaded_before_is_refused(folder, expected):
    old = state.load(folder, like=initial())
    run, given = opened(folder)
    with run:
        run(given, *batch())
    assert jax.tree.leaves(given)[0].is_deleted()
    step = memplan.jit(train, hbm=BUDGET, donate_argnums=0)
    with pytest.raises(StateFolderError, match="was loaded before epoch 1"):
        step.runtime(old, *batch())
    assert same(state.load(folder, like=initial()), expected[0][1])


@pytest.mark.slow
def test_one_runtime_has_a_folder_at_a_time(folder):
    run, _ = opened(folder)
    with run, pytest.raises(StateFolderError, match="in use by another runtime"):
        opened(folder)
    again, given = opened(folder)
    with again:
        again(given, *batch())


def test_state_that_no_result_takes_the_place_of_is_refused(folder):
    def forgetful(state, x, y):
        after, value = train(state, x, y)
        return {**after, "t": value.astype(jnp.bfloat16)}, after["m"][0]["b"][:3]

    given = state.load(folder, like=initial())
    with pytest.raises(StateFolderError, match=r"no result takes the place of argument state\."):
        memplan.jit(forgetful, hbm=BUDGET, donate_argnums=0).runtime(given, *batch())


@pytest.mark.slow
def test_results_that_change_places_are_refused(folder):
    run, given = opened(folder)
    with run:
        after, _ = run(given, *batch())
        with pytest.raises(StepRuntimeError, match="each in its place"):
            run({**after, "m": after["v"], "v": after["m"]}, *batch())


def test_a_part_of_the_state_is_refused(folder):
    given = state.load(folder, like=initial())

    def part(weights, x):
        return jax.tree.map(lambda w: w + x, weights)

    with pytest.raises(StateFolderError, match="of which 12 are donated: donate all of them"):
        memplan.jit(part, hbm=BUDGET, donate_argnums=0).runtime(given["p"], jnp.ones(()))


def test_results_that_are_alike_are_refused(folder):
    def both(of, x, y):
        after, _ = train(of, x, y)
        return jax.tree.map(jnp.zeros_like, after), after

    given = state.load(folder, like=initial())
    with pytest.raises(StateFolderError, match="no result takes the place"):
        memplan.jit(both, hbm=BUDGET, donate_argnums=0).runtime(given, *batch())


@pytest.mark.slow
def test_a_runtime_that_is_dropped_ends(folder, expected):
    run, given = opened(folder)
    run(given, *batch())
    run.wait()
    thread = run._commits._thread
    del run
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()
    again, given = opened(folder)
    with again:
        again(given, *batch())
    assert same(state.load(folder, like=initial()), expected[0][2])


def test_state_that_is_not_donated_is_only_read(folder, expected):
    given = state.load(folder, like=initial())
    with memplan.jit(train, hbm="6MiB", split=False).runtime(given, *batch()) as run:
        after, value = run(given, *batch())
        assert float(value) == expected[1][0]
        assert same(after, expected[0][1])
    assert state.Folder.at(folder).epoch() == 0


@pytest.mark.slow
def test_a_folder_that_goes_away_ends_the_steps(folder):
    run, given = opened(folder)
    shutil.rmtree(folder)

    def some(given):
        for _ in range(4):
            given, _ = run(given, *batch())

    with pytest.raises((OSError, StepRuntimeError), match=str(folder)):
        some(given)
    run.close()


def test_what_is_no_state_is_refused(folder, tmp_path):
    with pytest.raises(StateFolderError, match="is there already"):
        state.save(folder, initial())
    with pytest.raises(StateFolderError, match=r"it has no epoch\.json"):
        state.load(tmp_path)
    for text in ("", "{}", '{"epoch": -1}', '{"epoch": "x"}', "[]"):
        (folder / "epoch.json").write_text(text)
        with pytest.raises(StateFolderError, match=r"epoch\.json has"):
            state.load(folder)


def test_nothing_is_left_of_a_state_that_could_not_be_written(tmp_path):
    with pytest.raises(memplan.MemplanError, match="two arrays are called"):
        state.save(tmp_path / "state", {"a.b": np.zeros(3), "a": {"b": np.zeros(3)}})
    assert list(tmp_path.iterdir()) == []


def test_padding_is_left_out(tmp_path):
    tree = {"a": np.arange(5, dtype=np.int8), "b": np.ones((3, 3), np.float32)}
    disk.save(tmp_path / "padded", tree, padded=True)
    assert set(disk.load(tmp_path / "padded")) == {"a", "b"}
    assert same(disk.load(tmp_path / "padded", like=tree), tree)
