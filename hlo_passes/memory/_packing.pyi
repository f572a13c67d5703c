import numpy as np
import numpy.typing as npt

type _Ints = npt.NDArray[np.int64]
type _Interval = tuple[int, int]

class Occupancy:
    """Which offsets are taken during a range of time (see `occupancy.h`); none at first.

    Args:
      moments: the last one that a range may end with.
    """

    def __init__(self, moments: int, /) -> None: ...
    def take(self, live_range: _Interval, bottom: int, top: int, /) -> None:
        """Takes the offsets from `bottom` to `top` during a range. O(log moments) unions.

        Raises:
          IndexError: for a range that is empty or reaches beyond the last moment.
        """

    def taken(self, live_range: _Interval, /) -> list[_Interval]:
        """Returns what is taken at any moment of a range: sorted intervals that do not touch.
        Of n intervals at O(log moments) nodes, O(n log log moments).

        Raises:
          IndexError: as `take`.
        """

def place(
    moments: int,
    sizes: _Ints,
    counts: _Ints,
    starts: _Ints,
    ends: _Ints,
    alignment: int,
    lowest: bool,
    offsets: _Ints,
    /,
) -> None:
    """Gives one rectangle, or one group of them, after the other an offset.

    Args:
      moments: see `Occupancy`.
      sizes, counts: int64[groups]: bytes, and of how many rectangles.
      starts, ends: int64[rectangles], group by group: half-open ranges of moments.
      alignment: every offset is a multiple of it.
      lowest: take the lowest gap that fits, else the smallest, of equal ones the lowest.
      offsets: int64[groups], which is written: bytes; 0 for a group of no bytes.

    Raises:
      TypeError: for arrays of other elements.
      ValueError: for numbers that do not go together.
      IndexError: as `Occupancy.take`.
    """
