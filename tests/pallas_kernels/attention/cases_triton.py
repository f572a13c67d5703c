"""The Triton programs in Triton's interpreter, each case to be called by `isolated.run`.

The interpreter wants torch's tensors, of which `HostArray` has the few methods that it calls
(triton 3.7.1). It multiplies bfloat16 as the integers that it stores it in, and cuts digits off
where hardware rounds to the nearest, which is mended here.
"""

import os
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import kernel_triton, reference
from pallas_kernels.attention.problem import Band, Problem, Segments
from pallas_kernels.targets import target_of

A100 = target_of("cuda", "NVIDIA A100-SXM4-80GB")
GUARD = 4096


class HostArray:
    """An array in memory that is poisoned before and after it."""

    def __init__(self, array: np.ndarray) -> None:
        poison = np.nan if jnp.issubdtype(array.dtype, jnp.floating) else -(1 << 30)
        self.poison = np.full(GUARD, poison, array.dtype)
        whole = np.concatenate([self.poison, array.ravel(), self.poison])
        self.whole, self.shape, self.dtype = whole, array.shape, str(array.dtype)

    def array(self) -> np.ndarray:
        """What the program left, of which nothing may lie outside."""
        for guard in (self.whole[:GUARD], self.whole[-GUARD:]):
            assert guard.tobytes() == self.poison.tobytes(), "written outside of an array"
        return self.whole[GUARD:-GUARD].reshape(self.shape)

    def data_ptr(self) -> int:
        return self.whole.ctypes.data + GUARD * self.whole.itemsize

    # What the interpreter takes a tensor to host memory and back with: it is there already.
    def untyped_storage(self) -> "HostArray":
        return self

    def cpu(self) -> "HostArray":
        return self

    def new_empty(self, *_: Any, **__: Any) -> "HostArray":
        return self

    def set_(self, *_: Any) -> None: ...
    def copy_(self, *_: Any) -> None: ...
    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.shape

    def stride(self) -> tuple[int, ...]:
        return ()


def triton_call(*given: Any, kernel: Any, out_type: Any, grid: Any, **options: Any) -> Any:
    """Like `jax_triton.triton_call`, in the interpreter."""
    for compiling in ("name", "num_warps", "num_stages", "compute_capability"):
        del options[compiling]
    types, tree = jax.tree.flatten(out_type)
    inputs = [HostArray(np.array(a)) for a in given]
    outputs = [HostArray(np.full(t.shape, np.nan, t.dtype)) for t in types]
    kernel[grid](*inputs, *outputs, **options)
    return jax.tree.unflatten(tree, [jnp.asarray(o.array()) for o in outputs])


def interpret() -> None:
    """From here on what would be compiled is interpreted, in this whole process."""
    # Triton reads it when it is imported, for which there is no other way.
    os.environ["TRITON_INTERPRET"] = "1"
    interpreter = import_module("triton.runtime.interpreter")
    types = import_module("triton.language")

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != types.bfloat16:
            return handle
        wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, types.float32)

    class Builder(interpreter.InterpreterBuilder):
        def create_dot(self, a: Any, b: Any, *rest: Any) -> Any:
            return super().create_dot(widened(a), widened(b), *rest)

        def cast_impl(self, src: Any, dst_type: Any) -> Any:
            if (src.dtype.scalar, dst_type.scalar) != (types.float32, types.bfloat16):
                return super().cast_impl(src, dst_type)
            return interpreter.TensorHandle(
                src.data.astype(jnp.bfloat16).view(np.uint16), types.bfloat16
            )

    interpreter.interpreter_builder.__class__ = Builder
    vars(import_module("jax_triton"))["triton_call"] = triton_call


def check(
    lengths: tuple[int, int],
    heads: tuple[int, int],
    head_dim: int,
    dtype: str,
    band: Band,
    soft_cap: float | None = None,
    segmented: bool = False,
    batch: int = 1,
) -> None:
    """Results and gradients against the reference in float64, and that in the same type."""
    interpret()
    (q_len, kv_len), (q_heads, kv_heads) = lengths, heads
    scale = head_dim**-0.5
    problem = Problem(
        batch, q_len, kv_len, q_heads, kv_heads, head_dim, dtype, band, scale, soft_cap, segmented
    )
    rng = np.random.default_rng(0)

    def normal(length: int, count: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(batch, length, count, head_dim)), dtype)

    def ids(length: int) -> jax.Array:
        return jnp.asarray(np.sort(rng.integers(0, 4, size=(batch, length)), axis=1), jnp.int32)

    q, d_out = normal(q_len, q_heads), normal(q_len, q_heads)
    k, v = normal(kv_len, kv_heads), normal(kv_len, kv_heads)
    segments = Segments(ids(q_len), ids(kv_len)) if segmented else None

    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a, np.float64)) for a in (q, k, v)]

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            return reference.attend(problem, q, k, v, segments, jnp.float64)

        @jax.jit
        def exactly(d_out: jax.Array, *wide: jax.Array) -> list[jax.Array]:
            out, gradients, lse = jax.vjp(attend, *wide, has_aux=True)
            return [out, lse, *gradients(d_out)]

        exact = exactly(jnp.asarray(np.asarray(d_out, np.float64)), *wide)
    out, lse = jax.jit(reference.forward, static_argnums=(0, 1))(problem, A100, q, k, v, segments)
    delta = jnp.einsum("bthd,bthd->bht", out.astype(jnp.float32), d_out.astype(jnp.float32))
    backward = problem, A100, q, k, v, segments, lse, delta, d_out
    same_type = [out, lse, *jax.jit(reference.backward, static_argnums=(0, 1))(*backward)]
    found = [
        *kernel_triton.forward(problem, A100, q, k, v, segments),
        *kernel_triton.backward(*backward),
    ]
    names = "out", "lse", "d_q", "d_k", "d_v"
    for name, ours, theirs, truth in zip(names, found, same_type, exact, strict=True):
        ours, theirs, truth = (np.asarray(a, np.float64) for a in (ours, theirs, truth))
        nothing = np.isneginf(truth)
        np.testing.assert_array_equal(np.isneginf(ours), nothing)
        error, allowed = (
            abs(np.where(nothing, 0, a) - np.where(nothing, 0, truth)).max() for a in (ours, theirs)
        )
        assert error <= 2 * allowed + 1e-5, f"{name} of {problem}: {error} > 2 * {allowed}"


def bands() -> None:
    f32 = "float32"
    check((100, 130), (1, 1), 64, f32, Band(), batch=2)
    check((100, 100), (1, 1), 64, f32, Band(None, 0))
    check((70, 150), (1, 1), 64, f32, Band(None, 0, 80))
    check((100, 100), (1, 1), 64, f32, Band(40, 0))
    check((120, 100), (1, 1), 64, f32, Band(30, 20, -20))


def bands_that_show_nothing() -> None:
    f32 = "float32"
    # Some queries, and whole blocks of them, see no key.
    check((150, 100), (1, 1), 64, f32, Band(10, None, 20))
    check((150, 100), (1, 1), 64, f32, Band(None, 0, -70))
    check((40, 40), (1, 1), 64, f32, Band(0, 0))


def options() -> None:
    f32 = "float32"
    check((70, 70), (4, 2), 64, f32, Band(None, 0))
    check((70, 90), (2, 1), 32, f32, Band(), soft_cap=1.5)
    check((70, 70), (1, 1), 64, f32, Band(40, 0), segmented=True, batch=2)
    check((70, 90), (1, 1), 16, f32, Band(), soft_cap=20.0, segmented=True)


def widths() -> None:
    causal = Band(None, 0)
    check((40, 40), (1, 1), 96, "float32", causal)
    check((40, 40), (1, 1), 256, "float32", causal)
    check((40, 40), (1, 1), 8, "float32", causal)


def types(dtype: str) -> None:
    check((200, 140), (1, 1), 64, dtype, Band(None, 0, -30))
    check((100, 100), (1, 1), 96, dtype, Band())
    check((70, 100), (2, 1), 128, dtype, Band(None, 0), soft_cap=10.0)
    check((70, 70), (1, 1), 256, dtype, Band(20, 0))


def planted(fault: str) -> None:
    """A run with a fault, which has to fail."""
    original = kernel_triton._call

    def faulty(program: str, problem: Problem, *rest: Any) -> Any:
        band = problem.band
        changed = {
            "a window one key too wide": Band(band.left and band.left + 1, band.right, band.offset),
            "keys past the end": band,
        }[fault]
        longer = problem.kv_len + 8 * (fault == "keys past the end")
        return original(
            program, Problem(**{**vars(problem), "band": changed, "kv_len": longer}), *rest
        )

    kernel_triton._call = faulty
    check((60, 60), (1, 1), 64, "float32", Band(20, 20))
