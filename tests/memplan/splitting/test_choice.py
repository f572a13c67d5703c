"""Programs in chunks: the same numbers, and less of them there at once."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from hlo_passes.equations import Scan, decode, name
from memplan.splitting import choice
from memplan.splitting.choice import split
from memplan.splitting.live import live_in, live_in_chunk, within
from memplan.splitting.loops import in_chunks
from memplan.splitting.regions import Chunks, Graph, grow
from memplan.splitting.shards import WHOLE, Shards
from memplan.streams.leading_axis import shape_of
from memplan.streams.programs import inline_all_calls, without_dead


@pytest.fixture(autouse=True)
def small_and_exact(monkeypatch):
    monkeypatch.setattr(choice, "_SMALLEST", 0)
    with jax.enable_x64(True):
        yield


def traced(function, *args):
    return inline_all_calls(jax.make_jaxpr(function)(*args).jaxpr)


def live_bytes(jaxpr):
    return max(live_in(jaxpr, WHOLE).loads)


def temporaries(jaxpr, args):
    compiled = jax.jit(jaxpr_as_fun(jaxpr)).lower(*args).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def scans_in(jaxpr):
    return [scan.body for eqn in jaxpr.eqns if isinstance(scan := decode(eqn), Scan)]


def largest(jaxpr):
    """The largest array that a program, or one inside it, makes."""
    inner = scans_in(jaxpr)
    own = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars]
    return max([*own, *map(largest, inner)])


def drawn(key, *shape):
    return np.random.default_rng(key).standard_normal(shape) / shape[0] ** 0.5


def attention(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def block(x, weights):
    query, key, value, out, up, down = weights
    y = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True))
    heads = [(y @ w).reshape(*y.shape[:2], 4, -1) for w in (query, key, value)]
    x = x + attention(*heads).reshape(x.shape) @ out
    return x + jax.nn.gelu(x @ up) @ down


def loss(x, layers, head, labels):
    for weights in layers:
        x = block(x, weights)
    scores = jax.nn.log_softmax(x @ head)
    return -jnp.mean(jnp.take_along_axis(scores, labels[..., None], -1))


def scanned(x, layers, head, labels):
    stacks = jax.tree.map(lambda *parts: jnp.stack(parts), *layers)
    x, _ = jax.lax.scan(lambda x, weights: (block(x, weights), None), x, stacks)
    return loss(x, (), head, labels)


def causal(x, layers):
    """Of one long sequence, whose layers keep their weights of attention for the derivative."""
    for query, key, value, out, up, down in layers:
        q, k, v = ((x @ w).reshape(*x.shape[:2], 4, -1) for w in (query, key, value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -jnp.inf)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape) @ out
        x = x + jnp.tanh(x @ up) @ down
    return (x**2).mean()


SHAPES = [(64, 64)] * 4 + [(64, 256), (256, 64)]
LAYERS = [tuple(drawn(k, *s) for k, s in enumerate(SHAPES, 10 * n)) for n in range(2)]
X, HEAD = drawn(100, 4, 128, 64), drawn(101, 64, 2048)
LABELS = np.arange(4 * 128).reshape(4, 128) * 7 % 2048

LONG = drawn(105, 1, 509, 64)

QUERIES = (drawn(102, 1, 256, 4, 16), drawn(103, 1, 256, 4, 16), drawn(104, 1, 256, 4, 16))

# What is run, on what, and to which part of it what is live comes down.
PROGRAMS = {
    "attention": (attention, QUERIES, 0.2),
    "block": (block, (X, LAYERS[0]), 0.25),
    "loss": (loss, (X, (), HEAD, LABELS), 0.2),
    "loss and gradients": (jax.value_and_grad(loss, argnums=(0, 2)), (X, (), HEAD, LABELS), 0.25),
    "attention and gradients": (
        jax.value_and_grad(lambda *a: (attention(*a) ** 2).sum(), argnums=(0, 1, 2)),
        QUERIES,
        0.25,
    ),
    "training": (jax.value_and_grad(loss, argnums=(1, 2)), (X, LAYERS, HEAD, LABELS), 0.3),
    "long training": (jax.value_and_grad(causal), (LONG, LAYERS[:1] * 3), 0.2),
    "scanned": (jax.value_and_grad(scanned, argnums=(1, 2)), (X, LAYERS, HEAD, LABELS), 0.3),
    "computed again": (
        jax.grad(lambda x, w: (jax.checkpoint(block)(x, w) ** 2).sum(), argnums=1),
        (X, LAYERS[0]),
        0.3,
    ),
}


@pytest.mark.parametrize(
    ("function", "args", "share"),
    [
        pytest.param(*of, id=name, marks=[pytest.mark.slow] * (name == "long training"))
        for name, of in PROGRAMS.items()
    ],
)
def test_less_is_live_and_numbers_are_the_same(function, args, share):
    jaxpr, flat = traced(function, *args), jax.tree.leaves(args)
    before = live_bytes(jaxpr)
    new, splits = split(jaxpr, int(before * share))
    assert splits
    assert live_bytes(new) <= 1.1 * before * share
    # What XLA makes of it.
    assert temporaries(new, flat) < 0.6 * temporaries(jaxpr, flat)
    for a, b in zip(jaxpr_as_fun(jaxpr)(*flat), jaxpr_as_fun(new)(*flat), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.relu, jax.nn.silu, jax.nn.gelu])
@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint])
def test_calls_inside_of_loops_are_cut(activation, around):
    def function(x, layers):
        layer = around(lambda x, w: (activation(x @ w) @ w.T, None))
        return jax.lax.scan(layer, x, layers)[0]

    args = drawn(0, 256, 16), drawn(1, 3, 16, 256)
    jaxpr = traced(function, *args)
    new, _ = split(jaxpr, live_bytes(jaxpr) // 4)
    assert live_bytes(new) <= live_bytes(jaxpr) / 3
    expected, found = (jaxpr_as_fun(j)(*args) for j in (jaxpr, new))
    np.testing.assert_allclose(expected[0], found[0], rtol=1e-11, atol=1e-12)


def test_a_result_that_was_a_python_number_is_cut_once():
    def function(x):
        bias = (jnp.arange(64)[:, None] - jnp.arange(32)) * 0.5
        return jnp.exp(x + bias).sum(0), bias

    jaxpr = traced(function, SQUARE)
    new, splits = split(jaxpr, live_bytes(jaxpr) // 2)
    assert len(splits) <= 1
    assert live_bytes(new) <= live_bytes(jaxpr)


def test_logits_and_their_gradient_are_nowhere():
    args = X, (), HEAD, LABELS
    jaxpr = traced(jax.value_and_grad(loss, argnums=(0, 2)), *args)
    new, _ = split(jaxpr, live_bytes(jaxpr) // 5)
    assert largest(jaxpr) == 4 * 128 * 2048
    assert largest(new) <= max(HEAD.size, 4 * 128 * 2048 // 4)


def test_what_fits_is_left_as_it_is():
    jaxpr = traced(attention, *QUERIES)
    assert split(jaxpr, live_bytes(jaxpr)) == (jaxpr, ())


def test_what_cannot_be_cut_is_left_as_it_is():
    jaxpr = traced(jax.lax.linalg.lu, np.eye(64))
    assert split(jaxpr, 0) == (jaxpr, ())


def test_effects_and_random_numbers_stay_outside():
    def function(x):
        x = jnp.tanh(x) * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
        jax.debug.callback(lambda total: None, x.sum())
        return (jnp.exp(x) @ x.T).sum(1)

    x = drawn(0, 512, 256)
    jaxpr = traced(function, x)
    new, splits = split(jaxpr, live_bytes(jaxpr) // 4)
    assert splits
    kinds = [name(eqn) for eqn in new.eqns]
    assert kinds.count("debug_callback") == 1
    for body in scans_in(new):
        assert not {name(e) for e in body.eqns} & {"debug_callback", "random_bits"}
    np.testing.assert_allclose(jaxpr_as_fun(new)(x)[0], function(x), rtol=1e-12)


SQUARE = drawn(200, 64, 32)
CUBE = drawn(201, 3, 64, 256)


def swapped(a, b):
    pair = jnp.sin(a), jnp.cos(b)
    (p, q), _ = jax.lax.scan(lambda c, _: ((c[1], c[0]), None), pair, None, length=3)
    return p * 2, q * 2


def counted(x):
    def trip(c, _):
        return jnp.sin(c) + jax.lax.broadcasted_iota(c.dtype, c.shape, 0), None

    return jnp.exp(jax.lax.scan(trip, jnp.cos(x), None, length=3)[0]).sum()


def parted(x):
    inner = jax.checkpoint(lambda x: jnp.sin(jnp.cos(x).reshape(3, -1)).reshape(x.shape))
    return (inner(jnp.tanh(x)) * 2).sum()


def carried_twice(x, a):
    def trip(c, x):
        new = jnp.tanh(c[1] + x)
        return (new, new), None

    (p, h), _ = jax.lax.scan(trip, (jnp.zeros(a.shape), jnp.sin(a)), x)
    return jnp.exp(p).sum() + (jnp.exp(h) * 3).sum()


def used_twice(a):
    x = jnp.sin(a)
    return jnp.einsum("ijk,jil->ijkl", x, x).sum()


def written_between(x):
    total = jax.new_ref(jnp.ones(()))
    y = jnp.exp(x @ x.T)
    total[...] = y.sum()
    return (y / total[...]).sum(1)


def never_read(a):
    b = jnp.exp(a) @ a.T  # noqa: F841
    return jnp.zeros(64).at[jnp.arange(32)].add(jnp.exp(a.sum(0)))


def largest_of_complex(x):
    return jnp.max((x + 1j) @ x.T, axis=0)


def bytes_of_one(x):
    return jax.lax.bitcast_convert_type(x.sum(), np.uint8)[:, None] * jnp.ones((8, 64), np.uint8)


def drawn_inside(x):
    with jax.threefry_partitionable(False):
        bits = jax.checkpoint(lambda x: x * jax.random.bits(jax.random.key(3), (32,), np.uint32))
        return jnp.exp(bits(jnp.sin(x)) * 1e-9).sum()


def widened(x):
    numbers = (x > 9).astype(np.uint8) + np.uint8(200)
    return jax.lax.reduce_sum_p.bind(numbers, axes=(0,), out_sharding=None).astype(np.uint32)


def of_keys(key):
    keys = jax.random.split(key, (1 << 9, 8))
    return jax.vmap(jax.vmap(lambda k: jax.random.bits(k, (), jnp.uint8)))(keys.T)


def never_read_inside(x):
    def body(carry, _):
        jax.lax.scan(lambda _, entry: (None, None), None, carry)
        jnp.exp(jnp.concatenate([carry] * 4)).sum(0)
        return jnp.tanh(carry), None

    return jax.lax.scan(body, x, None, length=3)[0]


def whole_inside(x, w):
    def outer(x, w):
        p, q = jax.checkpoint(lambda x, w: (jnp.sin(x), jnp.cos(w)))(x, w)
        return p + q

    return jnp.exp(jax.checkpoint(outer)(jnp.tanh(x), w)).sum()


def custom_inside(x):
    body = jax.checkpoint(lambda x, s: jnp.sin(x * jax.nn.relu(s)))
    return jnp.exp(body(jnp.tanh(x), x[0, 0])).sum()


FOUND_BY_REVIEW = {
    "a result inside that is whole": (whole_inside, (SQUARE, SQUARE)),
    "a derivative of one's own inside": (custom_inside, (SQUARE,)),
    "dead equations inside": (never_read_inside, (SQUARE[:, :32],)),
    "swapped carries": (swapped, (SQUARE, SQUARE + 1)),
    "iota in a loop": (counted, (SQUARE,)),
    "sizes inside": (parted, (SQUARE[:12],)),
    "one value, two carries": (carried_twice, (CUBE, CUBE[0])),
    "two dimensions of one array": (used_twice, (SQUARE[:8].reshape(8, 8, 4),)),
    "order of effects": (written_between, (SQUARE,)),
    "dead equations": (never_read, (SQUARE,)),
    "no largest of complex numbers": (largest_of_complex, (SQUARE,)),
    "bytes of a number": (bytes_of_one, (SQUARE,)),
    "random numbers in another way": (drawn_inside, (SQUARE,)),
    "an integer that wraps": (widened, (SQUARE,)),
    "keys": (of_keys, (jax.random.key(0),)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("function", "args"), FOUND_BY_REVIEW.values(), ids=FOUND_BY_REVIEW)
def test_numbers_stay_the_same_wherever_it_is_cut(function, args):
    jaxpr = traced(function, *args)
    expected = jaxpr_as_fun(jaxpr)(*args)
    alive = without_dead(jaxpr)
    graph = Graph(alive, WHOLE)
    programs = [split(jaxpr, live_bytes(jaxpr) // part)[0] for part in (2, 8)]
    for seed in graph.maker:
        for d, size in enumerate(getattr(seed.aval, "shape", ())):
            for parts in (2, 4):
                if size % parts == 0 and (region := grow(graph, seed, d, parts, 0)) is not None:
                    rows = region.rows
                    chunks = {Chunks(rows, rows // parts), Chunks(rows, rows - rows // parts)}
                    programs += [in_chunks(graph, region, c) for c in chunks]
    for program in programs:
        for a, b in zip(expected, jaxpr_as_fun(program)(*args), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


def test_a_long_dimension_has_its_divisors_soon():
    assert choice._divisors(2**40 * 3)[:4] == [1, 2, 3, 4]


@pytest.mark.parametrize("rows", [2, 7, 96, 2047, 8191, 2**20])
def test_numbers_of_chunks_come_near_any_that_is_asked_for(rows):
    parts = [chunks.parts for chunks in choice._chunkings(rows, is_even=False)]
    assert parts[-1] == rows
    assert all(1.4 * a <= b <= 3.1 * a for a, b in itertools.pairwise([1, *parts]))


def test_on_several_devices_chunks_are_of_one_size():
    assert [chunks.each for chunks in choice._chunkings(2047, is_even=True)] == [89, 23, 1]


def test_what_a_loop_carries_is_in_chunks_where_those_inside_of_it_are_not_enough():
    def function(x, w):
        def layer(carry, w):
            return jnp.sort(jnp.exp(carry[:, :, None] * w), 1).sum(2), None

        return jax.lax.scan(layer, x[:, None] * jnp.ones(256), w)[0].sum(1)

    x, w = drawn(0, 1024), drawn(1, 3, 8) / 64
    jaxpr = traced(function, x, w)
    new, _ = split(jaxpr, live_bytes(jaxpr) // 40)
    assert live_bytes(new) < live_bytes(jaxpr) / 30
    expected, found = (jaxpr_as_fun(j)(x, w) for j in (jaxpr, new))
    np.testing.assert_allclose(expected, found, rtol=1e-11)


def test_a_recurrence_is_cut_along_its_batch_with_what_it_adds_up():
    def loss(w, u, xs):
        def cell(h, x):
            h = jnp.tanh(h @ w + x @ u)
            return h, h

        return (jax.lax.scan(cell, jnp.zeros((xs.shape[1], 16)), xs)[1] ** 2).mean()

    args = drawn(0, 16, 16) / 4, drawn(1, 8, 16), drawn(2, 32, 64, 8)
    jaxpr = traced(jax.value_and_grad(loss, argnums=(0, 1)), *args)
    new, (cut, *_) = split(jaxpr, live_bytes(jaxpr) // 10)
    assert cut.parts >= 8
    assert live_bytes(new) < live_bytes(jaxpr) / 6
    expected, found = (jaxpr_as_fun(j)(*args) for j in (jaxpr, new))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


def test_a_loop_that_asks_and_its_branches_are_cut_together():
    def function(x):
        def body(c):
            i, y = c
            y = jax.lax.cond(i % 2 == 0, lambda y: jnp.sort(jnp.sin(y), 1), lambda y: y * y, y)
            return i + 1, y

        return jax.lax.while_loop(lambda c: c[0] < 5, body, (0, jnp.exp(x)))[1].sum(1)

    x = drawn(0, 256, 64)
    jaxpr = traced(function, x)
    new, (cut,) = split(jaxpr, live_bytes(jaxpr) // 10)
    assert cut.parts >= 8
    assert live_bytes(new) < live_bytes(jaxpr) / 6
    expected, found = (jaxpr_as_fun(j)(x) for j in (jaxpr, new))
    np.testing.assert_allclose(*expected, *found, rtol=1e-11)


def test_chunks_are_no_finer_for_what_is_live_around_them():
    def function(a, x, w):
        kept = jax.lax.linalg.lu(a)[0]  # Nobody cuts that.
        least = jnp.sort(jnp.exp(x @ w), 1)[:, 0]
        return kept.sum(1) + least

    jaxpr = traced(function, drawn(0, 512, 512), drawn(1, 512, 64), drawn(2, 64, 2048))
    new, (cut,) = split(jaxpr, 512 * 512 * 8)
    assert 8 <= cut.parts <= 64
    assert live_bytes(new) < live_bytes(jaxpr) / 3


def convolved(images, weights):
    dimensions = ("NHWC", "HWIO", "NHWC")
    made = jax.lax.conv_general_dilated(
        images, weights, (1, 1), "SAME", dimension_numbers=dimensions
    )
    return jnp.sum(jnp.tanh(made) ** 2)


def test_convolutions_in_loops_have_the_order_for_which_cpus_have_a_library():
    """XLA:CPU puts them so in the entry only; a gradient takes twenty times as long otherwise."""
    images, weights = drawn(0, 8, 16, 16, 4), drawn(1, 3, 3, 4, 8)
    gradients = jax.grad(convolved, (0, 1))
    jaxpr = traced(gradients, images, weights)
    new, splits = split(jaxpr, live_bytes(jaxpr) // 4)
    assert splits
    compiled = jax.jit(jaxpr_as_fun(new)).lower(images, weights).compile()
    orders = re.findall(r"convolution\(.*dim_labels=([\w>-]+)", compiled.as_text() or "")
    assert len(orders) == 3
    assert set(orders) == {"b01f_01io->b01f"}
    for a, b in zip(compiled(images, weights), gradients(images, weights), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("orders", "options"),
    [
        (("NCHW", "OIHW", "NCHW"), {"padding": "VALID"}),
        (("HWCN", "IOHW", "CNWH"), {"padding": ((2, 1), (0, 3)), "rhs_dilation": (1, 2)}),
        (("NHWC", "HWOI", "HNWC"), {"padding": "SAME", "window_strides": (2, 1)}),
        (("NCHW", "OIHW", "NHWC"), {"padding": "SAME", "feature_group_count": 2}),
    ],
)
def test_convolutions_of_any_order_are_the_same_in_chunks(orders, options):
    sizes = {
        "N": 8,
        "H": 12,
        "W": 10,
        "C": 4,
        "O": 6,
        "I": 4 // options.get("feature_group_count", 1),
    }
    window = sizes | {"H": 3, "W": 2}
    args = drawn(0, *map(sizes.get, orders[0])), drawn(1, *map(window.get, orders[1]))

    def convolved(images, weights):
        how = {"window_strides": (1, 1), **options, "dimension_numbers": orders}
        return jnp.sum(jnp.tanh(jax.lax.conv_general_dilated(images, weights, **how)) ** 2)

    gradients = jax.grad(convolved, (0, 1))
    jaxpr = traced(gradients, *args)
    new, splits = split(jaxpr, live_bytes(jaxpr) // 4)
    assert splits
    for a, b in zip(jaxpr_as_fun(new)(*args), gradients(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


def gated_products(x, a, b):
    """As in an Evoformer's triangles: `c` is on its own everywhere, and lies innermost."""
    return jnp.einsum("ikc,jkc->ijc", jnp.tanh(x * a), jnp.tanh(x * b)).astype(x.dtype).sum((0, 1))


def test_chunks_lie_in_runs_that_memory_is_fast_with(monkeypatch):
    monkeypatch.setattr(choice, "_SMALLEST", 1 << 18)
    x = jax.ShapeDtypeStruct((256, 256, 64), jnp.float32)
    gains = jax.ShapeDtypeStruct((64,), jnp.float32)
    jaxpr = traced(gated_products, x, gains, gains)
    live = live_bytes(jaxpr)
    for part in (4, 16, 64):
        new, splits = split(jaxpr, live // part)
        assert live_bytes(new) <= 2 * live // part
        assert all(s.parts <= 4 for s in splits if s.dimension == 2), splits


def test_a_number_of_tokens_that_is_prime_is_cut_too():
    x, head, labels = drawn(0, 1021, 64), drawn(1, 64, 512), np.arange(1021) % 512
    jaxpr = traced(jax.value_and_grad(cross_entropy, argnums=(0, 1)), x, head, labels)
    new, (cut, *_) = split(jaxpr, live_bytes(jaxpr) // 5)
    assert 4 < cut.parts < 64
    assert live_bytes(new) < live_bytes(jaxpr) / 4
    expected, found = (jaxpr_as_fun(j)(x, head, labels) for j in (jaxpr, new))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12)


# --- programs at random ---------------------------------------------------------------------


def random_program(seed):
    """A function of a few arrays that share dimensions, of operations at random; and the arrays."""
    rng = np.random.default_rng(seed)
    batch, rows, inner, features = (int(rng.choice([2, 4, 5, 6, 7, 8, 11, 12])) for _ in range(4))
    args = [
        rng.standard_normal((batch, rows, features)),
        rng.standard_normal((features, inner)),
        rng.standard_normal((batch, rows, 1)),
    ]
    choices = rng.integers(0, 1 << 30, 12)

    def function(x, w, scale):
        values = [x, scale + x]
        for chosen in choices:
            a = values[chosen % len(values)]
            b = values[chosen // 7 % len(values)]
            values.append(_applied(int(chosen // 64), a, b, w))
        return sum((jnp.sin(v) * (n + 1)).mean() for n, v in enumerate(values)), values[-1]

    return function, args


def _applied(chosen, a, b, w):
    kind, more = chosen % 17, chosen // 17
    match kind:
        case 0:
            return jnp.tanh(a) * 1.5
        case 1 if a.shape == b.shape:
            return a * jax.nn.sigmoid(b)
        case 2:
            return jax.nn.softmax(a, axis=more % a.ndim)
        case 3 if a.shape[-1] == w.shape[0]:
            return a @ w
        case 4 if a.shape[-1] == w.shape[1]:
            return a @ w.T
        case 5 if a.ndim > 1:
            return jnp.swapaxes(a, more % a.ndim, (more // 4 + 1) % a.ndim)
        case 6 if a.ndim > 1:
            return a.reshape(-1, *a.shape[2:])
        case 7 if a.ndim < 4 and a.shape[0] % 2 == 0:
            return a.reshape(2, a.shape[0] // 2, *a.shape[1:])
        case 8 if a.ndim > 1:
            return a - a.mean(more % a.ndim, keepdims=True)
        case 9 if a.ndim == 3 and b.ndim == 3 and a.shape[::2] == b.shape[::2]:
            return jnp.einsum("bqd,bkd->bqk", a, b)
        case 10:
            return jnp.concatenate([a, jnp.flip(a, more % a.ndim)], more // 4 % a.ndim)[..., :24]
        case 11:
            return jnp.cumsum(a, more % a.ndim)
        case 12:
            return jax.lax.scan(lambda c, x: (jnp.tanh(c + x), c * x), a[0], a)[1]
        case 13 if a.ndim > 1 and a.shape[-1] == w.shape[0]:
            return jax.lax.scan(lambda c, x: (jnp.tanh(c @ w @ w.T / 9 + x), c), a[0], a)[1]
        case 14:
            odd = more % 2 == 1
            # Of sums that are next to nothing rounding would decide.
            is_large = (a * a).sum() > a.size / 3
            return jax.lax.cond(is_large ^ odd, jnp.sin, lambda a: a * a + 1, a)
        case 15:
            return jax.lax.fori_loop(0, 3, lambda i, v: jnp.cos(v) + a * i, a)
        case 16 if a.ndim > 1:
            c = jax.lax.stop_gradient(a), jnp.zeros(a.shape[1:]), 0
            c = jax.lax.while_loop(
                lambda c: c[2] < 3, lambda c: (jnp.cos(c[0]), c[1] + c[0].mean(0), c[2] + 1), c
            )
            return a * c[0] + c[1]
        case _:
            return jnp.cos(a) + a


def check_random(seed):
    function, args = random_program(seed)
    if seed % 2:
        value = function
        function = jax.value_and_grad(lambda *a: value(*a)[0], argnums=(0, 1, 2))
    jaxpr = traced(function, *args)
    shards = Shards()
    if seed % 3 == 0:  # In blocks, as on several devices; which makes no difference to numbers.
        d = seed // 3 % 3
        along = {
            v: tuple(1 + (k == d and n % 2 == 0) for k, n in enumerate(shape_of(v)))
            for v in jaxpr.invars
        }
        shards.carry_on(jaxpr, along)
    new, splits = split(jaxpr, live_bytes(jaxpr) // (2 + seed % 5), shards=shards)
    whole, in_chunks = (jax.jit(jaxpr_as_fun(j)) for j in (jaxpr, new))
    expected, found = whole(*args), in_chunks(*args)
    # Programs differ in what they make of a rounding: no more is asked than that they would keep.
    nudged = whole(*(np.nextafter(a, np.inf) if a.dtype.kind == "f" else a for a in args))
    for a, b, c in zip(expected, found, nudged, strict=True):
        rounding = np.abs(a - c).max(initial=0)
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-12 + rounding)
    return bool(splits)


@pytest.mark.parametrize("seed", [2, 7])
def test_random_programs(seed):
    assert check_random(seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("begin", range(0, 2000, 100))
def test_many_random_programs(begin):
    assert sum(map(check_random, range(begin, begin + 100))) > 50


@pytest.mark.parametrize("around", ["jit", "grad", "vmap", "checkpoint"])
def test_transformations_of_what_is_in_chunks(around):
    jaxpr = traced(attention, *QUERIES)
    new, _ = split(jaxpr, live_bytes(jaxpr) // 5)
    plain, chunked = (lambda *a, j=j: jaxpr_as_fun(j)(*a)[0] for j in (jaxpr, new))
    transformed = {
        "jit": jax.jit,
        "grad": lambda f: jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=(0, 1, 2)),
        "vmap": lambda f: lambda *a: jax.vmap(f)(*[jnp.stack([x, 2 * x]) for x in a]),
        "checkpoint": lambda f: jax.grad(lambda *a: (jax.checkpoint(f)(*a) ** 2).sum()),
    }[around]
    expected, found = (jax.tree.leaves(transformed(f)(*QUERIES)) for f in (plain, chunked))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def cross_entropy(x, head, labels):
    scores = jax.nn.log_softmax(x @ head)
    return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], 1))


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (attention, QUERIES),
        (
            jax.value_and_grad(cross_entropy, argnums=(0, 1)),
            (drawn(0, 256, 8), drawn(1, 8, 512), np.arange(256)),
        ),
        (
            jax.value_and_grad(cross_entropy, argnums=(0, 1)),
            (drawn(0, 251, 8), drawn(1, 8, 512), np.arange(251)),
        ),
    ],
)
def test_what_is_live_in_a_chunk_is_known_before_it_is_traced(monkeypatch, function, args):
    weighed, in_loops = dict[object, int](), list[tuple[int, int]]()

    def weigh(eqns, chunks, *args, **options):
        key = chunks, frozenset(eqn for eqn, _ in eqns)
        return weighed.setdefault(key, live_in_chunk(eqns, chunks, *args, **options))

    def trace(graph, region, chunks):
        new = in_chunks(graph, region, chunks)
        known = set(map(id, graph.eqns))
        (loop,) = (e for e in new.eqns if id(e) not in known and name(e) == "scan")
        key = chunks, frozenset(graph.eqns[n] for n in region.axes)
        in_loops.append((weighed[key], within(loop, WHOLE)))
        return new

    monkeypatch.setattr(choice, "live_in_chunk", weigh)
    monkeypatch.setattr(choice, "in_chunks", trace)
    jaxpr = traced(function, *args)
    for part in (2, 4, 8, 16):
        split(jaxpr, live_bytes(jaxpr) // part)
    assert in_loops
    for found, expected in in_loops:
        assert found == pytest.approx(expected, rel=0.1)
