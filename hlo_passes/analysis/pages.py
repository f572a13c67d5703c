"""What operations declare of the pages that they read and write.

A kernel that reads pages by a table of their numbers has whole pools as operands, and so has what
scatters new tokens into them: of the program one sees that all of each may be read, or written.
Which pages it is only the table says, but not when the program runs; what they are, how many there
may be, and which are never read again, operations say themselves, in attributes that XLA:CPU,
XLA:TPU and XLA:GPU leave where they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from hlo_passes.analysis.aliasing import in_place_pairs
from hlo_passes.analysis.dataflow import Dataflow
from hlo_passes.ir import Instruction, Module

PAGE_READS_ATTRIBUTE = "memplan_page_reads"
PAGE_WRITES_ATTRIBUTE = "memplan_page_writes"

_NONE = "none"


@dataclass(frozen=True, slots=True)
class PageAccess:
    """Of each sequence its last pages, in order.

    Attributes:
      pool: dimensions of an array of pages, the first one of which counts them.
      tokens: of a page.
      sequences: whose pages are read or written at once.
      pages: of a sequence, at most.
      queries: tokens at the end of each sequence that read, or that are written, at most.
      window: tokens before the last `queries` ones that are read, besides these; pages wholly
        before them are not read, and never again. None for all. Of what is written, 0.
    """

    pool: tuple[int, ...]
    tokens: int
    sequences: int
    pages: int
    queries: int
    window: int | None

    def touched(self, length: int, queries: int | None = None) -> range:
        """Which of a sequence's pages, by their place in its row of the table. The pages before
        that are dead to it.

        Args:
          length: tokens of the sequence, the last ones included.
          queries: how many of `queries` there are; all by default.
        """
        if self.window is None:
            begin = 0
        else:
            last = self.queries if queries is None else queries
            begin = max(length - last - self.window, 0)
        end = min(-(-length // self.tokens), self.pages) if begin < length else 0
        return range(min(begin // self.tokens, end), end)

    def on_device(self, i: Instruction) -> PageAccess | None:
        """What is declared of an array that is a pool, or a stack of such. Where XLA has split what
        was declared before over devices, by its heads or, where each has one page, by its
        sequences, that of one device; None of other arrays."""
        dimensions, pool = i.shape.dimensions[-len(self.pool) :], self.pool
        if len(i.shape.dimensions) - len(pool) not in (0, 1) or dimensions[2:] != pool[2:]:
            return None
        if dimensions == pool:
            return self
        pages, heads = dimensions[:2]
        if pages != pool[0] and (self.pages, self.sequences) != (1, pool[0]):
            return None
        if 0 in (pages, heads) or pool[0] % pages or pool[1] % heads:
            return None
        sequences = self.sequences * pages // pool[0]
        return replace(self, pool=dimensions, sequences=sequences)

    def is_stack(self, i: Instruction) -> bool:
        """Whether it is an array of pools, one a layer."""
        return i.shape.is_array and i.shape.dimensions[1:] == self.pool

    def has_pages(self, i: Instruction) -> bool:
        """Whether it is an array of such pages, be they all or some."""
        return i.shape.is_array and i.shape.dimensions[1 - len(self.pool) :] == self.pool[1:]

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
            found = cls(
                pool,
                int(said["tokens"]),
                int(said["sequences"]),
                int(said["pages"]),
                int(said["queries"]),
                None if said["window"] == _NONE else int(said["window"]),
            )
        except (KeyError, ValueError, TypeError):
            return None
        counts = *pool, found.sequences, found.pages, found.queries, found.window or 0
        return found if len(pool) > 1 and found.tokens > 0 and min(counts) >= 0 else None


class PageUse(NamedTuple):
    """Who reads or writes pages of a pool.

    Attributes:
      instruction: that is no part of a fusion.
      pool: its operand: a pool, or a stack of such, of which it takes a layer.
      access: what is declared of it.
    """

    instruction: Instruction
    pool: Instruction
    access: PageAccess


def page_reads(module: Module) -> Iterator[PageUse]:
    """Yields who reads pages, and each of its operands that is a pool of these."""
    for i in _instructions(module):
        yield from _uses(module, i, range(len(i.operand_ids)), PAGE_READS_ATTRIBUTE)


def page_writes(module: Module) -> Iterator[PageUse]:
    """Yields who writes pages, and each of its operands that is a pool of these and that it works
    on in place."""
    for i in _instructions(module):
        written = [pair.operand for pair in in_place_pairs(module, i)]
        yield from _uses(module, i, written, PAGE_WRITES_ATTRIBUTE)


class Origin(NamedTuple):
    """Where a pool comes from.

    Attributes:
      argument: in whose bytes it lies, or of which it is a copy; None where there is none.
      is_copy: it lies elsewhere.
      of_stack: the argument is a stack of pools.
    """

    argument: Instruction | None
    is_copy: bool
    of_stack: bool


def origin(dataflow: Dataflow, use: PageUse) -> Origin:
    """Finds the argument whose pages are read or written: XLA may have copied it, or a layer of a
    stack, before; XLA:TPU onto the chip, slice by slice."""
    module, access = dataflow.module, use.access
    arguments = {p.id for p in module.entry.parameters}
    first = dataflow.buffer_at(use.pool).id
    queue, seen = [use.pool], {use.pool.id}
    for i in queue:
        buffer = dataflow.buffer_at(i)
        for value in buffer.values:
            if value.instruction.id in arguments:
                return Origin(value.instruction, buffer.id != first, access.is_stack(i))
        for value in buffer.values:
            for operand in map(module.instructions.__getitem__, value.instruction.operand_ids):
                if operand.id not in seen and access.has_pages(operand):
                    seen.add(operand.id)
                    queue.append(operand)
    return Origin(None, False, False)


def _instructions(module: Module) -> Iterator[Instruction]:
    """Those that may read or write, and are no part of a fusion."""
    for computation in module.computations.values():
        if not computation.is_fusion:
            for i in computation.instructions:
                if i.opcode not in ("bitcast", "copy", "copy-start", "parameter", "tuple"):
                    yield i


def _uses(
    module: Module, i: Instruction, operands: Iterable[int], attribute: str
) -> Iterator[PageUse]:
    found: dict[PageUse, None] = {}
    for number in operands:
        pool = module.instructions[i.operand_ids[number]]
        for declared in _declared(module, i, number, attribute):
            access = declared.on_device(pool)
            # A kernel is split by hand, and declares what it has.
            if access is not None and (access == declared or attribute == PAGE_WRITES_ATTRIBUTE):
                found[PageUse(i, pool, access)] = None
    yield from found


def _declared(module: Module, i: Instruction, operand: int, attribute: str) -> Iterator[PageAccess]:
    """What is declared of an operand. Of a fusion, by those that work on it first: others in it may
    be about other pools."""
    said = [i.proto.frontend_attributes.map.get(attribute, "")]
    if i.opcode == "fusion":
        said = []
        inside = module.computations[i.called_computation_ids[0]]
        shown = {inside.parameters[operand].id}
        for inner in inside.instructions:
            if shown.isdisjoint(inner.operand_ids):
                continue
            if text := inner.proto.frontend_attributes.map.get(attribute):
                said.append(text)
            else:
                shown.add(inner.id)
        if not said and attribute == PAGE_WRITES_ATTRIBUTE:
            # A layer with its new tokens goes to its place in a stack.
            whole = (
                one.proto.frontend_attributes.map.get(attribute, "") for one in inside.instructions
            )
            said = list(dict.fromkeys(whole))
    for text in said:
        if (access := PageAccess.of_attribute(text)) is not None:
            yield access
