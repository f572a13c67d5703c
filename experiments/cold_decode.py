"""What does a decoding step take whose keys and values are on the host?

    python -m experiments.cold_decode [--part steps longest cycle disk] [--path FOLDER]

One sequence of an 8B (the shape of Llama 3.1, bfloat16), of which a few tokens are in the pools
and all others cold: arguments on the host, that the plan brings group by group through its slots.
Compiled by the compilers of a v5e and an H200, nothing is run; seconds are the machine model's, for
the final schedules.

*steps*: from few tokens, where compute hides the link, to many. The *bound* is the plan's own: no
plan within the budget is faster. The *floor* is, where that is more, what the link takes for what
this plan moves, and the compute that begins when all has come: the output head for the most part.
Temporaries are also counted in *slots*, arrays of a group's keys. XLA alone has the same arrays on
the host.

*longest*: a million tokens, 128 GiB of keys and values.

*cycle*: pages for which there is nearly room, on an H200. A step reads all of them in the same
order, so the least recently used is what is read next: a cache of that policy, with the same room,
moves all of them in each step. The plan moves what has no room; it has the same, for its slots and
all temporaries of the step as well.

*disk*, run on this machine: a small model in float32, its cold pages in a file. Steps take turns
with reads of the same bytes past the page cache, with steps whose cold pages are arrays in memory,
and with steps that have all pages in the pools; medians.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import memplan
from custom_calls import library
from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.hardware.machine import Machine
from hlo_passes.simulator.cost import instruction_costs
from hlo_passes.units import format_bytes, format_seconds
from memplan.compare import compared, view_planned, view_unscheduled
from memplan.demo import HOST_BYTES
from memplan.report.tables import Column, Table
from memplan.serve.model import Cold, ModelConfig, RopeScaling, make_pools, parameter_shapes, step

LLAMA3_8B = ModelConfig(
    vocab_size=128_256, num_layers=32, embed_dim=4096, mlp_dim=14_336, num_heads=32, num_kv_heads=8,
    head_dim=128, norm_eps=1e-5, rope_theta=5e5, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
    tie_embeddings=False, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False,
    max_len=131_072, dtype="bfloat16",
)  # fmt: skip

_SMALL = ModelConfig(
    vocab_size=1_024, num_layers=8, embed_dim=256, mlp_dim=512, num_heads=8, num_kv_heads=4,
    head_dim=64, norm_eps=1e-5, rope_theta=1e4, rope_scaling=None, tie_embeddings=False,
    qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False, max_len=65_536,
    dtype="float32",
)  # fmt: skip

_TARGETS = ("v5e", "h200")
# One of them is not in use: XLA:TPU multiplies a single one in its vector unit, 2.4 times slower.
_ROWS = 2
_PAGE = 128
_HOT = 8  # Pages: 1,024 tokens.
_SLOTS = 4  # Of a group's keys, or values: what the budget has beside weights and pools.
_BESIDE = 64 << 20  # Bytes that a step needs besides.

# Tokens that are cold, and groups of each layer's.
_STEPS = ((2_048, 1), (4_096, 1), (8_192, 1), (32_768, 1))
_LONGEST = {"v5e": ((1 << 20) - 1_024, 12), "h200": ((1 << 20) - 1_024, 6)}
_CYCLE = (32_768, 4)
_ROOM = 1.1  # All that is read in a step, over what there is room for.


def _define() -> None:
    parts = ["steps", "longest", "cycle", "disk"]
    flags.DEFINE_multi_enum("part", parts, parts, "which")
    flags.DEFINE_multi_string("target", list(_TARGETS), "topologies")
    flags.DEFINE_string("path", None, "folder on the disk to measure; none: not that part")
    flags.DEFINE_integer("rounds", 21, "how often each has its turn, on the disk")


def _rows(rows: Rows) -> Iterator[Row]:
    jax.config.update("jax_platforms", "cpu")
    for target in FLAGS.target:
        cases = [("steps", *of) for of in _STEPS] + [("longest", *_LONGEST[target])]
        for part, tokens, groups in cases:
            if part in FLAGS.part:
                case = {"part": part, "target": target, "cold": tokens, "groups": groups}
                yield rows.of(
                    case, functools.partial(_step, target, tokens, groups, part == "steps")
                )
    if "cycle" in FLAGS.part:
        tokens, groups = _CYCLE
        case = {"part": "cycle", "target": "h200", "cold": tokens, "groups": groups}
        yield rows.of(case, functools.partial(_cycle, "h200", tokens, groups))
    if "disk" in FLAGS.part and FLAGS.path is not None:
        yield rows.of({"part": "disk"}, functools.partial(_disk, Path(FLAGS.path), FLAGS.rounds))


# --- accelerators ---------------------------------------------------------------------------


def arguments(config: ModelConfig, hot: int, tokens: int, groups: int, page: int = _PAGE) -> Any:
    """Shapes of a step of one sequence: parameters, pools, numbers, and groups of cold pages."""

    def make() -> Any:
        zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
        params = {
            name: jnp.zeros(of, config.dtype) for name, of in parameter_shapes(config).items()
        }
        pages = tokens // page // groups
        cold = [
            Cold(make_pools(config, pages, page), zeros((_ROWS, pages)), zeros(_ROWS))
            for _ in range(groups)
        ]
        numbers = zeros((_ROWS, 1)), zeros(_ROWS), zeros(_ROWS), zeros((_ROWS, hot))
        return params, make_pools(config, hot, page), *numbers, cold

    return jax.eval_shape(make)


def program(config: ModelConfig) -> Callable[..., Any]:
    """`step`, with the cold pages by name."""

    def decode(
        params: Any, pools: Any, tokens: Any, starts: Any, counts: Any, tables: Any, cold: Any
    ) -> Any:
        return step(config, params, pools, tokens, starts, counts, tables, cold)

    return decode


def bytes_of(tree: Any) -> int:
    """Of all arrays of a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def compile_step(target: str, args: Any, budget: int) -> tuple[memplan.Compiled, Any]:
    """A decoding step whose cold pages alone may be on the host, and its machine."""
    where = memplan.topology(target).with_host_memory(HOST_BYTES)
    run = memplan.jit(
        program(LLAMA3_8B), hbm=budget, machine=where, offload="cold.*", split=False,
        donate_argnames="pools",
    )  # fmt: skip
    return run.lower(*args).compile(), where.machine


def _step(target: str, tokens: int, groups: int, beside_xla: bool) -> dict[str, Any]:
    args = arguments(LLAMA3_8B, _HOT, tokens, groups)
    slot = bytes_of(args[-1][0].layers[0].keys)
    budget = bytes_of(args[:-1]) + _SLOTS * slot + _BESIDE
    compiled, machine = compile_step(target, args, budget)
    figures = compared(view_planned(compiled, machine))
    found: dict[str, Any] = {"bytes": bytes_of(args[-1]), "slot": slot, **figures}
    found["after_s"] = _after_the_last_s(compiled, machine)
    if beside_xla:
        alone = view_unscheduled(compiled, machine)
        found["alone"] = None if alone is None else compared(alone)
    return found


def _after_the_last_s(compiled: memplan.Compiled, machine: Machine) -> float:
    """Seconds of the compute that begins when all has come."""
    instructions = compiled.module.entry.instructions
    costs = instruction_costs(compiled.module, machine)
    last = max(n for n, i in enumerate(instructions) if i.opcode == "copy-done")
    return sum(costs[i.id] for i in instructions[last:])


def _cycle(target: str, tokens: int, groups: int) -> dict[str, Any]:
    args = arguments(LLAMA3_8B, _HOT, tokens, groups)
    cold = args[-1]
    room = int(bytes_of(cold) / _ROOM)
    compiled, machine = compile_step(target, args, bytes_of(args[:-1]) + room)
    order = [bytes_of(x) for layer in range(32) for group in cold for x in group.layers[layer]]
    return {
        "bytes": bytes_of(cold), "room": room, "lru": _moved_by_lru(order, room),
        **compared(view_planned(compiled, machine)),
    }  # fmt: skip


def _moved_by_lru(sizes: Sequence[int], room: int) -> int:
    """Bytes that a step moves which reads arrays of these sizes in this order, as each step before
    it, through a cache that gives up what was read longest ago."""
    held: OrderedDict[int, int] = OrderedDict()
    moved = 0
    for _ in range(2):  # The first one fills it.
        moved = 0
        for array, size in enumerate(sizes):
            if array in held:
                held.move_to_end(array)
                continue
            moved += size
            held[array] = size
            while sum(held.values()) > room:
                held.popitem(last=False)
    return moved


# --- disk -----------------------------------------------------------------------------------


def _disk(folder: Path, rounds: int) -> dict[str, Any]:
    config, page, hot, groups, tokens = _SMALL, 64, 16, 1, 16_384
    shapes = arguments(config, hot, tokens, groups, page)
    random = np.random.default_rng(0)

    def draw(like: Any) -> Any:
        return np.asarray(random.standard_normal(like.shape, np.float32) * 0.05, like.dtype)

    params, pools = jax.device_put(jax.tree.map(draw, shapes[:2]))
    pages = tokens // page
    table, count = _both(np.arange(pages)), _both(pages, 0)
    (of,) = (jax.tree.map(draw, group.layers) for group in shapes[-1])
    path = folder / "cold.safetensors"
    memplan.disk.save(path, {"layers": of})
    stored = memplan.disk.load(path, like={"layers": shapes[-1][0].layers})["layers"]
    numbers = _both([7]), _both(tokens + 900, 0), _both(1, 0)
    hot_table = _both(np.arange(hot))
    args = (params, pools, *numbers, hot_table, [Cold(stored, table, count)])
    slot = bytes_of(of[0].keys)

    whole = jax.device_put(jax.tree.map(lambda x, y: np.concatenate([x, y]), of, pools))
    all_table = _both(np.arange(pages + hot))
    in_memory = jax.jit(program(config))
    all_hot = (params, whole, *numbers, all_table, [])
    beside = (*args[:-1], [Cold(jax.device_put(of), table, count)])
    budget = bytes_of((params, pools)) + 6 * slot
    step = memplan.jit(program(config), hbm=budget, offload="cold.*", split=False)
    buffer = np.empty(path.stat().st_size // 4096 * 4096, np.uint8)
    seconds: dict[str, list[float]] = {"read": [], "hot": [], "memory": [], "cold": []}
    logits: dict[str, Any] = {}

    def timed(way: str, call: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        result = jax.block_until_ready(call())
        seconds[way].append(time.perf_counter() - begin)
        logits[way] = None if result is None else np.asarray(result[0][0])

    with step.runtime(*args) as run:
        for _ in range(rounds):
            timed("read", lambda: library.load().read_file(str(path), buffer, 0))
            timed("hot", lambda: in_memory(*all_hot))
            timed("memory", lambda: in_memory(*beside))
            timed("cold", lambda: run(*args))
        device_bytes = run.compiled.device_bytes
        moved = run.compiled.plan.moved_bytes
    return {
        "bytes": bytes_of(of), "slot": slot, "moved": moved, "total": device_bytes,
        "budget": budget, "rounds": rounds,
        **{f"{way}_s": statistics.median(of[1:]) for way, of in seconds.items()},
        "difference": float(np.abs(logits["cold"] - logits["hot"]).max()),
        "largest": float(np.abs(logits["hot"]).max()),
    }  # fmt: skip


def _both(first: Any, second: Any = None) -> jax.Array:
    """int32 of both rows."""
    return jnp.asarray([first, first if second is None else second], jnp.int32)


# --- tables ---------------------------------------------------------------------------------


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    def of(part: str) -> list[Row]:
        return [row for row in rows if row["part"] == part]

    headings = (
        "cold tokens", "cold bytes", "moved", "temporaries", "slots", "step", "step / bound",
        "step / floor",
    )  # fmt: skip
    if found := of("steps"):
        columns = (*headings, "XLA alone", "its temporaries")
        yield Table(
            "A step of one sequence of an 8B, predicted",
            (Column("target"), *(Column(c, right=True) for c in columns)),
            tuple((*_figures(row), *_beside(row["alone"])) for row in found),
        )
    if found := of("longest"):
        columns = (*headings, "link busy")
        yield Table(
            "A million tokens of an 8B, predicted",
            (Column("target"), *(Column(c, right=True) for c in columns)),
            tuple((*_figures(row), f"{row['link_busy']:.1%}") for row in found),
        )
    if found := of("cycle"):
        yield Table(
            "Pages for which there is nearly room, moved in each step",
            tuple(
                Column(c, right=c != "target") for c in ("target", "pages", "room", "LRU", "plan")
            ),
            tuple(
                (
                    row["target"],
                    format_bytes(row["bytes"]),
                    format_bytes(row["room"]),
                    f"{row['lru'] / row['bytes']:.1%}",
                    f"{row['moved'] / row['bytes']:.1%}",
                )
                for row in found
            ),
        )
    if found := of("disk"):
        columns = (
            "cold", "moved", "reading it", "all in pools", "cold in memory", "cold on disk",
            "/ slower", "difference",
        )  # fmt: skip
        yield Table(
            "Cold pages on this machine's disk",
            tuple(Column(c, right=True) for c in columns),
            tuple(map(_disk_cells, found)),
        )


def _figures(row: Row) -> tuple[str, ...]:
    floor_s = max(row["bound_s"], row["link_busy"] * row["step_s"] + row["after_s"])
    return (
        row["target"],
        f"{row['cold']:,}",
        format_bytes(row["bytes"]),
        format_bytes(row["moved"]),
        format_bytes(row["temp"]),
        f"{row['temp'] / row['slot']:.1f}",
        format_seconds(row["step_s"]),
        f"{row['step_s'] / row['bound_s']:.3f}",
        f"{row['step_s'] / floor_s:.3f}",
    )


def _beside(alone: Row | None) -> tuple[str, str]:
    if alone is None:
        return "out of memory", "–"
    return format_seconds(alone["step_s"]), format_bytes(alone["temp"])


def _disk_cells(row: Row) -> tuple[str, ...]:
    slower = max(row["read_s"] * row["moved"] / row["bytes"], row["memory_s"])
    return (
        format_bytes(row["bytes"]),
        format_bytes(row["moved"]),
        format_seconds(row["read_s"]),
        *(format_seconds(row[f"{way}_s"]) for way in ("hot", "memory", "cold")),
        f"{row['cold_s'] / slower:.2f}",
        f"{row['difference'] / row['largest']:.1e}",
    )


EXPERIMENT = Experiment(_rows, _tables, _define)

if __name__ == "__main__":
    EXPERIMENT.main()
