"""Every op under everything that jax does to a function, on the CPU, where XLA implements it."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.attention.api import attention
from pallas_kernels.decode.api import decode_attention
from pallas_kernels.errors import KernelArgumentError, NotDifferentiableError
from pallas_kernels.streamed_matmul.api import streamed_matmul


@dataclasses.dataclass(frozen=True)
class Op:
    """An op and what to call it with.

    Attributes:
      call: of the arrays, to an array or several.
      shapes: of the arrays; their leading axis is the sequences, but for those of `shared`.
      ints: arrays of integers, below this number.
      shared: arrays that are the same for all sequences, and may not be mapped.
      has_gradient: with respect to the arrays that are not integers.
    """

    call: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    ints: dict[int, int] = dataclasses.field(default_factory=dict)
    shared: tuple[int, ...] = ()
    has_gradient: bool = True

    @property
    def floats(self) -> tuple[int, ...]:
        """Which of the arrays are no integers."""
        return tuple(i for i in range(len(self.shapes)) if i not in self.ints)

    def arrays(self, seed: int = 0, dtype: Any = np.float32) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [
            rng.integers(self.ints[i], size=shape)
            if i in self.ints
            else rng.normal(size=shape).astype(dtype)
            for i, shape in enumerate(self.shapes)
        ]

    def stacked(self, count: int = 3) -> list[np.ndarray]:
        """`count` calls' arrays on a leading axis, the shared ones once."""
        calls = [self.arrays(seed) for seed in range(count)]
        return [
            calls[0][i] if i in self.shared else np.stack([call[i] for call in calls])
            for i in range(len(self.shapes))
        ]

    def axes(self, axis: int = 0) -> list[int | None]:
        """Of `vmap`."""
        return [None if i in self.shared else axis for i in range(len(self.shapes))]

    def one(self, stacked: list[np.ndarray], index: int) -> Any:
        """The result of one of `stacked`."""
        return self.call(*(x if i in self.shared else x[index] for i, x in enumerate(stacked)))


def _segmented(q: Any, k: Any, v: Any, ids: Any) -> Any:
    return attention(q, k, v, causal=True, q_segment_ids=ids, return_lse=True)


def _paged(q: Any, k: Any, v: Any, lengths: Any, tables: Any) -> Any:
    return decode_attention(q, k, v, lengths, block_tables=tables, return_lse=True)


OPS = {
    "attention": Op(
        partial(attention, window=(3, 2), soft_cap=4.0), ((4, 6, 4, 8), (4, 7, 2, 8), (4, 7, 2, 8))
    ),
    "attention, segments": Op(_segmented, ((4, 6, 2, 8),) * 3 + ((4, 6),), ints={3: 2}),
    "decode": Op(
        decode_attention,
        ((4, 2, 4, 8), (4, 2, 5, 8), (4, 2, 5, 8), (4,)),
        ints={3: 6},
        has_gradient=False,
    ),
    "decode, paged": Op(
        _paged,
        ((4, 1, 4, 8), (4, 2, 3, 8), (4, 2, 3, 8), (4,), (4, 2)),
        ints={3: 7, 4: 4},
        has_gradient=False,
    ),
    "streamed": Op(streamed_matmul, ((4, 6), (6, 5)), shared=(1,)),
}
CALLS = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
DIFFERENTIABLE = {name: op for name, op in OPS.items() if op.has_gradient}
GRADIENTS = pytest.mark.parametrize("op", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE)


def assert_close(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for some, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert some.dtype == other.dtype
        np.testing.assert_allclose(some, other, rtol=1e-5, atol=1e-5)


def gradient(op: Op, call: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Of a sum of what the call gives, bent so that no gradient is constant."""

    def loss(*arrays: Any) -> Any:
        leaves = jax.tree.leaves((call or op.call)(*arrays))
        return sum(jnp.sin(jnp.where(jnp.isinf(x), 0, x)).sum() for x in leaves)

    return jax.grad(loss, op.floats)


# --- what goes in -------------------------------------------------------------------------


@CALLS
def test_arrays_of_numpy_and_of_jax(op: Op) -> None:
    assert_close(op.call(*op.arrays()), op.call(*map(jnp.asarray, op.arrays())))


@CALLS
def test_types_are_what_shapes_say(op: Op) -> None:
    found, arrays = op.call(*op.arrays()), op.arrays()
    said = jax.eval_shape(op.call, *arrays)
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in map(jnp.asarray, arrays)]
    assert said == jax.eval_shape(op.call, *structs)
    for leaf, struct in zip(jax.tree.leaves(found), jax.tree.leaves(said), strict=True):
        assert (leaf.shape, leaf.dtype) == (struct.shape, struct.dtype)
        assert not struct.weak_type


@CALLS
def test_weak_types(op: Op) -> None:
    strong = [jnp.asarray(x if i in op.ints else 0 * x + 0.5) for i, x in enumerate(op.arrays())]
    weak = [x if i in op.ints else jnp.full(x.shape, 0.5) for i, x in enumerate(strong)]
    assert weak[0].weak_type
    assert_close(jax.jit(op.call)(*weak), op.call(*strong))
    if op.has_gradient:
        assert_close(gradient(op)(*weak), gradient(op)(*strong))


@CALLS
def test_64_bits_change_nothing(op: Op) -> None:
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x) for x in op.arrays()]
        assert all(arrays[i].dtype == jnp.int64 for i in op.ints)
        found = jax.jit(op.call)(*arrays)
        gradients = gradient(op)(*arrays) if op.has_gradient else None
    assert_close(found, op.call(*op.arrays()))
    assert_close(gradients, gradient(op)(*op.arrays()) if op.has_gradient else None)


@CALLS
def test_no_sequences_have_no_results(op: Op) -> None:
    arrays = [x if i in op.shared else x[:0] for i, x in enumerate(op.arrays())]
    expected = jax.tree.map(lambda x: x[:0], op.call(*op.arrays()))
    assert_close(jax.jit(op.call)(*arrays), expected)
    if op.has_gradient:
        assert_close(gradient(op)(*arrays), tuple(jnp.zeros_like(arrays[i]) for i in op.floats))


@CALLS
def test_what_is_no_array(op: Op) -> None:
    first, *rest = op.arrays()
    with pytest.raises(KernelArgumentError, match=r"is a list: expected an array \["):
        op.call(first.tolist(), *rest)
    with pytest.raises(KernelArgumentError, match="is of type float64: expected bfloat16, float16"):
        op.call(first.astype(np.float64), *rest)


@pytest.mark.parametrize("name", ["attention", "decode"])
@pytest.mark.parametrize(("option", "value"), [("scale", 0.5), ("soft_cap", 2.0), ("window", 2)])
def test_constants_of_a_kernel(name: str, option: str, value: float) -> None:
    arrays = OPS[name].arrays()
    call: Any = attention if name == "attention" else decode_attention
    expected = call(*arrays, **{option: value})
    found = call(*arrays, **{option: np.asarray(value)[()]})
    assert_close(found, expected)
    sentence = f"{option} is traced, no constant: expected"
    with pytest.raises(KernelArgumentError, match=sentence):
        jax.jit(lambda x: call(*arrays, **{option: x}))(value)


# --- what is done to it -------------------------------------------------------------------


@CALLS
def test_jit(op: Op) -> None:
    expected = op.call(*op.arrays())
    with jax.checking_leaks():
        assert_close(jax.jit(op.call)(*op.arrays()), expected)
    with jax.disable_jit():
        assert_close(op.call(*op.arrays()), expected)


@CALLS
def test_it_is_traced_once(op: Op) -> None:
    traces = []

    @jax.jit
    def call(*arrays: Any) -> Any:
        traces.append(arrays)
        return op.call(*arrays)

    for seed in range(3):
        call(*op.arrays(seed))
    assert len(traces) == 1
    jaxprs = {str(jax.make_jaxpr(op.call)(*op.arrays())) for _ in range(2)}
    assert len(jaxprs) == 1


@CALLS
def test_scan_and_map(op: Op) -> None:
    stacked = op.stacked()
    moved = [x for i, x in enumerate(stacked) if i not in op.shared]
    shared = [stacked[i] for i in op.shared]

    def one(slices: Any) -> Any:
        return op.call(*slices, *shared)

    expected = jax.tree.map(lambda *x: jnp.stack(x), *(op.one(stacked, i) for i in range(3)))
    assert_close(jax.lax.map(one, moved), expected)
    assert_close(jax.lax.map(one, moved, batch_size=2), expected)


@pytest.mark.slow
@CALLS
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_vmap(op: Op, axis: int) -> None:
    stacked = op.stacked()
    moved = [x if i in op.shared else np.moveaxis(x, 0, axis) for i, x in enumerate(stacked)]
    found = jax.vmap(op.call, op.axes(axis), out_axes=axis)(*moved)
    expected = jax.tree.map(
        lambda *x: jnp.stack(x, axis=axis), *(op.one(stacked, i) for i in range(3))
    )
    assert_close(found, expected)


@CALLS
def test_vmap_of_vmap(op: Op) -> None:
    stacked = op.stacked(4)
    square = [x if i in op.shared else x.reshape(2, 2, *x.shape[1:]) for i, x in enumerate(stacked)]
    twice = jax.vmap(jax.vmap(op.call, op.axes()), op.axes())(*square)
    once = jax.vmap(op.call, op.axes())(*stacked)
    assert_close(twice, jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), once))


@CALLS
def test_vmap_over_nothing(op: Op) -> None:
    stacked = op.stacked()
    none = [x if i in op.shared else x[:0] for i, x in enumerate(stacked)]
    found = jax.vmap(op.call, op.axes())(*none)
    expected = jax.vmap(op.call, op.axes())(*stacked)
    assert_close(found, jax.tree.map(lambda x: x[:0], expected))


@CALLS
def test_shard_map(op: Op) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    split, same = PartitionSpec("data"), PartitionSpec()
    # A pool of pages belongs to all sequences.
    whole = (1, 2) if len(op.shapes) == 5 else op.shared
    specs = tuple(same if i in whole else split for i in range(len(op.shapes)))
    sharded = jax.jit(jax.shard_map(op.call, mesh=mesh, in_specs=specs, out_specs=split))
    assert_close(sharded(*op.arrays()), op.call(*op.arrays()))
    if op.has_gradient:
        found = jax.jit(gradient(op, sharded))(*op.arrays())
        assert_close(found, gradient(op)(*op.arrays()))


# --- derivatives --------------------------------------------------------------------------


@GRADIENTS
def test_gradients_transform_alike(op: Op) -> None:
    expected = gradient(op)(*op.arrays())
    assert_close(jax.jit(gradient(op))(*op.arrays()), expected)
    assert_close(gradient(op, jax.checkpoint(op.call))(*op.arrays()), expected)
    scanned = lambda *arrays: jax.lax.scan(  # noqa: E731
        lambda carry, _: (carry, op.call(*arrays)), 0.0, None, length=1
    )[1]
    assert_close(gradient(op, scanned)(*op.arrays()), expected)


@GRADIENTS
def test_vmap_of_gradients(op: Op) -> None:
    stacked = op.stacked()
    found = jax.vmap(gradient(op), op.axes())(*stacked)
    for i in range(3):
        arrays = [x if j in op.shared else x[i] for j, x in enumerate(stacked)]
        assert_close(tuple(x[i] for x in found), gradient(op)(*arrays))


@GRADIENTS
def test_second_derivatives(op: Op) -> None:
    """By differences of first ones, along one direction."""
    arrays = [jnp.asarray(x) for x in op.arrays()]
    rng = np.random.default_rng(7)
    along = {i: jnp.asarray(rng.normal(size=op.shapes[i]), jnp.float32) for i in op.floats}

    def slope(*arrays: Any) -> Any:
        """Of the loss, along the direction."""
        gradients = zip(gradient(op)(*arrays), op.floats, strict=True)
        return sum((g * along[i]).sum() for g, i in gradients)

    found = jax.jit(jax.grad(slope, op.floats))(*arrays)
    step = 1e-2

    def moved(by: float) -> Any:
        return gradient(op)(*(x + by * along[i] if i in along else x for i, x in enumerate(arrays)))

    for second, ahead, behind in zip(found, moved(step), moved(-step), strict=True):
        expected = (ahead - behind) / (2 * step)
        np.testing.assert_allclose(second, expected, rtol=0, atol=0.02 * abs(expected).max())


@GRADIENTS
def test_forward_mode_is_refused_by_jax(op: Op) -> None:
    arrays = [jnp.asarray(x) for x in op.arrays()]
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(lambda first: op.call(first, *arrays[1:]), arrays[:1], arrays[:1])


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if not op.has_gradient])
@pytest.mark.parametrize("order", [1, 2])
def test_what_has_no_gradient_says_so(name: str, order: int) -> None:
    op = OPS[name]
    call = gradient(op)
    if order == 2:
        call = gradient(op, call)
    with pytest.raises(NotDifferentiableError, match="decode_attention has no gradient"):
        call(*op.arrays())
