"""The front door of attention: what it computes, what it refuses, and in which words."""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, PartitionSpec

from pallas_kernels.attention import tpu
from pallas_kernels.attention.api import attention
from pallas_kernels.attention.problem import Band, Problem
from pallas_kernels.errors import (
    ImplementationNameError,
    KernelArgumentError,
    NotSupportedError,
)
from pallas_kernels.targets import current_target, target_of

Q_IDS = jnp.asarray(np.repeat([[0, 1, 2]], 11, axis=1))
KV_IDS = jnp.asarray(np.repeat([[0, 1, 3, 2]], 10, axis=1))


def arrays(batch: int = 1, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = ((batch, 33, 4, 16), (batch, 40, 2, 16), (batch, 40, 2, 16))
    q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"causal": True}, {"is_causal": True}),
        ({"window": (5, 3)}, {"local_window_size": (5, 3)}),
        ({"window": 4, "causal": True}, {"local_window_size": (4, 0)}),
        ({"scale": 0.3}, {"scale": 0.3}),
    ],
)
def test_agrees_with_jax(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    expected = jax.nn.dot_product_attention(*arrays(), **theirs)
    np.testing.assert_allclose(attention(*arrays(), **ours), expected, atol=2e-6)


def test_offset_moves_the_band() -> None:
    q, k, v = arrays()
    whole = jnp.concatenate([jnp.zeros_like(q[:, :7]), q], axis=1)
    expected = attention(whole, k, v, causal=True)[:, 7:]
    np.testing.assert_allclose(attention(q, k, v, causal=True, q_offset=7), expected, atol=1e-6)


@pytest.mark.parametrize("side", [39, 2**31 - 1, 2**40, np.int64(50)])
def test_a_window_beyond_all_keys_is_none(side: int) -> None:
    q, k, v = arrays()
    assert (attention(q, k, v, window=side) == attention(q, k, v)).all()
    moved = attention(q, k, v, window=(32 + 5, None), q_offset=5)
    assert (moved == attention(q, k, v)).all()


def test_soft_cap_bounds_scores() -> None:
    q, k, v = arrays()
    _, lse = attention(100 * q, k, v, soft_cap=2.0, return_lse=True)
    assert float(jnp.abs(lse - np.log(40)).max()) <= 2.0


def test_queries_that_see_nothing() -> None:
    q, k, v = arrays()
    out, lse = attention(q, k, v, causal=True, q_offset=-10, return_lse=True)
    assert not np.asarray(out[:, :10]).any()
    assert np.isneginf(np.asarray(lse[:, :, :10])).all()
    gradient = jax.grad(lambda q: attention(q, k, v, causal=True, q_offset=-10).sum())(q)
    assert np.isfinite(np.asarray(gradient)).all()


def materialised(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention of a window of (9, 3), causal, capped at 5, within segments; in plain jax."""
    k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
    scores = 5 * jnp.tanh(jnp.einsum("bthd,bshd->bhts", q, k) / 4 / 5)
    distance = jnp.arange(40) - jnp.arange(33)[:, None]
    seen = (distance <= 0) & (distance >= -9) & (Q_IDS[0][:, None] == KV_IDS[0])
    scores = jnp.where(seen, scores, -1e9)
    weights = jnp.where(seen.any(axis=-1)[:, None], jax.nn.softmax(scores, axis=-1), 0)
    lse = jnp.where(seen.any(axis=-1), jax.nn.logsumexp(scores, axis=-1), 0)
    return jnp.einsum("bhts,bshd->bthd", weights, v), lse


def with_everything(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same by `attention`; nothing where a query sees nothing."""
    ids = {"q_segment_ids": Q_IDS, "kv_segment_ids": KV_IDS}
    batched = {name: jnp.broadcast_to(x, (q.shape[0], x.shape[1])) for name, x in ids.items()}
    options: dict[str, Any] = {"causal": True, "window": (9, 3), "soft_cap": 5.0, **batched}
    out, lse = attention(q, k, v, **options, return_lse=True)
    return out, jnp.where(jnp.isinf(lse), 0, lse)


def loss(function: Callable[..., Any], q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    out, lse = function(q, k, v)
    return (out * jnp.cos(out)).sum() + (0.3 * lse).sum()


def test_gradients_of_outputs_and_log_sum_exp() -> None:
    found = jax.grad(partial(loss, with_everything), (0, 1, 2))(*arrays())
    expected = jax.grad(partial(loss, materialised), (0, 1, 2))(*arrays())
    for some, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(some, other, atol=3e-6)


def test_vmap_of_gradients_and_gradients_of_vmap() -> None:
    q, k, v = arrays()
    many = jnp.stack([q, 2 * q, q - 1])
    gradient = jax.grad(partial(loss, with_everything), (0, 1, 2))
    mapped = jax.vmap(gradient, in_axes=(0, None, None))(many, k, v)
    for i in range(3):
        for some, other in zip(mapped, gradient(many[i], k, v), strict=True):
            np.testing.assert_allclose(some[i], other, atol=3e-6)

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.vmap(partial(loss, with_everything), in_axes=(0, None, None))(q, k, v).sum()

    for some, other in zip(jax.grad(total, (0, 1, 2))(many, k, v), mapped, strict=True):
        summed = other if some.shape == other.shape else other.sum(axis=0)
        np.testing.assert_allclose(some, summed, atol=2e-5)


def test_second_derivatives_in_reverse_mode() -> None:
    q, k, v = (x[:, :3, :2, :4] for x in arrays())

    def second(attend: Callable[..., jax.Array]) -> jax.Array:
        return jax.jacrev(jax.grad(lambda q: jnp.sin(attend(q, k, v)).sum()))(q)

    expected = second(jax.nn.dot_product_attention)
    np.testing.assert_allclose(second(attention), expected, atol=3e-6)


def test_shard_map_over_batch_and_heads() -> None:
    q, k, v = arrays(batch=2)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    spec = PartitionSpec("data", None, "model")
    sharded = jax.shard_map(
        partial(attention, causal=True), mesh=mesh, in_specs=spec, out_specs=spec
    )
    np.testing.assert_allclose(
        jax.jit(sharded)(q, k, v), attention(q, k, v, causal=True), atol=1e-6
    )
    gradient = jax.jit(jax.grad(lambda q, k, v: sharded(q, k, v).sum(), (0, 1, 2)))(q, k, v)
    expected = jax.grad(lambda q, k, v: attention(q, k, v, causal=True).sum(), (0, 1, 2))(q, k, v)
    for some, other in zip(gradient, expected, strict=True):
        np.testing.assert_allclose(some, other, atol=3e-6)


def test_shard_map_with_keys_that_all_devices_share() -> None:
    q, k, v = arrays(batch=2)
    k, v = k[:, :, :1], v[:, :, :1]
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    split, shared = PartitionSpec("data", None, "model"), PartitionSpec("data")
    sharded = jax.shard_map(attention, mesh=mesh, in_specs=(split, shared, shared), out_specs=split)
    gradient = jax.jit(jax.grad(lambda q, k, v: sharded(q, k, v).sum(), (0, 1, 2)))(q, k, v)
    expected = jax.grad(lambda q, k, v: attention(q, k, v).sum(), (0, 1, 2))(q, k, v)
    for some, other in zip(gradient, expected, strict=True):
        np.testing.assert_allclose(some, other, atol=1e-5)


V6E = AbstractMesh((), (), abstract_device=AbstractDevice("TPU v6e", 1, "tpu"))


def kernels_on_tpu(function: Callable[..., Any]) -> list[str]:
    """By name, in a function of q, k and v."""
    shape = jax.ShapeDtypeStruct((1, 512, 2, 128), jnp.bfloat16)
    with jax.sharding.use_abstract_mesh(V6E):
        lowered = jax.jit(function).trace(*[shape] * 3).lower(lowering_platforms=("tpu",))
    return sorted(re.findall(r'kernel_name = "(attention_[a-z]+)', lowered.as_text()))


def gradient_of(layer: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *qkv: jnp.sin(layer(*qkv)).astype(jnp.float32).sum(), (0, 1, 2))


def kernels_of_a_gradient(policy: Any) -> list[str]:
    """In the gradient of a layer under `jax.checkpoint`."""
    layer = jax.checkpoint(partial(attention, causal=True), policy=policy)
    return kernels_on_tpu(gradient_of(layer))


def test_a_checkpoint_may_keep_what_the_kernel_gave() -> None:
    policies = jax.checkpoint_policies
    again = ["attention_backward", "attention_forward", "attention_forward"]
    assert kernels_of_a_gradient(policies.nothing_saveable) == again
    assert kernels_of_a_gradient(policies.save_only_these_names("attention_out")) == again
    both = policies.save_only_these_names("attention_out", "attention_lse")
    assert kernels_of_a_gradient(both) == ["attention_backward", "attention_forward"]


def test_second_derivatives_lower_for_a_tpu() -> None:
    def slope(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        d_q, *_ = gradient_of(partial(attention, causal=True, implementation="tpu"))(q, k, v)
        return d_q.astype(jnp.float32).sum()

    assert "attention_backward" in kernels_on_tpu(jax.grad(slope, (0, 1, 2)))


Q, K, V = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays())


def like(struct: jax.ShapeDtypeStruct, *shape: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape or struct.shape, dtype or struct.dtype)


@pytest.mark.parametrize(
    ("structs", "options", "sentence"),
    [
        (
            (like(Q, 33, 4, 16), K, V),
            {},
            r"q is of shape \(33, 4, 16\): expected \[batch, len, hea",
        ),
        (
            (Q, like(K, 2, 40, 2, 16), V),
            {},
            r"k is of shape \(2, 40, 2, 16\): expected \[1, kv_len",
        ),
        ((Q, K, like(V, 1, 39, 2, 16)), {}, r"v is of shape \(1, 39, 2, 16\): expected \(1, 40, 2"),
        ((Q, like(K, 1, 40, 3, 16), like(V, 1, 40, 3, 16)), {}, "a divisor of the 4 heads of q"),
        ((like(Q, dtype=jnp.int8), K, V), {}, "q is of type int8: expected bfloat16, float16"),
        ((Q, like(K, dtype=jnp.bfloat16), V), {}, "k is of type bfloat16: expected float32"),
        ((Q, like(K, 1, 0, 2, 16), like(V, 1, 0, 2, 16)), {}, "expected no empty axis"),
        ((Q, K, V), {"q_offset": 1.5}, r"q_offset is 1\.5: expected an int"),
        ((Q, K, V), {"window": -1}, "window is -1: expected at least 0 keys on a side"),
        ((Q, K, V), {"window": (4, 0.5)}, r"window is \(4, 0\.5\): expected at least 0 keys"),
        (
            (Q, K, V),
            {"window": (1, 2, 3)},
            r"window is \(1, 2, 3\): expected \(left, right\), or one",
        ),
        ((Q, K, V), {"soft_cap": "1"}, "soft_cap is '1': expected a positive number"),
        ((Q, K, V), {"scale": -0.1}, r"scale is -0\.1: expected a positive number"),
        ((Q, K, V), {"soft_cap": 0.0}, r"soft_cap is 0\.0: expected a positive number"),
        ((Q, K, V), {"q_segment_ids": Q_IDS}, "kv_segment_ids is None: expected ids of 40 keys"),
        ((Q, K, V), {"kv_segment_ids": KV_IDS}, "q_segment_ids is None: expected ids"),
        (
            (Q, K, V),
            {"q_segment_ids": Q_IDS, "kv_segment_ids": Q_IDS},
            r"kv_segment_ids is int\d+\[1, 33\]: expected int32\[1, 40\]",
        ),
    ],
)
def test_bad_arguments(
    structs: tuple[Any, Any, Any], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(KernelArgumentError, match=sentence):
        jax.eval_shape(partial(attention, **options), *structs)


def test_an_unknown_implementation() -> None:
    with pytest.raises(ImplementationNameError, match=r"'fast'.*expected one of 'tpu', .*'xla'"):
        attention(*arrays(), implementation="fast")


def test_each_that_refuses_says_why() -> None:
    with pytest.raises(NotSupportedError, match=r"for CPU takes.*\n  tpu: needs a TPU") as caught:
        attention(*arrays(), implementation="tpu")
    assert caught.value.reasons == {"tpu": "needs a TPU"}


def test_what_no_tpu_kernel_takes() -> None:
    problem = Problem(1, 8, 8, 1, 1, 80, "bfloat16", Band(), 1.0)
    reason = tpu.refusal(problem, target_of("tpu", "TPU v6 lite"))
    assert reason == "head_dim is 80: takes 64, 96, 128, 256. Pad the heads with zeros"
    for changed in ({"dtype": "float16"}, {"dtype": "float32", "head_dim": 256}):
        problem = dataclasses.replace(problem, **{"head_dim": 128, **changed})
        assert "takes" in (tpu.refusal(problem, target_of("tpu", "TPU v6 lite")) or "")
    assert "not known" in (tpu.refusal(problem, target_of("tpu", "TPU v99")) or "")


@pytest.mark.parametrize(
    ("kind", "generation"),
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("TPU v4", "unknown"),
    ],
)
def test_the_target_is_that_of_the_mesh(kind: str, generation: str) -> None:
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(kind, 1, "tpu"))
    assert current_target().platform == "cpu"
    with jax.sharding.use_abstract_mesh(mesh):
        assert current_target().generation == generation
