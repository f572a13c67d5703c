"""Which orders a plan depends on, worked out once instead of being checked at run time.

    data    done(i)  ──► the first instruction that reads what i brought
            done of an eviction  ──► start of what fetches it again
    reuse   the last reader of the bytes' earlier holder ──► start(i)
            done of an eviction or a store  ──► the first instruction from which its bytes are
            free

A program that runs its schedule in sequence keeps every fence by itself. One that runs
whatever is ready (XLA:CPU's thunk executor) gets each as a control edge, but for those that it
keeps by itself: it runs what touches the same bytes in the order of the schedule.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from hlo_passes.plan import Event, Fence, LogicalTime, Slot, Transfer


def derive_fences(
    transfers: Sequence[Transfer], slots: Sequence[Slot], end: LogicalTime
) -> tuple[Fence, ...]:
    """Returns the fences of a plan, in issue order, each order stated once.

    Args:
      transfers: in issue order.
      slots: of the arena that the transfers arrive in: of transfer i the slot of buffer
        ``"<buffer>#<i>"``, and those of the temporaries that share the arena.
      end: the tick behind the last.

    O(n log n) in transfers and slots.
    """
    last_held = _last_held(transfers, slots)
    fences: list[Fence] = []
    evicted: dict[str, int] = {}
    for transfer in transfers:
        done = Event("done", transfer.id)
        if transfer.kind == "evict":
            evicted[transfer.buffer] = transfer.id
            if transfer.done < end:
                fences.append(Fence(done, Event("compute", transfer.done), "reuse"))
            continue
        if transfer.buffer in evicted:
            away = Event("done", evicted[transfer.buffer])
            fences.append(Fence(away, Event("start", transfer.id), "data"))
        # Compute runs in order, so the latest of the earlier readers speaks for all.
        if last_held[transfer.id] > 0:
            last_read = Event("compute", last_held[transfer.id] - 1)
            fences.append(Fence(last_read, Event("start", transfer.id), "reuse"))
        fences.append(Fence(done, Event("compute", transfer.done), "data"))
    return tuple(fences)


def _last_held(transfers: Sequence[Transfer], slots: Sequence[Slot]) -> dict[int, LogicalTime]:
    """When the latest earlier holder of the bytes that a fetch arrives in lets go of them: tick
    by transfer id, 0 where there is none. Slots and starts are gone through in time."""
    by_name = {slot.buffer: slot for slot in slots}
    ending = sorted(slots, key=lambda s: s.live_range.end)
    freed = _Freed()
    found: dict[int, LogicalTime] = {}
    n = 0
    for t in sorted(transfers, key=lambda t: t.start):
        while n < len(ending) and ending[n].live_range.end <= t.start:
            freed.free(ending[n])
            n += 1
        if t.kind == "prefetch":
            found[t.id] = freed.latest(by_name[slot_name(t.buffer, t.id)])
    return found


class _Freed:
    """When each byte of an arena was last let go of, a step function of the offset.

    tick     0     │    7    │ 3  │    0
    offset   0     2         5    6        _bottoms: where each step begins
    """

    def __init__(self) -> None:
        self._bottoms = [0]
        self._ticks: list[LogicalTime] = [0]

    def free(self, slot: Slot) -> None:
        """Takes note of a slot that ends, no earlier than those before. Its step takes the
        place of those that it covers: O(log n) and the move of what lies above."""
        bottom, top = slot.offset, slot.offset + slot.size
        if bottom == top:
            return
        first, last = bisect_left(self._bottoms, bottom), bisect_right(self._bottoms, top)
        above = self._ticks[last - 1]
        self._bottoms[first:last] = [bottom, top]
        self._ticks[first:last] = [slot.live_range.end, above]

    def latest(self, slot: Slot) -> LogicalTime:
        """Returns the latest tick of a slot's bytes."""
        first = bisect_right(self._bottoms, slot.offset) - 1
        last = bisect_left(self._bottoms, slot.offset + slot.size)
        return max(self._ticks[first:last], default=0)


def slot_name(buffer: str, transfer: int) -> str:
    """The slot of one fetch of a buffer; a buffer that is fetched twice has two."""
    return f"{buffer}#{transfer}"
