"""What XLA:GPU's executable does, as its dumps say it: a sequence of thunks.

    003: kWhile         [prev=002 (1) | next=000 (1)]
      body:
        000: kCommandBuffer [prev=005 (2) | sink        ]
            009: kCustomKernel [source       | next=010 (1)] gemm_fusion_dot grid: [2048, 1, 1] ...

What is captured in a graph stands inside a ``kCommandBuffer``, in the sequence after XLA's passes
over thunks; where these change nothing, there is only the one before. The formats are those of
ThunkSequence::ToString (xla/backends/gpu/runtime/thunk.cc) and ThunkMetadataListProto.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hlo_passes.errors import MalformedModuleError
from hlo_passes.ir import Thunk

_THUNK = re.compile(r"( *)(\d+): k(\w+)(?: *\[[^\]]*\])? *(.*)")
_STREAM = re.compile(r"stream=(\w+)")
_METADATA = re.compile(r'profile_annotation: "([^"]*)"|thunk_id: (\d+)|^thunk_metadata', re.M)


def read_thunks(sequence: Path, metadata: Path | None) -> tuple[Thunk, ...]:
    """Reads a sequence of thunks.

    Args:
      metadata: the file with the names of their instructions.

    Raises:
      MalformedModuleError: when it has lines, and none is a thunk.
      OSError: when a file cannot be read.
    """
    names = {} if metadata is None else _names(_text(metadata))
    lines = _text(sequence).splitlines()
    matched = filter(None, map(_THUNK.fullmatch, lines))
    rows = [(len(of[1]), int(of[2]), of[3], of[4]) for of in matched]
    if not rows and not lines:
        return ()
    if not rows:
        raise MalformedModuleError(
            sequence.name, "it has no thunk", "Expected lines like 001: kCopy [source | sink]."
        )
    found, _ = _nested(rows, 0, names)
    return found


def _text(path: Path) -> str:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", errors="replace") as file:
        return file.read()


def _nested(
    rows: Sequence[tuple[int, int, str, str]], begin: int, names: Mapping[int, str]
) -> tuple[tuple[Thunk, ...], int]:
    """The thunks from a row on that are indented as much, with what is in them; and where they
    end."""
    found: list[Thunk] = []
    indent, at = rows[begin][0], begin
    while at < len(rows) and rows[at][0] >= indent:
        _, number, kind, text = rows[at]
        inside, after = (), at + 1
        if after < len(rows) and rows[after][0] > indent:
            inside, after = _nested(rows, after, names)
        stream = _STREAM.search(text)
        # Graphs have no number of their own.
        name = "" if kind == "CommandBuffer" else names.get(number, "")
        found.append(Thunk(kind, name, "" if stream is None else stream[1], inside))
        at = after
    return tuple(found), at


def _names(text: str) -> Mapping[int, str]:
    """The instruction of each thunk, by its number."""
    names: dict[int, str] = {}
    name, number = "", 0
    for found in _METADATA.finditer(text):
        if found[1] is not None:
            name = found[1]
        elif found[2] is not None:
            number = int(found[2])
        else:
            name, number = "", 0
        if name and number:
            names[number] = name
    return names
