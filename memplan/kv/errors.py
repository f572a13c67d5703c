"""What of caches of keys and values cannot be."""

from __future__ import annotations

from collections.abc import Sequence

from hlo_passes.errors import MemplanError


class KvSettingError(MemplanError, ValueError):
    """A setting that makes no cache."""

    def __init__(self, name: str, found: object, expected: str) -> None:
        super().__init__(f"{name}={found!r}: expected {expected}.")


class NoPagesError(MemplanError):
    """Requests have all pages of the device."""

    def __init__(self, asked: int, room: int) -> None:
        super().__init__(
            f"no {asked} more pages on the device: requests have all of its pages but {room}. "
            "Release one of them first, or make the cache larger (device=)."
        )


class PageError(MemplanError):
    """Bytes of pages that are not those that were written.

    Attributes:
      pages: on the device, that were to have them.
    """

    def __init__(self, pages: Sequence[int]) -> None:
        self.pages = tuple(pages)
        shown = ", ".join(map(str, self.pages))
        super().__init__(
            f"pages {shown} of the device were to come from slower memory, and their checksums are "
            "not those of what was written. Nobody else gets them; release the requests that have "
            "them, and pin again."
        )


class TraceError(MemplanError, ValueError):
    """A file that is no trace of requests."""

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(
            f"{path}: {problem}. Expected a trace: a .npz of time, n_in, last and plen of "
            "requests, parent of blocks, and meta; or lines of JSON with timestamp, "
            "input_length and hash_ids."
        )
