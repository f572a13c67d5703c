"""What do XLA's fusions leave of an MLP and of attention, on a TPU v5e and an H200?

    python -m experiments.fusion [--programs mlp attention] [--models gpt2 llama-7b]
        [--targets v5e h200]

LayerNorm ─► Linear ─► GeLU ─► Linear, and three projections ─► softmax ─► projection without a
mask, of 8 x 1,024 tokens in bfloat16, forward alone and with the gradients of all arguments;
weights stored as they are multiplied (``[in, out]``), the other way round (``[out, in]``), and
the latter with ``memplan.jit(layouts="all")``. Compiled by the real compilers; nothing is run.
Two tables:

    bytes   to and from HBM in a step, read + written: without fusions, as XLA compiled it, at the
            least (`hlo_passes.fusions.traffic`); what fusions of the pairs left would save, by why
            they are pairs
    pairs   of kernels that still hand each other an array through HBM, and why
            (`hlo_passes.fusions.pairs`); those that look the same and would save a twentieth of
            the step's bytes together
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product, starmap
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from absl import flags

import memplan
from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.fusions.pairs import PairReason, fusion_pairs
from hlo_passes.fusions.traffic import fusion_traffic
from hlo_passes.ir import Instruction, Module
from hlo_passes.units import format_bytes
from memplan.report.tables import Column, Table
from memplan.topologies import topology

type Cells = tuple[str, ...]
type Stored = Literal["[in, out]", "[out, in]", "[out, in], layouts"]

BATCH, TOKENS = 8, 1024


class Widths(NamedTuple):
    """Of one model: the residual stream, the MLP's hidden layer, heads and their width."""

    d: int
    hidden: int
    heads: int
    head: int


MODELS = {"gpt2": Widths(768, 3072, 12, 64), "llama-7b": Widths(4096, 16384, 32, 128)}

_EPSILON = 1e-5
# Of a step's bytes: what saves less is in no row, and in no sum.
_WORTH_A_ROW = 0.05
_WORTH_A_SUM = 0.01


class Case(NamedTuple):
    """One program.

    Attributes:
      program: a key of `PROGRAMS`.
      model: a key of `MODELS`.
      target: a topology's name.
      backward: whether gradients are part of it.
      stored: how the weights lie.
    """

    program: str
    model: str
    target: str
    backward: bool
    stored: Stored


def _define() -> None:
    flags.DEFINE_multi_enum("programs", list(PROGRAMS), list(PROGRAMS), "which")
    flags.DEFINE_multi_enum("models", list(MODELS), list(MODELS), "whose widths")
    flags.DEFINE_multi_string("targets", ["v5e", "h200"], "topologies")


def _rows(rows: Rows) -> Iterator[Row]:
    ways = (False, True), get_args(Stored.__value__)
    for case in starmap(Case, product(FLAGS.programs, FLAGS.models, FLAGS.targets, *ways)):
        yield rows.of(case._asdict(), lambda case=case: measure(compiled(case)))


def measure(module: Module) -> Row:
    """Bytes of the first table, and rows of the second."""
    return {**totals(module), "pairs": list(pairs_left(module))}


def mlp(params: Any, x: jax.Array, *, transposed: bool) -> jax.Array:
    """LayerNorm ─► Linear ─► GeLU ─► Linear; the normalization in float32.

    Args:
      params: as `mlp_params` says.
      x: [batch, tokens, d].
    """
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(variance + _EPSILON)
    normal = (normal * params["scale"] + params["bias"]).astype(x.dtype)
    spec = "bti,oi->bto" if transposed else "bti,io->bto"
    hidden = jax.nn.gelu(jnp.einsum(spec, normal, params["up"]) + params["up_bias"])
    return jnp.einsum(spec, hidden, params["down"]) + params["down_bias"]


def mlp_params(widths: Widths, transposed: bool) -> dict[str, tuple[int, ...]]:
    """Shapes."""
    d, h = widths.d, widths.hidden
    up, down = ((h, d), (d, h)) if transposed else ((d, h), (h, d))
    small = {"scale": (d,), "bias": (d,), "up_bias": (h,), "down_bias": (d,)}
    return {**small, "up": up, "down": down}


def attention(params: Any, x: jax.Array, *, transposed: bool) -> jax.Array:
    """Of all tokens to all tokens, heads outside tokens.

    Args:
      params: as `attention_params` says.
      x: [batch, tokens, d].
    """
    read, written = ("hkd", "dhk") if transposed else ("dhk", "hkd")
    q, k, v = (jnp.einsum(f"btd,{read}->bhtk", x, params[name]) for name in "qkv")
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k) / q.shape[-1] ** 0.5
    context = jnp.einsum("bhts,bhsk->bhtk", jax.nn.softmax(scores), v)
    return jnp.einsum(f"bhtk,{written}->btd", context, params["o"])


def attention_params(widths: Widths, transposed: bool) -> dict[str, tuple[int, ...]]:
    """Shapes."""
    d, _, heads, head = widths
    outer, inner = (d, heads, head), (heads, head, d)
    read, written = (inner, outer) if transposed else (outer, inner)
    return {"q": read, "k": read, "v": read, "o": written}


PROGRAMS = {"mlp": (mlp, mlp_params), "attention": (attention, attention_params)}


def compiled(case: Case) -> Module:
    """The final module."""
    function, shapes = PROGRAMS[case.program]
    widths, transposed = MODELS[case.model], case.stored != "[in, out]"

    def forward(params: Any, x: jax.Array) -> jax.Array:
        return function(params, x, transposed=transposed)

    def both(params: Any, x: jax.Array, gradient: jax.Array) -> tuple[jax.Array, Any]:
        y, pull = jax.vjp(forward, params, x)
        return y, pull(gradient)

    params = {
        name: jax.ShapeDtypeStruct(size, jnp.bfloat16)
        for name, size in shapes(widths, transposed).items()
    }
    x = jax.ShapeDtypeStruct((BATCH, TOKENS, widths.d), jnp.bfloat16)
    layouts = "all" if case.stored.endswith("layouts") else None
    step = memplan.jit(
        both if case.backward else forward, machine=topology(case.target), layouts=layouts
    )
    return step.lower(*((params, x, x) if case.backward else (params, x))).compile().module


def totals(module: Module) -> Row:
    """Bytes read and written, and what fusions would save, by the reason why there is none."""
    found = fusion_traffic(module)
    saved: Counter[PairReason] = Counter()
    for pair in fusion_pairs(module):
        saved[pair.reason] += pair.saved
    return {
        "unfused": found.unfused,
        "compiled": found.compiled,
        "bound": found.bound,
        "saves": dict(saved.most_common()),
    }


def pairs_left(module: Module) -> Iterator[Row]:
    """What stands in the second table, those that save most first."""
    saved: defaultdict[Cells, list[int]] = defaultdict(list)
    for p in fusion_pairs(module):
        # Of names of instructions nobody knows what they stand for.
        why = p.reason if p.reason in ("layout", "opaque") else f"{p.reason}: {p.why}"
        saved[str(p.shape), _called(p.producer), _called(p.consumer), why].append(p.saved)
    worth = _WORTH_A_ROW * fusion_traffic(module).compiled.total
    for what, sizes in sorted(saved.items(), key=lambda row: -sum(row[1])):
        if sum(sizes) >= worth:
            yield {"pairs": len(sizes), "saves": sum(sizes), "what": what}


def _called(i: Instruction) -> str:
    """By what the user wrote: jit(forward)/dot_general as dot_general."""
    return i.op_name.rpartition("/")[2] or i.opcode


def _tables(rows: Sequence[Row]) -> list[Table]:
    of = (Column("program"), Column("target"), Column(""), Column("weights"))
    bytes_ = [Column(c, right=True) for c in ("without fusions", "as compiled", "at the least")]
    pairs = map(Column, ("array", "written by", "read by", "because"))
    totals = _merged((row, _total_cells(row)) for row in rows)
    left = {way: _merged(_pairs(rows, way == "backward")) for way in ("forward", "backward")}
    columns = (*of, Column("saves", right=True), *pairs)
    return [
        Table("Bytes to and from HBM", (*of, *bytes_, Column("pairs left")), tuple(totals)),
        *(Table(f"Pairs left, {way}", columns, tuple(cells)) for way, cells in left.items()),
    ]


def _pairs(rows: Sequence[Row], backward: bool) -> Iterator[tuple[Row, Cells]]:
    for row in rows:
        for pair in row["pairs"] if row["backward"] == backward else ():
            times = f"{pair['pairs']} pairs, " if pair["pairs"] > 1 else ""
            yield row, (times + format_bytes(pair["saves"]), *pair["what"])


def _total_cells(row: Row) -> Cells:
    worth = _WORTH_A_SUM * sum(row["compiled"])
    left = [f"{reason} {format_bytes(n)}" for reason, n in row["saves"].items() if n >= worth]
    columns = (row["unfused"], row["compiled"], row["bound"])
    both = (f"{format_bytes(read)} + {format_bytes(written)}" for read, written in columns)
    return *both, ", ".join(left) or "none"


def _merged(rows: Iterable[tuple[Row, Cells]]) -> Iterator[Cells]:
    """One row for all ways to store the weights of which the same can be said."""
    found: defaultdict[tuple[Cells, Cells], list[str]] = defaultdict(list)
    for row, cells in rows:
        way = "forward + backward" if row["backward"] else "forward"
        of = (f"{row['program']}, {row['model']}", row["target"], way)
        found[of, cells].append(row["stored"])
    for (of, cells), stored in found.items():
        is_all = len(stored) == len(get_args(Stored.__value__))
        yield *of, "all" if is_all else "; ".join(stored), *cells


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
