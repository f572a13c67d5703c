"""The loops of a kernel's PTX that multiply matrices, by what is in them.

    $L__BB0_24:                 a loop: from a label to the last branch back to it
        wgmma ...m64n128k16...
        ex2.approx.ftz.f32
        @%p bra $L__BB0_24;

PTX is not what runs: ptxas chooses registers, merges and moves. But arithmetic stays, and so the
two loops of two configurations compare. It is what there is where SASS cannot be had.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

_LABEL = re.compile(r"^(\$L__BB\w+):", re.MULTILINE)
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L__BB\w+)\s*;")
_OPCODE = re.compile(r"^\s+(?:@!?%?\w+\s+)?([a-z]\w*)", re.MULTILINE)
_WGMMA = re.compile(r"wgmma\.mma_async")
_STEP = re.compile(
    r"^.*?(?:"
    r"wgmma\.mma_async\.\S*\.m64n(?P<columns>\d+)k(?P<depth>\d+)\.\S+\s+\{[^}]*\},\s*(?P<brace>\{?)"
    r"|wgmma\.wait_group\.sync\.aligned\s+(?P<groups>\d+)"
    r"|wgmma\.commit_group).*$",
    re.MULTILINE,
)
_THREADS = re.compile(r"^\.(?:max|req)ntid\s+(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Wgmma:
    """A product of 64 rows.

    Attributes:
      columns, depth: of [64, depth] times [depth, columns].
      from_registers: whether the left operand is; else it is read from SMEM.
    """

    columns: int
    depth: int
    from_registers: bool


@dataclass(frozen=True)
class Commit:
    """The products since the last one are a group, which is waited for as a whole."""


@dataclass(frozen=True)
class Wait:
    """Until no more than so many groups are on their way."""

    groups: int


@dataclass(frozen=True)
class Vector:
    """Instructions of each thread, by name without modifiers: ``"fma"``, ``"ex2"``."""

    opcodes: Mapping[str, int]


type Step = Wgmma | Commit | Wait | Vector


@dataclass(frozen=True)
class Loop:
    """An innermost loop that multiplies: what it does, in order."""

    steps: tuple[Step, ...]

    def count(self, *opcodes: str) -> int:
        """How many instructions have one of these names."""
        vectors = (step.opcodes for step in self.steps if isinstance(step, Vector))
        return sum(each.get(name, 0) for each in vectors for name in opcodes)


def read_threads(text: str) -> int:
    """Threads of a thread block."""
    found = _THREADS.search(text)
    assert found is not None, text[:2000]
    return int(found[1])


def read_loops(text: str) -> tuple[Loop, ...]:
    """The loops with wgmma that have no other such loop in them, in the order of the text."""
    starts = {found[1]: found.start() for found in _LABEL.finditer(text)}
    ends: dict[int, int] = {}
    for branch in _BRANCH.finditer(text):
        start = starts[branch[1]]
        if start < branch.start():
            ends[start] = max(ends.get(start, 0), branch.end())
    spans = [span for span in sorted(ends.items()) if _WGMMA.search(text, *span)]
    return tuple(
        _loop(text[start:end])
        for start, end in spans
        if not any(start < other and last < end for other, last in spans)
    )


def _loop(body: str) -> Loop:
    steps: list[Step] = []
    begin = 0
    for found in _STEP.finditer(body):
        steps += _vector(body[begin : found.start()])
        begin = found.end()
        if found["columns"]:
            from_registers = bool(found["brace"])
            steps.append(Wgmma(int(found["columns"]), int(found["depth"]), from_registers))
        else:
            steps.append(Wait(int(found["groups"])) if found["groups"] else Commit())
    return Loop((*steps, *_vector(body[begin:])))


def _vector(text: str) -> list[Step]:
    opcodes = Counter(_OPCODE.findall(text))
    return [Vector(opcodes)] if opcodes else []
