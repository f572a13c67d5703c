import numpy as np
import numpy.typing as npt

type _Ints = npt.NDArray[np.int64]
type _Floats = npt.NDArray[np.float64]

# Rows of numbers, one behind the other. Of a fetch: bytes, the tick of its first reader, the one
# after its last, its eviction or -1. Of an eviction: bytes, the ticks at which it is written and
# free, the one at which it is returned or -1, whether anything holds it. Of a departure: its ticks.
# All raise TypeError for arrays of other elements, ValueError for numbers that do not go together,
# and IndexError for ticks that there are not.

def schedule_evictions(
    evictions: _Ints,
    fetches: _Ints,
    load: _Ints,
    costs: _Floats,
    out_busy: _Floats,
    capacity: int,
    bytes_per_s: float,
    latency_s: float,
    margin: float,
    /,
) -> list[tuple[int, int]]:
    """See `eviction.schedule_evictions`."""

def schedule_starts(
    fetches: _Ints,
    departures: _Ints,
    load: _Ints,
    clock: _Floats,
    in_busy: _Floats,
    capacity: int,
    bytes_per_s: float,
    latency_s: float,
    margin: float,
    slots: int,
    ring_alignment: int,
    /,
) -> tuple[list[int], int, int]:
    """See `prefetch.schedule_starts`; -1 for no `slots` and no `ring_alignment`.

    Returns:
      The starts; and, where it does not fit, the tick that needs most, and how many bytes; else -1.
    """

def step_times(
    fetches: _Ints,
    starts: _Ints,
    evictions: _Ints,
    departures: _Ints,
    clock: _Floats,
    in_busy: _Floats,
    out_busy: _Floats,
    in_bytes_per_s: float,
    in_latency_s: float,
    out_bytes_per_s: float,
    out_latency_s: float,
    is_one_queue: bool,
    /,
) -> tuple[float, list[float], list[float]]:
    """Returns the seconds of the step, those at which the link begins with each fetch, and those
    at which what is issued at each tick is. O(n log n) in transfers, and O(ticks)."""
