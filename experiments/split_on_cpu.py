"""Parts of a program in chunks, measured on the CPU that is here: seconds, memory, and results.

    python -m experiments.split_on_cpu [--program loss] [--json FILE [--resume | --show]]

The programs of `experiments.split` in sizes that a few cores run in seconds, with arrays of
float32: by hand in 4 and 16 chunks, and by memplan within the bytes that those take. Each runs in
turn with the program as it is; *a step* is the ratio of processor seconds (medians), beside that of
the predictions. Bytes are those of temporaries and results: XLA's report, and *resident*, by how
much the process grew in a step as Linux has it. *Differs* is the largest difference of a result
from plain jax's, relative to the largest value in it.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from experiments.isolated import Failure, isolated
from experiments.running import FLAGS, Experiment, Row, Rows
from experiments.split_programs import SMALL
from hlo_passes.errors import MemoryBudgetError
from hlo_passes.simulator.timeline import scheduled_step
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import Lowered, jit
from memplan.compiled import Compiled
from memplan.report.tables import Column, Table
from memplan.topologies import topology

_PARTS = (4, 16)
_REPEATS = 5
_TIMEOUT_S = 900.0
_SETTLE_S = 0.3
_UNLIMITED = "512GiB"

_COLUMNS = (
    Column("program"),
    Column("way"),
    Column("XLA's bytes", right=True),
    Column("of plain", right=True),
    Column("resident", right=True),
    Column("of plain", right=True),
    Column("seconds", right=True),
    Column("a step, of plain", right=True),
    Column("predicted", right=True),
    Column("differs", right=True),
    Column("chunks"),
)

# --- measuring ------------------------------------------------------------------------------


def _define() -> None:
    flags.DEFINE_multi_enum("program", list(SMALL), list(SMALL), "which")


def _rows(rows: Rows) -> Iterator[Row]:
    for program in FLAGS.program:
        for parts in _PARTS:
            by_hand = _row(rows, {"program": program, "way": "by hand", "parts": parts}, _by_hand)
            yield by_hand
            if "failure" not in by_hand:
                case = {"program": program, "way": "memplan", "within": by_hand["bytes"]}
                yield _row(rows, case, _planned)


def _row(rows: Rows, case: Row, measure: Callable[[Row], Row]) -> Row:
    def measured() -> Row:
        found = isolated(measure, case, timeout_s=_TIMEOUT_S)
        return {"failure": found.reason} if isinstance(found, Failure) else found

    return rows.of(case, measured)


def _by_hand(case: Row) -> Row:
    jax.config.update("jax_platforms", "cpu")
    of = SMALL[case["program"]]()
    args = _arrays(of.args)
    plain = jit(of.function, hbm=_UNLIMITED).lower(*args)
    by_hand = jit(of.by_hand(case["parts"]), hbm=_UNLIMITED).lower(*args)
    return _compared(plain, by_hand, args)


def _planned(case: Row) -> Row:
    jax.config.update("jax_platforms", "cpu")
    of = SMALL[case["program"]]()
    args = _arrays(of.args)
    plain = jit(of.function, hbm=_UNLIMITED).lower(*args)
    try:
        # The host's memory is that of the device here: arguments stay.
        planned = jit(of.function, hbm=case["within"], offload=()).lower(*args)
        found = _compared(plain, planned, args)
    except MemoryBudgetError as error:
        return {"failure": f"refused; the planner's least: {format_bytes(error.least)}"}
    return found


def _arrays(shapes: Any) -> Any:
    """Arguments of such shapes: numbers of a normal distribution, and small integers."""

    def array(n: int, shape: Any) -> jax.Array:
        key = jax.random.key(n)
        if not jnp.issubdtype(shape.dtype, jnp.floating):
            return jax.random.randint(key, shape.shape, 0, 1000, shape.dtype)
        fan_in = shape.shape[-2] if len(shape.shape) > 1 else 1
        return jax.random.normal(key, shape.shape, jnp.float32) / fan_in**0.5

    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, [array(n, shape) for n, shape in enumerate(leaves)])


def _compared(plain: Lowered, other: Lowered, args: Any) -> Row:
    """Both, step by step in turn."""
    ways = {"plain": plain.compile(), "other": other.compile()}
    leaves, tree = jax.tree.flatten(args)
    placed = {way: jax.tree.unflatten(tree, step.place(leaves)) for way, step in ways.items()}
    results = {way: step(*placed[way]) for way, step in ways.items()}
    differs = _difference(results["plain"], results["other"])
    del results
    seconds: Mapping[str, list[float]] = {way: [] for way in ways}
    resident: Mapping[str, list[int]] = {way: [] for way in ways}
    for _ in range(_REPEATS):
        for way, step in ways.items():
            before = _settled_bytes()
            begin = time.process_time()
            jax.block_until_ready(step(*placed[way]))
            seconds[way].append(time.process_time() - begin)
            resident[way].append(_resident_bytes("VmHWM") - before)
    compiled = ways["other"]
    return {
        "bytes": compiled.device_bytes,
        "beside": _beside_arguments(compiled),
        "plain_beside": _beside_arguments(ways["plain"]),
        "resident": statistics.median(resident["other"]),
        "plain_resident": statistics.median(resident["plain"]),
        "seconds": statistics.median(seconds["other"]),
        "plain_seconds": statistics.median(seconds["plain"]),
        "predicted": _predicted_s(compiled) / _predicted_s(ways["plain"]),
        "differs": differs,
        "chunks": [f"{s.parts} of dimension {s.dimension}" for s in compiled.splits],
    }


def _beside_arguments(compiled: Compiled) -> int:
    """Bytes of results and temporaries, as XLA reports."""
    memory = compiled.memory_analysis()
    return memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes


def _predicted_s(compiled: Compiled) -> float:
    return scheduled_step(compiled.module, topology("cpu").machine).step_time_s


def _settled_bytes() -> int:
    """Resident, once what the last step took has been given back; the peak begins anew there."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    time.sleep(_SETTLE_S)
    Path("/proc/self/clear_refs").write_text("5")
    return _resident_bytes("VmRSS")


def _resident_bytes(what: str) -> int:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _difference(these: Any, those: Any) -> float:
    def of(a: jax.Array, b: jax.Array) -> float:
        # Of state that is drawn at random some roots are none; and a result may be all nothing.
        apart = jnp.where(jnp.isnan(a) & jnp.isnan(b), 0, jnp.abs(a - b))
        return float(jnp.max(apart) / (jnp.nanmax(jnp.abs(a)) + jnp.finfo(jnp.float32).tiny))

    return max(itertools.starmap(of, zip(*map(jax.tree.leaves, (these, those)), strict=True)))


# --- tables ---------------------------------------------------------------------------------


def _tables(rows: Sequence[Row]) -> list[Table]:
    return [Table("In chunks, on a CPU", _COLUMNS, tuple(tuple(_cells(r)) for r in rows))]


def _cells(row: Row) -> Iterator[str]:
    yield row["program"]
    yield f"by hand, {row['parts']}" if "parts" in row else "memplan"
    if "failure" in row:
        yield from ("–",) * 8
        yield row["failure"]
        return
    yield format_bytes(row["beside"])
    yield f"{row['beside'] / row['plain_beside']:.1%}"
    yield format_bytes(row["resident"])
    yield f"{row['resident'] / row['plain_resident']:.1%}"
    yield format_seconds(row["seconds"])
    yield f"{row['seconds'] / row['plain_seconds']:.2f}"
    yield f"{row['predicted']:.2f}"
    yield f"{row['differs']:.0e}"
    yield "; ".join(row["chunks"])


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
