"""XLA's buffer assignment as the text that every dump has beside a module.

    allocation 646: size 35610432, page 0, preallocated-temp:
     value: <6474 fusion.3{1} @0> (size=32768,offset=4096): bf16[256,64]{1,0}

It says what lies where, as the proto does, and not when: there is no trace of the heap. The format
is that of BufferAssignment::ToString (xla/service/buffer_assignment.cc).
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from hlo_passes.errors import MalformedModuleError
from hlo_passes.ir import Module
from hlo_passes.proto import hlo_pb2

_HEADING = "BufferAssignment:"
_ALLOCATION = re.compile(r"allocation (\d+): size (\d+)(?:, color (\d+))?((?:, .*)?):")
_VALUE = re.compile(
    r" value: <(\d+) ([^ {>]+)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): .*"
)

# No line of XLA's is longer, and a file of something else may be a single one.
_LONGEST = 1 << 20


def read_assignment(path: Path, module: Module) -> hlo_pb2.BufferAssignmentProto:
    """Reads the buffer assignment of `module`, in gzip or not.

    Raises:
      MalformedModuleError: when it is another text, is cut off within a line, or is about another
        module.
      OSError: when it cannot be opened or read.

    Complexity: linear in the lines.
    """
    found = hlo_pb2.BufferAssignmentProto()
    ids = {i.name: i.id for i in module.instructions.values()}
    known: set[int] = set()
    lines = _lines(path)
    if next(lines, "") != _HEADING:
        raise _error(path, f"its first line is not {_HEADING!r}")
    for number, line in enumerate(lines, 2):
        if allocation := _ALLOCATION.fullmatch(line):
            _add(found.buffer_allocations.add(), allocation)
        elif (value := _VALUE.fullmatch(line)) and found.buffer_allocations:
            buffer, name, index, size, offset = value.groups()
            if name not in ids:
                raise _error(path, f"line {number} has a value of {name}, the module has none")
            last = found.buffer_allocations[-1]
            last.assigned.add(logical_buffer_id=int(buffer), offset=int(offset), size=int(size))
            if int(buffer) not in known:
                known.add(int(buffer))
                added = found.logical_buffers.add(id=int(buffer), size=int(size), color=last.color)
                added.defined_at.instruction_id = ids[name]
                added.defined_at.shape_index.extend(int(n) for n in (index or "").split(",") if n)
        else:
            raise _error(path, f"line {number} is neither an allocation nor a value: {line[:80]!r}")
    return found


def _add(allocation: hlo_pb2.BufferAllocationProto, found: re.Match[str]) -> None:
    allocation.index, allocation.size = int(found[1]), int(found[2])
    allocation.color = int(found[3] or 0)
    words = found[4].split(", ")
    allocation.is_entry_computation_parameter = any(w.startswith("parameter ") for w in words)
    allocation.is_thread_local = "thread-local" in words
    allocation.is_constant = "constant" in words
    allocation.maybe_live_out = "maybe-live-out" in words


def _lines(path: Path) -> Iterator[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        try:
            while line := file.readline(_LONGEST):
                yield line.decode("utf-8", "replace").rstrip("\n")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise _error(path, f"it cannot be unpacked: {error}") from error


def _error(path: Path, problem: str) -> MalformedModuleError:
    return MalformedModuleError(
        str(path),
        f"no buffer assignment of this module as XLA writes it: {problem}",
        "The module is read without it.",
    )
