"""Attention on a TPU beside jax's splash attention, by the bundles of both."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash_kernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

from memplan.kernels.evidence_tpu import KernelEvidence, Program, tpu_evidence
from pallas_kernels.attention import kernel_tpu
from pallas_kernels.attention.problem import Band, Problem
from pallas_kernels.targets import TPUS
from pallas_kernels.tpu import Launch

_LENGTH = 2048
# Blocks of splash attention, of which the best is compared with: of queries, of keys, and of
# keys at once.
_SPLASH = (
    (2048, 2048, 1024),
    (1024, 2048, 1024),
    (1024, 2048, 512),
    (2048, 2048, 512),
    (512, 2048, 512),
)
_OURS = ((1024, 1024), (1024, 2048), (2048, 2048))


def against_splash(chip: str) -> Iterator[str]:
    """A head of 2048 x 2048 x 128, all of it seen, by both: lines of a table in Markdown.

    Bundles are those of the kernel's outermost loop, as often as it turns for a head. What is
    outside of it runs once for all heads; ours makes the first scores there, those of all other
    heads in the loop. What stands at the end of a step is counted with each of its items.
    """
    yield "| kernel | blocks | bundles | matrix unit | outside | spills |"
    yield "|---|---|---|---|---|---|"
    theirs = [_splash(*blocks) for blocks in _SPLASH]
    found = tpu_evidence([*theirs, *(full_head(chip, *blocks) for blocks in _OURS)], chip)
    for (q, kv, compute), (evidence,) in zip(_SPLASH, found, strict=False):
        yield _row(f"| splash | {q} x {kv}, {compute} at once", evidence, q, kv)
    for (q, kv), (evidence,) in zip(_OURS, found[len(_SPLASH) :], strict=True):
        yield _row(f"| memplan | {q} x {kv}", evidence, q, kv)


def _row(label: str, evidence: KernelEvidence, block_q: int, block_kv: int) -> str:
    loop = evidence.outermost
    busy = loop.use["MATMUL"] / evidence.capacity["MATMUL"] / loop.bundles
    outside = evidence.bundles - loop.bundles
    bundles = head_bundles(evidence, block_q, block_kv)
    return f"{label} | {bundles:,} | {busy:.0%} | {outside:,} | {evidence.spills:,} |"


def head_bundles(evidence: KernelEvidence, block_q: int, block_kv: int) -> int:
    """Of the outermost loop, for all of a head."""
    return (_LENGTH // block_q) * (_LENGTH // block_kv) * evidence.outermost.bundles


def full_head(chip: str, block_q: int, block_kv: int) -> Program:
    """Our forward kernel of one head of 128 that sees everything."""
    problem = Problem(1, _LENGTH, _LENGTH, 1, 1, 128, "bfloat16", Band(), 128**-0.5)
    launch = Launch(TPUS[chip].cores, int(0.9 * TPUS[chip].vmem_bytes), 0)
    config = kernel_tpu.Config(block_q, block_kv)
    head = jax.ShapeDtypeStruct((1, _LENGTH, 1, 128), jnp.bfloat16)
    function = partial(kernel_tpu.forward, problem, config, launch, segments=None)
    return function, (head,) * 3


def _splash(block_q: int, block_kv: int, block_kv_compute: int) -> Program:
    """jax's kernel of the same head."""
    blocks = splash_kernel.BlockSizes(
        block_q=block_q, block_kv=block_kv, block_kv_compute=block_kv_compute
    )
    head = jax.ShapeDtypeStruct((1, _LENGTH, 128), jnp.bfloat16)
    return partial(_run_splash, blocks), (head,) * 3


def _run_splash(blocks: splash_kernel.BlockSizes, *qkv: jax.Array) -> Any:
    mask = splash_mask.MultiHeadMask([splash_mask.FullMask((_LENGTH, _LENGTH))])
    kernel = splash_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=blocks)
    return kernel(*qkv)
