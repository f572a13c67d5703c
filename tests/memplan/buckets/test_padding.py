"""A program in a bucket has the results that it has by itself, whatever is in the padding."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from memplan.buckets.errors import PaddingError
from tests.memplan.buckets.padded import check

TOKENS = {"t": (1, 6)}
BOTH = {"b": (1, 3), "t": (2, 5)}


def rows(sizes: Mapping[str, int]) -> Sequence[Any]:
    return [np.random.RandomState(sizes["t"]).randn(sizes["t"], 3).astype(np.float32)]


def batch(sizes: Mapping[str, int]) -> Sequence[Any]:
    of = np.random.RandomState(sizes["t"])
    return [of.randn(sizes["b"], sizes["t"], 4).astype(np.float32)]


ROWS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(),
    "sum of one axis": lambda x: x.sum(0),
    "mean": lambda x: x.mean(),
    "variance": lambda x: (x.var(0), x.std()),
    "root of the size": lambda x: x.sum(0) / jnp.sqrt(x.shape[0]),
    "size in an exponent": lambda x: x.sum(0) * x.shape[0] ** -0.5,
    "log of the size": lambda x: x.sum(0) - np.log(x.shape[0] + 1),
    "max and min": lambda x: (x.max(0), x.min(), (x > 0).all(0), (x > 1).any()),
    "product": lambda x: x.prod(0),
    "argmax": lambda x: (jnp.argmax(x, 0), jnp.argmin(x[:, 0])),
    "softmax": lambda x: jax.nn.softmax(x, axis=0),
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=0),
    "gram": lambda x: x.T @ x,
    "outer": lambda x: x @ x.T,
    "last": lambda x: x[-1],
    "all but the last": lambda x: x[:-1].sum() + x[-1],
    "differences": lambda x: jnp.diff(x, axis=0, prepend=0.0),
    "shifted": lambda x: jnp.concatenate([x[1:], jnp.ones((1, 3), x.dtype)]),
    "behind each other": lambda x: jnp.concatenate([x, 2 * x, x[:1]]).cumsum(0),
    "rolled": lambda x: jnp.roll(x, 1, axis=0),
    "reversed": lambda x: x[::-1] * jnp.arange(x.shape[0])[:, None],
    "cumsum": lambda x: x.cumsum(0),
    "cumsum from the end": lambda x: lax.cumsum(x, reverse=True),
    "cumulative max of ones": lambda x: jnp.ones_like(x).cumsum(0),
    "logcumsumexp": lambda x: lax.cumlogsumexp(x, reverse=True),
    "sorted": lambda x: jnp.sort(x, axis=0),
    "argsorted in any order": lambda x: (
        jnp.argsort(jnp.where(x > 0, jnp.nan, x)[:, 0], stable=False) >= len(x)
    ),
    "argsorted": lambda x: jnp.argsort(x[:, 0]),
    "median of all": lambda x: jnp.sort(x[:, 0])[x.shape[0] // 2 * 0],
    "top": lambda x: lax.top_k(jnp.where(x > 9, x, -jnp.inf).T, 1),
    "padded before": lambda x: jnp.pad(x, ((2, 0), (0, 0))).sum(1),
    "padded behind": lambda x: jnp.pad(x, ((0, 2), (0, 0)), constant_values=7.0).cumsum(0),
    "padded to a size": lambda x: jnp.pad(x, ((0, 9 - x.shape[0]), (0, 0)), constant_values=-1.0),
    "counted": lambda x: x * jnp.arange(x.shape[0])[:, None],
    "counted from the end": lambda x: x * jnp.arange(x.shape[0])[::-1, None],
    "eye": lambda x: jnp.eye(x.shape[0]) + x @ x.T,
    "causal": lambda x: jnp.where(jnp.tril(jnp.ones((len(x), len(x)), bool)), x @ x.T, -1.0),
    "one by one": lambda x: lax.map(lambda row: jnp.sin(row).sum(), x),
    "scanned": lambda x: lax.scan(lambda c, r: (0.5 * c + r, c.sum()), jnp.zeros(3), x),
    "scanned from the end": lambda x: lax.scan(
        lambda c, r: (0.5 * c + r, c), jnp.ones(3), x, reverse=True
    ),
    "as often": lambda x: lax.fori_loop(0, x.shape[0], lambda i, c: c * 1.5 + i, x.sum()),
    "while": lambda x: lax.while_loop(
        lambda c: c[0] < x.shape[0], lambda c: (c[0] + 1, c[1] + x[c[0]]), (0, jnp.zeros(3))
    ),
    "branches": lambda x: lax.cond(x.sum() > 0, lambda y: y * 2, lambda y: y - 1, x),
    "again": lambda x: jax.checkpoint(lambda y: jnp.sin(y).sum(0) / len(y))(x),
    "gathered from outside": lambda x: jnp.asarray(x)[jnp.array([0, 40])],
    "a loop for each row": lambda x: jax.vmap(
        lambda r: lax.while_loop(lambda c: c.sum() < 5, lambda c: c + 1.5, r)
    )(x),
    "a key in a loop": lambda x: x + lax.fori_loop(
        0, 3, lambda i, k: jax.random.fold_in(k, i), jax.random.key(7)
    ).size,
    "narrow indices": lambda x: jnp.zeros((8, 3)).at[
        jnp.arange(len(x)).astype(jnp.int8)
    ].set(x),
    "gathered": lambda x: x[jnp.array([0, -1, 0])],
    "taken, filled": lambda x: jnp.take(x, jnp.array([0, 3, 5, -1]), axis=0, fill_value=5.0),
    "taken, clipped": lambda x: jnp.take(x, jnp.array([0, 3, 50]), axis=0, mode="clip"),
    "sliced where it is said": lambda x: lax.dynamic_slice(x, (4, 1), (1, 2)),
    "written": lambda x: jnp.asarray(x).at[-1].set(0.0).at[2].add(9.0),
    "scattered": lambda x: jnp.zeros((8, 3)).at[jnp.arange(len(x)) % 3].add(x),
    "scattered, set": lambda x: jnp.ones((8, 3)).at[7 - jnp.arange(len(x))].set(x),
    "scattered, clipped": lambda x: (
        jnp.zeros((4, 3)).at[jnp.arange(len(x)) * 2].max(x, mode="clip")
    ),
    "into a cache": lambda x: lax.dynamic_update_slice(jnp.ones((9, 3)), x, (3, 0)),
    "into the end of a cache": lambda x: lax.dynamic_update_slice(jnp.ones((7, 3)), x, (6, 0)),
    "out of a table": lambda x: (
        x + lax.dynamic_slice(jnp.arange(24.0).reshape(8, 3), (6, 0), x.shape)
    ),
    "window": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (1, 1), ((1, 0), (0, 0))),
    "convolved": lambda x: lax.conv_general_dilated(
        x.T[None], jnp.arange(18.0).reshape(2, 3, 3), (1,), "SAME"
    ),
    "random": lambda x: x + jax.random.normal(jax.random.key(1), x.shape),
    "dropout": lambda x: jnp.where(
        jax.random.bernoulli(jax.random.key(3), 0.5, (2, len(x), 3)), x[None] * 2, 0.0
    ),
    "keys": lambda x: jax.vmap(lambda k: jax.random.uniform(k, (2,)))(
        jax.random.split(jax.random.key(1), x.shape[0])
    ),
    "merged with a fixed one": lambda x: x.reshape(-1) * 2,
    "split off": lambda x: x.reshape(-1).reshape(x.shape[0], 3, 1).sum(1),
    "gradient": jax.grad(lambda x: (jax.nn.softmax(x, 0) ** 2).mean()),
    "gradient of a loop": jax.grad(
        lambda x: lax.scan(lambda c, r: (jnp.tanh(c + r), None), jnp.zeros(3), x)[0].sum()
    ),
    "closed over": lambda x: x * 2 + jnp.asarray(np.arange(3, dtype=np.float32)),
    "of its size": lambda x: x * np.arange(len(x), dtype=np.float32)[:, None],
    "split": lambda x: jnp.split(x, [1], axis=0)[0] + jnp.split(x, 3, axis=1)[1],
    "types": lambda x: (x.astype(jnp.int32).sum(), (x > 0).sum(), x.astype(jnp.bfloat16).max(0)),
}  # fmt: skip

BATCH: dict[str, Callable[[Any], Any]] = {
    "all of it": lambda x: x.mean(),
    "tokens as rows": lambda x: jnp.tanh(x.reshape(-1, 4) @ jnp.ones((4, 2))),
    "sum of tokens as rows": lambda x: x.reshape(-1, 4).sum(0) / (x.shape[0] * x.shape[1]),
    "there and back": lambda x: (x.reshape(-1, 4) * 2).reshape(x.shape).max(1),
    "attention": lambda x: jax.nn.softmax(x @ x.swapaxes(1, 2), axis=-1) @ x,
    "heads": lambda x: x.reshape(*x.shape[:2], 2, 2).transpose(0, 2, 1, 3).sum(2),
    "last token of each": lambda x: x[:, -1],
    "some of each": lambda x: jnp.take_along_axis(x, jnp.argmax(x, 1, keepdims=True), axis=1),
    "loss": lambda x: -jnp.take_along_axis(
        jax.nn.log_softmax(x), jnp.argmin(x, -1, keepdims=True), -1
    ).mean(),
    "tokens to experts": lambda x: jnp.zeros((3, 4)).at[
        jnp.argmax(x.reshape(-1, 4), -1) % 3
    ].add(x.reshape(-1, 4)),
    "gradient": jax.grad(lambda x: jnp.mean(jax.nn.relu(x.reshape(-1, 4) @ jnp.eye(4)) ** 2)),
    "mapped": jax.vmap(lambda row: lax.scan(lambda c, r: (c + r, c), jnp.zeros(4), row)[0]),
    "gradient of a convolution's weights": lambda x: jax.grad(
        lambda w: (
            lax.conv_general_dilated(
                x.sum(1).reshape(-1, 2, 2).repeat(2, 2),
                w,
                (1,),
                "SAME",
                dimension_numbers=("NWC", "WIO", "NWC"),
            )
            ** 2
        ).sum()
    )(jnp.arange(24.0).reshape(3, 4, 2) / 9),
    "pooled": jax.grad(
        lambda x: (
            lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2), (1, 1, 2), "VALID") ** 2
        ).mean()
    ),
    "norm": lambda x: (x - x.mean((0, 1))) / jnp.sqrt(x.var((0, 1)) + 1e-3),
}  # fmt: skip


@pytest.mark.parametrize("what", ROWS)
def test_rows(what: str):
    check(ROWS[what], rows, TOKENS)


@pytest.mark.parametrize("what", BATCH)
def test_batches(what: str):
    check(BATCH[what], batch, BOTH, tolerance=2e-5)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "every second one": (lambda x: x[::2], "no sum of products of sizes"),
    "rows in pairs": (lambda x: jnp.repeat(x, 2, 0).reshape(2, -1, 3), "takes what is there apart"),
    "columns first": (lambda x: x.T.reshape(-1)[:4], "not the first part"),
    "another way by size": (lambda x: x.sum() if len(x) < 7 else x.max(), "by the size"),
    "more by size": (lambda x: jnp.sin(x.sum()) if len(x) < 7 else x.sum(), "equations at sizes"),
    "random, by a generator of its own": (
        lambda x: x + jax.random.normal(jax.random.key(1, impl="rbg"), x.shape),
        "random numbers",
    ),
    "fewer where there is more": (
        lambda x: jnp.concatenate([x, jnp.full((12 - len(x), 3), -1.0)]),
        "not largest at the bucket's sizes",
    ),
    "less often where there is more": (
        lambda x: lax.fori_loop(len(x), 12, lambda i, c: c + i, 0) + x.sum(),
        "how often it runs is",
    ),
    "to a multiple": (lambda x: jnp.pad(x, ((0, -len(x) % 4), (0, 0))), "no sum of products"),
    "half of it": (lambda x: x.sum() / (len(x) // 2), "depends on sizes"),
    "before and behind": (
        lambda x: lax.pad(x, 1.0, ((len(x), -len(x), 0), (0, 0, 0))),
        "cut off behind",
    ),
    "a result by the size": (lambda x: (x.sum(), len(x) > 7), "a result: a number depends"),
    "squared": (lambda x: x * len(x) ** 2, "depends on sizes"),
    "made by numpy": (
        lambda x: x * np.linspace(0, 1, len(x), dtype=np.float32)[:, None],
        "closes over",
    ),
    "spectrum": (lambda x: jnp.fft.fft(x, axis=0), "depends on sizes"),
    "callback": (
        lambda x: jax.debug.callback(lambda _: None, x) or x,
        "effects",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_known_is_refused_and_the_line_named(what: str):
    fun, why = REFUSED[what]
    with pytest.raises(PaddingError, match=why) as caught:
        check(fun, rows, {"t": (5, 10)})
    assert "test_padding.py" in caught.value.line or "closes over" in str(caught.value)


# Each takes [rows, 3] to [other rows, 3].
STEPS: dict[str, Callable[[Any], Any]] = {
    "less the mean": lambda x: x - x.mean(0),
    "softmax": lambda x: jax.nn.softmax(x, 0),
    "by the largest": lambda x: x / (1 + jnp.abs(x).max()),
    "cumsum": lambda x: x.cumsum(0) / len(x),
    "cumsum from the end": lambda x: lax.cumsum(x, reverse=True),
    "reversed": lambda x: x[::-1],
    "twice": lambda x: jnp.concatenate([x, -x]),
    "one more": lambda x: jnp.concatenate([x[-1:], x]),
    "without the first": lambda x: x[1:],
    "without the last": lambda x: x[:-1] + x[-1],
    "rolled": lambda x: jnp.roll(x, 2, 0),
    "padded": lambda x: jnp.pad(x, ((1, 2), (0, 0)), constant_values=0.5),
    "sorted": lambda x: jnp.sort(x, 0),
    "in the order of one": lambda x: x[jnp.argsort(x[:, 1])],
    "attention": lambda x: jax.nn.softmax(x @ x.T, -1) @ x,
    "scan": lambda x: lax.scan(lambda c, r: (jnp.sin(c + r), c), jnp.zeros(3, x.dtype), x)[1],
    "scan from the end": lambda x: lax.scan(
        lambda c, r: (jnp.sin(c + r), c), jnp.zeros(3, x.dtype), x, reverse=True
    )[1],
    "flat and back": lambda x: jnp.tanh(x.reshape(-1)).reshape(-1, 3),
    "counted": lambda x: x * jnp.arange(len(x), dtype=x.dtype)[:, None] / len(x),
    "scattered": lambda x: jnp.zeros_like(x).at[jnp.arange(len(x))[::-1]].add(x),
    "each of all": lambda x: (x[:, None] * x[None]).reshape(-1, 3)[: len(x)],
    "drawn": lambda x: x + jax.random.uniform(jax.random.key(2), x.shape, x.dtype, -0.1, 0.1),
    "gradient": jax.grad(lambda x: (jax.nn.log_softmax(x, 0)[-1] * x.mean(0)).sum()),
}
REFUSED_STEPS = {"each of all"}  # Its rows are no product.


def random_programs(count: int) -> None:
    draw = random.Random(0)
    refused = 0
    for _ in range(count):
        names = draw.choices([*STEPS], k=draw.randint(2, 5))

        def program(x: Any, names: Sequence[str] = names) -> Any:
            for each in names:
                x = STEPS[each](x)
            return x, x.sum(0), x[-1]

        with jax.enable_x64(True):
            try:
                check(
                    program,
                    lambda s: [np.random.RandomState(s["t"]).randn(s["t"], 3)],
                    {"t": (5, 11)},
                    tolerance=1e-8,
                )
            except PaddingError as error:
                if not REFUSED_STEPS & {*names}:
                    raise AssertionError(names) from error
                refused += 1
            except AssertionError as error:
                raise AssertionError(names) from error
    assert refused < count // 2


@pytest.mark.slow
def test_random_programs():
    random_programs(6)


@pytest.mark.slow
def test_many_random_programs():
    random_programs(400)
