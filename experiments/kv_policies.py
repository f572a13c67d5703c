"""Which blocks of keys and values should stay? Policies on traces of requests.

    python -m experiments.kv_policies TRACE [--capacity 1000 2000] [--json FILE
        [--resume | --show]] [--plot kv.svg]

For each capacity, in blocks, the share of all prompts' tokens that were held (`memplan.kv.replay`):
by memplan's policies, *hints* with returns that are declared with a lognormal error of 0.5 and nine
tenths of the ends; with the hints of other requests; and with lies: who returns is said to end, and
who ends to return at once. By Belady's rule, which knows what comes. And by the policies of
libcachesim, where that is installed (``pip install libcachesim``; GPL: it is no dependency). Those
know single blocks: of a request they are asked for its blocks from the first on, or from the last,
whichever hits more; a hit is a prefix here as there, and what is behind a missing block is asked
for all the same, since it is computed then, and is there.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from experiments.running import FLAGS, Experiment, Row, Rows
from memplan.kv import Hints, Trace, declared, replay
from memplan.kv.replay import ReplayedPolicy
from memplan.report.tables import Column, Table

_CAPACITIES = (500, 1000, 2000, 5000, 10000, 20000)
_OURS: dict[str, ReplayedPolicy] = {
    "LRU": "lru",
    "learned": "learned",
    "hints": "hints",
    "hints of others": "hints",
    "hints that lie": "hints",
    "Belady": "belady",
}
_PEERS = ("LFU", "ARC", "LIRS", "TwoQ", "SLRU", "LeCaR", "Cacheus", "Hyperbolic", "LHD", "S3FIFO",
          "Sieve", "WTinyLFU", "Clock2QPlus", "ThreeLCache")  # fmt: skip


def _define() -> None:
    flags.DEFINE_multi_integer("capacity", list(_CAPACITIES), "blocks")


def _rows(rows: Rows, path: str) -> Iterator[Row]:
    trace = Trace.load(Path(path))
    ways: dict[str, Callable[[int], Row]] = {
        name: lambda capacity, name=name: _ours(trace, name, capacity) for name in _OURS
    }
    try:
        library = importlib.import_module("libcachesim")
    except ImportError:
        library = None
    for name in _PEERS if library else ():
        ways[name] = lambda capacity, name=name: _peer(trace, getattr(library, name), capacity)
    for capacity in FLAGS.capacity:
        for name, way in ways.items():
            case = {"trace": Path(path).stem, "policy": name, "capacity": capacity}
            yield rows.of(case, lambda way=way, capacity=capacity: way(capacity))


def _ours(trace: Trace, name: str, capacity: int) -> Row:
    hints = declared(trace)
    if name == "hints of others":
        order = np.random.default_rng(0).permutation(len(trace.paths))
        hints = Hints(hints.due[order], hints.ends[order], hints.spread)
    elif name == "hints that lie":
        returns = ~np.isnan(hints.due)
        hints = Hints(np.where(returns, np.nan, 1.0), returns, hints.spread)
    return replay(trace, capacity, _OURS[name], hints).to_dict()


def _peer(trace: Trace, kind: Any, capacity: int) -> Row:
    return max((_peer_in_order(trace, kind, capacity, step) for step in (1, -1)),
               key=lambda found: found["hit_rate"])  # fmt: skip


def _peer_in_order(trace: Trace, kind: Any, capacity: int, step: int) -> Row:
    request_of = importlib.import_module("libcachesim").Request
    cache, request = kind(cache_size=capacity), request_of()
    request.obj_size = 1
    hit = asked = 0
    begin = time.process_time()
    for number, path in enumerate(trace.paths):
        blocks = path.tolist()
        held = []
        for block in blocks[::step]:
            request.obj_id = block + 1
            held.append(cache.get(request))
        if number >= len(trace.paths) // 4:
            held = held[::step]
            hit += held.index(False) if False in held else len(held)
            asked += int(trace.n_in[number])
    seconds = time.process_time() - begin
    accesses = sum(path.size for path in trace.paths)
    rate = hit * trace.block_tokens / asked
    return {"hit_rate": rate, "seconds": seconds, "block_accesses": accesses}


# --- what is shown ---------------------------------------------------------------------------


def _tables(rows: Sequence[Row]) -> Iterator[Table]:
    traces = dict.fromkeys(row["trace"] for row in rows)
    capacities = sorted({row["capacity"] for row in rows})
    columns = (
        Column("trace"),
        Column("policy"),
        *(Column(f"{capacity:,}", right=True) for capacity in capacities),
        Column("µs a block", right=True),
    )
    cells = []
    for trace in traces:
        of_trace = [row for row in rows if row["trace"] == trace]
        for policy in dict.fromkeys(row["policy"] for row in of_trace):
            found = {row["capacity"]: row for row in of_trace if row["policy"] == policy}
            rates = (f"{found[c]['hit_rate']:.4f}" if c in found else "" for c in capacities)
            slowest = max(of["seconds"] / of["block_accesses"] for of in found.values())
            cells.append((trace, policy, *rates, f"{slowest * 1e6:.2f}"))
    yield Table("Tokens that were held, of all prompts'", columns, tuple(cells))


def _plot(rows: Sequence[Row]) -> Any:
    from matplotlib.figure import Figure

    traces = list(dict.fromkeys(row["trace"] for row in rows))
    figure = Figure(figsize=(5.2 * len(traces), 4.4), layout="constrained")
    for axes, trace in zip(figure.subplots(1, len(traces), squeeze=False)[0], traces, strict=True):
        of_trace = [row for row in rows if row["trace"] == trace]
        for policy in dict.fromkeys(row["policy"] for row in of_trace):
            points = sorted(
                (row["capacity"], row["hit_rate"]) for row in of_trace if row["policy"] == policy
            )
            is_ours = policy in _OURS
            axes.plot(
                *zip(*points, strict=True),
                label=policy,
                linewidth=1.8 if is_ours else 0.8,
                linestyle="-" if is_ours else "--",
                color=None if is_ours else "0.6",
            )
        axes.set(xscale="log", xlabel="blocks", ylabel="hit rate, of tokens", title=trace)
        handles, labels = axes.get_legend_handles_labels()
        ours = [k for k, label in enumerate(labels) if label in _OURS]
        axes.legend([handles[k] for k in ours], [labels[k] for k in ours], fontsize="small")
    return figure


EXPERIMENT = Experiment(_rows, _tables, _define, _plot, words=("TRACE",))

if __name__ == "__main__":
    EXPERIMENT.main()
