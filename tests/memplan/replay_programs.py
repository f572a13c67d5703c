"""Programs whose scheduled modules the tests replay; `python -m tests.memplan.replay_programs`
compiles them anew into ``tests/data/replay/<program>.<target>.pb.xz``.

The modules are those that a hook sees at POST_SCHEDULER, so neither the tests nor their
reader need a compiler for TPU or GPU.
"""

from __future__ import annotations

import lzma
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from hlo_passes.proto import hlo_pb2
from hlo_passes.xla import clear_hook, compile_for_topology, register_hook
from memplan.topologies import topology

MODULES = Path(__file__).parent.parent / "data" / "replay"
TARGETS = {"tpu": "v5e:2x2", "gpu": "h200"}
BF16 = jnp.bfloat16
DEVICE = jax.memory.Space.Device


@dataclass(frozen=True)
class Program:
    """A function of flat arrays.

    Attributes:
      arguments: shape and dtype of each.
      host: numbers of the arguments in pinned host memory.
      ulps: `memplan.replaying.max_difference` that rounding may make against ``jax.jit``.
    """

    function: Callable[..., Any]
    arguments: tuple[tuple[tuple[int, ...], Any], ...]
    host: tuple[int, ...] = ()
    donate: tuple[int, ...] = ()
    ulps: float = 8

    def values(self) -> list[np.ndarray]:
        """Arguments of a size that keeps products of them near one; the same every time."""
        random = np.random.default_rng(0)
        return [_value(random, shape, np.dtype(dtype)) for shape, dtype in self.arguments]

    def structs(self, sharding: Callable[[str | None], Any]) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct(
                shape, dtype, sharding=sharding("pinned_host" if i in self.host else None)
            )
            for i, (shape, dtype) in enumerate(self.arguments)
        ]

    def jit(self) -> Any:
        return jax.jit(self.function, donate_argnums=self.donate)


def _value(random: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if dtype.kind in "iu":
        return np.asarray(random.integers(0, 10, shape), dtype)
    scale = 1 / np.sqrt(shape[-2]) if len(shape) in (2, 3) else 1
    return np.asarray(random.standard_normal(shape) * scale, dtype)


def _chain(x, *weights):
    for w in weights:
        x = jnp.tanh(x @ jax.device_put(w, DEVICE))
    return x


def _attention(x, wq, wk, wv, wo):
    q = jnp.einsum("btd,dhk->bhtk", x, wq)
    k = jnp.einsum("btd,dhk->bthk", x, wk)
    v = jnp.einsum("btd,dhk->bhkt", x, wv)
    scores = jnp.einsum("bhtk,bshk->bhts", q, k) / 64
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores.astype(jnp.float32), -1e30), -1)
    return jnp.einsum("bhts,bhks,hkd->btd", weights.astype(x.dtype), v, wo)


def _mlp(x, scale, gate, up, down):
    wide = x.astype(jnp.float32)
    norm = wide * lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-5)
    h = norm.astype(x.dtype) * scale
    return x + (jax.nn.silu(h @ gate) * (h @ up)) @ down


def _kv_cache(keys, values, k, v, q, position):
    keys = lax.dynamic_update_slice(keys, k, (0, position, 0, 0))
    values = lax.dynamic_update_slice(values, v, (0, position, 0, 0))
    scores = jnp.einsum("bthd,bshd->bhts", q, keys)
    scores = jnp.where(jnp.arange(keys.shape[1]) <= position, scores, -1e30)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(q.dtype)
    return keys, values, jnp.einsum("bhts,bshd->bthd", weights, values)


def _embedding(table, ids, w):
    return jax.device_put(table, DEVICE)[ids] @ w


def _scan(x, stacked):
    def layer(x, w):
        return jnp.tanh(x @ jax.device_put(w, DEVICE)), x[0]

    return lax.scan(layer, x, stacked)


def _convolution(x, w1, w2):
    dimensions = ("NHWC", "HWIO", "NHWC")
    y = jax.nn.relu(lax.conv_general_dilated(x, w1, (2, 2), "SAME", dimension_numbers=dimensions))
    y = lax.conv_general_dilated(y, w2, (1, 1), "VALID", dimension_numbers=dimensions)
    return lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _selection(x, y):
    values, indices = lax.top_k(x, 5)
    return values, indices, jnp.sort(x, 0), jnp.argmax(x, 1), x.at[y].add(x[:3]), jnp.exp2(y)


def _transposes(x, y):
    rolled = [jnp.roll(x, i, 0) * i for i in range(3)]
    return rolled, jnp.flip(x, 1).T, (y.transpose(2, 0, 1) + 1).reshape(-1, 6).T, y[:, :2]


def _random(key, x):
    key = jax.random.wrap_key_data(key)
    return x + jax.random.normal(key, x.shape), jax.random.bernoulli(key, 0.3, x.shape)


def _offloaded_residual(x, w1, w2):
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(w1, w2):
        h = checkpoint_name(jnp.tanh(x @ w1), "h")
        return jnp.sum(jnp.sin(h @ w2).astype(jnp.float32) ** 2)

    return jax.grad(jax.checkpoint(loss, policy=policy), (0, 1))(w1, w2)


_PROJECTION = ((128, 4, 32), BF16)
_TOKEN = ((2, 1, 4, 32), BF16)

PROGRAMS = {
    "chain": Program(_chain, (((16, 256), BF16), *[((256, 256), BF16)] * 4), host=(1, 2, 3, 4)),
    "attention": Program(
        _attention, (((2, 32, 128), BF16), *[_PROJECTION] * 3, ((4, 32, 128), BF16))
    ),
    "mlp": Program(
        _mlp,
        (((4, 8, 64), BF16), ((64,), BF16), *[((64, 160), BF16)] * 2, ((160, 64), BF16)),
    ),
    "kv_cache": Program(
        _kv_cache, (*[((2, 16, 4, 32), BF16)] * 2, *[_TOKEN] * 3, ((), jnp.int32)), donate=(0, 1)
    ),
    # So many ids that a TPU reads them tile by tile.
    "embedding": Program(
        _embedding, (((100, 128), BF16), ((16, 256), jnp.int32), ((128, 64), BF16)), host=(0,)
    ),
    "scan": Program(_scan, (((8, 128), BF16), ((6, 128, 128), BF16)), host=(1,)),
    "convolution": Program(
        _convolution,
        (
            ((2, 16, 16, 8), jnp.float32),
            ((3, 3, 8, 16), jnp.float32),
            ((3, 3, 16, 32), jnp.float32),
        ),
        ulps=2**16,
    ),
    "selection": Program(_selection, (((6, 130), jnp.float32), ((3,), jnp.int32)), ulps=1),
    "transposes": Program(
        _transposes, (((64, 256), jnp.float32), ((4, 6, 10), jnp.float32)), ulps=0
    ),
    "random": Program(_random, (((2,), jnp.uint32), ((4, 200), jnp.float32)), ulps=4),
    "offloaded_residual": Program(
        _offloaded_residual, (((128, 256), BF16), *[((256, 256), BF16)] * 2)
    ),
}


def read(name: str, target: str) -> bytes:
    return lzma.decompress((MODULES / f"{name}.{target}.pb.xz").read_bytes())


def available() -> list[tuple[str, str]]:
    found = (path.name.split(".")[:2] for path in MODULES.glob("*.pb.xz"))
    return sorted((name, target) for name, target in found)


def compile_program(program: Program, target: str, options: dict[str, Any] | None = None) -> bytes:
    """Compiles for hardware that is not here; returns the final module."""
    devices = topology(TARGETS[target])
    traced = program.jit().trace(*program.structs(devices.sharding))
    if target == "tpu":
        executable = traced.lower().compile(options or {}).runtime_executable()
    else:
        lowered = traced.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
        executable = compile_for_topology(lowered, devices.devices[:1], options or {})
    return executable.hlo_modules()[0].as_serialized_hlo_module_proto()


def main() -> None:
    MODULES.mkdir(exist_ok=True)
    seen: list[bytes] = []
    # On a GPU without autotuning a matmul is a Triton fusion unless that is forbidden.
    variants = [("tpu", "tpu", {}), ("gpu", "gpu", {})]
    variants.append(("gpu", "cublas", {"xla_gpu_enable_triton_gemm": False}))
    for target, suffix, options in variants:
        topology(TARGETS[target])  # loads the plugin that the hook goes to
        register_hook(target, f"replay_{suffix}", seen.append)
        for name, program in PROGRAMS.items():
            if suffix == "cublas" and name not in ("chain", "mlp"):
                continue
            seen.clear()
            compile_program(program, target, options)
            proto = hlo_pb2.HloModuleProto.FromString(seen[-1])
            proto.ClearField("stack_frame_index")  # paths of the machine that compiled
            data = lzma.compress(proto.SerializeToString(), preset=9 | lzma.PRESET_EXTREME)
            (MODULES / f"{name}.{suffix}.pb.xz").write_bytes(data)
            print(f"{name}.{suffix}: {len(data)} bytes")
        clear_hook(target, f"replay_{suffix}")


if __name__ == "__main__":
    main()
