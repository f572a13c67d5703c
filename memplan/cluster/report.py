"""A cluster's plan as tables, and as a trace for Perfetto (see `memplan.report.trace`).

    tpu0        │ f0#0 │ f0#1 │        a process for chips: a thread a node, and one for what its
    tpu0 fabric ├gather►│               chips send each other
    a->b        ├──act0──►│             a process for wires: a thread each

Times are predictions, in microseconds from the beginning of a replay.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from hlo_passes.chains.chain import Copy
from hlo_passes.cluster.cluster import Place
from hlo_passes.cluster.plan import ClusterPlan
from hlo_passes.cluster.windows import described
from hlo_passes.cluster.work import NANOSECONDS
from hlo_passes.units import format_bytes, format_seconds
from memplan.report.tables import Column, Table

_CHIPS, _WIRES = 1, 2


def tables(plan: ClusterPlan) -> Iterator[Table]:
    """What each node computes, each wire carries, and each memory holds."""
    step_s = plan.step_time_s
    machines = {node.name: node for node in plan.cluster.chips}
    chips = [
        (
            name,
            f"{node.count} × {node.machine.name}" if node.machine else "",
            format_seconds(plan.busy_s[name]),
            f"{plan.busy_s[name] / step_s:.1%}" if step_s else "",
        )
        for name, node in machines.items()
        if name in plan.busy_s
    ]
    columns = Column("node"), Column("chips"), Column("computes", right=True)
    title = f"A step of {format_seconds(step_s)}, predicted"
    yield Table(title, (*columns, Column("of the step", right=True)), tuple(chips))
    rates = {wire.name: wire.bytes_per_s for wire in plan.cluster.wires}
    wires = [
        (
            name,
            format_bytes(size),
            f"{rates[name] / 1e9:.1f} GB/s",
            f"{size / rates[name] / step_s:.1%}",
        )
        for name, size in plan.wire_bytes.items()
    ]
    if wires:
        columns = Column("wire"), Column("carries", right=True), Column("of", right=True)
        yield Table("Wires", (*columns, Column("busy", right=True)), tuple(wires))
    held: defaultdict[str, int] = defaultdict(int)
    for space in plan.chain.spaces:
        held[space.tier] += space.bytes
    memories = [
        (tier, format_bytes(size), format_bytes(plan.cluster.capacity(Place.parse(tier))))
        for tier, size in held.items()
    ]
    columns = Column("memory"), Column("holds", right=True), Column("of", right=True)
    yield Table("Memories", columns, tuple(memories))


def render_trace(plan: ClusterPlan) -> str:
    """Returns the trace as JSON."""
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, str], int] = {}

    def thread(process: int, name: str) -> int:
        if (process, name) not in threads:
            threads[process, name] = len(threads)
            args = {"name": name}
            common = {"ph": "M", "pid": process, "tid": threads[process, name]}
            events.append({**common, "name": "thread_name", "args": args})
        return threads[process, name]

    for process, name in ((_CHIPS, "chips"), (_WIRES, "wires")):
        events.append(
            {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
        )
    for at, d, span in plan.timed:
        args: dict[str, Any] = {"descriptor": at, "bytes_per_s": span.bytes_per_s}
        if isinstance(d.action, Copy):
            args["bytes"] = d.action.bytes
        common = {
            "ph": "X",
            "name": described(plan, d.action),
            "ts": span.begin * 1e6 / NANOSECONDS,
            "dur": (span.end - span.begin) * 1e6 / NANOSECONDS,
            "args": args,
        }
        if not isinstance(d.action, Copy):
            tid = thread(_CHIPS, plan.chain.streams[d.stream].name)
            events.append({**common, "cat": "compute", "pid": _CHIPS, "tid": tid})
        for wire in span.wires:
            tid = thread(_WIRES, wire)
            events.append({**common, "cat": "move", "pid": _WIRES, "tid": tid})
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"title": plan.cluster.name, "times": "predicted"},
    }
    return json.dumps(document, ensure_ascii=False)
