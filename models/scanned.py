"""The decoder of `models.llama` with its layers stacked and scanned, as large codebases hold it.

    model = ScannedLlama(TINY, rngs=nnx.Rngs(0))     or  abstract_model(TINY): no bytes
    graphdef, params = nnx.split(model)
    cache = init_cache(TINY, batch=2, max_len=64)

then `forward`, `loss_fn`, `prefill` and `decode_step` of `models.llama`, as for `Llama`.

Each weight is one array for all layers, [num_layers, ...], whose path says what it is:
`layers.mlp.gate`. One `lax.scan` goes over the layers, so that the program is as long for
80 layers as for one. Keys and values, one array each for all layers, go through the scan
as xs and ys: a layer reads its own, updates them and hands them on. The layer itself is
`models.llama.Block`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec, Sharding

from models.configs import LlamaConfig
from models.llama import Block, Cache, Decoder, cache_shape, with_sharding, write
from models.sharding import (
    CACHE,
    CACHE_BY_HEAD,
    LOGITS,
    STREAM,
    AnyMesh,
    constrained,
    gathered,
    named,
)

Remat = Literal["none", "layer"]
"""What the backward pass computes again: nothing, or each layer from its input."""

# Keys and values of one layer, or stacked those of all.
type _Memory = tuple[jax.Array, jax.Array]


class ScannedLlama(Decoder):
    """The decoder whose layers are one `Block` with stacked weights.

    Args:
      remat: what a gradient through the layers saves or computes again.
      mesh: splits weights and activations as `models.sharding` says; None for one device.

    Weights may be wider than `config.dtype`: each is rounded where it is used.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        rngs: nnx.Rngs,
        remat: Remat = "none",
        mesh: AnyMesh | None = None,
    ):
        super().__init__(config, rngs=rngs)
        self.remat: Remat = remat
        self.mesh = mesh

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs, mesh=mesh)

        self.layers = stacked(rngs)

    def hidden(self, tokens: jax.Array, past: Cache | None = None) -> tuple[jax.Array, Cache]:
        """See `Decoder.hidden`."""
        length = tokens.shape[1]
        position = jnp.zeros((), jnp.int32) if past is None else past.position
        span = length if past is None else past.max_len
        x, rotation, mask = self.start(tokens, position, span)

        def append(layer: Block, x: jax.Array, old: _Memory | None) -> tuple[jax.Array, _Memory]:
            return layer(x, rotation, mask, None if old is None else (*old, position))

        old = None if past is None else (past.keys, past.values)
        x, (keys, values) = self._scan(append, x, old)
        layout = "by_token" if past is None else past.layout
        return x, Cache(keys, values, position + length, layout)

    def fill(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """See `Decoder.fill`."""
        length = tokens.shape[1]
        start = jnp.zeros((), jnp.int32)
        x, rotation, mask = self.start(tokens, start, length)

        def fill(layer: Block, x: jax.Array, old: _Memory) -> tuple[jax.Array, _Memory]:
            x, (keys, values) = layer(x, rotation, mask, None)
            return x, (
                write(old[0], keys, 0, cache.layout),
                write(old[1], values, 0, cache.layout),
            )

        x, (keys, values) = self._scan(fill, x, (cache.keys, cache.values))
        return x, Cache(keys, values, start + length, cache.layout)

    def _scan(
        self,
        step: Callable[[Block, jax.Array, Any], tuple[jax.Array, _Memory]],
        x: jax.Array,
        memory: Any,
    ) -> tuple[jax.Array, _Memory]:
        """`step` for each layer and its part of `memory`, on the residual stream `x`.

        `memory` is a pytree whose arrays have the layers as their leading axis.
        """
        graphdef, stacked = nnx.split(self.layers)

        def body(x: jax.Array, slices: tuple[nnx.State, Any]) -> tuple[jax.Array, _Memory]:
            weights, old = slices
            x, new = step(nnx.merge(graphdef, self._taken(weights)), x, old)
            return self._split(x, STREAM), new

        if self.remat == "layer":
            # The scan already keeps XLA from merging the two computations of a layer.
            body = jax.checkpoint(body, prevent_cse=False)
        return lax.scan(body, self._split(x, STREAM), (stacked, memory))

    def table(self, name: str) -> jax.Array:
        """See `Decoder.table`."""
        return self._taken({name: super().table(name)})[name]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """See `Decoder.logits`."""
        return self._split(super().logits(hidden), LOGITS)

    def _taken[Weights](self, weights: Weights) -> Weights:
        """`weights` as the computation takes them: in its dtype, gathered over "fsdp"."""
        weights = jax.tree.map(lambda weight: weight.astype(self.config.dtype), weights)
        return weights if self.mesh is None else gathered(weights, self.mesh)

    def _split(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return x if self.mesh is None else constrained(x, spec, self.mesh)


def init_cache(config: LlamaConfig, batch: int, max_len: int) -> Cache:
    """An empty cache for `batch` sequences of at most `max_len` tokens.

    Its keys and values are one array each, [num_layers, ...], as of `models.llama.cache_shape`.
    """
    shape = (config.num_layers, *cache_shape(config, batch, max_len))
    return Cache(
        keys=jnp.zeros(shape, config.dtype),
        values=jnp.zeros(shape, config.dtype),
        position=jnp.zeros((), jnp.int32),
        layout=config.cache_layout,
    )


def cache_shardings(cache: Cache, mesh: AnyMesh) -> Cache:
    """A `NamedSharding` for each array of a cache, as `models.sharding` splits it."""
    spec = CACHE if cache.layout == "by_token" else CACHE_BY_HEAD
    return jax.tree.map(lambda leaf: named(leaf.shape, spec, mesh), cache)


def stack_params(params: nnx.State) -> nnx.State:
    """The params of a `Llama` as those of a `ScannedLlama`; gradients likewise."""
    rest = params.raw_mapping
    layers = rest["layers"]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(layers[i] for i in sorted(layers)))
    return nnx.State({**rest, "layers": stacked})


def unstack_params(params: nnx.State) -> nnx.State:
    """The params of a `ScannedLlama` as those of a `Llama`: `stack_params` undone."""
    rest = params.raw_mapping
    stacked = rest["layers"]
    num_layers = jax.tree.leaves(stacked)[0].shape[0]
    layers = {i: jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(num_layers)}
    return nnx.State({**rest, "layers": layers})


def abstract_model(
    config: LlamaConfig,
    sharding: Sharding | None = None,
    *,
    remat: Remat = "none",
    mesh: AnyMesh | None = None,
) -> ScannedLlama:
    """The model with a `jax.ShapeDtypeStruct` for each parameter: no bytes, whatever its size.

    Args:
      sharding: put on every parameter, say a memory kind or a described topology's device.
      remat, mesh: as of `ScannedLlama`.
    """
    model = nnx.eval_shape(lambda: ScannedLlama(config, rngs=nnx.Rngs(0), remat=remat, mesh=mesh))
    return with_sharding(model, sharding)


def abstract_params(config: LlamaConfig, sharding: Sharding | None = None) -> nnx.State:
    """The params of `abstract_model`, in the structure that `nnx.split` gives."""
    return nnx.state(abstract_model(config, sharding))


def abstract_cache(
    config: LlamaConfig, batch: int, max_len: int, sharding: Sharding | None = None
) -> Cache:
    """`init_cache` with a `jax.ShapeDtypeStruct`, carrying `sharding`, for each array."""
    cache = jax.eval_shape(lambda: init_cache(config, batch, max_len))
    return with_sharding(cache, sharding)
