"""The decoders of `models.llama` and `models.moe` with layers stacked and scanned, as large
codebases hold them.

    model = ScannedLlama(TINY, rngs=nnx.Rngs(0))     or  abstract_model(TINY): no bytes
    graphdef, params = nnx.split(model)
    cache = init_cache(TINY, batch=2, max_len=64)

then `forward`, `loss_fn`, `prefill` and `decode_step` of `models.llama`, as for `Llama`.

Each weight is one array for all layers, [num_layers, ...], whose path says what it is:
`layers.mlp.gate`. One `lax.scan` goes over the layers, so that the program is as long for
80 layers as for one. Keys and values, one array each for all layers, go through the scan
as xs and ys: a layer reads its own, updates them and hands them on. The layer itself is
`models.llama.Block`, or `models.moe.MoeBlock`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec, Sharding

from models.configs import LlamaConfig, MoeConfig
from models.llama import Block, Cache, Decoder, cache_shape, with_sharding, write
from models.moe import MoeBlock
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
from models.stacking import Remat, scan_layers, stacked

# Keys and values of one layer, or stacked those of all.
type _Memory = tuple[jax.Array, jax.Array]


class ScannedLlama(Decoder):
    """The decoder whose layers are one `Block` with stacked weights.

    Args:
      remat: what a gradient through the layers saves or computes again.
      mesh: splits weights and activations as `models.sharding` says; None for one device.

    Weights may be wider than `config.dtype`: each is rounded where it is used.
    """

    block_type: type[Block] = Block

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

        block = functools.partial(self.block_type, config, mesh=mesh)
        self.layers = stacked(block, config.num_layers, rngs=rngs)

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
        step: Callable[[Block, jax.Array, Any], tuple[jax.Array, Any]],
        x: jax.Array,
        memory: Any,
    ) -> tuple[jax.Array, Any]:
        """`step` for each layer and its part of `memory`, on the residual stream `x`.

        `memory` is a pytree whose arrays have the layers as their leading axis.
        """

        def split(layer: Block, x: jax.Array, old: Any) -> tuple[jax.Array, Any]:
            x, new = step(layer, x, old)
            return self._split(x, STREAM), new

        x = self._split(x, STREAM)
        return scan_layers(self.layers, split, x, memory, remat=self.remat, taken=self._taken)

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


class ScannedMoeLlama(ScannedLlama):
    """`models.moe.MoeLlama` with stacked layers, for its `loss_fn`, too."""

    block_type = MoeBlock
    config: MoeConfig

    def _scan(
        self,
        step: Callable[[Block, jax.Array, Any], tuple[jax.Array, Any]],
        x: jax.Array,
        memory: Any,
    ) -> tuple[jax.Array, Any]:
        """See `ScannedLlama._scan`; the layers' balance goes on to whoever captures this model."""

        def with_balance(layer: Block, x: jax.Array, old: Any) -> tuple[jax.Array, Any]:
            (x, new), balance = nnx.capture(step, nnx.Intermediate)(layer, x, old)
            return x, (new, jax.tree.leaves(balance))

        x, (new, balance) = super()._scan(with_balance, x, memory)
        self.sow(nnx.Intermediate, "balance", balance, capture_noop=True)
        return x, new


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
    kind = ScannedMoeLlama if isinstance(config, MoeConfig) else ScannedLlama
    model = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0), remat=remat, mesh=mesh))
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
