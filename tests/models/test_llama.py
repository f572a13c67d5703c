"""The decoder against a second one, written in float64 numpy straight from the papers."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import models.llama as llama
from models.configs import CONFIGS, TINY, LlamaConfig

# Two layers are enough for one to read what another wrote.
TWO_LAYERS = dataclasses.replace(TINY, num_layers=2)
TWO_LAYERS_F32 = dataclasses.replace(TWO_LAYERS, dtype=jnp.float32)
VARIANTS = {
    "grouped": TWO_LAYERS_F32,
    "one head a group": dataclasses.replace(TWO_LAYERS_F32, num_kv_heads=4),
    "one group": dataclasses.replace(TWO_LAYERS_F32, num_kv_heads=1),
    "tied": dataclasses.replace(TWO_LAYERS_F32, tie_embeddings=True),
    "other base": dataclasses.replace(TWO_LAYERS_F32, rope_theta=500_000.0),
}


# Compiled once a shape and shared by the tests; op by op, each test would compile its own.
forward = jax.jit(llama.forward, static_argnums=0)
prefill = jax.jit(llama.prefill, static_argnums=0)
decode_step = jax.jit(llama.decode_step, static_argnums=0)


@pytest.fixture(autouse=True)
def _full_precision():
    """Accelerators multiply float32 in fewer bits unless told otherwise."""
    with jax.default_matmul_precision("highest"):
        yield


@functools.cache
def build(config: LlamaConfig) -> tuple[nnx.GraphDef[llama.Llama], nnx.State]:
    """A model whose every parameter, norm scales too, is drawn wide enough to matter."""
    graphdef, params = nnx.split(llama.abstract_model(config))
    rng = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(rng.normal(scale=0.3, size=leaf.shape), leaf.dtype)

    return graphdef, jax.tree.map(draw, params)


def draw_tokens(config: LlamaConfig, batch: int, length: int) -> jax.Array:
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.integers(config.vocab_size, size=(batch, length)), jnp.int32)


def by_name(params: nnx.State) -> dict[str, np.ndarray]:
    return {
        ".".join(map(str, path)): np.asarray(variable[...], np.float64)
        for path, variable in nnx.to_flat_state(params)
    }


def reference_logits(config: LlamaConfig, params: nnx.State, tokens: jax.Array) -> np.ndarray:
    """One token of one sequence at a time, one head at a time; rotations are complex numbers."""
    weights = by_name(params)
    half = config.head_dim // 2

    def norm(vector: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return vector / math.sqrt((vector @ vector) / vector.size + config.norm_eps) * scale

    def rotate(vector: np.ndarray, position: int) -> np.ndarray:
        pairs = vector[:half] + 1j * vector[half:]
        wavelengths = config.rope_theta ** (np.arange(half) / half)
        turned = pairs * np.exp(1j * position / wavelengths)
        return np.concatenate([turned.real, turned.imag])

    def sequence(row: np.ndarray) -> np.ndarray:
        stream = [weights["embedding"][token] for token in row]
        for i in range(config.num_layers):
            w = {
                name.removeprefix(f"layers.{i}."): weight
                for name, weight in weights.items()
                if name.startswith(f"layers.{i}.")
            }
            normal = [norm(x, w["attention_norm"]) for x in stream]
            for t in range(len(row)):
                for head in range(config.num_heads):
                    kv_head = head * config.num_kv_heads // config.num_heads
                    query = rotate(normal[t] @ w["attention.query"][:, head], t)
                    scores = np.array(
                        [
                            query @ rotate(normal[s] @ w["attention.key"][:, kv_head], s)
                            for s in range(t + 1)
                        ]
                    ) / math.sqrt(config.head_dim)
                    odds = np.exp(scores - scores.max())
                    values = [normal[s] @ w["attention.value"][:, kv_head] for s in range(t + 1)]
                    mixed = (odds / odds.sum()) @ np.stack(values)
                    stream[t] = stream[t] + mixed @ w["attention.output"][head]
            for t in range(len(row)):
                x = norm(stream[t], w["mlp_norm"])
                gate = x @ w["mlp.gate"]
                silu = gate / (1 + np.exp(-gate))
                stream[t] = stream[t] + (silu * (x @ w["mlp.up"])) @ w["mlp.down"]
        head = weights["embedding"].T if config.tie_embeddings else weights["head"]
        return np.stack([norm(x, weights["final_norm"]) @ head for x in stream])

    return np.stack([sequence(row) for row in np.asarray(tokens)])


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_equals_the_reference(variant: str):
    config = VARIANTS[variant]
    graphdef, params = build(config)
    tokens = draw_tokens(config, batch=2, length=6)
    logits = forward(graphdef, params, tokens)
    expected = reference_logits(config, params, tokens)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_prefill_then_decode_equals_one_forward():
    config = TWO_LAYERS_F32
    graphdef, params = build(config)
    tokens = draw_tokens(config, batch=2, length=9)
    full = forward(graphdef, params, tokens)

    logits, cache = prefill(
        graphdef, params, tokens[:, :5], llama.init_cache(config, batch=2, max_len=16)
    )
    np.testing.assert_allclose(logits[:, 0], full[:, 4], rtol=1e-4, atol=1e-4)
    step = jax.jit(functools.partial(llama.decode_step, graphdef), donate_argnames="cache")
    for t in range(5, 9):
        assert int(cache.position) == t
        logits, cache = step(params, tokens[:, t : t + 1], cache)
        np.testing.assert_allclose(logits[:, 0], full[:, t], rtol=1e-4, atol=1e-4)


def test_a_prompt_can_be_appended_in_chunks():
    config = TWO_LAYERS_F32
    graphdef, params = build(config)
    tokens = draw_tokens(config, batch=1, length=8)
    empty = llama.init_cache(config, batch=1, max_len=8)
    expected, whole = prefill(graphdef, params, tokens, empty)

    _, cache = decode_step(graphdef, params, tokens[:, :3], empty)
    logits, cache = decode_step(graphdef, params, tokens[:, 3:], cache)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), cache, whole)


def test_prefill_forgets_what_the_cache_held():
    config = TWO_LAYERS_F32
    graphdef, params = build(config)
    tokens = draw_tokens(config, batch=1, length=4)
    empty = llama.init_cache(config, batch=1, max_len=8)
    _, used = prefill(graphdef, params, tokens[:, ::-1], empty)
    fresh_logits, fresh = prefill(graphdef, params, tokens[:, :2], empty)
    again_logits, again = prefill(graphdef, params, tokens[:, :2], used)
    np.testing.assert_array_equal(again_logits, fresh_logits)

    # The tail still holds the old prompt; the next step must not see it.
    expected, _ = decode_step(graphdef, params, tokens[:, 2:3], fresh)
    logits, _ = decode_step(graphdef, params, tokens[:, 2:3], again)
    np.testing.assert_array_equal(logits, expected)


def test_later_tokens_do_not_change_earlier_logits():
    config = TWO_LAYERS_F32
    graphdef, params = build(config)
    tokens = draw_tokens(config, batch=1, length=6)
    changed = tokens.at[:, 4].add(1) % config.vocab_size
    before = forward(graphdef, params, tokens)
    after = forward(graphdef, params, changed)
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert not np.allclose(before[:, 4:], after[:, 4:])


def test_bfloat16_stays_near_float32_and_scores_in_float32():
    graphdef, params = build(TWO_LAYERS)
    wide_graphdef, _ = build(TWO_LAYERS_F32)
    tokens = draw_tokens(TWO_LAYERS, batch=2, length=6)
    logits, cache = prefill(graphdef, params, tokens, llama.init_cache(TWO_LAYERS, 2, 8))
    assert logits.dtype == jnp.float32
    assert {array.dtype for array in (*cache.keys, *cache.values)} == {jnp.dtype(jnp.bfloat16)}

    widened = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    expected = forward(wide_graphdef, widened, tokens)[:, -1:]
    # A rounding to bfloat16 errs by 2**-9 at most; some twenty follow one another here.
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    assert error < 20 * 2**-9


def test_rms_norm_rounds_to_bfloat16_once():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(64, 64)), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True))
    normal = llama.rms_norm(x, jnp.ones(64, jnp.bfloat16), eps=0.0)
    # float32 may fall on the other side of a tie; with a bfloat16 mean one in four does.
    differs = np.asarray(normal) != np.asarray(expected.astype(jnp.bfloat16))
    assert differs.mean() < 1e-3


def rotate(vector: np.ndarray, position: int) -> np.ndarray:
    """`apply_rope` on one vector at one position, base 10,000."""
    rotation = llama.rope_rotation(jnp.asarray([position]), vector.size, 10_000.0)
    return np.asarray(llama.apply_rope(jnp.asarray(vector)[None, None, None], rotation)).ravel()


def test_rope_turns_the_first_pair_by_one_radian_a_position():
    turned = rotate(np.eye(8, dtype=np.float32)[0], 3)
    expected = np.zeros(8)
    expected[0], expected[4] = math.cos(3), math.sin(3)
    np.testing.assert_allclose(turned, expected, atol=1e-6)


@settings(max_examples=20)
@given(
    positions=st.tuples(st.integers(0, 500), st.integers(0, 500)),
    shift=st.integers(0, 500),
    seed=st.integers(0, 2**32 - 1),
)
def test_rope_scores_depend_on_the_distance_alone(
    positions: tuple[int, int], shift: int, seed: int
):
    query, key = np.random.default_rng(seed).normal(size=(2, 16)).astype(np.float32)
    m, n = positions
    near = rotate(query, m) @ rotate(key, n)
    far = rotate(query, m + shift) @ rotate(key, n + shift)
    np.testing.assert_allclose(near, far, atol=1e-2)
    np.testing.assert_allclose(np.linalg.norm(rotate(query, m)), np.linalg.norm(query), rtol=1e-5)


def test_loss_is_the_cross_entropy_of_the_reference():
    config = TWO_LAYERS_F32
    graphdef, params = build(config)
    tokens = draw_tokens(config, batch=2, length=5)
    logits = reference_logits(config, params, tokens)
    odds = np.exp(logits)
    probability = odds / odds.sum(-1, keepdims=True)
    surprise = [
        -math.log(probability[row, t, int(tokens[row, t + 1])])
        for row in range(2)
        for t in range(4)
    ]
    loss = jax.jit(llama.loss_fn, static_argnums=0)(graphdef, params, tokens)
    np.testing.assert_allclose(loss, np.mean(surprise), rtol=1e-5)


def test_loss_needs_something_to_predict():
    graphdef, params = build(TWO_LAYERS_F32)
    with pytest.raises(ValueError, match=r"\(2, 1\): a loss needs two tokens"):
        llama.loss_fn(graphdef, params, draw_tokens(TWO_LAYERS_F32, batch=2, length=1))


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_finite_and_true(tied: bool):
    config = dataclasses.replace(TWO_LAYERS_F32, num_layers=1, tie_embeddings=tied)
    graphdef, params = build(config)
    tokens = draw_tokens(config, batch=2, length=6)
    loss = jax.jit(functools.partial(llama.loss_fn, graphdef, tokens=tokens))
    gradients = jax.jit(jax.grad(loss))(params)
    for name, gradient in by_name(gradients).items():
        assert np.isfinite(gradient).all(), name
        assert gradient.any(), name

    # Along the gradient itself the loss must climb at the gradient's own norm.
    norm = math.sqrt(sum(np.vdot(leaf, leaf) for leaf in by_name(gradients).values()))
    step = 1e-2

    def at(distance: float) -> float:
        moved = jax.tree.map(lambda p, g: p + distance / norm * g, params, gradients)
        return float(loss(moved))

    slope = (at(step) - at(-step)) / (2 * step)
    assert slope == pytest.approx(norm, rel=1e-2)


@pytest.mark.parametrize("function", [llama.prefill, llama.decode_step])
def test_a_donated_cache_is_updated_in_place(function):
    graphdef, params = nnx.split(llama.abstract_model(TWO_LAYERS))
    cache = llama.abstract_cache(TWO_LAYERS, batch=2, max_len=32)
    tokens = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    step = jax.jit(functools.partial(function, graphdef), donate_argnames="cache")
    memory = step.lower(params, tokens, cache).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= 2 * 32 * TWO_LAYERS.cache_bytes_per_token


@pytest.mark.parametrize("function", [llama.prefill, llama.decode_step])
@pytest.mark.parametrize("shape", [(3, 2), (2, 5)])
def test_tokens_must_fit_the_cache(function, shape: tuple[int, int]):
    graphdef, params = nnx.split(llama.abstract_model(TWO_LAYERS))
    cache = llama.abstract_cache(TWO_LAYERS, batch=2, max_len=4)
    call = functools.partial(function, graphdef)
    with pytest.raises(ValueError, match="do not fit a cache for 2 sequences of at most 4 tokens"):
        jax.eval_shape(call, params, jax.ShapeDtypeStruct(shape, jnp.int32), cache)


def test_parameters_are_named_by_what_they_are():
    config = dataclasses.replace(TINY, num_layers=1)
    names = [
        ".".join(map(str, path)) for path, _ in nnx.to_flat_state(llama.abstract_params(config))
    ]
    assert names == [
        "embedding",
        "final_norm",
        "head",
        "layers.0.attention.key",
        "layers.0.attention.output",
        "layers.0.attention.query",
        "layers.0.attention.value",
        "layers.0.attention_norm",
        "layers.0.mlp.down",
        "layers.0.mlp.gate",
        "layers.0.mlp.up",
        "layers.0.mlp_norm",
    ]


def test_a_built_model_is_what_the_abstract_one_says():
    config = dataclasses.replace(TINY, num_layers=1)
    graphdef, params = nnx.split(llama.Llama(config, rngs=nnx.Rngs(0)))
    abstract_graphdef, abstract = nnx.split(llama.abstract_model(config))
    assert graphdef == abstract_graphdef
    assert jax.tree.structure(params) == jax.tree.structure(abstract)
    assert jax.tree.map(jax.typeof, params) == jax.tree.map(jax.typeof, abstract)
    for name, weight in by_name(params).items():
        if name.endswith("norm"):
            np.testing.assert_array_equal(weight, 1)
        else:
            assert np.std(weight) == pytest.approx(0.02, rel=0.05), name


def test_abstract_70b_is_never_materialised():
    config = CONFIGS["llama3-70b"]
    held = sum(array.nbytes for array in jax.live_arrays())
    graphdef, params = nnx.split(llama.abstract_model(config))
    cache = llama.abstract_cache(config, batch=8, max_len=8192)
    tokens = jax.ShapeDtypeStruct((8, 1), jnp.int32)
    logits, after = jax.eval_shape(
        functools.partial(llama.decode_step, graphdef), params, tokens, cache
    )
    assert logits.shape == (8, 1, config.vocab_size)
    assert after.keys == cache.keys
    leaves = jax.tree.leaves((params, cache))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    # What tracing itself keeps is a few scalars.
    assert sum(array.nbytes for array in jax.live_arrays()) - held < 1024


def test_sharding_reaches_every_abstract_leaf():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = llama.abstract_params(TINY, sharding)
    cache = llama.abstract_cache(TINY, 1, 8, sharding)
    assert {leaf.sharding for leaf in jax.tree.leaves((params, cache))} == {sharding}
    assert {leaf.sharding for leaf in jax.tree.leaves(llama.abstract_params(TINY))} == {None}


def test_each_weight_and_each_cache_array_of_7b_is_an_argument_of_its_own():
    config = CONFIGS["llama2-7b"]
    graphdef, params = nnx.split(llama.abstract_model(config))
    cache = llama.abstract_cache(config, batch=8, max_len=1024)
    tokens = jax.ShapeDtypeStruct((8, 1), jnp.int32)
    lowered = jax.jit(functools.partial(llama.decode_step, graphdef)).lower(params, tokens, cache)
    text = lowered.as_text(debug_info=True)
    assert "params['layers'][31]['mlp']['gate'].value" in text
    assert "cache.keys[31]" in text
    # 9 weights and 2 cache arrays a layer; tables, last norm, tokens, position.
    assert len(jax.tree.leaves(lowered.args_info)) == 32 * (9 + 2) + 3 + 1 + 1
