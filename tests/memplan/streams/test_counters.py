"""Integers that are known before a program runs are those that it computes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hlo_passes.equations import programs
from memplan.streams.counters import index_in_words, known_integers, unknown, value_of, while_inputs

LENGTH = 5


def known_results(fun: Callable[..., Any], *args: Any) -> list[Any]:
    """What is known of the results; where something is, the program computes the same."""
    jaxpr = jax.make_jaxpr(fun)(*args)
    known = known_integers(jaxpr, unknown(jaxpr))
    found = [value_of(a, known, 1) for a in jaxpr.outvars]
    for value, computed in zip(found, jax.tree.leaves(fun(*args)), strict=True):
        if value is not None:
            assert value.dtype == computed.dtype
            np.testing.assert_array_equal(value[0], computed)
    return found


def each(of: Callable[[Any], Any], **options: Any) -> Callable[[], Any]:
    """A loop that gives `of` each counter."""

    def function() -> Any:
        def body(i: Any, _: None) -> tuple[Any, Any]:
            return i + 1, of(i)

        return lax.scan(body, jnp.int32(0), None, length=LENGTH, **options)

    return function


@pytest.mark.parametrize(
    "of",
    [
        lambda i: i,
        lambda i: LENGTH - 1 - i,
        lambda i: i * i - 3,
        lambda i: (i - 2) // 2,
        lambda i: lax.div(i - 2, 2),
        lambda i: (i - 2) % 3,
        lambda i: lax.rem(i - 2, 3),
        lambda i: jnp.clip(i, 1, 3),
        lambda i: lax.clamp(1, i, 3),
        lambda i: jnp.where((i < 2) | (i == 4), i, -i),
        lambda i: jnp.where(~(i >= 2) & (i != 1), i, jnp.sign(i)),
        lambda i: jnp.maximum(i, 2) + jnp.minimum(i, 1),
        lambda i: (i - 1).astype(jnp.uint8) + 3,
        lambda i: jnp.array([i, 2 * i]),
        lambda i: jnp.arange(4)[::-1] * i,
        lambda i: (jnp.arange(4) - i) // 2,
        lambda i: jnp.concatenate([jnp.arange(2), jnp.arange(3) > i]),
    ],
)
@pytest.mark.parametrize("reverse", [False, True])
def test_what_follows_from_a_counter(of: Callable[[Any], Any], reverse: bool):
    last, stacked = known_results(each(of, reverse=reverse))
    assert last is not None
    assert stacked is not None


def test_slices_of_an_iota():
    def fun() -> Any:
        return lax.scan(lambda c, i: (c + 2, c + i), 0, jnp.arange(LENGTH)[::-1], reverse=True)

    assert all(v is not None for v in known_results(fun))


def test_a_loop_in_a_loop():
    def fun() -> Any:
        def body(i: Any, _: None) -> tuple[Any, Any]:
            inner = lax.scan(lambda j, _: (j + 1, 2 * j), jnp.int32(3), None, length=2)
            return i + 1, inner

        return lax.scan(body, jnp.int32(0), None, length=LENGTH)

    assert all(v is not None for v in known_results(fun))


def test_calls():
    def fun() -> Any:
        i = jax.jit(lambda i: i + 1)(jnp.int32(2))
        return i, jax.checkpoint(lambda i: 2 * i)(i)

    assert all(v is not None for v in known_results(fun))


@pytest.mark.parametrize(
    "body",
    [
        lambda c, data: (c[0] + data, c[1]),
        lambda c, data: (c[0] * 2 + 1, c[1]),  # not the same step each time
        lambda c, data: (c[0] + c[1], c[1] + data),  # seems to stay in the first iteration
        lambda c, data: (jnp.where(c[0] < 3, c[0] + 1, 0), c[1]),
    ],
)
def test_what_is_no_counter(body: Callable[..., Any]):
    def fun(data: Any) -> Any:
        def step(c: Any, _: None) -> tuple[Any, Any]:
            return body(c, data), c[0]

        return lax.scan(step, (jnp.int32(1), jnp.int32(0)), None, length=LENGTH)[1]

    assert known_results(fun, jnp.int32(0)) == [None]


@pytest.mark.parametrize(
    ("start", "goes_on", "step", "trips"),
    [
        (0, lambda i, n: i < 4, 1, 4),
        (2, lambda i, n: i <= 8, 3, 3),
        (3, lambda i, n: i >= 0, -1, 4),
        (0, lambda i, n: i < n, 1, None),
        (5, lambda i, n: i < 4, 1, None),
        (0, lambda i, n: i < 4, 0, None),
        (0, lambda i, n: i < 1 << 30, 1, None),
    ],
)
def test_trips_of_a_while(start: int, goes_on: Callable[..., Any], step: int, trips: int | None):
    def fun(n: Any) -> Any:
        return lax.while_loop(lambda c: goes_on(*c), lambda c: (c[0] + step, c[1]), (start, n))

    jaxpr = jax.make_jaxpr(fun)(jnp.int32(7))
    (loop,) = (e for e in jaxpr.eqns if e.primitive.name == "while")
    inputs = while_inputs(loop, known_integers(jaxpr, unknown(jaxpr)), 1)
    assert (inputs and inputs.count) == trips


def test_an_index_in_words():
    def fun(w: Any, at: Any) -> Any:
        def body(i: Any, total: Any) -> Any:
            return lax.cond(
                i < 2, lambda: total + lax.dynamic_slice(w, (i + 2,), (1,)), lambda: total
            )

        return lax.fori_loop(0, 6, body, lax.dynamic_slice(w, (at,), (1,)))

    jaxpr = jax.make_jaxpr(fun)(jnp.arange(8.0), 3)
    words = {}

    def look(program: Any, path: tuple[int, ...]) -> None:
        for n, eqn in enumerate(program.eqns):
            if eqn.primitive.name == "dynamic_slice":
                words[index_in_words(jaxpr, (*path, n))] = len(path)
            for inside in programs(eqn):
                look(inside.jaxpr, (*path, n, *inside.step))

    look(jaxpr, ())
    assert words == {"indexed by data": 0, "indexed by 2, 3, 4, 5, … of 8": 3}
