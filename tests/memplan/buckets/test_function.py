"""`memplan.jit(buckets=)`: calls of every size, by a few programs."""

from __future__ import annotations

import copy
import functools
import pickle
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memplan
from memplan.api import Lowered
from memplan.buckets.errors import BucketsError

TOKENS = {"buckets": {"tokens": [8, 32]}, "dims": {"ids": "_ tokens"}}


def table() -> dict[str, jax.Array]:
    of = np.random.RandomState(0)
    return {name: jnp.asarray(of.randn(16, 16), jnp.float32) for name in ("embed", "out")}


def score(params: dict[str, Any], ids: Any) -> dict[str, Any]:
    x = jnp.tanh(params["embed"][ids] @ params["out"])
    return {"last": x[:, -1], "mean": x.mean((0, 1)), "each": x}


def ids_of(tokens: int, rows: int = 2) -> np.ndarray:
    return np.random.RandomState(tokens).randint(0, 16, (rows, tokens))


def assert_same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert isinstance(a, jax.Array)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def wait_for_compilations() -> None:
    for thread in threading.enumerate():
        if thread.name == "memplan-bucket":
            thread.join(60)


def test_every_size_has_its_own_results():
    step = memplan.jit(score, **TOKENS)
    params = table()
    for tokens in (32, 1, 8, 9, 31, 2):
        assert_same(step(params, ids_of(tokens)), score(params, ids_of(tokens)))
        assert_same(step(params, jnp.asarray(ids_of(tokens))), score(params, ids_of(tokens)))
    assert step.bucket_of(params, ids_of(9)) == {"tokens": 32}


def test_few_programs_are_compiled():
    traced: list[int] = []

    def counted(params: Any, ids: Any) -> Any:
        traced.append(ids.shape[1])
        return score(params, ids)

    step = memplan.jit(counted, **TOKENS)
    prepared = step.prepare(table(), ids_of(3))
    before = len(traced)
    for tokens in range(5, 33):
        step(table(), ids_of(tokens))
    assert len(traced) == before
    assert set(prepared.device_bytes) == {(8,), (32,)}
    # Of one token, the last one is all: that is a program of its own.
    step(table(), ids_of(1))
    assert len(traced) > before
    assert step.bucket_of(table(), ids_of(1)) == {"tokens": 1}
    assert prepared.arena_bytes == prepared.device_bytes[32,]


def test_a_call_runs_in_a_larger_bucket_while_its_own_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
):
    step = memplan.jit(score, **TOKENS)
    params = table()
    step(params, ids_of(20))
    begun, go_on = threading.Event(), threading.Event()
    compile_ = Lowered.compile

    def slowly(self: Lowered, *args: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return compile_(self, *args)

    monkeypatch.setattr(Lowered, "compile", slowly)
    small = step._bucket({"tokens": (1, 8)})
    assert_same(step(params, ids_of(5)), score(params, ids_of(5)))
    assert begun.wait(60)
    assert not small.ready
    assert_same(step(params, ids_of(6)), score(params, ids_of(6)))
    go_on.set()
    wait_for_compilations()
    assert small.ready
    assert_same(step(params, ids_of(5)), score(params, ids_of(5)))


def test_programs_are_traced_where_they_are_called():
    """Some libraries' tracing has a state of its own, which is not one of a thread."""
    threads: set[str] = set()

    def told(params: Any, ids: Any) -> Any:
        threads.add(threading.current_thread().name)
        return score(params, ids)

    step = memplan.jit(told, **TOKENS)
    for tokens in (32, 3, 3):
        step(table(), ids_of(tokens))
    assert threads == {threading.current_thread().name}


def test_a_bucket_of_one_size_is_the_program_itself():
    step = memplan.jit(
        lambda x: x[::2], buckets={"rows": [1, 2]}, dims={"x": "rows"}
    )  # Which could not be padded.
    np.testing.assert_array_equal(step(np.arange(2.0)), [0.0])
    np.testing.assert_array_equal(step(np.arange(1.0)), [0.0])


def test_methods_statics_and_keywords():
    @memplan.jit(buckets={"n": [4, 16]}, dims={"x": "n", "more.*": "n _"}, static_argnames="times")
    def total(x: Any, *, times: int, more: dict[str, Any]) -> Any:
        return x.sum() * times + more["w"].sum(0)

    for n in (3, 11):
        x, w = np.arange(n, dtype=np.float32), np.ones((n, 2), np.float32)
        assert_same(total(x, times=2, more={"w": w}), jnp.asarray(x.sum() * 2 + w.sum(0)))
        assert_same(total(x, times=3, more={"w": w}), jnp.asarray(x.sum() * 3 + w.sum(0)))


def test_programs_are_called_as_the_function_is():
    step = memplan.jit(functools.partial(score, table()), **TOKENS)
    assert step.lower(ids_of(3)).fun_name == "score"


def test_a_donated_cache_is_updated():
    def append(cache: Any, at: Any, new: Any) -> Any:
        return jax.lax.dynamic_update_slice(cache, new, (at, 0)), new.sum()

    step = memplan.jit(
        append, buckets={"new": [4, 8]}, dims={"new": "new _"}, donate_argnames="cache"
    )
    cache, plain, at = jnp.zeros((12, 2)), jnp.zeros((12, 2)), 0
    for n in (3, 5, 1, 3):
        new = np.full((n, 2), n, np.float32)
        old = cache
        cache, total = step(cache, at, new)
        assert old.is_deleted()
        plain = plain.at[at : at + n].set(new)
        at += n
        np.testing.assert_array_equal(cache, plain)
        assert total == new.sum()


def test_transformations_see_the_function():
    step = memplan.jit(lambda x: (x**2).mean(), buckets={"n": [8]}, dims={"x": "n"})
    x = jnp.arange(3.0)
    np.testing.assert_allclose(jax.grad(step)(x), 2 * x / 3)
    np.testing.assert_allclose(jax.vmap(step)(jnp.stack([x, x])), [5 / 3] * 2)


def test_all_buckets_keep_to_a_budget_with_weights_in_one_place():
    def layers(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return x - x.mean(0)

    of = np.random.RandomState(0)
    params = [jnp.asarray(of.randn(256, 256) / 16, jnp.float32) for _ in range(8)]
    step = memplan.jit(layers, hbm="1.25MiB", buckets={"rows": [8, 64]}, dims={"x": "rows _"})
    prepared = step.prepare(params, np.ones((3, 256), np.float32))
    assert prepared.arena_bytes <= 1.25 * 2**20
    hosted = {
        rows: step.lower(params, np.ones((rows, 256), np.float32)).compile().hosting.arguments
        for rows in (3, 60)
    }
    assert hosted[3] == hosted[60] != frozenset()
    placed, _ = step.place(params, np.ones((3, 256), np.float32))
    kinds = {n for n, w in enumerate(placed) if w.sharding.memory_kind == "pinned_host"}
    assert kinds == hosted[3]
    for rows in (3, 60, 8):
        x = of.randn(rows, 256).astype(np.float32)
        assert_same(step(placed, x), layers(params, x))


def test_shapes_are_planned():
    step = memplan.jit(score, **TOKENS)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), table())
    ids = jax.ShapeDtypeStruct((2, 5), jnp.int32)
    assert step.lower(shapes, ids).compile().device_bytes > 0
    assert set(step.prepare(shapes, ids).device_bytes) == {(8,), (32,)}


@pytest.mark.parametrize(
    ("buckets", "dims", "why"),
    [
        ({}, {"ids": "tokens"}, "names of sizes"),
        ({"tokens": 8}, None, "patterns of arguments"),
        ({"tokens": [0, 8]}, {"ids": "_ tokens"}, "positive ints"),
        ({"tokens": "8"}, {"ids": "_ tokens"}, "positive ints"),
        ({"tokens": [8]}, {"ids": "batch tokens"}, "buckets= has no batch"),
        ({"tokens": [8], "rows": [2]}, {"ids": "_ tokens"}, "no dimension is rows"),
        ({"tokens": [8]}, {"ids": 3}, "expected strings"),
    ],
)
def test_what_makes_no_buckets(buckets: Any, dims: Any, why: str):
    with pytest.raises(BucketsError, match=why):
        memplan.jit(score, buckets=buckets, dims=dims)


def test_calls_that_fit_no_bucket():
    params = table()
    with pytest.raises(BucketsError, match="tokens is 33 by ids; its buckets are for 1 to 32"):
        memplan.jit(score, **TOKENS)(params, ids_of(33))
    with pytest.raises(BucketsError, match="names 1 dimensions, ids has 2"):
        memplan.jit(score, buckets={"t": [4]}, dims={"ids": "t"})(params, ids_of(3))
    with pytest.raises(BucketsError, match="no argument matches"):
        memplan.jit(score, buckets={"t": [4]}, dims={"tokens": "t"})(params, ids_of(3))
    with pytest.raises(BucketsError, match="n is 2 by a and 3 by b"):
        memplan.jit(jnp.dot, buckets={"n": [4]}, dims={"[ab]": "n"})(np.ones(2), np.ones(3))
    with pytest.raises(BucketsError, match="in_shardings"):
        memplan.jit(score, **TOKENS, in_shardings=None)


@pytest.mark.parametrize(
    ("fun", "sizes", "calls"),
    [
        (lambda x: x.mean(), [1, 2], [2, 1, 1]),  # Two programs that are not padded.
        (lambda x: x.mean() if len(x) <= 8 else x.max(), [8, 32], [20, 6, 6, 7]),
        (lambda x: x[::2].sum() if len(x) == 8 else x.sum(), [7, 8, 32], [20, 8, 7]),
        # Of small sizes jax makes other programs.
        (lambda x: jnp.roll(x, -3), [8], [8, 2, 1, 3, 5]),
        (lambda x: x[-3:], [8], [8, 2, 5]),
        (lambda x: x[3:], [8], [8, 2, 3, 5]),
        (lambda x: jnp.convolve(x, jnp.ones(3), mode="same"), [8], [8, 2, 6]),
        (lambda x: jax.lax.top_k(x, min(3, len(x)))[1], [8], [8, 2, 5]),
        (lambda x: jnp.pad(x, (0, 12 - len(x)), constant_values=7.0), [8], [8, 5, 2]),
        (lambda x: x[:4].mean(), [8], [8, 2, 5]),
    ],
)  # fmt: skip
def test_a_program_runs_only_sizes_that_it_is_for(fun: Any, sizes: list[int], calls: list[int]):
    step = memplan.jit(fun, buckets={"n": sizes}, dims={"x": "n"})
    for n in calls:
        x = np.arange(n, dtype=np.float32) + 1
        assert_same(step(x), jnp.asarray(fun(jnp.asarray(x))))
    wait_for_compilations()


def test_what_was_found_of_one_kind_of_call_is_said_of_no_other():
    def either(x: Any, *, by_size: bool) -> Any:
        return x.mean() if by_size and len(x) <= 8 else x.max()

    step = memplan.jit(either, buckets={"n": [8, 32]}, dims={"x": "n"}, static_argnames="by_size")
    large, small = np.arange(20, dtype=np.float32), np.arange(6, dtype=np.float32)
    for by_size in (True, False):
        step(large, by_size=by_size)
    assert float(step(small, by_size=True)) == 2.5
    assert float(step(small, by_size=False)) == 5.0
    wait_for_compilations()


def test_a_size_that_cannot_be_called():
    def pairs(x: Any) -> Any:
        if len(x) < 2:
            raise ValueError("two, please")
        return x[1:] - x[:-1]

    step = memplan.jit(pairs, buckets={"n": [8]}, dims={"x": "n"})
    assert step(np.arange(5.0)).tolist() == [1.0] * 4
    with pytest.raises(ValueError, match="two, please"):
        step(np.ones(1))


def test_a_budget_has_weights_in_one_place_without_prepare():
    def layers(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return x

    of = np.random.RandomState(0)
    params = [jnp.asarray(of.randn(128, 128) / 11, jnp.float32) for _ in range(8)]
    step = memplan.jit(layers, hbm="0.8MiB", buckets={"rows": [8, 512]}, dims={"x": "rows _"})
    x = np.ones((3, 128), np.float32)
    placed, _ = step.place(params, x)
    assert_same(step(placed, x), layers(params, x))
    small, large = (
        step.lower(params, np.ones((n, 128), np.float32)).compile().hosting.arguments
        for n in (3, 500)
    )
    assert small == large != frozenset()


def test_types_are_those_of_the_function():
    step = memplan.jit(
        lambda x: (x * jnp.ones(1, jnp.bfloat16), len(x), 1 / len(x), jnp.full(len(x), 1.0)),
        buckets={"n": [16]},
        dims={"x": "n"},
    )
    x = jnp.full(7, 1.0)
    assert x.weak_type
    found, wanted = step(x), jax.jit(step.__wrapped__)(x)
    for a, b in zip(found, wanted, strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)


def test_doubles_are_exact():
    with jax.enable_x64(True):
        step = memplan.jit(
            lambda x: (x * (1 / len(x)), x / np.sqrt(len(x)), x * np.log(len(x))),
            buckets={"n": [64]},
            dims={"x": "n"},
        )
        x = np.linspace(1.0, 2.0, 47)
        for a, b in zip(step(x), step.__wrapped__(x), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-15)


def test_keys_have_sizes_too():
    step = memplan.jit(jax.vmap(jax.random.normal), buckets={"n": [8]}, dims={"args.0": "n"})
    keys = jax.random.split(jax.random.key(0), 5)
    np.testing.assert_allclose(step(keys), jax.vmap(jax.random.normal)(keys), rtol=1e-6)


def test_a_result_keeps_no_padding():
    step = memplan.jit(lambda x: x * 2, buckets={"n": [1 << 16]}, dims={"x": "n"})
    result = np.asarray(step(np.ones(16, np.float32)))
    while result.base is not None and isinstance(result.base, np.ndarray):
        result = result.base
    assert result.nbytes == 64


def test_it_is_copied_and_pickled():
    step = memplan.jit(score, **TOKENS)
    assert copy.deepcopy(step) is step
    again = pickle.loads(pickle.dumps(step))
    assert_same(again(table(), ids_of(5)), score(table(), ids_of(5)))


def test_python_ends_while_a_bucket_is_compiled():
    program = (
        "import jax, numpy as np, jax.numpy as jnp, memplan\n"
        "f = lambda x: jnp.linalg.norm(jax.nn.softmax(x))\n"
        "step = memplan.jit(f, buckets={'n': [8, 32]}, dims={'x': 'n'})\n"
        "step(np.ones(20, np.float32)); step(np.ones(6, np.float32))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert ended.returncode == 0, ended.stderr.decode()
