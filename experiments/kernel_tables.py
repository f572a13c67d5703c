"""What the compilers make of every shape of every kernel, as tables in Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments import kernel_programs as programs
from hlo_passes.hardware.machine import Machine, load_machine
from hlo_passes.units import format_bytes
from memplan.kernels.evidence_gpu import gpu_evidence
from memplan.kernels.evidence_tpu import KernelEvidence, tpu_evidence
from pallas_kernels.attention import kernel_gpu, kernel_gpu_dkv, kernel_gpu_dq
from pallas_kernels.attention import shapes as attention_shapes
from pallas_kernels.attention.problem import Problem
from pallas_kernels.attention.tuning import backward_choice, forward_choice
from pallas_kernels.decode import kernel_gpu as decode_gpu
from pallas_kernels.decode import kernel_tpu as decode_tpu
from pallas_kernels.decode import shapes as decode_shapes
from pallas_kernels.streamed_matmul import kernel_tpu as product_tpu
from pallas_kernels.streamed_matmul import shapes as product_shapes
from pallas_kernels.targets import TPUS, Target
from pallas_kernels.tuned import Tunable

# A vector register.
_REGISTER_BYTES = 4096

# Of each kernel of attention: how its blocks are chosen, and in how many products a pair of query
# and key is.
_ATTENTION = {"forward": (forward_choice, 2), "backward": (backward_choice, 5)}

_ABOUT = """\
# The kernels, as the compilers have them

`python -m experiments.kernels --shapes {chips} --write docs/kernels.md`: every shape of
`pallas_kernels/*/shapes.py`, compiled with libtpu {libtpu} and the CUDA 13 plugin {cuda} for
hardware that was not there. Nothing here was timed.

On TPUs, of each kernel: its configuration; bytes of VMEM that the compiler lists for its buffers
and windows; what is stored of spilled registers, each time it is; and all instruction bundles,
each once. A bundle takes a cycle, but where it waits for a copy. Of attention besides: the cycles
that are predicted for the whole problem, of each core, and the share of the machine's peak that
the products of visible pairs make of them (heads of 128 fill half of a matrix unit of 256 x 256,
those of 64 a quarter: of v6e and tpu7x 50 % and 25 % are the most). Near 100 %, and above it, the
bundles are fewer than the cycles that their products take. Of packed sequences all blocks of the
band are counted, and masked: which of them are skipped is known when they run.

Decode attention and the streamed product wait for memory, if their arithmetic is fast enough: of a
step of their rings there are the bundles, of which some under conditions are not run each time,
and the cycles that its copies take at the nominal bandwidth of HBM, or of the host's link. Where
the former are fewer, memory is what holds the kernel. A core of a v5p has half of the bandwidth for
decoding, where both run; the product runs on one.

On an H200: the configuration; registers at launch (of attention consumers raise theirs to 240),
bytes of a thread that are spilled, SMEM, and whether wgmma is asynchronous.
"""


def document(chips: list[str]) -> Iterator[str]:
    """The lines of docs/kernels.md.

    Args:
      chips: machines of the library, TPUs or GPUs of sm90.
    """
    yield _ABOUT.format(
        chips=" ".join(chips), libtpu=version("libtpu"), cuda=version("jax-cuda13-plugin")
    )
    for chip in chips:
        yield from (f"## {chip}", "")
        tables = _tpu_tables(chip) if chip in TPUS else _hopper_tables(chip)
        for name, rows in tables.items():
            yield from (f"### {name}", "")
            yield from rows
            yield ""


def _tpu_tables(chip: str) -> dict[str, Iterator[str]]:
    return {
        "attention": _attention_rows(chip),
        "decode_attention": _ring_rows(chip, decode_rings(chip)),
        "streamed_matmul": _ring_rows(chip, product_rings()),
    }


# --- attention on a TPU ---------------------------------------------------------------------


def _attention_rows(chip: str) -> Iterator[str]:
    yield "| shape | kernel | blocks | cycles, predicted | of peak | VMEM | spilled | bundles |"
    yield "|---|---|---|---|---|---|---|---|"
    machine = load_machine(chip)
    for shape in attention_shapes.SHAPES:
        problem = programs.attention_problem_of(shape)
        (found,) = tpu_evidence([programs.gradient(shape, "tpu")], chip)
        for evidence in reversed(found):
            kernel = evidence.name.removeprefix("attention_")
            choose, products = _ATTENTION[kernel]
            config, launch = choose(problem, TPUS[chip])
            flops = products * 2 * problem.head_dim * visible_pairs(problem)
            least = flops / machine.flops("bf16") * machine.clock_hz
            share = f"{least / launch.cycles:.0%}"
            yield (
                f"| {shape.name} | {kernel} | {config.block_q} x {config.block_kv} "
                f"| {launch.cycles:,} | {share} | {_bytes_and_bundles(evidence)}"
            )


def visible_pairs(problem: Problem) -> int:
    """Pairs of query and key that see each other, of all heads; segments not looked at."""
    band, at = problem.band, np.arange(problem.q_len) + problem.band.offset
    first = np.zeros_like(at) if band.left is None else at - band.left
    last = np.full_like(at, problem.kv_len) if band.right is None else at + band.right + 1
    seen = np.clip(last, 0, problem.kv_len) - np.clip(first, 0, problem.kv_len)
    return problem.batch * problem.q_heads * int(np.maximum(seen, 0).sum())


def _bytes_and_bundles(evidence: KernelEvidence) -> str:
    spilled = format_bytes(evidence.spills * _REGISTER_BYTES)
    return f"{format_bytes(evidence.own_bytes)} | {spilled} | {evidence.bundles:,} |"


# --- kernels that wait for memory, on a TPU -------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """A kernel that computes on what comes through a ring, a step at a time.

    Attributes:
      name: of its shape.
      program: to compile.
      config: how the kernel is cut.
      products: how often a step turns the loop over its products.
      hbm_bytes: that a step copies from HBM, on each core.
      host_bytes: that it copies from the host.
      cores: that share the bandwidth.
    """

    name: str
    program: programs.Program
    config: Any
    products: int
    hbm_bytes: int
    host_bytes: int = 0
    cores: int = 1

    def copy_cycles(self, machine: Machine) -> float:
        """The least that the copies of a step take."""
        seconds = self.hbm_bytes * self.cores / machine.hbm_bytes_per_s
        if self.host_bytes:
            link = machine.link("host", "hbm")
            seconds = max(seconds, self.host_bytes / link.nominal_bytes_per_s)
        return seconds * machine.clock_hz


def decode_rings(chip: str) -> list[Ring]:
    """Every shape of decode attention, as it is configured for a TPU."""
    rings = []
    for shape in decode_shapes.SHAPES:
        problem = programs.decode_problem_of(shape)
        config = next(decode_tpu.candidates(problem, Target("tpu", chip, chip)))
        rings.append(
            Ring(
                shape.name,
                programs.decode(shape, "tpu"),
                config,
                config.heads(problem) // (config.interleave * config.pack),
                decode_tpu.slot_bytes(problem, config),
                cores=config.head_splits * config.key_splits,
            )
        )
    return rings


def product_rings() -> list[Ring]:
    """Every shape of the streamed product, as it is configured for any TPU."""
    rings = []
    for shape in product_shapes.SHAPES:
        problem = shape.problem
        config = next(product_tpu.candidates(problem))
        tile_bytes = config.k_tile * config.n_tile * jnp.dtype(problem.w_dtype).itemsize
        x_bytes = problem.m * config.k_tile * jnp.dtype(problem.dtype).itemsize
        x_stays = config.x_slots == problem.k // config.k_tile
        rings.append(
            Ring(
                shape.name,
                programs.product(shape),
                config,
                max(1, problem.m // config.m_block),
                tile_bytes + (0 if x_stays else x_bytes),
                tile_bytes if problem.on_host else 0,
            )
        )
    return rings


def _ring_rows(chip: str, rings: list[Ring]) -> Iterator[str]:
    yield "| shape | configuration | bundles of a step | its copies | | VMEM | spilled | bundles |"
    yield "|---|---|---|---|---|---|---|---|"
    machine = load_machine(chip)
    found = tpu_evidence([ring.program for ring in rings], chip)
    for ring, (evidence,) in zip(rings, found, strict=True):
        step, copies = evidence.product_turn(ring.products), ring.copy_cycles(machine)
        yield (
            f"| {ring.name} | {_fields(ring.config)} "
            f"| {step:,} | {copies:,.0f} | {step / copies:.2f} | {_bytes_and_bundles(evidence)}"
        )


# --- Hopper ---------------------------------------------------------------------------------


def _hopper_tables(chip: str) -> dict[str, Iterator[str]]:
    target = Target("gpu", chip, "sm90")
    decoded = [(shape, programs.decode_problem_of(shape)) for shape in decode_shapes.SHAPES]
    return {
        "attention": _hopper_rows(
            chip,
            [
                (shape.name, programs.attention_problem_of(shape), programs.gradient(shape))
                for shape in attention_shapes.SHAPES
            ],
            (kernel_gpu.TUNABLE, kernel_gpu_dq.TUNABLE, kernel_gpu_dkv.TUNABLE),
        ),
        "decode_attention": _hopper_rows(
            chip,
            [
                (shape.name, problem, programs.decode(shape))
                for shape, problem in decoded
                if decode_gpu.refusal(problem, target) is None
            ],
            (decode_gpu.TUNABLE,),
        ),
    }


def _hopper_rows(
    chip: str,
    named: Iterable[tuple[str, Any, programs.Program]],
    tunables: Iterable[Tunable[Any, Any]],
) -> Iterator[str]:
    yield "| shape | kernel | configuration | registers | spilled | SMEM | asynchronous |"
    yield "|---|---|---|---|---|---|---|"
    by_name = {tunable.kernel: tunable for tunable in tunables}
    for name, problem, (function, arguments) in named:
        for kernel in gpu_evidence(function, *arguments, machine=chip):
            spilled = kernel.spill_store_bytes + kernel.spill_load_bytes
            yield (
                f"| {name} | {kernel.name} | {_fields(by_name[kernel.name].choose(problem))} "
                f"| {kernel.registers} | {format_bytes(spilled)} "
                f"| {format_bytes(kernel.smem_bytes)} | {'no' if kernel.serialised else 'yes'} |"
            )


def _fields(config: Any) -> str:
    fields = dataclasses.asdict(config).items()
    return ", ".join(f"{name} {getattr(value, 'value', value)}" for name, value in fields)
