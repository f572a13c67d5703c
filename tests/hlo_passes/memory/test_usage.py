"""The predicted memory against XLA's `memory_analysis`, over the corpus."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from hlo_passes.errors import UnscheduledModuleError
from hlo_passes.ir import Module
from hlo_passes.memory.usage import latest_values, memory_usage
from hlo_passes.reading.reader import read_module
from hlo_passes.xla import hlo_proto_to_canonical_text
from memplan.topologies import topology
from tests import corpus
from tests.corpus import accuracy

MEMORY = corpus.memory()
DOCUMENTED = Path("docs/memory_accuracy.md").read_text().splitlines()

# `<program>.<target>`: why its prediction is further from XLA's number than TOLERANCE.
EXCEPTIONS: dict[str, str] = {}
TOLERANCE = 0.001


@pytest.mark.parametrize("key", MEMORY)
def test_predicted_memory_is_that_of_memory_analysis(key: str) -> None:
    usage = memory_usage(corpus.read(key), corpus.platform(key))
    wrong = abs(usage.temp_bytes - MEMORY[key]["temp"]) > TOLERANCE * MEMORY[key]["temp"]
    assert wrong == (key in EXCEPTIONS), (usage.temp_bytes, MEMORY[key]["temp"])
    found = {
        "argument": usage.argument_bytes,
        "output": usage.output_bytes,
        "alias": usage.alias_bytes,
    }
    assert found == {k: v for k, v in MEMORY[key].items() if k != "temp"}
    # The lower bound is the load at the peak.
    assert sum(h.size for h in latest_values(usage.live)) == usage.lower_bound_bytes
    assert usage.lower_bound_bytes <= usage.heap_bytes <= usage.temp_bytes
    # The committed table says so.
    assert accuracy.row(key, usage) in DOCUMENTED


@pytest.mark.parametrize("key", MEMORY)
def test_a_module_survives_the_round_trip(key: str) -> None:
    before = corpus.read_bytes(key)
    after = Module(corpus.read(key).to_proto()).to_bytes()
    assert hlo_proto_to_canonical_text(after) == hlo_proto_to_canonical_text(before)


def test_the_peak_names_its_buffers() -> None:
    module = corpus.read("mlp_grad.v5e")
    usage = memory_usage(module, "tpu")
    largest = max(latest_values(usage.live), key=lambda h: h.size)
    assert largest.size == 16384 * 4096 * 2
    assert largest.value.instruction.op_name.startswith("jit(_mlp_loss)")
    assert usage.peak in module.entry.instructions


def test_a_peak_may_be_inside_a_loop() -> None:
    module = corpus.read("scan_remat_grad.h200")
    usage = memory_usage(module, "gpu")
    assert usage.peak is not None
    assert usage.peak not in module.entry.instructions


def test_host_memory_is_counted_apart() -> None:
    usage = memory_usage(corpus.read("mlp_offloaded.v5e"), "tpu", memory_space=5)
    assert usage.argument_bytes == 6 * 4096 * 4096 * 2
    assert usage.temp_bytes == 0


def test_residuals_offloaded_by_the_program_are_host_temporaries() -> None:
    usage = memory_usage(corpus.read("residuals_offloaded.v5e"), "tpu", memory_space=5)
    assert usage.heap_bytes == 5 * 16384 * 4096 * 2


def test_a_module_without_a_schedule_is_refused() -> None:
    text = "HloModule m\nENTRY e {\n  ROOT p = f32[8] parameter(0)\n}\n"
    with pytest.raises(UnscheduledModuleError, match="module m: it has no schedule"):
        memory_usage(read_module(text), "cpu")


def test_the_corpus_is_whole() -> None:
    files = {p.name.removesuffix(".pb.xz") for p in corpus.MODULES.iterdir()}
    assert files == set(json.loads(corpus.MEMORY.read_text()))


def counted(x: jax.Array, limit: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, limit, lambda n, y: jnp.tanh(y) + n, x)


def summed(*arrays: jax.Array) -> jax.Array:
    return sum((a * 2 for a in arrays[1:]), arrays[0])


def two_of(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x + 1, x * 2


def large_and_two(x: jax.Array, limit: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = counted(x, limit)
    return y @ y.T + x, x[0] * limit


def chosen(x: jax.Array, n: jax.Array) -> jax.Array:
    branches = (lambda x: jnp.flip(x, 0) * 2, lambda x: jnp.tanh(x) + 1, lambda x: x * 3)
    return jax.lax.switch(n, branches, x * 2) + 1


def factored(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    factor = jnp.linalg.cholesky(a @ jnp.swapaxes(a, -1, -2) + jnp.eye(a.shape[-1]))
    return jnp.einsum("bij,bjk->bki", a, b) + 1, factor


LIBTPU = pytest.mark.since("0.12.0.1", "its libtpu reserves more than what is counted")


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("name", "function", "shapes"),
    [
        # The loop's counter and condition have a place on the heap that nobody asks for.
        ("v5e", counted, [(8, 128), ()]),
        # Beside an array they count.
        pytest.param("v5e", large_and_two, [(8192, 8192), ()], marks=LIBTPU),
        # More than 2,000 arguments are one tuple, and its table is an argument.
        ("v5e", summed, [(8,)] * 2100),
        pytest.param("v6e", summed, [(8,)] * 2100, marks=pytest.mark.slow),
        ("v6e", two_of, [(8, 128)]),
        ("tpu7x", two_of, [(8, 128)]),
        ("v5p", two_of, [(8, 128)]),
        # What libtpu says: a conditional's results lie in the donated argument ...
        pytest.param("tpu7x", chosen, [(4096, 4096), ()], marks=LIBTPU),
        # ... and a fusion is written over an operand of another layout.
        pytest.param("tpu7x", factored, [(3, 905, 905), (3, 905, 32)], marks=LIBTPU),
    ],
)
def test_a_tpu_program_is_counted_as_xla_does(
    name: str, function: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    target = topology(name)
    arguments = [
        jax.ShapeDtypeStruct(s, jnp.float32 if s else jnp.int32, sharding=target.sharding())
        for s in shapes
    ]
    donate = (0,) if function is chosen else ()
    compiled = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
    xla = compiled.memory_analysis()
    assert xla is not None
    usage = memory_usage(read_module(compiled), "tpu", machine=target.machine)
    assert usage.argument_bytes == xla.argument_size_in_bytes
    assert usage.output_bytes == xla.output_size_in_bytes
    assert usage.temp_bytes == xla.temp_size_in_bytes
