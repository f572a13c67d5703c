"""Programs whose transfers a runtime replays: `memplan.jit(...).runtime`."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from custom_calls.runtime import events
from hlo_passes.chains.check import check
from hlo_passes.errors import DiskTooSlowError, NotReplayableError, StepRuntimeError
from memplan import disk

LAYERS, WIDTH = 8, 512
BUDGET = "5MiB"  # Of 8 MiB of weights.


def layers(seed=0):
    random = np.random.default_rng(seed)
    return [
        {
            "w": random.standard_normal((WIDTH, WIDTH), np.float32) / WIDTH**0.5,
            "b": np.ones(WIDTH, np.float32),
        }
        for _ in range(LAYERS)
    ]


def forward(params, x):
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x


def written(tmp_path, params):
    path = tmp_path / "params.safetensors"
    disk.save(path, params)
    return path, disk.load(path, like=params)


def same(one, other):
    return all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True))


@pytest.fixture
def x():
    return jnp.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


@pytest.mark.parametrize("where", ["file", "memory", "host"])
def test_results_are_those_of_jax(where, tmp_path, x):
    params = layers()
    given = written(tmp_path, params)[1] if where == "file" else params
    if where == "host":
        host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
        given = jax.device_put(params, host)
    step = memplan.jit(forward, hbm=BUDGET)
    with step.runtime(given, x) as run:
        for k in range(4):
            assert same(run(given, x + k), jax.jit(forward)(params, x + k))
        assert run.compiled.device_bytes <= 5 << 20
        assert run.compiled.followed.exactly


def test_a_disk_that_is_too_slow_for_what_is_asked_is_an_error(tmp_path, x):
    _, params = written(tmp_path, layers())
    step = memplan.jit(forward, hbm=BUDGET)
    said = r"a step moves .* MiB from and to the disk of .*params.safetensors, which gives .* GB/s"
    with pytest.raises(DiskTooSlowError, match=said) as caught:
        step.runtime(params, x, within_s=1e-6)
    assert caught.value.bytes / caught.value.bytes_per_s > 1e-6
    with step.runtime(params, x, within_s=60) as run:
        (read,) = {len(run.compiled.streamed)}
        assert caught.value.bytes == read * WIDTH * WIDTH * 4
        run(params, x)


def test_the_arena_is_what_the_checker_says_and_counts_in_the_budget(tmp_path, x):
    _, params = written(tmp_path, layers())
    with memplan.jit(forward, hbm=BUDGET).runtime(params, x) as run:
        (footprint,) = check(run.chain).footprint.values()
        assert run._runtime.allocated_bytes() == footprint
        xla = run.compiled.memory_analysis()
        temporaries = xla.temp_size_in_bytes + xla.output_size_in_bytes
        assert run.compiled.device_bytes > footprint + temporaries


def test_the_next_call_is_read_for_during_this_one(tmp_path, x):
    _, params = written(tmp_path, layers())
    with memplan.jit(forward, hbm=BUDGET).runtime(params, x, log=1000) as run:
        for _ in range(3):
            run(params, x)
        seen = events(run._runtime)
        reads = [k for k, d in enumerate(run.chain.descriptors) if d.stream == 0]
        segments = [k for k, d in enumerate(run.chain.descriptors) if d.stream == 1]
        of_next = seen[(seen["replay"] == 2) & np.isin(seen["descriptor"], reads)]
        before = seen[(seen["replay"] == 1) & np.isin(seen["descriptor"], segments)]
        assert of_next["issued"].min() < before["ended"].max()


def test_what_is_donated_and_on_the_device_stays_donated(tmp_path, x):
    params = layers()
    _, given = written(tmp_path, params)

    def step(params, x, total):
        return forward(params, x), total + x

    total = jnp.zeros_like(x)
    with memplan.jit(step, hbm=BUDGET, donate_argnums=2).runtime(given, x, total) as run:
        for _ in range(3):
            y, after = run(given, x, total)
            assert total.is_deleted()
            assert same(y, jax.jit(forward)(params, x))
            total = after
        assert jnp.allclose(total, 3 * x)


def test_arguments_by_name_and_other_functions_beside(tmp_path, x):
    params = layers()
    _, given = written(tmp_path, params)
    step = memplan.jit(lambda params, *, x: forward(params, x), hbm=BUDGET)
    with step.runtime(given, x=x) as one, step.runtime(given, x=x) as other:
        for run in (one, other, one):
            assert same(run(given, x=x), jax.jit(forward)(params, x))
    placed, named = step.place(given, x=x)
    assert same(step(*placed, **named), jax.jit(forward)(params, x))


def test_a_program_that_fits_needs_no_arena(x):
    params = layers()
    with memplan.jit(forward, hbm="1GiB").runtime(params, x) as run:
        assert run.chain is None
        assert same(run(params, x), jax.jit(forward)(params, x))


def test_a_weight_that_is_read_twice_has_one_place(tmp_path, x):
    params = layers()
    _, given = written(tmp_path, params)

    def twice(params, x):
        return forward(params, forward(params, x))

    with memplan.jit(twice, hbm=BUDGET).runtime(given, x) as run:
        for _ in range(3):
            assert same(run(given, x), jax.jit(twice)(params, x))


def test_other_arrays_than_it_was_opened_with_are_refused(tmp_path, x):
    _, given = written(tmp_path, layers())
    others = disk.load(tmp_path / "params.safetensors", like=layers())
    with memplan.jit(forward, hbm=BUDGET).runtime(given, x) as run:
        with pytest.raises(StepRuntimeError, match=r"argument params\.\d\.w is streamed"):
            run(others, x)
        run(given, x)


def test_after_its_end_it_says_so(tmp_path, x):
    _, given = written(tmp_path, layers())
    with memplan.jit(forward, hbm=BUDGET).runtime(given, x) as run:
        pass
    with pytest.raises(StepRuntimeError, match="is closed"):
        run(given, x)


def test_arguments_that_do_not_fit_are_jaxs_errors_and_harm_nothing(tmp_path, x):
    params = layers()
    _, given = written(tmp_path, params)
    with memplan.jit(forward, hbm=BUDGET).runtime(given, x) as run:
        with pytest.raises(TypeError):
            run(given)
        with pytest.raises(TypeError):
            run(given, x[:2])
        assert same(run(given, x), jax.jit(forward)(params, x))


def test_a_file_that_is_cut_off_names_itself_and_the_slot(tmp_path, x):
    path, given = written(tmp_path, layers())
    with memplan.jit(forward, hbm=BUDGET).runtime(given, x) as run:
        run(given, x)
        os.truncate(path, path.stat().st_size // 2)

        def some():
            for _ in range(3):  # What was read before the end of the file is used first.
                run(given, x)

        with pytest.raises(OSError, match=r"copy params\S* to .*params\.safetensors.*byte \d+"):
            some()
        with pytest.raises(StepRuntimeError, match=r"failed: .*params\.safetensors"):
            run(given, x)


def test_loops_that_read_their_slices_in_a_file_are_refused(tmp_path, x):
    stacked = jax.tree.map(lambda *a: np.stack(a), *layers())
    _, params = written(tmp_path, stacked)

    def scanned(params, x):
        return jax.lax.scan(lambda x, p: (jnp.tanh(x @ p["w"] + p["b"]), None), x, params)[0]

    with pytest.raises(NotReplayableError, match=r"reads argument params\.w .* in its file"):
        memplan.jit(scanned, hbm=BUDGET).runtime(params, x)
