"""Small programs that say what kernels take: each of a few kernels of one kind, in many sizes.

A program says what all its kernels together take; which those are, is seen in what XLA made of it.
So none of them has to be one kernel, nor has what is in it to be known beforehand. What takes
microseconds runs many times in a loop, so that the call does not count; and as layers of models are
not made of single operations, some of them are here as well, with their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Elements of arrays: from what a cache nearest to a core holds to what none holds.
_ELEMENTS = (1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22)
_FLOATS = (jnp.float32, jnp.bfloat16)

# Results that are new memory in each run: more bytes than any C library keeps.
_FRESH_BYTES = (48 << 20, 80 << 20, 128 << 20)

# A run is to take about this long; what an element and a FLOP take for that, next to nothing known.
_RUN_S = 2e-3
_ELEMENT_S, _FLOP_S, _KERNEL_S = 2e-10, 2e-11, 5e-6
_MOST_TIMES = 128


@dataclass(frozen=True)
class Program:
    """
    Attributes:
      name: for what is printed.
      fun: what is compiled.
      args: trees of shapes and types.
      flops: about how many its products take; 0 where it has none.
      is_looped: whether it may run several times in a loop.
    """

    name: str
    fun: Callable[..., Any]
    args: tuple[Any, ...]
    flops: int = 0
    is_looped: bool = True

    @property
    def once_s(self) -> float:
        """About what a run takes: enough to tell microseconds from milliseconds."""
        elements = sum(a.size for a in jax.tree.leaves(self.args))
        return _KERNEL_S + elements * _ELEMENT_S + self.flops * _FLOP_S

    def looped(self) -> Program:
        """The same program as often in a loop as makes a run of some milliseconds."""
        times = min(_MOST_TIMES, int(_RUN_S / self.once_s))
        if not self.is_looped or times < 2:
            return self

        def fun(*args: Any) -> Any:
            def body(_: Any, carried: Any) -> Any:
                args, _ = carried
                # What comes next depends on this result, or it would run once.
                return jax.lax.optimization_barrier((args, self.fun(*args)))

            return jax.lax.fori_loop(0, times, body, (args, self.fun(*args)))[1]

        return replace(self, fun=fun, name=f"{self.name}, {times} times")


def programs(cache_bytes: int) -> Iterator[Program]:
    """Yields all of them, some of which touch several times what a cache of so many bytes holds."""
    beyond = [cache_bytes] if cache_bytes > _ELEMENTS[-1] else []
    return _all((*_ELEMENTS, *beyond))


def arrays(program: Program) -> Any:
    """Arguments for it: numbers between 0.5 and 1, and integers that are places in any array."""
    rng = np.random.default_rng(0)

    def array(of: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(of.dtype, jnp.floating):
            return jnp.asarray(rng.random(of.shape, np.float32) / 2 + 0.5, of.dtype)
        return jnp.asarray(rng.integers(0, 64, of.shape), of.dtype)

    return jax.tree.map(array, program.args)


def _all(elements: tuple[int, ...]) -> Iterator[Program]:
    yield from _calls()
    yield from _many_kernels()
    yield from _fresh()
    for dtype in _FLOATS:
        yield from _elementwise(dtype, elements)
        yield from _reductions(dtype)
        yield from _over_examples(dtype)
        yield from _moves(dtype)
        yield from _products(dtype)
        yield from _layers(dtype)
    yield from _convolutions()
    yield from _integers()


def _shape(dimensions: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dimensions, dtype)


def _program(
    name: str, fun: Callable[..., Any], dtype: Any, *shapes: tuple[int, ...], flops: int = 0
) -> Program:
    args = tuple(_shape(dimensions, dtype) for dimensions in shapes)
    sizes = " ".join("×".join(map(str, dimensions)) for dimensions in shapes)
    return Program(f"{name} {jnp.dtype(dtype).name} {sizes}", fun, args, flops)


def _calls() -> Iterator[Program]:
    """What a call takes, and each array that is an argument or a result."""
    for n in 1, 16, 64, 256:
        for results in sorted({1, n}):
            name = f"call with {n} arrays and {results}"
            args = tuple(_shape((4,), jnp.float32) for _ in range(n))
            yield Program(name, lambda *xs, r=results: xs[:r], args, is_looped=False)


def _many_kernels() -> Iterator[Program]:
    """What a kernel takes that does next to nothing: one after the other, in a loop, and many that
    wait for none of the others."""

    def layers(n: int, x: Any, w: Any) -> Any:
        for _ in range(n):
            x = jnp.tanh(x @ w)
        return x

    def scanned(n: int, x: Any, w: Any) -> Any:
        return jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ w), x)

    def beside(xs: Any) -> Any:
        return [x * 0.9 + 0.1 * jnp.flip(x, 0) for x in xs]

    for n in 16, 64, 128:
        shape = [_shape((64, 8), jnp.float32)] * n
        yield Program(f"{n} beside each other", beside, (shape,), is_looped=False)
    for dtype in _FLOATS:
        for fun in layers, scanned:
            for n in 16, 64, 128:
                one = _program(f"{fun.__name__} {n}", partial(fun, n), dtype, (8, 8), (8, 8))
                yield replace(one, is_looped=False)


def _fresh() -> Iterator[Program]:
    """What it takes to be the first to write to memory: results larger than what is kept."""
    for dtype in _FLOATS:
        for size in _FRESH_BYTES:
            shape = (size // jnp.dtype(dtype).itemsize // 1024, 1024)
            name = f"fresh {jnp.dtype(dtype).name} {shape[0]}×{shape[1]}"
            args = (_shape((1024,), dtype),)
            yield Program(
                name, lambda x, s=shape: jnp.broadcast_to(x, s) + 1, args, is_looped=False
            )


def _elementwise(dtype: Any, elements: tuple[int, ...]) -> Iterator[Program]:
    operations: dict[str, Callable[..., Any]] = {
        "add": lambda x, y: x + y,
        "many": lambda x, y: ((x * 3 + y) * x - 2) * y + x * 0.5,
        "exp": lambda x, y: jnp.exp(x) * y,
        "tanh": lambda x, y: jnp.tanh(x) + y,
        "gelu": lambda x, y: jax.nn.gelu(x) * y,
        "divide": lambda x, y: x / y,
        "adam": lambda x, y: x - 0.1 * y / (jnp.sqrt(y * y * 0.9 + 0.1) + 1e-8),
    }
    for name, operation in operations.items():
        for n in elements:
            yield _program(name, operation, dtype, (n // 64, 64), (n // 64, 64))
    other = jnp.bfloat16 if dtype == jnp.float32 else jnp.float32
    for n in elements:
        yield _program("convert", lambda x: x.astype(other), dtype, (n // 64, 64))


def _reductions(dtype: Any) -> Iterator[Program]:
    operations: dict[str, Callable[..., Any]] = {
        "sum of rows": lambda x: x.sum(-1),
        "sum of columns": lambda x: x.sum(0),
        "sum of all": lambda x: (x * x).sum(),
        "largest": lambda x: x.max(-1),
        "softmax": lambda x: jax.nn.softmax(x),
        "normalized": lambda x: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True)),
        "summed up": lambda x: jnp.cumsum(x, -1),
    }
    for name, operation in operations.items():
        for rows, columns in (16, 64), (128, 256), (512, 512), (1024, 2048):
            yield _program(name, operation, dtype, (rows, columns))


def _over_examples(dtype: Any) -> Iterator[Program]:
    """Sums over examples and places, as the gradient of a bias is one, and over all."""
    operations: dict[str, Callable[..., Any]] = {
        "sum of examples": lambda x: x.reshape(-1, x.shape[-1]).sum(0),
        "mean of places": lambda x: x.mean(tuple(range(1, x.ndim - 1))),
        "squares": lambda x: (x.astype(jnp.float32) ** 2).sum(),
        "largest of all": lambda x: x.max(),
    }
    for name, operation in operations.items():
        for shape in (2, 16, 64), (2, 64, 256), (4, 128, 768), (4, 16, 16, 64), (2, 64, 64, 64):
            yield _program(name, operation, dtype, shape)


def _moves(dtype: Any) -> Iterator[Program]:
    for rows, columns in (64, 64), (512, 512), (768, 3072), (1536, 2048):
        shape = (rows, columns)
        yield _program("transpose", lambda x: x.T * 1, dtype, shape)
        yield _program("heads", lambda x: x.reshape(x.shape[0], 8, -1).swapaxes(0, 1), dtype, shape)
        yield _program("concatenate", lambda x, y: jnp.concatenate([x, y]), dtype, shape, shape)
        yield _program("pad", lambda x: jnp.pad(x, 3), dtype, shape)
        yield _program("reverse", lambda x: x[::-1], dtype, shape)
        where = _shape((min(rows, 512),), jnp.int32)
        table = _shape(shape, dtype)
        taken = _shape((where.size, columns), dtype)
        size = f"{jnp.dtype(dtype).name} {rows}×{columns}"
        yield Program(f"gather {size}", lambda t, i: t[i], (table, where))
        yield Program(f"scatter {size}", lambda t, i, x: t.at[i].add(x), (table, where, taken))
        row, at = _shape((1, columns), dtype), _shape((), jnp.int32)
        yield Program(f"update {size}", _updated, (table, row, at))


def _updated(table: Any, row: Any, at: Any) -> Any:
    return jax.lax.dynamic_update_slice(table * 2, row, (at, 0))


def _products(dtype: Any) -> Iterator[Program]:
    sizes = (1, 256, 256), (4, 768, 768), (64, 64, 64), (128, 256, 512), (64, 2048, 256)
    sizes += (256, 768, 768), (8, 1024, 4096), (768, 128, 768), (1024, 1024, 1024)
    contracted = {"nn": "mk,kn->mn", "nt": "mk,nk->mn", "tn": "km,kn->mn", "tt": "km,nk->mn"}
    for m, k, n in sizes:
        for form, spec in contracted.items():
            lhs = (m, k) if form[0] == "n" else (k, m)
            rhs = (k, n) if form[1] == "n" else (n, k)
            fun = partial(jnp.einsum, spec)
            yield _program(f"product {form}", fun, dtype, lhs, rhs, flops=2 * m * k * n)
    for b, m, k, n in (4, 64, 64, 64), (12, 128, 64, 128), (8, 16, 256, 512), (8, 512, 256, 512):
        for form, spec in contracted.items():
            lhs = (b, m, k) if form[0] == "n" else (b, k, m)
            rhs = (b, k, n) if form[1] == "n" else (b, n, k)
            batched = "b" + spec.replace(",", ",b").replace("->", "->b")
            fun = partial(jnp.einsum, batched)
            yield _program(f"products {form}", fun, dtype, lhs, rhs, flops=2 * b * m * k * n)


def _layers(dtype: Any) -> Iterator[Program]:
    """Layers as models have them, on examples of many tokens; and their gradients, in which
    products have other operands, and arrays other orders of dimensions."""

    def of_wide(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    def experts(x: Any, w: Any) -> Any:
        return jnp.einsum("betd,edf->betf", x, w)

    def mixture(x: Any, w: Any) -> Any:
        """Tokens go to places of experts, through those, and back."""
        tokens, experts = x[0], w.shape[0]
        places = 4 * tokens.shape[0] // experts
        to = jax.nn.one_hot(jnp.arange(tokens.shape[0]) % places, places, dtype=x.dtype)
        to = jax.nn.softmax(tokens[:, :experts])[:, :, None] * to[:, None, :]
        given = jnp.einsum("tec,td->ecd", to, tokens)
        hidden = jax.nn.silu(jnp.einsum("ecd,edf->ecf", given, w))
        return jnp.einsum("tec,ecf->tf", to, hidden)

    def attention(q: Any, k: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, k, is_causal=True)

    def normalized(x: Any, w: Any) -> Any:
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
        return (wide * w[0]).astype(x.dtype)

    def loss(x: Any, w: Any) -> Any:
        logits = (x @ w).astype(jnp.float32)
        return jax.nn.logsumexp(logits, -1) - logits[..., 0]

    cases: list[tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], int]] = []
    for b, t, d, f in (2, 32, 64, 128), (2, 64, 256, 512), (1, 128, 768, 3072), (4, 192, 384, 768):
        cases.append((of_wide, (b, t, d), (d, f), 2 * b * t * d * f))
        cases.append((normalized, (b, t, d), (1, d), 0))
        cases.append((loss, (b, t, d), (d, 2 * f), 4 * b * t * d * f))
        cases.append((attention, (b, t, d // 32, 32), (b, t, d // 32, 32), 4 * b * t * t * d))
    for e, t, d, f in (4, 4, 128, 256), (8, 20, 256, 512), (8, 40, 512, 1024):
        for examples in 1, 2:
            flops = 2 * examples * e * t * d * f
            cases.append((experts, (examples, e, t, d), (e, d, f), flops))
        cases.append((mixture, (1, 16 * t, d), (e, d, f), 128 * t * d * f))
    for fun, x, w, flops in cases:
        yield _program(f"layer {fun.__name__}", fun, dtype, x, w, flops=flops)
        for n, of in enumerate(("input", "weight")):
            gradient = jax.grad(
                lambda x, w, fun=fun: (fun(x, w).astype(jnp.float32) ** 2).sum(), argnums=n
            )
            name = f"gradient of {fun.__name__}'s {of}"
            yield _program(name, gradient, dtype, x, w, flops=3 * flops)


def _convolutions() -> Iterator[Program]:
    def convolved(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def gradient(x: Any, w: Any) -> Any:
        return jax.grad(lambda w, x: (convolved(x, w) ** 2).sum(), (0, 1))(w, x)

    for side, features in (8, 16), (16, 64), (32, 32), (32, 128):
        shapes = (2, side, side, features), (3, 3, features, features)
        flops = 36 * side * side * features * features
        yield _program("convolution", convolved, jnp.float32, *shapes, flops=flops)
        yield _program("gradient of a convolution", gradient, jnp.float32, *shapes, flops=3 * flops)


def _integers() -> Iterator[Program]:
    for n in _ELEMENTS[:4]:
        shape = (n // 64, 64)
        yield _program("add", lambda x: x * 3 + 1, jnp.int32, shape)
        yield _program("sort", lambda x: jnp.sort(x, -1), jnp.float32, shape)
        yield _program("sum", lambda x: x.sum(-1), jnp.int32, shape)
        yield _program("one of many", lambda x: jnp.argmax(x, -1), jnp.float32, shape)
        yield _program(
            "random", lambda x: jax.random.uniform(jax.random.key(0), x.shape), jnp.int32, shape
        )
