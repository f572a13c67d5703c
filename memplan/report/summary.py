"""A report as JSON-ready data, for programs: what ``--json`` prints.

It holds the figures, the peaks and the transfers, and leaves out what is only drawn (the
bytes at every tick, the span of every instruction).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from memplan.report.view import Held, Report, RunView, TierUsage

FORMAT_VERSION = 1


def summarize(report: Report) -> dict[str, Any]:
    """Returns the report in bytes, seconds and ticks, with the names of the dataclasses."""
    return {
        "format": "memplan.report",
        "version": FORMAT_VERSION,
        "memplan": report.version,
        "title": report.title,
        "machine": report.machine,
        "budget_bytes": report.budget_bytes,
        "runs": [_run(run) for run in report.runs],
    }


def _run(run: RunView) -> dict[str, Any]:
    clock = None if run.clock is None else asdict(run.clock)
    if clock is not None:
        del clock["spans"]
    return {
        "name": run.name,
        "module": run.module,
        "instructions": len(run.steps),
        "device": {**asdict(run.device), "total": run.device.total},
        "tiers": [_tier(tier) for tier in run.tiers],
        "moved_bytes": run.moved_bytes,
        "overlapped": run.overlapped,
        "transfers": [asdict(transfer) for transfer in run.transfers],
        "order": list(run.order),
        "predicted": clock,
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
