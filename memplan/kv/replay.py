"""A trace of requests, replayed: how many of its tokens need not be computed?

A hit is a prefix: blocks count until the first that is not held. Rates are those of all requests
but the first quarter, which fills the cache. Each request is over when the next one comes, and at
its end no more blocks stay than there is room for.
"""

from __future__ import annotations

import heapq
import math
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from memplan.kv.cache import PrefixCache
from memplan.kv.errors import KvSettingError
from memplan.kv.trace import Trace

__all__ = ["REPLAYED", "Hints", "Replayed", "declared", "replay"]

type ReplayedPolicy = Literal["lru", "belady", "learned", "hints"]
REPLAYED: tuple[ReplayedPolicy, ...] = ("lru", "belady", "learned", "hints")

_SOON = 1e-3
"""Seconds: a return that is declared for at once."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What is said of each request.

    Attributes:
      due: float64[N], seconds until its prefix is asked for again; nan where nothing is said.
      ends: bool[N], whether it is said that its session ends.
      spread: by how much the logarithms of `due` are off, as is said.
    """

    due: npt.NDArray[np.float64]
    ends: npt.NDArray[np.bool_]
    spread: float


def declared(trace: Trace, spread: float = 0.5, ends: float = 0.9, seed: int = 0) -> Hints:
    """What sessions of a trace say that know themselves about so well.

    Args:
      trace: the requests.
      spread: of the lognormal factor by which each declared return is off.
      ends: the share of those that do not return who say so; the others say nothing.
      seed: of what is drawn.

    Raises:
      KvSettingError: for numbers out of range.
    """
    if not 0 <= spread < math.inf:
        raise KvSettingError("spread", spread, "a number of at least 0")
    if not 0 <= ends <= 1:
        raise KvSettingError("ends", ends, "a share, 0 to 1")
    if seed < 0:
        raise KvSettingError("seed", seed, "an int of at least 0")
    random = np.random.default_rng(seed)
    normal, uniform = random.standard_normal(len(trace.paths)), random.random(len(trace.paths))
    returns = trace.returns >= 0
    away = np.maximum(trace.time[trace.returns] - trace.time, _SOON)
    due = np.where(returns, away * np.exp(spread * normal), np.nan)
    return Hints(due, ~returns & (uniform < ends), spread)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a replay.

    Attributes:
      hit_rate: tokens that were held, of those of all prompts.
      seconds: processor time of all calls of the cache.
      block_accesses: blocks that were asked for, in all requests.
    """

    hit_rate: float
    seconds: float
    block_accesses: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def replay(
    trace: Trace,
    capacity: int,
    policy: ReplayedPolicy = "hints",
    hints: Hints | None = None,
    history: int = 1 << 18,
) -> Replayed:
    """Replays a trace.

    Args:
      trace: the requests.
      capacity: blocks that are held.
      policy: one of a cache; or ``"belady"``, which knows all requests to come, keeps what is
        needed next, and takes nothing that is needed later (Belady 1966, with bypass): of single
        blocks no policy hits more.
      hints: what is said, for ``"hints"``; by default `declared` of the trace.
      history: as for `PrefixCache`.

    Raises:
      KvSettingError: for a capacity out of range, another policy, or hints of other requests.
    """
    if not 1 <= capacity < 1 << 30:
        raise KvSettingError("capacity", capacity, "1 to 2^30 - 1 blocks")
    if policy not in REPLAYED:
        raise KvSettingError("policy", policy, f"one of {', '.join(REPLAYED)}")
    hints = (hints or declared(trace)) if policy == "hints" else None
    if hints is not None and hints.due.shape != trace.time.shape:
        raise KvSettingError("hints", hints.due.shape, f"those of {trace.time.size} requests")
    begin = time.process_time()
    if policy == "belady":
        hits = _belady(trace, capacity)
    else:
        longest = max((path.size for path in trace.paths), default=0)
        cache = PrefixCache(
            block_tokens=1,
            device=capacity + longest,
            policy=policy,
            keep=capacity,
            salt=0,
            history=history,
        )
        hits = _cached(trace, cache, hints)
    seconds = time.process_time() - begin
    counted = slice(len(trace.paths) // 4, None)
    asked = int(trace.n_in[counted].sum(dtype=np.int64))
    rate = int(hits[counted].sum()) * trace.block_tokens / asked if asked else 0.0
    return Replayed(rate, seconds, sum(path.size for path in trace.paths))


def _cached(trace: Trace, cache: PrefixCache, hints: Hints | None) -> npt.NDArray[np.int64]:
    hits = np.zeros(len(trace.paths), np.int64)
    for number, path in enumerate(trace.paths):
        with cache.pin(path, session=0, now=float(trace.time[number])) as request:
            hits[number] = hit = request.hit_tokens
            request.extend(path.size - hit)
            request.commit(path[hit:])
            if hints is not None:
                due = float(hints.due[number])
                back = None if math.isnan(due) else due
                cache.hint(0, return_in=back, spread=hints.spread, ends=bool(hints.ends[number]))
    return hits


def _belady(trace: Trace, capacity: int) -> npt.NDArray[np.int64]:
    uses: list[list[int]] = [[] for _ in range(trace.blocks)]
    for number in reversed(range(len(trace.paths))):
        for block in trace.paths[number].tolist():
            uses[block].append(number)
    hits = np.zeros(len(trace.paths), np.int64)
    next_use: dict[int, int] = {}  # Of what is held.
    latest: list[tuple[int, int, int]] = []  # -next use, -depth, block; stale ones among them.
    for number, path in enumerate(trace.paths):
        blocks: list[int] = path.tolist()
        hits[number] = next(
            (k for k, block in enumerate(blocks) if block not in next_use), path.size
        )
        for depth, block in enumerate(blocks):
            uses[block].pop()
            if uses[block]:
                next_use[block] = uses[block][-1]
                heapq.heappush(latest, (-uses[block][-1], -depth, block))
            else:
                next_use.pop(block, None)
        while len(next_use) > capacity:
            use, _, block = heapq.heappop(latest)
            if next_use.get(block) == -use:
                del next_use[block]
    return hits
