"""Causal self-attention of a decoder by the fused kernels, on one device or split over a mesh."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from models.sharding import AnyMesh
from pallas_kernels.attention.api import attention

# Sequences are split like the residual stream, heads like the weights that make them.
_HEADS = P("fsdp", None, "model", None)


def fused_attention(
    query: jax.Array, keys: jax.Array, values: jax.Array, mesh: AnyMesh | None
) -> jax.Array:
    """Each token attends to itself and what stands before it.

    A compiler cannot split a kernel over devices as it splits other code: on a mesh each device
    runs it on its own sequences and heads. Key/value heads that are fewer than the devices of
    "model" are repeated until there is one for each.

    Args:
      query: [batch, len, num_heads, head_dim].
      keys, values: [batch, len, num_kv_heads, head_dim].
      mesh: with the axes "fsdp" and "model"; None for one device.

    Returns:
      Like `query`.

    Raises:
      ValueError: by jax, when the mesh does not divide sequences and heads.
    """
    causal = partial(attention, causal=True)
    if mesh is None:
        return causal(query, keys, values)
    missing = mesh.shape["model"] // keys.shape[2]
    if missing > 1:
        keys, values = (jnp.repeat(x, missing, axis=2) for x in (keys, values))
    split = jax.shard_map(causal, mesh=mesh, in_specs=(_HEADS,) * 3, out_specs=_HEADS)
    return split(query, keys, values)
