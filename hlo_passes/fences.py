"""Which orders a plan depends on, worked out once instead of being checked at run time.

    data    done(i)  ──► the first instruction that reads what i brought
            done of an eviction  ──► start of what fetches it again
    reuse   the last reader of the bytes' earlier holder ──► start(i)
            done of an eviction  ──► the first instruction from which its bytes are free

A program that runs its schedule in sequence keeps every fence by itself. One that runs
whatever is ready (XLA:CPU's thunk executor) gets each as a control edge.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hlo_passes.plan import Event, Fence, Slot, Transfer


def derive_fences(transfers: Sequence[Transfer], slots: Sequence[Slot]) -> tuple[Fence, ...]:
    """Returns the fences of a plan, in issue order, each order stated once.

    Args:
      transfers: in issue order.
      slots: of the arena that the transfers arrive in: of transfer i the slot of buffer
        ``"<buffer>#<i>"``, and those of the temporaries that share the arena.

    Time O(transfers × slots), vectorised.
    """
    by_name = {slot.buffer: slot for slot in slots}
    offsets = np.array([s.offset for s in slots], dtype=np.int64)
    tops = offsets + np.array([s.size for s in slots], dtype=np.int64)
    ends = np.array([s.live_range.end for s in slots], dtype=np.int64)
    fences: list[Fence] = []
    evicted: dict[str, int] = {}
    for transfer in transfers:
        done = Event("done", transfer.id)
        if transfer.kind == "evict":
            evicted[transfer.buffer] = transfer.id
            fences.append(Fence(done, Event("compute", transfer.done), "reuse"))
            continue
        if transfer.buffer in evicted:
            away = Event("done", evicted[transfer.buffer])
            fences.append(Fence(away, Event("start", transfer.id), "data"))
        slot = by_name[slot_name(transfer.buffer, transfer.id)]
        shares = (offsets < slot.offset + slot.size) & (slot.offset < tops)
        earlier = ends[shares & (ends <= transfer.start)]
        # Compute runs in order, so the latest of the earlier readers speaks for all.
        if earlier.size and earlier.max() > 0:
            last_read = Event("compute", int(earlier.max()) - 1)
            fences.append(Fence(last_read, Event("start", transfer.id), "reuse"))
        fences.append(Fence(done, Event("compute", transfer.done), "data"))
    return tuple(fences)


def slot_name(buffer: str, transfer: int) -> str:
    """The slot of one fetch of a buffer; a buffer that is fetched twice has two."""
    return f"{buffer}#{transfer}"
