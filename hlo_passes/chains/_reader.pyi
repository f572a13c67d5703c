from collections.abc import Buffer

type _Space = tuple[str, int, str, int, int, str, bool]
type _Slot = tuple[str, int, int, int]
type _Segment = tuple[str, tuple[int, ...], tuple[int, ...]]
type _Waits = tuple[tuple[int, bool], ...]
type _Descriptor = tuple[int, int, int, int, int, int, int, int, int, _Waits]

def check(data: Buffer, /) -> tuple[int, str] | None:
    """Says what `reader.h` finds wrong: the byte offset of the first problem, and the problem.

    Returns:
      None for a chain; of all else what `ChainFormatError` of `from_bytes` says.

    Time O(n) for n bytes.
    """

def content(
    data: Buffer, /
) -> tuple[
    bytes,
    tuple[_Space, ...],
    tuple[_Slot, ...],
    tuple[str, ...],
    tuple[_Segment, ...],
    tuple[_Descriptor, ...],
]:
    """Reads a chain with `reader.h`.

    Returns:
      fingerprint, spaces, slots, streams, segments and descriptors. Of these the fields: name,
      kind, tier, bytes, alignment, path, writable; name, space, offset, bytes; name; name,
      arguments, results; and op, stream, tick, source, destination, segment, bytes,
      source_offset, destination_offset, waits.

    Raises:
      ValueError: for what is no chain.
    """
