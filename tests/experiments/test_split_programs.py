"""What the programs in chunks compute: by hand, and by memplan, the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from experiments import split_programs
from experiments.split_programs import Program
from memplan.splitting.choice import split
from memplan.splitting.live import live_in
from memplan.splitting.shards import WHOLE
from memplan.streams.programs import inline_all_calls

SMALL: dict[str, Program] = {
    "gpt": split_programs.gpt_of(tokens=256),
    "gpt-train": split_programs.gpt_train_of(tokens=1024, width=128),
    "evoformer": split_programs.evoformer_of(residues=32, sequences=8),
    "latent-unet": split_programs.latent_unet_of(side=16),
}


def drawn(shape: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    random = np.random.default_rng(seed)
    fan_in = max(shape.shape[-2] if shape.ndim > 1 else 1, 1)
    return jnp.asarray(random.standard_normal(shape.shape) / fan_in**0.5, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("program", SMALL.values(), ids=SMALL)
def test_ways_agree(program: Program):
    leaves, tree = jax.tree.flatten(program.args)
    args: tuple[Any, ...] = tree.unflatten(drawn(leaf, n) for n, leaf in enumerate(leaves))
    jaxpr = inline_all_calls(jax.make_jaxpr(program.function)(*args).jaxpr)
    in_chunks, splits = split(jaxpr, max(live_in(jaxpr, WHOLE).loads) // 2)
    assert splits
    expected = jax.tree.leaves(jax.jit(program.function)(*args))
    by_hand = jax.tree.leaves(jax.jit(program.by_hand(4))(*args))
    for found in (by_hand, jax.jit(jaxpr_as_fun(in_chunks))(*jax.tree.leaves(args))):
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(np.abs(b).max()))


@pytest.mark.slow
def test_a_step_of_training_is_one_loop_and_not_a_small_one_beside_it():
    of = split_programs.unet_of(8, 64)
    jaxpr = inline_all_calls(jax.jit(of.function).trace(*of.args).jaxpr.jaxpr)
    _, splits = split(jaxpr, max(live_in(jaxpr, WHOLE).loads) // 3)
    assert [s.parts for s in splits] == [4]
