"""How large are the intents of real programs, and what do they say of what is live at the peak?

    python -m experiments.intents [--program ...] [--target v5e h200] [--json FILE]

serve decode   `memplan.serve`'s step for 32 sequences, of 8 layers of a Llama 3 of 8 billion
               parameters with 4,096 pages of 16 tokens
serve chunk    the same for a chunk of 512 tokens of one prompt
train          a training step of a Llama of 12 layers and 160 million parameters, 8 x 512 tokens,
               that keeps all that the backward pass reads
train scanned  the same model, its layers scanned, each computed again in the backward pass

Compiled by the real compilers, as XLA alone does it; nothing is run. Of the temporaries that are
live at the peak: how many bytes nobody works on then (they are within their longest gap), and what
costs least where they have no room, by the machine's model. Seconds are the processor's, for making
the intents of a compiled module.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import memplan
from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.reading.reader import read_module
from hlo_passes.units import format_bytes, format_seconds
from memplan.report.tables import Column, Table
from memplan.serve import model
from memplan.sidecar.intents import Buffer, Intents
from models import workloads

_TARGETS = ("v5e", "h200")
_MADE = ("activation", "residual", "copy")
_FALLBACKS = ("", "recompute", "host")


def _serve(rows: int, width: int) -> tuple[Callable[..., Any], Sequence[Any], int]:
    config = model.ModelConfig(
        vocab_size=128_256, num_layers=8, embed_dim=4096, mlp_dim=14_336, num_heads=32,
        num_kv_heads=8, head_dim=128, norm_eps=1e-5, rope_theta=5e5, rope_scaling=None,
        tie_embeddings=False, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False,
        max_len=8192, dtype="bfloat16",
    )  # fmt: skip
    params = {
        name: jax.ShapeDtypeStruct(shape, config.dtype)
        for name, shape in model.parameter_shapes(config).items()
    }
    pools = jax.eval_shape(lambda: model.make_pools(config, 4096, 16))
    shapes = (rows, width), (rows,), (rows,), (rows, 512)
    numbers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    return functools.partial(model.step, config), (params, pools, *numbers), 1


def _train(name: str) -> tuple[Callable[..., Any], Sequence[Any], int]:
    train = workloads.train if name == "train scanned" else workloads.unrolled_train
    fun, arguments = train("llama-160m", batch=8, tokens=512)
    return fun, arguments, 0


_PROGRAMS: dict[str, Callable[[], tuple[Callable[..., Any], Sequence[Any], int]]] = {
    "serve decode": functools.partial(_serve, 32, 1),
    "serve chunk": functools.partial(_serve, 1, 512),
    "train": functools.partial(_train, "train"),
    "train scanned": functools.partial(_train, "train scanned"),
}


def _define() -> None:
    flags.DEFINE_multi_string("program", list(_PROGRAMS), "what is compiled")
    flags.DEFINE_multi_string("target", list(_TARGETS), "machines")


def _rows(rows: Rows) -> Iterator[Row]:
    for program in FLAGS.program:
        for target in FLAGS.target:
            case: Row = {"program": program, "target": target}
            yield rows.of(case, functools.partial(_measure, program, target))


def _measure(program: str, target: str) -> dict[str, Any]:
    fun, arguments, donated = _PROGRAMS[program]()
    topology = memplan.topology(target)
    step = memplan.jit(fun, donate_argnums=donated, machine=topology)
    module = read_module(step.lower(*arguments).unplanned())
    begin = time.process_time()
    found = memplan.intents(module, machine=topology.machine)
    seconds = time.process_time() - begin
    live, idle, fallbacks = _at_peak(found)
    return {
        "instructions": len(module.instructions),
        "ticks": len(found.ticks),
        "buffers": len(found.buffers),
        "pools": len(found.pools),
        "bytes": len(found.to_bytes()),
        "module_bytes": len(module.to_bytes()),
        "seconds": seconds,
        "live": live,
        "idle": idle,
        "fallbacks": fallbacks,
    }


def _at_peak(found: Intents) -> tuple[int, int, dict[str, int]]:
    """Bytes of temporaries that are live, those of them that are idle, and all by fallback."""
    made = [b for b in found.buffers if b.kind in _MADE and b.tier == found.device_tier]
    held = np.zeros(len(found.ticks), np.int64)
    for b in made:
        for start, end in b.live:
            held[start:end] += b.size
    peak = int(held.argmax())
    live = [b for b in made if any(start <= peak < end for start, end in b.live)]
    sizes = {name: sum(b.size for b in live if b.fallback == name) for name in _FALLBACKS}
    return int(held[peak]), sum(b.size for b in live if _is_idle(b, peak)), sizes


def _is_idle(b: Buffer, tick: int) -> bool:
    if b.idle is None:
        return False
    if b.idle.start <= b.idle.end:
        return b.idle.start <= tick < b.idle.end
    return not b.idle.end <= tick < b.idle.start


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    headings = (
        "ticks", "buffers", "pools", "sidecar", "of the module", "made in",
        "live at the peak", "idle then", "to the host", "made again", "stays",
    )  # fmt: skip
    yield Table(
        "Intents of programs",
        (Column("program"), Column("target"), *(Column(h, right=True) for h in headings)),
        tuple(map(_row, rows)),
    )


def _row(row: Row) -> tuple[str, ...]:
    live = row["live"] or 1
    shares = (row["fallbacks"][name] / live for name in ("host", "recompute", ""))
    return (
        row["program"],
        row["target"],
        *(f"{row[name]:,}" for name in ("ticks", "buffers", "pools")),
        format_bytes(row["bytes"]),
        f"{row['bytes'] / row['module_bytes']:.1%}",
        format_seconds(row["seconds"]),
        format_bytes(row["live"]),
        f"{row['idle'] / live:.0%}",
        *(f"{share:.0%}" for share in shares),
    )


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
