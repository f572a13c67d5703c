"""What the compilers of a GPU say of a kernel, read from their dumps."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from hlo_passes.errors import KernelCompilationError
from memplan.kernels.evidence_gpu import (
    Job,
    KernelEvidence,
    each_gpu_evidence,
    gpu_evidence,
    read_evidence,
    read_sass,
)

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized \
due to insufficient register resources for the function 'f_mosaic_gpu_kernel'
ptxas info    : Compiling entry function 'f_mosaic_gpu_kernel' for 'sm_90a'
    200 bytes stack frame, 192 bytes spill stores, 204 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
"""
RESOURCES = (
    "Resources(smem_scratch_bytes=1024, tmem_scratch_cols=0, barrier_counts=Counter("
    "{Barrier(arrival_count=1, num_barriers=2, orders_tensor_core=False): 3, "
    "Barrier(arrival_count=2, num_barriers=1, orders_tensor_core=False): 1}))"
)
SASS = """\
.text.f_mosaic_gpu_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 FFMA R11, R237, R12, R19 ;
        /*0020*/             @!UP0 FFMA.FTZ R11, R7, R12, R19 ;
.L_x_0:
        /*4250*/                   HGMMA.64x64x16.F32.BF16 R152, gdesc[UR56], RZ, !UPT ;
"""


def double(x: jax.Array) -> jax.Array:
    def body(x_ref, y_ref, smem, barrier):
        plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
        plgpu.barrier_wait(barrier)
        smem[...] = smem[...] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, y_ref)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, reduction_scratch_bytes=0
        ),
        kernel_name="double",
    )(x)


def double_too_much(x: jax.Array) -> jax.Array:
    return double(jnp.zeros((1 << 20,), jnp.float32)) + x.sum()


def test_a_dump_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")  # Nothing to disassemble with.
    (tmp_path / "f_3.ptxas").write_text(REPORT)
    (tmp_path / "f_3.ptx").write_text(".maxntid 384, 1, 1\n")
    (tmp_path / "f_0.resources.txt").write_text(RESOURCES)
    expected = KernelEvidence("f", 168, 192, 204, 1024 + 8 * 7, 384, True, (), None)
    assert read_evidence(tmp_path) == (expected,)
    assert expected.spills


def test_instructions_are_counted_by_opcode():
    sass = read_sass(SASS)
    assert sass.instructions == 4
    assert sass.opcodes == {"LDC": 1, "FFMA": 2, "HGMMA": 1}
    assert sass.highest_register == 237


@pytest.mark.gpu
def test_a_kernel_is_compiled_and_read():
    (kernel,) = gpu_evidence(double, jax.ShapeDtypeStruct((256,), jnp.float32))
    assert (kernel.name, kernel.smem_bytes, kernel.spills) == ("double", 1024 + 8, False)
    assert 0 < kernel.registers < 64


def die(x: jax.Array) -> jax.Array:
    os._exit(3)


@pytest.mark.gpu
def test_one_that_fails_does_not_end_the_others():
    x = jax.ShapeDtypeStruct((256,), jnp.float32)
    jobs = [Job(each, (x,)) for each in (double, double_too_much, die, double)]
    first, too_much, dead, last = each_gpu_evidence(jobs)
    assert isinstance(too_much, KernelCompilationError)
    assert isinstance(dead, KernelCompilationError)
    assert isinstance(first, tuple)
    assert first == last


@pytest.mark.gpu
def test_what_does_not_compile_says_why():
    with pytest.raises(KernelCompilationError, match=r"double_too_much.*available shared memory"):
        gpu_evidence(double_too_much, jax.ShapeDtypeStruct((256,), jnp.float32))
