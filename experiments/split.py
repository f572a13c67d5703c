"""Parts of a program in chunks: what memplan makes of it, beside what is written by hand.

    python -m experiments.split [--program vit] [--target v5e] [--json FILE [--resume | --show]]

Programs whose largest arrays nobody needs as a whole:

vit           ViT-B/16, 4 layers, 1,024 images, forward
loss          the logits of 128,256 words for 8,192 tokens, their loss, and both gradients
attention     16 heads over 32,768 tokens, no kernel
mlp           4,096 wide on 65,536 tokens, and the gradients of both weights

Each is compiled by the target's own compiler: plain; by hand, in a loop over 4, 16 and 64 chunks,
as is done where no library helps; and by memplan, which is told no name and no chunk, within the
bytes that each of those takes. Bytes are XLA's report of the executables. Step times are
predictions of the machine model for their schedules. Nothing is run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from jax import lax

from experiments.isolated import Failure, isolated
from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.reading.reader import read_module
from hlo_passes.simulator.cost import instruction_costs
from hlo_passes.simulator.timeline import schedule_events, simulate
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import jit
from memplan.compiled import Compiled
from memplan.executable import Executable, device_bytes
from memplan.report.tables import Column, Table
from memplan.topologies import topology
from models.vit import VIT_B16_4L
from models.workloads import vit_forward

_PARTS = (4, 16, 64)
_TIMEOUT_S = 900.0
_UNLIMITED = "1TiB"

_COLUMNS = (
    Column("program"),
    Column("target"),
    Column("way"),
    Column("within", right=True),
    Column("on the device", right=True),
    Column("of plain", right=True),
    Column("a step", right=True),
    Column("of plain", right=True),
    Column("chunks"),
)

type Program = tuple[Callable[..., Any], Callable[[int], Callable[..., Any]], tuple[Any, ...]]
"""A function, the same by hand in so many chunks, and its arguments."""


# --- programs -------------------------------------------------------------------------------


def _vit() -> Program:
    forward, args = vit_forward(VIT_B16_4L, batch=1024)

    def by_hand(parts: int) -> Callable[..., Any]:
        def function(params: Any, images: Any) -> Any:
            chunks = images.reshape(parts, -1, *images.shape[1:])
            logits = lax.map(lambda chunk: forward(params, chunk), chunks)
            return logits.reshape(-1, logits.shape[-1])

        return function

    return forward, by_hand, args


def _loss() -> Program:
    def loss(x: Any, head: Any, labels: Any) -> Any:
        logits = jnp.dot(x, head, preferred_element_type=jnp.float32)
        scores = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], 1))

    both = jax.value_and_grad(loss, argnums=(0, 1))

    def by_hand(parts: int) -> Callable[..., Any]:
        def function(x: Any, head: Any, labels: Any) -> Any:
            def chunk(carry: Any, given: Any) -> Any:
                x, labels = given
                value, (dx, dhead) = both(x, head, labels)
                return (carry[0] + value, carry[1] + dhead.astype(jnp.float32)), dx

            begin = jnp.zeros((), jnp.float32), jnp.zeros(head.shape, jnp.float32)
            chunks = x.reshape(parts, -1, x.shape[-1]), labels.reshape(parts, -1)
            (total, dhead), dx = lax.scan(chunk, begin, chunks)
            dx = (dx.astype(jnp.float32) / parts).astype(x.dtype).reshape(x.shape)
            return total / parts, (dx, (dhead / parts).astype(head.dtype))

        return function

    args = (
        jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16),
        jax.ShapeDtypeStruct((2048, 128_256), jnp.bfloat16),
        jax.ShapeDtypeStruct((8192,), jnp.int32),
    )
    return both, by_hand, args


def _attention() -> Program:
    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores / q.shape[-1] ** 0.5).astype(v.dtype)
        return jnp.einsum("hqk,khd->qhd", weights, v)

    def by_hand(parts: int) -> Callable[..., Any]:
        def function(q: Any, k: Any, v: Any) -> Any:
            chunks = q.reshape(parts, -1, *q.shape[1:])
            return lax.map(lambda chunk: attention(chunk, k, v), chunks).reshape(q.shape)

        return function

    return attention, by_hand, (jax.ShapeDtypeStruct((32_768, 16, 128), jnp.bfloat16),) * 3


def _mlp() -> Program:
    def loss(weights: Any, x: Any) -> Any:
        up, down = weights
        return jnp.sum((jax.nn.gelu(x @ up) @ down).astype(jnp.float32) ** 2)

    def by_hand(parts: int) -> Callable[..., Any]:
        def function(weights: Any, x: Any) -> Any:
            def chunk(carry: Any, x: Any) -> Any:
                found = jax.value_and_grad(loss)(weights, x)
                return jax.tree.map(lambda a, b: a + b.astype(a.dtype), carry, found), None

            zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
            begin = jnp.zeros((), jnp.float32), zeros
            (total, grads), _ = lax.scan(chunk, begin, x.reshape(parts, -1, x.shape[-1]))
            return total, jax.tree.map(lambda g, w: g.astype(w.dtype), grads, weights)

        return function

    weights = tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1024, 4096), (4096, 1024)))
    args = weights, jax.ShapeDtypeStruct((65_536, 1024), jnp.bfloat16)
    return jax.value_and_grad(loss), by_hand, args


PROGRAMS: Mapping[str, Callable[[], Program]] = {
    "vit": _vit,
    "loss": _loss,
    "attention": _attention,
    "mlp": _mlp,
}


# --- measuring ------------------------------------------------------------------------------


def _define() -> None:
    flags.DEFINE_multi_enum("program", list(PROGRAMS), list(PROGRAMS), "which")
    flags.DEFINE_multi_string("target", ["v5e", "h200"], "topologies")


def _rows(rows: Rows) -> Iterator[Row]:
    for target in FLAGS.target:
        for program in FLAGS.program:
            case = {"program": program, "target": target}
            of = functools.partial(_row, rows, case)
            yield of({"way": "plain"}, _by_hand, 0)
            for parts in _PARTS:
                row = of({"way": "by hand", "parts": parts}, _by_hand, parts)
                yield row
                if "failure" not in row:
                    within = row["bytes"]
                    yield of({"way": "memplan", "within": within}, _planned, within)


def _row(
    rows: Rows, case: Row, way: Row, measure: Callable[[str, str, int], Row], number: int
) -> Row:
    def measured() -> Row:
        args = case["program"], case["target"], number
        found = isolated(measure, *args, timeout_s=_TIMEOUT_S)
        return {"failure": found.reason} if isinstance(found, Failure) else found

    return rows.of({**case, **way}, measured)


def _by_hand(program: str, target: str, parts: int) -> Row:
    """A program as it is, or in so many chunks, as ``jax.jit`` compiles it."""
    jax.config.update("jax_platforms", "cpu")
    function, by_hand, args = PROGRAMS[program]()
    function = by_hand(parts) if parts else function
    executable = jit(function, hbm=_UNLIMITED, machine=topology(target)).lower(*args).unplanned()
    return {"bytes": device_bytes(executable, 0), "step_s": _step_s(executable, target)}


def _planned(program: str, target: str, within: int) -> Row:
    jax.config.update("jax_platforms", "cpu")
    function, _, args = PROGRAMS[program]()
    planned = jit(function, hbm=within, split=True, machine=topology(target))
    lowered = planned.lower(*args)
    try:
        compiled: Compiled = lowered.compile()
    except MemoryBudgetError as error:
        return {"failure": f"refused; the planner's least: {format_bytes(error.least)}"}
    return {
        "bytes": compiled.device_bytes,
        "step_s": _seconds(compiled.module, target),
        "chunks": [f"{s.parts} of dimension {s.dimension}" for s in compiled.splits],
    }


def _step_s(executable: Executable, target: str) -> float:
    return _seconds(read_module(executable), target)


def _seconds(module: Any, target: str) -> float:
    machine = topology(target).machine
    events = schedule_events(module, instruction_costs(module, machine), machine)
    return simulate(events, machine).step_time_s


# --- tables ---------------------------------------------------------------------------------


def _tables(rows: Sequence[Row]) -> list[Table]:
    plain = {(r["program"], r["target"]): r for r in rows if r["way"] == "plain"}
    cells = tuple(tuple(_cells(r, plain[r["program"], r["target"]])) for r in rows)
    return [Table("In chunks", _COLUMNS, cells)]


def _cells(row: Row, plain: Row) -> Iterator[str]:
    yield row["program"]
    yield row["target"]
    yield row["way"]
    yield format_bytes(row["within"]) if "within" in row else ""
    if "failure" in row:
        yield from ("–",) * 4
        yield row["failure"]
        return
    has_plain = "failure" not in plain
    yield format_bytes(row["bytes"])
    yield f"{row['bytes'] / plain['bytes']:.1%}" if has_plain else ""
    yield format_seconds(row["step_s"])
    yield f"{row['step_s'] / plain['step_s']:.3f}" if has_plain else ""
    yield "; ".join(row.get("chunks", ())) or (str(row["parts"]) if "parts" in row else "")


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
