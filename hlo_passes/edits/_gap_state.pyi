from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

type _Ints = npt.NDArray[np.int64]
type _Floats = npt.NDArray[np.float64]
type _Gap = tuple[int, int]  # A temporary, and the access with which the gap starts.

class Catalog:
    """Temporaries, and what taking one away costs (see `gap_state.h`).

    Args:
      temporaries: of each size, bytes added when written, bytes of other arrays beside, numbers of
        its maker and of its resident or -1, tick at which it is written, seconds of its maker and
        what a run of that again is charged beside them, whether there is an obstacle, whether it
        can be made again, ticks at which it is read, and operands of its maker: a temporary; or
        what is not made, and the tick until which it is there: -1, or -2 less the number of a
        weight; and temporaries among them in whose bytes it may lie where they are read there for
        the last time.
      weights: int64[any], bytes of what makers read of the host.
      compute: costs, float64[ticks], seconds of each; in_busy and out_busy, those for which it
        occupies either link itself.
      links: bytes a second and latency in seconds of the link in and of that out; how much slower
        than that a link may be; seconds that each byte that moves is charged; whether they share
        one queue; whether temporaries can be taken away at all.
      transfers: fetches, what comes whatever is taken, as `placing._schedule` has it;
        int64[fetches], which of the weights each brings, or -1; evictions, what leaves, likewise.
      packing: residents, int64[3 · any], bytes and ticks of what shares the arena with fetches;
        holders, int64[evictions], the resident in whose bytes each lies, or the fetch, behind all
        of those, -1 where there is none; joined, int64[any], ticks at which something else is
        written into the bytes of a resident; and how the compiler packs it: alignment, in_order,
        smallest, table (see `placing.arena`).

    Raises:
      TypeError, ValueError, IndexError: for what does not go together.
    """

    def __init__(
        self,
        temporaries: Sequence[tuple[object, ...]],
        weights: _Ints,
        compute: tuple[_Floats, _Floats, _Floats],
        links: tuple[float, float, float, float, float, float, bool, bool],
        transfers: tuple[_Ints, _Ints, _Ints],
        packing: tuple[_Ints, _Ints, _Ints, int, bool, int, int],
    ) -> None: ...

class State:
    """Gaps that are taken, none at first; see `state.EditState`.

    Args:
      load, costs: int64[ticks] and float64[ticks], which are written from now on.

    Raises:
      TypeError, ValueError: for arrays of other elements, or another length.
      IndexError: of all that takes a gap, for one that there is not.
    """

    def __init__(self, catalog: Catalog, load: _Ints, costs: _Floats, depth: int, /) -> None: ...
    def copied(self, load: _Ints, costs: _Floats, /) -> State:
        """Returns the same with other arrays, which have what those of this one have."""

    def evict(self, temporary: int, start: int, /) -> None: ...
    def recompute(self, temporary: int, start: int, capacity: int, most_s: float, /) -> bool: ...
    def take(self, capacity: int, link_price: float, link_s: float, smallest: int, /) -> None:
        """See `greedy`. A few rounds of all gaps, each O(gaps log gaps + ticks of those taken)."""

    def improve(
        self, capacity: int, packed: int, terms: _Floats, smallest: int, slots: int, times: int, /
    ) -> None:
        """Searches for a faster selection, `times` times, each O(what `take` takes).

        Args:
          packed: bytes above which a packing counts as slower.
          terms: float64[2 · any], pairs of a link's price and of seconds at that price.
        """

    def cost(self, capacity: int, slots: int, /) -> float:
        """Predicts the seconds of a step and what is charged beside them; infinity where its load
        exceeds `capacity`, or its fetches have no room (-1: any number of `slots`).
        O(transfers · log + ticks)."""

    def fitted(
        self, capacity: int, slots: int, /
    ) -> tuple[int, float, list[tuple[int, int, int]], list[tuple[int, int, int]]]:
        """See `EditState.fitted`: bytes and costs; of each eviction the temporary, or -1 less its
        number among those whatever is taken, and the ticks at which it is issued and waited for; of
        each fetch the temporary, or -1 less the number of the weight, the tick of its first reader,
        and that at which it is issued. With none, 2**63 - 1 bytes. A few times O(n log n)."""

    def dearest(self) -> list[_Gap]: ...
    def give_back(self, capacity: int, among: Sequence[_Gap], /) -> None: ...
    def gaps(self) -> list[tuple[int, int, Literal["evict", "recompute"], int]]: ...
    def accesses(self, temporary: int, /) -> list[int]: ...
