"""What becomes of plans on the GPU that is here: bytes in use, seconds, and the same numbers?

    python -m experiments.on_device [--workload llama-train] [--budget 75 50 35]
        [--beyond mixtral-8x7b --hbm 70GiB] [--trace traces] [--json on_device.jsonl]

Programs of `models.corpus` run as jax has them and within shares of XLA's own total, the real
compiler autotuning in between. Seconds are medians of steps, each waited for; bytes are the
most that jax's allocator had in use during one, less what was there before. Results are
compared with plain jax's, from the same arguments. *Serial* is what the step would take if
transfers hid behind nothing: plain jax's step and all bytes over the measured link.

Plans are made for the host's link as it is measured at the start. ``--beyond`` runs a prompt
through a decoder that does not fit the device: planned, then with the same weights on the host
and XLA's own schedule, whose logits are compared. For pools that leave room on the device and
the host see ``XLA_PYTHON_CLIENT_MEM_FRACTION`` and ``XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from hlo_passes.budget import parse_bytes
from hlo_passes.machine import Machine, load_machine
from memplan.api import Compiled, jit
from memplan.executable import device_bytes
from memplan.signature import DEVICE_MEMORY_KIND, HOST_MEMORY_KIND
from models.corpus import CORPUS
from models.workloads import prefill

_REPEATS = 7

# Several samples of even the shortest step.
_SAMPLE_S = 0.5e-3


def main() -> None:
    options = _parse()
    jax.config.update("jax_platforms", "cuda,cpu")
    out = _Out(options.json)
    device = jax.devices()[0]
    if device.platform != "gpu":
        sys.exit(f"expected a GPU, found {device.device_kind}")
    out.write(kind="machine", device=device.device_kind, jax=jax.__version__)
    machine = load_machine(device.device_kind)
    link = _links(out)
    machine = _with_link(machine, *link)
    for workload in options.workload or ():
        with out.reported(workload):
            plain = _plain(workload, out)
            for percent in options.budget:
                with out.reported(f"{workload} {percent} %"):
                    _within(plain, percent, machine, link[0], options.trace, out)
    if options.beyond:
        with out.reported(options.beyond):
            _beyond(options.beyond, options.batch, options.tokens, options.hbm, machine, out)


class _Out:
    """Results, as they come, on the standard output and in a file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, **row: Any) -> None:
        line = json.dumps(row)
        print(line, flush=True)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    @contextmanager
    def reported(self, name: str) -> Iterator[None]:
        """An error is a result as well, and the next program comes all the same."""
        begin = time.monotonic()
        try:
            yield
        except Exception as error:  # Whatever XLA raises.
            traceback.print_exc()
            self.write(kind="failure", workload=name, error=str(error)[:2000])
        self.write(kind="took", workload=name, seconds=round(time.monotonic() - begin, 1))


def _links(out: _Out) -> tuple[float, float]:
    """Bytes per second from the host and to it, by transfers of 1 GiB; the rest is printed."""
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
    out.write(
        kind="links",
        from_host_gb_s=size / to_device / 1e9,
        to_host_gb_s=size / to_host / 1e9,
        both_gb_s=2 * size / both / 1e9,
        hbm_gb_s=2 * words.nbytes / stream / 1e9,
        bf16_tflop_s=2 * n**3 / matmul / 1e12,
    )
    return size / to_device, size / to_host


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
    """

    workload: str
    fun: Callable[..., Any]
    shapes: Any
    args: Any
    total: int
    result: Any
    step_s: float


def _plain(workload: str, out: _Out) -> _Plain:
    fun, shapes = CORPUS[workload].planning()
    args = _drawn(shapes)
    begin = time.monotonic()
    step = jax.jit(fun, donate_argnames=CORPUS[workload].donate).lower(*shapes).compile()
    compile_s = time.monotonic() - begin
    total, result = device_bytes(step, 0), step(*_copied(args))
    step_s, peak = _measured(step, _copied(args))
    named = {"kind": "own", "workload": workload, "total": total, "peak": peak}
    out.write(**named, step_s=step_s, compile_s=round(compile_s, 1))
    return _Plain(workload, fun, shapes, args, total, result, step_s)


def _within(
    plain: _Plain, percent: int, machine: Machine, from_host: float, trace: Path | None, out: _Out
) -> None:
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
    if trace is not None:
        args = _placed(compiled, plain.args)
        with jax.profiler.trace(str(trace / f"{plain.workload}-{percent}")):
            jax.block_until_ready(compiled(*args))
        del args
    out.write(
        kind="plan",
        workload=plain.workload,
        percent=percent,
        budget=budget,
        total=compiled.device_bytes,
        peak=peak,
        moved=plan.moved_bytes,
        evictions=len(plan.edits.evictions),
        recomputes=len(plan.edits.recomputes),
        follows=str(compiled.followed),
        difference=difference,
        step_s=step_s,
        ratio=step_s / plain.step_s,
        predicted_s=plan.prediction.step_time_s,
        predicted_compute_s=plan.prediction.compute_s,
        predicted_recompute_s=plan.prediction.recompute_s,
        serial_ratio=1 + plan.moved_bytes / from_host / plain.step_s,
        compile_s=round(compile_s, 1),
    )
    if compiled.hosting.arguments:
        unscheduled: Any = compiled.unscheduled()
        step_s, peak = _measured(unscheduled, _placed(compiled, plain.args))
        out.write(
            kind="unscheduled",
            workload=plain.workload,
            percent=percent,
            total=device_bytes(unscheduled, 0),
            peak=peak,
            step_s=step_s,
            ratio=step_s / plain.step_s,
        )


def _beyond(model: str, batch: int, tokens: int, hbm: str, machine: Machine, out: _Out) -> None:
    """A prompt through a decoder whose weights are more than the device holds, each weight
    made where the plan has it."""
    fun, shapes = prefill(model, batch=batch, tokens=tokens, cache_length=tokens)
    begin = time.monotonic()
    lowered = jit(fun, hbm=hbm, machine=machine, donate_argnames="cache").lower(*shapes)
    compiled = lowered.compile()
    plan = compiled.plan
    assert plan is not None
    out.write(
        kind="compiled",
        workload=model,
        compile_s=round(time.monotonic() - begin, 1),
        budget=parse_bytes(hbm),
        total=compiled.device_bytes,
        arguments=lowered.placing.lowering.arguments_bytes,
        moved=plan.moved_bytes,
        on_host=sum(p.size for p in plan.placements if p.tier == "host"),
        follows=str(compiled.followed),
        predicted_s=plan.prediction.step_time_s,
        predicted_compute_s=plan.prediction.compute_s,
    )
    begin = time.monotonic()
    args = _drawn(shapes, compiled.hosting.arguments)
    out.write(kind="filled", workload=model, seconds=round(time.monotonic() - begin, 1))
    params, ids, cache = args
    logits, cache = compiled(params, ids, cache)
    step_s, peak = _measured(compiled, (params, ids, cache), before=0)
    out.write(
        kind="beyond",
        workload=model,
        batch=batch,
        tokens=tokens,
        step_s=step_s,
        tokens_per_s=batch * tokens / step_s,
        peak=peak,
    )
    del cache
    unscheduled: Any = compiled.unscheduled()
    expected, cache = unscheduled(params, ids, _drawn(shapes[2]))
    difference = _difference(logits, expected)
    step_s, peak = _measured(unscheduled, (params, ids, cache), before=0)
    out.write(
        kind="beyond, unscheduled",
        workload=model,
        total=device_bytes(unscheduled, 0),
        step_s=step_s,
        peak=peak,
        difference=difference,
        largest=float(jnp.max(jnp.abs(logits))),
    )


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


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", action="append", choices=CORPUS)
    parser.add_argument("--budget", nargs="*", type=int, default=[75, 50, 35], metavar="PERCENT")
    parser.add_argument("--beyond", metavar="MODEL")
    parser.add_argument("--hbm", default="70GiB")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="profile a step of each")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
