"""Programs drawn at random, the same for the same number: what `memory_accuracy` compiles.

A program's number chooses its kind, in turn, and seeds what is drawn of it: the number of its
arguments (1 to 5,000), their sizes (bytes to about a GiB), dtypes, depth, what is donated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape
from jax import lax
from jax.sharding import PartitionSpec

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32

DEVICES = 4
"""Of the mesh of a program with `Program.partitions`; its axis is ``"x"``."""


@dataclass(frozen=True)
class Program:
    """A function with the shapes of its arguments.

    Attributes:
      function: takes the keyword ``mesh`` where there are partitions.
      arguments: pytrees of ``ShapeDtypeStruct``.
      donate: numbers of the donated arguments.
      partitions: mesh axes of each argument's dimensions; empty on one device.
    """

    function: Callable[..., Any]
    arguments: Sequence[Any]
    donate: tuple[int, ...] = ()
    partitions: tuple[PartitionSpec, ...] = ()


class Draws(Random):
    """Numbers, shapes and dtypes; of one program in four large ones."""

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        self.is_large = self.is_true(0.25)

    def size(self, low: int, high: int) -> int:
        """Log-distributed, both ends included."""
        return min(high, int(low * ((high + 1) / low) ** self.random()))

    def is_true(self, chance: float = 0.5) -> bool:
        return self.random() < chance

    def floating(self) -> Any:
        return self.choice((F32, F32, BF16))

    def width(self, high: int = 4096) -> int:
        """Of a dimension: mostly a power of two."""
        n = self.size(high // 2, 2 * high) if self.is_large else self.size(8, high)
        return n if self.is_true(0.3) else 1 << (n.bit_length() - 1)

    def array(self, elements: int, dtype: Any = None) -> Shape:
        """Of rank 0 to 3 and up to so many elements."""
        wanted = self.size(max(1, elements // 64), elements)
        dtype = dtype or self.floating()
        rank = self.randrange(4) if wanted < 64 else self.randrange(1, 4)
        if rank == 0 or wanted == 1:
            return Shape((), dtype)
        sides = [max(1, round(wanted ** (1 / rank))) for _ in range(rank - 1)]
        return Shape((*sides, max(1, wanted // reduce(int.__mul__, sides, 1))), dtype)

    def donated(self, *numbers: int) -> tuple[int, ...]:
        return numbers if self.is_true() else ()


_UNARY = (jnp.tanh, jnp.sin, jnp.exp, jnp.abs, jnp.square, jax.nn.gelu, jax.nn.relu, jnp.negative)
_BINARY = (jnp.add, jnp.multiply, jnp.maximum, jnp.subtract)


def _elementwise(draws: Draws) -> Program:
    dtype, n = draws.floating(), draws.size(1, 60)
    shape = draws.array(draws.size(2**24 if draws.is_large else 16, 2**28) // n + 1, dtype)
    steps = [(draws.choice(_UNARY), draws.choice(_BINARY)) for _ in range(n)]
    kept = {draws.randrange(n) for _ in range(draws.randrange(1, 4))}

    def function(arrays: list[Any]) -> Any:
        x, results = arrays[0], []
        for k, (one, two) in enumerate(steps):
            x = two(one(x), arrays[k])
            results += [x] * (k in kept)
        return results, x

    return Program(function, [[shape] * n], draws.donated(0))


def _many_arguments(draws: Draws) -> Program:
    """An optimizer's step, sums, or both: on very many arrays."""
    n = max(draws.size(1, 2500), draws.size(1, 2500))
    elements = max(1, draws.size(2**26 if draws.is_large else 2**10, 2**28) // n)
    shapes = [draws.array(elements) for _ in range(draws.randrange(1, 9))]
    arrays = [draws.choice(shapes) for _ in range(n)]
    what = draws.choice(("update", "sum", "norm", "pick"))

    def function(params: list[Any], grads: list[Any]) -> Any:
        if what == "sum":
            return sum(jnp.sum(p.astype(F32) * g) for p, g in zip(params, grads, strict=True))
        if what == "pick":
            return [jnp.flip(p.ravel()) + 1 for p in params[:: max(1, n // 50)]], grads[0] * 2
        scale = F32(0.1)
        if what == "norm":
            scale = lax.rsqrt(sum(jnp.sum(jnp.square(g.astype(F32))) for g in grads))
        return [p - (scale * g).astype(p.dtype) for p, g in zip(params, grads, strict=True)]

    return Program(function, [arrays, arrays], draws.donated(0))


def _matmuls(draws: Draws) -> Program:
    dtype, n = draws.floating(), draws.size(1, 6)
    widths = [draws.width() for _ in range(draws.randrange(1, 4))]
    sides = [draws.choice(widths) for _ in range(n + 1)]
    x = Shape((draws.width(8192), sides[0]), dtype)
    weights = [Shape(pair, dtype) for pair in pairwise(sides)]
    activation, is_kept = draws.choice(_UNARY), draws.is_true()

    def function(x: Any, weights: list[Any]) -> Any:
        hidden = []
        for w in weights:
            x = activation(x @ w)
            hidden.append(x.T if x.shape[0] < 64 else x.sum(0))
        return (x, hidden) if is_kept else x

    return Program(function, [x, weights])


def _mlp(x: Any, layers: Sequence[Any]) -> Any:
    for w, b in layers:
        x = jax.nn.gelu(x @ w + b)
    return x


def _mlp_grad(draws: Draws) -> Program:
    dtype, width, n = draws.floating(), draws.width(2048), draws.size(1, 8)
    layers = [(Shape((width, width), dtype), Shape((width,), dtype))] * n
    x = Shape((draws.width(8192), width), dtype)

    def loss(layers: Any, x: Any) -> Any:
        return jnp.mean(_mlp(x, layers).astype(F32) ** 2)

    def function(layers: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(layers, x)
        return jax.tree.map(lambda p, g: p - (0.01 * g).astype(p.dtype), layers, grads), value

    return Program(function, [layers, x], draws.donated(0))


def _adam(draws: Draws) -> Program:
    dtype, width, n = draws.floating(), draws.width(1024), draws.size(1, 60)
    weights = [Shape((width, width), dtype)] * n
    moments = [Shape((width, width), F32)] * n
    x = Shape((draws.width(2048), width), dtype)

    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x.astype(F32) ** 2)

    def function(state: Any, x: Any) -> Any:
        weights, first, second, step = state
        value, grads = jax.value_and_grad(loss)(weights, x)

        def update(w: Any, g: Any, m: Any, v: Any) -> Any:
            g = g.astype(F32)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            return (w - 1e-3 * m / (jnp.sqrt(v) * (1 - 0.9**step) + 1e-8)).astype(w.dtype), m, v

        updated = [update(*of) for of in zip(weights, grads, first, second, strict=True)]
        return (*map(list, zip(*updated, strict=True)), step + 1), value

    return Program(function, [(weights, moments, moments, Shape((), I32)), x], draws.donated(0))


def _attend(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores.astype(F32), -1e9), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(q.dtype), v)


def _attention(draws: Draws) -> Program:
    shape = (draws.size(1, 8), draws.width(2048), draws.size(1, 16), draws.choice((16, 64, 128)))
    shapes = [Shape(shape, draws.floating())] * 3
    if draws.is_true():
        return Program(_attend, shapes)
    return Program(jax.grad(lambda *of: jnp.sum(_attend(*of).astype(F32)), (0, 1, 2)), shapes)


def _transformer(draws: Draws) -> Program:
    """The gradients of a small decoder, by plain descent."""
    heads, size = draws.choice((2, 4, 8)), draws.choice((16, 64))
    width, vocabulary, depth = heads * size, draws.size(64, 32768), draws.size(1, 3)
    dtype, is_scanned = draws.floating(), draws.is_true()
    layer = {
        "qkv": Shape((width, 3, heads, size), dtype),
        "out": Shape((heads, size, width), dtype),
        "up": Shape((width, 4 * width), dtype),
        "down": Shape((4 * width, width), dtype),
        "norm": Shape((width,), F32),
    }
    stacked = jax.tree.map(lambda a: Shape((depth, *a.shape), a.dtype), layer)
    params = {
        "table": Shape((vocabulary, width), dtype),
        "layers": stacked if is_scanned else [layer] * depth,
    }
    tokens = Shape((draws.size(1, 16), draws.width(1024)), I32)

    def block(x: Any, w: Any) -> tuple[Any, None]:
        y = (x * lax.rsqrt(jnp.mean(x.astype(F32) ** 2, -1, keepdims=True)) * w["norm"]).astype(
            x.dtype
        )
        q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", y, w["qkv"]), 2, 0)
        x = x + jnp.einsum("bthk,hkd->btd", _attend(q, k, v), w["out"])
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    def loss(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]
        if is_scanned:
            x = lax.scan(jax.checkpoint(block), x, params["layers"])[0]
        else:
            x = reduce(lambda x, w: block(x, w)[0], params["layers"], x)
        logits = (x @ params["table"].T).astype(F32)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
        return -jnp.mean(picked)

    def step(params: Any, tokens: Any) -> Any:
        grads = jax.grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - (0.01 * g).astype(p.dtype), params, grads)

    function = step if draws.is_true(0.7) else loss
    return Program(function, [params, tokens], draws.donated(0) if function is step else ())


def _convolutions(draws: Draws) -> Program:
    channels = [draws.choice((3, 8, 16, 64, 128)) for _ in range(draws.size(1, 3) + 1)]
    side, dtype = draws.choice((16, 32, 64, 128)), draws.floating()
    x = Shape((draws.size(1, 64), side, side, channels[0]), dtype)
    pairs = pairwise(channels)
    kernels = [Shape((*draws.choice(((1, 1), (3, 3), (5, 5))), *pair), dtype) for pair in pairs]
    stride, is_pooled = draws.choice((1, 1, 2)), draws.is_true()

    def function(kernels: Any, x: Any) -> Any:
        for k in kernels:
            x = jax.nn.relu(
                lax.conv_general_dilated(
                    x, k, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
            )
        if is_pooled:
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
        return jnp.mean(x.astype(F32))

    if draws.is_true():
        return Program(jax.value_and_grad(function), [kernels, x])
    return Program(function, [kernels, x])


def _reductions(draws: Draws) -> Program:
    rows, columns = draws.width(8192), draws.width(8192)
    x = Shape((rows, columns), draws.choice((F32, BF16, I32)))
    ways: tuple[Callable[[Any], Any], ...] = (
        lambda x: jnp.sum(x, 0),
        lambda x: jnp.max(x, 1),
        lambda x: jnp.argmax(x, 1),
        lambda x: jax.nn.softmax(x.astype(F32), 1),
        lambda x: jnp.var(x.astype(F32), 0),
        lambda x: jnp.cumsum(x, 0),
        lambda x: jnp.mean(x.astype(F32)),
        lambda x: lax.associative_scan(jnp.maximum, x, axis=1),
        lambda x: jax.nn.logsumexp(x.astype(F32), 0),
        lambda x: jnp.any(x > 0, 1),
    )
    chosen = draws.sample(ways, draws.randrange(1, 5))
    return Program(lambda x: [way(x) for way in chosen], [x])


def _sorts(draws: Draws) -> Program:
    shape = (draws.width(2048), draws.width(8192)) if draws.is_true() else (draws.size(16, 2**22),)
    x = Shape(shape, draws.choice((F32, I32, BF16)))
    ways: tuple[Callable[[Any], Any], ...] = (
        jnp.sort,
        jnp.argsort,
        lambda x: lax.top_k(x, min(16, x.shape[-1])),
        lambda x: lax.sort((x, lax.broadcasted_iota(I32, x.shape, 0), x * 2), num_keys=1),
        lambda x: jnp.take_along_axis(x, jnp.argsort(x * x, -1), -1),
        lambda x: jnp.median(x.astype(F32), -1),
        lambda x: jnp.flip(jnp.sort(x + 1), -1) - x,
    )
    chosen = draws.sample(ways, draws.randrange(1, 4))
    return Program(lambda x: [way(x) for way in chosen], [x], draws.donated(0))


def _lookups(draws: Draws) -> Program:
    """Rows of a table, as they are, summed, weighted, or updated by their gradients."""
    table = Shape((draws.size(16, 200_000), draws.choice((1, 16, 64, 128, 300))), draws.floating())
    tokens = Shape((draws.size(1, 8192), draws.choice((1, 8, 32))), I32)
    way = draws.randrange(5)

    def function(table: Any, tokens: Any) -> Any:
        rows = table[tokens]
        if way == 0:
            return rows.sum(1)
        if way == 1:
            return jnp.tanh(rows).reshape(tokens.shape[0], -1)
        if way == 2:
            return jnp.einsum("tkd,tk->td", rows, jax.nn.softmax(rows.sum(-1)))
        return jnp.sum(jnp.tanh(rows.astype(F32)).sum(1) ** 2)

    if way < 3:
        return Program(function, [table, tokens])

    def step(table: Any, tokens: Any) -> Any:
        grad = jax.grad(function)(table, tokens)
        return table - (0.1 * grad).astype(table.dtype) if way == 4 else grad

    return Program(step, [table, tokens], draws.donated(0) if way == 4 else ())


def _scatters(draws: Draws) -> Program:
    rows, n = draws.size(16, 100_000), draws.size(1, 16384)
    columns = draws.choice(((), (1,), (16,), (128,), (4, 32)))
    x = Shape((rows, *columns), draws.choice((F32, F32, BF16, I32)))
    updates, at = Shape((n, *columns), x.dtype), Shape((n,), I32)
    ways = [draws.choice(("add", "set", "max", "multiply", "min")) for _ in range(draws.size(1, 3))]
    what, is_read = draws.randrange(4), draws.is_true(0.3)

    def function(x: Any, at: Any, updates: Any) -> Any:
        before = x * 2
        for way in ways:
            x = getattr(x.at[at], way)(updates)
            updates = updates + 1
        if what == 0:
            x = x + jax.ops.segment_sum(updates, at % 8, 8)[0]
        if what == 1:
            return x, jnp.bincount(at, length=64)
        return (x, before) if is_read else x

    return Program(function, [x, at, updates], draws.donated(0))


def _slices(draws: Draws) -> Program:
    rows, columns = draws.width(8192), draws.width()
    x, y = Shape((rows, columns), draws.floating()), Shape((max(1, rows // 4), columns), F32)
    count, is_split = draws.randrange(1, 5), draws.is_true()

    def function(x: Any, y: Any, at: Any) -> Any:
        for k in range(count):
            part = lax.dynamic_slice_in_dim(x, at + k, y.shape[0])
            part = jnp.tanh(part + y.astype(x.dtype))
            x = lax.dynamic_update_slice_in_dim(x, part, at * 2 + k, 0)
        if is_split:
            halves = jnp.split(x, 2, 1)
            return jnp.concatenate([halves[1], jnp.flip(halves[0], 0)], 0), jnp.pad(y, 3)
        return jnp.roll(x, 5, 0), x[::2, 1:] + 1

    return Program(function, [x, y, Shape((), I32)], draws.donated(0))


def _scans(draws: Draws) -> Program:
    width, depth, batch = draws.width(1024), draws.size(2, 40), draws.width(1024)
    dtype, is_nested, way = draws.floating(), draws.is_true(0.3), draws.randrange(4)
    x, stack = Shape((batch, width), dtype), Shape((depth, width, width), dtype)

    def layer(x: Any, w: Any) -> Any:
        y = jnp.tanh(x @ w)
        if is_nested:
            y = lax.fori_loop(0, 3, lambda n, y: jnp.sin(y) * n + x, y)
        return y, (y.sum(0) if way == 1 else y if way == 2 else None)

    def function(x: Any, stack: Any) -> Any:
        return lax.scan(layer, x, stack)

    if way < 3:
        return Program(function, [x, stack], draws.donated(0))
    step = jax.checkpoint(layer) if draws.is_true() else layer
    grad = jax.grad(lambda x, w: jnp.sum(lax.scan(step, x, w)[0].astype(F32)), (0, 1))
    return Program(grad, [x, stack])


def _recurrent(draws: Draws) -> Program:
    """An LSTM over a sequence, or its gradients."""
    width, length, batch = draws.width(512), draws.size(2, 200), draws.width(256)
    xs, w = Shape((length, batch, width), F32), Shape((2 * width, 4 * width), F32)
    state = [Shape((batch, width), F32)] * 2

    def cell(state: Any, w: Any, x: Any) -> Any:
        h, c = state
        i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ w, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return [jax.nn.sigmoid(o) * jnp.tanh(c), c], h

    def function(w: Any, state: Any, xs: Any) -> Any:
        return lax.scan(lambda s, x: cell(s, w, x), state, xs)

    if draws.is_true():
        return Program(function, [w, state, xs])
    return Program(jax.grad(lambda *of: jnp.mean(function(*of)[1])), [w, state, xs])


def _loops(draws: Draws) -> Program:
    n, side, dtype = draws.size(1, 12), draws.width(2048), draws.floating()
    is_rotated, has_product = draws.is_true(), draws.is_true()
    arrays = [Shape((side, side) if draws.is_true(0.8) else (side,), dtype) for _ in range(n)]
    if is_rotated:
        arrays = [arrays[0]] * n

    def body(carry: Any) -> Any:
        k, arrays = carry
        arrays = [jnp.tanh(a) + k.astype(a.dtype) for a in arrays]
        if has_product and arrays[0].ndim == 2:
            arrays[0] = arrays[0] @ arrays[0]
        return k + 1, arrays[1:] + arrays[:1] if is_rotated else arrays

    def function(arrays: Any, limit: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < limit, body, (I32(0), arrays))

    return Program(function, [arrays, Shape((), I32)], draws.donated(0))


def _branches(draws: Draws) -> Program:
    count, side, dtype = draws.randrange(2, 6), draws.width(), draws.floating()
    x, w = Shape((draws.width(), side), dtype), Shape((side, side), dtype)
    is_tuple, has_loop = draws.is_true(), draws.is_true(0.3)

    def branch(n: int, x: Any, w: Any) -> Any:
        y = jnp.flip(x, 0) * n if n % 3 == 0 else jnp.tanh(x @ w) + n if n % 3 == 1 else x
        if n % 2 and has_loop:
            y = lax.fori_loop(0, 4, lambda _, y: jnp.sin(y @ w), y)
        return (y, y.sum(0)) if is_tuple else y

    def function(n: Any, x: Any, w: Any) -> Any:
        found = lax.switch(n, [partial(branch, k) for k in range(count)], x * 2, w)
        return jax.tree.map(lambda y: y + 1, found), x[0]

    return Program(function, [Shape((), I32), x, w], draws.donated(1))


def _random(draws: Draws) -> Program:
    x = draws.array(2**25, F32)
    ways: tuple[Callable[[Any, Any], Any], ...] = (
        lambda k, x: jnp.where(jax.random.bernoulli(k, 0.9, x.shape), x / 0.9, 0),
        lambda k, x: x + jax.random.normal(k, x.shape),
        lambda k, x: jax.random.uniform(k, x.shape, BF16).astype(F32) * x,
        lambda k, x: jax.random.permutation(k, x) if x.ndim else x,
        lambda k, x: x + jax.random.randint(k, x.shape, 0, 10),
        lambda k, x: x * jax.random.gumbel(k, (*x.shape, 2)).sum(-1),
    )
    chosen = draws.sample(ways, draws.randrange(1, 3))
    implementation = draws.choice(("threefry2x32", "rbg"))

    def function(seed: Any, x: Any) -> Any:
        keys = jax.random.split(jax.random.key(seed, impl=implementation), len(chosen))
        return [way(key, x) for way, key in zip(chosen, keys, strict=True)]

    return Program(function, [Shape((), jnp.uint32), x])


def _linear_algebra(draws: Draws) -> Program:
    n, batch = draws.width(1024), draws.choice(((), (3,)))
    a, b = Shape((*batch, n, n), F32), Shape((*batch, n, draws.width(512)), F32)
    ways: tuple[Callable[[Any, Any], Any], ...] = (
        lambda a, b: jnp.linalg.cholesky(a @ jnp.swapaxes(a, -1, -2) + jnp.eye(n)),
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        lambda a, b: jnp.fft.irfft(jnp.fft.rfft(b) * 2),
        lambda a, b: jnp.fft.fft2(a).real,
        lambda a, b: jnp.abs(lax.complex(a, a * 2) @ lax.complex(b, b)),
        lambda a, b: jnp.einsum("...ij,...jk->...ki", a, b) + 1,
    )
    chosen = draws.sample(ways, draws.randrange(1, 3))
    return Program(lambda a, b: [way(a, b) for way in chosen], [a, b])


def _dtypes(draws: Draws) -> Program:
    kinds = (jnp.int8, jnp.uint8, jnp.bool_, jnp.complex64, jnp.float16, jnp.int16, BF16)
    kinds += (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int4)
    one, two = draws.sample(kinds, 2)
    rows, inner = draws.width(), draws.width()
    x, y = Shape((rows, inner), one), Shape((inner, draws.width()), two)

    def widened(a: Any) -> Any:
        return a.real if jnp.iscomplexobj(a) else a.astype(F32)

    def function(x: Any, y: Any) -> Any:
        z = widened(x) @ widened(y)
        narrow = jnp.clip(z, -8, 7).astype(I32).astype(jnp.int8)
        return narrow, (z > 0), z.astype(BF16).T, jnp.concatenate([x, x], 0), jnp.flip(y, 0)

    return Program(function, [x, y])


def _products_of_bytes(draws: Draws) -> Program:
    x = Shape((draws.width(8192), draws.width()), jnp.int8)
    w = Shape((x.shape[1], draws.width()), jnp.int8)

    def function(x: Any, w: Any, scale: Any) -> Any:
        y = lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=I32)
        return jnp.clip(jnp.round(y.astype(F32) * scale), -128, 127).astype(jnp.int8)

    return Program(function, [x, w, Shape((w.shape[1],), F32)])


def _many_results(draws: Draws) -> Program:
    x = Shape((draws.width(), draws.width()), draws.floating())
    n, is_nested = draws.size(2, 300), draws.is_true()

    def function(x: Any) -> Any:
        y = jnp.tanh(x @ x.T) if x.shape[0] < 1024 else x * 2
        small = [y[k % y.shape[0], : k + 1].sum() for k in range(n)]
        large = [jnp.roll(y, k, 0) * k for k in range(min(n, 5))]
        return {"small": small, "large": (large, y)} if is_nested else small + large

    return Program(function, [x])


def _batched(draws: Draws) -> Program:
    batch, width, n = draws.size(1, 64), draws.width(512), draws.size(1, 6)
    x, ws = Shape((batch, draws.width(512), width), F32), [Shape((width, width), F32)] * n
    per_example = draws.is_true()

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    if per_example:
        return Program(jax.vmap(jax.grad(loss), (None, 0)), [ws, x])
    return Program(jax.vmap(jax.value_and_grad(loss, 1), (None, 0)), [ws, x])


def _collectives(draws: Draws) -> Program:
    dtype, n = draws.floating(), draws.size(1, 6)
    x = Shape((DEVICES * draws.width(512), DEVICES * draws.width(512)), dtype)
    ring = [(k, (k + 1) % DEVICES) for k in range(DEVICES)]

    def gathered(x: Any) -> Any:
        return lax.all_gather(x, "x", tiled=True)[: x.shape[0]]

    def scattered(x: Any) -> Any:
        return jnp.tile(lax.psum_scatter(x, "x", tiled=True), (DEVICES, 1))

    ways: tuple[Callable[[Any], Any], ...] = (
        lambda x: lax.psum(x, "x"),
        lambda x: lax.pmax(x, "x"),
        gathered,
        scattered,
        lambda x: lax.ppermute(x, "x", ring),
        lambda x: lax.all_to_all(x, "x", 1, 1, tiled=True),
    )
    chosen = [draws.choice(ways) for _ in range(n)]
    is_looped = draws.is_true(0.3)

    def local(x: Any) -> Any:
        def layers(x: Any) -> Any:
            for way in chosen:
                x = jnp.tanh(way(x) * 2) + x
            return x

        return lax.fori_loop(0, 3, lambda _, x: layers(x), x) if is_looped else layers(x)

    spec = PartitionSpec("x")

    def function(x: Any, mesh: Any) -> Any:
        return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)

    return Program(function, [x], draws.donated(0), (spec,))


def _partitioned(draws: Draws) -> Program:
    dtype, width, n = draws.floating(), DEVICES * draws.width(512), draws.size(1, 4)
    x = Shape((DEVICES * draws.width(1024), width), dtype)
    weights = [(Shape((width, 4 * width), dtype), Shape((4 * width, width), dtype))] * n
    spec = draws.choice((PartitionSpec("x"), PartitionSpec(None, "x")))

    def loss(weights: Any, x: Any) -> Any:
        for w, u in weights:
            x = x + jax.nn.gelu(x @ w) @ u
        return jnp.mean(x.astype(F32) ** 2)

    def function(weights: Any, x: Any, mesh: Any) -> Any:
        grads = jax.grad(loss)(weights, x)
        return jax.tree.map(lambda p, g: p - (0.01 * g).astype(p.dtype), weights, grads)

    return Program(function, [weights, x], draws.donated(0), (spec, PartitionSpec("x")))


def _graph(draws: Draws) -> Program:
    """Any of many operations on any of the arrays that are there, over and over."""
    side, dtype = draws.width(2048), draws.floating()
    arguments = [Shape((side, side), dtype)] * draws.size(1, 8)
    arguments += [draws.array(4096, dtype) for _ in range(draws.size(1, 64))]
    squares: tuple[Callable[[Any, Any], Any], ...] = (
        lambda a, b: a @ b,
        lambda a, b: jnp.tanh(a) + b,
        lambda a, b: a.T * 2 + b,
        lambda a, b: a + b.sum(0),
        lambda a, b: jnp.flip(a, 1) - b[:1],
        lambda a, b: lax.dynamic_update_slice(a, b[: max(1, a.shape[0] // 2)], (1, 0)),
        lambda a, b: jnp.sort(a, 0) + b,
        lambda a, b: a.at[b[0].astype(I32) % a.shape[0]].add(b),
        lambda a, b: jax.nn.softmax(a, 1) * b,
        lambda a, b: lax.fori_loop(0, 3, lambda _, x: jnp.sin(x @ b), a),
        lambda a, b: lax.cond(a[0, 0] > 0, lambda: a + 1, lambda: b * 2),
        lambda a, b: jnp.cumsum(a, 0) + b,
        lambda a, b: jnp.concatenate([a[1:], b[:1]]),
        lambda a, b: jnp.where(a > b, a, b.mean()),
    )
    chances = [
        (draws.choice(squares), draws.random(), draws.random()) for _ in range(draws.size(2, 20))
    ]
    kept = draws.randrange(1, 6)

    def function(arguments: Any) -> Any:
        arrays = [a for a in arguments if a.shape == (side, side)]
        for way, one, two in chances:
            a, b = arrays[int(one * len(arrays))], arrays[-1 - int(two * min(3, len(arrays)))]
            arrays.append(way(a, b).astype(dtype))
        small = [a * 2 + 1 for a in arguments if a.shape != (side, side)]
        return arrays[-kept:], small

    return Program(function, [arguments], draws.donated(0))


KINDS: Mapping[str, Callable[[Draws], Program]] = {
    "many arguments": _many_arguments,
    "elementwise": _elementwise,
    "lookups": _lookups,
    "scatters": _scatters,
    "graph": _graph,
    "matmuls": _matmuls,
    "mlp gradients": _mlp_grad,
    "adam": _adam,
    "attention": _attention,
    "transformer": _transformer,
    "convolutions": _convolutions,
    "reductions": _reductions,
    "sorts": _sorts,
    "slices": _slices,
    "scans": _scans,
    "recurrent": _recurrent,
    "loops": _loops,
    "branches": _branches,
    "random": _random,
    "linear algebra": _linear_algebra,
    "dtypes": _dtypes,
    "products of bytes": _products_of_bytes,
    "many results": _many_results,
    "batched": _batched,
    "collectives": _collectives,
    "partitioned": _partitioned,
}


def kind(number: int) -> str:
    """That of program `number`."""
    return tuple(KINDS)[number % len(KINDS)]


def draw(number: int) -> Program:
    """Returns program `number`, the same one each time."""
    return KINDS[kind(number)](Draws(f"memplan {number}"))
