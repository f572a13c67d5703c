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

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hlo_passes.host_transfers import nests
from hlo_passes.ir import Computation, Instruction, Module, Shape, ShapeIndex
from hlo_passes.layout_maps import Order, OrderMap, aligned, bitcast, order_of, reshaped, transposed

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
        flow.walk(module.computations[computation_id], nest.executions, in_fusion=False)
    entry = module.entry
    for p in entry.parameters:
        if p.parameter_number not in free_parameters:
            flow.fix(s for s, _ in flow.leaves(p))
    flow.fix(s for s, _ in flow.leaves(entry.root) if (s.part or (0,))[0] not in free_results)
    for alias in module.input_output_aliases:
        parameter = entry.parameters[alias.parameter]
        flow.tie(Site(parameter.id, alias.parameter_index), Site(entry.root.id, alias.output_index))
    return flow.found


class _Flow:
    def __init__(self, module: Module) -> None:
        self.found = LayoutFlow()
        self._module = module
        self._executions = 1
        self._in_fusion = False

    def walk(self, computation: Computation, executions: int, *, in_fusion: bool) -> None:
        for i in computation.instructions:
            self._executions, self._in_fusion = executions, in_fusion
            self._instruction(i)

    def leaves(self, i: Instruction) -> Iterator[tuple[Site, Shape]]:
        """The sites of what an instruction gives."""
        for index, shape in i.shape.leaves():
            if shape.is_array and len(order_of(shape)) > 1:
                site = Site(i.id, index)
                self._add(site, shape)
                yield site, shape

    def fix(self, sites: Iterator[Site] | Sequence[Site]) -> None:
        self.found.fixed.update(sites)

    def tie(self, before: Site, after: Site) -> None:
        """The same array, in the same order."""
        shape = self.found.shapes.get(before)
        if shape is not None and after in self.found.shapes:
            same = aligned(shape.dimensions, shape.dimensions)
            self.found.links.append(Link(before, after, (same,), 0, is_tie=True))

    # --- one instruction ------------------------------------------------------------------

    def _instruction(self, i: Instruction) -> None:
        for _ in self.leaves(i):
            pass
        operands = [self._module.instructions[o] for o in i.operand_ids]
        match i.opcode:
            case "tuple":
                for k, operand in enumerate(operands):
                    for site, shape in self.leaves(operand):
                        self._link(site, Site(i.id, (k, *site.part)), shape)
            case "get-tuple-element":
                for site, _ in self.leaves(i):
                    self.tie(Site(operands[0].id, (i.tuple_index, *site.part)), site)
            case "while" | "call" | "conditional" | "async-start" | "fusion":
                self._calls(i, operands)
            case "copy-start":
                for index in ((0,), (1,)):
                    self.tie(Site(operands[0].id), Site(i.id, index))
            case "copy-done":
                self.tie(Site(operands[0].id, (0,)), Site(i.id))
            case "async-update" | "opt-barrier" | "domain":
                for site, _ in self.leaves(i):
                    self.tie(site._replace(instruction=operands[0].id), site)
            case "async-done":
                for site, _ in self.leaves(i):
                    self.tie(Site(operands[0].id, (1, *site.part)), site)
            case opcode if opcode in _VIEWS:
                self._view(i, operands[0])
            case opcode if opcode in _LOOSE:
                pass
            case opcode if opcode in _FIXED:
                self._fixed(i, operands)
            case _:
                self._elementwise(i, operands)

    def _calls(self, i: Instruction, operands: Sequence[Instruction]) -> None:
        bodies = [self._module.computations[c] for c in i.called_computation_ids]
        if i.opcode == "fusion":
            maps = _mover(self._module, bodies[0])
            if maps is not None:
                if self._in_fusion:
                    return
                if all(maps):
                    self._read(operands[0], i, tuple(m for m in maps if m))
                else:
                    self._fixed(i, operands)
                return
            executions = self._executions
            for operand, parameter in zip(operands, bodies[0].parameters, strict=True):
                for site, shape in self.leaves(operand):
                    inner = site._replace(instruction=parameter.id)
                    self._add(inner, parameter.shape.at(site.part))
                    self._link(site, inner, shape)
            self.walk(bodies[0], executions, in_fusion=True)
            self._executions, self._in_fusion = executions, False
            self._same(bodies[0].root, i)
            return
        if i.opcode == "async-start":
            self.walk(bodies[0], self._executions, in_fusion=True)
            self._in_fusion = False
            for k, (operand, parameter) in enumerate(
                zip(operands, bodies[0].parameters, strict=True)
            ):
                self._same(operand, parameter)
                for site, _ in self.leaves(operand):
                    self.tie(site, Site(i.id, (0, k, *site.part)))
            for site, _ in self.leaves(bodies[0].root):
                self.tie(site, Site(i.id, (1, *site.part)))
            return
        for n, body in enumerate(bodies):
            taken = [operands[n + 1]] if i.opcode == "conditional" else operands
            for operand, parameter in zip(taken, body.parameters, strict=True):
                self._same(operand, parameter)
            if not (i.opcode == "while" and body.root.shape.dtype == "pred"):
                self._same(body.root, i)
            if i.opcode == "while":
                self._same(body.parameters[0], i)

    def _same(self, before: Instruction, after: Instruction) -> None:
        for site, shape in self.leaves(before):
            self._add(site._replace(instruction=after.id), shape)
            self.tie(site, site._replace(instruction=after.id))

    def _view(self, i: Instruction, operand: Instruction) -> None:
        if self._in_fusion and i.opcode in ("copy", "transpose"):
            return
        step = _step(self._module, i)
        if step is None:
            self._fixed(i, [operand])
        else:
            self._read(operand, i, (step,))

    def _fixed(self, i: Instruction, operands: Sequence[Instruction]) -> None:
        self.fix([site for site, _ in self.leaves(i)])
        for k, operand in enumerate(operands):
            for site, shape in self.leaves(operand):
                taken = Site(i.id, site.part, k)
                self._add(taken, shape)
                self.fix([taken])
                self._link(site, taken, shape)

    def _elementwise(self, i: Instruction, operands: Sequence[Instruction]) -> None:
        """Of a tuple, as an all-reduce of several has, part by part."""
        if i.shape.is_tuple:
            for k, operand in enumerate(operands):
                for site, shape in self.leaves(operand):
                    self._link(site, Site(i.id, (k,)), shape)
            return
        for operand in operands[: _ARRAYS.get(i.opcode)]:
            if len(operand.shape.dimensions) == len(i.shape.dimensions):
                maps = (aligned(operand.shape.dimensions, i.shape.dimensions),)
                self._read(operand, i, maps)

    # --- links ----------------------------------------------------------------------------

    def _add(self, site: Site, shape: Shape) -> None:
        if site not in self.found.shapes:
            self.found.shapes[site] = shape
            self.found.executions[site] = self._executions

    def _read(self, before: Instruction, after: Instruction, maps: tuple[OrderMap, ...]) -> None:
        shapes = self.found.shapes
        if Site(after.id) in shapes and any(True for _ in self.leaves(before)):
            tiles = before.shape.layout.tiles
            rows = tiles[0][0] if tiles and len(tiles[0]) > 1 else 0
            self.found.links.append(
                Link(Site(before.id), Site(after.id), maps, rows, self._in_fusion)
            )

    def _link(self, before: Site, after: Site, shape: Shape) -> None:
        if after in self.found.shapes:
            same = aligned(shape.dimensions, shape.dimensions)
            self.found.links.append(Link(before, after, (same,), 0, self._in_fusion))


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


def _mover(module: Module, body: Computation) -> list[OrderMap | None] | None:
    """The maps from the first operand of a fusion to its result, if that only slices and moves;
    None if it does anything else."""
    steps: list[OrderMap | None] = []
    i, moves = body.root, False
    while i.opcode in _VIEWS | _SLICES:
        moves = moves or i.opcode in ("copy", "transpose")
        steps.append(_step(module, i))
        i = module.instructions[i.operand_ids[0]]
    return steps[::-1] if moves and i.opcode == "parameter" else None
