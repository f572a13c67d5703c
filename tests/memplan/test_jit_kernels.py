"""Programs with kernels: traced for the device that they are compiled for, and planned."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import memplan
from hlo_passes.ir import HOST_MEMORY_SPACE
from models import llama, scanned
from models.configs import LlamaConfig
from models.sharding import TOKENS, named, placed, weight_shardings
from pallas_kernels.attention.api import attention
from pallas_kernels.decode.api import decode_attention
from pallas_kernels.targets import current_target


def layers(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Self-attention, over and over; each weight is [embed, heads, width]."""
    for query, key, value in weights:
        q, k, v = (jnp.einsum("bte,ehd->bthd", x, w) for w in (query, key, value))
        x = x + jnp.einsum("bthd,ehd->bte", attention(q, k, v, causal=True), query)
    return x


def shapes() -> tuple[list[list[jax.ShapeDtypeStruct]], jax.ShapeDtypeStruct]:
    weight = jax.ShapeDtypeStruct((2048, 8, 128), jnp.bfloat16)
    return [[weight] * 3] * 4, jax.ShapeDtypeStruct((1, 1024, 2048), jnp.bfloat16)


@pytest.mark.parametrize(
    ("machine", "generation"), [("v5e", "v5e"), ("v6e", "v6e"), ("v5p", "v5p"), ("tpu7x", "tpu7x")]
)
@pytest.mark.tpu
def test_kernels_see_the_device_that_is_not_there(machine: str, generation: str) -> None:
    seen: list[str] = []

    def look(x: jax.Array) -> jax.Array:
        seen.append(current_target().generation)
        return x + 1

    looking = memplan.jit(look, machine=memplan.topology(machine))
    looking.eval_shape(jnp.ones(4))
    looking.trace(jnp.ones(8))
    assert seen == [generation] * 2
    assert current_target().generation == "cpu"


@pytest.mark.tpu
@pytest.mark.slow
def test_attention_is_planned_around() -> None:
    step = memplan.jit(layers, hbm="40MiB", machine=memplan.topology("v6e"))
    compiled = step.lower(*shapes()).compile()
    assert compiled.plan is not None
    # The weights are streamed past kernels, whose time the planner knows.
    assert compiled.plan.transfers
    report = compiled.memory_analysis()
    assert report.temp_size_in_bytes < 40 << 20
    text = compiled.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 4
    assert "attention_forward" in text


@pytest.mark.tpu
@pytest.mark.parametrize(("batch", "is_64_bit"), [(2048, False), (1, True)])
def test_gradients_of_packed_sequences_compile(batch: int, is_64_bit: bool) -> None:
    """The ranges of blocks of each sequence are in scalar memory, which is 1 MiB."""

    def loss(q: jax.Array, ids: jax.Array) -> jax.Array:
        out = attention(q, q, q, q_segment_ids=ids, implementation="tpu")
        return out.astype(jnp.float32).sum()

    q = jax.ShapeDtypeStruct((batch, 256, 1, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((batch, 256), jnp.int32)
    with jax.enable_x64(is_64_bit):
        step = memplan.jit(jax.grad(loss), machine=memplan.topology("v6e"))
        text = step.lower(q, ids).compile().as_text()
    assert "attention_backward" in text


@pytest.mark.slow
@pytest.mark.tpu
def test_what_is_not_materialised_is_not_held() -> None:
    """The scores alone would be 128 MiB."""
    machine = memplan.topology("v6e")
    plain = functools.partial(attention, causal=True, implementation="xla")
    q = jax.ShapeDtypeStruct((1, 2048, 8, 128), jnp.bfloat16)
    temps = [
        memplan.jit(f, machine=machine)
        .lower(q, q, q)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for f in (functools.partial(attention, causal=True), plain)
    ]
    assert temps[0] <= 16 << 20
    assert temps[1] >= 32 << 20


# --- decoding -----------------------------------------------------------------------------

DECODER = LlamaConfig(
    vocab_size=1024,
    num_layers=4,
    embed_dim=512,
    mlp_dim=1024,
    num_heads=4,
    num_kv_heads=2,
    attention="fused",
)
BATCH, CACHE_LENGTH = 8, 1024
ONE_DEVICE = [
    pytest.param("v5e", marks=pytest.mark.tpu),
    pytest.param("v6e", marks=[pytest.mark.tpu, pytest.mark.slow]),
    pytest.param("h200", marks=pytest.mark.gpu),
]
SLOW_ON_GPU = [
    pytest.param("v5e", marks=pytest.mark.tpu),
    pytest.param("v6e", marks=[pytest.mark.tpu, pytest.mark.slow]),
    pytest.param("h200", marks=[pytest.mark.gpu, pytest.mark.slow]),
]


def decode(module: Any, machine: str, hbm: str | None = None) -> Any:
    """A step of a decoder whose cache is 32 MiB, compiled."""
    graphdef, params = nnx.split(module.abstract_model(DECODER))
    cache = module.abstract_cache(DECODER, BATCH, CACHE_LENGTH)
    step = memplan.jit(
        functools.partial(llama.decode_step, graphdef),
        hbm=hbm,
        machine=memplan.topology(machine),
        donate_argnames="cache",
    )
    return step.lower(params, jax.ShapeDtypeStruct((BATCH, 1), jnp.int32), cache).compile()


def spaces_read_by_kernels(compiled: Any) -> list[list[int]]:
    """Of each call of a kernel, the memory spaces of its operands."""
    module = compiled.module
    return [
        [module.instructions[operand].shape.memory_space for operand in call.operand_ids]
        for call in module.instructions.values()
        if call.opcode == "custom-call" and "decode_attention" in call.op_name
        if call.custom_call_target in ("tpu_custom_call", "mosaic_gpu_v2")
    ]


@pytest.mark.parametrize("machine", ONE_DEVICE)
def test_decoders_read_their_cache_in_place(machine: str) -> None:
    compiled = decode(llama, machine)
    assert len(spaces_read_by_kernels(compiled)) == DECODER.num_layers
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 32 << 20
    # The cache of one layer is 8 MiB: none is copied, transposed or padded.
    assert memory.temp_size_in_bytes < 4 << 20


# Of 2 key/value heads, each device has one; of 4 devices, two share one.
@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
@pytest.mark.tpu
def test_decoders_on_a_mesh_run_the_kernel(shape: tuple[int, int]) -> None:
    topology = memplan.topology("v6e:2x2")
    mesh = topology.mesh(shape, ("fsdp", "model"))
    graphdef, params = nnx.split(scanned.abstract_model(DECODER, mesh=mesh))
    params = placed(params, weight_shardings(params, mesh))
    cache = scanned.abstract_cache(DECODER, BATCH, CACHE_LENGTH)
    cache = placed(cache, scanned.cache_shardings(cache, mesh))
    token = jax.ShapeDtypeStruct((BATCH, 1), jnp.int32, sharding=named((BATCH, 1), TOKENS, mesh))
    step = memplan.jit(functools.partial(llama.decode_step, graphdef), machine=topology)
    compiled = step.lower(params, token, cache).compile()
    assert spaces_read_by_kernels(compiled)


@pytest.mark.slow
@pytest.mark.parametrize("machine", SLOW_ON_GPU)
def test_decoders_are_planned_around(machine: str) -> None:
    compiled = decode(llama, machine, hbm="42MiB")
    assert compiled.plan.transfers
    assert compiled.followed.exactly
    kernels = spaces_read_by_kernels(compiled)
    assert len(kernels) == DECODER.num_layers
    assert all(HOST_MEMORY_SPACE not in spaces for spaces in kernels)


@pytest.mark.slow
@pytest.mark.tpu
def test_a_cache_on_the_host_goes_through_a_ring() -> None:
    compiled = decode(scanned, "v6e", hbm="32MiB")
    memory = compiled.memory_analysis()
    assert memory.host_argument_size_in_bytes >= 16 << 20
    kernels = spaces_read_by_kernels(compiled)
    assert kernels
    assert all(HOST_MEMORY_SPACE not in spaces for spaces in kernels)


@pytest.mark.slow
@pytest.mark.parametrize("machine", SLOW_ON_GPU)
def test_what_is_on_the_host_is_brought_to_the_kernel(machine: str) -> None:
    """Caches that are only read are arguments like weights: they are fetched in time."""
    topology = memplan.topology(machine)
    host = topology.sharding().with_memory_kind("pinned_host")
    cache = jax.ShapeDtypeStruct((8, 2, 4096, 128), jnp.bfloat16, sharding=host)

    def layers(q: jax.Array, caches: list[Any], lengths: jax.Array) -> jax.Array:
        for k, v in caches:
            q = q + decode_attention(q, k, v, lengths)
        return q

    q = jax.ShapeDtypeStruct((8, 1, 8, 128), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((8,), jnp.int32)
    step = memplan.jit(layers, hbm="40MiB", machine=topology)
    compiled = step.lower(q, [(cache, cache)] * 3, lengths).compile()
    assert compiled.plan.transfers
    assert compiled.followed.exactly
    kernels = spaces_read_by_kernels(compiled)
    assert len(kernels) == 3
    assert all(HOST_MEMORY_SPACE not in spaces for spaces in kernels)
    # 3 pairs of 32 MiB.
    assert compiled.memory_analysis().host_argument_size_in_bytes >= 56 << 20
