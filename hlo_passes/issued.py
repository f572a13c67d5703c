"""A choice's transfers, and the bytes that XLA takes for a module with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hlo_passes.allocations import find_allocations
from hlo_passes.assignment import assign_offsets
from hlo_passes.dataflow import analyze_dataflow
from hlo_passes.live_ranges import compute_live_ranges
from hlo_passes.memory import BACKENDS, measure_memory
from hlo_passes.placement import Choice
from hlo_passes.plan import Transfer
from hlo_passes.problem import Problem
from hlo_passes.rewrite import move_copies


def issue(posed: Problem, choice: Choice, away: Sequence[str] = ()) -> tuple[Transfer, ...]:
    """The transfers in the order in which they are issued.

    Args:
      away: the tier of each eviction; none where all go to the host's.
    """
    link, out = posed.link, posed.link_out
    away = away or [out.destination] * len(posed.evictions)
    found = [
        Transfer(
            id=0,
            buffer=fetch.buffer,
            source=link.source if fetch.eviction is None else away[fetch.eviction],
            destination=link.destination,
            size=fetch.size,
            start=start,
            done=fetch.reads.start,
            end=fetch.reads.end,
        )
        for fetch, start in zip(choice.fetches, choice.starts, strict=True)
    ]
    back = {f.eviction: f.reads.start for f in choice.fetches}  # The last of each.
    for n, (evicted, departure) in enumerate(zip(posed.evictions, choice.departures, strict=True)):
        leaving = Transfer(
            id=0,
            buffer=evicted.buffer,
            source=out.source,
            destination=away[n],
            size=evicted.size,
            start=departure.start,
            done=departure.done,
            end=back[n],
            kind="evict",
        )
        found.append(leaving)
    found.sort(key=lambda t: (t.start, t.kind != "evict"))  # Stable: the order of the search.
    return tuple(replace(t, id=i) for i, t in enumerate(found))


def excess_of(posed: Problem, choice: Choice, budget: int) -> npt.NDArray[np.int64]:
    """Returns int64[ticks]: by how many bytes what is live lies above the budget as XLA:GPU packs
    it; all 0 where it comes within `budget`.

    It packs by the length of lives, in instructions of the module as it will be, and a slightly
    other length can be another packing: of plans with some dozen evictions one in three took up
    to a fifth more than it did when it was packed by ticks. So the module is written and packed
    once more. XLA:TPU packs as things come, for which ticks are enough.
    """
    excess = np.zeros(posed.ticks.end, np.int64)
    if posed.machine.platform != "gpu":
        return excess
    module = move_copies(posed.module, issue(posed, choice))
    ranges = compute_live_ranges(analyze_dataflow(module))
    over = measure_memory(ranges, "gpu").total_bytes - budget
    if over <= 0:
        return excess
    heap, backend = find_allocations(ranges, "gpu").heap, BACKENDS["gpu"]
    packing = assign_offsets(
        [h.size for h in heap],
        [h.events for h in heap],
        backend.alignment,
        groups=[h.group for h in heap],
        strategies=backend.strategies,
    )
    ticks = [posed.ticks.tick_of.get(i.id, -1) for i in ranges.sequence]
    tick_at = np.maximum.accumulate(np.array([0, *ticks]))[1:]
    for h, offset in zip(heap, packing.offsets, strict=True):
        above = offset + h.size - (packing.total - over)
        if above > 0:
            live = ranges.of_value[h.value.id]
            first, last = tick_at[live.start], tick_at[min(live.end, len(ticks)) - 1]
            np.maximum(excess[first : last + 1], above, out=excess[first : last + 1])
    return excess
