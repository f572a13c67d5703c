"""Every program of the corpus with its arguments in a file: by calls of XLA, and by a runtime."""

import jax
import numpy as np
import pytest

import memplan
from memplan import disk
from models.corpus import CORPUS
from tests.memplan.test_planner_numerics import values
from tests.sweeps import slow_but

# What a training step takes are temporaries, which on CPU can only be computed again.
SHARES = dict.fromkeys(CORPUS, 0.75) | {"vit-train": 0.95}
STEPS = 3


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["llama-decode"], CORPUS))
def test_results_are_those_of_jax(name, tmp_path):
    fun, shapes = CORPUS[name].small()
    args = values(shapes)
    expected = jax.tree.leaves(jax.jit(fun)(*args))
    disk.save(tmp_path / "args.safetensors", args)
    given = disk.load(tmp_path / "args.safetensors", like=args)
    total = memplan.jit(fun, hbm="1TiB").lower(*args).compile().device_bytes
    step = memplan.jit(fun, hbm=int(total * SHARES[name]))
    compiled = step.lower(*given).compile()
    assert compiled.plan is not None
    assert compiled.plan.transfers
    for _ in range(STEPS):
        found = jax.tree.leaves(step(*step.place(*given)))
        assert all(map(np.array_equal, found, expected))
    with step.runtime(*given) as run:
        assert run.chain is not None
        for _ in range(STEPS):
            assert all(map(np.array_equal, jax.tree.leaves(run(*given)), expected))
