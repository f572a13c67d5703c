from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from experiments import kernel_programs as programs
from memplan.kernels.evidence_tpu import tpu_evidence
from pallas_kernels.decode import kernel_tpu
from pallas_kernels.decode.api import decode_attention
from pallas_kernels.decode.problem import Cache, Problem
from pallas_kernels.decode.shapes import SHAPES, Shape
from pallas_kernels.onchip import vmem_total
from pallas_kernels.targets import TPUS, Target, target_of
from tests.pallas_kernels.decode import interpreted_tpu
from tests.pallas_kernels.isolated import run
from tests.sweeps import slow_but

MODES = ("eager", "on_wait")
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
QUICK = ("llama3-8b-8k-int8-page32", "gemma2-9b-8k-window", "gpt2-1k")
V6E = target_of("tpu", "TPU v6 lite")


# --- numerics, in the interpreter ---------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "mode"),
    slow_but(
        [("masks", "eager"), ("types", "on_wait"), ("parts", "on_wait")],
        product(("masks", "types", "parts"), MODES),
    ),
)
def test_chosen_cases(mode: str, what: str) -> None:
    run(getattr(interpreted_tpu, f"check_{what}"), mode=mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_random_cases(mode: str) -> None:
    run(interpreted_tpu.check_random, mode=mode, examples=20, timeout_s=500)


@pytest.mark.slow
@pytest.mark.since("0.12", "its interpreter prints races and goes on")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("plant", ["one slot too few", "no wait"])
def test_a_planted_race_is_found(mode: str, plant: str) -> None:
    run(interpreted_tpu.check_plant, mode=mode, plant=plant)


# --- what it refuses ----------------------------------------------------------------------


def problem(**changes: Any) -> Problem:
    fields: dict[str, Any] = {
        "batch": 2,
        "q_len": 1,
        "q_heads": 8,
        "kv_heads": 2,
        "head_dim": 128,
        "num_pages": 64,
        "page_size": 16,
        "max_pages": 8,
        "paged": True,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "window": None,
        "scale": 1.0,
    }
    return Problem(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dtype": "float16", "kv_dtype": "float16"}, "TPUs have no float16"),
        ({"page_size": 24}, "a page of 24 bfloat16 tokens is not whole tiles: it takes a page"),
        ({"kv_dtype": "int8"}, "that is a multiple of 32"),
        (
            {"batch": 512, "max_pages": 1024},
            "take 2113568 bytes of SMEM: it takes fewer than 917504",
        ),
        ({"kv_heads": 8192, "q_heads": 8192}, "not even two pages fit into VMEM"),
    ],
)
def test_it_refuses(changes: dict[str, Any], sentence: str) -> None:
    assert sentence in (kernel_tpu.refusal(problem(**changes), V6E) or "")


@pytest.mark.parametrize(("platform", "kind"), [("cpu", "cpu"), ("tpu", "TPU v3")])
def test_it_refuses_other_devices(platform: str, kind: str) -> None:
    assert kernel_tpu.refusal(problem(), target_of(platform, kind))


def test_it_takes_the_rest() -> None:
    assert kernel_tpu.refusal(problem(), V6E) is None


# --- how the work is cut ------------------------------------------------------------------


def test_two_cores_take_half_of_the_heads_each() -> None:
    config = next(kernel_tpu.candidates(problem(), target_of("tpu", "TPU v5")))
    assert (config.head_splits, config.key_splits) == (2, 1)


def test_two_cores_take_half_of_each_sequence_of_one_head() -> None:
    config = next(kernel_tpu.candidates(problem(kv_heads=1), target_of("tpu", "TPU v5")))
    assert (config.head_splits, config.key_splits) == (1, 2)


def test_candidates_fit() -> None:
    found = list(kernel_tpu.candidates(problem(kv_heads=32, q_heads=32, max_pages=512), V6E))
    assert len(found) == len(set(found)) > 10
    for config in found:
        assert kernel_tpu.vmem_bytes(problem(), config) <= 96 << 20
        assert max(config.block, 16) % min(config.block, 16) == 0


# --- compiled -----------------------------------------------------------------------------


def check_bytes(shapes: list[Shape], chip: str) -> None:
    """Buffers are as large as the compiler has them, and windows no larger than counted."""
    found = tpu_evidence([programs.decode(shape, "tpu") for shape in shapes], chip)
    for shape, (evidence,) in zip(shapes, found, strict=True):
        problem = programs.decode_problem_of(shape)
        config = next(kernel_tpu.candidates(problem, Target("tpu", chip, chip)))
        buffers = vmem_total(kernel_tpu.scratch(problem, config))
        assert evidence.vmem["scratch operand"] == buffers, shape.name
        assert evidence.own_bytes <= kernel_tpu.vmem_bytes(problem, config), shape.name


@pytest.mark.slow
@pytest.mark.tpu
def test_the_compiler_lists_the_same_bytes() -> None:
    names = ("gpt2-1k", "falcon-7b-2k-mqa")
    check_bytes([shape for shape in SHAPES if shape.name in names], "v6e")


@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.parametrize("chip", TPUS)
def test_the_compiler_lists_the_same_bytes_of_every_shape(chip: str) -> None:
    check_bytes(list(SHAPES), chip)


def placed(device: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """On a device, in the layout that `problem` recommends."""
    layout = Layout(major_to_minor=tuple(range(x.ndim)))
    where = Format(layout, SingleDeviceSharding(device))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def abstract_device(device: Any) -> Any:
    abstract = AbstractDevice(device.device_kind, 1, "tpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract))


def compile_for(shape: Shape, device: Any) -> Any:
    positional, named = jax.tree.map(partial(placed, device), shape.abstract())

    @jax.jit
    def call(positional: Any, named: Any) -> Any:
        options: dict[str, Any] = {**named, **shape.options, "implementation": "tpu"}
        return decode_attention(*positional, **options, return_lse=True)

    with abstract_device(device):
        return call.trace(positional, named).lower(lowering_platforms=("tpu",)).compile()


def check_compiles(shape: Shape, device: Any) -> None:
    memory = compile_for(shape, device).memory_analysis()
    cache = 2 * jnp.dtype(shape.kv_dtype).itemsize * shape.batch * shape.kv_heads
    cache *= shape.context * shape.head_dim
    # Two cores that share the sequences write a result and an LSE each, float32, in whole lanes.
    partial_results = 2 * 2 * 4 * shape.batch * shape.q_len * shape.q_heads * 128
    spare = cache / 4 + partial_results
    assert memory.temp_size_in_bytes < spare, "a copy of the cache"


@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize("name", slow_but(["gpt2-1k"], QUICK))
def test_compiles(name: str, generation: str, tpu_compiler: Any) -> None:
    shape = next(shape for shape in SHAPES if shape.name == name)
    check_compiles(shape, tpu_compiler(TOPOLOGIES[generation]).devices[0])


@pytest.mark.slow
@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_shape_compiles(shape: Shape, generation: str, tpu_compiler: Any) -> None:
    check_compiles(shape, tpu_compiler(TOPOLOGIES[generation]).devices[0])


@pytest.mark.slow
@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize("name", ["llama3-70b-32k-speculate8", "llama3-8b-8k-int8-page32"])
def test_what_fits_by_vmem_bytes_compiles(name: str, generation: str, tpu_compiler: Any) -> None:
    """The configuration that takes most of VMEM, of those that should fit."""
    device = tpu_compiler(TOPOLOGIES[generation]).devices[0]
    target = target_of("tpu", device.device_kind)
    shape = next(shape for shape in SHAPES if shape.name == name)
    (q, k, v, lengths), named = shape.abstract()
    large = problem(
        batch=shape.batch,
        q_len=shape.q_len,
        q_heads=shape.q_heads,
        num_pages=k.shape[0],
        kv_heads=shape.kv_heads,
        page_size=k.shape[2],
        max_pages=named["block_tables"].shape[1],
        kv_dtype=shape.kv_dtype,
    )
    largest = max(
        kernel_tpu.candidates(large, target), key=lambda c: kernel_tpu.vmem_bytes(large, c)
    )
    shapes: Any = (k, v, lengths)
    cache = Cache(*shapes, **named)
    arguments = jax.tree.map(partial(placed, device), (q, cache))
    with abstract_device(device):
        call = jax.jit(partial(kernel_tpu.forward, large, target, config=largest))
        call.trace(*arguments).lower(lowering_platforms=("tpu",)).compile()


def test_shard_map_compiles(tpu_compiler: Any) -> None:
    """Heads over four chips: each has a quarter of every page."""
    devices = tpu_compiler("v6e:2x2").devices
    mesh = jax.sharding.Mesh(devices, ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    by = jax.sharding.PartitionSpec
    specs = (by(None, None, "x"), by(None, "x"), by(None, "x"), by(), by())
    shape = next(shape for shape in SHAPES if shape.name == "llama3-8b-8k")
    positional, named = shape.abstract()
    arguments = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
        for x, spec in zip((*positional, *named.values()), specs, strict=True)
    ]

    @jax.jit
    def call(*arguments: Any) -> Any:
        return jax.shard_map(
            lambda q, k, v, lengths, tables: decode_attention(
                q, k, v, lengths, block_tables=tables, implementation="tpu"
            ),
            mesh=mesh,
            in_specs=specs,
            out_specs=by(None, None, "x"),
        )(*arguments)

    text = call.trace(*arguments).lower(lowering_platforms=("tpu",)).compile().as_text()
    assert text is not None
    assert "tpu_custom_call" in text
    assert "bf16[2048,2,64,128]" in text
