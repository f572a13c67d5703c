"""A training loop with its state on the disk, for `test_state`: ends when it has made its steps.

python -m tests.memplan.state_training FOLDER STEPS
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import memplan
from memplan import state

LAYERS, WIDTH = 6, 256
BUDGET = "3MiB"  # Of 4.5 MiB of state.


def initial():
    random = np.random.default_rng(0)
    weights = [
        {"w": random.standard_normal((WIDTH, WIDTH), np.float32) / 16, "b": np.zeros(WIDTH, "f4")}
        for _ in range(LAYERS)
    ]
    zeros = jax.tree.map(np.zeros_like, weights)
    second = jax.tree.map(np.copy, zeros)
    # Where equinox has what is no array, its trees have None.
    return {"p": weights, "n": None, "m": zeros, "v": second, "t": np.float32(0)}


def batch():
    keys = jax.random.split(jax.random.key(0))
    return tuple(jax.random.normal(key, (8, WIDTH)) for key in keys)


def loss(weights, x, y):
    for layer in weights:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean((x - y) ** 2)


def train(state, x, y):
    """A step of Adam (Kingma and Ba, 2015)."""
    value, grads = jax.value_and_grad(loss)(state["p"], x, y)
    t = state["t"] + 1
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state["v"], grads)

    def updated(p, m, v):
        return p - 1e-3 * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)

    weights = jax.tree.map(updated, state["p"], m, v)
    return {"p": weights, "n": None, "m": m, "v": v, "t": t}, value


def opened(folder):
    """The runtime of a step, and its arguments."""
    given = state.load(folder, like=initial())
    return memplan.jit(train, hbm=BUDGET, donate_argnums=0).runtime(given, *batch()), given


def main(folder, steps):
    jax.config.update("jax_platforms", "cpu")
    run, given = opened(folder)
    with run:
        print("begun", flush=True)
        for _ in range(state.Folder.at(folder).epoch(), steps):
            given, _ = run(given, *batch())


if __name__ == "__main__":
    from pathlib import Path

    main(Path(sys.argv[1]), int(sys.argv[2]))
