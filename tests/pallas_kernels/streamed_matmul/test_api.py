"""`streamed_matmul` on the CPU: results, gradients, batching, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from pallas_kernels.errors import KernelArgumentError, NotSupportedError
from pallas_kernels.streamed_matmul.api import streamed_matmul

rng = np.random.default_rng(0)
X = jnp.asarray(rng.normal(size=(5, 24)), jnp.float32)
W = jnp.asarray(rng.normal(size=(24, 7)), jnp.float32)
SCALES = jnp.asarray(rng.random(7), jnp.float32)
INT8 = jnp.asarray(rng.integers(-127, 128, size=(24, 7)), jnp.int8)


def on_host(w):
    return jax.device_put(w, SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))


def plain(x, w, scales=None):
    out = jnp.dot(x, w.astype(x.dtype), precision="highest")
    return out if scales is None else out * scales


@pytest.mark.parametrize("place", [on_host, lambda w: w], ids=["host", "device"])
def test_the_product_is_on_the_device(place):
    for call in (streamed_matmul, jax.jit(streamed_matmul)):
        out = call(X, place(W))
        np.testing.assert_allclose(out, plain(X, W), rtol=1e-5)
        assert out.sharding.memory_kind == "device"


def test_int8_weights_with_scales():
    out = streamed_matmul(X, on_host(INT8), w_scales=SCALES)
    np.testing.assert_allclose(out, plain(X, INT8, SCALES), rtol=1e-5)


def test_the_type_of_the_result():
    assert streamed_matmul(X.astype(jnp.bfloat16), W.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert streamed_matmul(X, W, out_dtype=jnp.bfloat16).dtype == jnp.bfloat16


def test_gradients_are_where_the_arguments_are():
    def loss(x, w, scales):
        return (streamed_matmul(x, w, w_scales=scales) ** 2).sum()

    found = jax.jit(jax.grad(loss, (0, 1, 2)))(X, on_host(W), SCALES)
    expected = jax.grad(lambda *a: (plain(*a) ** 2).sum(), (0, 1, 2))(X, W, SCALES)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-4, atol=1e-4)
    assert [g.sharding.memory_kind for g in found] == ["device", "pinned_host", "device"]


def test_gradients_beside_int8_weights():
    def loss(call):
        return lambda x, scales: (call(x, INT8, scales) ** 2).sum()

    found = jax.grad(loss(lambda x, w, s: streamed_matmul(x, w, w_scales=s)), (0, 1))(X, SCALES)
    expected = jax.grad(loss(plain), (0, 1))(X, SCALES)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_rows_join_under_vmap():
    several = jnp.stack([X, 2 * X, -X])
    out = jax.vmap(streamed_matmul, (0, None))(several, on_host(W))
    np.testing.assert_allclose(out, jnp.einsum("bmk,kn->bmn", several, W), rtol=1e-4, atol=1e-5)


def test_what_was_asked_for_stays_under_transformations():
    several = jax.ShapeDtypeStruct((2, 8, 4096), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)

    def gradient(implementation):
        def loss(x, w):
            out = jax.vmap(lambda x: streamed_matmul(x, w, implementation=implementation))(x)
            return out.astype(jnp.float32).sum()

        return str(jax.make_jaxpr(jax.grad(loss))(several, w))

    device = AbstractDevice("TPU v6e", 1, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        assert "pallas_call" in gradient("tpu")
        assert "pallas_call" not in gradient("xla")


def test_mapped_weights_are_refused():
    several = jnp.stack([X, X])
    with pytest.raises(KernelArgumentError, match="w or w_scales is mapped by vmap: expected"):
        jax.vmap(streamed_matmul)(several, jnp.stack([W, W]))


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        ((X[0], W), {}, r"x is of shape \(24,\): expected \[m, k\] of x"),
        ((X, W.T), {}, r"w is of shape \(7, 24\): expected \[24, n\]"),
        ((X[:, :0], W[:0]), {}, "expected no empty axis, but for the first of both"),
        ((X.astype(jnp.int32), W), {}, "x is of type int32: expected bfloat16, float16, float32"),
        ((X, W.astype(jnp.bfloat16)), {}, "w is of type bfloat16: expected float32"),
        ((X, W), {"w_scales": SCALES[:3]}, r"w_scales is float32\[3\]: expected float32\[7\]"),
        ((X, W), {"w_scales": [1.0] * 7}, r"w_scales is a list: expected an array float32\[7\]"),
        ((X, W), {"out_dtype": jnp.int8}, "out_dtype is int8: expected bfloat16"),
        ((X, W), {"out_dtype": "zz"}, "out_dtype is 'zz': expected bfloat16"),
        ((on_host(X), W), {}, "x is in host memory: expected it on the device"),
    ],
)
def test_bad_arguments(arguments, options, sentence: str):
    with pytest.raises(KernelArgumentError, match=sentence):
        streamed_matmul(*arguments, **options)


def test_the_kernel_says_why_it_is_not_for_the_cpu():
    with pytest.raises(NotSupportedError, match="tpu: it needs a TPU, which CPU is not"):
        streamed_matmul(X, W, implementation="tpu")


def test_gradients_under_shard_map_are_those_without() -> None:
    """Rows are split, weights and their scales are the same everywhere."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 16), (16, 24)))
    scales = jnp.asarray(rng.uniform(1, 2, 24), jnp.float32)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    rows, same = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    def product(x: jax.Array, w: jax.Array, scales: jax.Array) -> jax.Array:
        return streamed_matmul(x, w, w_scales=scales)

    split = jax.shard_map(product, mesh=mesh, in_specs=(rows, same, same), out_specs=rows)
    found, expected = (
        jax.jit(jax.grad(lambda *a, f=f: jnp.sin(f(*a)).sum(), (0, 1, 2)))(x, w, scales)
        for f in (split, product)
    )
    for some, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(some, other, rtol=1e-4, atol=1e-5)
