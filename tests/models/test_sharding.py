"""What is split over a mesh computes what one device does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import models.llama as llama
import models.scanned as scanned
from models.configs import CONFIGS, MOE_CONFIGS, TINY
from models.moe import MoeBlock
from models.sharding import TOKENS, gathered, named, weight_shardings
from models.training import TrainOptions, abstract_state, init_state, train_step
from tests.models.drawn import initial

CONFIG = dataclasses.replace(TINY, num_layers=2, dtype=jnp.float32)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "model"))


@pytest.fixture(autouse=True)
def _full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def pod(fsdp: int, model: int) -> AbstractMesh:
    return AbstractMesh((fsdp, model), ("fsdp", "model"), (AxisType.Auto,) * 2)


def specs(name: str, mesh: AbstractMesh) -> dict[str, P]:
    config = {**CONFIGS, **MOE_CONFIGS}[name]
    shardings = weight_shardings(scanned.abstract_params(config), mesh)
    return {
        ".".join(map(str, path)): leaf.get_value().spec
        for path, leaf in nnx.to_flat_state(shardings)
    }


def build() -> tuple[nnx.State, jax.Array]:
    params = initial(scanned.ScannedLlama, CONFIG)[1]
    rng = np.random.default_rng(1)
    return params, jnp.asarray(rng.integers(CONFIG.vocab_size, size=(4, 9)), jnp.int32)


def assert_close(found, expected) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max()),
        found,
        expected,
    )


@pytest.mark.slow
def test_a_split_step_computes_what_one_device_does(mesh: Mesh):
    params, tokens = build()
    options = TrainOptions(microbatches=2)
    state = init_state(params, options)
    plain = nnx.graphdef(scanned.abstract_model(CONFIG))
    split = nnx.graphdef(scanned.abstract_model(CONFIG, remat="layer", mesh=mesh))
    expected = jax.jit(functools.partial(train_step, plain, options))(state, tokens)
    placed = jax.device_put(state, weight_shardings(state, mesh))
    found = jax.jit(functools.partial(train_step, split, options))(placed, tokens)
    assert_close(found[1], expected[1])
    assert_close(found[0].optimizer, expected[0].optimizer)
    for after, before in zip(jax.tree.leaves(found[0]), jax.tree.leaves(placed), strict=True):
        assert after.sharding.is_equivalent_to(before.sharding, before.ndim)


@pytest.mark.slow
def test_a_split_decode_computes_what_one_device_does(mesh: Mesh):
    params, tokens = build()
    cache = scanned.init_cache(CONFIG, batch=4, max_len=16)
    split_cache = jax.device_put(cache, scanned.cache_shardings(cache, mesh))
    split_params = jax.device_put(params, weight_shardings(params, mesh))
    found, expected = (
        jax.jit(functools.partial(llama.prefill, nnx.graphdef(model)))(p, tokens, c)
        for model, p, c in (
            (scanned.abstract_model(CONFIG, mesh=mesh), split_params, split_cache),
            (scanned.abstract_model(CONFIG), params, cache),
        )
    )
    assert_close(found, expected)


def test_every_large_weight_is_split_over_both_axes():
    found = specs("llama3-8b", pod(32, 8))
    assert {name: spec for name, spec in found.items() if "norm" not in name} == {
        "embedding": P("model", "fsdp"),
        "head": P("fsdp", "model"),
        "layers.attention.key": P(None, "fsdp", "model", None),
        "layers.attention.output": P(None, "model", None, "fsdp"),
        "layers.attention.query": P(None, "fsdp", "model", None),
        "layers.attention.value": P(None, "fsdp", "model", None),
        "layers.mlp.down": P(None, "model", "fsdp"),
        "layers.mlp.gate": P(None, "fsdp", "model"),
        "layers.mlp.up": P(None, "fsdp", "model"),
    }


def test_each_device_of_the_model_axis_has_some_of_the_experts():
    found = specs("dbrx", pod(32, 8))
    assert {name: spec for name, spec in found.items() if "mlp." in name} == {
        "layers.mlp.down": P(None, "model", None, "fsdp"),
        "layers.mlp.gate": P(None, "model", "fsdp", None),
        "layers.mlp.router": P(None, "fsdp", None),
        "layers.mlp.up": P(None, "model", "fsdp", None),
    }


def test_the_experts_of_one_layer_are_split_as_those_of_all():
    mesh, config = pod(2, 2), MOE_CONFIGS["tiny-moe"]
    layer = nnx.state(nnx.eval_shape(lambda: MoeBlock(config, rngs=nnx.Rngs(0))))
    of_all = weight_shardings(scanned.abstract_params(config), mesh)["layers"]
    for one, all_ in zip(
        jax.tree.leaves(weight_shardings(layer, mesh)), jax.tree.leaves(of_all), strict=True
    ):
        assert all_.spec == P(None, *one.spec)


def test_heads_that_do_not_divide_stay_whole():
    # 8 key/value heads over 16 devices.
    found = specs("llama3-8b", pod(16, 16))
    assert found["layers.attention.key"] == P(None, "fsdp", None, None)
    assert found["layers.attention.query"] == P(None, "fsdp", "model", None)


def test_moments_are_split_as_their_weights_are():
    mesh = pod(2, 2)
    state = abstract_state(TINY, TrainOptions(), mesh=mesh)
    moments = [
        leaf.sharding
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.optimizer)
        if "gate" in jax.tree_util.keystr(path)
    ]
    assert moments == [named((4, 64, 160), P(None, "fsdp", "model"), mesh)] * 2


def test_gathered_weights_are_whole_but_for_the_model_axis(mesh: Mesh):
    params = jax.device_put(build()[0], weight_shardings(build()[0], mesh))
    for before, after in zip(
        jax.tree.leaves(params),
        jax.tree.leaves(jax.jit(lambda weights: gathered(weights, mesh))(params)),
        strict=True,
    ):
        spec = P(*(None if axis == "fsdp" else axis for axis in before.sharding.spec))
        assert after.sharding.is_equivalent_to(NamedSharding(mesh, spec), after.ndim)
        np.testing.assert_array_equal(after, before)


@pytest.mark.slow
def test_weights_wait_in_parts_and_are_gathered_a_layer_at_a_time(mesh: Mesh):
    config = dataclasses.replace(TINY, num_layers=3)
    options = TrainOptions()
    graphdef = nnx.graphdef(scanned.abstract_model(config, remat="layer", mesh=mesh))
    state = abstract_state(config, options, mesh=mesh)
    tokens = jax.ShapeDtypeStruct((4, 9), jnp.int32, sharding=named((4, 9), TOKENS, mesh))
    step = jax.jit(functools.partial(train_step, graphdef, options), donate_argnames="state")
    lowered = step.lower(state, tokens)
    # Of one layer, gate and up, split over "model" alone.
    assert '[{}, {"model"}]> : tensor<64x160xbf16>' in lowered.as_text()

    compiled = lowered.compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert memory is not None
    assert "[3,32,80]" in text  # gate and up of all layers, a quarter
    assert "[3,64,80]" not in text
    assert "[3,64,160]" not in text
    assert memory.alias_size_in_bytes > 0.9 * memory.argument_size_in_bytes
