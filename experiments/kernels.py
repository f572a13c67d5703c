"""What the compilers make of the kernels, as a table, without their hardware.

python -m experiments.kernels --shapes v6e      every shape on a chip (h200), a table in Markdown
python -m experiments.kernels --splash v6e      beside jax's splash attention
python -m experiments.kernels --tune v6e        compiles blocks, writes tpu_bundles.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash_kernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

from experiments import kernel_programs
from hlo_passes.machine import load_machine
from hlo_passes.units import format_bytes
from memplan.kernels.evidence_gpu import gpu_evidence
from memplan.kernels.evidence_tpu import Evidence, Job, Region, collect
from memplan.topologies import Topology
from pallas_kernels.attention import kernel_tpu, kernel_tpu_backward
from pallas_kernels.attention.api import problem_of
from pallas_kernels.attention.problem import Band, Problem
from pallas_kernels.attention.shapes import SHAPES, Shape
from pallas_kernels.attention.tuning import backward_choice, forward_choice
from pallas_kernels.onchip import vmem_total
from pallas_kernels.targets import TPUS
from pallas_kernels.tpu import Launch

TUNED = Path(kernel_tpu.__file__).parent / "tpu_bundles.json"

# (block_q, block_kv) of which bundles are measured; others are interpolated.
_BLOCKS = (
    (256, 256),
    (256, 1024),
    (512, 512),
    (1024, 256),
    (1024, 1024),
    (1024, 2048),
    (2048, 1024),
)
_WIDTHS = ((64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16"), (128, "float32"))


def attention_blocks(
    target: Topology,
    *,
    kernel: str,
    block_q: int,
    block_kv: int,
    head_dim: int,
    dtype: str,
    limit: int | None = None,
) -> tuple[Callable[..., Any], tuple[Any, ...], str]:
    """One causal head of two blocks by two, so that some items have a mask and some have none.

    Args:
      limit: bytes of VMEM; by default those of the kernel's own buffers, which is exceeded if
        registers are spilled.
    """
    length = 2 * max(block_q, block_kv)
    band = Band(None, 0, 0)
    problem = Problem(1, length, length, 1, 1, head_dim, dtype, band, head_dim**-0.5)
    chip = TPUS[target.machine.name.removeprefix("tpu-")]
    sharding = target.sharding()
    whole = jax.ShapeDtypeStruct((1, length, 1, head_dim), dtype, sharding=sharding)
    row = jax.ShapeDtypeStruct((1, 1, length), jnp.float32, sharding=sharding)
    if kernel == "forward":
        config = kernel_tpu.Config(block_q, block_kv)
        size = limit or vmem_total(kernel_tpu.scratch(problem, config))

        def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            return kernel_tpu.forward(problem, config, Launch(chip.cores, size, 0), q, k, v, None)

        return forward, (whole,) * 3, "attention_forward"

    config = kernel_tpu_backward.Config(block_q, block_kv, min(256, block_kv))
    scratch = kernel_tpu_backward.scratch(problem, config, jnp.dtype(dtype))
    size = limit or vmem_total(scratch)

    def backward(q: jax.Array, k: jax.Array, v: jax.Array, lse: Any, delta: Any, d_out: Any) -> Any:
        return kernel_tpu_backward.backward(
            problem, config, Launch(chip.cores, size, 0), q, k, v, None, lse, delta, d_out
        )

    return backward, (whole, whole, whole, row, row, whole), "attention_backward"


def attention_shape(
    target: Topology, *, name: str, kernel: str
) -> tuple[Callable[..., Any], tuple[Any, ...], str]:
    """A shape of `shapes.py`, through the public function, and its gradient for the backward."""
    shape = next(shape for shape in SHAPES if shape.name == name)
    backward, specs = kernel_programs.gradient(shape, "tpu")
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target.sharding()), specs
    )
    if kernel == "backward":
        return backward, placed, "attention_backward"
    forward = partial(kernel_programs.forward, shape.options | {"implementation": "tpu"})
    return forward, placed[:-1], "attention_forward"


def splash(
    target: Topology, *, length: int, block_q: int, block_kv: int, block_kv_compute: int
) -> tuple[Callable[..., Any], tuple[Any, ...], str]:
    """jax's own splash attention of one head of 128, full."""
    mask = splash_mask.MultiHeadMask([splash_mask.FullMask((length, length))])
    blocks = splash_kernel.BlockSizes(
        block_q=block_q, block_kv=block_kv, block_kv_compute=block_kv_compute
    )
    kernel = splash_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=blocks)
    head = jax.ShapeDtypeStruct((1, length, 128), jnp.bfloat16, sharding=target.sharding())
    return lambda q, k, v: kernel(q, k, v), (head,) * 3, "splash_mha_fwd"


def attention_parts(evidence: Evidence) -> dict[str, int]:
    """Bundles of the parts of an attention kernel's loop, as `tuning.Bundles` names them.

    The items are the two regions with matrix products; the one without a mask comes first.
    """
    loop = outermost(evidence)
    inside = [r for r in evidence.inside(loop) if r.bundles > 30]
    if sum(r.use["MATMUL"] > 0 for r in inside) == 1:
        # A condition around all of a turn.
        inside = [
            r for r in evidence.inside(max(inside, key=lambda r: r.bundles)) if r.bundles > 30
        ]
    full, masked = (r.bundles for r in inside if r.use["MATMUL"])
    close = sum(r.bundles for r in inside if not r.use["MATMUL"])
    turn = loop.bundles - full - masked - close
    return {"full": full, "masked": masked, "turn": turn, "close": close}


def tune(chips: Iterable[str]) -> None:
    """Measures blocks on chips, and replaces their rows in the file that the kernels read."""
    table: dict[str, Any] = json.loads(TUNED.read_text()) if TUNED.exists() else {"rows": []}
    for chip in chips:
        rows = []
        for head_dim, dtype in _WIDTHS:
            for kernel in ("forward", "backward"):
                rows += _measured(chip, kernel, head_dim, dtype)
        table["rows"] = [row for row in table["rows"] if row["chip"] != chip] + rows
        table["libtpu"] = version("libtpu")
        table["rows"].sort(key=lambda row: json.dumps(row))
        lines = ",\n    ".join(json.dumps(row) for row in table["rows"])
        TUNED.write_text(
            f'{{\n  "libtpu": "{table["libtpu"]}",\n  "rows": [\n    {lines}\n  ]\n}}\n'
        )


def _measured(chip: str, kernel: str, head_dim: int, dtype: str) -> list[dict[str, Any]]:
    scale = max(1, head_dim // 128) * (2 if dtype == "float32" else 1)
    blocks = [(q, kv) for q, kv in _BLOCKS if q * kv * scale <= 1 << 21]
    build, capacity = "experiments.kernels:attention_blocks", int(0.9 * TPUS[chip].vmem_bytes)
    arguments = [
        {"kernel": kernel, "block_q": q, "block_kv": kv, "head_dim": head_dim, "dtype": dtype}
        for q, kv in blocks
    ]
    tight = collect(chip, [Job(build, a) for a in arguments])
    roomy = collect(chip, [Job(build, a | {"limit": capacity}) for a in arguments])
    rows = []
    for a, least, most in zip(arguments, tight, roomy, strict=True):
        own = own_bytes(a)
        spills = 0 if least.vmem_bytes is None else least.vmem_bytes - own
        row = {"chip": chip, **a, **attention_parts(most), "own": own, "spills": spills}
        print(row, flush=True)
        rows.append(row)
    return rows


def own_bytes(a: dict[str, Any]) -> int:
    length = 2 * max(a["block_q"], a["block_kv"])
    band = Band(None, 0, 0)
    problem = Problem(1, length, length, 1, 1, a["head_dim"], a["dtype"], band, 1.0)
    if a["kernel"] == "forward":
        return vmem_total(
            kernel_tpu.scratch(problem, kernel_tpu.Config(a["block_q"], a["block_kv"]))
        )
    config = kernel_tpu_backward.Config(a["block_q"], a["block_kv"], min(256, a["block_kv"]))
    return vmem_total(kernel_tpu_backward.scratch(problem, config, jnp.dtype(a["dtype"])))


# Of each kernel: how its blocks are chosen, what it holds, and in how many products a pair is.
_KERNELS: dict[str, tuple[Any, Any, int]] = {
    "forward": (forward_choice, kernel_tpu.scratch, 2),
    "backward": (
        backward_choice,
        partial(kernel_tpu_backward.scratch, result=jnp.dtype(jnp.bfloat16)),
        5,
    ),
}


# --- the table ------------------------------------------------------------------------------

# Blocks of splash attention, of which the best is compared with.
_SPLASH = ((1024, 2048, 1024), (1024, 2048, 512), (2048, 2048, 512), (512, 2048, 512))
_OURS = ((1024, 1024), (1024, 2048), (2048, 2048))


def against_splash(chip: str) -> Iterator[str]:
    """A head of 2048 x 2048 x 128, all of it seen, by both: lines of a table in Markdown.

    Bundles are those of the kernel's outermost loop, as often as it turns for a head. What is
    outside of it runs once for all heads; ours makes the first scores there, those of all other
    heads in the loop. What stands at the end of a step is counted with each of its items.
    """
    yield "| kernel | blocks | bundles | matrix unit | outside | spills |"
    yield "|---|---|---|---|---|---|"
    build = "experiments.kernels:"
    peers = [
        Job(build + "splash", {"length": 2048, "block_q": q, "block_kv": kv, "block_kv_compute": c})
        for q, kv, c in _SPLASH
    ]
    ours = [
        Job(build + "full_head", {"length": 2048, "block_q": q, "block_kv": kv}) for q, kv in _OURS
    ]
    found = collect(chip, [*peers, *ours])
    for (q, kv, compute), evidence in zip(_SPLASH, found, strict=False):
        yield _head_row(f"| splash | {q} x {kv}, {compute} at once", evidence, q, kv)
    for (q, kv), evidence in zip(_OURS, found[len(peers) :], strict=True):
        yield _head_row(f"| memplan | {q} x {kv}", evidence, q, kv)


def _head_row(label: str, evidence: Evidence, block_q: int, block_kv: int) -> str:
    turns, loop = (2048 // block_q) * (2048 // block_kv), outermost(evidence)
    busy = loop.use["MATMUL"] / evidence.capacity["MATMUL"] / loop.bundles
    outside = evidence.bundles - loop.bundles
    return f"{label} | {turns * loop.bundles:,} | {busy:.0%} | {outside:,} | {evidence.spills:,} |"


def outermost(evidence: Evidence) -> Region:
    """The loop that a kernel's time is spent in; the whole kernel if it turns but once."""
    return max(evidence.loops(), key=lambda region: region.bundles, default=evidence.regions[0])


def full_head_bundles(chip: str, block_q: int, block_kv: int) -> tuple[int, int]:
    """Bundles of our loop for the same head, and registers spilled.

    Counted as by `against_splash`.
    """
    arguments = {"length": 2048, "block_q": block_q, "block_kv": block_kv}
    (evidence,) = collect(chip, [Job("experiments.kernels:full_head", arguments)])
    turns = (2048 // block_q) * (2048 // block_kv)
    return turns * outermost(evidence).bundles, evidence.spills


def full_head(
    target: Topology, *, length: int, block_q: int, block_kv: int
) -> tuple[Callable[..., Any], tuple[Any, ...], str]:
    """The forward kernel of one head of 128 that sees everything."""
    problem = Problem(1, length, length, 1, 1, 128, "bfloat16", Band(), 128**-0.5)
    config = kernel_tpu.Config(block_q, block_kv)
    chip = TPUS[target.machine.name.removeprefix("tpu-")]
    size = int(0.9 * chip.vmem_bytes)
    head = jax.ShapeDtypeStruct((1, length, 1, 128), jnp.bfloat16, sharding=target.sharding())

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return kernel_tpu.forward(problem, config, Launch(chip.cores, size, 0), q, k, v, None)[0]

    return forward, (head,) * 3, "attention_forward"


def shape_rows(chip: str) -> Iterator[str]:
    """Every shape of attention on a TPU, forward and backward: lines of a table in Markdown.

    Bytes are what the kernel's buffers take, and what is stored of spilled registers, each time
    it is; cycles are what `tuning` predicts for the problem, the share that of the least that its
    matrix products could take at the machine's peak.
    """
    yield "| shape | kernel | blocks | cycles, predicted | of peak | VMEM | spilled | bundles |"
    yield "|---|---|---|---|---|---|---|---|"
    build, machine = "experiments.kernels:attention_shape", load_machine(chip)
    for shape in SHAPES:
        problem = shape_problem(shape)
        for kernel in ("forward", "backward"):
            job = Job(build, {"name": shape.name, "kernel": kernel})
            (evidence,) = collect(chip, [job])
            choose, scratch, products = _KERNELS[kernel]
            config, launch = choose(problem, TPUS[chip])
            flops = products * 2 * problem.head_dim * visible_pairs(problem)
            least = flops / dict(machine.peak_flops)["bf16"] * machine.clock_hz
            fill = f"{format_bytes(vmem_total(scratch(problem, config)))} "
            spilled = evidence.spills * 4096
            yield (
                f"| {shape.name} | {kernel} | {config.block_q} x {config.block_kv} "
                f"| {launch.cycles:,} | {least / launch.cycles:.0%} | {fill} "
                f"| {format_bytes(spilled)} | {evidence.bundles:,} |"
            )


def hopper_rows() -> Iterator[str]:
    """Every shape of attention on an H200: lines of a table in Markdown."""
    yield "| shape | kernel | registers | spilled, bytes | SMEM, bytes | asynchronous |"
    yield "|---|---|---|---|---|---|"
    for shape in SHAPES:
        function, arguments = kernel_programs.gradient(shape)
        for kernel in gpu_evidence(function, *arguments):
            yield (
                f"| {shape.name} | {kernel.name} | {kernel.registers} "
                f"| {kernel.spill_store_bytes + kernel.spill_load_bytes} "
                f"| {kernel.smem_bytes:,} | {'no' if kernel.serialised else 'yes'} |"
            )


def shape_problem(shape: Shape) -> Problem:
    """The problem that `attention` makes of a shape."""
    _, (q, k, v, *_) = kernel_programs.gradient(shape)
    problem = problem_of(q, k, v, **shape.options)
    return dataclasses.replace(problem, segments=bool(shape.segment_lens))


def visible_pairs(problem: Problem) -> int:
    """Pairs of query and key that see each other, of all heads; segments not looked at."""
    band, at = problem.band, np.arange(problem.q_len) + problem.band.offset
    first = np.zeros_like(at) if band.left is None else at - band.left
    last = np.full_like(at, problem.kv_len) if band.right is None else at + band.right + 1
    seen = np.clip(last, 0, problem.kv_len) - np.clip(first, 0, problem.kv_len)
    return problem.batch * problem.q_heads * int(np.maximum(seen, 0).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", nargs="*", metavar="CHIP")
    parser.add_argument("--splash", nargs="*", metavar="CHIP")
    parser.add_argument("--shapes", nargs="*", metavar="CHIP")
    options = parser.parse_args()
    for chip in options.shapes or ():
        print(f"\n{chip}\n")
        for row in hopper_rows() if chip == "h200" else shape_rows(chip):
            print(row, flush=True)
    if options.tune is not None:
        tune(options.tune or TPUS)
    for chip in options.splash or ():
        print(f"\n{chip}\n")
        for row in against_splash(chip):
            print(row, flush=True)


if __name__ == "__main__":
    main()
