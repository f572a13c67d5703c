"""Which blocks attention takes on a TPU: the fastest that fit, by what the compiler made of some.

`tpu_bundles.json` holds, for each chip, how many instruction bundles the compiler needed for the
parts of the kernels' loops with some blocks (made by ``python -m experiments.kernels --tune``).
Between these the parts are interpolated, in terms that follow the work: products grow with the
pairs of a block, softmax and stores with its rows and columns. What a problem takes is then
counted exactly, item by item, and the least is chosen:

    bundles = full items (turn + full) + masked items (turn + masked) + ends close

A bundle is a clock cycle where no copy is waited for; copies are hidden as long as the blocks are
large enough.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import kernel_tpu, kernel_tpu_backward
from pallas_kernels.attention.blocks import Counts, count_items
from pallas_kernels.attention.problem import Problem
from pallas_kernels.onchip import vmem_total
from pallas_kernels.targets import Chip
from pallas_kernels.tpu import LANES, Launch, pad_up

# Of VMEM, for a kernel's buffers; XLA holds what it prefetches for others in the rest.
_SHARE = 0.6
# Spills are interpolated: bytes that are allowed for them, besides twice what is expected.
_SPILL_LEAST, _SPILL_MARGIN = 1 << 20, 2
_BLOCKS = (256, 512, 1024, 2048)


@dataclass(frozen=True)
class Bundles:
    """Instruction bundles of the parts of a kernel's loop, of some blocks.

    Attributes:
      full, masked: an item's products and softmax, without and with a mask.
      turn: what each item takes besides.
      close: what each row block takes at its end.
      spills: bytes of VMEM that the compiler takes for registers, besides the kernel's own.
    """

    full: float
    masked: float
    turn: float
    close: float
    spills: float

    def total(self, counts: Counts) -> float:
        """Of a whole problem."""
        items = counts.full + counts.masked
        return (
            counts.full * self.full
            + counts.masked * self.masked
            + items * self.turn
            + counts.rows * self.close
        )


def forward_choice(problem: Problem, chip: Chip) -> tuple[kernel_tpu.Config, Launch]:
    """The fastest blocks of the forward kernel that fit."""
    return _fastest(problem, chip, "forward", forward_candidates(problem, chip))


def backward_choice(problem: Problem, chip: Chip) -> tuple[kernel_tpu_backward.Config, Launch]:
    """The fastest blocks of the backward kernel that fit."""
    return _fastest(problem, chip, "backward", backward_candidates(problem, chip))


def forward_candidates(problem: Problem, chip: Chip) -> Iterator[tuple[kernel_tpu.Config, int]]:
    """Blocks that leave room for others in VMEM, and bytes."""
    for block_q in _sizes(problem.q_len, 2 * LANES):
        for block_kv in _sizes(problem.kv_len, LANES):
            config = kernel_tpu.Config(block_q, block_kv)
            size = vmem_total(kernel_tpu.scratch(problem, config))
            if size <= _SHARE * chip.vmem_bytes:
                yield config, size


def backward_candidates(
    problem: Problem, chip: Chip
) -> Iterator[tuple[kernel_tpu_backward.Config, int]]:
    """Blocks that leave room for others in VMEM, and bytes."""
    for block_q in _sizes(problem.q_len, LANES):
        for block_kv in _sizes(problem.kv_len, LANES):
            chunk = max(c for c in (128, 256) if block_kv % c == 0)
            config = kernel_tpu_backward.Config(block_q, block_kv, chunk)
            size = vmem_total(kernel_tpu_backward.scratch(problem, config, jnp.float32))
            if size <= _SHARE * chip.vmem_bytes:
                yield config, size


def backward_parts(problem: Problem, chip: Chip) -> int:
    """Into how many parts queries and keys have to be taken apart for their sums to fit."""
    parts = 1
    while True:
        q_len, kv_len = -(-problem.q_len // parts), -(-problem.kv_len // parts)
        part = dataclasses.replace(problem, q_len=q_len, kv_len=kv_len)
        if any(True for _ in backward_candidates(part, chip)):
            return parts
        parts += 1


def _sizes(length: int, multiple: int) -> list[int]:
    """Block sizes for a length: powers of two, and what cuts it into few equal blocks."""
    whole = pad_up(length, multiple)
    equal = {pad_up(-(-length // n), multiple) for n in range(1, 9)}
    sizes = {size for size in (*equal, *_BLOCKS) if multiple <= size <= min(whole, max(_BLOCKS))}
    return sorted(sizes)


def _fastest[Config: (kernel_tpu.Config, kernel_tpu_backward.Config)](
    problem: Problem, chip: Chip, kernel: str, candidates: Iterator[tuple[Config, int]]
) -> tuple[Config, Launch]:
    predict = predictor(chip.generation, kernel, _width(problem.head_dim), problem.dtype)

    def cost(candidate: tuple[Config, int]) -> float:
        config, _ = candidate
        rows = "queries" if kernel == "forward" else "keys"
        counts = count_items(problem, config.block_q, config.block_kv, rows)
        return predict(config.block_q, config.block_kv).total(counts)

    config, size = best = min(candidates, key=cost)
    spills = predict(config.block_q, config.block_kv).spills
    limit = size + int(_SPILL_MARGIN * spills) + _SPILL_LEAST
    # What is dealt to the cores: steps forward, whole key/value heads backward.
    units = problem.batch * problem.kv_heads
    if kernel == "forward":
        units = problem.batch * problem.q_heads * -(-problem.q_len // config.block_q)
    most = -(-units // chip.cores) / units
    return config, Launch(chip.cores, limit, int(cost(best) * most))


def _width(head_dim: int) -> int:
    """The measured head width that stands for one."""
    return 64 if head_dim == 64 else pad_up(head_dim, LANES)


@cache
def predictor(
    generation: str, kernel: str, width: int, dtype: str
) -> Callable[[int, int], Bundles]:
    """Bundles of any blocks, by least squares over those that were compiled."""
    alike = [
        row
        for row in _table()
        if (row["chip"], row["kernel"], row["dtype"]) == (generation, kernel, dtype)
    ]
    # Not every width is measured in every type.
    nearest = min((row["head_dim"] for row in alike), key=lambda w: abs(w - width))
    rows = [row for row in alike if row["head_dim"] == nearest]
    terms = np.array([_terms(row["block_q"], row["block_kv"]) for row in rows])
    parts = ("full", "masked", "turn", "close", "spills")
    fits = {}
    for part in parts:
        measured = np.array([row[part] for row in rows], float)
        # Relative errors count: small blocks are as much asked for as large ones.
        weights = 1 / np.maximum(measured, 1)
        fits[part] = np.linalg.lstsq(terms * weights[:, None], measured * weights, rcond=None)[0]

    def predict(block_q: int, block_kv: int) -> Bundles:
        at = _terms(block_q, block_kv)
        return Bundles(*(max(float(at @ fits[part]), 0.0) for part in parts))

    return predict


def _terms(block_q: int, block_kv: int) -> Any:
    return np.array([1.0, block_q, block_kv, block_q * block_kv / 1024])


@cache
def _table() -> Sequence[dict[str, Any]]:
    text = (files("pallas_kernels.attention") / "tpu_bundles.json").read_text(encoding="utf-8")
    return json.loads(text)["rows"]
