"""Every program to plan traces, with arguments of the published size."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from models.configs import CONFIGS
from models.dit import TINY_DIT
from models.stacking import Remat
from models.training import TrainOptions
from models.vit import TINY_VIT
from models.workloads import (
    Workload,
    decode,
    dit_train,
    scanned_decode,
    scanned_prefill,
    train,
    unrolled_train,
    vit_train,
)

MESH = AbstractMesh((32, 8), ("fsdp", "model"), (AxisType.Auto,) * 2)
NAMES = ["tiny", "llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b"]


def traced(workload: Workload):
    fun, args = workload
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))
    return jax.eval_shape(fun, *args)


def size(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", NAMES)
def test_scanned_decode(name: str):
    config, workload = CONFIGS[name], scanned_decode(name, batch=2, cache_length=32)
    logits, cache = traced(workload)
    params, _, before = workload[1]
    assert size(params) == config.param_bytes
    assert logits.shape == (2, 1, config.vocab_size)
    assert jax.tree.map(jax.typeof, cache) == jax.tree.map(jax.typeof, before)


def test_scanned_decode_takes_and_gives_the_bytes_that_decode_does():
    found = scanned_decode("llama2-13b", batch=2, cache_length=32)
    expected = decode("llama2-13b", batch=2, cache_length=32)
    assert size(found[1]) == size(expected[1])


def test_scanned_prefill():
    workload = scanned_prefill("llama3-8b", batch=2, tokens=16, cache_length=32)
    logits, cache = traced(workload)
    assert logits.shape == (2, 1, CONFIGS["llama3-8b"].vocab_size)
    assert cache.keys.shape == (32, 2, 32, 8, 128)


@pytest.mark.parametrize("name", NAMES)
def test_train(name: str):
    config, workload = CONFIGS[name], train(name, batch=2, tokens=16)
    state, tokens = workload[1]
    # Weights, two float32 moments and an int32 count.
    assert size(state) == config.param_bytes + 8 * config.param_count + 4
    assert tokens.shape == (2, 17)
    after, metrics = traced(workload)
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
    assert set(metrics) == {"loss", "grad_norm"}


@pytest.mark.parametrize("remat", [None, "none", "layer"])
@pytest.mark.parametrize(
    "make",
    [
        lambda remat: vit_train(TINY_VIT, batch=2, scan=remat),
        lambda remat: dit_train(TINY_DIT, batch=2, scan=remat),
        lambda remat: (
            unrolled_train("tiny-moe", batch=2, tokens=16)
            if remat is None
            else train("tiny-moe", batch=2, tokens=16, remat=remat)
        ),
    ],
    ids=["vit", "dit", "moe"],
)
def test_training_with_layers_in_a_row_scanned_or_computed_again(
    make: Callable[[Remat | None], Workload], remat: Remat | None
):
    fun, args = make(remat)
    after, _ = traced((fun, args))
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, args[0])
    found = str(jax.make_jaxpr(fun)(*args))
    assert ("scan[" in found) == (remat is not None)
    assert ("remat" in found) == (remat == "layer")


def test_train_takes_what_it_is_told():
    options = TrainOptions(microbatches=2, clip_norm=None)
    workload = train(
        "tiny", batch=4, tokens=16, remat="none", options=options, param_dtype=jnp.float32
    )
    state, _ = workload[1]
    assert size(state) == 12 * CONFIGS["tiny"].param_count + 4
    traced(workload)


@pytest.mark.parametrize(
    "workload",
    [
        scanned_decode("llama3-8b", batch=64, cache_length=128, mesh=MESH),
        scanned_prefill("llama3-8b", batch=64, tokens=64, cache_length=128, mesh=MESH),
        train("llama3-8b", batch=64, tokens=64, mesh=MESH),
    ],
    ids=["decode", "prefill", "train"],
)
def test_a_mesh_splits_nearly_all_bytes_evenly(workload: Workload):
    traced(workload)
    leaves = jax.tree.leaves(workload[1])
    parts = [
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves
    ]
    assert sum(parts) < 1.01 * size(leaves) / MESH.size
