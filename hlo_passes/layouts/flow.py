"""Where arrays have orders, and which orders go together.

    %w  ─ read ─► %dynamic-slice ─ tie ─► %bitcast ─ tie ─► operand of %dot: fixed
    %x  ─ read ─► %add ─ read ─► %transpose ─ read ─► operand of %dot: fixed

A *site* is an array whose dimensions lie in some order. Where XLA can put a conversion between
one site and the next there is a *read*, which costs nothing if the orders agree; where it
cannot, within a fusion or around a loop, there is a *tie*. What computes by its own order
(a product, a convolution, a custom call, a gather) is *fixed*: it takes and gives what it was
compiled with. All else computes in any order: it hands on those of its operands.

A copy or a transpose is nothing but a read whose orders do not agree (yet); likewise a fusion
of such. In a fusion that also computes they cost nothing, since its bytes are read and written
anyway, and its two sides are left alone. Of a sum or a broadcast the smaller side may lie in
any order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hlo_passes.analysis.async_chains import async_chains, wrapped_by
from hlo_passes.analysis.dataflow import source_of
from hlo_passes.ir import Computation, Instruction, Module, Shape, ShapeIndex
from hlo_passes.layouts.maps import (
    Order,
    OrderMap,
    aligned,
    bitcast,
    order_of,
    reshaped,
    transposed,
)
from hlo_passes.loops.host_transfers import nests

_FIXED = frozenset(
    {"all-gather", "all-to-all", "bitcast-convert", "cholesky", "convolution", "custom-call"}
    | {"dot", "fft", "gather", "ragged-all-to-all", "ragged-dot", "reduce-scatter"}
    | {"reduce-window", "rng", "rng-bit-generator", "scan", "scatter", "select-and-scatter"}
    | {"sort", "topk", "triangular-solve"}
)
# Their operands lie as they will, or there is but a number of them.
_LOOSE = frozenset(
    {"after-all", "broadcast", "constant", "infeed", "iota", "outfeed", "parameter"}
    | {"partition-id", "recv", "recv-done", "reduce", "replica-id", "send", "send-done"}
)
_VIEWS = frozenset({"bitcast", "copy", "reshape", "transpose"})
_SLICES = frozenset({"dynamic-slice", "slice"})
# Of these only so many operands are arrays to work on; the others say where.
_ARRAYS = {"dynamic-slice": 1, "dynamic-update-slice": 2, "pad": 1}


class Site(NamedTuple):
    """An array that lies in some order.

    Attributes:
      instruction: the id of who gives it, or, of an operand, of who takes it.
      part: which part of what it gives.
      operand: the number of the operand; -1 of a result.
    """

    instruction: int
    part: ShapeIndex = ()
    operand: int = -1


@dataclass(frozen=True, slots=True)
class Link:
    """Two sites of which the second is the first, or is made of it.

    Attributes:
      before, after: which.
      maps: from the order of the one to that of the other, one after another.
      tile_rows: of the tiles that views must keep as they are; 0 where there are none.
      is_tie: whether there can be no conversion in between.
    """

    before: Site
    after: Site
    maps: tuple[OrderMap, ...]
    tile_rows: int
    is_tie: bool

    def forward(self, order: Order) -> Order | None:
        """The order after, without a conversion, of an order before; None if there is none."""
        found: Order | None = order
        for step in self.maps:
            if self.tile_rows and not step.keeps_tiles(order, self.tile_rows):
                return None
            found = step.forward(order)
            if found is None:
                return None
            order = found
        return found

    def backward(self, order: Order) -> Order | None:
        """The order before that becomes this one."""
        found: Order | None = order
        for step in reversed(self.maps):
            found = step.backward(order)
            if found is None:
                return None
            order = found
        return found


@dataclass(frozen=True)
class LayoutFlow:
    """The orders of a module.

    Attributes:
      shapes: of every site; the order in which it lies is that of its layout.
      executions: how often what is there runs in a step.
      fixed: the sites whose order is that which they have.
      links: between sites.
    """

    shapes: dict[Site, Shape] = field(default_factory=dict[Site, Shape])
    executions: dict[Site, int] = field(default_factory=dict[Site, int])
    fixed: set[Site] = field(default_factory=set[Site])
    links: list[Link] = field(default_factory=list[Link])


def layout_flow(
    module: Module, free_parameters: Collection[int] = (), free_results: Collection[int] = ()
) -> LayoutFlow:
    """Returns how orders of dimensions depend on each other in a compiled module.

    Args:
      module: after XLA's layout assignment.
      free_parameters: numbers of the entry's parameters that may be given in another layout.
      free_results: numbers of its results that may be.

    O(instructions).
    """
    flow = _Flow(module)
    for computation_id, nest in nests(module).items():
        flow.executions[computation_id] = nest.executions
    for computation_id in nests(module):
        flow.walk(module.computations[computation_id])
    entry, fixed = module.entry, flow.found.fixed
    for p in entry.parameters:
        if p.parameter_number not in free_parameters:
            fixed.update(flow.sites(p))
    for site in flow.sites(entry.root):
        if (site.part or (0,))[0] not in free_results:
            fixed.add(site)
    for alias in module.input_output_aliases:
        parameter = entry.parameters[alias.parameter]
        flow.tie(Site(parameter.id, alias.parameter_index), Site(entry.root.id, alias.output_index))
    return flow.found


class _Flow:
    """Walks through computations.

    Attributes:
      found: so far.
      executions: of each computation, how often it runs in a step.
    """

    def __init__(self, module: Module) -> None:
        self.found = LayoutFlow()
        self.executions: dict[int, int] = {}
        self._module = module
        self._fused: set[int] = set()

    def walk(self, computation: Computation) -> None:
        for i in computation.instructions:
            self._instruction(i)

    def sites(self, i: Instruction) -> list[Site]:
        """The sites of what an instruction gives."""
        return [
            site for part, shape in i.shape.leaves() if self._add(site := Site(i.id, part), shape)
        ]

    def tie(self, before: Site, after: Site) -> None:
        """The same array, in the same order."""
        self._same(before, after, is_tie=True)

    # --- one instruction ------------------------------------------------------------------

    def _instruction(self, i: Instruction) -> None:
        own = self.sites(i)
        operands = [self._module.instructions[o] for o in i.operand_ids]
        is_fused = i.computation_id in self._fused
        match i.opcode:
            case "tuple":
                for k, operand in enumerate(operands):
                    for site in self.sites(operand):
                        self._same(site, Site(i.id, (k, *site.part)), is_tie=is_fused)
            case "get-tuple-element":
                for site in own:
                    self.tie(Site(operands[0].id, (i.tuple_index, *site.part)), site)
            case "fusion":
                self._fusion(i, operands)
            case "while" | "call" | "conditional":
                self._control_flow(i, operands)
            case "async-start" | "async-update" | "async-done":
                self._async(i)
            case "copy-start":
                self.tie(Site(operands[0].id), Site(i.id, (0,)))
                self.tie(Site(operands[0].id), Site(i.id, (1,)))
            case "copy-done":
                self.tie(Site(operands[0].id, (0,)), Site(i.id))
            case "opt-barrier" | "domain":
                self._handed_on(operands[0], i)
            case "copy" if i.shape.is_tuple:  # Of the table only.
                self._handed_on(operands[0], i)
            case "copy" | "transpose" if is_fused:
                pass
            case opcode if opcode in _VIEWS:
                step = _step(self._module, i)
                self._made(operands[0], i, None if step is None else (step,))
            case opcode if opcode in _LOOSE:
                pass
            case opcode if opcode in _FIXED:
                self._fixed(i, operands)
            case _ if i.shape.is_tuple:  # An all-reduce of several arrays.
                for k, operand in enumerate(operands):
                    self._same(Site(operand.id), Site(i.id, (k,)), is_tie=is_fused)
            case opcode:
                for operand in operands[: _ARRAYS.get(opcode)]:
                    if len(operand.shape.dimensions) == len(i.shape.dimensions):
                        maps = (aligned(operand.shape.dimensions, i.shape.dimensions),)
                        self._made(operand, i, maps)

    def _fusion(self, i: Instruction, operands: Sequence[Instruction]) -> None:
        (body,) = (self._module.computations[c] for c in i.called_computation_ids)
        moved = _moved(self._module, body)
        if moved is not None:
            if i.computation_id not in self._fused:
                self._made(operands[moved.parameter], i, moved.maps)
            return
        self._fused.add(body.id)
        self.executions[body.id] = self.executions[i.computation_id]
        for operand, parameter in zip(operands, body.parameters, strict=True):
            self._handed_on(operand, parameter, is_tie=False)
        self.walk(body)
        self._handed_on(body.root, i)

    def _control_flow(self, i: Instruction, operands: Sequence[Instruction]) -> None:
        for n, called in enumerate(i.called_computation_ids):
            body = self._module.computations[called]
            if called not in self.executions:  # Only what runs asynchronously calls it.
                self.executions[called] = self.executions[i.computation_id]
                self.walk(body)
            taken = [operands[n + 1]] if i.opcode == "conditional" else operands
            for operand, parameter in zip(taken, body.parameters, strict=False):
                self._handed_on(operand, parameter)
            if i.opcode == "while":
                self._handed_on(body.parameters[0], i)
            if body.root.shape.dtype != "pred" or i.opcode != "while":
                self._handed_on(body.root, i)

    def _async(self, link: Instruction) -> None:
        for site in self.sites(link):
            source = source_of(self._module, link, site.part)
            if source is not None:
                self.tie(Site(*source), site)
        wrapped = wrapped_by(self._module, link)
        if wrapped is None:
            return
        operands = async_chains(self._module)[link.id].operands
        self._fused.add(wrapped.id)
        self.executions[wrapped.id] = self.executions[link.computation_id]
        for p in wrapped.parameters:
            self._handed_on(self._module.instructions[operands[p.parameter_number]], p)
        self.walk(wrapped)
        within = () if link.opcode == "async-done" else (1,)
        for site in self.sites(wrapped.root):
            self.tie(site, Site(link.id, (*within, *site.part)))

    def _fixed(self, i: Instruction, operands: Sequence[Instruction]) -> None:
        self.found.fixed.update(self.sites(i))
        for k, operand in enumerate(operands):
            for site in self.sites(operand):
                taken = Site(i.id, site.part, k)
                self._add(taken, operand.shape.at(site.part))
                self.found.fixed.add(taken)
                self._same(site, taken, is_tie=i.computation_id in self._fused)

    # --- sites and links ------------------------------------------------------------------

    def _add(self, site: Site, shape: Shape) -> bool:
        """Whether it is an array that has more than one order."""
        if not shape.is_array or len(order_of(shape)) < 2:
            return False
        self.found.shapes[site] = shape
        computation = self._module.instructions[site.instruction].computation_id
        self.found.executions[site] = self.executions[computation]
        return True

    def _handed_on(self, before: Instruction, after: Instruction, *, is_tie: bool = True) -> None:
        """All parts as they are."""
        self.sites(after)
        for site in self.sites(before):
            self._same(site, site._replace(instruction=after.id), is_tie=is_tie)

    def _same(self, before: Site, after: Site, *, is_tie: bool) -> None:
        shape = self.found.shapes.get(before)
        if shape is not None and after in self.found.shapes:
            same = aligned(shape.dimensions, shape.dimensions)
            self.found.links.append(Link(before, after, (same,), 0, is_tie))

    def _made(
        self, before: Instruction, after: Instruction, maps: tuple[OrderMap, ...] | None
    ) -> None:
        """One array made of another; without maps in this order only."""
        if maps is None:
            self._fixed(after, [before])
        elif Site(before.id) in self.sites(before) and Site(after.id) in self.sites(after):
            tiles = before.shape.layout.tiles
            rows = tiles[0][0] if tiles and len(tiles[0]) > 1 else 0
            is_tie = after.computation_id in self._fused
            self.found.links.append(Link(Site(before.id), Site(after.id), maps, rows, is_tie))


def _step(module: Module, view: Instruction) -> OrderMap | None:
    before = module.instructions[view.operand_ids[0]].shape
    match view.opcode:
        case "transpose":
            return transposed(before.dimensions, tuple(view.proto.dimensions))
        case "bitcast":
            return bitcast(before, view.shape)
        case "reshape":
            return reshaped(before.dimensions, view.shape.dimensions)
        case _:
            return aligned(before.dimensions, view.shape.dimensions)


class _Moved(NamedTuple):
    """What a fusion that only slices and moves does.

    Attributes:
      parameter: the number of what it moves.
      maps: from that to its result; None where no other order of the one is one of the other.
    """

    parameter: int
    maps: tuple[OrderMap, ...] | None


def _moved(module: Module, body: Computation) -> _Moved | None:
    """None if a fusion does anything else."""
    steps: list[OrderMap | None] = []
    i, moves = body.root, False
    while i.opcode in _VIEWS | _SLICES:
        moves = moves or i.opcode in ("copy", "transpose")
        steps.append(_step(module, i))
        i = module.instructions[i.operand_ids[0]]
    if not moves or i.opcode != "parameter":
        return None
    maps = tuple(step for step in reversed(steps) if step is not None)
    return _Moved(i.parameter_number, maps if len(maps) == len(steps) else None)
