"""Runs functions in buckets, with the padding of all arguments poisoned, beside themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memplan.buckets.function import _cut
from memplan.buckets.padding import padded
from memplan.buckets.sizes import Probes

type Made = Callable[[Mapping[str, int]], Sequence[Any]]


def poisoned(array: Any, shape: Sequence[int]) -> Any:
    """An array that is part of a larger one, in which the rest is worse than wrong."""
    array = np.asarray(array)
    floats = np.issubdtype(array.dtype, np.floating)
    worst = np.nan if floats else array.dtype.type(1) if array.dtype == bool else 10**6
    whole = np.full(shape, worst, array.dtype)
    whole[tuple(map(slice, array.shape))] = array
    return jnp.asarray(whole)


def in_bucket(
    fun: Callable[..., Any], made: Made, ranges: Mapping[str, tuple[int, int]]
) -> Callable[[Mapping[str, int]], Any]:
    """Returns a function of sizes: the results of `fun` in the bucket of these ranges.

    Args:
      made: returns the arguments for sizes.
    """
    probes = Probes(ranges)
    traced = [jax.make_jaxpr(fun, return_shape=True)(*made(point)) for point in probes.points]
    tree = jax.tree.structure(traced[0][1])
    dims: list[Any] = []

    @jax.jit
    def run(arrays: Sequence[Any], sizes: Mapping[str, Any]) -> list[Any]:
        values = padded(probes, [closed for closed, _ in traced], arrays, sizes)
        dims[:] = [value.dims for value in values]
        return [value.array for value in values]

    def call(sizes: Mapping[str, int]) -> Any:
        shapes = [np.shape(a) for a in made(probes.points[0])]
        arrays = [poisoned(a, shape) for a, shape in zip(made(sizes), shapes, strict=True)]
        results = run(arrays, {axis: jnp.int32(n) for axis, n in sizes.items()})
        cut = [_cut(a, of, probes.points[0], sizes) for a, of in zip(results, dims, strict=True)]
        return jax.tree.unflatten(tree, cut)

    return call


def check(
    fun: Callable[..., Any],
    made: Made,
    ranges: Mapping[str, tuple[int, int]],
    *,
    tolerance: float = 1e-5,
) -> None:
    """The results in a bucket are those of the function itself, at sizes of the bucket."""
    call = in_bucket(fun, made, ranges)
    spans = (
        sorted({low, (low + high) // 2, high - 1, high} - {low - 1})
        for low, high in ranges.values()
    )
    for numbers in itertools.product(*spans):
        sizes = dict(zip(ranges, numbers, strict=True))
        found, wanted = call(sizes), fun(*map(jnp.asarray, made(sizes)))
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert a.shape == b.shape, sizes
            assert a.dtype == b.dtype, sizes
            np.testing.assert_allclose(
                np.asarray(a, np.float64 if a.dtype != bool else bool),
                np.asarray(b),
                rtol=tolerance,
                atol=tolerance,
                err_msg=str(sizes),
            )
