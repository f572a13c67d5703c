"""What operations declare of the pages that they read.

A kernel that reads pages by a table of their numbers has whole pools as operands: of the program
one sees that it may read all of each. Which pages it reads only the table says, but not when the
program runs; what they are, how many there may be, and which are never read again, it says itself,
in an attribute that XLA:CPU, XLA:TPU and XLA:GPU leave where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from hlo_passes.ir import Instruction, Module

PAGE_READS_ATTRIBUTE = "memplan_page_reads"

_NONE = "none"


@dataclass(frozen=True, slots=True)
class PageReads:
    """Of each sequence its pages in order, all that its length reaches.

    Attributes:
      pool: dimensions of an array of pages, the first one of which counts them.
      tokens: of a page.
      sequences: whose pages are read at once.
      pages: of a sequence, at most.
      window: tokens before the last `queries` ones that are read, besides these; pages wholly
        before them are not read, and never again. None for all.
      queries: tokens at the end of each sequence that read.
    """

    pool: tuple[int, ...]
    tokens: int
    sequences: int
    pages: int
    queries: int
    window: int | None

    def is_pool(self, i: Instruction) -> bool:
        return i.shape.is_array and i.shape.dimensions == self.pool

    def is_stack(self, i: Instruction) -> bool:
        """Whether it is an array of pools, one a layer."""
        return i.shape.is_array and i.shape.dimensions[1:] == self.pool

    def to_attribute(self) -> str:
        numbers = {
            "pool": ",".join(map(str, self.pool)),
            "tokens": self.tokens,
            "sequences": self.sequences,
            "pages": self.pages,
            "queries": self.queries,
            "window": _NONE if self.window is None else self.window,
        }
        return " ".join(f"{name}={value}" for name, value in numbers.items())

    @classmethod
    def of_attribute(cls, text: str) -> Self | None:
        """What `to_attribute` wrote; None for what it did not."""
        try:
            said = dict(part.split("=", 1) for part in text.split())
            pool = tuple(map(int, said["pool"].split(",")))
            return cls(
                pool,
                int(said["tokens"]),
                int(said["sequences"]),
                int(said["pages"]),
                int(said["queries"]),
                None if said["window"] == _NONE else int(said["window"]),
            )
        except (KeyError, ValueError, TypeError):
            return None


def page_reads(module: Module) -> Iterator[tuple[Instruction, Instruction, PageReads]]:
    """Yields who reads, the pool, and what is declared of it: for each instruction that is no part
    of a fusion, and each of its operands that is a pool, or a stack of such, of which it reads a
    layer."""
    for computation in module.computations.values():
        if computation.is_fusion:
            continue
        for i in computation.instructions:
            for reads in _declared(module, i):
                for operand in (module.instructions[o] for o in dict.fromkeys(i.operand_ids)):
                    if reads.is_pool(operand) or reads.is_stack(operand):
                        yield i, operand, reads


def _declared(module: Module, i: Instruction) -> tuple[PageReads, ...]:
    if i.opcode in ("bitcast", "copy", "copy-start", "parameter", "tuple"):
        return ()
    inside = [i]
    if i.opcode == "fusion":
        for called in i.called_computation_ids:
            inside += module.computations[called].instructions
    said = (one.proto.frontend_attributes.map.get(PAGE_READS_ATTRIBUTE) for one in inside)
    found = (PageReads.of_attribute(text) for text in said if text)
    return tuple(dict.fromkeys(reads for reads in found if reads is not None))
