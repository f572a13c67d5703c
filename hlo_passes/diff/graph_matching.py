"""Which node of one graph is which of another: what stands in equal surroundings, first.

    before   a ─ b ─ b ─ b ─ c
             │   │   │    ╲   ╲            n is new
    after    a ─ b ─ b ─ n ─ b ─ c

Nodes with the same whole history and future, where those are unique on both sides, are pairs.
From the largest surroundings (`twin_graph`) to the smallest, as GumTree takes the tallest subtrees
first (Falleri et al., "Fine-grained and accurate source code differencing", ASE 2014), pairs are

- anchors: the one node with that signature here, and the one there;
- neighbours of a pair, of equal signature, at the same place beside it, the best supported first.

What cannot be told apart (equal parts in parallel) is paired in order, class by class, each with
what follows from it. At last come neighbours of a pair that are only of one kind: they have
changed. Differently from GumTree the graphs are no trees, and a pair is held against all of its
neighbours that are paired already.

Where a part was inserted between equal ones, pairs that began on either side of it contradict
each other where they meet: that place is moved to where least is torn (`pair_refinement`).
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from hlo_passes.diff.pair_refinement import refine_pairs
from hlo_passes.diff.twin_graph import Node, TwinGraph, Words, cones, mixed
from hlo_passes.diff.twin_graph import signatures as find_signatures

_RADII = (32, 16, 8, 4, 2, 1, 0)

# Of those the smallest, for nodes that are known by their labels.
_FEW_RADII = 4

# Equal neighbours on the two sides of which all combinations are held against each other.
_MOST_COMBINATIONS = 64

# Of a node with more users than this, users neither speak for a pair nor against it.
_MANY_USERS = 64


def match_graphs(before: Sequence[Node], after: Sequence[Node]) -> list[tuple[int, int]]:
    """Finds which nodes of two graphs correspond.

    Returns:
      Pairs of a node of `before` and one of `after`, in the order of `before`.

    Time O(e log e) for e edges.
    """
    matcher = _Matcher(TwinGraph(before, after))
    history, future = cones(matcher.graph)
    matcher.take_unique(mixed(history, future))
    if matcher.is_complete:
        return matcher.pairs()
    signatures = find_signatures(matcher.graph, _RADII)
    for radius in _RADII:
        matcher.take_unique(mixed(signatures[radius], matcher.hints), among=matcher.hints != 0)
        matcher.spread(signatures[radius])
    matcher.take_near(signatures, _RADII)
    matcher.take_rest(signatures, _RADII)
    refine_pairs(matcher.graph, matcher.partner)
    return matcher.pairs()


def match_identified(
    before: Sequence[Node], after: Sequence[Node], known: Iterable[tuple[int, int]] = ()
) -> list[tuple[int, int]]:
    """Finds which nodes of two graphs correspond, where equal labels all but say so.

    Args:
      known: pairs that are given, whatever their labels.

    Returns, and time: as `match_graphs`.
    """
    matcher = _Matcher(TwinGraph(before, after))
    for a, b in known:
        matcher.pair(a, matcher.graph.split + b)
    history, future = cones(matcher.graph)
    matcher.take_unique(mixed(history, future))
    if matcher.is_complete:
        return matcher.pairs()
    radii = _RADII[-_FEW_RADII:]
    signatures = find_signatures(matcher.graph, radii)
    matcher.take_unique(signatures[0])
    matcher.take_near(signatures, radii)
    matcher.take_rest(signatures, radii)
    return matcher.pairs()


class _Matcher:
    """The pairs so far.

    Attributes:
      partner: of each node, −1 where it has none.
    """

    def __init__(self, graph: TwinGraph) -> None:
        self.graph = graph
        self.partner = array("q", [-1]) * len(graph.labels)
        self.hints = np.array(graph.hints, np.uint64)

    def pairs(self) -> list[tuple[int, int]]:
        split = self.graph.split
        return [(a, b - split) for a, b in enumerate(self.partner[:split]) if b >= 0]

    @property
    def is_complete(self) -> bool:
        """Whether one of the graphs has no node left."""
        split = self.graph.split
        return (
            min(self.partner[:split], default=0) >= 0 or min(self.partner[split:], default=0) >= 0
        )

    def classes(
        self, keys: Words, among: npt.NDArray[np.bool_] | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """Nodes without a partner by their key, of both sides, where both have some."""
        free = np.frombuffer(self.partner, np.int64) < 0
        nodes = np.flatnonzero(free if among is None else free & among)
        nodes = nodes[np.argsort(keys[nodes], kind="stable")]
        is_first = np.ones(len(nodes) + 1, np.bool_)
        is_first[1:-1] = keys[nodes[1:]] != keys[nodes[:-1]]
        bounds = np.flatnonzero(is_first)
        # Within a class nodes are in their order, those of the first graph before the others.
        is_first_graph = np.concatenate([[0], np.cumsum(nodes < self.graph.split)])
        middles = bounds[:-1] + np.diff(is_first_graph[bounds])
        is_shared = (bounds[:-1] < middles) & (middles < bounds[1:])
        ordered = nodes.tolist()
        cuts = zip(bounds[:-1][is_shared], middles[is_shared], bounds[1:][is_shared], strict=True)
        return [(ordered[a:b], ordered[b:c]) for a, b, c in cuts]

    def take_unique(self, keys: Words, among: npt.NDArray[np.bool_] | None = None) -> None:
        """Pairs what is alone on its side with its key, and not called otherwise."""
        for first, second in self.classes(keys, among):
            if len(first) == len(second) == 1:
                (a,), (b,) = first, second
                if not self._is_vetoed(a, b):
                    self.pair(a, b)

    def pair(self, a: int, b: int) -> None:
        self.partner[a], self.partner[b] = b, a

    def take_near(self, signatures: Mapping[int, Words], radii: Sequence[int]) -> None:
        """Pairs what is unique in its surroundings, or beside a pair, from large ones to small."""
        for radius in radii:
            self.take_unique(signatures[radius])
            self.spread(signatures[radius])

    def take_rest(self, signatures: Mapping[int, Words], radii: Sequence[int]) -> None:
        """Pairs what is equal and not unique in order, and what is of one kind beside pairs."""
        for radius in radii:
            self.pair_in_order(signatures[radius])
        self.spread(np.array(self.graph.kinds, np.int64).view(np.uint64), loosely=True)

    def spread(
        self, keys: Words, pairs: Iterable[tuple[int, int]] | None = None, loosely: bool = False
    ) -> None:
        """Pairs neighbours of pairs that have equal keys and stand at the same place.

        Args:
          pairs: where to begin; by default at all of them.
          loosely: also where several neighbours have that key, or are called otherwise.
        """
        heap: list[tuple[int, int, int, int, int]] = []
        for pair in self._boundary(keys) if pairs is None else pairs:
            self._suggest(*pair, keys, loosely, heap)
        while heap:
            balance, distance, tie, a, b = heappop(heap)
            if self.partner[a] >= 0 or self.partner[b] >= 0:
                continue
            now = self._balance(a, b)
            if -now > balance:
                heappush(heap, (-now, distance, tie, a, b))
            else:
                self.pair(a, b)
                self._suggest(a, b, keys, loosely, heap)

    def _boundary(self, keys: Words) -> list[tuple[int, int]]:
        """Pairs beside which both sides have a node without a partner, of the same key."""
        graph = self.graph
        partner = np.frombuffer(self.partner, np.int64)
        first = np.minimum(np.arange(len(partner)), np.where(partner < 0, len(partner), partner))
        found: list[npt.NDArray[np.int64]] = []
        for at, beside in (
            (graph.edge_users, graph.edge_operands),
            (graph.edge_operands, graph.edge_users),
        ):
            is_open = (partner[at] >= 0) & (partner[beside] < 0) & (graph.edge_slots >= 0)
            nodes = at[is_open]
            words = mixed(first[nodes], graph.edge_slots[is_open], keys[beside[is_open]])
            is_before = nodes < graph.split
            found.append(nodes[is_before][np.isin(words[is_before], words[~is_before])])
        nodes = np.unique(np.concatenate(found))
        return [*zip(nodes.tolist(), partner[nodes].tolist(), strict=True)]

    def _suggest(
        self,
        a: int,
        b: int,
        keys: Words,
        loosely: bool,
        heap: list[tuple[int, int, int, int, int]],
    ) -> None:
        graph = self.graph
        for edges in (graph.operands, graph.users):
            here = self._free_neighbours(edges[a], keys)
            if not here:
                continue
            there = self._free_neighbours(edges[b], keys)
            for key, first in here.items():
                second = there.get(key, ())
                if len(first) * len(second) > (_MOST_COMBINATIONS if loosely else 1):
                    continue
                for x in first:
                    for y in second:
                        if loosely or not self._is_vetoed(x, y):
                            balance = -self._balance(x, y)
                            distance = 0 if graph.labels[x] == graph.labels[y] else 1
                            if graph.hints[x] != graph.hints[y]:
                                distance += 2
                            tie = graph.ranks[x] + graph.ranks[y]
                            heappush(heap, (balance, distance, tie, x, y))

    def _free_neighbours(
        self, edges: Sequence[tuple[int, int]], keys: Words
    ) -> dict[tuple[int, int], list[int]]:
        """Neighbours without a partner, by their slot and key."""
        found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for node, slot in edges:
            if self.partner[node] < 0 and slot >= 0:
                of = found[slot, int(keys[node])]
                if node not in of:
                    of.append(node)
        return found

    def pair_in_order(self, keys: Words) -> None:
        """Pairs nodes of equal keys by their ranks, each class with what follows from it."""
        ranks = self.graph.ranks
        classes = [
            tuple(sorted(nodes, key=ranks.__getitem__) for nodes in both)
            for both in self.classes(keys)
        ]
        for both in sorted(classes, key=lambda c: ranks[c[0][0]]):
            first, second = ([n for n in nodes if self.partner[n] < 0] for nodes in both)
            pairs = [*zip(first, second, strict=False)]
            for a, b in pairs:
                self.pair(a, b)
            self.spread(keys, pairs)

    def _is_vetoed(self, a: int, b: int) -> bool:
        """Whether one of them has a name that the other should have."""
        return self.graph.hints[a] != self.graph.hints[b]

    def _balance(self, a: int, b: int) -> int:
        """Edges that speak for a pair, twice, less those of either that lead elsewhere."""
        graph, partner = self.graph, self.partner
        balance = 0
        for edges in (graph.operands, graph.users):
            here, there = edges[a], edges[b]
            if len(here) > _MANY_USERS or len(there) > _MANY_USERS:
                continue
            paired = [(partner[n], slot) for n, slot in here if partner[n] >= 0]
            agreeing = sum([edge in there for edge in paired])
            elsewhere = len(paired) + sum([partner[n] >= 0 for n, _ in there]) - 2 * agreeing
            balance += 2 * agreeing - elsewhere
        return balance
