"""Programs whose arguments may lie in many orders: projections of attention, convolutions,
checkpoints with transposed weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from models.corpus import CORPUS
from models.workloads import Workload

_BF16 = jnp.bfloat16
_EXTENT = {"b": 4, "t": 1024, "d": 1024, "h": 8, "k": 128}
_LAYERS = 4

# The orders in which frameworks store a projection to heads.
PROJECTIONS = ("dhk", "dkh", "hdk", "hkd", "kdh", "khd")


def projection(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum(f"btd,{spec}->bhtk", x, w)


def attention_layers(spec: str, params: Any, x: jax.Array) -> jax.Array:
    """Scanned layers of attention; all weights are stored as `spec` says."""

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        q, k, v = (projection(spec, x, w[name]) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bhtk,bhsk->bhts", q, k))
        return x + jnp.einsum(f"bhts,bhsk,{spec}->btd", weights, v, w["o"]), None

    return lax.scan(layer, x, params)[0]


def convolutions(images: str, kernels: str, weights: Any, x: jax.Array) -> jax.Array:
    for w in weights:
        x = jax.nn.relu(
            lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=(images, kernels, images)
            )
        )
    return x


def transposed_mlp(weights: Any, x: jax.Array) -> jax.Array:
    """Weights [out, in], as PyTorch stores them."""
    for w in weights:
        x = jax.nn.gelu(x @ w.T)
    return x


def _array(spec: str, extent: Mapping[str, int], *leading: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*leading, *(extent[c] for c in spec)), _BF16)


def _projection(spec: str) -> Workload:
    return partial(projection, spec), (_array("btd", _EXTENT), _array(spec, _EXTENT))


def _attention(spec: str) -> Workload:
    params = {name: _array(spec, _EXTENT, _LAYERS) for name in "qkvo"}
    return partial(attention_layers, spec), (params, _array("btd", _EXTENT))


def _convolutions(images: str, kernels: str) -> Workload:
    image = {"N": 8, "H": 64, "W": 64, "C": 128}
    kernel = {"H": 3, "W": 3, "I": 128, "O": 128}
    arguments = [_array(kernels, kernel)] * 3, _array(images, image)
    return partial(convolutions, images, kernels), arguments


def _transposed() -> Workload:
    weights = [jax.ShapeDtypeStruct(s, _BF16) for s in ((4096, 1024), (1024, 4096))] * 2
    return transposed_mlp, (weights, _array("btd", _EXTENT))


type Program = tuple[Callable[[], Workload], str | None]
"""How to make a program and its arguments, and which of them is donated."""

PROGRAMS: Mapping[str, Program] = {
    **{f"projection {spec}": (partial(_projection, spec), None) for spec in PROJECTIONS},
    **{f"attention {spec}": (partial(_attention, spec), None) for spec in PROJECTIONS},
    "conv NHWC HWIO": (partial(_convolutions, "NHWC", "HWIO"), None),
    "conv NCHW OIHW": (partial(_convolutions, "NCHW", "OIHW"), None),
    "conv NCHW HWIO": (partial(_convolutions, "NCHW", "HWIO"), None),
    "mlp [out, in]": (_transposed, None),
    **{name: (entry.planning, entry.donate) for name, entry in CORPUS.items()},
}
