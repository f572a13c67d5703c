"""Which instruction of one module is which of another.

    before   a = dot(x, w)   b = fusion(a, y) { negate, add }
    after    d.7 = dot(x.2, w.1)   n.3 = negate(d.7)   s = fusion(n.3, y.2) { add }

    pairs    a ─ d.7   negate ─ n.3   add ─ add   b ─ s       groups   {b} ─ {n.3, s}

First what the modules compute is matched (`value_graph`, `graph_matching`): without names,
numbers, order, layouts and fusions, so that it survives another schedule, another compiler
flag, an inserted layer. Then the instructions: those that compute one value are told apart by
where they stand, and so are those that pass it on; fusions are what they contain.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal, NamedTuple

from hlo_passes.diff.graph_matching import match_graphs, match_identified
from hlo_passes.diff.twin_graph import Node
from hlo_passes.diff.value_graph import Numbering, ValueGraph, attributes, flat, value_graph
from hlo_passes.garbage import collection_paused
from hlo_passes.ir import Instruction, Module, Shape

# Of fusions that compute the same value, all combinations are held against each other.
_MOST_HOLDERS = 64

type Aspect = Literal[
    "opcode",
    "element type",
    "dimensions",
    "layout",
    "memory space",
    "attributes",
    "fused with",
]
"""What can differ between two instructions that correspond."""


class Pair(NamedTuple):
    """An instruction of the one module and the one of the other that corresponds to it."""

    before: Instruction
    after: Instruction


@dataclass(frozen=True, slots=True)
class Group:
    """What was fused otherwise: fusions, and instructions that stand alone on one side, which
    together hold the same work. Neither side is empty, and one has several."""

    before: tuple[Instruction, ...]
    after: tuple[Instruction, ...]


@dataclass(frozen=True, eq=False)
class Matching:
    """Which instructions of two modules correspond.

    Attributes:
      pairs: one to one, over all computations, in the order of `before`.
      groups: split and merged fusions, in the order of `before`.
      only_before, only_after: instructions without a partner, in the modules' order.
    """

    before: Module
    after: Module
    pairs: tuple[Pair, ...]
    groups: tuple[Group, ...]
    only_before: tuple[Instruction, ...]
    only_after: tuple[Instruction, ...]
    _kernels_before: Mapping[int, Instruction]
    _kernels_after: Mapping[int, Instruction]

    @cached_property
    def after_of(self) -> Mapping[int, Instruction]:
        """Id of an instruction of `before` to its partner."""
        return {a.id: b for a, b in self.pairs}

    def swapped(self) -> Matching:
        """The same, seen from the other module."""
        place = {i.id: n for n, i in enumerate(self.after.instructions.values())}
        pairs = (Pair(b, a) for a, b in self.pairs)
        groups = (Group(g.after, g.before) for g in self.groups)
        return Matching(
            self.after,
            self.before,
            tuple(sorted(pairs, key=lambda p: place[p.before.id])),
            tuple(sorted(groups, key=lambda g: place[g.before[0].id])),
            self.only_after,
            self.only_before,
            self._kernels_after,
            self._kernels_before,
        )

    @cached_property
    def _regrouped(self) -> frozenset[Instruction]:
        return frozenset(i for g in self.groups for i in (*g.before, *g.after))

    def changes(self, pair: Pair) -> frozenset[Aspect]:
        """Returns what differs between the two of a pair; nothing where they are equal. Operands
        and called computations have pairs of their own.

        ``"fused with"``: the fusions that hold them, or what these two fusions hold.
        """
        a, b = pair
        found: set[Aspect] = set()
        if a.opcode != b.opcode:
            found.add("opcode")
        elif attributes(a) != attributes(b):
            found.add("attributes")
        found |= _shape_changes(a.shape, b.shape)
        kernels = self._kernels_before[a.id], self._kernels_after[b.id]
        if kernels == pair:
            if not self._regrouped.isdisjoint(pair):
                found.add("fused with")
        elif self.after_of.get(kernels[0].id) is not kernels[1]:
            found.add("fused with")
        return frozenset(found)


def _shape_changes(a: Shape, b: Shape) -> set[Aspect]:
    if a is b:
        return set()
    before, after = dict(a.leaves()), dict(b.leaves())
    found: set[Aspect] = set()
    if before.keys() != after.keys():
        found.add("dimensions")
    for index in before.keys() & after.keys():
        x, y = before[index], after[index]
        if x.dtype != y.dtype:
            found.add("element type")
        if x.dimensions != y.dimensions:
            found.add("dimensions")
        if x.memory_space != y.memory_space:
            found.add("memory space")
        if (x.layout.minor_to_major, x.layout.tiles) != (y.layout.minor_to_major, y.layout.tiles):
            found.add("layout")
    return found


@collection_paused()
def match_modules(before: Module, after: Module) -> Matching:
    """Finds which instructions of two modules correspond.

    Names, ids, metadata, layouts, memory spaces, the order of instructions, fusions and backend
    configurations may all differ. Metadata (`Instruction.op_name`) and the order of parameters
    and instructions only help to tell equal parts from each other. Exchanged modules give the
    exchanged result.

    Time O(n log n) for n instructions and operands of both.
    """
    # One canonical direction, whichever the caller's: ties are broken in the same way.
    if after.to_bytes() < before.to_bytes():
        return _match(after, before).swapped()
    return _match(before, after)


type _Sides = tuple[ValueGraph, ValueGraph]

type _Classes = tuple[Sequence[int], Sequence[int]]
"""Of each value of either module a number: the same for two that correspond."""


def _match(before: Module, after: Module) -> Matching:
    numbering = Numbering()
    sides = value_graph(before, numbering), value_graph(after, numbering)
    classes = _match_values(sides, numbering)
    first, second = (
        _instructions(graph, of, numbering) for graph, of in zip(sides, classes, strict=True)
    )
    matched = {
        sides[0].order[a].id: sides[1].order[b]
        for a, b in match_identified(first, second, _same_fusions(sides, classes))
    }
    taken = {i.id for i in matched.values()}
    instructions = before.instructions.values()
    pairs = tuple(Pair(i, matched[i.id]) for i in instructions if i.id in matched)
    return Matching(
        before,
        after,
        pairs,
        tuple(_groups(sides, pairs)),
        tuple(i for i in instructions if i.id not in matched),
        tuple(i for i in after.instructions.values() if i.id not in taken),
        sides[0].kernel,
        sides[1].kernel,
    )


def _match_values(sides: _Sides, numbering: Numbering) -> _Classes:
    """Constants are equal or not; what depends on arguments is matched as a graph, in which
    constants are part of what reads them. Else what two layers share would tie them together."""
    digests = [_digests(graph, numbering) for graph in sides]
    constants = [
        {of[n] for n, value in enumerate(graph.values) if value.is_constant}
        for graph, of in zip(sides, digests, strict=True)
    ]
    classes: list[list[int]] = []
    for side, (graph, of) in enumerate(zip(sides, digests, strict=True)):
        shared = constants[0] & constants[1]
        # Without a counterpart: negative, and other numbers in each module.
        classes.append(
            [
                of[n] if value.is_constant and of[n] in shared else -2 * n - 1 - side
                for n, value in enumerate(graph.values)
            ]
        )
    computed = [[n for n, v in enumerate(g.values) if not v.is_constant] for g in sides]
    first, second = (
        _value_nodes(graph, of, numbers)
        for graph, of, numbers in zip(sides, digests, computed, strict=True)
    )
    ends = len(computed[0]), len(computed[1])
    for a, b in match_graphs(first, second):
        if a < ends[0] and b < ends[1]:
            number = numbering.of(("pair", a))
            classes[0][computed[0][a]] = classes[1][computed[1][b]] = number
    return classes[0], classes[1]


def _digests(graph: ValueGraph, numbering: Numbering) -> list[int]:
    """Of each value its label with the constants that it is computed from; of constants that is
    all that they are."""
    digests: list[int] = []
    for n, value in enumerate(graph.values):
        constants = sorted(
            (slot, digests[o])
            for o, slot in value.operands
            if o < n and graph.values[o].is_constant
        )
        digests.append(numbering.of(("value", value.label, *constants)))
    return digests


def _value_nodes(graph: ValueGraph, labels: Sequence[int], computed: Sequence[int]) -> list[Node]:
    """The values that are no constants, and at last what stands before the first argument and
    the first result."""
    place = {n: k for k, n in enumerate(computed)}
    rows: tuple[dict[int, int], dict[int, int]] = ({}, {})
    nodes: list[Node] = []
    for n in computed:
        value = graph.values[n]
        operands = [(place[o], slot) for o, slot in value.operands if o in place]
        first = value.members[0] if value.members else None
        rank = first.parameter_number if first else value.place
        name = first.op_name if first else ""
        if value.place:
            rows[first is None][n] = rank
        nodes.append(Node(labels[n], value.kind, operands, value.place, name, rank))
    for n, row in enumerate(rows):
        before = len(nodes)
        nodes.append(Node(-n, -n, [], 0, "", 0))
        for value in sorted(row, key=row.__getitem__):
            nodes[place[value]] = nodes[place[value]]._replace(beside=before)
            before = place[value]
    return nodes


def _instructions(graph: ValueGraph, classes: Sequence[int], numbering: Numbering) -> list[Node]:
    own = {i.id: classes[n] for n, v in enumerate(graph.values) for i in v.members}
    nodes: list[Node] = []
    for n, (i, links) in enumerate(zip(graph.order, graph.links, strict=True)):
        kind = numbering.of(i.opcode.removesuffix("-start"))
        if i.id in own:
            label = numbering.of(("member", i.opcode, own[i.id]))
            if own[i.id] > 0:
                kind = numbering.of(("member", own[i.id]))
        else:
            values = tuple(classes[v] for v in flat(graph.flow[i.id]))
            label = numbering.of((i.opcode, numbering.of_shape(i.shape), values))
        nodes.append(Node(label, kind, links, 0, i.op_name, n))
    return nodes


def _same_fusions(sides: _Sides, classes: _Classes) -> Iterator[tuple[int, int]]:
    """Pairs of fusions, as places in `ValueGraph.order`, that share more of what they compute
    with each other than with any other one."""
    holders: list[defaultdict[int, set[int]]] = []
    for graph, of in zip(sides, classes, strict=True):
        place = {i.id: n for n, i in enumerate(graph.order)}
        held: defaultdict[int, set[int]] = defaultdict(set)
        for value, number in zip(graph.values, of, strict=True):
            for i in value.members if not value.is_constant else ():
                if (kernel := graph.kernel[i.id]).opcode == "fusion":
                    held[number].add(place[kernel.id])
        holders.append(held)
    shared: defaultdict[tuple[int, int], float] = defaultdict(float)
    for number, here in holders[0].items():
        there = holders[1].get(number, set())
        if 0 < len(here) * len(there) <= _MOST_HOLDERS:
            for pair in product(here, there):
                shared[pair] += 1 / (len(here) * len(there))
    yield from _mutual(shared)


def _mutual(weights: Mapping[tuple[int, int], float]) -> Iterator[tuple[int, int]]:
    """The pairs that weigh more than all others of both of their ends."""
    best: list[dict[int, float]] = [{}, {}]
    ties: Counter[tuple[int, int, float]] = Counter()
    for pair, weight in weights.items():
        for side, end in enumerate(pair):
            best[side][end] = max(best[side].get(end, 0.0), weight)
            ties[side, end, weight] += 1
    for pair, weight in sorted(weights.items()):
        if all(
            best[side][end] == weight and ties[side, end, weight] == 1
            for side, end in enumerate(pair)
        ):
            yield pair


def _groups(sides: _Sides, pairs: Iterable[Pair]) -> Iterator[Group]:
    """Fusions, and what stands alone, of which one side's parts have most of what they compute
    from the other's."""
    shared: Counter[tuple[Instruction, Instruction]] = Counter()
    constants = {i.id for v in sides[0].values if v.is_constant for i in v.members}
    members = {i.id for v in sides[0].values for i in v.members} - constants
    for a, b in pairs:
        if a.id in members:
            shared[sides[0].kernel[a.id], sides[1].kernel[b.id]] += 1
    main: tuple[dict[Instruction, Instruction], ...] = ({}, {})
    most: Counter[Instruction] = Counter()
    for pair, count in shared.items():
        for side, (kernel, other) in enumerate((pair, pair[::-1])):
            if count > most[kernel]:
                most[kernel] = count
                main[side][kernel] = other
    linked: defaultdict[Instruction, list[Instruction]] = defaultdict(list)
    for of in main:
        for kernel, other in of.items():
            linked[kernel].append(other)
            linked[other].append(kernel)
    place = {i.id: n for n, i in enumerate(sides[0].module.instructions.values())}
    later = {i.id: n for n, i in enumerate(sides[1].module.instructions.values())}
    seen: set[Instruction] = set()
    for kernel in sorted(main[0], key=lambda i: place[i.id]):
        if kernel not in seen:
            found = _reached(kernel, linked)
            seen |= found
            if len(found) > 2:
                yield Group(
                    tuple(sorted(found & main[0].keys(), key=lambda i: place[i.id])),
                    tuple(sorted(found & main[1].keys(), key=lambda i: later[i.id])),
                )


def _reached(
    start: Instruction, linked: Mapping[Instruction, Iterable[Instruction]]
) -> set[Instruction]:
    found, pending = {start}, [start]
    while pending:
        fresh = [i for i in linked[pending.pop()] if i not in found]
        found.update(fresh)
        pending += fresh
    return found
