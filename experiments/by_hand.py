"""A step with a part of its state on the host as people have it there by hand: brought whole where
the step begins, taken back where it ends, and scheduled by XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.stages import Compiled
from jax.tree_util import KeyPath


def compiled_by_hand(
    step: Callable[..., Any], args: tuple[Any, ...], on_host: Callable[[KeyPath], bool]
) -> Compiled:
    """Compiles ``step(state, *inputs) -> (state, rest)``, whose state is donated.

    Args:
      args: `jax.ShapeDtypeStruct` with shardings; the state is returned with its own.
      on_host: of the path of an array of the state.
    """
    state, *inputs = args
    state = jax.tree_util.tree_map_with_path(
        lambda path, leaf: _hosted(leaf) if leaf.ndim and on_host(path) else leaf, state
    )

    def brought(leaf: jax.Array, given: jax.ShapeDtypeStruct) -> jax.Array:
        if given.sharding is None or given.sharding.memory_kind != "pinned_host":
            return leaf
        return jax.device_put(leaf, jax.memory.Space.Device)

    def stepped(state: Any, *inputs: Any) -> tuple[Any, Any]:
        return step(jax.tree.map(brought, state, given), *inputs)

    given = state
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    jitted = jax.jit(stepped, donate_argnums=0, out_shardings=(shardings, None))
    return jitted.lower(state, *inputs).compile()


def _hosted(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    assert leaf.sharding is not None
    return leaf.update(sharding=leaf.sharding.with_memory_kind("pinned_host"))
