import numpy as np
import numpy.typing as npt

type _Tokens = npt.NDArray[np.int32]
type _Place = tuple[int, int]

class PrefixCache:
    """See `prefix_cache.h`; `memplan.kv.PrefixCache` is its face.

    Args:
      block_tokens: tokens of a block.
      pages: of the device, the host, and a disk.
      keep: blocks that stay on the device while no request has them, at most.
      history: ends of requests' paths that are remembered beyond those of blocks that are held.
      policy: 0 LRU, 1 learned, 2 hints.
      salt: what keys of prefixes begin with.

    Raises:
      ValueError: for numbers out of range.
    """

    def __init__(
        self,
        block_tokens: int,
        pages: tuple[int, int, int],
        keep: int,
        history: int,
        policy: int,
        salt: int,
        /,
    ) -> None: ...
    def find(self, tokens: _Tokens, /) -> tuple[int, int, int]:
        """How many of the blocks, from the first on, each tier holds; changes nothing."""

    def begin(self, tokens: _Tokens, now: float, /) -> int:
        """A request for a prefix at a time in seconds; returns its number.

        Raises:
          TypeError: for arrays of other elements than int32.
          ValueError: for tokens that are no whole blocks.
        """

    def hits(self, request: int, /) -> int:
        """How many blocks, from the first on, need not be computed.

        Raises:
          ValueError: for a request that has ended; so all that take one, but `say`.
        """

    def pages(self, request: int, /) -> list[int]:
        """Those on the device, block by block."""

    def extend(self, request: int, pages: int, /) -> bool:
        """Whether there are so many more pages for it, which it has then."""

    def commit(self, request: int, tokens: _Tokens, /) -> None:
        """The next blocks are computed. Its pages may change.

        Raises:
          ValueError: for more blocks than it has pages for, or for other tokens than it began with.
        """

    def say(self, request: int, kind: int, seconds: float, spread: float, /) -> None:
        """What is known of its next use: 0 nothing, 1 in so many seconds, 2 none. Of one that ended
        so long ago that it is forgotten, nothing happens."""

    def end(self, request: int, /) -> None: ...
    def lose(self, page: int, /) -> None:
        """Forgets the block that has a page of the device, and all behind it; what requests have
        of them, when these end. O(blocks).

        Raises:
          ValueError: for a number of no page.
        """

    def clear(self) -> None:
        """Forgets all blocks, as `lose` does."""

    def room(self) -> int:
        """Pages on the device that requests do not have."""

    def take_moves(self) -> list[tuple[_Place, _Place]]:
        """Copies from (tier, page) to (tier, page) that are due, in order; they are forgotten."""

    def held(self) -> tuple[int, int, int]:
        """Blocks of each tier."""

    def remembered(self) -> int: ...
    def followed(self) -> int:
        """The policy that is followed now; as for the constructor."""

    def check(self) -> None:
        """Raises RuntimeError with what is not as it must be. O(blocks)."""
