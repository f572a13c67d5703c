"""The bytes of a cache's pages: on the device, on the host, and in a file.

    pools = [jnp.zeros((device_pages, *page_shape), jnp.bfloat16) for _ in layers]
    store = memplan.kv.PageStore(cache, pools, folder="/scratch")
    request = cache.pin(prompt)
    store.settle()                            what was found is on the device now
    logits, store.pools = step(store.pools, request.pages, ...)

A page is one row of each pool. Off the device its rows are a *record*, one after the other, with a
CRC-32C that is compared when they come back. Threads may settle at the same time.
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from custom_calls import library
from memplan.kv.cache import Move, PrefixCache
from memplan.kv.errors import KvSettingError, PageError

__all__ = ["PageStore"]

_BLOCK = 4096
"""Bytes: no disk asks for coarser alignment."""
_MOST_AT_ONCE = 64
"""Pages of one transfer."""
_DEVICE, _HOST, _DISK = range(3)

type _Bytes = npt.NDArray[np.uint8]


class PageStore:
    """Pages of all tiers of a cache.

    Args:
      cache: whose pages these are.
      pools: a tree of arrays [device pages, ...] on the device, as steps read and write them.
      folder: where the file of the disk's pages is; it has no name there, and is gone with the
        process, however that ends.

    Attributes:
      pools: as given; whoever donates them to a step puts its results here.
      record_bytes: of a page off the device.

    Raises:
      KvSettingError: for pools of other pages than the cache's, or no folder where it has a disk.
      OSError: for a folder in which no file can be written.
    """

    def __init__(
        self, cache: PrefixCache, pools: Any, folder: str | os.PathLike[str] | None = None
    ) -> None:
        device, host, disk = cache.pages
        leaves = jax.tree.leaves(pools)
        if not leaves:
            raise KvSettingError("pools", pools, "a tree of arrays")
        for leaf in leaves:
            if leaf.ndim < 1 or leaf.shape[0] != device:
                raise KvSettingError("pools", leaf.shape, f"arrays [{device}, ...]")
        if disk and folder is None:
            raise KvSettingError("folder", folder, f"a folder for the {disk} pages on disk")
        self._cache, self.pools = cache, pools
        self._rows = [(leaf.shape[1:], np.dtype(leaf.dtype)) for leaf in leaves]
        self._sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in self._rows]
        self.record_bytes = -(-sum(self._sizes) // _BLOCK) * _BLOCK
        self._host = _records(host, self.record_bytes)
        self._staged = _records(_MOST_AT_ONCE, self.record_bytes)
        self._sums: dict[tuple[int, int], int | None] = {}
        self._due: list[Move] = []
        self._lost: set[int] = set()
        self._lock = threading.Lock()
        self._file = None
        if disk:
            # It has no name, so that a process that is killed leaves nothing.
            self._file = tempfile.TemporaryFile(dir=folder)
            weakref.finalize(self, self._file.close)
            os.posix_fallocate(self._file.fileno(), 0, disk * self.record_bytes)

    @property
    def file(self) -> str | None:
        """A path of the file of the disk's pages, if there is one, in this process alone; they are
        records, one after the other."""
        return None if self._file is None else f"/proc/self/fd/{self._file.fileno()}"

    @property
    def _path(self) -> str:
        assert self.file is not None, "the cache has no disk"
        return self.file

    def settle(self) -> None:
        """Carries out what the cache says is to be copied. Until then no page that it gave out may
        be read or written.

        Raises:
          PageError: where bytes are not those that were written: the cache has lost them
            (`PrefixCache.lose`), and all else is done. Release the requests that have its pages,
            and pin again.
          OSError: where the file cannot be read or written. What was not copied is the next time.
        """
        with self._lock:
            self._due += self._cache.take_moves()
            for moves in _batches([*self._due]):
                self._move(moves)
                del self._due[: len(moves)]
            lost, self._lost = sorted(self._lost), set()
            for page in lost:
                self._cache.lose(page)
        if lost:
            raise PageError(lost)

    def warm(self) -> None:
        """Compiles what `settle` runs, so that no call of it waits for that; the pools stay as they
        are."""
        if not any(self._cache.pages[_HOST:]):
            return
        with self._lock:
            count = 1
            while count <= _MOST_AT_ONCE:
                rows = _take(self.pools, np.zeros(count, np.int32))
                nowhere = np.full(count, self._cache.pages[0], np.int32)
                self.pools = _put(self.pools, jax.tree.map(np.asarray, rows), nowhere)
                count *= 2

    def _move(self, moves: Sequence[Move]) -> None:
        source, target = moves[0].source.tier, moves[0].target.tier
        come, go = ([move[end].page for move in moves] for end in (0, 1))
        records = self._read(source, come)
        found = [library.load().crc32c(record) for record in records]
        if source == _DEVICE:  # What is lost has no sum that could be right.
            sums = [
                None if page in self._lost else one for page, one in zip(come, found, strict=True)
            ]
        else:
            sums = [self._sums[source, page] for page in come]
        if target == _DEVICE:
            self._lost.difference_update(go)
            self._lost.update(page for page, a, b in zip(go, sums, found, strict=True) if a != b)
            self.pools = _put(self.pools, self._leaves(records), _padded(go, self._cache.pages[0]))
            return
        self._sums.update(((target, page), one) for page, one in zip(go, sums, strict=True))
        if target == _HOST:
            self._host[go] = records
            return
        for page, record in zip(go, records, strict=True):
            offset = page * self.record_bytes
            library.load().write_file(self._path, record, offset)

    def _read(self, tier: int, pages: Sequence[int]) -> _Bytes:
        """uint8[pages, record bytes]."""
        records = self._staged[: len(pages)]
        if tier == _HOST:
            records[:] = self._host[pages]
        elif tier == _DISK:
            for page, record in zip(pages, records, strict=True):
                library.load().read_file(self._path, record, page * self.record_bytes)
        else:
            begin = 0
            rows = _take(self.pools, _padded(pages, 0))
            for leaf, size in zip(jax.tree.leaves(rows), self._sizes, strict=True):
                own = np.ascontiguousarray(np.asarray(leaf)[: len(pages)])
                records[:, begin : begin + size] = own.reshape(len(pages), -1).view(np.uint8)
                begin += size
            records[:, begin:] = 0
        return records

    def _leaves(self, records: _Bytes) -> Any:
        """Rows of each pool, padded as `_padded` pads their pages."""
        begin, leaves = 0, []
        rows = np.arange(_power(len(records))) % len(records)
        for (shape, dtype), size in zip(self._rows, self._sizes, strict=True):
            own = np.ascontiguousarray(records[:, begin : begin + size])[rows]
            leaves.append(own.view(dtype).reshape(len(rows), *shape))
            begin += size
        return jax.tree.unflatten(jax.tree.structure(self.pools), leaves)


@partial(jax.jit, donate_argnums=0)
def _put(pools: Any, rows: Any, pages: jax.Array) -> Any:
    return jax.tree.map(lambda pool, row: pool.at[pages].set(row, mode="drop"), pools, rows)


@jax.jit
def _take(pools: Any, pages: jax.Array) -> Any:
    return jax.tree.map(lambda pool: pool[pages], pools)


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _padded(pages: Sequence[int], fill: int) -> npt.NDArray[np.int32]:
    """As many as a power of two, so that few programs are compiled."""
    return np.array([*pages, *[fill] * (_power(len(pages)) - len(pages))], np.int32)


def _records(count: int, size: int) -> _Bytes:
    """uint8[count, size], each at the beginning of a block."""
    memory = np.empty(count * size + _BLOCK, np.uint8)
    begin = -memory.ctypes.data % _BLOCK
    return memory[begin : begin + count * size].reshape(count, size)


def _batches(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Moves that can be carried out at once, in order: between the same tiers, to a page each."""
    batch: dict[int, Move] = {}  # By their targets' pages.
    tiers = None
    for move in moves:
        between = move.source.tier, move.target.tier
        page = move.target.page
        if batch and (between != tiers or page in batch or len(batch) == _MOST_AT_ONCE):
            yield list(batch.values())
            batch = {}
        tiers = between
        batch[page] = move
    if batch:
        yield list(batch.values())
