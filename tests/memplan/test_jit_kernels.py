"""Programs with kernels: traced for the device that they are compiled for, and planned."""

import functools

import jax
import jax.numpy as jnp
import pytest

import memplan
from pallas_kernels.attention.api import attention
from pallas_kernels.targets import current_target


def layers(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Self-attention, over and over; each weight is [embed, heads, width]."""
    for query, key, value in weights:
        q, k, v = (jnp.einsum("bte,ehd->bthd", x, w) for w in (query, key, value))
        x = x + jnp.einsum("bthd,ehd->bte", attention(q, k, v, causal=True), query)
    return x


def shapes() -> tuple[list[list[jax.ShapeDtypeStruct]], jax.ShapeDtypeStruct]:
    weight = jax.ShapeDtypeStruct((2048, 8, 128), jnp.bfloat16)
    return [[weight] * 3] * 8, jax.ShapeDtypeStruct((4, 1024, 2048), jnp.bfloat16)


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
def test_attention_is_planned_around() -> None:
    step = memplan.jit(layers, hbm="80MiB", machine=memplan.topology("v6e"))
    compiled = step.lower(*shapes()).compile()
    assert compiled.plan is not None
    # The weights are streamed past kernels, whose time the planner knows.
    assert compiled.plan.transfers
    report = compiled.memory_analysis()
    assert report.temp_size_in_bytes < 80 << 20
    text = compiled.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 8
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


@pytest.mark.tpu
def test_what_is_not_materialised_is_not_held() -> None:
    """The scores alone would be 512 MiB."""
    machine = memplan.topology("v6e")
    plain = functools.partial(attention, causal=True, implementation="xla")
    q = jax.ShapeDtypeStruct((4, 2048, 8, 128), jnp.bfloat16)
    temps = [
        memplan.jit(f, machine=machine)
        .lower(q, q, q)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for f in (functools.partial(attention, causal=True), plain)
    ]
    assert temps[0] <= 64 << 20
    assert temps[1] >= 128 << 20
