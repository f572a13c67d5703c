from collections.abc import Buffer, Sequence
from os import PathLike

from typing_extensions import CapsuleType

copy_start: CapsuleType
copy_done: CapsuleType

type _Record = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int]

def trace_begin(capacity: int, /) -> None: ...
def trace_end() -> tuple[list[_Record], int]: ...
def set_link_bandwidth(bytes_per_second: float, /) -> None: ...
def read_file(
    path: str | PathLike[str],
    buffer: Buffer,
    offset: int,
    *,
    depth: int = 16,
    chunk: int = 1 << 20,
    use_uring: bool = True,
) -> None:
    """Fills a buffer with the bytes of a file from `offset` on, as a `copy_start` out of a
    mapped one does.

    Args:
      depth: requests under way at once.
      chunk: bytes of a request, a multiple of 4096.
      use_uring: False for threads, as where the kernel has no io_uring.

    Raises:
      OSError: names the file, and the byte at which the read ended.
    """

def write_file(
    path: str | PathLike[str],
    buffer: Buffer,
    offset: int,
    *,
    depth: int = 16,
    chunk: int = 1 << 20,
    use_uring: bool = True,
) -> None:
    """Writes a buffer into a file that is there; see `read_file`. It is on the disk after an
    `os.fdatasync`."""

def file_place(address: int, /) -> tuple[str, int, tuple[int, int] | None] | None:
    """The path and the offset of the byte at an address, if it is that of a `MappedFile`, and bytes
    and checksum of the stretch that begins there, if there is one."""

def crc32c(data: Buffer, /) -> int:
    """CRC-32C (Castagnoli) of all bytes of a buffer."""

class MappedFile:
    """All bytes of a file, read-only, as a buffer. While it lives, a `copy_start` whose operand
    lies in it reads the file itself, past the page cache; whoever else touches the bytes has the
    kernel read pages on demand.

    Args:
      summed: stretches whose CRC-32C is known: offset, bytes and checksum of each. A `copy_start`
        of all of one ends in an error where the bytes that were read have another.

    Raises:
      OSError: when the file cannot be opened or mapped, or is empty.
    """

    def __new__(
        cls, path: str | PathLike[str], summed: Sequence[tuple[int, int, int]] = (), /
    ) -> MappedFile: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
