"""Decoders of the Llama family over pages of keys and values.

    logits, pools = step(config, params, pools, tokens, starts, counts, tables)

One function is both a chunk of a prompt, T tokens a row, and a decoding step, one token a row. It
writes keys and values of the tokens it is given into their pages, then reads those pages through
`decode_attention`. The tokens of a row stand at its *end*: the last one is always the last column,
whose logits are asked for, and the columns before the first one are queries that see only tokens
that are there, or none; a padding column behind the tokens would read what nobody wrote.

Llama (Touvron et al., 2023, arXiv:2302.13971) with grouped queries (Ainslie et al., 2023,
arXiv:2305.13245) and the frequencies of Llama 3.1 (Grattafiori et al., 2024, arXiv:2407.21783);
Qwen2 (Yang et al., 2024, arXiv:2407.10671), with biases of queries, keys and values; Qwen3 (Yang et
al., 2025, arXiv:2505.09388), whose heads of queries and keys are normalised. Normalisation,
rotation, softmax and logits are float32, the rest is of the parameters' type.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from memplan.serve.errors import ServeSettingError
from pallas_kernels.decode import Cache, decode_attention_in_parts, write_pages, write_tokens

type Params = Mapping[str, Any]


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 stretches wavelengths for contexts that are longer than it was trained with.

    Attributes:
      factor: by which the long ones are stretched.
      low_freq_factor, high_freq_factor: wavelengths above `original_len` / low are stretched, those
        below `original_len` / high are not, and between the two it is a mixture.
      original_len: tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_len: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder; hashable.

    Attributes:
      vocab_size: rows of the embedding table.
      num_layers: decoder blocks.
      embed_dim, mlp_dim, head_dim: widths of the residual stream, within the MLP, and of a head.
      num_heads, num_kv_heads: the former a multiple of the latter.
      norm_eps: added to the mean square inside RMSNorm.
      rope_theta: base of the rotary wavelengths; rope_scaling: how they are stretched.
      tie_embeddings: whether the output head is the embedding table.
      qkv_bias, output_bias, mlp_bias: which projections have biases.
      qk_norm: whether heads of queries and keys are normalised.
      max_len: tokens that it was trained for.
      dtype: of parameters, activations, keys and values, by numpy's name.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    max_len: int
    dtype: str

    def page_bytes(self, page_size: int) -> int:
        """Bytes of the keys and values of so many tokens, in all layers."""
        values = 2 * self.num_layers * self.num_kv_heads * page_size * self.head_dim
        return values * jnp.dtype(self.dtype).itemsize


class Pool(NamedTuple):
    """A layer's pages: keys, already rotated, and values, each
    [pages, num_kv_heads, page_size, head_dim]."""

    keys: jax.Array
    values: jax.Array


class Cold(NamedTuple):
    """Whole pages of sequences that are in no pool: read where they are, and not written.

    Attributes:
      layers: pages of each layer, numbered in all as here.
      tables: int32[B, P], which of them each sequence has.
      counts: int32[B], how many, 0 of a row that is not in use; entries of `tables` behind these
        may hold anything.
    """

    layers: Sequence[Pool]
    tables: jax.Array
    counts: jax.Array

    @property
    def lengths(self) -> jax.Array:
        """int32[B], tokens of each sequence."""
        return self.counts * self.layers[0].keys.shape[2]

    def part(self, layer: int) -> Cache:
        """What attention of a layer reads."""
        return Cache(*self.layers[layer], self.lengths, self.tables)


class Arriving(NamedTuple):
    """Pages that were stored and come into the pools, layer by layer.

    Attributes:
      layers: pages of each layer, [n, num_kv_heads, page_size, head_dim].
      pages: int32[n], those of the pools that they become; none twice.
    """

    layers: Sequence[Pool]
    pages: jax.Array

    def into(self, pool: Pool, layer: int) -> Pool:
        """A layer's pool with them."""
        stored = self.layers[layer]
        return Pool(*(write_pages(x, y, self.pages) for x, y in zip(pool, stored, strict=True)))


def make_pools(config: ModelConfig, pages: int, page_size: int) -> list[Pool]:
    """Pages of zeros for each layer."""
    shape = (pages, config.num_kv_heads, page_size, config.head_dim)

    # One buffer an array: two arguments that share one cannot both be donated.
    def zeros() -> jax.Array:
        return jnp.zeros(shape, config.dtype)

    return [Pool(zeros(), zeros()) for _ in range(config.num_layers)]


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of each parameter by its name in a checkpoint; matrices are [out, in]."""
    c = config
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes = dict[str, tuple[int, ...]]()
    shapes["model.embed_tokens.weight"] = c.vocab_size, c.embed_dim
    for layer in range(c.num_layers):
        linear = {
            "self_attn.q_proj": (queries, c.embed_dim, c.qkv_bias),
            "self_attn.k_proj": (keys, c.embed_dim, c.qkv_bias),
            "self_attn.v_proj": (keys, c.embed_dim, c.qkv_bias),
            "self_attn.o_proj": (c.embed_dim, queries, c.output_bias),
            "mlp.gate_proj": (c.mlp_dim, c.embed_dim, c.mlp_bias),
            "mlp.up_proj": (c.mlp_dim, c.embed_dim, c.mlp_bias),
            "mlp.down_proj": (c.embed_dim, c.mlp_dim, c.mlp_bias),
        }
        norms = {"input_layernorm": c.embed_dim, "post_attention_layernorm": c.embed_dim}
        if c.qk_norm:
            norms |= {"self_attn.q_norm": c.head_dim, "self_attn.k_norm": c.head_dim}
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, has_bias) in linear.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        for name, width in norms.items():
            shapes[f"{prefix}{name}.weight"] = (width,)
    shapes["model.norm.weight"] = (c.embed_dim,)
    if not c.tie_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.embed_dim)
    return shapes


def frequencies(config: ModelConfig) -> npt.NDArray[np.float32]:
    """float32[head_dim / 2]: radians by which each pair of coordinates turns from one position to
    the next (Su et al., 2021, arXiv:2104.09864)."""
    turns = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is not None:
        # Of how many whole waves a context of the original length has, both ends are given.
        waves = scaling.original_len * turns / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = np.clip((waves - low) / (high - low), 0, 1)
        turns = turns * (kept + (1 - kept) / scaling.factor)
    return turns.astype(np.float32)


def step(
    config: ModelConfig,
    params: Params,
    pools: Sequence[Pool],
    tokens: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    tables: jax.Array | Sequence[jax.Array],
    cold: Sequence[Cold] = (),
    arriving: Arriving | None = None,
) -> tuple[jax.Array, list[Pool]]:
    """Runs the next tokens of some sequences.

    Rows may be of one sequence: all write before any reads.

    Args:
      params: by their names in a checkpoint, of `parameter_shapes`.
      pools: one a layer. Donate them: they are written in place.
      tokens: int32[B, T], those of row b in its last `counts[b]` columns; the others may be any
        that there are.
      starts: int32[B], tokens of each sequence whose keys and values are in its pages, cold ones
        and those that arrive among them.
      counts: int32[B], how many follow, 0 to T; a row of 0 is not in use.
      tables: int32[B, P], the pages of each sequence in order, without the cold ones. Entries
        behind those of `starts + counts` tokens may hold anything. Or several, of consecutive rows,
        each as wide as its own need: how long a step is predicted to take, widths say.
      cold: any whole pages of the sequences, in groups that are read one after the other. The fewer
        pages a group has, the less of a device's memory it takes while it is read.
      arriving: pages that come into the pools with this step; a layer's are there when it reads.

    Returns:
      float32[B, vocab_size], logits of what follows each row's last token, and the pools. Nothing
      is written but the rows' new tokens, and what arrives.

    Raises:
      ServeSettingError: for tables of more or fewer rows than `tokens` has.
    """
    columns = jnp.arange(tokens.shape[1]) - tokens.shape[1]
    positions = jnp.maximum((starts + counts)[:, None] + columns, 0)
    # In the pools a sequence has no gaps where its cold pages are.
    away = sum((group.lengths for group in cold), jnp.zeros_like(starts))
    lengths = jnp.where(counts > 0, starts + counts - away, 0)
    groups = _rows_of(tables if isinstance(tables, Sequence) else [tables], len(tokens))
    angles = positions[..., None].astype(jnp.float32) * frequencies(config)
    rotation = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]

    x = params["model.embed_tokens.weight"][tokens]
    written: list[Pool] = []
    for layer, pool in enumerate(pools):
        p = _Layer(config, params, f"model.layers.{layer}.")
        normal = p.norm("input_layernorm", x)
        q = _rotated(p.heads("q", normal), rotation)
        k = _rotated(p.heads("k", normal), rotation)
        if arriving is not None:
            pool = arriving.into(pool, layer)
        values = p.heads("v", normal)
        for rows, table in groups:
            pool = Pool(
                *(
                    write_tokens(
                        pages, new[rows], lengths[rows], counts=counts[rows], block_tables=table
                    )
                    for pages, new in zip(pool, (k, values), strict=True)
                )
            )
        parts = [group.part(layer) for group in cold]
        mixed = jnp.concatenate(
            [
                decode_attention_in_parts(
                    q[rows],
                    [*(_of_rows(x, rows) for x in parts), Cache(*pool, lengths[rows], table)],
                )
                for rows, table in groups
            ]
        )
        x += p.linear("self_attn.o_proj", mixed.reshape(*mixed.shape[:2], -1))
        normal = p.norm("post_attention_layernorm", x)
        gate = jax.nn.silu(p.linear("mlp.gate_proj", normal))
        x += p.linear("mlp.down_proj", gate * p.linear("mlp.up_proj", normal))
        written.append(pool)

    last = _rms_norm(x[:, -1], params["model.norm.weight"], config.norm_eps)
    name = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    return _product(last, params[name], jnp.float32), written


def _rows_of(tables: Sequence[jax.Array], batch: int) -> list[tuple[slice, jax.Array]]:
    """Which rows of a step each table is of."""
    ends = [*itertools.accumulate(table.shape[0] for table in tables)]
    if ends[-1:] != [batch]:
        shapes = [table.shape for table in tables]
        raise ServeSettingError("tables", shapes, f"{batch} rows in all, one a row of tokens")
    return [(slice(a, b), table) for a, b, table in zip([0, *ends], ends, tables, strict=False)]


def _of_rows(part: Cache, rows: slice) -> Cache:
    assert part.block_tables is not None, "cold pages have tables"
    return replace(part, lengths=part.lengths[rows], block_tables=part.block_tables[rows])


class _Layer(NamedTuple):
    config: ModelConfig
    weights: Params
    prefix: str

    def linear(self, name: str, x: jax.Array) -> jax.Array:
        """x [.., in] to [.., out]."""
        y = _product(x, self.weights[f"{self.prefix}{name}.weight"], x.dtype)
        bias = self.weights.get(f"{self.prefix}{name}.bias")
        return y if bias is None else y + bias

    def norm(self, name: str, x: jax.Array) -> jax.Array:
        return _rms_norm(x, self.weights[f"{self.prefix}{name}.weight"], self.config.norm_eps)

    def heads(self, which: str, x: jax.Array) -> jax.Array:
        """x [B, T, embed_dim] to [B, T, heads, head_dim]: ``"q"``, ``"k"`` or ``"v"``."""
        y = self.linear(f"self_attn.{which}_proj", x)
        y = y.reshape(*y.shape[:2], -1, self.config.head_dim)
        is_normal = self.config.qk_norm and which != "v"
        return self.norm(f"self_attn.{which}_norm", y) if is_normal else y


def _product(x: jax.Array, weight: jax.Array, dtype: Any) -> jax.Array:
    """x [.., in] times weight [out, in], summed in float32."""
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, weight, contract, preferred_element_type=jnp.float32).astype(dtype)


def _rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Of the last axis (Zhang & Sennrich, 2019)."""
    wide = x.astype(jnp.float32)
    normal = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return normal.astype(x.dtype) * scale


def _rotated(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x [B, T, heads, head_dim]; a pair is coordinates i and i + head_dim / 2, as in published
    checkpoints."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
