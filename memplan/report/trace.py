"""A trace that opens in Perfetto and chrome://tracing: a process for each run.

    compute     │ c0 │ c1 │ waits │ c2 │       spans of the compute engine
    host→hbm      ╰─►├────w2──────┤ ╰─►        a thread for each direction of a link, and for
    hbm→host            ├──a───┤               the interconnect; arrows from the start to the
    hbm bytes   ▁▁▂▂▅▅▅▅▃▃                     bytes, and from the bytes to the done

Times are predictions of a machine model, in microseconds from the start of the step. The
format is Google's "Trace Event Format" (Duffy and others, 2016): ``X`` is a span, ``C`` a
counter, ``s`` and ``f`` the ends of an arrow, ``M`` a name.

    thread      cat         args
    compute     compute     op_name, source, tick
                recompute   the same, and "again": the HLO name of the first instruction
                stall       those of the instruction that waits
    a route     fetch, evict, refetch, copy or collective (`TransferKind`)
                            buffer, bytes, execution, loop, hidden_us, start_tick, done_tick
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any

from hlo_passes.plan import LogicalTime
from memplan.report.view import Clock, Report, RunView

_COMPUTE_THREAD = 0
_NANOSECOND = 1e-9

_Event = dict[str, Any]


def render_trace(report: Report) -> str:
    """Returns the trace as JSON. A run without a clock has no times and is left out."""
    named: list[_Event] = []
    timed: list[_Event] = []
    for process, run in enumerate(report.runs, 1):
        if run.clock is None:
            continue
        named += _names(process, run)
        timed += _spans(process, run, run.clock)
        timed += _memory(process, run, run.clock)
        timed += _transfers(process, run, run.clock)
    document = {
        "traceEvents": named + sorted(timed, key=lambda event: event["ts"]),
        "displayTimeUnit": "ms",
        "otherData": {
            "title": report.title,
            "machine": report.machine,
            "memplan": report.version,
            "times": "predicted",
        },
    }
    return json.dumps(document, ensure_ascii=False)


def _names(process: int, run: RunView) -> Iterator[_Event]:
    def name(kind: str, thread: int, args: dict[str, Any]) -> _Event:
        return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}

    yield name("process_name", 0, {"name": f"{run.name}: {run.module}"})
    yield name("process_sort_index", 0, {"sort_index": process})
    for route, thread in {"compute": _COMPUTE_THREAD, **_threads(run)}.items():
        yield name("thread_name", thread, {"name": route})
        yield name("thread_sort_index", thread, {"sort_index": thread})


def _threads(run: RunView) -> dict[str, int]:
    routes = dict.fromkeys(t.route for t in (*run.transfers, *run.collectives))
    return {route: thread for thread, route in enumerate(routes, _COMPUTE_THREAD + 1)}


def _span(process: int, thread: int, name: str, start_s: float, end_s: float) -> _Event:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": start_s * 1e6,
        "dur": max(0.0, end_s - start_s) * 1e6,
    }


def _spans(process: int, run: RunView, clock: Clock) -> Iterator[_Event]:
    for span in clock.spans:
        step = run.steps[span.tick]
        name = f"waits at {step.instruction}" if span.stall else step.instruction
        event = _span(process, _COMPUTE_THREAD, name, span.start_s, span.end_s)
        event["cat"] = "stall" if span.stall else "compute"
        event["args"] = {"op_name": step.op_name, "source": step.source_line, "tick": span.tick}
        if not span.stall and step.instruction in run.recomputed:
            event["cat"] = "recompute"
            event["args"]["again"] = run.recomputed[step.instruction]
        yield event


def _transfers(process: int, run: RunView, clock: Clock) -> Iterator[_Event]:
    threads = _threads(run)
    when = _Clock(clock)
    for number, transfer in enumerate((*run.transfers, *run.collectives)):
        thread = threads[transfer.route]
        for execution, moving in enumerate(transfer.spans):
            event = _span(process, thread, transfer.name, moving.begin_s, moving.end_s)
            event["cat"] = transfer.kind
            event["args"] = {
                "buffer": transfer.buffer,
                "bytes": transfer.size,
                "execution": f"{execution + 1} of {transfer.executions}",
                "loop": transfer.loop,
                "hidden_us": moving.hidden_s * 1e6,
                "start_tick": transfer.start,
                "done_tick": transfer.done,
            }
            yield event
            # An arrow binds to the span around its end; a span does not hold its last moment.
            last = max(moving.begin_s, moving.end_s - _NANOSECOND)
            needed = max(moving.end_s, when.done(moving.issued_s, transfer.start, transfer.done))
            identity = f"{process}.{number}.{execution}"
            issued = _COMPUTE_THREAD, moving.issued_s
            yield from _arrow(process, f"{identity}.start", issued, (thread, moving.begin_s))
            yield from _arrow(
                process, f"{identity}.done", (thread, last), (_COMPUTE_THREAD, needed)
            )


def _arrow(
    process: int, identity: str, tail: tuple[int, float], head: tuple[int, float]
) -> Iterator[_Event]:
    """From a thread at a second to another."""
    common = {
        "name": identity.rpartition(".")[2],
        "cat": "transfer",
        "id": identity,
        "pid": process,
    }
    yield {**common, "ph": "s", "tid": tail[0], "ts": tail[1] * 1e6}
    yield {**common, "ph": "f", "bp": "e", "tid": head[0], "ts": head[1] * 1e6}


def _memory(process: int, run: RunView, clock: Clock) -> Iterator[_Event]:
    reached = list(_Clock(clock).reached(len(run.steps)))
    for tier in run.tiers:
        shown = -1
        for seconds, ticks in reached:
            first = bisect_right(tier.times, ticks.start) - 1
            for i in range(first, bisect_left(tier.times, ticks.stop)):
                if i == shown:
                    continue
                shown = i
                yield {
                    "ph": "C",
                    "name": f"{tier.tier} bytes",
                    "pid": process,
                    "tid": _COMPUTE_THREAD,
                    "ts": seconds * 1e6,
                    "args": {band.kind: band.bytes[i] for band in tier.bands},
                }


class _Clock:
    """Seconds and ticks of a step.

    A loop's body comes back to its ticks: seconds rise, ticks fall at each iteration.
    """

    def __init__(self, clock: Clock) -> None:
        self._end = clock.step_time_s
        self._seconds = [span.start_s for span in clock.spans]
        self._ticks = [span.tick for span in clock.spans]

    def done(self, issued_s: float, start: LogicalTime, done: LogicalTime) -> float:
        """When the engine comes to `done`, having been at `start` at `issued_s`.

        The spans between lie between the two ticks; the next one behind is at the done, past
        it, or, where the loop's body ends, at the beginning of the next iteration.
        """
        for at in range(bisect_left(self._seconds, issued_s), len(self._ticks)):
            if not start <= self._ticks[at] < done:
                return self._seconds[at]
        return self._end

    def reached(self, end: LogicalTime) -> Iterator[tuple[float, range]]:
        """Yields moments with the ticks that the engine has come through since the last one."""
        before = -1
        for seconds, tick in zip(self._seconds, self._ticks, strict=True):
            yield seconds, range(before + 1 if tick > before else tick, tick + 1)
            before = tick
        if before + 1 < end:
            yield self._end, range(before + 1, end)
