"""Layers as one layer with stacked weights, gone through by one `lax.scan`.

Each weight is one array for all layers, [num_layers, ...], so that a program is as long for
80 layers as for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

Remat = Literal["none", "layer"]
"""What the backward pass computes again: nothing, or each layer from its input."""


def build_layers(
    make: Callable[..., nnx.Module], num_layers: int, *, rngs: nnx.Rngs, scan: Remat | None
) -> Any:
    """The layers of a model, for `through_layers`: `make(rngs=rngs)` for each of them.

    Args:
      scan: what a gradient computes again of layers that are `stacked`; None for layers that stand
        one after the other, whose weights are arrays of their own.
    """
    if scan is None:
        return nnx.List([make(rngs=rngs) for _ in range(num_layers)])
    return stacked(make, num_layers, rngs=rngs)


def through_layers(layers: Any, x: jax.Array, *others: jax.Array, scan: Remat | None) -> jax.Array:
    """`layer(x, *others)` for each of `build_layers` in turn, on what the one before gave."""
    if scan is None:
        for layer in layers:
            x = layer(x, *others)
        return x
    return scan_layers(layers, lambda layer, x, _: (layer(x, *others), None), x, remat=scan)[0]


def stacked[Layer: nnx.Module](
    make: Callable[..., Layer], num_layers: int, *, rngs: nnx.Rngs
) -> Layer:
    """One layer whose weights are those of `num_layers` layers `make(rngs=rngs)`."""

    @nnx.split_rngs(splits=num_layers)
    @nnx.vmap
    def build(rngs: nnx.Rngs) -> Layer:
        return make(rngs=rngs)

    return build(rngs)


def scan_layers[Layer: nnx.Module, Carry, Result](
    layers: Layer,
    step: Callable[[Layer, Carry, Any], tuple[Carry, Result]],
    carry: Carry,
    parts: Any = None,
    *,
    remat: Remat,
    taken: Callable[[nnx.State], nnx.State] = lambda weights: weights,
) -> tuple[Carry, Result]:
    """`step` for each of the layers in turn.

    Args:
      layers: as of `stacked`.
      step: takes a layer, what the one before it gave, and its slice of `parts`.
      parts: a pytree whose arrays have the layers as their leading axis.
      remat: what a gradient through the layers saves or computes again.
      taken: the weights of one layer as it computes with them.

    Returns:
      What the last layer gave, and the results of all, stacked.
    """
    graphdef, weights = nnx.split(layers)

    def body(carry: Carry, slices: tuple[nnx.State, Any]) -> tuple[Carry, Result]:
        own, part = slices
        return step(nnx.merge(graphdef, taken(own)), carry, part)

    if remat == "layer":
        # The scan already keeps XLA from merging the two computations of a layer.
        body = jax.checkpoint(body, prevent_cse=False)
    return lax.scan(body, carry, (weights, parts))


def stack_params(params: nnx.State) -> nnx.State:
    """The params of a model whose `layers` are a list as those of one where they are `stacked`;
    gradients likewise."""
    rest = params.raw_mapping
    layers = rest["layers"]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(layers[i] for i in sorted(layers)))
    return nnx.State({**rest, "layers": stack})


def unstack_params(params: nnx.State) -> nnx.State:
    """`stack_params` undone."""
    rest = params.raw_mapping
    stack = rest["layers"]
    num_layers = jax.tree.leaves(stack)[0].shape[0]
    layers = {i: jax.tree.map(lambda leaf, i=i: leaf[i], stack) for i in range(num_layers)}
    return nnx.State({**rest, "layers": layers})
