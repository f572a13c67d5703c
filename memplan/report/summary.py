"""A report as JSON-ready data, for programs: what ``--json`` prints.

It holds the figures, the peaks, the transfers and the loops, and leaves out what is only
drawn (the bytes at every tick, the span of every instruction and of every execution of a
transfer). All names are those of `memplan.report.view` and `hlo_passes.plan`, where each is
explained; bytes, seconds and ticks, `null` where there is nothing to say.

    {"format": "memplan.report", "version": 4, "memplan", "title", "machine", "budget_bytes",
     "note", "runs": [{
        "name", "module", "is_planned", "instructions",
        "device": {...},              DeviceBytes, with "total"
        "tiers": [{...}],             TierUsage, with the peak, without the bands
        "moved_bytes", "overlapped",
        "transfers": [{...}],         TransferView, with "moved_bytes", "hidden_bytes", "busy_s"
        "collectives": [{...}],       the same, to other devices
        "is_reordered",
        "recomputed": {clone: original},
        "chunks": [{...}],            Split: parts of the program that are run in chunks
        "split": [{...}],             SplitView: temporaries away from the device for a while
        "decisions": [{...}],         Decision: what was weighed for each
        "bodies": [{...}],            BodyPlan: what it does in each iteration of a loop
        "loops", "streams", "left_alone", "compiler_options", "order",
        "predicted": {...}}]}         Clock, with "gap" and what binds, without the spans

Version 3 added collectives, kinds of transfers, edits, decisions and what binds; version 4 the
bodies of loops.

What ``memplan inspect`` finds beside that stands under ``"findings"``: `Findings`, with
``"advice"``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from hlo_passes.plan import BodyPlan, LoopStreams
from memplan.report.advising import Advice
from memplan.report.differences import Compared, Differences
from memplan.report.findings import Findings
from memplan.report.view import Held, Report, RunView, TierUsage, TransferView

FORMAT_VERSION = 4


def summarize(report: Report) -> dict[str, Any]:
    """Returns the report in bytes, seconds and ticks, with the names of the dataclasses."""
    return {
        "format": "memplan.report",
        "version": FORMAT_VERSION,
        "memplan": report.version,
        "title": report.title,
        "machine": report.machine,
        "budget_bytes": report.budget_bytes,
        "note": report.note,
        "runs": [_run(run) for run in report.runs],
    }


def summarize_findings(findings: Findings, advice: Sequence[Advice]) -> dict[str, Any]:
    """Returns what was found, in bytes, seconds and ticks, with the names of the dataclasses."""
    return {**_plain(findings), "advice": _plain(advice)}


def summarize_differences(
    compared: Sequence[Compared], found: Differences | None, failed: Sequence[str]
) -> dict[str, Any]:
    """Returns the figures of all programs that were compared, and what differs in the first."""
    differences = None
    if found is not None:
        lists = (f.name for f in fields(found) if f.name != "matching")
        differences = {name: _plain(getattr(found, name)) for name in lists}
        differences["corresponding"] = len(found.matching.pairs)
        differences["fused_otherwise"] = [
            {"before": [i.name for i in g.before], "after": [i.name for i in g.after]}
            for g in found.matching.groups
        ]
    return {
        "format": "memplan.diff",
        "version": 1,
        "modules": [
            {
                "before": c.key[0],
                "after": c.key[1],
                "figures": _plain(c.figures),
                "problem": c.problem,
            }
            for c in compared
        ],
        "differences": differences,
        "failed": list(failed),
    }


def _plain(value: Any) -> Any:
    """Dataclasses and named tuples as objects, all the way down."""
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def _run(run: RunView) -> dict[str, Any]:
    clock = None if run.clock is None else asdict(run.clock)
    if clock is not None and run.clock is not None:
        del clock["spans"]
        clock["gap"] = run.clock.gap
        clock["binding"]["shares"] = dict(run.clock.binding.shares)
    return {
        "name": run.name,
        "module": run.module,
        "is_planned": run.is_planned,
        "instructions": len(run.steps),
        "device": {**asdict(run.device), "total": run.device.total},
        "tiers": [_tier(tier) for tier in run.tiers],
        "moved_bytes": run.moved_bytes,
        "overlapped": run.overlapped,
        "transfers": [_transfer(transfer) for transfer in run.transfers],
        "collectives": [_transfer(collective) for collective in run.collectives],
        "is_reordered": run.is_reordered,
        "recomputed": dict(run.recomputed),
        "chunks": [asdict(chunks) for chunks in run.chunks],
        "split": [asdict(split) for split in run.split],
        "decisions": [asdict(decision) for decision in run.decisions],
        "bodies": [_body(body) for body in run.bodies],
        "loops": [{**asdict(loop), "step": loop.step._asdict()} for loop in run.loops],
        "streams": [_streams(streams) for streams in run.streams],
        "left_alone": dict(run.left_alone),
        "compiler_options": dict(run.compiler_options),
        "order": list(run.order),
        "predicted": clock,
    }


def _transfer(transfer: TransferView) -> dict[str, Any]:
    written = asdict(transfer)
    del written["spans"]
    return {
        **written,
        "moved_bytes": transfer.moved_bytes,
        "hidden_bytes": transfer.hidden_bytes,
        "busy_s": transfer.busy_s,
    }


def _body(body: BodyPlan) -> dict[str, Any]:
    plan = body.plan
    return {
        "computation": body.computation,
        "loop": body.loop,
        "executions": body.executions,
        "edits": asdict(plan.edits),
        "decisions": [asdict(decision) for decision in plan.decisions],
        "moved_bytes": body.moved_bytes,
        "predicted": asdict(plan.prediction),
    }


def _streams(streams: LoopStreams) -> dict[str, Any]:
    return {
        **asdict(streams),
        "fetched_bytes": streams.fetched_bytes,
        "stored_bytes": streams.stored_bytes,
    }


def _tier(tier: TierUsage) -> dict[str, Any]:
    return {
        "tier": tier.tier,
        "capacity_bytes": tier.capacity_bytes,
        "peak_bytes": tier.peak_bytes,
        "peak_time": tier.peak_time,
        "peak": tier.peak._asdict(),
        "held_count": tier.held_count,
        "held": [_held(held) for held in tier.held],
    }


def _held(held: Held) -> dict[str, Any]:
    reader = None if held.reader is None else held.reader._asdict()
    return {**asdict(held), "origin": held.origin._asdict(), "reader": reader}
