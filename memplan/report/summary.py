"""A report as JSON-ready data, for programs: what ``--json`` prints.

It holds the figures, the peaks, the transfers and the loops, and leaves out what is only
drawn (the bytes at every tick, the span of every instruction and of every execution of a
transfer).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hlo_passes.plan import LoopStreams
from memplan.report.view import Held, Report, RunView, TierUsage, TransferView

FORMAT_VERSION = 2


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


def _run(run: RunView) -> dict[str, Any]:
    clock = None if run.clock is None else asdict(run.clock)
    if clock is not None:
        del clock["spans"]
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
