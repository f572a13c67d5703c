"""How a mesh with the axes "fsdp" and "model" splits the weights and activations of a decoder.

Fully sharded data parallelism (Zhao et al., 2023, arXiv:2304.11277) over "fsdp": each device
keeps a part of every weight and gathers a layer's weights when it gets there; sequences are
split over the same axis. Tensor parallelism (Shoeybi et al., 2019, arXiv:1909.08053, section
3) over "model": heads, MLP width and vocabulary stay split while they are computed with, and
experts are on a part of its devices each (Lepikhin et al., 2020, arXiv:2006.16668, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import DictKey, KeyPath, tree_map_with_path

type AnyMesh = Mesh | AbstractMesh
"""A mesh with axes "fsdp" and "model", of devices or of their number alone."""

# Of each weight of one layer, by the last part of its path; what is not listed is replicated.
_WEIGHTS: Mapping[str, P] = MappingProxyType(
    {
        "embedding": P("model", "fsdp"),
        "head": P("fsdp", "model"),
        "query": P("fsdp", "model", None),
        "key": P("fsdp", "model", None),
        "value": P("fsdp", "model", None),
        "output": P("model", None, "fsdp"),
        "gate": P("fsdp", "model"),
        "up": P("fsdp", "model"),
        "down": P("model", "fsdp"),
        "router": P("fsdp", None),
    }
)

# Likewise of what each expert of a layer has: the experts are the leading axis.
_EXPERTS: Mapping[str, P] = MappingProxyType(
    {
        "gate": P("model", "fsdp", None),
        "up": P("model", "fsdp", None),
        "down": P("model", None, "fsdp"),
    }
)

STREAM = P("fsdp", None, None)
"""The residual stream, [batch, len, embed_dim]."""

TOKENS = P("fsdp", None)
"""[batch, len]."""

LOGITS = P("fsdp", None, "model")
"""[batch, len, vocab_size]."""

CACHE = P(None, "fsdp", None, "model", None)
"""Stacked keys or values by token, [num_layers, batch, max_len, num_kv_heads, head_dim]."""

CACHE_BY_HEAD = P(None, "fsdp", "model", None, None)
"""Likewise by head, [num_layers, batch, num_kv_heads, max_len, head_dim]."""


def weight_shardings[Tree](weights: Tree, mesh: AnyMesh) -> Tree:
    """A `NamedSharding` for each array of `weights`, or of whatever has their paths.

    An axis of the mesh that does not divide a dimension leaves it whole, as 16 devices do 8
    key/value heads. Arrays that are no weight, such as a count of steps, are replicated.

    Args:
      weights: stacked or a single layer's; gradients and moments have the same paths.
    """
    return tree_map_with_path(
        lambda path, leaf: named(leaf.shape, _weight_spec(path, leaf.ndim), mesh), weights
    )


def gathered[Tree](weights: Tree, mesh: AnyMesh) -> Tree:
    """`weights` with all that is split over "fsdp" gathered, and "model" left as it is.

    Left alone, XLA's partitioner may pass parts of the weights around the devices during each
    product instead. A gradient is summed to the gathered shape, then split; the TPU compiler
    makes a reduce-scatter of most of them.
    """

    def gather(path: KeyPath, leaf: jax.Array) -> jax.Array:
        spec = P(*(None if axis == "fsdp" else axis for axis in _weight_spec(path, leaf.ndim)))
        return constrained(leaf, spec, mesh)

    return tree_map_with_path(gather, weights)


def constrained(x: jax.Array, spec: P, mesh: AnyMesh) -> jax.Array:
    """`x`, split by `spec` where that divides its dimensions."""
    return lax.with_sharding_constraint(x, named(x.shape, spec, mesh))


def named(shape: tuple[int, ...], spec: P, mesh: AnyMesh) -> NamedSharding:
    """`spec` on `mesh`, without the axes that do not divide their dimension of `shape`."""
    axes = zip(shape, (*spec, *[None] * len(shape)), strict=False)
    fits = (None if a is None or size % mesh.shape[a] else a for size, a in axes)
    return NamedSharding(mesh, P(*fits))


def placed[Tree](tree: Tree, shardings: Tree) -> Tree:
    """`tree` with a `jax.ShapeDtypeStruct`, carrying its sharding, for each array."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )


def _weight_spec(path: KeyPath, ndim: int) -> P:
    names = [key.key for key in path if isinstance(key, DictKey)]
    if not names:
        return P()
    # Those of all layers have the layers in front.
    stacked = "layers" in names
    of_name = _WEIGHTS.get(names[-1], P())
    if ndim - stacked > len(of_name):
        of_name = _EXPERTS.get(names[-1], of_name)
    return P(None, *of_name) if stacked else of_name
