"""Which blocks of which prefixes are kept, and in which tier.

    cache = memplan.kv.PrefixCache(block_tokens=16, device=4096, host=65536)
    request = cache.pin(prompt, session="a")        prompt[: request.hit_tokens] is there already
    request.extend(blocks)                          pages for what is computed
    request.commit(tokens)                          is computed: others may use it
    cache.hint("a", return_in=40.0)                 what is known of when it comes back
    request.release()

A cache is numbers only: it gives out pages, and says what is to be copied from which to which
(`PrefixCache.take_moves`); whoever has the bytes copies them. It is safe for threads: each call
is whole.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Literal, NamedTuple, Self, get_args

import numpy as np
import numpy.typing as npt

from memplan.kv._prefix_cache import PrefixCache as _Core
from memplan.kv.errors import KvSettingError, NoPagesError

__all__ = ["Found", "Move", "Place", "Policy", "PrefixCache", "Request"]

type Policy = Literal["lru", "learned", "hints"]
type Tokens = Sequence[int] | npt.NDArray[np.integer]

_POLICIES: tuple[Policy, ...] = get_args(Policy.__value__)
_TIERS = ("device", "host", "disk")
_UNKNOWN, _RETURNS, _ENDS = range(3)


class Place(NamedTuple):
    """A page of a tier: 0 the device, 1 the host, 2 a disk."""

    tier: int
    page: int


class Move(NamedTuple):
    """A copy of one page's bytes."""

    source: Place
    target: Place


class Found(NamedTuple):
    """Tokens of a prefix that are held, from the first on: all those on the device come before
    those on the host, and these before those on a disk."""

    device: int
    host: int
    disk: int


class PrefixCache:
    """Blocks of tokens' keys and values, shared by all requests that begin with the same tokens.

    Args:
      block_tokens: tokens of a block, the unit of all that is kept.
      device, host, disk: pages of each tier, a block each.
      policy: ``"lru"``; ``"learned"``: by how soon blocks of their kind were used again, as learned
        from all requests; ``"hints"``: and by what is said of a session. Both follow LRU where that
        was better lately.
      history: requests that are remembered beyond those whose blocks are held; 200 bytes each, and
        as many for a session.
      keep: blocks that may stay on the device when no request has them; by default all it has.
      salt: what keys of prefixes begin with, an int of 64 bits. By default it is drawn, so that
        nobody can make prompts whose keys collide; with one, runs are repeated to the bit.

    Attributes:
      block_tokens: as given.
      pages: of the device, the host, and the disk.

    Raises:
      KvSettingError: for settings that make no cache.
    """

    def __init__(
        self,
        *,
        block_tokens: int,
        device: int,
        host: int = 0,
        disk: int = 0,
        policy: Policy = "hints",
        history: int = 1 << 18,
        keep: int | None = None,
        salt: int | None = None,
    ) -> None:
        if policy not in _POLICIES:
            raise KvSettingError("policy", policy, f"one of {', '.join(_POLICIES)}")
        for name, value, least in (
            ("block_tokens", block_tokens, 1),
            ("device", device, 1),
            ("host", host, 0),
            ("disk", disk, 0),
            ("history", history, 0),
            ("keep", device if keep is None else keep, 0),
        ):
            if not least <= value < 1 << 31:
                raise KvSettingError(name, value, f"an int of {least} to 2^31 - 1")
        self.block_tokens = block_tokens
        self.pages = (device, host, disk)
        keep = device if keep is None else keep
        salt = secrets.randbits(64) if salt is None else salt
        policies = _POLICIES.index(policy)
        self._core = _Core(block_tokens, self.pages, keep, history, policies, salt)
        self._most_sessions = history
        self._sessions: OrderedDict[Hashable, int] = OrderedDict()
        self._open: set[int] = set()
        self._lock = threading.Lock()  # Of the sessions; the core's calls are whole.

    def lookup(self, tokens: Tokens) -> Found:
        """Says how much of a prefix is held, and touches nothing.

        Args:
          tokens: int[n]; those behind the last whole block do not count.
        """
        found = self._core.find(self._blocks(tokens))
        return Found(*(blocks * self.block_tokens for blocks in found))

    def pin(self, tokens: Tokens, *, session: Hashable = None, now: float | None = None) -> Request:
        """A request begins: what is held of its prefix comes to the device, and stays until the
        request is released.

        Args:
          tokens: int[n], those of its prompt. Where the last one is to be run in any case, for
            what comes behind it, leave it out.
          session: who asks, by whom `hint` knows the request; None if nobody says anything.
          now: seconds on a clock that does not go back; `time.monotonic` by default.

        Raises:
          KvSettingError: for tokens that are none, or a time that is none.
        """
        now = time.monotonic() if now is None else now
        if not math.isfinite(now):
            raise KvSettingError("now", now, "seconds")
        hash(session)  # What is none must not be found out behind the beginning.
        number = self._core.begin(self._blocks(tokens), now)
        self._open.add(number)
        if session is not None:
            with self._lock:
                self._sessions[session] = number
                self._sessions.move_to_end(session)
                self._forget_sessions()
        return Request(self._core, number, self.block_tokens, self._end)

    def _forget_sessions(self) -> None:
        """The oldest; those whose requests are open are newest again."""
        while len(self._sessions) > self._most_sessions + len(self._open):
            session, number = self._sessions.popitem(last=False)
            if number in self._open:
                self._sessions[session] = number

    def _end(self, number: int) -> None:
        self._core.end(number)
        self._open.discard(number)

    def hint(
        self,
        session: Hashable,
        *,
        return_in: float | None = None,
        spread: float = 0.5,
        ends: bool = False,
    ) -> None:
        """Says when a session asks again for what it asked for last, before or after its request is
        released. A session that was never seen, or is forgotten, is none.

        Args:
          return_in: seconds from its request on.
          spread: by how much the logarithm of those is off (standard deviation).
          ends: it does not come back.

        Raises:
          KvSettingError: for seconds or a spread below 0, or not finite; or for both an end and a
            return.
        """
        for name, value in (("return_in", return_in or 0.0), ("spread", spread)):
            if not 0 <= value < math.inf:
                raise KvSettingError(name, value, "a finite number of at least 0")
        if ends and return_in is not None:
            raise KvSettingError("return_in", return_in, "none of who ends")
        with self._lock:
            number = self._sessions.get(session)
        if number is None:
            return
        if ends:
            self._core.say(number, _ENDS, 0.0, 0.0)
        elif return_in is None:
            self._core.say(number, _UNKNOWN, 0.0, 0.0)
        else:
            self._core.say(number, _RETURNS, return_in, spread)

    def take_moves(self) -> list[Move]:
        """Copies that are due before any page that was given out since the last call is read or
        written; in this order."""
        return [Move(Place(*source), Place(*target)) for source, target in self._core.take_moves()]

    def lose(self, page: int) -> None:
        """The bytes of a page on the device are lost: its block and all behind it are forgotten,
        and nobody else gets them. Requests that have them are to be released. O(blocks).

        Raises:
          ValueError: for a number of no page.
        """
        self._core.lose(page)

    def clear(self) -> None:
        """Forgets all blocks, as after a change of the model's weights; what requests have, when
        these are released. What was learned stays."""
        self._core.clear()

    def held(self) -> dict[str, int]:
        """Blocks that each tier holds, pinned ones among them."""
        return dict(zip(_TIERS, self._core.held(), strict=True))

    @property
    def room(self) -> int:
        """Pages on the device that no request has: as many can be asked for with
        `Request.extend`."""
        return self._core.room()

    @property
    def followed(self) -> Policy:
        """The policy whose hits were most lately, which decides now."""
        return _POLICIES[self._core.followed()]

    def check(self) -> None:
        """Raises RuntimeError with what of the cache's state is not as it must be. O(blocks)."""
        self._core.check()

    def _blocks(self, tokens: Tokens) -> npt.NDArray[np.int32]:
        array = _int32(tokens)
        return array[: array.size - array.size % self.block_tokens]


class Request:
    """A request, from `PrefixCache.pin` on until it is released. As a context it is released at the
    end of it."""

    def __init__(
        self, core: _Core, number: int, block_tokens: int, end: Callable[[int], None]
    ) -> None:
        self._core, self._number, self._block_tokens, self._end = core, number, block_tokens, end
        self._is_released = False

    @property
    def hit_tokens(self) -> int:
        """Tokens of the prompt, from the first on, that need not be computed."""
        return self._core.hits(self._number) * self._block_tokens

    @property
    def pages(self) -> list[int]:
        """Pages on the device, block by block: those of the hit, and what `extend` gave."""
        return self._core.pages(self._number)

    def extend(self, blocks: int) -> None:
        """Takes pages for so many more blocks.

        Raises:
          NoPagesError: where requests have all pages; then it has as many as before.
        """
        if not self._core.extend(self._number, blocks):
            raise NoPagesError(blocks, self._core.room())

    def commit(self, tokens: Tokens) -> None:
        """Blocks behind the hit, or behind those that were committed last, are computed: they
        serve others from now on. Where somebody else was faster, `pages` has his afterwards.

        Args:
          tokens: int[n], whole blocks; of the prompt, or behind it.

        Raises:
          KvSettingError: for tokens that are none.
          ValueError: for tokens that are no whole blocks, or others than those of the prompt, or
            more than it has pages for; then nothing is committed.
        """
        self._core.commit(self._number, _int32(tokens))

    def release(self) -> None:
        """The request ends. Its blocks may be kept, or not; pages behind the last one are free."""
        if not self._is_released:
            self._is_released = True
            self._end(self._number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def _int32(tokens: Tokens) -> npt.NDArray[np.int32]:
    array = np.asarray(tokens)
    if array.dtype == np.int32 and array.ndim == 1:
        return np.ascontiguousarray(array)  # Nothing to compare: it is asked for each request.
    if array.size == 0:
        return np.empty(0, np.int32)
    bounds = np.iinfo(np.int32)
    is_of_ints = array.ndim == 1 and array.dtype.kind in "iu"
    if not is_of_ints or array.min() < bounds.min or array.max() > bounds.max:
        shown = f"{array.dtype}{list(array.shape)}"
        raise KvSettingError("tokens", shown, "one dimension of ints of 32 bits")
    return np.ascontiguousarray(array, np.int32)
