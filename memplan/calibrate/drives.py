"""How fast a drive is read and written past the page cache, by how many requests are under way."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from memplan.calibrate.measuring import Timed

_FILE_BYTES = 1 << 28
_BLOCK = 1 << 20
_SMALL = 1 << 12
DEPTHS = (1, 4, 16)
"""How many reads are under way."""
_WRITES = 4


class Drive:
    """A file in a folder, which goes when this is closed.

    Attributes:
      timed: what to measure, by what it is and how many requests are under way: ``"latency"`` is
        one small read, ``"read"`` and ``"write"`` are of the whole file.

    Raises:
      OSError: when the folder's file system has a page cache only (a RAM disk), or is full.
    """

    def __init__(self, folder: Path) -> None:
        handle, name = tempfile.mkstemp(dir=folder, prefix="memplan-calibrate-")
        os.close(handle)
        self._path = Path(name)
        try:
            self._path.write_bytes(os.urandom(_BLOCK) * (_FILE_BYTES // _BLOCK))
            self._file = os.open(name, os.O_RDWR | os.O_DIRECT)
        except OSError:
            self._path.unlink()
            raise
        os.fsync(self._file)
        self._pool = ThreadPoolExecutor(max(DEPTHS))
        # A mapping of its own lies at the beginning of a page, as these requests ask for.
        self._blocks = [mmap.mmap(-1, _BLOCK) for _ in range(max(DEPTHS))]
        small = memoryview(self._blocks[0])[:_SMALL]
        self.timed: Mapping[tuple[str, int], Timed] = {
            ("latency", 1): Timed(partial(os.preadv, self._file, [small], _FILE_BYTES // 2), True),
            **{("read", depth): Timed(self._all(os.preadv, depth), True) for depth in DEPTHS},
            ("write", _WRITES): Timed(self._all(os.pwritev, _WRITES), True),
        }

    def _all(self, of: Callable[..., int], depth: int) -> Callable[[], None]:
        def part(n: int) -> None:
            for at in range(n * _BLOCK, _FILE_BYTES, depth * _BLOCK):
                of(self._file, [self._blocks[n]], at)

        def run() -> None:
            for one in [self._pool.submit(part, n) for n in range(depth)]:
                one.result()

        return run

    def bytes_per_s(self, of: str) -> float:
        """Of ``"read"`` or ``"write"``, at the depth that is best."""
        best = min(t.timing.seconds for (what, _), t in self.timed.items() if what == of)
        return _FILE_BYTES / best

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._file)
        self._path.unlink()
