"""What becomes of plans on the GPU that is here: bytes in use, seconds, and the same numbers?

    python -m experiments.on_device [--workload llama-train] [--budget 75 50 35]
        [--beyond mixtral-8x7b --hbm 70GiB] [--trace traces]
        [--json on_device.jsonl [--resume | --show]] [--plot on_device.svg]

Programs of `models.corpus` run as jax has them and within shares of XLA's own total, the real
compiler autotuning in between. Seconds are medians of steps, each waited for; bytes are the
most that jax's allocator had in use during one, less what was there before. Results are
compared with plain jax's, from the same arguments. *Serial* is what the step would take if
transfers hid behind nothing: plain jax's step and all bytes over the measured link.

Plans are made for the host's link as it is measured at the start. ``--beyond`` runs a prompt
through a decoder that does not fit the device: planned, then with the same weights on the host
and XLA's own schedule, whose logits are compared. For pools that leave room on the device and
the host see ``XLA_PYTHON_CLIENT_MEM_FRACTION`` and ``XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB``.
``--plot`` draws predicted against measured steps.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.sharding import SingleDeviceSharding

from experiments.running import FLAGS, Experiment, Row, Rows
from hlo_passes.budget import parse_bytes
from hlo_passes.hardware.machine import Machine, load_machine
from hlo_passes.units import format_bytes, format_seconds
from memplan.api import Compiled, jit
from memplan.executable import device_bytes
from memplan.report.tables import Column, Table
from memplan.signature import DEVICE_MEMORY_KIND, HOST_MEMORY_KIND
from models.corpus import CORPUS
from models.workloads import prefill

_REPEATS = 7

# Several samples of even the shortest step.
_SAMPLE_S = 0.5e-3


def _define() -> None:
    flags.DEFINE_multi_enum("workload", [], list(CORPUS), "of `models.corpus`")
    flags.DEFINE_multi_integer("budget", [75, 50, 35], "percent of what XLA takes; may be none")
    flags.DEFINE_string("beyond", None, "a model that does not fit")
    flags.DEFINE_string("hbm", "70GiB", "its budget")
    flags.DEFINE_integer("batch", 8, "its prompts")
    flags.DEFINE_integer("tokens", 1024, "of each")
    flags.DEFINE_string("trace", None, "folder for a profile of a step of each")


def _rows(rows: Rows) -> Iterator[Row]:
    jax.config.update("jax_platforms", "cuda,cpu")
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise app.UsageError(f"expected a GPU, found {device.device_kind}")
    # A plan that another XLA carries out is another case.
    plugin = version("jax-cuda13-plugin")
    links = rows.of({"kind": "links", "plugin": plugin}, _links)
    yield links
    machine = _with_link(
        load_machine(device.device_kind), links["from_host_gb_s"] * 1e9, links["to_host_gb_s"] * 1e9
    )
    for workload in FLAGS.workload:
        # Run where its arrays are needed, once.
        plain = functools.cache(lambda w=workload: _plain(w))
        own = {"kind": "own", "plugin": plugin, "workload": workload}
        yield rows.of(own, lambda plain=plain: _attempt(lambda: plain().row))
        for n in FLAGS.budget:
            case = {"kind": "plan", "plugin": plugin, "workload": workload, "percent": n}
            yield rows.of(
                case, lambda n=n, plain=plain: _attempt(lambda: _within(plain(), n, machine, links))
            )
    if FLAGS.beyond is not None:
        case = {"kind": "beyond", "plugin": plugin, "workload": FLAGS.beyond}
        case |= {"budget": parse_bytes(FLAGS.hbm)}
        case |= {"batch": FLAGS.batch, "tokens": FLAGS.tokens}
        yield rows.of(case, lambda: _attempt(lambda: _beyond(case, machine)))


def _attempt(measure: Callable[[], Row]) -> Row:
    """An error is a result as well, and the next program comes all the same."""
    try:
        return measure()
    except Exception as error:  # Whatever XLA raises.
        traceback.print_exc()
        return {"failure": str(error)[:2000]}


def _links() -> Row:
    """Rates of 1 GiB from the host and to it, alone and both at once, of HBM and of products."""
    size = 1 << 30
    host, device = _memory(HOST_MEMORY_KIND), _memory(DEVICE_MEMORY_KIND)
    here = jnp.full(size, 7, jnp.int8, device=device)
    there = jax.device_put(here, host)
    to_device = _median_s(lambda: jax.device_put(there, device))
    to_host = _median_s(lambda: jax.device_put(here, host))
    both = _median_s(lambda: (jax.device_put(there, device), jax.device_put(here, host)))
    words = jnp.ones(size, jnp.float32)
    scale = jax.jit(lambda x: x * 3)
    stream = _median_s(lambda: scale(words))
    n = 16384
    square = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
    product = jax.jit(lambda x: x @ x)
    matmul = _median_s(lambda: product(square))
    return {
        "from_host_gb_s": size / to_device / 1e9,
        "to_host_gb_s": size / to_host / 1e9,
        "both_gb_s": 2 * size / both / 1e9,
        "hbm_gb_s": 2 * words.nbytes / stream / 1e9,
        "bf16_tflop_s": 2 * n**3 / matmul / 1e12,
    }


def _with_link(machine: Machine, from_host: float, to_host: float) -> Machine:
    """The machine with the host's link as measured."""
    device = machine.device_memory.name
    links = tuple(
        dataclasses.replace(
            k, efficiency=(to_host if k.source == device else from_host) / k.nominal_bytes_per_s
        )
        for k in machine.links
    )
    return dataclasses.replace(machine, links=links)


@dataclass(frozen=True)
class _Plain:
    """A program as jax has it.

    Attributes:
      shapes, args: its arguments.
      total: device bytes as XLA reports them.
      result: of a step from `args`.
      step_s: seconds of a step.
      row: what is told of it.
    """

    workload: str
    fun: Callable[..., Any]
    shapes: Any
    args: Any
    total: int
    result: Any
    step_s: float
    row: Row


def _plain(workload: str) -> _Plain:
    fun, shapes = CORPUS[workload].planning()
    args = _drawn(shapes)
    begin = time.monotonic()
    step = jax.jit(fun, donate_argnames=CORPUS[workload].donate).lower(*shapes).compile()
    compile_s = time.monotonic() - begin
    total, result = device_bytes(step, 0), step(*_copied(args))
    step_s, peak = _measured(step, _copied(args))
    row = {"total": total, "peak": peak, "step_s": step_s, "compile_s": round(compile_s, 1)}
    return _Plain(workload, fun, shapes, args, total, result, step_s, row)


def _within(plain: _Plain, percent: int, machine: Machine, links: Row) -> Row:
    """The program within a share of what it takes by itself, then with the same arguments on the
    host and XLA's own schedule."""
    budget = plain.total * percent // 100
    donate = CORPUS[plain.workload].donate
    begin = time.monotonic()
    step = jit(plain.fun, hbm=budget, machine=machine, donate_argnames=donate)
    compiled = step.lower(*plain.shapes).compile()
    compile_s = time.monotonic() - begin
    plan = compiled.plan
    assert plan is not None
    difference = _difference(compiled(*_placed(compiled, plain.args)), plain.result)
    step_s, peak = _measured(compiled, _placed(compiled, plain.args))
    if FLAGS.trace is not None:
        args = _placed(compiled, plain.args)
        with jax.profiler.trace(str(Path(FLAGS.trace, f"{plain.workload}-{percent}"))):
            jax.block_until_ready(compiled(*args))
        del args
    found: Row = {
        "budget": budget,
        "total": compiled.device_bytes,
        "peak": peak,
        "moved": plan.moved_bytes,
        "evictions": len(plan.edits.evictions),
        "recomputes": len(plan.edits.recomputes),
        "follows": str(compiled.followed),
        "difference": difference,
        "step_s": step_s,
        "plain_s": plain.step_s,
        "predicted_s": plan.prediction.step_time_s,
        "predicted_compute_s": plan.prediction.compute_s,
        "predicted_recompute_s": plan.prediction.recompute_s,
        "serial_s": plain.step_s + plan.moved_bytes / (links["from_host_gb_s"] * 1e9),
        "plain_total": plain.total,
        "compile_s": round(compile_s, 1),
    }
    if compiled.hosting.arguments:
        found["unscheduled"] = _attempt(lambda: _unscheduled(plain, compiled))
    return found


def _unscheduled(plain: _Plain, compiled: Compiled) -> Row:
    step: Any = compiled.unscheduled()
    step_s, peak = _measured(step, _placed(compiled, plain.args))
    return {"total": device_bytes(step, 0), "peak": peak, "step_s": step_s}


def _beyond(case: Row, machine: Machine) -> Row:
    """A prompt through a decoder whose weights are more than the device holds, each weight
    made where the plan has it."""
    batch, tokens = case["batch"], case["tokens"]
    fun, shapes = prefill(case["workload"], batch=batch, tokens=tokens, cache_length=tokens)
    begin = time.monotonic()
    step = jit(fun, hbm=case["budget"], machine=machine, donate_argnames="cache")
    lowered = step.lower(*shapes)
    compiled = lowered.compile()
    plan = compiled.plan
    assert plan is not None
    compile_s = time.monotonic() - begin
    params, ids, cache = _drawn(shapes, compiled.hosting.arguments)
    logits, cache = compiled(params, ids, cache)
    step_s, peak = _measured(compiled, (params, ids, cache), before=0)
    del cache

    def unscheduled() -> Row:
        step: Any = compiled.unscheduled()
        expected, cache = step(params, ids, _drawn(shapes[2]))
        difference = _difference(logits, expected)
        step_s, peak = _measured(step, (params, ids, cache), before=0)
        total = device_bytes(step, 0)
        return {"total": total, "peak": peak, "step_s": step_s, "difference": difference}

    return {
        "total": compiled.device_bytes,
        "arguments": lowered.placing.lowering.arguments_bytes,
        "moved": plan.moved_bytes,
        "on_host": sum(p.size for p in plan.placements if p.tier == "host"),
        "follows": str(compiled.followed),
        "predicted_s": plan.prediction.step_time_s,
        "predicted_compute_s": plan.prediction.compute_s,
        "compile_s": round(compile_s, 1),
        "step_s": step_s,
        "peak": peak,
        "largest": float(jnp.max(jnp.abs(logits))),
        "unscheduled": _attempt(unscheduled),
    }


def _measured(
    step: Callable[..., Any], args: Sequence[Any], before: int | None = None
) -> tuple[float, int]:
    """Median seconds of a step whose donated argument the next one takes from its result, and
    the most bytes in use during one, less those of anything but its arguments.

    Args:
      before: bytes in use without the arguments; None where these are all on the device but
        for what is in the host's memory.
    """
    held = sum(
        leaf.nbytes
        for leaf in jax.tree.leaves(args)
        if leaf.sharding.memory_kind != HOST_MEMORY_KIND
    )
    if before is None:
        before = _in_use() - held
    seconds: list[float] = []
    peak = 0
    for n in range(_REPEATS + 1):
        begin = time.perf_counter()
        with _sampled() as samples:
            result = jax.block_until_ready(step(*args))
        if n:
            seconds.append(time.perf_counter() - begin)
            peak = max(peak, *samples)
        args = _next(args, result)
        del result
    return statistics.median(seconds), peak - before


def _next(args: Sequence[Any], result: Any) -> list[Any]:
    """The arguments of the next step: of the result what was donated, the others again."""
    results = [result, *(result if isinstance(result, tuple) else ())]
    again = list(args)
    for n, arg in enumerate(args):
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(arg)):
            kind = jax.tree.structure(arg)
            again[n] = next(r for r in results if jax.tree.structure(r) == kind)
    return again


@contextmanager
def _sampled() -> Iterator[list[int]]:
    """Yields the bytes in use meanwhile, again and again."""
    samples = [_in_use()]
    done = threading.Event()

    def sample() -> None:
        while not done.wait(_SAMPLE_S):
            samples.append(_in_use())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def _in_use() -> int:
    stats = jax.devices()[0].memory_stats()
    return 0 if stats is None else stats["bytes_in_use"]


def _median_s(call: Callable[[], Any]) -> float:
    seconds: list[float] = []
    for _ in range(_REPEATS + 1):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def _placed(compiled: Compiled, args: Sequence[Any]) -> Sequence[Any]:
    """Copies of arguments, in the tiers that a plan has for them."""
    leaves, tree = jax.tree.flatten(_copied(args))
    return jax.block_until_ready(jax.tree.unflatten(tree, compiled.move(leaves)))


def _drawn(shapes: Any, hosted: Container[int] = ()) -> Any:
    """Arrays of these shapes, the flat ones `hosted` in the host's memory. Of the moments of an
    optimizer the second are not negative."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    made: list[jax.Array] = []
    for n, (path, leaf) in enumerate(leaves):
        positive = ".nu" in jax.tree_util.keystr(path)
        key = jax.random.key(n, impl="rbg")
        array = _draw(key, leaf.shape, jnp.dtype(leaf.dtype), positive)
        if n in hosted:
            array = jax.device_put(array, _memory(HOST_MEMORY_KIND))
        made.append(jax.block_until_ready(array))
    return jax.tree.unflatten(tree, made)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype, positive: bool) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(key, shape, 0, 4, jnp.int32).astype(dtype)
    drawn = jax.random.normal(key, shape, jnp.bfloat16) * 0.05
    return (jnp.abs(drawn) if positive else drawn).astype(dtype)


def _copied(args: Any) -> Any:
    return jax.block_until_ready(jax.tree.map(jnp.copy, args))


def _difference(found: Any, expected: Any) -> float:
    """The greatest difference of two results, as a share of the largest number of an array."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    device = _memory(DEVICE_MEMORY_KIND)
    return max(float(_apart(jax.device_put(a, device), b)) for a, b in pairs)


@jax.jit
def _apart(a: jax.Array, b: jax.Array) -> jax.Array:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-30)


def _memory(kind: str) -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0], memory_kind=kind)


_COLUMNS = (
    Column("program"),
    *(
        Column(heading, right=True)
        for heading in (
            *("budget", "in use less XLA's report", "moved", "evictions", "recomputes"),
            *("plain jax", "memplan", "ratio", "predicted", "ratio predicted", "serial"),
            *("XLA's own schedule", "in", "results"),
        )
    ),
)

_BEYOND_COLUMNS = (
    Column("a prompt"),
    *(
        Column(heading, right=True)
        for heading in ("device bytes, XLA's report", "in use", "step", "tokens/s", "logits")
    ),
)


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    plans = [row for row in rows if row["kind"] == "plan"]
    for plugin in dict.fromkeys(row["plugin"] for row in plans):
        found = tuple(_cells(row) for row in plans if row["plugin"] == plugin)
        yield Table(f"Programs of the corpus, XLA of {plugin}", _COLUMNS, found)
    for row in _done(row for row in rows if row["kind"] == "beyond"):
        title = f"{row['workload']}, {row['batch']} × {row['tokens']} tokens"
        host = format_bytes(row["on_host"])
        runs = (
            (f"memplan, hbm={format_bytes(row['budget'])}, {host} on the host", row),
            (
                "XLA's own schedule, the same on the host",
                row["unscheduled"],
            ),
        )
        cells = tuple((name, *_beyond_cells(run, row)) for name, run in runs)
        yield Table(title, _BEYOND_COLUMNS, cells)


def _done(rows: Iterable[Row]) -> Iterator[Row]:
    return (row for row in rows if "failure" not in row)


def _cells(row: Row) -> tuple[str, ...]:
    if "failure" in row:
        named = (row["workload"], f"{row['percent']} %")
        return (*named, *["–"] * (len(_COLUMNS) - 3), row["failure"].partition("\n")[0])
    other = row.get("unscheduled", {})
    # What plain jax is predicted to take.
    plain_s = row["predicted_compute_s"] - row["predicted_recompute_s"]
    return (
        row["workload"],
        f"{row['percent']} %",
        f"{row['peak'] - row['total']:,} B",
        f"{row['moved'] / 1e9:.2f} GB",
        str(row["evictions"]),
        str(row["recomputes"]),
        format_seconds(row["plain_s"]),
        format_seconds(row["step_s"]),
        f"{row['step_s'] / row['plain_s']:.2f}",
        format_seconds(row["predicted_s"]),
        f"{row['predicted_s'] / plain_s:.2f}",
        f"{row['serial_s'] / row['plain_s']:.2f}",
        format_seconds(other["step_s"]) if "step_s" in other else "–",
        f"{other['total'] / row['plain_total']:.0%}" if "total" in other else "–",
        _difference_cell(row["difference"]),
    )


def _beyond_cells(run: Row, row: Row) -> tuple[str, ...]:
    if "failure" in run:
        return (*["–"] * 4, run["failure"])
    return (
        f"{run['total']:,}",
        f"{run['peak']:,}",
        format_seconds(run["step_s"]),
        f"{row['batch'] * row['tokens'] / run['step_s']:,.0f}",
        _difference_cell(run["difference"]) if "difference" in run else "",
    )


def _difference_cell(difference: float) -> str:
    return "bit-identical" if difference == 0 else f"within {difference:.1e}"


def _plot(rows: Sequence[Row]) -> Any:
    """Steps of plans, predicted against measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.add_subplot()
    done = [row for row in _done(rows) if "predicted_s" in row]
    for workload in dict.fromkeys(row["workload"] for row in done):
        found = [row for row in done if row["workload"] == workload]
        measured = [1e3 * row["step_s"] for row in found]
        axes.plot(measured, [1e3 * row["predicted_s"] for row in found], "o", label=workload)
    ends = [1e3 * row[name] for row in done for name in ("step_s", "predicted_s")]
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], ":", color="gray")
    axes.set(xscale="log", yscale="log", xlabel="step, measured, ms", ylabel="step, predicted, ms")
    axes.legend(fontsize=8)
    return figure


EXPERIMENT = Experiment(_rows, _tables, _define, _plot)

if __name__ == "__main__":
    EXPERIMENT.main()
