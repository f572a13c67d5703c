"""The TPU kernel: its results and its synchronisation, interpreted; that it compiles."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

from experiments import kernel_programs as programs
from memplan.kernels.evidence_tpu import tpu_evidence
from pallas_kernels.streamed_matmul import kernel_tpu
from pallas_kernels.streamed_matmul.api import streamed_matmul
from pallas_kernels.streamed_matmul.problem import Problem
from pallas_kernels.streamed_matmul.shapes import SHAPES
from pallas_kernels.targets import target_of
from tests.pallas_kernels.isolated import run
from tests.pallas_kernels.streamed_matmul import cases
from tests.sweeps import slow_but

V6E = target_of("tpu", "TPU v6 lite")
DECODE = Problem(16, 4096, 14336, *cases.BF16, on_host=True)


@pytest.mark.slow
@pytest.mark.parametrize("mode", slow_but(["on_wait"], ["eager", "on_wait"]))
def test_every_schedule_gives_the_product_without_a_race(mode: str):
    run(cases.schedules, mode=mode)


def test_types_and_shapes():
    run(cases.types_and_shapes)


@pytest.mark.slow
@pytest.mark.parametrize("ring", ["chunks", "tiles", "x"])
@pytest.mark.parametrize(
    ("fault", "mode"), [("slots share a buffer", "eager"), ("a wait is missing", "on_wait")]
)
def test_a_planted_fault_is_caught(fault: str, ring: str, mode: str):
    with pytest.raises(pytest.fail.Exception, match=r"RACE DETECTED|nan >|\d >"):
        run(cases.planted, fault=fault, ring=ring, mode=mode)


# --- what it is cut into ------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_a_config_fits_the_shape(shape):
    problem = shape.problem
    config = next(kernel_tpu.candidates(problem))
    assert problem.k % (config.k_tile * config.chunk_tiles) == 0
    assert problem.n % config.n_tile == 0
    assert kernel_tpu.vmem_bytes(problem, config) <= 44 << 20


def test_slots_that_would_deadlock_are_refused():
    with pytest.raises(ValueError, match="3 slots for chunks of 2 tiles are too few for 6 tile"):
        kernel_tpu.Config(256, 128, 128, 2, tile_slots=6, chunk_tiles=2, chunk_slots=3)
    with pytest.raises(ValueError, match="at least 2 of each"):
        kernel_tpu.Config(256, 128, 128, 2, tile_slots=1, chunk_tiles=2, chunk_slots=3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"k": 4100}, "k = 4100 is no multiple of 128"),
        ({"n": 14336 + 128}, "n = 14464 is no multiple of 256"),
        ({"dtype": "float16", "w_dtype": "float16"}, "the MXU has no float16"),
        ({"w_dtype": "int8"}, "keep such weights in HBM"),
        ({"m": 1 << 17}, "split the rows"),
        ({"m": 513, "on_host": False}, "expected at most 512"),
    ],
    ids=str,
)
def test_what_it_refuses(change, reason: str):
    refused = kernel_tpu.refusal(replace(DECODE, **change), V6E)
    assert refused is not None
    assert reason in refused


@pytest.mark.parametrize(
    "change",
    [{}, {"on_host": False, "n": 14336 + 128}, {"on_host": False, "w_dtype": "int8"}, {"m": 8192}],
    ids=str,
)
def test_what_it_takes(change):
    assert kernel_tpu.refusal(replace(DECODE, **change), V6E) is None


@pytest.mark.parametrize(
    ("platform", "kind", "reason"),
    [("cpu", "cpu", "which CPU is not"), ("cuda", "NVIDIA H200", "src must be a GMEM reference")],
)
def test_other_platforms_are_refused(platform: str, kind: str, reason: str):
    refused = kernel_tpu.refusal(DECODE, target_of(platform, kind))
    assert refused is not None
    assert reason in refused


# --- the compiler -------------------------------------------------------------------------


def lowered(devices, function, *arguments):
    mesh = Mesh(devices[:1], ("x",))

    def described(shape, dtype, memory_kind=None):
        sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=memory_kind)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    given = [None if a is None else described(*a) for a in arguments]
    device = AbstractDevice(devices[0].device_kind, 1, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*given).lower(lowering_platforms=("tpu",))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_every_shape_compiles(tpu_compiler, name: str):
    devices = tpu_compiler(name).devices

    def product(x, w, w_scales):
        return streamed_matmul(x, w, w_scales=w_scales, implementation="tpu")

    for shape in SHAPES:
        program = lowered(
            devices,
            product,
            ((shape.m, shape.k), jnp.bfloat16),
            ((shape.k, shape.n), shape.w_dtype, "pinned_host" if shape.on_host else "device"),
            ((shape.n,), jnp.float32) if shape.w_dtype == "int8" else None,
        )
        text = program.compile().as_text()
        assert text is not None
        assert text.count('custom_call_target="tpu_custom_call"') == 1, shape.name
        # The kernel itself reads the host: nothing else moves the weights.
        assert ("S(5)" in text) == shape.on_host, shape.name
        assert "copy-start(%w" not in text, shape.name


@pytest.mark.slow
@pytest.mark.tpu
def test_the_compiler_lists_the_same_bytes():
    names = ("llama2-7b-down-decode", "llama3-8b-head-decode", "llama3-70b-up-int8")
    shapes = [shape for shape in SHAPES if shape.name in names]
    found = tpu_evidence([programs.product(shape) for shape in shapes], "v6e")
    for shape, (evidence,) in zip(shapes, found, strict=True):
        config = next(kernel_tpu.candidates(shape.problem))
        assert evidence.own_bytes == kernel_tpu.vmem_bytes(shape.problem, config), shape.name


def test_the_gradient_of_x_streams_the_weights_too(tpu_compiler):
    devices = tpu_compiler("v5e:2x2").devices

    def gradient(x, w):
        return jax.grad(lambda x: streamed_matmul(x, w).astype(jnp.float32).sum())(x)

    weights = (4096, 14336), jnp.bfloat16, "pinned_host"
    text = lowered(devices, gradient, ((16, 4096), jnp.bfloat16), weights).compile().as_text()
    assert text is not None
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    assert "dot(" not in text
