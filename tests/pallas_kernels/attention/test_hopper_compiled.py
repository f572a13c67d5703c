"""The Hopper kernels, compiled for an H200 that is not there: no spills, asynchronous wgmma."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments import kernel_programs as programs
from memplan.kernels.evidence_gpu import KernelEvidence, gpu_evidence
from pallas_kernels.attention import kernel_gpu, kernel_gpu_dkv, kernel_gpu_dq
from pallas_kernels.attention.problem import Band, Problem
from pallas_kernels.attention.shapes import SHAPES, Shape

pytestmark = pytest.mark.gpu

KERNELS = ("attention_forward", "attention_key_gradients", "attention_query_gradient")
BY_NAME = {shape.name: shape for shape in SHAPES}
# A length that is a multiple of a tile, and one that is not even one of 8.
QUICK = ("flux-dit-4608", "vit-l16-384")


def is_clean(kernels: tuple[KernelEvidence, ...]) -> None:
    assert tuple(kernel.name for kernel in kernels) == KERNELS
    for kernel in kernels:
        assert not kernel.spills, kernel
        assert not kernel.serialised, kernel


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_shapes_of_models(name: str):
    function, arguments = programs.gradient(BY_NAME[name])
    is_clean(gpu_evidence(function, *arguments))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in QUICK])
def test_more_shapes_of_models(name: str):
    function, arguments = programs.gradient(BY_NAME[name])
    is_clean(gpu_evidence(function, *arguments))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [16, 32, 48, 80, 112, 160, 192, 224])
def test_other_widths_of_heads(head_dim: int):
    shape = Shape("", 1, 1000, 1000, 8, 4, head_dim, {"causal": True})
    function, given = programs.gradient(shape, dtype=jnp.float16)
    is_clean(gpu_evidence(function, *given))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [None, (1023, 0)])
def test_soft_cap_and_segments_at_once(head_dim: int, window: tuple[int, int] | None):
    options = {"causal": True, "window": window, "soft_cap": 30.0}
    shape = Shape("", 1, 4096, 4096, 8, 4, head_dim, options, (4096,))
    function, given = programs.gradient(shape)
    is_clean(gpu_evidence(function, *given))


@pytest.mark.slow
def test_soft_cap_of_wide_heads():
    shape = Shape("", 1, 8192, 8192, 16, 8, 256, {"causal": True, "soft_cap": 50.0})
    function, given = programs.gradient(shape)
    is_clean(gpu_evidence(function, *given))


def problem(**fields: Any) -> Problem:
    whole = Problem(1, 1024, 1024, 4, 2, 128, "bfloat16", Band(right=0), 0.1)
    return dataclasses.replace(whole, **fields)


def forward(asked: Problem, config: kernel_gpu.Config, *arrays: jax.Array) -> object:
    q, k, v = arrays
    return kernel_gpu.forward(asked, config, q, k, v, None)


def query_gradient(asked: Problem, config: kernel_gpu_dq.Config, *arrays: jax.Array) -> object:
    q, k, v, rows = arrays
    return kernel_gpu_dq.query_gradient(asked, config, q, k, v, None, rows, rows, q)


def key_gradients(asked: Problem, config: kernel_gpu_dkv.Config, *arrays: jax.Array) -> object:
    q, k, v, rows = arrays
    return kernel_gpu_dkv.key_gradients(asked, config, q, k, v, None, rows, rows, q)


def arguments(asked: Problem) -> tuple[jax.ShapeDtypeStruct, ...]:
    q = (asked.batch, asked.q_len, asked.q_heads, asked.head_dim)
    kv = (asked.batch, asked.kv_len, asked.kv_heads, asked.head_dim)
    rows = (asked.batch, asked.q_heads, asked.q_len)
    tokens = tuple(jax.ShapeDtypeStruct(shape, asked.dtype) for shape in (q, kv, kv))
    return *tokens, jax.ShapeDtypeStruct(rows, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [96, 256])
def test_smem_is_what_was_said(head_dim: int):
    asked = problem(head_dim=head_dim)
    given = arguments(asked)
    for module, function, n in (
        (kernel_gpu, forward, 3),
        (kernel_gpu_dq, query_gradient, 4),
        (kernel_gpu_dkv, key_gradients, 4),
    ):
        config = module.TUNABLE.default(asked)
        (kernel,) = gpu_evidence(partial(function, asked, config), *given[:n])
        assert kernel.smem_bytes == module.smem_bytes(asked, config)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_candidate_compiles(head_dim: int):
    asked = problem(head_dim=head_dim)
    given = arguments(asked)
    for module, function, n in (
        (kernel_gpu, forward, 3),
        (kernel_gpu_dq, query_gradient, 4),
        (kernel_gpu_dkv, key_gradients, 4),
    ):
        for config in module.candidates(asked):
            assert gpu_evidence(partial(function, asked, config), *given[:n]), config


def test_the_products_are_on_the_tensor_cores_and_exp_is_one_fma_and_one_ex2():
    asked = problem(band=Band())
    config = kernel_gpu.Config(64, 128, 2)
    (kernel,) = gpu_evidence(partial(forward, asked, config), *arguments(asked)[:3])
    if kernel.sass is None:
        pytest.skip("nvdisasm is not installed")
    opcodes = kernel.sass.opcodes
    # Of 64 x 128 scores, and 64 x 128 outputs, over 16 of the contracted axis each.
    assert opcodes["HGMMA"] == 8 + 8
    # A thread has 64 of the scores; besides, there is what is done once a row.
    assert 64 <= opcodes["FFMA"] < 64 + 8
    assert 64 <= opcodes["MUFU"] < 64 + 12
