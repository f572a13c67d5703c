"""What the compilers make of the kernels, as a table, without their hardware.

python -m experiments.kernels                    the table
python -m experiments.kernels --tune v6e         compiles blocks, writes tpu_bundles.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from memplan.kernels.evidence_tpu import Evidence, Job, collect
from memplan.topologies import Topology
from pallas_kernels.attention import kernel_tpu, kernel_tpu_backward
from pallas_kernels.attention.problem import Band, Problem
from pallas_kernels.attention.tuning import CHIPS
from pallas_kernels.onchip import vmem_total

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
    chip = CHIPS[target.machine.name.removeprefix("tpu-")]
    sharding = target.sharding()
    whole = jax.ShapeDtypeStruct((1, length, 1, head_dim), dtype, sharding=sharding)
    row = jax.ShapeDtypeStruct((1, 1, length), jnp.float32, sharding=sharding)
    if kernel == "forward":
        config = kernel_tpu.Config(block_q, block_kv)
        size = limit or vmem_total(kernel_tpu.scratch(problem, config))

        def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
            return kernel_tpu.forward(problem, config, chip.cores, size, q, k, v, None)

        return forward, (whole,) * 3, "attention_forward"

    config = kernel_tpu_backward.Config(block_q, block_kv, min(256, block_kv))
    scratch = kernel_tpu_backward.scratch(problem, config, jnp.dtype(dtype))
    size = limit or vmem_total(scratch)

    def backward(q: jax.Array, k: jax.Array, v: jax.Array, lse: Any, delta: Any, d_out: Any) -> Any:
        return kernel_tpu_backward.backward(
            problem, config, chip.cores, size, q, k, v, None, lse, delta, d_out
        )

    return backward, (whole, whole, whole, row, row, whole), "attention_backward"


def attention_parts(evidence: Evidence) -> dict[str, int]:
    """Bundles of the parts of an attention kernel's loop, as `tuning.Bundles` names them.

    The items are the two regions with matrix products: the one without a mask comes first.
    """
    loop = max(evidence.loops(), key=lambda region: region.bundles)
    inside = [r for r in evidence.inside(loop) if r.bundles > 30]
    full, masked = (r.bundles for r in inside if r.use["MATMUL"])
    close = sum(r.bundles for r in inside if not r.use["MATMUL"])
    turn = loop.bundles - full - masked - close
    return {"full": full, "masked": masked, "turn": turn, "close": close}


def tune(chips: Iterable[str]) -> None:
    """Measures blocks on chips, and replaces their rows in the file that the kernels read."""
    table = json.loads(TUNED.read_text()) if TUNED.exists() else {"rows": []}
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
    build, capacity = f"{__name__}:attention_blocks", int(0.9 * CHIPS[chip].vmem_bytes)
    arguments = [
        {"kernel": kernel, "block_q": q, "block_kv": kv, "head_dim": head_dim, "dtype": dtype}
        for q, kv in blocks
    ]
    tight = collect(chip, [Job(build, a) for a in arguments])
    roomy = collect(chip, [Job(build, a | {"limit": capacity}) for a in arguments])
    rows = []
    for a, least, most in zip(arguments, tight, roomy, strict=True):
        own = _own_bytes(a)
        spills = 0 if least.vmem_bytes is None else least.vmem_bytes - own
        row = {"chip": chip, **a, **attention_parts(most), "own": own, "spills": spills}
        print(row, flush=True)
        rows.append(row)
    return rows


def _own_bytes(a: dict[str, Any]) -> int:
    length = 2 * max(a["block_q"], a["block_kv"])
    band = Band(None, 0, 0)
    problem = Problem(1, length, length, 1, 1, a["head_dim"], a["dtype"], band, 1.0)
    if a["kernel"] == "forward":
        return vmem_total(
            kernel_tpu.scratch(problem, kernel_tpu.Config(a["block_q"], a["block_kv"]))
        )
    config = kernel_tpu_backward.Config(a["block_q"], a["block_kv"], min(256, a["block_kv"]))
    return vmem_total(kernel_tpu_backward.scratch(problem, config, jnp.dtype(a["dtype"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", nargs="*", metavar="CHIP")
    options = parser.parse_args()
    if options.tune is not None:
        tune(options.tune or CHIPS)


if __name__ == "__main__":
    main()
