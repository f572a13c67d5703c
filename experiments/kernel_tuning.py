"""Bundles of attention's loops with some blocks, from which `tuning` chooses on a TPU."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from memplan.kernels.evidence_tpu import KernelEvidence, Program, tpu_evidence
from pallas_kernels.attention import kernel_tpu, kernel_tpu_backward
from pallas_kernels.attention.problem import Band, Problem
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
# The compiler takes 72 KiB for itself, and says only that where there is not even room for it.
_COMPILERS_BYTES = 128 << 10
_WIDTHS = ((64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16"), (128, "float32"))


@dataclass(frozen=True)
class Blocks:
    """One causal head of two blocks by two, so that some items have a mask and some have none.

    Attributes:
      kernel: "forward" or "backward".
    """

    kernel: str
    block_q: int
    block_kv: int
    head_dim: int
    dtype: str

    @property
    def problem(self) -> Problem:
        length, band = 2 * max(self.block_q, self.block_kv), Band(None, 0, 0)
        return Problem(
            1, length, length, 1, 1, self.head_dim, self.dtype, band, self.head_dim**-0.5
        )

    @property
    def config(self) -> Any:
        if self.kernel == "forward":
            return kernel_tpu.Config(self.block_q, self.block_kv)
        chunk = min(256, self.block_kv)
        return kernel_tpu_backward.Config(self.block_q, self.block_kv, chunk)

    @property
    def own_bytes(self) -> int:
        """Of VMEM, for the kernel's buffers."""
        if self.kernel == "forward":
            return vmem_total(kernel_tpu.scratch(self.problem, self.config))
        scratch = kernel_tpu_backward.scratch(self.problem, self.config, jnp.dtype(self.dtype))
        return vmem_total(scratch)

    def program(self, chip: str, limit: int) -> Program:
        """The kernel alone.

        Args:
          limit: bytes of VMEM. With little more than its buffers take, the compiler says what it
            needs for spilled registers, if it spills any.
        """
        shape = (1, self.problem.q_len, 1, self.head_dim)
        whole = jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))
        row = jax.ShapeDtypeStruct((1, 1, self.problem.q_len), jnp.float32)
        static = (self.problem, self.config, Launch(TPUS[chip].cores, limit, 0))
        if self.kernel == "forward":
            return partial(kernel_tpu.forward, *static, segments=None), (whole,) * 3
        function = partial(_backward, *static)
        return function, (whole, whole, whole, row, row, whole)


def _backward(
    problem: Problem, config: Any, launch: Launch, q: Any, k: Any, v: Any, *rows: Any
) -> Any:
    return kernel_tpu_backward.backward(problem, config, launch, q, k, v, None, *rows)


def tune(chips: Iterable[str]) -> None:
    """Measures blocks on chips, and replaces their rows in the file that the kernels read."""
    table: dict[str, Any] = json.loads(TUNED.read_text()) if TUNED.exists() else {"rows": []}
    for chip in chips:
        rows = list(_measured(chip))
        table["rows"] = [row for row in table["rows"] if row["chip"] != chip] + rows
        table["libtpu"] = version("libtpu")
        table["rows"].sort(key=json.dumps)
        lines = ",\n    ".join(json.dumps(row) for row in table["rows"])
        TUNED.write_text(
            f'{{\n  "libtpu": "{table["libtpu"]}",\n  "rows": [\n    {lines}\n  ]\n}}\n'
        )


def _measured(chip: str) -> Iterator[dict[str, Any]]:
    roomy = int(0.9 * TPUS[chip].vmem_bytes)
    for head_dim, dtype in _WIDTHS:
        scale = max(1, head_dim // 128) * (2 if dtype == "float32" else 1)
        sizes = [(q, kv) for q, kv in _BLOCKS if q * kv * scale <= 1 << 21]
        for kernel in ("forward", "backward"):
            tried = [Blocks(kernel, q, kv, head_dim, dtype) for q, kv in sizes]
            programs = [
                blocks.program(chip, limit)
                for blocks in tried
                for limit in (blocks.own_bytes + _COMPILERS_BYTES, roomy)
            ]
            found = tpu_evidence(programs, chip)
            for blocks, (tight,), (most,) in zip(tried, found[::2], found[1::2], strict=True):
                spills = _COMPILERS_BYTES
                if tight.exceeded is not None:
                    spills = tight.exceeded - blocks.own_bytes
                row = {"chip": chip, **asdict(blocks), **attention_parts(most)}
                row |= {"own": blocks.own_bytes, "spills": spills}
                print(row, flush=True)
                yield row


def attention_parts(evidence: KernelEvidence) -> dict[str, int]:
    """Bundles of the parts of an attention kernel's loop, as `tuning.Bundles` names them.

    The items are the two regions with matrix products; the one without a mask comes first.
    """
    loop = evidence.outermost
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
