"""A step after a step, as a training loop runs them: what one gives back is what the next takes."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import jax


class Repeated:
    """Runs a function again and again on arguments that stay as they are.

        state, batch ─► step ─► state, loss        state is donated: the first time a copy of it,
          ▲                       │                then what came back in its place
          └───────────────────────┘

    As memory comes back like that, a run takes what it takes in a loop: copies of what is donated,
    made before each run, would be in no cache, and in memory that the system has just cleared.
    """

    def __init__(self, fun: Any, args: Any, kwargs: Any, info: Any) -> None:
        """
        Args:
          fun: of `memplan.jit` or ``jax.jit``.
          args, kwargs: what it is called with.
          info: ``args_info`` of its lowering for these, which says whether it is given any.
        """
        self._fun = fun
        self._leaves, self._tree = jax.tree.flatten((args, kwargs))
        self._given = [_copy(leaf) for leaf in self._leaves] if _donates(info) else self._leaves

    def run(self) -> float:
        """Runs it once, and returns the seconds until it was done."""
        args, kwargs = jax.tree.unflatten(self._tree, self._given)
        begin = time.perf_counter()
        results = jax.block_until_ready(self._fun(*args, **kwargs))
        seconds = time.perf_counter() - begin
        # The first that could be it, as jax pairs what is donated with results, too.
        back: defaultdict[object, list[Any]] = defaultdict(list)
        for leaf in reversed(jax.tree.leaves(results)):
            back[_kind(leaf)].append(leaf)

        def again(given: Any, leaf: Any) -> Any:
            if not isinstance(given, jax.Array) or not given.is_deleted():
                return leaf
            alike = back[_kind(leaf)]
            return alike.pop() if alike else _copy(leaf)

        self._given = [*map(again, self._given, self._leaves)]
        return seconds


def _donates(info: Any) -> bool:
    leaves = jax.tree.leaves(info, is_leaf=lambda leaf: hasattr(leaf, "donated"))
    return any(leaf.donated for leaf in leaves)


def _kind(leaf: Any) -> object:
    if not isinstance(leaf, jax.Array):
        return None
    return leaf.shape, leaf.dtype, leaf.sharding


def _copy(leaf: Any) -> Any:
    """The same array once more, in the same memories of the same devices."""
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.device_put(leaf, leaf.sharding, may_alias=False)
