"""The transfers of a choice, in the order in which they are issued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hlo_passes.placing.placement import Choice
from hlo_passes.placing.problem import Problem
from hlo_passes.plan import Transfer


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
    # Of a temporary the last fetch of it; a result stays.
    back = dict.fromkeys(range(len(posed.evictions)), posed.ticks.end)
    back |= {f.eviction: f.reads.start for f in choice.fetches if f.eviction is not None}
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
