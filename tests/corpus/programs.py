"""The programs of the corpus: small, and each with something that moves memory its own way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import models.llama as llama
from models.configs import TINY


@dataclass(frozen=True)
class Argument:
    """An array argument.

    Attributes:
      host: it lives in pinned host memory.
      partition: mesh axis of each dimension, for programs on several devices.
    """

    shape: tuple[int, ...]
    dtype: Any = jnp.float32
    host: bool = False
    partition: tuple[str | None, ...] = ()


@dataclass(frozen=True)
class Program:
    """A function with the shapes of its arguments: a pytree of `Argument`s each.

    Attributes:
      donate: numbers of the donated arguments.
      mesh: axis name to size.
    """

    function: Callable[..., Any]
    arguments: Sequence[Any]
    donate: tuple[int, ...] = ()
    mesh: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"x": 1})


BF16 = jnp.bfloat16


def _mlp(x, weights):
    for w in weights:
        x = jnp.tanh(x @ jax.device_put(w, jax.memory.Space.Device))
    return x


def _mlp_loss(weights, x):
    for w in weights:
        x = jax.nn.gelu(x @ w)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def _adam(state, x):
    weights, first, second, step = state
    loss, gradients = jax.value_and_grad(_mlp_loss)(weights, x)
    step = step + 1

    def update(w, g, m, v):
        g = g.astype(jnp.float32)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        rate = 1e-3 * jnp.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        return (w - rate * m / (jnp.sqrt(v) + 1e-8)).astype(w.dtype), m, v

    updated = [update(*t) for t in zip(weights, gradients, first, second, strict=True)]
    weights, first, second = (list(column) for column in zip(*updated, strict=True))
    return (weights, first, second, step), loss


def _scan(x, stacked):
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, stacked)[0]


def _scan_loss(stacked, x):
    return jnp.sum(_scan(x, stacked).astype(jnp.float32))


def _scan_remat_loss(stacked, x):
    layer = jax.checkpoint(lambda c, w: (jax.nn.gelu(c @ w) @ w.T + c, None))
    return jnp.sum(lax.scan(layer, x, stacked)[0].astype(jnp.float32))


def _scan_host(x, stacked):
    def layer(c, w):
        return jnp.tanh(c @ jax.device_put(w, jax.memory.Space.Device)), None

    return lax.scan(layer, x, stacked)[0]


def _conditional(flag, x, w):
    def wide(x):
        return jnp.tanh(jnp.tanh(x @ w) @ w.T)

    return lax.cond(flag, wide, lambda x: jnp.flip(x, 0) * 2, x) + x


def _conv_loss(kernels, x):
    for kernel in kernels:
        dimensions = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x, kernel, (1, 1), ((1, 1), (1, 1)), None, None, dimensions)
        x = jax.nn.relu(x)
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.mean(x)


def _sort(x, keys):
    values, indices = lax.top_k(x, 64)
    order = jnp.argsort(keys)
    return (
        values,
        indices,
        jnp.take(keys, order),
        lax.sort((keys, jnp.arange(keys.size)), num_keys=1),
    )


def _embedding_loss(table, w, tokens):
    x = table[tokens]
    return jnp.sum(jnp.tanh(x @ w))


def _softmax(x, mask):
    y = jnp.where(mask, x, -1e9)
    y = jax.nn.softmax(y, -1) + jax.nn.log_softmax(x, 0)
    return (y - y.mean(-1, keepdims=True)) / (y.std(-1, keepdims=True) + 1e-5)


def _random(key, x):
    a, b = jax.random.split(key)
    keep = jax.random.bernoulli(a, 0.9, x.shape)
    return jnp.where(keep, x / 0.9, 0) + jax.random.normal(b, x.shape)


def _sharded(x, weights):
    for w, u in weights:
        x = x + jax.nn.gelu(x @ w) @ u
    return x


def _sharded_loss(weights, x):
    return jnp.mean(_sharded(x, weights).astype(jnp.float32) ** 2)


def _cumsum(x):
    return jnp.cumsum(x, 0) - lax.associative_scan(jnp.maximum, x, axis=1)


def _int8(x, w, scale):
    y = lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)
    y = y.astype(jnp.float32) * scale
    return jnp.clip(jnp.round(y), -128, 127).astype(jnp.int8)


def _sliced_loop(x, out):
    def body(i, out):
        row = lax.dynamic_slice_in_dim(x, i * 8, 8)
        return lax.dynamic_update_slice_in_dim(out, jnp.tanh(row @ row.T @ row), i * 8, 0)

    return lax.fori_loop(0, x.shape[0] // 8, body, out)


def _while(x, w):
    def unfinished(carry):
        _, change, n = carry
        return (change > 1e-3) & (n < 100)

    def body(carry):
        x, _, n = carry
        y = lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ w), x)
        return y, jnp.max(jnp.abs(x - y)), n + 1

    return lax.while_loop(unfinished, body, (x, jnp.float32(1), 0))[0]


def _rotate(a, b, c):
    return lax.fori_loop(0, 10, lambda _, t: (t[1], t[2], t[0] @ t[1]), (a, b, c))


def _offloaded_residuals(weights, x):
    def layer(x, w):
        return checkpoint_name(jnp.tanh(x @ w), "kept")

    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["kept"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    @partial(jax.checkpoint, policy=policy)
    def loss(weights, x):
        for w in weights:
            x = layer(x, w)
        return jnp.sum(x.astype(jnp.float32))

    return jax.grad(loss)(weights, x)


def _linalg(a, b):
    factor = jnp.linalg.cholesky(a @ a.T + 100 * jnp.eye(a.shape[0]))
    return lax.linalg.triangular_solve(factor, b, left_side=True, lower=True)


def _attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores.astype(jnp.float32), -1e9), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(q.dtype), v)


def _many_outputs(x):
    return [jnp.roll(x, i) * i for i in range(6)], x.T @ x, x.sum(0), x.max(1)


def _transposes(x, w):
    y = jnp.transpose(x, (2, 0, 1)).reshape(-1, x.shape[1]) @ w
    return jnp.concatenate([y, y[::-1]], 0).astype(BF16), jnp.pad(y, 8)


_LLAMA = dataclasses.replace(TINY, num_layers=8, embed_dim=1024, mlp_dim=4096)
_GRAPH, _PARAMS = nnx.split(llama.abstract_model(_LLAMA))
_CACHE = llama.abstract_cache(_LLAMA, 16, 2048)


def _as_arguments(tree: Any, *, host: bool = False) -> Any:
    return jax.tree.map(lambda a: Argument(a.shape, a.dtype, host), tree)


def _llama_train(params, tokens):
    loss, gradients = jax.value_and_grad(partial(llama.loss_fn, _GRAPH))(params, tokens)
    return jax.tree.map(lambda p, g: p - (0.01 * g).astype(p.dtype), params, gradients), loss


def _llama_offloaded(params, tokens):
    return llama.forward(_GRAPH, jax.device_put(params, jax.memory.Space.Device), tokens)


_WEIGHTS = [Argument((4096, 4096), BF16)] * 6
_STATE = (
    [Argument((4096, 4096), BF16)] * 4,
    [Argument((4096, 4096))] * 4,
    [Argument((4096, 4096))] * 4,
    Argument((), jnp.int32),
)
_SHARDED = [
    (
        Argument((4096, 16384), BF16, partition=(None, "x")),
        Argument((16384, 4096), BF16, partition=("x",)),
    )
] * 3

# Sizes are such that not everything fits a TPU's 128 MiB of VMEM. Compiling costs the same.
PROGRAMS: Mapping[str, Program] = {
    "mlp_offloaded": Program(
        _mlp, [Argument((256, 4096), BF16), [Argument((4096, 4096), BF16, host=True)] * 6]
    ),
    "mlp_grad": Program(jax.grad(_mlp_loss), [_WEIGHTS, Argument((16384, 4096), BF16)]),
    "adam": Program(_adam, [_STATE, Argument((16384, 4096), BF16)], donate=(0,)),
    "scan": Program(_scan, [Argument((32768, 4096), BF16), Argument((8, 4096, 4096), BF16)]),
    "scan_grad": Program(
        jax.grad(_scan_loss), [Argument((8, 4096, 4096), BF16), Argument((8192, 4096), BF16)]
    ),
    "scan_remat_grad": Program(
        jax.grad(_scan_remat_loss),
        [Argument((8, 4096, 8192), BF16), Argument((8192, 4096), BF16)],
    ),
    "scan_offloaded": Program(
        _scan_host, [Argument((32768, 4096), BF16), Argument((8, 4096, 4096), BF16, host=True)]
    ),
    "conditional": Program(
        _conditional,
        [Argument((), jnp.bool_), Argument((16384, 4096)), Argument((4096, 8192))],
    ),
    "conv_grad": Program(
        jax.grad(_conv_loss),
        [
            [Argument((3, 3, 16, 32)), Argument((3, 3, 32, 32)), Argument((3, 3, 32, 64))],
            Argument((64, 128, 128, 16)),
        ],
    ),
    "sort": Program(_sort, [Argument((8192, 4096)), Argument((2**24,))]),
    "embedding_grad": Program(
        jax.grad(_embedding_loss, (0, 1)),
        [Argument((131072, 1024)), Argument((1024, 4096)), Argument((64, 512), jnp.int32)],
    ),
    "softmax": Program(_softmax, [Argument((16384, 8192)), Argument((16384, 8192), jnp.bool_)]),
    "random": Program(_random, [Argument((2,), jnp.uint32), Argument((16384, 8192))]),
    "sharded": Program(_sharded, [Argument((16384, 4096), BF16), _SHARDED], mesh={"x": 4}),
    "sharded_grad": Program(
        jax.grad(_sharded_loss),
        [_SHARDED, Argument((16384, 4096), BF16, partition=("x",))],
        mesh={"x": 4},
    ),
    "cumsum": Program(_cumsum, [Argument((8192, 8192))]),
    "int8": Program(
        _int8,
        [Argument((16384, 4096), jnp.int8), Argument((4096, 8192), jnp.int8), Argument((8192,))],
    ),
    "sliced_loop": Program(
        _sliced_loop, [Argument((32768, 4096)), Argument((32768, 4096))], donate=(1,)
    ),
    "while": Program(_while, [Argument((32768, 2048)), Argument((2048, 2048))]),
    "rotate": Program(_rotate, [Argument((8192, 8192))] * 3),
    "residuals_offloaded": Program(
        _offloaded_residuals, [[Argument((4096, 4096), BF16)] * 6, Argument((16384, 4096), BF16)]
    ),
    "linalg": Program(_linalg, [Argument((4096, 4096)), Argument((4096, 4096))]),
    "attention": Program(_attention, [Argument((4, 4096, 8, 128), BF16)] * 3),
    "many_outputs": Program(_many_outputs, [Argument((4096, 8192))]),
    "transposes": Program(_transposes, [Argument((256, 1024, 256)), Argument((1024, 1024))]),
    "llama_prefill": Program(
        partial(llama.prefill, _GRAPH),
        [_as_arguments(_PARAMS), Argument((16, 1024), jnp.int32), _as_arguments(_CACHE)],
        donate=(2,),
    ),
    "llama_decode": Program(
        partial(llama.decode_step, _GRAPH),
        [_as_arguments(_PARAMS), Argument((16, 1), jnp.int32), _as_arguments(_CACHE)],
        donate=(2,),
    ),
    "llama_train": Program(
        _llama_train, [_as_arguments(_PARAMS), Argument((16, 1024), jnp.int32)], donate=(0,)
    ),
    "llama_offloaded": Program(
        _llama_offloaded, [_as_arguments(_PARAMS, host=True), Argument((8, 512), jnp.int32)]
    ),
}
