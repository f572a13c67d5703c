"""What do XLA's fusions leave of LayerNorm ─► Linear ─► GeLU ─► Linear, on a TPU v5e and an H200?

    python -m experiments.fusion [--models gpt2 llama-7b] [--targets v5e h200]

8 x 1,024 tokens in bfloat16, the normalization in float32, forward alone and with the gradients
of all arguments; weights stored as they are multiplied (``[in, out]``), the other way round
(``[out, in]``), and the latter with ``memplan.jit(layouts="all")``. Compiled by the real
compilers; nothing is run. Two Markdown tables:

    bytes   to and from HBM in a step, read + written: without fusions, as XLA compiled it, at the
            least (`hlo_passes.fusion_traffic`)
    pairs   of kernels that still hand each other an array through HBM, and why
            (`hlo_passes.fusion_pairs`); those that would save a hundredth of the step's bytes
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

import memplan
from hlo_passes.fusion_pairs import FusionPair, fusion_pairs
from hlo_passes.fusion_traffic import HbmBytes, fusion_traffic
from hlo_passes.ir import Instruction, Module
from hlo_passes.units import format_bytes
from memplan.topologies import topology

type Stored = Literal["[in, out]", "[out, in]", "[out, in], layouts"]

BATCH, TOKENS = 8, 1024
WIDTHS = {"gpt2": (768, 3072), "llama-7b": (4096, 16384)}

_EPSILON = 1e-5
# Of a step's bytes: what saves less is in no row.
_WORTH_A_ROW = 0.01


class Case(NamedTuple):
    """One program.

    Attributes:
      model: a key of `WIDTHS`.
      target: a topology's name.
      stored: how the weights lie.
      backward: whether gradients are part of it.
    """

    model: str
    target: str
    stored: Stored
    backward: bool

    @property
    def cells(self) -> tuple[str, ...]:
        return (
            self.model,
            self.target,
            "forward + backward" if self.backward else "forward",
            self.stored,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(WIDTHS), choices=list(WIDTHS))
    parser.add_argument("--targets", nargs="+", default=["v5e", "h200"])
    options = parser.parse_args()
    cases = [
        Case(model, target, stored, backward)
        for model in options.models
        for target in options.targets
        for backward in (False, True)
        for stored in get_args(Stored.__value__)
    ]
    modules = {case: compiled(case) for case in cases}
    of = ("model", "target", "", "weights")
    bytes_ = (*of, "without fusions", "as compiled", "at the least", "pairs left")
    _write(bytes_, (totals(c, m) for c, m in modules.items()))
    print()
    pairs = (*of, "saves", "array", "written by", "read by", "because")
    _write(pairs, (row for c, m in modules.items() for row in left(c, m)))


def block(params: Any, x: jax.Array, *, transposed: bool) -> jax.Array:
    """LayerNorm ─► Linear ─► GeLU ─► Linear.

    Args:
      params: ``scale, bias`` [d]; ``up`` [d, h], ``down`` [h, d], or each the other way round;
        ``up_bias`` [h], ``down_bias`` [d].
      x: [batch, tokens, d].
    """
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(variance + _EPSILON)
    normal = (normal * params["scale"] + params["bias"]).astype(x.dtype)
    product = "bti,oi->bto" if transposed else "bti,io->bto"
    hidden = jax.nn.gelu(jnp.einsum(product, normal, params["up"]) + params["up_bias"])
    return jnp.einsum(product, hidden, params["down"]) + params["down_bias"]


def program(backward: bool, transposed: bool) -> Callable[..., Any]:
    """The block, or the block and its gradients for a gradient of its result."""

    def forward(params: Any, x: jax.Array) -> jax.Array:
        return block(params, x, transposed=transposed)

    def both(params: Any, x: jax.Array, gradient: jax.Array) -> tuple[jax.Array, Any]:
        y, pull = jax.vjp(forward, params, x)
        return y, pull(gradient)

    return both if backward else forward


def compiled(case: Case) -> Module:
    """The final module."""
    d, h = WIDTHS[case.model]
    transposed = case.stored != "[in, out]"
    sizes = {"scale": (d,), "bias": (d,), "up_bias": (h,), "down_bias": (d,)}
    sizes |= {"up": (h, d), "down": (d, h)} if transposed else {"up": (d, h), "down": (h, d)}
    params = {name: jax.ShapeDtypeStruct(size, jnp.bfloat16) for name, size in sizes.items()}
    x = jax.ShapeDtypeStruct((BATCH, TOKENS, d), jnp.bfloat16)
    args = (params, x, x) if case.backward else (params, x)
    layouts = "all" if case.stored.endswith("layouts") else None
    step = memplan.jit(
        program(case.backward, transposed), machine=topology(case.target), layouts=layouts
    )
    return step.lower(*args).compile().module


def totals(case: Case, module: Module) -> tuple[str, ...]:
    """A row of the first table."""
    found = fusion_traffic(module)
    pairs = fusion_pairs(module)
    reasons = dict.fromkeys(p.reason for p in pairs if _is_worth_a_row(p, found.compiled))
    left = (
        f"{reason} {format_bytes(sum(p.saved for p in pairs if p.reason == reason))}"
        for reason in reasons
    )
    columns = (found.unfused, found.compiled, found.bound)
    return *case.cells, *map(_read_and_written, columns), ", ".join(left) or "none"


def left(case: Case, module: Module) -> Iterator[tuple[str, ...]]:
    """Rows of the second table."""
    compiled = fusion_traffic(module).compiled
    for p in fusion_pairs(module):
        if _is_worth_a_row(p, compiled):
            ends = _called(p.producer), _called(p.consumer)
            yield *case.cells, format_bytes(p.saved), str(p.shape), *ends, f"{p.reason}: {p.why}"


def _is_worth_a_row(pair: FusionPair, compiled: HbmBytes) -> bool:
    return pair.saved >= _WORTH_A_ROW * compiled.total


def _read_and_written(found: HbmBytes) -> str:
    return f"{format_bytes(found.read)} + {format_bytes(found.written)}"


def _called(i: Instruction) -> str:
    """By what the user wrote: jit(forward)/dot_general as dot_general."""
    return f"{i.op_name.rpartition('/')[2] or i.opcode} `%{i.name}`"


def _write(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    for cells in (headings, ["---"] * len(headings), *rows):
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
