"""A Llama decoder (Touvron et al., 2023, arXiv:2302.13971) in Flax NNX, used functionally.

    model = Llama(TINY, rngs=nnx.Rngs(0))          or  abstract_model(TINY): no bytes
    graphdef, params = nnx.split(model)
    cache = init_cache(TINY, batch=2, max_len=64)

    logits, cache = prefill(graphdef, params, prompt, cache)       the prompt, at once
    logits, cache = decode_step(graphdef, params, token, cache)    then token by token

`graphdef` is static (close over it with `functools.partial`, or `static_argnums=0`), the
rest are pytrees of arrays. Donate the cache: each layer's update is a
`dynamic_update_slice`, which XLA then performs in place.

Every layer owns its parameters and the loop over layers is unrolled, so that each weight
is one argument of the program, moved and placed by itself, with a path that says what it
is: `layers.3.mlp.gate`. Numerics follow the published implementation: weights,
activations and cache in `config.dtype`; RMSNorm, rotary embeddings, softmax and logits in
float32.
"""

import dataclasses
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Sharding

from models.attending import cached_attention, fused_attention
from models.configs import CacheLayout, LlamaConfig
from models.sharding import AnyMesh
from pallas_kernels.decode import write_tokens

# The `initializer_range` of the published configurations.
_INIT_STDDEV = 0.02


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens seen so far.

    Attributes:
      keys: one array a layer, in `layout`, already rotated; or those of all layers in one
        array, on a leading axis (`models.scanned`).
      values: likewise, not rotated.
      position: int32 scalar, how many tokens the cache holds; the next one goes there.
      layout: of each layer's array.
    """

    keys: tuple[jax.Array, ...] | jax.Array
    values: tuple[jax.Array, ...] | jax.Array
    position: jax.Array
    layout: CacheLayout = dataclasses.field(default="by_token", metadata={"static": True})

    @property
    def batch(self) -> int:
        """How many sequences there is room for."""
        return jax.tree.leaves(self.keys)[0].shape[-4]

    @property
    def max_len(self) -> int:
        """How many tokens of each sequence there is room for."""
        return jax.tree.leaves(self.keys)[0].shape[-3 if self.layout == "by_token" else -2]


def init_cache(config: LlamaConfig, batch: int, max_len: int) -> Cache:
    """An empty cache for `batch` sequences of at most `max_len` tokens.

    It takes `batch * max_len * config.cache_bytes_per_token` bytes, and 4 for the position.
    """
    shape = cache_shape(config, batch, max_len)

    # One buffer an array: two arguments that share a buffer cannot both be donated.
    def empty() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(shape, config.dtype) for _ in range(config.num_layers))

    return Cache(
        keys=empty(),
        values=empty(),
        position=jnp.zeros((), jnp.int32),
        layout=config.cache_layout,
    )


def cache_shape(config: LlamaConfig, batch: int, max_len: int) -> tuple[int, int, int, int]:
    """Of one layer's keys or values, in `config.cache_layout`."""
    if config.cache_layout == "by_token":
        return batch, max_len, config.num_kv_heads, config.head_dim
    return batch, config.num_kv_heads, max_len, config.head_dim


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root mean square normalisation (Zhang & Sennrich, 2019) of the last axis.

    Accumulates in float32, then scales in the dtype of `x`.
    """
    wide = x.astype(jnp.float32)
    normal = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return normal.astype(x.dtype) * scale


def rope_rotation(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, each [len, head_dim / 2] float32, for int `positions` [len].

    Coordinate pair i turns by `position * theta ** (-2 i / head_dim)` radians (Su et al.,
    2021, arXiv:2104.09864, section 3.2.2).
    """
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[:, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates `x` [batch, len, heads, head_dim] by its positions.

    A pair is coordinates i and i + head_dim / 2 ("rotate half"), as in the checkpoints
    published for `transformers`; the paper pairs 2 i with 2 i + 1, which is the same up to
    a permutation of the columns of the query and key weights.
    """
    cos, sin = (part[:, None, :] for part in rotation)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def grouped_attention(
    query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array
) -> jax.Array:
    """Softmax attention where consecutive query heads share a key/value head.

    (Ainslie et al., 2023, arXiv:2305.13245.) The scores are materialised: this is the plain
    form that a fused kernel is measured against.

    Args:
      query: [batch, len, num_heads, head_dim].
      keys, values: [batch, span, num_kv_heads, head_dim].
      mask: bool [len, span], true where the query may look.

    Returns:
      [batch, len, num_heads, head_dim] in the dtype of `query`.
    """
    batch, length, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[2]
    # Folding the group out of the query spares a repeat of keys and values in memory.
    query = query.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", query, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(mask, scores * head_dim**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    mixed = jnp.einsum("bkgts,bskd->btkgd", weights, values)
    return mixed.reshape(batch, length, num_heads, head_dim)


def init_weight(rngs: nnx.Rngs, shape: tuple[int, ...], config: LlamaConfig) -> nnx.Param:
    """A matrix in `config.dtype`, normal with a deviation of 0.02."""
    stddev = jnp.asarray(_INIT_STDDEV, config.dtype)
    return nnx.Param(jax.random.normal(rngs.params(), shape, config.dtype) * stddev)


def write(
    buffer: jax.Array, new: jax.Array, position: jax.Array | int, layout: CacheLayout
) -> jax.Array:
    """A layer's keys or values with `new` ones from `position` on.

    Args:
      buffer: in `layout`.
      new: [batch, len, heads, width].
    """
    if layout == "by_token":
        return lax.dynamic_update_slice_in_dim(buffer, new, position, axis=1)
    return write_tokens(buffer, new, jnp.asarray(position + new.shape[1], jnp.int32))


class Attention(nnx.Module):
    """Grouped-query attention; heads are an axis of their own in every weight.

    Args:
      mesh: that fused attention is split over, as of `fused_attention`.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, mesh: AnyMesh | None = None):
        self.is_fused = config.attention == "fused"
        self.layout: CacheLayout = config.cache_layout
        self.mesh = mesh
        embed, width = config.embed_dim, config.head_dim
        self.query = init_weight(rngs, (embed, config.num_heads, width), config)
        self.key = init_weight(rngs, (embed, config.num_kv_heads, width), config)
        self.value = init_weight(rngs, (embed, config.num_kv_heads, width), config)
        self.output = init_weight(rngs, (config.num_heads, width, embed), config)

    def __call__(
        self,
        x: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        mask: jax.Array,
        past: tuple[jax.Array, jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Attends from `x` [batch, len, embed_dim] to itself or, given one, to the past.

        `past` is a layer's (keys, values, position) of a `Cache`; `x` is written into it
        first. Also returns the keys and values that were attended to: in the layout of the
        cache, or without one by token.
        """
        query = apply_rope(jnp.einsum("bte,ehd->bthd", x, self.query[...]), rotation)
        keys = apply_rope(jnp.einsum("bte,ehd->bthd", x, self.key[...]), rotation)
        values = jnp.einsum("bte,ehd->bthd", x, self.value[...])
        if past is not None:
            old_keys, old_values, position = past
            keys = write(old_keys, keys, position, self.layout)
            values = write(old_values, values, position, self.layout)
        if not self.is_fused:
            mixed = grouped_attention(query, keys, values, mask)
        elif past is None:
            mixed = fused_attention(query, keys, values, self.mesh)
        else:
            mixed = cached_attention(query, keys, values, past[2] + x.shape[1], self.mesh)
        return jnp.einsum("bthd,hde->bte", mixed, self.output[...]), (keys, values)


class Mlp(nnx.Module):
    """SwiGLU (Shazeer, 2020, arXiv:2002.05202): `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.gate = init_weight(rngs, (config.embed_dim, config.mlp_dim), config)
        self.up = init_weight(rngs, (config.embed_dim, config.mlp_dim), config)
        self.down = init_weight(rngs, (config.mlp_dim, config.embed_dim), config)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, len, embed_dim] to the same."""
        return (jax.nn.silu(x @ self.gate[...]) * (x @ self.up[...])) @ self.down[...]


class Block(nnx.Module):
    """One decoder layer: attention, then the MLP, each on a normalised residual stream."""

    mlp_type: Callable[..., nnx.Module] = Mlp

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, mesh: AnyMesh | None = None):
        self.norm_eps = config.norm_eps
        self.attention_norm = nnx.Param(jnp.ones(config.embed_dim, config.dtype))
        self.attention = Attention(config, rngs=rngs, mesh=mesh)
        self.mlp_norm = nnx.Param(jnp.ones(config.embed_dim, config.dtype))
        self.mlp = self.mlp_type(config, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        mask: jax.Array,
        past: tuple[jax.Array, jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """As `Attention`, on the residual stream."""
        normal = rms_norm(x, self.attention_norm[...], self.norm_eps)
        mixed, present = self.attention(normal, rotation, mask, past)
        x = x + mixed
        return x + self.mlp(rms_norm(x, self.mlp_norm[...], self.norm_eps)), present


class Decoder(nnx.Module):
    """What surrounds the layers, however these are held: tables, positions, the last norm.

    Matrices start normal with a deviation of 0.02, norm scales at one.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = init_weight(rngs, (config.vocab_size, config.embed_dim), config)
        self.final_norm = nnx.Param(jnp.ones(config.embed_dim, config.dtype))
        self.head = (
            None
            if config.tie_embeddings
            else init_weight(rngs, (config.embed_dim, config.vocab_size), config)
        )

    def hidden(self, tokens: jax.Array, past: Cache | None = None) -> tuple[jax.Array, Cache]:
        """The residual stream after the last layer.

        Args:
          tokens: int [batch, len].
          past: what came before; None for sequences that start here.

        Returns:
          [batch, len, embed_dim], and the cache that holds every token attended to: `past`
          with the new tokens written into it, or one of exactly `len` entries, by token.
        """
        raise NotImplementedError

    def fill(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """The residual stream of sequences that start here, and `cache` from its start on.

        Args:
          tokens: int [batch, len].
          cache: whatever it holds is forgotten.

        Returns:
          [batch, len, embed_dim], and `cache` at position `len`.
        """
        raise NotImplementedError

    def start(
        self, tokens: jax.Array, position: jax.Array, span: int
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array], jax.Array]:
        """What the first layer reads: the residual stream, the rotation and the mask.

        Args:
          tokens: int [batch, len], from `position` on.
          span: how many entries of the cache there are to look at.
        """
        config = self.config
        positions = position + jnp.arange(tokens.shape[1])
        rotation = rope_rotation(positions, config.head_dim, config.rope_theta)
        # Causality also hides the part of the cache that nothing was written to yet.
        mask = positions[:, None] >= jnp.arange(span)
        return self.table("embedding")[tokens], rotation, mask

    def table(self, name: str) -> jax.Array:
        """A weight that is no layer's, as the computation takes it."""
        return getattr(self, name)[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., embed_dim] to float32 scores of the next token, [..., vocab_size]."""
        normal = rms_norm(hidden, self.table("final_norm"), self.config.norm_eps)
        if self.head is None:
            head, equation = self.table("embedding"), "...e,ve->...v"
        else:
            head, equation = self.table("head"), "...e,ev->...v"
        return jnp.einsum(equation, normal, head, preferred_element_type=jnp.float32)


class Llama(Decoder):
    """The decoder whose layers stand one after the other."""

    block_type: type[Block] = Block

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.layers = nnx.List(
            [self.block_type(config, rngs=rngs) for _ in range(config.num_layers)]
        )

    def hidden(self, tokens: jax.Array, past: Cache | None = None) -> tuple[jax.Array, Cache]:
        """See `Decoder.hidden`."""
        length = tokens.shape[1]
        position = jnp.zeros((), jnp.int32) if past is None else past.position
        span = length if past is None else past.max_len
        x, rotation, mask = self.start(tokens, position, span)
        keys, values = [], []
        for i, layer in enumerate(self.layers):
            layer_past = None if past is None else (past.keys[i], past.values[i], position)
            x, (layer_keys, layer_values) = layer(x, rotation, mask, layer_past)
            keys.append(layer_keys)
            values.append(layer_values)
        layout = "by_token" if past is None else past.layout
        return x, Cache(tuple(keys), tuple(values), position + length, layout)

    def fill(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """See `Decoder.fill`."""
        hidden, prompt = self.hidden(tokens)

        def filled(old: Iterable[jax.Array], new: Iterable[jax.Array]) -> tuple[jax.Array, ...]:
            return tuple(write(*pair, 0, cache.layout) for pair in zip(old, new, strict=True))

        keys, values = filled(cache.keys, prompt.keys), filled(cache.values, prompt.values)
        return hidden, Cache(keys, values, prompt.position, cache.layout)


def forward[Model: Decoder](
    graphdef: nnx.GraphDef[Model], params: nnx.State, tokens: jax.Array
) -> jax.Array:
    """Scores of every next token, without a cache.

    Args:
      graphdef, params: of `nnx.split` of a decoder.
      tokens: int [batch, len].

    Returns:
      float32 logits, [batch, len, vocab_size].
    """
    model = nnx.merge(graphdef, params)
    hidden, _ = model.hidden(tokens)
    return model.logits(hidden)


def loss_fn[Model: Decoder](
    graphdef: nnx.GraphDef[Model], params: nnx.State, tokens: jax.Array
) -> jax.Array:
    """Mean cross entropy, in nats per token, of each token given those before it.

    Args:
      graphdef, params: of `nnx.split` of a decoder; differentiate with `argnums=1`.
      tokens: int [batch, len], len at least 2; the first of each row is only read.

    Returns:
      float32 scalar.

    Raises:
      ValueError: if rows have fewer than two tokens: there is nothing to predict.
    """
    return next_token_loss(nnx.merge(graphdef, params), tokens)


def next_token_loss(model: Decoder, tokens: jax.Array) -> jax.Array:
    """`loss_fn` of a merged model."""
    if tokens.shape[1] < 2:
        raise ValueError(f"tokens of shape {tokens.shape}: a loss needs two tokens a row or more")
    hidden, _ = model.hidden(tokens[:, :-1])
    logits = model.logits(hidden)
    targets = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - targets)


def prefill[Model: Decoder](
    graphdef: nnx.GraphDef[Model], params: nnx.State, tokens: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Reads whole prompts into a cache, from its start: what it held before is forgotten.

    The prompt attends to itself only, so its cost does not depend on the cache's length.

    Args:
      graphdef, params: of `nnx.split` of a decoder.
      tokens: int [batch, len], prompts of one length.
      cache: donatable; every array of the result takes the place of one of its own.

    Returns:
      float32 logits of the token after the prompt, [batch, 1, vocab_size], and the cache at
      position `len`.

    Raises:
      ValueError: if the prompts are longer than the cache, or not one for each of its rows; if
        the cache was made for another kind of attention.
    """
    model = nnx.merge(graphdef, params)
    _check_fits(model.config, tokens, cache)
    hidden, cache = model.fill(tokens, cache)
    return model.logits(hidden[:, -1:]), cache


def decode_step[Model: Decoder](
    graphdef: nnx.GraphDef[Model], params: nnx.State, tokens: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Appends tokens to the sequences of a cache and scores the one after them.

    Args:
      graphdef, params: of `nnx.split` of a decoder.
      tokens: int [batch, 1]; a longer row appends a chunk of a prompt.
      cache: donatable; every array of the result takes the place of one of its own. The
        caller keeps `cache.position + tokens.shape[1] <= max_len`: the position is a traced
        value, and past the end XLA clamps the write onto the last entries.

    Returns:
      float32 logits of the next token, [batch, 1, vocab_size] (their argmax over the last
      axis is the next step's `tokens`), and the cache with the tokens appended.

    Raises:
      ValueError: if a row is longer than the whole cache, or rows are not as many as its; if
        the cache was made for another kind of attention.
    """
    model = nnx.merge(graphdef, params)
    _check_fits(model.config, tokens, cache)
    hidden, cache = model.hidden(tokens, cache)
    return model.logits(hidden[:, -1:]), cache


def _check_fits(config: LlamaConfig, tokens: jax.Array, cache: Cache) -> None:
    if cache.layout != config.cache_layout:
        raise ValueError(
            f"a cache {cache.layout} does not fit attention={config.attention!r}, whose cache is "
            f"{config.cache_layout}: build it with init_cache(config, batch, max_len)"
        )
    if tokens.shape[0] != cache.batch or tokens.shape[1] > cache.max_len:
        raise ValueError(
            f"tokens of shape {tokens.shape} do not fit a cache for {cache.batch} sequences of "
            f"at most {cache.max_len} tokens: build it with init_cache(config, batch, max_len)"
        )


def abstract_model(config: LlamaConfig, sharding: Sharding | None = None) -> Llama:
    """The model with a `jax.ShapeDtypeStruct` for each parameter: no bytes, whatever its size.

    Args:
      config: any configuration.
      sharding: put on every parameter, say a memory kind or a described topology's device.

    Returns:
      A `Llama` for `nnx.split`; its graphdef equals that of a materialised one.
    """
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
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


def with_sharding[Tree](tree: Tree, sharding: Sharding | None) -> Tree:
    """`tree` with a `jax.ShapeDtypeStruct`, carrying `sharding`, for each array."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )
