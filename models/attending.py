"""Attention of a decoder by the fused kernels, on one device or split over a mesh.

A compiler cannot split a kernel over devices as it splits other code: on a mesh with the axes
"fsdp" and "model" each device runs it on its own sequences and heads.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from models.sharding import AnyMesh
from pallas_kernels.attention.api import attention
from pallas_kernels.decode.api import decode_attention


def fused_attention(
    query: jax.Array, keys: jax.Array, values: jax.Array, mesh: AnyMesh | None
) -> jax.Array:
    """Each token attends to itself and what stands before it.

    Key/value heads that are fewer than the devices of "model" are repeated until there is one
    for each.

    Args:
      query: [batch, len, num_heads, head_dim].
      keys, values: [batch, len, num_kv_heads, head_dim].
      mesh: with the axes "fsdp" and "model"; None for one device.

    Returns:
      Like `query`.

    Raises:
      ValueError: by jax, when the mesh does not divide the heads.
    """
    causal = partial(attention, causal=True)
    if mesh is None:
        return causal(query, keys, values)
    missing = mesh.shape["model"] // keys.shape[2]
    if missing > 1:
        keys, values = (jnp.repeat(x, missing, axis=2) for x in (keys, values))
    # Sequences are split like the residual stream, heads like the weights that make them.
    heads = P(_sequences(query, mesh), None, "model", None)
    split = jax.shard_map(causal, mesh=mesh, in_specs=(heads,) * 3, out_specs=heads)
    return split(query, keys, values)


def cached_attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: jax.Array,
    mesh: AnyMesh | None,
) -> jax.Array:
    """The last tokens of each sequence attend to its cache, themselves included.

    Key/value heads that are fewer than the devices of "model" are on all of these, and each
    reads the one that its queries look at.

    Args:
      query: [batch, len, num_heads, head_dim].
      keys, values: [batch, num_kv_heads, max_len, head_dim].
      length: int32 scalar, tokens in the cache, those of `query` included.
      mesh: with the axes "fsdp" and "model"; None for one device.

    Returns:
      Like `query`.

    Raises:
      ValueError: by jax, when the mesh does not divide the heads.
    """
    lengths = jnp.full(query.shape[0], length, jnp.int32)
    if mesh is None:
        return decode_attention(query, keys, values, lengths)
    num_kv_heads, devices = keys.shape[1], mesh.shape["model"]
    is_shared = devices > num_kv_heads and devices % num_kv_heads == 0

    def of_device(
        query: jax.Array, keys: jax.Array, values: jax.Array, lengths: jax.Array
    ) -> jax.Array:
        if is_shared:
            head = lax.axis_index("model") // (devices // num_kv_heads)
            keys, values = (lax.dynamic_slice_in_dim(x, head, 1, 1) for x in (keys, values))
        return decode_attention(query, keys, values, lengths)

    sequences = _sequences(query, mesh)
    heads = P(sequences, None, "model", None)
    memory = P(sequences, None if is_shared else "model", None, None)
    split = jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(heads, memory, memory, P(sequences)),
        out_specs=heads,
    )
    return split(query, keys, values, lengths)


def _sequences(query: jax.Array, mesh: AnyMesh) -> str | None:
    """The axis that splits the sequences, unless there are too few: one prompt is whole."""
    return None if query.shape[0] % mesh.shape["fsdp"] else "fsdp"
