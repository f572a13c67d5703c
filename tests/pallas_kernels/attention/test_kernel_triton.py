"""Attention through Triton: what it refuses, its results in the interpreter, what it compiles to.

All but the refusals need jax-triton, and are skipped with the reason that users would get.
"""

import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from hlo_passes.hardware.gpu_target import gpu_target_config
from hlo_passes.hardware.machine import load_machine
from hlo_passes.xla import compile_for_topology
from pallas_kernels.attention import kernel_triton
from pallas_kernels.attention.api import attention
from pallas_kernels.attention.problem import Band, Problem
from pallas_kernels.attention.shapes import SHAPES, Shape
from pallas_kernels.errors import NotSupportedError
from pallas_kernels.targets import target_of
from tests.pallas_kernels.attention import cases_triton
from tests.pallas_kernels.isolated import run
from tests.sweeps import slow_but

A100 = target_of("cuda", "NVIDIA A100-SXM4-80GB")
CAUSAL = Problem(1, 512, 512, 8, 2, 128, "bfloat16", Band(None, 0), 128**-0.5)
KINDS = {
    "sm80": "NVIDIA A100-SXM4-80GB",
    "sm86": "NVIDIA A10G",
    "sm89": "NVIDIA L40S",
    "sm90": "NVIDIA H200",
}
# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
SHARED_BYTES = {"sm80": 163 << 10, "sm86": 99 << 10, "sm89": 99 << 10, "sm90": 227 << 10}


@pytest.fixture
def triton():
    """Skips without it."""
    refused = kernel_triton.refusal(CAUSAL, A100)
    if refused is not None:
        pytest.skip(refused)


# --- refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "kind", "change", "reason"),
    [
        ("cpu", "cpu", {}, "it needs a GPU, which CPU is not"),
        ("tpu", "TPU v6 lite", {}, r"which TPU v6 lite \(v6e\) is not"),
        ("cuda", "NVIDIA B200", {}, r"chosen for sm80, sm86, sm89, sm90; NVIDIA B200 \(sm100\)"),
        ("cuda", "NVIDIA A100", {"head_dim": 512}, "head_dim = 512 is over 256"),
        ("cuda", "NVIDIA A100", {"batch": 70000}, "65535 programs at most"),
    ],
)
def test_what_it_refuses(platform: str, kind: str, change, reason: str):
    refused = kernel_triton.refusal(replace(CAUSAL, **change), target_of(platform, kind))
    assert re.search(reason, refused or "")


@pytest.mark.parametrize(("generation", "kind"), KINDS.items())
def test_what_gpus_are_called(generation: str, kind: str):
    assert target_of("cuda", kind).generation == generation


def test_a_failed_import_is_the_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    kernel_triton._import_failure.cache_clear()
    try:
        refused = kernel_triton.refusal(CAUSAL, A100)
    finally:
        kernel_triton._import_failure.cache_clear()
    assert refused is not None
    assert "jax-triton cannot be imported (ModuleNotFoundError: " in refused
    assert "pip install 'memplan[triton]'" in refused


def test_the_cpu_is_refused_through_the_api():
    x = jnp.zeros((1, 4, 1, 8))
    with pytest.raises(NotSupportedError, match="triton: it needs a GPU, which CPU is not"):
        attention(x, x, x, implementation="triton")


# --- results ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    "case",
    [
        cases_triton.bands,
        cases_triton.bands_that_show_nothing,
        cases_triton.options,
        cases_triton.widths,
    ],
    ids=lambda case: case.__name__,
)
def test_results_and_gradients(case):
    run(case)


@pytest.mark.slow
@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("dtype", slow_but(["bfloat16"], ["bfloat16", "float16"]))
def test_types_with_tensor_cores(dtype: str):
    run(cases_triton.types, dtype=dtype)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("fault", ["a window one key too wide", "keys past the end"])
def test_a_planted_fault_is_caught(fault: str):
    with pytest.raises(pytest.fail.Exception, match=r"AssertionError: \w+ of Problem"):
        run(cases_triton.planted, fault=fault)


# --- the compiler -------------------------------------------------------------------------


def gradients(shape: Shape):
    """The gradients of a shape, and its arguments."""
    q = jax.ShapeDtypeStruct((shape.batch, shape.q_len, shape.q_heads, shape.head_dim), "bfloat16")
    k = jax.ShapeDtypeStruct((shape.batch, shape.kv_len, shape.kv_heads, shape.head_dim), q.dtype)
    ids = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32) if shape.segment_lens else None

    def loss(q, k, v, ids):
        out = attention(q, k, v, q_segment_ids=ids, implementation="triton", **shape.options)
        return out.astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2)), (q, k, k, ids)


def traced(shape: Shape, kind: str):
    function, arguments = gradients(shape)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(kind, 1, "cuda"))):
        return jax.jit(function).trace(*arguments)


def compiled_programs(shape: Shape, generation: str, monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Of each program of a shape, compiled by triton: name, spilled and shared bytes."""
    compiler = import_module("triton.compiler")
    target = import_module("triton.backends.compiler").GPUTarget
    package = Path(import_module("triton").__file__ or "").parent
    found = {}

    def triton_call(
        *given,
        kernel,
        out_type,
        grid,
        name,
        num_warps,
        num_stages,
        compute_capability,
        **constants,
    ):
        arrays = [*map(jax.typeof, given), *jax.tree.leaves(out_type)]
        pointers = {"bfloat16": "*bf16", "float32": "*fp32", "int32": "*i32"}
        names = kernel.arg_names
        types = {n: pointers[a.dtype.name] for n, a in zip(names, arrays, strict=False)}
        source = compiler.ASTSource(
            fn=kernel,
            signature=types | dict.fromkeys(constants, "constexpr"),
            constexprs={(names.index(n),): value for n, value in constants.items()},
            attrs={(i,): [["tt.divisibility", 16]] for i in range(len(arrays))},
        )
        program = compiler.compile(
            source,
            target=target("cuda", compute_capability, 32),
            options={"num_warps": num_warps, "num_stages": num_stages},
        )
        cubin = tmp_path / f"{name}.cubin"
        cubin.write_bytes(program.asm["cubin"])
        command = [package / "backends/nvidia/bin/cuobjdump", "-res-usage", cubin]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        stack = re.search(r"STACK:(\d+)", usage)
        assert stack is not None, usage
        found[name] = int(stack[1]), program.metadata.shared
        return jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), out_type)

    monkeypatch.setattr("jax_triton.triton_call", triton_call)
    traced(shape, KINDS[generation])
    return found


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    ("name", "generation"),
    slow_but(
        [("llama3-8b-4k", "sm89"), ("llama3-8b-4k", "sm90")],
        product((shape.name for shape in SHAPES), KINDS),
    ),
)
def test_programs_fit_and_do_not_spill(name: str, generation: str, monkeypatch, tmp_path):
    shape = next(shape for shape in SHAPES if shape.name == name)
    found = compiled_programs(shape, generation, monkeypatch, tmp_path)
    assert sorted(found) == [
        "attention_forward",
        "attention_key_gradients",
        "attention_query_gradients",
    ]
    for program, (spilled_bytes, shared_bytes) in found.items():
        assert shared_bytes <= SHARED_BYTES[generation], program
        # Of 1020 bytes of registers a thread; heads of 256 do not quite go in.
        assert spilled_bytes <= (64 if shape.head_dim == 256 else 8), program


@pytest.mark.slow
@pytest.mark.usefixtures("triton")
def test_xla_compiles_three_calls(gpu_compiler):
    shape = next(s for s in SHAPES if s.name == "llama3-8b-4k")
    lowered = traced(shape, KINDS["sm90"]).lower(lowering_platforms=("cuda",))
    config = gpu_target_config(load_machine("h200"))
    devices = gpu_compiler(target_config=config, topology="1x1x1").devices
    executable = compile_for_topology(lowered.compiler_ir("stablehlo"), devices, {})
    text = executable.hlo_modules()[0].to_string()
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 3
    assert "dot(" not in text


def test_the_api_does_not_import_triton():
    command = [
        sys.executable,
        "-c",
        "import sys; from pallas_kernels.attention import api; "
        "sys.exit('triton' in sys.modules or 'jax_triton' in sys.modules)",
    ]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run(command, check=True, env=environment, cwd=Path(__file__).parents[3])
